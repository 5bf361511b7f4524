"""``attach``: reads a collection that is already there once, so that the guard can stand before it."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from casemate import config as configuration
from casemate.app import open_app, spread_on
from casemate.attaching.copies import WIDESPREAD
from casemate.attaching.run import About, Spread, beside
from casemate.backends.attached import AttachedIndex
from casemate.cli.console import INTERRUPTED, ConfigFile, Json, On, bar, out, print_json, say, shown
from casemate.errors import ConfigError
from casemate.protocols import Embedder, Index

SAMPLE = 16
"""Texts that are embedded again, to see whether the configured embedder made the vectors."""
SAME = 0.95
"""Cosine below which it did not."""
QUIET_S = 10.0
"""Seconds between two lines of progress where nobody sees a bar."""
EXAMPLE = """\
rag:
  index:
    use: attached
    collection: {use: pgvector_table, url: "${PG_URL}", table: docs, id: id, text: text, vector: embedding}"""


def attach(
    config: ConfigFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read all, say what is there, keep nothing.")] = False,
    anew: Annotated[bool, typer.Option("--anew", help="Forget what an interrupted run has read.")] = False,
    on: On = None,
    as_json: Json = False,
) -> None:
    """Read the collection of rag.index once, or again after others wrote to it. Interrupt at will and run again.

    Nothing is written into the collection. Until a run is through, what the last one found stays in force.
    """
    settings = configuration.read(config)
    with spread_on(on) as spread, open_app(settings, spread=spread) as app:
        with _opened(app.index, app.guard.rag.embedder, dry_run) as index:
            begin = time.monotonic()
            found = _read(index, anew, app.spread.map if spread else beside)
            agreement = _agreement(index, app.guard.rag.embedder)
            told = Told(index, found, agreement, time.monotonic() - begin, dry_run)
    if as_json:
        print_json(told.as_json())
    else:
        told.show()


@contextmanager
def _opened(index: Index, embedder: Embedder, dry_run: bool) -> Iterator[AttachedIndex]:
    """The configured index; for a dry run another like it, whose file is thrown away."""
    if not isinstance(index, AttachedIndex):
        raise ConfigError(f"rag.index is no attached collection; one is configured as\n{EXAMPLE}")
    if not dry_run:
        yield index
        return
    with tempfile.TemporaryDirectory() as folder:
        other = dataclasses.replace(index, path=Path(folder) / "attached.db", schema="")
        index.close()  # a store that only one may open is free for the other
        with closing(other):
            other.open(embedder.fingerprint, embedder.dim)
            yield other


def _read(index: AttachedIndex, anew: bool, spread: Spread) -> About:
    with bar() as shown_bar:
        task = shown_bar.add_task("reading", total=index.collection.count() or 1)

        def tell(rows: int) -> None:
            shown_bar.update(task, completed=rows, description=rate(rows))

        rate = _rate()
        try:
            return index.attach(tell, anew, spread)
        except KeyboardInterrupt:
            say.print("interrupted; what was read is kept, run 'casemate attach' again to go on")
            raise typer.Exit(INTERRUPTED) from None


def _rate() -> Callable[[int], str]:
    """Says how fast rows come; on a line of its own now and then where nobody sees the bar."""
    seen: list[tuple[float, int]] = []

    def told(rows: int) -> str:
        now = time.monotonic()
        seen.append((now, rows))
        (since, before), said = seen[0], f"reading, {rows} rows"
        if now > since:
            said += f", {(rows - before) / (now - since):.0f} a second"
        if not say.is_terminal and len(seen) > 1 and now - seen[-2][0] > QUIET_S:
            say.print(said)
        else:
            del seen[1:-1]
        return said

    return told


def _agreement(index: AttachedIndex, embedder: Embedder) -> float | None:
    """Median cosine of stored vectors to those that the embedder makes of the same texts; None: there are no rows."""
    tenants = index.tenants()
    documents, stored = next(index.scan(tenants[0]), ([], None)) if tenants else ([], None)
    if not documents or stored is None:
        return None
    some = documents[:SAMPLE]
    ways = [embedder.embed([d.text or " " for d in some]), embedder.embed([d.content or " " for d in some])]
    return float(np.median(np.max([(w * stored[: len(some)]).sum(axis=1) for w in ways], axis=0)))


@dataclasses.dataclass(frozen=True)
class Told:
    """What there is to say after a run."""

    index: AttachedIndex
    found: About
    agreement: float | None
    seconds: float
    dry_run: bool

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        facts = {"collection": self.index.collection.name, **self.found.as_json(), "agreement": self.agreement}
        return facts | {"kept": not self.dry_run, "not_protected": self.lacking(), "seconds": self.seconds}

    def show(self) -> None:
        """For people."""
        f = self.found
        where = shown(self.index.collection.name)
        out.print(f"{where}: {f.rows} rows of {f.dim} numbers in {self.seconds:.0f} s", soft_wrap=True)
        how = f"grouped by {shown(f.grouped)}" if f.grouped else "as the collection names them"
        out.print(f"sources: {f.sources}" + (f", {how}" if f.sources < f.rows else ""), soft_wrap=True)
        out.print(f"near-copies: {f.copied} rows in {f.copies} groups, cosine at least {f.threshold:g}")
        for count, what in (
            (f.rescaled, "vectors were not of unit length; similarities are their cosines"),
            (f.textless, "rows have no text and are left out"),
            (f.vectorless, "rows have no vector and are left out"),
        ):
            if count:
                say.print(f"[yellow]note:[/yellow] {count} {what}")
        for what in self.lacking():
            say.print(f"[yellow]not protected:[/yellow] {shown(what)}", soft_wrap=True)
        out.print("dry run: nothing was kept" if self.dry_run else "kept; next: casemate calibrate")

    def lacking(self) -> list[str]:
        """What the guard cannot do here, a sentence each."""
        f, told = self.found, ["whoever asks the store itself is not seen by the guard"]
        if f.rescaled and not self.index.collection.by_cosine:
            told.append(
                f"{f.rescaled} vectors are not of unit length, and the store does not look for the nearest by cosine: "
                "it may miss the nearest row, and with it a detection; give the collection cosine as its metric"
            )
        if self.agreement is not None and self.agreement < SAME:
            told.append(
                f"the configured embedder makes other vectors of the same texts (median cosine {self.agreement:.2f}): "
                "questions land in the wrong place; configure the one that made the collection"
            )
        if f.rows and f.sources == f.rows:
            told.append(
                "each row is its own source: of a document that was cut up one part is hidden, and the rest answers; "
                "where that is so, name it: a column or key there, rag.index.source_field or source_pattern"
            )
        if not f.threshold:
            told.append("near-copies were not looked for: when one is hidden, another answers; set near_copies")
        if f.widespread:
            told.append(f"{f.widespread} texts stand in more than {WIDESPREAD} sources each: hiding one hides nothing")
        told.append(
            "what others write into the store is found at once, and is in the moments after the next 'casemate attach'"
            if self.index.unknown == "judge"
            else "what others write into the store is withheld until the next 'casemate attach'"
        )
        return told
