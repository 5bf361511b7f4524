"""Diagnoses an installation: checks every part and reports faults with their remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from casemate import plugins
from casemate.app import open_app
from casemate.backends.indexes.attached import AttachedIndex
from casemate.config import FILE, Config, PluginSpec, read
from casemate.errors import CasemateError, DataError
from casemate.guard import generation_costs
from casemate.guard.audience import AudiencePolicy
from casemate.guard.calibration.log_review import log_warnings, weak_attacks_note
from casemate.guard.client_state.crawl_evidence import RecordedLimits
from casemate.guard.defenses.crawl_limit import CrawlLimit, daily_share_notes
from casemate.guard.defenses.quorum.bounds import describe_bounds
from casemate.guard.defenses.reindex import Reindex
from casemate.maths.calibration import Calibration
from casemate.maths.stats import clopper_pearson
from casemate.monitor.alerts.delivery_queue import DELIVERY_KIND, DeliveryOutcome
from casemate.monitor.alerts.outbox import LOOK_BACK
from casemate.monitor.honeytokens.planting import find_records
from casemate.monitor.poisoning.quarantine import Quarantine, QuarantineState
from casemate.monitor.service import missing_screening, open_alert_dispatcher
from casemate.protocols import CalibratedDefense, Defense
from casemate.rag.corpus import Corpus, Source
from casemate.rag.ingest import Ingest
from casemate.reindexing.registry import reindex_due
from casemate.reports.format import plural, utc_time
from casemate.system import App
from casemate.types import DEFAULT_TENANT, Event, Query, access_labels

KEEPS_HITS = frozenset({"canary_token", "honeytoken"})
"""Defenses that see hits and, by default, withhold none."""
FEW = 30
"""Documents below which statistical defenses decide nothing (METHODS F1)."""
PARSED = 20
"""Largest number of new or changed sources that are parsed to find those that cannot be read."""
MANY = 0.2
"""Share of flagged questions above which a calibrated guard and benign clients are an unlikely cause."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. ``ok`` is None for a note, or if the check could not run."""

    name: str
    ok: bool | None
    detail: str


def examine_configuration(path: Path | None) -> Finding:
    """Checks keys and values of the configuration file and the options of its plug-ins; opens nothing.

    Args:
        path: The configuration file; None as for ``config.read``, but without a file the check fails.
    """
    try:
        config = read(path or Path(FILE), variables_needed=False)
        for role, spec in _plug_ins(config):
            plugins.validate(role, spec, config.folder)
    except CasemateError as error:
        return Finding("configuration", False, str(error))
    return Finding("configuration", True, str(path or FILE))


def _plug_ins(config: Config) -> Iterator[tuple[str, PluginSpec]]:
    rag, redteam, monitor = config.rag, config.redteam, config.monitor
    yield from (("embedder", rag.embedder), ("index", rag.index), ("generator", rag.generator))
    yield from (("defense", spec) for spec in config.guard.defenses)
    yield from (("attack", spec) for spec in redteam.attacks)
    yield from (("crawler", spec) for spec in redteam.crawl.attacks)
    yield from (("channel", spec) for spec in monitor.channels)
    yield "store", config.store


def examine(path: Path | None, fix: bool = False) -> Iterator[Finding]:
    """Checks configuration, index, guard, event store, embedder and corpus.

    Args:
        path: The configuration file; None as for ``config.read``.
        fix: Whether to rebuild wrong corpus moments from the stored vectors.
    """
    try:
        config = read(path)
        there = path or Path(FILE)
        yield Finding("configuration", True, str(there) if there.exists() else f"no {FILE} here: default configuration")
        app = open_app(config)
    except CasemateError as error:
        yield Finding("wiring", False, str(error))
        return
    with app:
        yield from _index(app, fix)
        yield from _guard(app)
        yield from _order(app)
        yield from _audience(app)
        yield from _labels(app)
        yield from _budgets(app)
        yield from _reindexed(app)
        yield from _events(app)
        yield from _channels(app)
        yield Finding("generator", None, f"{config.rag.generator.use}: not checked; try 'casemate ask'")
        yield _vectors(app)
        if config.rag.corpus is not None:
            yield from _corpus(app, config)


def _try(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, look())
    except CasemateError as error:
        return Finding(name, False, str(error))


def _index(app: App, fix: bool) -> Iterator[Finding]:
    try:
        wrong = app.index.check()
        if wrong and fix:
            app.index.rebuild()
            yield Finding("index", None, f"rebuilt the corpus moments: {'; '.join(wrong)}")
            wrong = app.index.check()
        yield from (Finding("index", False, problem) for problem in wrong)
        if not wrong:
            yield Finding("index", True, "vectors and corpus moments agree")
        if isinstance(app.index, AttachedIndex) and app.index.summary():
            drift = app.index.measure_drift()
            yield Finding("attached", None if drift.share else True, drift.describe())
        for tenant in app.index.tenants():
            n = app.index.moments(tenant).n
            detail = f"tenant {tenant!r}: {n} chunks of {len(app.index.digests(tenant))} sources"
            few = "; too few for statistical defenses: they decide nothing and hide nothing" if n < FEW else ""
            yield Finding("documents", None if few else True, detail + few)
            if missing := missing_screening(app, tenant):
                yield Finding("screening", None, f"tenant {tenant!r}: {missing}")
        if not app.index.tenants():
            yield Finding("documents", None, f"the index is empty; run '{app.indexing_command}'")
    except CasemateError as error:
        yield Finding("index", False, str(error))


def _guard(app: App) -> Iterator[Finding]:
    """Checks that the calibration fits the collection."""
    if app.config.guard.mode == "off":
        return
    try:
        tenants = app.index.tenants()
    except CasemateError as error:
        yield Finding("guard", False, str(error))
        return
    for defense, tenant in product(app.calibrated, tenants):
        try:
            found = defense.ready(tenant, app.index.moments(tenant).n)
        except CasemateError as error:
            yield Finding("guard", False, str(error))
            continue
        if found is not None:
            state = "calibrated on" if found.benign else "not calibrated, withholds nothing:"
            detail = f"{defense.name}, tenant {tenant!r}: {state} {found.source}, {found.at}"
            yield Finding("guard", True if found.benign else None, detail)
            yield from _calibration_notes(defense, found, tenant)


def _calibration_notes(defense: CalibratedDefense, found: Calibration, tenant: str) -> Iterator[Finding]:
    """Repeats what ``casemate index`` and ``casemate calibrate`` printed about a calibration."""
    rate = defense.significance or 0.0
    notes = [*log_warnings(found, rate), weak_attacks_note(found, rate)] if found.benign else []
    yield from (Finding("calibration", None, f"{defense.name}, tenant {tenant!r}: {note}") for note in notes if note)


def _order(app: App) -> Iterator[Finding]:
    """Names the defenses that withhold hits after ``crawl_limit`` has counted them as shown."""
    names = [spec.use for spec in app.config.guard.defenses]
    if "crawl_limit" not in names or app.config.guard.mode == "off":
        return
    for name, defense in list(zip(names, app.guard.defenses, strict=True))[names.index("crawl_limit") + 1 :]:
        if type(defense).on_retrieve is not Defense.on_retrieve and name not in KEEPS_HITS:
            detail = f"{name} withholds chunks that crawl_limit, before it, has counted as shown"
            yield Finding("order of defenses", None, f"{detail}; place {name} before crawl_limit")


def _audience(app: App) -> Iterator[Finding]:
    """Describes the audience policy, and counts keys and sources that its rules do not cover."""
    policy = app.guard.audience
    if policy.unentitled == "full":
        yield Finding("audience", True, "every client may read every source that its labels allow, in full")
        return
    try:
        clients = _client_keys(app)
        restricted = sum(policy.restricts(Query("", groups=frozenset(b.get("groups", ())))) for b in clients)
        enforced = app.mode == "enforce"
        how = "" if enforced else f"; NOT carried out in mode {app.mode}: run 'casemate enforce'"
        detail = (
            f"unentitled clients receive {policy.unentitled}; {plural(len(policy.rules), 'rule')}"
            f"{' and a function' if policy.function else ''}; "
            f"{restricted} of {len(clients)} client keys are restricted{how}"
        )
        yield Finding("audience", enforced, detail)
        yield from _groups(policy, clients)
        wanted = sorted({key for rule in policy.rules for key in rule.metadata or ()})
        patterns = sorted({pattern for rule in policy.rules for pattern in rule.sources})
        for tenant in app.index.tenants() if wanted or patterns else ():
            sources = dict(app.index.metadata(tenant))
            for pattern in patterns:
                covered = sum(fnmatchcase(name, pattern) for name in sources)
                detail = f"tenant {tenant!r}: {covered} of {len(sources)} sources match {pattern!r}"
                yield Finding("audience", True if covered else None, detail)
            for key in wanted:
                lacking = sum(metadata.get(key) in (None, "", []) for metadata in sources.values())
                detail = f"tenant {tenant!r}: {lacking} of {len(sources)} sources lack the metadata {key!r}"
                yield Finding("audience", None if lacking else True, f"{detail}; no rule with it covers them")
    except CasemateError as error:
        yield Finding("audience", False, str(error))


def _client_keys(app: App) -> list[Mapping[str, Any]]:
    """The recorded grants of all valid client keys."""
    events = [e.body for e in app.store.scan("key")]
    revoked = {body.get("key") for body in events if body.get("action") == "revoked"}
    return [b for b in events if b.get("role") == "client" and b.get("key") not in revoked]


def _labels(app: App) -> Iterator[Finding]:
    """Counts the sources with access labels, and compares their labels with those of client keys.

    An attached collection is not read: that could take long.
    """
    if isinstance(app.index, AttachedIndex):
        return
    try:
        held = {label for key in _client_keys(app) for label in key.get("labels", ())}
        for tenant in app.index.tenants():
            sources = {name: access_labels(metadata) for name, metadata in app.index.metadata(tenant)}
            restricted = [labels for labels in sources.values() if labels is not None]
            used = Counter(label for labels in restricted for label in labels)
            if not restricted and not held:
                continue
            labeled = len(restricted)
            detail = f"tenant {tenant!r}: {labeled} of {len(sources)} sources are restricted to keys with a label (acl)"
            named = ", ".join(f"{label} {plural(count, 'source')}" for label, count in sorted(used.items()))
            yield Finding("labels", True if labeled else None, detail + (f": {named}" if named else ""))
            if unread := sorted(used.keys() - held):
                yield Finding("labels", None, f"tenant {tenant!r}: no client key has the labels {unread}")
            if unused := sorted(held - used.keys()):
                yield Finding("labels", None, f"tenant {tenant!r}: keys have labels that no source has: {unused}")
    except CasemateError as error:
        yield Finding("labels", False, str(error))


def _groups(policy: AudiencePolicy, clients: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Compares the groups of rules with those of client keys: an unknown group may be misspelled."""
    named = {group for rule in policy.rules for group in rule.groups}
    held = {group for body in clients for group in body.get("groups", ())}
    if clients and (unused := sorted(named - held)):
        yield Finding("audience", None, f"no client key has these groups of guard.audience.entitled: {unused}")
    if policy.function is None and (unnamed := sorted(held - named)):
        yield Finding("audience", None, f"no rule of guard.audience.entitled names these groups of keys: {unnamed}")


def _budgets(app: App) -> Iterator[Finding]:
    """Describes what the budgets of units allow, and what is spent of them. Break-glass is a note: it weakens."""
    try:
        sources = sum(len(app.index.digests(tenant)) for tenant in app.index.tenants())
        for line in describe_bounds(app.guard.defenses, sources):
            yield Finding("budgets", None if line.startswith("break-glass") else True, line)
    except CasemateError as error:
        yield Finding("budgets", False, str(error))


def _limited(app: App, verdicts: Sequence[Event]) -> Iterator[Finding]:
    """Counts the clients that ``crawl_limit`` limited lately, and checks its daily share against the collection."""
    limits = [defense for defense in app.guard.defenses if isinstance(defense, CrawlLimit)]
    if not limits or app.config.guard.mode == "off":
        return
    try:
        for tenant in app.index.tenants():
            for note in daily_share_notes(limits, app.index.moments(tenant).n, app.config.rag.k):
                yield Finding("daily share", None, f"tenant {tenant!r}: {note}")
    except CasemateError as error:
        yield Finding("daily share", False, str(error))
    now = datetime.now(UTC)
    since = now - timedelta(hours=max(24.0, *(limit.hours for limit in limits)))
    recorded, clients = RecordedLimits(app.store, since), set[tuple[Any, str]]()
    for event in verdicts:
        if event.at >= since and recorded.add(event) and event.at > now - timedelta(hours=24):
            clients.add((event.body.get("tenant"), str(event.body.get("client", ""))))
    yield from (Finding("crawl limit", None, line) for line in recorded.describe())
    detail = f"crawl_limit limited the context or the answers of {plural(len(clients), 'client')} in the last 24 hours"
    yield Finding("crawl limit", None if clients else True, detail + "; see 'casemate client list'" * bool(clients))


def _reindexed(app: App) -> Iterator[Finding]:
    """Checks that the re-indexing fits the collection."""
    for defense in app.guard.defenses:
        if not isinstance(defense, Reindex):
            continue
        try:
            tenants = app.index.tenants()
        except CasemateError as error:
            yield Finding("reindex", False, str(error))
            continue
        for tenant in tenants:
            try:
                why = reindex_due(defense.ready(tenant), app.index)
                state = f"{why}: run 'casemate reindex'" if why else "fits the collection"
                yield Finding("reindex", None if why else True, f"tenant {tenant!r}: {state}")
            except CasemateError as error:
                yield Finding("reindex", False, str(error))


def _vectors(app: App) -> Finding:
    """Checks that similar texts have similar vectors."""

    def look() -> str:
        a, b, c = app.guard.rag.embedder.embed(["the cat sleeps", "a cat is asleep", "quarterly tax return"])
        if not float(a @ b) > float(a @ c):
            raise CasemateError("the embedder ranks an unrelated text above a similar one; check its weights")
        return app.guard.rag.embedder.fingerprint

    return _try("embedder", look)


def _events(app: App) -> Iterator[Finding]:
    """Checks the event store, and what it says of the verdicts about clients."""
    is_canary = app.config.monitor.is_canary
    try:
        events = [e for e in app.store.scan("verdict") if not is_canary(str(e.body.get("client", "")))]
        yield from _limited(app, events)
        yield from _verdicts(events, generation_costs.summarize_costs(app.store.scan("generation")))
    except CasemateError as error:
        yield Finding("event store", False, str(error))


def _verdicts(events: Sequence[Event], costs: Mapping[str, float]) -> Iterator[Finding]:
    """Number of verdicts, share of flagged questions by defense, and cost of generated answers."""
    parts, many, failed = [f"{len(events)} verdicts"], [], []
    for defense in sorted({str(e.body.get("defense")) for e in events}):
        given = [e.body for e in events if str(e.body.get("defense")) == defense]
        failures = [str(b["evidence"].get("message")) for b in given if "error" in b.get("evidence", {})]
        failed += [f"{defense} in {len(failures)} of {len(given)} questions, last: {failures[-1]}"] if failures else []
        bodies = [body for body in given if not {"error", "undecided"} & body.get("evidence", {}).keys()]
        if len(bodies) < len(given):
            parts.append(f"{defense} did not decide {len(given) - len(bodies)} of {len(given)} questions")
        if not bodies:
            continue
        flags = [body for body in bodies if body.get("flagged")]
        first = sum(body.get("evidence", {}).get("reasons") != ["before"] for body in flags)
        low, high = clopper_pearson(len(flags), len(bodies))
        new = f", {first} of them new, the others repeat an earlier decision" if first < len(flags) else ""
        share = f"{len(flags) / len(bodies):.2f} [{low:.2f}, {high:.2f}]{new}"
        parts.append(f"{defense} flagged {len(flags)} of {len(bodies)} questions: {share}")
        many += [defense] if low > MANY else []
    parts += [generation_costs.format_costs(costs)] if costs else []
    yield Finding("event store", True, "; ".join(parts))
    if failed:
        yield Finding("failures", None, f"guard.on_error decided where a defense failed: {'; '.join(failed)}")
    for defense in many:
        why = "an attack, or questions unlike those of the calibration"
        yield Finding("flagged", None, f"{defense} flagged more than {100 * MANY:.0f} % of the questions: {why}")


def _channels(app: App) -> Iterator[Finding]:
    """Shows the last delivery through each notification channel, and why it failed; sends nothing."""
    test = "test it with 'casemate canary alerts --test'"
    try:
        names = [channel.name for channel in open_alert_dispatcher(app).channels]
        events = app.store.scan(DELIVERY_KIND, datetime.now(UTC) - LOOK_BACK) if names else ()
    except CasemateError as error:
        yield Finding("channel", False, str(error))
        return
    last = {event.body["channel"]: event for event in events}
    for name in names:
        event = last.get(name)
        if event is None:
            yield Finding("channel", None, f"{name}: nothing was sent in the last {LOOK_BACK.days} days; {test}")
        elif event.body["outcome"] == DeliveryOutcome.DELIVERED:
            yield Finding("channel", True, f"{name}: last delivery {utc_time(event.at)}")
        else:
            reason = event.body["reason"].removeprefix(f"channel {name!r}: ")
            yield Finding("channel", False, f"{name}: the last delivery failed, {utc_time(event.at)}: {reason}; {test}")


def _corpus(app: App, config: Config) -> Iterator[Finding]:
    """Compares index and corpus. Differences and unreadable files are notes, not failures."""
    chunk, undecided = config.rag.chunk, dict[str, Source]()
    assert config.rag.corpus is not None

    def keep(source: Source, digest: str) -> None:
        if len(undecided) <= PARSED and (source.name, digest) not in decided:
            undecided[source.name] = source

    try:
        decided = _quarantined(app)
        corpus = Corpus(config.folder / config.rag.corpus, config.rag.max_file_mb)
        plan = Ingest(app.guard, corpus, chunk.tokens, chunk.overlap, missing="keep").plan(keep)
        honeytokens = find_records(app.index, None).doubtful if plan.added else ()  # without a key, all of them
    except CasemateError as error:
        yield Finding("corpus", False, str(error))
        return
    states = {name: decided.get((name, digest)) for name, digest in plan.todo.items()}
    new = [name for name, state in states.items() if state is None]
    unread = [problem.where for problem in corpus.problems if not problem.harmless]
    damaged = [n for n in new if n in undecided and _damaged(undecided[n])] if len(new) <= PARSED else []
    new = [name for name in new if name not in damaged]
    parts, due = [f"{plan.unchanged} sources up to date"], []
    for what, names, advice in (
        ("new, changed or without text", new, "run 'casemate index'"),
        ("in quarantine", [n for n, state in states.items() if state == "held"], "run 'casemate quarantine list'"),
        ("rejected in quarantine", [n for n, state in states.items() if state == "dropped"], ""),
        ("with the name of another source", list(plan.clashing), "run 'casemate index'"),
        ("in the index only", list(plan.gone), "run 'casemate index'"),
        ("cannot be read", [*unread, *damaged], "repair or remove what cannot be read; 'casemate index' says why"),
    ):
        if names:
            parts.append(f"{len(names)} {what}: {', '.join(names[:3])}{', ...' if names[3:] else ''}")
            due += [advice] if advice else []
    yield Finding("corpus", None if due else True, "; ".join([*parts, *dict.fromkeys(due)]))
    if added := [] if isinstance(app.index, AttachedIndex) else sorted({*plan.added}.difference(honeytokens)):
        some = f"{', '.join(added[:2])}{', ...' if added[2:] else ''}"
        detail = f"{plural(len(added), 'source')} in the index, not from rag.corpus but added by a program: {some}"
        yield Finding("other sources", None, f"{detail}; to remove them in Python: await app.guard.remove(names)")


def _damaged(source: Source) -> bool:
    try:
        source.parse()
    except DataError:
        return True
    return False


def _quarantined(app: App) -> dict[tuple[str, str], QuarantineState]:
    """States of the default tenant's sources in quarantine or rejected, by name and digest of the content."""
    found = [one for one in Quarantine(app.store).all().values() if one.tenant == DEFAULT_TENANT]
    states = {(one.source, one.documents[0].digest.partition("@")[0]): one.state for one in found}
    return {key: state for key, state in states.items() if state != "released"}
