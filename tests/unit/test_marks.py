import base64
import codecs
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.marks import (
    ERRORS,
    HELD,
    HELD_AT_MOST,
    STEP,
    SYLLABLES,
    Marks,
    Mint,
    Text,
    Watch,
    distance,
    letters,
)

MINT = Mint("a key for tests")
MARKS = [MINT.mark("request", f"chunk {i}") for i in range(5)]
MARK = MARKS[2]
BEFORE = "The north bridge was closed on 3 May 2031, after divers had found cracks in two of its piers. "
AFTER = " Buses cross at Wexcombe now, and the repair will cost 4.2 million marks."

DISGUISES = {
    "as it is": MARK,
    "capitals": MARK.upper(),
    "run together": MARK.replace(" ", ""),
    "spaced": " ".join(MARK.replace(" ", "")),
    "hyphens": "-".join(MARK),
    "one a line": "\n".join(MARK),
    "numbered": "\n".join(f"{i}. {word}" for i, word in enumerate(MARK.split(), 1)),
    "markdown": "".join(f"**{c}**" for c in MARK),
    "zero width": "\u200b".join(MARK),
    "soft hyphens": "\u00ad".join(MARK),
    "full width": "".join(chr(ord(c) + 0xFEE0) if c != " " else c for c in MARK),
    "mathematical": "".join(chr(0x1D41A + ord(c) - 97) if c != " " else c for c in MARK),
    "accents": MARK.translate(str.maketrans("aeio", "áèïô")),
    "cyrillic": MARK.translate(str.maketrans("aeokpmt", "аеокрмт")),
    "greek": MARK.translate(str.maketrans("aeiovt", "αειοντ")),
    "digits": MARK.translate(str.maketrans("aeio", "4310")),
    "backwards": MARK[::-1],
    "words backwards": " ".join(MARK.split()[::-1]),
    "each word backwards": " ".join(word[::-1] for word in MARK.split()),
    "rot13": codecs.encode(MARK, "rot13"),
    "base64": base64.b64encode(MARK.encode()).decode(),
    "base64 in a text": base64.b64encode(f"It begins: {MARK}, and so on.".encode()).decode(),
    "base64 in groups": " ".join(base64.b64encode(MARK.encode()).decode()[i : i + 4] for i in range(0, 28, 4)),
    "url-safe base64": base64.urlsafe_b64encode(f"??>>{MARK}".encode()).decode(),
    "hex": MARK.encode().hex(),
    "hex in pairs": MARK.upper().encode().hex(" "),
    "hex with 0x": " ".join(f"0x{ord(c):02x}" for c in MARK),
    "unicode escapes": "".join(f"\\u{ord(c):04x}" for c in MARK),
    "long unicode escapes": "".join(f"\\U{ord(c):08x}" for c in MARK),
    "braced escapes": "".join(f"\\u{{{ord(c):x}}}" for c in MARK),
    "doubled backslashes": "".join(f"\\\\u{ord(c):04x}" for c in MARK),
    "byte escapes": "".join(f"\\x{ord(c):02x}" for c in MARK),
    "code points": " ".join(f"U+{ord(c):04X}" for c in MARK),
    "entities": "".join(f"&#{ord(c)};" for c in MARK),
    "hex entities": "".join(f"&#x{ord(c):x};" for c in MARK),
    "percent": "".join(f"%{ord(c):02x}" for c in MARK),
    "decimal": ", ".join(str(ord(c)) for c in MARK),
    "without its first word": MARK.split(maxsplit=1)[1],
    "without its last word": MARK.rsplit(maxsplit=1)[0],
}


def watched(text, cuts=(), marks=MARKS):
    """What a watch lets through of a text that comes in pieces."""
    watch = Watch(Marks(marks))
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    out = [watch.feed(text[i:j]) for i, j in zip(places, places[1:], strict=False)]
    return "".join([*out, watch.finish()]), watch


class TestMint:
    def test_marks_are_three_words_that_can_be_said(self):
        for mark in MARKS:
            assert [len(word) for word in mark.split()] == [6, 6, 6]
            assert all(word[i : i + 2] in SYLLABLES for word in mark.split() for i in (0, 2, 4))

    def test_depend_on_key_and_on_everything_that_is_marked(self):
        made = [Mint(key).mark(*about) for key in ("a", "b") for about in (("r", "c"), ("r", "d"), ("s", "c"), ("rc",))]
        assert len(set(made)) == len(made)
        assert Mint("a").mark("r", "c") == made[0]
        assert Mint("a").mark("r,c") != Mint("a").mark("r", "c") != Mint("a").mark("r", "c", "")

    def test_thousands_of_marks_are_far_apart(self):
        marks = {MINT.mark("r", str(i)) for i in range(3000)}
        assert len(marks) == 3000
        one = next(iter(marks)).replace(" ", "")
        assert min(distance(one, other.replace(" ", "")) for other in list(marks)[1:200]) > 2 * ERRORS

    def test_the_checksum_tells_own_marks_from_others(self):
        assert all(MINT.genuine(mark) for mark in MARKS)
        assert MINT.genuine(MARK.upper()) and not MINT.genuine(MARK[:-1])
        others = [Mint("another key").mark("r", str(i)) for i in range(2000)]
        assert sum(map(MINT.genuine, others)) < 6  # one in 4,096
        assert not MINT.genuine("") and not MINT.genuine("the bridge was")

    def test_shares_are_spread_evenly(self):
        shares = [MINT.share("oracle", str(i)) for i in range(2000)]
        assert 0 <= min(shares) and max(shares) < 1
        assert abs(sum(share < 0.3 for share in shares) / 2000 - 0.3) < 0.04


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_mark_is_found_in_every_disguise(disguise):
    found = Marks(MARKS).find(Text(f"{BEFORE}{DISGUISES[disguise]}{AFTER}"))
    assert found is not None and found.mark == MARK
    assert found.errors == 0 or "without" in disguise or disguise == "greek"  # nu is taken for the v that it looks like


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("size", [1, 3, 7, 40, 10_000])
def test_nothing_of_a_mark_comes_through_in_any_disguise(disguise, size):
    out, watch = watched(f"{BEFORE}{DISGUISES[disguise]}{AFTER}", range(0, 2000, size))
    assert watch.found is not None and watch.found.mark == MARK
    assert BEFORE.startswith(out)


def edits(text):
    """Texts with up to two letters changed, left out or put in."""
    one = st.tuples(st.sampled_from("cdi"), st.integers(0, len(text)), st.sampled_from("bdfghkmnaeiouxyw"))

    def edited(steps):
        said = text
        for kind, wanted, char in steps:
            at = min(wanted, len(said))
            said = said[:at] + (char if kind != "d" else "") + said[at + (kind != "i") :]
        return said

    return st.lists(one, max_size=ERRORS).map(edited)


@settings(max_examples=300)
@given(edits(MARK), st.lists(st.integers(0, 300), max_size=8))
def test_two_wrong_letters_hide_no_mark(spoilt, cuts):
    whole = Marks(MARKS).find(Text(f"{BEFORE}{spoilt}{AFTER}"))
    assert whole is not None and whole.mark == MARK and whole.errors <= ERRORS
    out, watch = watched(f"{BEFORE}{spoilt}{AFTER}", cuts)
    assert watch.found is not None and watch.found.mark == MARK
    assert BEFORE.startswith(out)


CODES = {
    "letters": str,
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 of more": lambda text: base64.b64encode(f"and {text}, so".encode()).decode(),
    "hex": lambda text: text.encode().hex(),
    "decimal": lambda text: " ".join(str(ord(c)) for c in text),
    "escapes": lambda text: "".join(f"\\u{ord(c):04x}" for c in text),
}


@pytest.mark.parametrize("code", CODES)
def test_nothing_comes_through_that_only_the_whole_mark_gives_away(code):
    """With both errors in the middle word, no two words side by side are whole."""
    before = "The old bridge. "
    for i in range(40):
        mark = MINT.mark(str(i))
        spoilt = f"{mark[:8]}{'xq'[i % 2]}{mark[9]}x{mark[10:]}"
        text = f"{before}{CODES[code](spoilt)}{AFTER}"
        for size in (1, 5):
            out, watch = watched(text, range(0, len(text), size), [mark])
            assert watch.found is not None
            assert before.startswith(out)


ANY = (
    st.text(max_size=300)
    | st.text("ab \\ux0%&#;160=", max_size=300)
    | st.lists(
        st.sampled_from([*" .,\n", *SYLLABLES, "the", "bridge", "\\u0061", "%62", "0x63", "&#97;", "6a", "99 "]),
        max_size=120,
    ).map("".join)
)


@settings(max_examples=500)
@given(ANY, st.lists(st.integers(0, 400), max_size=10))
def test_a_text_without_marks_comes_through_unchanged_however_it_is_cut(text, cuts):
    out, watch = watched(text, cuts)
    assert (out, watch.found) == (text, None)


@settings(max_examples=100)
@given(ANY, st.sampled_from(sorted(DISGUISES)), st.lists(st.integers(0, 600), max_size=6))
def test_whatever_stands_before_it_a_mark_does_not_come_through(before, disguise, cuts):
    text = f"{before}\n\n{DISGUISES[disguise]}{AFTER}"
    out, watch = watched(text, cuts)
    if watch.found:  # letters before it may spoil its groups of four, or its pairs
        assert f"{before}\n\n".startswith(out)
    else:
        assert "base64" in disguise or "hex" in disguise or "without" in disguise or disguise == "decimal"


@pytest.mark.parametrize(("length", "kept"), [(6, True), (7, False), (12, False), (17, False)])
def test_an_end_in_the_middle_of_a_mark_is_not_let_through(length, kept):
    begun = " ".join(w for w in (MARK.replace(" ", "")[:length][i : i + 6] for i in (0, 6, 12)) if w)
    out, watch = watched(BEFORE + begun)
    assert (watch.found is None) == kept
    assert out == (BEFORE + begun if kept else "") or (not kept and BEFORE.startswith(out))


def test_what_two_marks_share_out_is_no_mark():
    mixed = f"{MARKS[0].split()[0]} {MARKS[1].split()[1]} {MARKS[2].split()[2]}"
    assert Marks(MARKS).find(Text(BEFORE + mixed + AFTER)) is None
    apart = f"{MARK.split()[0]}{AFTER}{MARK.split()[1]}"
    assert Marks(MARKS).find(Text(apart)) is None


def test_all_marks_of_a_text_are_named():
    text = f"{MARKS[4]} {BEFORE} {base64.b64encode(MARKS[1].encode()).decode()}"
    assert Marks(MARKS).all(Text(text)) == sorted([MARKS[1], MARKS[4]])
    assert Marks([]).find(Text(text)) is None


@pytest.mark.parametrize(
    "text", ["word " * 400, "12 34,5; " * 400, " " * 3000, "北风与太阳" * 300, "–" * 3000, "\u200b" * 3000]
)
def test_a_stream_flows(text):
    """It is held back by a bounded number of characters, whatever they are."""
    watch, out = Watch(Marks(MARKS)), 0
    for i, char in enumerate(text, 1):
        out += len(watch.feed(char))
        assert i - out <= HELD_AT_MOST + STEP
    if text[0].isalpha():
        assert len(text) - out <= 2 * HELD + STEP


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Zakeno", "zakeno"),
        ("z4k3n0 2031", "zakeno"),
        ("№ 5 ﬁsh", "nofish"),
        (r"\u007aa&#107;%65", "zake"),
        (r"\u{1F600}\uFFFFFF", "ff"),
        ("&#9999999;a", "a"),
        ("", ""),
    ],
)
def test_letters_are_those_one_reads(text, expected):
    assert letters(text)[0] == expected


@given(st.text(max_size=80))
def test_each_letter_has_its_place(text):
    spelled, places = letters(text)
    assert len(spelled) == len(places) and places == sorted(places)
    assert all(0 <= place < len(text) for place in places)


@settings(max_examples=60)
@given(st.text("ab", min_size=1, max_size=5), st.text("abc", max_size=7))
def test_distance_is_that_to_the_nearest_part(needle, text):
    @lru_cache(None)
    def levenshtein(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(levenshtein(a[1:], b[1:]) + (a[0] != b[0]), levenshtein(a[1:], b) + 1, levenshtein(a, b[1:]) + 1)

    parts = {text[i:j] for i in range(len(text) + 1) for j in range(i, len(text) + 1)}
    assert distance(needle, text) == min(levenshtein(needle, part) for part in parts)
