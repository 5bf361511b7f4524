"""What an extraction attack carried away, and what its defenses noticed: plain records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from casemate.stats import Rate, rate
from casemate.words import abstains, words

FORMAT = 1


class Step(NamedTuple):
    """One question, what came back, and what the operator knows about it.

    Attributes:
        question: What was asked.
        reply: What the client saw.
        context: Ids of the chunks that the answer was made from.
        hidden: Ids of the chunks that were withheld.
        alarms: Names of the defenses that took the question for an attack's.
        touched: Whether a defense withheld something or changed the answer, as far as verdicts tell.
        failed: Whether a defense failed.
        refused: Whether the target took the question for none, as when it is too long. The reply is empty then.
    """

    question: str
    reply: str
    context: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()
    touched: bool = False
    failed: bool = False
    refused: bool = False

    @property
    def answered(self) -> bool:
        """Whether the reply says anything but that there is nothing to say."""
        return bool(self.reply.strip()) and not abstains(self.reply)


class Find(NamedTuple):
    """A text that the attack holds to be the collection's, and the number of the query, from 1, that gave it."""

    text: str
    query: int


@dataclass(frozen=True, slots=True)
class Walk:
    """One crawl of one target, step by step.

    Attributes:
        steps: In order of asking.
        finds: In order of finding.
        resumed: How many of the steps were kept from an earlier run. A guard that remembers clients only in memory
            had forgotten those.
        exhausted: Whether the budget ended the crawl, and not the attack.
        error: Why it broke off, if it did. What was found before counts.
        seconds: Of this run.
    """

    steps: tuple[Step, ...]
    finds: tuple[Find, ...]
    resumed: int = 0
    exhausted: bool = False
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Haul:
    """What one crawl carried away from one target. For the owner lower is better, unless it says otherwise.

    The interval of a rate is that of chunks, or questions, drawn at random. They were met in one crawl, where one
    depends on the other, so how much a crawl with another seed would carry away is not in it.

    Attributes:
        questions: Asked.
        chunks: In the collection.
        segments: Different texts that were compared with them.
        crr: Chunk recovery rate (RAGFort): share of chunks with a segment of ROUGE-L F1 > .5 and cosine > .85.
        crr_recall: The same with ROUGE-L recall > .5. Another measure: either may be the larger.
        crr_at: ``crr`` by another limit of ROUGE-L F1: .3, .7, .9.
        crr_recall_at: ``crr_recall`` likewise.
        crr_ikea: What IKEA calls CRR: mean ROUGE-L F1 of the answers against the chunks they were made from, put
            together. Of no kin to ``crr``: it tells how literally it is answered. None: nothing was answered.
        fidelity: RAGCrawler's semantic fidelity: mean over chunks of the largest cosine with a segment, in [-1, 1].
        coverage: RAGCrawler's CR: share of chunks that some answer was made from, said or not. None, like the next two:
            the target does not tell from which.
        area: Area under the curve of coverage by the number of questions, in [0, 1].
        efficiency: IKEA's EE: different chunks retrieved, by the most that so many questions can retrieve, in [0, 1].
        answered: Share of questions that were not refused; for the owner of an attacked system. None: none was asked.
        coverage_after: Number of the question by which 10, 25 and 50 % were covered; None: never. More is better.
        crr_after: The same for recovered chunks.
        curve: After which question, coverage, if it is known, and CRR: where one of them changes, and the end.
        touched: In how many questions a defense withheld something or changed the answer, as far as verdicts tell.
        alarms: In how many questions each defense raised an alarm. More is better.
        first_alarm: Number of the first question with an alarm; None: there was none. Earlier is better.
        failed: In how many questions a defense failed: the guard was not what it should be.
        finds: What the attack itself holds to be the collection's. Texts of the owner.
        resumed: See ``Walk``.
        exhausted: See ``Walk``.
        error: See ``Walk``.
    """

    questions: int
    chunks: int
    segments: int
    crr: Rate
    crr_recall: Rate
    crr_at: Mapping[str, Rate]
    crr_recall_at: Mapping[str, Rate]
    crr_ikea: Rate | None
    fidelity: float
    coverage: Rate | None
    area: float | None
    efficiency: float | None
    answered: Rate | None
    coverage_after: Mapping[str, int | None]
    crr_after: Mapping[str, int | None]
    curve: tuple[tuple[int, float | None, float], ...] = ()
    touched: int = 0
    alarms: Mapping[str, int] = field(default_factory=dict)
    first_alarm: int | None = None
    failed: int = 0
    finds: tuple[Find, ...] = ()
    resumed: int = 0
    exhausted: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Crawl:
    """One extraction attack against one or several targets.

    Attributes:
        attack: Its name.
        paper: Where it is from.
        seed: Of everything that was drawn.
        budget: Questions that it might ask.
        clients: How many names shared the questions.
        embedder: By whose cosine chunks and segments were compared.
        hauls: By target.
        crr_drop: CRR off minus on, from paired resamples of chunks; None unless both were run. More is better.
        relative: CRR on by off, as RAGFort prints it; None if that is not to be had. Lower is better.
    """

    attack: str
    paper: str
    seed: int
    budget: int
    clients: int
    embedder: str
    hauls: Mapping[str, Haul]
    crr_drop: Rate | None = None
    relative: float | None = None
    format: int = FORMAT

    def bare(self) -> Crawl:
        """The same without the texts that were carried away."""
        return replace(self, hauls={side: replace(haul, finds=()) for side, haul in self.hauls.items()})

    def save(self, path: Path) -> None:
        """Writes it as json, without the texts that were carried away: only by which query they were."""
        told = asdict(self)
        for haul in told["hauls"].values():
            haul["finds"] = [query for _, query in haul["finds"]]
        path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Loot:
    """What a crawl brought, whether or not the collection is known to compare it with. No text is in it.

    Attributes:
        questions: Asked.
        answered: Share that was answered with anything but that there is nothing to say; None: none was asked.
        refused: Questions that the target took for none.
        said: Words in all replies.
        texts: Different texts that the attack holds to be the collection's.
        words: Words in these.
        vocabulary: Different words in these, in lower case.
        resumed: See ``Walk``.
        exhausted: See ``Walk``.
        error: See ``Walk``.
    """

    questions: int
    answered: Rate | None
    refused: int
    said: int
    texts: int
    words: int
    vocabulary: int
    resumed: int = 0
    exhausted: bool = False
    error: str = ""

    @classmethod
    def of(cls, walk: Walk) -> Loot:
        """That of a walk."""
        steps, found = walk.steps, {find.text for find in walk.finds}
        spoken = [word for text in found for word in words(text)]
        return cls(
            questions=len(steps),
            answered=rate(sum(step.answered for step in steps), len(steps)) if steps else None,
            refused=sum(step.refused for step in steps),
            said=sum(len(words(step.reply)) for step in steps),
            texts=len(found),
            words=len(spoken),
            vocabulary=len(set(spoken)),
            resumed=walk.resumed,
            exhausted=walk.exhausted,
            error=walk.error,
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """What harmless sessions met with. Lower is better in all.

    Attributes:
        sessions: How many.
        questions: In all of them together.
        alarmed: Share of sessions in which a defense raised an alarm; None: there was no session.
        alarms: In how many sessions each defense did.
        touched: Questions in which a defense withheld something or changed the answer, as far as verdicts tell.
        changed: Answers that differ from the bare system's; None if it was not asked.
        failed: Questions in which a defense failed.
    """

    sessions: int
    questions: int
    alarmed: Rate | None
    alarms: Mapping[str, int]
    touched: int
    changed: int | None
    failed: int
