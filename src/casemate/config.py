"""casemate.yaml -> one validated tree. Unknown keys are refused; secrets come from the environment only.

No object is built here: that is ``app.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

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
from casemate.types import MAX_K, VARIABLE, Secret

FILE = "casemate.yaml"


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


class KnownSection(Section):
    """What the owner knows of a target outside: texts, one a file or a record, as `rag.corpus` may hold them."""

    members: Path | None = Field(default=None, description="Texts that are surely in its collection.")
    nonmembers: Path | None = Field(
        default=None, description="Texts that surely are not, of the same genre and time as the members."
    )
    corpus: Path | None = Field(
        default=None, description="All that is in it, for what crawlers recover. Without it, the members as a sample."
    )


Unchecked: TypeAlias = Literal["guard_off", "harmless", "two_worlds", "defense_errors", "fresh_clients"]
"""Checks that need more of a target than answers."""


class RedteamSection(Section):
    """How the system is attacked (`casemate redteam run`)."""

    target: Part = Field(
        default=Part(use="own"),
        description="Who is attacked: `own` is this system; else a name of `targets`, or `http`, `openai_endpoint`, "
        "`python`, `langchain_runnable` with options.",
    )
    target_off: Part | None = Field(
        default=None, description="The same target outside with its guard off, to tell what the guard does."
    )
    targets: Mapping[str, Part] | None = Field(default=None, description="Targets outside by a name of your own.")
    i_own_this_target: bool = Field(
        default=False, description="Must be true before a target outside is attacked, or `--own` given."
    )
    known: KnownSection = KnownSection()
    leave_out: tuple[Unchecked, ...] = Field(
        default=(),
        description="Checks that a target outside cannot undergo and that you accept as not tested: `guard_off`, "
        "`harmless`, `two_worlds`, `defense_errors`, `fresh_clients`. What is neither made nor left out is "
        "INCONCLUSIVE.",
    )

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


class MonitorSection(Section):
    """Known questions, asked on a schedule (`casemate canary`)."""

    canaries: Path = Field(default=Path("canaries.yaml"), description="The canary set.")
    target: Part = Field(
        default=Part(use="own"),
        description="Who is asked: `own` is this system with its guard; else `python`, `http` or `openai_endpoint`.",
    )
    judge: Part | None = Field(default=None, description="A generator that judges behaviours that have no name.")
    every: str = Field(
        default="1h", pattern=r"^[1-9]\d{0,5}[smhd]$", description="From one run to the next, such as 15m, 1h or 1d."
    )
    client: str = Field(
        default="canary-{canary}-{run}",
        min_length=1,
        description="Name under which canaries are asked; `{canary}` and `{run}` stand for the ids.",
    )
    concurrency: int = Field(default=8, ge=1, le=64, description="Questions at the same time.")
    timeout_s: float = Field(default=30.0, gt=0, description="Longest time for one answer.")
    page_rules: bool = Field(
        default=False, description="Alert also on any sudden failure, 8 of the last 10, and 10 % of a run."
    )
    false_alerts: float = Field(
        default=1000.0, gt=0, description="Runs in which at most one false alert is allowed, in the long run."
    )
    channels: tuple[Part, ...] = Field(default=(), description="Who is told: `webhook` or `apprise`, with options.")
    gate: bool = Field(
        default=False,
        description="`casemate index` holds new documents back that look like poison, once it has 500 to compare with.",
    )
    notices_per_hour: int = Field(default=20, ge=1, description="Notices to a channel in an hour; more are summed up.")


class GatewaySection(Section):
    """The door for other programs (`casemate serve`)."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any that is free.")
    model: str = Field(default="casemate", min_length=1, description="Name of the one model that clients are offered.")
    max_body_mb: float = Field(default=4, gt=0, le=1024, description="Largest request, in MB (10^6 bytes).")
    body_timeout_s: float = Field(default=30, gt=0, description="Longest time that a request may take to arrive.")
    timeout_s: float = Field(default=120, gt=0, description="Longest time that an answer may take, all of it.")
    pace_ms: float = Field(
        default=100,
        ge=0,
        le=10_000,
        description="Answers are begun at multiples of this after a request came, so that time does not tell what the "
        "guard did; 0: at once.",
    )
    grace_s: float = Field(default=30, gt=0, description="Time that running answers are given when the gateway ends.")
    concurrency: int = Field(
        default=1200, ge=1, description="Requests at work at once, waiting streams included; more are told to retry."
    )
    requests_per_minute: int = Field(default=600, ge=1, description="Of each key that has no rate of its own.")
    tokens_per_day: int = Field(default=2_000_000, ge=1, description="Of each key that has no budget of its own.")
    cors: tuple[str, ...] = Field(default=(), description="Origins whose pages may call it; none: no page may.")
    tls_cert: Path | None = Field(default=None, description="Certificate chain (PEM); with it the gateway speaks TLS.")
    tls_key: Path | None = Field(default=None, description="Private key of the certificate (PEM).")
    trusted_proxies: tuple[str, ...] = Field(
        default=(), description="Addresses whose X-Forwarded-For and -Proto are believed."
    )
    metrics: Literal["key", "open"] = Field(
        default="key", description="`/metrics` for keys of role metrics or admin, or `open` to whoever reaches it."
    )
    traces: str = Field(
        default="",
        pattern=r"^(https?://[^\s@]+)?$",
        description="Where OpenTelemetry traces go (OTLP over HTTP), such as http://localhost:4318/v1/traces; empty: "
        "where OTEL_EXPORTER_OTLP_ENDPOINT says, or nowhere.",
    )

    @model_validator(mode="after")
    def _both_files(self) -> GatewaySection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both, or neither")
        return self


class PrivacySection(Section):
    """What may be noted about people."""

    log_text: bool = Field(default=False, description="Note the text of a question beside its verdict.")


class Config(Section):
    """The whole of casemate.yaml."""

    rag: RagSection = RagSection()
    guard: GuardSection = GuardSection()
    calibrate: CalibrateSection = CalibrateSection()
    redteam: RedteamSection = RedteamSection()
    monitor: MonitorSection = MonitorSection()
    gateway: GatewaySection = GatewaySection()
    store: Part = Field(default=Part(use="sql_events"), description="Keeps events.")
    privacy: PrivacySection = PrivacySection()
    _folder: Path = PrivateAttr(default=Path())

    @property
    def folder(self) -> Path:
        """Where relative paths start: the folder of the file."""
        return self._folder


class Loader(yaml.SafeLoader):
    """Plain values only: aliases let a few lines stand for millions."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As the base class, but for aliases."""
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=event.start_mark)
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
        raw = yaml.load(file.read_text(encoding="utf-8"), Loader)
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
    return Secret.read(value)


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
