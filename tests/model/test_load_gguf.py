"""Loaded GGUF models against plain transformers models of the same dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from model.gguf_models import Tiny, logits, reference, relative_error, write
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.model.layers import QuantEmbedding, QuantLinear, model_problems
from tilewright.model.load import load

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_divisors(theta: float, dim: int, factor: float) -> np.ndarray[Any, Any]:
    """Divisors of the frequencies in Llama 3.1's scaling, one frequency at a time."""
    divisors = []
    for i in range(0, dim, 2):
        wave = 2 * np.pi * theta ** (i / dim)
        if wave < 8192 / 4:
            divisors.append(1.0)
        elif wave > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wave - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
MODELS = {
    "llama-tied": Tiny("llama", {"embd": "Q8_0", "": "Q4_1"}),
    "llama-k-quants": Tiny(
        "llama", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output.w": "Q6_K", "": "Q4_K"}, tied=False
    ),
    "llama-biases": Tiny(
        "llama",
        {"": "Q8_0"},
        biases=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down"),
        config={"attention_bias": True, "mlp_bias": True},
    ),
    "llama-qkv-biases": Tiny(
        "llama",
        {"": "Q5_0"},
        biases=("attn_q", "attn_k", "attn_v"),
        config={"attention_bias": True},
    ),
    "llama-grouped-1": Tiny("llama", {"": "Q4_0"}, heads=8, kv_heads=1, head_dim=32),
    "llama3-rope": Tiny(
        "llama",
        {"": "Q8_0"},
        theta=500_000.0,
        rope_factors=llama3_divisors(500_000.0, 64, 32.0),
        config={"rope_parameters": LLAMA3_SCALING},
    ),
    "llama-linear-rope": Tiny(
        "llama",
        {"": "Q8_0"},
        metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        config={"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "qwen2": Tiny(
        "qwen2", {"embd": "Q6_K", "": "Q5_1"}, biases=("attn_q", "attn_k", "attn_v"), eps=1e-6
    ),
    "qwen2-yarn": Tiny(
        "qwen2",
        {"": "Q8_0"},
        biases=("attn_q", "attn_k", "attn_v"),
        tied=False,
        metadata={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 512,
        },
        config={
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "rope_theta": 10_000.0,
            }
        },
    ),
    "qwen3": Tiny("qwen3", {"embd": "Q4_0", "": "IQ4_NL"}, head_dim=128, theta=1e6),
    "qwen3-untied": Tiny("qwen3", {"output.w": "Q8_0", "": "Q3_K"}, head_dim=32, tied=False),
    "gemma3": Tiny(
        "gemma3",
        {"embd": "Q8_0", "ffn_down": "Q6_K", "attn_output": "Q4_K", "": "Q5_0"},
        layers=7,
        kv_heads=1,
        theta=1e6,
        eps=1e-6,
        metadata={"attention.sliding_window": 16},
        config={
            "sliding_window": 16,
            "query_pre_attn_scalar": 64,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma3-256": Tiny(
        "gemma3",
        {"": "Q8_0"},
        heads=2,
        kv_heads=1,
        head_dim=256,
        theta=1e6,
        metadata={"attention.sliding_window": 16},
        config={
            "sliding_window": 16,
            "query_pre_attn_scalar": 256,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma3-pattern-softcap-linear": Tiny(
        "gemma3",
        {"": "Q8_0"},
        layers=4,
        head_dim=32,
        theta=1e6,
        metadata={
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": 2,
            "final_logit_softcapping": 5.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        config={
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 5.0,
            "rope_parameters": GEMMA_ROPE,
        },
    ),
    "gemma3-no-window": Tiny(
        "gemma3",
        {"": "Q4_1"},
        theta=1e6,
        config={
            "sliding_window": 2048,
            "query_pre_attn_scalar": 64,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "llama-f16": Tiny("llama", {"": "F16"}),
    "qwen3-bf16-embedding": Tiny("qwen3", {"embd": "BF16", "": "Q4_K"}),
    "llama-tq2-dequantized": Tiny("llama", {"ffn": "TQ2_0", "embd": "TQ1_0", "": "Q4_0"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_dequantized_model(name: str, tmp_path: Path) -> None:
    tiny = MODELS[name]
    values = write(tmp_path / "model.gguf", tiny)
    model, _ = load(tmp_path / "model.gguf")
    right = logits(reference(tiny, values))
    assert right.abs().max() > 0.5
    assert relative_error(logits(model), right) < 1e-4


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_packed_type_runs_packed(kind: str, tmp_path: Path) -> None:
    tiny = Tiny("llama", {"": kind}, layers=1)
    values = write(tmp_path / "model.gguf", tiny)
    model, _ = load(tmp_path / "model.gguf")
    assert set(model.tilewright_info.packed) == {kind}
    assert model.tilewright_info.packed[kind].tensors == 8
    assert model.tilewright_info.dequantized == {}
    assert relative_error(logits(model), logits(reference(tiny, values))) < 1e-4


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3", "gemma3-256"])
def test_agrees_with_transformers_own_reader(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny = MODELS[name]
    write(tmp_path / "model.gguf", tiny)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    model, _ = load(tmp_path / "model.gguf")
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert getattr(model.config, key) == getattr(theirs.config, key)
    assert relative_error(logits(model), logits(theirs)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny = MODELS["gemma3"]
    values = write(tmp_path / "model.gguf", tiny)
    model, _ = load(tmp_path / "model.gguf", dtype=dtype)
    assert model.dtype == dtype
    assert model.model.embed_tokens(torch.tensor([1])).dtype == dtype
    right = logits(reference(tiny, values))
    assert relative_error(logits(model), right) < (0.01 if dtype is torch.float16 else 0.08)


def test_int8_activations_are_passed_on(tmp_path: Path) -> None:
    tiny = MODELS["llama-tied"]
    values = write(tmp_path / "model.gguf", tiny)
    model, _ = load(tmp_path / "model.gguf", activations="int8")
    assert model.lm_head.activations == "int8"
    assert model.model.layers[0].mlp.up_proj.activations == "int8"
    assert relative_error(logits(model), logits(reference(tiny, values))) < 0.05


def test_odd_rope_factors_become_frequencies(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 3.0, 32, dtype=np.float32)
    tiny = Tiny("llama", {"": "Q8_0"}, rope_factors=factors)
    values = write(tmp_path / "model.gguf", tiny)
    model, _ = load(tmp_path / "model.gguf")
    plain = reference(tiny, values)
    assert relative_error(logits(model), logits(plain)) > 1e-3
    plain.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    assert relative_error(logits(model), logits(plain)) < 1e-4


def test_llama3_rope_is_recovered(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", MODELS["llama3-rope"])
    model, _ = load(tmp_path / "model.gguf")
    assert model.config.rope_parameters == LLAMA3_SCALING


def test_module_names_and_sharing(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", MODELS["llama-tied"])
    model, _ = load(tmp_path / "model.gguf")
    layer = model.model.layers[1]
    for module in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj):
        assert isinstance(module, QuantLinear)
    assert isinstance(model.model.embed_tokens, QuantEmbedding)
    assert model.lm_head.packed is model.model.embed_tokens.packed
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def test_packed_weights_are_the_file(tmp_path: Path) -> None:
    """Nothing but q and k, whose rows move, is copied: the tensors lie in the mapped file."""
    write(tmp_path / "model.gguf", MODELS["llama-tied"])
    model, _ = load(tmp_path / "model.gguf")
    places = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("model.gguf"):
            low, high = line.split()[0].split("-")
            places.append((int(low, 16), int(high, 16)))
    if not places:
        pytest.skip("this system has no /proc/self/maps")

    def mapped(linear: QuantLinear) -> bool:
        at = linear.packed.data.data_ptr()
        return any(low <= at < high for low, high in places)

    layer = model.model.layers[0]
    assert mapped(layer.mlp.down_proj)
    assert mapped(layer.self_attn.v_proj)
    assert mapped(model.lm_head)
    assert not mapped(layer.self_attn.q_proj)


def test_info_and_problems(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    write(path, MODELS["llama-tq2-dequantized"])
    model, _ = load(path)
    info = model.tilewright_info
    assert (info.format, info.architecture) == ("gguf", "llama")
    assert info.file_bytes == path.stat().st_size
    assert {k: v.tensors for k, v in info.packed.items()} == {"Q4_0": 8}
    assert {k: v.tensors for k, v in info.dequantized.items()} == {"TQ1_0": 1, "TQ2_0": 6}
    assert {k: v.tensors for k, v in info.dense.items()} == {"F32": 5}
    q4_bytes = 2 * (256 * 256 * 2 + 128 * 256 * 2) * 18 // 32
    assert info.packed["Q4_0"].bytes == info.packed_bytes == q4_bytes
    lines = [r.getMessage() for r in caplog.records if r.name == "tilewright"]
    assert len(lines) == 1
    assert "TQ1_0 x1" in lines[0]
    assert "TQ2_0 x6" in lines[0]
    problems = model_problems(model)
    assert [tuple(p) for p in problems] == [
        ("model.layers.*.self_attn.q_proj", "Q4_0", 256, 256, 0, 4),
        ("model.layers.*.self_attn.k_proj", "Q4_0", 128, 256, 0, 4),
    ]
    assert {p.op for p in problems} == {"mmq"}


def test_generation_config_and_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", MODELS["llama-tied"])
    model, tokenizer = load(tmp_path / "model.gguf")
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.generation_config.bos_token_id == 1
    assert model.generation_config.pad_token_id == 2
    assert model.config.eos_token_id == 2
    assert tokenizer.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer("hello world", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] <= ids.input_ids.shape[1] + 4


def test_without_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", MODELS["llama-tied"], tokens=False)
    model, tokenizer = load(tmp_path / "model.gguf")
    assert tokenizer is None
    assert model.tilewright_info.notes == ["the file carries no tokenizer"]


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", MODELS["llama-tied"])
    model, _ = load(str(tmp_path))
    assert model.tilewright_info.format == "gguf"
