"""A BERT with random weights, as saved by transformers and by sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert(folder: Path, vocabulary: Sequence[str], dim: int = 32, layers: int = 2) -> Path:
    """Two layers without a pooler."""
    import torch
    import transformers

    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def sentence_model(bert: Path, into: Path, length: int) -> Path:
    """The same model with mean pooling, for at most ``length`` tokens."""
    import sentence_transformers

    model = sentence_transformers.SentenceTransformer(str(bert), device="cpu", local_files_only=True)
    model.max_seq_length = length
    model.save(str(into))
    return into
