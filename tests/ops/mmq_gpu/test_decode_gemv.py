"""mmq's kernel for one row of x: its own source in numpy against the float64 oracle, its space."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tilewright.errors import TileError
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for
from tilewright.ops.contract import Case
from tilewright.ops.mmq.decode_space import TYPES, default
from tilewright.ops.mmq.hopper_planted import PLANTED
from tilewright.ops.mmq.reference import mmq_reference
from tilewright.ops.mmq.spec import SPEC
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Problem, Tile

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

from ops.mmq_gpu import decode_machine

ROUNDED = {"float16": 4e-4, "bfloat16": 3e-3}  # of y, relative: weights are not


def tile(block_n: int, num_warps: int) -> Tile:
    return Tile.of("decode", block_n=block_n, num_warps=num_warps)


def problem(**change: Any) -> Problem:
    return replace(Problem("mmq", "sm_90", "float16", "Q4_K", "float", 1, 4096, 14336, 0), **change)


@pytest.fixture(scope="module")
def kernel() -> Any:
    return decode_machine.machine()


# K that warps share evenly, that leaves some without a last step, and that leaves some without any.
SHAPES = {
    "steps in turn": (tile(16, 2), 1536),
    "a last step for some": (tile(32, 4), 2560),
    "more warps than steps": (tile(32, 2), 256),
    "one warp": (tile(16, 1), 512),
}


# bfloat16 does not hold codes of 8 bits.
PAIRS = [(t, d) for t in TYPES for d in ROUNDED if (t, d) != ("Q8_0", "bfloat16")]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("weight_type", "dtype"), PAIRS)
def test_it_agrees_with_the_oracle(kernel, weight_type, dtype, shape):
    of, k = SHAPES[shape]
    n = 2 * of.block_n
    inputs = SPEC.make_inputs(Case("mmq", weight_type, dtype, 1, n, k), 7)
    weight = pack_blocks_for(inputs.source.raw, weight_type, arch="sm_90")
    assert isinstance(weight, GpuBlocks)
    bias = torch.linspace(-3, 3, n)
    y = decode_machine.product(kernel, inputs.x, weight, bias, of).double().numpy()
    right = mmq_reference(inputs.x64(), inputs.source, bias.double().numpy())
    assert np.linalg.norm(y - right) < ROUNDED[dtype] * np.linalg.norm(right)


@pytest.mark.parametrize("column", [0, 9, 250, 255, 256, 1300])
@pytest.mark.parametrize("weight_type", ["Q4_1", "Q6_K", "Q8_0"])
def test_every_column_meets_its_own_weights(kernel, weight_type, column):
    """One number of x alone gives that column of the weight, rounded once."""
    inputs = SPEC.make_inputs(Case("mmq", weight_type, "float16", 1, 32, 1536), 3)
    weight = pack_blocks_for(inputs.source.raw, weight_type, arch="sm_90")
    assert isinstance(weight, GpuBlocks)
    x = torch.zeros(1, 1536, dtype=torch.float16)
    x[0, column] = 1
    y = decode_machine.product(kernel, x, weight, None, tile(32, 2)).double().numpy()
    right = mmq_reference(x.double().numpy(), inputs.source, None)
    # Sums of float32 with the offset's part in them, then float16.
    np.testing.assert_allclose(y, right, rtol=2**-10, atol=2**-16 * np.abs(right).max())


@pytest.mark.parametrize("wrong", [p for p in PLANTED if p.tile.algorithm == "decode"],
                         ids=lambda wrong: wrong.name)  # fmt: skip
def test_a_planted_tile_is_wrong_and_what_it_pretends_to_be_is_right(kernel, wrong):
    (case,) = wrong.cases

    def error(of: Tile, k: int) -> float:
        inputs = SPEC.make_inputs(Case("mmq", case.weight_type, "float16", 1, case.N, k), 7)
        weight = pack_blocks_for(inputs.source.raw, case.weight_type, arch="sm_90")
        assert isinstance(weight, GpuBlocks)
        y = decode_machine.product(kernel, inputs.x, weight, None, of).double().numpy()
        right = mmq_reference(inputs.x64(), inputs.source, None)
        return float(np.linalg.norm(y - right) / np.linalg.norm(right))

    assert error(wrong.honest, case.K) < ROUNDED["float16"]
    assert error(wrong.tile, case.K) > 0.1


REFUSED = {
    "another GPU": (problem(arch="sm_80"), "decode sm_90"),
    "two rows": (problem(M=2), "decode one row"),
    "a table's codes": (problem(weight_type="IQ4_XS"), "decode exact products"),
    "8 bits in bfloat16": (
        problem(weight_type="Q8_0", act_dtype="bfloat16"), "decode exact products"),
    "float32": (problem(act_dtype="float32"), "decode exact products"),
    "K of no whole steps": (problem(weight_type="Q4_0", K=14368), "decode whole steps"),
    "N of no whole programs": (problem(N=4104), "decode whole steps"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_space_refuses_what_the_kernel_cannot(name):
    asked, rule = REFUSED[name]
    with pytest.raises(TileError, match=re.escape(rule)):
        TRITON_SPACE.check(tile(32, 8), asked)


def test_32_rows_have_registers_for_8_warps_and_no_more():
    TRITON_SPACE.check(tile(32, 8), problem())
    with pytest.raises(TileError, match="decode registers"):
        TRITON_SPACE.check(tile(32, 16), problem())


@pytest.mark.parametrize(
    ("n", "k", "block_n", "num_warps"),
    [
        (4096, 14336, 16, 8), (28672, 4096, 32, 4), (6144, 4096, 16, 8), (4096, 4096, 16, 8),
        (1024, 4096, 16, 16), (128256, 4096, 32, 4), (4096, 256, 16, 1), (33008, 4096, 16, 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("weight_type", TYPES)
def test_defaults_obey_the_rules(weight_type, n, k, block_n, num_warps):
    asked = problem(weight_type=weight_type, N=n, K=k)
    if (weight_type, n) == ("Q6_K", 6144):
        num_warps = 4
    assert default(asked) == tile(block_n, num_warps)
    TRITON_SPACE.check(tile(block_n, num_warps), asked)
    assert TRITON_SPACE.default(asked) == tile(block_n, num_warps)


def test_there_is_no_default_where_no_tile_may():
    assert default(problem(M=2)) is None
    assert default(problem(weight_type="Q4_0", K=14368)) is None
