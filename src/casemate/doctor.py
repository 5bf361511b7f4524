"""Looks at every part of an installation and says what is wrong, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from casemate.app import App, open_app
from casemate.backends.attached import AttachedIndex
from casemate.config import FILE, Config, read
from casemate.corpus import Corpus
from casemate.defenses.reindex import Reindex
from casemate.errors import CasemateError
from casemate.ingest import Ingest
from casemate.lab import generation
from casemate.reindexing.shelf import due
from casemate.stats import clopper_pearson

FEW = 30
"""Below this many documents statistics say nothing (METHODS F1)."""
MANY = 0.2
"""A share of flagged questions above this is not what a fitted guard does to harmless askers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``ok`` is None when it could not be looked at."""

    name: str
    ok: bool | None
    detail: str


def examine(path: Path | None, fix: bool = False) -> Iterator[Finding]:
    """Looks at configuration, embedder, index, event store and corpus, in this order.

    Args:
        path: The configuration file; None as for ``config.read``.
        fix: Rebuild the moments from the stored vectors when they are wrong.
    """
    try:
        config = read(path)
        there = path or Path(FILE)
        yield Finding("configuration", True, str(there) if there.exists() else f"no {FILE} here: the defaults hold")
        app = open_app(config)
    except CasemateError as error:
        yield Finding("wiring", False, str(error))
        return
    with app:
        yield from _index(app, fix)
        yield from _guard(app)
        yield from _reindexed(app)
        yield _try("event store", lambda: _events(app))
        yield Finding("generator", None, f"{config.rag.generator.use}: not asked here; try 'casemate ask'")
        yield _vectors(app)
        if config.rag.corpus is not None:
            yield _corpus(app, config)


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
            yield Finding("index", None, f"rebuilt the moments, because: {'; '.join(wrong)}")
            wrong = app.index.check()
        yield from (Finding("index", False, problem) for problem in wrong)
        if not wrong:
            yield Finding("index", True, "vectors and moments agree; tr(S) = n")
        if isinstance(app.index, AttachedIndex) and app.index.about():
            drift = app.index.drifted()
            yield Finding("attached", None if drift.share else True, drift.told())
        for tenant in app.index.tenants():
            n = app.index.moments(tenant).n
            said = f"tenant {tenant!r}: {n} chunks of {len(app.index.digests(tenant))} sources"
            few = f"{said}; with so few, defenses that rest on statistics make no statement and hide nothing"
            yield Finding("documents", None if n < FEW else True, few if n < FEW else said)
        if not app.index.tenants():
            yield Finding("documents", None, "the index is empty; run 'casemate index FOLDER'")
    except CasemateError as error:
        yield Finding("index", False, str(error))


def _guard(app: App) -> Iterator[Finding]:
    """Whether what the guard has learnt fits what it guards."""
    if app.calibrated is None or app.config.guard.mode == "off":
        return
    for tenant in app.index.tenants():
        try:
            found = app.calibrated.ready(tenant, app.index.moments(tenant).n)
        except CasemateError as error:
            yield Finding("guard", False, str(error))
            continue
        if found is not None:
            learnt = f"tenant {tenant!r}: fitted to {found.source}, {found.at}"
            detail = learnt if found.benign else f"{learnt}; nothing will be withheld"
            yield Finding("guard", True if found.benign else None, detail)


def _reindexed(app: App) -> Iterator[Finding]:
    """Whether the space that is ranked in fits the collection."""
    for defense in app.guard.defenses:
        if not isinstance(defense, Reindex):
            continue
        for tenant in app.index.tenants():
            try:
                why = due(defense.ready(tenant), app.index)
                said = f"{why}: run 'casemate reindex'" if why else "fits the collection"
                yield Finding("reindex", None if why else True, f"tenant {tenant!r}: {said}")
            except CasemateError as error:
                yield Finding("reindex", False, str(error))


def _vectors(app: App) -> Finding:
    """The embedder works, and tells near from far."""

    def look() -> str:
        a, b, c = app.guard.rag.embedder.embed(["the cat sleeps", "a cat is asleep", "quarterly tax return"])
        if not float(a @ b) > float(a @ c):
            raise CasemateError("the embedder finds unlike texts nearer than like ones; check its weights")
        return app.guard.rag.embedder.fingerprint

    return _try("embedder", look)


def _events(app: App) -> str:
    """How many events there are, in which share of the questions each defense withheld something and why, and costs."""
    events = app.store.scan("verdict")
    said = [f"{len(events)} verdicts"]
    for defense in sorted({str(e.body.get("defense")) for e in events}):
        bodies = [e.body for e in events if str(e.body.get("defense")) == defense]
        flags = [body for body in bodies if body.get("flagged")]
        anew = sum(body.get("evidence", {}).get("why") != ["before"] for body in flags)
        low, high = clopper_pearson(len(flags), len(bodies))
        said.append(
            f"{defense} flagged {len(flags)} of {len(bodies)} questions: {len(flags) / len(bodies):.2f} "
            f"[{low:.2f}, {high:.2f}], {anew} of them anew, the others by what was withheld from the client before"
        )
        if low > MANY:
            said.append(f"more than {MANY:.0%}: an attack, or harmless questions that the guard was not fitted to")
    if figures := generation.spent(app.store.scan("generation")):
        said.append(generation.told(figures))
    return "; ".join(said)


def _corpus(app: App, config: Config) -> Finding:
    """Whether the index is up to date. That it is not is no failure, and neither is a file that cannot be read."""
    chunk = config.rag.chunk
    assert config.rag.corpus is not None
    try:
        corpus = Corpus(config.folder / config.rag.corpus, config.rag.max_file_mb)
        plan = Ingest(app.guard, corpus, chunk.tokens, chunk.overlap, gone="keep").plan()
    except CasemateError as error:
        return Finding("corpus", False, str(error))
    said = f"{plan.unchanged} sources indexed as they are"
    for what, names in (
        ("new, changed or without text", list(plan.todo)),
        ("in the index only", list(plan.gone)),
        ("cannot be read", [p.where for p in corpus.problems if not p.harmless]),
    ):
        said += f"; {len(names)} {what}: {', '.join(names[:3])}{', ...' if names[3:] else ''}" if names else ""
    current = said.endswith("as they are")
    return Finding("corpus", True if current else None, said if current else f"{said}; 'casemate index' says more")
