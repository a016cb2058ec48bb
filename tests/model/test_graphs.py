"""The decoder of GPUs, its kernels run by Triton's interpreter, against transformers' forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triton_interpreter
from tilewright.errors import UnsupportedError
from tilewright.model import graphs
from tilewright.model.fuse import why_not_fused
from tilewright.model.generate import decoder_for, how_stepped
from tilewright.model.graphs import GraphDecoder, why_not_graphed

with triton_interpreter.interpreting():
    from tilewright.ops.decoder import triton_kernels

transformers: Any = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "head_dim": 32,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-odd": ("Llama", {"head_dim": 20, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 32}),
    "gemma3": ("Gemma3", {"layer_types": ["sliding_attention", "full_attention"],
                          "sliding_window": 8, "query_pre_attn_scalar": 32}),
}  # fmt: skip


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A small model with random weights, its norms not 1."""
    name, changes = FAMILIES[family]
    text = "Text" if family == "gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model.requires_grad_(False)


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it grows within a test."""
    monkeypatch.setattr(graphs, "_FIRST_CAPACITY", 16)


def right_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0].float()


def off(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got - right).abs().max() / right.abs().max())


IDS = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("small_cache")
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_tokens_give_transformers_logits(family: str) -> None:
    model = model_of(family)
    right = right_logits(model, IDS)
    decoder = GraphDecoder(model)
    found = {8: decoder.prefill(IDS[:, :9]), 9: decoder.step(int(IDS[0, 9]))}
    found[17] = decoder.prefill(IDS[:, 10:18])
    for at in range(18, 21):
        found[at] = decoder.step(int(IDS[0, at]))
    assert decoder.position == 21
    for at, logits in found.items():
        assert off(logits, right[at]) < 5e-6, at
    decoder.reset()
    assert off(decoder.logits(IDS[:, :6]), right[:6]) < 5e-6


def test_half_precision_rounds_where_transformers_does() -> None:
    model = model_of("qwen3", torch.float16)
    right = right_logits(model, IDS)
    decoder = GraphDecoder(model)
    found = torch.stack([decoder.prefill(IDS[:, :9]), decoder.step(int(IDS[0, 9]))])
    assert off(found, right[8:10]) < 4e-3


def test_a_prompt_in_pieces_is_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    monkeypatch.setattr(graphs, "PREFILL_ROWS", 7)
    decoder = GraphDecoder(model)
    right = right_logits(model, IDS)
    assert off(decoder.prefill(IDS[:, :16]), right[15]) < 5e-6
    decoder.reset()
    assert off(decoder.logits(IDS[:, :16]), right[:16]) < 5e-6


def test_a_step_repeats_bit_for_bit() -> None:
    decoder = GraphDecoder(model_of("gemma3"))
    decoder.prefill(IDS[:, :5])
    first = decoder.step(5)
    decoder.reset()
    decoder.prefill(IDS[:, :5])
    assert torch.equal(decoder.step(5), first)


@pytest.mark.usefixtures("small_cache")
def test_a_cache_that_cannot_grow_leaves_no_graph_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = GraphDecoder(model_of("llama"))
    decoder.prefill(IDS[:, :9])
    decoder._graph = "of the cache of 16"
    zeros, made = torch.zeros, []

    def few(*size: Any, **more: Any) -> torch.Tensor:
        made.append(size)
        if len(made) == 3:  # the first layer's keys and values have moved
            raise torch.OutOfMemoryError("planted")
        return zeros(*size, **more)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", few)
        with pytest.raises(torch.OutOfMemoryError):
            decoder.prefill(IDS[:, 9:18])
    assert not decoder.captured
    right = right_logits(decoder._model, IDS)
    assert off(decoder.step(int(IDS[0, 9])), right[9]) < 5e-6
    assert off(decoder.prefill(IDS[:, 10:18]), right[17]) < 5e-6


def test_why_a_model_on_the_cpu_has_no_graph() -> None:
    model = model_of("llama")
    assert why_not_graphed(model) == "the model is on cpu"
    decoder = GraphDecoder(model)
    decoder.prefill(IDS[:, :3])
    decoder.step(1)
    assert decoder.why_eager == "the model is on cpu"
    assert not decoder.captured
    assert how_stepped(model, decoder) is None
    assert not isinstance(decoder_for(model), GraphDecoder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"class": "GPT2"}, "GPT2LMHeadModel has no decoder of its own"),
        ({"hidden_act": "relu"}, "activation 'relu' has no kernel"),
        ({"final_logit_softcapping": 30.0}, "final softcap"),
        ({"rope": "dynamic"}, "dynamic rope, whose frequencies follow"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_models_it_does_not_serve(change: dict[str, Any], reason: str) -> None:
    if change.get("class"):
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64)
        model: Any = transformers.GPT2LMHeadModel(config)
    elif change.get("rope"):
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**SIZES, "rope_parameters": rope})
        )
        assert "dynamic rope" in str(why_not_fused(model))
    else:
        model = model_of("llama")
        for name, value in change.items():
            setattr(model.config, name, value)
    with pytest.raises(UnsupportedError, match=reason):
        GraphDecoder(model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.prefill(torch.zeros(2, 3, dtype=torch.int64)), r"ids has shape \[2, 3\]"),
        (lambda d: d.prefill(torch.zeros(1, 0, dtype=torch.int64)), r"ids has shape \[1, 0\]"),
        (lambda d: d.prefill(torch.tensor([[1, 64]])), "ids reach from 1 to 64"),
        (lambda d: d.logits(torch.tensor([[-1, 4]])), "ids reach from -1 to 4"),
        (lambda d: d.step(64), r"token_id is 64; the vocabulary is 0\.\.63"),
    ],
)
def test_bad_ids(call: Any, message: str) -> None:
    decoder = GraphDecoder(model_of("llama"))
    with pytest.raises(ValueError, match=message):
        call(decoder)
    assert decoder.position == 0


def plain_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: int, window: int, scale: float
) -> torch.Tensor:
    """One token's attention in float64: q [heads, D], cache [kv heads, capacity, D]."""
    first = max(seen - window, 0) if window else 0
    each = q.shape[0] // keys.shape[0]
    k = keys[:, first:seen].double().repeat_interleave(each, 0)
    v = values[:, first:seen].double().repeat_interleave(each, 0)
    scores = torch.einsum("hd,hld->hl", q.double(), k) * scale
    return torch.einsum("hl,hld->hd", scores.softmax(1), v)


@pytest.mark.parametrize("seen", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("splits", [1, 4])
def test_attention_of_a_token(seen: int, window: int, splits: int) -> None:
    generator = torch.Generator().manual_seed(seen)
    q = torch.randn(6, 24, generator=generator)
    keys = torch.full((2, 256, 24), float("nan"))  # what lies behind must not be read as numbers
    values = torch.full((2, 256, 24), float("nan"))
    keys[:, :seen] = torch.randn(2, seen, 24, generator=generator)
    values[:, :seen] = torch.randn(2, seen, 24, generator=generator)
    y = triton_kernels.attend(
        q.view(1, -1), keys, values, torch.tensor([seen - 1]), scale=0.3, window=window,
        splits=splits,
    )  # fmt: skip
    right = plain_attention(q, keys, values, seen, window, 0.3)
    torch.testing.assert_close(y.view(6, 24).double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", sorted(triton_kernels.ACTIVATIONS))
def test_gate_is_transformers_activation(activation: str) -> None:
    from transformers.activations import ACT2FN

    gates, up = torch.randn(5, 300) * 4, torch.randn(5, 300)
    found = triton_kernels.gate(gates[:, :290], up[:, :290], activation)
    torch.testing.assert_close(found, (ACT2FN[activation](gates) * up)[:, :290])
