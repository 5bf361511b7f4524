import asyncio
import gzip
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.demo.clinic import case_notes
from casemate.errors import ConfigError
from casemate.rag.pipeline import join_stream
from casemate.redteam.attacks.interrogation import REQUEST, Interrogation, as_question, negated_clause, yes_no_answer
from casemate.redteam.attacks.menta import MEntA
from casemate.text.tokens import words
from casemate.types import Document, Probe, Prompt, Reply
from tests.fakes import Script

TEXT = (
    "OBJECTIVE: The north bridge over the Tarn was closed on 3 May 2031, after divers found cracks in two piers. "
    "Engineer Ottilie Brandt estimates that the repair costs 4.2 million marks. Buses of line 12 now cross at Wexcombe,"
    " and the journey is eleven minutes longer. The toll was not raised. We counted 31,236 crossings in 1995."
)
GENRE = ["The ferry at Crale is run by Captain Sorrel.", "We met Dr Haverkamp at Brackwell; the NT-proBNP was high."]
NOTES = [Document(name, text) for name, text in case_notes(24, seed=3)]


def prepared(text=TEXT, title="", seed=0, genre=GENRE, **options):
    attack = Interrogation(**options)
    attack.study(genre)
    return asyncio.run(attack.prepare(Document("a", text, title), np.random.default_rng(seed)))


def measured(truth, replies, **options):
    probe = Probe(tuple("?" for _ in truth), {"truth": list(truth)})
    return asyncio.run(Interrogation(**options).measure(Document("a", ""), probe, [Reply(r) for r in replies]))


def facts(probe, about=""):
    """Returns the questions except summary and request, by their true answer."""
    bare = [q.removeprefix(about).removesuffix(REQUEST).strip() for q in probe.questions]
    return {t: [q for q, truth in zip(bare, probe.key["truth"], strict=True) if truth == t] for t in ("yes", "no")}


class TestQuestions:
    def test_each_asks_for_one_fact_and_starts_with_the_title(self):
        probe = prepared(title="A bridge closed.")
        for question in probe.questions:
            assert re.fullmatch(r"A bridge closed\. \S.*\? Answer Yes, No or I don't know\.", question)
        assert "Is the journey eleven minutes longer?" in facts(probe, "A bridge closed.")["yes"]

    def test_a_title_keeps_its_question_mark(self):
        assert all(q.startswith("Is the bridge safe? ") for q in prepared(title="Is the bridge safe?").questions)

    def test_key_terms_are_the_summary_without_a_title(self):
        summary, _, _ = prepared().questions[0].partition(". ")
        assert "north bridge" in summary
        assert set(words(summary)) <= set(words(TEXT))

    def test_the_summary_is_optional(self):
        bare, full = prepared(summary=False), prepared(summary=True)
        assert all(f.endswith(b) for b, f in zip(bare.questions, full.questions, strict=True))
        assert bare.questions != full.questions

    def test_half_of_the_true_answers_are_no(self):
        for note in NOTES:
            by_truth = facts(prepared(note.text, summary=False))
            assert len(by_truth["no"]) == len(by_truth["yes"])

    def test_are_limited_in_number(self):
        assert len(prepared(" ".join(n.text for n in NOTES)).questions) == 30
        assert len(prepared(questions=4).questions) == 4
        assert len(prepared(questions=3).questions) == 3

    def test_are_at_least_three(self):
        for text in ("It rained.", "rain", "The bridge is closed", "Two."):
            probe = prepared(text)
            assert len(set(probe.questions)) == 3
            assert sorted(probe.key["truth"]) == ["no", "no", "yes"]

    def test_an_empty_text_has_none(self):
        probe = prepared(" \n", title="")
        assert probe.questions == ()
        assert measured([], []) == (-5.0, 0.0, 0.0)

    def test_a_text_without_words_uses_the_title(self):
        assert "bridge" in prepared("", title="North bridge closed").questions[0]

    def test_depend_on_the_seed_only(self):
        assert prepared(seed=1) == prepared(seed=1)
        assert prepared(seed=1).questions != prepared(seed=2).questions

    def test_true_questions_contain_words_of_the_text_only(self):
        frame = set(words("Is it true that"))
        for question in facts(prepared(summary=False))["yes"]:
            assert set(words(question)) - frame <= set(words(TEXT))

    def test_false_questions_change_a_number_a_name_or_the_sense(self):
        kinds = set()
        for seed in range(12):
            for question in facts(prepared(seed=seed, summary=False))["no"]:
                new = set(re.findall(r"[\w.,]*\w", question)) - set(re.findall(r"[\w.,]*\w", TEXT))
                kinds |= {"number" for w in new if w[0].isdigit()}
                kinds |= {"name" for w in new if w in ("Crale", "Sorrel", "Haverkamp", "Brackwell")}
                kinds |= {"sense" for w in new if w in ("wrong", "untrue", "shorter")}
                kinds |= {"sense"} if " not " in question or "toll was raised" in question else set()
        assert kinds == {"number", "name", "sense"}

    def test_replaced_numbers_keep_their_format(self):
        found = {q for seed in range(30) for q in facts(prepared(seed=seed, summary=False))["no"] if "crossings" in q}
        years = {int(y) for q in found for y in re.findall(r"in (\d{4})\?", q)}
        counts = {c for q in found for c in re.findall(r"counted (\S+) crossings", q)}
        assert len(years) > 2 and all(1990 < y < 2010 for y in years)
        assert len(counts) > 1 and all(re.fullmatch(r"\d{1,3},\d{3}", c) for c in counts)


@given(st.text(max_size=120), st.integers(0, 9))
def test_any_text_is_accepted(text, seed):
    probe = prepared(text, seed=seed)
    assert len(probe.questions) == len(probe.key["truth"])
    assert not probe.questions or len(probe.questions) >= 3
    json.dumps(dict(probe.key))


@given(st.from_regex(r"[0-9]{1,30}([.,][0-9]{1,4}){0,3}", fullmatch=True), st.integers(0, 20))
def test_any_number_is_replaced(number, seed):
    text = f"The lock keeper counted {number} boats"
    for question in facts(prepared(text, seed=seed, summary=False))["no"]:
        if question.startswith("Is it true") and " not " not in question:
            assert f" {number} " not in question


@pytest.mark.parametrize(
    ("clause", "question"),
    [
        ("The dose was halved", "Was the dose halved?"),
        ("but the dose was halved", "Was the dose halved?"),
        ("PhIP has been found in fried meat", "Has PhIP been found in fried meat?"),
        ("If the toll is raised, traffic falls", "Is it true that if the toll is raised, traffic falls?"),
        ("In May the toll was raised", "Is it true that in May the toll was raised?"),
        ("Divers found cracks and were praised", "Is it true that divers found cracks and were praised?"),
        ("Divers who were hired found cracks", "Is it true that divers who were hired found cracks?"),
    ],
)
def test_clauses_are_turned_into_questions(clause, question):
    assert as_question(clause, ["PhIP"]) == question


@pytest.mark.parametrize(
    ("clause", "contrary"),
    [
        ("There was no difference", "There was difference"),
        ("It can be seen", "It can not be seen"),
        ("Herons have a nest", ""),
        ("Tolls increased", "Tolls decreased"),
    ],
)
def test_clauses_are_negated(clause, contrary):
    assert negated_clause(clause) == contrary


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("Yes.", "yes"),
        ("no", "no"),
        ("**Yes** - see [1]", "yes"),
        ("Answer: No, it was not.", "no"),
        ("Yes or no? No.", "no"),
        ("I don't know.", "unknown"),
        ("I don’t", "unknown"),
        ("I do not know whether that is so.", "unknown"),
        ("There is no information about it.", "unknown"),
        ("The documents do not mention a toll.", "unknown"),
        ("I cannot find this in the context.", "unknown"),
        ("I am unable to answer that.", "unknown"),
        ("It depends.", ""),
        ("Nobody knows yesterday's noise.", ""),
        ("", ""),
    ],
)
def test_replies_are_classified_as_yes_no_or_unknown(reply, verdict):
    assert yes_no_answer(reply) == verdict


@given(
    st.lists(st.tuples(st.sampled_from(["yes", "no"]), st.sampled_from(["Yes.", "No.", "I don't know.", "Maybe."]))),
    st.floats(0, 10),
)
def test_score_equals_the_formula_of_the_paper(pairs, penalty):
    truth, replies = [t for t, _ in pairs], [r for _, r in pairs]
    if not pairs:
        return
    right = np.array([r.lower().rstrip(".") == t for t, r in pairs])
    unknown = np.array(replies) == "I don't know."
    expected = np.mean(right - penalty * unknown), right.mean(), 1 - unknown.mean()
    assert measured(truth, replies, penalty=penalty) == pytest.approx(expected)


@pytest.mark.parametrize("options", [{"questions": 2}, {"penalty": -1}, {"penalty": float("nan")}])
def test_options_out_of_range_are_rejected(options):
    with pytest.raises(ConfigError, match="interrogation"):
        Interrogation(**options)


QUESTIONS = "Here they are\n1. Is it old?\n- Is it wet?\n3) Is it long?\n\nIs it blue?\nIs it new?"


def test_writer_generates_questions_and_shadow_model_answers_them():
    writer = Script([QUESTIONS, "  the north\nbridge. "])
    shadow = Script(["Yes", "no.", "I don't know", "No", "Yes."])
    probe = prepared(writer=writer, shadow=shadow)
    known = ("Is it old?", "Is it wet?", "Is it blue?", "Is it new?")
    assert probe.questions == tuple(f"the north bridge. {question} {REQUEST}" for question in known)
    assert probe.key["truth"] == ["yes", "no", "no", "yes"]
    assert all(p.context == (Document("a", TEXT),) for p in writer.prompts + shadow.prompts)
    assert [p.question for p in shadow.prompts][:2] == ["Is it old?", "Is it wet?"]


def test_writer_answers_without_a_shadow_model():
    writer = Script([QUESTIONS, "Yes", "Yes", "Yes", "bridge"])
    assert len(prepared(writer=writer, questions=3).questions) == 3


def test_rules_generate_questions_if_the_writer_returns_none():
    probe = prepared(writer=Script(["I cannot do that.", ""]))
    assert len(probe.questions) > 3
    assert probe.questions == prepared().questions


@pytest.mark.parametrize("kind", [Interrogation, MEntA])
def test_separates_members_from_nonmembers_with_the_simulated_reader(kind):
    def score(note, context):
        attack = kind()
        attack.study([n.text for n in NOTES])
        probe = asyncio.run(attack.prepare(note, np.random.default_rng(1)))
        streams = [SimulatedReader().stream(Prompt(q, context, "")) for q in probe.questions]
        return asyncio.run(attack.measure(note, probe, [Reply(asyncio.run(join_stream(s))) for s in streams]))[0]

    inside = [score(note, (NOTES[0], note, NOTES[1])) for note in NOTES[2:12]]
    outside = [score(note, tuple(NOTES[:3])) for note in NOTES[12:22]]
    assert min(inside) > max(outside)


@pytest.mark.slow
def test_recorded_answers_of_a_language_model_reproduce_the_published_auc(data):
    """Naseh et al., NFCorpus, Llama 3 8B: AUC .965. Some replies are truncated within "Yes" or "I don't know"."""
    with gzip.open(data / "mia_riddle/nfcorpus_ia_llama3_8b_top15.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]

    def auc(penalty):
        scores = [
            measured([yes_no_answer(a) or "?" for a in r["answers"]], r["llm_responses"], penalty=penalty) for r in rows
        ]
        return roc_auc_score([r["mem"] == "yes" for r in rows], [s[0] for s in scores])

    assert auc(1.0) == pytest.approx(0.965, abs=0.005)
    assert auc(0.0) < auc(1.0) < auc(5.0) < 0.98
