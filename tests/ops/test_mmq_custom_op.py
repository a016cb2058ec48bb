"""mmq under torch.compile: one operation, the same numbers, and a shape known beforehand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.gguf_models import quantize
from tilewright.layout.blocks import pack_blocks_for
from tilewright.layout.cpu import pack_blocks
from tilewright.ops.mmq.custom_op import mmq_compiled
from tilewright.ops.mmq.op import mmq_gemm
from tilewright.tiles.tile import Tile


def raw(kind: str = "Q4_K") -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((24, 256), dtype=np.float32)
    return np.frombuffer(quantize(values, kind).tobytes(), np.uint8).reshape(24, -1).copy()


@pytest.mark.parametrize("tile", [None, Tile.of("dot", unroll=4, threads=0)], ids=["any", "dot"])
def test_a_compiled_product_is_the_eager_one(tile: Tile | None) -> None:
    weight = pack_blocks(raw(), "Q4_K")
    x, bias = torch.randn(2, 3, 256), torch.randn(24)

    def product(x: torch.Tensor) -> torch.Tensor:
        return mmq_gemm(x, weight, bias, tile=tile) + 1

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), product(x))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q6_K", "MXFP4"])
def test_the_shape_is_known_without_running(kind: str) -> None:
    weight = pack_blocks_for(raw(kind), kind, arch="sm_90").to("meta")  # type: ignore[union-attr]
    x = torch.empty(5, 7, 256, dtype=torch.float16, device="meta")
    y = mmq_compiled(x, weight, None, "float", None, None)
    assert y.shape == (5, 7, 24)
    assert y.dtype is torch.float16
