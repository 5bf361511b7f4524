"""The cascade by whole answers: an encoded copy is regenerated without the document."""

import asyncio

import pytest

from casemate.demo.clinic import case_notes
from casemate.guard.defenses.cascade.rewriting import RewritingGenerator
from casemate.rag.pipeline import join_stream
from casemate.types import UNKNOWN, Document, Prompt
from tests.disguises import DISGUISES
from tests.fakes import AnswerFunction

NOTES = [" ".join(text.split()) for _, text in case_notes(4, seed=3)]
NOT_DECODED = {"base85", "polybius"}
"""Stated in ``docs/defenses/crawl_limit.md``."""


def answer(disguise):
    costs = []
    copies_first = AnswerFunction(lambda prompt: disguise(prompt.context[0].text) if prompt.context else UNKNOWN)
    generator = RewritingGenerator(copies_first, "ablated", 16, 24, 0.3, lambda prompt, body: costs.append(body))
    prompt = Prompt("What is known?", (Document("d0", NOTES[0]),), "")
    return asyncio.run(join_stream(generator.stream(prompt))), costs[0]


FORMS = ("capitals", "full width", "zero width", "spaced letters", "numbered words", "fillers", "base64", "reversed")


@pytest.mark.parametrize("name", [*FORMS, *sorted(NOT_DECODED)])
def test_encoded_copy_is_not_sent(name):
    text, costs = answer(DISGUISES[name])
    if name in NOT_DECODED:
        assert text == DISGUISES[name](NOTES[0])
    else:
        assert text == UNKNOWN and costs["copied"] == {0} and costs["generations"] == 2


def test_short_encoded_quotation_is_sent():
    text, costs = answer(lambda text: " ".join(text.split()[:12]).upper())
    assert text == " ".join(NOTES[0].split()[:12]).upper() and not costs["copied"]
