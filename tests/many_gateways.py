"""A gateway on a shared Postgres database: ``python -m tests.many_gateways FOLDER``, with the address in ``URL``.

Documents are random words and the embedder is a toy. Index, event store, guard, limits and keys are the real ones.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from casemate import config as configuration
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.indexes.pgvector import PgvectorIndex
from casemate.gateway.server import serve
from casemate.guard.calibration import file as calibration
from casemate.guard.calibration.closeness import FEATURES
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.guard import Guard
from casemate.maths.calibration import Calibration
from casemate.rag.pipeline import Rag
from casemate.system import App
from casemate.types import Query, Secret
from tests.fakes import WORDS, BagOfWords, Parrot, documents

COUNT, K = 60, 5
HELD = documents(COUNT)


def open_shared(folder: Path, url: str) -> App:
    """Assembles a system that keeps all state in the database."""
    section = {"port": 0, "pace_ms": 20, "requests_per_minute": 10**6, "shutdown_grace_s": 5}
    config = configuration.parse({"rag": {"k": K}, "guard": {"defenses": []}, "gateway": section}, folder=folder)
    opened = ExitStack()
    index = opened.enter_context(closing(PgvectorIndex(Secret(url), connections=6)))
    store = opened.enter_context(closing(SqlEventStore(Secret(url))))
    embedder = BagOfWords(256)
    rag = Rag(embedder, index, Parrot())
    mirabel = Mirabel(calibration=folder / "calibration.json", embedder=embedder, index=index, store=store)
    return App(config, Guard(rag, [mirabel, CrawlLimit(store=store)], store=store), store, opened)


def prepare(folder: Path, url: str) -> None:
    """Adds documents, and calibrates the guard on short benign questions."""
    with open_shared(folder, url) as app:
        asyncio.run(app.guard.add(HELD))
        mirabel, index = app.guard.defenses[0], app.index
        ones, none = (1.0,) * len(FEATURES), (0.0,) * len(FEATURES)
        made = Calibration("bag-of-words", COUNT, K, FEATURES, none, ones, ones, (), "made up")
        rng, scores = np.random.default_rng(7), list[float]()
        for number in range(200):
            text = " ".join(rng.choice([*WORDS, f"only{number % COUNT}"], 3, replace=False))
            found = index.search(app.guard.rag.embedder.embed([text])[0], 40)
            scores.append(max(asyncio.run(mirabel.score(Query(text, client=str(number), k=K), found, made)).values()))
        calibration.write_calibration(
            folder / "calibration.json", "default", replace(made, benign=tuple(sorted(scores)))
        )


def harmless(folder: Path, url: str, names: Sequence[str]) -> dict[str, str]:
    """Returns a question for each document that retrieves it without being flagged."""
    with open_shared(folder, url) as app:
        return {name: _harmless(app, name) for name in names}


def _harmless(app: App, name: str) -> str:
    rng, words = np.random.default_rng(3), next(d.text for d in HELD if d.id == name).split()[1:]
    while True:
        text = " ".join(rng.choice(words, 4, replace=False))
        seen, verdicts = asyncio.run(app.guard.retrieve(Query(text, client=text, k=K)))
        if not any(v.flagged for v in verdicts) and name in [h.document.id for h in seen.hits]:
            return text


def main() -> None:
    """Prints the address, and serves until a signal."""
    app = open_shared(Path(sys.argv[1]), os.environ["URL"])
    serve(app, lambda address: print(address, flush=True))


if __name__ == "__main__":
    main()
