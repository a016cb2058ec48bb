"""w4a16 under torch.compile: one operation, the same numbers, and a shape known beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tilewright.formats.w4 import W4Codes
from tilewright.layout.cpu import pack_w4
from tilewright.layout.hopper import pack_w4_hopper
from tilewright.layout.triton import pack_w4_words
from tilewright.ops.w4a16.custom_op import w4a16_compiled
from tilewright.ops.w4a16.op import w4a16_gemm
from tilewright.tiles.tile import Tile


def codes() -> W4Codes:
    rng = np.random.default_rng(0)
    scales = rng.random((40, 4), dtype=np.float32) * 0.1
    zeros = rng.integers(0, 16, (40, 4), dtype=np.uint8)
    return W4Codes(
        rng.integers(0, 16, (40, 128), dtype=np.uint8), scales, zeros, 32, None, torch.float16
    )


@pytest.mark.parametrize("tile", [None, Tile.of("dot", unroll=4, threads=0)], ids=["any", "dot"])
def test_a_compiled_product_is_the_eager_one(tile: Tile | None) -> None:
    weight = pack_w4(codes())
    x, bias = torch.randn(2, 3, 128), torch.randn(40)

    def product(x: torch.Tensor) -> torch.Tensor:
        return w4a16_gemm(x, weight, bias, tile=tile) + 1

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), product(x))


@pytest.mark.parametrize(
    "pack",
    [pack_w4, pack_w4_words, lambda w: pack_w4_hopper(w, act_dtype=torch.float16)],
    ids=["cpu", "words", "hopper"],
)
def test_the_shape_of_every_layout_is_known_without_running(pack: Any) -> None:
    weight = pack(codes())
    x = torch.empty(5, 7, 128, dtype=torch.float16, device="meta")
    moved = weight.to("meta") if hasattr(weight, "to") else weight
    y = w4a16_compiled(x, moved, None, "float", None, None)
    assert y.shape == (5, 7, 40)
    assert y.dtype is torch.float16
    assert y.device.type == "meta"


def test_the_registered_op_keeps_its_promises() -> None:
    weight = pack_w4(codes())
    torch.library.opcheck(
        torch.ops.tilewright.w4a16.default,
        (
            torch.randn(4, 128), weight.codes, weight.scales, weight.zeros, None, None, "cpu", 40,
            128, 32, "float", "", 0,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
