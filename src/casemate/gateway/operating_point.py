"""Moves the operating point: the largest share of benign queries that a calibrated defense may flag.

The running guard uses it at once, because the defense reads ``significance`` for each query. Other gateways on the same
event store follow seconds later (``monitor.enforcement.SettingsSync``). To persist, the value is also written into
casemate.yaml (``config_file``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from casemate import config_file
from casemate.config import Config, PluginSpec
from casemate.config_file import entry, insert, substitute
from casemate.errors import DataError
from casemate.monitor.enforcement import SIGNIFICANCE, record_setting
from casemate.protocols import CalibratedDefense
from casemate.reports.format import short_rate
from casemate.system import App


def defense_of(app: App) -> CalibratedDefense | None:
    """The defense whose operating point is moved: the first that can be calibrated, whatever its mode."""
    return next((d for d in app.guard.defenses if isinstance(d, CalibratedDefense)), None)


def change(app: App, significance: float, by: str) -> str:
    """Sets the operating point, in (0, 1), of the running guard, records it, and writes it into casemate.yaml. Blocks.

    Returns why casemate.yaml could not be written; empty if it was. Either way the value is in effect until the process
    ends.

    Raises:
        DataError: If the guard has no calibrated defense.
        BackendError: If the change could not be recorded; it is not made then.
    """
    defense = defense_of(app)
    if defense is None:
        raise DataError("no defense has an operating point; add a calibrated one, such as mirabel, to guard.defenses")
    record_setting(app.store, f"{defense.name}.{SIGNIFICANCE}", significance, by, before=defense.significance)
    defense.significance = significance
    return write_config(app.config.file, defense.name, significance)


def write_config(path: Path, defense: str, significance: float) -> str:
    """Writes the value into a configuration file; returns why that failed, or ""."""
    return config_file.edit(
        path,
        lambda text: _candidates(text, defense, significance),
        lambda before, after: _differs_only_in(before, after, defense, significance),
    )


def yaml_snippet(defense: str, significance: float) -> str:
    """The lines to write into casemate.yaml by hand."""
    return f"guard:\n  defenses:\n    - {{use: {defense}, {SIGNIFICANCE}: {_yaml(significance)}}}"


def _candidates(text: str, defense: str, significance: float) -> Iterator[str]:
    """Texts with the value inserted at each place where it may belong; the caller validates them."""
    value = _yaml(significance)
    spec = f"{{use: {defense}, {SIGNIFICANCE}: {value}}}"
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return
    if root is None:
        yield f"{text}\nguard: {{defenses: [{spec}]}}\n"
        return
    guard = entry(root, "guard")
    defenses = entry(guard, "defenses") if guard is not None else None
    if guard is None:
        yield f"{text.rstrip()}\nguard: {{defenses: [{spec}]}}\n"
    elif defenses is None and isinstance(guard, yaml.MappingNode):
        yield insert(text, guard, f"defenses: [{spec}]")
    for node in defenses.value if isinstance(defenses, yaml.SequenceNode) else ():
        if isinstance(node, yaml.ScalarNode) and node.value == defense:
            yield substitute(text, node, spec)
        elif isinstance(node, yaml.MappingNode) and (held := entry(node, SIGNIFICANCE)) is not None:
            yield substitute(text, held, value)
        elif isinstance(node, yaml.MappingNode):
            yield insert(text, node, f"{SIGNIFICANCE}: {value}")


def _yaml(significance: float) -> str:
    text = short_rate(significance)
    return f"0{text}" if text.startswith(".") else text


def _differs_only_in(before: Config, after: Config, defense: str, significance: float) -> bool:
    """Whether two configurations differ in nothing but the significance of the first defense of this name."""
    parts = list(before.guard.defenses)
    at = next((i for i, part in enumerate(parts) if part.use == defense), None)
    if at is None:
        return False
    parts[at] = PluginSpec(use=defense, **{**parts[at].options, SIGNIFICANCE: significance})
    wanted = before.model_copy(update={"guard": before.guard.model_copy(update={"defenses": tuple(parts)})})
    return wanted.model_dump() == after.model_dump()
