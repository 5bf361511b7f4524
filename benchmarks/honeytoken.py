"""Honeytokens: share of benign questions that retrieve a record, and questions of a crawler until it does.

``python -m benchmarks.honeytoken [folder] [detection]`` caches embeddings in the folder. Half of the questions select
the positions of the records; the other half measure the rate. The crawler uses the simulated reader, which obeys
commands to repeat. It is one client. As in the defense, the count is of different records among its five best hits.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import SEED, save, saved
from benchmarks.kept import Kept, corpus, questions
from casemate import plugins
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import BudgetExhausted
from casemate.guard.defenses.honeytoken import Honeytoken
from casemate.guard.guard import Guard
from casemate.guard.watermarks.honeytoken_keys import HoneytokenKeyFile, format_credential
from casemate.maths import stats
from casemate.monitor.alerts.alert import ALERT_KIND
from casemate.monitor.alerts.alerting_store import AlertingEventStore
from casemate.monitor.honeytokens.planting import PlantingSettings, plant_records
from casemate.protocols import Generator
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.black_box import MeteredBlackBox
from casemate.types import Document, Prompt, Query, Reply

CORPORA = {"squad": "article", "nfcorpus": "abstract"}
CRAWLERS = ("composite", "rag_thief", "rag_crawler", "ikea")
SECRET = "a key of the benchmark alone, so that it can be repeated"
QUESTIONS, LOG, K, ALARM = 100, 1500, 5, 3


def main(folder: str = "", only: str = "") -> None:
    """Measures both corpora, and the time from a token to its alert.

    ``detection``: only the time, added to earlier results.
    """
    with tempfile.TemporaryDirectory() as scratch:
        embedder = Kept(Path(folder or scratch) / "kept.npz")
        detection = only == "detection"
        results = saved("honeytoken") if detection else {n: measured(n, embedder, Path(scratch)) for n in CORPORA}
        results["detection"] = asyncio.run(delays(embedder, Path(scratch)))
        if folder:
            embedder.save()
    save("honeytoken", results)


def measured(name: str, embedder: Kept, folder: Path) -> dict[str, Any]:
    """Results of one corpus."""
    rng = np.random.default_rng(SEED)
    all_questions = questions(name)
    asked = [all_questions[i] for i in rng.permutation(len(all_questions))[: 2 * LOG]]
    (folder / f"{name}.json").write_text(json.dumps({"format": 1, "secret": SECRET, "generation": 1}))
    with closing(SqliteIndex(folder / f"{name}.db")) as index:
        guard = Guard(Rag(embedder, index, SimulatedReader()), [defense := Honeytoken(keys=folder / f"{name}.json")])
        documents = corpus(name)
        index.add(documents, embedder.embed([d.content for d in documents]))
        done = asyncio.run(
            plant_records(
                guard,
                HoneytokenKeyFile(defense.keys),
                PlantingSettings(style=CORPORA[name], questions=asked[:LOG], k=K),
            )  # type: ignore[arg-type]
        )
        others = asked[LOG:]
        found = [harmless(guard, q) for q in others]
        result = {
            "documents": len(documents), "records": done.held, "given_up": done.skipped,
            "log": done.benign, "other_questions": stats.proportion(sum(f > 0 for f in found), len(found)),
            "sessions_of_50_with_3": stats.proportion(*sessions(guard, others)),
        }  # fmt: skip
        result["crawlers"] = {c: asyncio.run(crawled(c, guard)) for c in CRAWLERS}
    return result


def harmless(guard: Guard, question: str) -> int:
    """Number of honeytokens in the context of a question."""
    query = Query(question, k=K)
    hits = asyncio.run(guard.rag.retrieve(query)).hits
    return sum(h.document.source.startswith("archive/") for h in hits)


def sessions(guard: Guard, asked: list[str]) -> tuple[int, int]:
    """Clients with 50 questions each: number that are shown three different records, and number of clients."""
    alarms, count = 0, len(asked) // 50
    for i in range(count):
        shown = set[str]()
        for question in asked[50 * i : 50 * (i + 1)]:
            hits = asyncio.run(guard.rag.retrieve(Query(question, k=K))).hits
            shown |= {h.document.source for h in hits if h.document.source.startswith("archive/")}
        alarms += len(shown) >= ALARM
    return alarms, count


async def crawled(name: str, guard: Guard) -> dict[str, Any]:
    """Questions until a crawler is shown the first and the third record, and the number of records in all."""
    seen, first = set[str](), dict[int, int]()
    asked = 0

    async def ask(text: str) -> Reply:
        nonlocal asked
        if asked >= QUESTIONS:
            raise BudgetExhausted("all questions are asked")
        asked += 1
        answer = await guard.ask(Query(text[:20_000], client=name, k=K))
        seen.update(h.document.source for h in answer.retrieval.hits if h.document.source.startswith("archive/"))
        first.setdefault(len(seen), asked)
        return answer.reply

    attack = plugins.load("crawler", name)()
    for option, kind in plugins.injected(type(attack)).items():
        if kind.__name__ == "Embedder":
            setattr(attack, option, guard.rag.embedder)
    with suppress(BudgetExhausted):
        async for _ in attack.extract(MeteredBlackBox(ask), np.random.default_rng(SEED)):
            pass
    reached = [next((q for n, q in first.items() if n >= least), None) for least in (1, ALARM)]
    return {"questions": asked, "records": len(seen), "first_at": reached[0], "third_at": reached[1]}


async def delays(embedder: Kept, folder: Path, repeats: int = 100) -> dict[str, float]:
    """Milliseconds from the generation of a token to an alert that another process can read.

    The complete path: retrieval, guard, detection in the stream, event, alert. Each repetition has its own tenant,
    because further leaks within an hour join the first alert.
    """
    keys = HoneytokenKeyFile(folder / "delay.json")
    leaked = format_credential("api_key", keys.load_or_create().prompt_token("api_key", 1), "example.net")
    written, found, busy = [0.0, 0.0], list[float](), list[float]()

    class Leaks(Generator):
        async def stream(self, prompt: Prompt) -> Any:
            yield "The key is "
            written[:] = time.perf_counter(), time.process_time()
            yield leaked
            yield ", and that is all there is to say about it, for now and for ever."

    document = Document("keys", "The key is kept in the office.")
    vector = embedder.embed([document.content])
    path = folder / "delay.db"
    with (
        closing(SqlEventStore(path=path)) as store,
        closing(SqlEventStore(path=path)) as reader,
        closing(SqliteIndex(folder / "delay-index.db")) as index,
    ):
        alerting = AlertingEventStore(store)
        guard = Guard(Rag(embedder, index, Leaks()), [Honeytoken(keys=keys.path, store=alerting)], store=alerting)
        for i in range(repeats):
            index.add([document], vector, f"t{i}")
            await guard.ask(Query("Where is the key?", client=f"c{i}", tenant=f"t{i}", k=K))
            while not any(e.body["canaries"] == [f"c{i}"] for e in reader.latest(ALERT_KIND, 1)):
                await asyncio.sleep(0.001)
            found.append(1e3 * (time.perf_counter() - written[0]))
            busy.append(1e3 * (time.process_time() - written[1]))
    quantiles = {f"p{round(100 * q)}_ms": float(np.quantile(found, q)) for q in (0.95, 0.99)}
    cpu = {"median_cpu_ms": float(np.median(busy)), "largest_cpu_ms": max(busy)}  # wall time includes waits
    return {"median_ms": float(np.median(found)), **quantiles, "largest_ms": max(found), **cpu, "leaks": repeats}


if __name__ == "__main__":
    main(*sys.argv[1:])
