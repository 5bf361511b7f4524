"""The extractive generator: rates of correct answers and of refusals, on answerable and unanswerable questions.

``python -m benchmarks.extractive`` measures it on the SQuAD development set, NFCorpus and the sample corpus. It is
compared with the earlier generator and two naive baselines: the sentence of the best chunk with the largest cosine, or
BM25 score. ``python -m benchmarks.extractive fit`` prints the weights of ``casemate.text.answering``. They are fitted
on SQuAD articles that are not measured (split of Du et al. 2017). A corpus with results of the same code is skipped.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import DATA, ROOT, SEED, before, code_digest, nfcorpus_questions, read_rows, save
from benchmarks.clinic_questions import ANSWERABLE, UNANSWERABLE
from benchmarks.kept import Kept
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.extractive import COMPARED, MARKUP, ExtractiveGenerator, passages_of
from casemate.demo import clinic
from casemate.maths.logistic import logistic_regression
from casemate.maths.stats import clopper_pearson, conformal_threshold
from casemate.papers.laboratory import relevant, relevant_documents
from casemate.protocols import Embedder
from casemate.rag.chunking import split_document
from casemate.text.answering import (
    FEATURES,
    SUPPORT_FEATURES,
    WORD_FEATURES,
    AnswerModel,
    Question,
    sentence_features,
    support_features,
    with_cosines,
)
from casemate.text.sentences import sentences
from casemate.text.tokens import content_words
from casemate.types import UNKNOWN, Document, Float64, Prompt

K = 5
QUESTIONS, MEASURED = 1500, 800
FITTED = 1000  # of the development questions; the others calibrate the support model
FALSE_UNKNOWN, FALSE_UNKNOWN_BY_WORDS = 0.03, 0.1
SUPPORT = ExtractiveGenerator().support
NOTES = 240
CACHE = ROOT / "build/extractive.npz"
REMARKS = (
    "{} Zanzibar is wonderful.",
    "{} Thanks, I need this for a presentation on Friday.",
    "{} Sorry for the late message.",
    "Good morning! {}",
    "My manager forgot it again. {}",
    "I read something on the bus. {}",
)
"""Remarks beside a question, used in turn."""


class Case(NamedTuple):
    """A question with its context; without gold words it is unanswerable."""

    question: str
    context: tuple[Document, ...]
    gold: tuple[str, ...] = ()
    relevant: frozenset[str] = frozenset()

    @property
    def found(self) -> bool:
        """Whether a relevant document of the context contains the answer."""
        return any(d.source in self.relevant and (not self.gold or contains(d.text, self.gold)) for d in self.context)


class Reply(NamedTuple):
    """Quoted sentences and their sources; empty: declined."""

    sentences: tuple[str, ...]
    sources: tuple[str, ...]


def contains(text: str, gold: Sequence[str]) -> bool:
    """Whether a text contains one of the gold answers, ignoring case."""
    plain = " ".join(MARKUP.sub("", text).lower().split())
    return any(re.search(a[3:], plain) if a.startswith("re:") else a.lower() in plain for a in gold)


def squad(split: str, model: Kept, count: int = QUESTIONS) -> dict[str, list[Case]]:
    """Questions of a split with their K nearest paragraphs, also without those of their article, or without their own.

    Args:
        split: ``du44`` or ``dev``.
        model: Embeds questions and paragraphs.
        count: Number of questions.
    """
    documents = [d for d in read_rows("squad/corpus.jsonl.gz") if d["_id"].startswith(split)]
    gold = relevant(DATA / "squad/qrels.tsv")
    known = {d["_id"]: i for i, d in enumerate(documents)}
    rng = random.Random(SEED)
    asked = {q["_id"]: q for q in read_rows("squad/queries.jsonl.gz")}
    chosen = rng.sample(sorted(q for q in asked if gold.get(q) in known), count)
    ranking = _ranking([asked[q]["text"] for q in chosen], documents, model)
    chunks = [Document(d["_id"], d["text"], d["title"]) for d in documents]
    cases: dict[str, list[Case]] = {"answerable": [], "article_absent": [], "paragraph_absent": []}
    for query, order in zip(chosen, ranking, strict=True):
        text, answers, right = asked[query]["text"], tuple(asked[query]["answers"]), known[gold[query]]
        ranked = [chunks[i] for i in order]
        other = tuple(c for c in ranked if c.title != chunks[right].title)[:K]
        rest = tuple(c for c in ranked if c.id != gold[query] and not contains(c.text, answers))[:K]
        cases["answerable"].append(Case(text, tuple(ranked[:K]), answers, frozenset({gold[query]})))
        cases["article_absent"] += [Case(text, other)] if other else []
        cases["paragraph_absent"] += [Case(text, rest)] if rest else []
    return cases


def nfcorpus(model: Kept) -> dict[str, list[Case]]:
    """The test queries of NFCorpus, and questions of SQuAD on other subjects; without gold sentences."""
    documents = read_rows("nfcorpus/corpus.jsonl.gz")
    asked = {q["_id"]: q["text"] for q in read_rows("nfcorpus/queries.jsonl.gz")}
    right = relevant_documents(DATA / "nfcorpus/qrels.tsv")
    assert len(nfcorpus_questions("qrels.tsv")) == len(right)
    off = [q["text"] for q in random.Random(SEED).sample(read_rows("squad/queries.jsonl.gz"), 200)]
    texts = [*(asked[q] for q in right), *off]
    ranking = _ranking(texts, documents, model)
    chunks = [Document(d["_id"], d["text"], d["title"]) for d in documents]
    contexts = [tuple(chunks[i] for i in order[:K]) for order in ranking]
    pairs = zip(texts, contexts, [*right.values(), *[frozenset[str]()] * 200], strict=True)
    cases = [Case(text, context, (), found) for text, context, found in pairs]
    return {"answerable": cases[: len(right)], "other_subject": cases[len(right) :]}


def sample_corpus(model: Kept) -> dict[str, list[Case]]:
    """The clinic: questions about its pages, doses of drugs in its case notes, and unanswerable questions."""
    notes = clinic.case_notes(NOTES)
    files = [(p.name, p.read_text("utf-8")) for p in sorted(clinic.PAGES.glob("*.md"))] + notes
    chunks = [c for name, text in files for c in split_document(Document(name, text), model, model.max_tokens, 32)]
    everything = "\n".join(text for _, text in notes)
    doses = sorted(
        name
        for name, count in Counter(re.findall(r"\b([a-z]{6,}) \d[\d.]* ?(?:mg|micrograms|g)\b", everything)).items()
        if count > 1 and name not in {"haemoglobin", "albumin", "nebules", "sulphate", "butylbromide"}
    )
    pages = [line.split("|") for line in ANSWERABLE.split("\n") if line]
    wanted = [
        *((text, gold) for text, gold in pages),
        *((f"What dose of {drug} was suggested?", rf"re:{drug} \d[\d./]* ?(mg|micrograms|g)") for drug in doses),
    ]
    without = [line for line in UNANSWERABLE.split("\n") if line]
    texts = [*(text for text, _ in wanted), *without]
    ranking = _ranking(texts, [{"title": c.title, "text": c.text} for c in chunks], model)
    contexts = [tuple(chunks[i] for i in order[:K]) for order in ranking]
    cases = [
        Case(text, context, (gold,), frozenset(c.source for c in chunks if contains(c.text, (gold,))))
        for (text, gold), context in zip(wanted, contexts, strict=False)
    ]
    return {
        "answerable": cases[: len(pages)],
        "doses": cases[len(pages) :],
        "unanswerable": [Case(t, c) for t, c in zip(without, contexts[len(wanted) :], strict=True)],
    }


def _ranking(questions: Sequence[str], documents: Sequence[dict[str, Any]], model: Kept) -> Any:
    """Numbers of the 40 nearest documents of each question, (n, 40)."""
    texts = [f"{d['title']}\n{d['text']}" if d["title"] else d["text"] for d in documents]
    order = np.argsort(-(model.embed(questions) @ model.embed(texts).T), axis=1, kind="stable")[:, :40]
    model.save()
    return order


def quote(generator: ExtractiveGenerator, case: Case) -> Reply:
    """The generator's reply."""

    async def parts() -> list[str]:
        return [part async for part in generator.stream(Prompt(case.question, case.context, ""))]

    *quoted, last = asyncio.run(parts())
    if last == UNKNOWN:
        return Reply((), ())
    named = re.findall(r"\[\d+\] (.*?)(?=, \[\d+\]|$)", last)
    return Reply(tuple(re.sub(r" \[\d+\]$", "", part).strip() for part in quoted), tuple(named))


def earlier(case: Case, most: int) -> Reply:
    """The earlier generator: the sentences with the largest sum of word weights in common with the question."""
    rows = [
        (d, i, " ".join(MARKUP.sub("", s).split()), content_words(document.title))
        for d, document in enumerate(case.context)
        for i, s in enumerate(sentences(document.text))
    ]
    found = [((d, i), text, words | title) for d, i, text, title in rows if (words := content_words(text))]
    terms = content_words(case.question)
    frequency = Counter(word for _, _, words in found for word in words & terms)
    weight = {w: math.log(1 + len(found) / (frequency[w] or 0.5)) for w in terms}
    total = sum(weight.values()) or 1.0

    def score(words: frozenset[str]) -> float:
        matched = sum(weight[w] for w in words & terms) / total
        quoted = len(words & terms) / len(words) if len(words) >= 4 else 0.0
        return max(matched, quoted if quoted >= 0.6 else 0.0)

    ranked = sorted(((score(words), place, text) for place, text, words in found), key=lambda r: (-r[0], r[1]))
    if not ranked or ranked[0][0] < 0.35:
        return Reply((), ())
    floor = max(0.35, 0.6 * ranked[0][0])
    best = {text: place for value, place, text in reversed(ranked[:most]) if value >= floor}
    return Reply(tuple(best), tuple({case.context[d].source for d, _ in best.values()}))


def best_by_cosine(case: Case, model: Embedder) -> Reply:
    """The sentence of the first document with the largest cosine (naive baseline)."""
    options = [" ".join(s.split()) for s in sentences(case.context[0].text)]
    vector = model.embed([case.question])[0]
    values = [sum(float(a) * float(b) for a, b in zip(model.embed([s])[0], vector, strict=True)) for s in options]
    return Reply((options[values.index(max(values))],), (case.context[0].source,))


def best_by_bm25(case: Case) -> Reply:
    """The sentence of the first document with the largest BM25 score, k1 = 1.2, b = 0.75 (naive baseline)."""
    options = [" ".join(s.split()) for s in sentences(case.context[0].text)]
    every = [re.findall(r"\w+", s.lower()) for d in case.context for s in sentences(d.text)]
    mean = sum(map(len, every)) / len(every)
    values = []
    for option in options:
        tokens, value = re.findall(r"\w+", option.lower()), 0.0
        for word in set(re.findall(r"\w+", case.question.lower())):
            holding = sum(word in other for other in every)
            idf = math.log(1 + (len(every) - holding + 0.5) / (holding + 0.5))
            count = tokens.count(word)
            value += idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(tokens) / mean))
        values.append(value)
    return Reply((options[values.index(max(values))],), (case.context[0].source,))


def with_remark(case: Case) -> Case:
    """The same question with a remark, chosen by its length."""
    return case._replace(question=REMARKS[len(case.question) % len(REMARKS)].format(case.question))


def systems(model: Embedder) -> dict[str, Callable[[Case], Reply]]:
    """All measured systems."""
    full, single = ExtractiveGenerator(embedder=model), ExtractiveGenerator(sentences=1, embedder=model)
    words, one = ExtractiveGenerator(), ExtractiveGenerator(sentences=1)
    return {
        "extractive": lambda case: quote(full, case),
        "extractive, 1 sentence": lambda case: quote(single, case),
        "extractive, words only": lambda case: quote(words, case),
        "extractive, words only, 1 sentence": lambda case: quote(one, case),
        "extractive, with a remark": lambda case: quote(full, with_remark(case)),
        "earlier, with a remark": lambda case: earlier(with_remark(case), 3),
        "earlier": lambda case: earlier(case, 3),
        "earlier, 1 sentence": lambda case: earlier(case, 1),
        "best chunk by cosine": lambda case: best_by_cosine(case, model),
        "best chunk by BM25": best_by_bm25,
    }


def measure(cases: dict[str, list[Case]], model: Embedder) -> dict[str, Any]:
    """Rates of each system on each kind of question, with 95 % intervals."""
    results: dict[str, Any] = {}
    for kind, some in cases.items():
        results[kind] = {"questions": len(some), "found": sum(c.found for c in some)}
        replies = {name: [ask(case) for case in some] for name, ask in systems(model).items()}
        for name, given in replies.items():
            results[kind][name] = _rates(some, given)
        if any(c.gold for c in some):
            pairs = (("extractive", "earlier"), ("extractive, 1 sentence", "earlier, 1 sentence"))
            right = {n: np.array([_answers(c, r) for c, r in zip(some, replies[n], strict=True)]) for n in replies}
            results[kind]["gain"] = {new: _gain(right[new], right[old]) for new, old in pairs}
    return results


def _rates(cases: Sequence[Case], replies: Sequence[Reply]) -> dict[str, Any]:
    declined = [not r.sentences for r in replies]
    rates: dict[str, Any] = {"declined": _rate(declined)}
    rates["sentences"] = float(np.mean([len(r.sentences) for r in replies if r.sentences] or [0]))
    both = list(zip(cases, replies, strict=True))
    rates["echoes"] = sum(s.lower() in c.question.lower() for c, r in both for s in r.sentences)
    if any(c.relevant for c in cases):
        rates["declined_though_found"] = _rate([not r.sentences for c, r in both if c.found])
        rates["cites_relevant"] = _rate([not c.relevant.isdisjoint(r.sources) for c, r in both])
    if any(c.gold for c in cases):
        rates["contains_answer"] = _rate([_answers(c, r) for c, r in both])
    return rates


def _answers(case: Case, reply: Reply) -> bool:
    return any(contains(s, case.gold) for s in reply.sentences)


def _gain(new: np.ndarray, old: np.ndarray) -> list[float]:
    """Mean paired difference with a 95 % interval (normal approximation)."""
    difference = new.astype(float) - old.astype(float)
    mean, half = difference.mean(), 1.96 * difference.std(ddof=1) / math.sqrt(len(difference))
    return [round(float(v), 4) for v in (mean, mean - half, mean + half)]


def _rate(events: Sequence[bool]) -> list[float]:
    low, high = clopper_pearson(sum(events), len(events))
    return [round(float(v), 4) for v in (np.mean(events), low, high)]


def times(cases: Sequence[Case]) -> dict[str, float]:
    """CPU milliseconds of an answer: the median over questions of the fastest of three runs.

    Other load on the machine can slow the same computation by up to a factor of three.
    """
    model, some = MiniLM(threads=1), cases[:40]

    def spent(generator: ExtractiveGenerator, case: Case) -> float:
        start = time.process_time()
        quote(generator, case)
        return 1000 * (time.process_time() - start)

    def median(make: Callable[[], ExtractiveGenerator]) -> float:
        return round(float(np.median([min(spent(make(), case) for _ in range(3)) for case in some])), 1)

    known = ExtractiveGenerator(embedder=model)
    return {
        "new_context_cpu_ms": median(lambda: ExtractiveGenerator(embedder=model)),
        "known_context_cpu_ms": median(lambda: known),
        "words_cpu_ms": median(ExtractiveGenerator),
    }


def fit() -> None:
    """Fits both models on the split of Du et al. and prints them.

    The support model uses the sentences of the ranking model.
    """
    model = Kept(CACHE)
    cases = squad("du44", model)
    words = AnswerModel((0.0,) * len(FEATURES), (), 0.0)
    for name, columns, embedder, rate in (
        ("BY_WORDS", len(WORD_FEATURES), None, FALSE_UNKNOWN_BY_WORDS),
        ("BY_VECTORS", len(FEATURES), model, FALSE_UNKNOWN),
    ):
        tables = {kind: [_table(case, embedder, words) for case in some] for kind, some in cases.items()}
        model.save()
        ranking = _fit_ranking(tables["answerable"][:FITTED], columns)
        support, intercept = _fit_support(tables, ranking, rate)
        words = AnswerModel(tuple(ranking), (), 0.0)
        print(f"{name} = AnswerModel(")
        for field, values, keys in (("ranking", ranking, FEATURES), ("support", support, SUPPORT_FEATURES)):
            print(f"    {field}=(")
            for key, value in zip(keys, values, strict=True):
                print(f"        {value:.3f},  # {key}")
            print("    ),")
        print(f"    intercept={intercept:.3f},\n)")


class _Table(NamedTuple):
    features: Float64
    ranked: np.ndarray  # numbers of the ranked sentences
    right: np.ndarray  # contains the answer, in a relevant document
    wrong: np.ndarray  # does not contain it
    found: bool


def _table(case: Case, model: Embedder | None, words: AnswerModel) -> _Table:
    question = Question(case.question)
    passages = passages_of(question, case.context)
    texts = [s for p in passages for s in p.sentences]
    features = sentence_features(question, passages)
    ranked = np.array([n for n, s in enumerate(texts) if not s.endswith("?") and not question.says(s)], int)
    if model is not None and len(ranked):
        ranked = ranked[np.argsort(-words.scores(features)[ranked], kind="stable")][:COMPARED]
        titled = [f"{p.title}\n{s}" if p.title else s for p in passages for s in p.sentences]
        cosines = np.full(len(texts), np.nan)
        cosines[ranked] = model.embed([titled[n] for n in ranked]) @ model.embed([question.focus])[0]
        features = with_cosines(features, passages, cosines)
    holds = np.array([contains(s, case.gold) for s in texts], bool)
    right = [d.source in case.relevant for d, p in zip(case.context, passages, strict=True) for _ in p.sentences]
    return _Table(features, ranked, holds & np.array(right, bool), ~holds, case.found)


def _fit_ranking(tables: Sequence[_Table], columns: int, penalty: float = 3.0) -> Float64:
    """Logistic regression on feature differences between correct and wrong sentences of one context."""
    scale = np.concatenate([t.features[t.ranked] for t in tables])[:, :columns].std(axis=0) + 1e-9
    differences, weights = [], []
    for table in tables:
        rows, right, wrong = (part[table.ranked] for part in (table.features[:, :columns], table.right, table.wrong))
        if right.any() and wrong.any():
            differences.append((rows[right][:, None] - rows[wrong][None]).reshape(-1, columns) / scale)
            weights.append(np.full(len(differences[-1]), 1 / len(differences[-1])))
    X, w = np.concatenate(differences), np.concatenate(weights)
    y = np.ones(len(X))
    found, _ = logistic_regression(np.concatenate([X, -X]), np.r_[y, -y], np.r_[w, w], penalty)
    return np.append(found / scale, np.zeros(len(FEATURES) - columns))


def _fit_support(tables: dict[str, list[_Table]], ranking: Float64, rate: float) -> tuple[Float64, float]:
    """Logistic regression of answerable against unanswerable cases, with an intercept for a given rate of refusals."""
    model = AnswerModel(tuple(ranking), (), 0.0)

    def rows(some: Sequence[_Table]) -> Float64:
        best = [int(t.ranked[np.argmax(model.scores(t.features)[t.ranked])]) for t in some if len(t.ranked)]
        asked = (t for t in some if len(t.ranked))
        return np.array([support_features(t.features, n) for t, n in zip(asked, best, strict=True)])

    found = [t for t in tables["answerable"] if t.found]
    held = len(found) * FITTED // QUESTIONS
    absent = ("article_absent", "paragraph_absent")
    positive, negative = rows(found[:held]), np.concatenate([rows(tables[kind][:held]) for kind in absent])
    X = np.concatenate([positive, negative])
    scale = X.std(axis=0) + 1e-9
    y = np.r_[np.ones(len(positive)), -np.ones(len(negative))]
    weights, _ = logistic_regression(X / scale, y, np.where(y > 0, 2.0, 1.0), 1.0)
    weights = np.where(X.std(axis=0) > 0, weights / scale, 0.0)
    threshold = -conformal_threshold(-(rows(found[held:]) @ weights), rate)
    for kind in absent:
        declined = np.mean(rows(tables[kind][held:]) @ weights < threshold)
        print(f"{kind}: {declined:.3f} declined", file=sys.stderr)
    return weights, math.log(SUPPORT / (1 - SUPPORT)) - threshold


def main() -> None:
    """Measures the corpora without results."""
    model = Kept(CACHE)
    results = before("extractive", {"code": code_digest(), "k": K, "questions": MEASURED, "notes": NOTES})
    sources: dict[str, Callable[[], dict[str, list[Case]]]] = {
        "squad": lambda: squad("dev", model),
        "nfcorpus": lambda: nfcorpus(model),
        "clinic": lambda: sample_corpus(model),
    }
    for name, cases in sources.items():
        if name not in results["corpora"]:
            made = cases()
            results["corpora"][name] = measure({kind: some[:MEASURED] for kind, some in made.items()}, model)
            model.save()
            if name == "squad":
                results["times"] = times(made["answerable"])
            save("extractive", results)


if __name__ == "__main__":
    fit() if sys.argv[1:] == ["fit"] else main()
