"""Prompts and answers as compressed JSONL."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def short_name(model: Path) -> str:
    """Family and size of a model.

    >>> short_name(Path("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"))
    'qwen0.5b'
    """
    family = re.match(r"[a-zA-Z]+", model.stem)
    size = re.search(r"\d+(\.\d+)?[mb]\b", model.stem)
    return f"{family[0]}{size[0]}" if family and size else model.stem


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of a file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file whose bytes depend on the rows only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(data.encode("utf-8"), 9, mtime=0))


def write_prompts(path: Path, prompts: Mapping[str, Mapping[str, Any]]) -> int:
    """Writes prompts; a shared text is written once, before its first prompt. Returns their number."""
    rows: list[dict[str, Any]] = []
    written: set[str] = set()
    for prompt in prompts.values():
        for key, text in prompt["texts"].items():
            if key not in written:
                written.add(key)
                rows.append({"part": key, "text": text})
        rows.append({name: value for name, value in prompt.items() if name != "texts"})
    write(path, rows)
    return len(prompts)


def read_answers(*paths: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Answers by id, and the facts about the model from the first line."""
    answers: dict[str, str] = {}
    about: dict[str, Any] = {}
    for path in paths:
        for row in read(path):
            if "id" in row:
                answers[row["id"]] = row["answer"]
            else:
                about = row
    return answers, about
