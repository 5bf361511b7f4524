"""Questions about persons under ``quorum``, by letter case and form of the name: answers that depend on one document.

Two synthetic collections: 300 pages of a staff handbook, and 300 support tickets, one document a person. Persons share
first names and surnames, common and rare ones. ``PERSONS`` of them are asked about, with the default options, with the
person's document and without it. An answer *depends* on the document if both answers differ. Baseline in the same run:
the same without the rule on names whose letter case does not mark them (``AskedQuestion.lacks_name_part``).

``python -m benchmarks.quorum_names``; the texts are in ``quorum_names.yaml``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml

from benchmarks import ROOT, SEED, save
from benchmarks.kept import Kept
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.quorum.keywords import AskedQuestion
from casemate.maths.stats import clopper_pearson
from casemate.types import Document, Hit, Query, Retrieval, SimilarityStats, Vector

SIZE, PERSONS, QUESTIONS, HITS = 300, 100, 4, 140
"""Documents; persons asked about; questions about each and form of the name; most hits of a search."""
COMMON, OFTEN = 0.5, 30
"""Share of persons whose first name is one of the first six, and of other persons in a document who are one of the
first ``OFTEN``: these persons are in several documents."""
TEXTS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SECRET = "secret of the benchmark of names"
FORMS: Mapping[str, str] = {
    "name": "{f} {l}",
    "surname first": "{l}, {f}",
    "initial": "{f} K. {l}",
    "title": "Dr {f} {l}",
}
CASES: Mapping[str, Callable[[str], str]] = {
    "as written": str,
    "lower case": str.lower,
    "title case": lambda text: " ".join(word[:1].upper() + word[1:] for word in text.split(" ")),
    "capitals": str.upper,
}
Asked = tuple[str, str, str]
"""Source of the person's document, form of the name, question."""


def main() -> None:
    """Measures both collections and writes the figures."""
    embedder, results = Kept(ROOT / "build/quorum_names.npz"), {}
    for name in ("handbook", "tickets"):
        rng = np.random.default_rng(SEED)
        documents, persons = _collection(TEXTS[name]["statements"], rng)
        asked = list(_questions(TEXTS[name]["questions"], persons, rng))
        results[name] = _measured(documents, asked, embedder)
        embedder.save()
    save("quorum_names", {"documents": SIZE, "persons": PERSONS, "collections": results})


def _collection(statements: list[list[str]], rng: np.random.Generator) -> tuple[list[Document], list[tuple[str, str]]]:
    """The documents, each with the source ``person/NUMBER``, and the persons in this order."""
    first, last = TEXTS["first_names"].split(), TEXTS["surnames"].split()
    persons = dict[tuple[str, str], None]()
    while len(persons) < SIZE:
        some = first[:6] if rng.random() < COMMON else first
        persons[str(rng.choice(some)), str(rng.choice(last))] = None
    documents = []
    for number, (given, family) in enumerate(persons):
        values = {name: str(rng.integers(low, high)) for name, (low, high) in TEXTS["numbers"].items()}
        values |= {name: str(rng.choice(words)) for name, words in TEXTS["words"].items()}
        values["o"] = " ".join(list(persons)[int(rng.integers(OFTEN if rng.random() < COMMON else SIZE))])
        said = [str(rng.choice(some)).format(n=f"{given} {family}", f=given, l=family, **values) for some in statements]
        text = " ".join(said[i] for i in rng.permutation(len(said)))
        title = str(rng.choice([f"{given} {family}", "", "Record"]))
        documents.append(Document(f"person/{number}", text, title, source=f"person/{number}"))
    return documents, list(persons)


def _questions(forms: list[str], persons: list[tuple[str, str]], rng: np.random.Generator) -> Iterator[Asked]:
    for number in rng.permutation(len(persons))[:PERSONS]:
        given, family = persons[int(number)]
        for form, written in FORMS.items():
            for question in rng.permutation(forms)[:QUESTIONS]:
                yield f"person/{number}", form, str(question).format(n=written.format(f=given, l=family))


def _measured(documents: list[Document], asked: list[Asked], embedder: Kept) -> dict[str, Any]:
    vectors = embedder.embed([document.content for document in documents])
    defense, counts = Quorum(secret=SECRET), Counter[tuple[str, str, str]]()
    for (source, form, question), vector in zip(asked, embedder.embed([q for _, _, q in asked]), strict=True):
        worlds = [_found(documents, vectors @ vector, without) for without in ("", source)]
        for case, change in CASES.items():
            text = change(question)
            counts["of", form, case] += 1
            counts["depend", form, case] += _depends(defense, text, worlds)
            with mock.patch.object(AskedQuestion, "lacks_name_part", return_value=False):
                counts["without the rule", form, case] += _depends(defense, text, worlds)
    return {f"{form}, {case}": _rates(counts, form, case) for form in FORMS for case in CASES}


def _found(documents: list[Document], cosines: Vector, without: str) -> tuple[Hit, ...]:
    """The hits of a search in the collection without one source."""
    order = [int(i) for i in np.argsort(-cosines, kind="stable") if documents[int(i)].source != without]
    return tuple(Hit(documents[i], float(cosines[i])) for i in order[:HITS])


def _depends(defense: Quorum, text: str, worlds: list[tuple[Hit, ...]]) -> bool:
    answers = set()
    for hits in worlds:
        unreadable = frozenset(hit.document.id for hit in hits)
        found = Retrieval(hits, SimilarityStats(SIZE, 0.0, 0.1), True, unreadable)
        answers.add(asyncio.run(defense.on_retrieve(Query(text), found)).value.hits[0].document.text)
    return len(answers) > 1


def _rates(counts: Mapping[tuple[str, str, str], int], form: str, case: str) -> dict[str, Any]:
    n = counts["of", form, case]
    shares = {key: counts[key, form, case] for key in ("depend", "without the rule")}
    return {key: [count, n, *clopper_pearson(count, n)] for key, count in shares.items()}


if __name__ == "__main__":
    main()
