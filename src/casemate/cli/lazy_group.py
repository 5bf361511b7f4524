"""Imports the module of a command when the command runs; help is read from the modules' source."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

COMMANDS: Mapping[str, str] = {
    "try": "try_documents:try_documents",
    "demo": "setup:demo",
    "init": "init:init",
    "index": "setup:index",
    "ask": "ask:ask",
    "calibrate": "setup:calibrate",
    "serve": "serve:serve",
    "enforce": "enforce:enforce",
    "doctor": "setup:doctor",
    "attach": "attach:attach",
    "reindex": "reindex:reindex",
    "reproduce": "reproduce:reproduce",
    "mcp": "mcp:mcp",
    "key": "serve:key",
    "client": "client:client",
    "canary": "canary:canary",
    "quarantine": "quarantine:quarantine",
    "traces": "traces:traces",
    "events": "events:events",
    "redteam": "redteam:redteam",
    "report": "redteam:report",
}
"""Module of this package, and the function or ``typer.Typer`` in it, by command."""
EXTENDED_BY = {"canary": ("canary_drift", "canary_set", "honeytokens", "ownership")}
"""Modules that add subcommands to a command."""


def load(name: str) -> Any:
    """Imports a command; returns it as the framework's command object."""
    module, _, attribute = COMMANDS[name].partition(":")
    for other in (module, *EXTENDED_BY.get(name, ())):
        import_module(f"casemate.cli.{other}")
    found = getattr(import_module(f"casemate.cli.{module}"), attribute)
    parent = typer.Typer(rich_markup_mode=None, add_completion=False)
    if isinstance(found, typer.Typer):
        parent.add_typer(found, name=name)
    else:
        parent.command(name)(found)
    return get_group(parent).commands[name]


def describe(name: str) -> str:
    """Help of a command, from the docstring of its function or the ``help`` of its ``typer.Typer``."""
    module, _, attribute = COMMANDS[name].partition(":")
    for node in ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == attribute:
            assert isinstance(node.value, ast.Call)
            return next(str(ast.literal_eval(word.value)) for word in node.value.keywords if word.arg == "help")
    raise LookupError(COMMANDS[name])


class LazyGroup(TyperGroup):
    """A group of ``COMMANDS``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # the names, for suggestions

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Imports the command that runs."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load(args[0])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Lists all commands without importing them."""
        parent = typer.Typer(rich_markup_mode=None, add_completion=False)
        for name in COMMANDS:
            parent.command(name, help=describe(name))(lambda: None)
        self.commands = get_group(parent).commands
        super().format_commands(ctx, formatter)
