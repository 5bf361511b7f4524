import pytest

from casemate.backends.generators.simulated_reader.requests import Task, parse_request
from casemate.redteam.attacks.composite import FRAMES, INFORMATION_KINDS, Composite
from casemate.redteam.crawling.common_words import ILLNESSES, MAIL_SUBJECTS, NAMES, WORDS
from casemate.redteam.crawling.extracted_texts import COMMANDS
from tests.unit.crawls import NOTES, Scribe, Scripted, System, crawl, share


@pytest.mark.parametrize("information", INFORMATION_KINDS)
def test_yields_each_recovered_text_once(information):
    system = System()
    found = crawl(Composite(information, questions=40), system)
    assert len(system.questions) == len(set(system.questions)) == 40
    assert len(found) == len(set(found))
    assert set(found) <= {note.text for note in NOTES}
    assert share(found) == len({i for shown in system.shown for i in shown}) / len(NOTES) > 0.2


def test_untargeted_information_is_random_words():
    system = System()
    crawl(Composite(questions=5, tokens=7), system)
    for question in system.questions:
        information, _, command = question.partition("\n\n")
        assert command == COMMANDS[0]
        assert len(set(information.split())) == 7
        assert set(information.split()) <= set(WORDS)


@pytest.mark.parametrize("information", INFORMATION_KINDS)
def test_every_question_is_recognized_as_a_repeat_command(information):
    box = Scripted(["Some text of at least five words."])
    crawl(Composite(information, questions=300), box)
    assert {parse_request(question).task for question in box.questions} == {Task.REPEAT}


def test_targeted_information_uses_each_illness_once():
    box = Scripted(["Some text of at least five words."])
    crawl(Composite("health", questions=len(ILLNESSES)), box)
    for illness in ILLNESSES:
        assert any(illness in question for question in box.questions), illness
    assert len(set(ILLNESSES)) == len(ILLNESSES) > 90
    assert set(FRAMES) == set(INFORMATION_KINDS) - {"words"}
    assert all(item == item.strip() and item for item in (*ILLNESSES, *NAMES, *MAIL_SUBJECTS))


def test_command_changes_only_after_a_refusal():
    refusing_target = Scripted(["I'm sorry, I can't share that."])
    assert crawl(Composite(questions=len(COMMANDS)), refusing_target) == []
    assert all(any(command in q for q in refusing_target.questions) for command in COMMANDS)
    answering_target = Scripted(["The ferry runs until ten o'clock."])
    assert crawl(Composite(questions=8), answering_target) == ["The ferry runs until ten o'clock."]
    assert all(q.endswith(COMMANDS[0]) for q in answering_target.questions)


def test_writer_is_used_until_it_repeats_itself():
    writer = Scribe(["1. Herons in the reeds\n- A ferry at night\n\nHerons in the reeds", "A ferry at night\n"])
    box = Scripted(["nothing"])
    crawl(Composite(questions=4, subject="birds and boats", writer=writer), box)
    assert [
        q.replace("\n\n", "").startswith(start) or q.endswith(start)
        for q, start in zip(box.questions, ["Herons in the reeds", "A ferry at night"], strict=False)
    ] == [True, True]
    assert len(box.questions) == 4  # two by the writer, two by rules
    assert len(writer.prompts) == 2
    assert "birds and boats" in writer.prompts[0].question
    assert writer.prompts[0].context == ()
