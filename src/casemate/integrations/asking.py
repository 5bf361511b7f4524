"""One question on its way from a framework, through the guard, to the framework's own search and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from casemate.errors import ConfigError
from casemate.types import Query, Vector

ANONYMOUS = Query("").client
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks.

    What was withheld from a client stays withheld from him, and what one asks adds up: so name each person or service
    by what was authenticated, never by what a request says of itself. Whoever is not named is ``anonymous``, and all
    of them are one client.

    Attributes:
        client: Name or number of the person or service.
        tenant: Tells clients of the same name apart. It chooses no documents: that is what filters are for.
    """

    client: str = ""
    tenant: str = ""

    @property
    def name(self) -> str:
        """What the guard knows him by."""
        client = self.client or ANONYMOUS
        return f"{self.tenant}/{client}" if self.tenant else client


NOBODY = Asker()
_ASKER: ContextVar[Asker] = ContextVar("casemate_asker", default=NOBODY)


@contextmanager
def asking(client: str = "", tenant: str = "") -> Iterator[None]:
    """Says who asks, for all that is retrieved within the block, whatever the framework.

    Args:
        client: See ``Asker``; empty: as it is outside the block.
        tenant: Likewise.
    """
    token = _ASKER.set(asker(client, tenant))
    try:
        yield
    finally:
        _ASKER.reset(token)


def asker(client: Any = "", tenant: Any = "") -> Asker:
    """Who asks, as far as it is said here, else as a block around says.

    Raises:
        ConfigError: If a name is no text. A guard that took it for anonymous would mix people up.
    """
    for name, value in (("client", client), ("tenant", tenant)):
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ConfigError(f"casemate_{name} is a {type(value).__name__}; give a text")
    around = _ASKER.get()
    return Asker(str(client) or around.client, str(tenant) or around.tenant)


class Row(NamedTuple):
    """One of a framework's documents, as it was found.

    Attributes:
        id: Unique in the collection.
        text: What a model reads of it.
        metadata: Anything else that it carries.
        source: The record that it was cut from; empty: it is one of its own.
        native: The framework's own object.
        score: The framework's own score, whatever that means there; None: it gave none.
        cosine: Exact similarity to what was asked; None: not known from the score.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = NOTHING
    source: str = ""
    native: Any = None
    score: float | None = None
    cosine: float | None = None


@dataclass(eq=False, slots=True)
class Asked:
    """A question.

    Attributes:
        text: As it was asked; empty when only a vector was given.
        native: Its vector as the framework's embedder gave it.
        k: How many documents are wanted.
        asker: Who asks.
        options: What else the framework's search is to be given: filters.
        whole: The same without filters; None: there are none.
        given: Documents that somebody else retrieved and that are judged; None: the guard retrieves.
        inline: Whether a search runs where it is asked for, or in a thread while a loop goes on.
        vector: ``native`` at unit length.
        found: What the framework found so far, by id.
    """

    text: str
    native: Any
    k: int
    asker: Asker
    options: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] | None = None
    given: Sequence[Row] | None = None
    inline: bool = True
    vector: Vector | None = None
    found: dict[str, Row] = field(default_factory=dict)


ASKED: ContextVar[Asked | None] = ContextVar("casemate_asked", default=None)
"""The question that is being answered here; None: the guard looks around by itself."""
