"""``reindex``: learns a space in which topics lie apart, shows it, and goes back to an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import numpy as np
import typer
from rich.progress import Progress
from rich.table import Table

from casemate import config as configuration
from casemate.app import App, build, open_app, spread_on
from casemate.cli.console import FAILED, ConfigFile, Json, On, Tenant, bar, out, print_json, say, shown
from casemate.config import Config, Part
from casemate.defenses.reindex import Reindex
from casemate.errors import ConfigError
from casemate.lab.reindex import Settings, fit
from casemate.lab.topic_map import picture
from casemate.reindexing.files import put
from casemate.reindexing.lora import LoraSettings
from casemate.reindexing.shelf import Shelf, due
from casemate.reindexing.space import Reindexing, key
from casemate.types import DEFAULT_TENANT


def reindex(
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    show: Annotated[bool, typer.Option("--show", help="List the versions, and whether one is due.")] = False,
    rollback: Annotated[int | None, typer.Option(help="Put this version in force again.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Most steps of training. Default: by the mode.")] = None,
    device: Annotated[
        str, typer.Option(help="Where an encoder is fine-tuned (modes lora): auto, cpu, cuda ...")
    ] = "auto",
    on: On = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Less memory for a third more time (modes lora).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Learn topics and a map that parts them, for the defense `reindex`. Interrupt at will and run again.

    Exit codes: 0 in force, 1 refused because too little would be found.
    """
    settings = configuration.read(config)
    defense = _configured(settings)
    shelf = Shelf(defense.folder, tenant)
    with spread_on(on) as spread, open_app(settings, spread=spread) as app:
        if rollback is not None:
            _told(shelf.rollback(rollback), as_json)
        elif show:
            _listed(shelf, app, as_json)
        else:
            written = _learnt(app, defense, shelf, steps, LoraSettings(device=device, checkpointing=checkpointing))
            _told(written, as_json)
            raise typer.Exit(0 if written.accepted else FAILED)


def _configured(settings: Config) -> Reindex:
    """The defense as configured, or as it is by default."""
    part = next((p for p in settings.guard.defenses if p.use == "reindex"), None)
    if part is None:
        say.print(
            "[yellow]note:[/yellow] reindex is not among guard.defenses: what is learnt here changes no answer yet"
        )
    found = build("defense", part or Part(use="reindex"), settings.folder)
    if not isinstance(found, Reindex):
        raise ConfigError("another package's plug-in is called reindex; this command knows only our own")
    return found


def _learnt(app: App, defense: Reindex, shelf: Shelf, steps: int | None, encoder: LoraSettings) -> Reindexing:
    rag = app.guard.rag
    with shelf.learning() as checkpoint:
        settings = Settings(shelf.tenant, defense.mode, app.config.rag.k, encoder=encoder, checkpoint=checkpoint)
        if steps is not None:
            settings = replace(settings, training=replace(settings.schedule, steps=steps))
        with bar() as progress:
            learnt = fit(rag.index, rag.embedder, settings, _teller(progress), app.spread)
        written = shelf.write(learnt)
    put(shelf.place / "topics.svg", _picture(app, written).encode())
    say.print(f"the topics, before and after: {shown(str(shelf.place / 'topics.svg'))}", soft_wrap=True)
    return written


def _picture(app: App, learnt: Reindexing) -> str:
    pieces, keys = [], list[int]()
    for documents, vectors in app.guard.rag.index.scan(learnt.tenant):
        keys += [key(d) for d in documents]
        pieces.append(np.array(vectors))
    return picture(*learnt.seen(np.array(keys, np.uint64), np.concatenate(pieces)))


def _teller(progress: Progress) -> Callable[[str, int, int], None]:
    tasks: dict[str, object] = {}

    def tell(what: str, done: int, of: int) -> None:
        if what not in tasks:
            tasks[what] = progress.add_task(what, total=of or None)
        progress.update(tasks[what], completed=done, total=of or None)  # type: ignore[arg-type]

    return tell


def _told(learnt: Reindexing, as_json: bool) -> None:
    if as_json:
        print_json(_about(learnt))
        return
    state = "in force" if learnt.accepted else "[red]refused[/red]"
    out.print(f"version {learnt.version}, mode {learnt.mode}, strength {learnt.strength:.2f}: {state}")
    out.print(shown(learnt.why), soft_wrap=True)
    if size := learnt.megabytes["adapter"]:
        vectors = learnt.megabytes["vectors"]
        out.print(f"the fine-tuned encoder's adapter takes {size:.1f} MB, its vectors of the chunks {vectors:.1f} MB")


def _listed(shelf: Shelf, app: App, as_json: bool) -> None:
    current = shelf.current()
    why = due(current, app.guard.rag.index) if current else "there is none"
    versions = [shelf.read(number) for number in shelf.versions()]
    if as_json:
        print_json({"current": current and current.version, "due": why, "versions": [_about(v) for v in versions]})
        return
    table = Table("version", "made", "mode", "strength", "state")
    for v in versions:
        state = "in force" if current and v.version == current.version else "kept" if v.accepted else "refused"
        table.add_row(str(v.version), v.at, v.mode, f"{v.strength:.2f}", state)
    out.print(table)
    out.print(f"due: {shown(why)}" if why else "not due")


def _about(learnt: Reindexing) -> dict[str, object]:
    names = ("version", "at", "mode", "strength", "accepted", "why", "report")
    return {name: getattr(learnt, name) for name in names}
