"""The assessment of an existing system over its interface: ordinary questions, pasted records and a crawl.

It uses the external targets of the red team. Nothing is indexed: the operator provides documents that the system
contains. The number of requests is limited, including retries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from casemate import config as configuration
from casemate.config import Config, PluginSpec
from casemate.demo.assessment import CRAWLER, MIN_RECORD_WORDS, PLAIN_QUESTIONS, QUOTE_WORDS, SEED, quotes
from casemate.demo.sample import SampledCorpus
from casemate.errors import BackendError, BudgetExhausted, ConfigError, DataError, QueryError
from casemate.maths import stats
from casemate.maths.stats import Estimate
from casemate.plugins import build
from casemate.protocols import Embedder, MembershipAttack, Progress, Steps
from casemate.rag.chunking import split_document
from casemate.rag.corpus import Problem
from casemate.redteam.campaigns.external_targets import ExternalTargets, MeteredTarget, build_external_targets
from casemate.redteam.campaigns.liveness_checks import (
    QUESTIONS_AFTER,
    LivenessResult,
    check_liveness,
    check_still_answers,
    genre_check,
    refusal_check,
)
from casemate.redteam.lab.datasets import MIN_CANDIDATES, IndexedSource, Split, split_from_pools
from casemate.redteam.lab.experiment import Experiment, ExperimentPlan
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan
from casemate.redteam.lab.extraction_metrics import measure_crawl, without_context
from casemate.redteam.lab.judge import ON, attack_result
from casemate.redteam.lab.results import AttackResult, CheckStatus, ExtractionResult
from casemate.redteam.lab.store import CampaignStore, Exchange
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.text.sentences import sentences
from casemate.text.tokens import count_words
from casemate.types import Answer, Document, Query

log = logging.getLogger(__name__)
QUERIES, MIN_QUERIES = 200, 40
"""Default number of requests, and the useful minimum."""
PLAIN_SHARE, PASTED_SHARE = 0.1, 0.6
"""Shares of the requests for ordinary questions and for pasted texts; the rest is for crawl and end."""
MIN_SHORT_RECORD_WORDS = 30
"""Minimum length of a record if too few are longer: half of it is still longer than a quotation."""
MAX_CHUNKS = 600
"""Maximum number of chunks that are compared with the crawl's replies, drawn by document."""
RESUME_S = 5.0
"""Seconds before questions that a failed request ended are resumed. They end for good when a resumption adds none."""
ATTACK = PluginSpec.model_validate({"use": "s2mia", "bleu_ref": "rest"})
"""Pastes the first half of a text and scores how well the reply continues it."""
LIMITED = ("openai_endpoint", "http")
"""Target plug-ins with a limit of requests."""
CONFIG: dict[str, Any] = {"redteam": {"folder": "redteam", "i_own_this_target": True, "concurrency": 4}}


class QueryPlan(NamedTuple):
    """How the requests are divided.

    Attributes:
        pairs: Pasted records, and as many pasted texts of the baseline; 0: too few records.
    """

    total: int
    plain: int
    pairs: int
    crawl: int


@dataclass(frozen=True, slots=True)
class PastedTexts:
    """The first half of each text is pasted, and its continuation requested.

    Attributes:
        records: Share of records whose other half was quoted.
        baseline: The same for the texts of the baseline.
        result: Membership inference from the same replies.
    """

    question: str
    reply: str
    text: str
    records: Estimate
    baseline: Estimate
    result: AttackResult


@dataclass(frozen=True, slots=True)
class EndpointAssessment:
    """Content of the report; a part that was not measured is None.

    Attributes:
        endpoint: The system's name, without secrets.
        compared: Documents whose chunks are compared with the crawl's replies.
        requests: Number of requests sent, including retries.
        failures: Failures of the system or an attack; with one, the figures must not be trusted.
        gaps: Missing or doubtful measurements.
        left_out: Files that were not read, because the folder is too large.
    """

    at: str
    seconds: float
    endpoint: str
    found: int
    compared: int
    chunks: int
    baseline: str
    plan: QueryPlan
    requests: int
    plain: LivenessResult
    shown: Exchange
    pasted: PastedTexts | None
    crawl: ExtractionResult | None
    crawled: Exchange | None
    failures: tuple[str, ...]
    gaps: tuple[str, ...]
    problems: tuple[Problem, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    """The planned requests, before anything is sent.

    ``folder`` has documents that the system contains; ``left_out`` counts files that were not read, because it is too
    large. ``chunks`` are the sample for the crawl.
    """

    config: Config
    external: ExternalTargets
    folder: Path
    questions: tuple[str, ...]
    documents: tuple[Document, ...]
    chunks: tuple[Document, ...]
    records: tuple[Document, ...]
    others: tuple[Document, ...]
    baseline: str
    queries: QueryPlan
    embedder: Embedder
    problems: tuple[Problem, ...]
    left_out: int

    @property
    def name(self) -> str:
        """The system's host and model, without secrets; or its name in the configuration."""
        return self.external.names[ON].removeprefix("openai_endpoint ").removeprefix("http ")

    def describe(self) -> str:
        """The planned requests, in one or two sentences."""
        total, plain, pairs, crawl = self.queries
        pasted = f"{2 * pairs} with a pasted text ({pairs} records, {pairs} of the baseline), " if pairs else ""
        return (
            f"At most {total} requests to {self.name}, retries included: {plain} ordinary questions, {pasted}"
            f"{crawl} of a crawler, {QUESTIONS_AFTER} of the ordinary ones again. Baseline: {self.baseline}. "
            "Change the number with --queries."
        )


def plan_endpoint(
    target: PluginSpec, folder: Path, nonmembers: Path | None, queries: int, questions: Sequence[str], work: Path
) -> EndpointPlan:
    """Reads the documents, which the system contains, and plans the requests; sends nothing.

    Without documents of the same kind that it does not contain, see ``recombined``. ``queries`` is the largest number
    of requests, at least ``MIN_QUERIES``. ``work`` is an empty folder.

    Raises:
        ConfigError: If the target cannot be built.
        DataError: If nothing can be read, or `nonmembers` has too few records.
    """
    config = _limited(target, queries, work)
    external = build_external_targets(config)
    embedder = CachedEmbedder(build("embedder", config.rag.embedder, work))
    corpus, rng = SampledCorpus(folder), np.random.default_rng(SEED)
    documents = _read(corpus, rng)
    if not documents:
        reason = "; ".join(f"{p.where}: {p.reason}" for p in corpus.problems[:3])
        raise DataError(f"no text in {folder} can be read{': ' if reason else ''}{reason}")
    pairs = int(PASTED_SHARE * queries) // 2
    chunks = _chunks(documents, embedder)
    records = _records(chunks, pairs, rng)
    if nonmembers:
        others = _nonmembers(nonmembers, embedder, pairs, rng)
        baseline = f"texts of {nonmembers}, which the system does not contain"
    else:
        others = recombined(records, rng) if len(records) >= MIN_CANDIDATES else []
        baseline = "texts whose sentences come from different records, so no such record exists"
    pairs = min(pairs, len(records), len(others))
    pairs = pairs if pairs >= MIN_CANDIDATES else 0
    plain = min(PLAIN_QUESTIONS, int(PLAIN_SHARE * queries))
    return EndpointPlan(
        config=config,
        external=external,
        folder=folder,
        questions=tuple(questions[:plain]),
        documents=tuple(documents),
        chunks=tuple(chunks),
        records=tuple(records),
        others=tuple(others),
        baseline=baseline,
        queries=QueryPlan(queries, plain, pairs, queries - plain - 2 * pairs - QUESTIONS_AFTER),
        embedder=embedder,
        problems=tuple(corpus.problems),
        left_out=corpus.left_out,
    )


def _limited(target: PluginSpec, queries: int, work: Path) -> Config:
    """The configuration, with the target limited to a number of requests."""
    if target.use not in LIMITED:
        known = ", ".join(LIMITED)
        raise ConfigError(f"the target {target.use!r} cannot be limited to {queries} requests; use one of: {known}")
    limited = PluginSpec.model_validate({"use": target.use, **target.options, "max_requests": queries})
    return configuration.with_overrides(configuration.parse(CONFIG, folder=work), redteam={"target": limited})


def _nonmembers(folder: Path, embedder: Embedder, wanted: int, rng: np.random.Generator) -> list[Document]:
    """Texts that the system does not contain."""
    found = _records(_chunks(_read(SampledCorpus(folder), rng), embedder, "nonmember/"), wanted, rng)
    if len(found) < MIN_CANDIDATES:
        least = f"{MIN_CANDIDATES} or more"
        raise DataError(f"{folder} has {len(found)} texts of {MIN_SHORT_RECORD_WORDS} words; provide {least}")
    return found


def _read(corpus: SampledCorpus, rng: np.random.Generator) -> list[Document]:
    """The readable documents, in random order."""
    found = []
    for source in corpus.sources():
        try:
            title, text, _ = source.parse()
        except DataError as error:
            corpus.problems.append(Problem(source.name, str(error)))
            continue
        found.append(Document(source.name, text, title))
    return [found[i] for i in rng.permutation(len(found))]


def _chunks(documents: Sequence[Document], embedder: Embedder, prefix: str = "") -> list[Document]:
    """The chunks of the first documents, at least one document and otherwise at most `MAX_CHUNKS` chunks."""
    found = list[Document]()
    for document in documents:
        chunks = split_document(document, embedder, embedder.max_tokens, 0)
        if found and len(found) + len(chunks) > MAX_CHUNKS:
            break
        found += [replace(chunk, id=f"{prefix}{chunk.id}") for chunk in chunks]
    return found


def _records(chunks: Sequence[Document], wanted: int, rng: np.random.Generator) -> list[Document]:
    """Chunks to paste, as texts of their own: long ones first, then shorter ones if too few are long."""
    lengths = [count_words(chunk.text) for chunk in chunks]
    order = [i for i in rng.permutation(len(chunks)).tolist() if lengths[i] >= MIN_SHORT_RECORD_WORDS]
    chosen = sorted(order, key=lambda i: lengths[i] < MIN_RECORD_WORDS)[:wanted]
    return [Document(chunks[i].id, chunks[i].text) for i in chosen]


def recombined(records: Sequence[Document], rng: np.random.Generator) -> list[Document]:
    """As many texts as there are records, whose sentences come from different records. Same words, no such record.

    The part at each position comes from the same relative position of another record. A text without sentences is
    divided into runs of words. Needs at least two records.
    """
    parts = [_parts(record.text) for record in records]
    found = []
    for i, own in enumerate(parts):
        others = [j for j in rng.permutation(len(parts)).tolist() if j != i]
        sources = [parts[others[n % len(others)]] for n in range(len(own))]
        chosen = [source[n * len(source) // len(own)] for n, source in enumerate(sources)]
        found.append(Document(f"baseline/{i}", " ".join(chosen)))
    return found


def _parts(text: str) -> list[str]:
    """The sentences of a text; if there are fewer than four, runs of words."""
    found = sentences(text)
    if len(found) >= 4:
        return found
    tokens = text.split()
    return [" ".join(tokens[i : i + QUOTE_WORDS]) for i in range(0, len(tokens), QUOTE_WORDS)]


@dataclass(slots=True)
class _Findings:
    """Failures, and missing or doubtful results, one sentence each."""

    failures: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)


async def try_endpoint(plan: EndpointPlan, steps: Steps) -> EndpointAssessment:
    """Asks the system: ordinary questions, pasted texts, and a crawl.

    Raises:
        BackendError: If the system cannot be reached, rejects the key, or refuses the first question.
        BudgetExhausted: If retries used up the requests before the attacks.
        DataError: If it answers none of the ordinary questions.
    """
    began, target, findings = time.monotonic(), plan.external.targets[ON], _Findings()
    plain, shown = await _ask_plain(plan, target, steps)
    findings.gaps += [] if plain.check.status is CheckStatus.PASS else [f"{plain.check.reason}."]
    folder = plan.config.folder / plan.config.redteam.folder
    folder.mkdir(parents=True, exist_ok=True)
    with CampaignStore(folder / "campaigns.db") as store:
        pasted = await _paste(plan, target, store, steps, findings)
        crawl, crawled = await _crawl(plan, target, store, steps, findings)
    if not findings.failures:
        await _check_end(plan, target, plain, findings)
    return EndpointAssessment(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - began,
        endpoint=plan.name,
        found=len(plan.documents),
        compared=len({chunk.source for chunk in plan.chunks}),
        chunks=len(plan.chunks),
        baseline=plan.baseline,
        plan=plan.queries,
        requests=target.requests,
        plain=plain,
        shown=shown,
        pasted=pasted,
        crawl=crawl,
        crawled=crawled,
        failures=tuple(findings.failures),
        gaps=tuple(findings.gaps),
        problems=plan.problems,
        left_out=plan.left_out,
    )


@dataclass(slots=True)
class _Resumption:
    """Decides whether to resume after a failed request: as long as each attempt finishes more than those before.

    Attributes:
        finished: Number finished before the last attempt; -1: the first failed attempt is resumed in any case.
    """

    finished: int = -1

    async def may_continue(self, finished: int) -> bool:
        """Waits before the next attempt; False, at once, if the last one finished nothing more."""
        if finished <= self.finished:
            return False
        self.finished = finished
        log.warning("a request failed; the questions are resumed in %g s", RESUME_S)
        await asyncio.sleep(RESUME_S)
        return True


@dataclass(slots=True)
class _KeptAnswers(MeteredTarget):
    """Keeps and counts answers and refusals, so that no question is asked again after another one failed."""

    count: Progress = lambda count: None
    answers: dict[str, Answer | QueryError] = field(default_factory=dict)

    async def ask(self, query: Query) -> Answer:
        if query.text not in self.answers:
            try:
                self.answers[query.text] = await MeteredTarget.ask(self, query)
            except QueryError as error:
                self.answers[query.text] = error
            self.count(1)
        found = self.answers[query.text]
        if isinstance(found, QueryError):
            raise found
        return found


async def _ask_plain(plan: EndpointPlan, target: MeteredTarget, steps: Steps) -> tuple[LivenessResult, Exchange]:
    """Asks the operator's questions and those about documents; chooses the one that is shown."""
    with steps("asking ordinary questions", plan.queries.plain) as count:
        kept = _KeptAnswers(target.inner, target.nonce, count=count)
        own, found = await _resumed_answers(plan, kept)
    target.proof = kept.proof
    asked = [*own, *found.exchanges]
    if not any(exchange.reply.strip() for exchange in asked):
        raise DataError(
            f"{plan.name} answered none of {len(asked)} ordinary questions about {plan.folder}; no attack was run, "
            "because its figures would say nothing. Check the system, and the address"
        )
    answered = [e for e in found.exchanges if e.answered]
    whole = [e for e in answered if e.question[:1].isupper()]  # some drafted questions contain only key words
    return found, (own or whole or answered or asked)[0]


async def _resumed_answers(plan: EndpointPlan, target: _KeptAnswers) -> tuple[list[Exchange], LivenessResult]:
    """Like ``_plain_answers``, resumed after a failed request."""
    resumption = _Resumption(finished=0)
    while True:
        try:
            return await _plain_answers(plan, target)
        except BackendError:
            if not await resumption.may_continue(len(target.answers)):
                raise


async def _plain_answers(plan: EndpointPlan, target: MeteredTarget) -> tuple[list[Exchange], LivenessResult]:
    """The answers to the operator's questions, and to those about documents."""
    own = list[Exchange]()
    for text in plan.questions:
        try:
            own.append(Exchange.from_answer(text, await target.ask(Query(text, "try"))))
        except QueryError:
            own.append(Exchange(text, "", refused=True))
    left = max(2, plan.queries.plain - len(own))
    return own, await check_liveness(ON, target, plan.documents, plan.config.redteam, left)


async def _paste(
    plan: EndpointPlan, target: MeteredTarget, store: CampaignStore, steps: Steps, findings: _Findings
) -> PastedTexts | None:
    """Pastes records and texts of the baseline; None: nothing was measured."""
    if not plan.queries.pairs:
        least = f"{MIN_CANDIDATES} texts of {MIN_SHORT_RECORD_WORDS} words"
        findings.gaps.append(f"No record was pasted: that needs at least {least}.")
        return None
    experiment = _experiment(plan, target, store)
    split, attack = experiment.split, experiment.attacks[ATTACK.use]
    with steps("pasting records and texts of the baseline", experiment.total) as count:
        trials, resumption = await experiment.run(count), _Resumption()
        while trials.errors and await resumption.may_continue(len(trials.done[ATTACK.use, ON])):
            trials = await experiment.run()
    findings.failures += [f"{name}: {reason}." for name, reason in trials.errors.items()]
    result = attack_result(ATTACK.use, attack, trials, split.half, seen=False)
    checks = (genre_check(split), refusal_check(trials))
    findings.gaps += [f"{check.reason}." for check in checks if check.status is not CheckStatus.PASS]
    pasted = {trial.candidate for trial in trials.done[ATTACK.use, ON]}
    if trials.missing:
        findings.gaps.append(f"{len(pasted)} of {experiment.total} texts were pasted; then the requests were used up.")
    inside, outside = (
        [(d, experiment.exchanges(ATTACK.use, ON, d.source)[0]) for d in texts if d.source in pasted]
        for texts in (split.members, split.nonmembers)
    )
    if not inside or not outside:
        return None
    if 2 * (unanswered := sum(not exchange.answered for _, exchange in inside)) > len(inside):
        findings.gaps.append(
            f"{unanswered} of {len(inside)} pasted records got a refusal or no answer: the AUC and the quoted share "
            "say little about questions that the system answers."
        )
    quoted, others = ([quotes(d.text, e.question, e.reply) for d, e in pairs] for pairs in (inside, outside))
    record, shown = inside[quoted.index(True) if True in quoted else 0]
    records, baseline = (stats.proportion(sum(found), len(found)) for found in (quoted, others))
    return PastedTexts(shown.question, shown.reply, record.text, records, baseline, result)


async def _check_end(plan: EndpointPlan, target: MeteredTarget, before: LivenessResult, findings: _Findings) -> None:
    """Checks that the system still answers from its documents, with the requests that are left."""
    if not before.proven:
        return  # a gap already
    try:
        check = await check_still_answers(target, before, plan.config.redteam.concurrency)
    except (BackendError, BudgetExhausted) as error:
        findings.gaps.append(f"Whether the system still answered at the end is unknown: {error}.")
    else:
        findings.gaps += [f"{check.reason}."] if check else []


def _experiment(plan: EndpointPlan, target: MeteredTarget, store: CampaignStore) -> Experiment:
    attack: MembershipAttack = build("attack", ATTACK)
    settings = ExperimentPlan(
        seed=SEED,
        k=plan.config.rag.k,
        questions=2 * plan.queries.pairs,
        concurrency=plan.config.redteam.concurrency,
        waits=(),  # the target retries by itself
    )
    split, unknown = _split(plan), IndexedSource((), np.empty((0, 0), np.float32))
    indexed = {document.source: unknown for document in split.members}
    return Experiment({ATTACK.use: attack}, split, {ON: target}, store, indexed, settings)


def _split(plan: EndpointPlan) -> Split:
    """Records as members, texts of the baseline as non-members."""
    members, count = plan.records[: plan.queries.pairs], plan.queries.pairs
    rows = list(range(len(members))), list(range(len(members), len(members) + len(plan.others)))
    return split_from_pools([*members, *plan.others], *rows, (count, count), np.random.default_rng(SEED))


async def _crawl(
    plan: EndpointPlan, target: MeteredTarget, store: CampaignStore, steps: Steps, findings: _Findings
) -> tuple[ExtractionResult | None, Exchange | None]:
    """Crawls the system, and compares the replies with the sampled chunks. Returns the result and the last exchange."""
    total, questions = (
        plan.queries.total,
        min(plan.queries.crawl, plan.queries.total - target.requests - QUESTIONS_AFTER),
    )
    if questions < 1 or findings.failures:
        return None, None
    settings = CrawlPlan(seed=SEED, k=plan.config.rag.k, questions=questions, waits=())
    attack = build("crawler", PluginSpec(use=CRAWLER), plan.config.folder, {Embedder: plan.embedder})
    crawler = Crawler(CRAWLER, attack, {ON: target}, store, settings)
    with steps(f"{CRAWLER} crawls", questions) as count:
        traces, resumption = await crawler.run(count), _Resumption()
        while traces[ON].error and await resumption.may_continue(len(traces[ON].exchanges)):
            traces = await crawler.run()
    whole = [replace(d, text=d.content, title="") for d in plan.chunks]
    median = max(1, int(np.median([len(d.text.split()) for d in whole])))
    step = partial(steps, f"comparing the replies with {len(whole)} chunks")
    made = await asyncio.to_thread(measure_crawl, crawler, traces, whole, plan.embedder, [median], step=step)
    result, exchanges = without_context(made).by_target[ON], traces[ON].exchanges
    if len({exchange.reply for exchange in exchanges if exchange.answered}) <= 1 < len(exchanges):
        findings.gaps.append(
            f"The crawler's {len(exchanges)} questions, in English, got refusals or one and the same reply: the copied "
            "share says little about crawlers that ask otherwise."
        )
    if result.error:
        findings.failures.append(f"{CRAWLER}: {result.error}.")
    elif result.questions < plan.queries.crawl and target.requests + QUESTIONS_AFTER >= total:
        findings.gaps.append(
            f"All {total} requests were used, some for retries or repeated questions: the crawler asked "
            f"{result.questions} of {plan.queries.crawl} questions."
        )
    return result, exchanges[-1] if exchanges else None
