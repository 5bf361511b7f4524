"""YAML of which every value knows its line: texts as they are written, and no aliases.

A scalar stays the text that stands in the file, so that ``expected_answer: 1.10`` means those four characters and
``no`` is a word. Whoever reads it says what kind of value he wants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from casemate.config import Loader
from casemate.errors import DataError

MOST = 5_000_000
"""Characters of a file that are read."""
M = TypeVar("M", bound=BaseModel)
_NULL = "tag:yaml.org,2002:null"


class Fault(NamedTuple):
    """Something wrong with a mapping: the key, empty for the whole of it; and what, in words that go on after it."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field} {self.message}".strip()


class Faults(ValueError):
    """What a model's own validator finds wrong, several things at once."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = tuple(faults)


def compose(text: str, name: str) -> yaml.Node | None:
    """The nodes of a text; None if there is nothing in it.

    Args:
        text: YAML.
        name: Of the file, for errors.

    Raises:
        DataError: If it is no YAML, has aliases, or is too large; the message has the line.
    """
    if len(text) > MOST:
        raise DataError(f"{name} has {len(text):,} characters; at most {MOST:,} are read")
    try:
        loader = Loader(text)
        try:
            node: yaml.Node | None = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise DataError(f"{where}: no valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = "too deeply nested" if isinstance(error, RecursionError) else error
        raise DataError(f"{name}: no valid YAML: {why}") from error
    return node


def plain(node: yaml.Node) -> Any:
    """The value of a node: texts, lists, dictionaries; None where nothing is written. Of equal keys the last counts."""
    if isinstance(node, yaml.MappingNode):
        return {plain(key) if isinstance(key, yaml.ScalarNode) else str(line(key)): plain(v) for key, v in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [plain(item) for item in node.value]
    return None if node.tag == _NULL else node.value


def line(node: yaml.Node, path: Sequence[str | int] = ()) -> int:
    """The line, from 1, of what a path of keys and places leads to; of a key, where the path ends in one.

    Where the path leads nowhere, as to a key that is missing, it is the line of what it should be in.
    """
    at: int = node.start_mark.line + 1
    for step in path:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if getattr(key, "value", None) == step]
            if not found:
                return at
            key, node = found[-1]
            at = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            at = node.start_mark.line + 1
        else:
            return at
    return at


def validated(model: type[M], node: yaml.Node) -> tuple[M | None, list[tuple[int, str]]]:
    """A mapping as a model, None if it is none; and all that is wrong with it, each with its line.

    Texts become the numbers and truth values that the model wants.
    """
    if not isinstance(node, yaml.MappingNode):
        return None, [(line(node), f"must hold keys and values, such as {', '.join(list(model.model_fields)[:4])}")]
    values = plain(node)
    blank = [key for key, value in values.items() if value is None]
    wrong = [(line(node, [key]), f"{key} has no value; leave it out, or write one") for key in blank]
    wrong += [(again, f"{key} stands twice, first in line {first}") for key, first, again in doubled(node)]
    try:
        return model.model_validate({key: value for key, value in values.items() if value is not None}), wrong
    except ValidationError as error:
        told = [
            fault for e in error.errors() if e["loc"][:1] not in {(key,) for key in blank} for fault in _told(model, e)
        ]
        return None, wrong + [(line(node, path), what) for path, what in told]


def _told(model: type[BaseModel], error: Any) -> list[tuple[list[str | int], str]]:
    """One of pydantic's complaints in our words, with the place it is about."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, Faults):
        return [([fault.field], str(fault)) for fault in cause.faults]
    path = list(error["loc"])
    where = ".".join(map(str, path))
    if error["type"] == "extra_forbidden":
        near = get_close_matches(str(path[-1]), model.model_fields, 1, 0.0)
        return [(path, f"{where} is no known key; nearest: {near[0]}")]
    if error["type"] == "missing":
        return [(path, f"{where} is missing")]
    shown = repr(error["input"])
    why = error["msg"].removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        why = "it must not be blank, nor begin or end so"
    return [(path, f"{where} is {shown if len(shown) < 80 else shown[:77] + '...'}: {why[0].lower()}{why[1:]}")]


def doubled(node: yaml.MappingNode) -> Iterator[tuple[str, int, int]]:
    """Keys that a mapping has twice, each with the line of the first and of the second."""
    seen: dict[str, int] = {}
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        at = key.start_mark.line + 1
        if key.value in seen:
            yield key.value, seen[key.value], at
        seen.setdefault(key.value, at)
