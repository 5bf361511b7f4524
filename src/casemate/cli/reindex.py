"""``reindex``: learns, lists and rolls back contrastive re-indexings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import numpy as np
import typer
from rich.progress import Progress
from rich.table import Table

from casemate import config as configuration
from casemate.app import open_app, open_executor
from casemate.cli.console import Code, ConfigFile, Json, On, Tenant, bar, note, out, print_json, say, shown
from casemate.config import Config, PluginSpec
from casemate.errors import ConfigError
from casemate.guard.defenses.reindex import Reindex
from casemate.plugins import build
from casemate.reindexing.fitting import ReindexSettings, fit
from casemate.reindexing.lora import LoraSettings
from casemate.reindexing.registry import ReindexRegistry, reindex_due
from casemate.reindexing.space import Reindexing, chunk_key
from casemate.reports.topic_map import picture
from casemate.runtime.files import write_atomically
from casemate.system import App
from casemate.types import DEFAULT_TENANT


def reindex(
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    show: Annotated[bool, typer.Option("--show", help="List the versions and whether a new one is due.")] = False,
    rollback: Annotated[int | None, typer.Option(help="Activate this version again.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: depends on the mode.")] = None,
    device: Annotated[str, typer.Option(help="Device for fine-tuning (modes lora): auto, cpu, cuda ...")] = "auto",
    on: On = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Use less memory and a third more time (modes lora).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Learn a re-indexing for the defense `reindex` (RAGFort). Can be interrupted and resumed.

    Exit codes: 0 activated; 1 refused because retrieval would lose too much.
    """
    settings = configuration.read(config)
    defense = _configured(settings)
    registry = ReindexRegistry(defense.folder, tenant)
    with open_executor(on) as executor, open_app(settings, executor=executor) as app:
        if rollback is not None:
            _print_result(registry.rollback(rollback), as_json)
        elif show:
            _print_versions(registry, app, as_json)
        else:
            written = _learnt(app, defense, registry, steps, LoraSettings(device=device, checkpointing=checkpointing))
            _print_result(written, as_json)
            raise typer.Exit(0 if written.accepted else Code.FAILED)


def _configured(settings: Config) -> Reindex:
    """The defense as configured, or with default options."""
    part = next((p for p in settings.guard.defenses if p.use == "reindex"), None)
    if part is None:
        note("reindex is not in guard.defenses: add it, or the result has no effect")
    found = build("defense", part or PluginSpec(use="reindex"), settings.folder)
    if not isinstance(found, Reindex):
        raise ConfigError("the plug-in reindex belongs to another package; this command supports the built-in one only")
    return found


def _learnt(
    app: App, defense: Reindex, registry: ReindexRegistry, steps: int | None, encoder: LoraSettings
) -> Reindexing:
    rag = app.guard.rag
    with registry.training_lock() as checkpoint:
        settings = ReindexSettings(
            registry.tenant, defense.mode, app.config.rag.k, encoder=encoder, checkpoint=checkpoint
        )
        if steps is not None:
            settings = replace(settings, training=replace(settings.schedule, steps=steps))
        with bar() as progress:
            learnt = fit(rag.index, rag.embedder, settings, _progress_callback(progress), app.executor)
        written = registry.write(learnt)
    write_atomically(registry.folder / "topics.svg", _picture(app, written).encode())
    say.print(f"topics before and after: {shown(str(registry.folder / 'topics.svg'))}")
    return written


def _picture(app: App, learnt: Reindexing) -> str:
    pieces, keys = [], list[int]()
    for documents, vectors in app.guard.rag.index.scan(learnt.tenant):
        keys += [chunk_key(d) for d in documents]
        pieces.append(np.array(vectors))
    return picture(*learnt.before_and_after(np.array(keys, np.uint64), np.concatenate(pieces)))


def _progress_callback(progress: Progress) -> Callable[[str, int, int], None]:
    tasks: dict[str, object] = {}

    def tell(what: str, done: int, of: int) -> None:
        if what not in tasks:
            tasks[what] = progress.add_task(what, total=of or None)
        progress.update(tasks[what], completed=done, total=of or None)  # type: ignore[arg-type]

    return tell


def _print_result(learnt: Reindexing, as_json: bool) -> None:
    if as_json:
        print_json(_about(learnt))
        return
    state = "active" if learnt.accepted else "[red]refused[/red]"
    out.print(f"version {learnt.version}, mode {learnt.mode}, strength {learnt.strength:.2f}: {state}")
    out.print(shown(learnt.reason))
    if size := learnt.megabytes["adapter"]:
        vectors = learnt.megabytes["vectors"]
        out.print(f"the fine-tuned encoder's adapter takes {size:.1f} MB, its vectors of the chunks {vectors:.1f} MB")


def _print_versions(registry: ReindexRegistry, app: App, as_json: bool) -> None:
    current = registry.current()
    reason = reindex_due(current, app.guard.rag.index) if current else "no version exists"
    versions = list(registry.readable())
    if unreadable := sorted(set(registry.versions()) - {v.version for v in versions}):
        note(f"damaged, or of another version of Casemate: {', '.join(map(str, unreadable))}")
    if as_json:
        print_json({"current": current and current.version, "due": reason, "versions": [_about(v) for v in versions]})
        return
    table = Table("version", "made", "mode", "strength", "state")
    for v in versions:
        state = "active" if current and v.version == current.version else "kept" if v.accepted else "refused"
        table.add_row(str(v.version), v.at, v.mode, f"{v.strength:.2f}", state)
    out.print(table)
    out.print(f"due: {shown(reason)}" if reason else "not due")


def _about(learnt: Reindexing) -> dict[str, object]:
    names = ("version", "at", "mode", "strength", "accepted", "reason", "report")
    return {name: getattr(learnt, name) for name in names}
