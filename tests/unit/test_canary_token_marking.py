"""Positions of canary tokens, and options of the defense."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.config import PluginSpec
from casemate.errors import ConfigError
from casemate.guard.defenses.canary_token import CanaryToken, insert_token
from casemate.plugins import build
from casemate.text.sentences import sentences
from casemate.types import Secret

KEY = Secret("a key of sixteen or more characters")


def test_copy_from_the_middle_of_a_chunk_contains_a_token():
    text = " ".join(f"On day {i} a gray heron flew over weir number {i} at noon." for i in range(60))
    copied = insert_token(text, "zakeno mirodo pilafe", 400)
    assert len(sentences(copied)) > len(sentences(text)) + 5
    assert all("zakeno mirodo pilafe" in copied[at : at + 900] for at in range(0, len(copied) - 900, 50))


@given(
    st.text("ab.!。\n ", max_size=400) | st.text(max_size=200),
    st.integers(50, 90),
    st.integers(0, 120),
)
def test_text_without_the_tokens_is_unchanged(text, spacing, lead):
    token = "zakeno mirodo pilafe"
    done = insert_token(text, token, spacing, lead)
    bare = [part for part in re.split(rf"(?:\n\n)?{token}(?:\n\n)?", done)]
    assert "".join(bare).replace("\n", "") == text.replace("\n", "")
    assert len(bare) >= 2
    assert all(len(part) <= max(2 * spacing, 2 * lead) for part in bare)
    assert bare[0] == "" if not lead else len(bare[0]) >= min(lead, len(text)) - 2


def test_tokens_are_inserted_between_sentences():
    text = " ".join(f"Herons number {i} to Z. A. Brandt nest in Dr. Ito's reeds." for i in range(40))
    parts = insert_token(text, "zakeno mirodo pilafe", 200).split("zakeno mirodo pilafe")
    assert len(parts) > 8
    assert all(part.strip().endswith("reeds.") for part in parts if part.strip())


@pytest.mark.parametrize(
    "options", [{"secret": Secret("short")}, {"spacing": 10}, {"lead": -1}, {"oracle_share": 1.1}, {"oracle_share": -1}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="canary_token") as error:
        CanaryToken(**options)
    assert "short'" not in str(error.value)


def test_the_secret_comes_from_the_environment():
    with pytest.raises(ConfigError, match="secret"):
        build(
            "defense",
            PluginSpec.model_validate({"use": "canary_token", "secret": "written in the file, which is wrong"}),
        )
    assert build("defense", PluginSpec(use="canary_token", secret=KEY)).secret == KEY
