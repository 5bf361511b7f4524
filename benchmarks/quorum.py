"""Quorum answers: what unentitled clients learn, and what they still get. No language model; readers are simulated.

Attacks on a sample of NFCorpus with guard off, Mirabel and quorum, k = 3: the natural asker (a question from the
candidate's title alone), six published attacks, and an attacker that has every other document and the code. Utility and
poison on a synthetic collection in which r documents state each fact. ``python -m benchmarks.quorum 30 600`` takes
30 + 30 candidates among 600 further documents. ``... synthetic`` measures the synthetic collection only.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import DATA, SEED, nfcorpus_questions, save
from casemate import plugins
from casemate.app import open_app
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.audience import AudiencePolicy
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.guard import Guard
from casemate.maths.metrics import auc
from casemate.maths.recovery import rouge_l
from casemate.maths.stats import bootstrap, clopper_pearson
from casemate.protocols import MembershipAttack, Target
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.caching import CachedEmbedder
from casemate.system import App
from casemate.text.edited_copies import is_edited_copy, text_words
from casemate.text.grounding import grounding_score
from casemate.text.sentences import sentences
from casemate.types import UNKNOWN, Document, Probe, Query, Reply, Secret

ATTACKS = ("direct", "s2mia", "mba", "interrogation", "dcmi", "menta")
STRANGER = frozenset[str]()
POLICY = AudiencePolicy("quorum")
REDUNDANCY = (1, 2, 3, 5, 8)
FACTS = 5


@dataclass
class NaturalAsker(MembershipAttack):
    """Asks about the candidate's title, as any user would, and scores how much of the text the reply contains."""

    paper = "none: an ordinary question"

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """One question."""
        return Probe((f"What is known about {candidate.title.rstrip('.')}?",))

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Grounding of the reply in the text."""
        return (grounding_score(candidate.text, probe.questions[0], replies[0].text),)


@dataclass
class Box:
    """One attack session of an unentitled client."""

    target: Target
    client: str
    asked: int = 0

    async def ask(self, text: str) -> Reply:
        """Asks."""
        self.asked += 1
        return (await self.target.ask(Query(text, self.client, k=3, groups=STRANGER))).reply


def main() -> None:
    """Measures everything."""
    synthetic = asyncio.run(_synthetic())
    results: dict[str, Any] = {"synthetic": synthetic, "edited_copies": _copies()}
    if "synthetic" not in sys.argv:
        each, others = (int(x) for x in sys.argv[1:3]) if len(sys.argv) > 2 else (30, 600)
        results |= {"each": each, "others": others} | _nfcorpus(each, others)
    save("quorum", results)


def _quorum(support: int = 2, jitter: int = 2) -> Quorum:
    return Quorum(support=support, jitter=jitter, secret=Secret("secret of the benchmark"))


def _documents() -> list[Document]:
    with gzip.open(DATA / "nfcorpus/corpus.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    return [Document(row["_id"], row["text"], row["title"]) for row in rows]


def _copies() -> dict[str, Any]:
    """Edited copies that are missed, and pairs of distinct documents that are merged, on NFCorpus."""
    documents, rng = _documents(), np.random.default_rng(SEED)
    words = [text_words(d.text) for d in documents]
    missed = 0
    chosen = rng.choice(len(documents), 500, replace=False)
    for i in chosen:
        parts = sentences(documents[i].text)
        text = " ".join(parts[j] for j in rng.permutation(len(parts))).split()
        missed += not is_edited_copy(words[i], text_words(" ".join(w for w in text if rng.random() > 0.22)))
    merged = [(i, j) for i in range(len(words)) for j in range(i) if is_edited_copy(words[i], words[j])]
    distinct = [(i, j) for i, j in merged if documents[i].text != documents[j].text]
    return {
        "missed": [missed, len(chosen), *clopper_pearson(missed, len(chosen))],
        "pairs": len(words) * (len(words) - 1) // 2,
        "merged": len(merged),
        "merged_with_different_text": [[documents[i].title, documents[j].title] for i, j in distinct],
    }


def _nfcorpus(each: int, others: int) -> dict[str, Any]:
    documents, rng = _documents(), np.random.default_rng(SEED)
    seen: dict[str, Document] = {d.text: d for d in documents if len(d.text.split()) > 50}
    drawn = list(seen.values())
    order = rng.permutation(len(drawn))[: 2 * each + others]
    members, nonmembers = [drawn[i] for i in order[:each]], [drawn[i] for i in order[each : 2 * each]]
    held = [*members, *(drawn[i] for i in order[2 * each :])]
    with tempfile.TemporaryDirectory() as folder:
        raw = {
            "rag": {"k": 3, "index": {"use": "sqlite", "path": f"{folder}/index.db"}},
            "guard": {"defenses": [{"use": "mirabel", "calibration": f"{folder}/calibration.json"}]},
            "calibrate": {"documents": 30, "questions": 250},
            "store": {"use": "sql", "path": f"{folder}/events.db"},
        }
        with open_app(raw) as app:
            asyncio.run(app.guard.add(held))
            asyncio.run(app.calibrate(nfcorpus_questions("qrels.dev.tsv")))
            return asyncio.run(_attacked(app, members, nonmembers, held))


async def _attacked(
    app: App, members: list[Document], nonmembers: list[Document], held: list[Document]
) -> dict[str, Any]:
    embedder = CachedEmbedder(app.guard.rag.embedder)
    rag = Rag(embedder, app.index, SimulatedReader(), app.guard.rag.instructions)
    targets: dict[str, Target] = {
        "off": rag,
        "mirabel": Guard(rag, app.guard.defenses),
        "quorum": Guard(rag, [_quorum()], audience=POLICY),
    }
    attacks: dict[str, MembershipAttack] = {"natural": NaturalAsker()}
    attacks |= {name: plugins.load("attack", name)() for name in ATTACKS}
    found: dict[str, Any] = {}
    for name, attack in attacks.items():
        attack.study([d.text for d in held[-100:]])
        found[name] = {}
        for label, target in targets.items():
            sides = []
            for side, candidates in (("m", members), ("n", nonmembers)):
                boxes = [Box(target, f"{name}-{label}-{side}{i}") for i in range(len(candidates))]
                rng = [np.random.default_rng([SEED, i]) for i in range(len(candidates))]
                runs = [attack.run(c, b, r) for c, b, r in zip(candidates, boxes, rng, strict=True)]
                sides.append([(await run)[0] for run in runs])
            found[name][label] = _auc(*sides)
            print(name, label, found[name][label], file=sys.stderr, flush=True)
    pivotal = await _pivotal(app, embedder, members)
    return {"auc": found, "know_all_but_one": pivotal, **await _answers(targets, held)}


def _auc(members: list[float], nonmembers: list[float]) -> list[float]:
    """AUC with a 95 % bootstrap interval, stratified."""
    return [float(value) for value in bootstrap(auc, members, nonmembers, SEED)]


async def _pivotal(app: App, embedder: Any, members: list[Document]) -> dict[str, Any]:
    """Share of members for which one question gives another answer without them: all that this attacker can learn."""
    found: dict[str, Any] = {}
    asker = NaturalAsker()
    for label, quorum in {"m=2": _quorum(jitter=1), "m=2, J=2": _quorum(), "m=3": _quorum(3, 1)}.items():
        guard = Guard(Rag(embedder, app.index, SimulatedReader()), [quorum], audience=POLICY)
        changed = 0
        for i, member in enumerate(members):
            (question,) = (await asker.prepare(member, np.random.default_rng(0))).questions
            query = Query(question, f"pivotal-{i}", k=3, groups=STRANGER)
            whole = (await guard.ask(query)).text
            app.index.remove([member.source])
            changed += (await guard.ask(query)).text != whole
            await guard.add([member])
        low, high = clopper_pearson(changed, len(members))
        found[label] = {"pivotal": [changed, len(members), low, high], "auc_at_most": 0.5 + high / 2}
    return found


async def _answers(targets: dict[str, Target], held: list[Document]) -> dict[str, Any]:
    """Test questions as a crawler: answered, CPU time of the defense, documents recovered (ROUGE-L recall above .5)."""
    questions = nfcorpus_questions("qrels.tsv")[:120]
    replies: dict[str, list[str]] = {}
    for label in ("off", "quorum"):
        replies[label] = [
            (await targets[label].ask(Query(q, f"crawler-{label}", k=3, groups=STRANGER))).text for q in questions
        ]
    out: dict[str, Any] = {"questions": len(questions)}
    for label, texts in replies.items():
        recovered = sum(any(rouge_l(d.text, t).recall > 0.5 for t in texts if len(t) > 200) for d in held[:200])
        out[label] = {"answered": sum(t != UNKNOWN for t in texts), "recovered_of_200": recovered}
    guard = targets["quorum"]
    assert isinstance(guard, Guard)
    (quorum,) = guard.defenses
    times = []
    for q in questions:
        query = Query(q, "timed", k=3, groups=STRANGER)
        found = await guard.rag.find(query, await guard.rag.encode(query), 3 + quorum.lookahead)
        marked = type(found)(found.hits, found.similarity_stats, True, frozenset(h.document.id for h in found.hits))
        began = time.thread_time()
        await quorum.on_retrieve(query, marked)
        times.append(time.thread_time() - began)
    out["cpu_ms"] = {name: 1000 * float(np.quantile(times, p)) for name, p in (("median", 0.5), ("p95", 0.95))}
    return out


# A synthetic collection


def _words(rng: np.random.Generator, count: int) -> list[str]:
    heads, middles, tails = "b d f g k l m n p r s t v".split(), "a e i o u".split(), "lan mor nis rek tav vin".split()
    return ["".join(rng.choice(x) for x in (heads, middles, tails)).capitalize() for _ in range(count)]


TEMPLATES = (
    "The {kind} of {place} was built in {year} by {person}. {noise}",
    "{noise} In {year}, {person} built the {kind} of {place}.",
    "{person} is known as the builder of the {kind} in {place}; it was finished in {year}. {noise}",
    "Visitors to {place} should see the {kind}, built by {person} in {year}. {noise}",
    "{noise} According to the chronicle, the {kind} of {place} dates from {year}, and {person} built it.",
)


def _fact(rng: np.random.Generator, number: int) -> dict[str, str]:
    kind = ("bridge", "mill", "harbor", "library", "theater")[number % 5]
    place, person, false = _words(rng, 3)
    return {
        "kind": kind,
        "place": f"{place}ford",
        "person": f"{person}son",
        "false": f"{false}berg",
        "year": str(int(rng.integers(1500, 1950))),
    }


def _collection(rng: np.random.Generator) -> tuple[list[Document], dict[int, list[dict[str, str]]]]:
    """Documents, and the facts by redundancy r: each is stated by r documents in varied wording."""
    documents, facts = [], {}
    for r in REDUNDANCY:
        facts[r] = [_fact(rng, i) for i in range(FACTS)]
        for i, fact in enumerate(facts[r]):
            for j in range(r):
                noise = f"{' '.join(_words(rng, 14)).lower().capitalize()}."
                text = TEMPLATES[int(rng.integers(len(TEMPLATES)))].format(noise=noise, **fact)
                documents.append(Document(f"r{r}-{i}-{j}", text))
    return documents, facts


async def _synthetic() -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    documents, facts = _collection(rng)
    with tempfile.TemporaryDirectory() as folder, closing(SqliteIndex(Path(folder) / "index.db")) as index:
        embedder = MiniLM()
        rag = Rag(CachedEmbedder(embedder), index, ExtractiveGenerator())  # by words: fast
        await Guard(rag, []).add(documents)
        targets: dict[str, Target] = {"plain": rag}
        for m, jitter in ((2, 1), (2, 2), (3, 1), (4, 1)):
            targets[f"m={m}, J={jitter}"] = Guard(rag, [_quorum(m, jitter)], audience=POLICY)
        utility = {label: {str(r): await _correct(t, facts[r]) for r in REDUNDANCY} for label, t in targets.items()}
        return {"facts": FACTS, "correct": utility, "poison": await _poisoned(rag, targets, facts)}


def _question(fact: dict[str, str], asked: str) -> str:
    return (
        f"Who built the {fact['kind']} of {fact['place']}?"
        if asked == "person"
        else (f"When was the {fact['kind']} of {fact['place']} built?")
    )


async def _correct(target: Target, facts: list[dict[str, str]]) -> list[float]:
    """Answers that contain the value, of both questions about each fact, with a 95 % interval."""
    right = 0
    for fact in facts:
        for asked in ("person", "year"):
            query = Query(_question(fact, asked), "reader", groups=STRANGER)
            right += fact[asked] in (await target.ask(query)).text
    total = 2 * len(facts)
    return [right, total, *clopper_pearson(right, total)]


async def _poisoned(rag: Rag, targets: dict[str, Target], facts: dict[int, list[dict[str, str]]]) -> dict[str, Any]:
    """Answers with the false name after 1 to 3 poisoned texts: the question, then a false statement (PoisonedRAG)."""
    found: dict[str, Any] = {}
    attacked = facts[5]
    for kappa in (1, 2, 3):
        texts = []
        for i, fact in enumerate(attacked):
            for j in range(kappa):
                rest = " ".join(_words(np.random.default_rng([SEED, i, j]), 14)).lower()
                said = (
                    f"{_question(fact, 'person')} {fact['false']} built the {fact['kind']} of {fact['place']}. {rest}."
                )
                texts.append(Document(f"poison-{i}-{j}", said))
        await Guard(rag, []).add(texts)
        found[str(kappa)] = {}
        for label, target in targets.items():
            false = right = 0
            for fact in attacked:
                text = (await target.ask(Query(_question(fact, "person"), "reader", groups=STRANGER))).text
                false, right = false + (fact["false"] in text), right + (fact["person"] in text)
            n = len(attacked)
            found[str(kappa)][label] = {"false": [false, n, *clopper_pearson(false, n)], "correct": [right, n]}
        rag.index.remove([d.source for d in texts])
    return found


if __name__ == "__main__":
    main()
