"""Personal data in answers: masked, counted, and never recorded."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate import plugins
from casemate.config import PluginSpec
from casemate.errors import ConfigError
from casemate.guard.defenses.personal_data import MaskPersonalData, mask
from casemate.protocols import Generator, PersonalDataFinder
from casemate.testing import check_defense, check_personal_data_finder
from casemate.types import PersonalData, Query
from tests.gateways import chat, client, key, make

ADDRESS = "ann.lee@example.org"
TEXT = f"Write to {ADDRESS}, or call +1 212 555 0175; the IBAN is DE89370400440532013000. Ann Lee opens at 8:30."


@dataclass
class Addresses(PersonalDataFinder):
    """Finds mail addresses."""

    def find(self, text):
        return [PersonalData("EMAIL", *m.span()) for m in re.finditer(r"[\w.]+@\w+(\.\w+)+", text)]


@dataclass
class Says(Generator):
    text: str = TEXT

    async def stream(self, prompt):
        for start in range(0, len(self.text), 7):  # values are split between pieces
            yield self.text[start : start + 7]


def test_the_finder_and_the_defense_conform():
    check_personal_data_finder(Addresses())
    check_defense(MaskPersonalData(Addresses()))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_gets_the_kind_instead_of_the_value_whole_or_as_a_stream(tmp_path, stream):
    app = make(tmp_path, Says(), (MaskPersonalData(Addresses()),))
    with client(app, key(app)) as http:
        answer = http.post("/v1/chat/completions", json=chat("only1", stream=stream)).text
        app.store.flush()
        (verdict,) = app.store.scan("verdict")
    assert ADDRESS not in answer and "[EMAIL]" in answer
    assert (verdict.body["flagged"], verdict.body["score"], verdict.body["evidence"]) == (True, 1.0, {"EMAIL": 1})
    assert ADDRESS not in str(verdict)


def test_observe_mode_counts_and_changes_nothing(tmp_path):
    app = make(tmp_path, Says(), (MaskPersonalData(Addresses()),), mode="observe")
    with client(app, key(app)) as http:
        assert ADDRESS in http.post("/v1/chat/completions", json=chat("only1")).text
        app.store.flush()
        (verdict,) = app.store.scan("verdict")
    assert (verdict.body["flagged"], verdict.body["enforced"]) == (True, False)


async def test_what_the_client_wrote_itself_is_not_masked(tmp_path):
    guard = make_guard(tmp_path)
    answer = await guard.ask(Query(f"Whose address is {ADDRESS.upper()}?"))
    assert ADDRESS in answer.text and not answer.verdicts[0].flagged


async def test_an_answer_of_a_failed_finder_is_withheld(tmp_path):
    @dataclass
    class Failing(PersonalDataFinder):
        def find(self, text):
            raise RuntimeError(text)

    guard = make_guard(tmp_path, Failing())
    answer = await guard.ask(Query("only1"))
    assert answer.text == "I don't know." and ADDRESS not in str(answer.verdicts)


def make_guard(folder, finder=None):
    with ThreadPoolExecutor(1) as pool:  # outside of the running event loop
        return pool.submit(make, folder, Says(), (MaskPersonalData(finder or Addresses()),)).result().guard


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20))), st.text(alphabet="ab", min_size=60, max_size=60))
def test_no_character_of_a_value_remains_and_all_others_do(spans, text):
    found = [PersonalData("X", start, start + length) for start, length in spans]
    covered = {i for one in found for i in range(one.start, one.end)}
    kept = mask(text, found).replace("[X]", "")
    assert kept == "".join(c for i, c in enumerate(text) if i not in covered)


@pytest.fixture
def presidio(monkeypatch):
    """The real library, without a network."""
    pytest.importorskip("presidio_analyzer", reason="the extra casemate[presidio] is not installed")

    def refused(*_, **__):
        raise AssertionError("the finder contacts the network")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
    return lambda **options: plugins.build("personal_data_finder", PluginSpec(use="presidio", **options))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_presidio_finds_patterns_without_a_model_and_without_a_network(presidio):
    finder = presidio()
    check_personal_data_finder(finder)
    assert [(one.kind, TEXT[one.start : one.end]) for one in finder.find(TEXT)] == [
        ("EMAIL_ADDRESS", ADDRESS),
        ("PHONE_NUMBER", "+1 212 555 0175"),
        ("IBAN_CODE", "DE89370400440532013000"),
    ]
    assert [one.kind for one in presidio(kinds=["IBAN_CODE"]).find(TEXT)] == ["IBAN_CODE"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"model": "no_such_model"}, "no installed model of spaCy is named 'no_such_model'"),
        ({"kinds": ["NO_SUCH_KIND"]}, "unknown NO_SUCH_KIND; known: .*EMAIL_ADDRESS"),
        ({"min_score": 2}, "min_score=2"),
    ],
)
def test_presidio_refuses_options_that_it_cannot_follow(presidio, options, why):
    with pytest.raises(ConfigError, match=why):
        presidio(**options)
