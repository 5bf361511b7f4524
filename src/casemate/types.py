"""The values that the parts of Casemate exchange: frozen, comparable, without I/O."""

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
"""One embedding, (dim,), or several, (n, dim); rows have unit L2 norm."""
Float64: TypeAlias = npt.NDArray[np.float64]

DEFAULT_TENANT = "default"
UNKNOWN = "I don't know."
"""The uniform refusal: the answer whenever the context does not support one, whatever the reason."""
ACL = "acl"
"""Key of a document's metadata that lists access labels; a reader needs one of them."""
READERS = "readers"
"""Metadata key of a document that lists clients who may read it in full. ``mirabel`` uses the same."""
MAX_K = 1000
"""Largest number of documents that are retrieved for one answer."""
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Reference to an environment variable in a configuration."""


class Secret(str):
    """A string from the environment, masked in ``repr`` and so in logs and tracebacks.

    If it came from a reference such as ``${NAME}``, only the reference is pickled. Unpickling reads the environment of
    the receiving process.

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
        """Creates a secret; ``written`` is the text with references that it was expanded from, if any."""
        made = super().__new__(cls, value)
        made.written = written
        return made

    @classmethod
    def read(cls, written: str) -> Secret:
        """Expands each ``${NAME}`` in a text from the environment.

        Raises:
            KeyError: If a variable is not set.
        """
        return cls(VARIABLE.sub(lambda m: os.environ[m[1]], written), written)

    def __repr__(self) -> str:
        return "Secret('***')"

    def __reduce__(self) -> Any:
        return (Secret.read, (self.written,)) if self.written else (Secret, (str(self),))


class Action(StrEnum):
    """What a defense did; in observe mode, what it would have done."""

    NONE = "none"  # changed nothing
    HIDE = "hide"  # withheld a source document from the context
    WITHHOLD = "withhold"  # failed, so the whole context was withheld


def access_labels(metadata: Mapping[str, Any]) -> frozenset[str] | None:
    """The access labels in a document's metadata: see ``Document.labels``.

    A nested ``acl`` restricts access, too: frameworks store the metadata of a document inside a field ``metadata``.

    >>> access_labels({"metadata": {"acl": ["hr"]}}), access_labels({"acl": ["hr"], "also": [{"ACL": []}]})
    (frozenset({'hr'}), frozenset())
    """
    named: frozenset[str] | None = None
    waiting: list[Any] = [metadata]
    while waiting:  # iterative, because nesting may exceed the recursion limit
        value = waiting.pop()
        if isinstance(value, str):  # fast path: this is called for every hit of every request
            continue
        if isinstance(value, Mapping):
            inner = metadata_names(value, ACL)
            named = inner if named is None else named if inner is None else named & inner
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return named


def metadata_names(metadata: Mapping[str, Any], key: str) -> frozenset[str] | None:
    """The names that a metadata key lists, as text; None: the key is missing, or its value is.

    Letter case and surrounding spaces of the key do not matter, because ``ACL`` is meant to restrict access, too. Of
    several spellings, only the names that all of them list count.

    >>> metadata_names({"ACL": "hr", "by": "Ann"}, "acl"), metadata_names({"acl": ["hr"], "Acl ": []}, "acl")
    (frozenset({'hr'}), frozenset())
    >>> metadata_names({}, "acl") is None
    True
    """
    wanted = key.lower()
    given = [value for name, value in metadata.items() if value is not None and str(name).strip().lower() == wanted]
    if not given:
        return None
    named = (value if isinstance(value, list | tuple | set | frozenset) else [value] for value in given)
    return frozenset.intersection(*(frozenset(text for one in names if (text := str(one))) for names in named))


@dataclass(frozen=True, slots=True)
class Document:
    """A chunk: a text that is embedded and retrieved as a unit.

    Attributes:
        id: Unique within a tenant.
        title: Title of the source; embedded before the text.
        source: The file or record that the chunk is part of; the chunk's own id if empty.
        digest: Content hash of the whole source, by which ingest detects changes.
        metadata: Further fields, kept as they are. ``acl``, in any letter case, restricts access: see ``labels``.
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
        """Title and text, as embedded."""
        return f"{self.title}\n{self.text}" if self.title else self.text

    @property
    def labels(self) -> frozenset[str] | None:
        """Access labels: a reader needs one of them. None: the whole tenant may read it. Empty: no client may.

        >>> sorted(Document("d", "", metadata={"acl": ["hr", "board"]}).labels)
        ['board', 'hr']
        """
        return access_labels(self.metadata)


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a client.

    Attributes:
        text: The question.
        client: Name of the client.
        tenant: The tenant whose documents are searched.
        k: Number of documents to retrieve.
        id: Id of the request.
        labels: Access labels of the client; documents with other labels are invisible to it. None: no restriction.
        groups: Groups of the client, for ``guard.audience``. None: an operator, who may read every document in full.
            An empty set: a client without groups.

    Raises:
        TypeError: If `labels` or `groups` is a text.
    """

    text: str
    client: str = "anonymous"
    tenant: str = DEFAULT_TENANT
    k: int = 5
    id: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    labels: frozenset[str] | None = None
    groups: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.labels, str) or isinstance(self.groups, str):
            raise TypeError(f"labels={self.labels!r}, groups={self.groups!r}; each must be a set of texts, or None")

    def may_read(self, document: Document) -> bool:
        """Whether the client's labels give access to a document.

        >>> hr = Query("", labels=frozenset({"hr"}))
        >>> [hr.may_read(Document("d", "", metadata={"acl": named})) for named in (None, ["hr"], ["board"], [])]
        [True, True, False, False]
        """
        return self.labels is None or (named := document.labels) is None or not named.isdisjoint(self.labels)


@dataclass(frozen=True, slots=True)
class Hit:
    """A retrieved document with its cosine similarity to the query, in [-1, 1]."""

    document: Document
    score: float


@dataclass(frozen=True, slots=True)
class SimilarityStats:
    """Statistics of S_q, the similarities of a query to all documents of the tenant.

    Attributes:
        std: Population standard deviation of S_q.
    """

    n: int
    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Retrieval:
    """The result of a search.

    Attributes:
        hits: Hits by decreasing score.
        similarity_stats: Statistics of the query's similarities to all documents.
        exhausted: Whether these are all hits there are.
        unreadable: Ids of the hits that the client may not read in full (``guard.audience``). None: there is no such
            restriction for this client.
        left_out: Number of found documents that the statistics leave out: withheld, or not for this client.
    """

    hits: tuple[Hit, ...]
    similarity_stats: SimilarityStats
    exhausted: bool = field(default=False, compare=False)
    unreadable: frozenset[str] | None = field(default=None, compare=False)
    left_out: int = field(default=0, compare=False)

    @property
    def documents(self) -> int:
        """Number of documents of the tenant, readable for the client or not."""
        return self.similarity_stats.n + self.left_out


@dataclass(frozen=True, slots=True)
class Prompt:
    """Input of a generator.

    Attributes:
        instructions: System prompt.
        request: Id of the request, for defenses that wrap the generator. It is not part of the model's input.
    """

    question: str
    context: tuple[Document, ...]
    instructions: str
    request: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision of a defense about one request. For the operator only: it never reaches the client.

    Attributes:
        flagged: Whether the request is classified as an attack.
        score: Higher is more suspicious, in every defense.
        threshold: The request is flagged if the score exceeds it; None if no decision was possible.
        hidden: Ids of the documents that the action withholds from the context.
        evidence: Figures behind the decision, without raw text.
        enforced: False in observe mode: the action was recorded but not carried out.
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
    """All that the client sees of an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as the operator sees it.

    Attributes:
        retrieval: The context it is based on.
        verdicts: Decisions of the defenses.
    """

    text: str
    retrieval: Retrieval
    verdicts: tuple[Verdict, ...] = ()

    @property
    def reply(self) -> Reply:
        """The client's view of this answer."""
        return Reply(self.text)


@dataclass(frozen=True, slots=True)
class Probe:
    """Questions of a membership attack about one candidate document.

    Attributes:
        questions: The questions, in the order of asking.
        key: What the attack needs to evaluate the replies: masked words, true answers. JSON-serializable.
    """

    questions: tuple[str, ...]
    key: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Injection:
    """An instruction to the language model, hidden in a document.

    Attributes:
        variant: The effect that it asks for.
        instruction: The instruction. Given by the user, it shows whether the model follows it at all.
        document: A document that contains it.
        key: What the attack needs to recognize the effect. JSON-serializable.
    """

    variant: str
    instruction: str
    document: Document
    key: str = ""


class PersonalData(NamedTuple):
    """A value in a text that concerns a person, such as a telephone number.

    Attributes:
        kind: What it is, in the words of the finder.
        start: Position of its first character.
        end: Position behind its last character.
    """

    kind: str
    start: int
    end: int


class TokenScore(NamedTuple):
    """Likelihood of one token of a text under a language model.

    Attributes:
        start: Position of its first character.
        end: Position behind its last character.
        logprob: Natural logarithm of its probability given the text before it, at most 0.
        rank: Number of tokens that are likelier at this position; 0: none.
    """

    start: int
    end: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the event store.

    Attributes:
        kind: Kind, such as ``verdict``.
        body: JSON-serializable content.
    """

    id: str
    at: datetime
    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class QuotaRequest:
    """Request for units of a quota that all processes on an event store share: a token bucket.

    Attributes:
        amount: Units to acquire; 0 only reads the usage; a negative amount returns units.
        most: Capacity: units that may be in use at once. The caller sets it, and may change it.
        per_s: Used units that are restored per second.
        period: Label of the current period; usage starts at 0 in a new period.
    """

    name: str
    amount: int
    most: float
    per_s: float = 0.0
    period: str = "ever"


class QuotaGrant(NamedTuple):
    """Units granted, at most the requested amount, and units in use after that."""

    amount: int
    used: float


@dataclass(frozen=True, slots=True)
class Notification:
    """A message about an alert, sent through a channel. It contains no text of answers or documents.

    Attributes:
        key: Idempotency key: equal whenever the same notification is sent again.
        alert: Id of the alert; for a summary, its key.
        action: ``opened``, ``updated``, ``recovered``, ``summary`` or ``test``.
        severity: ``low``, ``medium``, ``high`` or ``critical``.
        text: The message as plain text.
        markdown: The message as Markdown.
        details: The message as data: kind, set, canaries, since, documents.
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
    """Result of one stage of a defense.

    Attributes:
        value: The value for the next stage.
        verdict: The decision; None if there is none.
        more: The defense needs more hits to decide, and is called again with them. It must not have recorded anything.
            Without effect if ``Retrieval.exhausted``, also after a defense that replaced unreadable hits.
    """

    value: T
    verdict: Verdict | None = None
    more: bool = False
