from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from casemate import plugins
from casemate.config import PluginSpec
from casemate.errors import BackendError, CapabilityError, ConfigError
from casemate.guard.defenses.cascade import Cascade
from casemate.guard.guard import Guard
from casemate.plugins import build
from casemate.protocols import TokenModel
from casemate.rag.pipeline import join_stream
from casemate.testing import check_defense
from casemate.types import Document, Prompt
from tests.disguises import DISGUISES
from tests.fakes import AnswerFunction, Memory, Parrot
from tests.unit.toy_models import Toy, ToyReading

CONTEXT = (Document("a", "abca"), Document("b", "cbb"))
PROMPT = Prompt("a", CONTEXT, "")
TEXT = (
    "The ferry of Oakwood leaves at nine. Its captain is Ottilie Brandt, and the fare is four marks. Dogs travel free "
    "on weekdays. The winter timetable begins in November, when the last boat leaves at five. Tickets are sold on "
    "board."
)
OTHER = "The library is closed on Mondays. It lends out tools as well as books."


def whole(generator, prompt=PROMPT):
    return asyncio.run(join_stream(generator.stream(prompt)))


def pieces(generator, prompt=PROMPT, most=None):
    async def run():
        found, stream = [], generator.stream(prompt)
        async for piece in stream:
            found.append(piece)
            if len(found) == most:
                break
        await stream.aclose()
        return found

    return asyncio.run(run())


def made(store=None, generator=None, **options):
    options = {"draft": Toy(1), "run": 2, "budget": 4, "max_tokens": 12} | options
    return Cascade(store=store, **options).on_generate(generator or Toy(2))


def context_of(prompt):
    """The texts of the context, or a refusal."""
    return " ".join(d.text for d in prompt.context) or "I don't know."


class TestWiring:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rule": "eq5"}, "unknown deferral rule 'eq5'"),
            ({"reference_view": "none"}, "reference_view='none'.*known: same, ablated, summary, guarded"),
            ({"bonus": "draft"}, "bonus='draft'"),
            ({"run": 0}, "need run > 0"),
            ({"budget": -1}, "budget=-1"),
            ({"share": 0.0}, "share=0.0"),
            ({"alpha": 1.0}, "alpha=1.0"),
            ({"bound": 0.5}, "bound=0.5"),
            ({"gamma": 0}, "gamma=0"),
            ({"max_tokens": 0}, "max_tokens=0"),
            ({"temperature": -1.0}, "temperature=-1.0"),
            ({"seed": -1}, "seed=-1"),
            ({"reference": Toy(2)}, "has a reference model but no draft"),
        ],
    )
    def test_invalid_options_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            Cascade(**options)

    def test_models_with_different_vocabularies_are_refused(self):
        with pytest.raises(CapabilityError, match="the draft has 4 tokens and the reference 5, .* from token 3 on"):
            made(generator=Toy(2, "abcd "))
        with pytest.raises(CapabilityError, match="4 tokens and the reference 4, and they differ from token 0 on"):
            made(reference=Toy(2, "bac "))

    def test_generator_without_probabilities_is_refused_as_reference(self):
        with pytest.raises(CapabilityError, match="Parrot provides none; set 'reference'"):
            made(generator=Parrot())

    def test_model_that_cannot_rewind_is_refused(self):
        class NoRewind(Toy):
            def begin(self, prompts):
                return NoRewindReading(self, [tuple(p) for p in prompts])

        class NoRewindReading(ToyReading):
            def read(self, answer, last=1):
                self.prompts = [(*prompt, *answer) for prompt in self.prompts]
                return super().read(answer, last)

        with pytest.raises(CapabilityError, match="the draft model cannot rewind its cache"):
            made(draft=NoRewind(1))
        with pytest.raises(CapabilityError, match="the reference model cannot rewind its cache"):
            made(generator=NoRewind(2))

    def test_model_that_rounds_to_bfloat16_can_rewind(self):
        class RoundedModel(Toy):
            def begin(self, prompts):
                return RoundedReading(self, [tuple(p) for p in prompts])

        class RoundedReading(ToyReading):
            noise = np.random.default_rng(7)

            def read(self, answer, last=1):
                logits = super().read(answer, last)
                return logits + 0.05 * self.noise.choice([-1, 1], logits.shape)

        assert made(draft=RoundedModel(1, spread=2.3))

    def test_view_same_is_refused_without_a_draft(self):
        with pytest.raises(CapabilityError, match="reference_view cannot be 'same'"):
            Cascade(reference_view="same").on_generate(Parrot())

    def test_system_generator_is_the_default_reference(self):
        own = Toy(2)
        whole(made(generator=own))
        assert " a abca cbb " in own.begun

    def test_configured_reference_replaces_the_generator(self):
        reference, parrot = Toy(2), Parrot()
        assert set(whole(made(generator=parrot, reference=reference))) <= set("abc ")
        assert not parrot.prompts and reference.begun

    def test_models_come_from_the_configuration(self, data):
        folder = data.parent / "models" / "draft"
        if not folder.is_dir():
            pytest.skip(f"no model at {folder}")
        pytest.importorskip("transformers", reason="needs casemate[transformers]")
        part = PluginSpec.model_validate(
            {"use": "cascade", "draft": {"use": "transformers", "model": str(folder), "device": "cpu"}}
        )
        assert TokenModel in type(build("defense", part).draft).__mro__
        assert plugins.injected(Cascade)["reference"] is TokenModel
        wrong = {"use": "cascade", "draft": {"use": "transformers", "model": "/nowhere/model"}}
        with pytest.raises(Exception, match="'/nowhere/model' cannot be loaded"):
            build("defense", PluginSpec.model_validate(wrong))
        with pytest.raises(ConfigError, match="unknown token_model 'extractive'; allowed: transformers"):
            build("defense", PluginSpec.model_validate({"use": "cascade", "draft": "extractive"}))

    @pytest.mark.parametrize("options", [{}, {"reference_view": "summary"}, {"run": 2, "budget": 3}])
    def test_satisfies_the_defense_contract(self, options):
        check_defense(Cascade(**options))
        check_defense(Cascade(draft=Toy(1), reference=Toy(2), max_tokens=9, **options))


class TestStreaming:
    def test_answer_is_streamed_block_by_block(self):
        generator = made(max_tokens=20, budget=None, run=9)
        found = pieces(generator)
        assert 20 / 5 <= len(found) <= 20
        decoding = generator.decoding(PROMPT)
        while not decoding.finished:
            decoding.block()
        assert "".join(found) == Toy().text(decoding.answer).lstrip() == whole(generator)

    def test_models_stop_when_the_consumer_closes_the_stream(self):
        memory = Memory()
        generator = made(memory, max_tokens=50)
        assert len(pieces(generator, most=2)) == 2
        (event,) = memory.events
        assert event.body["tokens"] < 25

    def test_multi_token_characters_are_sent_whole(self):
        class Bytes(Toy):
            def text(self, tokens):
                written = super().text(tokens).replace(" ", "")
                return written[:-1] + "\ufffd" if written.endswith("b") else written

        found = pieces(made(draft=Bytes(1), generator=Bytes(2), max_tokens=30))
        assert all("\ufffd" not in piece for piece in found[:-1])
        assert len(found) > 1

    def test_samples_are_deterministic_for_a_seed(self):
        def answer(seed, temperature=1.0):
            return whole(made(temperature=temperature, seed=seed, max_tokens=30))

        assert answer(1) == answer(1)
        assert len({answer(seed) for seed in range(6)}) > 3
        assert len({answer(seed, 0.0) for seed in range(6)}) == 1

    def test_concurrent_answers_equal_separate_answers(self):
        generator = made(temperature=1.0, max_tokens=30)
        prompts = [PROMPT, Prompt("b", CONTEXT[:1], "")]

        async def both():
            return await asyncio.gather(*(join_stream(generator.stream(prompt)) for prompt in prompts))

        assert asyncio.run(both()) == [whole(generator, prompt) for prompt in prompts]

    def test_costs_are_recorded_without_text(self):
        memory = Memory()
        whole(made(memory, max_tokens=40))
        (event,) = memory.events
        body = event.body
        assert event.kind == "generation"
        named = [body[key] for key in ("defense", "request", "mode", "rule", "view")]
        assert named == ["cascade", "", "token", "token_copy", "ablated"]
        assert body["tokens"] == 40 and body["passes"] >= 8
        assert body["flops_paper"] > body["flops_reference"] > 0 < body["flops_honest"]
        assert body["quoted"] >= 3 and set(body["copied"]) <= {"a", "b"} and body["copied"]
        text = json.dumps(body)
        assert "abca" not in text and "cbb" not in text

    def test_store_failure_does_not_change_the_answer(self):
        class FullStore(Memory):
            def append(self, event):
                raise OSError("disk full")

        assert whole(made(FullStore())) == whole(made())


class TestBadInput:
    def test_empty_context_is_answered(self):
        memory = Memory()
        assert whole(made(memory), Prompt("a", (), ""))
        assert memory.events[0].body["copied"] == []

    def test_document_without_text_is_accepted(self):
        assert whole(made(), Prompt("a", (Document("x", ""), *CONTEXT), ""))

    @pytest.mark.parametrize("which", ["draft", "reference"])
    def test_prompt_beyond_the_limit_is_refused_before_any_text(self, which):
        generator = made(**{"reference": Toy(2), which: Toy(3, limit=11)})
        with pytest.raises(BackendError, match="the prompt has 12 tokens, and a model of the cascade reads at most 11"):
            pieces(generator)

    def test_failure_of_one_model_stops_the_other(self):
        class Failing(Toy):
            def begin(self, prompts):
                reading = super().begin(prompts)
                read, passes = reading.read, []

                def failing(answer, last=1):
                    passes.append(1)
                    if len(passes) > 3:
                        raise BackendError("out of memory", backend="toy", retryable=False)
                    return read(answer, last)

                reading.read = failing
                return reading

        found = []

        async def run():
            async for piece in made(generator=Failing(2), max_tokens=40, budget=None, run=9).stream(PROMPT):
                found.append(piece)

        with pytest.raises(BackendError, match="out of memory"):
            asyncio.run(run())
        assert 0 < len("".join(found)) <= 15


class TestWholeAnswers:
    """For generators without token probabilities."""

    def made(self, generator, store=None, **options):
        return Cascade(store=store, **({"run": 6, "budget": 10} | options)).on_generate(generator)

    def prompt(self, question="What is free on weekdays?", *texts):
        return Prompt(question, tuple(Document(f"d{i}", text) for i, text in enumerate(texts or (TEXT, OTHER))), "")

    def test_answer_within_the_limits_is_unchanged(self):
        reciting, memory = AnswerFunction(lambda prompt: "Dogs travel free on weekdays."), Memory()
        assert pieces(self.made(reciting, memory), self.prompt()) == ["Dogs travel free on weekdays."]
        assert len(reciting.prompts) == 1
        body = memory.events[0].body
        assert (body["mode"], body["generations"], body["copied"], body["quoted"]) == ("answer", 1, [], 4)

    def test_recitation_is_regenerated_from_the_other_documents(self):
        reciting, memory = AnswerFunction(context_of), Memory()
        assert whole(self.made(reciting, memory), self.prompt("Repeat all.")) == "I don't know."
        assert [len(p.context) for p in reciting.prompts] == [2, 0]
        assert memory.events[0].body["copied"] == ["d0", "d1"]

    def test_only_quoted_documents_are_removed(self):
        reciting = AnswerFunction(lambda p: p.context[0].text if p.context[0].id == "d0" else "It lends out tools.")
        assert whole(self.made(reciting), self.prompt()) == "It lends out tools."
        assert [[d.id for d in p.context] for p in reciting.prompts] == [["d0", "d1"], ["d1"]]

    def test_documents_are_removed_one_after_another(self):
        reciting = AnswerFunction(lambda p: p.context[0].text if p.context else "Nothing.")
        assert whole(self.made(reciting), self.prompt("?", TEXT, OTHER, "One two three.")) == "One two three."
        assert len(reciting.prompts) == 3

    @pytest.mark.parametrize("view", ["summary", "guarded"])
    def test_repeated_quotation_removes_the_document(self, view):
        reciting = AnswerFunction(lambda p: TEXT if any(d.id == "d0" for d in p.context) else "Nothing.")
        assert whole(self.made(reciting, reference_view=view), self.prompt()) == "Nothing."
        assert [len(p.context) for p in reciting.prompts] == [2, 2, 1]

    def test_text_that_is_also_generated_without_the_document_is_allowed(self):
        reciting = AnswerFunction(lambda p: TEXT)
        assert whole(self.made(reciting), self.prompt()) == TEXT
        assert len(reciting.prompts) == 2

    def test_text_of_the_question_does_not_count_as_quotation(self):
        question = "Is it right that the winter timetable begins in November, when the last boat leaves at five?"
        reciting = AnswerFunction(
            lambda p: "The winter timetable begins in November, when the last boat leaves at five."
        )
        for asked in (question, "When?"):
            whole(self.made(reciting, budget=14), self.prompt(asked))
        assert len(reciting.prompts) == 1 + 2

    @pytest.mark.parametrize("words", [6, 7])
    def test_run_at_the_limit_is_allowed(self, words):
        reciting = AnswerFunction(lambda p: " ".join(TEXT.split()[2:][:words]) if len(p.context) == 2 else "Nothing.")
        assert (whole(self.made(reciting), self.prompt()) == "Nothing.") == (words > 6)

    @pytest.mark.parametrize("sentences", [1, 2])
    def test_short_quotations_count_against_the_budget(self, sentences):
        written = ("Dogs travel free on weekdays", "tickets are sold on board")
        reciting = AnswerFunction(lambda p: ", and ".join(written[:sentences]) if len(p.context) == 2 else "Nothing.")
        generator = self.made(reciting, budget=9, run=6)
        assert (whole(generator, self.prompt("?")) == "Nothing.") == (sentences > 1)

    def test_inserted_words_do_not_hide_a_quotation(self):
        reciting = AnswerFunction(lambda p: " indeed ".join(TEXT.split()) if len(p.context) == 2 else "Nothing.")
        assert whole(self.made(reciting), self.prompt()) == "Nothing."

    @pytest.mark.parametrize(
        "name", ["capitals", "full width", "spaced letters", "zero width", "numbered words", "base64"]
    )
    def test_disguise_does_not_hide_a_quotation(self, name):
        reciting = AnswerFunction(lambda prompt: DISGUISES[name](" ".join(d.text for d in prompt.context)))
        whole(self.made(reciting), self.prompt("What is free on weekdays?", TEXT))
        assert [len(p.context) for p in reciting.prompts][-1] == 0

    def test_answer_is_sent_only_after_it_is_measured(self):
        guard = Guard.__new__(Guard)  # only the generators are needed
        assert not asyncio.iscoroutinefunction(guard.stream)
        found = pieces(self.made(AnswerFunction(context_of)), self.prompt("Repeat all."))
        assert found == ["I don't know."]


def test_cascade_of_one_model_equals_that_model():
    for seed in range(5):
        toy = Toy(seed)
        alone = asyncio.run(join_stream(toy.stream(PROMPT)))
        same = made(draft=Toy(seed), generator=toy, max_tokens=8, run=99, budget=None)
        assert whole(same) == alone.lstrip()


def test_limits_stop_recitation():
    """Without limits, the same pair of models recites the document."""

    class RecitingModel(Toy):
        def logits(self, prompt, answer):
            text = self.text(prompt)
            start = text.index("abcacba") if "abcacba" in text else None
            if start is None or len(answer) >= 7:
                return super().logits(prompt, answer)
            return 9.0 * np.eye(4)[prompt[start + len(answer)]]

    prompt = Prompt("b", (Document("s", "abcacba"),), "")
    pair = {"draft": RecitingModel(1), "generator": RecitingModel(2), "max_tokens": 7}
    assert whole(made(**pair, run=99, budget=None), prompt) == "abcacba"
    assert whole(made(**pair, run=3, budget=4), prompt) != "abcacba"
    assert whole(made(**pair, run=3, budget=4), prompt).startswith("abc")
    assert whole(made(**pair, run=3, budget=4, reference_view="same"), prompt) == "abcacba"
