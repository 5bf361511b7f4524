"""Batched compared with single generation: CPU seconds, and equality of the answers.

    python -m benchmarks.real.throughput MODEL [batch] [prompts]

It measures CPU time of all threads, because the machine may be shared. The number of threads is not set.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from benchmarks import SEED, save
from casemate.backends.generators.transformers import CausalLM
from casemate.demo.clinic import BENIGN_QUESTIONS, case_notes
from casemate.types import Document, Prompt

INSTRUCTIONS = "Answer from the documents. Be brief."
TOKENS = 32


def main() -> None:
    """Measures and writes the figures."""
    model, batch, count = sys.argv[1], int((sys.argv[2:] or ["16"])[0]), int((sys.argv[3:] or ["16"])[0])
    note = case_notes(1, SEED)[0][1]
    context = (Document("note", " ".join(note.split()[:60])),)
    prompts = [Prompt(BENIGN_QUESTIONS[i % len(BENIGN_QUESTIONS)], context, INSTRUCTIONS) for i in range(count)]
    found: dict[str, Any] = {"model": model.rpartition("/")[2], "prompts": count, "tokens": TOKENS}
    for dtype in ("float32", "bfloat16"):
        single = CausalLM(model, device="cpu", dtype=dtype, max_tokens=TOKENS)
        start = time.process_time()
        alone = [asyncio.run(_joined(single, prompt)) for prompt in prompts]
        single_s = time.process_time() - start
        single.batch = batch
        start = time.process_time()
        together = asyncio.run(_together(single, prompts))
        batched_s = time.process_time() - start
        equal = sum(map(str.__eq__, together, alone))
        found[dtype] = {"single_cpu_s": single_s, "batched_cpu_s": batched_s, "ratio": single_s / batched_s}
        found[dtype] |= {"batch": batch, "equal_answers": equal}
        print(dtype, found[dtype], flush=True)
    save("real_throughput", found)


async def _together(model: CausalLM, prompts: list[Prompt]) -> list[str]:
    return await asyncio.gather(*(_joined(model, prompt) for prompt in prompts))


async def _joined(model: CausalLM, prompt: Prompt) -> str:
    return "".join([chunk async for chunk in model.stream(prompt)])


if __name__ == "__main__":
    main()
