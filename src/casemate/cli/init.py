"""``init``: writes a casemate.yaml with all protections in observe mode, and the generator that was chosen."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from casemate import config as configuration
from casemate.backends import local_servers
from casemate.backends.local_servers import LocalServer, find_local_servers
from casemate.cli.console import Json, is_terminal, note, out, print_json, say, shown
from casemate.config import GatewaySection
from casemate.errors import ConfigError, did_you_mean

EXTRACTIVE = "extractive"
DEFAULT_CORPUS = "docs"
TEMPLATE = """\
# All keys and defaults: docs/reference/configuration.md. Write secrets as ${{NAME}}; they come from the environment.
rag:
  corpus: {corpus}
  embedder: minilm          # openai | sentence_transformers
  index: sqlite             # pgvector
  generator: {generator}
  k: 5
guard:
  mode: observe             # observe logs what it would withhold; 'casemate enforce' switches to enforce
  on_error: closed          # open
  defenses:
    - {{use: mirabel, significance: .01}}    # membership inference; 'casemate calibrate' shows what other values cost
    # - {{use: quorum, secret: "${{QUORUM_SECRET}}"}}    # no single document decides an answer: docs/defenses/quorum.md
    - {{use: crawl_limit, questions: 50}}    # extraction: what one client may copy; keep it last
  # audience: {{unentitled: quorum, entitled: [{{groups: [staff]}}]}}    # for quorum: who may read everything in full
monitor:
  gate: observe             # poisoning: screens new documents; true quarantines suspicious ones
# calibrate:
#   query_log: questions.jsonl    # real benign questions; default: synthetic questions from the corpus
"""
EXTRACTIVE_LINE = 'extractive     # {use: openai, model: ..., base_url: ..., api_key: "${LLM_KEY}"}'


def init(
    corpus: Annotated[
        str | None, typer.Argument(help="Folder or file with the documents. Default: docs, which may not exist yet.")
    ] = None,
    generator: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:MODEL]",
            help="What writes the answers: extractive (no model), or a model server of this machine: ollama, "
            "llama.cpp, vllm. Default: asks if there is one.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Use the first local model server without asking.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a casemate.yaml: all protections in observe mode, and a local model server if one is chosen."""
    path = Path(configuration.FILE)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; edit it, or overwrite it with --force")
    if corpus is not None and not Path(corpus).exists():
        raise ConfigError(f"no file or folder at {corpus}; create it, or give the folder with your documents")
    corpus = corpus or DEFAULT_CORPUS
    chosen, servers = _choose(generator, yes, interactive=not as_json and is_terminal())
    try:
        path.write_text(_content(corpus, chosen), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; run the command in a writable folder") from error
    if as_json:
        found = [asdict(server) | {"base_url": server.base_url} for server in servers]
        print_json({"written": str(path), "generator": chosen[0].name if chosen else EXTRACTIVE, "servers": found})
        return
    _report(path, corpus, chosen, servers)


def _report(path: Path, corpus: str, chosen: tuple[LocalServer, str] | None, servers: Sequence[LocalServer]) -> None:
    there = Path(corpus).exists()
    out.print(f"wrote {path}; next: {'casemate index' if there else f'put your documents into {shown(corpus)}'}")
    if not there:
        note(f"{shown(corpus)}, the value of rag.corpus, does not exist yet")
    said = "the guard observes: it records what it would withhold; 'casemate enforce' shows that and switches it on"
    say.print(said)
    if chosen and importlib.util.find_spec("openai") is None:
        note("this generator needs an extra: pip install 'casemate\\[openai]'")
    if servers and not chosen:
        first = servers[0]
        say.print(
            f"found {shown(_describe(servers))}; to let it write the answers: "
            f"casemate init --force --generator {shown(f'{first.name}:{first.models[0]}')} {shown(corpus)}"
        )


def _content(corpus: str, chosen: tuple[LocalServer, str] | None) -> str:
    if chosen is None:
        return TEMPLATE.format(corpus=json.dumps(corpus), generator=EXTRACTIVE_LINE)
    server, model = chosen
    spec = f"{{use: openai, model: {json.dumps(model)}, base_url: {json.dumps(server.base_url)}}}   # {server.name}"
    text = TEMPLATE.format(corpus=json.dumps(corpus), generator=spec)
    if server.port == GatewaySection().port:  # vLLM and the gateway have the same default
        text += f"gateway:\n  port: {server.port + 1}                # {server.name} has {server.port}\n"
    return text


def _choose(
    wanted: str | None, yes: bool, *, interactive: bool
) -> tuple[tuple[LocalServer, str] | None, list[LocalServer]]:
    """The server and model that write the answers, None for extractive answers; and the servers that were found."""
    if wanted == EXTRACTIVE:
        return None, []
    name, _, model = (wanted or "").partition(":")
    if wanted and name not in local_servers.PORTS:
        allowed = [EXTRACTIVE, *local_servers.PORTS]
        raise ConfigError(f"unknown generator {name!r}{did_you_mean(name, allowed)}; set others in rag.generator")
    servers = find_local_servers(local_servers.PORTS)
    if wanted:
        return _wanted(name, model, {server.name: server for server in servers}), servers
    if servers and (yes or (interactive and _confirm(servers))):
        return (servers[0], servers[0].models[0]), servers
    return None, servers


def _wanted(name: str, model: str, servers: Mapping[str, LocalServer]) -> tuple[LocalServer, str]:
    server = servers.get(name)
    if server is None:
        address = f"{local_servers.HOST}:{local_servers.PORTS[name]}"
        raise ConfigError(
            f"no {name} with a model answers at {address}; start it and load a model, or set rag.generator"
        )
    if model and model not in server.models:
        raise ConfigError(f"{name} has no model {model!r}; it has {', '.join(server.models[:20])}")
    return server, model or server.models[0]


def _confirm(servers: Sequence[LocalServer]) -> bool:
    say.print(f"found {shown(_describe(servers))}")
    first = servers[0]
    return typer.confirm(f"Let {first.models[0]} on {first.name} write the answers?", default=True, err=True)


def _describe(servers: Sequence[LocalServer]) -> str:
    """Names, ports and up to three models of each server."""
    parts = []
    for server in servers:
        more = f" and {len(server.models) - 3} more" if len(server.models) > 3 else ""
        parts.append(f"{server.name} at {local_servers.HOST}:{server.port} ({', '.join(server.models[:3])}{more})")
    return "; ".join(parts)
