"""Tensor names of GGUF files, and the names transformers gives the same tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["SKIPPED_GGUF_TENSORS", "hf_name", "hub_name"]

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

# Architectures with Mamba-2 mixers: how the model's parts are called, then those of a layer.
_MAMBA = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_MAMBA_LEAVES = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
_ATTENTION = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
}


def _inside(part: str, names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: f"{part}.{ours}" for theirs, ours in names.items()}


_HYBRID_TOP = {
    "mamba2": {
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
    },
    "nemotron_h": {
        "token_embd": "model.embeddings",
        "output_norm": "model.norm_f",
        "output": "lm_head",
    },
    "granitehybrid": _TOP,
    "falcon-h1": _TOP | {"output_norm": "model.final_layernorm"},
}
_HYBRID_BLOCK = {
    "mamba2": {"attn_norm": "norm", **_inside("mixer", _MAMBA)},
    "nemotron_h": {
        "attn_norm": "norm",
        **_inside("mixer", _MAMBA | _ATTENTION),
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
    },
    "granitehybrid": {
        "attn_norm": "input_layernorm",
        **_inside("mamba", _MAMBA),
        **_inside("self_attn", _ATTENTION),
        "ffn_norm": "post_attention_layernorm",
        # transformers keeps both in one matrix, shared_mlp.input_linear.
        "ffn_gate": "shared_mlp.gate_proj",
        "ffn_up": "shared_mlp.up_proj",
        "ffn_down": "shared_mlp.output_linear",
        # The same part where there are experts too.
        "ffn_gate_shexp": "shared_mlp.gate_proj",
        "ffn_up_shexp": "shared_mlp.up_proj",
        "ffn_down_shexp": "shared_mlp.output_linear",
        "ffn_gate_inp": "block_sparse_moe.router",
        "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
        "ffn_up_exps": "block_sparse_moe.experts.up_proj",
        "ffn_down_exps": "block_sparse_moe.experts.down_proj",
    },
    "falcon-h1": {
        "attn_norm": "input_layernorm",
        **_inside("mamba", _MAMBA),
        **_inside("self_attn", _ATTENTION),
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
}
_HYBRID_MIXER = {
    "mamba2": "backbone.layers.{}.mixer.",
    "nemotron_h": "model.layers.{}.mixer.",
    "granitehybrid": "model.layers.{}.mamba.",
    "falcon-h1": "model.layers.{}.mamba.",
}
_PATTERN = re.compile(r"^(?:blk\.(?P<layer>\d+)\.)?(?P<stem>[a-z0-9_]+)\.(?P<leaf>weight|bias)$")
_BLOCK_NAME = re.compile(r"^blk\.(?P<layer>\d+)\.(?P<rest>.+)$")

# What checkpoints on the hub call differently from transformers' module tree, by model type.
_HUB = {
    "mamba2": (
        (re.compile(r"^model\."), ""),
        (re.compile(r"^backbone\.embedding\."), "backbone.embeddings."),
    ),
    "nemotron_h": ((re.compile(r"^backbone\."), "model."),),
    "granitemoehybrid": (
        (re.compile(r"\.block_sparse_moe\.router\.layer\."), ".block_sparse_moe.router."),
        # Of input_linear, gate and up of all experts in one tensor, `CheckpointSource` makes two.
        (
            re.compile(r"\.block_sparse_moe\.output_linear\."),
            ".block_sparse_moe.experts.down_proj.",
        ),
    ),
}


def hf_name(gguf_name: str, architecture: str) -> str | None:
    """The transformers name of a GGUF tensor, such as "blk.0.attn_q.weight" ->
    "model.layers.0.self_attn.q_proj.weight".

    Args:
        gguf_name: name in the file.
        architecture: one of `tilewright.model.config_map.ARCHITECTURES`.

    Returns:
        the name, or None for a tensor that these architectures do not have.
    """
    if architecture in _HYBRID_BLOCK:
        return _hybrid_name(gguf_name, architecture)
    match = _PATTERN.match(gguf_name)
    if match is None:
        return None
    layer, stem, leaf = match["layer"], match["stem"], match["leaf"]
    if layer is None:
        module = _TOP.get(stem)
        return f"{module}.{leaf}" if module else None
    module = _BLOCK.get(stem) or _BLOCK_BY_ARCHITECTURE[architecture].get(stem)
    return f"model.layers.{int(layer)}.{module}.{leaf}" if module else None


def hub_name(name: str, model_type: str | None) -> str:
    """transformers' name of a tensor of a safetensors folder."""
    for theirs, ours in _HUB.get(model_type or "", ()):
        name = theirs.sub(ours, name)
    return name


def _hybrid_name(gguf_name: str, architecture: str) -> str | None:
    match = _BLOCK_NAME.match(gguf_name)
    if match is None:
        stem, _, leaf = gguf_name.partition(".")
        module = _HYBRID_TOP[architecture].get(stem)
        return f"{module}.{leaf}" if module and leaf in ("weight", "bias") else None
    layer, rest = int(match["layer"]), match["rest"]
    mixer = _HYBRID_MIXER[architecture].format(layer)
    if rest in _MAMBA_LEAVES:
        return mixer + _MAMBA_LEAVES[rest]
    if architecture == "falcon-h1" and rest in ("ffn_norm", "ffn_norm.weight"):
        return f"model.layers.{layer}.pre_ff_layernorm.weight"  # llama.cpp's name has no leaf
    stem, _, leaf = rest.partition(".")
    module = _HYBRID_BLOCK[architecture].get(stem)
    top = mixer.split(".", 1)[0]
    known = module and leaf in ("weight", "bias")
    return f"{top}.layers.{layer}.{module}.{leaf}" if known else None
