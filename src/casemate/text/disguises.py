r"""Decodes disguised text: Unicode variants, markup, escape sequences, binary-to-text encodings, letter ciphers.

``decodings`` returns all candidate plain texts in linear time. Each decoder scans the text once, and the output is at
most ``MAX_GROWTH`` times as long as the input. ``DecodedText`` reduces them to letters. The caller searches in them for
a watermark token, or for the words of a document.

Ciphers that permute the alphabet can be recognized only with the searched text, so they are left to the search:
``alphabet_differences`` is the same for a text and all its rotations.
"""

from __future__ import annotations

import base64
import re
import string
import unicodedata
from binascii import a2b_base64
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from casemate.text.tokens import FunctionCache

MAX_GROWTH = 40
"""Maximum number of characters of all decodings, for each character of the text."""
MAX_LAYERS = 2
"""Maximum depth of nested encodings."""
_LETTERS = string.ascii_lowercase
_LIKE = str.maketrans(
    "аеорсухіјѕкмтвн" + "αεικνορτβηυ" + "ᴀʙᴄᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴜᴠᴡᴢ" + "ıǀ" + "օսհոզցյ" + "ɑɡ",
    "aeopcyxijskmtbh" + "aeikvoptbnu" + "abcdefghijklmnoprstuvwz" + "il" + "ouhnqgj" + "ag",
)
_TRANSLITERATED = str.maketrans(
    dict(zip("абвгдезийклмнопрстуфыэі", "abvgdezijklmnoprstufyei", strict=True))
    | {"ё": "e", "ж": "zh", "х": "kh", "ц": "ts", "ч": "ch", "ш": "sh", "щ": "shch", "ю": "yu", "я": "ya", "ь": ""}
    | dict(zip("αβγδεζηικλμνξοπρσςτυφω", "abgdeziiklmnxoprsstufo", strict=True))
    | {"θ": "th", "χ": "ch", "ψ": "ps"}
)
"""Letters by their sound; ``_LIKE`` maps them by their shape."""
_BRAILLE = dict(zip("⠁⠃⠉⠙⠑⠋⠛⠓⠊⠚⠅⠇⠍⠝⠕⠏⠟⠗⠎⠞⠥⠧⠺⠭⠽⠵", _LETTERS, strict=True))
_LETTER_BLOCKS = (0x1F130, 0x1F150, 0x1F170, 0x1F1E6)
"""First letter of alphabets that have no compatibility decomposition."""
_OTHER_SCRIPT = re.compile("[\u0370-\u03ff\u0400-\u04ff]")
_DIGITS = str.maketrans("0134578@$!", "oieastbasi")
_LEET = re.compile(r"[0134578@$!](?:(?<=[a-z].)|(?=[a-z]))")
_ESCAPE = re.compile(
    r"\\{1,4}u0000([0-9a-f]{4})|\\{1,4}u([0-9a-f]{4})|\\{1,4}u\{([0-9a-f]{2,6})\}"
    r"|(?:\\{1,4}x|%|\b0x)([0-9a-f]{2})|\bu\+([0-9a-f]{4})"
    r"|&#x([0-9a-f]{2,6});?|&#(\d{2,7});?|\\{1,4}([01][0-7]{2})(?!\d)"
    r"|((?:=[0-9a-f]{2}){3,})"
    r"|&(?:shy|nbsp|zwj|zwnj|lrm|rlm|ensp|emsp|thinsp|hairsp|nobreak|zerowidthspace|invisible\w{5,6});",
    re.IGNORECASE,
)
_NOT_SPECIAL = bytes(c for c in range(256) if c not in b"\\%=&<[{}*`~")
"""All bytes except those that begin escapes and markup; two escapes begin with ``0x`` and ``u+``."""
_MARKUP = re.compile(
    r"<!--[^<>]{0,200}-->|</?[a-z][^<>]{0,200}>|\[/?[a-z]{1,10}(?:=[^\[\]]{0,100})?\]|\\[a-z]{2,12}(?=\{)|[{}*`~]",
    re.IGNORECASE,
)
_BASE64_RUN = re.compile(
    r"(?<![A-Za-z0-9+/_-])[A-Za-f][A-HQ-Xg-nw-z0-3][ABEFIJMNQRUVYZcdghklopstwx014589][A-Za-z0-9+/_-]+"
)
"""Other base64 texts begin with a byte that is not ASCII."""
_BASE32_RUN = re.compile(r"[A-Z2-7]{13,}|[a-z2-7]{13,}")
_PAIRS = re.compile(r"(?:[0-9a-f]{2}[^0-9a-z]{0,3}){12,}", re.IGNORECASE)
_NOT_HEX = re.compile(r"[^0-9A-Fa-f]+")
_BITS = re.compile(r"(?:[01]{8}[^01a-z]{0,3}){4,}")
_NOT_BIT = re.compile("[^01]+")
_DECIMAL_CODE = re.compile(r"\d(?<!\d\d)\d\d?(?!\d)")
_OCTAL_RUN = re.compile(r"(?:(?<!\d)[01][0-7]{2}(?!\d)[^0-9a-z]{0,3}){6,}")
_OCTAL_CODE = re.compile("[01][0-7]{2}")
_LETTER_NUMBERS = re.compile(r"\d(?<!\d\d)\d?(?:[^\w]{1,3}\d{1,2}(?!\d)){5,}")
_LETTER_NUMBER = re.compile(r"(\d{1,2})([^\w]{0,3})")
_MORSE_RUN = re.compile(r"(?:[.\-·•−–_]{1,5}[ /|]{1,4}){5,}[.\-·•−–_]{1,5}")
_MORSE_SIGN = re.compile(r"([.\-]{1,5})( */)?")
_MORSE_SIGNS = (
    ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- --.."
)
_MORSE = dict(zip(_MORSE_SIGNS.split(), _LETTERS, strict=True))
_DASHES = str.maketrans("·•−–_", "..---")
_SPELLING_WORDS = frozenset(
    """alpha alfa bravo charlie delta echo foxtrot golf hotel india juliett juliet kilo lima mike november oscar papa
    quebec romeo sierra tango uniform victor whiskey xray yankee zulu""".split()
)
LETTER_NAMES = dict(zip(_LETTERS, _LETTERS, strict=True)) | {
    name: letter
    for letter, names in zip(
        _LETTERS,
        """ay bee/be see/cee/sea dee ee eff gee aitch/haitch eye/aye jay kay ell/el em en oh pee/pea cue/queue ar/are
        ess tee/tea you/yew vee double ex why zee/zed""".split(),
        strict=True,
    )
    for name in names.split("/")
}
"""Letters by their English names; the name of w is two words."""
_SPACED = re.compile(r"(?<!\S)\S(?: \S(?!\S)){2,}")
_DOUBLED = re.compile(r"([a-z])\1")
_DOUBLED_RUN = re.compile(r"(?:([a-z])\1[^a-z]{0,3}){6,}")
INVISIBLE = (
    r"\xad\u034f\u061c\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    r"\U000e0000-\U000e001f\U000e007f-\U000e01ff"
)
"""Invisible characters, as ranges of a regular expression, without the tag characters that copy ASCII."""
_VISIBLE_RUN = re.compile(f"[^{INVISIBLE}]+")
_ACCENTED = ("LATIN", "GREEK", "CYRILLIC")
"""Scripts whose letters keep their identity without diacritics; prefixes of character names."""
_LEAST_INVISIBLE = 16
"""Minimum number of invisible characters for decoding; ordinary text has a few in emoji."""
_NOT_BASE64 = bytes(c for c in range(128) if not chr(c).isalnum())  # + and / encode no letter
_NO_LETTER = bytes(c for c in range(256) if not 97 <= c <= 122)
_NO_DIGIT = bytes(c for c in range(256) if not 48 <= c <= 57)
_LETTERS_OR_SPACE = bytes(c if 97 <= c <= 122 else 32 for c in range(256))
_PRINTABLE = bytes(c if 32 <= c < 127 else 32 for c in range(256))
_NOT_PRINTABLE = bytes(c for c in range(256) if not 32 <= c < 127 and c not in b"\t\n\r")
_VOWELS = str.maketrans("", "", "aeiou")
_SHORT_WORD = 20
"""Maximum length of a word whose swapped letters are cached."""


class _Prefilter(NamedTuple):
    """A fast test that precedes the search with a slow expression. Every text that the expression matches passes.

    Attributes:
        classes: Replacement of each character.
        ignored: Characters that are removed before.
        sought: Text that the rest must contain.
    """

    classes: bytes
    ignored: bytes
    sought: bytes

    @classmethod
    def of(cls, sought: str, classes: Mapping[str, str], ignored: str = "") -> _Prefilter:
        """Creates a test; characters without a class become spaces."""
        table = {c: sign for sign, members in classes.items() for c in members}
        codes = "".join(table.get(chr(c), " ") for c in range(128)).ljust(256)
        return cls(codes.encode(), ignored.encode(), sought.encode())

    def passes(self, text: str) -> bool:
        """Whether the expression may match a text; true for all texts that are not ASCII."""
        return not text.isascii() or self.sought in b" %b " % text.encode().translate(self.classes, self.ignored)


_ASCII = "".join(map(chr, range(128)))
_ALPHANUMERIC = f"{string.digits}{string.ascii_letters}"


def _all_but(characters: str) -> str:
    return "".join(c for c in _ASCII if c not in characters)


_MAY_BE_SPACED = _Prefilter.of(" a a ", {"a": "".join(c for c in _ASCII if not c.isspace())})
_MAY_BE_NUMBERS = _Prefilter.of(6 * "0", {"0": string.digits}, _all_but(f"{_ALPHANUMERIC}_"))
_MAY_BE_MORSE = _Prefilter.of(6 * ".", {".": ".-_"}, " /|")
_MAY_BE_BASE32 = _Prefilter.of(13 * "a", {"a": f"{string.ascii_letters}234567"})
_MAY_BE_HEX = _Prefilter.of(24 * "0", {"0": string.hexdigits}, _all_but(_ALPHANUMERIC))
_MAY_BE_BITS = _Prefilter.of(32 * "0", {"0": "01"}, _all_but(f"01{_LETTERS}"))
_MAY_BE_OCTAL = _Prefilter.of(18 * "0", {"0": string.digits}, _all_but(f"{string.digits}{_LETTERS}"))


class Decoding(NamedTuple):
    """A candidate plain text.

    Attributes:
        form: The outermost encoding: ``plain``, ``markup`` (plain with markup), ``spaced``, ``script``, ``swapped``,
            ``doubled``, ``initials``, ``base64``, ``base32``, ``hex``, ``binary``, ``octal``, ``codes`` (decimal),
            ``numbers`` (of letters), ``morse`` or ``invisible``.
        text: The folded text: lower case, ASCII where there is an equivalent.
    """

    form: str
    text: str


def _visible_character(char: str) -> str:
    code = ord(char)
    if 0xE0020 <= code <= 0xE007E:  # tag characters, an invisible copy of ASCII
        return chr(code - 0xE0000)
    for first in _LETTER_BLOCKS:
        if first <= code < first + 26:
            return _LETTERS[code - first]
    if char in _BRAILLE:
        return _BRAILLE[char]
    plain = unicodedata.normalize("NFKD", char)
    return "".join(
        " " if c.isspace() else "" if unicodedata.category(c) in ("Mn", "Me", "Cf", "Cc", "Cs", "Co") else c
        for c in plain
    )


_VISIBLE: FunctionCache[int, str] = FunctionCache(lambda code: _visible_character(chr(code)), 50_000)
"""Compatibility forms of characters for ``str.translate``. Invisible characters and diacritics map to ""."""


def visible_text(text: str) -> str:
    r"""Returns the visible text: escapes decoded, compatibility characters and tags as letters, without the invisible.

    >>> visible_text("z\u200ba\u0301%6B &#101; ﬁ")
    'zak e fi'
    """
    text = _unescaped(text)
    if text.isascii():
        return text
    return text.translate(_VISIBLE)


def _may_be_special(text: str) -> bool:
    """Whether a text may contain escapes or markup."""
    lower = text.lower()
    return "0x" in lower or "u+" in lower or text.encode("ascii", "ignore").translate(None, _NOT_SPECIAL) != b""


def _unescaped(text: str) -> str:
    for _ in range(MAX_LAYERS if _may_be_special(text) else 0):
        decoded = _ESCAPE.sub(_decode_escape, text)
        if decoded == text:
            break
        text = decoded
    return text


def fold_text(text: str) -> str:
    """Returns a text in lower case, look-alikes as Latin letters, without markup.

    >>> fold_text("<b>T</b>he **north** brіdge")
    'the north bridge'
    """
    if text.isascii() and not _may_be_special(text):
        return text.lower()
    return _fold(_MARKUP.sub("", visible_text(text)))


def fold_name(name: str) -> str:
    """Returns a name without invisible and indistinguishable differences. Names that look different stay different.

    Unlike ``fold_text``, it keeps apparent markup. It removes diacritics from Latin, Greek and Cyrillic letters only;
    in other scripts the marks change the sound.

    >>> fold_name("M\u0430llor\u00fd <M@x.org>"), fold_name("\u304c") == fold_name("\u304b")
    ('mallory <m@x.org>', False)
    """
    name = _unescaped(name)
    if name.isascii():
        return name.lower()
    kept, letter = list[str](), ""
    for char in unicodedata.normalize("NFKD", name):
        if letter.isalpha() and unicodedata.category(char) == "Mn" and _VISIBLE_RUN.match(char):
            kept.append("" if unicodedata.name(letter, "").startswith(_ACCENTED) else char)
        elif folded := _fold(_VISIBLE[ord(char)]):
            kept.append(folded)
            letter = letter if unicodedata.category(char) == "Mc" else folded[-1]
    return unicodedata.normalize("NFC", "".join(kept))


def without_markup(text: str) -> str:
    """Replaces markup by spaces of the same length."""
    return _MARKUP.sub(lambda markup: " " * len(markup[0]), text)


def _digit_letter(digit: re.Match[str]) -> str:
    return digit[0].translate(_DIGITS)


def _fold(visible: str) -> str:
    return visible.lower() if visible.isascii() else visible.casefold().translate(_LIKE)


def decodings(text: str) -> list[Decoding]:
    """Returns all candidate plain texts, first the text itself; encodings are nested up to ``MAX_LAYERS``.

    >>> [d.text for d in decodings("VGhlIG5vcnRoIGJyaWRnZQ==") if d.form == "base64" and "bridge" in d.text]
    ['the north bridge']
    """
    found = [Decoding("plain", fold_text(text))]
    _decode_layer(text, found, MAX_LAYERS, "")
    return found


def _decode_layer(text: str, found: list[Decoding], layers: int, outer: str) -> None:
    """Appends the decodings of a text; ``outer`` is the encoding that the text comes from."""
    visible = visible_text(text)
    plain = found[0].text if visible is text and not outer else fold_text(visible)
    for form, decoded in _rewritings(visible, plain):
        found.append(Decoding(outer or form, decoded))
    for form, code, readable in (*_invisible_decodings(text), *_binary_decodings(visible)):
        decoded = code.decode("latin-1")
        found.append(Decoding(outer or form, _fold(decoded)))
        if readable and layers > 1:
            _decode_layer(decoded, found, layers - 1, outer or form)


def _rewritings(visible: str, plain: str) -> Iterator[tuple[str, str]]:
    """Yields the texts from decoders of letters and words."""
    if (kept := _fold(visible)) != plain:
        yield "markup", kept
    if _MAY_BE_SPACED.passes(plain) and _SPACED.search(plain):
        yield "spaced", _SPACED.sub(lambda run: run[0].replace(" ", ""), plain)
    if _LEET.search(plain):
        yield "leet", _LEET.sub(_digit_letter, plain)
    if not visible.isascii() and _OTHER_SCRIPT.search(visible):
        yield "script", visible.lower().translate(_TRANSLITERATED)
    letters = plain.encode("ascii", "replace").translate(_LETTERS_OR_SPACE)
    for run in _DOUBLED_RUN.finditer(plain) if _has_doubled(letters) else ():
        yield "doubled", _DOUBLED.sub(r"\1", run[0])
    yield "swapped", _swap_pairs(letters.decode("ascii"))
    found = letters.decode("ascii").split()
    yield "initials", "".join([word[0] for word in found])
    single = [word for word in found if len(word) == 1]
    if 5 < len(single) < len(found):
        yield "initials", "".join(single)
    if len(named := [LETTER_NAMES[word] for word in found if word in LETTER_NAMES]) > 5:
        yield "initials", "".join(named)
    if len(spelled := [word[0] for word in found if word in _SPELLING_WORDS]) > 5:
        yield "initials", "".join(spelled)
    digits = _digits(visible)
    for run in _LETTER_NUMBERS.findall(visible) if digits >= 6 and _MAY_BE_NUMBERS.passes(visible) else ():
        yield "numbers", "".join(_numbered_letter(*code) for code in _LETTER_NUMBER.findall(run))
    for run in _MORSE_RUN.findall(visible) if _MAY_BE_MORSE.passes(visible) else ():
        signs = _MORSE_SIGN.findall(run.translate(_DASHES).replace("|", "/"))
        yield "morse", "".join(_MORSE.get(sign, "") + (" " if "/" in after else "") for sign, after in signs)
    if digits >= 2 and _DECIMAL_CODE.search(visible):
        yield "codes", _decimal_text(visible)


def _has_doubled(letters: bytes) -> bool:
    """Whether six letters are doubled, as in a run of doubled letters; spaces are ignored."""
    bare = letters.replace(b" ", b"")
    code = int.from_bytes(bare)
    return (code ^ code >> 8).to_bytes(len(bare)).count(0) >= 6


def _swap_pairs(letters: str) -> str:
    """Swaps the first two letters of each word, the next two, and so on."""
    return " ".join([_SWAPPED[word] if len(word) <= _SHORT_WORD else _swap_word(word) for word in letters.split(" ")])


def _swap_word(word: str) -> str:
    code, even = bytearray(word, "ascii"), len(word) // 2 * 2
    code[:even:2], code[1:even:2] = code[1:even:2], code[:even:2]
    return code.decode("ascii")


_SWAPPED = FunctionCache(_swap_word, 4096)


def _numbered_letter(number: str, after: str) -> str:
    """The letter of a number, followed by a space unless a hyphen or a dot joins it to the next."""
    code = int(number)
    return (_LETTERS[code - 1] if 1 <= code <= 26 else "") + (" " if "-" not in after and "." not in after else "")


def _binary_decodings(visible: str) -> Iterator[tuple[str, bytes, bool]]:
    """Yields form, bytes, and whether they are mostly printable, from decoders of bytes. Other bytes become spaces."""
    for code in _base64_bytes(visible):
        yield "base64", *_printable(code)
    by_run = b" ".join(filter(None, map(_base64_run, _BASE64_RUN.findall(visible))))
    if by_run:
        yield "base64", *_printable(by_run)
    for run in _BASE32_RUN.findall(visible) if _MAY_BE_BASE32.passes(visible) else ():
        for start in range(8):
            yield "base32", *_printable(base64.b32decode(_whole_groups(run[start:], 8).upper()))
    digits = _digits(visible)
    for run in _PAIRS.findall(visible) if digits > 3 and _MAY_BE_HEX.passes(visible) else ():
        bare = _NOT_HEX.sub("", run)  # the code of each letter begins with a digit
        for start in range(2):
            yield "hex", *_printable(bytes.fromhex(_whole_groups(bare[start:], 2)))
    for run in _BITS.findall(visible) if digits >= 32 and _MAY_BE_BITS.passes(visible) else ():
        bits = _NOT_BIT.sub("", run)
        for start in range(8):
            part = _whole_groups(bits[start:], 8)
            yield "binary", *_printable(int(part or "0", 2).to_bytes(len(part) // 8 or 1, "big"))
    for run in _OCTAL_RUN.findall(visible) if digits >= 18 and _MAY_BE_OCTAL.passes(visible) else ():
        yield "octal", *_printable(bytes(int(code, 8) for code in _OCTAL_CODE.findall(run)))


def _invisible_decodings(text: str) -> Iterator[tuple[str, bytes, bool]]:
    """Yields decodings of invisible characters: bytes by variation selectors, or digits by two or four characters.

    Both common numberings of variation selectors are tried. The digits are the most frequent characters, because emoji
    and hyphenation add others. They are in Unicode order or its reverse, and form bytes or codes of seven bits.
    """
    if text.isascii():
        return
    found = _VISIBLE_RUN.sub("", text)
    if len(found) < _LEAST_INVISIBLE:
        return
    for first in (0xE0100, 0xE0100 - 16):
        numbers = (ord(c) - (0xFE00 if c < "\ufe10" else first) for c in found if c >= "\ufe00")
        yield "invisible", *_printable(bytes(n for n in numbers if 0 <= n < 256))
    frequent = [sign for sign, _ in Counter(found).most_common(4)]
    for count in (2, 4):
        if count <= len(frequent):
            yield from _bit_decodings(found, sorted(frequent[:count]))


def _bit_decodings(found: str, signs: list[str]) -> Iterator[tuple[str, bytes, bool]]:
    """Yields decodings of two signs as one bit each, or of four as two bits each. Other characters are removed."""
    rest = dict.fromkeys(map(ord, set(found).difference(signs)), "")
    for order in (signs, signs[::-1]):
        digit = {ord(sign): f"{i:0{len(signs) // 2}b}" for i, sign in enumerate(order)}
        bits = found.translate(rest | digit)
        for size in (8, 7):
            for start in range(size):
                groups = (bits[i : i + size] for i in range(start, len(bits) - size + 1, size))
                yield "invisible", *_printable(bytes(int(group, 2) for group in groups))


def _digits(text: str) -> int:
    """Upper bound on the number of digits: exact in ASCII, otherwise the length of the text."""
    return len(text.encode().translate(None, _NO_DIGIT)) if text.isascii() else len(text)


def _printable(code: bytes) -> tuple[bytes, bool]:
    """The bytes with unprintable ones replaced by spaces, and whether at most one in ten is unprintable."""
    wrong = len(code) - len(code.translate(None, _NOT_PRINTABLE))
    return code.translate(_PRINTABLE), len(code) >= 8 and 10 * wrong <= len(code)


def _whole_groups(text: str, size: int) -> str:
    return text[: len(text) // size * size]


def _base64_bytes(text: str) -> list[bytes]:
    """Decodes a text as base64, ignoring separators, at each of the four offsets of a group."""
    code = text.encode("ascii", "ignore").translate(None, _NOT_BASE64)
    return [a2b_base64(code[start : len(code) - (len(code) - start) % 4]) for start in range(min(4, len(code) - 3))]


def _base64_run(run: str) -> bytes:
    """Decodes one run of characters as base64 from its start; empty unless all bytes are printable."""
    code = run.replace("-", "+").replace("_", "/")
    if len(code) % 4 == 1:
        return b""
    decoded = base64.b64decode(code + "=" * (-len(code) % 4))
    return b"" if decoded.translate(None, _NOT_PRINTABLE) != decoded else decoded


def _decimal_text(text: str) -> str:
    """Decodes decimal ASCII codes, ignoring other characters between the codes."""
    codes = map(int, _DECIMAL_CODE.findall(text))
    return "".join(chr(n) for n in codes if 32 <= n < 127).lower()


class DecodedText:
    """The letters of a text, as written and decoded from each encoding.

    Args:
        text: Any text.

    Attributes:
        views: Decoded letter sequences by form: ``letters`` (as written), and the forms of ``Decoding``.
    """

    def __init__(self, text: str) -> None:
        self.views: dict[str, list[str]] = {"letters": [normalize_letters(text)[0]]}
        for decoding in decodings(text):
            letters = only_letters(decoding.text)
            views = self.views.setdefault("letters" if decoding.form in ("plain", "markup") else decoding.form, [])
            if letters and letters not in views:
                views.append(letters)
        self._ngrams: dict[tuple[int, str], dict[str, set[str]]] = {}

    def ngrams(self, n: int) -> dict[str, set[str]]:
        """Returns the character n-grams of the views, by form; ``n`` is at least 1."""
        return self._grams(n, "letters", str)

    def difference_ngrams(self, n: int) -> dict[str, set[str]]:
        """Returns the n-grams of the views' ``alphabet_differences``, by form."""
        return self._grams(n, "differences", alphabet_differences)

    def consonant_ngrams(self, n: int) -> dict[str, set[str]]:
        """Returns the n-grams of the views without vowels, by form."""
        return self._grams(n, "consonants", without_vowels)

    def _grams(self, n: int, kind: str, change: Callable[[str], str]) -> dict[str, set[str]]:
        if (n, kind) not in self._ngrams:
            self._ngrams[n, kind] = {
                form: {text[i : i + n] for text in map(change, views) for i in range(len(text) - n + 1)}
                for form, views in self.views.items()
            }
        return self._ngrams[n, kind]


def only_letters(folded: str) -> str:
    """Returns the ASCII letters of a text in lower case."""
    return folded.encode("ascii", "ignore").translate(None, _NO_LETTER).decode("ascii")


def without_vowels(letters: str) -> str:
    """Returns the consonants of a text in lower case."""
    return letters.translate(_VOWELS)


def alphabet_differences(letters: str) -> str:
    """Returns the distance in the alphabet between neighboring letters, as letters; the same for all rotations.

    >>> alphabet_differences("bridge") == alphabet_differences("oevqtr")  # rot13
    True
    """
    codes = letters.encode("ascii", "ignore")
    return "".join(_LETTERS[(b - a) % 26] for a, b in zip(codes, codes[1:], strict=False))


def normalize_letters(text: str) -> tuple[str, list[int]]:
    r"""Returns the letters of a text in one normal form, and the position of each in the text.

    Escape sequences are decoded and letters lower-cased. Accents, invisible characters, punctuation and spaces are
    removed. Look-alikes of other alphabets, and digits after a letter, become Latin letters; other digits are removed.

    >>> normalize_letters(r"Z\u0061-k3 n0!")[0], normalize_letters("é 7")
    ('zakeno', ('e', [0]))
    """
    found: list[str] = []
    positions: list[int] = []
    spelled = False
    for char, position in _unescape(text):
        plain = _plain(char)
        if spelled and not plain:
            plain = char.translate(_DIGITS) if char in "0134578@$" else ""
        spelled = bool(plain)
        found.append(plain)
        positions += [position] * len(plain)
    return "".join(found), positions


def _unescape(text: str) -> Iterable[tuple[str, int]]:
    """Yields the characters of a text with escape sequences decoded, each with its position."""
    at = 0
    for match in _ESCAPE.finditer(text):
        yield from zip(text[at : match.start()], range(at, match.start()), strict=True)
        yield from ((char, match.start()) for char in _decode_escape(match))
        at = match.end()
    yield from zip(text[at:], range(at, len(text)), strict=True)


def _decode_escape(escape: re.Match[str]) -> str:
    """Decodes an escape sequence; named entities are invisible characters and decode to nothing."""
    number = escape.lastindex or 0
    if not number:
        return ""
    if number == 9:
        return bytes.fromhex(escape[9].replace("=", "")).decode("latin-1")
    code = int(escape[number], {7: 10, 8: 8}.get(number, 16))
    return chr(code) if code <= 0x10FFFF else ""


@lru_cache(maxsize=4096)
def _plain(char: str) -> str:
    """Returns the normal form of a character; empty if it is not a letter."""
    return "".join(c for c in _visible_character(char).casefold().translate(_LIKE) if c.isalpha())
