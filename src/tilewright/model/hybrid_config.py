"""Configurations of hybrid models, and of Mamba-2, from GGUF metadata.

llama.cpp tells the kind of a layer by its heads and its width: a layer without key-value heads is
recurrent (in nemotron_h if it has no feed-forward part either). What transformers' classes can say
and llama.cpp's models do not compute is set to what changes nothing: limits of dt, factors of
FalconH1 that conversion multiplied into the weights.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from tilewright.errors import FormatError, UnsupportedError

__all__ = ["HYBRIDS", "hybrid_options"]

HYBRIDS = ("mamba2", "nemotron_h", "granitehybrid", "falcon-h1")
"""GGUF architectures of this file."""

_NO_LIMIT = 1e-30  # of dt, from below; not 0, whose logarithm transformers would take


class _Fields(Protocol):
    file: object

    def get(self, key: str, default: Any = None) -> Any: ...
    def number(self, key: str, default: float | None = None) -> float: ...
    def integer(self, key: str, default: int | None = None) -> int: ...
    def rope(self, default_theta: float) -> dict[str, Any]: ...


def hybrid_options(
    fields: _Fields,
    architecture: str,
    *,
    vocab_size: int,
    tied: bool,
    biases: frozenset[str],
    stems: frozenset[str],
) -> dict[str, Any]:
    """The arguments of the transformers configuration of a file.

    Args:
        fields: its metadata.
        architecture: one of `HYBRIDS`.
        vocab_size, tied, biases: as `tilewright.model.config_map.config_from_gguf`.
        stems: stems of all block tensors.

    Raises:
        UnsupportedError: a variant that transformers' model class does not compute.
        FormatError: a field is missing or malformed.
    """
    mixer = _Mixer(fields)
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": fields.integer("embedding_length"),
        "tie_word_embeddings": tied,
        "use_cache": True,
    }
    layers = fields.integer("block_count")
    eps = fields.number("attention.layer_norm_rms_epsilon")
    conv_bias = "ssm_conv1d" in biases
    if architecture == "mamba2":
        return common | {
            "num_hidden_layers": layers, "layer_norm_epsilon": eps, "num_heads": mixer.heads,
            "head_dim": mixer.head_dim, "state_size": mixer.state, "n_groups": mixer.groups,
            "conv_kernel": mixer.taps, "expand": mixer.expand(common["hidden_size"]),
            "use_conv_bias": conv_bias,
        }  # fmt: skip
    if architecture == "nemotron_h":
        return common | _nemotron(fields, mixer, layers) | {
            "layer_norm_epsilon": eps, "use_conv_bias": conv_bias,
            "mlp_bias": bool(biases & {"ffn_up", "ffn_down"}),
        }  # fmt: skip
    common |= {
        "num_hidden_layers": layers, "rms_norm_eps": eps, "mamba_n_heads": mixer.heads,
        "mamba_d_head": mixer.head_dim, "mamba_n_groups": mixer.groups,
        "mamba_d_state": mixer.state, "mamba_d_conv": mixer.taps, "mamba_conv_bias": conv_bias,
        "max_position_embeddings": fields.integer("context_length"),
        "rope_parameters": fields.rope(10_000.0),
    }  # fmt: skip
    if architecture == "granitehybrid":
        return common | _granite(fields, mixer, layers, common["hidden_size"])
    return common | _falcon(fields, mixer, common["hidden_size"], "ssm_norm" in stems)


class _Mixer:
    """The sizes of a Mamba-2 mixer."""

    def __init__(self, fields: _Fields) -> None:
        self._fields = fields
        self.inner = fields.integer("ssm.inner_size")
        self.heads = fields.integer("ssm.time_step_rank")
        self.state = fields.integer("ssm.state_size")
        self.groups = fields.integer("ssm.group_count")
        self.taps = fields.integer("ssm.conv_kernel")
        if self.inner % self.heads or self.heads % self.groups:
            raise FormatError(
                f"ssm.inner_size {self.inner}, ssm.time_step_rank {self.heads} and ssm.group_count "
                f"{self.groups} do not divide each other; heads and groups of equal size are "
                "needed",
                file=fields.file,
            )
        self.head_dim = self.inner // self.heads

    def expand(self, hidden: int) -> int:
        """How much wider the mixer is than the model."""
        if self.inner % hidden:
            raise UnsupportedError(
                f"{self._fields.file}: a mixer of {self.inner} in a model of {hidden}; in "
                "transformers' model it is a whole multiple"
            )
        return self.inner // hidden


def _nemotron(fields: _Fields, mixer: _Mixer, layers: int) -> dict[str, Any]:
    _refuse_experts(fields, "nemotron_h")
    _refuse_scale(fields)
    heads = _per_layer(fields, "attention.head_count", layers)
    kv_heads = _per_layer(fields, "attention.head_count_kv", layers)
    widths = _per_layer(fields, "feed_forward_length", layers)
    kinds = [
        "mlp" if wide else "full_attention" if kv else "linear_attention"
        for kv, wide in zip(kv_heads, widths, strict=True)
    ]
    options: dict[str, Any] = {
        "layers_block_type": kinds, "ssm_state_size": mixer.state,
        "mamba_num_heads": mixer.heads, "mamba_head_dim": mixer.head_dim,
        "n_groups": mixer.groups, "conv_kernel": mixer.taps, "time_step_min": _NO_LIMIT,
        "max_position_embeddings": fields.integer("context_length"),
        "intermediate_size": _one(fields, "feed_forward_length", widths),
    }  # fmt: skip
    if "full_attention" in kinds:
        options |= {
            "num_attention_heads": _one(fields, "attention.head_count", heads),
            "num_key_value_heads": _one(fields, "attention.head_count_kv", kv_heads),
            "head_dim": _head_dim(fields),
        }
    return options


def _granite(fields: _Fields, mixer: _Mixer, layers: int, hidden: int) -> dict[str, Any]:
    experts = int(fields.number("expert_count", 0))
    wide = fields.integer("feed_forward_length")
    shared = fields.integer("expert_shared_feed_forward_length") if experts else wide
    heads = _one(fields, "attention.head_count", _per_layer(fields, "attention.head_count", layers))
    kv_heads = _per_layer(fields, "attention.head_count_kv", layers)
    head_dim = _head_dim(fields, hidden // heads)
    _whole_rope(fields, head_dim, "granitehybrid")
    return {
        "layer_types": ["full_attention" if kv else "linear_attention" for kv in kv_heads],
        "num_attention_heads": heads,
        "num_key_value_heads": _one(fields, "attention.head_count_kv", kv_heads),
        "head_dim": head_dim,
        "mamba_expand": mixer.expand(hidden),
        "num_local_experts": experts,
        "num_experts_per_tok": fields.integer("expert_used_count") if experts else 1,
        "intermediate_size": wide,
        "shared_intermediate_size": shared,
        # llama.cpp keeps no word for "none": 0 is one.
        "embedding_multiplier": fields.number("embedding_scale", 1.0) or 1.0,
        "logits_scaling": fields.number("logit_scale", 1.0) or 1.0,
        "residual_multiplier": fields.number("residual_scale", 1.0) or 1.0,
        "attention_multiplier": fields.number("attention.scale", 0.0) or 1 / math.sqrt(head_dim),
        "position_embedding_type": "rope" if fields.get("rope.scaling.finetuned", True) else None,
    }


def _falcon(fields: _Fields, mixer: _Mixer, hidden: int, normed: bool) -> dict[str, Any]:
    _refuse_experts(fields, "falcon-h1")
    _refuse_scale(fields)
    heads = fields.integer("attention.head_count")
    head_dim = _head_dim(fields, hidden // heads)
    _whole_rope(fields, head_dim, "falcon-h1")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.integer("feed_forward_length"),
        "mamba_d_ssm": mixer.inner,
        "mamba_rms_norm": normed,
        "mamba_norm_before_gate": False,  # llama.cpp's order
    }


def _head_dim(fields: _Fields, default: int | None = None) -> int:
    keys = fields.integer("attention.key_length", default)
    values = fields.integer("attention.value_length", keys)
    if keys != values:
        raise UnsupportedError(
            f"{fields.file}: keys of {keys} and values of {values} numbers a head; they must agree"
        )
    return keys


def _whole_rope(fields: _Fields, head_dim: int, architecture: str) -> None:
    turned = fields.integer("rope.dimension_count", head_dim)
    if turned != head_dim:
        raise UnsupportedError(
            f"{fields.file}: rope turns {turned} of {head_dim} numbers of a head; {architecture} "
            "models in transformers turn all of them"
        )


def _per_layer(fields: _Fields, key: str, layers: int) -> list[int]:
    """A number for every layer, of a field that holds one or one a layer; 0 is allowed."""
    value = fields.get(key)
    if isinstance(value, list | tuple | np.ndarray):
        items = list(value)
    else:
        items = [int(fields.number(key))] * layers
    whole = all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in items)
    if len(items) < layers or not whole or any(i < 0 for i in items):
        raise FormatError(
            f"{key} is {items[:8]}; a whole number for each of {layers} layers is needed",
            file=fields.file,
        )
    return [int(item) for item in items[:layers]]


def _one(fields: _Fields, key: str, items: list[int]) -> int:
    """The number that all layers agree on which have one; 1 if none has."""
    found = {item for item in items if item}
    if len(found) > 1:
        raise UnsupportedError(
            f"{fields.file}: {key} differs from layer to layer ({sorted(found)[:8]}); models "
            "whose layers are alike load"
        )
    return found.pop() if found else 1


def _refuse_experts(fields: _Fields, architecture: str) -> None:
    experts = int(fields.number("expert_count", 0))
    if experts:
        raise UnsupportedError(
            f"{fields.file}: a mixture of {experts} experts; of {architecture}, dense models load"
        )


def _refuse_scale(fields: _Fields) -> None:
    scale = fields.number("attention.scale", 0.0)
    if scale:
        raise UnsupportedError(
            f"{fields.file}: attention.scale is {scale}; transformers' model has no such scaling"
        )
