"""Answer accuracy under differential privacy by redundancy of the documents, with the offline model.

``python -m benchmarks.dp_rag``. Each question asks for one fact of a record; r documents of the context state it, and
the context has no other document. ``as published`` has the settings of DP-RAG's code, which Mirabel's authors adopted.
``sharper`` has a temperature of .02, and equal weight for the model without documents. Exact match with the correct
answer, 24 tokens, delta .001. Texts are synthetic and the model is tiny: the figures show relations, not the level of a
large model.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import ROOT, SEED, save
from benchmarks.cascade import _said
from casemate.backends.generators.transformers import CausalLM
from casemate.guard.defenses.dp_rag import DPRAG
from casemate.maths import stats
from casemate.papers.synthetic_records import Record, records
from casemate.protocols import Generator
from casemate.types import Document

COUNT = 30
AGREEING = (1, 3, 5, 10, 20, 60)
SETTINGS: dict[str, dict[str, float]] = {
    "as published": {"temperature": 1.0, "public": 0.01},
    "sharper": {"temperature": 0.02, "public": 0.02},
}


def main() -> None:
    """Measures and saves."""
    import torch

    torch.set_num_threads(1)
    model = CausalLM(str(ROOT / "models/reference"), device="cpu", max_tokens=60)
    asked = records(COUNT, SEED)
    found: dict[str, Any] = {"no guard": _judged(model, asked)}
    for epsilon in (2.0, 100.0):
        for name, options in SETTINGS.items():
            defense = DPRAG(model=model, epsilon=epsilon, tokens=24, seed=SEED, **options)  # type: ignore[arg-type]
            found[f"epsilon {epsilon:g}, {name}"] = _judged(defense.on_generate(model), asked)
            print(epsilon, name, found[f"epsilon {epsilon:g}, {name}"], file=sys.stderr)
    save("dp_rag", {"documents_that_say_the_same": AGREEING, **found})


def _judged(generator: Generator, asked: list[Record]) -> dict[str, Any]:
    """Exact match by the number of documents that state the fact.

    The bare model reads at most five: its training limit.
    """
    found = {}
    for count in AGREEING if not isinstance(generator, CausalLM) else AGREEING[:3]:
        right = 0
        for i, record in enumerate(asked):
            question, gold = record.asked(i % len(record.facts))
            documents = [Document(f"{record.name} {n}", gold) for n in range(count)]
            right += _said(generator, question, documents) == gold
        found[str(count)] = stats.proportion(right, len(asked))
    return found


if __name__ == "__main__":
    main()
