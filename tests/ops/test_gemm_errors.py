"""Bad calls of the ops, and the message each gets."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ops.cpu.weights import blocks, four_bit
from tilewright.errors import TileError, UnsupportedError
from tilewright.ops.cpu.space import cpu_space
from tilewright.ops.mmq.op import mmq_gemm
from tilewright.ops.w4a16.op import w4a16_gemm
from tilewright.tiles.tile import Problem, Tile

X = torch.zeros(4, 64)

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "x is no tensor": ({"x": [1.0]}, TypeError, "x is list; pass a torch.Tensor"),
    "x is float64": ({"x": X.double()}, UnsupportedError, "float32, float16 or bfloat16"),
    "x is integer": ({"x": X.long()}, UnsupportedError, "x has dtype torch.int64"),
    "x is elsewhere": ({"x": X.to("meta")}, UnsupportedError, "x is on meta"),
    "K differs": ({"x": torch.zeros(4, 96)}, ValueError, "last dimension must be K=64"),
    "x is a scalar": ({"x": torch.tensor(1.0)}, ValueError, "last dimension must be K=64"),
    "bias is short": ({"bias": torch.zeros(7)}, ValueError, "bias has shape [7]"),
    "bias is integer": ({"bias": torch.zeros(8).int()}, ValueError, "floating point [N=8]"),
    "activations": ({"activations": "int4"}, ValueError, "activations='int4'; use one of"),
    "threads": ({"threads": 0}, ValueError, "threads=0; it must be at least 1"),
    "algorithm": ({"tile": Tile.of("cuda")}, TileError, "algorithm 'cuda' is not in"),
    "field missing": ({"tile": Tile.of("dot", threads=0)}, TileError, "has the fields"),
    "field value": ({"tile": Tile.of("dot", unroll=3, threads=0)}, TileError, "unroll=3"),
    "registers": (
        {"tile": Tile.of("panel", mr=12, nv=4, block_parts=8, threads=0)},
        TileError,
        "breaks rule 'registers'",
    ),
    "eight bits unasked": (
        {"tile": Tile.of("int8", mr=1, nv=1, block_parts=16, threads=0)},
        TileError,
        "eight-bit activations only when asked",
    ),
}


@pytest.mark.parametrize("call", list(BAD))
@pytest.mark.parametrize("op", ["mmq", "w4a16"])
def test_a_bad_call_says_what_came_and_what_is_allowed(op: str, call: str) -> None:
    arguments, error, message = BAD[call]
    weight: Any
    if op == "mmq":
        function, weight = mmq_gemm, blocks("Q4_0", 8, 64)[0]
    else:
        function, weight = w4a16_gemm, four_bit(8, 64, 32, zeros=True)[0]
    with pytest.raises(error, match=re.escape(message)):
        function(**{"x": X, "weight": weight, **arguments})  # type: ignore[arg-type]


def test_the_library_serves_only_its_types() -> None:
    tile = Tile.of("onnxruntime", level=0, threads=0)
    with pytest.raises(TileError, match="breaks rule 'library type'"):
        mmq_gemm(torch.zeros(2, 256), blocks("Q6_K", 8, 256)[0], tile=tile)


def test_every_default_and_candidate_obeys_the_rules() -> None:
    space = cpu_space("mmq")
    for m in (1, 2, 4, 5, 64, 8192):
        for activations in ("float", "int8"):
            problem = Problem("mmq", "cpu", "float32", "Q4_1", activations, m, 576, 576, 0)
            space.check(space.default(problem), problem)
            candidates = space.candidates(problem)
            assert space.default(problem) in candidates
            for tile in candidates:
                space.check(tile, problem)
