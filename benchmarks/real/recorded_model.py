"""A real language model with recorded answers in a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.real import answer, files
from benchmarks.real.sample import digest
from benchmarks.real.shared_model import SharedModel, shared
from casemate.backends.generators.transformers import CausalLM
from casemate.errors import BackendError
from casemate.protocols import Generator
from casemate.types import Prompt

BATCH = 16


@dataclass(eq=False)
class RecordedModel(Generator):
    """A model with recorded answers in a file. It does not generate a prompt that is recorded or in progress.

    Attributes:
        model: GGUF file, on an accelerator if there is one; None: only recorded answers.
        file: File of the answers.
        tokens: Maximum answer length.
        about: Further facts for the first line of a new file.
        batch: Number of answers per generation batch.
        used: Keys of the requested answers.

    Raises:
        BackendError: If an answer is not recorded, and there is no model.
    """

    model: Path | None
    file: Path
    tokens: int
    about: Mapping[str, Any] = field(default_factory=dict)
    batch: int = BATCH
    used: set[str] = field(default_factory=set)
    _answers: dict[str, str] = field(default_factory=dict)
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _loaded: CausalLM | None = None

    def __post_init__(self) -> None:
        if self.model is None or self.file.exists():
            self._answers = files.read_answers(self.file)[0]
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        about = {"model": self.model.name, "digest": answer.digest(self.model), "dtype": "bfloat16"}
        answer.write_lines(self.file, [about | {"decoding": "greedy", "max_tokens": self.tokens} | dict(self.about)])

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Yields the whole answer."""
        key = digest(prompt.question, [asdict(d) for d in prompt.context], prompt.instructions)
        if key not in self._answers:
            if key not in self._running:
                self._running[key] = asyncio.create_task(self._generate(key, prompt))
            await self._running[key]
        self.used.add(key)
        yield self._answers[key]

    @property
    def loaded(self) -> CausalLM:
        """The model, loaded at first use."""
        if self.model is None:
            problem = f"{self.file.name} has no answer to this prompt"
            raise BackendError(problem, backend="recorded", retryable=False)
        if self._loaded is None:
            self._loaded = CausalLM(str(self.model), dtype="bfloat16", max_tokens=self.tokens, batch=self.batch)
        return self._loaded

    async def _generate(self, key: str, prompt: Prompt) -> None:
        """Generates an answer and appends it to the file."""
        socket = self.model and shared(self.model)
        try:
            generator = SharedModel(socket, self.tokens) if socket else self.loaded
            text = "".join([piece async for piece in generator.stream(prompt)])
            self._answers[key] = text
            answer.write_lines(self.file, [{"id": key, "answer": text}])
        finally:
            del self._running[key]
