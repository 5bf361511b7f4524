"""A system of several processes, any of which can be killed and restarted.

The processes are gateways, a Postgres server, and ``casemate index`` with its parser process. The latter indexes a
folder into a separate tenant while the gateways serve.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.gateway import ENVIRONMENT, raw, server

TENANT = "files"
"""Tenant of the folder. The gateways do not answer from it."""
FILES, CHANGED = 24, 8
PAGE = "<p>Sheet {name}, version {version}, lists part {part}.</p>"
FILLING = "<div></div>" * 60_000
"""Text-free HTML that slows the parser down."""
PARSER_WAIT_S = 60.0


class Database:
    """A Postgres server.

    Attributes:
        url: Its address, which does not change.
    """

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pgserver
        self._folder = folder
        self._server = pgserver.get_server(str(folder), cleanup_mode="stop")
        self.url = str(self._server.get_uri())
        self._server.psql("CREATE EXTENSION IF NOT EXISTS vector")

    @property
    def process(self) -> int:
        """Process id of the postmaster."""
        return int((self._folder / "postmaster.pid").read_text().split()[0])

    def kill(self, seconds: float = 60.0) -> None:
        """Kills the postmaster, and restarts the server on the same files when its other processes have ended."""
        process, end = Path(f"/proc/{self.process}"), time.monotonic() + seconds
        os.kill(self.process, signal.SIGKILL)
        while process.exists() or not self._started():
            assert time.monotonic() < end, "the server did not start again"
            time.sleep(0.1)

    def _started(self) -> bool:
        """Starts the server; False while processes of the killed one are alive."""
        with suppress(subprocess.SubprocessError, AssertionError):
            self._server.ensure_postgres_running()
            return str(self._server.get_uri()) == self.url
        return False

    def close(self) -> None:
        """Stops the server."""
        self._server.cleanup()


@contextmanager
def postgres(folder: Path) -> Iterator[Database]:
    """A server whose address is in ``DATABASE_URL`` for this process and its children."""
    database = Database(folder)
    try:
        os.environ["DATABASE_URL"] = ENVIRONMENT["DATABASE_URL"] = database.url
        yield database
    finally:
        database.close()


def sections() -> dict[str, Any]:
    """Configuration for Postgres in place of SQLite files."""
    return {
        "rag": {"index": {"use": "pgvector", "url": "${DATABASE_URL}"}, "embedder": {"use": "minilm", "threads": 1}},
        "store": {"use": "sql", "url": "${DATABASE_URL}"},
    }


@dataclass
class Killable:
    """Gateways, an optional database, and the program that indexes a folder.

    Attributes:
        folder: Their files.
        gateways: Number of gateways.
        sections: Differences to the configuration of ``benchmarks.gateway``.
        database: The Postgres server, or None.
        urls: Addresses of the gateways.
        processes: Process ids of the gateways.
        told: ``begin FILE VERSION`` before a file is written, ``done FILE VERSION`` when it was reported as indexed.
        counts: Number of kills, runs and failures by kind.
    """

    folder: Path
    gateways: int
    sections: dict[str, Any]
    database: Database | None = None
    urls: list[str] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _opened: list[ExitStack] = field(default_factory=list)

    async def start(self) -> None:
        """Starts the gateways."""
        (self.folder / "casemate.json").write_text(json.dumps(raw(self.folder, **self.sections)))
        for number in range(self.gateways):
            self.urls.append("")
            self.processes.append(0)
            self._opened.append(ExitStack())
            await self._start_gateway(number)

    async def stop(self) -> None:
        """Ends the gateways."""
        for opened in self._opened:
            await asyncio.to_thread(opened.close)

    async def _start_gateway(self, number: int) -> None:
        running = server(self.folder, pace_ms=100, sections=self.sections)
        url, process = await asyncio.to_thread(self._opened[number].enter_context, running)
        assert url, "a gateway did not start"
        self.urls[number], self.processes[number] = url, process

    async def kill(self, kind: str, rng: random.Random) -> None:
        """Kills a process by SIGKILL, and restarts it unless its parent does.

        Args:
            kind: ``gateway``, ``database`` or ``parser``.
            rng: Chooses the gateway.
        """
        if kind == "gateway":
            number = rng.randrange(self.gateways)
            os.kill(self.processes[number], signal.SIGKILL)
            await asyncio.to_thread(self._opened[number].close)
            await self._start_gateway(number)
        elif kind == "database":
            assert self.database
            await asyncio.to_thread(self.database.kill)
        elif not await self._kill_parser(rng):
            return
        self.counts[f"kills of a {kind}"] += 1

    async def _kill_parser(self, rng: random.Random) -> bool:
        """Kills a parser process at a random time of its work; False if none started."""
        end = time.monotonic() + PARSER_WAIT_S
        while time.monotonic() < end:
            if parsers := _parsers():
                await asyncio.sleep(rng.uniform(0, 1))
                with suppress(ProcessLookupError):
                    os.kill(parsers[0], signal.SIGKILL)
                    return True
            await asyncio.sleep(0.02)
        return False

    async def index_again_and_again(self, rng: random.Random, pause_s: float = 3.0) -> None:
        """Changes some files, indexes the folder, and records the acknowledged versions, in a loop."""
        corpus, number = self.folder / "corpus", 0
        corpus.mkdir(exist_ok=True)
        written: dict[str, str] = {}
        while True:
            number += 1
            for name in rng.sample(range(FILES), FILES if number == 1 else CHANGED):
                self._write(corpus / f"f{name}.html", str(number), rng)
                written[f"f{name}.html"] = str(number)
            await self._index(corpus, written)
            await asyncio.sleep(pause_s)

    def _write(self, file: Path, version: str, rng: random.Random) -> None:
        self.told.append(f"begin {file.name} {version}")
        page = PAGE.format(name=file.stem, version=version, part=rng.randrange(10**9))
        file.write_text(f"<html><body>{page}{FILLING}</body></html>")

    async def _index(self, corpus: Path, written: dict[str, str]) -> None:
        command = [sys.executable, "-m", "casemate", "index", str(corpus), "--tenant", TENANT, "--no-calibrate"]
        command += ["--json", "--config", str(self.folder / "casemate.json")]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            output = (await process.communicate())[0]
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            report = json.loads(output)
        except ValueError:  # it ended with an error
            self.counts["runs of the indexing program that failed"] += 1
            return
        problems = {problem["where"] for problem in report["problems"]}
        self.counts["runs of the indexing program"] += 1
        self.counts["files reported as not parsed"] += len(problems)
        self.told += [f"done {name} {version}" for name, version in written.items() if name not in problems]


def _parsers() -> list[int]:
    """Ids of the parser processes that this program's children started."""
    processes = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [process for process in processes if _is_parser(process)]


def _is_parser(process: int) -> bool:
    """Whether a process is a parser and a descendant of this program."""
    with suppress(OSError):  # it has ended
        if b"casemate.rag.parsing_process" in Path(f"/proc/{process}/cmdline").read_bytes():
            while process > 1 and process != os.getpid():
                process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            return process == os.getpid()
    return False
