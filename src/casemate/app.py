"""The only place where objects are wired: configuration in, a running system out."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, get_type_hints

from pydantic import TypeAdapter, ValidationError

from casemate import calibration, registry
from casemate import config as configuration
from casemate.backends.ray import RayCluster
from casemate.calibration import Calibration
from casemate.config import Config, Part, RedteamSection
from casemate.defenses.mirabel import Mirabel
from casemate.errors import ConfigError, DataError
from casemate.guard import Guard
from casemate.lab.calibrate import Settings, calibrate
from casemate.monitor.alerts.at_once import Alarming
from casemate.neighbors import one_thread
from casemate.protocols import Embedder, EventStore, Index, MembershipAttack, Progress, Target
from casemate.rag import INSTRUCTIONS, Rag, require_tenant
from casemate.spread import Alone, Spread, SpreadEmbedder
from casemate.types import DEFAULT_TENANT, Secret, Vector


@dataclass(frozen=True, slots=True)
class App:
    """A wired system. Close it, or use it in a ``with`` block: closing writes what is still to be noted.

    While it is open, BLAS uses one thread in this process (``neighbors.one_thread`` says why).

    Attributes:
        config: What it was built from.
        guard: The protected system; what ``guard.mode: off`` means is decided by ``target``.
        store: The event store.
        opened: What is to be closed.
        spread: Where work is done that others can share.
    """

    config: Config
    guard: Guard
    store: EventStore
    opened: ExitStack = field(repr=False)
    spread: Spread = field(default_factory=Alone)

    @property
    def target(self) -> Target:
        """What answers: the guard, or the bare system when the guard is off."""
        return self.guard.rag if self.config.guard.mode == "off" else self.guard

    @property
    def index(self) -> Index:
        """The index."""
        return self.guard.rag.index

    @property
    def calibrated(self) -> Mirabel | None:
        """The defense that needs a calibration, if one is configured."""
        found = (d for d in self.guard.defenses if isinstance(d, Mirabel) and d.mode == "calibrated")
        return next(found, None)

    async def calibrate(
        self, log: Sequence[str] = (), tenant: str = DEFAULT_TENANT, progress: Progress = lambda count: None
    ) -> Calibration:
        """Fits the guard to a tenant's documents, and writes what it has learnt where the guard looks for it.

        Args:
            log: Harmless questions that people asked; empty: they are made from the documents.
            tenant: Whose documents.
            progress: Called with the number of questions just embedded.

        Raises:
            ConfigError: If no configured defense is calibrated.
            DataError: If the file that is there is damaged.
        """
        defense = self.calibrated
        if defense is None:
            raise ConfigError("nothing to calibrate: guard.defenses has no mirabel in mode calibrated")
        require_tenant(tenant)
        calibration.read(defense.calibration)  # what is wrong with it shows before the work, not after
        settings = calibration_settings(self.config, tenant)
        found = await calibrate(self.guard.rag, published_attacks(), log, settings, progress)
        calibration.write(defense.calibration, tenant, found)
        return found

    def due(self, tenant: str = DEFAULT_TENANT) -> str:
        """Why the guard must be calibrated before it can judge a tenant's questions; empty if it need not."""
        try:
            if self.calibrated is not None:
                self.calibrated.ready(tenant, self.index.moments(tenant).n)
        except DataError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Writes what is still to be noted, and lets go of files and connections."""
        self.opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_app(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    rebuild: bool = False,
    spread: Spread | None = None,
) -> App:
    """Builds the system that a configuration describes.

    Args:
        config: A ``casemate.yaml``, the same as a mapping or a ``Config``; None: the file in this folder, or the
            defaults where there is none.
        rebuild: Empties the index first, of all tenants, so that another embedder may fill it.
        spread: Who shares the work; it is the caller's to close. None: this process does it all.

    Raises:
        ConfigError: If something is unknown, missing or out of range.
        DataError: If the index is damaged, no index, or was built by another embedder.
        BackendError: If something outside cannot be reached.
    """
    if isinstance(config, str | Path):
        config = configuration.read(Path(config))
    elif config is None:
        config = configuration.read()
    elif not isinstance(config, Config):
        config = configuration.parse(config)
    folder = config.folder
    generator = build("generator", config.rag.generator, folder)
    for part in config.guard.defenses:  # what is wrong with an option shows before anything is opened
        if not registry.wants(registry.load("defense", part.use)).keys() & part.options:  # a model would load twice
            build("defense", part, folder)
    embedder: Embedder = build("embedder", config.rag.embedder, folder)
    if spread is not None:
        embedder = SpreadEmbedder(embedder, spread, Embedding.of(config, embedder.fingerprint))
    with ExitStack() as opened:
        opened.enter_context(one_thread())
        index: Index = opened.enter_context(closing(build("index", config.rag.index, folder)))
        store = Alarming(opened.enter_context(closing(build("store", config.store, folder))))
        if rebuild:  # only now, when all else is known to work
            index.clear()
        rag = Rag(embedder, index, generator, config.rag.instructions or INSTRUCTIONS)
        parts = {Embedder: embedder, Index: index, EventStore: store}
        defenses = [build("defense", part, folder, parts) for part in config.guard.defenses]
        guard = Guard(
            rag,
            defenses,
            enforce=config.guard.mode == "enforce",
            on_error=config.guard.on_error,
            store=store,
            log_text=config.privacy.log_text,
        )
        return App(config, guard, store, opened.pop_all(), spread or Alone())


@dataclass(frozen=True, slots=True)
class Embedding:
    """Embeds texts on a worker, by the embedder of a configuration.

    Attributes:
        part: The embedder, pickled: secrets are in it by their names.
        fingerprint: What it must be.
    """

    part: bytes
    fingerprint: str

    @classmethod
    def of(cls, config: Config, fingerprint: str) -> Self:
        """As the configuration says; relative paths start where they do here."""
        return cls(pickle.dumps((config.rag.embedder, config.folder.absolute())), fingerprint)

    def __call__(self, texts: Sequence[str]) -> Vector:
        """Vectors of the texts, (n, dim)."""
        return self.embedder.embed(list(texts))

    @property
    def embedder(self) -> Embedder:
        """The worker's own, made when it is first needed.

        Raises:
            ConfigError: If it cannot be made there, or makes other vectors.
        """
        found = _made(self.part)
        if found.fingerprint != self.fingerprint:
            raise ConfigError(f"a worker's embedder is {found.fingerprint!r}, not {self.fingerprint!r} as here")
        return found


@lru_cache(maxsize=2)
def _made(pickled: bytes) -> Embedder:
    try:
        part, folder = pickle.loads(pickled)
    except KeyError as error:
        raise ConfigError(f"the environment of a worker lacks {error}, which the configuration names") from error
    fields = {f.name for f in dataclasses.fields(registry.load("embedder", part.use))}
    own = {"threads": 1} if "threads" in fields else {}  # a worker has one core
    embedder: Embedder = build("embedder", Part.model_validate({"use": part.use, **own, **part.options}), folder)
    return embedder


@contextmanager
def spread_on(where: str | None) -> Iterator[Spread | None]:
    """The workers that share the work, for as long as the block lasts.

    Args:
        where: ``local``, ``auto``, ``host:port`` or ``ray://host:port``; None: there are none.

    Raises:
        ConfigError: If it is none of these, or the workers run something else.
        BackendError: If they cannot be reached.
        MissingExtra: If Ray is absent.
    """
    if where is None:
        yield None
        return
    with closing(RayCluster(where)) as spread:
        yield spread


def calibration_settings(config: Config, tenant: str) -> Settings:
    """How the guard of a tenant is calibrated, as the configuration says."""
    section = config.calibrate
    return Settings(tenant, config.rag.k, section.documents, section.questions, section.seed)


def published_attacks() -> dict[str, MembershipAttack]:
    """The attacks that a guard is calibrated against: with their own options, whatever a campaign is told to run."""
    return {part.use: build("attack", part) for part in RedteamSection().attacks}


def build(role: str, part: Part, folder: Path = Path(), parts: Mapping[Any, Any] = MappingProxyType({})) -> Any:
    """One plug-in, with its options checked against the fields of its dataclass.

    A field typed with a protocol takes a plug-in in its turn: by name or mapping, or, if nothing is given, the system's
    own from ``parts``.

    Args:
        role: One of ``registry.ROLES``.
        part: Name and options.
        folder: Where relative paths start.
        parts: What the system has, by protocol.

    Raises:
        ConfigError: If the name or an option is unknown, or a value is of the wrong kind.
    """
    cls = registry.load(role, part.use)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    unknown = [name for name in part.options if name not in fields]
    if unknown:
        known = ", ".join(fields) or "none"
        raise ConfigError(f"{role} {part.use!r} has no option {unknown[0]!r}; known: {known}")
    lacking = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and name not in part.options
    ]
    if lacking:
        raise ConfigError(f"{role} {part.use!r} needs the option {lacking[0]!r}")
    wanted = registry.wants(cls)
    values = {name: parts[kind] for name, kind in wanted.items() if kind in parts}
    for name, value in part.options.items():
        where = f"{role} {part.use!r}, option {name!r}"
        if name in wanted:
            values[name] = build(registry.role(wanted[name]), _part(where, value), folder)
        else:
            values[name] = _checked(where, cls, fields[name], value)
    paths = {n: f.default for n, f in fields.items() if isinstance(f.default, Path) and n not in values}
    placed = {n: folder / v if isinstance(v, Path) else v for n, v in (paths | values).items()}
    try:
        return cls(**placed)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{role} {part.use!r} cannot be built with these options: {error}") from error


def _part(where: str, value: Any) -> Part:
    try:
        return Part.model_validate(value)
    except ValidationError as error:
        raise ConfigError(
            f"{where} is {value!r}: give a plug-in's name, or a mapping with 'use' and options"
        ) from error


def _checked(where: str, cls: type[Any], field: dataclasses.Field[Any], value: Any) -> Any:
    """The value as the field's type, which is the only description of an option there is."""
    kind = get_type_hints(cls)[field.name]
    if kind is Secret:
        if not isinstance(value, Secret):
            raise ConfigError(f"{where} is a secret: write ${{NAME}} and set NAME in the environment")
        return value
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{where} is {value!r}: {error.errors()[0]['msg']}") from error
