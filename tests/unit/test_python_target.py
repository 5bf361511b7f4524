import asyncio
import gc
import subprocess
import sys
import threading
import time

import pytest

from casemate.backends.target_answers import partial_answer
from casemate.backends.targets.python import PythonTarget
from casemate.config import PluginSpec
from casemate.errors import BackendError, ConfigError
from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.results import CanaryStatus
from casemate.monitor.canaries.run import CanaryRunner
from casemate.plugins import build
from casemate.types import Query

HERE = "tests.unit.test_python_target"
NOT_CALLABLE = 7
threads_seen = set()
release = threading.Event()


def plain(question):
    threads_seen.add(threading.current_thread().name)
    return f"You asked: {question}"


async def later(question):
    await asyncio.sleep(0)
    return f"Later: {question}"


def returns_a_coroutine(question):
    return later(question)


def mapping(question):
    return {"answer": "It is 7.", "sources": ["a.md", "b.md"], "ids": [1, "x"], "scores": [0.9, 0.5], "more": 1}


def whole(question):
    return partial_answer("It is 7.", ids=("d1",))


class Asker:
    def __call__(self, question):
        return "from an object"

    @staticmethod
    async def method(question):
        return "from a method"


class AsyncAsker:
    async def __call__(self, question):
        return "from an asynchronous object"


asker, async_asker = Asker(), AsyncAsker()


def breaks(question):
    raise ValueError(f"secret of {question}")


async def breaks_later(question):
    raise KeyError("secret")


def leaves(question):
    sys.exit(3)


def hangs(question):
    if question == "hang":
        release.wait(20)
    return "yes"


def odd(question):
    return {
        "none": None,
        "number": {"answer": 7},
        "short": {"answer": "x", "sources": ["a"]},
        "uneven": {"answer": "x", "sources": ["a"], "ids": [], "scores": [1]},
        "nan": {"answer": "x", "sources": ["a"], "ids": ["b"], "scores": [float("nan")]},
        "kind": {"answer": "x", "sources": [None], "ids": ["b"], "scores": [1]},
        "text": {"answer": "x", "sources": 5, "ids": ["b"], "scores": [1]},
    }[question]


def ask(name, question="Why?", **options):
    return asyncio.run(PythonTarget(f"{HERE}:{name}", **options).ask(Query(question)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain", "You asked: Why?"),
        ("later", "Later: Why?"),
        ("returns_a_coroutine", "Later: Why?"),
        ("mapping", "It is 7."),
        ("whole", "It is 7."),
        ("asker", "from an object"),
        ("async_asker", "from an asynchronous object"),
        ("Asker.method", "from a method"),
    ],
)
def test_supports_all_kinds_of_functions(name, text):
    assert ask(name).text == text


def test_synchronous_function_runs_in_a_thread():
    threads_seen.clear()
    ask("plain")
    assert threads_seen == {"python"}


def test_reads_retrieval_details_only_if_declared():
    hits = ask("mapping", tells=frozenset({"sources", "ids", "scores"})).retrieval.hits
    assert [(h.document.id, h.document.source, h.score) for h in hits] == [("1", "a.md", 0.9), ("x", "b.md", 0.5)]
    assert ask("mapping").retrieval.hits == ()
    target = build("target", PluginSpec(use="python", call=f"{HERE}:mapping", tells=["sources"]))
    assert target.tells == {"sources"}


def test_stream_yields_one_chunk():
    async def chunks():
        return [chunk async for chunk in PythonTarget(f"{HERE}:plain").stream(Query("q"))]

    assert asyncio.run(chunks()) == ["You asked: q"]


@pytest.mark.parametrize(
    ("name", "kind"), [("breaks", "ValueError"), ("breaks_later", "KeyError"), ("leaves", "SystemExit")]
)
def test_error_contains_the_exception_type_and_not_its_message(name, kind):
    with pytest.raises(BackendError) as caught:
        ask(name)
    assert str(caught.value) == f"{HERE}:{name} raised {kind}"


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("none", "returned NoneType"),
        ("number", "returned dict"),
        ("short", "returned no ids"),
        ("uneven", "differ in length"),
        ("nan", "scores must be finite"),
        ("kind", "ids and sources must be strings or integers"),
        ("text", "not iterable"),
    ],
)
def test_invalid_return_values_raise(question, message):
    with pytest.raises(BackendError, match=message):
        ask("odd", question, tells=frozenset({"sources", "ids", "scores"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"call": "plain"}, "write module:function"),
        ({"call": f"{HERE}:"}, "write module:function"),
        ({"call": "no_such_module:f"}, "No module named 'no_such_module'"),
        ({"call": f"{HERE}:no_such"}, "no_such"),
        ({"call": f"{HERE}:NOT_CALLABLE"}, "is not callable"),
        ({"tells": frozenset({"titles"})}, "allowed: ids, scores, sources"),
        ({"threads": 0}, "threads=0; it must be at least 1"),
    ],
)
def test_rejects_invalid_options(options, message):
    with pytest.raises(ConfigError, match=message):
        PythonTarget(**{"call": f"{HERE}:plain"} | options)


def test_imports_the_module_from_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_own_rag.py").write_text("def ask(question):\n    return 'mine'\n")
    target = build("target", PluginSpec(use="python", call="my_own_rag:ask"), tmp_path)
    assert asyncio.run(target.ask(Query("q"))).text == "mine"


class TestHanging:
    @pytest.fixture(autouse=True)
    def release_threads(self):
        release.clear()
        yield
        release.set()

    def test_fails_one_canary_but_not_the_run(self):
        found = [Canary(id=q, query=q, expected_answer="yes") for q in ("hang", "b", "c")]
        begun = time.monotonic()
        result = asyncio.run(CanaryRunner(found, PythonTarget(f"{HERE}:hangs"), timeout_s=0.3).run("r"))
        assert time.monotonic() - begun < 30  # default threads of asyncio would delay the end
        assert [r.status for r in result.results] == [CanaryStatus.ERROR, CanaryStatus.PASS, CanaryStatus.PASS]
        assert result.results[0].error == "no answer within 0.3 s"

    def test_blocks_at_most_the_configured_threads(self):
        before = threading.active_count()
        target = PythonTarget(f"{HERE}:hangs", threads=2)

        async def several():
            return await asyncio.gather(
                *(asyncio.wait_for(target.ask(Query("hang")), 0.1) for _ in range(6)), return_exceptions=True
            )

        for _ in range(3):
            assert {type(e) for e in asyncio.run(several())} == {TimeoutError}
        assert threading.active_count() <= before + 2

    def test_does_not_prevent_process_exit(self, tmp_path):
        (tmp_path / "stuck.py").write_text("import time\ndef ask(question):\n    time.sleep(60)\n")
        code = (
            "import asyncio; from casemate.backends.targets.python import PythonTarget;"
            "from casemate.types import Query;"
            "asyncio.run(asyncio.wait_for(PythonTarget('stuck:ask').ask(Query('q')), 0.1))"
        )
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30
        )
        assert "TimeoutError" in done.stderr
        assert time.monotonic() - begun < 30


def test_threads_end_with_the_target():
    target = PythonTarget(f"{HERE}:plain")
    asyncio.run(target.ask(Query("q")))
    target_threads = [t for t in threading.enumerate() if t.name == "python" and t.is_alive()]
    del target
    gc.collect()
    for thread in target_threads:
        thread.join(5)
    assert not [t for t in target_threads if t.is_alive()]


def test_importing_the_targets_imports_none_of_their_packages():
    code = (
        "import sys; import casemate.backends.targets.http, casemate.backends.targets.openai_endpoint;"
        "import casemate.backends.targets.python;"
        "import casemate.monitor.canaries.run;"
        "print(sorted({'httpx', 'jsonpath_ng', 'openai', 'rapidfuzz', 'onnxruntime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
