"""Disclosure accounting: counted share of disguised texts, unreadable answers, CPU times, benign sessions.

``python -m benchmarks.disclosure [folder] [corpus ...] [size=number ...]`` measures everything. ``python -m
benchmarks.disclosure time`` measures disguises, unreadable answers and times, ``... cpu`` times only. With
``model=FILE`` it measures only the benign sessions of a **real** model, whose answers are cached in `build/disclosure`.

Disguises are those of ``tests/disguises.py``, applied to notes of the fictional clinic. Two kinds of benign answers
test the detection of unreadable text: ``ANSWERS`` recorded answers of a **real** model to questions about NFCorpus,
over the five best chunks; and other documents of each corpus. Benign sessions are those of ``benchmarks.defaults``,
under ``crawl_limit`` with default options. The readers are the extractive generator and the **simulated** reader, which
answers a one-word question with whole documents. Results of the same code and sizes are kept for other corpora.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT, SEED, before, code_digest, save
from benchmarks.defaults import CORPORA, SIZES, Corpus, K, default_specs, load, new_index, sessions
from benchmarks.kept import Kept
from benchmarks.kept import corpus as documents
from benchmarks.real.files import read as read_set
from benchmarks.real.recorded_model import RecordedModel
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.demo.clinic import case_notes
from casemate.guard.client_state.crawl_evidence import SUSPICION
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.guard import Guard
from casemate.maths import stats
from casemate.maths.stats import clopper_pearson
from casemate.protocols import Generator
from casemate.rag.pipeline import Rag, join_stream
from casemate.redteam.lab.caching import CachedGenerator, ReplyBuffer
from casemate.redteam.lab.experiment import describe_options
from casemate.text.disclosure import DisclosureCounter
from casemate.text.synthetic_questions import generate_questions
from casemate.types import Query
from tests.disguises import CODED, DISGUISES, HELD_OUT, UNREADABLE

NOTES = [" ".join(text.split()) for _, text in case_notes(60, seed=3)]
RECORDED = ROOT / "benchmarks/recorded/nfcorpus_qwen0.5b.jsonl.gz"
ANSWERS, OTHERS, TOKENS = 3000, 300, 512
QUESTION = "Which operation did the patient have, and who referred her?"


def main() -> None:
    """Measures disguises, times, and the named corpora; by default all of ``benchmarks.defaults``."""
    if sys.argv[1:] in (["time"], ["cpu"]):
        held = json.loads((ROOT / "benchmarks/results/disclosure.json").read_text())["results"]
        counted = _counted() if sys.argv[1] == "time" else {}
        return save("disclosure", held | counted | {"cpu_ms": _times()})
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/casemate-defaults")
    folder.mkdir(parents=True, exist_ok=True)
    given = dict(a.partition("=")[::2] for a in sys.argv[2:] if "=" in a)
    model = given.pop("model", "")
    SIZES.update((name, int(size)) for name, size in given.items())
    about = {"code": code_digest(), "sizes": dict(SIZES), "defense": describe_options(CrawlLimit())}
    saved = "disclosure_reader" if model else "disclosure"
    results = before(saved, about) | ({} if model else _counted() | {"cpu_ms": _times()})
    for name in [a for a in sys.argv[2:] if "=" not in a] or CORPORA:
        found = asyncio.run(_harmless(name, folder, Path(model) if model else None))
        results["corpora"][name] = results["corpora"].get(name, {}) | found
        save(saved, results)


def _counted() -> dict[str, Any]:
    embedder = Kept(ROOT / "build/kept.npz")
    try:
        return {
            "disguises": _disguises(DISGUISES),
            "without_a_decoder": _disguises(UNREADABLE),
            "of_ordinary_words": _disguises(CODED),
            "charged_as_unreadable": {
                "answers of a real model": _charged(_recorded_answers(embedder)),
                **{name: _charged(_other_documents(name)) for name in ("nfcorpus", "squad", "mathqa")},
            },
        }
    finally:
        embedder.save()


def _recorded_answers(embedder: Kept) -> Iterator[tuple[str, Sequence[str], str]]:
    """Question, texts and answer of ``ANSWERS`` recorded exchanges of any attack, in seeded order."""
    answered = [
        (question, answer)
        for row in read_set(RECORDED)[1:]
        for question, answer in zip(row["questions"], row.get("answers", {}).get("off", ()), strict=False)
        if question and answer
    ]
    drawn = [answered[i] for i in np.random.default_rng(SEED).permutation(len(answered))[:ANSWERS]]
    texts = [d.content for d in documents("nfcorpus")]
    scores = embedder.embed([question for question, _ in drawn]) @ embedder.embed(texts).T
    for (question, answer), row in zip(drawn, scores, strict=True):
        yield question, [texts[i] for i in np.argsort(-row)[:5]], answer


def _other_documents(name: str) -> Iterator[tuple[str, Sequence[str], str]]:
    """Documents as answers from a context of five others: fluent text with other words."""
    texts = [d.content for d in documents(name)]
    order = np.random.default_rng(SEED).permutation(len(texts))[: 6 * OTHERS]
    for i in range(0, len(order) - 5, 6):
        *shown, other = (texts[j] for j in order[i : i + 6])
        yield "", shown, other


def _charged(exchanges: Iterable[tuple[str, Sequence[str], str]]) -> dict[str, Any]:
    """Answers that are charged for unreadable words: number, total, share and interval; and the words charged."""
    words = []
    for question, texts, answer in exchanges:
        counter = DisclosureCounter(texts, question)
        counter.read(answer)
        words.append(counter.unreadable_words)
    count = sum(map(bool, words))
    return {
        "answers": [count, len(words), count / len(words), *clopper_pearson(count, len(words))],
        "words": sorted(filter(None, words)),
    }


def _disguises(disguises: Mapping[str, Callable[[str], str]]) -> dict[str, Any]:
    """Mean share of a note's words that is counted, by disguise; at most 1."""
    found = {}
    for name, disguise in disguises.items():
        shares = []
        for i in range(0, 30, 5):
            counter = DisclosureCounter(NOTES[i : i + 5], QUESTION, NOTES[40:45])
            words = counter.read(disguise(NOTES[i + 1]))[1].bit_count() + counter.unreadable_words
            shares.append(min(1.0, words / counter.lengths[1]))
        found[name] = round(float(np.mean(shares)), 3)
    above = [name for name, share in found.items() if share > 0.3]
    return {
        "share": found,
        "above_exposure": [len(above), len(found)],
        "above_exposure_held_out": [len(set(above) & set(HELD_OUT)), len(set(found) & set(HELD_OUT))],
    }


def _times() -> dict[str, Any]:
    """CPU milliseconds (p50, p95) for 200 words and 10 chunks, with 5 texts of the null, and the digest of the code.

    Words are counted while the reader writes the next ones. ``after the last word``: the part that delays the end of
    the answer. Each repetition shuffles the chunks, so that no cache of the context applies, or keeps their order.
    """
    words = " ".join(NOTES[:10]).split()
    answers = {
        "quotes two chunks": " ".join(words[:200]),
        "half from the chunks": " ".join(words[:100] + " ".join(NOTES[30:]).split()[:100]),
        "none of the chunks": " ".join(" ".join(NOTES[30:]).split()[:200]),
    }

    rng = np.random.default_rng(SEED)

    def cpu_ms(answer: str, new: bool) -> tuple[float, float]:
        texts = [NOTES[i] for i in (rng.permutation(10) if new else range(10))]
        *pieces, last = re.findall(r"\s*\S+", answer)
        start = time.process_time()
        counter = DisclosureCounter(texts, QUESTION, NOTES[40:45])
        for piece in pieces:
            counter.add(piece)
        before_last = time.process_time()
        counter.add(last)
        counter.finish()
        end = time.process_time()
        return 1000 * (end - start), 1000 * (end - before_last)

    found: dict[str, Any] = {"code": code_digest()}
    for name, answer in answers.items():
        for new in (True, False):
            spent = np.quantile([cpu_ms(answer, new) for _ in range(300)], (0.5, 0.95), axis=0).round(2).T.tolist()
            label = name + ", the same context again" * (not new)
            found |= {label: spent[0], f"{label}, after the last word": spent[1]}
    return found


async def _harmless(name: str, folder: Path, model: Path | None) -> dict[str, Any]:
    reader = RecordedModel(model, ROOT / f"build/disclosure/{model.stem}-{name}.jsonl.gz", TOKENS) if model else None
    embedder, corpus = Kept(folder / f"{name}.npz"), load(name)
    try:
        with closing(new_index(folder / f"{name}-disclosure.db", embedder)) as index:
            rag = Rag(embedder, index, ExtractiveGenerator())
            await Guard(rag, []).add(corpus.documents)
            return await _limits(corpus, rag, reader)
    finally:
        embedder.save()


async def _limits(corpus: Corpus, rag: Rag, model: RecordedModel | None = None) -> dict[str, Any]:
    """Benign sessions under ``crawl_limit`` by two readers, and with the synthetic questions of the red team.

    With a model, it is the only reader.
    """
    own = [q.text for q in corpus.asked]
    made = generate_questions(corpus.documents, SIZES["questions"], np.random.default_rng(SEED + 4))
    if model and model.model:
        asked = {"": own, ", synthetic questions": made}
        reading = Rag(rag.embedder, rag.index, model)
        await asyncio.gather(*(reading.ask(Query(t, k=K)) for texts in asked.values() for t in texts))
        return {model.model.stem + which: await _under_limit(texts, rag, model) for which, texts in asked.items()}
    return {
        "extractive": await _under_limit(own, rag, ExtractiveGenerator()),
        "simulated_reader": await _under_limit(own, rag, SimulatedReader()),
        "simulated_reader, synthetic questions": await _under_limit(made, rag, SimulatedReader()),
    }


async def _under_limit(texts: Sequence[str], rag: Rag, inner: Generator) -> dict[str, Any]:
    """Sessions in which ``crawl_limit`` raises an alarm or a suspicion, with the test statistic.

    Searches each question once. Documents that Mirabel hides would only reduce the number of words that can be quoted.
    """
    (spec,) = (spec for spec in default_specs() if spec.use == "crawl_limit")
    limit, generator = CrawlLimit(**spec.options), CachedGenerator(inner, ReplyBuffer(), type(inner).__name__)
    limited, rng = limit.on_generate(generator), np.random.default_rng(SEED + 1)
    found = [await rag.retrieve(Query(text, k=4 * K)) for text in texts]
    levels, tests, asked, cut = Counter[str](), Counter[str](), 0, 0
    for client, numbers in sessions(len(texts), SIZES["sessions"], rng):
        for i in numbers:
            query = Query(texts[i], client, k=K)
            outcome = await limit.on_retrieve(query, found[i])
            prompt = rag.prompt(query, replace(outcome.value, hits=outcome.value.hits[:K]))
            answer = await join_stream(limited.stream(prompt))
            asked, cut = asked + 1, cut + (answer != await join_stream(generator.stream(prompt)))
        summary = limit.evidence.summary(Query("", client))
        levels[limit.evidence.level(Query("", client)).value] += 1
        tests.update(test for test, value in summary.items() if test != "chunks" and value > SUSPICION)
    count = SIZES["sessions"]
    return {
        "sessions": count,
        "questions": asked,
        "alarmed": stats.proportion(levels["alarmed"], count),
        "suspected": stats.proportion(levels["suspected"], count),
        "suspected_by": dict(tests),
        "cut_answers": stats.proportion(cut, asked),
    }


if __name__ == "__main__":
    main()
