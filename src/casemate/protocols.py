"""Every extension point on one page.

Protocols: what an operator brings to run the system. Derive from one and implement all of it.

    Embedder                  text to vectors
    Index                     documents, vectors and corpus moments of each tenant
    Generator                 the answer
    LanguageModel, TokenModel token probabilities: of a text, and of the next token
    EventStore                events, quotas and leases
    VectorCollection          an existing collection that Casemate attaches to; TransactionalCollection: in SQL
    Target                    a system that answers: the red team attacks it, the monitor asks it
    Channel                   delivery of notifications
    Executor                  a cluster of workers; in ``casemate.runtime.executor``

Base classes: what a plug-in author writes. Derive from one, make it a dataclass, and override what differs.

    Defense                   a countermeasure; CalibratedDefense: with a threshold calibrated on benign queries
    MembershipAttack          infers whether a document is in the collection
    ExtractionAttack          recovers texts of the collection
    PoisoningAttack           writes documents that change answers

Interfaces between parts of Casemate: DocumentSink (receives documents), BlackBox (all that an attack may use), and the
proxies EmbedderProxy and EventStoreProxy, which delegate to another object.

``casemate.plugins`` maps roles to these classes, ``casemate.testing`` checks implementations, and
docs/reference/extension-points.md shows an example of each.

Embedders, indexes, collections and event stores are synchronous and thread-safe: they compute, or wait for one short
reply, so ``Rag`` calls them in worker threads. Generators stream, so they are asynchronous.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from casemate.maths.calibration import Calibration
from casemate.maths.moments import CorpusMoments
from casemate.types import (
    DEFAULT_TENANT,
    Answer,
    Document,
    Event,
    Hit,
    Injection,
    Notification,
    Outcome,
    PersonalData,
    Probe,
    Prompt,
    Query,
    QuotaGrant,
    QuotaRequest,
    Reply,
    Retrieval,
    TokenScore,
    Vector,
)

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of items just finished."""
Steps: TypeAlias = Callable[[str, int | None], AbstractContextManager[Progress]]
"""Opens a progress display for a step with a title and a number of items, if known; yields a counter."""
Logits: TypeAlias = npt.NDArray[np.float32]
"""Unnormalized log-probabilities of the next token: (..., vocabulary)."""
TARGET_DETAILS = frozenset({"sources", "ids", "scores"})
"""What a target may report beside its answer: sources, ids and scores of the retrieved chunks."""


# What an operator brings: protocols


class Embedder(Protocol):
    """Turns texts into unit vectors."""

    @property
    def fingerprint(self) -> str:
        """Identifies model, weights and backend; equal only if the vectors are comparable."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    @property
    def max_tokens(self) -> int:
        """Number of tokens that are embedded; the rest of a text is ignored."""

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds texts in order: (n, dim), float32, rows of unit length."""

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Start and end character of each token of the text, for chunking at token boundaries."""


class Index(Protocol):
    """Stores documents, vectors and moments by tenant; each call sees one tenant only."""

    def open(self, fingerprint: str, dim: int) -> None:
        """Opens or creates the store for the vectors of one embedder.

        Before it, and after ``close``, every call but ``clear`` and ``close`` raises a BackendError. Once another
        process has cleared the store for another embedder, these calls raise a DataError.

        Raises:
            DataError: If it holds vectors of another embedder, is damaged, or is not an index.
            BackendError: If it cannot be reached.
        """

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        """Adds documents with their vectors, (n, dim), and replaces all documents of the same sources.

        One transaction.

        Raises:
            DataError: If the vectors have the wrong shape or length, an id occurs twice or belongs to another source, a
                text is not valid Unicode, or metadata are not JSON. Nothing is then changed.
        """

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """Removes all documents of these sources, in one transaction; returns their number."""

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:
        """Finds the k nearest documents, with float64 scores, and the similarity statistics of the same snapshot.

        Ties are ordered by age.
        """

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        """The moments of all documents of the tenant."""

    def digests(self, tenant: str = DEFAULT_TENANT) -> Mapping[str, str]:
        """Content hash of each source."""

    def tenants(self) -> Sequence[str]:
        """All tenants with documents, sorted."""

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[Sequence[Document], Vector]]:
        """Yields all documents with their stored vectors, (n, dim), in order of age, in batches of bounded memory.

        Each batch is one snapshot; other writers may commit between batches. A document that stays is yielded once. One
        that is added during the scan comes last or not at all, one that is removed may have been yielded. Of a replaced
        document, the old version, the new one or both are yielded; if ids must be unique, keep the later one.
        """

    def metadata(self, tenant: str = DEFAULT_TENANT) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Source and metadata of the documents, in any order, equal pairs once or repeatedly.

        Default: reads the whole index.
        """
        return ((document.source, document.metadata) for documents, _ in self.scan(tenant) for document in documents)

    def warm(self, tenant: str = DEFAULT_TENANT) -> None:
        """Loads or builds what a search needs, so that the first query does not wait for it. Default: the moments."""
        self.moments(tenant)

    def check(self) -> Sequence[str]:
        """Describes every fault of the store, one sentence each; empty if it is sound."""

    def rebuild(self) -> None:
        """Recomputes the moments from the stored vectors."""

    def clear(self) -> None:
        """Removes all documents of all tenants, and the embedder's fingerprint. It needs no ``open``."""

    def close(self) -> None:
        """Closes files and connections."""


class Generator(Protocol):
    """Writes the answer."""

    def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the answer; the parts joined are the whole text.

        Raises:
            BackendError: If the model cannot be reached, or the stream breaks off.
        """


class LanguageModel(Protocol):
    """Scores the likelihood of a text, token by token."""

    def score(self, text: str) -> Sequence[TokenScore]:
        """Scores every token of the text but the first, in order.

        Raises:
            BackendError: If the model fails.
        """


class DecodingSession(Protocol):
    """One answer during decoding, for one or several contexts: the distribution of the next token in each."""

    @property
    def flops(self) -> float:
        """Floating-point operations spent so far."""

    def read(self, answer: Sequence[int], last: int = 1) -> Logits:
        """Logits of the token after each of the last positions of an answer: (contexts, last, vocabulary).

        The last row follows the whole answer, the row before it all but the last token, and so on. The prefix that the
        answer shares with the previous call is reused; the rest of the previous answer is discarded.

        Args:
            answer: Token ids of the answer so far.
            last: Number of rows, from 1 to the length of the answer plus 1.

        Raises:
            BackendError: If the answer exceeds the model's context window, or the model fails.
        """


class TokenModel(Protocol):
    """A language model at the level of tokens: gives the distribution of the next token."""

    @property
    def vocabulary(self) -> Sequence[str]:
        """Token strings by id. Two models with equal vocabularies assign the same ids."""

    @property
    def ends(self) -> Collection[int]:
        """Ids of the tokens that end an answer."""

    @property
    def limit(self) -> int | None:
        """Largest number of tokens of prompt and answer together; None if unknown."""

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, in the model's chat format."""

    def tokens(self, text: str) -> list[int]:
        """Token ids of a plain text."""

    def text(self, tokens: Sequence[int]) -> str:
        """Text of some token ids, without special tokens."""

    def begin(self, prompts: Sequence[Sequence[int]]) -> DecodingSession:
        """Starts an answer to one prompt, or to several in parallel, each given as token ids.

        Raises:
            BackendError: If a prompt is empty or exceeds the model's context window.
        """

    def flops(self, tokens: int, before: int) -> float:
        """Floating-point operations of reading ``tokens`` tokens after ``before`` others."""


class EventStore(Protocol):
    """An append-only event log, with quotas and leases for all processes that share it."""

    @property
    def dropped(self) -> int:
        """Number of events that were discarded because they could not be written."""
        return 0

    def append(self, event: Event) -> None:
        """Queues an event and returns at once; a background thread writes it."""

    def scan(self, kind: str | None = None, since: datetime | None = None) -> Sequence[Event]:
        """Events in order of writing. First waits until all events that were appended before are written."""

    def latest(self, kind: str, count: int) -> Sequence[Event]:
        """The last ``count`` events of a kind, in order of writing; cheap in a large log."""
        return self.scan(kind)[-count:]

    def read_since(self, kind: str, after: int, since: datetime | None = None) -> tuple[Sequence[Event], int]:
        """Reads the events of a kind behind an offset, by any writer.

        No event is missed and none is returned twice, whatever the writers' clocks are. Events that this process has
        not written yet are not waited for.

        Args:
            kind: The kind.
            after: Offset that the previous call returned; 0 at first.
            since: Skips older events, which the first call may do.

        Returns:
            The events, and the offset behind the last of them.
        """
        held = self.scan(kind)
        return [e for e in held[after:] if since is None or e.at >= since], len(held)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Waits until all events appended so far are written; False on timeout."""

    def receipt(self) -> Callable[[], bool]:
        """Returns a function that reports whether all events appended before this call are written. Neither waits."""
        return lambda: self.flush(0)

    def acquire(self, requests: Sequence[QuotaRequest]) -> Sequence[QuotaGrant]:
        """Acquires units from quotas: of each, as many as are left, never more among all processes on the store.

        Raises:
            BackendError: If the store cannot be reached; the units may have been acquired.
        """

    def quota_usage(self, prefix: str) -> Mapping[str, float]:
        """Units in use, as last recorded, of each quota whose name begins with a prefix. Writes nothing.

        Raises:
            BackendError: If the store cannot be read.
        """

    def discard_quotas(self, names: Collection[str]) -> None:
        """Deletes quotas. A later request under one of these names begins at 0; unknown names have no effect.

        Raises:
            BackendError: If the store cannot be reached; some quotas may have been deleted.
        """

    def lease(self, name: str, holder: str, seconds: float) -> bool:
        """Acquires or renews a lease; True if this holder alone has it, by the store's clock.

        Raises:
            BackendError: If the store cannot be reached; the previous holder may still have the lease.
        """

    def release(self, name: str, holder: str) -> None:
        """Releases a lease early; has no effect if this holder does not have it."""

    def close(self) -> None:
        """Flushes and closes the database."""


REGISTERED_NAMES: dict[type[Any], str] = {}
"""Name of each class that ``casemate.plugins`` loaded from an entry point."""


def plug_in_name(part: object) -> str:
    """Name of a plug-in in the configuration: of its file or entry point. Without one, the name of its class."""
    cls = type(part)
    package, _, module = cls.__module__.partition(".")
    return module.rpartition(".")[2] if package == "casemate" else REGISTERED_NAMES.get(cls, cls.__name__)


@dataclass(frozen=True, slots=True)
class CollectionPage:
    """A page of rows of a collection. Rows without text or vector are skipped and counted.

    Attributes:
        documents: The rows, with the ids of the collection.
        vectors: (n, dim), as stored; the caller checks finiteness and length.
        after: Cursor behind this page, opaque to the caller.
        tenants: Tenant of each document; empty: all belong to the default tenant.
        textless: Number of rows skipped because they have no text.
        vectorless: Number of rows skipped because they have no vector.
    """

    documents: Sequence[Document]
    vectors: Vector
    after: str = ""
    tenants: Sequence[str] = ()
    textless: int = 0
    vectorless: int = 0


class VectorCollection(Protocol):
    """Rows of id, text, vector and metadata in an existing store. Thread-safe and synchronous.

    Attributes:
        by_cosine: Whether a search ranks by cosine, whatever the lengths of the vectors; valid once it is open.
        max_results: Largest k of a search.
    """

    by_cosine: bool = True
    max_results: int = sys.maxsize

    @property
    def name(self) -> str:
        """Name in messages; contains no password. With the options database, tenant, where, only it names the rows."""

    def open(self) -> int:
        """Connects; returns the length of a vector.

        Raises:
            BackendError: If the store cannot be reached.
            DataError: If the collection does not exist, or has no vectors, or vectors of several lengths.
        """

    def count(self) -> int:
        """Number of rows, or an estimate."""

    def scan(self, after: str = "") -> Iterator[CollectionPage]:
        """Yields all rows in a fixed order, in pages of bounded memory, starting behind a cursor if one is given.

        A row that stays is yielded once; one that is added or removed during the scan may or may not be.
        """

    def search(self, vector: Vector, k: int) -> Sequence[Hit]:
        """Finds the k nearest rows, exactly or approximately, by decreasing exact cosine (``maths.vectors.cosines``).

        The result may be longer: rows that tie with the last one are included. It is shorter only if there are no more
        rows.

        Raises:
            CapabilityError: If k exceeds ``max_results``, or the store cannot return enough rows with text and vector.
        """

    def find(self, ids: Sequence[str]) -> CollectionPage:
        """Returns the rows with these ids that exist, in any order; ``after`` is empty."""

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        """Inserts rows, replacing those with the same ids. Idempotent.

        Raises:
            CapabilityError: If the collection is attached read-only.
        """

    def remove(self, ids: Sequence[str]) -> None:
        """Deletes the rows with these ids that exist; see ``add``."""

    def close(self) -> None:
        """Closes connections."""


@runtime_checkable
class TransactionalCollection(VectorCollection, Protocol):
    """A collection in a SQL database, which changes in one transaction with tables of Casemate.

    ``within`` is the value of ``transaction``: a connection with ``execute`` and ``cursor``, as in psycopg. None: a
    transaction for this call alone.

    Attributes:
        tenanted: Whether rows belong to tenants. If not, all belong to the default tenant.
    """

    tenanted: bool

    def transaction(self, write: bool) -> AbstractContextManager[Any]:
        """An atomic transaction; without ``write`` it is read-only, on one snapshot."""

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT, within: Any | None = None) -> Sequence[Hit]:
        """See ``VectorCollection.search``."""

    def find(self, ids: Sequence[str], tenant: str = DEFAULT_TENANT, within: Any | None = None) -> CollectionPage:
        """See ``VectorCollection.find``."""

    def add(
        self,
        documents: Sequence[Document],
        vectors: Vector,
        tenant: str = DEFAULT_TENANT,
        within: Any | None = None,
    ) -> None:
        """See ``VectorCollection.add``."""

    def remove(self, ids: Sequence[str], tenant: str = DEFAULT_TENANT, within: Any | None = None) -> None:
        """See ``VectorCollection.remove``."""


class Target(Protocol):
    """A system that answers: an unprotected ``Rag``, a ``Guard``, a remote endpoint.

    A remote one declares what it supports in two optional attributes. ``tells`` contains the details that it returns
    beside the text: some of ``sources``, ``ids`` and ``scores``. ``can`` contains ``clients`` if it passes on
    ``Query.client``. Checks of the red team that need another capability are inconclusive.
    """

    async def ask(self, query: Query) -> Answer:
        """Answers a query.

        Raises:
            BackendError: If the system cannot be reached, fails, times out, or returns no answer.
        """

    async def stream(self, query: Query) -> AsyncIterator[str]:
        """Streams the answer to a query. By default, the whole answer is one chunk."""
        yield (await self.ask(query)).text


class Channel(Protocol):
    """Delivers notifications: a webhook, mail, a pager. Deliveries are recorded under its name."""

    name: str

    async def send(self, notification: Notification) -> None:
        """Sends one notification. After a retry, the same one may arrive twice, with the same key.

        Raises:
            BackendError: If delivery failed, or its outcome is unknown.
        """


class PersonalDataFinder(Protocol):
    """Recognizes personal data in texts. Called from several threads."""

    def find(self, text: str) -> Sequence[PersonalData]:
        """The values in a text, in order of their positions; they may overlap."""


# What a plug-in author writes: base classes


class Defense:
    """A countermeasure. Subclass it, make it a dataclass, and override the stages on which it acts.

    Every default changes nothing. Options are dataclass fields: configuration keys and documentation derive from them.
    A defense must not modify its arguments, and must be deterministic: the same input after the same history gives the
    same decision.

    Attributes:
        max_hidden_sources: Number of source documents that it usually withholds from one context at most. The guard
            always fetches as many more, so hiding neither shortens the context nor changes the amount of work. A
            defense that must withhold more requests further hits (``Outcome.more``).
        lookahead: Number of hits beyond the context that it compares with.
        reorders: Whether it ranks hits otherwise than by similarity. No defense that withholds or compares may run
            after it.
        replaces_unreadable: Whether it replaces the hits that the client may not read in full. The guard leaves it out
            where a retrieval is not delivered, and what it replaces may be retrieved again within a ``turn``.
        unit_keys: Option, where a defense has it: metadata keys, such as ``subject``, whose common values unite sources
            to one unit (``guard.units``). The two-world audit removes such units.
    """

    paper: ClassVar[str] = ""
    unit_keys: tuple[str, ...] = ()
    max_hidden_sources: ClassVar[int] = 0
    lookahead: ClassVar[int] = 0
    reorders: ClassVar[bool] = False
    replaces_unreadable: ClassVar[bool] = False

    @property
    def compares_clients(self) -> bool:
        """Whether verdicts about one client depend on other clients' queries. Campaigns then run in one process."""
        return False

    def vector_only(self) -> Defense:
        """Returns the defense for queries of which only the vector is known; by default the same one."""
        return self

    def sync(self) -> None:
        """Reads what other processes recorded about clients. The guard calls it in a thread before each decision."""

    def blocked_sources(self, query: Query) -> Collection[str]:
        """Sources that are withheld from this client whatever the query. The guard fetches as many more hits."""
        return ()

    def denies_full_text(self, query: Query) -> bool:
        """Whether this client may read no source in full now, whatever the query, as if it were entitled to none."""
        return False

    async def on_index(self, documents: Sequence[Document], vectors: Vector) -> tuple[Sequence[Document], Vector]:
        """Processes documents and their vectors, (n, dim), before they are indexed."""
        return documents, vectors

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Processes the retrieved hits before the generator reads them."""
        return Outcome(retrieval)

    def on_generate(self, generator: Generator) -> Generator:
        """Wraps the generator, once, when the guard is built."""
        return generator

    def on_observe(self, generator: Generator) -> Generator:
        """Wraps the generator for observe mode: it may measure prompts and answers, and changes neither."""
        return generator

    async def on_answer(self, query: Query, answer: Answer) -> Outcome[Answer]:
        """Processes the finished answer."""
        return Outcome(answer)

    async def on_deliver(self, query: Query, documents: Sequence[Document]) -> Sequence[Document]:
        """Processes retrieved documents that are handed to the client itself, in place of an answer.

        In observe mode the result is discarded.
        """
        return documents


STAGES = tuple(name for name in dir(Defense) if name.startswith("on_"))
"""The stages of a defense."""


def unknown_stages(cls: type[Any]) -> list[str]:
    """Stages of a defense that this version never calls: misspelled, or of another version."""
    names = dir(cls) if issubclass(cls, Defense) else ()
    found = {name for name in names if name.startswith("on_") and callable(getattr(cls, name))}  # else an option
    return sorted(found.difference(STAGES))


class CalibratedDefense(Defense):
    """A defense whose threshold is calibrated on benign queries by split conformal prediction.

    Derive from it instead of ``Defense``: then `casemate calibrate`, `casemate doctor`, the framework integrations, the
    red team's lab and the dashboard's operating point work with the defense. Keep the calibrations in a
    ``guard.calibration.model.CalibrationFile``.

    Attributes:
        name: Name of the plug-in, as under ``guard.defenses`` and in its verdicts.
        calibration: Option: the calibration file. The lab and the integrations set their own.
        significance: Option: the operating point, the largest share of benign queries that may be flagged, in (0, 1).
            The dashboard assigns it at run time, so read it for each query.
    """

    name: ClassVar[str]
    calibration: Path
    significance: float | None

    @property
    def uses_calibration(self) -> bool:
        """Whether the configured mode needs a calibration."""
        return True

    def ready(self, tenant: str, documents: int) -> Calibration | None:
        """Returns the calibration in use for a tenant with this number of chunks; None if none is needed.

        Raises:
            DataError: If the calibration is missing or stale; the message says how to get one.
        """
        raise NotImplementedError

    async def score(self, query: Query, retrieval: Retrieval, calibration: Calibration) -> Mapping[str, float]:
        """Scores every source in the context: source to score, higher is more suspicious.

        ``fitting.calibrate`` calls it to estimate the distribution among benign queries. The score must be free of
        thresholds and jitter, and independent of earlier queries and of the client.

        Args:
            query: The query.
            retrieval: Its hits, at least ``lookahead`` more than the context has, if there are as many.
            calibration: A calibration whose ``benign`` scores may still be empty.
        """
        raise NotImplementedError


class BlackBox(Protocol):
    """All that an attack may use: a text goes in, the text of the reply comes out."""

    async def ask(self, text: str) -> Reply:
        """Asks the target once.

        Raises:
            BudgetExhausted: If no query is left.
        """


class MembershipAttack:
    """Infers whether a document that the attacker has is in the collection, from replies alone.

    Subclass it, make it a dataclass, and override ``prepare`` and ``measure``. An attack whose next question depends on
    the last reply overrides ``run``. The lab provides budget, cache and threshold. The same candidate, generator state
    and replies must give the same questions and features.

    Attributes:
        features: Names of the values that ``measure`` returns; the first is the score that is used alone.
    """

    paper: ClassVar[str] = ""
    features: ClassVar[tuple[str, ...]] = ("score",)

    def study(self, texts: Sequence[str]) -> None:
        """Receives texts of the genre, of unknown membership, before the first candidate. By default ignored."""

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """Writes the questions for one candidate, a whole document."""
        raise NotImplementedError

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Computes the features of the replies, finite numbers; higher means a member, in each of them."""
        raise NotImplementedError

    async def run(self, candidate: Document, box: BlackBox, rng: np.random.Generator) -> tuple[float, ...]:
        """Prepares, asks one question after another, and measures."""
        probe = await self.prepare(candidate, rng)
        return await self.measure(candidate, probe, [await box.ask(question) for question in probe.questions])


class ExtractionAttack:
    """Recovers texts of the collection by repeated queries: a crawler.

    Subclass it, make it a dataclass, and override ``extract``. The lab provides budget and cache. The same generator
    state and replies must give the same questions. ``paper`` is the source of the method.
    """

    paper: ClassVar[str] = ""

    def extract(self, box: BlackBox, rng: np.random.Generator) -> AsyncIterator[str]:
        """Yields texts that the attack takes for texts of the collection, each as soon as it is recovered.

        Ends when the attack has no further question. Does not catch ``BudgetExhausted`` of the box.
        """
        raise NotImplementedError

    def decode(self, reply: str) -> str:
        """Returns the text that a reply stands for, if the attack asks for replies in another form."""
        return reply


class PoisoningAttack:
    """Writes documents that change answers once they are indexed. The same generator state gives the same documents."""

    paper: ClassVar[str] = ""

    async def craft(self, question: str, desired: str, rng: np.random.Generator) -> Sequence[Document]:
        """Writes documents so that the answer to a question is, or contains, the desired text."""
        raise NotImplementedError


class InjectionAttack:
    """Hides instructions to the language model in documents. The same generator state gives the same documents.

    Attributes:
        variants: Names of the effects that its instructions ask for.
    """

    paper: ClassVar[str] = ""
    variants: tuple[str, ...] = ()

    def craft(self, variant: str, question: str, rng: np.random.Generator) -> Injection:
        """Writes a document that is retrieved for a question and contains an instruction."""
        raise NotImplementedError

    def succeeded(self, injection: Injection, reply: str, instructions: str) -> bool:
        """Whether a reply shows the effect. A quotation of the instruction is not an effect.

        Args:
            injection: Result of `craft`.
            reply: The reply to the question.
            instructions: System prompt of the attacked system, for an effect that discloses it.
        """
        raise NotImplementedError


# Interfaces between parts of Casemate, and proxies


Withheld: TypeAlias = Literal["quarantined", "rejected"]
"""Why a sink did not index a source: it waits for a decision, or an operator rejected this content."""


class DocumentSink(Protocol):
    """Receives documents: a ``Guard``, or a screening gate in front of one. Every ingest path ends in a sink."""

    @property
    def embedder(self) -> Embedder:
        """Embeds the documents."""

    @property
    def index(self) -> Index:
        """Holds the documents that were accepted."""

    async def add(
        self,
        documents: Sequence[Document],
        tenant: str = DEFAULT_TENANT,
        progress: Progress | None = None,
        uploader: str = "",
    ) -> Mapping[str, Withheld]:
        """Embeds and indexes documents. They replace all documents of the same sources.

        Args:
            documents: The chunks, whole sources at a time.
            tenant: The tenant they belong to.
            progress: Called with the number of chunks just embedded.
            uploader: Who or what adds them, such as the id of an API key. Empty: unknown.

        Returns:
            Sources that were not indexed, and why; empty if all were. Never shown to clients.
        """

    async def remove(self, sources: Sequence[str], tenant: str = DEFAULT_TENANT) -> int:
        """Removes all documents of these sources; returns their number."""


@runtime_checkable
class WithholdingIndex(Protocol):
    """An index over rows of other programs. It cannot refuse a row, so it withholds it from retrieval.

    Attributes:
        withhold_new: Whether rows that other programs added since the last scan are withheld until the next one.
    """

    withhold_new: bool

    def withhold(self, ids: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """Withholds rows of other programs from retrieval; returns their number. Rows added here stay as they are."""

    def admit(self, ids: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """Ends the withholding of rows; returns how many of them were withheld."""


class EmbedderProxy(Embedder):
    """Delegates to another embedder. Override ``embed`` to obtain some vectors otherwise."""

    def __init__(self, inner: Embedder) -> None:
        self.inner = inner

    @property
    def fingerprint(self) -> str:
        return self.inner.fingerprint

    @property
    def dim(self) -> int:
        return self.inner.dim

    @property
    def max_tokens(self) -> int:
        return self.inner.max_tokens

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        return self.inner.spans(text)


class EventStoreProxy(EventStore):
    """Delegates to another event store. Override ``append`` to observe events."""

    def __init__(self, store: EventStore) -> None:
        self._store = store

    @property
    def dropped(self) -> int:
        return self._store.dropped

    def append(self, event: Event) -> None:
        self._store.append(event)

    def scan(self, kind: str | None = None, since: datetime | None = None) -> Sequence[Event]:
        return self._store.scan(kind, since)

    def latest(self, kind: str, count: int) -> Sequence[Event]:
        return self._store.latest(kind, count)

    def read_since(self, kind: str, after: int, since: datetime | None = None) -> tuple[Sequence[Event], int]:
        return self._store.read_since(kind, after, since)

    def flush(self, timeout_s: float = 10.0) -> bool:
        return self._store.flush(timeout_s)

    def receipt(self) -> Callable[[], bool]:
        return self._store.receipt()

    def acquire(self, requests: Sequence[QuotaRequest]) -> Sequence[QuotaGrant]:
        return self._store.acquire(requests)

    def quota_usage(self, prefix: str) -> Mapping[str, float]:
        return self._store.quota_usage(prefix)

    def discard_quotas(self, names: Collection[str]) -> None:
        self._store.discard_quotas(names)

    def lease(self, name: str, holder: str, seconds: float) -> bool:
        return self._store.lease(name, holder, seconds)

    def release(self, name: str, holder: str) -> None:
        self._store.release(name, holder)

    def close(self) -> None:
        self._store.close()
