"""The nouns: frozen, comparable, free of I/O."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float32]
"""One embedding (dim,) or several (n, dim); rows have unit L2 norm."""
Float64: TypeAlias = npt.NDArray[np.float64]

DEFAULT_TENANT = "default"
UNKNOWN = "I don't know."
"""The one wording of every answer that the context does not support, whatever the reason."""
ACL = "acl"
"""Key of a document's metadata under which the labels are of which whoever reads it needs one."""
MAX_K = 1000
"""Most documents that are read for one answer."""
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""How the value of an environment variable is written where it must not be."""


class Secret(str):
    """A text that came from the environment. It never shows itself in a repr, hence in no log or traceback.

    Where it is written as ``${NAME}``, that is what is pickled: whoever unpickles it has his own environment.

    >>> import os, pickle
    >>> os.environ["A_KEY"] = "k1"
    >>> sent = pickle.dumps(Secret("k1", "${A_KEY}"))
    >>> os.environ["A_KEY"] = "k2"
    >>> b"k1" in sent, str(pickle.loads(sent))
    (False, 'k2')
    """

    __slots__ = ("written",)
    written: str

    def __new__(cls, value: str, written: str = "") -> Secret:
        """The text, and how it is written where secrets must not be."""
        made = super().__new__(cls, value)
        made.written = written
        return made

    @classmethod
    def read(cls, written: str) -> Secret:
        """The secret that is written so, with each ``${NAME}`` taken from the environment.

        Raises:
            KeyError: If a variable is not set.
        """
        return cls(VARIABLE.sub(lambda m: os.environ[m[1]], written), written)

    def __repr__(self) -> str:
        return "Secret('***')"

    def __reduce__(self) -> Any:
        return (Secret.read, (self.written,)) if self.written else (Secret, (str(self),))


class Action(StrEnum):
    """What a defense did, or in observe mode would have done."""

    NONE = "none"  # nothing was changed
    HIDE = "hide"  # a source document was withheld from the context
    WITHHOLD = "withhold"  # the whole context was withheld, because the defense failed


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of text that is embedded and retrieved as one: a chunk.

    Attributes:
        id: Unique within a tenant.
        text: What the model reads.
        title: Title of the source; embedded in front of the text.
        source: The file or record the chunk was cut from; the chunk's own id when empty.
        digest: Content hash of the whole source, by which indexing again finds what changed.
        metadata: Anything else, carried along. Under ``acl`` it names who may read it: see ``labels``.
    """

    id: str
    text: str
    title: str = ""
    source: str = ""
    digest: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.source:
            object.__setattr__(self, "source", self.id)

    @property
    def content(self) -> str:
        """Title and text, as they are embedded."""
        return f"{self.title}\n{self.text}" if self.title else self.text

    @property
    def labels(self) -> frozenset[str]:
        """Whoever has one of these may read it; without any, all of its tenant may.

        >>> sorted(Document("d", "", metadata={"acl": ["hr", "board"]}).labels)
        ['board', 'hr']
        """
        named = self.metadata.get(ACL)
        if named is None:  # on every request's path, for every hit
            return frozenset()
        return frozenset(map(str, named if isinstance(named, list | tuple | set | frozenset) else [named]))


@dataclass(frozen=True, slots=True)
class Query:
    """A question, who asks it, how many documents may be read for it, and the id of the request.

    Attributes:
        labels: Of whoever asks: documents that name others are not there for him. None: nothing is kept from him.
    """

    text: str
    client: str = "anonymous"
    tenant: str = DEFAULT_TENANT
    k: int = 5
    id: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    labels: frozenset[str] | None = None

    def may_read(self, document: Document) -> bool:
        """Whether a document is there for whoever asks."""
        return self.labels is None or not (named := document.labels) or not named.isdisjoint(self.labels)


@dataclass(frozen=True, slots=True)
class Hit:
    """A retrieved document with its cosine similarity to the query, in [-1, 1]."""

    document: Document
    score: float


@dataclass(frozen=True, slots=True)
class Background:
    """Size, mean and population standard deviation of S_q, the query's similarity to each document it may reach."""

    n: int
    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Hits by decreasing score, and the law they stand out from.

    Attributes:
        hits: What was found.
        background: The law of the query's similarity to all documents.
        exhausted: Whether there is nothing more to be found.
    """

    hits: tuple[Hit, ...]
    background: Background
    exhausted: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a generator is given: the question, the context it may use, and how to behave; and the id of the request.

    A defense that wraps the generator knows by the id whose question it is. A model is not told.
    """

    question: str
    context: tuple[Document, ...]
    instructions: str
    request: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a defense decided about one request. For the operator only: it never reaches a client.

    Attributes:
        defense: Name of the defense.
        flagged: Whether the request looks like an attack.
        action: What was done about it.
        score: Higher is more suspicious, in every defense.
        threshold: Flagged when the score is above it; None when no statement was possible.
        hidden: Ids of the documents that the action keeps out of the context.
        evidence: Numbers behind the decision. No raw text.
        enforced: False in observe mode: the action was noted, not carried out.
    """

    defense: str
    flagged: bool
    action: Action
    score: float
    threshold: float | None
    hidden: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    enforced: bool = True


@dataclass(frozen=True, slots=True)
class Reply:
    """What the client sees. Nothing else may leave."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the operator sees: the text, the context it was made from, and the verdicts."""

    text: str
    retrieval: Retrieval
    verdicts: tuple[Verdict, ...] = ()

    @property
    def reply(self) -> Reply:
        """The client's view of this answer."""
        return Reply(self.text)


@dataclass(frozen=True, slots=True)
class Probe:
    """What an attacker prepares for one candidate document.

    Attributes:
        questions: What the target is asked, in this order.
        key: What the attacker keeps to himself to read the replies with: masked words, true answers. Plain json.
    """

    questions: tuple[str, ...]
    key: Mapping[str, Any] = field(default_factory=dict)


class TokenScore(NamedTuple):
    """How a language model takes one token of a text.

    Attributes:
        start: First character.
        end: The character after the last.
        logprob: Natural logarithm of its probability given what stands before it, at most 0.
        rank: How many tokens the model finds likelier at that place; 0: it is the likeliest.
    """

    start: int
    end: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Event:
    """One row of the append-only record that monitor, trends and dashboard read."""

    id: str
    at: datetime
    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Something to be taken from an allowance that all share who share a store.

    Attributes:
        name: Of the allowance.
        amount: How much; 0 only asks; below 0 gives back.
        most: What may be used at once in all. It is the caller's to say, and may change.
        per_s: How much of what was used flows back each second.
        period: Another one begins with nothing used.
    """

    name: str
    amount: int
    most: float
    per_s: float = 0.0
    period: str = "ever"


class Given(NamedTuple):
    """What was given of it: as much as there was, and what is used in all now."""

    amount: int
    used: float


@dataclass(frozen=True, slots=True)
class Notice:
    """What a channel carries to people. No text of an answer or of a document.

    Attributes:
        key: Equal whenever the same notice is sent again, so that a receiver can tell.
        alert: Id of the alert; of a summary, its key.
        action: ``opened``, ``updated``, ``recovered`` or ``summary``.
        severity: ``low``, ``medium``, ``high`` or ``critical``.
        at: When what it tells happened.
        title: One line.
        text: All of it, as plain text.
        markdown: The same as Markdown.
        details: The same for programs: kind, set, canaries, since, documents.
    """

    key: str
    alert: str
    action: str
    severity: str
    at: datetime
    title: str
    text: str
    markdown: str
    details: Mapping[str, Any] = field(default_factory=dict)


T = TypeVar("T")


class Outcome(NamedTuple, Generic[T]):
    """What a defense hands on.

    Attributes:
        value: What is left.
        verdict: What it decided; None: nothing to say.
        more: It cannot decide on so few hits, and wants to be asked again with more. Nothing has been decided, and it
            remembers nothing of having been asked.
    """

    value: T
    verdict: Verdict | None = None
    more: bool = False
