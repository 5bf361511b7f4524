"""Our scoring of recorded answers of a language model (Naseh et al. 2025, Llama-3-8B, NFCorpus, 250 + 250)."""

import asyncio
import gzip
import json

import pytest

from casemate.maths import metrics
from casemate.redteam.attacks.direct import Direct
from casemate.redteam.attacks.interrogation import Interrogation, yes_no_answer
from casemate.redteam.attacks.s2mia import S2MIA
from casemate.types import Document, Probe, Reply


def scores(data, name, attack, key, feature=0):
    """A feature by the attack's own ``measure`` for each row, as lists of members and non-members."""
    found = {"yes": [], "no": []}
    with gzip.open(data / f"mia_riddle/nfcorpus_{name}.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    attack.study([row["text"] for row in rows])
    for row in rows:
        candidate = Document(row["_id"], row["text"], row["title"])
        probe = Probe(tuple(row["questions"]), key(row))
        replies = [Reply(text) for text in row["llm_responses"]]
        found[row["mem"]].append(asyncio.run(attack.measure(candidate, probe, replies))[feature])
    assert (len(found["yes"]), len(found["no"])) == (250, 250)
    return found["yes"], found["no"]


def truth(row):
    return {"truth": [yes_no_answer(answer) for answer in row["answers"]]}


@pytest.mark.parametrize(
    ("name", "attack", "key", "feature", "published"),
    [
        pytest.param(  # the published scorer counts correct answers only
            "ia_llama3_8b_top15", Interrogation(), truth, 1, 0.965, marks=pytest.mark.slow
        ),
        ("s2mia", S2MIA(), lambda row: {}, 0, 0.745),
        ("direct_rag_mia", Direct(), lambda row: {}, 0, 0.732),
    ],
)
def test_recorded_answers_have_the_published_auc(data, name, attack, key, feature, published):
    assert metrics.auc(*scores(data, name, attack, key, feature)) == pytest.approx(published, abs=0.01)


@pytest.mark.slow
def test_penalizing_unknown_answers_increases_the_auc_of_interrogation(data):
    """Four of ten replies to non-members are "I don't know", truncated after "I don't" in the record."""
    assert metrics.auc(*scores(data, "ia_llama3_8b_top15", Interrogation(penalty=5), truth)) > 0.975
