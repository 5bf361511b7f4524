"""Quorum answers with a real language model: by redundancy, by composition, and by cost.

``python -m benchmarks.quorum_reader FILE.gguf [MINUTES]`` queries the model, and caches its answers under ``build``.
Run it again until every question is answered. It writes complete questions to ``benchmarks/recorded/quorum``, without
texts of a corpus. ``... FILE.gguf pack`` writes them without queries. Without arguments it measures recorded answers.
``... FILE.gguf cost`` compares the time of a plain answer and of isolated answers.

Plain RAG reads ten passages. Quorum reads isolated answers, without poison and with one and two texts of PoisonedRAG.
``compose`` is the product's composition. The others are for comparison:

- ``words``: all released words.
- ``span``: the span of one isolated answer that consists of released words, with the highest total support.
- ``span, pairs``: the same with released word order.
- ``phrase``: the best run of words that m units state as a whole.

``span`` and ``span, pairs`` do not have the quorum's properties: one unit can change the choice. An answer is correct
if it contains a gold answer as whole words.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import DATA, ROOT, SEED, read_rows, save
from benchmarks.kept import Kept, corpus
from benchmarks.real import files
from benchmarks.real.recorded_model import RecordedModel
from benchmarks.redundant import FLOOR, Case, squad, synthetic
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.generators.transformers import CausalLM
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import BackendError
from casemate.guard.defenses.quorum import READ_SENTENCES, Quorum
from casemate.guard.defenses.quorum.isolated import IsolatedAnswers
from casemate.guard.defenses.quorum.keywords import (
    AskedQuestion,
    Pair,
    Sentence,
    Token,
    Word,
    excerpt,
    read_text,
    statements,
)
from casemate.guard.defenses.quorum.release import Release, Thresholds, compose
from casemate.guard.units import group_units, whole
from casemate.maths.metrics import exact_match
from casemate.maths.stats import clopper_pearson
from casemate.protocols import Generator
from casemate.rag.pipeline import INSTRUCTIONS, Rag, join_stream
from casemate.redteam.attacks.poison import Poison
from casemate.types import UNKNOWN, Document, Hit, Prompt, Query, Retrieval, SimilarityStats

WORK = ROOT / "build/quorum_reader"
RECORDED = ROOT / "benchmarks/recorded/quorum"
TOKENS = 32
SUPPORT = (2, 3)
LARGEST = 8
"""Limits: keywords of a unit, and words of a phrase."""
K = 10
PROMPTS = 1
"""Version of the prompts. Change it together with ``isolated.ASK`` or ``INSTRUCTIONS``."""
POISON = (0, 1, 2)
PLAIN = (0,)
"""Numbers of poisoned texts for plain RAG: few, because its contexts are long."""
AT_ONCE, BATCH = 16, 64
"""Number of concurrent questions, and number of answers per generation batch."""
UNITS = 10
COST_UNITS, COST_QUESTIONS = (10, 24), 4
EACH, FACTS, REDUNDANCY = 48, 5, (1, 2, 3, 5, 8, 12, 20)
"""Questions of SQuAD for each bin, facts of the synthetic collection for each r, and the values of r."""
BINS = ((3, 4), (5, 24))


@dataclass(frozen=True)
class Asked:
    """A question with the answers of a reader.

    Attributes:
        corpus: Name of the collection.
        case: The question.
        poison: Number of poisoned texts.
        plain: Answer of plain RAG; None: not asked.
        isolated: Answers from single units; empty: abstained, or not asked.
        unasked: Answers from units without the question's names. The defense does not ask these units.
    """

    corpus: str
    case: Case
    poison: int
    plain: str | None
    isolated: tuple[str, ...]
    unasked: tuple[str, ...] = ()


def main() -> None:
    """Parses the command line."""
    if len(sys.argv) > 2 and sys.argv[2] == "cost":
        save("quorum_cost", asyncio.run(cost(Path(sys.argv[1]))))
        return
    if len(sys.argv) > 1:
        packing = sys.argv[2:] == ["pack"]
        ask(Path(sys.argv[1]), 1e9 if packing or len(sys.argv) < 3 else float(sys.argv[2]), packing)
    results = {}
    for file in sorted(RECORDED.glob("reader_*.jsonl.gz")):
        about, rows = recorded(file)
        found = {"tables": tables(rows), "answered_without_names": answered_without_names(rows)}
        found["stated_by_m_units"] = stated(rows)
        results[file.name.removeprefix("reader_").partition(".jsonl")[0]] = about | found
    save("quorum_reader", results)


def ask(model: Path, minutes: float, packing: bool = False) -> None:
    """Queries the model for some minutes, and writes the complete questions; if packing, only writes."""
    facts = {"prompts": PROMPTS, "seed": SEED, "corpus": "synthetic, squad"}
    reader = RecordedModel(None if packing else model, WORK / f"{model.stem}.jsonl.gz", TOKENS, facts, BATCH)
    began, found = time.monotonic(), []
    with suppress(BackendError):  # packing: the first question without an answer
        for rows in answers(reader):
            found += rows
            spent = time.monotonic() - began
            print(rows[0].corpus, rows[0].case.id, f"{spent:.0f} s, {time.process_time():.0f} CPU-s", flush=True)
            if spent > 60 * minutes:
                break
    about = files.read(reader.file)[0] | {"max_tokens": TOKENS}
    files.write(RECORDED / f"reader_{files.short_name(model)}.jsonl.gz", [about, *map(_packed, found)])


async def cost(model: Path) -> dict[str, Any]:
    """Time of a plain answer over five passages, and of quorum answers of at most 10 and 24 units, on SQuAD.

    ``again``: the same question a second time, from the cache. Passages are whole paragraphs.
    """
    reader = CausalLM(str(model), dtype="bfloat16", max_tokens=TOKENS, batch=max(COST_UNITS))
    await join_stream(reader.stream(Prompt("Is it ready?", (), INSTRUCTIONS)))
    embedder, documents = Kept(ROOT / "build/kept.npz"), corpus("squad")
    vectors = embedder.embed([d.content for d in documents])
    rows = []
    for case in squad(embedder, COST_QUESTIONS // len(BINS), BINS):
        scores = vectors @ embedder.embed([case.question])[0]
        best = np.argsort(-scores, kind="stable")[: 2 * max(COST_UNITS)]
        hits = tuple(Hit(documents[i], float(scores[i])) for i in best)
        found = Retrieval(hits, SimilarityStats(len(documents), 0.0, 0.1), True, frozenset(h.document.id for h in hits))
        plain = Prompt(case.question, tuple(h.document for h in hits[:5]), INSTRUCTIONS)
        row: dict[str, Any] = {"plain": await _timed(join_stream(reader.stream(plain)))}
        for units in COST_UNITS:
            quorum = Quorum(support=2, jitter=1, units=units, writer=reader)
            for name in (f"{units} units", f"{units} units, again"):
                row[name] = await _timed(quorum.on_retrieve(Query(case.question, k=5), found))
        rows.append(row)
        print(row, flush=True)
    total = {name: [sum(row[name][c] for row in rows) for c in (0, 1)] for name in rows[0]}
    ratios = {name: [total[name][c] / total["plain"][c] for c in (0, 1)] for name in total}
    return {"model": model.name, "questions": rows, "wall_and_cpu_seconds": total, "ratio_to_plain": ratios}


async def _timed(work: Awaitable[Any]) -> list[float]:
    """Wall-clock and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    await work
    return [time.perf_counter() - wall, time.process_time() - cpu]


def _packed(row: Asked) -> dict[str, Any]:
    """A row of the recorded file. It identifies questions of SQuAD by id and omits their texts and answers."""
    found = asdict(row)
    if row.corpus == "squad":
        found["case"] |= {"question": "", "answers": []}
    return found


def recorded(file: Path) -> tuple[dict[str, Any], list[Asked]]:
    """Facts about the model, and recorded answers. Rows about SQuAD are skipped if its data are missing."""
    about, *rows = files.read(file)
    known = {r["_id"]: r for r in read_rows("squad/queries.jsonl.gz")} if (DATA / "squad").exists() else {}
    found = []
    for row in rows:
        case = row["case"]
        if row["corpus"] == "squad":
            if case["id"] not in known:
                continue
            case |= {"question": known[case["id"]]["text"], "answers": dict.fromkeys(known[case["id"]]["answers"])}
        row |= {"case": Case(**case | {"answers": tuple(case["answers"])})}
        row |= {what: tuple(row[what]) for what in ("isolated", "unasked")}
        found.append(Asked(**row))
    return about, found


def tables(rows: Sequence[Asked]) -> dict[str, Any]:
    """Correct and false answers by collection, poison, m and composition."""
    found: dict[str, Any] = {}
    for row in rows:
        group = found.setdefault(row.corpus, {}).setdefault(f"poison {row.poison}", {})
        if row.plain is not None:
            _count(group, "plain", row, row.plain)
            _count(group, "some isolated answer", row, " | ".join(row.isolated))
        for m in SUPPORT:
            for name, text in compositions(row, m).items():
                _count(group, f"m={m}, {name}", row, text)
            everyone = replace(row, isolated=(*row.isolated, *row.unasked))
            _count(group, f"m={m}, compose, all units asked", row, compositions(everyone, m)["compose"])
    return {c: {p: {n: _rates(v) for n, v in t.items()} for p, t in group.items()} for c, group in found.items()}


def stated(rows: Sequence[Asked]) -> dict[str, dict[str, list[float]]]:
    """Correct answers without poison where at least m isolated answers are correct, by collection and m."""
    found: dict[str, dict[str, list[float]]] = {}
    for m in SUPPORT:
        for name in sorted({row.corpus for row in rows}):
            clean = [row for row in rows if row.corpus == name and row.plain is not None]
            kept = [r for r in clean if sum(exact_match(text, r.case.answers) for text in r.isolated) >= m]
            said = {"quorum": [compositions(r, m)["compose"] for r in kept], "plain": [r.plain or "" for r in kept]}
            for system, texts in said.items():
                right = sum(exact_match(text, r.case.answers) for text, r in zip(texts, kept, strict=True))
                rates = [right, len(kept), *clopper_pearson(right, len(kept))]
                found.setdefault(f"{name}, m={m}", {})[system] = rates
    return found


def answered_without_names(rows: Sequence[Asked]) -> dict[str, list[float]]:
    """Units without the question's names from which the model gives an answer instead of a refusal, without poison."""
    found: dict[str, list[float]] = {}
    for name in sorted({row.corpus for row in rows}):
        said = [text for row in rows if row.corpus == name and not row.poison for text in row.unasked]
        answered = sum(bool(text) for text in said)
        found[name] = [answered, len(said), *clopper_pearson(answered, len(said))] if said else []
    return found


def _count(group: dict[str, Any], name: str, row: Asked, text: str) -> None:
    false = exact_match(text, [row.case.false])
    group.setdefault(name, []).append((exact_match(text, row.case.answers), false, len(text.split()), row.case.r))


def _rates(values: Sequence[tuple[bool, bool, int, int]]) -> dict[str, Any]:
    right, false, words, redundancy = map(list, zip(*values, strict=True))
    return {
        "right": [sum(right), len(values), *clopper_pearson(sum(right), len(values))],
        "false": [sum(false), len(values), *clopper_pearson(sum(false), len(values))],
        "words": sum(words) / len(values),
        "right_by_r": {
            str(r): [sum(x for x, y in zip(right, redundancy, strict=True) if y == r), redundancy.count(r)]
            for r in sorted(set(redundancy))
        },
    }


def compositions(row: Asked, m: int) -> dict[str, str]:
    """Answers by each composition."""
    question = AskedQuestion.of(row.case.question)
    sentences = [read_text(answer) for answer in row.isolated]
    release = Release.of([statements(question, s, LARGEST) for s in sentences], Thresholds(m))
    released = [item.lemma for item in release.levels if isinstance(item, Word)]
    return {
        "compose": compose(question, release.levels).text,
        "words": " ".join(sorted(released)),
        "span": _span(question, sentences, release, ordered=False),
        "span, pairs": _span(question, sentences, release, ordered=True),
        "phrase": _phrase(question, sentences, m),
    }


def _span(question: AskedQuestion, units: Sequence[Sequence[Sentence]], release: Release, ordered: bool) -> str:
    """The span of released words and words of the question with the highest total support."""
    best: tuple[int, int, str] = (0, 0, UNKNOWN)
    for sentence in (s for unit in units for s in unit):
        for run in _runs(question, sentence, release, ordered):
            new = {t.lemma for t in run if Word(t.lemma) in release.levels}
            if new:
                best = max(best, (sum(release.support[Word(w)] for w in new), -len(run), _written(run)))
    return best[2]


def _runs(question: AskedQuestion, sentence: Sentence, release: Release, ordered: bool) -> Iterator[list[Token]]:
    """Longest runs of adjacent tokens that are released or words of the question."""
    run: list[Token] = []
    for token in sentence.tokens:
        asked = question.repeats(token) or question.contains(token.lemma)
        fits = asked or Word(token.lemma) in release.levels
        joined = not run or not ordered or Pair(run[-1].lemma, token.lemma) in release.levels
        if run and not (fits and joined and not token.breaks):
            yield run
            run = []
        if fits:
            run.append(token)
    if run:
        yield run


def _phrase(question: AskedQuestion, units: Sequence[Sequence[Sentence]], m: int) -> str:
    """The run of tokens that m units state: expected type first, then level, then length."""
    counts: Counter[tuple[str, ...]] = Counter()
    written: dict[tuple[str, ...], str] = {}
    for unit in units:
        runs = {tuple(t.lemma for t in run): _written(run) for s in unit for run in _every_run(s)}
        counts.update(runs.keys())
        written = {**runs, **written}

    def worth(run: tuple[str, ...]) -> tuple[bool, int, int, tuple[str, ...]]:
        new = sum(not question.contains(name) for name in run)
        return bool(question.expects(written[run])), (counts[run] // m).bit_length(), new, run

    released = [r for r, n in counts.items() if n >= m and not all(map(question.contains, r))]
    return written[max(released, key=worth)] if released else UNKNOWN


def _every_run(sentence: Sentence) -> Iterator[Sequence[Token]]:
    tokens = sentence.tokens
    for start in range(len(tokens)):
        for end in range(start + 1, min(start + LARGEST, len(tokens)) + 1):
            if end > start + 1 and tokens[end - 1].breaks:
                break
            yield tokens[start:end]


def _written(run: Sequence[Token]) -> str:
    return " ".join(part for i, t in enumerate(run) for part in (t.before if i else "", t.written) if part)


def answers(reader: Generator) -> Iterator[list[Asked]]:
    """Yields the questions with their answers, ``AT_ONCE`` at a time."""

    async def together(name: str, rag: Rag, cases: Sequence[Case]) -> list[Asked]:
        rows = await asyncio.gather(*(asked(name, rag, case, reader) for case in cases))
        return [row for group in rows for row in group]

    embedder = Kept(ROOT / "build/kept.npz")
    for name, documents, cases in collections(embedder):
        with tempfile.TemporaryDirectory() as folder, closing(SqliteIndex(Path(folder) / "index.db")) as index:
            rag = Rag(embedder, index, ExtractiveGenerator())
            index.add(documents, embedder.embed([d.content for d in documents]))
            for start in range(0, len(cases), AT_ONCE):
                yield asyncio.run(together(name, rag, cases[start : start + AT_ONCE]))


def collections(embedder: Kept) -> Iterator[tuple[str, Sequence[Document], Sequence[Case]]]:
    """Yields both collections with their questions."""
    documents, cases = synthetic(FACTS, REDUNDANCY)
    yield "synthetic", documents, sorted(cases, key=lambda case: case.id.partition("-")[2])  # each r occurs early
    yield "squad", corpus("squad"), squad(embedder, EACH, BINS)


async def asked(name: str, rag: Rag, case: Case, reader: Generator) -> list[Asked]:
    """Asks one question with each number of poisoned texts. They rank first, because each begins with the question."""
    poison = await Poison(texts=max(POISON)).craft(case.question, case.false, np.random.default_rng(SEED))
    hits = (await rag.retrieve(Query(case.question, k=2 * UNITS))).hits
    hits = tuple(hit for hit in hits if hit.score >= FLOOR)
    contexts = [(*(Hit(d, 1.0) for d in poison[:count]), *hits) for count in POISON]
    units = [[whole(unit) for unit in group_units(context)[:UNITS]] for context in contexts]
    question = AskedQuestion.of(case.question)
    every = list({d.text: d for context in units for d in context}.values())
    read = {d.text: excerpt(question, d, READ_SENTENCES) for d in every}
    reads = [tuple(h.document for h in context[:K]) for context in contexts[: len(PLAIN)]]
    prompts = [Prompt(case.question, context, INSTRUCTIONS) for context in reads]
    (said, costs), *plain = await asyncio.gather(
        IsolatedAnswers(reader).ask(case.question, [read[d.text] or d for d in every]),
        *(join_stream(reader.stream(p)) for p in prompts),
    )
    if costs["failed"]:
        raise BackendError(f"{costs['failed']} isolated answers failed; ask again", backend="reader", retryable=True)
    answer = dict(zip((d.text for d in every), said, strict=True))
    named = {text for text, document in read.items() if document is not None}

    def row(count: int, plain: str | None, found: Sequence[Document]) -> Asked:
        isolated = tuple(answer[d.text] if d.text in named else "" for d in found)
        return Asked(name, case, count, plain, isolated, tuple(answer[d.text] for d in found if d.text not in named))

    return [row(*parts) for parts in zip_longest(POISON, plain, units)]


if __name__ == "__main__":
    main()
