"""Serves one language model to several processes on this machine, so that their answers form one batch.

    python -m benchmarks.real.shared_model FILE.gguf SOCKET [rows]

Clients use it if the environment variable `SHARED_MODELS` names the folder of the socket, and the socket has the name
of the model. A connection transfers one prompt or chat as a JSON line, and its answer. On an accelerator, the cache of
the batch has a fixed size (`accelerated`).
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.real.accelerated import FixedCacheDecoder
from casemate.backends.generators.transformers import CausalLM
from casemate.backends.generators.transformers.batch import Job
from casemate.errors import BackendError
from casemate.protocols import Generator
from casemate.rag.pipeline import join_stream
from casemate.runtime.batching import ContinuousBatch
from casemate.types import Document, Prompt

ROWS = 192
LONGEST_LINE = 1 << 24


def shared(model: Path) -> Path | None:
    """The socket of a model that another process serves; None: there is none."""
    folder = os.environ.get("SHARED_MODELS")
    socket = Path(folder or ".") / f"{model.stem}.sock"
    return socket if folder and socket.exists() else None


@dataclass(frozen=True)
class SharedModel(Generator):
    """A model in another process.

    Attributes:
        socket: Its socket.
        tokens: Largest length of an answer.
    """

    socket: Path
    tokens: int

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Yields the whole answer."""
        asked = {"tokens": self.tokens, "question": prompt.question, "instructions": prompt.instructions}
        yield (await ask(self.socket, asked | {"context": [asdict(d) for d in prompt.context]}))["answer"]


async def ask(socket: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one answer.

    Args:
        socket: Socket of the model.
        asked: `tokens`, the maximum answer length, and a chat (`messages`) or the parts of a `Prompt`.

    Raises:
        BackendError: If the model fails, or its process has ended.
    """
    reader, writer = await asyncio.open_unix_connection(str(socket), limit=LONGEST_LINE)
    writer.write(json.dumps(asked).encode() + b"\n")
    try:
        found: dict[str, Any] = json.loads(await reader.readline() or "{}")
    finally:
        writer.close()
    if "answer" not in found:
        raise BackendError(found.get("error", "the shared model has ended"), backend="shared", retryable=False)
    return found


async def serve(model: CausalLM, socket: Path) -> None:
    """Serves requests until the process ends."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        found: dict[str, Any] = {}
        try:
            found = await (_chat if "messages" in asked else _prompt)(model, asked)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
        writer.write(json.dumps(found).encode() + b"\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answered, str(socket), limit=LONGEST_LINE, backlog=1000)
    async with server:
        await server.serve_forever()


async def _prompt(model: CausalLM, asked: Mapping[str, Any]) -> dict[str, Any]:
    own = copy.copy(model)  # shares weights and batch
    own.max_tokens = asked["tokens"]
    context = tuple(Document(**document) for document in asked["context"])
    return {"answer": await join_stream(own.stream(Prompt(asked["question"], context, asked["instructions"])))}


async def _chat(model: CausalLM, asked: Mapping[str, Any]) -> dict[str, Any]:
    """A row in the format of `answer`."""
    chat, limit = model._chat, asked["tokens"]
    text = chat.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)
    tokens = await model._batch.submit((chat(text, add_special_tokens=False).input_ids, limit))
    written = chat.decode(tokens, skip_special_tokens=True).strip()
    return {"answer": written, "tokens": len(tokens), "stopped": len(tokens) < limit}


def accelerate(model: CausalLM) -> None:
    """Replaces the model's decoder by one with a fixed cache."""
    decoder = FixedCacheDecoder(model._model, len(model.vocabulary), model.ends, model.batch, model._last)
    model._batch = ContinuousBatch(
        lambda arrived: decoder.decode(arrived=lambda: [Job(n, *job) for n, job in arrived()])
    )


def main() -> None:
    """Loads the model, and serves it."""
    file, socket = Path(sys.argv[1]), Path(sys.argv[2])
    rows = int(sys.argv[3]) if len(sys.argv) > 3 else ROWS
    model = CausalLM(str(file), dtype="bfloat16", batch=rows)
    if model._device == "cuda":
        accelerate(model)
    socket.unlink(missing_ok=True)
    asyncio.run(serve(model, socket))


if __name__ == "__main__":
    main()
