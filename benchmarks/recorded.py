"""The guard on recorded questions to a real language model (Naseh et al. 2025, Llama-3-8B, NFCorpus).

The recording contains the model's answers with the document in the context. If the guard withholds the document, the
model would have answered differently. This answer is replaced by that of a random non-member, whose document was
absent. So all answers are real, but the replacement is **simulated**.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

from benchmarks import SEED, nfcorpus_app, nfcorpus_questions, read_rows, save
from casemate.maths import metrics, stats
from casemate.protocols import MembershipAttack
from casemate.redteam.attacks.direct import Direct
from casemate.redteam.attacks.interrogation import Interrogation, yes_no_answer
from casemate.redteam.attacks.s2mia import S2MIA
from casemate.system import App
from casemate.types import Document, Probe, Query, Reply

FILES: dict[str, tuple[str, MembershipAttack]] = {
    "interrogation": ("ia_llama3_8b_top15", Interrogation()),
    "s2mia": ("s2mia", S2MIA()),
    "direct": ("direct_rag_mia", Direct()),
}


def main() -> None:
    """Asks the recorded questions, one client per document."""
    rows = {name: read_rows(f"mia_riddle/nfcorpus_{file}.jsonl.gz") for name, (file, _) in FILES.items()}
    out = {row["_id"] for row in rows["s2mia"] if row["mem"] == "no"}
    with nfcorpus_app(out, nfcorpus_questions("qrels.dev.tsv")) as app:
        results = {name: _judge(app, name, rows[name]) for name in FILES}
    save("recorded", results)


def _judge(app: App, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    attack = FILES[name][1]
    attack.study([row["text"] for row in rows])
    rng = np.random.default_rng(SEED)
    others = [row for row in rows if row["mem"] == "no"]
    before: dict[str, list[float]] = {"yes": [], "no": []}
    after: dict[str, list[float]] = {"yes": [], "no": []}
    hidden_questions = hidden_documents = asked = 0
    for row in rows:
        hidden = _hidden(app, name, row) if row["mem"] == "yes" else [False] * len(row["questions"])
        stand_in = others[int(rng.integers(len(others)))]
        asked += len(hidden) if row["mem"] == "yes" else 0
        hidden_questions += sum(hidden)
        hidden_documents += any(hidden)
        before[row["mem"]].append(_score(attack, row, row, [False] * len(hidden)))
        after[row["mem"]].append(_score(attack, row, stand_in, hidden))
        print(".", end="", file=sys.stderr, flush=True)
    members = len(before["yes"])
    return {
        "auc_recorded": stats.bootstrap(metrics.auc, before["yes"], before["no"], SEED),
        "auc_with_the_guard": stats.bootstrap(metrics.auc, after["yes"], after["no"], SEED),
        "withheld_of_questions": stats.proportion(hidden_questions, asked),
        "withheld_of_documents": stats.proportion(hidden_documents, members),
        "members": members,
        "nonmembers": len(before["no"]),
    }


def _hidden(app: App, name: str, row: dict[str, Any]) -> list[bool]:
    """For each question about a member, whether the guard withholds its document."""
    found = []
    for question in row["questions"]:
        query = Query(question, f"{name}:{row['_id']}", k=3)
        _, verdicts = asyncio.run(app.guard.retrieve(query))
        found.append(any(row["_id"] in v.evidence.get("withheld", ()) for v in verdicts))
    return found


def _score(attack: MembershipAttack, row: dict[str, Any], stand_in: dict[str, Any], hidden: list[bool]) -> float:
    """The attack's score, with the reply about another document in place of every withheld one.

    For yes/no questions, the replacement is compared with the truths of its own document: only correctness counts.
    """
    pairs = zip(row["llm_responses"], stand_in["llm_responses"], hidden, strict=False)
    replies = [Reply(other if h else own) for own, other, h in pairs]
    key: dict[str, Any] = {}
    if "answers" in row:
        truths = zip(row["answers"], stand_in["answers"], hidden, strict=False)
        key = {"truth": [yes_no_answer(other if h else own) for own, other, h in truths]}
    text = stand_in if hidden == [True] and not key else row  # the replacement describes its own text
    candidate = Document(text["_id"], text["text"], text["title"])
    probe = Probe(tuple(row["questions"][: len(replies)]), key)
    return asyncio.run(attack.measure(candidate, probe, replies))[0]


if __name__ == "__main__":
    main()
