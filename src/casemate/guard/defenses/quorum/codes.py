"""Codes and numbers of a question, and patterns that find the same ones in a text.

A code, such as a customer number or a mail address, may be written with any separators: *K-4711-82* is *k 4711 82*. A
number is found as a whole only: *7* is neither in *1.07* nor in *twenty-seven*.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from casemate.text.ordinary_words import WordKind, word_kind
from casemate.text.tokens import NUMBER_WORDS
from casemate.text.unspaced import is_spaceless

YEAR = re.compile(r"(?:1\d|20)\d\d")
NUMBER = re.compile(rf"{YEAR.pattern}|\d{{1,2}}|\d+[.:]\d+")
"""A year, a small number, a number with decimals or a time. Others are codes: separators may stand between digits."""
NEVER = re.compile(r"(?!)")
"""Found in no text, so that every unit abstains."""
MAX_CODE = 100
"""Letters and digits of a code, at most. With more, every unit abstains: the search would take seconds."""
_ADDRESS = re.compile(r"[\w.+-]{1,64}@[\w.-]{0,250}\w")
_RUN = re.compile(r"[^\W_]+")
_SEPARATOR = re.compile(r"[ ./_:\\-]{0,3}|,")
_MAX_LETTERS = 3
"""Letters of a part of a code without digits, at most."""
_SINGLE_WORDS = frozenset("aàeéèioòuyавиокусяñ")
"""Letters that are words by themselves."""

_JOINING = ".,:'’·٫٬"
"""Characters between digits of one number: before decimals and thousands, in times."""
_BEFORE = rf"(?<!\d[{_JOINING}])"
_AFTER = rf"(?![{_JOINING}]\d|[ \u00a0\u2009\u202f]\d{{3}}(?!\d)|[²³¹¼-¾⁰-₉⅐-↋])"
"""Between these, a number is not part of a longer one: no decimals, thousands, powers or fractions."""
_NO_LETTER = r"(?![^\W\d_s](?![^\W\d_])(?!(?<=T)\d))"
"""No single letter follows, as in *12a*. Allowed are that of a plural, and that between date and time: *01T07:05*."""
_NUMBER_NAMES = {number: name for name, number in NUMBER_WORDS.items()} | {"1": "one"}
_LARGE = "hundred thousand million billion".split()
_TENS = [name for name, number in NUMBER_WORDS.items() if number[1:] == "0"]
_NO_TENS = "".join(rf"(?<!\b{word}[\W_])" for word in _TENS + _LARGE)
_NO_MORE = rf"(?![\W_]{{1,3}}(?:{'|'.join(['one', *NUMBER_WORDS, *_LARGE])})\b)"
"""Between these, an English number is not part of a longer one, as *seven* is of *twenty-seven* and *seven hundred*."""


def find_codes(text: str) -> Iterator[str]:
    """Codes of a question as written: addresses, and parts with digits and short parts without that are neighbors."""
    yield from _ADDRESS.findall(text)
    text = _ADDRESS.sub(" ? ", text)
    group: list[re.Match[str]] = []
    for run in _RUN.finditer(text):
        part = _is_code_part(run[0])
        joined = group and _SEPARATOR.fullmatch(text, group[-1].end(), run.start())
        if group and not (part and joined):
            yield from _code(text, group)
            group = []
        if part:
            group.append(run)
    yield from _code(text, group)


def without_codes(text: str, codes: Iterable[str]) -> str:
    """Replaces the codes of a question. Its numbers stay: they are not words."""
    for code in codes:
        text = text if NUMBER.fullmatch(code) else text.replace(code, " 0 ")
    return text


def code_pattern(code: str) -> re.Pattern[str]:
    """The pattern of a code with any separators, or of a number as a whole."""
    if NUMBER.fullmatch(code):
        return _number_pattern(code)
    characters = [re.escape(c) for c in code if c.isalnum()]
    if len(characters) > MAX_CODE:
        return NEVER
    letters = r"[\W_]{0,3}".join(characters)
    if code.isdecimal():  # 30000 is also 30,000, but 300.00 is another number
        letters = f"{''.join(characters)}|(?!\\d+[.,:]\\d\\d?(?!\\d)){letters}" if len(code) > 3 else code
    return re.compile(rf"(?<![^\W_]){_BEFORE}(?:{letters})(?![^\W_]){_AFTER}", re.IGNORECASE)


def _is_code_part(run: str) -> bool:
    if any(map(str.isdigit, run)):
        return not is_spaceless(run)
    low = run.lower()
    single = len(run) == 1 and low not in _SINGLE_WORDS
    return len(run) <= _MAX_LETTERS and low != run.upper() and (single or word_kind(low) is WordKind.UNLISTED)


def _code(text: str, group: list[re.Match[str]]) -> Iterator[str]:
    while group and group[-1][0].isalpha() and text[group[-1].start() - 1] == " ":  # a unit of measurement
        group = group[:-1]
    if not any(map(str.isdigit, "".join(run[0] for run in group))):
        return
    if all(YEAR.fullmatch(run[0]) for run in group):
        yield from (run[0] for run in group)
    else:
        yield text[group[0].start() : group[-1].end()]


def _number_pattern(number: str) -> re.Pattern[str]:
    """A number as a whole, also with leading zeros or as an English word. A time may have seconds.

    The digits come first, so that the search skips texts without them.
    """
    digits = number.lstrip("0") or "0"
    literal = re.escape(digits).replace(":", "[.:]").replace(r"\.", "[.,:]")
    joined = "[1-9]" if len(literal) > len(digits) else "[1-9A-Za-z]"  # a date may be written before a time: T07:05
    before = rf"(?<!{joined}{literal})(?<!\d0{literal})(?<!\d[{_JOINING}]{literal})(?<!\d[{_JOINING}]0{literal})"
    after = r"(?!\d)" if ":" in number else _AFTER.replace("(?!", r"(?!\d|", 1)
    name = _NUMBER_NAMES.get(digits)
    return re.compile(
        f"{literal}{before}{after}{_NO_LETTER}" + (rf"|{_NO_TENS}\b{name}\b{_NO_MORE}" if name else ""), re.IGNORECASE
    )
