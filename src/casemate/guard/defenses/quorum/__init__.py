"""Quorum: no single document decides what an unentitled client receives.

Each unit of independence (a source with its copies) states a few keywords about the question, alone, from its chunk
that is nearest to the question. A keyword is released if enough units state it. The answer is composed from the
question and the released keywords. The composing step never sees a text, so no prompt extracts what fewer units say.

Isolate-then-aggregate: Xiang et al. 2024, "Certifiably Robust RAG against Retrieval Corruption" (RobustRAG, arXiv
2405.15556), against poisoning. The release of what several units state: Koga et al. 2024, "Privacy-Preserving
Retrieval-Augmented Generation with Differential Privacy" (arXiv 2412.04697), for privacy, with noise.

Deviation: units are sources with copies and common authors, not passages. RobustRAG counts passages.
Deviation: the threshold is a number of units with a secret jitter, not a share of the answers. It does not depend on
how many units abstain.
Deviation: the answer is composed by rules. RobustRAG's model writes it from the keywords, and may add to them.
Deviation: noise and budgets only with the option ``epsilon`` (``privacy``). Otherwise the guarantee is a count.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from casemate.errors import ConfigError, require_range
from casemate.guard import generation_costs
from casemate.guard.audience import ReleasedDocument
from casemate.guard.defenses.quorum.isolated import IsolatedAnswers
from casemate.guard.defenses.quorum.keywords import (
    AskedQuestion,
    Item,
    excerpt,
    read_text,
    statements,
    unit_statements,
)
from casemate.guard.defenses.quorum.ledger import DAY_S, Ledger
from casemate.guard.defenses.quorum.privacy import PrivateHistogram
from casemate.guard.defenses.quorum.private_answers import PrivateAnswers
from casemate.guard.defenses.quorum.release import Composition, Release, Thresholds, compose
from casemate.guard.units import group_units, unit_names, whole
from casemate.protocols import Defense, EventStore, Generator
from casemate.types import UNKNOWN, Action, Document, Hit, Outcome, Prompt, Query, Retrieval, Secret, Verdict

NAME = "quorum"
SECRET_CHARACTERS = 16
CHUNKS_PER_SOURCE = 4
"""Chunks of one source, the nearest ones, that are compared with those of others to find copies."""
MAX_HITS = 1024
"""Hits after which no more are requested for further units. Bounds the time if one source has very many chunks."""
READ_SENTENCES = 3
"""Sentences of a unit that a writer reads, at most."""


@dataclass(eq=False)
class Quorum(Defense):
    """Replaces the sources that a client may not read in full by statements of at least ``support`` units.

    Acts on hits that the client may not read in full, by ``guard.audience`` or because its budget is used up
    (``crawl_limit``). Without such hits it changes nothing.

    Attributes:
        support: m: number of units that must state a keyword, at least 2.
        jitter: J: the threshold of each keyword is m plus 0 to J - 1, by a keyed hash; 1: none. With jitter, one
            question of a client that has all other documents reveals a unit less often; many questions still do.
        secret: Key of the jitter, at least 16 characters, the same in all gateways.
        period_days: Days after which the jitter is drawn again and budgets begin again, at least 1.
        units: N: largest number of units that contribute.
        words: L: largest number of keywords of one unit.
        sentences: Largest number of sentences that a unit contributes.
        floor: Least cosine similarity of a chunk to the question, in [-1, 1]. Chunks below it are ignored.
        unit_keys: Metadata keys that unite sources to one unit, such as ``author``. All sources without a value are
            one unit.
        writer: A generator that answers the question from each unit alone, all at once; none: its best sentences.
        writer_s: Seconds after which a unit whose answer the writer has not finished abstains, above 0. Set it below
            ``gateway.timeout_s``: otherwise one document on which the writer hangs prevents every answer. In a batch,
            it can make the other units exceed it, too.
        epsilon: Budget of differential privacy of a unit in one period, over all clients, above 0; none: no noise. Then
            ``support``, ``jitter``, ``secret`` and ``units`` have no effect: all units above the floor count, and the
            noise determines the result. Needs ``casemate[dp]``.
        delta: Probability that the bound of ``epsilon`` fails, in (0, 1).
        answers: T: number of answers with ``words`` keywords each that a unit's budget covers, at least 1. The noise
            grows with its square root.
        break_glass: B: number of answers that one unit may give alone in one period, over all clients; 0: none.
        store: The system's; receives the costs of isolated answers, and stores the budgets.
    """

    support: int = 3
    jitter: int = 3
    secret: Secret = field(default=Secret(""), repr=False)
    period_days: int = 30
    units: int = 24
    words: int = 8
    sentences: int = 2
    floor: float = 0.3
    unit_keys: tuple[str, ...] = ()
    writer: Generator | None = field(default=None, repr=False)
    writer_s: float = 100.0
    epsilon: float | None = None
    delta: float = 1e-5
    answers: int = 1
    break_glass: int = 0
    store: EventStore | None = field(default=None, repr=False)

    paper: ClassVar[str] = "RobustRAG, arXiv 2405.15556, and DPVoteRAG, arXiv 2412.04697, combined"
    lookahead: ClassVar[int] = 48
    reorders: ClassVar[bool] = True
    replaces_unreadable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.support < 2:
            raise ConfigError(f"{NAME}.support is {self.support}; it must be at least 2: one unit is not a quorum")
        require_range(NAME, self, "jitter period_days units words sentences answers", at_least=1)
        require_range(NAME, self, "break_glass", at_least=0)
        require_range(NAME, self, "writer_s", above=0)
        require_range(NAME, self, "floor", at_least=-1, at_most=1)
        self.secret = Secret(self.secret)
        self.private = None if self.epsilon is None else self._private_answers(self.epsilon)
        if self.private is None and self.jitter > 1 and len(self.secret) < SECRET_CHARACTERS:
            raise ConfigError(
                f"{NAME}.secret has {len(self.secret)} characters; it must have at least {SECRET_CHARACTERS}. Set it "
                "to ${NAME} with a random value in the environment, equal on all gateways, or set jitter: 1"
            )
        self._isolated = None if self.writer is None else IsolatedAnswers(self.writer, self.writer_s)

    @property
    def compares_clients(self) -> bool:
        """Whether clients share budgets of units."""
        return self.private is not None or self.break_glass > 0

    @property
    def single_unit_answers(self) -> Ledger:
        """The ledger of answers that one unit gave alone."""
        return Ledger(self.store, "break-glass", self.break_glass, self.period_days)

    def _private_answers(self, epsilon: float) -> PrivateAnswers:
        require_range(NAME, self, "epsilon", above=0)
        require_range(NAME, self, "delta", above=0, below=1)
        if self.break_glass:
            raise ConfigError(
                f"{NAME}: epsilon={epsilon}, break_glass={self.break_glass}; an answer of one unit has no noise; set "
                "one of them only"
            )
        histogram = PrivateHistogram.of(epsilon, self.delta, self.words, self.answers)
        return PrivateAnswers(histogram, Ledger(self.store, "dp", histogram.most, self.period_days))

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Replaces unreadable hits by one document with the released keywords; it comes last.

        Readable hits stay if they reach the floor, at most k - 1 beside released keywords. So they do not depend on
        unreadable ones.
        """
        if retrieval.unreadable is None:
            return Outcome(retrieval)
        near = [hit for hit in retrieval.hits if hit.score >= self.floor]
        readable = [hit for hit in near if hit.document.id not in retrieval.unreadable]
        complete = retrieval.exhausted or len(near) < len(retrieval.hits)
        if not complete and (self.private is not None or len(readable) < query.k):
            return Outcome(retrieval, more=True)
        speaking = [hit for hit in near if hit.document.id in retrieval.unreadable]
        if self.private is not None:  # no unit may displace another
            return await self._released(query, retrieval, readable, group_units(speaking, self.unit_keys))
        units = group_units(_nearest_of_each_source(speaking), self.unit_keys)
        if not complete and len(units) < self.units and len(retrieval.hits) < MAX_HITS:
            return Outcome(retrieval, more=True)
        return await self._released(query, retrieval, readable, units[: self.units])

    def on_generate(self, generator: Generator) -> Generator:
        """Wraps the generator: without readable documents, the composed answer is the answer."""
        return _QuorumGenerator(generator)

    async def _released(
        self, query: Query, retrieval: Retrieval, readable: Sequence[Hit], units: Sequence[Sequence[Hit]]
    ) -> Outcome[Retrieval]:
        answer, figures = Composition(UNKNOWN, ()), dict[str, Any]()
        if query.k > 1 or not readable:  # else the answer has no place, and must cost no budget
            answer, figures = await (self._counted(query, units) if self.private is None else self._noisy(query, units))
        released = Hit(ReleasedDocument(NAME, answer.text), self.floor)
        kept = [*readable[: query.k - 1], released] if answer.words else list(readable[: query.k])
        assert retrieval.unreadable is not None
        hidden = tuple(h.document.id for h in retrieval.hits if h.document.id in retrieval.unreadable)
        evidence = {
            "units": len(units),
            "readable": len(kept) - (released in kept),
            "words": len(answer.words),
            **figures,
        }
        unreadable = [hit for hit in retrieval.hits if hit.document.id in retrieval.unreadable]
        if unreadable and not units:
            sources = len({hit.document.source for hit in unreadable})
            evidence |= {"best": max(hit.score for hit in unreadable), "floor": self.floor, "left_out": sources}
        verdict = Verdict(NAME, False, Action.HIDE if hidden else Action.NONE, 0.0, 0.0, hidden, evidence)
        return Outcome(replace(retrieval, hits=tuple(kept or [released])), verdict)

    async def _counted(self, query: Query, units: Sequence[Sequence[Hit]]) -> tuple[Composition, dict[str, Any]]:
        """Answers from what enough units state; with the certificate."""
        question = AskedQuestion.of(query.text)
        said, costs = await self._statements_of(query, question, units)
        release = Release.of(said, self._thresholds(query.tenant))
        answer = compose(question, release.levels)
        opened: dict[str, Any] = {}
        if self.break_glass and not answer.words:
            answer, opened = await self._single_unit_answer(query, question, units, said)
        figures = {
            "stating": sum(map(bool, said)),
            "support": [release.supporters(word) for word in answer.words],
            **release.certificate(answer.words),
        }
        return answer, figures | opened | costs

    async def _single_unit_answer(
        self, query: Query, question: AskedQuestion, units: Sequence[Sequence[Hit]], said: Sequence[Collection[Item]]
    ) -> tuple[Composition, dict[str, Any]]:
        """Answers from the most similar unit that states something, if it has a single-unit answer left.

        A unit without one is not replaced by the next: that would open a second unit for one question.
        """
        refused = compose(question, {})
        for unit, items in zip(units, said, strict=True):
            answer = compose(question, Release.of([items], Thresholds(1)).levels)
            if answer.words:
                names = unit_names(unit, self.unit_keys)
                granted = (await self.single_unit_answers.spend(query.tenant, [(names, 1)])) == [1]
                sources = sorted({hit.document.source for hit in unit})
                return answer if granted else refused, {"break_glass": {"sources": sources, "granted": granted}}
        return refused, {}

    async def _noisy(self, query: Query, units: Sequence[Sequence[Hit]]) -> tuple[Composition, dict[str, Any]]:
        """Answers with differential privacy; from the cache, if the question was answered before."""
        assert self.private is not None
        if (repeated := self.private.cached(query)) is not None:
            return repeated, {"repeated": True, **self.private.noise()}
        said, costs = await self._statements_of(query, AskedQuestion.of(query.text), units)
        answer, figures = await self.private.ask(query, said, [unit_names(unit, self.unit_keys) for unit in units])
        return answer, figures | costs

    async def _statements_of(
        self, query: Query, question: AskedQuestion, units: Sequence[Sequence[Hit]]
    ) -> tuple[list[Collection[Item]], dict[str, Any]]:
        """Returns what each unit states, and the costs of isolated answers. Units without its names are not asked."""
        if self._isolated is None:
            return [self.statements_of_unit(question, unit) for unit in units], {}
        read = [excerpt(question, self._stated_by(unit), READ_SENTENCES) for unit in units]
        asked = {i: document for i, document in enumerate(read) if document is not None}
        answers, costs = await self._isolated.ask(query.text, list(asked.values()))
        generation_costs.append(self.store, NAME, query.id, costs)
        said: list[Collection[Item]] = [frozenset()] * len(units)
        for i, answer in zip(asked, answers, strict=True):
            said[i] = statements(question, read_text(answer), self.words)
        return said, costs

    def statements_of_unit(self, question: AskedQuestion, unit: Sequence[Hit]) -> Collection[Item]:
        """Returns what a unit states about a question; nothing if it abstains. Depends on this unit alone."""
        return unit_statements(question, self._stated_by(unit), self.sentences, self.words)

    def _stated_by(self, unit: Sequence[Hit]) -> Document:
        """The text that a unit contributes: its nearest chunk; with ``epsilon``, all its chunks above the floor.

        How many chunks of a unit are among the hits depends on those of the others, unless all above the floor are.
        """
        return unit[0].document if self.private is None else whole(unit)

    def _thresholds(self, tenant: str) -> Thresholds:
        period = int(time.time() // (DAY_S * self.period_days))
        return Thresholds(self.support, self.jitter, self.secret, f"{tenant}\x1f{period}")


def _nearest_of_each_source(hits: Sequence[Hit]) -> list[Hit]:
    """The first ``CHUNKS_PER_SOURCE`` hits of each source, in order: a long source must not displace others."""
    counts, kept = Counter[str](), list[Hit]()
    for hit in hits:
        counts[hit.document.source] += 1
        if counts[hit.document.source] <= CHUNKS_PER_SOURCE:
            kept.append(hit)
    return kept


@dataclass(frozen=True, slots=True)
class _QuorumGenerator(Generator):
    """A generator that gives a composed answer as it is."""

    generator: Generator

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the answer."""
        if prompt.context and all(isinstance(document, ReleasedDocument) for document in prompt.context):
            yield "\n".join(document.text for document in prompt.context)
            return
        async for piece in self.generator.stream(prompt):
            yield piece
