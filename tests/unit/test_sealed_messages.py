"""Sealed messages: only messages of a process of the same campaign for the same purpose are unpickled."""

from __future__ import annotations

import ast
import hashlib
import hmac
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import casemate
from casemate.errors import ConfigError, DataError
from casemate.runtime.sealed_messages import MessageSeal, Reference, SealedMessage
from casemate.types import Secret

SECRET = b"0123456789abcdef0123456789abcdef"
SEAL = MessageSeal(SECRET)
RAN: list[str] = []


class CodeOnUnpickling:
    """Executes code when it is unpickled."""

    def __reduce__(self):
        return RAN.append, ("ran",)


def test_the_code_is_hmac_sha256_of_purpose_body_and_buffers():
    message = SEAL.seal(np.arange(3000), "why")
    parts = (b"why", message.body, *(part.tobytes() for part in message.buffers))
    text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    assert message.code == hmac.digest(SECRET, text, hashlib.sha256)
    assert len(message.buffers) == 1


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists, max_leaves=20))
def test_a_value_is_returned(value):
    assert SEAL.open(SEAL.seal(value, "p"), "p") == value


@pytest.mark.parametrize("shape", [(0,), (3, 0), (4, 5), (2000, 8)])
def test_arrays_survive_a_transport_that_pickles(shape):
    array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    sent = pickle.loads(pickle.dumps(SEAL.seal({"a": array, "b": array.T}, "p")))
    found = SEAL.open(sent, "p")
    assert np.array_equal(found["a"], array) and np.array_equal(found["b"], array.T)


@given(st.data())
def test_any_changed_byte_is_rejected(data):
    RAN.clear()
    message = SEAL.seal((CodeOnUnpickling(), np.arange(5000)), "p")
    part = data.draw(st.sampled_from(["code", "body", "buffers"]))
    raw = bytearray(message.buffers[0].tobytes() if part == "buffers" else getattr(message, part))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    changed = (np.frombuffer(bytes(raw), np.uint8),) if part == "buffers" else bytes(raw)
    with pytest.raises(DataError, match="not from this campaign"):
        SEAL.open(replace(message, **{part: changed}), "p")
    assert not RAN


@pytest.mark.parametrize(
    "forged",
    [
        MessageSeal(b"x" * 32).seal(CodeOnUnpickling(), "p"),
        SEAL.seal(CodeOnUnpickling(), "another purpose"),
        SealedMessage(b"", pickle.dumps(CodeOnUnpickling())),
        SealedMessage(b"", pickle.dumps(CodeOnUnpickling()), (np.array([CodeOnUnpickling()], object),)),
        pickle.dumps(CodeOnUnpickling()),
        None,
    ],
)
def test_a_forged_message_is_not_unpickled(forged):
    RAN.clear()
    with pytest.raises(DataError, match="not from this campaign, so it was rejected"):
        SEAL.open(forged, "p")
    assert not RAN


def test_a_reference_is_a_name_and_its_handle():
    message = SEAL.seal(["x", Reference("n1", "where")], "p")
    assert message.handles == {"n1": "where"} and b"where" not in message.body
    found = SEAL.open(message, "p")[1]
    assert (found.name, found.handle) == ("n1", "where")


def test_a_missing_secret_variable_is_an_error_with_its_name(monkeypatch):
    monkeypatch.setenv("A_KEY", "k1")
    message = SEAL.seal(Secret.read("${A_KEY}"), "p")
    assert b"k1" not in message.body
    monkeypatch.delenv("A_KEY")
    with pytest.raises(ConfigError, match="a worker lacks the environment variable 'A_KEY'"):
        SEAL.open(message, "p")


def test_a_short_secret_is_rejected():
    with pytest.raises(ConfigError, match="at least 32"):
        MessageSeal(b"short")


def test_a_proof_requires_the_secret_and_differs_from_a_message_code():
    assert SEAL.proof("a") == MessageSeal(SECRET).proof("a")
    assert len({SEAL.proof("a"), SEAL.proof("b"), MessageSeal(b"x" * 32).proof("a")}) == 3


def test_only_the_sealed_message_module_unpickles():
    found, unsafe = set(), {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    files = {path: path.read_text("utf-8") for path in Path(casemate.__file__).parent.rglob("*.py")}
    for path in (path for path, text in files.items() if any(name in text for name in unsafe)):
        for node in ast.walk(ast.parse(files[path])):
            names = [n.name for n in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.partition(".")[0] for name in names} & unsafe:
                found.add(path.name)
    assert found == {
        "sealed_messages.py",
        "faiss_folder.py",
    }  # the second one unpickles plain data and executes no code; its own test shows it
