"""What a crawler asks for next: noun phrases of what it was told, words to begin with, and how alike they are.

For the attacks that carry a collection away. An anchor is a short phrase that stands for a place in the collection: a
question that holds it finds the documents that lie there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence

import numpy as np

from casemate.errors import CapabilityError
from casemate.protocols import Embedder, Generator, Progress
from casemate.types import Document, Prompt, Vector
from casemate.words import WORD, clauses, content_words, names, terms

GENERAL = tuple(
    """accident address agreement animal answer appointment art bank book bridge building business car chemistry child
    city company computer contract customer date delivery distance education electricity email energy engine family
    food game government health history hotel house insurance invoice job language law library machine mathematics
    medicine meeting member money movie music nature office order patient people phone plant police price problem
    product project question religion report research result salary school science server software space sport system
    teacher team test time town trade travel treatment university water weather week work""".split()
)
"""Words to begin with when nothing is known of the subject."""
LONGEST = 60
"""Characters of an anchor; what is longer is no phrase."""
EMPTY = frozenset(
    """
    able absolutely according across actual additional along among anyone anything anyway appropriate around ask asks
    available avoid avoids aware basic became become becomes began begin begins behind beside besides best better
    beyond big bit bought bring brings brought buy buys came cause causes certain clear close come comes common
    complete consist consists contain contains correct cure cures current dear definite despite different difficult
    dont easy either else enough especially etc even everyone everything exact except extra feel feels fell felt find
    finds fine fixes following found free full further gave general get gets give given gives glad goes gone good
    great happy hard heal heals held hello help helps here hereby hi hold holds hope hopes huge important include
    includes including inside instead interest keep keeps kept kind knew know knows large last late later lead leads
    leaves led less likely little look lot lots lower lowers made main major make makes maybe met minor near need
    needs new next nice nobody normal nothing ok okay old one others outside particular perhaps please poor possible
    prevent prevents produce produces proper quite ran rather ready real recent reduce reduces regard regarding
    regards relieve relieves remember require requires right rise rises rose run runs said same saw say says second
    see seem seems seen sees send sends sent several severe show shown shows simple slight small solve solves someone
    something sometimes soon sorry sort specific stand stands start stood stop strong suggest suggesting suggests
    suitable sure take takes tell tells thank thanks thereby thereof thing things think thinks thought three told took
    total treat treats tries trigger triggers try two unable underlying unless usual various want wants way ways
    welcome well went whatever whenever whole wish wont worse worst would write writes written wrong wrote yes
    """.split()
)
"""Words that name nothing, and verbs that have no verb's ending and hardly ever name a thing."""
LABEL = re.compile(r"[A-Z]\w*:")
"""What stands before a colon names what follows it: "Doctor:" is no part of that."""
SPREAD = 8
"""Dimensions that a stem takes in a vector of stems: hardly ever do two take the same."""
ITEM = re.compile(r"^[\s\-*•]*(?:\d+[.):]\s*)?")


def phrases(text: str) -> list[str]:
    """The noun phrases of a text by rules, in order of reading, each once in whatever form.

    >>> phrases("The tolls of the north bridge rose in May, and Ottilie Brandt doubted that a toll is fair.")
    ['tolls', 'north bridge', 'Ottilie Brandt', 'fair']
    """
    known = names(text)
    found: dict[frozenset[str], str] = {}
    for clause in clauses(text):
        for phrase in spoken(clause, known):
            found.setdefault(content_words(phrase), phrase)
    return list(found.values())


def spoken(clause: str, known: Collection[str] = ()) -> list[str]:
    """The noun phrases of one clause, as it has them; names that are known keep their capital at its beginning."""
    masked = LABEL.sub(_blank, WORD.sub(lambda match: _blank(match) if _empty(match[0]) else match[0], clause))
    return [phrase for phrase in terms(masked, known) if len(phrase) <= LONGEST and content_words(phrase)]


def _blank(match: re.Match[str]) -> str:
    return ";" * len(match[0])


def _empty(word: str) -> bool:
    plain = word.lower().replace("’", "'")
    return plain in EMPTY or plain.endswith("n't") or plain.startswith("i'") or plain in {"it's", "that's"}


def required(embedder: Embedder | None, attack: str) -> Embedder:
    """The attacker's embedder.

    Raises:
        CapabilityError: If there is none.
    """
    if embedder is None:
        raise CapabilityError(f"{attack} compares texts by their vectors, so it needs an embedder of its own; name one")
    return embedder


async def lines(writer: Generator, request: str, text: str = "") -> list[str]:
    """What the attacker's language model writes, line by line, without numbers and bullets.

    Args:
        writer: The model.
        request: What it is to write.
        text: What it is to read for that, if anything.
    """
    context = (Document("reply", text),) if text else ()
    written = "".join([piece async for piece in writer.stream(Prompt(request, context, ""))])
    return [line for raw in written.splitlines() if (line := ITEM.sub("", raw).strip(" \"'`"))]


async def named(writer: Generator, request: str, count: int, text: str = "") -> list[str]:
    """The first phrases of those that the attacker's language model writes, each once; longer lines are no phrases."""
    written = (line.rstrip(".,;:") for line in await lines(writer, request, text))
    return list(dict.fromkeys(line for line in written if line and len(line) <= LONGEST))[:count]


class Memory:
    """Texts with their vectors, each text once, in the order of coming.

    Args:
        embedder: Makes the vectors. It is asked once for each text, for many at a time.
    """

    def __init__(self, embedder: Embedder) -> None:
        self.texts: list[str] = []
        self.embedder = embedder
        self._places: dict[str, int] = {}
        self._rows: Vector = np.empty((64, embedder.dim), np.float32)

    def __len__(self) -> int:
        return len(self.texts)

    def __contains__(self, text: str) -> bool:
        return text in self._places

    @property
    def vectors(self) -> Vector:
        """(n, dim), a view: valid until the next text comes."""
        return self._rows[: len(self.texts)]

    def embed(self, texts: Sequence[str]) -> Vector:
        """Vectors of some texts, (m, dim), without keeping those that are new."""
        new = list(dict.fromkeys(text for text in texts if text not in self._places))
        made = dict(zip(new, self.embedder.embed(new), strict=True)) if new else {}
        found = [made[text] if text in made else self._rows[self._places[text]] for text in texts]
        return np.stack(found) if found else np.empty((0, self.embedder.dim), np.float32)

    def add(self, text: str, vector: Vector | None = None) -> int:
        """Keeps a text; returns its place. Its vector is made if it is not given."""
        if text in self._places:
            return self._places[text]
        row = self.embedder.embed([text])[0] if vector is None else vector
        place = self._places[text] = len(self.texts)
        if place == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[place] = row
        self.texts.append(text)
        return place

    def closest(self, vector: Vector) -> tuple[int, float]:
        """Place of the text most alike, and its cosine; (-1, -1.0) if there is none."""
        if not self.texts:
            return -1, -1.0
        s = self.vectors @ vector
        place = int(s.argmax())
        return place, float(s[place])

    def admit(self, texts: Sequence[str], limit: float, vectors: Vector | None = None) -> list[int]:
        """Keeps, in order, those texts that no text kept is like, by a cosine of ``limit`` or more.

        Args:
            texts: What asks to be let in.
            limit: In (0, 1].
            vectors: Theirs, (m, dim), if they are at hand.

        Returns:
            Places of the texts that were let in.
        """
        rows = self.embed(texts) if vectors is None else vectors
        before = (rows @ self.vectors.T).max(axis=1, initial=-1.0)  # (m,)
        chosen: dict[str, int] = {}
        for i, text in enumerate(texts):
            beside = (rows[list(chosen.values())] @ rows[i]).max(initial=-1.0)
            if text not in self._places and text not in chosen and max(before[i], beside) < limit:
                chosen[text] = i
        return [self.add(text, rows[i]) for text, i in chosen.items()]


class Stems:
    """An embedder without a model: each stem has a direction of its own, so texts are alike by their words alone."""

    fingerprint = "stems"
    dim = 1024
    max_tokens = 10_000

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """See ``Embedder``. A text without words that carry meaning is like none but such."""
        rows = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for stem in content_words(text) or {""}:
                digest = hashlib.blake2b(stem.encode("utf-8", "surrogatepass"), digest_size=2 * SPREAD).digest()
                codes = np.frombuffer(digest, "<u2").astype(np.int64)
                np.add.at(row, codes % self.dim, np.where(codes >> 15, 1, -1))
            if not row.any():
                row[0] = 1  # stems that cancel one another
        if progress is not None:
            progress(len(texts))
        unit: Vector = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Start and end of each word."""
        return [match.span() for match in WORD.finditer(text)]
