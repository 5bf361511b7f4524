"""Reads a canary set from YAML, and reports every mistake in it with its line.

Scalars stay the text of the file, so ``expected_answer: 1.10`` means those four characters and ``no`` is a word. The
model converts them to numbers and truth values where a key needs one. YAML aliases are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from casemate.config import StrictLoader
from casemate.errors import DataError, did_you_mean, validation_reason
from casemate.monitor.canaries.canary import Canary, CanarySet, FieldErrors, unsupported_expectations

MAX_FILE_CHARACTERS = 5_000_000
"""Longest file that is read."""
JSON_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NULL = "tag:yaml.org,2002:null"


def read_canaries(path: Path, *, k: int | None = None, judge: bool = False) -> CanarySet:
    """Reads a YAML file: a list of canaries, or a mapping with ``canaries`` and optionally ``name``.

    Environment variables are not expanded. ``k`` is the number of documents in a context, if known. An expectation that
    needs more is an error, and so is one that needs a judge model, unless ``judge``.

    Raises:
        DataError: If the file cannot be read or is invalid; the message has one line per mistake.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        hint = ""
        if isinstance(error, FileNotFoundError):
            hint = "; run 'casemate canary suggest' to draft a set, or set monitor.canaries to another file"
        raise DataError(f"cannot read the canaries {path}: {why}{hint}") from error
    return parse_canaries(text, str(path), k=k, judge=judge)


def parse_canaries(text: str, name: str = "canaries.yaml", *, k: int | None = None, judge: bool = False) -> CanarySet:
    """Parses the text of a canary file. Arguments and errors: see ``read_canaries``.

    >>> parse_canaries("- {id: a, query: Why, expected_answr: '7'}", "c.yaml")
    Traceback (most recent call last):
        ...
    casemate.errors.DataError: c.yaml:1: canary 'a': unknown key 'expected_answr'; did you mean 'expected_answer'?
    """
    root = _compose_yaml(text, name)
    title, rows = _rows(root, name)
    canaries: list[Canary] = []
    errors: list[tuple[int, str]] = []
    for number, node in enumerate(rows, 1):
        found, wrong = _parse_canary(node, number, k, judge)
        errors += wrong
        canaries += [found] if found else []
    errors += _duplicate_ids(rows)
    if errors:
        raise DataError("\n".join(f"{name}:{line}: {what}" for line, what in sorted(errors)))
    return CanarySet(title or Path(name).stem, tuple(canaries))


def with_paraphrases(text: str, paraphrases: Mapping[str, Sequence[str]], name: str = "canaries.yaml") -> str:
    r"""The text of a canary file with paraphrases by canary id; all other text, comments included, stays as it is.

    Raises:
        DataError: If the text is not a valid canary file, or the result is none.

    >>> with_paraphrases("- id: a\n  query: Why?\n  expected_refusal: true\n", {"a": ["Tell me why."]})
    '- id: a\n  paraphrases: ["Tell me why."]\n  query: Why?\n  expected_refusal: true\n'
    """
    parse_canaries(text, name, judge=True)
    _, rows = _rows(_compose_yaml(text, name), name)
    for node in reversed(rows):  # from the end, so that earlier positions stay valid
        added = paraphrases.get(_value_of(node)["id"])
        if added:
            key = next(key for key, _ in node.value if key.value == "query")
            mark = key.start_mark
            listed = yaml.safe_dump(
                list(added), allow_unicode=True, default_flow_style=True, default_style='"', width=math.inf
            ).strip()
            end = ", " if isinstance(node, yaml.CollectionNode) and node.flow_style else "\n" + " " * mark.column
            text = f"{text[: mark.index]}paraphrases: {listed}{end}{text[mark.index :]}"
    parse_canaries(text, name, judge=True)
    return text


def canary_json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a canary file, for editors."""
    own = Canary.model_json_schema()
    definitions = own.pop("$defs", {}) | {"Canary": own}
    row = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/Canary"}}
    mapping = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "canaries": row},
        "required": ["canaries"],
        "additionalProperties": False,
    }
    return {"$schema": JSON_SCHEMA_DIALECT, "title": "Canaries", "anyOf": [row, mapping], "$defs": definitions}


def _rows(root: yaml.Node | None, name: str) -> tuple[str, list[yaml.Node]]:
    """Name of the set, and its canaries before validation."""
    title = ""
    if isinstance(root, yaml.MappingNode):
        values = _value_of(root)
        unknown = [key for key in values if key not in {"name", "canaries"}]
        if unknown or "canaries" not in values:
            allowed = ["name", "canaries"]
            what = (
                f"unknown key {unknown[0]!r}{did_you_mean(unknown[0], allowed)}"
                if unknown
                else f"the key 'canaries' is missing; allowed: {', '.join(allowed)}"
            )
            raise DataError(f"{name}:{_line_of(root, unknown[:1])}: {what}")
        title = str(values.get("name") or "")
        root = next(value for key, value in root.value if key.value == "canaries")
    if isinstance(root, yaml.SequenceNode) and root.value:
        return title, root.value
    where = f"{name}:{_line_of(root)}" if root else name
    raise DataError(f"{where}: no canaries; write a list with at least one")


def _parse_canary(
    node: yaml.Node, number: int, k: int | None, judge: bool
) -> tuple[Canary | None, list[tuple[int, str]]]:
    """One canary, None if invalid, and its errors with their lines."""
    found, errors = _validate(node)
    if found is not None:
        unsupported = unsupported_expectations(found, k=k, has_judge=judge)
        errors += [(_line_of(node, [error.field]), str(error)) for error in unsupported]
    values = _value_of(node)
    label = values.get("id", number) if isinstance(values, dict) else number
    return found, [(line, f"canary {label!r}: {what}") for line, what in errors]


def _duplicate_ids(rows: Sequence[yaml.Node]) -> list[tuple[int, str]]:
    first: dict[str, int] = {}
    errors = []
    for node in rows:
        values = _value_of(node)
        if isinstance(values, dict) and isinstance(values.get("id"), str):
            name, line = values["id"], _line_of(node, ["id"])
            if name in first:
                errors.append((line, f"canary {name!r}: duplicate id, first used in line {first[name]}"))
            first.setdefault(name, line)
    return errors


def _compose_yaml(text: str, name: str) -> yaml.Node | None:
    """Parses YAML to nodes; None for an empty file.

    Raises:
        DataError: If the text is not YAML, has aliases or is too long; the message has the line.
    """
    if len(text) > MAX_FILE_CHARACTERS:
        raise DataError(f"{name} has {len(text):,} characters; at most {MAX_FILE_CHARACTERS:,} are allowed")
    try:
        loader = StrictLoader(text)
        try:
            node: yaml.Node | None = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise DataError(f"{where}: invalid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = "too deeply nested" if isinstance(error, RecursionError) else error
        raise DataError(f"{name}: invalid YAML: {why}") from error
    return node


def _value_of(node: yaml.Node) -> Any:
    """A node as texts, lists and dictionaries; None where nothing is written. The last of duplicate keys wins."""
    if isinstance(node, yaml.MappingNode):
        return {
            _value_of(key) if isinstance(key, yaml.ScalarNode) else str(_line_of(key)): _value_of(value)
            for key, value in node.value
        }
    if isinstance(node, yaml.SequenceNode):
        return [_value_of(item) for item in node.value]
    return None if node.tag == _NULL else node.value


def _line_of(node: yaml.Node, path: Sequence[str | int] = ()) -> int:
    """Line, from 1, of the key or item at a path; of the innermost existing node if the path does not exist."""
    line: int = node.start_mark.line + 1
    for step in path:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if getattr(key, "value", None) == step]
            if not found:
                return line
            key, node = found[-1]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            return line
    return line


def _validate(node: yaml.Node) -> tuple[Canary | None, list[tuple[int, str]]]:
    """A mapping as a model, None if invalid, and all its errors with their lines."""
    if not isinstance(node, yaml.MappingNode):
        keys = ", ".join(list(Canary.model_fields)[:4])
        return None, [(_line_of(node), f"must be a mapping with keys such as {keys}")]
    values = _value_of(node)
    blank = [key for key, value in values.items() if value is None]
    errors = [(_line_of(node, [key]), f"{key} has no value; remove the key or add a value") for key in blank]
    errors += [(again, f"duplicate key {key!r}, first in line {first}") for key, first, again in _duplicate_keys(node)]
    try:
        return Canary.model_validate({key: value for key, value in values.items() if value is not None}), errors
    except ValidationError as error:
        reported = [e for e in error.errors() if e["loc"][:1] not in {(key,) for key in blank}]
        return None, errors + [(_line_of(node, path), what) for e in reported for path, what in _describe(e)]


def _describe(error: Any) -> list[tuple[list[str | int], str]]:
    """Messages for one pydantic error, with the path that each concerns."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, FieldErrors):
        return [([e.field], str(e)) for e in cause.errors]
    path = list(error["loc"])
    where = ".".join(map(str, path))
    if error["type"] == "extra_forbidden":
        key = str(path[-1])
        closest = get_close_matches(key, Canary.model_fields, 1, 0.0)
        return [(path, f"unknown key {where!r}; did you mean {closest[0]!r}?")]
    if error["type"] == "missing":
        return [(path, f"{where} is missing")]
    shown = repr(error["input"])
    why = validation_reason(error)
    if error["type"] == "string_pattern_mismatch":
        why = "it must not be blank, nor begin or end with a blank"
    return [(path, f"{where} is {shown if len(shown) < 80 else shown[:77] + '...'}: {why}")]


def _duplicate_keys(node: yaml.MappingNode) -> Iterator[tuple[str, int, int]]:
    """Keys that a mapping has twice, each with the line of the first and of the later one."""
    seen: dict[str, int] = {}
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        line = key.start_mark.line + 1
        if key.value in seen:
            yield key.value, seen[key.value], line
        seen.setdefault(key.value, line)
