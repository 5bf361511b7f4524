"""Finds model servers on this machine: Ollama, llama.cpp and vLLM on their default ports of 127.0.0.1.

All three list their models at ``/v1/models``. Nothing but these three addresses is contacted, and no proxy is used.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

HOST = "127.0.0.1"
PORTS: Mapping[str, int] = MappingProxyType({"ollama": 11434, "llama.cpp": 8080, "vllm": 8000})
"""Default ports, by server."""
TIMEOUT_S = 0.5
MAX_BYTES = 1_000_000
_MODEL = re.compile(r"[\w./:@+-]{1,200}")  # also keeps ${NAME} and markup out of the configuration
_NO_CHAT = re.compile(r"embed|rerank|minilm|\bbge\b|\be5\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A model server that answered on 127.0.0.1, with the names of its models that may write answers, at least one."""

    name: str
    port: int
    models: tuple[str, ...]

    @property
    def base_url(self) -> str:
        """Address of its OpenAI-compatible API."""
        return f"http://{HOST}:{self.port}/v1"


def find_local_servers(ports: Mapping[str, int] = PORTS, timeout_s: float = TIMEOUT_S) -> list[LocalServer]:
    """Asks all ports concurrently, at most ``timeout_s``; the servers that list a model, in the order of ``ports``."""
    found: dict[str, tuple[str, ...]] = {}

    def look(name: str, port: int) -> None:
        found[name] = _models(port, timeout_s)

    threads = [threading.Thread(target=look, args=pair, daemon=True) for pair in ports.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [LocalServer(name, port, models) for name, port in ports.items() if (models := found.get(name))]


def _models(port: int, timeout_s: float) -> tuple[str, ...]:
    """The models that a port lists; empty if it does not answer like a model server."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("GET", "/v1/models", headers={"Accept": "application/json"})
        response = connection.getresponse()
        body = response.read(MAX_BYTES) if response.status == http.HTTPStatus.OK else b""
        return chat_models(json.loads(body))
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return ()
    finally:
        connection.close()


def chat_models(answer: Any) -> tuple[str, ...]:
    """The names in the answer to ``GET /v1/models`` of models that may write answers."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    names = [row.get("id") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return tuple(n for n in names if isinstance(n, str) and _MODEL.fullmatch(n) and not _NO_CHAT.search(n))
