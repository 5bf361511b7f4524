"""Fits the weights of the refusal detector, ``casemate/text/refusal_weights.json``.

``python -m benchmarks.refusal_fit`` fits a logistic regression on three sources: the development replies, the first two
held-out sets, which became development data, and sentences from ``refusal_templates.yaml``. A refusal counts by its
clause with the highest score, an answer by all its clauses (multiple-instance learning).

``python -m benchmarks.refusal_fit compare`` measures four detectors, each on one of the three sets after fitting on the
others: these weights, words and characters, nearest prototypes of sentence embeddings, and both votes. All three sets
were known when the lexicon and the templates were written, so the results are optimistic. ``benchmarks/refusals.py``
measures the third held-out set.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import yaml
from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline, make_union

from benchmarks import ROOT, read_rows, save
from benchmarks.refusals import load
from casemate.text import refusals
from casemate.text.sentences import sentences

SETS = ("development", "held_out", "held_out_2")
PER_TEMPLATE = 6
TEMPLATE_WEIGHT = 0.3
"""Weight of a sentence from a template; a written reply has weight 1."""
INVERSE_PENALTY = 0.3
LEAST_COUNT = 3
"""Minimum number of clauses with a feature."""
ROUNDS = 3
NEGATION = re.compile(
    r"\b(?:not|no|cannot|unable|never|unknown|neither|without|refused|denied|information|sorry)\b|n't\b"
)
TARGET = ROOT / "src/casemate/text/refusal_weights.json"

Row = dict[str, Any]


def templates(seed: int = 7) -> list[Row]:
    """Sentences from templates: language, refusal, text. English has twice as many."""
    rng = random.Random(seed)
    rows = []
    for language, parts in yaml.safe_load((ROOT / "benchmarks/refusal_templates.yaml").read_text("utf-8")).items():
        for kind in ("refusals", "answers"):
            for template in parts[kind]:
                rows.extend(
                    {
                        "language": language,
                        "refusal": kind == "refusals",
                        "text": _filled(template, parts["slots"][kind], rng),
                    }
                    for _ in range(PER_TEMPLATE * (2 if language == "en" else 1))
                )
    return rows


def _filled(template: str, slots: dict[str, list[str]], rng: random.Random) -> str:
    """Replaces each slot by a random choice, capitalized at the start of the sentence."""

    def choice(match: re.Match[str]) -> str:
        name = match[1]
        if name in slots:
            return rng.choice(slots[name])
        text = rng.choice(slots[name[0].lower() + name[1:]])
        return text[:1].upper() + text[1:]

    text = " ".join(re.sub(r"\{(\w+)\}", choice, template).split()).replace(" .", ".")
    return text[:1].upper() + text[1:]


def sentences_of_squad(half: int) -> list[Row]:
    """Sentences of one half of the SQuAD paragraphs: those with a negation, and an equal number of others."""
    texts = (row["text"] for row in read_rows("squad/corpus.jsonl.gz"))
    found = [s for i, text in enumerate(texts) if i % 2 == half for s in sentences(text) if s[:1].isupper()]
    random.Random(7).shuffle(found)
    negated = [s for s in found if NEGATION.search(s)]
    others = [s for s in found if not NEGATION.search(s)][: len(negated)]
    return [
        {"language": "en", "refusal": False, "negated": i < len(negated), "text": s}
        for i, s in enumerate([*negated, *others])
    ]


def fit(rows: Sequence[Row], weight: Callable[[Row], float]) -> dict[str, float]:
    """Returns weights by feature; the empty name is the intercept."""
    bags = [[refusals.features(clause) for clause in refusals.candidates(row["text"])] for row in rows]
    examples = [(row, bag) for row, bag in zip(rows, bags, strict=True) if bag]
    counts: dict[str, int] = {}
    for _, bag in examples:
        for name in set().union(*bag):
            counts[name] = counts.get(name, 0) + 1
    kept = {name for name, n in counts.items() if n >= LEAST_COUNT}
    weights = {"": 0.0, "NEG": 1.0, "I": 0.1}
    for _ in range(ROUNDS):
        x, y, w = [], [], []
        for row, bag in examples:
            best = max(bag, key=lambda clause: sum(weights.get(name, 0.0) for name in sorted(clause)))
            for clause in [best] if row["refusal"] else bag:
                x.append(dict.fromkeys(sorted(clause & kept), 1.0))
                y.append(row["refusal"])
                w.append(weight(row))
        vectorizer = DictVectorizer()
        model = LogisticRegression(C=INVERSE_PENALTY, max_iter=400).fit(vectorizer.fit_transform(x), y, sample_weight=w)
        weights = dict(zip(vectorizer.feature_names_, model.coef_[0].tolist(), strict=True))
        weights[""] = float(model.intercept_[0])
    return {name: round(value, 2) for name, value in sorted(weights.items()) if abs(value) >= 0.005 or not name}


def fitted(sets: Iterable[str]) -> dict[str, float]:
    """Weights fitted on some of the sets and on the templates."""
    written = [row for name in sets for row in load(name)]
    generated = templates() + sentences_of_squad(0)
    light = {id(row) for row in generated}
    return fit(written + generated, lambda row: TEMPLATE_WEIGHT if id(row) in light else 1.0)


def _figures(rows: Sequence[Row], flagged: Sequence[bool]) -> dict[str, float]:
    hits = sum(row["refusal"] and flag for row, flag in zip(rows, flagged, strict=True))
    return {
        "recall": round(hits / sum(row["refusal"] for row in rows), 3),
        "precision": round(hits / max(sum(flagged), 1), 3),
    }


def compare() -> None:
    """Writes recall and precision of each detector on each set, after fitting on the other sets."""
    from casemate.backends.embedders.minilm import MiniLM

    embedder = MiniLM()
    generated = templates()
    results: dict[str, Any] = {}
    for name in SETS:
        others = [other for other in SETS if other != name]
        rows, train = load(name), [row for other in others for row in load(other)] + generated
        weights = fitted(others)
        refusals._weights = lambda weights=weights: weights  # type: ignore[assignment,misc]
        by_class = [refusals.is_refusal(row["text"]) for row in rows]
        words = make_pipeline(
            make_union(
                TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), min_df=2),
                TfidfVectorizer(ngram_range=(1, 3), min_df=2, token_pattern=r"\w+"),
            ),
            LogisticRegression(C=30, max_iter=500),
        )
        texts, labels = [row["text"] for row in train], np.array([row["refusal"] for row in train])
        by_words = words.fit(texts, labels).predict([row["text"] for row in rows])
        vectors, queries = embedder.embed(texts), embedder.embed([row["text"] for row in rows])
        nearest = np.argsort(-(queries @ vectors.T), axis=1)[:, :7]
        by_prototype = labels[nearest].mean(axis=1) > 0.5
        results[name] = {
            "classes": _figures(rows, by_class),
            "words and characters": _figures(rows, by_words.tolist()),
            "nearest prototypes": _figures(rows, by_prototype.tolist()),
        }
        print(name, results[name])
    save("refusal_fit", results)


def main() -> None:
    """Writes the weights, or compares."""
    if sys.argv[1:] == ["compare"]:
        compare()
        return
    weights = fitted(SETS)
    TARGET.write_text(json.dumps(weights, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")
    print(len(weights), "weights,", TARGET.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
