"""The gate in the interpreter: every planted fault of the kernel for few rows falls."""

from __future__ import annotations

import pytest

import triton_interpreter  # noqa: F401
from quick import one_in
from tilewright.device import INTERPRETER
from tilewright.errors import TileError
from tilewright.ops.catalog import spec_for
from tilewright.ops.contract import Case
from tilewright.ops.mmq.gemv_space import PLANTED
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.tune.gate import CHECKS, gate, planted

SPEC = spec_for("mmq", INTERPRETER)


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: the gate's own fill is what is tested."""


by_name = pytest.mark.parametrize("wrong", PLANTED, ids=lambda wrong: wrong.name)
some_by_name = pytest.mark.parametrize("wrong", one_in(2, PLANTED), ids=lambda wrong: wrong.name)


def test_the_gate_finds_them_in_the_space():
    assert set(PLANTED) <= set(planted(SPEC))


@by_name
def test_a_planted_tile_is_rejected_for_its_fault(wrong):
    (case,) = wrong.cases
    result = gate(SPEC.with_run(wrong.run), wrong.tile, [case])
    assert not result.passed
    assert result.check == wrong.caught_by, result


@some_by_name
def test_without_its_check_a_planted_tile_passes(wrong):
    """Each is right on the product it would be tuned for, but for what the one check sees."""
    checks = set(CHECKS) - {wrong.caught_by, "ragged-shapes"}
    (case,) = wrong.cases
    result = gate(SPEC.with_run(wrong.run), wrong.tile, [case], _checks=checks)
    assert result.passed, result


@some_by_name
def test_the_tile_it_pretends_to_be_is_right(wrong):
    (case,) = wrong.cases
    TRITON_SPACE.check(wrong.honest, case.problem(INTERPRETER))
    result = gate(SPEC, wrong.honest, [case], _checks=set(CHECKS) - {"ragged-shapes"})
    assert result.passed, result


@by_name
def test_the_space_refuses_it(wrong):
    (case,) = wrong.cases
    with pytest.raises(TileError, match="has the fields"):
        TRITON_SPACE.check(wrong.tile, case.problem(INTERPRETER))


@pytest.mark.parametrize(
    ("name", "dtype", "m", "k", "change"),
    [
        ("Q4_1", "float16", 8, 96, {"split_k": 2, "ahead": 1}),
        pytest.param("MXFP4", "bfloat16", 5, 160, {}, marks=pytest.mark.slow),
        pytest.param(
            "Q8_0", "float32", 2, 96, {"block_m": 2, "block_n": 8}, marks=pytest.mark.slow
        ),
        pytest.param("Q6_K", "float16", 16, 256, {"block_m": 16}, marks=pytest.mark.slow),
    ],
)
def test_a_right_tile_passes_every_check(name, dtype, m, k, change):
    tile = PLANTED[1].honest.replace(num_warps=1, **change)
    result = gate(SPEC, tile, [Case("mmq", name, dtype, m, 24, k)])
    assert result.passed, result
    assert result.cases > 5
