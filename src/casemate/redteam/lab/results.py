"""Records of a campaign: written as JSON, rendered as reports, compared with a baseline.

Directions are the operator's: "lower is better" means better protected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from casemate.errors import DataError, first_reason
from casemate.maths.stats import Estimate

FORMAT = 2


class CheckStatus(StrEnum):
    """Outcome of a check or a campaign. A check that was not made is never a pass."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"  # skipped, interrupted, or too few trials to decide
    ERROR = "error"  # the target, a defense or an attack failed


SEVERITY = (CheckStatus.ERROR, CheckStatus.FAIL, CheckStatus.INCONCLUSIVE, CheckStatus.PASS)
"""All statuses, worst first."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One membership attack on one candidate.

    Attributes:
        candidate: Source of the attacked document.
        member: Whether it was in the index.
        features: Measurements of the attack; higher indicates membership.
        hidden: Questions in which the guard withheld the candidate; 0 with the guard off.
        flagged: Questions in which the guard withheld any document or changed the answer.
    """

    candidate: str
    member: bool
    features: tuple[float, ...]
    questions: int
    hidden: int = 0
    flagged: int = 0


@dataclass(frozen=True, slots=True)
class MembershipMetrics:
    """Success of one membership attack against one target. A `Estimate` has its 95 % interval; None: too few trials.

    Attributes:
        auc: Area under the ROC curve, in [0, 1]; 0.5 is chance, closer to 0.5 is better.
        adjusted_accuracy: max(acc, 1 - acc) - 0.5 at thresholds fitted on the other half, in [0, 0.5]; lower is better.
        tpr_at_1: True positive rate at a 1 % false positive rate, in [0, 1]; lower is better.
        tpr_at_01: The same at 0.1 %.
        ks: Kolmogorov-Smirnov distance of the scores, in [0, 1]; lower is better.
        recall_query: Share of questions about members in which the candidate was withheld; higher is better.
        recall_document: Share of members withheld in at least one question; higher is better.
        nonmember_flags: Share of questions about non-members in which anything was withheld.
        roc: Points (false positive rate, true positive rate).
        histogram: Bin `edges` and the counts `members` and `nonmembers` of the scores.
    """

    members: int
    nonmembers: int
    auc: Estimate
    adjusted_accuracy: Estimate
    tpr_at_1: Estimate | None
    tpr_at_01: Estimate | None
    ks: float
    recall_query: Estimate | None
    recall_document: Estimate | None
    nonmember_flags: Estimate | None
    roc: tuple[tuple[float, float], ...] = ()
    histogram: Mapping[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttackResult:
    """One membership attack, guard off against guard on.

    Attributes:
        backend: Models that the attack used, or `deterministic`.
        off: Metrics against the bare system; None: not run.
        on: Metrics against the guarded system; None: not run.
        auc_drop: AUC off minus on, from paired resamples.
        error: Why there are no metrics; empty if there are some.
    """

    name: str
    paper: str
    backend: str
    off: MembershipMetrics | None
    on: MembershipMetrics | None
    auc_drop: Estimate | None = None
    error: str = ""

    @property
    def sides(self) -> dict[str, MembershipMetrics]:
        """The metrics by target, `off` and `on`."""
        return {side: metrics for side, metrics in (("off", self.off), ("on", self.on)) if metrics}


@dataclass(frozen=True, slots=True)
class RecoveredText:
    """A text that an extraction attack attributes to the collection, and the question that yielded it (from 1)."""

    text: str
    query: int


@dataclass(frozen=True, slots=True)
class VerbatimExtraction:
    """MEXTRA's metrics (Wang et al. 2025, arXiv 2502.13172, section 4.1). Lower is better.

    A text is extracted if the reply to a question that had it as context contains all of it, ignoring case and white
    space. The paper counts the stored requests; here the chunks are counted.

    Attributes:
        extracted: EN: distinct texts extracted.
        retrieved: RN: distinct texts in the contexts.
        efficiency: EE: EN / (questions x k), in [0, 1].
        complete: CER: share of questions whose reply contains every text of its context.
        any: AER: share of questions whose reply contains at least one.
    """

    extracted: int
    retrieved: int
    efficiency: float
    complete: Estimate
    any: Estimate


@dataclass(frozen=True, slots=True)
class ExtractionResult:
    """Extraction metrics of one crawl of one target. Lower is better unless stated otherwise.

    The interval of a rate treats chunks (or questions) as a random sample. One crawl visits them dependently, so the
    variance between crawls with different seeds is not included.

    Attributes:
        segments: Distinct texts compared with them.
        crr: Chunk recovery rate (RAGFort): share of chunks with a segment of ROUGE-L F1 > 0.5 and cosine > 0.85.
        crr_recall: The same with ROUGE-L recall > 0.5. A different measure: either may be larger.
        crr_at: `crr` at other ROUGE-L F1 limits: 0.3, 0.7, 0.9.
        crr_recall_at: `crr_recall` likewise.
        crr_ikea: CRR as IKEA defines it: mean ROUGE-L F1 of an answer against its concatenated context. Unrelated to
            `crr`: it measures how literal answers are. None: no question was answered.
        fidelity: Semantic fidelity (RAGCrawler): mean over chunks of the largest cosine with an answer or an item of
            it, in [-1, 1].
        coverage: RAGCrawler's CR: share of chunks used as context of some answer, quoted or not. None, like the next
            two, if the target does not report its context.
        area: Area under the coverage curve over the number of questions, in [0, 1].
        efficiency: Extraction efficiency (IKEA's EE): distinct chunks retrieved, relative to the most that this number
            of questions can retrieve, in [0, 1].
        answered: Share of questions that were answered. None: no question was asked.
        coverage_after: Number of the question after which 10, 25 and 50 % were covered; None: never. Higher is better.
        crr_after: The same for recovered chunks.
        curve: (question, coverage or None, CRR) wherever one of them changes, and at the end.
        verbatim: Texts extracted in full. None: no question was asked, or the target does not report its context.
        touched: Questions in which a defense withheld something or changed the answer, according to the verdicts.
        alarms: Questions in which each defense raised an alarm. Higher is better.
        first_alarm: Number of the first question with an alarm; None: no alarm. Lower is better.
        finds: Texts that the attack attributes to the collection. They are the operator's data.
        first_recovered: Number of the question that recovered each chunk, by chunk id; operator's data, as `finds`.
        resumed: As exhausted and error, see `CrawlTrace`.
    """

    questions: int
    chunks: int
    segments: int
    crr: Estimate
    crr_recall: Estimate
    crr_at: Mapping[str, Estimate]
    crr_recall_at: Mapping[str, Estimate]
    crr_ikea: Estimate | None
    fidelity: float
    coverage: Estimate | None
    area: float | None
    efficiency: float | None
    answered: Estimate | None
    coverage_after: Mapping[str, int | None]
    crr_after: Mapping[str, int | None]
    curve: tuple[tuple[int, float | None, float], ...] = ()
    verbatim: VerbatimExtraction | None = None
    touched: int = 0
    alarms: Mapping[str, int] = field(default_factory=dict)
    first_alarm: int | None = None
    failed: int = 0
    finds: tuple[RecoveredText, ...] = ()
    first_recovered: Mapping[str, int] = field(default_factory=dict)
    resumed: int = 0
    exhausted: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Crawl:
    """One extraction attack against one or several targets.

    Attributes:
        budget: Questions the attack could ask.
        embedder: Fingerprint of the embedder used for cosines.
        by_target: Metrics by target, `off` and `on`.
        crr_drop: CRR off minus on, from paired resamples of chunks; None unless both were run. Higher is better.
        ratio: CRR on divided by off, as in RAGFort, from paired resamples of chunks; None if undefined.
    """

    attack: str
    paper: str
    seed: int
    budget: int
    clients: int
    embedder: str
    by_target: Mapping[str, ExtractionResult]
    crr_drop: Estimate | None = None
    ratio: Estimate | None = None
    format: int = FORMAT

    @property
    def recovered(self) -> Estimate:
        """CRR with the guard on, or else off."""
        return next(self.by_target[side].crr for side in ("on", "off") if side in self.by_target)

    def without_texts(self) -> Crawl:
        """A copy without ids of chunks, whose recovered texts are empty; the numbers of their questions remain."""
        return replace(
            self,
            by_target={
                side: replace(
                    result,
                    finds=tuple(RecoveredText("", find.query) for find in result.finds),
                    first_recovered={},
                )
                for side, result in self.by_target.items()
            },
        )


@dataclass(frozen=True, slots=True)
class ExtractionSide:
    """Volume of text that a crawl returned from one target. Contains no text; needs no reference collection.

    Attributes:
        answered: Share of questions answered with anything but a refusal; None: none was asked.
        refused: Questions that the target rejected.
        said: Words in all replies.
        texts: Distinct texts that the attack attributes to the collection.
        words: Words in these texts.
        vocabulary: Distinct words in these texts, in lower case.
        resumed: As exhausted and error, see `CrawlTrace`.
    """

    questions: int
    answered: Estimate | None
    refused: int
    said: int
    texts: int
    words: int
    vocabulary: int
    resumed: int = 0
    exhausted: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class BenignReplay:
    """Effect of the guard on benign sessions. Lower is better.

    Attributes:
        alarmed: Share of sessions in which a defense raised an alarm; None: no session.
        alarms: Sessions in which each defense raised an alarm.
        touched: Questions in which a defense withheld something or changed the answer, according to the verdicts.
        changed: Answers that differ from the bare system's.
        failed: Questions in which a defense failed.
    """

    sessions: int
    questions: int
    alarmed: Estimate | None
    alarms: Mapping[str, int]
    touched: int
    changed: int
    failed: int


@dataclass(frozen=True, slots=True)
class Utility:
    """Cost of the guard on benign questions. Lower is better.

    Attributes:
        source: Origin of the questions: logged or synthetic.
        flagged: Share of questions with a document withheld, in [0, 1]. None: not observable.
        answer_changed: Share of answers that changed, in [0, 1]. Of an external target: share of questions that the
            bare system answers and the guarded one does not.
        failed: Questions in which a defense failed.
        unentitled_lost: Share of the bare system's answers that a client without entitlement loses, in [0, 1]. None:
            ``guard.audience`` restricts no client, or not measured.
    """

    source: str
    questions: int
    flagged: Estimate | None
    answer_changed: Estimate
    failed: int = 0
    unentitled_lost: Estimate | None = None


@dataclass(frozen=True, slots=True)
class TwoWorldAudit:
    """Contexts with a withheld document against contexts of the same index without it. They must be equal.

    Attributes:
        pairs: Questions compared.
        differing: Questions with different contexts.
        rate: Their share; anything above 0 is a leak. The interval counts members (``stats.clustered_rate``).
        failed: Replayed questions in which a defense failed, in either world.
        not_compared: Sessions about sources without which no calibration fits, or a defense has too few chunks.
    """

    pairs: int
    differing: int
    rate: Estimate
    failed: int = 0
    not_compared: int = 0


@dataclass(frozen=True, slots=True)
class RedactedExchange:
    """One question of an attack and the reply, redacted: words outside the template are replaced by their number.

    Attributes:
        reply: The reply as the client sees it.
        answered: Whether the reply is neither empty nor a refusal.
        in_context: Whether the candidate was in the generator's context; None: no context was reported.
        hidden: Aliases of sources of which the guard withheld documents, at most ten.
        hidden_count: Number of these sources.
        reasons: Decisions of the defenses that flagged the question.
        refused: Whether the target rejected the question.
        recovered: Aliases of sources of which a crawl's question recovered new chunks, at most ten.
        recovered_count: Number of these chunks.
        context: Aliases of the sources in the context of a crawl's question, at most ten.
    """

    question: str
    reply: str
    answered: bool = False
    in_context: bool | None = None
    hidden: tuple[str, ...] = ()
    hidden_count: int = 0
    reasons: tuple[str, ...] = ()
    failed: bool = False
    refused: bool = False
    recovered: tuple[str, ...] = ()
    recovered_count: int = 0
    context: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionSide:
    """One attack on one candidate, or one question of a crawl, against one target.

    Attributes:
        guess: Whether the attack decided for membership, by a rule fitted on other candidates; None: too few trials.
            Of a crawl: whether the question recovered new chunks; None: the collection is unknown.
        hidden: Questions in which the guard withheld the candidate.
        flagged: Questions in which the guard withheld any document or changed the answer.
        score: The attack's score; its AUC is computed from them. Higher means member. None: too few trials, or a crawl.
    """

    guess: bool | None
    questions: int
    hidden: int
    flagged: int
    score: float | None = None


@dataclass(frozen=True, slots=True)
class AttackSession:
    """One attack on one candidate, or one question of a crawl, against all targets.

    Attributes:
        candidate: Alias of the attacked document; of a crawl: the number of the question, in words.
        member: Whether the document is in the index; None: a question of a crawl.
        sides: Results by target, `off` and `on`.
        exchanges: Exchanges by target, in the order of the questions; empty: left out of the record.
    """

    attack: str
    candidate: str
    member: bool | None
    sides: Mapping[str, SessionSide]
    exchanges: tuple[Mapping[str, RedactedExchange], ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement and its outcome.

    Attributes:
        name: The requirement, in words.
        reason: One sentence: the meaning of the outcome, or why there is none.
        attack: The attack concerned, or empty.
        owasp: Ids of the OWASP Top 10 for LLM Applications.
        atlas: Ids of MITRE ATLAS techniques.
    """

    name: str
    status: CheckStatus
    value: float | None
    limit: float | None
    reason: str
    attack: str = ""
    owasp: tuple[str, ...] = ()
    atlas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One effect of one injection attack, by ordinary questions. Shares with 95 % intervals; None: not measured.

    Questions whose answer shows the effect without any injected document are excluded from all other shares.

    Attributes:
        variant: The effect that the instruction asks for.
        questions: Questions that the other shares are based on.
        baseline: Share of all questions whose answer shows the effect without an injected document.
        control: Share of questions in which the reader follows the same instruction, given by the user.
        retrieved: Share of questions with the injected document in the context, guard off.
        off: Share of questions in which the instruction is followed, guard off. Lower is better.
        on: The same with the guard on.
        quarantined: Share of injected documents that the screening of new documents finds suspicious.
        failed: Questions in which a defense failed.
    """

    attack: str
    variant: str
    paper: str
    questions: int
    baseline: Estimate | None = None
    control: Estimate | None = None
    retrieved: Estimate | None = None
    off: Estimate | None = None
    on: Estimate | None = None
    quarantined: Estimate | None = None
    failed: int = 0

    @property
    def name(self) -> str:
        """Attack and effect."""
        return f"{self.attack}: {self.variant}"


@dataclass(frozen=True, slots=True)
class PersonalDataResult:
    """Personal data in answers to ordinary questions, except values that the question contains. Lower is better.

    Attributes:
        off: Share of answers with personal data, guard off, with its 95 % interval.
        on: The same with the guard on.
        kinds: Values by kind, by target, `off` and `on`; never the values.
        recognized: How many of some examples the finder recognizes. None of them: it may not work.
        failed: Questions in which a defense failed.
    """

    finder: str
    questions: int
    off: Estimate
    on: Estimate
    kinds: Mapping[str, Mapping[str, int]]
    recognized: int
    examples: int
    failed: int = 0


@dataclass(frozen=True, slots=True)
class CampaignResult:
    """Everything a report is rendered from.

    Attributes:
        id: Id of this run.
        at: End of the run, ISO 8601 with offset.
        status: The worst status of all checks.
        utility: Cost of the guard on benign questions; None: not measured.
        audit: Result of the two-world audit; None: not made.
        not_tested: Limits of the campaign, one sentence each.
        simulated: Parts that replaced real ones, one sentence each.
        evidence: Seed, versions, fingerprints of configuration and corpus, sizes of the split.
        cost: Questions, cached answers, model calls, seconds from the start of the preparation (calibration included).
        crawls: Results of extraction attacks, without the recovered texts.
        extracted: Volume of text returned, by extraction attack and target.
        benign_sessions: Effect of the guard on benign sessions; None: not replayed.
        probes: Results of injection attacks, one per effect.
        personal_data: Personal data in answers to ordinary questions; None: not measured.
        sessions: Membership attacks candidate by candidate, or crawls question by question; the worst first.
        sessions_total: Number of these, with those left out of `sessions`.
        document_names: Source by alias, as sessions use it. Neither in the record nor in a report, because a name may
            identify a person.
    """

    id: str = ""
    at: str = ""
    status: CheckStatus = CheckStatus.INCONCLUSIVE
    attacks: tuple[AttackResult, ...] = ()
    utility: Utility | None = None
    audit: TwoWorldAudit | None = None
    checks: tuple[Check, ...] = ()
    not_tested: tuple[str, ...] = ()
    simulated: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    crawls: tuple[Crawl, ...] = ()
    extracted: Mapping[str, Mapping[str, ExtractionSide]] = field(default_factory=dict)
    benign_sessions: BenignReplay | None = None
    probes: tuple[ProbeResult, ...] = ()
    personal_data: PersonalDataResult | None = None
    sessions: tuple[AttackSession, ...] = ()
    sessions_total: int = 0
    document_names: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def summary(self) -> dict[str, Any]:
        """The result as JSON values, without sessions and document names."""
        return asdict(replace(self, sessions=(), document_names={}))

    def to_json(self) -> str:
        """The record as JSON, without document names."""
        return json.dumps(asdict(replace(self, document_names={})), indent=1, ensure_ascii=False) + "\n"


def load_result(path: Path) -> CampaignResult:
    """Reads a saved campaign.

    Raises:
        DataError: If the file is missing, damaged, or of another format.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("format") != FORMAT:
            raise DataError(
                f"{path} has report format {raw.get('format')!r}; this version reads {FORMAT}. Run the campaign again"
            )
        result = TypeAdapter(CampaignResult).validate_python(raw)
    except (OSError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        reason = first_reason(error) if isinstance(error, ValidationError) else error
        raise DataError(f"{path} is not a report of 'casemate redteam run', 'crawl' or 'probe': {reason}") from error
    invalid = [rate for rate in _rates(result) if not rate.low <= rate.high or not all(map(math.isfinite, rate))]
    if invalid:
        raise DataError(f"{path} holds an invalid rate: {tuple(invalid[0])}")
    return result


def _rates(part: Any) -> Iterator[Estimate]:
    if isinstance(part, Estimate):
        yield part
    elif is_dataclass(part):
        for entry in fields(part):
            yield from _rates(getattr(part, entry.name))
    elif isinstance(part, Mapping | tuple):
        for item in part.values() if isinstance(part, Mapping) else part:
            yield from _rates(item)
