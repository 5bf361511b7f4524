"""casemate.yaml -> one validated tree. Unknown keys are refused; secrets come from the environment only.

No object is built here: that is ``app.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from casemate.errors import ConfigError
from casemate.types import MAX_K, Secret

FILE = "casemate.yaml"
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Section(BaseModel):
    """Part of the configuration; keys that nobody reads are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(BaseModel):
    """A plug-in by its name, with its options: ``minilm``, or ``{use: minilm, threads: 2}``."""

    model_config = ConfigDict(extra="allow", frozen=True)
    use: str = Field(validation_alias=AliasChoices("use", "name"))

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        named = {"use": value} if isinstance(value, str) else value
        if isinstance(named, Mapping) and any(isinstance(named.get(key), Secret) for key in ("use", "name")):
            raise ValueError("a plug-in's name is written out, not taken from the environment")
        return named

    @property
    def options(self) -> dict[str, Any]:
        """What the plug-in is built with."""
        return dict(self.model_extra or {})


class ChunkSection(Section):
    """How texts are cut."""

    tokens: int = Field(default=0, ge=0, description="Tokens of a chunk; 0: as many as the embedder reads.")
    overlap: int = Field(
        default=32, ge=0, description="Tokens that a chunk shares with the one before; at most half a chunk."
    )


class RagSection(Section):
    """The system under protection."""

    corpus: Path | None = Field(default=None, description="Folder or file that `casemate index` reads.")
    max_file_mb: float = Field(
        default=64, gt=0, le=1e6, description="Larger files, and larger lines of jsonl, are left out and named."
    )
    chunk: ChunkSection = ChunkSection()
    embedder: Part = Field(default=Part(use="minilm"), description="Turns texts into vectors.")
    index: Part = Field(default=Part(use="sqlite"), description="Keeps documents, vectors and moments.")
    generator: Part = Field(default=Part(use="extractive"), description="Writes the answer.")
    instructions: str = Field(
        default="", repr=False, description="What a generating model is told to do; empty: our wording."
    )
    k: int = Field(default=5, ge=1, le=MAX_K, description="Documents read for an answer.")


class GuardSection(Section):
    """What protects it."""

    mode: Literal["enforce", "observe", "off"] = Field(
        default="enforce", description="`observe` notes every verdict and changes nothing; `off` asks no defense."
    )
    on_error: Literal["closed", "open"] = Field(
        default="closed",
        description="When a defense fails: `closed` answers without any context, `open` without that defense.",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false

    defenses: tuple[Part, ...] = Field(default=(Part(use="mirabel"),), description="In the order in which they act.")


class CalibrateSection(Section):
    """How the guard learns what harmless questions are like (`casemate calibrate`)."""

    log: Path | None = Field(
        default=None,
        description="Harmless questions that people asked: plain lines or jsonl. Without it they are made.",
    )
    questions: int = Field(default=800, ge=20, le=100_000, description="Harmless questions made, or taken of the log.")
    documents: int = Field(default=120, ge=20, le=10_000, description="Documents that are probed.")
    seed: int = Field(default=7, ge=0, description="Of everything that is drawn.")


class GateSection(Section):
    """What must hold for a red-team run to pass."""

    adjusted_accuracy: float = Field(
        default=0.05, gt=0, lt=0.5, description="How much better than a coin an attacker may tell members from others."
    )
    harmless: float = Field(
        default=0.05, gt=0, lt=1, description="Share of harmless questions that may be answered otherwise."
    )


class CrawlSection(Section):
    """How much of the collection crawlers carry away (`casemate redteam crawl`)."""

    attacks: tuple[Part, ...] = Field(
        default=tuple(Part(use=name) for name in ("composite", "rag_thief", "rag_crawler")),
        description="Which crawlers, with their options.",
    )
    questions: int = Field(default=300, ge=1, description="Questions that each may ask.")
    clients: int = Field(default=1, ge=1, description="Names that each goes by, one after another.")
    recovered: float = Field(
        default=0.05, ge=0, le=1, description="Gate: share of the chunks that a crawler may recover, guard on."
    )


class RedteamSection(Section):
    """How the system is attacked (`casemate redteam run`)."""

    attacks: tuple[Part, ...] = Field(
        default=tuple(Part(use=name) for name in ("direct", "s2mia", "mba", "interrogation", "dcmi", "menta")),
        description="Which attacks, with their options.",
    )
    members: int = Field(default=200, ge=10, description="Documents that are attacked and in the index.")
    nonmembers: int = Field(default=200, ge=10, description="Documents that are attacked and held out of it.")
    split: Path | None = Field(default=None, description="A json file that names them instead.")
    reader: Part = Field(
        default=Part(use="obedient"),
        description="Who writes the answers: `obedient` simulates an able model; `own` is `rag.generator`.",
    )
    benign: Path | None = Field(
        default=None,
        description="Harmless questions, not those of `calibrate.log`, that tell the guard's cost. Without it, made.",
    )
    identity: Literal["candidate", "question", "campaign"] = Field(
        default="candidate", description="Who the attacker seems to be: another client for each of these."
    )
    budget: int | None = Field(default=None, ge=1, description="Questions in all; unset: as many as it takes.")
    concurrency: int = Field(default=4, ge=1, le=64, description="Candidates attacked side by side.")
    seed: int = Field(default=7, ge=0, description="Of everything that is drawn.")
    folder: Path = Field(default=Path(".casemate/redteam"), description="Where the lab keeps its work and the report.")
    gate: GateSection = GateSection()
    crawl: CrawlSection = CrawlSection()


class PrivacySection(Section):
    """What may be noted about people."""

    log_text: bool = Field(default=False, description="Note the text of a question beside its verdict.")


class Config(Section):
    """The whole of casemate.yaml."""

    rag: RagSection = RagSection()
    guard: GuardSection = GuardSection()
    calibrate: CalibrateSection = CalibrateSection()
    redteam: RedteamSection = RedteamSection()
    store: Part = Field(default=Part(use="sql_events"), description="Keeps events.")
    privacy: PrivacySection = PrivacySection()
    _folder: Path = PrivateAttr(default=Path())

    @property
    def folder(self) -> Path:
        """Where relative paths start: the folder of the file."""
        return self._folder


class _Loader(yaml.SafeLoader):
    """Plain values only: aliases let a few lines stand for millions."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        return super().compose_node(parent, index)


def read(path: Path | None = None) -> Config:
    """The configuration in a file; None: ``casemate.yaml`` here, or the defaults where there is none.

    Raises:
        ConfigError: If the file is missing, no YAML, or holds something unknown or out of range.
    """
    if path is None and not Path(FILE).exists():
        return Config()
    file = path or Path(FILE)
    try:
        raw = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the configuration {file}: {why}; 'casemate init' writes one") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, LookupError) as error:
        raise ConfigError(f"{file} is no valid YAML: {error}") from error
    return parse(raw or {}, name=str(file), folder=file.parent)


def parse(raw: Any, name: str = "configuration", folder: Path = Path()) -> Config:
    """The configuration in a mapping, as YAML gives it.

    Raises:
        ConfigError: As ``read``.

    >>> parse({"guard": {"mod": "off"}})
    Traceback (most recent call last):
        ...
    casemate.errors.ConfigError: configuration: guard.mod is no known key; known: mode, on_error, defenses
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{name}: the file must hold keys and values, not {type(raw).__name__}")
    try:
        config = Config.model_validate(_expand(raw, name))
    except ValidationError as error:
        raise ConfigError(f"{name}: " + "; ".join(_say(e) for e in error.errors())) from error
    config._folder = folder
    return config


def changed(config: Config, **sections: Mapping[str, Any]) -> Config:
    """The configuration with other values for some keys of these sections, checked as if they stood in the file.

    Raises:
        ConfigError: As ``read``.
    """
    try:
        merged = {name: dict(getattr(config, name)) | dict(values) for name, values in sections.items()}
        found = Config.model_validate(dict(config) | merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_say(e) for e in error.errors())) from error
    found._folder = config.folder
    return found


def _expand(value: Any, name: str) -> Any:
    """``${NAME}`` replaced by the environment's value; a text that held one is a secret from then on."""
    if isinstance(value, Mapping):
        return {k: _expand(v, name) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand(v, name) for v in value]
    if not isinstance(value, str) or not VARIABLE.search(value):
        return value
    missing = [v for v in VARIABLE.findall(value) if v not in os.environ]
    if missing:
        raise ConfigError(f"{name}: the environment variable {missing[0]} is not set, and the configuration needs it")
    return Secret(VARIABLE.sub(lambda m: os.environ[m[1]], value))


def _say(error: Any) -> str:
    """One of pydantic's complaints in our words, with what is allowed."""
    where = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        section: Any = Config
        for step in error["loc"][:-1]:
            section = section.model_fields[step].annotation
        return f"{where} is no known key; known: {', '.join(section.model_fields)}"
    if error["type"] == "missing":
        return f"{where} is missing"
    return f"{where} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
