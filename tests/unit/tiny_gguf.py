"""A tiny Qwen2 model with random weights, written as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LAYERS, WIDTH, INNER, HEADS, KEY_HEADS, LENGTH = 2, 32, 64, 4, 2, 512


def write_gguf(path: Path, chat: str = CHAT, seed: int = 3, architecture: str = "qwen2", **extra: int) -> Path:
    """Writes the model. `extra` are further integer metadata, with dots as double underscores."""
    import gguf
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", *SPECIAL]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - len(SPECIAL)) + [3] * len(SPECIAL))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    if chat:
        writer.add_chat_template(chat)
    for name, value in extra.items():
        writer.add_uint16(name.replace("__", "."), value)
    for name, weights in _weights(len(tokens), np.random.default_rng(seed)).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(vocabulary: int, rng: np.random.Generator) -> dict[str, Any]:
    def drawn(*shape: int) -> Any:
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    keys = WIDTH // HEADS * KEY_HEADS
    found = {"token_embd.weight": drawn(vocabulary, WIDTH), "output_norm.weight": np.ones(WIDTH, np.float32)}
    found["output.weight"] = drawn(vocabulary, WIDTH)
    for layer in range(LAYERS):
        parts = {
            "attn_norm.weight": np.ones(WIDTH, np.float32),
            "ffn_norm.weight": np.ones(WIDTH, np.float32),
            "attn_q.weight": drawn(WIDTH, WIDTH),
            "attn_q.bias": drawn(WIDTH),
            "attn_k.weight": drawn(keys, WIDTH),
            "attn_k.bias": drawn(keys),
            "attn_v.weight": drawn(keys, WIDTH),
            "attn_v.bias": drawn(keys),
            "attn_output.weight": drawn(WIDTH, WIDTH),
            "ffn_gate.weight": drawn(INNER, WIDTH),
            "ffn_up.weight": drawn(INNER, WIDTH),
            "ffn_down.weight": drawn(WIDTH, INNER),
        }
        found |= {f"blk.{layer}.{name}": weights for name, weights in parts.items()}
    return found
