"""Personal data in answers: masking, counts, and absence from the log."""

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
        for start in range(0, len(self.text), 7):  # values span several chunks
            yield self.text[start : start + 7]


def test_finder_and_defense_pass_the_conformance_checks():
    check_personal_data_finder(Addresses())
    check_defense(MaskPersonalData(Addresses()))


@pytest.mark.parametrize("stream", [False, True])
def test_answer_contains_the_kind_instead_of_the_value(tmp_path, stream):
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


async def test_does_not_mask_values_of_the_question(tmp_path):
    guard = make_guard(tmp_path)
    answer = await guard.ask(Query(f"Whose address is {ADDRESS.upper()}?"))
    assert ADDRESS in answer.text and not answer.verdicts[0].flagged


async def test_withholds_the_answer_if_the_finder_fails(tmp_path):
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
def test_mask_removes_all_characters_of_values_and_no_others(spans, text):
    found = [PersonalData("X", start, start + length) for start, length in spans]
    covered = {i for one in found for i in range(one.start, one.end)}
    kept = mask(text, found).replace("[X]", "")
    assert kept == "".join(c for i, c in enumerate(text) if i not in covered)


@pytest.fixture
def presidio(monkeypatch):
    """The presidio library without network access."""
    pytest.importorskip("presidio_analyzer", reason="the extra casemate[presidio] is not installed")

    def fail(*_, **__):
        raise AssertionError("the finder contacts the network")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(socket.socket, "connect", fail)
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
def test_presidio_rejects_invalid_options(presidio, options, why):
    with pytest.raises(ConfigError, match=why):
        presidio(**options)
