#!/usr/bin/env python3
"""Answers prompts with a language model: greedy, batched, resumable. Needs only torch and transformers.

    python answer.py prompts.jsonl.gz answers.jsonl.gz --model FOLDER_OR_FILE.gguf

It imports nothing of this repository, so it also runs alone on a machine with an accelerator and no network. A GGUF
file also needs the package ``gguf``.

Input, one JSON object a line: ``{"part": key, "text": ...}`` defines a text that several prompts share.
``{"id", "max_tokens", "system", "parts": [keys], "user"}`` is a prompt: its user message is the parts and ``user``,
joined by empty lines. Instead of these, ``messages`` may hold the chat. Output: ``{"id", "answer", "tokens",
"stopped"}``; ``stopped`` is false if the answer reached ``max_tokens``. The first line of a new file names the model.

Each batch is written at once as one gzip member. A second run skips the ids that are there.
"""

import argparse
import gzip
import hashlib
import json
import sys
import time
import zlib
from pathlib import Path


def read_lines(path):
    """The JSON objects of a gzip file; stops at a damaged end, which an interrupted run leaves."""
    found = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                found.append(json.loads(line))
    except (EOFError, OSError, ValueError, zlib.error) as error:
        if not found:
            raise SystemExit(f"{path} cannot be read: {error}") from error
        print(f"{path}: the end is damaged and is dropped ({type(error).__name__})", file=sys.stderr)
    return found


def write_lines(path, rows, mode="ab"):
    """Appends one gzip member."""
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with open(path, mode) as file:
        file.write(gzip.compress(data.encode("utf-8"), 6, mtime=0))


def chats(rows):
    """The chat of each prompt by id, and its largest answer."""
    texts = {row["part"]: row["text"] for row in rows if "part" in row}
    for row in rows:
        if "id" in row:
            yield row["id"], messages_of(row, texts), int(row["max_tokens"])


def messages_of(row, texts):
    """The chat of one prompt."""
    if "messages" in row:
        return row["messages"]
    user = "\n\n".join([*(texts[key] for key in row.get("parts", ())), row["user"]])
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [*system, {"role": "user", "content": user}]


def digest(path):
    """SHA-256 of a file, or of the names and sizes in a folder."""
    if path.is_dir():
        listing = sorted((file.name, file.stat().st_size) for file in path.iterdir())
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    value = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value.update(block)
    return value.hexdigest()


def load(path, device, dtype):
    """Model and tokenizer from a folder or a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, more = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, **more)
    if more and (settings := unpacked()):
        more = {**more, "quantization_config": settings}
    if not tokenizer.chat_template:
        raise SystemExit(f"{path}: no chat template; use a model that is trained on chats")
    model = AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, dtype), local_files_only=True, **more)
    return model.to(getattr(torch, dtype)).to(device).eval(), tokenizer


def unpacked():
    """The setting that unpacks a GGUF file's weights; None where transformers always does."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return None
    return GgufConfig(dequantize=True)


def batches(prompts, budget):
    """Groups prompts of similar length: positions of a batch, padding and answers included, stay below the budget."""
    group, widest, longest = [], 0, 0
    for prompt in sorted(prompts, key=lambda p: (-p[2], -len(p[1]))):
        wide, long = max(widest, len(prompt[1])), max(longest, prompt[2])
        if group and ((wide + long) * (len(group) + 1) > budget or prompt[2] * 4 < longest):
            yield group
            group, wide, long = [], len(prompt[1]), prompt[2]
        group.append(prompt)
        widest, longest = wide, long
    if group:
        yield group


def generate(model, tokenizer, ends, group):
    """The answers of one batch, padded on the left."""
    import torch

    width = max(len(ids) for _, ids, _ in group)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    rows = [[pad] * (width - len(ids)) + ids for _, ids, _ in group]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for _, ids, _ in group]
    device = model.device
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=max(limit for _, _, limit in group),
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=ends,
            pad_token_id=pad,
        )
    for (name, _, limit), row in zip(group, out[:, width:].tolist(), strict=True):
        end = next((i for i, token in enumerate(row) if token in ends), len(row))
        kept = row[: min(end, limit)]
        text = tokenizer.decode(kept, skip_special_tokens=True).strip()
        yield {"id": name, "answer": text, "tokens": len(kept), "stopped": end <= limit and end < len(row)}


def answer(model, tokenizer, ends, group):
    """The answers of one batch; halves it when memory runs out."""
    import torch

    try:
        return list(generate(model, tokenizer, ends, group))
    except torch.OutOfMemoryError:
        if len(group) == 1:
            raise
    torch.cuda.empty_cache()
    half = len(group) // 2
    return answer(model, tokenizer, ends, group[:half]) + answer(model, tokenizer, ends, group[half:])


def stop_tokens(model, tokenizer):
    """Ids that end an answer."""
    named = [tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>")]
    listed = model.generation_config.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    known = {i for i in [*named, *listed, tokenizer.eos_token_id] if i is not None and i != tokenizer.unk_token_id}
    return sorted(known)


def run(given):
    """Answers whatever is open."""
    import torch

    device = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    out, done = Path(given.answers), set()
    if out.exists():
        rows = read_lines(out)
        done = {row["id"] for row in rows if "id" in row}
        temporary = out.with_suffix(".part")
        write_lines(temporary, rows, "wb")  # drops a damaged end
        temporary.replace(out)
    model, tokenizer = load(Path(given.model), device, given.dtype)
    ends = stop_tokens(model, tokenizer)
    if not out.exists():
        about = {"model": Path(given.model).name, "digest": digest(Path(given.model)), "dtype": given.dtype}
        write_lines(out, [{**about, "device": device, "torch": torch.__version__, "decoding": "greedy"}])
    todo = []
    for name, messages, limit in chats(read_lines(Path(given.prompts))):
        if name not in done:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            todo.append((name, tokenizer(text, add_special_tokens=False).input_ids, limit))
    if given.limit:
        todo = todo[: given.limit]
    began, count, tokens, made = time.monotonic(), 0, 0, 0
    for group in batches(todo, given.positions):
        rows = answer(model, tokenizer, ends, group)
        write_lines(out, rows)
        count, tokens = count + len(rows), tokens + sum(len(ids) for _, ids, _ in group)
        made += sum(row["tokens"] for row in rows)
        spent = time.monotonic() - began
        rest = spent / count * (len(todo) - count)
        print(
            f"{count}/{len(todo)} prompts, {tokens / spent:.0f} tokens/s read, {made / spent:.0f} written, "
            f"{spent:.0f} s, about {rest:.0f} s left",
            flush=True,
        )


def main():
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("answers")
    parser.add_argument("--model", required=True, help="folder of save_pretrained, or GGUF file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--positions", type=int, default=200_000, help="largest batch: prompts times positions")
    parser.add_argument("--limit", type=int, default=0, help="answer only so many prompts")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
