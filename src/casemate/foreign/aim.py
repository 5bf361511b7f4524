"""Who is attacked: targets by name or address, that they are the owner's, and what they can be asked for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from casemate import capabilities, registry
from casemate import config as configuration
from casemate.app import build
from casemate.capabilities import Capability
from casemate.config import Config, Part, RedteamSection
from casemate.errors import ConfigError, QueryError
from casemate.lab.experiment import digest
from casemate.lab.judge import OFF, ON
from casemate.protocols import Target
from casemate.remote import Refused, host_of
from casemate.types import Answer, Query

OWN = "own"
PASSING = frozenset({"headers", "api_key", "timeout_s", "retries", "requests_per_s", "max_bytes", "threads", "folder"})
"""Options that do not make a target another one: credentials, which are renewed, and patience."""
FRAGMENT = re.compile(r"/v1/?#(.+)$")


@dataclass(eq=False)
class Asked(Target):
    """A target outside as the lab asks it: counted, and under names that no earlier campaign went by.

    Attributes:
        inner: Who is asked.
        nonce: What is put behind each client's name.
        proof: A harmless question that it has answered; None: none yet. It is asked again when another is refused, to
            see that this is the question's fault, and not a key that has ended.
        questions: Asked in this run.
        sent: Characters of them.
        received: Characters of the answers.
    """

    inner: Target
    nonce: str = ""
    proof: Query | None = None
    questions: int = field(default=0, init=False)
    sent: int = field(default=0, init=False)
    received: int = field(default=0, init=False)

    async def ask(self, query: Query) -> Answer:
        """Answers one query. What is known of its context stays; a verdict on it would not be the lab's own.

        Raises:
            QueryError: If the target refuses this question, though it has answered others.
            BackendError: If it fails.
        """
        try:
            return await self._once(query)
        except Refused as error:
            if self.proof is None:
                raise
            await self._once(self.proof)
            raise QueryError(str(error)) from error

    async def _once(self, query: Query) -> Answer:
        self.questions += 1
        self.sent += len(query.text)
        answer = await self.inner.ask(replace(query, client=f"{query.client}-{self.nonce}"))
        self.received += len(answer.text)
        return replace(answer, verdicts=())

    async def stream(self, query: Query) -> AsyncIterator[str]:
        """The whole answer in one piece."""
        yield (await self.ask(query)).text

    @property
    def requests(self) -> int:
        """What the target was sent in this run, tries included."""
        return int(getattr(self.inner, "requests", self.questions))


@dataclass(frozen=True, slots=True)
class Aim:
    """What is attacked.

    Attributes:
        names: How each target is called in the report, by ``on`` and ``off``.
        targets: They themselves. ``on`` is the target as its users meet it.
        can: What can be asked of them.
        label: Fingerprint of what they are.
    """

    names: Mapping[str, str]
    targets: Mapping[str, Asked]
    can: frozenset[Capability]
    label: str

    def cost(self) -> dict[str, float]:
        """What this run took of the targets."""
        found = self.targets.values()
        return {
            "questions_this_run": sum(t.questions for t in found),
            "requests_this_run": sum(t.requests for t in found),
            "characters_sent": sum(t.sent for t in found),
            "characters_received": sum(t.received for t in found),
        }


def is_outside(config: Config) -> bool:
    """Whether the red team attacks another system than the one that the configuration describes."""
    return config.redteam.target.use != OWN


def pointed(config: Config, target: str | None, off: str | None, own: bool) -> Config:
    """The configuration with what the command line says of the target.

    Args:
        config: The file's.
        target: A name of ``redteam.targets``, ``own``, an address, or ``module:function``; None: the file's.
        off: The same with its guard off; None: the file's, unless another target is given.
        own: Whether it was said that the target is one's own.

    Raises:
        ConfigError: If a name is unknown.
    """
    given: dict[str, Any] = {"i_own_this_target": True} if own else {}
    if target:
        given |= {"target": _part(config.redteam, target), "target_off": None}
    if off:
        given |= {"target_off": _part(config.redteam, off)}
    return configuration.changed(config, redteam=given) if given else config


def take_aim(config: Config, *given: Capability) -> Aim:
    """Builds the targets that the red team is to attack.

    Args:
        config: Its ``redteam`` section names them.
        given: What the owner gives beside them.

    Raises:
        ConfigError: If nobody has said that they are his, or they cannot be built.
    """
    section = config.redteam
    parts = {ON: _resolved(section, section.target)}
    if section.target_off is not None:
        parts[OFF] = _resolved(section, section.target_off)
    said = {ON: section.target, OFF: section.target_off}
    names = {side: _called(part, said[side]) for side, part in parts.items()}
    if not section.i_own_this_target:
        raise ConfigError(
            f"{' and '.join(names.values())} would be attacked, with many questions and at somebody's cost; if it is "
            "yours, or its owner has told you to, set redteam.i_own_this_target: true, or say --own"
        )
    if OFF in parts and _print(parts[OFF]) == _print(parts[ON]):
        raise ConfigError("redteam.target and redteam.target_off are the same; give the one without its guard, or none")
    built = {side: build("target", part, config.folder) for side, part in sorted(parts.items())}  # off before on
    both = (Capability.GUARD_OFF,) if OFF in parts else ()
    can = frozenset.intersection(*(capabilities.of(target, *given, *both) for target in built.values()))
    label = digest({side: _print(part) for side, part in parts.items()})
    return Aim(names, {side: Asked(target) for side, target in built.items()}, can, label)


async def in_turn(target: Asked, queries: Sequence[Query], concurrency: int) -> list[Answer | None]:
    """The answers to some questions, a few at a time; None where one is refused.

    Raises:
        BackendError: If the target fails.
    """
    free = asyncio.Semaphore(concurrency)

    async def one(query: Query) -> Answer | None:
        async with free:
            try:
                return await target.ask(query)
            except QueryError:
                return None

    tasks = [asyncio.create_task(one(query)) for query in queries]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _part(section: RedteamSection, said: str) -> Part:
    """What is meant by a word on the command line."""
    if said in (section.targets or {}) or said == OWN:
        return Part(use=said)
    if found := FRAGMENT.search(said):
        return Part.model_validate({"use": "openai_endpoint", "base_url": said.partition("#")[0], "model": found[1]})
    if said.startswith(("http://", "https://")):
        return Part.model_validate({"use": "http", "url": said})
    if re.fullmatch(r"[\w.]+:[\w.]+", said):
        return Part.model_validate({"use": "python", "call": said})
    known = ", ".join([*(section.targets or {}), OWN])
    raise ConfigError(
        f"no target is called {said!r}; known: {known}. Or give an address (http://..., or http://.../v1#model for an "
        "OpenAI-compatible one), or module:function"
    )


def _resolved(section: RedteamSection, part: Part) -> Part:
    """A target of ``redteam.targets`` by its name, or the part itself."""
    named = section.targets or {}
    if part.use in named and not part.options:
        return named[part.use]
    if part.use not in registry.names("target"):
        known = ", ".join([*named, *registry.names("target"), OWN])
        raise ConfigError(f"no target is called {part.use!r}; known: {known}")
    return part


def _called(part: Part, said: Part | None) -> str:
    """A target without anything secret: its name, if it has one, its plug-in, and where or what it is."""
    options = part.options
    address = str(options.get("url") or options.get("base_url") or "")
    what = [host_of(address), *(str(options.get(key, "")) for key in ("model", "call", "runnable"))]
    found = " ".join(filter(None, [part.use, *what]))
    return found if said is None or said is part else f"{said.use} ({found})"


def _print(part: Part) -> str:
    """What a target is, without what may change and leave it the same. A secret shows as a fingerprint only."""
    found: dict[str, Any] = {key: value for key, value in part.options.items() if key not in PASSING}
    for key in found.keys() & {"url", "base_url"}:
        found[key] = urlsplit(str(found[key]))._replace(netloc=host_of(str(found[key]))).geturl()
    return digest(part.use, {key: _plain(value) for key, value in found.items()})


def _plain(value: Any) -> str:
    return digest(str(dict(value)) if isinstance(value, Mapping) else str(value))


def ledger_of(config: Config) -> Path:
    """Where the lab keeps what it has asked."""
    return config.folder / config.redteam.folder / "ledger.db"
