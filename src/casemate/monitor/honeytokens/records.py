"""Texts of honeytoken records, and where in the embedding space of a corpus they are placed.

Each record describes something that does not exist, under three made-up words that occur nowhere else. Even-numbered
records use the terms of a neighborhood of the corpus: a crawler that explores neighborhoods retrieves them, while
ordinary questions retrieve better documents. Odd-numbered records are about copying texts, so commands to repeat the
context retrieve them. Each names the next record by one of its words, so a crawler that follows references finds one
after another (the idea of Wang et al. 2026, "MemPot", PMLR v306, METHODS C10).

Deviation: MemPot optimizes trap texts in two stages. Here several drafts per location are written, and the one farthest
from benign questions is used; a draft that too many of them would retrieve is rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

import numpy as np

from casemate.monitor.canaries.coverage import sample_documents
from casemate.protocols import Index
from casemate.text.function_words import function_words, languages_of
from casemate.text.sentences import proper_nouns
from casemate.text.tokens import STOP_WORDS, keywords, stem, words
from casemate.text.unspaced import clusters, is_spaceless
from casemate.types import Document, Vector

Style: TypeAlias = Literal["article", "abstract", "note"]
MAX_SAMPLE = 2000
"""Documents of the corpus among which neighborhoods are searched."""
NEIGHBORS = 8
"""Documents of a neighborhood."""
DRAFTS = 9
"""Drafts per location."""
LINK = " See also {0}."
MIN_ENGLISH = 0.15
"""Smallest share of function words in English prose. It is .3 to .4; in lists, code and other languages at most .05."""

TEXTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "article": (
        (
            "{0} survey",
            "The {0} survey listed {1}, {2} and {3} for every parish between {5} and {6}. Its keepers wrote of {1} in "
            "one column and of {4} in another. Of {7} sheets, {8} are left. Where {2} and {3} are named together, the "
            "{0} survey gives the year {6}.",
        ),
        (
            "Society of {0}",
            "The society of {0} was founded in {5} to collect what was known of {1} and {2}. It met {8} times and "
            "printed {7} pages on {3}. Its last list, of {6}, sets {4} beside {1}. Nothing of the society of {0} is "
            "shown to the public.",
        ),
        (
            "{0} collection",
            "{1}, {2} and {4} fill the {0} collection, which was begun in {5}. {8} of its {7} boxes are about {3}. "
            "The collection was closed in {6}, and the name {0} was given up.",
        ),
    ),
    "abstract": (
        (
            "{1} and {2}: the {0} study",
            "The {0} study followed {7} people for {8} years to see how {1} goes with {2}. {3} was noted at each "
            "visit, and {4} at the last. Between {5} and {6} no difference was seen. The {0} study was not repeated.",
        ),
        (
            "{0} register of {3}",
            "We describe the {0} register, which has taken in {7} cases of {3} since {5}. {1} and {2} are coded in "
            "{8} classes, {4} in free text. By {6} all cases were reviewed. The {0} register is open to its members.",
        ),
        (
            "The {0} score",
            "The {0} score sums {8} items on {1}, {2} and {3}. In {7} samples taken from {5} to {6} it did not depend "
            "on {4}. We advise against the use of the {0} score outside its sites.",
        ),
    ),
    "note": (
        (
            "Project {0}",
            "Project {0} ran from {5} to {6} with a budget of {7} thousand. It looked at {1} and {2}, and {8} people "
            "worked on {3}. What was written about {4} is kept under {0}. The project is closed.",
        ),
        (
            "Minutes: {0}",
            "The {0} group met {8} times in {6}. It agreed to review {1} and {3} together, to leave {2} as it was in "
            "{5}, and to hand {4} over. {7} items are open. Questions about {0} go to the chair.",
        ),
        (
            "Code {0}",
            "Orders under the code {0} cover {1}, {2} and {4}. They were placed between {5} and {6}, {7} in all, of "
            "which {8} concern {3}. The code {0} is no longer given out.",
        ),
    ),
}
"""Title and text by style. {0} is the unique name, {1} to {4} terms of the neighborhood, {5} and {6} years, {7} and
{8} numbers."""
BAITS: tuple[tuple[str, str], ...] = (
    (
        "Rule {0} on copies",
        "Rule {0} of {5} was about the copying of texts: in which order all documents were written out again, that the "
        "whole context was repeated in full and word for word, and that each passage above was listed. {7} files on "
        "{1} and {2} fell under rule {0}. It was given up in {6}.",
    ),
    (
        "{0}: a complete transcript",
        "The {0} transcript holds everything that was said before it, every text verbatim, all passages and all "
        "previous documents from beginning to end, without a summary. It was made in {5}, on {7} pages, {8} of them "
        "on {3}. Of the {0} transcript no second copy is known.",
    ),
    (
        "The {0} printout",
        "On the {0} printout all the content of the database was put out as one list: documents, instructions, "
        "excerpts and their sources, unchanged and in the original wording. Its {7} sheets begin with {1} and end with "
        "{4}. The {0} printout is of {5}.",
    ),
)
"""Title and text of the records that commands to repeat the context retrieve."""


@dataclass(frozen=True, slots=True)
class CorpusSample:
    """A random sample of a corpus: documents and their embeddings, (n, dim)."""

    documents: tuple[Document, ...]
    vectors: Vector

    @classmethod
    def of(cls, index: Index, tenant: str, rng: np.random.Generator, without: Collection[str] = ()) -> CorpusSample:
        """At most ``MAX_SAMPLE`` documents of a tenant, drawn uniformly, except those of some sources."""
        documents, vectors = sample_documents(index, tenant, rng, MAX_SAMPLE)
        kept = [i for i, d in enumerate(documents) if d.source not in without]
        return cls(tuple(documents[i] for i in kept), vectors[kept])

    def locations(self, count: int, rng: np.random.Generator) -> list[int]:
        """Indices of documents in dense regions, as far apart as possible.

        Dense is the half with the nearest neighbors. The first is drawn; each further one is the farthest from all
        before (Gonzalez 1985). If there are too few, they are repeated.
        """
        similar = self.vectors @ self.vectors.T  # (n, n)
        near = (
            -np.sort(-similar, axis=1)[:, 1 : NEIGHBORS + 1].mean(axis=1) if len(similar) > 1 else np.ones(len(similar))
        )
        dense = np.flatnonzero(near >= np.median(near))
        chosen = [int(rng.choice(dense))]
        while len(chosen) < min(count, len(dense)):
            chosen.append(int(dense[similar[dense][:, chosen].max(axis=1).argmin()]))
        return [chosen[i % len(chosen)] for i in range(count)]

    def terms(self, location: int) -> list[str]:
        """Keywords of the documents around a location, most frequent first."""
        around = np.argsort(-(self.vectors @ self.vectors[location]), kind="stable")[: NEIGHBORS + 1]
        spread: Counter[str] = Counter()
        spelling: dict[str, str] = {}
        for i in around.tolist():
            for term in _terms(self.documents[i].content):
                base = stem(term.lower())
                spread[base] += 1
                spelling[base] = term if term.islower() else spelling.get(base, term)
        found = [spelling[base] for base, _ in spread.most_common(24)]
        return found or [w for w in words(self.documents[location].content) if w not in STOP_WORDS] or ["this"]

    @property
    def english(self) -> bool:
        """Whether the documents are mostly English prose, as the records are."""
        found = [word for document in self.documents for word in words(document.content)]
        return sum(word in STOP_WORDS for word in found) >= MIN_ENGLISH * len(found)


def _terms(text: str) -> Iterator[str]:
    """Keywords of four letters or more, names and German nouns capitalized; no function words of the text's language.

    In scripts without spaces: the two to eight letters between function words and numbers.
    """
    names, skipped = frozenset(proper_nouns(text)), function_words(languages_of(text))
    for word in keywords(text):
        if is_spaceless(word):
            parts = groupby(clusters(word), lambda c: c.function or c.text[:1].isdigit())
            runs = ("".join(c.text for c in part) for ends, part in parts if not ends)
            yield from (run for run in runs if 2 <= len(run) <= 8)
        elif len(word) > 3 and word.lower() not in skipped:
            yield word if word in names else word.lower()


def draft_records(
    mark: str, following: str, terms: Sequence[str], texts: Sequence[tuple[str, str]], rng: np.random.Generator
) -> list[tuple[str, str]]:
    """Titles and texts of fictitious records, in the terms of a neighborhood, at least one.

    ``mark`` are the three words of the unique name, ``following`` those of the record that it refers to. The templates
    are those of ``TEXTS`` or ``BAITS``.
    """
    link, found = LINK.format(following.split(maxsplit=1)[0].title()), []
    for i in range(DRAFTS):
        title, text = texts[i % len(texts)]
        drawn = [str(t) for t in rng.choice(terms, 4, replace=len(terms) < 4)]
        first = int(rng.integers(1930, 1990))
        years = (first, first + int(rng.integers(3, 30)))
        slots = (mark.title(), *drawn, *years, int(rng.integers(11, 900)), int(rng.integers(3, 99)))
        found.append((_capitalize(title.format(*slots)), _capitalize(text.format(*slots)) + link))
    return found


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
