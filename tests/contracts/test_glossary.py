"""The glossary lists each term once, in alphabetical order, with existing modules."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \| (.+?) \|$", (ROOT / "docs/glossary.md").read_text(), re.M)
NEEDED = """baseline benign calibration canary candidate cascade channel chunk client conformal context coverage
CRR CUSUM document drift e-value event extraction hit honeytoken index leader lease member moments
near-duplicate notification offset operator outbox query quarantine quota rate reader reply score
significance simulated similarity source synthetic tenant threshold token two-world unit verdict
watermark withheld""".split()


def order(term):
    return re.sub(r"[^a-z0-9]+", " ", term.lower()).strip()


def test_terms_are_unique_and_in_order():
    terms = [order(term) for term, _, _ in ROWS]
    assert terms == sorted(set(terms))


def test_the_glossary_has_the_standard_terms():
    terms = " ".join(term for term, _, _ in ROWS)
    assert not [word for word in NEEDED if word.lower() not in terms.lower()]


def test_the_modules_exist():
    named = {path for _, _, where in ROWS for path in re.findall(r"`([\w/]+(?:\.py|/))`", where)}
    assert len(named) > 40
    assert not [path for path in named if not any((base / path).exists() for base in (ROOT / "src/casemate", ROOT))]


def test_definitions_are_short():
    for term, meaning, _ in ROWS:
        for sentence in re.split(r"(?<=[.:;])\s", meaning):
            assert len(sentence.split()) <= 25, term
