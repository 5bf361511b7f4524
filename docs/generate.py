"""Writes docs/reference/configuration.md from the code: sections from config.py, options from each plug-in's fields."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel

from casemate import registry
from casemate.config import Config, Part
from casemate.protocols import Embedder, EventStore, Index
from casemate.types import Secret

FILE = Path(__file__).with_name("reference") / "configuration.md"
HEAD = """\
# Configuration reference

Made by `python docs/generate.py`; do not edit.

One file, `casemate.yaml`; without it the defaults hold. Unknown keys are refused. Relative paths start at its folder
(not in options that may also be a name on a hub).
Secrets are written `${NAME}` and come from the environment. A plug-in is its name, or a mapping with its options:
`embedder: minilm` or `embedder: {use: minilm, threads: 2}` (`name` means the same as `use`).

## Sections

| key | default | what |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(_rows(Config)) + "\n\n## Plug-ins\n" + "".join(_role(role) for role in registry.ROLES)


def _rows(section: type[BaseModel], prefix: str = "") -> list[str]:
    rows = []
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if inspect.isclass(kind) and issubclass(kind, BaseModel) and kind is not Part:
            rows += [f"| **`{prefix}{name}`** | | {_first_line(kind)} |", *_rows(kind, f"{prefix}{name}.")]
        else:
            rows.append(f"| `{prefix}{name}` | `{_shown(field.default)}` | {field.description} |")
    return rows


def _role(role: str) -> str:
    text = f"\n### {role}\n"
    for name in registry.names(role):
        cls = registry.load(role, name)
        text += f"\n**`{name}`**: {_first_line(cls)}\n\n| option | default | what |\n|---|---|---|\n"
        described = _described(cls)
        system = {name for name, kind in registry.wants(cls).items() if kind in (Embedder, Index, EventStore)}
        for field in (f for f in dataclasses.fields(cls) if f.init and f.name not in system):
            secret = " A secret: write `${NAME}`." if get_type_hints(cls)[field.name] is Secret else ""
            text += f"| `{field.name}` | `{_shown(field.default)}` | {described[field.name]}{secret} |\n"
    return text


def _described(cls: type[Any]) -> dict[str, str]:
    """The ``Attributes`` of a docstring."""
    _, _, attributes = (inspect.getdoc(cls) or "").partition("Attributes:")
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", attributes, re.M | re.S)
    return {name: " ".join(text.split()).replace("|", "\\|").replace("``", "`") for name, text in entries}


def _first_line(cls: type[Any]) -> str:
    return (inspect.getdoc(cls) or "").splitlines()[0]


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if isinstance(default, Part):
        return default.use
    if isinstance(default, tuple):
        return f"[{', '.join(map(_shown, default))}]"
    return str(default) if default not in {"", None} else "-"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
    print(f"wrote {FILE}", file=sys.stderr)
