"""Answers prompts on this machine's processor, reading every shared beginning once: greedy, batched, resumable.

    python -m benchmarks.real.answer_here PROMPTS ANSWERS --model FILE.gguf [--minutes CPU_MINUTES] [--limit COUNT]

Input, output and resume are those of ``answer.py``. On a processor, reading a prompt costs its tokens, whether alone or
in a batch. So prompts are read one after the other, in the order of their tokens, and each reads only what follows its
common beginning with the one before: the system message, and often the first documents. Answers are decoded in batches.
If another process serves the model (`shared_model`), that process answers.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from benchmarks.real import answer
from benchmarks.real.shared_model import ask, shared
from casemate.backends.generators.transformers import gguf
from casemate.backends.generators.transformers.batch import BatchDecoder, Job

ROWS = 16
AT_ONCE = 64
"""Prompts that are ordered and answered together, so that a run that is stopped has answered the first ones."""
SHARED_AT_ONCE = 256
"""Prompts that a shared model is asked at once."""


Chat: TypeAlias = tuple[str, list[dict[str, str]], int]
"""Id of a prompt, its chat, and the largest length of the answer in tokens."""
Item = TypeVar("Item")


class TrunkDecoder(BatchDecoder):
    """A batch decoder that reads prompts one by one, each from its common beginning with the one before.

    Attributes:
        tokens_read: Tokens that the model has read.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._trunk: Any = None
        self._trunk_tokens: list[int] = []
        self.tokens_read = 0

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any, Any]:
        """See the base class."""
        import torch

        logits, cache, mask = self._read_one(prompts[0])
        for prompt in prompts[1:]:
            more, other, other_mask = self._read_one(prompt)
            cache, mask = _joined(cache, mask, other, other_mask)
            logits = torch.cat([logits, more])
        return logits, cache, mask

    def _read_one(self, prompt: Sequence[int]) -> tuple[Any, Any, Any]:
        """Logits after the prompt, its cache and its mask."""
        import torch
        from transformers import DynamicCache

        pairs = zip(self._trunk_tokens, list(prompt)[:-1], strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._trunk is None or not same:
            self._trunk, same = DynamicCache(), 0
        elif surplus := len(self._trunk_tokens) - same:
            self._trunk.crop(-surplus)
        self._trunk_tokens = list(prompt)
        self.tokens_read += len(prompt) - same
        device = self._model.device
        out = self._model(
            input_ids=torch.tensor([list(prompt)[same:]], device=device),
            position_ids=torch.arange(same, len(prompt), device=device)[None],
            past_key_values=self._trunk,
            use_cache=True,
            **self._last,
        )
        mask = torch.ones(1, len(prompt), device=device, dtype=torch.long)
        return out.logits[:, -1, : self._size].float(), copy.deepcopy(self._trunk), mask


def _joined(cache: Any, mask: Any, other: Any, other_mask: Any) -> tuple[Any, Any]:
    """Two caches as one, the shorter padded on the left."""
    import torch
    from torch.nn.functional import pad

    width = max(mask.shape[1], other_mask.shape[1])
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        for name in ("keys", "values"):
            parts = [getattr(layer, name) for layer in (ours, theirs)]
            setattr(ours, name, torch.cat([pad(part, (0, 0, width - part.shape[2], 0)) for part in parts]))
    return cache, torch.cat([pad(m, (width - m.shape[1], 0)) for m in (mask, other_mask)])


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--minutes", type=float, default=1e9, help="CPU time after which no further group is begun")
    parser.add_argument("--limit", type=int, help="answer only the first prompts of the file")
    run(parser.parse_args())


def run(given: argparse.Namespace) -> None:
    """Answers whatever is open, in the order of the file."""
    import torch

    there = answer.read_lines(given.answers) if given.answers.exists() else []
    done = {row.get("id") for row in there}
    first = islice(answer.chats(answer.read_lines(given.prompts)), given.limit)
    chats = [chat for chat in first if chat[0] not in done]
    if not chats:
        return
    socket = shared(given.model)
    if not given.answers.exists():
        about = {"model": given.model.name, "digest": answer.digest(given.model), "dtype": "bfloat16"}
        about |= {"device": "cuda" if socket and torch.cuda.is_available() else "cpu"}
        answer.write_lines(given.answers, [{**about, "torch": torch.__version__, "decoding": "greedy"}])
    if socket:
        asyncio.run(_answered_elsewhere(socket, given.answers, chats))
        return
    model, tokenizer = answer.load(gguf.converted(given.model), "cpu", "bfloat16")
    ends = answer.stop_tokens(model, tokenizer)
    for group in pieces(chats, AT_ONCE):
        for rows in pieces(answered(model, tokenizer, ends, group), ROWS):
            answer.write_lines(given.answers, rows)
        if time.process_time() > 60 * given.minutes:
            print(f"stopped after {given.minutes:g} CPU minutes")
            return


async def _answered_elsewhere(socket: Path, answers: Path, chats: Sequence[Chat]) -> None:
    """Writes the answers of a model in another process."""
    free, began = asyncio.Semaphore(SHARED_AT_ONCE), time.monotonic()

    async def row(chat: Chat) -> dict[str, Any]:
        name, messages, limit = chat
        async with free:
            return {"id": name} | await ask(socket, {"messages": messages, "tokens": limit})

    rows, tasks = [], [asyncio.create_task(row(chat)) for chat in chats]
    for count, done in enumerate(asyncio.as_completed(tasks), 1):
        rows.append(await done)
        if len(rows) == SHARED_AT_ONCE or count == len(chats):
            answer.write_lines(answers, rows)
            print(f"{count}/{len(chats)} answers, {time.monotonic() - began:.0f} s", flush=True)
            rows = []


def pieces(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of so many items each; the last may be shorter.

    >>> list(pieces("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])


def answered(model: Any, tokenizer: Any, ends: Sequence[int], chats: Sequence[Chat]) -> Iterator[dict[str, Any]]:
    """Rows of the answers file, as answers finish."""
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for _, chat, _ in chats]
    tokens = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    decoder = TrunkDecoder(model, len(tokenizer), ends, ROWS, {"logits_to_keep": 1})
    began, made = time.process_time(), 0
    jobs = [Job(number, ids, chats[number][2]) for number, ids in enumerate(tokens)]
    for count, (number, ids) in enumerate(decoder.decode(jobs), 1):
        made += len(ids)
        text = tokenizer.decode(ids, skip_special_tokens=True).strip()
        yield {"id": chats[number][0], "answer": text, "tokens": len(ids), "stopped": len(ids) < jobs[number].limit}
        if count % ROWS == 0 or count == len(jobs):
            spent = time.process_time() - began
            share = decoder.tokens_read / sum(map(len, tokens))
            print(f"{count}/{len(jobs)} answers, {spent:.0f} CPU-s, {made} tokens, {share:.0%} read", flush=True)


if __name__ == "__main__":
    main()
