"""The verbs. A Protocol is what an operator brings; a base class is what a plug-in author writes.

Embedders and indexes are synchronous and thread-safe (they compute, or wait for one short answer); ``Rag`` runs
them in worker threads. Generators stream, so they are asynchronous.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.events import EventStore as EventStore  # noqa: PLC0414  it is found here, too
from casemate.stats import CorpusMoments
from casemate.types import (
    DEFAULT_TENANT,
    Answer,
    Document,
    Notice,
    Outcome,
    Probe,
    Prompt,
    Query,
    Reply,
    Retrieval,
    TokenScore,
    Vector,
)

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of items just finished."""
Logits: TypeAlias = npt.NDArray[np.float32]
"""What a model makes of the next token, before it is a probability: (..., vocabulary)."""


class Embedder(Protocol):
    """Turns texts into unit vectors."""

    @property
    def fingerprint(self) -> str:
        """Identifies model, weights and backend: equal only if the vectors are comparable."""
        ...

    @property
    def dim(self) -> int:
        """Length of a vector."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens of text that are read; what is beyond is ignored."""
        ...

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds texts in order: (n, dim), float32, unit rows."""
        ...

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Start and end character of each token of the text, so that it can be cut where tokens end."""
        ...


class Remembering(Embedder):
    """An embedder that has some vectors from elsewhere, and asks another for the rest.

    Attributes:
        inner: Who embeds. What cannot be asked here can be asked there.
    """

    def __init__(self, inner: Embedder) -> None:
        self.inner = inner

    @property
    def fingerprint(self) -> str:
        """See ``Embedder``."""
        return self.inner.fingerprint

    @property
    def dim(self) -> int:
        """See ``Embedder``."""
        return self.inner.dim

    @property
    def max_tokens(self) -> int:
        """See ``Embedder``."""
        return self.inner.max_tokens

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        """See ``Embedder``."""
        return self.inner.spans(text)


class Index(Protocol):
    """Keeps documents with their vectors and moments, by tenant; whoever asks sees one tenant only."""

    def open(self, fingerprint: str, dim: int) -> None:
        """Opens the store, or makes it, for the vectors of one embedder.

        Raises:
            DataError: If it holds vectors of another embedder, is damaged, or is no index.
            BackendError: If it cannot be reached.
        """
        ...

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT) -> None:
        """Puts documents in; whatever was held of the same sources is replaced. One transaction.

        Raises:
            DataError: If the vectors do not fit, are not of unit length, or an id is given twice.
        """
        ...

    def remove(self, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> int:
        """Takes all documents of these sources out; returns how many there were. One transaction."""
        ...

    def search(self, vector: Vector, k: int, tenant: str = DEFAULT_TENANT) -> Retrieval:
        """The k nearest documents, ties by age, with float64 scores, and the background of the same moment."""
        ...

    def moments(self, tenant: str = DEFAULT_TENANT) -> CorpusMoments:
        """The moments of everything the tenant can reach."""
        ...

    def digests(self, tenant: str = DEFAULT_TENANT) -> Mapping[str, str]:
        """Content hash of each source held."""
        ...

    def tenants(self) -> Sequence[str]:
        """All tenants that hold documents, sorted."""
        ...

    def scan(self, tenant: str = DEFAULT_TENANT) -> Iterator[tuple[Sequence[Document], Vector]]:
        """All documents with their stored vectors, (n, dim), in order of age, in pieces of constant memory.

        Each piece is of one moment, and between pieces anyone may write. What stays is seen once. What is added
        meanwhile comes last or not at all, and what is removed may have been seen: so of what is replaced, either or
        both; whoever needs each id once keeps the later.
        """
        ...

    def warm(self, tenant: str = DEFAULT_TENANT) -> None:
        """Loads or builds what a search needs, so that the first question does not wait for it."""
        ...

    def check(self) -> Sequence[str]:
        """What is wrong with the store, a sentence each; empty when it is sound."""
        ...

    def rebuild(self) -> None:
        """Computes the moments afresh from the stored vectors."""
        ...

    def clear(self) -> None:
        """Removes all documents of all tenants and forgets the embedder. ``open`` may then be called anew."""
        ...

    def close(self) -> None:
        """Lets go of files and connections."""
        ...


class Generator(Protocol):
    """Writes the answer."""

    def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """The answer in pieces; joined they are the whole.

        Raises:
            BackendError: If the model cannot be reached or breaks off.
        """
        ...


class LanguageModel(Protocol):
    """Says how likely a text is, token by token."""

    def score(self, text: str) -> Sequence[TokenScore]:
        """Every token of the text but the first, in order.

        Raises:
            BackendError: If the model fails.
        """
        ...


class Reading(Protocol):
    """One answer in the making, behind one or several contexts: what a model expects next."""

    @property
    def flops(self) -> float:
        """Floating-point operations of all that was read so far."""
        ...

    def read(self, answer: Sequence[int], last: int = 1) -> Logits:
        """Logits of the token after each of the last places of an answer: (contexts, last, vocabulary).

        The last row is what follows the whole answer, the one before what follows all but its last token. What was read
        before is not read again, as far as the answer still begins so; what no longer belongs to it is forgotten.

        Args:
            answer: The tokens of the answer so far.
            last: How many rows, at least 1 and at most one more than the answer has tokens.

        Raises:
            BackendError: If the answer has become too long for the model, or the model fails.
        """
        ...


class TokenModel(Protocol):
    """A language model by its tokens: reads some, and says what may come next."""

    @property
    def vocabulary(self) -> Sequence[str]:
        """The name of each token, by its id: two models whose vocabularies are equal mean the same by an id."""
        ...

    @property
    def ends(self) -> Collection[int]:
        """The tokens that end an answer."""
        ...

    @property
    def limit(self) -> int | None:
        """Most tokens that prompt and answer have together; None: no limit is known."""
        ...

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, as the model wants it put."""
        ...

    def tokens(self, text: str) -> list[int]:
        """The tokens of a plain text."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; marks that are no text are left out."""
        ...

    def begin(self, prompts: Sequence[Sequence[int]]) -> Reading:
        """Opens an answer behind one prompt, or behind several at once, each the tokens of a prompt.

        Raises:
            BackendError: If a prompt is empty, or too long for the model.
        """
        ...

    def flops(self, tokens: int, before: int) -> float:
        """Floating-point operations that reading so many tokens takes, after so many others."""
        ...


class Channel(Protocol):
    """Carries notices to people: a webhook, a mail, a pager. What it delivered is noted under its name."""

    name: str

    async def send(self, notice: Notice) -> None:
        """Sends one notice; the same may come again, with the same key.

        Raises:
            BackendError: If it was not taken, or nobody knows whether it was.
        """
        ...


class Target(Protocol):
    """Anything that answers: an unprotected ``Rag``, a ``Guard``, a remote endpoint."""

    async def ask(self, query: Query) -> Answer:
        """Answers one query, whole."""
        ...

    def stream(self, query: Query) -> AsyncIterator[str]:
        """Answers one query, piece by piece."""
        ...


class BlackBox(Protocol):
    """All that an attack ever gets: a text goes in, the text of the reply comes out."""

    async def ask(self, text: str) -> Reply:
        """Asks the target once.

        Raises:
            BudgetExhausted: If no question is left.
        """
        ...


class Defense:
    """One countermeasure. Subclass, make it a dataclass, override the stages it acts on.

    Every default is the identity. Options are dataclass fields: configuration keys and documentation derive from
    them. A defense must not change what it is given, and must decide the same on the same input after the same past.

    Attributes:
        paper: Where the method is from.
        hides: How many source documents it usually withholds from one context at most. The guard fetches that much
            more, always, flagged or not, so that hiding neither shortens the context nor changes the work done. A
            defense that must withhold more asks for more (``Outcome.more``).
        looks: How many hits beyond the context it compares with.
        reorders: Whether it puts hits into another order than that of similarity. No defense that withholds or
            compares may come behind it.
    """

    paper: ClassVar[str] = ""
    hides: ClassVar[int] = 0
    looks: ClassVar[int] = 0
    reorders: ClassVar[bool] = False

    def follow(self) -> None:
        """Takes in what other processes wrote about clients. The guard calls it in a thread before it judges."""

    def barred(self, query: Query) -> Collection[str]:
        """Sources that this client is not to see whatever he asks. The guard fetches as many hits more."""
        return ()

    async def on_index(self, documents: Sequence[Document], vectors: Vector) -> tuple[Sequence[Document], Vector]:
        """Acts when documents enter the index."""
        return documents, vectors

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Acts on what was found, before the generator sees it."""
        return Outcome(retrieval)

    def on_generate(self, generator: Generator) -> Generator:
        """Wraps the generator, once, at wiring."""
        return generator

    async def on_answer(self, query: Query, answer: Answer) -> Outcome[Answer]:
        """Acts on the finished answer."""
        return Outcome(answer)


class MembershipAttack:
    """Finds out whether the attacker's copy of a document is in the collection, by asking questions alone.

    Subclass, make it a dataclass, override ``prepare`` and ``measure``; an attack whose next question depends on the
    last reply overrides ``run``. It holds no budget, no cache and no threshold: those are the lab's. The same
    candidate, generator state and replies give the same questions and figures.

    Attributes:
        paper: Where the method is from.
        features: Names of what ``measure`` returns, the first being the score that stands alone.
    """

    paper: ClassVar[str] = ""
    features: ClassVar[tuple[str, ...]] = ("score",)

    def study(self, texts: Sequence[str]) -> None:
        """Learns the genre before the first candidate: texts of its kind, of unknown membership. Default: nothing."""

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """The questions for one candidate, a whole document."""
        raise NotImplementedError

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """The features of the replies, a finite number each; higher speaks for membership, in every one."""
        raise NotImplementedError

    async def run(self, candidate: Document, box: BlackBox, rng: np.random.Generator) -> tuple[float, ...]:
        """Prepares, asks one question after another, and measures."""
        probe = await self.prepare(candidate, rng)
        return await self.measure(candidate, probe, [await box.ask(question) for question in probe.questions])


class ExtractionAttack:
    """Carries a collection away, question by question.

    Subclass, make it a dataclass, override ``extract``. It holds no budget and no cache: those are the lab's. The same
    generator state and replies give the same questions. ``paper`` says where the method is from.
    """

    paper: ClassVar[str] = ""

    def extract(self, box: BlackBox, rng: np.random.Generator) -> AsyncIterator[str]:
        """Texts that are held to be the collection's, each as soon as it is recovered.

        Ends when the attack has nothing more to ask. ``BudgetExhausted`` of the box goes through it to the lab.
        """
        raise NotImplementedError


class PoisoningAttack:
    """Writes documents that change what is answered, once they are in a corpus; the same ones in the same state."""

    paper: ClassVar[str] = ""

    async def craft(self, question: str, desired: str, rng: np.random.Generator) -> Sequence[Document]:
        """Documents that are to make the answer to a question be, or hold, what is desired."""
        raise NotImplementedError
