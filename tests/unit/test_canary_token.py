import asyncio
import base64
import json
import re
from dataclasses import dataclass

import pytest

from casemate.errors import BackendError
from casemate.guard.defenses.canary_token import CanaryToken
from casemate.guard.watermarks.tokens import TokenGenerator
from casemate.protocols import Generator
from casemate.rag.pipeline import join_stream
from casemate.types import UNKNOWN, Action, Document, Prompt, Query, Secret
from tests.fakes import Memory
from tests.unit.piecewise import Piecewise, guards

KEY = Secret("a key of sixteen or more characters")
TOKEN = re.compile(r"^[a-z]{6} [a-z]{6} [a-z]{6}$", re.M)
LONG = "The ferry leaves at ten. " * 40


@dataclass
class Reader(Piecewise):
    answer: object = staticmethod(lambda prompt: LONG)


def repeat_context(prompt):
    """Repeats the context as a model might."""
    return "Here it is:\n\n" + "\n\n".join(d.text for d in prompt.context)


def is_probe(prompt):
    return "made-up words" in prompt.question


@pytest.fixture
def make(tmp_path):
    with guards(tmp_path, lambda **options: CanaryToken(**{"secret": KEY, "oracle_share": 0.0} | options)) as guard:
        yield guard


def body(store):
    (event,) = store.events
    assert event.kind == "verdict"
    return event.body


def tokens(prompt):
    """Returns the token of each chunk in a prompt by chunk id."""
    return {d.id: TOKEN.findall(d.text)[0] for d in prompt.context}


class TestPrompt:
    def test_every_chunk_starts_with_its_own_token(self, make):
        guard, _ = make(reader := Reader())
        answer = asyncio.run(guard.ask(Query("amber heron", id="r1")))
        found = tokens(reader.prompts[0])
        assert found == {d: TokenGenerator(KEY).token("r1", d) for d in found}
        assert len(set(found.values())) == 5
        for document, hit in zip(reader.prompts[0].context, answer.retrieval.hits, strict=True):
            assert document.text == f"{found[document.id]}\n\n{hit.document.text}"  # the retrieval is unchanged

    def test_tokens_of_two_requests_are_disjoint(self, make):
        guard, _ = make(reader := Reader())
        for _ in range(2):
            asyncio.run(guard.ask(Query("amber heron")))
        first, second = (set(tokens(p).values()) for p in reader.prompts)
        assert not first & second

    def test_defenses_without_a_secret_generate_different_tokens(self):
        prompt, made = Prompt("q", (Document("a", "text"),), ""), []
        for _ in range(2):
            asyncio.run(join_stream(CanaryToken(oracle_share=0).on_generate(reader := Reader()).stream(prompt)))
            made += tokens(reader.prompts[0]).values()
        assert made[0] != made[1]

    def test_question_and_instructions_are_unchanged(self, make):
        guard, _ = make(reader := Reader())
        asyncio.run(guard.ask(Query("amber heron")))
        assert (reader.prompts[0].question, reader.prompts[0].instructions) == ("amber heron", guard.rag.instructions)

    def test_observe_mode_inserts_no_tokens(self, make):
        guard, store = make(reader := Reader(repeat_context), enforce=False)
        answer = asyncio.run(guard.ask(Query("amber heron")))
        assert answer.text == repeat_context(reader.prompts[0])
        assert not TOKEN.search(answer.text) and not store.events


class TestAnswerWithToken:
    def test_is_cut_without_a_notice(self, make):
        guard, store = make(reader := Reader(repeat_context))
        answer = asyncio.run(guard.ask(Query("amber heron", client="mallory", id="r7")))
        assert answer.text == UNKNOWN
        assert reader.closed == 1 and reader.written < 30  # the model stops
        verdict_body = body(store)
        assert (verdict_body["flagged"], verdict_body["action"], verdict_body["client"], verdict_body["request"]) == (
            True,
            Action.WITHHOLD,
            "mallory",
            "r7",
        )
        assert verdict_body["evidence"]["leaked"] == reader.prompts[0].context[0].id
        assert verdict_body["evidence"]["ended"] == "cut"
        assert (verdict_body["defense"], verdict_body["enforced"], verdict_body["tenant"], verdict_body["k"]) == (
            "canary_token",
            True,
            "default",
            5,
        )

    @pytest.mark.parametrize("number", [1, 4])
    def test_is_attributed_to_the_chunk_of_the_token(self, make, number):
        guard, store = make(reader := Reader(lambda p: f"It says: {base64.b64encode(p.context[number].text.encode())}"))
        asyncio.run(guard.ask(Query("amber heron")))
        assert body(store)["evidence"]["leaked"] == reader.prompts[0].context[number].id
        assert body(store)["evidence"]["form"] == "base64"

    def test_stops_the_generation(self):
        @dataclass
        class Endless(Generator):
            """Not an async generator, so garbage collection does not close it."""

            closed: bool = False

            def stream(self, prompt):
                self.text = prompt.context[0].text
                return self

            def __aiter__(self):
                return self

            async def __anext__(self):
                return self.text

            async def aclose(self):
                self.closed = True

        stream = CanaryToken(oracle_share=0).on_generate(endless := Endless()).stream
        assert asyncio.run(join_stream(stream(Prompt("q", (Document("a", "text"),), "")))) == UNKNOWN
        assert endless.closed

    def test_keeps_the_text_sent_before(self, make):
        beginning = "The heron is a bird that nests in reeds, and it comes back to the same place each year. " * 3
        guard, store = make(reader := Reader(lambda p: beginning + p.context[1].text))
        out = asyncio.run(guard.ask(Query("amber heron"))).text
        assert beginning.startswith(out) and len(out) > len(beginning) / 2
        assert body(store)["flagged"]

    @pytest.mark.parametrize("size", [1, 8, 100, 10_000])
    def test_contains_no_part_of_the_token(self, make, size):
        guard, _ = make(reader := Reader(lambda p: LONG + repeat_context(p), size))
        out = asyncio.run(join_stream(guard.stream(Query("amber heron"))))
        assert (LONG + "Here it is:\n\n").startswith(out) or (size > len(LONG) and out == UNKNOWN)
        assert not any(word in out for token in tokens(reader.prompts[0]).values() for word in token.split())


class TestLegitimateAnswer:
    @pytest.mark.parametrize("text", [LONG, "", "Yes.", UNKNOWN, "a b " * 500])
    def test_is_unchanged(self, make, text):
        guard, store = make(Reader(lambda p: text))
        assert asyncio.run(guard.ask(Query("amber heron"))).text == text
        assert asyncio.run(join_stream(guard.stream(Query("amber heron")))) == text
        assert [(e.body["flagged"], e.body["score"], e.body["evidence"]["ended"]) for e in store.events] == [
            (False, 0.0, "whole")
        ] * 2

    def test_may_contain_tokens_of_other_requests(self, make):
        guard, store = make(Reader(lambda p: f"They said {TokenGenerator(KEY).token('other', 'd1')} to me. " + LONG))
        assert asyncio.run(guard.ask(Query("amber heron"))).text.endswith(LONG)
        assert not body(store)["flagged"]

    def test_is_streamed(self, make):
        guard, _ = make(reader := Reader())

        async def first():
            stream = guard.stream(Query("amber heron"))
            piece = await anext(stream)
            written = reader.written
            await stream.aclose()
            return piece, written

        piece, written = asyncio.run(first())
        assert LONG.startswith(piece) and written * reader.size < 120 < len(LONG)

    def test_without_a_context_is_unchanged_and_not_recorded(self):
        defense = CanaryToken(store=Memory(), oracle_share=1)
        stream = defense.on_generate(Reader()).stream(Prompt("q", (), ""))
        assert asyncio.run(join_stream(stream)) == LONG
        assert not defense.store.events


class TestConcurrentRequests:
    def test_do_not_mix_tokens_or_clients(self, make):
        guard, store = make(reader := Reader(lambda p: repeat_context(p) if "stolen" in p.question else LONG))
        queries = [Query(f"amber {'stolen' if i % 3 == 0 else 'heron'} {i % 2}", client=f"c{i}") for i in range(24)]

        async def all_at_once():
            return await asyncio.gather(*(guard.ask(q) if i % 2 else joined(guard, q) for i, q in enumerate(queries)))

        async def joined(guard, query):
            return await join_stream(guard.stream(query))

        asyncio.run(all_at_once())
        verdict_body = {e.body["request"]: e.body for e in store.events}
        assert len(verdict_body) == 24
        for query in queries:
            assert verdict_body[query.id]["client"] == query.client
            assert verdict_body[query.id]["flagged"] == ("stolen" in query.text)
        assert len({t for p in reader.prompts for t in tokens(p).values()}) == 24 * 5

    def test_can_be_interleaved_in_one_asyncio_task(self, make):
        guard, store = make(Reader())
        queries = [Query("amber heron", client=name) for name in "ab"]

        async def in_turns():
            streams = [guard.stream(query) for query in queries]
            while streams:
                for stream in list(streams):
                    if await anext(stream, None) is None:
                        streams.remove(stream)

        asyncio.run(in_turns())
        assert {e.body["request"]: e.body["client"] for e in store.events} == {q.id: q.client for q in queries}

    def test_answer_to_another_question_has_no_client(self, make):
        guard, store = make(Reader(repeat_context))

        async def another():
            await guard.retrieve(Query("amber heron", client="alice"))
            prompt = Prompt("something else", (Document("a", "text"),), "")
            return await join_stream(guard.generator.stream(prompt))

        assert asyncio.run(another()) == UNKNOWN
        assert (body(store)["client"], body(store)["flagged"]) == ("", True)


class TestSecondPath:
    def verdict_body(self, make, answer, share=1.0):
        guard, store = make(reader := Reader(answer), oracle_share=share)
        text = asyncio.run(guard.ask(Query("amber heron"))).text
        assert text == LONG
        assert len(reader.prompts) == reader.closed == (2 if share else 1)
        return body(store), reader

    def test_requests_the_token_after_the_same_question_and_context(self, make):
        verdict_body, reader = self.verdict_body(
            make, lambda p: tokens(p)[p.context[0].id].upper() if is_probe(p) else LONG
        )
        answer, probe = sorted(reader.prompts, key=is_probe)
        assert probe.question.startswith("amber heron\n\n")
        assert (probe.context, probe.instructions) == (answer.context, answer.instructions)
        assert (verdict_body["evidence"]["oracle"], verdict_body["score"], verdict_body["flagged"]) == (
            "passed",
            0.0,
            False,
        )

    def test_failure_is_recorded_as_evidence_without_an_action(self, make):
        verdict_body, _ = self.verdict_body(make, lambda p: "I see no such words." if is_probe(p) else LONG)
        assert verdict_body["evidence"]["oracle"] == "failed"
        assert (verdict_body["score"], verdict_body["threshold"], verdict_body["flagged"], verdict_body["action"]) == (
            0.5,
            0.5,
            False,
            Action.NONE,
        )

    def test_is_short(self, make):
        _, reader = self.verdict_body(make, lambda p: "no " * 5000 if is_probe(p) else LONG)
        assert reader.written * reader.size < len(LONG) + 300

    def test_error_does_not_affect_the_answer_and_is_not_evidence(self, make, caplog):
        def answer(prompt):
            if is_probe(prompt):
                raise BackendError("down", backend="fake", retryable=True)
            return LONG

        guard, store = make(Reader(answer), oracle_share=1.0)
        assert asyncio.run(guard.ask(Query("amber heron"))).text == LONG
        assert (body(store)["evidence"]["oracle"], body(store)["score"]) == ("broke off", 0.0)
        assert "the second path of canary_token failed: BackendError" in caplog.text

    def test_is_canceled_when_the_answer_is_cut(self, make):
        guard, store = make(
            reader := Reader(lambda p: LONG * 1000 if is_probe(p) else repeat_context(p), 1), oracle_share=1.0
        )
        assert asyncio.run(guard.ask(Query("amber heron"))).text == UNKNOWN
        assert body(store)["evidence"]["oracle"] == "not asked"
        assert reader.closed == 2

    def test_runs_for_a_pseudorandom_share_of_the_requests(self, make):
        self.verdict_body(make, lambda p: LONG, share=0.0)
        prompt = Prompt("q", (Document("a", "text"),), "")
        defense = CanaryToken(secret=KEY, oracle_share=0.2)

        async def paths():
            counts = []
            for i in range(300):
                await defense.on_retrieve(Query("q", id=str(i)), None)
                await join_stream(defense.on_generate(reader := Reader(lambda p: "Yes.")).stream(prompt))
                counts.append(len(reader.prompts))
            return counts

        counts = asyncio.run(paths())
        assert 30 < counts.count(2) < 90
        assert counts == asyncio.run(paths())


class TestVerdictLog:
    def test_records_an_answer_that_the_client_aborts(self, make):
        guard, store = make(reader := Reader(lambda p: LONG * 50), oracle_share=1.0)

        async def close_early():
            stream = guard.stream(Query("amber heron"))
            await anext(stream)
            await stream.aclose()
            while not store.events:  # the generator's stream is closed when the guard's stream is garbage-collected
                await asyncio.sleep(0)

        asyncio.run(close_early())
        assert (body(store)["evidence"]["ended"], reader.closed) == ("broke off", 2)
        assert reader.written < 500

    def test_records_an_answer_that_the_model_interrupts(self, make):
        @dataclass
        class InterruptedReader(Reader):
            async def stream(self, prompt):
                yield LONG
                raise BackendError("down", backend="fake", retryable=True)

        guard, store = make(InterruptedReader())
        with pytest.raises(BackendError):
            asyncio.run(guard.ask(Query("amber heron")))
        assert (body(store)["evidence"]["ended"], body(store)["flagged"]) == ("broke off", False)

    def test_failing_store_does_not_affect_the_answer(self, make, caplog):
        class FailingStore(Memory):
            def append(self, event):
                raise BackendError("closed", backend="memory", retryable=False)

        guard, _ = make(Reader(), store=FailingStore())
        assert asyncio.run(guard.ask(Query("amber heron"))).text == LONG
        assert "a verdict of canary_token was not appended" in caplog.text

    def test_contains_no_question_text_token_or_secret(self, make, caplog):
        guard, store = make(reader := Reader(repeat_context))
        asyncio.run(guard.ask(Query("amber private words")))
        kept = json.dumps(body(store)) + repr(guard.defenses[0]) + caplog.text
        secrets = ["private", KEY, *tokens(reader.prompts[0]).values(), reader.prompts[0].context[0].text]
        assert not any(secret in kept for secret in secrets)


class TestLeakedText:
    def ask_as_three_clients(self, make):
        guard, store = make(reader := Reader())
        for name in ("alice", "bob", "carol"):
            asyncio.run(guard.ask(Query("amber heron", client=name)))
        return store, reader

    def test_is_traced_to_request_and_chunk(self, make):
        store, reader = self.ask_as_three_clients(make)
        chunk, token = list(tokens(reader.prompts[1]).items())[2]
        (found,) = CanaryToken(secret=KEY, store=store).trace(f"Stolen: {base64.b64encode(token.encode()).decode()}")
        assert (found["client"], found["chunk"]) == ("bob", chunk)
        assert found["request"] == store.events[1].body["request"]

    def test_is_not_traced_without_the_secret_or_the_events(self, make):
        store, reader = self.ask_as_three_clients(make)
        text = "\n".join(tokens(reader.prompts[0]).values())
        assert len(CanaryToken(secret=KEY, store=store).trace(text)) == 5
        assert CanaryToken(secret=Secret("another key of many characters"), store=store).trace(text) == []
        assert CanaryToken(secret=KEY, store=Memory()).trace(text) == CanaryToken(secret=KEY).trace(text) == []
        assert CanaryToken(secret=KEY, store=store).trace("The ferry leaves at ten.") == []
