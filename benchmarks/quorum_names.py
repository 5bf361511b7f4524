"""Questions about persons, codes and addresses under ``quorum``: answers that depend on one document.

Nine synthetic collections: tickets of a bank, personnel notes in four languages, a wiki of suppliers, rows of a table,
pages of a handbook, support tickets. Each document is about one person. Persons share first names and surnames, common
and rare ones, some of which are ordinary words. Some persons are asked about, with the default options, with the
person's document and without it. An answer *depends* on the document if both answers differ. Baseline in the same run:
the same without the rule (``Subject.is_missing``).

Utility: questions about facts that ``STATED`` documents state; answers that contain the value.

``python -m benchmarks.quorum_names``; the texts are in ``quorum_names.yaml``. With ``design``, it uses the names with
which the rule was designed.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import yaml

from benchmarks import ROOT, SEED, save
from benchmarks.kept import Kept
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.quorum.subjects import Subject
from casemate.maths.stats import clopper_pearson
from casemate.types import Document, Hit, Query, Retrieval, Secret, SimilarityStats, Vector

SIZE, PERSONS, QUESTIONS, HITS = 250, 16, 2, 140
"""Documents; persons asked about; questions about each; most hits of a search."""
COMMON, OFTEN, FREQUENT, STATED = 0.5, 30, 5, 7
"""Share of persons with one of the first ``FREQUENT`` first names, and of other persons in a document who are one of
the first ``OFTEN``: these persons are in several documents. Documents that state a fact."""
TEXTS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
Change = Callable[[str], str]


def _title(text: str) -> str:
    return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))


def _dashes_as(separator: str) -> Change:
    return lambda text: text.replace("-", separator)


NAMES: Mapping[str, tuple[str, Change]] = {
    "as written": ("{f} {l}", str),
    "lower case": ("{f} {l}", str.lower),
    "title case": ("{f} {l}", _title),
    "capitals": ("{f} {l}", str.upper),
    "surname first": ("{l}, {f}", str),
    "surname first, lower case": ("{l}, {f}", str.lower),
    "initial, lower case": ("{f} k. {l}", str.lower),
    "title, lower case": ("dr {f} {l}", str.lower),
    "beside a capital": ("{f} {l}", lambda text: text.lower().rstrip(" ?") + " on Monday?"),
    **{f"joined by {s!a}": (f"{{l}}{s}{{f}}", str.lower) for s in ("/", ": ", ";", "_", ".", "\u200b")},
    "in brackets": ("{l} ({f})", str.lower),
    "first name alone": ("{f}", str.lower),
    "surname alone": ("{l}", str.lower),
}
"""How a question writes a name."""
CODES: Mapping[str, Change] = {
    "as written": str,
    "lower case": str.lower,
    **{f"{s!a} for dashes": _dashes_as(s) for s in (" ", ".", "/", "_", "")},
    "spaces, lower case": lambda text: text.replace("-", " ").lower(),
}
ADDRESSES: Mapping[str, Change] = {
    "as written": str,
    "capitals": str.upper,
    "spaces": lambda text: text.replace(".", " ").replace("@", " @ "),
    "underscore": lambda text: text.replace(".", "_", 1),
    "at": lambda text: text.replace("@", " at "),
}


class Asked(NamedTuple):
    """A question as embedded, its spellings, and the document that it is about."""

    source: str
    text: str
    spellings: dict[str, str]


class Collection(NamedTuple):
    """Documents, each with the source ``person/NUMBER``, with its person and values in this order."""

    documents: list[Document]
    persons: list[tuple[str, str]]
    values: list[dict[str, str]]


def main() -> None:
    """Measures all collections and writes the figures."""
    design = "design" in sys.argv[1:]
    embedder, results = Kept(ROOT / f"build/quorum_names{'_design' * design}.npz"), {}
    for name, texts in TEXTS["collections"].items():
        rng = np.random.default_rng(SEED)
        made = _collection(texts, 0 if design else 1, rng)
        vectors = embedder.embed([document.content for document in made.documents])
        results[name] = _measured(made.documents, vectors, [*_asked(texts, made, rng)], embedder)
        results[name]["facts"] = _facts(TEXTS["facts"][texts["group"]], made.documents, vectors, embedder)
        embedder.save()
        print(name, results[name]["facts"], file=sys.stderr, flush=True)
    save(f"quorum_names{'_design' * design}", {"persons": PERSONS, "collections": results})


def _collection(texts: Mapping[str, Any], half: int, rng: np.random.Generator) -> Collection:
    group = TEXTS["groups"][texts["group"]]
    first = group["first"].split()[half::2]
    last = [name.strip() for name in group["last"].split("|")][half::2]
    drawn = dict[tuple[str, str], None]()
    while len(drawn) < min(SIZE, int(0.9 * len(first) * len(last))):
        some = first[:FREQUENT] if rng.random() < COMMON else first
        drawn[str(rng.choice(some)), str(rng.choice(last))] = None
    made = Collection([], [*drawn], [])
    facts = TEXTS["facts"][texts["group"]]
    stated = [rng.choice(len(drawn), STATED, replace=False) for _ in facts]
    for number, person in enumerate(drawn):
        made.values.append(_values(person, made.persons, group["words"], rng))
        fields = {"n": " ".join(person), "f": person[0], "l": person[1], **made.values[-1]}
        said = [str(rng.choice(some)).format(**fields) for some in texts["statements"]]
        said += [str(rng.choice(f[2])).format(v=f[1]) for f, at in zip(facts, stated, strict=True) if number in at]
        order = range(len(said)) if "separator" in texts else rng.permutation(len(said))
        text = texts.get("separator", "\n" if said[0].startswith("-") else " ").join(said[i] for i in order)
        title = "" if "separator" in texts else str(rng.choice([fields["n"], "", "Record"]))
        made.documents.append(Document(f"person/{number}", text, title, source=f"person/{number}"))
    return made


def _values(
    person: tuple[str, str], persons: list[tuple[str, str]], words: Mapping[str, list[str]], rng: np.random.Generator
) -> dict[str, str]:
    values = {name: str(rng.integers(low, high)) for name, (low, high) in TEXTS["numbers"].items()}
    values |= {name: str(rng.choice(some)) for name, some in words.items()}
    for name, (start, *lengths) in TEXTS["codes"].items():
        values[name] = "-".join([start, *("".join(map(str, rng.integers(10, size=n))) for n in lengths)])
    first, last = (part.split()[-1].lower().replace("'", "") for part in person)
    values["mail"] = f"{rng.choice([first, first[0]])}.{last}@postly.example"
    values["o"] = " ".join(persons[int(rng.integers(OFTEN if rng.random() < COMMON else len(persons)))])
    return values


def _asked(texts: Mapping[str, Any], made: Collection, rng: np.random.Generator) -> Iterator[Asked]:
    for number in map(int, rng.permutation(len(made.persons))[:PERSONS]):
        fields, source = dict(zip("fl", made.persons[number], strict=True)), f"person/{number}"
        for question in map(str, rng.permutation(texts["questions"])[:QUESTIONS]):
            spellings = {k: change(question.format(n=form.format(**fields))) for k, (form, change) in NAMES.items()}
            yield Asked(source, spellings["as written"], {f"name, {key}": text for key, text in spellings.items()})
        for kind, some in texts.get("about", {}).items():
            question, value = str(rng.choice(some)), made.values[number][kind]
            changes = ADDRESSES if kind == "mail" else CODES
            spelled = {f"{kind}, {key}": question.format(x=change(value)) for key, change in changes.items()}
            yield Asked(source, question.format(x=value), spelled)


def _measured(documents: list[Document], vectors: Vector, asked: list[Asked], embedder: Kept) -> dict[str, Any]:
    counts = Counter[tuple[str, str]]()
    for question, vector in zip(asked, embedder.embed([q.text for q in asked]), strict=True):
        worlds = [_found(documents, vectors @ vector, without) for without in ("", question.source)]
        for key, text in question.spellings.items():
            counts[key, "of"] += 1
            counts[key, "depend"] += _depends(text, worlds)
            with mock.patch.object(Subject, Subject.is_missing.__name__, return_value=False):
                counts[key, "without the rule"] += _depends(text, worlds)
    return {key: _rates(counts, key) for key, kind in list(counts) if kind == "of"}


def _facts(facts: list[Any], documents: list[Document], vectors: Vector, embedder: Kept) -> dict[str, int]:
    """The number of facts, and of right answers to questions as written and in lower case."""
    right = Counter[str]({"of": len(facts), "as written": 0, "lower case": 0})
    for (question, value, _), vector in zip(facts, embedder.embed([f[0] for f in facts]) if facts else (), strict=True):
        hits = _found(documents, vectors @ vector, "")
        for key, text in (("as written", question), ("lower case", question.lower())):
            right[key] += value.lower() in _answer(text, hits).lower()
    return dict(right)


def _found(documents: list[Document], cosines: Vector, without: str) -> tuple[Hit, ...]:
    """The hits of a search in the collection without one source."""
    order = [int(i) for i in np.argsort(-cosines, kind="stable") if documents[int(i)].source != without]
    return tuple(Hit(documents[i], float(cosines[i])) for i in order[:HITS])


def _depends(text: str, worlds: list[tuple[Hit, ...]]) -> bool:
    return len({_answer(text, hits) for hits in worlds}) > 1


def _answer(text: str, hits: tuple[Hit, ...]) -> str:
    found = Retrieval(hits, SimilarityStats(SIZE, 0.0, 0.1), True, frozenset(hit.document.id for hit in hits))
    return asyncio.run(QUORUM.on_retrieve(Query(text), found)).value.hits[0].document.text


def _rates(counts: Mapping[tuple[str, str], int], key: str) -> dict[str, Any]:
    n = counts[key, "of"]
    return {kind: [counts[key, kind], n, *clopper_pearson(counts[key, kind], n)] for kind in _KINDS}


QUORUM = Quorum(secret=Secret("secret of the benchmark of names"))
_KINDS = ("depend", "without the rule")

if __name__ == "__main__":
    main()
