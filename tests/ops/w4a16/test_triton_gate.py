"""The gate in the interpreter: every planted fault of the Triton kernel falls, a right tile passes.

It launches each tile some thirty times around its own numbers, so the tiles are small.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from quick import one_in
from tilewright.errors import GateError
from tilewright.ops.contract import Case
from tilewright.ops.w4a16.triton_planted import AHEAD_PLANTED, PLANTED
from tilewright.tiles.tile import Tile
from tilewright.tune.gate import CHECKS, gate, planted, recheck, watch

pytest.importorskip(
    "triton_interpreter", reason="triton is not installed: pip install 'tilewright[triton]'"
)

from tilewright.ops.w4a16 import triton_gemm
from tilewright.ops.w4a16.triton_spec import SPEC


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: the gate's own fill is what is tested."""


ALL = (*PLANTED, *AHEAD_PLANTED)
by_name = pytest.mark.parametrize("wrong", ALL, ids=lambda wrong: wrong.name)
some_by_name = pytest.mark.parametrize(
    "wrong", one_in(3, ALL, lambda wrong: wrong in PLANTED), ids=lambda wrong: wrong.name
)


def test_the_gate_finds_them_in_the_space():
    assert tuple(planted(SPEC)) == ALL


@by_name
def test_a_planted_tile_is_rejected_for_its_fault(wrong):
    (case,) = wrong.cases
    result = gate(SPEC.with_run(wrong.run), wrong.tile, [case])
    assert not result.passed
    assert result.check == wrong.caught_by, result
    with pytest.raises(GateError, match=wrong.caught_by):
        result.raise_if_failed()


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
    checks = set(CHECKS) - {"ragged-shapes"}
    # Those of "ahead" run on words that its kernel serves; others would be multiplied as "wx".
    spec = SPEC.with_run(wrong.run) if wrong in AHEAD_PLANTED else SPEC
    result = gate(spec, wrong.honest, [case], _checks=checks)
    assert result.passed, result


@pytest.mark.parametrize(
    ("dtype", "weight_type", "dequant", "group"),
    [
        ("float16", "uint4", "packed", 64),
        pytest.param("bfloat16", "uint4b8", "packed", -1, marks=pytest.mark.slow),
        pytest.param("float32", "uint4", "scalar", 32, marks=pytest.mark.slow),
    ],
)
def test_a_right_tile_passes_every_check(dtype, weight_type, dequant, group):
    tile = Tile.of(
        "triton",
        block_m=16,
        block_n=32,
        block_k=32,
        num_warps=4,
        num_stages=2,
        group_m=8,
        dequant=dequant,
        order="xw",
    )
    case = Case(SPEC.name, weight_type, dtype, 17, 40, 64, group)
    result = gate(SPEC, tile, [case])
    assert result.passed, result
    assert result.cases > 5
    inputs = watch(SPEC.make_inputs(case, 0))
    y = SPEC.run(inputs, tile=tile)
    assert recheck(SPEC, inputs, y, tile=tile).passed


@pytest.mark.parametrize(
    "wrong",
    one_in(2, [p for p in AHEAD_PLANTED if p.name in ("odd-step", "row-beyond")]),
    ids=lambda wrong: wrong.name,
)
def test_a_right_tile_ahead_passes_every_check(wrong, monkeypatch):
    """On the products of the wrong ones, and around them; each launch is served by its kernel."""
    served = []
    launch = triton_gemm.launch_ahead
    monkeypatch.setattr(
        triton_gemm, "launch_ahead", lambda *a, **kw: (served.append(1), launch(*a, **kw))
    )
    (case,) = wrong.cases
    result = gate(SPEC.with_run(wrong.run), wrong.honest, [case])
    assert result.passed, result
    assert result.cases > 5
    assert len(served) >= 5 * result.cases


def test_a_tile_that_breaks_a_rule_is_rejected_with_the_rule():
    tile = replace(PLANTED[0].honest).replace(block_k=128)
    case = Case(SPEC.name, "uint4", "float16", 17, 40, 128, 64)
    result = gate(SPEC, tile, [case])
    assert result.check == "launch"
    assert "breaks rule 'one scale a step'" in result.reason


@pytest.mark.parametrize("block_m", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_a_right_skinny_tile_passes_every_check(block_m):
    tile = Tile.of(
        "skinny",
        block_m=block_m,
        block_n=16,
        block_k=32,
        split_k=2,
        num_warps=4,
        num_stages=2,
    )
    case = Case(SPEC.name, "uint4", "float16", 2, 40, 96, 32)
    result = gate(SPEC, tile, [case])
    assert result.passed, result
    assert result.cases > 5
