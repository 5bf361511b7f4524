"""``attach``: reads an existing vector store once, so that the guard can protect it in place."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from casemate import config as configuration
from casemate.app import open_app, open_executor
from casemate.backends.indexes.attached import AttachedIndex
from casemate.backends.sidecar.attach_scan import PageMap, RowScreen, ScanSummary, map_in_thread
from casemate.backends.sidecar.near_duplicates import MAX_GROUP_SOURCES
from casemate.cli.console import Code, ConfigFile, Json, On, bar, interruptible, note, out, print_json, say, shown
from casemate.cli.setup import calibrate_if_due
from casemate.errors import ConfigError
from casemate.monitor.poisoning.quarantine import Quarantine
from casemate.monitor.service import open_tenant_screening
from casemate.protocols import Embedder, Index

SAMPLE = 16
"""Texts that are embedded again to check that the configured embedder made the stored vectors."""
SAME = 0.95
"""Lowest median cosine at which the embedder counts as the same."""
EXAMPLE = """\
rag:
  index:
    use: attached
    collection: {use: pgvector_table, url: "${PG_URL}", table: docs, id: id, text: text, vector: embedding}
docs/how-to/attach-a-collection.md has an example for each store"""


def attach(
    config: ConfigFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read everything, print the findings, keep nothing.")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the progress of an interrupted run.")] = False,
    fit: Annotated[bool, typer.Option("--calibrate/--no-calibrate", help="Calibrate the guard if needed.")] = True,
    on: On = None,
    as_json: Json = False,
) -> None:
    """Guard an existing vector store: read the collection of rag.index, calibrate the guard.

    Run it again after others changed the collection. It can be interrupted and resumed.

    Nothing is written into the collection. The results of the last complete run stay in use until a run completes.
    """
    settings = configuration.read(config)
    with open_executor(on) as executor, open_app(settings, executor=executor) as app:
        with _opened(app.index, app.guard.rag.embedder, dry_run) as index:
            begin = time.monotonic()
            gates = None if dry_run else open_tenant_screening(app.guard, app.store, app.config)
            screen = gates.screen_rows if gates else None
            found = _read(index, restart, app.executor.map if executor else map_in_thread, screen)
            agreement = _agreement(index, app.guard.rag.embedder)
            waiting = len(Quarantine(app.store).pending()) if gates and gates.enforced() else 0
            result = AttachReport(index, found, agreement, time.monotonic() - begin, dry_run, waiting)
        print_json(result.as_json()) if as_json else result.show()
        if not dry_run:
            for tenant in app.index.tenants():
                calibrate_if_due(app, tenant, fit)
    raise typer.Exit(Code.INCOMPLETE if result.quarantined else Code.OK)


@contextmanager
def _opened(index: Index, embedder: Embedder, dry_run: bool) -> Iterator[AttachedIndex]:
    """The configured index; for a dry run, a copy of it with a temporary file."""
    if not isinstance(index, AttachedIndex):
        raise ConfigError(f"rag.index is not an attached collection; configure one in casemate.yaml:\n{EXAMPLE}")
    if not dry_run:
        yield index
        return
    with tempfile.TemporaryDirectory() as folder:
        other = dataclasses.replace(index, path=Path(folder) / "attached.db", schema="")
        index.close()  # some stores allow one open handle
        with closing(other):
            other.open(embedder.fingerprint, embedder.dim)
            yield other


def _read(index: AttachedIndex, restart: bool, map_pages: PageMap, screen: RowScreen | None) -> ScanSummary:
    with bar() as shown_bar:
        task = shown_bar.add_task("reading rows", total=index.collection.count() or 1)
        with interruptible("interrupted; what was read is kept; run 'casemate attach' again to resume"):
            return index.attach(lambda rows: shown_bar.update(task, completed=rows), restart, map_pages, screen)


def _agreement(index: AttachedIndex, embedder: Embedder) -> float | None:
    """Median cosine between stored vectors and the embedder's vectors of the same texts. None without rows."""
    tenants = index.tenants()
    documents, stored = next(index.scan(tenants[0]), ([], None)) if tenants else ([], None)
    if not documents or stored is None:
        return None
    some = documents[:SAMPLE]
    ways = [embedder.embed([d.text or " " for d in some]), embedder.embed([d.content or " " for d in some])]
    return float(np.median(np.max([(w * stored[: len(some)]).sum(axis=1) for w in ways], axis=0)))


@dataclasses.dataclass(frozen=True)
class AttachReport:
    """The findings of a run."""

    index: AttachedIndex
    found: ScanSummary
    agreement: float | None
    seconds: float
    dry_run: bool
    quarantined: int = 0

    def as_json(self) -> dict[str, Any]:
        """The findings as JSON."""
        facts = {"collection": self.index.collection.name, **self.found.as_json(), "agreement": self.agreement}
        facts |= {"kept": not self.dry_run, "quarantined": self.quarantined}
        return facts | {"not_protected": self.lacking(), "seconds": self.seconds}

    def show(self) -> None:
        """Prints the findings."""
        f = self.found
        where = shown(self.index.collection.name)
        out.print(f"{where}: {f.rows} rows of {f.dim} numbers in {self.seconds:.0f} s")
        how = f"grouped by {shown(f.grouped)}" if f.grouped else "as the collection names them"
        out.print(f"sources: {f.sources}" + (f", {how}" if f.sources < f.rows else ""))
        out.print(f"near-duplicates: {f.copied} rows in {f.copies} groups, cosine at least {f.threshold:g}")
        for count, what in (
            (f.rescaled, "vectors do not have unit length; similarities are their cosines"),
            (f.textless, "rows have no text and are skipped"),
            (f.vectorless, "rows have no vector and are skipped"),
        ):
            if count:
                note(f"{count} {what}")
        if self.quarantined:
            say.print(
                f"[yellow]quarantined:[/yellow] {self.quarantined} new sources look poisoned and are withheld; "
                "run 'casemate quarantine list'"
            )
        for what in self.lacking():
            say.print(f"[yellow]not protected:[/yellow] {shown(what)}")
        if self.dry_run:
            out.print("dry run: nothing was kept")

    def lacking(self) -> list[str]:
        """Limits of the protection, one sentence each."""
        f, limits = self.found, ["queries sent directly to the store bypass the guard"]
        if f.rescaled and not self.index.collection.by_cosine:
            limits.append(
                f"{f.rescaled} vectors do not have unit length and the store does not rank by cosine: it may miss the "
                "nearest row, and the guard a detection; set the collection's metric to cosine"
            )
        if self.agreement is not None and self.agreement < SAME:
            limits.append(
                f"the configured embedder makes other vectors of the same texts (median cosine {self.agreement:.2f}): "
                "configure the embedder that made the collection"
            )
        grouping = f.grouped or getattr(self.index.collection, "source", "")
        if f.rows > 1 and f.sources == f.rows and grouping:
            limits.append(
                f"each row is its own source by {grouping!r}: if a document has several rows, correct this field or "
                "pattern; hiding one row leaves the others"
            )
        elif f.rows and f.sources == f.rows:
            limits.append(
                "each row is its own source: if a document has several chunks, hiding one leaves the others; "
                "name the field with the document in the collection's option source, or set rag.index.source_field or "
                "source_pattern"
            )
        if not f.threshold:
            limits.append("near-duplicates are not grouped: hiding one leaves the others; set rag.index.near_copies")
        if f.widespread:
            limits.append(
                f"{f.widespread} texts occur in more than {MAX_GROUP_SOURCES} sources each: hiding one source is no use"
            )
        limits.append(
            "rows that others add are found at once; they enter the corpus moments with the next 'casemate attach'"
            if not self.index.withhold_new
            else "rows that others add are withheld until the next 'casemate attach'"
        )
        return limits
