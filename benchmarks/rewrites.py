"""Texts rewritten by a real model: synthetic replacements of documents, and counting of paraphrased disclosure.

``python -m benchmarks.rewrites model=FILE [texts=N] [folder]``: paragraphs of SQuAD. The folder caches the model's
answers, so that an interrupted run can be resumed.

*Synthetic replacement* (SAGE, Zeng et al. 2024, arXiv 2406.14773): the model lists the facts of a text, and writes a
new text from the list alone. Results: remaining text (ROUGE-L F1, proper nouns), and remaining utility (questions whose
answer the new text contains). Deviation: the paper's second stage, in which an agent rewrites until it finds no private
detail, is left out. The small model cannot judge this.

*Paraphrase*: the model writes a text in other words. Disclosure is counted by words (``casemate.text.disclosure``) and
by sentences. A sentence of the text is disclosed if its cosine to a sentence of the answer exceeds a threshold. The
threshold is the 99.9 % quantile of the null: cosines of answers to sentences of texts that were not shown. Benign
answers of the extractive generator to the corpus's own questions are counted in the same way.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import DATA, SEED, code_digest, read_rows, save
from benchmarks.kept import Kept
from benchmarks.real.recorded_model import RecordedModel
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.maths import metrics, stats
from casemate.maths.recovery import MIN_ROUGE_L, rouge_l
from casemate.papers.laboratory import relevant
from casemate.protocols import Embedder
from casemate.rag.pipeline import join_stream
from casemate.text.disclosure import DisclosureCounter
from casemate.text.sentences import proper_nouns, sentences
from casemate.types import Document, Prompt

FACTS = "List the facts of this text, one short line for each. Write only the list."
WRITE = "Write a new text from these facts, in your own words. Write only the text."
REWRITE = "Rewrite this text in other words. Change every sentence, and keep all facts. Write only the new text."
TOKENS, UNSEEN, QUANTILE, EXPOSURE = 220, 200, 0.999, 0.3
"""Maximum answer length; texts of the null; its quantile; share of a text above which it counts as disclosed."""


def main() -> None:
    """Generates and measures."""
    given = dict(a.partition("=")[::2] for a in sys.argv[1:] if "=" in a)
    folder = Path(next((a for a in sys.argv[1:] if "=" not in a), "/tmp/casemate-rewrites"))
    folder.mkdir(parents=True, exist_ok=True)
    embedder = Kept(folder / "vectors.npz")
    found = asyncio.run(_measured(folder, given["model"], int(given.get("texts", 12)), embedder))
    embedder.save()
    save("rewrites", {"code": code_digest(), "model": Path(given["model"]).name, **found})


async def _measured(folder: Path, model: str, count: int, embedder: Kept) -> dict[str, Any]:
    rng, writer = np.random.default_rng(SEED), RecordedModel(Path(model), folder / "answers.jsonl.gz", TOKENS)

    async def write(text: str) -> str:
        return await join_stream(writer.stream(Prompt(text, (), "")))

    every = [Document(r["_id"], r["text"]) for r in read_rows("squad/corpus.jsonl.gz")]
    drawn = [every[i] for i in rng.permutation(len(every)) if 60 <= len(every[i].text.split()) <= 120]
    texts, unseen = [d.text for d in drawn[:count]], [d.text for d in drawn[count : count + UNSEEN]]
    asked = _asked([d.id for d in drawn[:count]])
    facts = await asyncio.gather(*(write(f"{FACTS}\n\n{text}") for text in texts))
    synthetic = await asyncio.gather(*(write(f"{WRITE}\n\n{listed}") for listed in facts))
    paraphrases = await asyncio.gather(*(write(f"{REWRITE}\n\n{text}") for text in texts))
    harmless = []
    for number in range(len(texts)):
        for question, _ in asked[number][:3]:
            prompt = Prompt(question, tuple(Document(str(i), t) for i, t in enumerate(texts[number : number + 5])), "")
            harmless.append((number, await join_stream(ExtractiveGenerator(embedder=embedder).stream(prompt))))
    null = _cosines(embedder, " ".join([*paraphrases, *(answer for _, answer in harmless)]), " ".join(unseen)).ravel()
    threshold = float(np.quantile(null, QUANTILE))
    return {
        "texts": len(texts),
        "threshold": threshold,
        "null_cosines": len(null),
        "synthetic": _kept(texts, synthetic, asked),
        "rewritten": _kept(texts, paraphrases, asked),
        "counted": {
            "paraphrases": _counted(embedder, texts, list(enumerate(paraphrases)), unseen, threshold),
            "synthetic": _counted(embedder, texts, list(enumerate(synthetic)), unseen, threshold),
            "harmless": _counted(embedder, texts, harmless, unseen, threshold),
        },
        "cpu_ms_of_an_answer": _cpu_ms(embedder, paraphrases),
    }


def _asked(ids: Sequence[str]) -> list[list[tuple[str, tuple[str, ...]]]]:
    """For each text, its questions with their gold answers."""
    texts = {r["_id"]: (r["text"], tuple(r["answers"])) for r in read_rows("squad/queries.jsonl.gz")}
    by_text: dict[str, list[tuple[str, tuple[str, ...]]]] = {i: [] for i in ids}
    for question, text in relevant(DATA / "squad/qrels.tsv").items():
        if text in by_text and question in texts:
            by_text[text].append(texts[question])
    return [by_text[i] for i in ids]


def _kept(
    texts: Sequence[str], written: Sequence[str], asked: Sequence[Sequence[tuple[str, tuple[str, ...]]]]
) -> Mapping[str, Any]:
    """Remaining words, names and answers of the originals in new texts."""
    overlap = [rouge_l(text, new).f1 for text, new in zip(texts, written, strict=True)]
    names = [(name, new) for text, new in zip(texts, written, strict=True) for name in set(proper_nouns(text))]
    golds = [(golds, new) for new, questions in zip(written, asked, strict=True) for _, golds in questions]
    return {
        "rouge_l_f1": float(np.mean(overlap)),
        "recovered": stats.proportion(sum(f1 > MIN_ROUGE_L for f1 in overlap), len(overlap)),
        "proper_nouns_kept": stats.proportion(sum(name in new for name, new in names), len(names)),
        "answers_kept": stats.proportion(sum(metrics.exact_match(new, g) for g, new in golds), len(golds)),
    }


def _cosines(embedder: Embedder, answer: str, text: str) -> np.ndarray:
    """Cosines of a text's sentences (rows) with an answer's sentences (columns)."""
    own, said = sentences(text), sentences(answer)
    if not own or not said:
        return np.zeros((len(own), 1))
    found: np.ndarray = embedder.embed(own) @ embedder.embed(said).T
    return found


def _counted(
    embedder: Embedder,
    texts: Sequence[str],
    answers: Sequence[tuple[int, str]],
    unseen: Sequence[str],
    threshold: float,
) -> dict[str, Any]:
    """Share of each text that an answer discloses, by words and by sentences, and answers above the threshold."""
    by_words, by_sentences = [], []
    for number, answer in answers:
        counter = DisclosureCounter([texts[number]], "", unseen[:5])
        by_words.append(counter.read(answer)[0].bit_count() / counter.lengths[0])
        by_sentences.append(float((_cosines(embedder, answer, texts[number]).max(axis=1) > threshold).mean()))
    return {
        how: {
            "share": float(np.mean(shares)),
            "above_exposure": stats.proportion(sum(s > EXPOSURE for s in shares), len(shares)),
        }
        for how, shares in (("words", by_words), ("sentences", by_sentences))
    }


def _cpu_ms(embedder: Kept, answers: Sequence[str]) -> float:
    """Median CPU milliseconds to embed the sentences of an answer; the sentences of the texts are embedded before."""
    times = []
    for answer in answers:
        start = time.process_time()
        embedder.inner.embed(sentences(answer))
        times.append(1000 * (time.process_time() - start))
    return float(np.median(times))


if __name__ == "__main__":
    main()
