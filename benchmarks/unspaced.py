"""Scripts without spaces, on synthetic texts: quorum answers by redundancy, and benign answers under ``crawl_limit``.

Quorum: r documents state each fact in varied wording. Further documents state another value for each other name. No
embedder is needed: all documents reach the similarity floor.

``crawl_limit``: chunks of ten sentences, one question per chunk, with default options. The context is the five chunks
with most words of the question. The reader is **simulated**, and each client asks ten questions. ``python -m
benchmarks.unspaced``.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from benchmarks import SEED, save
from benchmarks.unspaced_texts import LANGUAGES, Fact, Language
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.defenses.quorum import Quorum
from casemate.maths.stats import clopper_pearson
from casemate.rag.pipeline import join_stream
from casemate.text.tokens import content_words
from casemate.types import UNKNOWN, Document, Hit, Prompt, Query, Retrieval, SimilarityStats

REDUNDANCY, SUPPORTS = (1, 2, 3, 5, 8), (2, 3)


def main() -> None:
    """Measures all languages and writes the figures."""
    found = {
        language: {f"m={m}": {str(r): _measured(texts, m, r) for r in REDUNDANCY} for m in SUPPORTS}
        for language, texts in LANGUAGES.items()
    }
    crawl = {language: asyncio.run(_benign(texts)) for language, texts in LANGUAGES.items()}
    save("unspaced", {"quorum": found, "crawl_limit": crawl})


def _measured(texts: Language, m: int, r: int) -> dict[str, Any]:
    rng, right, wrong, short, times = np.random.default_rng(SEED), 0, 0, 0, list[float]()
    asked = [(fact, name) for name in texts.names for fact in texts.facts]
    for fact, name in asked:
        value = str(rng.choice(fact.values))
        documents = _collection(texts, fact, name, value, r, rng)
        began = time.process_time()
        said = _answer(documents, fact.question.format(n=name), m)
        times.append(1000 * (time.process_time() - began))
        phrases = [] if said == UNKNOWN else said.removesuffix(".").split("; ")
        right += _core(value) in _plain(said)
        wrong += any(_core(other) in _plain(said) for other in fact.values if other != value)
        short += sum(sum(phrase in text for text in documents) < m for phrase in phrases)
    n = len(asked)
    return {
        "right": [right, n, *clopper_pearson(right, n)],
        "other_value": [wrong, n, *clopper_pearson(wrong, n)],
        "phrases_of_fewer_units": short,
        "ms": [float(np.median(times)), float(np.percentile(times, 95))],
    }


def _collection(texts: Language, fact: Fact, name: str, value: str, r: int, rng: np.random.Generator) -> list[str]:
    """``r`` documents with the value, and one about each other name with another value."""
    others = [v for v in fact.values if v != value]
    found = texts.documents(fact, name, value, r, rng)
    for other in texts.names:
        if other != name:
            found += texts.documents(fact, other, str(rng.choice(others)), 1, rng)
    return found


def _answer(documents: list[str], question: str, m: int) -> str:
    hits = tuple(Hit(Document(f"d{i}", text), 0.8 - i / 1000) for i, text in enumerate(documents))
    given = Retrieval(hits, SimilarityStats(100, 0.0, 0.1), True, frozenset(hit.document.id for hit in hits))
    outcome = asyncio.run(Quorum(support=m, jitter=1).on_retrieve(Query(question), given))
    return outcome.value.hits[0].document.text


def _plain(text: str) -> str:
    return text.replace(" ", "")


def _core(value: str) -> str:
    """A value without its unit, which the question may contain."""
    plain = _plain(value).strip("年ปีพ.ศ元円")
    return plain.removesuffix("บาท").removesuffix("ໂມງ")


async def _benign(texts: Language) -> dict[str, Any]:
    """Benign answers that ``crawl_limit`` changes, and the share of a chunk that answers quote."""
    rng, limit, changed = np.random.default_rng(SEED), CrawlLimit(), 0
    documents, questions, shares = list[Document](), list[str](), list[float]()
    for name in texts.names:
        for fact in texts.facts:
            stated = fact.statements[0].format(n=name, v=str(rng.choice(fact.values)))
            documents.append(Document(f"d{len(documents)}", texts.document(stated, 9, rng)))
            questions.append(fact.question.format(n=name))
    for i, question in enumerate(questions):
        asked = content_words(question)
        near = sorted(documents, key=lambda document: -len(asked & content_words(document.text)))[:5]
        plain, limited = await _answers(limit, Query(question, f"client{i // 10}", k=5), near)
        changed += plain != limited
        shares.append(len(plain) / len(near[0].text))
    n = len(questions)
    return {"changed": [changed, n, *clopper_pearson(changed, n)], "answer_by_chunk": float(np.mean(shares))}


async def _answers(limit: CrawlLimit, query: Query, documents: list[Document]) -> tuple[str, str]:
    """The answer of the simulated reader without and with the limit."""
    reader, hits = SimulatedReader(), tuple(Hit(d, 0.8 - i / 100) for i, d in enumerate(documents))
    limit.sync()
    outcome = await limit.on_retrieve(query, Retrieval(hits, SimilarityStats(100, 0.0, 0.1), exhausted=True))
    shown = tuple(hit.document for hit in outcome.value.hits[: query.k])
    plain = await join_stream(reader.stream(Prompt(query.text, tuple(documents), "", query.id)))
    limited = limit.on_generate(reader).stream(Prompt(query.text, shown, "", query.id))
    return plain, await join_stream(limited)


if __name__ == "__main__":
    main()
