"""Tensor names of GGUF files, and the names transformers gives the same tensors."""

from __future__ import annotations

import re

__all__ = ["SKIPPED_GGUF_TENSORS", "hf_name"]

# Tensors that carry no weight of the model: rope factors become part of the rotary embedding.
SKIPPED_GGUF_TENSORS = frozenset({"rope_freqs.weight"})

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What `ffn_norm` is depends on whether the attention output has a norm of its own.
_BLOCK_BY_ARCHITECTURE = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "qwen2": {"ffn_norm": "post_attention_layernorm"},
    "qwen3": {
        "ffn_norm": "post_attention_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    },
    "qwen3moe": {
        "ffn_norm": "post_attention_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    },
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    },
}
_PATTERN = re.compile(r"^(?:blk\.(?P<layer>\d+)\.)?(?P<stem>[a-z0-9_]+)\.(?P<leaf>weight|bias)$")


def hf_name(gguf_name: str, architecture: str) -> str | None:
    """The transformers name of a GGUF tensor, such as "blk.0.attn_q.weight" ->
    "model.layers.0.self_attn.q_proj.weight".

    Args:
        gguf_name: name in the file.
        architecture: "llama", "qwen2", "qwen3", "qwen3moe" or "gemma3".

    Returns:
        the name, or None for a tensor that these architectures do not have.
    """
    match = _PATTERN.match(gguf_name)
    if match is None:
        return None
    layer, stem, leaf = match["layer"], match["stem"], match["leaf"]
    if layer is None:
        module = _TOP.get(stem)
        return f"{module}.{leaf}" if module else None
    module = _BLOCK.get(stem) or _BLOCK_BY_ARCHITECTURE[architecture].get(stem)
    return f"model.layers.{int(layer)}.{module}.{leaf}" if module else None
