"""Quorum answers: information that clients without entitlement obtain. Readers are **simulated**; k = 3.

``python -m benchmarks.quorum attacks CORPUS EACH [NAMES]``: attacks with and without quorum (m = 2 and 3, J = 2, and m
= J = 3). The corpus is ``nfcorpus`` or ``squad``, with EACH members and non-members and ``FURTHER`` more documents.
Attackers: the natural asker, questions that a 1.5B model wrote from titles (``written``, NFCorpus), the published
attacks and the adaptive ones.

Decision rules are fitted under each target on half of the candidates, and tested on the other half. ``know_all`` is an
attacker with every other document and the code: the two-world audit of answers, over ``AUDITED`` questions of the
attack for each member.

With ``CORPUS+copies``, the index also contains an edited copy of each member. The two must count as one unit. ``...
questions CORPUS EACH``: that attacker asks ``ASKED`` questions about each record, in its own words. ``... crawl CORPUS
CHUNKS [NAMES]``: extraction by one client and by 100, with output transforms, m = 2, J = 1.

Each part is saved when it is finished. A part with results is skipped, unless ``NAMES`` (comma-separated) contains it.
``benchmarks.quorum_utility`` measures utility and CPU time, ``benchmarks.poison_defenses`` poisoning.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks import ROOT, SEED, code_digest, crawl, save, saved
from benchmarks.kept import Kept
from benchmarks.real import files
from benchmarks.samples import ADAPTIVE, ATTACKS, NaturalAsker, Sample, experiment
from benchmarks.units import edited
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.audience import AudiencePolicy
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.quorum.keywords import AskedQuestion
from casemate.guard.defenses.quorum.release import Release, Thresholds, compose
from casemate.guard.guard import Guard
from casemate.guard.units import group_units, unit_sources
from casemate.maths.stats import clopper_pearson
from casemate.protocols import MembershipAttack, Target
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.caching import CachedGenerator
from casemate.redteam.lab.experiment import Experiment
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan
from casemate.redteam.lab.extraction_metrics import measure_crawl
from casemate.redteam.lab.judge import membership_metrics
from casemate.redteam.lab.results import MembershipMetrics
from casemate.redteam.lab.store import CampaignStore
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.text.output_transforms import TRANSFORMS
from casemate.text.sentences import clauses
from casemate.text.tokens import join_words, keywords
from casemate.types import Document, Hit, Secret

STRANGER = frozenset[str]()
POLICY = AudiencePolicy("quorum")
SECRET = Secret("secret of the benchmark")
FURTHER = 100
"""Documents in the index that are not candidates."""
AUDITED, ASKED = 5, 1000
FETCHED = 96
"""Hits from which units are formed; the maximum of the defense."""
SETTINGS = {"m=2": (2, 1), "m=2, J=2": (2, 2), "m=3": (3, 1), "m=3, J=2": (3, 2), "m=3, J=3": (3, 3)}
WRITTEN = ROOT / "benchmarks/recorded/nfcorpus_qwen1.5b.jsonl.gz"
FRAMES = ("What is known about {}?", "What about {}?", "What was found on {}?", "How is {} described?")
QUESTIONS = 100
"""Questions per crawl."""
Due: TypeAlias = Callable[[str], bool]
CRAWLERS = (*crawl.CRAWLERS, *(f"rag_thief+{name}" for name in TRANSFORMS))


def main() -> None:
    """Measures the named or missing parts, and writes the results after each."""
    what, corpus, size, *named = sys.argv[1:]
    embedder = Kept(ROOT / f"build/quorum-{what}-{corpus}.npz")
    began = time.process_time()

    def is_due(name: str) -> bool:
        return name in named[0].split(",") if named else name not in _written_part(what, corpus)[1]

    for label, found in {"attacks": _attacks, "questions": _questions, "crawl": _crawls}[what](
        corpus, int(size), is_due, embedder
    ):
        results, part = _written_part(what, corpus)  # read again: another process may have written meanwhile
        part[label] = {"size": int(size), "code": code_digest()} | found
        save("quorum", results)
        embedder.save()
        print(label, f"{time.process_time() - began:.0f} CPU-s", file=sys.stderr, flush=True)


def _written_part(what: str, corpus: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The saved results, and their part about one corpus."""
    results = saved("quorum")
    return results, results.setdefault(what, {}).setdefault(corpus, {})


def _attacks(corpus: str, each: int, is_due: Due, embedder: Kept) -> Iterator[tuple[str, dict[str, Any]]]:
    """AUC of each attack, and number of answers that depend on the candidate."""
    corpus, _, with_copies = corpus.partition("+")
    sample = Sample.of(corpus)
    written = _written() if corpus == "nfcorpus" else {}
    documents = sorted(sample.documents, key=lambda d: d.source not in written)  # with written questions first
    members, others = documents[:each], documents[each : 2 * each]
    attacks = sample.attacks(("natural", *ATTACKS, *ADAPTIVE))
    if all(d.source in written for d in (*members, *others)):
        attacks["written"] = NaturalAsker(written)
    held = [*members, *documents[2 * each : 2 * each + FURTHER]]
    if with_copies:
        rng = np.random.default_rng(SEED)
        held += [Document(f"copy-{d.source}", edited(d.text, rng), d.title) for d in members]
    with _system(held, embedder) as (rag, ledger):
        for name, attack in attacks.items():
            if is_due(name):
                yield name, asyncio.run(_attacked({name: attack}, rag, ledger, (members, others)))


def _written() -> dict[str, list[str]]:
    """Questions that a 1.5B model wrote from titles of NFCorpus documents, by source."""
    rows = files.read(WRITTEN)[1:]
    return {row["candidate"]: row["questions"] for row in rows if row["author"] == "model:natural_title"}


@contextmanager
def _system(held: Sequence[Document], embedder: Kept) -> Iterator[tuple[Rag, CampaignStore]]:
    """The documents in an index, with the simulated reader."""
    with tempfile.TemporaryDirectory() as folder, closing(SqliteIndex(Path(folder) / "index.db")) as index:
        with closing(CampaignStore(Path(folder) / "ledger.db")) as ledger:
            rag = Rag(embedder, index, CachedGenerator(SimulatedReader(), ledger, "simulated_reader"))
            index.add(held, embedder.embed([d.content for d in held]))
            yield rag, ledger


def _guard(rag: Rag, support: int, jitter: int) -> Guard:
    return Guard(rag, [Quorum(support=support, jitter=jitter, secret=SECRET)], audience=POLICY)


async def _attacked(
    attacks: dict[str, MembershipAttack],
    rag: Rag,
    ledger: CampaignStore,
    sides: tuple[Sequence[Document], Sequence[Document]],
) -> dict[str, Any]:
    made = {"quorum": (2, 2), "quorum, m=3": (3, 2), "quorum, m=3, J=3": (3, 3)}
    targets: dict[str, Target] = {"off": rag} | {name: _guard(rag, *setting) for name, setting in made.items()}
    lab = experiment(attacks, rag.index, ledger, targets, sides)
    trials = await lab.run()
    (attack,) = attacks
    found: dict[str, Any] = {"errors": dict(trials.errors)}
    for label in targets:
        found[label] = _brief(membership_metrics(trials.done[attack, label], lab.split.half, label != "off"))
    found["know_all"] = _audited(lab, attack, rag, sides[0])
    return found


def _brief(figures: MembershipMetrics | None) -> dict[str, Any] | None:
    return figures and {"auc": list(figures.auc), "adjusted_accuracy": list(figures.adjusted_accuracy)}


def _audited(lab: Experiment, attack: str, rag: Rag, members: Sequence[Document]) -> dict[str, Any]:
    """Answers that change without the candidate's unit, for an attacker with every other document."""
    rng = np.random.default_rng(SEED)
    changed: dict[str, list[list[bool]]] = {label: [] for label in SETTINGS}
    for source, unit in unit_sources(rag.index, [m.source for m in members]).items():
        asked = list(dict.fromkeys(e.question for e in lab.exchanges(attack, "quorum", source)))
        drawn = [asked[i] for i in rng.permutation(len(asked))[:AUDITED]]
        vectors = rag.embedder.embed(drawn)
        rows = [_differing(rag, question, vector, unit) for question, vector in zip(drawn, vectors, strict=True)]
        for label in SETTINGS:
            changed[label].append([row[label] for row in rows])
    return {label: _summary(rows) for label, rows in changed.items()}


def _summary(changed: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Pivotal answers, revealed members, and the attacker's AUC: .5 + half of the share of revealed members."""
    total, pivotal, revealed = sum(map(len, changed)), sum(map(sum, changed)), sum(map(any, changed))
    share = [revealed / len(changed), *clopper_pearson(revealed, len(changed))]
    return {
        "answers": [pivotal, total, *clopper_pearson(pivotal, total)],
        "members": [revealed, len(changed)],
        "auc": [0.5 + x / 2 for x in share],
    }


def _questions(corpus: str, each: int, is_due: Due, embedder: Kept) -> Iterator[tuple[str, dict[str, Any]]]:
    """Information that ``ASKED`` questions about one record reveal to an attacker with every other document.

    The number of clients is irrelevant: answers do not depend on the client or on earlier questions. The questions name
    one to four words of one clause of the record.
    """
    if not is_due("records"):
        return
    documents = Sample.of(corpus).documents
    held = documents[: each + 2 * FURTHER]
    rng = np.random.default_rng(SEED)
    with _system(held, embedder) as (rag, _):
        units = unit_sources(rag.index, [d.source for d in held[:each]])
        changed: dict[str, list[list[bool]]] = {label: [] for label in SETTINGS}
        for document in held[:each]:
            asked = _about(document, rng)
            rows = [
                _differing(rag, question, vector, units[document.source])
                for question, vector in zip(asked, embedder.inner.embed(asked), strict=True)
            ]
            for label in SETTINGS:
                changed[label].append([row[label] for row in rows])
    steps = (1, 10, 100, ASKED)
    yield (
        "records",
        {label: {str(n): _summary([row[:n] for row in rows]) for n in steps} for label, rows in changed.items()},
    )


def _about(document: Document, rng: np.random.Generator) -> list[str]:
    """Questions about single facts of a record."""
    parts = [words for clause in clauses(document.text) if (words := keywords(clause))]
    asked = []
    for _ in range(ASKED):
        words = parts[int(rng.integers(len(parts)))]
        chosen = rng.choice(len(words), min(len(words), int(rng.integers(1, 5))), replace=False)
        asked.append(str(rng.choice(FRAMES)).format(join_words([words[i] for i in sorted(chosen)])))
    return asked


def _differing(rag: Rag, text: str, vector: Any, unit: frozenset[str]) -> dict[str, bool]:
    """By setting, whether the answer changes without a unit. Units are read once for all settings."""
    question, quorum = AskedQuestion.of(text), Quorum(support=2, jitter=1)
    found = rag.index.search(vector, FETCHED + len(unit)).hits
    worlds = []
    for hits in (found, [hit for hit in found if hit.document.source not in unit]):
        near: list[Hit] = [hit for hit in hits if hit.score >= quorum.floor][:FETCHED]
        worlds.append([quorum.statements_of_unit(question, group) for group in group_units(near)[: quorum.units]])
    differing = {}
    for label, (support, jitter) in SETTINGS.items():
        thresholds = Thresholds(support, jitter, SECRET, "benchmark")
        one, other = (compose(question, Release.of(said, thresholds).levels).text for said in worlds)
        differing[label] = one != other
    return differing


def _crawls(corpus: str, chunks: int, is_due: Due, embedder: Kept) -> Iterator[tuple[str, dict[str, Any]]]:
    """Recovery by each crawler: no defense, and the quorum policy with one client and with 100."""
    crawl.CORPORA[corpus] = chunks
    with tempfile.TemporaryDirectory() as folder:
        ground = crawl.IndexedCorpus(corpus, Path(folder), CachedEmbedder(embedder))
        with closing(ground.ledger), closing(ground.index):
            for label in filter(is_due, CRAWLERS):
                yield label, asyncio.run(_crawled(ground, label))


async def _crawled(ground: crawl.IndexedCorpus, label: str) -> dict[str, Any]:
    attack = crawl.make_attack(label, ground.embedder)
    traces = {}
    for side, clients in (("off", 1), ("1 client", 1), ("100 clients", 100)):
        target = ground.rag if side == "off" else _guard(ground.rag, 2, 1)
        plan = CrawlPlan(seed=SEED, k=crawl.K, questions=QUESTIONS, clients=clients, label=side)
        crawler = Crawler(label, attack, {side: target}, ground.ledger, plan)
        traces |= await crawler.run()
    crawled = measure_crawl(crawler, traces, ground.documents, ground.embedder, windows=False)
    rates = {side: list(result.crr) for side, result in crawled.by_target.items()}
    off, *_ = rates["off"]
    relative = {side: [x / off for x in rate] for side, rate in rates.items() if off and side != "off"}
    return {"crr": rates, "relative, of a fixed rate without a defense": relative}


if __name__ == "__main__":
    main()
