"""The gate in the interpreter: every planted fault of moe's kernels falls, a right tile passes."""

from __future__ import annotations

import pytest

import triton_interpreter  # noqa: F401
from quick import one_in
from tilewright.device import INTERPRETER
from tilewright.errors import TileError
from tilewright.ops.catalog import spec_for
from tilewright.ops.contract import Case
from tilewright.ops.moe.gpu_planted import PLANTED
from tilewright.ops.moe.gpu_space import MOE_SPACE
from tilewright.tune.gate import CHECKS, gate, planted

SPEC = spec_for("moe", INTERPRETER)


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: the gate's own fill is what is tested."""


by_name = pytest.mark.parametrize("wrong", PLANTED, ids=lambda wrong: wrong.name)
some_by_name = pytest.mark.parametrize("wrong", one_in(2, PLANTED), ids=lambda wrong: wrong.name)


def test_the_gate_finds_them_in_the_space():
    assert tuple(planted(SPEC)) == PLANTED


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
    MOE_SPACE.check(wrong.honest, case.problem(INTERPRETER))
    result = gate(SPEC, wrong.honest, [case], _checks=set(CHECKS) - {"ragged-shapes"})
    assert result.passed, result


@by_name
def test_the_space_refuses_it(wrong):
    (case,) = wrong.cases
    with pytest.raises(TileError, match="has the fields"):
        MOE_SPACE.check(wrong.tile, case.problem(INTERPRETER))


@pytest.mark.parametrize(
    ("number", "name", "dtype"),
    [
        pytest.param(0, "uint4", "bfloat16", id="triton-uint4", marks=pytest.mark.slow),
        pytest.param(0, "Q4_K", "float16", id="triton-Q4_K", marks=pytest.mark.slow),
        pytest.param(3, "MXFP4", "float16", id="gemv-MXFP4", marks=pytest.mark.slow),
    ],
)
def test_a_right_tile_passes_every_check(number, name, dtype):
    tile = PLANTED[number].honest
    k, group = (256, 0) if name == "Q4_K" else (96, 32 if name == "uint4" else 0)
    case = Case("moe", name, dtype, 9, 40, k, group, experts=4, top_k=2)
    result = gate(SPEC, tile, [case])
    assert result.passed, result
    assert result.cases > 5
