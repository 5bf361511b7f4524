r"""Marks: made-up words that tell where a copy came from, and finding them in whatever was made of the copy.

A mark is three words such as "zakeno mirodo pilafe": easy to copy, hard to guess, said by nobody. Which words follow
from a secret key and what is marked, so that who has the key can make them again; the last syllables are a checksum.

A mark is found in any case, spaced out or run together, with invisible or similar-looking characters, as escape
sequences (``\u0062``, ``%62``, ``\142``, ``&#98;``), in base64, hexadecimal or decimal codes, backwards by letter or by
word, in ROT13, and with two letters wrong, lacking or too many. Of the three words two side by side suffice. Two wrong
letters leave one of the three words whole, and that is how a mark is found in one pass, however many are looked for.

It is not found where less is left of it: letters with others put between them, other sounds for the letters, a cipher
with a key, binary digits, its words one by one at different places, or an answer in other words.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aeio"
SYLLABLES = tuple(map("".join, product(CONSONANTS, VOWELS)))
"""The 64 syllables, 6 bits each."""
WORDS, WORD = 3, 6  # words of a mark, letters of a word
LETTERS = WORDS * WORD
CHECKED = 2
"""Syllables of the checksum; the other 7 tell what is marked."""
ERRORS = 2
"""Letters that may be wrong, lacking or too many."""

HELD = 36
"""Letters that a stream holds back: those of a mark with its errors in base64, which has most, and some to spare."""
HELD_AT_MOST = 1000
"""Characters held back at most, where hardly a letter stands among them."""
STEP = 16
"""A stream is searched again when so many characters have come."""

_LIKE = str.maketrans(
    "аеорсухіјѕкмтвн" + "αεικνορτβη" + "ᴀʙᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴠᴢ" + "ıǀ",
    "aeopcyxijskmtbh" + "aeikvoptbn" + "abdefghijklmnoprstvz" + "il",
)
_DIGITS = str.maketrans("0134578@$", "oieastbas")
_ESCAPE = re.compile(
    r"\\+u0000([0-9a-f]{4})|\\+u([0-9a-f]{4})|\\+u\{([0-9a-f]{2,6})\}|(?:\\+x|%|\b0x)([0-9a-f]{2})|\bu\+([0-9a-f]{4})"
    r"|&#x([0-9a-f]{2,6});?|&#(\d{2,7});?|\\+([01][0-7]{2})(?!\d)"
    r"|&(?:shy|nbsp|zwj|zwnj|lrm|rlm|ensp|emsp|thinsp|hairsp|nobreak|zerowidthspace|invisible\w{5,6});",
    re.IGNORECASE,
)
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9]+")  # + and / stand for no letter of a mark
_PAIRS = re.compile(r"(?:[0-9a-f]{2}[^0-9a-z]{0,3}){12,}", re.IGNORECASE)
_NOT_HEX = re.compile(r"[^0-9A-Fa-f]+")
_CODE = re.compile(r"(?<!\d)\d{2,3}(?!\d)")
_LOWER = bytes(c + 32 if 65 <= c <= 90 else c for c in range(256))
_NO_LETTER = bytes(c for c in range(256) if not 97 <= c <= 122)
_SPELLED = re.compile(f"(?=((?:[{CONSONANTS}][{VOWELS}]){{{LETTERS // 2}}}))")
_TURNED = str.maketrans("abcdefghijklmnopqrstuvwxyz", "nopqrstuvwxyzabcdefghijklm")


class Mint:
    """Makes marks.

    Args:
        key: The secret. Who has it can make the same marks.
    """

    def __init__(self, key: str) -> None:
        self._key = key.encode(errors="surrogatepass")

    def mark(self, *about: str) -> str:
        """The mark of a thing: always the same, and of another thing another.

        >>> Mint("k").mark("request", "chunk") == Mint("k").mark("request", "chunk") != Mint("k").mark("other", "chunk")
        True
        """
        body = self._syllables("mark", about, LETTERS // 2 - CHECKED)
        return _spaced(body + self._syllables("check", (body,), CHECKED))

    def genuine(self, mark: str) -> bool:
        """Whether these are the words of a mark made with this key: of other words, one in 4,096 seems so.

        >>> Mint("k").genuine(Mint("k").mark("chunk")), Mint("k").genuine(Mint("j").mark("chunk"))
        (True, False)
        """
        said = _spaced("".join(mark.lower().split()))
        body = said.replace(" ", "")[: -2 * CHECKED]
        return len(said) == LETTERS + WORDS - 1 and said == _spaced(body + self._syllables("check", (body,), CHECKED))

    def own(self, text: Text) -> list[str]:
        """What must be marks made with this key, of whatever: words with the right checksum. With no letter wrong."""
        runs = (m[1] for views in text.views.values() for view in views for m in _SPELLED.finditer(view))
        return sorted({_spaced(run) for run in runs if self.genuine(run)})

    def share(self, *about: str) -> float:
        """A number in [0, 1) that follows from a thing as its mark does: for drawing a sample."""
        return int.from_bytes(self._digest("share", about)[:6], "big") / 2**48

    def _syllables(self, use: str, about: tuple[str, ...], count: int) -> str:
        bits = int.from_bytes(self._digest(use, about), "big")
        return "".join(SYLLABLES[bits >> 6 * i & 63] for i in range(count))

    def _digest(self, use: str, about: tuple[str, ...]) -> bytes:
        return hmac.new(self._key, json.dumps([use, *about]).encode(), hashlib.sha256).digest()


class Found(NamedTuple):
    """A mark in a text.

    Attributes:
        mark: Which.
        form: What the text had to be taken for: ``letters``, ``base64``, ``hex`` or ``codes``.
        errors: Letters wrong, lacking or too many.
    """

    mark: str
    form: str
    errors: int


class Text:
    """A text as whoever looks for marks sees it.

    Attributes:
        views: Its letters, and the letters that it holds in codes, by form.
        runs: All runs of as many letters as a word has, by form.
    """

    def __init__(self, text: str) -> None:
        self.views: dict[str, list[str]] = {
            "letters": [letters(text)[0]],
            "base64": _from_base64(text),
            "hex": _from_hex(text),
            "codes": ["".join(chr(n) for n in map(int, _CODE.findall(text)) if n < 128 and chr(n).isalpha()).lower()],
        }
        self.runs = {
            form: {view[i : i + WORD] for view in views for i in range(len(view) - WORD + 1)}
            for form, views in self.views.items()
        }


class Marks:
    """Marks to be looked for, all at once.

    Args:
        marks: As ``Mint`` makes them.
    """

    def __init__(self, marks: Iterable[str]) -> None:
        self._needles = {needle: mark for mark in marks for needle in _needles(mark)}
        self._places: dict[str, list[tuple[str, int]]] = {}
        for needle in self._needles:
            for at in range(0, LETTERS, WORD):
                self._places.setdefault(needle[at : at + WORD], []).append((needle, at))

    def find(self, text: Text) -> Found | None:
        """The mark with the fewest errors in a text, if there is any."""
        return min(self._all(text), key=lambda f: (f.errors, f.mark, f.form), default=None)

    def all(self, text: Text) -> list[str]:
        """The marks that are in a text, sorted."""
        return [found.mark for found in self.each(text)]

    def each(self, text: Text) -> list[Found]:
        """The marks that are in a text, sorted, each as it is there with the fewest errors."""
        best: dict[str, Found] = {}
        for found in self._all(text):
            held = best.setdefault(found.mark, found)
            best[found.mark] = min(held, found, key=lambda f: (f.errors, f.form))
        return [best[mark] for mark in sorted(best)]

    def begun(self, text: str) -> Found | None:
        """The mark that a text breaks off in, if it does so beyond the first word."""
        end = letters(text[-10 * LETTERS :])[0][-LETTERS:]
        for needle, mark in self._needles.items():
            for length in range(LETTERS - 1, WORD, -1):
                if end.endswith(needle[:length]):
                    return Found(mark, "letters", LETTERS - length)
        return None

    def _all(self, text: Text) -> Iterator[Found]:
        for form, views in text.views.items():
            for word in self._places.keys() & text.runs[form]:
                for view in views:
                    yield from (Found(self._needles[n], form, errors) for n, errors in self._around(word, view))

    def _around(self, word: str, view: str) -> list[tuple[str, int]]:
        """Needles that are there, with their errors, of those that have a word; looked for where the word stands."""
        found = []
        for match in re.finditer(f"(?={word})", view):
            for needle, at in self._places[word]:
                start = match.start() - at
                part = view[max(start - ERRORS, 0) : start + LETTERS + ERRORS]
                errors = distance(needle, part)
                if errors <= ERRORS or needle[:-WORD] in part or needle[WORD:] in part:
                    found.append((needle, errors))
        return found


class Watch:
    """Looks for marks in a stream, and lets nothing through that could be the beginning of one.

    Attributes:
        found: The mark that has come; from then on nothing is let through any more.

    Args:
        marks: What must not come.
    """

    def __init__(self, marks: Marks) -> None:
        self.found: Found | None = None
        self._marks, self._held, self._fresh = marks, "", 0

    def feed(self, piece: str) -> str:
        """Takes the next piece of the stream, and gives what may go on."""
        self._held += piece
        self._fresh += len(piece)
        return self._passed(_safe(self._held)) if self._fresh >= STEP else ""

    def finish(self) -> str:
        """The rest, when the stream has ended."""
        rest = self._passed(len(self._held))
        self.found = self.found or self._marks.begun(rest)
        return "" if self.found else rest

    def _passed(self, count: int) -> str:
        """So many of the held characters, if there is no mark among the held."""
        if self.found is None:
            self.found = self._marks.find(Text(self._held))
        if self.found:
            self._held = ""
            return ""
        out, self._held, self._fresh = self._held[:count], self._held[count:], 0
        return out


def letters(text: str) -> tuple[str, list[int]]:
    r"""The letters of a text, one form for all that look alike, and the place in the text of each.

    Escape sequences are read; lower case; accents, invisible characters, punctuation and spaces go; look-alikes of
    other alphabets and digits behind a letter become Latin letters; other digits go.

    >>> letters(r"Z\u0061-k3 n0!")[0], letters("é 7")
    ('zakeno', ('e', [0]))
    """
    found: list[str] = []
    places: list[int] = []
    spelled = False
    for char, place in _unescaped(text):
        plain = _plain(char)
        if spelled and not plain:
            plain = char.translate(_DIGITS) if char in "0134578@$" else ""
        spelled = bool(plain)
        found.append(plain)
        places += [place] * len(plain)
    return "".join(found), places


def distance(needle: str, text: str) -> int:
    """The fewest letters to change, take out or put in, so that the needle is some part of the text (Sellers 1980).

    >>> distance("zakeno", "the zaceno!"), distance("abc", "")
    (1, 3)
    """
    row = [0] * (len(text) + 1)
    for i, wanted in enumerate(needle, 1):
        above, row = row, [i]
        for j, char in enumerate(text, 1):
            row.append(min(above[j - 1] + (char != wanted), above[j] + 1, row[j - 1] + 1))
    return min(row)


def _spaced(spelled: str) -> str:
    """Letters as words.

    >>> _spaced("zakenomirodopilafe")
    'zakeno mirodo pilafe'
    """
    return " ".join(spelled[i : i + WORD] for i in range(0, len(spelled), WORD))


def _needles(mark: str) -> Iterable[str]:
    """The letters of a mark: as they are, backwards by word, by letter, by both, and each in ROT13."""
    said = mark.split()
    for order in (said, said[::-1]):
        for spelled in ("".join(order), "".join(word[::-1] for word in order)):
            yield from (spelled, spelled.translate(_TURNED))


def _safe(held: str) -> int:
    """How many characters from the start can be no part of a mark that is still coming."""
    _, places = letters(held)
    return max(places[-HELD] if len(places) >= HELD else 0, len(held) - HELD_AT_MOST)


def _unescaped(text: str) -> Iterable[tuple[str, int]]:
    """The characters that a text stands for, each with the place where it is written."""
    at = 0
    for match in _ESCAPE.finditer(text):
        yield from zip(text[at : match.start()], range(at, match.start()), strict=True)
        yield _meant(match), match.start()
        at = match.end()
    yield from zip(text[at:], range(at, len(text)), strict=True)


def _meant(escape: re.Match[str]) -> str:
    """The character that an escape sequence stands for; nothing for one that is named, for these are not seen."""
    number = escape.lastindex or 0
    if not number:
        return ""
    code = int(escape[number], {7: 10, 8: 8}.get(number, 16))
    return chr(code) if code <= 0x10FFFF else ""


@lru_cache(maxsize=4096)
def _plain(char: str) -> str:
    """A character's letters in their one form; none if it is no letter."""
    return "".join(c for c in unicodedata.normalize("NFKD", char).casefold().translate(_LIKE) if c.isalpha())


def _from_base64(text: str) -> list[str]:
    """What the text is in base64, whatever stands between, by each of the four places where a group may begin."""
    code = _NOT_BASE64.sub("", text)
    groups = (code[start : start + (len(code) - start) // 4 * 4] for start in range(4))
    return [_ascii(base64.b64decode(group)) for group in groups if group]


def _from_hex(text: str) -> list[str]:
    """What runs of pairs of hexadecimal digits mean, by both places where a pair may begin."""
    found = []
    for run in _PAIRS.findall(text):
        digits = _NOT_HEX.sub("", run)
        found += [_ascii(bytes.fromhex(digits[start : start + (len(digits) - start) // 2 * 2])) for start in range(2)]
    return found


def _ascii(code: bytes) -> str:
    """The letters among some bytes, in lower case."""
    return code.translate(_LOWER).translate(None, _NO_LETTER).decode("ascii")
