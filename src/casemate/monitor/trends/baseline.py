"""Baselines: how canaries behave while nothing is wrong, recorded once and accepted by an operator.

Repeated runs measure how often each canary fails although nothing is wrong, which documents its context contains, and
its usual answer. A recorded baseline is a candidate: it has no effect until an operator has seen its changes and
accepted it by id. Otherwise an attacker who poisons the system slowly, or before the next recording, would make the
poison part of the baseline (METHODS D6). An older baseline can be accepted again.

A canary whose document the operator has replaced can no longer pass. Indexing records which sources the operator
changed (``record_source_updates``); canaries that depend on them are outdated: they are asked and shown, but do not
alert. A document that disappears or changes without such a record is not an update, and its canary alerts.

Functions that use the store raise ``BackendError`` if it fails.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter

from casemate.errors import DataError
from casemate.monitor.canaries.canary import Canary, CanarySet
from casemate.monitor.canaries.results import CanaryResult, CanaryRun, CanaryStatus, group_by
from casemate.monitor.trends.cusum import WatchedCanary, WatchedSet
from casemate.monitor.trends.sequential_tests import FlakeCounts
from casemate.protocols import EventStore, Index
from casemate.runtime.events import append_durably, digest
from casemate.runtime.stored import read_stored
from casemate.types import Event

BASELINE_KIND = "canary-baseline"
"""Kind of the events that store a recorded baseline, or its acceptance."""
UPDATE_KIND = "corpus-update"
"""Kind of the events that list sources changed or removed by the operator."""
BASELINE_RUNS = 20
"""Default number of runs of a recording."""
SOURCES_PER_EVENT = 1_000
"""Sources that one event lists."""
MIN_COSINE_DROP = 0.005
"""Smallest drop of a cosine that counts as a change."""


@dataclass(frozen=True, slots=True)
class CanaryBaseline:
    """Baseline of one canary.

    Attributes:
        fingerprint: An edited canary has another one, and so no baseline.
        documents: Ids of the documents in its context in passed runs, most frequent first.
        digest: Digest of the most frequent answer; empty if answers are not stored.
        words: Words of the shortest and of the longest answer.
        cosine: Lowest cosine of the best expected document, or of the best retrieved one if none is expected; None if
            the target does not report scores.
        sources: Its expected sources, with the hashes of their content.
        lasting: See ``FlakeCounts``, from ``next_asked`` on.
        highest_cosine: Highest cosine of the same document; None also in baselines of earlier versions.
    """

    fingerprint: str
    asked: int
    failed: int
    errors: int = 0
    documents: tuple[str, ...] = ()
    answers: int = 0
    digest: str = ""
    words: tuple[int, int] = (0, 0)
    cosine: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    lasting: tuple[int, int, int, int] = (0, 0, 0, 0)
    highest_cosine: float | None = None

    @property
    def flakes(self) -> FlakeCounts:
        """Counts for the sequential tests."""
        return FlakeCounts(self.asked, self.failed, *self.lasting)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A recorded baseline; its id is a digest of its content."""

    id: str
    set: str
    fingerprint: str
    at: datetime
    runs: int
    canaries: Mapping[str, CanaryBaseline]

    def of(self, canary: Canary) -> CanaryBaseline | None:
        """Baseline of a canary; None if it is new or was edited since the recording."""
        found = self.canaries.get(canary.id)
        return found if found is not None and found.fingerprint == canary_fingerprint(canary) else None


_BASELINE = TypeAdapter(Baseline)


def canary_fingerprint(canary: Canary) -> str:
    """16 hexadecimal digits, equal for canaries with the same question and expectations."""
    return CanarySet("", (canary,)).fingerprint


def record_baseline(
    runs: Sequence[CanaryRun],
    canaries: CanarySet,
    *,
    at: datetime,
    digests: Mapping[str, str] | None = None,
    force: bool = False,
    repeats: Sequence[CanaryResult] = (),
) -> Baseline:
    """Computes a baseline from runs of the whole set while nothing is wrong, at least one; usually ``BASELINE_RUNS``.

    ``digests`` is ``Index.digests``; None: not recorded. ``repeats`` are the results of failed canaries that were asked
    once more within their run. With ``force``, canaries that never pass are accepted.

    Raises:
        DataError: If canaries never passed; the message lists them.
    """
    history = group_by((result for run in runs for result in run.results), lambda r: r.canary)
    never = [c.id for c in canaries.canaries if not any(r.status is CanaryStatus.PASS for r in history.get(c.id, ()))]
    if never and not force:
        raise DataError(
            f"{len(never)} of {len(canaries.canaries)} canaries never passed in {len(runs)} runs: "
            f"{', '.join(never)}; correct or remove them, or record them with --force"
        )
    repeated = group_by((r for r in repeats if r.status is not CanaryStatus.ERROR), lambda r: r.canary)
    measured = {
        canary.id: replace(
            _measure(canary, judged, digests or {}, len(history[canary.id]) - len(judged)),
            lasting=(*_after_failures(judged), *_counts(repeated.get(canary.id, ()))),
        )
        for canary in canaries.canaries
        if (judged := [r for r in history.get(canary.id, ()) if r.status is not CanaryStatus.ERROR])
    }
    found = Baseline("", canaries.name, canaries.fingerprint, at.astimezone(UTC), len(runs), measured)
    return replace(found, id=digest(json.dumps(_to_body(found), sort_keys=True), length=12))


def propose_baseline(store: EventStore, baseline: Baseline) -> None:
    """Stores a baseline as a candidate."""
    body = _to_body(baseline) | {"state": "candidate"}
    event = Event(f"{BASELINE_KIND}:{baseline.id}", baseline.at, BASELINE_KIND, body)
    append_durably(store, [event], "the monitor's events")


def accept_baseline(store: EventStore, canaries: CanarySet, id_: str, by: str, at: datetime) -> Baseline:
    """Puts a recorded baseline, by its id or a unique prefix, into force.

    Raises:
        DataError: If the id matches no baseline of this set, or several.
    """
    found = [b for b in recorded_baselines(store, canaries) if id_ and b.id.startswith(id_)]
    if len(found) != 1:
        raise DataError(
            f"{id_!r} matches {len(found)} recorded baselines of {canaries.name!r}; give the whole id of one"
        )
    body = {"state": "accepted", "set": canaries.name, "id": found[0].id, "by": by}
    event = Event(f"{BASELINE_KIND}:{found[0].id}:{at.timestamp():.6f}", at, BASELINE_KIND, body)
    append_durably(store, [event], "the monitor's events")
    return found[0]


def recorded_baselines(store: EventStore, canaries: CanarySet) -> list[Baseline]:
    """All recorded baselines of a set, oldest first."""
    return [
        read_stored(_BASELINE, event.body, "baseline")
        for event in store.scan(BASELINE_KIND)
        if event.body["state"] == "candidate" and event.body["set"] == canaries.name
    ]


def load_baseline(store: EventStore, canaries: CanarySet) -> Baseline | None:
    """The baseline accepted last; None if none was accepted."""
    accepted = [
        event.body["id"]
        for event in store.scan(BASELINE_KIND)
        if event.body["state"] == "accepted" and event.body["set"] == canaries.name
    ]
    recorded = {b.id: b for b in recorded_baselines(store, canaries)} if accepted else {}
    return recorded.get(accepted[-1]) if accepted else None


def baseline_changes(old: Baseline | None, new: Baseline) -> list[str]:
    """Differences between two baselines, one line each, without text of answers or documents."""
    if old is None:
        return [f"first baseline, of {len(new.canaries)} canaries"]
    found = [f"{name}: no longer measured" for name in old.canaries if name not in new.canaries]
    for name, canary in new.canaries.items():
        before = old.canaries.get(name)
        found += [f"{name}: {what}" for what in (_differences(before, canary) if before else ["newly measured"])]
    return found


def unchanged_canaries(old: Baseline, new: Baseline) -> int:
    """Number of canaries that behave as in the old baseline."""
    return sum(name in old.canaries and not [*_differences(old.canaries[name], c)] for name, c in new.canaries.items())


def record_source_updates(store: EventStore, tenant: str, sources: Collection[str], at: datetime) -> None:
    """Records that the operator changed or removed sources."""
    names, events = sorted(sources), []
    for batch in (names[i : i + SOURCES_PER_EVENT] for i in range(0, len(names), SOURCES_PER_EVENT)):
        id_ = f"{UPDATE_KIND}:{digest(tenant, *batch)}:{at.timestamp():.6f}"
        events.append(Event(id_, at, UPDATE_KIND, {"tenant": tenant, "sources": batch}))
    append_durably(store, events, "the monitor's events")


def record_if_changed(store: EventStore, index: Index, tenant: str, new: Mapping[str, str]) -> None:
    """Records sources that an upload replaces by other content, or that are removed, before either happens. Blocks.

    ``new`` has the content hash of each source; empty: it is removed. Does nothing while no baseline exists: an index
    may take long to list its sources.
    """
    if store.latest(BASELINE_KIND, 1):
        held = index.digests(tenant)
        changed = [name for name, digest in new.items() if name in held and (not digest or held[name] != digest)]
        record_source_updates(store, tenant, changed, datetime.now(UTC))


def updated_sources(store: EventStore, tenant: str, since: datetime) -> frozenset[str]:
    """Sources that the operator has changed or removed since a time."""
    events = store.scan(UPDATE_KIND, since)
    return frozenset(name for e in events if e.body["tenant"] == tenant for name in e.body["sources"])


def outdated_canaries(
    baseline: Baseline, digests: Mapping[str, str], updates: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Canaries that depend on sources changed by the operator, with these sources.

    ``digests`` is that of the index now, ``updates`` is ``updated_sources`` since the recording.
    """
    found = {
        name: tuple(s for s, digest in canary.sources.items() if s in updates and digests.get(s) != digest)
        for name, canary in baseline.canaries.items()
    }
    return {name: sources for name, sources in found.items() if sources}


def changed_sources(
    baseline: Baseline, digests: Mapping[str, str], updates: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Canaries with sources of their baseline that were changed or removed since, and these sources.

    Expected sources are compared by content hash. Of the others in the context, those that the operator changed count.
    Arguments as for ``outdated_canaries``.
    """
    found = {}
    for name, canary in baseline.canaries.items():
        changed = [source for source, digest in canary.sources.items() if digests.get(source) != digest]
        context = (d if d in updates else d.rpartition("#")[0] for d in canary.documents)  # the id of a chunk: source#n
        changed += [source for source in context if source in updates and source not in canary.sources]
        if changed:
            found[name] = tuple(dict.fromkeys(changed))
    return found


def watched_set(
    canaries: CanarySet,
    baseline: Baseline | None = None,
    interval_s: float = 3600.0,
    outdated: Collection[str] = (),
    changed: Mapping[str, tuple[str, ...]] | None = None,
) -> WatchedSet:
    """A set with its baseline, as the sequential tests need it; without one, canaries are assumed to fail often.

    ``outdated`` and ``changed`` are those of ``outdated_canaries`` and ``changed_sources``.

    Raises:
        DataError: See ``WatchedSet``.
    """
    found = []
    for canary in canaries.canaries:
        measured = baseline.of(canary) if baseline else None
        found.append(
            WatchedCanary(
                canary.id,
                canary.severity,
                measured.flakes if measured else FlakeCounts(),
                canary.interval_s or 0.0,
                canary.alert_on_deviation and canary.id not in outdated,
                frozenset(measured.documents if measured else ()),
                (changed or {}).get(canary.id, ()),
                canary.id in outdated,
            )
        )
    return WatchedSet(canaries.name, tuple(found), interval_s)


def _measure(canary: Canary, judged: Sequence[CanaryResult], digests: Mapping[str, str], errors: int) -> CanaryBaseline:
    """Baseline of one canary; contexts and answers are those of passed runs."""
    passed = [r for r in judged if r.status is CanaryStatus.PASS]
    answers = Counter(digest(r.text) for r in passed if r.text)
    lengths = [r.words for r in passed]
    cosines = [c for r in passed if (c := best_cosine(canary, r)) is not None]
    source_of = {name: source for r in passed for name, source in zip(r.documents, r.sources, strict=False)}
    expected = {*canary.expected_sources, *(source_of[i] for i in canary.expected_documents if i in source_of)}
    return CanaryBaseline(
        canary_fingerprint(canary),
        len(judged),
        len(judged) - len(passed),
        errors,
        tuple(name for name, _ in Counter(d for r in passed for d in r.documents).most_common()),
        len(answers),
        answers.most_common(1)[0][0] if answers else "",
        (min(lengths, default=0), max(lengths, default=0)),
        min(cosines, default=None),
        {source: digests[source] for source in sorted(expected) if source in digests},
        highest_cosine=max(cosines, default=None),
    )


def _counts(results: Sequence[CanaryResult]) -> tuple[int, int]:
    return len(results), sum(r.status is CanaryStatus.FAIL for r in results)


def _after_failures(judged: Sequence[CanaryResult]) -> tuple[int, int]:
    """Results that follow a failed one, and failures among them."""
    pairs = zip(judged, judged[1:], strict=False)
    return _counts([now for before, now in pairs if before.status is CanaryStatus.FAIL])


def best_cosine(canary: Canary, result: CanaryResult) -> float | None:
    """Cosine of the best expected document, or of the best retrieved one if none is expected; None: not reported."""
    if canary.expected_documents or canary.expected_sources:
        names, expected = (
            (result.documents, canary.expected_documents)
            if canary.expected_documents
            else (result.sources, canary.expected_sources)
        )
        scores = [s for name, s in zip(names, result.scores, strict=False) if name in expected]
    else:
        scores = list(result.scores[:1])
    return max(scores, default=None)


def _differences(old: CanaryBaseline, new: CanaryBaseline) -> Iterable[str]:
    if old.fingerprint != new.fingerprint:
        yield "edited since the old baseline"
    if old.failed * new.asked != new.failed * old.asked:  # the rates differ
        yield f"failed in {new.failed} of {new.asked} runs; before: {old.failed} of {old.asked}"
    if added := [d for d in new.documents if d not in old.documents]:
        yield f"new in its context: {', '.join(added)}"
    if missing := [d for d in old.documents if d not in new.documents]:
        yield f"no longer in its context: {', '.join(missing)}"
    if old.digest and new.digest and old.digest != new.digest:
        (a, b), (c, d) = old.words, new.words
        yield f"different usual answer, {c} to {d} words; before: {a} to {b}"
    if old.cosine is not None and new.cosine is not None and new.cosine < old.cosine - MIN_COSINE_DROP:
        yield f"cosine of its best document {new.cosine:.3f}; before: {old.cosine:.3f}"


def _to_body(baseline: Baseline) -> dict[str, Any]:
    return asdict(baseline) | {"at": baseline.at.isoformat()}
