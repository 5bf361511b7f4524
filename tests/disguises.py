"""Disguises of a text, each an independent encoder: the oracle for decoding.

The decoder was developed with ``DEVELOPED`` and without ``HELD_OUT``. The split depends on the names only.
"""

import base64
import codecs
import hashlib
import json
import re
import string
import urllib.parse

LOWER = string.ascii_lowercase
NATO = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey xray yankee zulu"
).split()
MORSE = (
    ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- --.."
).split()
FILLERS = "um well so right okay anyway indeed basically".split()


def letters(change):
    """A disguise that changes each ASCII letter, in lower case, and keeps other characters."""
    return lambda text: "".join(change(c) if c in LOWER else c for c in text.lower())


def offset(first, case=str.lower):
    """Letters of another Unicode block, in alphabetical order from ``first``."""
    return lambda text: "".join(chr(first + ord(c.lower()) - 97) if c.lower() in LOWER else c for c in case(text))


def table(source, target):
    return lambda text: text.lower().translate(str.maketrans(source, target))


def words(change, separator=" "):
    return lambda text: separator.join(change(i, word) for i, word in enumerate(text.split(), 1))


def between(mark):
    return lambda text: " ".join(mark.join(word) for word in text.split())


def around(before, after):
    return letters(lambda c: f"{before}{c}{after}")


def shift(k):
    return letters(lambda c: LOWER[(ord(c) - 97 + k) % 26])


def number(c):
    return str(ord(c) - 96)


def b64(text):
    return base64.b64encode(text.encode()).decode()


def swapped(items):
    items = list(items)
    for i in range(0, len(items) - 1, 2):
        items[i], items[i + 1] = items[i + 1], items[i]
    return items


def halves(text):
    middle = text.split()
    at = len(middle) // 2
    return f"{' '.join(middle[:at])} and that was the first part of what was found there, {' '.join(middle[at:])}"


DISGUISES = {
    "plain": str,
    "capitals": str.upper,
    "alternating case": lambda t: "".join(c.upper() if i % 2 else c.lower() for i, c in enumerate(t)),
    "full width": lambda t: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in t),
    "mathematical bold": offset(0x1D41A),
    "monospace": offset(0x1D68A),
    "circled": offset(0x24D0),
    "squared": offset(0x1F130),
    "negative circled": offset(0x1F150),
    "negative squared": offset(0x1F170),
    "regional indicators": lambda t: " ".join(offset(0x1F1E6)(c) for c in t),
    "small capitals": table("abdefghijklmnoprstvz", "ᴀʙᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴠᴢ"),
    "superscripts": table("abdeghijklmnoprstuvwxyz", "ᵃᵇᵈᵉᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ"),
    "zero width": between("\u200b"),
    "soft hyphens": between("\u00ad"),
    "word joiners": between("\u2060"),
    "variation selectors": between("\ufe0f"),
    "stacked marks": letters(lambda c: f"{c}\u0301\u0323\u0360"),
    "struck through": letters(lambda c: f"{c}\u0336"),
    "tag characters": lambda t: "".join(chr(0xE0000 + ord(c)) for c in t if ord(c) < 128),
    "cyrillic look-alikes": table("aeopcyxijs", "аеорсухіјѕ"),
    "greek look-alikes": table("aiouvkt", "αιουνκτ"),
    "cyrillic letters": table("abvgdezijklmnoprstuf", "абвгдезийклмнопрстуф"),
    "greek letters": table("abgdeziklmnoprstuf", "αβγδεζικλμνοπρστυφ"),
    "armenian look-alikes": table("ouhnq", "օսհոզ"),
    "numbered words": words(lambda i, w: f"{i}.{w}"),
    "numbered lines": words(lambda i, w: f"{i}) {w}", "\n"),
    "lettered words": words(lambda i, w: f"({LOWER[i % 26]}) {w}"),
    "numbered letters": lambda t: " ".join(f"{i}{c}" for i, c in enumerate(t.replace(" ", ""), 1)),
    "fillers": words(lambda i, w: f"{w} {FILLERS[i % len(FILLERS)]}"),
    "one filler": words(lambda i, w: f"{w} banana"),
    "emoji between words": words(lambda i, w: f"{w} \U0001f33f"),
    "quoted words": words(lambda i, w: f'"{w}",'),
    "bold words": words(lambda i, w: f"**{w}**"),
    "bold letters": around("**", "**"),
    "code letters": around("`", "`"),
    "tags around letters": around("<b>", "</b>"),
    "spans around letters": around('<span class="x">', "</span>"),
    "bbcode": around("[b]", "[/b]"),
    "latex": around("\\textbf{", "}"),
    "comments between letters": letters(lambda c: f"{c}<!-- x -->"),
    "table cells": words(lambda i, w: f"| {w}", " "),
    "spaced letters": lambda t: "  ".join(" ".join(w) for w in t.split()),
    "hyphens": between("-"),
    "dots": between("."),
    "underscores": between("_"),
    "letters a line": lambda t: "\n".join(t.replace(" ", "")),
    "slashes": lambda t: "/".join(t.replace(" ", "")),
    "no spaces": lambda t: t.replace(" ", ""),
    "camel case": lambda t: "".join(w.capitalize() for w in t.split()),
    "snake case": lambda t: "_".join(t.split()),
    "list of letters": lambda t: json.dumps(list(t)),
    "list of words": lambda t: json.dumps(t.split()),
    "reversed": lambda t: t[::-1],
    "words in reverse": lambda t: " ".join(t.split()[::-1]),
    "reversed words": words(lambda i, w: w[::-1]),
    "rot13": lambda t: codecs.encode(t, "rot13"),
    "rot5": shift(5),
    "rot19": shift(19),
    "atbash": table(LOWER, LOWER[::-1]),
    "rot13 without spaces": lambda t: codecs.encode(t, "rot13").replace(" ", ""),
    "base64": b64,
    "base64 by word": words(lambda i, w: b64(w)),
    "base64 without padding": lambda t: base64.urlsafe_b64encode(t.encode()).decode().rstrip("="),
    "base64 twice": lambda t: b64(b64(t)),
    "base64 of rot13": lambda t: b64(codecs.encode(t, "rot13")),
    "base32": lambda t: base64.b32encode(t.encode()).decode(),
    "base32 in lower case": lambda t: base64.b32encode(t.encode()).decode().lower(),
    "hex": lambda t: t.encode().hex(),
    "hex pairs": lambda t: t.encode().hex(" "),
    "hex with 0x": lambda t: " ".join(f"0x{ord(c):02x}" for c in t),
    "hex of reversed": lambda t: t[::-1].encode().hex(),
    "byte escapes": lambda t: "".join(f"\\x{b:02x}" for b in t.encode()),
    "binary": lambda t: " ".join(f"{b:08b}" for b in t.encode()),
    "binary without spaces": lambda t: "".join(f"{b:08b}" for b in t.encode()),
    "decimal": lambda t: " ".join(str(b) for b in t.encode()),
    "list of codes": lambda t: json.dumps(list(t.encode())),
    "octal": lambda t: " ".join(f"{b:03o}" for b in t.encode()),
    "octal escapes": lambda t: "".join(f"\\{b:03o}" for b in t.encode()),
    "letter numbers": words(lambda i, w: "-".join(number(c) for c in w.lower() if c in LOWER)),
    "letter numbers, spaced": lambda t: " ".join(number(c) for c in t.lower() if c in LOWER),
    "letter numbers of two digits": lambda t: " ".join(f"{ord(c) - 96:02d}" for c in t.lower() if c in LOWER),
    "unicode escapes": lambda t: "".join(f"\\u{ord(c):04x}" for c in t),
    "code points": lambda t: " ".join(f"U+{ord(c):04X}" for c in t),
    "entities": lambda t: "".join(f"&#{ord(c)};" for c in t),
    "hex entities": lambda t: "".join(f"&#x{ord(c):x};" for c in t),
    "percent": lambda t: "".join(f"%{b:02X}" for b in t.encode()),
    "percent twice": lambda t: urllib.parse.quote("".join(f"%{b:02X}" for b in t.encode())),
    "quoted printable": lambda t: "".join(f"={b:02X}" for b in t.encode()),
    "leetspeak": table("aeiost", "431057"),
    "leetspeak with signs": table("aeis", "@3!$"),
    "swapped words": lambda t: " ".join(swapped(t.split())),
    "swapped letters": words(lambda i, w: "".join(swapped(w))),
    "morse": lambda t: " / ".join(" ".join(MORSE[ord(c) - 97] for c in w if c in LOWER) for w in t.lower().split()),
    "spelling alphabet": lambda t: " ".join(NATO[ord(c) - 97] for c in t.lower() if c in LOWER),
    "as in": lambda t: ", ".join(f"{c} as in {NATO[ord(c) - 97]}" for c in t.lower() if c in LOWER),
    "braille": table(LOWER, "⠁⠃⠉⠙⠑⠋⠛⠓⠊⠚⠅⠇⠍⠝⠕⠏⠟⠗⠎⠞⠥⠧⠺⠭⠽⠵"),
    "doubled letters": letters(lambda c: c + c),
    "without vowels": letters(lambda c: "" if c in "aeiou" else c),
    "pig latin": words(lambda i, w: f"{w[1:]}{w[0]}ay"),
    "first letters of words": lambda t: " ".join(NATO[ord(c) - 97].upper() for c in t.lower() if c in LOWER),
    "halves": halves,
    "base85": lambda t: base64.b85encode(t.encode()).decode(),
    "polybius": letters(lambda c: f"{(ord(c) - 97) // 5 + 1}{(ord(c) - 97) % 5 + 1} "),
}
"""Encoders by name. The decoder does not support the last ones."""

UNREADABLE = {
    "letters between the letters": lambda t: "".join(c + "x" for c in t),
    "a letter in brackets": lambda t: "".join(f"[{c}]" for c in t),
    "three times each letter": lambda t: "".join(3 * c for c in t),
    "another rotation for each word": words(
        lambda i, w: "".join(LOWER[(LOWER.index(c) + i) % 26] if c in LOWER else c for c in w.lower())
    ),
    "odd alphabet": table(LOWER, "qjzxkvwpyfmgucbdhlnrtsioea"),
    "runes": letters(lambda c: chr(0x16A0 + ord(c) - 97)),
    "numbers of words": words(lambda i, w: str(int.from_bytes(w.encode(), "big"))),
    "base64 three times": lambda t: base64.b64encode(base64.b64encode(base64.b64encode(t.encode()))).decode(),
    "bits of seven": lambda t: " ".join(f"{b:07b}" for b in t.encode()),
    "dots and dashes": lambda t: " ".join(". " * (b // 12) + "-" * (b % 12) for b in t.encode()),
}
"""Encoders that no decoder supports, besides the last ones of ``DISGUISES``."""


def hidden(code, size=400):
    """Only the word "the" is visible, once per part of the invisible characters."""
    return lambda text: "".join(f" the{code(text)[i : i + size]}" for i in range(0, len(code(text)), size))


def as_symbols(symbols, bits):
    """The bits of a text as symbols, ``bits`` bits per symbol."""
    places = range(8 - bits, -1, -bits)
    return lambda text: "".join(symbols[b >> at & (1 << bits) - 1] for b in text.encode() for at in places)


INVISIBLE = {
    "bytes as variation selectors": hidden(lambda t: "".join(chr(0xE0100 + b) for b in t.encode())),
    "variation selectors of both blocks": hidden(
        lambda t: "".join(chr((0xFE00 if b < 16 else 0xE0100 - 16) + b) for b in t.encode())
    ),
    "bits of zero width": hidden(as_symbols("\u200b\u200c", 1)),
    "other bits of zero width": hidden(as_symbols("\u2060\u200d", 1)),
    "pairs of bits of zero width": hidden(as_symbols("\u200b\u200c\u200d\u2060", 2)),
    "half bytes of zero width": hidden(
        as_symbols("\u200b\u200c\u200d\u200e\u200f" + "".join(map(chr, range(0x2060, 0x206C))), 4)
    ),
    "bits as spaces and tabs": hidden(as_symbols(" \t", 1)),
    "half bytes as spaces": hidden(
        as_symbols("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000 ", 4)
    ),
}
"""Encoders with invisible output."""

OTHER_SCRIPTS = {
    name: letters(lambda c, first=first: chr(first + ord(c)))
    for name, first in {"phonetic": 0x200, "Armenian": 0x500, "Ethiopic": 0x1200, "CJK": 0x4E00, "Yi": 0xA000}.items()
}
"""Letters of scripts that the texts do not use, at the same distances as in ASCII."""

LETTER_NAMES = (
    "ay bee see dee ee eff gee aitch eye jay kay ell em en oh pee cue ar ess tee you vee double-u ex why zee"
).split()
BY_INITIAL = {word[0]: word for word in NATO} | dict(
    zip("aehinost", "any each her into nor over some this".split(), strict=True)
)


def in_long_words(change):
    """Changes each word of five or more letters."""
    return words(lambda i, w: change(w) if len(w) > 4 else w)


ALTERED = {
    "a letter missing inside": in_long_words(lambda w: w[:2] + w[3:]),
    "a letter added inside": in_long_words(lambda w: f"{w[:2]}e{w[2:]}"),
    "another letter inside": in_long_words(lambda w: f"{w[:2]}o{w[3:]}"),
    "another first letter": in_long_words(lambda w: f"m{w[1:]}"),
    "a letter doubled": in_long_words(lambda w: w[:2] + w[1:]),
    "other vowels": table("aeiou", "eioua"),
    "names of letters": lambda t: " ".join(LETTER_NAMES[ord(c) - 97] for c in t.lower() if c in LOWER),
    "names of characters": lambda t: " ".join(f"LATIN SMALL LETTER {c.upper()}" for c in t.lower() if c in LOWER),
    "initials of ordinary words": lambda t: " ".join(BY_INITIAL[c] for c in t.lower() if c in LOWER),
    "a letter and a digit for each letter": letters(lambda c: f"{'abcdefgh'[(ord(c) - 97) % 8]}{(ord(c) - 97) // 8} "),
}
"""Encoders whose output consists of words, or looks like words of the texts."""


def before_vowels(syllable):
    return lambda text: re.sub("([aeiou]+)", rf"{syllable}\1", text.lower())


OUTLINED = {
    "a syllable before each vowel": before_vowels("ub"),
    "a longer syllable before each vowel": before_vowels("idig"),
    "each vowel twice, with a letter between": letters(lambda c: f"{c}b{c}" if c in "aeiou" else c),
    "each consonant twice, with a letter between": letters(lambda c: c if c in "aeiou" else f"{c}o{c}"),
    "a sign for the third letter": in_long_words(lambda w: f"{w[:2]}_{w[3:]}"),
    "three letters of each word": words(lambda i, w: w[:3]),
    "last two letters of each word": words(lambda i, w: w[-2:]),
    "first and last letters of each word": words(lambda i, w: w[:2] + w[-2:]),
    "first halves before second halves": lambda t: "\n".join(
        [words(lambda i, w: w[: (len(w) + 1) // 2])(t), words(lambda i, w: w[(len(w) + 1) // 2 :])(t)]
    ),
    "other letters inside": words(lambda i, w: w[0] + shift(i)(w[1:-1]) + w[-1] if len(w) > 2 else w),
}
"""Encoders that change each word, but keep its position and its first or last letter."""

COVER = (
    "people who live near the old harbor often walk along the quay before breakfast and watch how small boats return "
    "with their nets while gulls wait on every roof for what is thrown away and later the market opens where bakers "
    "sell warm bread beside stalls of fruit that farmers bring down from the hills each day except sunday when most "
    "shops stay closed until noon so visitors sit under the lime trees drink coffee and talk about weather or music"
).split()
"""Ordinary words that carry a code."""


def code_words(*code):
    """A word, or several, for each letter."""
    return lambda text: ", ".join(code[ord(c) - 97] for c in text.lower() if c in LOWER)


def bits(text):
    """Five bits for each letter."""
    return "".join(f"{ord(c) - 97:05b}" for c in text.lower() if c in LOWER)


def covered_letters(text, line):
    """A line of ordinary words for each letter, by ``line(letter, words)``."""
    found = [c for c in text.lower() if c in LOWER]
    return [line(c, " ".join((COVER * 2)[i % 80 :][:4])) for i, c in enumerate(found)]


def form_bits(change):
    """Letters of ordinary words in one of two forms, one bit each."""

    def disguise(text):
        code = iter(bits(text))
        cover = " ".join(COVER * (1 + len(bits(text)) // 300))
        return "".join(change(c) if c in LOWER and next(code, "0") == "1" else c for c in cover)

    return disguise


CODED = {
    "number words": code_words(
        *"one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split(),
        *"seventeen eighteen nineteen twenty".split(),
        *(f"twenty-{unit}" for unit in "one two three four five six".split()),
    ),
    "colors for letters": code_words(
        *"red blue green gold pink teal gray navy plum lime rose ruby jade onyx opal iris mint rust".split(),
        *"sand snow coal clay wine corn lava moss".split(),
    ),
    "yes and no for bits": lambda t: " ".join("yes" if b == "1" else "no" for b in bits(t)),
    "first letters of lines": lambda t: "\n".join(covered_letters(t, lambda c, w: f"{BY_INITIAL[c]} {w}")),
    "first letters of numbered lines": lambda t: "\n".join(
        f"{i}. {line}" for i, line in enumerate(covered_letters(t, lambda c, w: f"{BY_INITIAL[c]} {w}"))
    ),
    "first letters of sentences": lambda t: " ".join(
        covered_letters(t, lambda c, w: f"{BY_INITIAL[c].capitalize()} {w}.")
    ),
    "last letters of words": lambda t: " ".join(COVER[i % 80][:3] + c for i, c in enumerate(t.lower()) if c in LOWER),
    "capitals as bits": form_bits(str.upper),
    "full-width letters as bits": form_bits(lambda c: chr(ord(c) + 0xFEE0)),
    "bold letters as bits": form_bits(lambda c: chr(0x1D41A + ord(c) - 97)),
}
"""Encoders whose output consists of ordinary words. Their choice, places or forms of letters encode the text."""


def _held_out(name):
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 1


DEVELOPED = [name for name in DISGUISES if not _held_out(name)]
HELD_OUT = [name for name in DISGUISES if _held_out(name)]
