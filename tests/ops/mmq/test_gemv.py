"""mmq's kernel for few rows in the interpreter, held to the float64 oracle of the file's bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import triton_interpreter  # noqa: F401
from quick import latin
from tilewright.device import INTERPRETER
from tilewright.errors import TileError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import pack_blocks_for
from tilewright.ops.catalog import spec_for
from tilewright.ops.check import check_output
from tilewright.ops.contract import Case
from tilewright.ops.mmq import decode_space, gemv_space, triton_gemv
from tilewright.ops.mmq.op import mmq_gemm
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Tile

SPEC = spec_for("mmq", INTERPRETER)
TYPES = tuple(BLOCK_TYPES)
ROWS = Tile.of("gemv", block_m=8, block_n=16, num_warps=2, units=1, ahead=0, split_k=1)
SUMS = ROWS.replace(block_m=1, block_n=8)
CASES = [
    case if i % 8 == 0 else pytest.param(case, marks=pytest.mark.slow, id=case.id)
    for i, case in enumerate(
        c for c in SPEC.cases if 0 < c.M <= 16 and c.activations == "float" and c.K < 4096
    )
]


def held(case: Case, tile: Tile, seed: int = 0) -> torch.Tensor:
    """Run a case and hold it to the oracle."""
    inputs = SPEC.make_inputs(case, seed)
    y = SPEC.run(inputs, tile=tile)
    ref = SPEC.reference(inputs)
    result = check_output(y, ref, SPEC.error_model(inputs, ref))
    assert result.passed, result
    return y


def k_of(name: str, blocks: int) -> int:
    return blocks * BLOCK_TYPES[name].block_size


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases_of_the_spec(case):
    if case.act_dtype == "float32":
        block_m = next(n for n in (1, 2, 4, 8, 16) if n >= case.M)
        held(case, ROWS.replace(block_m=block_m, block_n=8, ahead=case.M % 2))
    else:
        held(case, ROWS.replace(block_m=8 if case.M <= 8 else 16, ahead=case.M % 2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", TYPES)
def test_a_row_without_matrix_units(name, dtype):
    held(Case("mmq", name, dtype, 1, 20, k_of(name, 2), flags=("bias",)), SUMS)


@pytest.mark.parametrize("name", TYPES)
def test_weights_are_the_files_numbers(name):
    """Unit vectors read the weight out: 16 columns, of every sub-block and place in a word."""
    k = k_of(name, 256 // BLOCK_TYPES[name].block_size)
    source = SPEC.make_inputs(Case("mmq", name, "float32", 1, 24, k), 2).source
    columns = torch.arange(16) * 17 % k
    x = torch.zeros(16, k, dtype=torch.float16)
    x[torch.arange(16), columns] = 1
    weight = pack_blocks_for(source.raw, name, arch=INTERPRETER)
    y = mmq_gemm(x, weight, tile=ROWS.replace(block_m=16, num_warps=1))
    right = torch.from_numpy(BLOCK_TYPES[name].dequantize(source.raw))[:, columns].T
    if BLOCK_TYPES[name].block_size == 32:  # rounded once
        assert torch.equal(y, right.half())
    else:  # d and dmin multiply sums that are exact, or rounded once
        assert torch.allclose(y.float(), right, rtol=2**-10, atol=2**-14 * right.abs().max())


@pytest.mark.parametrize(
    ("name", "units", "ahead", "split_k"),
    latin(3, ("Q5_1", "Q8_0", "Q6_K"), ((1, 0), (2, 1), (4, 1), (1, 2)), (1, 2, 4)),
)
def test_steps_and_shares_even_and_uneven_and_empty(name, units, ahead, split_k):
    blocks = 5 if name != "Q6_K" else 3
    case = Case("mmq", name, "float16", 5, 24, k_of(name, blocks), flags=("bias",))
    tile = ROWS.replace(units=units, ahead=ahead, split_k=split_k)
    assert torch.equal(held(case, tile), held(case, tile))


@pytest.mark.parametrize("name", ["Q3_K", "Q5_K", "IQ4_NL"])
def test_more_rows_of_the_weight_a_program(name):
    held(Case("mmq", name, "bfloat16", 16, 40, k_of(name, 1)), ROWS.replace(block_m=16, block_n=32))


def test_offsets_past_2_gb_are_computed_in_64_bits(monkeypatch):
    monkeypatch.setattr(triton_gemv, "spans_wide", lambda tensor: True)
    for name in ("Q5_K", "MXFP4"):
        held(Case("mmq", name, "float16", 5, 40, k_of(name, 3), flags=("bias", "strided")), ROWS)


def test_large_sums_of_x_do_not_overflow():
    """Minimums multiply the sum of a sub-block of x, here far above what float16 holds."""
    case = Case("mmq", "Q4_K", "float16", 1, 16, 256)
    source = SPEC.make_inputs(case, 0).source
    weight = pack_blocks_for(source.raw, "Q4_K", arch=INTERPRETER)
    x = torch.full((1, 256), 2e3, dtype=torch.float16)
    right = x.double() @ torch.from_numpy(BLOCK_TYPES["Q4_K"].dequantize(source.raw)).double().T
    y = mmq_gemm(x, weight, tile=ROWS)
    assert torch.allclose(y.double(), right, rtol=2**-10, atol=1)


ARCHS = ("sm_80", "sm_90", "sm_100", "gfx1151", "gfx90a", "gfx942", INTERPRETER)


@pytest.mark.parametrize("arch", ARCHS)
def test_defaults_obey_the_rules(arch):
    for name, dtype, m, (n, k) in itertools.product(
        TYPES, ("float16", "bfloat16", "float32"), (1, 2, 8, 9, 16, 17),
        [(40, 256), (1024, 4096), (4096, 14336), (128256, 4096)],
    ):  # fmt: skip
        problem = Case("mmq", name, dtype, m, n, k).problem(arch)
        tile = gemv_space.default(problem)
        if tile is not None:
            TRITON_SPACE.check(tile, problem)
            better = decode_space.default(problem)  # for one row, on one GPU
            assert TRITON_SPACE.default(problem) == (tile if better is None else better)


@pytest.mark.parametrize(
    ("arch", "m", "dtype", "change", "rule"),
    [
        ("sm_90", 9, "float16", {}, "all rows at once"),
        ("sm_90", 8, "float16", {"block_n": 8}, "matrix units"),
        ("gfx942", 8, "float16", {}, "matrix units"),
        ("sm_90", 8, "float16", {"block_n": 64, "units": 4}, "gemv registers"),
        ("sm_90", 1, "float32", {"block_n": 64}, "gemv registers"),
    ],
)
def test_a_rule_and_what_breaks_it(
    arch: str, m: int, dtype: str, change: dict[str, Any], rule: str
):
    problem = Case("mmq", "Q4_K", dtype, m, 512, 1024).problem(arch)
    with pytest.raises(TileError, match=f"breaks rule '{rule}'"):
        TRITON_SPACE.check(ROWS.replace(**change), problem)
    fits = Case("mmq", "Q4_K", dtype, min(m, 8), 512, 1024).problem("sm_90")
    TRITON_SPACE.check(ROWS, fits)


def test_rules_are_of_no_account_to_other_tiles():
    problem = Case("mmq", "Q4_K", "float16", 300, 512, 1024).problem("sm_90")
    TRITON_SPACE.check(TRITON_SPACE.default(problem), problem)
    assert all(rule.holds(TRITON_SPACE.default(problem), problem) for rule in gemv_space.RULES)


@pytest.mark.parametrize("tile", [ROWS, SUMS], ids=["matrix units", "sums"])
def test_columns_of_x_that_lie_far_apart(tile):
    """x is a view whose columns span more than 2^31 elements: no offset may be one of 32 bits."""
    k = 256
    source = SPEC.make_inputs(Case("mmq", "Q4_0", "float16", 1, 24, k), 3).source
    weight = pack_blocks_for(source.raw, "Q4_0", arch=INTERPRETER)
    apart = 2**31 // (k - 1) + 1
    x = torch.empty(k * apart, dtype=torch.float16).as_strided((1, k), (1, apart))
    x.copy_(torch.linspace(-1, 1, k))  # touches no more than these pages
    assert torch.equal(mmq_gemm(x, weight, tile=tile), mmq_gemm(x.contiguous(), weight, tile=tile))
