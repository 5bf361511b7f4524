"""Audience policy: which sources a client may read in full, and what it receives of the others.

Access labels (``acl``) decide before: a client never receives anything of a document whose labels it lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from casemate.errors import ConfigError
from casemate.types import READERS, Document, Query, metadata_names

Unentitled: TypeAlias = Literal["full", "quorum", "nothing"]
EntitlementFunction: TypeAlias = Callable[[Query, Document], object]
"""Decides whether the client of a query may read a document in full: exactly True if so."""
log = logging.getLogger(__name__)
IGNORED = "the audience policy is not carried out in observe mode: every client reads full texts"
"""Warning to the operator if the guard observes and the policy restricts clients."""


@dataclass(frozen=True, slots=True)
class ReleasedDocument(Document):
    """What several units state together, in place of their texts: no client is denied it, and none is charged for it.

    Its class marks it: a name could be forged by a document.
    """


@dataclass(frozen=True, slots=True)
class EntitlementRule:
    """Entitles clients to sources.

    Attributes:
        groups: The client has one of these groups; empty: every client.
        metadata: The document has one of the values of each key; empty: every document.
        sources: The name of the source matches one of these patterns; empty: every document. ``*`` also matches
            slashes: ``public/*`` is a folder with all subfolders.

    Raises:
        ConfigError: If all are empty, or a key has no value.
    """

    groups: frozenset[str] = frozenset()
    metadata: Mapping[str, frozenset[str]] | None = None
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups and self.covers_all:
            raise ConfigError(
                "guard.audience.entitled: a rule has neither groups nor metadata nor sources, so every client could "
                "read every source; add one of them, or set unentitled: full"
            )
        for key, values in (self.metadata or {}).items():
            if not values:
                raise ConfigError(f"guard.audience.entitled: metadata key {key!r} has no value; list at least one")

    @property
    def covers_all(self) -> bool:
        """Whether the rule applies to every document."""
        return not self.metadata and not self.sources

    def covers_client(self, groups: frozenset[str]) -> bool:
        """Whether the rule applies to a client with these groups."""
        return not self.groups or not self.groups.isdisjoint(groups)

    def covers_document(self, document: Document) -> bool:
        """Whether the rule applies to a document. Missing metadata never matches."""
        if self.sources and not any(fnmatchcase(document.source, pattern) for pattern in self.sources):
            return False
        return all(not values.isdisjoint(_values(document, key)) for key, values in (self.metadata or {}).items())


@dataclass(frozen=True, slots=True)
class AudiencePolicy:
    """Who may read what in full.

    Attributes:
        unentitled: What a client receives of sources that it may not read in full: ``full`` text all the same,
            ``quorum`` answers, or ``nothing``.
        rules: A client is entitled to a source if one rule covers both, or the document's ``readers`` list the client.
        function: A further rule, or None. The client is entitled if it returns True; any other value, or an exception,
            entitles no client. It is called for every hit of a restricted client, so it must be fast and not block.
    """

    unentitled: Unentitled = "full"
    rules: tuple[EntitlementRule, ...] = ()
    function: EntitlementFunction | None = None

    def restricts(self, query: Query) -> bool:
        """Whether there may be sources that the client of a query may not read in full.

        It depends on the client alone. Operators (``Query.groups`` is None) have no restriction.
        """
        if self.unentitled == "full" or query.groups is None:
            return False
        return not any(rule.covers_all and rule.covers_client(query.groups) for rule in self.rules)

    def entitles(self, query: Query, document: Document) -> bool:
        """Whether the client of a query may read a document in full."""
        if query.groups is None or query.client in (metadata_names(document.metadata, READERS) or ()):
            return True
        groups = query.groups
        if any(rule.covers_client(groups) and rule.covers_document(document) for rule in self.rules):
            return True
        return self.function is not None and _holds(self.function, query, document)


def _holds(function: EntitlementFunction, query: Query, document: Document) -> bool:
    try:
        return function(query, document) is True
    except Exception as error:  # its message may contain text of the document
        log.error("guard.audience.function failed (%s); the client is not entitled", type(error).__name__)
        return False


def _values(document: Document, key: str) -> frozenset[str]:
    """The values of a metadata key as text; none if it is missing or empty."""
    value = document.metadata.get(key)
    values = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return frozenset(str(v) for v in values if v is not None and str(v))
