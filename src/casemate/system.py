"""A built system: ``App``, its calibration, and its embedder on workers. ``casemate.app`` builds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from casemate import plugins
from casemate.backends.indexes.attached import AttachedIndex
from casemate.config import Config, GuardSection, PluginSpec, RedteamSection
from casemate.errors import ConfigError, DataError
from casemate.guard.audience import AudiencePolicy, EntitlementFunction, EntitlementRule
from casemate.guard.calibration.file import read_calibrations, write_calibration
from casemate.guard.calibration.fitting import CalibrationSettings, calibrate, calibrated_defenses, calibration_due
from casemate.guard.guard import Guard
from casemate.maths.calibration import Calibration
from casemate.plugins import build
from casemate.protocols import (
    CalibratedDefense,
    Defense,
    Embedder,
    EventStore,
    EventStoreProxy,
    Index,
    MembershipAttack,
    Steps,
    Target,
)
from casemate.rag.pipeline import require_tenant
from casemate.runtime.callables import import_attribute, is_async
from casemate.runtime.executor import Executor, LocalExecutor
from casemate.types import DEFAULT_TENANT, Event, QuotaGrant, QuotaRequest, Vector

NAMED_TENANTS = 5
"""Tenants that a message names at most."""


def audience_policy(section: GuardSection, folder: Path) -> AudiencePolicy:
    """The audience policy of a configuration.

    Args:
        section: The configuration of the guard.
        folder: Folder of the configuration: searched for the module of ``audience.function``.

    Raises:
        ConfigError: If a rule has neither groups nor metadata, or a key without values; or if the function does not
            exist, is not a function, or is asynchronous.
    """
    rules = []
    for rule in section.audience.entitled:
        values = {k: frozenset([v] if isinstance(v, str) else v) for k, v in rule.metadata.items()}
        rules.append(EntitlementRule(frozenset(rule.groups), values or None, rule.sources))
    return AudiencePolicy(section.audience.unentitled, tuple(rules), _entitlement(section.audience.function, folder))


def _entitlement(location: str, folder: Path) -> EntitlementFunction | None:
    if not location:
        return None
    option = "guard.audience.function"
    found: EntitlementFunction = import_attribute(option, location, folder)
    if not callable(found) or is_async(found):
        raise ConfigError(f"{option} is {location!r}; it must name a function that is not asynchronous")
    return found


@dataclass(frozen=True, slots=True)
class App:
    """A running system. Close it, or use it in a ``with`` block: closing flushes the event store.

    While it is open, BLAS uses one thread in this process (``runtime.blas_threads`` gives the reason).

    Attributes:
        guard: The guard, whatever ``guard.mode``; ``target`` respects the mode.
        opened: Resources that ``close`` closes.
        executor: Executor of distributed work.
    """

    config: Config
    guard: Guard
    store: EventStore
    opened: ExitStack = field(repr=False)
    executor: Executor = field(default_factory=LocalExecutor)

    @property
    def target(self) -> Target:
        """The system that answers: the guard, or the bare ``Rag`` in mode ``off``."""
        return self.guard.rag if self.config.guard.mode == "off" else self.guard

    @property
    def mode(self) -> Literal["enforce", "observe", "off"]:
        """The mode of the guard at present: ``guard.mode``, unless enforcement was switched since."""
        if self.config.guard.mode == "off":
            return "off"
        return "enforce" if self.guard.enforce else "observe"

    @property
    def ignores_audience(self) -> bool:
        """Whether ``guard.audience`` restricts clients, and is not carried out because the guard observes."""
        return self.mode == "observe" and self.guard.audience.unentitled != "full"

    def unrecorded_target(self) -> Target:
        """The system that answers, for questions of the operator's own tools. Nothing about them is recorded.

        The guard has new defenses, with the same options and models. They read the event store and the state that
        clients have there, and write nothing: no verdict, no cost, no client state.
        """
        if self.config.guard.mode == "off":
            return self.guard.rag
        store = ReadOnlyEventStore(self.store)
        defenses = [_with_store(defense, store) for defense in self.guard.defenses]
        return Guard(
            self.guard.rag,
            defenses,
            enforce=self.guard.enforce,
            on_error=self.config.guard.on_error,
            audience=self.guard.audience,
        )

    @property
    def index(self) -> Index:
        """The index."""
        return self.guard.rag.index

    @property
    def indexing_command(self) -> str:
        """The command that gives the index its documents."""
        return f"casemate {'attach' if self.config.rag.index.use == 'attached' else 'index'}"

    def require_documents(self, tenant: str) -> None:
        """Refuses a tenant without documents.

        Raises:
            DataError: If the tenant has none; the message names the command, and a few other tenants.
        """
        tenants = self.index.tenants()
        if tenant in tenants:
            return
        how = f"run '{self.indexing_command}'"
        if not tenants:
            raise DataError(f"nothing is indexed yet; {how}")
        others = ", ".join(sorted(tenants)[:NAMED_TENANTS])
        raise DataError(f"tenant {tenant!r} has no documents; {how}, or choose another with --tenant: {others}")

    @property
    def calibrated(self) -> tuple[CalibratedDefense, ...]:
        """The defenses that use a calibration."""
        return calibrated_defenses(self.guard.defenses)

    async def calibrate(
        self,
        log: Sequence[str] = (),
        tenant: str = DEFAULT_TENANT,
        steps: Steps = lambda title, total: nullcontext(lambda count: None),
    ) -> dict[str, Calibration]:
        """Calibrates every calibrated defense on a tenant's documents, and writes the calibration files.

        Args:
            log: Benign queries from real users; empty: synthetic questions are generated from the documents.
            tenant: The tenant.
            steps: Opens a display for each defense, which counts the queries that were embedded or scored.

        Returns:
            Calibrations by name of the defense.

        Raises:
            ConfigError: If no configured defense uses a calibration.
            DataError: If a calibration file is damaged.
        """
        return await calibrate_guard(self.guard, self.config, log, tenant, steps)

    def due(self, tenant: str = DEFAULT_TENANT) -> str:
        """Reason why the guard must be calibrated before it can answer a tenant's queries; empty if it is ready."""
        return calibration_due(self.guard.defenses, self.index, tenant)

    def close(self) -> None:
        """Writes pending events, and closes files and connections."""
        self.opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ReadOnlyEventStore(EventStoreProxy):
    """An event store that drops what is written."""

    def append(self, event: Event) -> None:
        """Drops the event."""

    def acquire(self, requests: Sequence[QuotaRequest]) -> Sequence[QuotaGrant]:
        """Returns what each request would be granted by the recorded usage, and consumes nothing."""
        used = [self._store.quota_usage(r.name).get(r.name, 0.0) for r in requests]
        return [QuotaGrant(min(r.amount, max(0, int(r.most - u))), u) for r, u in zip(requests, used, strict=True)]

    def discard_quotas(self, names: Collection[str]) -> None:
        """Deletes nothing."""

    def close(self) -> None:
        """Does nothing: the caller owns the store."""


def _with_store(defense: Defense, store: EventStore) -> Defense:
    """A new defense with the same options and models, and another event store."""
    if not dataclasses.is_dataclass(defense):
        return defense
    options = [name for name, kind in plugins.injected(type(defense)).items() if kind is EventStore]
    made: Defense = dataclasses.replace(defense, **dict.fromkeys(options, store))
    return made


@dataclass(frozen=True, slots=True)
class EmbeddingTask:
    """Embeds texts on a worker, with the embedder of a configuration.

    Attributes:
        spec: The embedder. Its secrets are pickled as references only.
        folder: Base of relative paths in its options.
        fingerprint: Fingerprint that the worker's embedder must have.
    """

    spec: PluginSpec
    folder: Path
    fingerprint: str

    @classmethod
    def of(cls, config: Config, fingerprint: str) -> Self:
        """Creates the task for a configuration; relative paths are resolved as in this process."""
        return cls(config.rag.embedder, config.folder.absolute(), fingerprint)

    def __call__(self, texts: Sequence[str]) -> Vector:
        """Embeds the texts: (n, dim)."""
        return self.embedder.embed(list(texts))

    @property
    def embedder(self) -> Embedder:
        """The worker's embedder, built on first use.

        Raises:
            ConfigError: If it cannot be built on the worker, or its fingerprint differs.
        """
        found = _build_embedder(self)
        if found.fingerprint != self.fingerprint:
            raise ConfigError(
                f"a worker's embedder is {found.fingerprint!r}, here it is {self.fingerprint!r}; install equal versions"
            )
        return found


@lru_cache(maxsize=2)
def _build_embedder(task: EmbeddingTask) -> Embedder:
    spec = task.spec
    fields = {f.name for f in dataclasses.fields(plugins.load("embedder", spec.use))}
    own = {"threads": 1} if "threads" in fields else {}  # one task per core
    spec = PluginSpec.model_validate({"use": spec.use, **own, **spec.options})
    embedder: Embedder = build("embedder", spec, task.folder)
    return embedder


async def calibrate_guard(
    guard: Guard, config: Config, log: Sequence[str], tenant: str, steps: Steps
) -> dict[str, Calibration]:
    """Calibrates every calibrated defense of a guard. See ``App.calibrate``."""
    defenses = calibrated_defenses(guard.defenses)
    if not defenses:
        raise ConfigError("nothing to calibrate: no defense in guard.defenses uses a calibration")
    require_tenant(tenant)
    for defense in defenses:
        read_calibrations(defense.calibration)  # reports a damaged file before the work, not after it
    settings, found = calibration_settings(config, tenant), dict[str, Calibration]()
    collection = guard.index.bound_name if isinstance(guard.index, AttachedIndex) else ""
    for defense in defenses:
        made = await calibrate(defense, guard.rag, published_attacks(), log, settings, steps)
        made = replace(made, collection=collection)
        write_calibration(defense.calibration, tenant, made)
        found[defense.name] = made
    return found


def calibration_settings(config: Config, tenant: str) -> CalibrationSettings:
    """Calibration settings of a tenant from the configuration."""
    section = config.calibrate
    return CalibrationSettings(tenant, config.rag.k, section.documents, section.questions, section.seed)


def published_attacks() -> dict[str, MembershipAttack]:
    """The attacks that a guard is calibrated against, with default options, whatever ``redteam.attacks`` is."""
    return {spec.use: build("attack", spec) for spec in RedteamSection().attacks}
