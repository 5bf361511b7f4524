"""Answers prompts with a language model: greedy, batched, resumable; shared prefixes are read once.

    python -m benchmarks.real.answer PROMPTS ANSWERS --model MODEL [--minutes CPU_MINUTES] [--limit COUNT]

MODEL is a GGUF file or a folder. If another process serves it on an accelerator (`shared_model`), that process answers;
otherwise the local CPU. On a CPU the cost of a prompt is its number of tokens, with or without batching. So prompts are
read one by one in token order. Each reads only the tokens after its common prefix with the previous prompt: the system
message, and often the first documents. Answers are decoded in batches.

Input: one JSON object per line. ``{"part": key, "text": ...}`` defines a text that several prompts share. ``{"id",
"max_tokens", "system", "parts": [keys], "user"}`` is a prompt; its user message is the parts and ``user``, joined by
empty lines. Alternatively, ``messages`` contains the chat.

Output: ``{"id", "answer", "tokens", "stopped"}``; ``stopped`` is false if the answer reached ``max_tokens``. The first
line of a new file names the model. Each batch is appended as one gzip member. A second run skips ids with answers.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gzip
import hashlib
import json
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from benchmarks.real.shared_model import ask, shared
from casemate.backends.generators.transformers import CausalLM
from casemate.backends.generators.transformers.batch import BatchDecoder, Job
from casemate.runtime.files import file_checksum

ROWS = 16
AT_ONCE = 64  # prompts that are sorted and answered together, so that an interrupted run has answered the first ones
SHARED_AT_ONCE = 256  # prompts in one request to a shared model

Chat: TypeAlias = tuple[str, list[dict[str, str]], int]
"""Id of a prompt, its chat, and the maximum length of the answer in tokens."""
Row: TypeAlias = dict[str, Any]
Item = TypeVar("Item")


def read_lines(path: Path) -> list[Row]:
    """The JSON objects of a gzip file. It stops at a truncated end, which an interrupted run leaves."""
    found: list[Row] = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                found.append(json.loads(line))
    except (EOFError, OSError, ValueError, zlib.error) as error:
        if not found:
            raise SystemExit(f"{path} cannot be read: {error}") from error
        print(f"{path}: the end is damaged and is dropped ({type(error).__name__})", file=sys.stderr)
    return found


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]], mode: str = "ab") -> None:
    """Appends one gzip member."""
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with open(path, mode) as file:
        file.write(gzip.compress(data.encode("utf-8"), 6, mtime=0))


def chats(rows: Sequence[Row]) -> Iterator[Chat]:
    """Id, chat and maximum answer length of each prompt."""
    texts = {row["part"]: row["text"] for row in rows if "part" in row}
    for row in rows:
        if "id" in row:
            yield row["id"], messages_of(row, texts), int(row["max_tokens"])


def messages_of(row: Row, texts: Mapping[str, str]) -> list[dict[str, str]]:
    """The chat of one prompt."""
    if "messages" in row:
        return list(row["messages"])
    user = "\n\n".join([*(texts[key] for key in row.get("parts", ())), row["user"]])
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [*system, {"role": "user", "content": user}]


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and sizes in a folder."""
    if path.is_dir():
        listing = sorted((file.name, file.stat().st_size) for file in path.iterdir())
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    return file_checksum(path)


class TrunkDecoder(BatchDecoder):
    """A batch decoder that reads prompts one by one, each from its common prefix with the previous one.

    Attributes:
        tokens_read: Number of prompt tokens computed.
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
    """Concatenates two caches; the shorter is padded on the left."""
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
    parser.add_argument("--model", type=Path, required=True, help="GGUF file, or folder")
    parser.add_argument("--minutes", type=float, default=1e9, help="CPU time after which no further group is begun")
    parser.add_argument("--limit", type=int, help="answer only the first prompts of the file")
    run(parser.parse_args())


def run(given: argparse.Namespace) -> None:
    """Answers all prompts without an answer, in file order."""
    import torch

    there = read_lines(given.answers) if given.answers.exists() else []
    if there:
        write_lines(given.answers.with_suffix(".part"), there, "wb")  # without a truncated end
        given.answers.with_suffix(".part").replace(given.answers)
    done = {row.get("id") for row in there}
    first = islice(chats(read_lines(given.prompts)), given.limit)
    todo = [chat for chat in first if chat[0] not in done]
    if not todo:
        return
    socket = shared(given.model)
    if not given.answers.exists():
        about = {"model": given.model.name, "digest": digest(given.model), "dtype": "bfloat16"}
        about |= {"device": "cuda" if socket and torch.cuda.is_available() else "cpu"}
        write_lines(given.answers, [{**about, "torch": torch.__version__, "decoding": "greedy"}])
    if socket:
        asyncio.run(_answered_elsewhere(socket, given.answers, todo))
        return
    model = CausalLM(str(given.model), device="cpu", dtype="bfloat16")
    for group in pieces(todo, AT_ONCE):
        for rows in pieces(answered(model, group), ROWS):
            write_lines(given.answers, rows)
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
            write_lines(answers, rows)
            print(f"{count}/{len(chats)} answers, {time.monotonic() - began:.0f} s", flush=True)
            rows = []


def pieces(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of ``size`` items; the last may be shorter.

    >>> list(pieces("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])


def answered(model: CausalLM, chats: Sequence[Chat]) -> Iterator[Row]:
    """Yields rows of the answers file as answers finish."""
    tokenizer = model._chat
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for _, chat, _ in chats]
    tokens = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    decoder = TrunkDecoder(model._model, len(model.vocabulary), model.ends, ROWS, model._last)
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
