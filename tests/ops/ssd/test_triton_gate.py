"""The gate in the interpreter: every planted fault of ssd's kernels falls, a right tile passes."""

from __future__ import annotations

import pytest

import triton_interpreter  # noqa: F401
from tilewright.device import INTERPRETER
from tilewright.errors import TileError
from tilewright.ops.catalog import spec_for
from tilewright.ops.ssd.triton_planted import PLANTED
from tilewright.ops.ssd.triton_space import TRITON_SPACE
from tilewright.tune.gate import CHECKS, gate, planted

SPEC = spec_for("ssd", INTERPRETER)

by_fault = pytest.mark.parametrize(
    "wrong", PLANTED, ids=lambda wrong: f"{wrong.name}-{wrong.tile.algorithm}"
)


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: the gate's own fill is what is tested."""


def test_the_gate_finds_them_in_the_space():
    assert tuple(planted(SPEC)) == PLANTED


@by_fault
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which multiplies the Inf
def test_a_planted_tile_is_rejected_for_its_fault(wrong):
    (case,) = wrong.cases
    result = gate(SPEC.with_run(wrong.run), wrong.tile, [case])
    assert not result.passed
    assert result.check == wrong.caught_by, result


@pytest.mark.parametrize(
    "wrong",
    [wrong for wrong in PLANTED if wrong.caught_by == "ragged-shapes"],
    ids=lambda wrong: wrong.name,
)
def test_without_its_check_a_planted_tile_passes(wrong):
    """It is right on the product it would be tuned for."""
    (case,) = wrong.cases
    result = gate(
        SPEC.with_run(wrong.run), wrong.tile, [case], _checks={*CHECKS} - {"ragged-shapes"}
    )
    assert result.passed, result


@pytest.mark.parametrize("wrong", PLANTED[:3], ids=lambda wrong: str(wrong.tile.algorithm))
def test_the_tile_it_pretends_to_be_is_right_and_of_the_space(wrong):
    (case,) = wrong.cases
    TRITON_SPACE.check(wrong.honest, case.problem(INTERPRETER))
    with pytest.raises(TileError, match="has the fields"):
        TRITON_SPACE.check(wrong.tile, case.problem(INTERPRETER))
    result = gate(SPEC, wrong.honest, [case], _checks={*CHECKS} - {"ragged-shapes"})
    assert result.passed, result


@pytest.mark.slow
@pytest.mark.parametrize("wrong", PLANTED[:3], ids=lambda wrong: str(wrong.tile.algorithm))
def test_a_right_tile_passes_every_check(wrong):
    (case,) = wrong.cases
    result = gate(SPEC, wrong.honest, [case])
    assert result.passed, result
    assert result.cases > 5
