"""From `git clone` to the report of `casemate try` on 240 mixed files: CPU seconds and wall-clock time by stage.

The files are written from public texts (NFCorpus and SQuAD): markdown, text, html, pdf and jsonl. CPU seconds include
all child processes. Other load affects wall-clock time, and CPU seconds less.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import html
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import DATA, ROOT, save

FILES = 240
RECORDS = 5
"""Records in a jsonl file."""
KINDS = ("md", "txt", "html", "pdf", "jsonl")
FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
LINE = 90
"""Characters per line of a PDF."""


def texts() -> Iterator[tuple[str, str]]:
    """Titles and texts of NFCorpus and SQuAD, alternating."""
    files = [DATA / name / "corpus.jsonl.gz" for name in ("nfcorpus", "squad")]
    streams = [gzip.open(file, "rt", encoding="utf-8") for file in files]
    for lines in zip(*streams, strict=False):
        for line in lines:
            record = json.loads(line)
            yield record.get("title", ""), record["text"]


def write_files(folder: Path, count: int = FILES) -> None:
    """Writes the files, a fifth of each type. Deterministic."""
    folder.mkdir(parents=True)
    source = texts()
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        path = folder / f"{i:03}.{kind}"
        if kind == "jsonl":
            records = [{"id": f"{i}-{n}", "title": t, "text": x} for n, (t, x) in enumerate(islice(source, RECORDS))]
            path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
            continue
        title, text = next(source)
        if kind == "md":
            path.write_text(f"# {title}\n\n{text}\n", encoding="utf-8")
        elif kind == "txt":
            path.write_text(f"{title}\n\n{text}\n", encoding="utf-8")
        elif kind == "html":
            page = f"<title>{html.escape(title)}</title><h1>{html.escape(title)}</h1><p>{html.escape(text)}</p>"
            path.write_text(page, encoding="utf-8")
        else:
            path.write_bytes(pdf(f"{title}. {text}"))


def pdf(text: str) -> bytes:
    """A PDF with one long page of text in Latin letters."""
    words, lines = text.encode("latin-1", "replace").split(), [b""]
    for word in words:
        if len(lines[-1]) + len(word) > LINE:
            lines.append(b"")
        lines[-1] += word + b" "
    escaped = [line.replace(b"\\", rb"\\").replace(b"(", rb"\(").replace(b")", rb"\)") for line in lines]
    shown = b"".join(b"(%s) Tj T*\n" % line for line in escaped)
    stream = b"BT /F1 9 Tf 11 TL 40 %d Td\n%sET" % (12 * len(lines) + 20, shown)
    parts = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 %d] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>"
        % (12 * len(lines) + 40),
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        FONT,
    ]
    out, places = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, part)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(parts) + 1, len(out))
    return out + b"xref\n0 %d\n0000000000 65535 f \n" % (len(parts) + 1) + table + end


class Stages:
    """Wall-clock time and CPU seconds of stages, including child processes."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, title: str, total: int | None = None) -> Iterator[Any]:
        """Measures a stage; as in `Steps`, yields a counter."""
        began, before = time.monotonic(), cpu_seconds()
        yield lambda count: None
        took = {"wall_s": round(time.monotonic() - began, 1), "cpu_s": round(cpu_seconds() - before, 1)}
        self.found[title] = took
        print(title, took, file=sys.stderr, flush=True)


def cpu_seconds() -> float:
    """CPU seconds of this process and its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def assess(folder: Path) -> dict[str, Any]:
    """Runs the assessment on a folder in this process, and writes the report."""
    from casemate.cli.try_documents import INDEX_SECONDS
    from casemate.demo.assessment import try_folder
    from casemate.demo.assessment_report import as_json, render_assessment

    stages = Stages()
    with tempfile.TemporaryDirectory() as work, stages("all of it"):
        found = asyncio.run(try_folder(folder, Path(work), (), INDEX_SECONDS, stages))
        with stages("writing the report"):
            (folder.parent / "report.html").write_text(render_assessment(found), encoding="utf-8")
    figures = as_json(found)
    kept = {name: figures[name] for name in ("sample", "headlines", "failures")}
    return {"stages": stages.found, "figures": {**kept, "problems": len(figures["problems"])}}


def measure(install: bool) -> dict[str, Any]:
    """All stages, each in its own process."""
    stages = Stages()
    with tempfile.TemporaryDirectory() as place:
        base, python = Path(place), sys.executable
        write_files(base / "documents")
        with stages("git clone"):
            run(base, "git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", "casemate")
        if install:
            with stages("make .venv/.base"):
                run(base / "casemate", "make", "--silent", ".venv/.base")
            python = str(base / "casemate/.venv/bin/python")
        with stages("casemate try"):
            path = os.pathsep.join([str(base / "casemate/src"), str(ROOT)])
            command = [python, "-m", "benchmarks.first_run", "--assess", str(base / "documents")]
            environment = os.environ | {"PYTHONPATH": path}
            done = subprocess.run(command, cwd=base, env=environment, check=True, stdout=subprocess.PIPE)
    inner = json.loads(done.stdout)
    total = {key: round(sum(stage[key] for stage in stages.found.values()), 1) for key in ("wall_s", "cpu_s")}
    return {
        "files": FILES,
        "cores": len(os.sched_getaffinity(0)),
        "installed": install,
        "total": total,
        "stages": stages.found,
        "try": inner["stages"],
        "figures": inner["figures"],
    }


def run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Measures and saves; `--assess FOLDER` is the child process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assess", type=Path, help="Only run the assessment on this folder, and print its stages.")
    parser.add_argument("--no-install", action="store_true", help="Use this environment instead of a new one.")
    arguments = parser.parse_args()
    if arguments.assess:
        print(json.dumps(assess(arguments.assess)))
        return
    save("first_run", measure(not arguments.no_install))


if __name__ == "__main__":
    main()
