import base64
import codecs
import random
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.guard.watermarks.detection import (
    HELD_LETTERS,
    MAX_ERRORS,
    MAX_HELD,
    SEARCH_INTERVAL,
    WatermarkDetector,
    WatermarkFilter,
    substring_distance,
)
from casemate.guard.watermarks.tokens import SYLLABLES, TokenGenerator
from casemate.text.disguises import DecodedText, normalize_letters

GENERATOR = TokenGenerator("a key for tests")
TOKENS = [GENERATOR.token("request", f"chunk {i}") for i in range(5)]
TOKEN = TOKENS[2]
BEFORE = "The north bridge was closed on 3 May 2031, after divers had found cracks in two of its piers. "
AFTER = " Buses cross at Wexcombe now, and the repair will cost 4.2 million marks."

DISGUISES = {
    "as it is": TOKEN,
    "capitals": TOKEN.upper(),
    "run together": TOKEN.replace(" ", ""),
    "spaced": " ".join(TOKEN.replace(" ", "")),
    "hyphens": "-".join(TOKEN),
    "one a line": "\n".join(TOKEN),
    "numbered": "\n".join(f"{i}. {word}" for i, word in enumerate(TOKEN.split(), 1)),
    "markdown": "".join(f"**{c}**" for c in TOKEN),
    "zero width": "\u200b".join(TOKEN),
    "soft hyphens": "\u00ad".join(TOKEN),
    "full width": "".join(chr(ord(c) + 0xFEE0) if c != " " else c for c in TOKEN),
    "mathematical": "".join(chr(0x1D41A + ord(c) - 97) if c != " " else c for c in TOKEN),
    "accents": TOKEN.translate(str.maketrans("aeio", "áèïô")),
    "cyrillic": TOKEN.translate(str.maketrans("aeokpmt", "аеокрмт")),
    "greek": TOKEN.translate(str.maketrans("aeiovt", "αειοντ")),
    "digits": TOKEN.translate(str.maketrans("aeio", "4310")),
    "backwards": TOKEN[::-1],
    "words backwards": " ".join(TOKEN.split()[::-1]),
    "each word backwards": " ".join(word[::-1] for word in TOKEN.split()),
    "rot13": codecs.encode(TOKEN, "rot13"),
    "base64": base64.b64encode(TOKEN.encode()).decode(),
    "base64 in a text": base64.b64encode(f"It begins: {TOKEN}, and so on.".encode()).decode(),
    "base64 in groups": " ".join(base64.b64encode(TOKEN.encode()).decode()[i : i + 4] for i in range(0, 28, 4)),
    "url-safe base64": base64.urlsafe_b64encode(f"??>>{TOKEN}".encode()).decode(),
    "hex": TOKEN.encode().hex(),
    "hex in pairs": TOKEN.upper().encode().hex(" "),
    "hex with 0x": " ".join(f"0x{ord(c):02x}" for c in TOKEN),
    "unicode escapes": "".join(f"\\u{ord(c):04x}" for c in TOKEN),
    "long unicode escapes": "".join(f"\\U{ord(c):08x}" for c in TOKEN),
    "braced escapes": "".join(f"\\u{{{ord(c):x}}}" for c in TOKEN),
    "doubled backslashes": "".join(f"\\\\u{ord(c):04x}" for c in TOKEN),
    "byte escapes": "".join(f"\\x{ord(c):02x}" for c in TOKEN),
    "code points": " ".join(f"U+{ord(c):04X}" for c in TOKEN),
    "entities": "".join(f"&#{ord(c)};" for c in TOKEN),
    "hex entities": "".join(f"&#x{ord(c):x};" for c in TOKEN),
    "percent": "".join(f"%{ord(c):02x}" for c in TOKEN),
    "decimal": ", ".join(str(ord(c)) for c in TOKEN),
    "without its first word": TOKEN.split(maxsplit=1)[1],
    "without its last word": TOKEN.rsplit(maxsplit=1)[0],
}


def filtered(text, cuts=(), tokens=TOKENS):
    """Streams a text in pieces through a filter. Returns the passed text and the filter."""
    watch = WatermarkFilter(WatermarkDetector(tokens))
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    out = [watch.feed(text[i:j]) for i, j in zip(places, places[1:], strict=False)]
    return "".join([*out, watch.finish()]), watch


class TestTokenGenerator:
    def test_tokens_are_three_pronounceable_words(self):
        for mark in TOKENS:
            assert [len(word) for word in mark.split()] == [6, 6, 6]
            assert all(word[i : i + 2] in SYLLABLES for word in mark.split() for i in (0, 2, 4))

    def test_tokens_depend_on_key_and_subject(self):
        made = [
            TokenGenerator(key).token(*about)
            for key in ("a", "b")
            for about in (("r", "c"), ("r", "d"), ("s", "c"), ("rc",))
        ]
        assert len(set(made)) == len(made)
        assert TokenGenerator("a").token("r", "c") == made[0]
        assert (
            TokenGenerator("a").token("r,c")
            != TokenGenerator("a").token("r", "c")
            != TokenGenerator("a").token("r", "c", "")
        )

    def test_tokens_have_a_large_minimum_distance(self):
        marks = {GENERATOR.token("r", str(i)) for i in range(3000)}
        assert len(marks) == 3000
        one = next(iter(marks)).replace(" ", "")
        assert min(substring_distance(one, other.replace(" ", "")) for other in list(marks)[1:200]) > 2 * MAX_ERRORS

    def test_checksum_accepts_own_tokens(self):
        assert all(GENERATOR.is_genuine(mark) for mark in TOKENS)
        assert GENERATOR.is_genuine(TOKEN.upper()) and not GENERATOR.is_genuine(TOKEN[:-1])
        others = [TokenGenerator("another key").token("r", str(i)) for i in range(2000)]
        assert sum(map(GENERATOR.is_genuine, others)) < 6  # one token in 4,096
        assert not GENERATOR.is_genuine("") and not GENERATOR.is_genuine("the bridge was")

    def test_uniform_numbers_are_uniform(self):
        shares = [GENERATOR.uniform("oracle", str(i)) for i in range(2000)]
        assert 0 <= min(shares) and max(shares) < 1
        assert abs(sum(share < 0.3 for share in shares) / 2000 - 0.3) < 0.04


@pytest.mark.parametrize("disguise", DISGUISES)
def test_token_is_found_in_every_disguise(disguise):
    found = WatermarkDetector(TOKENS).best_match(DecodedText(f"{BEFORE}{DISGUISES[disguise]}{AFTER}"))
    assert found is not None and found.token == TOKEN
    assert found.errors == 0 or "without" in disguise or disguise == "greek"  # nu is normalized to the confusable v


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("size", [1, 3, 7, 40, 10_000])
def test_the_filter_passes_no_part_of_a_disguised_token(disguise, size):
    out, watch = filtered(f"{BEFORE}{DISGUISES[disguise]}{AFTER}", range(0, 2000, size))
    assert watch.found is not None and watch.found.token == TOKEN
    assert BEFORE.startswith(out)


def edits(text):
    """Texts with up to two letters changed, omitted or inserted."""
    one = st.tuples(st.sampled_from("cdi"), st.integers(0, len(text)), st.sampled_from("bdfghkmnaeiouxyw"))

    def edited(steps):
        edited_text = text
        for kind, wanted, char in steps:
            at = min(wanted, len(edited_text))
            edited_text = edited_text[:at] + (char if kind != "d" else "") + edited_text[at + (kind != "i") :]
        return edited_text

    return st.lists(one, max_size=MAX_ERRORS).map(edited)


@settings(max_examples=40)
@given(edits(TOKEN), st.lists(st.integers(0, 300), max_size=8))
def test_a_token_with_two_wrong_letters_is_found(spoilt, cuts):
    whole = WatermarkDetector(TOKENS).best_match(DecodedText(f"{BEFORE}{spoilt}{AFTER}"))
    assert whole is not None and whole.token == TOKEN and whole.errors <= MAX_ERRORS
    out, watch = filtered(f"{BEFORE}{spoilt}{AFTER}", cuts)
    assert watch.found is not None and watch.found.token == TOKEN
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
def test_the_filter_passes_no_part_if_only_the_whole_token_matches(code):
    """With both errors in the middle word, no two adjacent words are unchanged."""
    before = "The old bridge. "
    for i in range(40):
        mark = GENERATOR.token(str(i))
        spoilt = f"{mark[:8]}{'xq'[i % 2]}{mark[9]}x{mark[10:]}"
        text = f"{before}{CODES[code](spoilt)}{AFTER}"
        for size in (1, 5):
            out, watch = filtered(text, range(0, len(text), size), [mark])
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


@settings(max_examples=80)
@given(ANY, st.lists(st.integers(0, 400), max_size=10))
def test_text_without_tokens_passes_unchanged_for_any_split(text, cuts):
    out, watch = filtered(text, cuts)
    assert (out, watch.found) == (text, None)


@settings(max_examples=100)
@given(ANY, st.sampled_from(sorted(DISGUISES)), st.lists(st.integers(0, 600), max_size=6))
def test_no_token_passes_after_any_text(before, disguise, cuts):
    text = f"{before}\n\n{DISGUISES[disguise]}{AFTER}"
    out, watch = filtered(text, cuts)
    if watch.found:  # preceding letters may shift the groups of four letters or the pairs
        assert f"{before}\n\n".startswith(out)
    else:
        assert "base64" in disguise or "hex" in disguise or "without" in disguise or disguise == "decimal"


@pytest.mark.parametrize(("length", "kept"), [(6, True), (7, False), (12, False), (17, False)])
def test_incomplete_token_at_the_end_does_not_pass(length, kept):
    begun = " ".join(w for w in (TOKEN.replace(" ", "")[:length][i : i + 6] for i in (0, 6, 12)) if w)
    out, watch = filtered(BEFORE + begun)
    assert (watch.found is None) == kept
    assert out == (BEFORE + begun if kept else "") or (not kept and BEFORE.startswith(out))


def test_words_of_different_tokens_do_not_match():
    mixed = f"{TOKENS[0].split()[0]} {TOKENS[1].split()[1]} {TOKENS[2].split()[2]}"
    assert WatermarkDetector(TOKENS).best_match(DecodedText(BEFORE + mixed + AFTER)) is None
    apart = f"{TOKEN.split()[0]}{AFTER}{TOKEN.split()[1]}"
    assert WatermarkDetector(TOKENS).best_match(DecodedText(apart)) is None


APART = {
    "a line for each word": lambda token: "".join(
        f"\n{w} is one of the words of it, here {w[0]}" for w in token.split()
    ),
    "a poem": lambda token: "".join(f"\nover the silver water {w} and a garden in the evening" for w in token.split()),
    "in reverse order": lambda token: " and then a long remark about it, ".join(token.split()[::-1]),
    "one word reversed": lambda token: " and a very long remark about it, ".join(
        [token[:6], token[12:6:-1], token[14:]]
    ),
}
MIXED = {
    "pig latin": lambda word: f"{word[1:]}{word[0]}ay",
    "ends exchanged": lambda word: f"{word[-1]}{word[1:-1]}{word[0]}",
    "sorted letters": lambda word: "".join(sorted(word)),
    "shuffled letters": lambda word: "".join(random.Random(word).sample(word, len(word))),
}


@pytest.mark.parametrize("form", APART)
def test_a_stream_ends_at_the_last_word_of_a_token_with_other_text_between(form):
    _, watch = filtered(BEFORE + APART[form](TOKEN) + AFTER, range(0, 900, 7))
    assert watch.found and (watch.found.token, watch.found.form) == (TOKEN, "apart")


def test_words_of_different_tokens_are_not_a_token():
    words = [token.split()[i] for i, token in enumerate(TOKENS[:3])]
    text = BEFORE + " and then a long remark about it, ".join([*words, words[0]]) + AFTER
    assert filtered(text)[0] == text


@pytest.mark.parametrize("form", MIXED)
@pytest.mark.parametrize("token", TOKENS)
def test_a_token_with_reordered_letters_is_found(form, token):
    text = BEFORE + " ".join(map(MIXED[form], token.split())) + AFTER
    out, watch = filtered(text, range(0, 900, 7))
    assert watch.found and watch.found.token == token
    assert MIXED[form](token.split()[0]) not in out


def test_reordered_letters_of_two_words_are_not_a_token():
    text = BEFORE + " ".join("".join(sorted(word)) for word in TOKEN.split()[:2]) + AFTER
    assert filtered(text)[0] == text


def test_all_tokens_of_a_text_are_returned():
    text = f"{TOKENS[4]} {BEFORE} {base64.b64encode(TOKENS[1].encode()).decode()}"
    assert WatermarkDetector(TOKENS).tokens(DecodedText(text)) == sorted([TOKENS[1], TOKENS[4]])
    assert WatermarkDetector([]).best_match(DecodedText(text)) is None


@pytest.mark.parametrize(
    "text", ["word " * 400, "12 34,5; " * 400, " " * 3000, "北风与太阳" * 300, "–" * 3000, "\u200b" * 3000]
)
def test_lag_of_a_stream_is_bounded(text):
    """For any characters, the filter buffers a bounded number of them."""
    watch, out = WatermarkFilter(WatermarkDetector(TOKENS)), 0
    for i, char in enumerate(text, 1):
        out += len(watch.feed(char))
        assert i - out <= MAX_HELD + SEARCH_INTERVAL
    if text[0].isalpha():
        assert len(text) - out <= 2 * HELD_LETTERS + SEARCH_INTERVAL


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
def test_normalized_letters(text, expected):
    assert normalize_letters(text)[0] == expected


@given(st.text(max_size=80))
def test_each_letter_has_its_position(text):
    spelled, places = normalize_letters(text)
    assert len(spelled) == len(places) and places == sorted(places)
    assert all(0 <= place < len(text) for place in places)


@settings(max_examples=60)
@given(st.text("ab", min_size=1, max_size=5), st.text("abc", max_size=7))
def test_substring_distance_is_the_minimum_over_substrings(needle, text):
    @lru_cache(None)
    def levenshtein(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(levenshtein(a[1:], b[1:]) + (a[0] != b[0]), levenshtein(a[1:], b) + 1, levenshtein(a, b[1:]) + 1)

    parts = {text[i:j] for i in range(len(text) + 1) for j in range(i, len(text) + 1)}
    assert substring_distance(needle, text) == min(levenshtein(needle, part) for part in parts)
