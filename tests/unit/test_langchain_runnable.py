import asyncio
import sys
import threading

import pytest

pytest.importorskip("langchain_core", reason="needs casemate[langchain]")

from langchain_core.documents import Document as Page
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda

from casemate.backends.targets.langchain_runnable import LangChainRunnable
from casemate.config import PluginSpec
from casemate.errors import BackendError, ConfigError
from casemate.plugins import build
from casemate.types import Query

HERE = "tests.unit.test_langchain_runnable"
PAGES = [Page("a", id="1", metadata={"source": "a.md"}), Page("b", id="2", metadata={"source": "b.md"})]
release = threading.Event()
failures = []


def _later(question):
    async def answer(question):
        await asyncio.sleep(0)
        return f"Later: {question}"

    return answer(question)


text = RunnableLambda(lambda question: f"You asked: {question}")
message = RunnableLambda(lambda question: AIMessage(f"You asked: {question}"))
blocks = RunnableLambda(lambda question: AIMessage([{"type": "text", "text": "You "}, "asked"]))
mapping = RunnableLambda(lambda given: {"answer": given["input"], "context": PAGES})
graph = RunnableLambda(lambda given: {"messages": [*given["messages"], AIMessage("It is 7.")]})
later = RunnableLambda(_later)
told_who = RunnableLambda(lambda question, config: config["configurable"]["thread_id"])
odd = RunnableLambda(lambda question: {"reply": 7})
hanging = RunnableLambda(lambda question: release.wait(20) or "late")


def flaky(question):
    failures.append(question)
    if len(failures) < 3:
        raise ConnectionError(f"secret of {question}")
    return "at last"


flaky_chain = RunnableLambda(flaky)
secret = RunnableLambda(lambda question: 1 / 0)


def made():
    return text


def ask(name, **options):
    return asyncio.run(LangChainRunnable(f"{HERE}:{name}", **options).ask(Query("Why?", client="ann")))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("text", {}, "You asked: Why?"),
        ("made", {}, "You asked: Why?"),
        ("text", {"asynchronous": True}, "You asked: Why?"),
        ("later", {"asynchronous": True}, "Later: Why?"),
        ("message", {}, "You asked: Why?"),
        ("blocks", {}, "You asked"),
        ("mapping", {"input": "input"}, "Why?"),
        ("graph", {"input": "messages"}, "It is 7."),
        ("told_who", {"sessions": True}, "ann"),
    ],
)
def test_supports_all_kinds_of_runnables(name, options, said):
    assert ask(name, **options).text == said


def test_reads_retrieval_details_only_if_declared():
    hits = ask("mapping", input="input", tells=frozenset({"ids", "sources"})).retrieval.hits
    assert [(h.document.id, h.document.source) for h in hits] == [("1", "a.md"), ("2", "b.md")]
    assert ask("mapping", input="input").retrieval.hits == ()
    with pytest.raises(BackendError, match="no documents under 'context'"):
        ask("text", tells=frozenset({"ids"}))


def test_invalid_return_values_raise():
    with pytest.raises(BackendError, match=r"returned dict with \['reply'\]; expected text"):
        ask("odd")
    with pytest.raises(BackendError, match=f"{HERE}:secret raised ZeroDivisionError$"):
        ask("secret")


def test_retries_failed_calls():
    failures.clear()
    target = LangChainRunnable(f"{HERE}:flaky_chain", retries=2)
    assert asyncio.run(target.ask(Query("Why?"))).text == "at last"
    assert target.requests == 3
    failures.clear()
    with pytest.raises(BackendError, match="raised ConnectionError$"):
        ask("flaky_chain")


def test_call_times_out():
    release.clear()
    try:
        with pytest.raises(BackendError, match=r"gave no answer within 0.1 s") as caught:
            ask("hanging", timeout_s=0.1, retries=3)
        assert caught.value.retryable
    finally:
        release.set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runnable": "text"}, "write module:function"),
        ({"runnable": f"{HERE}:PAGES"}, r"has no invoke\(\)"),
        ({"tells": frozenset({"scores"})}, "tells has 'scores'; allowed: ids, sources"),
        ({"threads": 0}, "threads=0; it must be at least 1"),
        ({"timeout_s": 0}, "timeout_s=0; it must be above 0"),
    ],
)
def test_rejects_invalid_options(options, message):
    with pytest.raises(ConfigError, match=message):
        LangChainRunnable(**{"runnable": f"{HERE}:text"} | options)


def test_sessions_option_declares_that_clients_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    target = build("target", PluginSpec(use="langchain_runnable", runnable=f"{HERE}:told_who", sessions=True), tmp_path)
    assert target.can == {"clients"}
    assert not LangChainRunnable(f"{HERE}:text").can
