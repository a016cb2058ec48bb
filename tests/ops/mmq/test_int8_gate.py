"""The gate in the interpreter: every planted int8 tile falls, and a right one passes."""

from __future__ import annotations

import pytest

import triton_interpreter  # noqa: F401
from quick import one_in
from tilewright.device import INTERPRETER
from tilewright.errors import GateError, TileError
from tilewright.ops.catalog import spec_for
from tilewright.ops.contract import Case
from tilewright.ops.mmq.int8_planted import PLANTED
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.tune.gate import CHECKS, gate, planted, recheck, watch

SPEC = spec_for("mmq", INTERPRETER)
BY_NAME = {wrong.name: wrong for wrong in PLANTED}
# What the seed's "I = 64 alone", "nthreads = 256 alone" and "I = 96" break.
BROKEN = {
    "rows-alone": "rows and warps agree",
    "warps-alone": "rows and warps agree",
    "rows-256": "rows divide 128",
}


SPLIT = {"split_k": 2, "schedule": "split-k"}
STREAM = {"units": 7, "schedule": "stream-k"}


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: the gate's own fill is what is tested."""


by_name = pytest.mark.parametrize("wrong", PLANTED, ids=lambda wrong: wrong.name)


def test_the_gate_finds_them_in_the_space():
    assert set(PLANTED) <= set(planted(SPEC))
    assert {"rows-alone", "warps-alone", "rows-256", "iter-k"} <= set(BY_NAME)


@by_name
def test_a_planted_tile_is_rejected_for_its_fault(wrong):
    (case,) = wrong.cases
    result = gate(SPEC.with_run(wrong.run), wrong.tile, [case])
    assert not result.passed
    assert result.check == wrong.caught_by, result
    with pytest.raises(GateError, match=wrong.caught_by):
        result.raise_if_failed()


@pytest.mark.parametrize("wrong", one_in(2, PLANTED), ids=lambda wrong: wrong.name)
def test_without_its_check_a_planted_tile_passes(wrong):
    """Each is right on the product it would be tuned for, but for what the one check sees."""
    checks = set(CHECKS) - {wrong.caught_by, "ragged-shapes"}
    (case,) = wrong.cases
    result = gate(SPEC.with_run(wrong.run), wrong.tile, [case], _checks=checks)
    assert result.passed, result


@by_name
def test_the_space_refuses_it(wrong):
    (case,) = wrong.cases
    with pytest.raises(TileError, match="has the fields"):
        TRITON_SPACE.check(wrong.tile, case.problem(INTERPRETER))


@pytest.mark.parametrize("name", BROKEN)
def test_the_rules_refuse_the_tile_that_it_pretends_to_be(name):
    (case,) = BY_NAME[name].cases
    with pytest.raises(TileError, match=f"breaks rule '{BROKEN[name]}'"):
        TRITON_SPACE.check(BY_NAME[name].honest, case.problem(INTERPRETER))


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in BROKEN])
def test_the_tile_it_pretends_to_be_is_right(name):
    """Where no rule is broken: only the gate stands between it and a table."""
    (case,) = BY_NAME[name].cases
    honest = BY_NAME[name].honest
    TRITON_SPACE.check(honest, case.problem(INTERPRETER))
    result = gate(SPEC, honest, [case], _checks=set(CHECKS) - {"ragged-shapes"})
    assert result.passed, result


@pytest.mark.parametrize(
    ("name", "m", "k", "fields"),
    [
        ("Q5_1", 17, 96, {}),
        pytest.param("MXFP4", 17, 96, SPLIT, marks=pytest.mark.slow),
        pytest.param("Q4_0", 16, 64, STREAM, marks=pytest.mark.slow),
        pytest.param("Q6_K", 17, 256, {}, marks=pytest.mark.slow),
    ],
)
def test_a_right_tile_passes_every_check(name, m, k, fields):
    tile = BY_NAME["iter-k"].honest.replace(**fields)
    case = Case("mmq", name, "float16", m, 40, k, 0, "int8")
    result = gate(SPEC, tile, [case])
    assert result.passed, result
    assert result.cases > 5
    inputs = watch(SPEC.make_inputs(case, 0))
    assert recheck(SPEC, inputs, SPEC.run(inputs, tile=tile), tile=tile).passed
