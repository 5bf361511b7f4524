"""Resolves external targets by name or address, requires the operator's consent, and meters their use."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from casemate import config as configuration
from casemate import plugins
from casemate.config import Config, PluginSpec, RedteamSection
from casemate.errors import BackendError, ConfigError, QueryError
from casemate.plugins import build
from casemate.protocols import Progress, Target
from casemate.redteam.lab.capabilities import Capability, external_capabilities
from casemate.redteam.lab.experiment import digest
from casemate.redteam.lab.judge import OFF, ON
from casemate.runtime.concurrency import map_concurrently
from casemate.runtime.http_client import RequestRefused, host_of
from casemate.types import Answer, Query

OWN = "own"
NOT_IDENTIFYING = frozenset(
    {"headers", "api_key", "timeout_s", "retries", "requests_per_s", "max_bytes", "max_requests", "threads", "folder"}
)
"""Options that do not identify a target: credentials, which are renewed, and limits."""
OPENAI_ADDRESS = re.compile(r"/v1/?#(.+)$")


@dataclass(eq=False)
class MeteredTarget(Target):
    """An external target: counts questions and characters, and adds the campaign's ``nonce`` to client names.

    ``proof`` is a benign question that the target has answered. It is asked again when another question is refused, to
    distinguish a refused question from an expired key.
    """

    inner: Target
    nonce: str = ""
    proof: Query | None = None
    questions: int = field(default=0, init=False)
    sent: int = field(default=0, init=False)
    received: int = field(default=0, init=False)

    async def ask(self, query: Query) -> Answer:
        """Answers one query. Verdicts are dropped: they would not be those of a guard built by the lab.

        Raises:
            QueryError: If the target refuses this question but answers the proof, or its answer is empty.
            BackendError: If it fails.
        """
        try:
            answer = await self._ask(query)
        except RequestRefused as error:
            if self.proof is None:
                raise
            await self._ask(self.proof)
            raise QueryError(str(error)) from error
        if not answer.text.strip():
            raise QueryError("the answer is empty")
        return answer

    async def _ask(self, query: Query) -> Answer:
        self.questions += 1
        self.sent += len(query.text)
        answer = await self.inner.ask(replace(query, client=f"{query.client}-{self.nonce}"))
        self.received += len(answer.text)
        return replace(answer, verdicts=())

    async def stream(self, query: Query) -> AsyncIterator[str]:
        """Yields the whole answer at once."""
        yield (await self.ask(query)).text

    async def ask_all(
        self,
        queries: Sequence[Query],
        concurrency: int,
        progress: Progress = lambda count: None,
        failures: list[BackendError] | None = None,
    ) -> list[Answer | None]:
        """The answers to several queries; None for a refused one.

        With ``failures``, the error of a query at which the target fails is appended there, and its answer is None.

        Raises:
            BackendError: If the target fails, without ``failures``.
        """

        async def ask(query: Query) -> Answer | None:
            try:
                return await self.ask(query)
            except QueryError:
                return None
            except BackendError as error:
                if failures is None:
                    raise
                failures.append(error)
                return None
            finally:
                progress(1)

        return await map_concurrently(ask, queries, concurrency)

    @property
    def requests(self) -> int:
        """Requests of this run, retries included."""
        return int(getattr(self.inner, "requests", self.questions))


@dataclass(frozen=True, slots=True)
class ExternalTargets:
    """The attacked targets by `on` (as users see it) and `off`: their names, and capabilities that all have.

    ``label`` is the fingerprint of what identifies them.
    """

    names: Mapping[str, str]
    targets: Mapping[str, MeteredTarget]
    can: frozenset[Capability]
    label: str

    def set_nonce(self, nonce: str) -> None:
        """Sets the suffix of client names."""
        for target in self.targets.values():
            target.nonce = nonce

    def cost(self) -> dict[str, float]:
        """Questions, requests and characters of this run."""
        found = self.targets.values()
        return {
            "questions_this_run": sum(t.questions for t in found),
            "requests_this_run": sum(t.requests for t in found),
            "characters_sent": sum(t.sent for t in found),
            "characters_received": sum(t.received for t in found),
        }


def is_external(config: Config) -> bool:
    """Whether the red team attacks another system than that of the configuration."""
    return config.redteam.target.use != OWN


def override_targets(config: Config, target: str | None, off: str | None, own: bool) -> Config:
    """Applies the command line's targets to a configuration.

    A target is a name of `redteam.targets`, `own`, an address, or `module:function`. None: as configured; if only
    ``target`` is given, there is no target with its guard off. ``own``: the operator confirmed the ownership.

    Raises:
        ConfigError: If a name is unknown.
    """
    given: dict[str, Any] = {"i_own_this_target": True} if own else {}
    if target:
        given |= {"target": _parse_target(config.redteam, target), "target_off": None}
    if off:
        given |= {"target_off": _parse_target(config.redteam, off)}
    return configuration.with_overrides(config, redteam=given) if given else config


def target_parts(section: RedteamSection) -> dict[str, PluginSpec]:
    """The configured external targets by side of the guard, with their names in `redteam.targets` resolved."""
    configured = {ON: section.target, OFF: section.target_off}
    return {side: _resolve(section, spec) for side, spec in configured.items() if spec is not None}


def build_external_targets(config: Config, *provided: Capability) -> ExternalTargets:
    """Builds the configured external targets; ``provided`` are capabilities that the operator adds.

    Raises:
        ConfigError: If the operator has not confirmed that they own the targets, or one cannot be built.
    """
    section = config.redteam
    parts, configured = target_parts(section), {ON: section.target, OFF: section.target_off}
    names = {side: _display_name(part, configured[side]) for side, part in parts.items()}
    if not section.i_own_this_target:
        raise ConfigError(
            f"{' and '.join(names.values())} would be attacked, with many questions and possibly at a cost; if it is "
            "yours, or its owner has authorized you, set redteam.i_own_this_target: true, or pass --own"
        )
    if OFF in parts and _identity(parts[OFF]) == _identity(parts[ON]):
        raise ConfigError(
            "redteam.target and redteam.target_off are the same; set target_off to the target without its guard, "
            "or unset it"
        )
    built = {side: build("target", part, config.folder) for side, part in sorted(parts.items())}  # off before on
    if OFF in parts:
        provided = (*provided, Capability.GUARD_OFF)
    can = frozenset.intersection(*(external_capabilities(target, *provided) for target in built.values()))
    label = digest({side: [_identity(part), plugins.packages("target", part)] for side, part in parts.items()})
    return ExternalTargets(names, {side: MeteredTarget(target) for side, target in built.items()}, can, label)


def _parse_target(section: RedteamSection, text: str) -> PluginSpec:
    if text in (section.targets or {}) or text == OWN:
        return PluginSpec(use=text)
    if found := OPENAI_ADDRESS.search(text):
        address = text.partition("#")[0]
        return PluginSpec.model_validate({"use": "openai_endpoint", "base_url": address, "model": found[1]})
    if text.startswith(("http://", "https://")):
        return PluginSpec.model_validate({"use": "http", "url": text})
    if re.fullmatch(r"[\w.]+:[\w.]+", text):
        return PluginSpec.model_validate({"use": "python", "call": text})
    known = ", ".join([*(section.targets or {}), OWN])
    raise ConfigError(
        f"unknown target {text!r}; known: {known}. Or pass an address (http://..., or http://.../v1#model for an "
        "OpenAI-compatible one), or module:function"
    )


def _resolve(section: RedteamSection, part: PluginSpec) -> PluginSpec:
    """A target of `redteam.targets` by its name, or the spec itself."""
    named = section.targets or {}
    if part.use in named and not part.options:
        return named[part.use]
    if part.use not in plugins.names("target"):
        known = ", ".join([*named, *plugins.names("target"), OWN])
        raise ConfigError(f"unknown target {part.use!r}; known: {known}")
    return part


def _display_name(part: PluginSpec, configured: PluginSpec | None) -> str:
    """A target without secrets: its configured name, its plug-in, and its host, model or function."""
    options = part.options
    address = str(options.get("url") or options.get("base_url") or "")
    details = [host_of(address), *(str(options.get(key, "")) for key in ("model", "call", "runnable"))]
    found = " ".join(filter(None, [part.use, *details]))
    return found if configured is None or configured is part else f"{configured.use} ({found})"


def _identity(part: PluginSpec) -> str:
    """Fingerprint of the options that identify a target. A secret counts by its fingerprint only."""
    found: dict[str, Any] = {key: value for key, value in part.options.items() if key not in NOT_IDENTIFYING}
    for key in found.keys() & {"url", "base_url"}:
        found[key] = urlsplit(str(found[key]))._replace(netloc=host_of(str(found[key]))).geturl()
    texts = {key: str(dict(value) if isinstance(value, Mapping) else value) for key, value in found.items()}
    return digest(part.use, {key: digest(text) for key, text in texts.items()})
