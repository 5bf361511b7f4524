import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest

from casemate.demo import clinic

NOTES = clinic.case_notes()
PAGES = sorted(clinic.PAGES.glob("*.md"))


def shingles(text: str, width: int = 8) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[at : at + width]) for at in range(len(words) - width + 1)}


def overlaps(texts: list[str]) -> dict[tuple[int, int], float]:
    """Returns the Jaccard similarity of each pair with a common 8-gram. An index from 8-gram to notes finds them."""
    sets = [shingles(text) for text in texts]
    holders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for at, grams in enumerate(sets):
        for gram in grams:
            holders[gram].append(at)
    shared: defaultdict[tuple[int, int], int] = defaultdict(int)
    for group in holders.values():
        for pair in combinations(group, 2):
            shared[pair] += 1
    return {(a, b): n / (len(sets[a]) + len(sets[b]) - n) for (a, b), n in shared.items()}


def test_same_seed_gives_the_same_notes() -> None:
    assert clinic.case_notes() == NOTES


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_notes_do_not_depend_on_the_hash_seed(hash_seed: str) -> None:
    script = "import json; from casemate.demo.clinic import case_notes; print(json.dumps(case_notes(60)))"
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)
    assert [tuple(note) for note in json.loads(done.stdout)] == NOTES[:60]


def test_another_seed_gives_other_notes() -> None:
    assert not {text for _, text in clinic.case_notes(seed=8)} & {text for _, text in NOTES}


def test_longer_list_starts_with_the_shorter_list() -> None:
    assert clinic.case_notes(30) == NOTES[:30]
    assert clinic.case_notes(0) == []


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_notes_are_complete_and_of_the_expected_length(seed: int) -> None:
    notes = clinic.case_notes(count=440, seed=seed)
    assert len(notes) == len({name for name, _ in notes}) == 440
    for name, text in notes:
        record = Path(name).stem
        assert name == f"notes/{record}.md"
        assert record in text
        assert 110 <= len(text.split()) <= 220
        assert not set("{}[]") & set(text), text
        assert ".." not in text


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (8, 9))])
def test_no_two_notes_are_near_duplicates(seed: int) -> None:
    found = overlaps([text for _, text in clinic.case_notes(seed=seed)])
    assert max(found.values()) <= 0.35
    assert sum(found.values()) / (400 * 399 / 2) < 0.005


def test_families_and_layouts_have_at_most_440_pairings() -> None:
    families, layouts = clinic._families(), clinic._layouts()
    assert len(families) >= 20
    assert len({family.dept for family in families}) >= 20
    assert len(layouts) >= 12
    assert all(len(items) == len(set(items)) for family in families for items in family.phrases.values())
    suiting = sum(layout.suits(family) for family in families for layout in layouts)
    assert suiting <= 440  # the default members and nonmembers use each pairing at least once


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_a_title_and_the_expected_length(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text.startswith("# ")
    assert text.endswith("\n")
    assert 120 <= len(text.split()) <= 350
    assert "\n# " not in text


def test_a_page_states_that_the_clinic_is_fictional() -> None:
    assert 20 <= len(PAGES) <= 30
    assert "made-up clinic" in (clinic.PAGES / "about-the-clinic.md").read_text("utf-8")


def test_questions_are_distinct() -> None:
    assert len(set(clinic.BENIGN_QUESTIONS)) == 24
    assert all(question.endswith("?") for question in clinic.BENIGN_QUESTIONS)


def test_written_files_are_the_members_and_pages(tmp_path: Path) -> None:
    for _ in range(2):  # the second write produces the same files
        clinic.write_corpus(tmp_path / "corpus", count=50)
        written = {
            path.relative_to(tmp_path / "corpus").as_posix(): path.read_bytes().decode("utf-8")
            for path in (tmp_path / "corpus").rglob("*.md")
        }
        pages = {f"policies/{page.name}": page.read_text("utf-8") for page in PAGES}
        assert written == pages | dict(NOTES[:50])
