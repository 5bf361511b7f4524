"""Conformance suite for defenses: inputs stay unchanged, decisions are deterministic, verdicts match what is hidden."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

import numpy as np

from casemate.backends.index_checks import require_valid
from casemate.errors import CapabilityError
from casemate.guard.guard import Guard
from casemate.protocols import STAGES, CalibratedDefense, Defense, Generator, unknown_stages
from casemate.rag.pipeline import Rag, join_stream
from casemate.types import Action, Answer, Document, Hit, Prompt, Query, Retrieval, SimilarityStats, Vector, Verdict

DIM = 16
QUESTION = "what does the record of the second patient say"
_clients = itertools.count()


def check_defense(defense: Defense) -> None:
    """Runs every check for a defense. Call it where no event loop runs."""

    async def run() -> None:
        for obligation in DEFENSE_OBLIGATIONS:
            await obligation(defense)

    asyncio.run(run())


def _asked(k: int = 5) -> Query:
    """The question, with a new client: a defense may keep state per client."""
    return Query(QUESTION, client=f"client {next(_clients)}", k=k)


class _Parrot(Generator):
    """A generator that repeats its context word by word."""

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        for document in prompt.context:
            for word in document.text.split():
                yield f"{word} "


class _Canned(Rag):
    """A system with the same retrieval for every question."""

    def __init__(self, retrieval: Retrieval) -> None:
        self.instructions, self.generator, self._retrieval = "Answer.", _Parrot(), retrieval

    async def encode(self, query: Query, then: Callable[[], None] = lambda: None) -> Vector:
        then()
        return np.full(DIM, DIM**-0.5, np.float32)

    async def search(self, vector: Vector, k: int, tenant: str) -> Retrieval:
        return replace(self._retrieval, hits=self._retrieval.hits[:k])


def _retrieval(scores: list[float], similarity_stats: SimilarityStats, chunks: int = 1) -> Retrieval:
    """Hits with these scores; consecutive groups of ``chunks`` hits share a source."""
    hits = [
        Hit(Document(f"d{i}", f"secret text number {i}", "title", f"source {i // chunks}", "", {"i": [i]}), score)
        for i, score in enumerate(scores)
    ]
    return Retrieval(tuple(hits), similarity_stats, exhausted=True)


def _cases() -> Iterator[tuple[str, Retrieval]]:
    """Retrievals: typical ones, attacks and edge cases."""
    usual, falling = SimilarityStats(1000, 0.1, 0.08), [0.3 - i / 100 for i in range(8)]
    yield "a benign question", _retrieval(falling, usual)
    yield "a question that carries a document", _retrieval([0.97, *falling], usual)
    yield "a question that carries a document of three chunks", _retrieval([0.97, 0.95, 0.94, *falling], usual, 3)
    yield "two documents alike", _retrieval([0.97, 0.97, *falling], usual)
    yield "nothing but one source", _retrieval([0.9, 0.8, 0.7], usual, 3)
    yield "an empty index", _retrieval([], SimilarityStats(0, 0.0, 0.0))
    yield "one document", _retrieval([0.9], SimilarityStats(1, 0.9, 0.0))
    yield "two documents", _retrieval([0.9, 0.1], SimilarityStats(2, 0.5, 0.4))
    yield "documents that are all alike", _retrieval([0.9] * 8, SimilarityStats(1000, 0.9, 0.0))
    yield "an exact copy", _retrieval([1.0 + 1e-7, *falling], usual)
    yield "scores below zero", _retrieval([-0.1, -0.2], SimilarityStats(1000, -0.3, 0.1))


async def _is_described(defense: Defense) -> None:
    """Docstring, paper and options are documented."""
    cls = type(defense)
    assert isinstance(defense, Defense), f"{cls.__name__} must derive from casemate.Defense"
    assert dataclasses.is_dataclass(defense), "options are dataclass fields: configuration and documentation need them"
    written = (cls.__doc__ or "").strip()
    assert written and not written.startswith(f"{cls.__name__}("), "a docstring must say what it does"
    assert cls.paper.strip(), "'paper' must say where the method is from"
    assert not unknown_stages(cls), f"{unknown_stages(cls)[0]} is never called; the stages are {', '.join(STAGES)}"
    assert isinstance(cls.max_hidden_sources, int) and cls.max_hidden_sources >= 0, (
        f"'max_hidden_sources' is {cls.max_hidden_sources!r}; it is a number of documents"
    )
    if isinstance(defense, CalibratedDefense):
        options = {field.name for field in dataclasses.fields(defense)}
        assert getattr(cls, "name", ""), "a calibrated defense needs 'name', the name of the plug-in"
        assert options >= {"calibration", "significance"}, "a calibrated defense has these two options"
    for field in dataclasses.fields(defense):
        assert field.name in written, f"the docstring does not explain the option {field.name!r}"


async def _changes_nothing_it_is_given(defense: Defense) -> None:
    """Inputs stay unchanged: queries, retrievals and answers, including document metadata."""
    for what, retrieval in _cases():
        before, query = copy.deepcopy(retrieval), _asked()
        same = copy.deepcopy(query)
        answer = Answer("a text", retrieval)
        await defense.on_retrieve(query, retrieval)
        await defense.on_answer(query, answer)
        assert retrieval == before, f"on {what}, the retrieval was changed"
        assert answer == Answer("a text", before), f"on {what}, the answer was changed"
        assert query == same, f"on {what}, the query was changed"


async def _decides_the_same_on_the_same(defense: Defense) -> None:
    """Decisions do not depend on other clients' queries, earlier or concurrent."""
    cases = list(_cases())
    first = [await defense.on_retrieve(_asked(), r) for _, r in cases]
    again = [await defense.on_retrieve(_asked(), r) for _, r in reversed(cases)][::-1]
    at_once = await asyncio.gather(*(defense.on_retrieve(_asked(), r) for _, r in cases))
    for (what, retrieval), *outcomes in zip(cases, first, again, at_once, strict=True):
        assert outcomes[0] == outcomes[1] == outcomes[2], f"on {what}, the outcome is not always the same"
        answer = Answer("a text", retrieval)
        answers = [await defense.on_answer(_asked(), answer) for _ in range(2)]
        assert answers[0] == answers[1], f"on {what}: on_answer"


async def _hides_what_it_says(defense: Defense) -> None:
    """Hits are only removed: whole sources, at most ``max_hidden_sources``, and the verdict names them."""
    for what, before in _cases():
        after, verdict, more = await defense.on_retrieve(_asked(), before)
        assert not more, f"on {what}, it wants more hits, and there are no more"
        kept = [h for h in before.hits if h in after.hits]
        left = list(after.hits)
        if defense.reorders:
            left.sort(key=lambda h: before.hits.index(h) if h in before.hits else -1)
        assert left == kept, f"on {what}: hits may be taken out, not added, changed or moved"
        assert after.similarity_stats == before.similarity_stats, f"on {what}, the background was changed"
        gone = [h.document for h in before.hits if h not in after.hits]
        missing, named = {d.id for d in gone}, set(verdict.hidden if verdict else ())
        assert named == missing, f"on {what}, the verdict hides {named}, and {missing} are missing"
        sources = {d.source for d in gone}
        assert len(sources) <= type(defense).max_hidden_sources, (
            f"on {what}, {len(sources)} sources are hidden: more than 'max_hidden_sources'"
        )
        half = sources & {h.document.source for h in after.hits}
        assert not half, f"on {what}, the other chunks of {half} are still there and tell as much"


async def _delivers_what_it_is_given(defense: Defense) -> None:
    """Documents for the client are left out or shortened, not added or moved."""
    for what, retrieval in _cases():
        given = [h.document for h in retrieval.hits]
        before, left = copy.deepcopy(given), iter(given)
        delivered = [d.id for d in await defense.on_deliver(_asked(), given)]
        assert given == before, f"on {what}, on_deliver changed what it was given"
        assert all(any(d.id == name for d in left) for name in delivered), f"on {what}, on_deliver added or moved one"


async def _gives_verdicts_that_agree(defense: Defense) -> None:
    """Score, threshold, flag and action are consistent, and the evidence contains numbers, not texts."""
    for what, retrieval in _cases():
        _, verdict, _ = await defense.on_retrieve(_asked(), retrieval)
        if verdict is not None:
            _require_agreement(what, verdict, retrieval)
        _, verdict, _ = await defense.on_answer(_asked(), Answer("secret text number 1", retrieval))
        if verdict is not None:
            _require_agreement(what, verdict, retrieval)


def _require_agreement(what: str, v: Verdict, retrieval: Retrieval) -> None:
    assert v.defense, f"on {what}, the verdict does not name its defense"
    assert np.isfinite(v.score), f"on {what}, the score is {v.score}"
    above = v.threshold is not None and v.score > v.threshold
    assert v.flagged == above, f"on {what}: flagged is {v.flagged}, score {v.score}, threshold {v.threshold}"
    assert v.flagged or v.action is Action.NONE, f"on {what}, it does something and flags nothing"
    assert bool(v.hidden) == (v.action is Action.HIDE), f"on {what}, action is {v.action}, hidden {v.hidden}"
    assert v.enforced, f"on {what}, 'enforced' is set; that is the guard's to say"
    try:
        evidence = json.dumps(dict(v.evidence))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"on {what}, the evidence cannot be kept as JSON: {error}") from error
    for text in (QUESTION, *(h.document.text for h in retrieval.hits)):
        assert text not in evidence, f"on {what}, the evidence holds the text {text!r}"


async def _indexes_what_fits(defense: Defense) -> None:
    """Documents and vectors from ``on_index`` are valid and deterministic."""
    x = np.random.default_rng(0).standard_normal((6, DIM))
    vectors = np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)
    documents = [Document(f"d{i}", f"text {i}", metadata={"i": [i]}) for i in range(6)]
    before, same = vectors.copy(), copy.deepcopy(documents)
    first, E = await defense.on_index(documents, vectors)
    assert documents == same and np.array_equal(vectors, before), "on_index changed what it was given"
    require_valid(first, E, DIM)
    again, F = await defense.on_index(documents, vectors)
    assert list(first) == list(again) and np.array_equal(E, F), "on_index made something else of the same documents"


async def _wraps_a_generator(defense: Defense) -> None:
    """The wrapped generator streams text and is deterministic."""
    prompt = Prompt(QUESTION, tuple(Document(f"d{i}", f"one two {i}") for i in range(3)), "Answer.")
    try:
        wrapped = defense.on_generate(_Parrot())
    except CapabilityError:  # it needs another generator, and raises this error at wiring
        return
    first = await join_stream(wrapped.stream(prompt))
    assert isinstance(first, str), f"the wrapped generator gave {first!r}"
    assert await join_stream(wrapped.stream(prompt)) == first, (
        "the wrapped generator gave another text on the same prompt"
    )


async def _changes_no_answer_in_observe_mode(defense: Defense) -> None:
    """In observe mode, answers equal those without the defense."""
    for what, retrieval in _cases():
        bare, query = Guard(_Canned(retrieval), ()), _asked(k=3)
        try:
            guard = Guard(_Canned(retrieval), [defense], enforce=False)
        except CapabilityError:
            return
        expected, seen = await bare.ask(query), await guard.ask(query)
        assert replace(seen, verdicts=()) == expected, f"on {what}, observe mode changed the answer"
        assert await join_stream(guard.stream(query)) == await join_stream(bare.stream(query)), f"on {what}, the stream"
        failed = [v for v in seen.verdicts if "error" in v.evidence]
        assert not failed, f"on {what}, the defense fails: {failed}"


async def _leaves_a_full_context(defense: Defense) -> None:
    """Behind a guard, no hidden document is in the context, and hiding does not shorten the context."""
    for what, retrieval in _cases():
        query = _asked(k=3)
        try:
            answer = await Guard(_Canned(retrieval), [defense]).ask(query)
        except CapabilityError:
            return
        left = {h.document.id for h in answer.retrieval.hits}
        hidden = {name for v in answer.verdicts for name in v.hidden}
        assert not left & hidden, f"on {what}, {left & hidden} is hidden and in the context"
        possible = min(query.k, len({h.document.id for h in retrieval.hits} - hidden))
        assert len(left) == possible, f"on {what}, the context has {len(left)} documents; {possible} were left"


DEFENSE_OBLIGATIONS: tuple[Callable[[Defense], Awaitable[None]], ...] = (
    _is_described,
    _changes_nothing_it_is_given,
    _decides_the_same_on_the_same,
    _hides_what_it_says,
    _delivers_what_it_is_given,
    _gives_verdicts_that_agree,
    _indexes_what_fits,
    _wraps_a_generator,
    _changes_no_answer_in_observe_mode,
    _leaves_a_full_context,
)
