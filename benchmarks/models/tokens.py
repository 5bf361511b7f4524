"""The tokenizer of the pair: byte-level BPE in which every number of one to three digits is one token.

Longer numbers are split from the left into groups of three: 48213 becomes 482 and 13. This avoids copy errors in
digits. Merges are learned from synthetic texts without digits; merges of digits are fixed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.models.documents import Writer, shown
from benchmarks.models.questions import Asker

VOCABULARY = 3072
PAD, START, END = 0, 1, 2
SPECIAL = ["<pad>", "<s>", "</s>"]
DIGITS = "0123456789"
CONTEXTS = 6000


def trained(contexts: int = CONTEXTS, vocabulary: int = VOCABULARY) -> Tokenizer:
    """A tokenizer learned from ``contexts`` synthetic contexts."""
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = _bytes()
    numbers = len(DIGITS) ** 2 + len(DIGITS) ** 3
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - numbers,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=14,
    )
    learnt.train_from_iterator(_texts(contexts), trainer)
    found = json.loads(learnt.to_str())["model"]
    words: dict[str, int] = found["vocab"]
    merges = []
    for a, b in product(DIGITS, repeat=2):
        words[a + b] = len(words)
        merges.append((a, b))
    for a, b, c in product(DIGITS, repeat=3):
        words[a + b + c] = len(words)
        merges += [(a + b, c), (a, b + c)]
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges + [tuple(merge) for merge in found["merges"]]))
    split = pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, _bytes()])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def read(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def prompt(tokenizer: Tokenizer, texts: str, question: str) -> tuple[list[int], list[int]]:
    """Tokens of a context, and tokens of a question about it up to the start of the answer."""
    return [START, *encoded(tokenizer, f"Context:\n{texts}\n")], encoded(tokenizer, f"Question: {question}\nAnswer:")


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text, without special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _bytes() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _texts(contexts: int) -> Iterator[str]:
    """Contexts with questions, and plain sentences, without digits."""
    asker, other = Asker(Writer(777)), Writer(778)
    for _ in range(contexts):
        texts = asker.writer.context()
        said = ["Context:", shown(texts)]
        for asked in (asker.ask(texts) for _ in range(3)):
            said += [f"Question: {asked.text}", f"Answer: {'' if asked.kind in {'rep', 'repdoc'} else asked.answer}"]
        yield re.sub(r"\d", "", "\n".join(said))
        yield " ".join(other.prose() for _ in range(3))
        yield other.deed()[0]
