"""Writes the signatures in docs/reference/extension-points.md from the code."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from casemate import protocols
from casemate.runtime import executor

FILE = Path(__file__).with_name("reference") / "extension-points.md"
BLOCK = re.compile(r"(<!-- signatures: ([\w ]+) -->\n).*?(<!-- end -->)", re.S)


def page(text: str) -> str:
    """The page with the present signatures."""
    return BLOCK.sub(lambda m: f"{m[1]}\n```py\n{_joined(m[2])}\n```\n\n{m[3]}", text)


def _joined(names: str) -> str:
    return "\n".join(map(signatures, names.split()))


def signatures(name: str) -> str:
    """The public members of an interface, one line each."""
    base = getattr(protocols, name, None) or getattr(executor, name)
    lines = [f"class {name}:"]
    for member in members(base):
        value = inspect.getattr_static(base, member, None)
        if isinstance(value, property):
            lines.append(f"    {member}: {_short(value.fget.__annotations__['return'])}")
        elif inspect.isfunction(value):
            kind = "async def" if inspect.iscoroutinefunction(value) else "def"
            lines.append(f"    {kind} {member}{_short(str(inspect.signature(value)))}")
        else:
            lines.append(f"    {member}: {_short(str(base.__annotations__.get(member, '')))}")
    return "\n".join(lines)


def members(base: type[Any]) -> list[str]:
    """Names of the public members that an interface declares itself, in order."""
    declared = [*base.__annotations__, *vars(base)]
    return [name for name in dict.fromkeys(declared) if not name.startswith("_")]


def _short(text: str) -> str:
    return re.sub(r"<function .*? at 0x\w+>", "...", text.replace("'", ""))


if __name__ == "__main__":
    FILE.write_text(page(FILE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {FILE}", file=sys.stderr)
