"""The plug-in registry: finds a plug-in by role and name, and builds it from its options.

A built-in plug-in is named by its file: ``load("defense", "mirabel")`` imports ``casemate.guard.defenses.mirabel`` and
returns the class in it that derives from ``Defense``. ``ROLES`` lists every role.

Another package registers a plug-in as an entry point. The group is ``casemate.<role>``, and the object is a class that
derives from the base class of the role:

    [project.entry-points."casemate.defense"]
    embargo = "my_package.embargo:Embargo"

A plug-in is a dataclass: its fields are its options (see ``build``). `casemate.testing` checks third-party plug-ins.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from casemate.config import PluginSpec
from casemate.errors import ConfigError, UnknownName, closest_name, did_you_mean, shown_value, validation_reason
from casemate.protocols import (
    REGISTERED_NAMES,
    STAGES,
    Channel,
    Defense,
    Embedder,
    EventStore,
    ExtractionAttack,
    Generator,
    Index,
    InjectionAttack,
    LanguageModel,
    MembershipAttack,
    PersonalDataFinder,
    PoisoningAttack,
    Target,
    TokenModel,
    VectorCollection,
    unknown_stages,
)
from casemate.runtime.executor import Executor
from casemate.runtime.package_code import package_code
from casemate.types import Secret


class Role(NamedTuple):
    """What a plug-in can be.

    Attributes:
        package: Package of the built-in plug-ins, one per file.
        base: Protocol or base class that a plug-in derives from.
    """

    package: str
    base: type[Any]


ROLES: dict[str, Role] = {
    "embedder": Role("casemate.backends.embedders", Embedder),
    "index": Role("casemate.backends.indexes", Index),
    "generator": Role("casemate.backends.generators", Generator),
    "language_model": Role("casemate.backends.generators", LanguageModel),
    "token_model": Role("casemate.backends.generators", TokenModel),
    "store": Role("casemate.backends.event_stores", EventStore),
    "collection": Role("casemate.backends.collections", VectorCollection),
    "target": Role("casemate.backends.targets", Target),
    "channel": Role("casemate.backends.channels", Channel),
    "cluster": Role("casemate.backends.clusters", Executor),
    "personal_data_finder": Role("casemate.backends.personal_data_finders", PersonalDataFinder),
    "defense": Role("casemate.guard.defenses", Defense),
    "attack": Role("casemate.redteam.attacks", MembershipAttack),
    "crawler": Role("casemate.redteam.attacks", ExtractionAttack),
    "poisoner": Role("casemate.redteam.attacks", PoisoningAttack),
    "injector": Role("casemate.redteam.attacks", InjectionAttack),
}
"""Every role. Its entry-point group is ``casemate.<role>``."""

_OPENED = frozenset(
    {
        "embedder",
        "index",
        "generator",
        "language_model",
        "token_model",
        "store",
        "collection",
        "cluster",
        "personal_data_finder",
    }
)
"""Roles whose plug-ins open a file, a connection or a model when they are built."""


INSTALL_HINT = "; if another package provides it, install that package in this environment"


def names(role: str) -> list[str]:
    """Names of all plug-ins of a role, sorted.

    >>> "mirabel" in names("defense")
    True
    """
    built_in = [name for name in _files(role) if _classes(role, name)]
    return sorted({*built_in, *(e.name for e in _registered(entry_points, role))})


def load(role: str, name: str) -> type[Any]:
    """Finds the class of a plug-in.

    Args:
        role: One of ``ROLES``.
        name: Name of the plug-in's file, or of an entry point.

    Raises:
        UnknownName: If there is none; the message lists the available names.
        ConfigError: If an entry point has the name of another plug-in, cannot be imported, or is not a dataclass that
            fills the role.
    """
    built_in = _classes(role, name) if name in _files(role) else []
    registered = [e for e in _registered(entry_points, role) if e.name == name]
    if registered:
        others = [*(f"built-in {c.__module__}:{c.__name__}" for c in built_in), *map(_described, registered[1:])]
        if others:
            raise ConfigError(
                f"the entry point {name} = {_described(registered[0])} of group casemate.{role} has the name of "
                f"another plug-in, {others[0]}; rename the entry point, or uninstall its package"
            )
        return _imported(role, registered[0])
    if len(built_in) == 1:
        return built_in[0]
    allowed = names(role)
    hint = _elsewhere(role, name) or ("" if closest_name(name, allowed) else INSTALL_HINT)
    raise UnknownName(f"unknown {role} {name!r}{did_you_mean(name, allowed)}{hint}")


def injected(cls: type[Any]) -> dict[str, type[Any]]:
    """The options of a plug-in that are plug-ins themselves: field name to protocol.

    >>> injected(load("defense", "mirabel"))["embedder"].__name__
    'Embedder'
    """
    bases = {role.base for role in ROLES.values()}
    found = {}
    for name, kind in get_type_hints(cls).items():
        for candidate in (kind, *get_args(kind)):
            if inspect.isclass(candidate) and candidate in bases:
                found[name] = candidate
    return found


def packages(role: str, spec: PluginSpec) -> dict[str, str]:
    """Packages outside Casemate that a plug-in and its plug-in options come from, with fingerprints of their code."""
    cls = load(role, spec.use)
    found = package_code(cls)
    for name, kind in injected(cls).items():
        if name in spec.options:
            found |= packages(role_of(kind), _spec(f"{role} {spec.use!r}", name, spec.options[name]))
    return found


def role_of(base: type[Any]) -> str:
    """Name of the role with this protocol or base class."""
    return next(name for name, role in ROLES.items() if role.base is base)


def build(role: str, spec: PluginSpec, folder: Path = Path(), parts: Mapping[Any, Any] = MappingProxyType({})) -> Any:
    """Builds a plug-in from its options, which are validated against the fields of its dataclass.

    A field typed with a protocol is built as a plug-in too, from a name or mapping. If it is not configured, it is the
    system's own from ``parts``.

    Args:
        role: One of ``ROLES``.
        spec: Name and options.
        folder: Folder against which relative paths are resolved, defaults included.
        parts: The system's own parts: protocol to object.

    Raises:
        ConfigError: If the name or an option is unknown, an option is missing, or a value has the wrong type.
    """
    cls = load(role, spec.use)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    _require_options(role, spec.use, fields, spec.options)
    plug_ins = injected(cls)
    values = {name: parts[kind] for name, kind in plug_ins.items() if kind in parts}
    for name, value in spec.options.items():
        plug_in = f"{role} {spec.use!r}"
        if name in plug_ins:
            values[name] = build(role_of(plug_ins[name]), _spec(plug_in, name, value), folder)
        else:
            values[name] = _option_value(plug_in, name, get_type_hints(cls)[name], value)
    paths = {n: f.default for n, f in fields.items() if isinstance(f.default, Path) and n not in values}
    resolved = {n: folder / v if isinstance(v, Path) else v for n, v in (paths | values).items()}
    try:
        return cls(**resolved)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{role} {spec.use!r} cannot be built with these options: {error}") from error


def validate(role: str, spec: PluginSpec, folder: Path = Path()) -> None:
    """Checks name and options of a plug-in.

    A plug-in that contains others, or opens a file or model, is not built. Ranges of its options are then not checked.

    Args:
        role: One of ``ROLES``.
        spec: Name and options.
        folder: Folder against which relative paths are resolved.

    Raises:
        ConfigError: If the name or an option is unknown, an option is missing, or a value has the wrong type.
    """
    cls = load(role, spec.use)
    fields, plug_ins = {f.name: f for f in dataclasses.fields(cls) if f.init}, injected(cls)
    _require_options(
        role,
        spec.use,
        {n: f for n, f in fields.items() if n not in plug_ins},
        {n: v for n, v in spec.options.items() if n not in plug_ins},
    )
    for name, value in spec.options.items():
        plug_in = f"{role} {spec.use!r}"
        if name in plug_ins:
            validate(role_of(plug_ins[name]), _spec(plug_in, name, value), folder)
        else:
            _option_value(plug_in, name, get_type_hints(cls)[name], value)
    if not plug_ins and role not in _OPENED:
        build(role, spec, folder)


@cache
def _installed() -> Any:
    """The entry points of all installed packages. Kept: reading their metadata takes a twentieth of a second."""
    return metadata.entry_points()


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """The installed entry points of a group."""
    return tuple(_installed().select(group=group))


@cache
def _registered(find: Callable[..., Iterable[EntryPoint]], role: str) -> tuple[EntryPoint, ...]:
    return tuple(find(group=f"casemate.{role}"))


@cache
def _files(role: str) -> list[str]:
    """Names of the modules in the package of a role."""
    return [m.name for m in pkgutil.iter_modules(importlib.import_module(ROLES[role].package).__path__)]


@cache
def _classes(role: str, name: str) -> list[type[Any]]:
    """The public classes in a plug-in's file that fill a role. Importing the file needs none of its extras."""
    package, base = ROLES[role]
    module = importlib.import_module(f"{package}.{name}")
    return [
        cls
        for label, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__ == module.__name__ and base in cls.__mro__ and not label.startswith("_")
    ]


def _described(entry: EntryPoint) -> str:
    """The object of an entry point, and the distribution that registers it."""
    return f"{entry.value} ({entry.dist.name} {entry.dist.version})" if entry.dist else entry.value


def _imported(role: str, entry: EntryPoint) -> type[Any]:
    """The class of an entry point. Importing it runs foreign code, so any error is possible."""
    what = f"the entry point {entry.name} = {_described(entry)} of group casemate.{role}"
    try:
        with redirect_stdout(sys.stderr):  # stdout may be read by a program
            cls = entry.load()
    except (Exception, SystemExit) as error:
        needed = [line for line in (entry.dist and entry.dist.requires) or () if re.match(r"casemate(?![\w.-])", line)]
        needs = f"; it requires {needed[0]}, and {metadata.version('casemate')} is installed" if needed else ""
        raise ConfigError(
            f"{what} cannot be imported: {type(error).__name__}: {error}{needs}; repair or uninstall its package"
        ) from error
    if fault := _fault(ROLES[role].base, cls):
        raise ConfigError(f"{what} {fault}")
    REGISTERED_NAMES[cls] = entry.name
    return cast(type[Any], cls)


def _fault(base: type[Any], cls: Any) -> str:
    """Why the object of an entry point does not fill a role with this base class; empty if it does."""
    if not (inspect.isclass(cls) and base in cls.__mro__):
        return f"must be a subclass of {base.__name__}"
    if not dataclasses.is_dataclass(cls):
        return "must be a dataclass: its fields are its options"
    if unknown := unknown_stages(cls):
        return f"has the stage {unknown[0]}, which this version never calls{did_you_mean(unknown[0], STAGES)}"
    try:
        get_type_hints(cls)
    except NameError as error:
        return f"has an option whose type is not imported at run time: {error}"
    except Exception as error:
        return f"has an option whose type cannot be evaluated: {type(error).__name__}: {error}"
    return ""


def _elsewhere(role: str, name: str) -> str:
    """Where else a name is registered: in another role, or in a group that is not a role; empty if nowhere."""
    for other in ROLES:
        known = name in _files(other) and _classes(other, name)
        if other != role and (known or any(e.name == name for e in _registered(entry_points, other))):
            return f"; the role {other} has a plug-in of this name"
    groups = {f"casemate.{one}" for one in ROLES}
    for group in sorted(g for g in _installed().groups if g.startswith("casemate.") and g not in groups):
        if found := [e for e in entry_points(group) if e.name == name]:
            return f"; {_described(found[0])} registers it in the group {group}{did_you_mean(group, sorted(groups))}"
    return ""


def _require_options(
    role: str, use: str, fields: Mapping[str, dataclasses.Field[Any]], options: Mapping[str, Any]
) -> None:
    plug_in = f"{role} {use!r}"
    unknown = next((name for name in options if name not in fields), None)
    if unknown is not None:
        raise ConfigError(f"{plug_in} has no option {unknown!r}{did_you_mean(unknown, fields)}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in options:
            raise ConfigError(f"{plug_in} needs the option {name!r}")


def _spec(plug_in: str, name: str, value: Any) -> PluginSpec:
    where = f"{plug_in}, option {name!r}"
    try:
        return PluginSpec.model_validate(value)
    except ValidationError:
        raise ConfigError(
            f"{where} is {shown_value(name, value)}: give a plug-in's name, or a mapping with 'use' and options"
        ) from None  # the error quotes the value


def _option_value(plug_in: str, name: str, kind: Any, value: Any) -> Any:
    """Converts the value to the type of its field."""
    where = f"{plug_in}, option {name!r}"
    if kind is Secret:
        if not isinstance(value, Secret):
            raise ConfigError(
                f"{where} is a secret: write ${{NAME}} and set NAME in the environment; leave it out if none is needed"
            )
        return value
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        reason = validation_reason(error.errors()[0])
        raise ConfigError(f"{where} is {shown_value(name, value)}: {reason}") from None  # the error quotes the value
