"""Changes single values of a casemate.yaml as text, so that comments, layout and ``${SECRETS}`` stay.

A change is made in one place of the text. The file is replaced only if the new configuration differs from the old one
in nothing but the wanted values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from casemate import config as configuration
from casemate.config import Config
from casemate.errors import BackendError, CasemateError
from casemate.runtime.files import write_atomically


def set_values(path: Path, values: Mapping[str, bool | str]) -> str:
    """Sets keys of a configuration file, such as ``{"guard.mode": "enforce"}``.

    Returns:
        Reason why the file could not be changed; empty if it was. Either way it is whole.
    """

    def candidates(text: str) -> Iterable[str]:
        yield reduce(lambda changed, pair: _with_value(changed, *pair), values.items(), text)

    return edit(path, candidates, lambda before, after: _with_values(before, values) == after.model_dump())


def edit(path: Path, candidates: Callable[[str], Iterable[str]], accept: Callable[[Config, Config], bool]) -> str:
    """Replaces a configuration file by the first candidate text that is accepted.

    Args:
        path: The configuration file.
        candidates: Returns changed texts for the present text.
        accept: Whether the second configuration differs from the first, the present one, as intended.

    Returns:
        Reason why the file could not be changed; empty if it was.
    """
    try:
        text = path.read_bytes().decode("utf-8")  # keeps the line ends
        before = configuration.read(path)
    except (OSError, UnicodeDecodeError, CasemateError):
        return f"there is no {path.name} that can be read in {path.parent.resolve()}"
    try:
        for changed in candidates(text):
            if _is_accepted(changed, path, before, accept):
                return _replace_file(path, changed)
    except yaml.YAMLError:
        pass
    return f"{path.name} is laid out in a way that cannot be changed safely"


def entry(node: Any, name: str) -> Any:
    """The value of a key of a YAML mapping; None if it has none."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for key, value in pairs if key.value == name), None)


def substitute(text: str, node: Any, new: str) -> str:
    """The text with another value at a YAML node."""
    return text[: node.start_mark.index] + new + text[node.end_mark.index :]


def insert(text: str, node: Any, new: str) -> str:
    """The text with a further first entry of a YAML mapping, in its own style."""
    if node.flow_style:
        at = node.start_mark.index + 1
        return f"{text[:at]}{new}{', ' if node.value else ''}{text[at:]}"
    at = node.start_mark.index
    return f"{text[:at]}{new}{_line_end(text)}{' ' * node.start_mark.column}{text[at:]}"


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _is_accepted(changed: str, path: Path, before: Config, accept: Callable[[Config, Config], bool]) -> bool:
    try:
        after = configuration.parse(yaml.safe_load(changed), name=path.name, folder=path.parent)
    except (yaml.YAMLError, CasemateError):
        return False
    return accept(before, after)


def _with_value(text: str, key: str, value: bool | str) -> str:
    """The text with one more value; unchanged where the layout does not permit it."""
    section, name = key.split(".")
    new = str(value).lower() if isinstance(value, bool) else value
    root = yaml.compose(text, yaml.SafeLoader)
    held = entry(root, section)
    if held is None and getattr(root, "flow_style", False):
        return insert(text, root, f"{section}: {{{name}: {new}}}")
    if held is None:
        end = _line_end(text)
        return f"{text.rstrip()}{end}{section}: {{{name}: {new}}}{end}"
    present = entry(held, name)
    if present is not None:
        return substitute(text, present, new)
    return insert(text, held, f"{name}: {new}") if isinstance(held, yaml.MappingNode) else text


def _with_values(config: Config, values: Mapping[str, bool | str]) -> dict[str, Any]:
    wanted = config.model_dump()
    for key, value in values.items():
        section, name = key.split(".")
        wanted[section][name] = value
    return wanted


def _replace_file(path: Path, text: str) -> str:
    """Puts the file in place, whole or not at all, with the rights it had."""
    try:
        place = path.resolve()
        rights = place.stat().st_mode & 0o777
        write_atomically(place, text.encode("utf-8"), rights)
    except (OSError, BackendError) as error:
        cause = error.__cause__ or error
        return f"{path.name} cannot be written: {getattr(cause, 'strerror', None) or type(cause).__name__}"
    return ""
