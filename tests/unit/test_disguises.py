"""The decoder against independent encoders: watermark tokens in 104 disguises, and hostile texts."""

import random
import re

import pytest

from casemate.guard.watermarks.detection import WatermarkDetector
from casemate.guard.watermarks.tokens import TokenGenerator
from casemate.text import disguises
from casemate.text.disguises import (
    MAX_GROWTH,
    DecodedText,
    alphabet_differences,
    decodings,
    fold_text,
    only_letters,
    visible_text,
)
from tests.disguises import DEVELOPED, DISGUISES, HELD_OUT, INVISIBLE

GENERATOR = TokenGenerator("a key for tests")
TOKENS = [GENERATOR.token("request", f"chunk {i}") for i in range(4)]
BEFORE = "The north bridge was closed on 3 May 2031, after divers had found cracks in two of its piers. "
AFTER = " Buses cross at Wexcombe now, and the repair will cost 4.2 million marks."
NOT_DECODED = {"base85", "polybius"}


@pytest.mark.parametrize("name", sorted(DISGUISES))
def test_watermark_is_found_in_disguise(name):
    detector = WatermarkDetector(TOKENS)
    found = [detector.best_match(DecodedText(f"{BEFORE}{DISGUISES[name](t)}{AFTER}")) for t in TOKENS]
    decoded = [match.token if match else None for match in found]
    assert decoded == ([None] * len(TOKENS) if name in NOT_DECODED else TOKENS)


@pytest.mark.parametrize("name", INVISIBLE)
def test_watermark_in_invisible_characters_is_found(name):
    """Not decoded: visible spaces, and an alphabet of sixteen characters of which a token uses only a part."""
    found = WatermarkDetector(TOKENS).best_match(DecodedText(f"{BEFORE}{INVISIBLE[name](TOKENS[1])}{AFTER}"))
    if name in ("bits as spaces and tabs", "half bytes as spaces", "half bytes of zero width"):
        assert found is None
    else:
        assert (found.token, found.form) == (TOKENS[1], "invisible")


def test_seven_bit_codes_are_decoded_and_emoji_are_not_codes():
    bits = "".join(f"{ord(c):07b}" for c in TOKENS[1]).translate({48: "\u200b", 49: "\u200c"})
    assert WatermarkDetector(TOKENS).best_match(DecodedText(f"No.{bits} Sorry.")).token == TOKENS[1]
    assert "invisible" not in DecodedText(5 * "\U0001f468\u200d\U0001f469\u200d\u2764\ufe0f").views


@pytest.mark.parametrize("other", ["\u2764\ufe0f", "\xad", "\u2764\ufe0f\u200f\xad"])
@pytest.mark.parametrize("name", ["bits of zero width", "pairs of bits of zero width"])
def test_other_invisible_characters_do_not_disable_the_decoding(name, other):
    text = f"{BEFORE}{INVISIBLE[name](TOKENS[1])}{other}{AFTER}{other}"
    found = WatermarkDetector(TOKENS).best_match(DecodedText(f"{other}{text}"))
    assert found is not None and (found.token, found.form) == (TOKENS[1], "invisible")


def test_all_held_out_disguises_but_one_are_decoded():
    """The decoder was written without the held-out disguises.

    At the first trial, it decoded 53 of 55; the previous version decoded 32. Pig latin is also decoded now, because
    the letters of a word may be in another order.
    """
    assert not set(DEVELOPED) & set(HELD_OUT) and set(DEVELOPED) | set(HELD_OUT) == set(DISGUISES)
    assert len(NOT_DECODED & set(HELD_OUT)) == 1 and len(HELD_OUT) == 55


def try_all_decoders(monkeypatch):
    monkeypatch.setattr(disguises._Prefilter, "passes", lambda sketch, text: True)
    monkeypatch.setattr(disguises, "_has_doubled", lambda letters: True)
    monkeypatch.setattr(disguises, "_may_be_special", lambda text: True)


@pytest.mark.parametrize("name", sorted(DISGUISES))
def test_skipped_decoders_would_find_nothing(name, monkeypatch):
    """A decoder is skipped if the text has too few digits or dashes. The reference applies all decoders."""
    texts = [DISGUISES[name](BEFORE[:length]) for length in (4, 5, 6, 8, 12, 95)]
    found = [readable(text) for text in texts]
    try_all_decoders(monkeypatch)
    monkeypatch.setattr(disguises, "_digits", lambda text: 10**6)
    monkeypatch.setattr(disguises, "_BASE64_RUN", re.compile(r"[A-Za-z0-9+/_-]{4,}"))
    assert found == [readable(text) for text in texts]


@pytest.mark.parametrize(
    "signs", ["aab ", "01 a-", "0177 ,", "1a2B ", ".- /|x", "a b\n\t", "2Ab7", "7 12.-", "0xu+%41\\", "ſKa4 "]
)
def test_prefilter_skips_no_decoding_of_random_texts(signs, monkeypatch):
    rng = random.Random(signs)
    texts = ["".join(rng.choices(signs, k=rng.randrange(120))) for _ in range(60)]
    texts += [f"{text[:9]} {rng.choice(HOSTILE) * 14}{text[9:]}" for text in texts]
    found = [decodings(text) for text in texts]
    assert len({d.form for text in found for d in text}) > 3
    try_all_decoders(monkeypatch)
    assert found == [decodings(text) for text in texts]


def readable(text):
    return [d for d in decodings(text) if len(only_letters(d.text)) > 3]


HOSTILE = [
    *("\\", "<", "a", "aa", "<!--", "1-", "01", "A7", "ff", ". ", "%41", "%25", "&#65;", "\U000e0041", "a1", "=41"),
    *("[b", "1 ", "=4", "\\u", "&#", "\u0301", "a\u200b", "*a*", "Zm9v", "\ud800", "VkdobA== "),
    *("\u200b\u200c", "\u200b\u200c\u200d\u2060", "\U000e0141", "\U000e0166", "\ufe0f"),
]


@pytest.mark.parametrize("unit", HOSTILE)
def test_decodings_grow_linearly(unit):
    """Each decoder scans the text once, so the size of the output measures the work."""
    sizes = [sum(len(d.text) for d in decodings(unit * (size // len(unit)))) for size in (4_000, 32_000)]
    assert sizes[0] <= MAX_GROWTH * 4_000
    rounding = 8_000  # each decoder omits an incomplete group, a larger share of the smaller text
    assert sizes[1] <= MAX_GROWTH * 32_000 and sizes[1] <= 8 * sizes[0] + rounding


@pytest.mark.slow
@pytest.mark.parametrize("unit", HOSTILE)
def test_a_million_characters_are_decoded(unit):
    found = decodings(unit * (10**6 // len(unit)))
    assert sum(len(d.text) for d in found) <= MAX_GROWTH * 10**6


def test_visible_text_resolves_encodings_and_markup():
    assert visible_text("\U000e0068\U000e0069 \uff28\uff29 \u24d7\u24d8 h\u200bi &#104;i") == "hi HI hi hi hi"
    assert fold_text("Call [b]NOW[/b] or <i>n</i>ever; 5 mg of B12") == "call now or never; 5 mg of b12"
    assert visible_text("%2568%2569") == "hi"


def test_plain_form_is_first_for_ordinary_text():
    found = decodings(BEFORE)
    assert found[0] == ("plain", BEFORE.lower())
    assert {d.form for d in found} <= {"plain", "swapped", "initials", "base64", "codes", "leet"}


@pytest.mark.parametrize("k", range(26))
def test_alphabet_differences_do_not_depend_on_the_rotation(k):
    rotated = "".join(chr(97 + (ord(c) - 97 + k) % 26) for c in "northbridge")
    assert alphabet_differences(rotated) == alphabet_differences("northbridge")


def test_three_separate_words_of_a_token_are_found_and_two_are_not():
    detector, (a, b, c) = WatermarkDetector(TOKENS), TOKENS[0].split()
    assert detector.best_match(DecodedText(f"{c}{BEFORE}{a}{AFTER}{b}")).token == TOKENS[0]
    assert detector.best_match(DecodedText(f"{BEFORE}{a}{AFTER}{b}")) is None
