"""What is normal: how canaries fared when all was well, recorded once and accepted by somebody.

Repeated runs tell how often each canary fails though nothing is wrong, which documents its context has, and what it
usually answers. A recording is a candidate, and counts for nothing until it is accepted by its name, with what it
changes in sight: else whoever poisons the system slowly, or before the next recording, makes his poison the norm
(METHODS D6). An older baseline can be accepted again.

A canary whose document the owner himself has replaced can no longer be met. What the owner changes is noted when it is
indexed (``note_update``); canaries that rest on it are outdated: they are asked and shown, and page nobody. A document
that is gone or changed without such a note is no update, and its canary pages.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from casemate.errors import DataError
from casemate.monitor.canaries.canary import Canary, CanarySet
from casemate.monitor.canaries.results import Result, Run, Status, by_canary, write
from casemate.monitor.trends.watched import Clean, Known, Watched
from casemate.protocols import EventStore
from casemate.stats import Rate, rate
from casemate.types import Event

KIND = "canary-baseline"
"""Events of this kind hold a recording, or say that one was accepted."""
UPDATE = "corpus-update"
"""Events of this kind name sources that the owner has changed or removed."""
RUNS = 20
"""Runs of a usual recording."""
NAMES = 1_000
"""Sources that one event names."""
LOWER = 0.005
"""Cosine by which a similarity must fall to be worth telling."""


@dataclass(frozen=True, slots=True)
class Norm:
    """What is normal for one canary.

    Attributes:
        fingerprint: Of the canary as it was asked; one that was edited since is unknown.
        asked: In how many runs it could be judged.
        failed: In how many of these it failed.
        errors: In how many it could not be judged.
        documents: Ids that were in its context when it passed, the most frequent first.
        answers: How many different answers it had when it passed.
        digest: Of the most frequent one; empty: the answers were not kept.
        words: Words of the shortest and of the longest.
        cosine: Lowest similarity of the best document expected, or of the best found where none is expected; None: the
            target does not tell it.
        sources: Sources that it expects, with the hashes of their content.
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

    @property
    def clean(self) -> Clean:
        """As the alarms want it."""
        return Clean(self.asked, self.failed)

    @property
    def flake(self) -> Rate:
        """How often it fails though all is well, with its 95 % interval."""
        return rate(self.failed, self.asked)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A recording.

    Attributes:
        id: Follows from what was recorded.
        set: Name of the canary set.
        fingerprint: Of the set.
        at: When it was recorded.
        runs: How many runs.
        norms: By canary.
    """

    id: str
    set: str
    fingerprint: str
    at: datetime
    runs: int
    norms: Mapping[str, Norm]

    def of(self, canary: Canary) -> Norm | None:
        """What is normal for a canary; None: nothing is known of it as it is now."""
        norm = self.norms.get(canary.id)
        return norm if norm is not None and norm.fingerprint == fingerprint(canary) else None

    def unknown(self, canaries: CanarySet) -> tuple[str, ...]:
        """The canaries of a set that are new or were edited since the recording: their flake rates are not known."""
        return tuple(canary.id for canary in canaries.canaries if self.of(canary) is None)

    def documents(self, canaries: CanarySet) -> dict[str, tuple[str, ...]]:
        """The ids that are known of each canary's context, as ``run`` takes them."""
        return {canary.id: norm.documents for canary in canaries.canaries if (norm := self.of(canary))}


def fingerprint(canary: Canary) -> str:
    """Equal for canaries that ask and expect the same: 16 hexadecimal digits."""
    return CanarySet("", (canary,)).fingerprint


def record(
    runs: Sequence[Run],
    canaries: CanarySet,
    *,
    at: datetime,
    digests: Mapping[str, str] | None = None,
    force: bool = False,
) -> Baseline:
    """What some runs show to be normal.

    Args:
        runs: All of the whole set, made while all was well; usually ``RUNS``.
        canaries: The set.
        at: When they were made.
        digests: Content hash of each source held, as ``Index.digests`` gives it; None: it is not noted.
        force: Whether canaries that never pass are taken in all the same.

    Raises:
        DataError: If there are no runs, or canaries that passed in none of them; the message names these.
    """
    if not runs:
        raise DataError("there are no runs to record; ask the canaries first")
    history = by_canary(result for run in runs for result in run.results)
    never = [c.id for c in canaries.canaries if not any(r.status is Status.PASS for r in history.get(c.id, ()))]
    if never and not force:
        raise DataError(
            f"{len(never)} of {len(canaries.canaries)} canaries passed in none of {len(runs)} runs: "
            f"{', '.join(never)}; correct or remove them, or record them all the same by force"
        )
    norms = {
        canary.id: _norm(canary, judged, digests or {}, len(history[canary.id]) - len(judged))
        for canary in canaries.canaries
        if (judged := [r for r in history.get(canary.id, ()) if r.status is not Status.ERROR])
    }
    found = Baseline("", canaries.name, canaries.fingerprint, at.astimezone(UTC), len(runs), norms)
    digest = hashlib.sha256(json.dumps(_body(found), sort_keys=True).encode()).hexdigest()
    return replace(found, id=digest[:12])


def propose(store: EventStore, baseline: Baseline) -> None:
    """Notes a recording as a candidate.

    Raises:
        BackendError: If the store does not take it.
    """
    write(store, [Event(f"{KIND}:{baseline.id}", baseline.at, KIND, _body(baseline) | {"state": "candidate"})])


def accept(store: EventStore, canaries: CanarySet, name: str, by: str, at: datetime) -> Baseline:
    """Makes a recording the norm.

    Args:
        store: Where it is.
        canaries: The set.
        name: Its id, or the beginning of it.
        by: Who accepts it.
        at: When.

    Raises:
        DataError: If the name names nothing of this set, or more than one.
        BackendError: If the store fails.
    """
    found = [b for b in recordings(store, canaries) if name and b.id.startswith(name)]
    if len(found) != 1:
        raise DataError(
            f"{name!r} names {len(found) or 'nothing'} of the recordings of {canaries.name!r}; give the whole id"
        )
    body = {"state": "accepted", "set": canaries.name, "id": found[0].id, "by": by}
    write(store, [Event(f"{KIND}:{found[0].id}:{at.timestamp():.6f}", at, KIND, body)])
    return found[0]


def recordings(store: EventStore, canaries: CanarySet) -> list[Baseline]:
    """All recordings of a set, the oldest first.

    Raises:
        BackendError: If the store cannot be read.
    """
    return [
        _baseline(event.body)
        for event in store.scan(KIND)
        if event.body["state"] == "candidate" and event.body["set"] == canaries.name
    ]


def load(store: EventStore, canaries: CanarySet) -> Baseline | None:
    """The recording that was accepted last; None: none ever was.

    Raises:
        BackendError: If the store cannot be read.
    """
    accepted = [
        e.body["id"] for e in store.scan(KIND) if e.body["state"] == "accepted" and e.body["set"] == canaries.name
    ]
    known = {b.id: b for b in recordings(store, canaries)} if accepted else {}
    return known.get(accepted[-1]) if accepted else None


def changes(old: Baseline | None, new: Baseline) -> list[str]:
    """What another baseline would change, a line each; no text of an answer or of a document."""
    if old is None:
        return [f"{len(new.norms)} canaries are measured for the first time"]
    found = [f"{name}: is not measured any more" for name in old.norms if name not in new.norms]
    for name, norm in new.norms.items():
        before = old.norms.get(name)
        found += [f"{name}: {what}" for what in (_differences(before, norm) if before else ["is measured first"])]
    return found


def note_update(store: EventStore, tenant: str, sources: Collection[str], at: datetime) -> None:
    """Notes that the owner has changed or removed some sources.

    Raises:
        BackendError: If the store does not take it.
    """
    names = sorted(sources)
    pieces = [names[i : i + NAMES] for i in range(0, len(names), NAMES)]
    write(store, [_update(tenant, piece, at) for piece in pieces])


def updated(store: EventStore, tenant: str, since: datetime) -> frozenset[str]:
    """The sources that the owner has changed or removed since then.

    Raises:
        BackendError: If the store cannot be read.
    """
    events = store.scan(UPDATE, since)
    return frozenset(name for e in events if e.body["tenant"] == tenant for name in e.body["sources"])


def outdated(baseline: Baseline, digests: Mapping[str, str], updates: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The canaries that rest on sources which the owner has changed, with these sources.

    Args:
        baseline: In force.
        digests: Content hash of each source held now.
        updates: Sources that the owner has changed or removed since the recording, by ``updated``.
    """
    found = {
        name: tuple(s for s, digest in norm.sources.items() if s in updates and digests.get(s) != digest)
        for name, norm in baseline.norms.items()
    }
    return {name: sources for name, sources in found.items() if sources}


def watched(
    canaries: CanarySet, baseline: Baseline | None = None, every: float = 3600.0, aside: Collection[str] = ()
) -> Watched:
    """A set as it is watched, with what is known of it.

    Args:
        canaries: The set.
        baseline: In force; None: there is none, and its canaries are taken to fail often.
        every: Seconds from one run to the next.
        aside: Canaries that page nobody, such as those that are ``outdated``.

    Raises:
        DataError: If the set is empty, or its names are too long.
    """
    known = []
    for canary in canaries.canaries:
        norm = baseline.of(canary) if baseline else None
        known.append(
            Known(
                canary.id,
                canary.severity,
                norm.clean if norm else Clean(),
                canary.interval.total_seconds() if canary.interval else 0.0,
                canary.alert_on_deviation and canary.id not in aside,
                frozenset(norm.documents if norm else ()),
            )
        )
    return Watched(canaries.name, tuple(known), every)


def _update(tenant: str, sources: Sequence[str], at: datetime) -> Event:
    name = f"{UPDATE}:{_digest(tenant, *sources)}:{at.timestamp():.6f}"
    return Event(name, at, UPDATE, {"tenant": tenant, "sources": list(sources)})


def _norm(canary: Canary, judged: Sequence[Result], digests: Mapping[str, str], errors: int) -> Norm:
    """What the judged results of a canary show; of its context and answers, those count that passed."""
    good = [r for r in judged if r.status is Status.PASS]
    said = Counter(_digest(r.text) for r in good if r.text)
    lengths = [r.words for r in good]
    cosines = [c for r in good if (c := _cosine(canary, r)) is not None]
    home = {name: source for r in good for name, source in zip(r.documents, r.sources, strict=False)}
    wanted = {*canary.expected_sources, *(home[i] for i in canary.expected_documents if i in home)}
    return Norm(
        fingerprint(canary),
        len(judged),
        len(judged) - len(good),
        errors,
        tuple(name for name, _ in Counter(d for r in good for d in r.documents).most_common()),
        len(said),
        said.most_common(1)[0][0] if said else "",
        (min(lengths, default=0), max(lengths, default=0)),
        min(cosines, default=None),
        {source: digests[source] for source in sorted(wanted) if source in digests},
    )


def _cosine(canary: Canary, result: Result) -> float | None:
    """Similarity of the best document that is expected, or of the best found."""
    if canary.expected_documents or canary.expected_sources:
        names, wanted = (
            (result.documents, canary.expected_documents)
            if canary.expected_documents
            else (result.sources, canary.expected_sources)
        )
        scores = [s for name, s in zip(names, result.scores, strict=False) if name in wanted]
    else:
        scores = list(result.scores[:1])
    return max(scores, default=None)


def _differences(old: Norm, new: Norm) -> Iterable[str]:
    if old.fingerprint != new.fingerprint:
        yield "was edited since"
    if (old.asked, old.failed) != (new.asked, new.failed):
        yield f"failed in {new.failed} of {new.asked} runs; before, in {old.failed} of {old.asked}"
    if came := [d for d in new.documents if d not in old.documents]:
        yield f"new in its context: {', '.join(came)}"
    if went := [d for d in old.documents if d not in new.documents]:
        yield f"no more in its context: {', '.join(went)}"
    if old.digest and new.digest and old.digest != new.digest:
        (a, b), (c, d) = old.words, new.words
        yield f"usually answers otherwise: {c} to {d} words; before, {a} to {b}"
    if old.cosine is not None and new.cosine is not None and new.cosine < old.cosine - LOWER:
        yield f"its best document has a similarity of {new.cosine:.3f}; before, {old.cosine:.3f}"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:16]


def _body(baseline: Baseline) -> dict[str, Any]:
    """The recording as an event keeps it."""
    return {
        "id": baseline.id,
        "set": baseline.set,
        "fingerprint": baseline.fingerprint,
        "at": baseline.at.isoformat(),
        "runs": baseline.runs,
        "norms": {name: asdict(norm) | {"sources": dict(norm.sources)} for name, norm in baseline.norms.items()},
    }


def _baseline(body: Mapping[str, Any]) -> Baseline:
    norms = {
        name: Norm(**told | {"documents": tuple(told["documents"]), "words": tuple(told["words"])})
        for name, told in body["norms"].items()
    }
    at = datetime.fromisoformat(body["at"])
    return Baseline(body["id"], body["set"], body["fingerprint"], at, body["runs"], norms)
