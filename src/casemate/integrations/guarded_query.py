"""A question on its path from a framework through the guard to the framework's search, and its client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from casemate.errors import ConfigError
from casemate.types import Query, Vector

ANONYMOUS = Query("").client
NO_METADATA: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Identity of a client.

    The guard keeps state per client: withheld documents stay withheld, and evidence accumulates. Use an authenticated
    name, never one that the request itself claims. Requests without a name share the client ``anonymous``.

    Attributes:
        client: Name or number of the person or service.
        tenant: Separates clients of the same name. It does not select documents; use filters for that.
        groups: Groups of the client, for the rules of ``guard.audience``.
        labels: Access labels of the client. A document with ``acl`` in its metadata is only for clients with one of
            its labels.
    """

    client: str = ""
    tenant: str = ""
    groups: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The client name that the guard uses, and by which a document's ``readers`` list the client.

        No two pairs of tenant and client have the same name: without a tenant, a name with a slash begins with one.

        >>> ClientIdentity("ann").name, ClientIdentity("ann", "north").name
        ('ann', 'north/ann')
        >>> ClientIdentity("north/ann").name, ClientIdentity("ann", "north/east").name
        ('/north/ann', 'north%2Feast/ann')
        """
        client = self.client or ANONYMOUS
        if not self.tenant:
            return f"/{client}" if "/" in client else client
        tenant = self.tenant.replace("%", "%25").replace("/", "%2F")
        return f"{tenant}/{client}"


ANONYMOUS_CLIENT = ClientIdentity()
_ASKER: ContextVar[ClientIdentity] = ContextVar("casemate_asker", default=ANONYMOUS_CLIENT)


@contextmanager
def client_context(
    client: str = "", tenant: str = "", groups: Sequence[str] = (), labels: Sequence[str] = ()
) -> Iterator[None]:
    """Sets the client for every retrieval inside the block, in all frameworks.

    Empty: that outside the block; groups and labels, only if the client is the same. See ``ClientIdentity``.

    Raises:
        ConfigError: If a name is not a text.
    """
    for name, values in (("groups", groups), ("labels", labels)):
        if isinstance(values, str) or not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{name} must be a list of texts")
    found = client_identity(client, tenant)
    found = replace(found, groups=tuple(groups) or found.groups, labels=tuple(labels) or found.labels)
    token = _ASKER.set(found)
    try:
        yield
    finally:
        _ASKER.reset(token)


def client_identity(client: Any = "", tenant: Any = "") -> ClientIdentity:
    """The client given here, else the client of the enclosing ``client_context``.

    Raises:
        ConfigError: If a name is not a text. Treating it as anonymous would mix clients.
    """
    for name, value in (("client", client), ("tenant", tenant)):
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ConfigError(f"casemate_{name} is a {type(value).__name__}; give a text")
    around = _ASKER.get()
    found = ClientIdentity(str(client) or around.client, str(tenant) or around.tenant)
    is_same = (found.client, found.tenant) == (around.client, around.tenant)
    return replace(found, groups=around.groups, labels=around.labels) if is_same else found


class Guarded:
    """Base of the framework classes whose results are guarded."""


class FrameworkDocument(NamedTuple):
    """A document of the framework, as retrieved.

    Attributes:
        id: Unique in the collection.
        text: The text that a model reads.
        source: The record that it is a chunk of; empty: a record of its own.
        native: The framework's own object; None: a defense composed the text.
        score: The framework's own score; None: unknown.
        cosine: Exact cosine to the question; None: unknown.
        released: Whether it is what several sources state together: no client is charged for it.
        related: Ids and metadata of related documents that the framework's object has.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = NO_METADATA
    source: str = ""
    native: Any = None
    score: float | None = None
    cosine: float | None = None
    released: bool = False
    related: Sequence[Any] = ()


@dataclass(eq=False, slots=True)
class GuardedQuery:
    """A question from a framework.

    Attributes:
        text: The question; empty if only a vector was given.
        native: Its vector as the framework's embedder returned it.
        options: Further arguments of the framework's search, such as filters.
        whole: The arguments without filters; None: there are no filters.
        given: Documents from another retriever, to be judged; None: the guard retrieves.
        candidates: Whether the caller chooses among the documents, and calls ``Protection.deliver`` for those.
        inline: Whether a search runs in the calling thread. False: in a worker thread.
        vector: ``native`` with unit length.
        found: Documents that the framework found so far, by id.
    """

    text: str
    native: Any
    k: int
    identity: ClientIdentity
    options: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] | None = None
    given: Sequence[FrameworkDocument] | None = None
    candidates: bool = False
    inline: bool = True
    vector: Vector | None = None
    found: dict[str, FrameworkDocument] = field(default_factory=dict)


_COMPOSING: ContextVar[bool] = ContextVar("casemate_composing", default=False)


@contextmanager
def composing() -> Iterator[None]:
    """Lets retrievals in the block return candidates: the caller hands over other texts, and delivers these."""
    token = _COMPOSING.set(True)
    try:
        yield
    finally:
        _COMPOSING.reset(token)


def is_composing() -> bool:
    """Whether the present code is in a ``composing`` block."""
    return _COMPOSING.get()


CURRENT_QUERY: ContextVar[GuardedQuery | None] = ContextVar("casemate_asked", default=None)
"""The question that is being processed; None outside of one."""
