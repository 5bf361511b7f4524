"""Systems that are given by their address: target plug-in, model, key, and confirmation of ownership."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import typer

from casemate import config as configuration
from casemate.backends.targets.openai_endpoint import only_model
from casemate.cli.console import is_terminal, say, shown
from casemate.config import PluginSpec
from casemate.errors import BackendError, CasemateError, ConfigError
from casemate.redteam.campaigns.external_targets import override_targets
from casemate.runtime.http_client import host_of
from casemate.types import Secret

KEY_VARIABLE = "CASEMATE_ENDPOINT_KEY"
BODY, ANSWER = '{"question": "{question}"}', "$.answer"
"""Request and JSONPath of the answer, with plain HTTP."""
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
"""Hosts that need no confirmation."""

Model = Annotated[str, typer.Option(help="Model of an OpenAI-compatible address; default: the only one that it lists.")]
Body = Annotated[str, typer.Option(help="With plain HTTP: request as JSON, with {question} in it.")]
AnswerPath = Annotated[str, typer.Option("--answer", help="With plain HTTP: JSONPath of the answer's text.")]
KeyVariable = Annotated[
    str, typer.Option("--key-env", help="Environment variable with the API key of the address, if it needs one.")
]
Own = Annotated[bool, typer.Option("--own", help="Confirm that you own the system, or may attack it.")]


class EndpointOptions(NamedTuple):
    """Options of an endpoint that is given by its address.

    Attributes:
        model: Model of an OpenAI-compatible server; empty: the only one that it lists, if the address ends in /v1.
    """

    model: str
    body: str
    answer: str
    key_env: str


ATTACK = (
    "{} would be attacked, with many questions and possibly at a cost",
    "Is it yours, or did its owner authorize you?",
    "if it is yours, or its owner has authorized you, pass --own",
)
"""What happens to a system, the question before, and what to do without a terminal."""


def endpoint_target(
    endpoint: str, options: EndpointOptions, config: Path | None, own: bool, texts: tuple[str, str, str] = ATTACK
) -> PluginSpec:
    """The target plug-in of a system that the caller may question: an address, or a name in ``redteam.targets``.

    For ``texts`` see ``ATTACK``.

    Raises:
        ConfigError: If the name or the model is unknown, or ownership is not confirmed.
    """
    target = _parse(endpoint, options, config)
    _confirm(target, own, texts)
    return _with_model(target, options.key_env)


def _parse(endpoint: str, options: EndpointOptions, config: Path | None) -> PluginSpec:
    if not endpoint.startswith(("http://", "https://")):
        settings = configuration.read(config)
        found = override_targets(settings, endpoint, None, False).redteam
        return (found.targets or {}).get(endpoint, found.target)
    address, _, named = endpoint.partition("#")
    key, model = os.environ.get(options.key_env, ""), options.model or named
    base = address.rstrip("/").removesuffix("/chat/completions")
    if model or base.endswith("/v1"):
        secret = {"api_key": Secret(key)} if key else {}
        return PluginSpec.model_validate({"use": "openai_endpoint", "base_url": base, "model": model, **secret})
    headers = {"headers": {"authorization": Secret(f"Bearer {key}")}} if key else {}
    plain = {"use": "http", "url": address, "body": options.body, "answer": options.answer}
    return PluginSpec.model_validate({**plain, **headers})


def _with_model(target: PluginSpec, key_env: str) -> PluginSpec:
    """The target with the only model that its server lists, if none is given."""
    options = target.options
    if target.use != "openai_endpoint" or options.get("model", "") != "":
        return target
    try:
        with key_explained(key_env):
            name = asyncio.run(only_model(options["base_url"], options.get("api_key", "")))
    except CasemateError as error:
        raise ConfigError(f"{error}; name the model with --model, or a plain HTTP address with its path") from error
    say.print(f"model: {shown(name)}, the only one that {shown(host_of(options['base_url']))} lists")
    return PluginSpec.model_validate({"use": target.use, **options, "model": name})


@contextmanager
def key_explained(key_env: str) -> Iterator[None]:
    """Adds to an error about the key where it is read from."""
    try:
        yield
    except BackendError as error:
        if "HTTP 401" not in str(error) and "HTTP 403" not in str(error):
            raise
        why = f"{error}. The key is read from the environment variable {key_env}"
        raise BackendError(why, backend=error.backend, retryable=False) from error


def _confirm(target: PluginSpec, own: bool, texts: tuple[str, str, str]) -> None:
    """Requires a confirmation for a system that is not on this machine."""
    options = target.options
    host = host_of(str(options.get("url") or options.get("base_url") or ""))
    if own or urlsplit(f"//{host}").hostname in LOCAL:
        return
    what, question, advice = texts
    what = what.format(host or target.use)
    if is_terminal() and typer.confirm(f"{what}. {question}", err=True):
        return
    raise ConfigError(f"{what}; {advice}")
