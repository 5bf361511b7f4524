"""Find a plug-in by its name. The name is the file.

``load("defense", "mirabel")`` imports ``casemate.defenses.mirabel`` and returns the class in it that is a
``Defense``. Packages outside the tree declare an entry point in the group ``casemate.defense`` (or
``casemate.embedder``, ``casemate.index``, ``casemate.generator``, ``casemate.store``, ``casemate.model``,
``casemate.tokens``, ``casemate.target``, ``casemate.collection``, ``casemate.channel``, ``casemate.attack``,
``casemate.crawler``, ``casemate.poisoner``).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from importlib.metadata import entry_points
from typing import Any, get_args, get_type_hints

from casemate.collection import Collection
from casemate.errors import ConfigError, UnknownName
from casemate.protocols import (
    Channel,
    Defense,
    Embedder,
    EventStore,
    ExtractionAttack,
    Generator,
    Index,
    LanguageModel,
    MembershipAttack,
    PoisoningAttack,
    Target,
    TokenModel,
)

ROLES: dict[str, tuple[str, type[Any]]] = {
    "embedder": ("casemate.backends", Embedder),
    "index": ("casemate.backends", Index),
    "generator": ("casemate.backends", Generator),
    "store": ("casemate.backends", EventStore),
    "model": ("casemate.backends", LanguageModel),
    "tokens": ("casemate.backends", TokenModel),
    "target": ("casemate.backends", Target),
    "collection": ("casemate.backends", Collection),
    "channel": ("casemate.backends", Channel),
    "defense": ("casemate.defenses", Defense),
    "attack": ("casemate.attacks", MembershipAttack),
    "crawler": ("casemate.attacks", ExtractionAttack),
    "poisoner": ("casemate.attacks", PoisoningAttack),
}
"""What a plug-in can be: where its file lies, and what its class derives from."""


def names(role: str) -> list[str]:
    """All plug-ins that can fill a role, sorted.

    >>> "mirabel" in names("defense")
    True
    """
    inside = [name for name in _files(ROLES[role][0]) if _found(role, name)]
    return sorted({*inside, *(e.name for e in entry_points(group=f"casemate.{role}"))})


def load(role: str, name: str) -> type[Any]:
    """The class of the plug-in that has this name.

    Args:
        role: One of ``ROLES``.
        name: The file's name, or that of an entry point.

    Raises:
        UnknownName: If there is none; the message lists those there are.
    """
    for entry in entry_points(group=f"casemate.{role}", name=name):
        return _checked(role, name, entry.load())
    found = _found(role, name) if name in _files(ROLES[role][0]) else []
    if len(found) != 1:
        raise UnknownName(f"no {role} is called {name!r}; known: {', '.join(names(role))}")
    return found[0]


def wants(cls: type[Any]) -> dict[str, type[Any]]:
    """The options of a plug-in that are plug-ins themselves, and the protocol of each: fields typed with one.

    >>> wants(load("defense", "mirabel"))["embedder"].__name__
    'Embedder'
    """
    bases = {base for _, base in ROLES.values()}
    found = {}
    for name, kind in get_type_hints(cls).items():
        for candidate in (kind, *get_args(kind)):
            if inspect.isclass(candidate) and candidate in bases:
                found[name] = candidate
    return found


def role(base: type[Any]) -> str:
    """The role that a protocol stands for."""
    return next(name for name, (_, known) in ROLES.items() if known is base)


def _files(package: str) -> list[str]:
    """Names of the modules of a package."""
    return [m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)]


def _found(role: str, name: str) -> list[type[Any]]:
    """The public classes in a plug-in's file that fill a role. Importing the file needs none of its extras."""
    package, base = ROLES[role]
    module = importlib.import_module(f"{package}.{name}")
    return [
        cls
        for label, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__ == module.__name__ and base in cls.__mro__ and not label.startswith("_")
    ]


def _checked(role: str, name: str, cls: Any) -> type[Any]:
    """An entry point's object, if it is a class that fills the role."""
    base = ROLES[role][1]
    if not (inspect.isclass(cls) and base in cls.__mro__):
        raise ConfigError(f"the entry point {name!r} of group casemate.{role} must be a subclass of {base.__name__}")
    return cls
