"""Moving the operating point: the share of harmless questions that may be flagged, ``mirabel.significance``.

It takes effect in the running guard at once: the defense reads it anew for each question; and in other gateways on the
same store seconds later (``Settings``). To last, it is also written into casemate.yaml. The file is changed in one
place only, as text, so comments and secrets stay; and it is written only if what it then says differs from what it said
in nothing but this value.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from casemate import config as configuration
from casemate.app import App
from casemate.config import FILE, Config, Part
from casemate.defenses.mirabel import Mirabel
from casemate.errors import CasemateError, DataError
from casemate.lab.cost_charts import written
from casemate.types import Event

KIND = "setting"
NAME = "mirabel.significance"
DEFENSE = "mirabel"


def defense_of(app: App) -> Mirabel | None:
    """The defense whose operating point is moved: the first of its kind."""
    return next((d for d in app.guard.defenses if isinstance(d, Mirabel)), None)


def move(app: App, significance: float, by: str) -> str:
    """Sets the operating point of the running guard, notes who did, and writes it into casemate.yaml. Blocks.

    Returns:
        Why it could not be written; empty if it was. In either case it is in force until the process ends.

    Raises:
        DataError: If the guard has no such defense, or the value is not between 0 and 1.
        BackendError: If it could not be noted; nothing has changed then.
    """
    defense = defense_of(app)
    if defense is None:
        raise DataError("the guard has no mirabel, so there is no operating point; see guard.defenses in casemate.yaml")
    if not 0 < significance < 1:
        raise DataError(f"the significance is {significance}; it must lie between 0 and 1")
    body = {"name": NAME, "before": defense.significance, "after": significance, "by": by}
    app.store.append(Event(uuid.uuid4().hex, datetime.now(UTC), KIND, body))
    if not app.store.flush():
        raise DataError("the event store did not take the change, so it was not made; see that it can be written")
    defense.significance = significance
    return save(app.config.folder / FILE, significance)


class Settings:
    """Follows operating points that were set in other gateways on the same store, and in this one before a restart.

    One counts if it was set where what is in force here was in force. So gateways that began with the same
    casemate.yaml go the same way, and one whose file was since given another value by hand keeps that.

    Args:
        app: The system.
    """

    def __init__(self, app: App) -> None:
        self._app, self._place = app, 0

    def follow(self) -> None:
        """Takes in what is new. Blocks.

        Raises:
            BackendError: If the store cannot be read.
        """
        events, self._place = self._app.store.follow(KIND, self._place)
        defense = defense_of(self._app)
        for body in (event.body for event in events if event.body.get("name") == NAME):
            if defense is not None and defense.significance == body["before"]:
                defense.significance = float(body["after"])


def save(path: Path, significance: float) -> str:
    """Writes the value into a configuration; returns why that could not be, or nothing."""
    try:
        text = path.read_text(encoding="utf-8")
        before = configuration.read(path)
    except (OSError, UnicodeDecodeError, CasemateError):
        return f"there is no {path.name} that can be read in {path.parent.resolve()}"
    for changed in _candidates(text, significance):
        try:
            raw = yaml.safe_load(changed)
            after = configuration.parse(raw, name=path.name, folder=path.parent)
        except (yaml.YAMLError, CasemateError):
            continue
        if _same_but(before, after, significance):
            return _written(path, changed)
    return f"{path.name} is laid out in a way that cannot be changed safely"


def line(significance: float) -> str:
    """What to write into casemate.yaml by hand."""
    return f"guard:\n  defenses:\n    - {{use: {DEFENSE}, significance: {written(significance)}}}"


def _candidates(text: str, significance: float) -> Iterator[str]:
    """The text with the value put in where it belongs; each is to be checked."""
    value = _yaml(significance)
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return
    if root is None:
        yield f"{text}\nguard: {{defenses: [{{use: {DEFENSE}, significance: {value}}}]}}\n"
        return
    guard = _entry(root, "guard")
    defenses = _entry(guard, "defenses") if guard is not None else None
    if guard is None:
        yield f"{text.rstrip()}\nguard: {{defenses: [{{use: {DEFENSE}, significance: {value}}}]}}\n"
    elif defenses is None and isinstance(guard, yaml.MappingNode):
        yield _before(text, guard, f"defenses: [{{use: {DEFENSE}, significance: {value}}}]")
    for node in defenses.value if isinstance(defenses, yaml.SequenceNode) else ():
        if isinstance(node, yaml.ScalarNode) and node.value == DEFENSE:
            yield _put(text, node, f"{{use: {DEFENSE}, significance: {value}}}")
        elif isinstance(node, yaml.MappingNode) and (held := _entry(node, "significance")) is not None:
            yield _put(text, held, value)
        elif isinstance(node, yaml.MappingNode):
            yield _before(text, node, f"significance: {value}")


def _yaml(significance: float) -> str:
    text = written(significance)
    return f"0{text}" if text.startswith(".") else text


def _entry(node: Any, name: str) -> Any:
    """The value of a key of a mapping; None if it has none."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for key, value in pairs if key.value == name), None)


def _put(text: str, node: Any, new: str) -> str:
    return text[: node.start_mark.index] + new + text[node.end_mark.index :]


def _before(text: str, node: Any, new: str) -> str:
    """A further first entry of a mapping, in its own style."""
    if node.flow_style:
        at = node.start_mark.index + 1
        return f"{text[:at]}{new}{', ' if node.value else ''}{text[at:]}"
    at = node.start_mark.index
    return f"{text[:at]}{new}\n{' ' * node.start_mark.column}{text[at:]}"


def _same_but(before: Config, after: Config, significance: float) -> bool:
    """Whether two configurations differ in nothing but the significance of the first mirabel."""
    parts = list(before.guard.defenses)
    at = next((i for i, part in enumerate(parts) if part.use == DEFENSE), None)
    if at is None:
        return False
    parts[at] = Part(use=DEFENSE, **{**parts[at].options, "significance": significance})
    wanted = before.model_copy(update={"guard": before.guard.model_copy(update={"defenses": tuple(parts)})})
    return wanted.model_dump() == after.model_dump()


def _written(path: Path, text: str) -> str:
    """Puts the file in place, whole or not at all, with the rights it had."""
    try:
        place = path.resolve()
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, place.stat().st_mode & 0o777)
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        return f"{path.name} cannot be written: {error.strerror or type(error).__name__}"
    return ""
