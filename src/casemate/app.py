"""Builds a running system from a configuration: the only place where objects are wired."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from casemate import config as configuration
from casemate import plugins
from casemate.backends.indexes.attached import AttachedIndex, one_collection
from casemate.config import Config, PluginSpec
from casemate.errors import DataError
from casemate.guard.calibration.file import read_calibrations
from casemate.guard.calibration.fitting import calibrated_defenses
from casemate.guard.guard import Guard
from casemate.monitor.alerts.alerting_store import AlertingEventStore
from casemate.plugins import build
from casemate.protocols import CalibratedDefense, Embedder, EventStore, Index, WithholdingIndex
from casemate.rag.distributed_embedder import DistributedEmbedder
from casemate.rag.pipeline import INSTRUCTIONS, Rag
from casemate.runtime.blas_threads import single_blas_thread
from casemate.runtime.executor import Executor, LocalExecutor
from casemate.system import App, EmbeddingTask, audience_policy


def open_app(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    folder: Path | str = ".",
    rebuild: bool = False,
    executor: Executor | None = None,
) -> App:
    """Builds the system of a configuration.

    Args:
        config: Path of a ``casemate.yaml``, or its content as a mapping or ``Config``; None: the file in the working
            directory, or the defaults if there is none.
        folder: Folder of a mapping's relative paths: of the index, the events and the calibration, ``.casemate/...``.
        rebuild: Clears the index of all tenants first, so that another embedder can be used.
        executor: Executor of distributed work, closed by the caller; None: this process.

    Raises:
        ConfigError: If a key or plug-in is unknown, or an option is missing or out of range.
        DataError: If the index is damaged, is not an index, or was built with another embedder.
        BackendError: If an external system cannot be reached.
    """
    config = configuration.read() if config is None else configuration.resolve(config, Path(folder))
    folder = config.folder
    for spec in config.guard.defenses:  # reports wrong options before anything is opened
        if not plugins.injected(plugins.load("defense", spec.use)).keys() & spec.options:  # would load a model twice
            build("defense", spec, folder)
    embedder: Embedder = build("embedder", config.rag.embedder, folder)
    generator = build("generator", config.rag.generator, folder, {Embedder: embedder})
    if executor is not None:
        embedder = DistributedEmbedder(embedder, executor, EmbeddingTask.of(config, embedder.fingerprint))
    with ExitStack() as opened:
        opened.enter_context(single_blas_thread())
        index = opened.enter_context(closing(_build_index(config)))
        store = opened.enter_context(closing(AlertingEventStore(build("store", config.store, folder))))
        if rebuild:  # last, once everything else has been opened
            index.clear()
        rag = Rag(embedder, index, generator, config.rag.instructions or INSTRUCTIONS)
        parts = {Embedder: embedder, Index: index, EventStore: store}
        defenses = [build("defense", spec, folder, parts) for spec in config.guard.defenses]
        _require_own_calibrations(index, calibrated_defenses(defenses))  # refuses a shared calibration file
        guard = Guard(
            rag,
            defenses,
            enforce=config.guard.mode == "enforce",
            on_error=config.guard.on_error,
            store=store,
            log_text=config.privacy.log_text,
            audience=audience_policy(config.guard, config.folder),
        )
        return App(config, guard, store, opened.pop_all(), executor or LocalExecutor())


def _require_own_calibrations(index: Index, defenses: Sequence[CalibratedDefense]) -> None:
    """Refuses the calibration of another attached collection, so that it is neither used nor replaced.

    Raises:
        DataError: If there is one, or if a file is damaged.
    """
    name = index.bound_name if isinstance(index, AttachedIndex) else ""
    for defense in defenses if name else ():
        for found in read_calibrations(defense.calibration).values():
            if found.collection not in ("", name):
                raise DataError(
                    f"{defense.calibration} is the calibration of {found.collection!r}, not of {name!r}; "
                    f"{one_collection(str(defense.calibration))}"
                )


def _build_index(config: Config) -> Index:
    """The configured index; with screening, rows of other programs are withheld until they are screened."""
    index: Index = build("index", config.rag.index, config.folder)
    if isinstance(index, WithholdingIndex) and config.monitor.gate is True:
        index.withhold_new = True
    return index


@contextmanager
def open_executor(where: str | None) -> Iterator[Executor | None]:
    """Connects to a cluster for the duration of the block.

    Args:
        where: ``local``, ``auto``, ``host:port`` or ``ray://host:port``; None: no cluster.

    Raises:
        ConfigError: If the address has another form, or the workers run another version.
        BackendError: If the cluster cannot be reached.
        MissingExtra: If Ray is not installed.
    """
    if where is None:
        yield None
        return
    with closing(build("cluster", PluginSpec.model_validate({"use": "ray", "address": where}))) as executor:
        yield executor
