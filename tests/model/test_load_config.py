"""Configurations from GGUF metadata and from config.json, field by field."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from tilewright.errors import FormatError, UnsupportedError
from tilewright.model.config_map import config_from_checkpoint, config_from_gguf
from tilewright.model.gguf_source import rope_row_order
from tilewright.model.names import hf_name
from tilewright.model.rope import llama3_parameters


def metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "context_length": 4096,
        "embedding_length": 512,
        "block_count": 12,
        "feed_forward_length": 1024,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 500000.0,
    }
    fields |= {key.replace("__", "."): value for key, value in changes.items()}
    named = {f"{architecture}.{k}": v for k, v in fields.items() if v is not None}
    return {"general.architecture": architecture, **named}


def config(
    values: dict[str, Any], *, tied: bool = False, biases: frozenset[str] = frozenset()
) -> Any:
    return config_from_gguf(values, vocab_size=1000, tied=tied, biases=biases, file="m.gguf")


def test_llama() -> None:
    made = config(metadata(rope__dimension_count=64), tied=True)
    assert made.model_type == "llama"
    assert (
        made.to_dict().items()
        >= {
            "vocab_size": 1000,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
        }.items()
    )
    assert made.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    biased = config(metadata(), biases=frozenset({"attn_q", "ffn_up"}))
    assert (biased.attention_bias, biased.mlp_bias) == (True, True)
    assert biased.tie_word_embeddings is False


def test_defaults() -> None:
    made = config(metadata(attention__head_count_kv=None, rope__freq_base=None))
    assert made.num_key_value_heads == 8
    assert made.rope_parameters["rope_theta"] == 10000.0


def test_equal_layers_may_be_listed() -> None:
    assert config(metadata(attention__head_count_kv=[2] * 12)).num_key_value_heads == 2


def test_qwen3_head_dim() -> None:
    made = config(metadata("qwen3", attention__key_length=128, attention__value_length=128))
    assert (made.model_type, made.head_dim) == ("qwen3", 128)


def test_yarn() -> None:
    scaling = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 1024,
        "rope__scaling__yarn_beta_fast": 16.0,
        "rope__scaling__yarn_beta_slow": 2.0,
    }
    made = config(metadata("qwen2", **scaling))
    expected = {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    }
    assert made.rope_parameters == expected
    made = config(metadata("qwen2", **scaling, rope__scaling__yarn_attn_factor=1.5))
    assert made.rope_parameters["attention_factor"] == 1.5
    made = config(metadata("qwen2", **scaling, rope__scaling__attn_factor=0.5))
    assert made.rope_parameters["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"rope__scale_linear": 4.0}, "linear"),
        ({"rope__scaling__factor": 4.0}, "linear"),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, "default"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, "default"),
    ],
    ids=["old-key", "no-type", "none", "factor-1"],
)
def test_linear(fields: dict[str, Any], kind: str) -> None:
    made = config(metadata(**fields))
    assert made.rope_parameters["rope_type"] == kind
    assert made.rope_parameters.get("factor") == (4.0 if kind == "linear" else None)


def test_gemma3() -> None:
    made = config(
        metadata(
            "gemma3",
            attention__key_length=256,
            attention__value_length=256,
            attention__sliding_window=512,
            rope__freq_base=1e6,
            rope__scaling__type="linear",
            rope__scaling__factor=8.0,
            final_logit_softcapping=30.0,
        ),
        tied=True,
    )
    assert made.model_type == "gemma3_text"
    assert made.head_dim == made.query_pre_attn_scalar == 256
    assert made.sliding_window == 512
    assert made.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 2
    assert made.final_logit_softcapping == 30.0
    assert made.hidden_activation == "gelu_pytorch_tanh"
    assert made.rope_parameters == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }


def test_gemma3_variants() -> None:
    listed = [True, False, False] * 4
    made = config(
        metadata(
            "gemma3",
            attention__sliding_window=64,
            attention__sliding_window_pattern=listed,
            rope__freq_base_swa=20000.0,
        )
    )
    assert [kind == "sliding_attention" for kind in made.layer_types] == listed
    assert made.rope_parameters["sliding_attention"]["rope_theta"] == 20000.0
    # The 27B model, known by its 62 layers, divides by the width over the heads.
    large = config(metadata("gemma3", block_count=62, attention__key_length=128,
                            attention__value_length=128))  # fmt: skip
    assert (large.head_dim, large.query_pre_attn_scalar) == (128, 64)


BAD_FIELDS = [
    ({"attention__head_count": None}, FormatError, r"llama\.attention\.head_count is None; a num"),
    ({"attention__head_count": "8"}, FormatError, "head_count is '8'; a number is needed"),
    ({"attention__head_count": True}, FormatError, "head_count is True; a number is needed"),
    ({"attention__head_count": 0}, FormatError, "positive whole number"),
    ({"block_count": 2.5}, FormatError, "positive whole number"),
    ({"attention__layer_norm_rms_epsilon": float("nan")}, FormatError, "must be finite"),
    ({"rope__freq_base": -1.0}, FormatError, "not negative"),
    ({"feed_forward_length": [1024, 512]}, UnsupportedError, "differs from layer to layer"),
    ({"embedding_length": 510}, FormatError, "make no llama model"),
]


@pytest.mark.parametrize(("fields", "error", "message"), BAD_FIELDS, ids=lambda v: str(v)[:40])
def test_bad_fields(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        config(metadata(**fields))


def test_config_json_keeps_nothing_of_its_quantization() -> None:
    described = {
        "model_type": "qwen3",
        "hidden_size": 512,
        "num_attention_heads": 8,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "gptq"},
    }
    made = config_from_checkpoint(described, file="folder")
    assert made.rope_parameters["rope_theta"] == 1e6
    assert not hasattr(made, "quantization_config")
    assert described["quantization_config"] == {"quant_method": "gptq"}


@pytest.mark.parametrize(
    ("name", "architecture", "right"),
    [
        ("token_embd.weight", "llama", "model.embed_tokens.weight"),
        ("output.weight", "qwen2", "lm_head.weight"),
        ("blk.11.attn_q.bias", "qwen2", "model.layers.11.self_attn.q_proj.bias"),
        ("blk.0.ffn_norm.weight", "llama", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.0.ffn_norm.weight", "gemma3", "model.layers.0.pre_feedforward_layernorm.weight"),
        ("blk.3.attn_k_norm.weight", "qwen3", "model.layers.3.self_attn.k_norm.weight"),
        ("blk.3.attn_k_norm.weight", "llama", None),
        ("blk.0.ffn_gate_exps.weight", "llama", None),
        ("token_embd.scale", "llama", None),
    ],
)
def test_names(name: str, architecture: str, right: str | None) -> None:
    assert hf_name(name, architecture) == right


@pytest.mark.parametrize(("rows", "heads"), [(8, 1), (24, 3), (576, 9)])
def test_row_order_inverts_llama_cpps_conversion(rows: int, heads: int) -> None:
    original = np.arange(rows)
    stored = original.reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(rows)
    assert np.array_equal(stored[rope_row_order(rows, heads)], original)


def test_llama3_parameters_are_recovered_or_not_guessed() -> None:
    dim, theta, factor = 128, 500000.0, 8.0
    divisors = []
    for i in range(0, dim, 2):
        wave = 2 * math.pi * theta ** (i / dim)
        smooth = (8192 / wave - 1) / 3
        blended = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if wave < 2048 else factor if wave > 8192 else blended)
    right = np.array(divisors, dtype=np.float32)
    found = llama3_parameters(right, theta=theta, head_dim=dim)
    assert found is not None
    assert (found["factor"], found["original_max_position_embeddings"]) == (8.0, 8192)
    right[40] *= 1.01
    assert llama3_parameters(right, theta=theta, head_dim=dim) is None
