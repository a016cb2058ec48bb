"""QuantLinear and QuantEmbedding against products of the gguf package's dequantized weights."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from torch import nn

from formats import w4_files
from model.gguf_models import quantize
from tilewright.errors import UnsupportedError
from tilewright.formats.w4 import W4Codes
from tilewright.layout.cpu import PackedBlocks, PackedW4, pack_blocks, pack_w4
from tilewright.model.layers import QuantEmbedding, QuantLinear, model_problems


def blocks(kind: str, n: int, k: int, seed: int = 0) -> tuple[PackedBlocks, torch.Tensor]:
    weight = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    raw = quantize(weight, kind)
    return pack_blocks(raw, kind), torch.from_numpy(gguf.quants.dequantize(raw, Q[kind]))


def codes(n: int, k: int, g: int, symmetric: bool) -> tuple[PackedW4, torch.Tensor]:
    code, scale, zero = w4_files.random_weight(n, k, g, symmetric)
    weight = W4Codes(code, scale.astype(np.float32), zero, g, None, torch.float16)
    zeros = 8.0 if zero is None else np.repeat(zero, g, axis=1).astype(np.float32)
    plain = np.repeat(scale.astype(np.float32), g, axis=1) * (code.astype(np.float32) - zeros)
    return pack_w4(weight), torch.from_numpy(plain)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 64), (2, 5, 64)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("make", [lambda: blocks("Q4_1", 48, 64), lambda: codes(48, 64, 32, False)],
                         ids=["blocks", "codes"])  # fmt: skip
def test_linear(make: Any, bias: bool, shape: tuple[int, ...]) -> None:
    packed, plain = make()
    torch.manual_seed(0)
    x = torch.randn(shape)
    offset = torch.randn(48) if bias else None
    layer = QuantLinear(packed, offset)
    right = nn.functional.linear(
        x.double(), plain.double(), None if offset is None else offset.double()
    )
    y = layer(x)
    assert y.shape == right.shape
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), right, rtol=0, atol=1e-5 * float(right.abs().max()))


def test_linear_describes_itself() -> None:
    packed, _ = blocks("Q4_K", 32, 256)
    layer = QuantLinear(packed, torch.zeros(32), activations="int8")
    assert (layer.in_features, layer.out_features) == (256, 32)
    assert (layer.weight_type, layer.group) == ("Q4_K", 0)
    assert repr(layer) == "QuantLinear(256 -> 32, Q4_K, bias=True, activations='int8')"
    symmetric = QuantLinear(codes(16, 128, 32, True)[0])
    assert (symmetric.weight_type, symmetric.group) == ("uint4b8", 32)
    assert repr(symmetric) == "QuantLinear(128 -> 16, uint4b8 g32, bias=False, activations='float')"
    whole_row = QuantLinear(codes(16, 128, 128, False)[0])
    assert (whole_row.weight_type, whole_row.group) == ("uint4", -1)


def test_linear_passes_activations_on() -> None:
    packed, _ = blocks("Q8_0", 32, 64)
    asked = []

    def op(x: torch.Tensor, weight: Any, bias: Any, **options: Any) -> torch.Tensor:
        asked.append((weight, bias, options))
        return x

    layer = QuantLinear(packed, activations="int8")
    layer._op = op
    layer(torch.zeros(1, 64))
    layer.activations = "float"
    layer(torch.zeros(1, 64))
    assert asked == [(packed, None, {"activations": kind}) for kind in ("int8", "float")]


def test_linear_refuses_other_activations() -> None:
    packed, _ = blocks("Q4_0", 32, 32)
    with pytest.raises(UnsupportedError, match="activations is 'fp8'; allowed are float, int8"):
        QuantLinear(packed, activations="fp8")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding(kind: str, dtype: torch.dtype) -> None:
    packed, plain = blocks(kind, 40, 256)
    layer = QuantEmbedding(packed, dtype=dtype)
    ids = torch.tensor([[0, 39, 7], [7, 7, 1]])
    assert torch.equal(layer(ids), plain.to(dtype)[ids])
    assert torch.equal(layer(ids.int()), plain.to(dtype)[ids])
    assert layer(torch.empty((1, 0), dtype=torch.int64)).shape == (1, 0, 256)
    assert (layer.num_embeddings, layer.embedding_dim) == (40, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_embedding_is_gemmas(dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    packed, plain = blocks("Q8_0", 40, 160)
    theirs = Gemma3TextScaledWordEmbedding(40, 160, 0, embed_scale=160**0.5)
    theirs.weight = nn.Parameter(plain.to(dtype))
    ours = QuantEmbedding(packed, dtype=dtype, scale=160**0.5)
    ids = torch.arange(40)
    assert torch.equal(ours(ids), theirs(ids))
    assert repr(ours) == "QuantEmbedding(40 x 160, Q8_0, scale=12.6491)"


@pytest.mark.parametrize("bad", [-1, 40])
def test_embedding_refuses_ids_outside(bad: int) -> None:
    packed, _ = blocks("Q8_0", 40, 32)
    with pytest.raises((IndexError, RuntimeError)):
        QuantEmbedding(packed)(torch.tensor([0, bad]))


def test_a_packed_module_is_not_saved_as_if_it_were_whole() -> None:
    model = nn.Sequential(QuantLinear(blocks("Q8_0", 32, 32)[0]))
    with pytest.raises(UnsupportedError, match="holds a packed weight"):
        model.state_dict()


def test_model_problems_group_by_shape_and_type() -> None:
    layers = nn.ModuleList()
    for seed in range(3):
        layer = nn.Module()
        layer.q_proj = QuantLinear(blocks("Q4_K", 64, 256, seed)[0])
        layer.k_proj = QuantLinear(blocks("Q4_K", 32, 256, seed)[0])
        layer.v_proj = QuantLinear(blocks("Q6_K", 32, 256, seed)[0])
        layer.o_proj = QuantLinear(blocks("Q4_K", 64, 256, seed)[0])
        layer.gate = nn.Linear(4, 4)
        layers.append(layer)
    model = nn.Module()
    model.layers = layers
    model.head = QuantLinear(codes(64, 256, 64, True)[0])
    problems = model_problems(model)
    assert [tuple(p) for p in problems] == [
        ("layers.*.q_proj", "Q4_K", 64, 256, 0, 6),
        ("layers.*.k_proj", "Q4_K", 32, 256, 0, 3),
        ("layers.*.v_proj", "Q6_K", 32, 256, 0, 3),
        ("head", "uint4b8", 64, 256, 64, 1),
    ]
    assert [p.op for p in problems] == ["mmq", "mmq", "mmq", "w4a16"]
