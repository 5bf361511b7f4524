"""The two networks: small Llamas, their initialization, and the initialization of the large one from the small one.

In the first layer three heads initially attend one, two and three tokens back, regardless of content. Training then
learns to continue a copy within minutes; whether these heads are the cause was not tested.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from benchmarks.models.tokens import END, PAD, START

HEAD = 32
EPSILON = 1e-5
SHAPES = {
    "draft": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 320},
    "reference": {"hidden_size": 256, "num_hidden_layers": 5, "intermediate_size": 512},
}
CONSTANT, SHARP, FREQUENCIES = 0.3, 5.0, 6


def network(size: str, vocabulary: int, seed: int) -> Any:
    """A newly initialized network; float32.

    Args:
        size: One of ``SHAPES``.
        vocabulary: Size of the vocabulary.
        seed: Seed of the weights.
    """
    torch.manual_seed(seed)
    shape = SHAPES[size]
    heads = shape["hidden_size"] // HEAD
    config = LlamaConfig(
        **shape,
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        rms_norm_eps=EPSILON,
        tie_word_embeddings=True,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model: Any = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.05 if "embed" in name else weights.shape[1] ** -0.5 * (0.3 if out else 1)
                weights.normal_(0, std)
        _look_back(model)
    return model


def _look_back(model: Any) -> None:
    """Initializes three heads to attend to previous positions, through a dimension that is constant for all tokens."""
    embedding, first = model.model.embed_tokens.weight, model.model.layers[0].self_attn
    embedding[:, 0] = CONSTANT
    norm = CONSTANT / math.sqrt(0.05**2 + CONSTANT**2 / embedding.shape[1])  # the value after the norm
    speed = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)[:FREQUENCIES]
    sharp = SHARP / norm
    for head, back in enumerate((1, 2, 3)):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        q, k = first.q_proj.weight[rows], first.k_proj.weight[rows]
        q *= 0.1
        k *= 0.1
        k[:FREQUENCIES, 0] = sharp
        q[:FREQUENCIES, 0] = sharp * torch.cos(speed * back)
        q[HEAD // 2 : HEAD // 2 + FREQUENCIES, 0] = -sharp * torch.sin(speed * back)


@torch.no_grad()
def grown(small: Any, size: str, seed: int) -> Any:
    """A larger network with the function of the small one (net2net initialization).

    The output weights of new heads, units and layers are zero. Their input weights are random, so that they can learn.
    """
    large = network(size, small.config.vocab_size, seed)
    old, new = dict(small.named_parameters()), dict(large.named_parameters())
    width, wide = small.config.hidden_size, large.config.hidden_size
    shrink = math.sqrt(width / wide)  # the mean square over more dimensions is smaller
    last = small.config.num_hidden_layers - 1
    for name, weights in new.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        source = old[name.replace(f".layers.{layer}.", f".layers.{min(layer, last)}.")]
        if name == "model.norm.weight":
            weights.zero_()
            weights[:width] = source * shrink
        elif weights.ndim == 1:
            weights.fill_(float(source.mean()) * shrink)
            weights[:width] = source * shrink
        elif "embed" in name:
            weights.normal_(0, 0.2 * float(source.std()))
            weights[:, :width] = source
        else:
            _widen(weights, source, name.endswith(("o_proj.weight", "down_proj.weight")), layer > last)
    return large


def _widen(weights: torch.Tensor, source: torch.Tensor, out: bool, added: bool) -> None:
    """Copies the old matrix into the upper left corner of the new one, and scales the rest."""
    if added:
        if out:
            weights.zero_()
        return
    rows, columns = source.shape
    weights.mul_(float(source.std()) / float(weights.std()) * 0.7)
    if out:
        weights[:, columns:] = 0
        weights[rows:, :columns] = 0
    else:
        weights[:rows, columns:] = 0
    weights[:rows, :columns] = source


def export(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a model folder for transformers, with weights in bfloat16."""
    logging.disable_progress_bar()
    small = LlamaForCausalLM(model.config).to(torch.bfloat16)
    small.load_state_dict(model.state_dict())
    small.config.dtype = torch.bfloat16
    small.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # it repeats the configuration
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
