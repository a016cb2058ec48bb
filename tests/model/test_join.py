"""Joined products, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import triton_interpreter  # noqa: F401
from tilewright.device import INTERPRETER
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for, unpack_blocks
from tilewright.model.join import join_products, products_of
from tilewright.model.layers import QuantLinear, model_problems
from tilewright.ops.catalog import spec_for
from tilewright.ops.contract import Case

SPEC = spec_for("mmq", INTERPRETER)
K = 256


def linear(
    kind: str, rows: int, *, seed: int = 0, bias: bool = False, activations: str = "float"
) -> QuantLinear:
    raw = SPEC.make_inputs(Case("mmq", kind, "float32", 1, rows, K), seed).source.raw
    packed = pack_blocks_for(raw, kind, "cpu", arch=INTERPRETER)
    held = torch.randn(rows, generator=torch.Generator().manual_seed(seed)) if bias else None
    return QuantLinear(packed, held, activations=activations)


class Attention(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            self.add_module(name, part)


def names_of(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_children()]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "MXFP4"])
def test_a_joined_product_gives_what_its_parts_give(kind: str) -> None:
    parts = [linear(kind, rows, seed=rows) for rows in (48, 16, 17)]
    x = torch.randn(3, K)
    before = [part(x) for part in parts]
    attention = Attention(*parts)
    assert join_products(attention) == 1
    (found,) = products_of(attention, ("q_proj", "k_proj", "v_proj"))
    module, widths = found
    assert widths == (48, 16, 17)
    assert module is attention.qkv_proj
    torch.testing.assert_close(module(x), torch.cat(before, dim=1), rtol=1e-5, atol=1e-5)
    for part, right in zip(parts, before, strict=True):
        torch.testing.assert_close(part(x), right, rtol=1e-5, atol=1e-5)


def test_parts_are_rows_of_the_joined_weight() -> None:
    parts = [linear("Q5_K", 32, seed=1), linear("Q5_K", 16, seed=2)]
    alone: list[Any] = [unpack_blocks(part.packed) for part in parts]  # type: ignore[arg-type]
    mlp = nn.Module()
    mlp.add_module("gate_proj", parts[0])
    mlp.add_module("up_proj", parts[1])
    join_products(mlp)
    whole: Any = mlp.gate_up_proj.packed
    assert isinstance(whole, GpuBlocks)
    assert whole.N == 48
    for part, right in zip(parts, alone, strict=True):
        packed: Any = part.packed
        held = whole.low.untyped_storage().data_ptr()
        assert packed.low.untyped_storage().data_ptr() == held
        for got, want in zip(unpack_blocks(packed), right, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kinds", "made", "together"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), ["qk_proj"], [2, 1]),
        (("Q6_K", "Q4_K", "Q4_K"), ["kv_proj"], [1, 2]),
        (("Q4_K", "Q6_K", "Q4_K"), [], [1, 1, 1]),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_only_neighbours_of_one_type_are_joined(
    kinds: tuple[str, ...], made: list[str], together: list[int]
) -> None:
    attention = Attention(*(linear(kind, 16) for kind in kinds))
    join_products(attention)
    assert names_of(attention) == ["q_proj", "k_proj", "v_proj", *made]
    found = products_of(attention, ("q_proj", "k_proj", "v_proj"))
    assert [len(widths) for _, widths in found] == together


@pytest.mark.parametrize(
    "others",
    [
        lambda: linear("Q4_K", 16, bias=True),
        lambda: linear("Q4_K", 16, activations="int8"),
        lambda: nn.Linear(K, 16),
    ],
    ids=["bias", "activations", "dense"],
)
def test_what_differs_stays_apart(others: Any) -> None:
    mlp = nn.Module()
    mlp.add_module("gate_proj", linear("Q4_K", 16))
    mlp.add_module("up_proj", others())
    assert join_products(mlp) == 0
    assert names_of(mlp) == ["gate_proj", "up_proj"]


def test_biases_are_joined_too() -> None:
    parts = [linear("Q4_0", rows, seed=rows, bias=True) for rows in (16, 32, 16)]
    x = torch.randn(2, K)
    right = torch.cat([part(x) for part in parts], dim=1)
    attention = Attention(*parts)
    assert join_products(attention) == 1
    torch.testing.assert_close(attention.qkv_proj(x), right, rtol=1e-5, atol=1e-5)


def test_a_model_counts_the_joined_product_once() -> None:
    attention = Attention(*(linear("Q4_K", 16, seed=i) for i in range(3)))
    join_products(attention)
    (problem,) = model_problems(attention)
    assert (problem.name, problem.N, problem.K, problem.count) == ("qkv_proj", 48, K, 1)
    assert join_products(attention) == 0


def test_a_missing_product_is_named() -> None:
    with pytest.raises(AttributeError, match="Module has no gate_proj"):
        products_of(nn.Module(), ("gate_proj", "up_proj"))
