"""A red-team campaign on an owner's own system: from the configuration to a report.

The lab copies the index, holds some documents out of it, and attacks the copy, guard off and guard on. Nothing is
written into the owner's index, and nobody who asks it notices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import platform
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from casemate import calibration, capabilities, registry
from casemate.app import App, Embedding, build, calibration_settings, published_attacks
from casemate.backends.sqlite import SqliteIndex
from casemate.config import Part
from casemate.corpus import Corpus
from casemate.crew import Orders, Systems, crew, files_of
from casemate.defenses.crawl_limit import CrawlLimit
from casemate.errors import ConfigError
from casemate.guard import Guard
from casemate.lab import audit, datasets, generation
from casemate.lab.box import CachedEmbedder, CachedGenerator
from casemate.lab.calibrate import calibrate
from casemate.lab.datasets import Split, Stored
from casemate.lab.errands import Send
from casemate.lab.experiment import Experiment, Plan, Trials
from casemate.lab.judge import OFF, ON, Gate, judge_campaign
from casemate.lab.ledger import Ledger
from casemate.lab.questions import made_questions
from casemate.lab.results import AttackResult, Campaign, Check, Figures, Status, Transcript, Utility
from casemate.lab.wording import overall, redact, scrub
from casemate.protocols import Generator, Index, MembershipAttack
from casemate.rag import Rag
from casemate.spread import Alone
from casemate.stats import Rate
from casemate.types import DEFAULT_TENANT, UNKNOWN, Query, Secret
from casemate.words import STOP_WORDS, words

log = logging.getLogger(__name__)

Steps: TypeAlias = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
"""Opens a progress display for a step of so many items, if that is known; gives what counts them."""
SIMULATED = (
    "The reader is a simulation ('obedient'): a script that stands in for an able and obedient language model, the "
    "worst case for the owner."
)
WRITTEN = "The attacks' questions were written by script, without a language model."
REACHED = "The system could be asked to the end"
SWAYED = "sessions_swayed_by_a_member_not_withheld"
NOT_TESTED = (
    "Attackers who share what they learn over several clients' names.",
    "Extraction of texts, and poisoning: these attacks ask for membership only.",
)


@dataclass(frozen=True, slots=True)
class Lab:
    """A wired campaign: the copy of the index, the systems over it, and what is asked.

    Attributes:
        app: The owner's system, which is only read.
        split: Who is a member.
        rag: The bare system over the lab's index.
        make_guard: A guard without a past over an index.
        experiment: What is run.
        held: What the lab's index holds of each member.
    """

    app: App
    split: Split
    rag: Rag
    make_guard: Callable[[Index], Guard]
    experiment: Experiment
    held: Mapping[str, Stored]


async def run_campaign(
    app: App, log: Sequence[str], benign: Sequence[str], steps: Steps, tenant: str = DEFAULT_TENANT
) -> Campaign:
    """Runs what the configuration says, or goes on with what was interrupted.

    Args:
        app: The owner's system, indexed.
        log: Harmless questions to calibrate the lab's guard on; empty: made.
        benign: Others, which tell what the guard costs; empty: made.
        steps: Shows progress.
        tenant: Whose documents.

    Raises:
        CasemateError: If the campaign cannot be set up. What goes wrong in an attack is in the campaign.
    """
    with ExitStack() as opened:
        lab = await _set_up(app, log, steps, tenant, opened)
        with steps("attacking, guard off and guard on", lab.experiment.total) as count:
            trials = await lab.experiment.run(count)
        worlds = await _audit(lab, steps)
        utility = await _utility(lab, benign, steps)
        return _campaign(lab, trials, worlds, utility)


async def _set_up(app: App, log: Sequence[str], steps: Steps, tenant: str, opened: ExitStack) -> Lab:
    section = app.config.redteam
    folder = app.config.folder / section.folder
    split = _split(app, tenant)
    index: Index = opened.enter_context(closing(SqliteIndex(folder / "index.db")))
    embedder = CachedEmbedder(app.guard.rag.embedder)
    ledger = opened.enter_context(Ledger(folder / "ledger.db"))
    name, reader = reader_of(app)
    generator = CachedGenerator(reader, ledger, name)
    rag = Rag(embedder, index, generator, app.guard.rag.instructions)
    with steps("copying the index without the non-members", None) as count:
        datasets.hold_out(app.index, index, split, tenant, count)
    attacks: dict[str, MembershipAttack] = {p.use: build("attack", p, app.config.folder) for p in section.attacks}
    fitted = await _calibrate(app, rag, log, steps, tenant)

    systems = Systems(app.config, app.config.folder, rag, fitted)
    held = datasets.stored(index, {d.source for d in split.members}, tenant)
    plan = Plan(
        seed=section.seed,
        k=app.config.rag.k,
        tenant=tenant,
        identity=section.identity,
        questions=section.budget,
        concurrency=section.concurrency,
        label=label_of(app, name, fitted.read_text(encoding="utf-8") if fitted else ""),
    )
    orders = partial(Orders, split=split, held=held, plan=plan, reader=name, place=(folder / "index.db").absolute())
    send = _helpers(app, systems, generator, orders)
    experiment = Experiment(attacks, split, systems.targets(), ledger, held, plan, send)
    return Lab(app, split, rag, systems.guard, experiment, held)


def _helpers(app: App, systems: Systems, generator: CachedGenerator, orders: Callable[..., Orders]) -> Send | None:
    """Who runs trials elsewhere; None: nobody, or their order matters."""
    if isinstance(app.spread, Alone):
        return None
    if any(isinstance(d, CrawlLimit) and d.colluders for d in app.guard.defenses):
        log.warning("crawl_limit compares clients, which workers cannot: this process runs all trials")
        return None
    fitted = systems.fitted.absolute() if systems.fitted else None
    complete = orders(
        config=(app.config, app.config.folder.absolute()),
        embedding=Embedding.of(app.config, app.guard.rag.embedder.fingerprint),
        instructions=systems.rag.instructions,
        fitted=fitted,
        files=None,
    )
    if not app.spread.here:
        complete = dataclasses.replace(complete, files=files_of(complete.place, fitted))
    return crew(app.spread, complete, generator)


def _split(app: App, tenant: str) -> Split:
    section, corpus = app.config.redteam, app.config.rag.corpus
    if corpus is None:
        raise ConfigError("the red team needs whole documents: set rag.corpus in casemate.yaml")
    found = Corpus(app.config.folder / corpus, app.config.rag.max_file_mb)
    documents = datasets.read(found, app.index.digests(tenant).keys())
    if section.split is not None:
        return datasets.read_split(app.config.folder / section.split, documents, section.seed)
    return datasets.split(documents, section.members, section.nonmembers, section.seed)


def reader_of(app: App) -> tuple[str, Generator]:
    """Who writes the answers, and a label of it."""
    part = app.config.redteam.reader
    if part.use == "own":
        return f"own:{_told(app.config.rag.generator)}", app.guard.rag.generator
    return _told(part), build("generator", part, app.config.folder)


async def _calibrate(app: App, rag: Rag, log: Sequence[str], steps: Steps, tenant: str) -> Path | None:
    """The lab's own calibration, made as the owner's is but on the lab's index: it must not know the non-members."""
    if app.calibrated is None:
        return None
    settings = calibration_settings(app.config, tenant)
    facts = [rag.embedder.fingerprint, rag.index.digests(tenant), list(log), dataclasses.asdict(settings)]
    path = app.config.folder / app.config.redteam.folder / f"calibration-{_hash(facts)}.json"
    if tenant not in calibration.read(path):
        with steps("calibrating the lab's guard", None) as count:
            calibration.write(path, tenant, await calibrate(rag, published_attacks(), log, settings, count))
    return path


def label_of(app: App, reader: str, learnt: object) -> str:
    """A fingerprint of everything but plan, split and attacks that the results depend on."""
    config = app.config
    parts = [_told(config.rag.embedder), *map(_told, config.guard.defenses), config.guard.on_error]
    return _hash([parts, app.guard.rag.instructions, reader, learnt, version("casemate")])


def _told(part: Part) -> str:
    """A plug-in with its options. A secret counts, but is not to be read: the label is kept in the lab's file."""
    options = {k: _hash(str(v)) if isinstance(v, Secret) else repr(v) for k, v in part.options.items()}
    return f"{part.use}:{options}"


async def _audit(lab: Lab, steps: Steps) -> audit.Worlds:
    sessions = lab.experiment.sessions(ON)
    with steps("asking in two worlds", len(lab.experiment.attacks) * len(lab.split.members)) as count:
        return await audit.two_worlds(lab.rag.index, lab.make_guard, sessions, lab.held, lab.experiment.plan, count)


async def _utility(lab: Lab, benign: Sequence[str], steps: Steps) -> Utility:
    plan = lab.experiment.plan
    source = f"{len(benign)} questions of a log"
    if not benign:
        rng = np.random.default_rng(plan.seed + 1)
        benign = made_questions(lab.split.members, 300, rng)
        source = f"{len(benign)} questions made from the corpus: nobody has asked them"
    queries = [Query(text, f"harmless-{i}", plan.tenant, plan.k) for i, text in enumerate(benign)]
    with steps("asking harmless questions", len(queries)) as count:
        return await audit.utility(lab.rag, lab.make_guard(lab.rag.index), queries, source, count)


def _campaign(
    lab: Lab, trials: Trials, worlds: audit.Worlds | None, utility: Utility | None, broken: str = ""
) -> Campaign:
    section = lab.app.config.redteam
    gate = Gate(section.gate.adjusted_accuracy, section.gate.harmless)
    found = worlds.audit if worlds else None
    judged = judge_campaign(trials, lab.split, lab.experiment.attacks, gate, utility, found)
    failed = (Check(REACHED, Status.ERROR, None, None, broken),) if broken else ()
    left = sorted(set(registry.names("attack")) - set(lab.experiment.attacks))
    simulated = [SIMULATED] if section.reader.use == "obedient" else []
    return Campaign(
        id=uuid.uuid4().hex,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        status=Status.ERROR if broken else judged.status,
        attacks=judged.attacks,
        utility=utility,
        audit=found,
        checks=(*failed, *judged.checks),
        not_tested=(*((f"Attacks that were not run: {', '.join(left)}.",) if left else ()), *NOT_TESTED),
        simulated=(*simulated, WRITTEN),
        transcripts=tuple(transcripts(lab.experiment)),
        evidence=_evidence(lab, worlds),
        cost=_cost(lab, trials),
    )


def _evidence(lab: Lab, worlds: audit.Worlds | None) -> dict[str, Any]:
    app, plan = lab.app, lab.experiment.plan
    digests = app.index.digests(plan.tenant)
    return {
        "target": "own",
        "capabilities": sorted(capabilities.OWN),
        "seed": plan.seed,
        "k": plan.k,
        "identity": plan.identity,
        "corpus": _hash(sorted(digests.items())),
        "documents": len(digests),
        "chunks": lab.rag.index.moments(plan.tenant).n,
        "embedder": app.guard.rag.embedder.fingerprint,
        "split": lab.split.fingerprint,
        "members": len(lab.split.members),
        "nonmembers": len(lab.split.nonmembers),
        "near_duplicates_dropped": lab.split.dropped,
        "guard": [part.use for part in app.config.guard.defenses],
        "guard_options": _hash(repr(app.config.guard)),
        "reader": app.config.redteam.reader.use,
        "members_in_context_despite_guard": worlds and worlds.exposed,
        SWAYED: worlds and worlds.swayed,
        "questions_about_members": worlds and worlds.asked,
        "versions.casemate": version("casemate"),
        "versions.python": platform.python_version(),
        "versions.numpy": np.__version__,
        "versions.platform": sys.platform,
        **({"notes": lab.split.notes} if lab.split.notes else {}),
    }


def _cost(lab: Lab, trials: Trials) -> dict[str, float]:
    generator = lab.rag.generator
    counts = (generator.calls, generator.hits) if isinstance(generator, CachedGenerator) else (0, 0)
    return {**trials.cost, "model_calls": counts[0], "answered_from_cache": counts[1], **served(lab.app)}


def served(app: App) -> dict[str, float]:
    """What answers cost that a defense wrote for the owner's users: not in a campaign."""
    return {f"live_{name}": value for name, value in generation.spent(app.store.scan("generation")).items()}


def transcripts(experiment: Experiment, sides: Sequence[str] = (OFF, ON)) -> Iterator[Transcript]:
    """The first exchange about the first member and non-member of each attack. Only the attack's own words show.

    These are in its questions about each of several candidates, and, but for stop words, in the text of none of them:
    what all records of a collection share is the collection's, not the attack's.
    """
    groups = {True: experiment.split.members[:3], False: experiment.split.nonmembers[:3]}
    theirs = {word for group in groups.values() for d in group for word in words(d.content)} - STOP_WORDS
    for name in experiment.attacks:
        sessions = [experiment.session(name, sides[0], d.source) for group in groups.values() for d in group]
        asked = [set(words(s[0].question)) for s in sessions if s]
        own = [*(set.intersection(*asked) - theirs if len(asked) > 1 else ()), "yes", "no", UNKNOWN]
        for target, member in product(sides, groups):
            for exchange in experiment.session(name, target, groups[member][0].source)[:1]:
                yield Transcript(name, target, member, redact(exchange.question, own), redact(exchange.reply, own))


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def show(campaign: Campaign, out: Console) -> None:
    """The verdict and the table, guard off against guard on."""
    campaign = scrub(campaign)
    status = overall(campaign)
    out.print(banner(status))
    out.print(target_line(campaign.evidence), soft_wrap=True)
    out.print(_table(campaign))
    if campaign.utility:
        u = campaign.utility
        out.print(
            f"The price: {rate_text(u.flagged)} of {u.questions} harmless questions had a document withheld, "
            f"{rate_text(u.answer_changed)} got another answer ({escape(u.source)})."
            if u.flagged
            else f"The price: {rate_text(u.answer_changed)} of {u.questions} harmless questions ({escape(u.source)}).",
            soft_wrap=True,
        )
    if campaign.audit:
        a = campaign.audit
        swayed = campaign.evidence.get(SWAYED)
        beside = f" Sessions in which a member changed a context without being withheld: {swayed}." if swayed else ""
        out.print(
            f"Two worlds: {a.differing} of {a.pairs} contexts differed between withheld and absent.{beside}",
            soft_wrap=True,
        )
    for check in campaign.checks:
        if check.status is not Status.PASS:
            name = f"{check.attack}: {check.name}" if check.attack else check.name
            out.print(f"[bold]{check.status.value}[/bold] {escape(name)}: {escape(check.why)}", soft_wrap=True)
    out.print(cost_line(campaign.cost), soft_wrap=True)
    for line in campaign.simulated:
        out.print(f"[dim]simulated: {escape(line)}[/dim]", soft_wrap=True)
    for line in campaign.not_tested:
        out.print(f"[dim]not tested: {escape(line)}[/dim]", soft_wrap=True)


def target_line(evidence: Mapping[str, Any]) -> str:
    """Who was attacked, and what could be asked of him, for the console."""
    off = f", guard off: {evidence['target_off']}" if "target_off" in evidence else ""
    can = ", ".join(evidence.get("capabilities", ())) or "not said"
    return escape(f"target: {evidence.get('target', 'own')}{off}; capabilities: {can}")


def cost_line(cost: Mapping[str, float]) -> str:
    """What it took, for the console."""
    told = [f"{name.replace('_', ' ')} {value:,.0f}" for name, value in cost.items() if not name.startswith("live_")]
    return f"it took: {', '.join(told) or 'not recorded'}"


def _table(campaign: Campaign) -> Table:
    """What each attack achieved: area under the ROC curve, .5 is a coin toss."""
    found = Table(title="Can members be told from others? AUC [95 %]; .5 is a coin toss", title_justify="left")
    for column in ("attack", "guard off", "guard on", "withheld"):
        found.add_column(column, no_wrap=True)
    for a in campaign.attacks:
        found.add_row(escape(a.name), *(_cells(a) if not a.error else ("error", "", "")))
    return found


def _cells(a: AttackResult) -> tuple[str, str, str]:
    def auc(f: Figures | None) -> str:
        return rate_text(f.auc) if f else "not run"

    withheld = f"{a.on.recall_query.value:.0%}" if a.on and a.on.recall_query else ""
    return auc(a.off), auc(a.on), withheld


def rate_text(r: Rate | None) -> str:
    """A rate with its interval, for the console."""
    return f"{r.value:.2f} \\[{r.low:.2f}, {r.high:.2f}]" if r else "too few to say"


def banner(status: Status) -> str:
    """How it ended, in its colour, for the console."""
    colours = {Status.PASS: "green", Status.FAIL: "red", Status.INCONCLUSIVE: "yellow", Status.ERROR: "red"}
    return f"[bold {colours[status]}]{status.upper()}[/bold {colours[status]}]"
