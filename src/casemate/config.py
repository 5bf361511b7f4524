"""Reads casemate.yaml into one validated tree.

Unknown keys are refused, and secrets come from the environment only. This module builds no objects; `casemate.app`
does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

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

from casemate.errors import ConfigError, did_you_mean, shown_value, validation_reason
from casemate.text.output_transforms import TRANSFORMS
from casemate.types import MAX_K, VARIABLE, Secret

FILE = "casemate.yaml"


class Section(BaseModel):
    """One section of the configuration. Refuses unknown keys, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PluginSpec(BaseModel):
    """A plug-in by name, with its options: ``minilm``, or ``{use: minilm, threads: 2}``."""

    model_config = ConfigDict(extra="allow", frozen=True)
    use: str = Field(validation_alias=AliasChoices("use", "name"))

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        named = {"use": value} if isinstance(value, str) else value
        if isinstance(named, Mapping) and any(isinstance(named.get(key), Secret) for key in ("use", "name")):
            raise ValueError("the name of a plug-in cannot come from the environment; write it out")
        return named

    @property
    def options(self) -> dict[str, Any]:
        """The options: every key but ``use``."""
        return dict(self.model_extra or {})


class ChunkSection(Section):
    """How documents are split into chunks."""

    tokens: int = Field(default=0, ge=0, description="Tokens per chunk; 0: the embedder's maximum.")
    overlap: int = Field(
        default=32, ge=0, description="Tokens that a chunk shares with the previous one; at most half a chunk."
    )


class RagSection(Section):
    """The RAG system under protection."""

    corpus: Path | None = Field(default=None, description="Folder or file that `casemate index` reads.")
    max_file_mb: float = Field(
        default=64, gt=0, le=1e6, description="Larger files, and larger lines of jsonl, are skipped and reported."
    )
    chunk: ChunkSection = ChunkSection()
    embedder: PluginSpec = Field(default=PluginSpec(use="minilm"), description="Turns texts into vectors.")
    index: PluginSpec = Field(
        default=PluginSpec(use="sqlite"), description="Stores documents, vectors and corpus moments."
    )
    generator: PluginSpec = Field(default=PluginSpec(use="extractive"), description="Writes the answer.")
    instructions: str = Field(
        default="", repr=False, description="System prompt of a generating model; empty: the built-in one."
    )
    k: int = Field(default=5, ge=1, le=MAX_K, description="Documents retrieved for an answer.")


class EntitlementSection(Section):
    """A rule that entitles clients to sources."""

    groups: tuple[str, ...] = Field(default=(), description="Groups of clients; empty: every client.")
    metadata: Mapping[str, str | tuple[str, ...]] = Field(
        default={}, description="Metadata keys of documents with the accepted values; empty: every document."
    )
    sources: tuple[str, ...] = Field(
        default=(),
        description="Patterns of names of sources, such as `public/*`; `*` matches slashes, too; empty: every one.",
    )


class AudienceSection(Section):
    """Which clients may read which sources in full. Applies in mode `enforce`; `observe` changes nothing."""

    unentitled: Literal["full", "quorum", "nothing"] = Field(
        default="full",
        description="What clients receive of sources that they may not read in full: `full` text all the same, "
        "`quorum` answers (needs the defense `quorum`), or `nothing`.",
    )
    entitled: tuple[EntitlementSection, ...] = Field(
        default=(),
        description="Rules of one or more of `groups` of clients, `metadata` of documents, and `sources`, patterns of "
        "names. A client may read a source in full if one rule fits in all parts, or if the document's metadata key "
        "`readers` names the client.",
    )
    function: str = Field(
        default="",
        description="A further rule: `module:name` of a function of the query and the document, which returns True if "
        "the client may read the document in full. Anything else, also an exception, entitles no client.",
    )


class GuardSection(Section):
    """The guard and its defenses."""

    mode: Literal["enforce", "observe", "off"] = Field(
        default="enforce",
        description="`observe` records every verdict and changes nothing; `off` runs no defense.",
    )
    on_error: Literal["closed", "open"] = Field(
        default="closed",
        description="When a defense fails: `closed` answers without any context, `open` without that defense.",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _off_as_written(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML 1.1 reads a bare `off` as false

    defenses: tuple[PluginSpec, ...] = Field(
        default=(PluginSpec(use="mirabel"),), description="The defenses, in the order in which they run."
    )
    audience: AudienceSection = AudienceSection()

    @field_validator("defenses")
    @classmethod
    def _each_defense_once(cls, value: tuple[PluginSpec, ...]) -> tuple[PluginSpec, ...]:
        names = [spec.use for spec in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} is given more than once; name each defense once")
        return value

    @model_validator(mode="after")
    def _audience_is_carried_out(self) -> GuardSection:
        wanted = self.audience.unentitled
        if wanted != "full" and self.mode == "off":
            raise ValueError(f"audience.unentitled is {wanted!r}, and mode off gives every client full text")
        if wanted == "quorum" and "quorum" not in {spec.use for spec in self.defenses}:
            raise ValueError("audience.unentitled is 'quorum', which is not in defenses; add it before crawl_limit")
        if wanted == "full" and (self.audience.entitled or self.audience.function):
            raise ValueError("audience.entitled has rules without effect; set audience.unentitled to quorum or nothing")
        return self


class CalibrateSection(Section):
    """How the guard is calibrated on benign queries (`casemate calibrate`)."""

    query_log: Path | None = Field(
        default=None,
        description="Benign queries from real users: plain lines or jsonl. Without it, synthetic questions are used.",
    )
    questions: int = Field(
        default=800, ge=20, le=100_000, description="Benign queries: generated, or at most sampled from the log."
    )
    documents: int = Field(default=120, ge=20, le=10_000, description="Documents probed by the published attacks.")
    seed: int = Field(default=7, ge=0, description="Seed of all random choices.")


class GateSection(Section):
    """Limits that a red-team run must meet to pass."""

    adjusted_accuracy: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Largest adjusted accuracy of an attacker: max(a, 1 - a) - 0.5, where 0 is guessing.",
    )
    harmless: float = Field(
        default=0.05, gt=0, lt=1, description="Largest share of benign queries whose answer the guard may change."
    )


class CrawlSection(Section):
    """Extraction attacks: how much of the collection a crawler recovers (`casemate redteam crawl`)."""

    attacks: tuple[PluginSpec, ...] = Field(
        default=tuple(PluginSpec(use=name) for name in ("composite", "rag_thief", "rag_crawler")),
        description="The crawlers, with their options.",
    )
    questions: int = Field(default=300, ge=1, description="Query budget of each crawler.")
    clients: int = Field(default=1, ge=1, description="Client names that each crawler uses, one after another.")
    schedule: Literal["rotate", "adaptive"] = Field(
        default="rotate",
        description="`rotate`: the clients ask in turn. `adaptive`: one asks until its replies get shorter, then the "
        "next.",
    )
    transforms: tuple[str, ...] = Field(
        default=(),
        description="Output transforms. Each crawler also runs once with each: it asks for answers in this form, and "
        f"decodes them. Known: {', '.join(TRANSFORMS)}.",
    )
    max_recovered: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Largest share of the chunks that a crawler may recover with the guard on.",
    )


class ProbeSection(Section):
    """Instructions hidden in documents, and personal data in answers (`casemate redteam probe`)."""

    attacks: tuple[PluginSpec, ...] = Field(
        default=(PluginSpec(use="injection"),), description="The injection attacks, with their options."
    )
    questions: int = Field(
        default=80,
        ge=1,
        description="Ordinary questions for each effect. With the default limit, fewer than 72 cannot pass.",
    )
    max_followed: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Largest share of the questions in which an injected instruction may be followed, guard on.",
    )
    personal_data: PluginSpec | None = Field(
        default=None,
        description="A personal data finder, such as `presidio`. The answers to the ordinary questions are searched "
        "with it; without it they are not.",
    )
    max_personal_data: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Largest share of the questions whose answer may contain personal data, guard on.",
    )


class ProvidedSection(Section):
    """Texts of known membership that the operator provides for an external target, one per file or record.

    The formats are those of `rag.corpus`.
    """

    members: Path | None = Field(default=None, description="Texts that are in its collection.")
    nonmembers: Path | None = Field(
        default=None, description="Texts that are not in it, of the same genre and period as the members."
    )
    corpus: Path | None = Field(
        default=None,
        description="The whole collection, to measure what crawlers recover. Without it, the members serve as a "
        "sample.",
    )


SkippableCheck: TypeAlias = Literal["guard_off", "harmless", "two_worlds", "defense_errors", "fresh_clients"]
"""Checks that need more of a target than answers."""


class RedteamSection(Section):
    """How the system is attacked (`casemate redteam run`)."""

    target: PluginSpec = Field(
        default=PluginSpec(use="own"),
        description="The target: `own` is this system; else a name of `targets`, or `http`, `openai_endpoint`, "
        "`python`, `langchain_runnable` with options.",
    )
    target_off: PluginSpec | None = Field(
        default=None, description="The same external target with its guard off, to measure the effect of the guard."
    )
    targets: Mapping[str, PluginSpec] | None = Field(
        default=None, description="External targets, by names of your choice."
    )
    i_own_this_target: bool = Field(
        default=False,
        description="Must be true, or `--own` given, before an external target is attacked.",
    )
    provided: ProvidedSection = ProvidedSection()
    skip_checks: tuple[SkippableCheck, ...] = Field(
        default=(),
        description="Checks that an external target does not support and that you accept as untested: `guard_off`, "
        "`harmless`, `two_worlds`, `defense_errors`, `fresh_clients`. A check that is neither run nor skipped is "
        "INCONCLUSIVE.",
    )

    attacks: tuple[PluginSpec, ...] = Field(
        default=tuple(PluginSpec(use=name) for name in ("direct", "s2mia", "mba", "interrogation", "dcmi", "menta")),
        description="The membership inference attacks, with their options.",
    )
    members: int = Field(default=200, ge=10, description="Candidates that are in the index.")
    nonmembers: int = Field(default=200, ge=10, description="Candidates that are removed from the lab's index.")
    split: Path | None = Field(default=None, description="A json file that lists both, instead of a random split.")
    reader: PluginSpec = Field(
        default=PluginSpec(use="simulated_reader"),
        description="The model that writes the answers: `simulated_reader` simulates an able model; `own` is "
        "`rag.generator`.",
    )
    benign: Path | None = Field(
        default=None,
        description="Benign queries that measure the cost of the guard; use others than in `calibrate.query_log`. "
        "Without it, synthetic questions are used.",
    )
    identity: Literal["candidate", "question", "campaign"] = Field(
        default="candidate",
        description="How often the attacker changes its client name: per candidate, per question, or never.",
    )
    budget: int | None = Field(default=None, ge=1, description="Largest number of queries in total; unset: no limit.")
    concurrency: int = Field(default=4, ge=1, le=64, description="Candidates attacked in parallel.")
    seed: int = Field(default=7, ge=0, description="Seed of all random choices.")
    folder: Path = Field(default=Path(".casemate/redteam"), description="Folder of the lab's files and the report.")
    gate: GateSection = GateSection()
    crawl: CrawlSection = CrawlSection()
    probe: ProbeSection = ProbeSection()


class MonitorSection(Section):
    """Canaries: known questions, asked on a schedule (`casemate canary`)."""

    canaries: Path = Field(default=Path("canaries.yaml"), description="The canary set.")
    target: PluginSpec = Field(
        default=PluginSpec(use="own"),
        description="The monitored system: `own` is this one with its guard; else `python`, `http` or "
        "`openai_endpoint`.",
    )
    judge: PluginSpec | None = Field(
        default=None,
        description="A generator that judges expected refusals, and expected behaviors without a built-in check.",
    )
    interval: str = Field(
        default="1h", pattern=r"^[1-9]\d{0,5}[smhd]$", description="Time between two runs, such as 15m, 1h or 1d."
    )
    client: str = Field(
        default="canary-{canary}-{run}",
        min_length=1,
        description="Client name of canary queries; `{canary}` and `{run}` are replaced by the ids.",
    )
    concurrency: int = Field(default=8, ge=1, le=64, description="Queries in parallel.")
    timeout_s: float = Field(default=30.0, gt=0, description="Timeout of one answer.")
    page_rules: bool = Field(
        default=False,
        description="Alert also if a canary fails suddenly, failed in 8 of its last 10 runs, or if more than 10 % of a "
        "run fail.",
    )
    runs_per_false_alert: float = Field(
        default=1000.0, gt=0, description="Average number of runs between two false alerts, at least."
    )
    channels: tuple[PluginSpec, ...] = Field(
        default=(), description="Channels that receive alerts: `webhook` or `apprise`, with options."
    )
    gate: bool | Literal["observe"] = Field(
        default=False,
        description="Quarantines new documents that resemble poisoned ones, however they arrive, once the index has "
        "500 chunks to compare with. `observe` records them and indexes them nevertheless.",
    )
    gate_reader: PluginSpec | None = Field(
        default=None,
        description="The generator that answers watched questions with and without a new document, to see whether the "
        "answer changes; `own` is `rag.generator`. Default: quotes a sentence, without a model.",
    )
    notifications_per_hour: int = Field(
        default=20, ge=1, description="Notifications per channel and hour; further ones are summarized."
    )

    def is_canary(self, client: str) -> bool:
        """Whether a client name is that of a canary query."""
        prefix = self.client.partition("{")[0]
        return bool(prefix) and client.startswith(prefix)


class GatewaySection(Section):
    """The HTTP server (`casemate serve`)."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    model: str = Field(default="casemate", min_length=1, description="Name of the one model that is offered.")
    max_body_mb: float = Field(default=4, gt=0, le=1024, description="Largest request, in MB (10^6 bytes).")
    body_timeout_s: float = Field(default=30, gt=0, description="Timeout for receiving a request.")
    timeout_s: float = Field(default=120, gt=0, description="Timeout of a whole answer.")
    pace_ms: float = Field(
        default=100,
        ge=0,
        le=10_000,
        description="Rounds time-to-first-token up to a multiple of this, so latency does not reveal the guard's "
        "decision. The interval is longer for a key whose questions take longer. 0: no rounding.",
    )
    shutdown_grace_s: float = Field(default=30, gt=0, description="Time for running answers to finish at shutdown.")
    concurrency: int = Field(
        default=1200,
        ge=1,
        description="Concurrent requests, open streams included; further ones get 503 and Retry-After.",
    )
    concurrency_per_key: int | None = Field(
        default=None, ge=1, description="The same for one key; empty: five sixths of `concurrency`."
    )
    max_connections: int | None = Field(
        default=None,
        ge=1,
        description="Open connections, TLS handshakes included. A new one replaces one that waits for its client, of "
        "the address with most of those. Empty: the limit of file descriptors less 256.",
    )
    requests_per_minute: int = Field(default=600, ge=1, description="Rate limit of keys without their own.")
    tokens_per_day: int = Field(default=2_000_000, ge=1, description="Token budget of keys without their own.")
    cors_origins: tuple[str, ...] = Field(default=(), description="Origins whose pages may call the API; empty: none.")
    tls_cert: Path | None = Field(default=None, description="Certificate chain (PEM); with it the gateway speaks TLS.")
    tls_key: Path | None = Field(default=None, description="Private key of the certificate (PEM).")
    trusted_proxies: tuple[str, ...] = Field(
        default=(), description="Addresses of proxies whose X-Forwarded-For and -Proto headers are trusted."
    )
    mcp: bool = Field(
        default=False, description="Whether `/v1/mcp` offers tools to agents (Model Context Protocol, extra `mcp`)."
    )
    agent_memory: bool = Field(
        default=False,
        description="Whether these tools include `remember` and `forget`: entries that only their client may read in "
        "full. Needs `guard.audience.unentitled`: `nothing` or `quorum`.",
    )
    metrics: Literal["key", "open"] = Field(
        default="key",
        description="Access to `/metrics`: `key` requires role metrics or admin. `open` needs no key: a client that "
        "reaches it can see whether its question was flagged, by the counts of verdicts.",
    )
    otlp_endpoint: str = Field(
        default="",
        pattern=r"^(https?://[^\s@]+)?$",
        description="Receiver of OpenTelemetry traces (OTLP over HTTP), such as http://localhost:4318/v1/traces; "
        "empty: OTEL_EXPORTER_OTLP_ENDPOINT, or no traces.",
    )

    @model_validator(mode="after")
    def _both_tls_files(self) -> GatewaySection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both, or neither")
        return self


class PrivacySection(Section):
    """What may be recorded about clients."""

    log_text: bool = Field(default=False, description="Record the text of a query with its verdict.")


class Config(Section):
    """The whole of casemate.yaml."""

    rag: RagSection = RagSection()
    guard: GuardSection = GuardSection()
    calibrate: CalibrateSection = CalibrateSection()
    redteam: RedteamSection = RedteamSection()
    monitor: MonitorSection = MonitorSection()
    gateway: GatewaySection = GatewaySection()
    store: PluginSpec = Field(default=PluginSpec(use="sql"), description="Stores events.")
    privacy: PrivacySection = PrivacySection()
    _folder: Path = PrivateAttr(default=Path())
    _file: Path = PrivateAttr(default=Path(FILE))

    @property
    def file(self) -> Path:
        """The file, as it was named."""
        return self._file

    @property
    def folder(self) -> Path:
        """Folder of the file, against which relative paths are resolved."""
        return self._folder


class StrictLoader(yaml.SafeLoader):
    """Loads YAML without aliases, because a few lines of aliases can expand to millions of nodes.

    A mapping that is constructed has each key once. Of two, YAML would drop the first one, and with it the options of
    a whole section.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Composes a node like the base class, but refuses aliases."""
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Constructs a mapping like the base class, but refuses a key that occurs twice."""
        seen = set[tuple[str, str]]()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                problem = f"the key {key.value!r} occurs twice; write its values under one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read(path: Path | None = None, variables_needed: bool = True) -> Config:
    """Reads a configuration file.

    Args:
        path: The file; None: ``casemate.yaml`` in the working directory, or the defaults if there is none.
        variables_needed: Whether an environment variable that is not set is an error. Else its name stays in the value.

    Raises:
        ConfigError: If the file is missing or not YAML, or a key is unknown or a value out of range.
    """
    if path is None and not Path(FILE).exists():
        return Config()
    file = path or Path(FILE)
    try:
        raw = yaml.load(file.read_text(encoding="utf-8"), StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the configuration {file}: {why}; run 'casemate init' to create one") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, LookupError) as error:
        raise ConfigError(f"{file} is not valid YAML: {_yaml_reason(error)}") from None  # the error quotes lines
    config = parse(raw or {}, str(file), file.parent, variables_needed)
    config._file = file
    return config


def _yaml_reason(error: Exception) -> str:
    """What is wrong and where, without the lines of the file: these may contain a secret."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    return f"{error.problem}, line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"


def resolve(config: Config | Mapping[str, Any] | Path | str, folder: Path = Path()) -> Config:
    """A configuration that is given as such, as a file, or as a mapping with the folder of its relative paths.

    Raises:
        ConfigError: See ``read``.
    """
    if isinstance(config, Config):
        return config
    return read(Path(config)) if isinstance(config, str | Path) else parse(config, folder=folder)


def parse(raw: Any, name: str = "configuration", folder: Path = Path(), variables_needed: bool = True) -> Config:
    """Validates a configuration that is given as a mapping.

    Args:
        raw: The mapping, as YAML yields it.
        name: Prefix of error messages.
        folder: Folder against which relative paths are resolved.
        variables_needed: See ``read``.

    Raises:
        ConfigError: If a key is unknown, a value is out of range, or an environment variable is not set.

    >>> parse({"rag": {"chunk": {"token": 3}}}, "yaml")
    Traceback (most recent call last):
        ...
    casemate.errors.ConfigError: yaml: unknown key 'rag.chunk.token'; did you mean 'tokens'? allowed: tokens, overlap
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{name}: the top level must be a mapping of keys to values, not {type(raw).__name__}")
    try:
        config = Config.model_validate(_expand_variables(raw, name, variables_needed))
    except ValidationError as error:
        raise ConfigError(f"{name}: {_describe(error)}") from None  # the error quotes values
    config._folder, config._file = folder, folder / FILE
    return config


def with_overrides(config: Config, **sections: Mapping[str, Any]) -> Config:
    """Returns a copy with other values for some keys, by section, validated like a file.

    Raises:
        ConfigError: If a key is unknown or a value out of range.
    """
    try:
        merged = {name: _set_values(getattr(config, name)) | dict(values) for name, values in sections.items()}
        found = Config.model_validate(dict(config) | merged)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None
    found._folder, found._file = config.folder, config.file
    return found


def _set_values(section: BaseModel) -> dict[str, Any]:
    """The values that were given, without defaults: a copy then still knows which they are."""
    return {name: value for name, value in section if name in section.model_fields_set}


def _expand_variables(value: Any, name: str, needed: bool) -> Any:
    """Replaces ``${NAME}`` by the environment's value. The resulting string is a ``Secret``."""
    if isinstance(value, Mapping):
        return {k: _expand_variables(v, name, needed) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand_variables(v, name, needed) for v in value]
    if not isinstance(value, str) or not VARIABLE.search(value):
        return value
    missing = [v for v in VARIABLE.findall(value) if v not in os.environ]
    if missing and needed:
        raise ConfigError(f"{name}: the environment variable {missing[0]} is not set, and the configuration needs it")
    return Secret(value, value) if missing else Secret.read(value)


def _describe(invalid: ValidationError) -> str:
    """All errors. Those about the alternatives of one value are one error with several reasons."""
    of_value: dict[str, list[str]] = {}
    for error in invalid.errors():
        what, reason = _key_and_reason(error)
        of_value.setdefault(what, []).append(reason)
    return "; ".join(": ".join(filter(None, (what, ", or ".join(reasons)))) for what, reasons in of_value.items())


def _key_and_reason(error: Any) -> tuple[str, str]:
    """The key of one validation error with its value, and what is allowed; empty if the first says all."""
    key = _key(error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_alternatives(error['loc'])}", ""
    if error["type"] == "missing":
        return f"{key} is missing", ""
    value = "" if isinstance(error["input"], Mapping) else f" is {shown_value(key, error['input'])}"
    return f"{key}{value}", validation_reason(error)


def _key(path: Sequence[Any]) -> str:
    """The key in the file; pydantic appends the name of the type to a value that may have one of several types."""
    section: Any = Config
    for place, step in enumerate(path):
        if step not in getattr(section, "model_fields", ()):
            break
        section = section.model_fields[step].annotation
        plain = all(get_origin(a) in (None, Literal) for a in get_args(section))
        if plain and get_origin(section) in (Union, UnionType):
            path = path[: place + 1]
            break
    return ".".join(str(step) for step in path)


def _alternatives(path: Iterable[Any]) -> str:
    """The closest key of the same section, and all of its keys."""
    *sections, last = path
    section: Any = Config
    for step in sections:  # an int is a place in a tuple of sections
        section = get_args(section)[0] if isinstance(step, int) else section.model_fields[step].annotation
    return did_you_mean(str(last), section.model_fields)
