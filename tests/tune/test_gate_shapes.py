"""Which products the gate makes up around a tile's own numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewright.device import cpu_device
from tilewright.ops.catalog import SPECS
from tilewright.ops.contract import Case, OpSpec
from tilewright.ops.space import Rule, TileSpace
from tilewright.tiles.tile import Tile
from tilewright.tune.gate_shapes import ragged_cases

PANEL = Tile.of("panel", mr=8, nv=3, block_parts=16, threads=0)
MMQ = Case("mmq", "Q4_1", "float16", 512, 576, 1536)


def of_mmq(tile: Tile = PANEL, case: Case = MMQ) -> list[Case]:
    return ragged_cases(SPECS["mmq"], tile, case)


def test_each_dimension_is_ragged_alone_and_all_at_once() -> None:
    """A panel of this tile is 48 columns, its rows come by 8, its K by 512."""
    shapes = {(c.M % 8 != 0, c.N % 48 != 0, c.K % 512 != 0) for c in of_mmq()}
    assert {(True, False, False), (False, True, False), (False, False, True)} <= shapes
    assert (True, True, True) in shapes


def test_they_lie_below_above_and_beyond_a_piece() -> None:
    cases = of_mmq()
    assert {7, 9, 16, 17, 1, 511} == {c.M for c in cases}
    assert {47, 49, 96, 97, 1} == {c.N for c in cases}
    assert {480, 512, 544, 32} == {c.K for c in cases}


@pytest.mark.parametrize("field", ["op", "weight_type", "act_dtype", "activations", "group"])
def test_they_are_of_the_case_s_kind(field: str) -> None:
    case = Case("w4a16", "uint4", "bfloat16", 5, 128, 512, 128, "int8", ("act_order",))
    tile = Tile.of("int8", mr=4, nv=3, block_parts=32, threads=0)
    cases = ragged_cases(SPECS["w4a16"], tile, case)
    assert {getattr(c, field) for c in cases} == {getattr(case, field)}
    assert all("act_order" in c.flags for c in cases)
    assert {flag for c in cases for flag in c.flags} >= {"bias", "outliers", "strided"}


def test_small_products_of_a_mixture_have_few_experts() -> None:
    case = Case("moe", "Q4_K", "float16", 8, 1536, 2048, experts=128, top_k=32)
    cases = ragged_cases(SPECS["moe"], PANEL, case)
    assert {(c.experts, c.top_k) for c in cases} == {(16, 16)}
    small = replace(case, experts=4, top_k=2)
    assert {(c.experts, c.top_k) for c in ragged_cases(SPECS["moe"], PANEL, small)} == {(4, 2)}


@pytest.mark.parametrize(
    ("weight_type", "group", "step"),
    [("uint4", 32, 32), ("uint4b8", 128, 128), ("uint4", -1, 8), ("Q4_K", 0, 256), ("Q8_0", 0, 32)],
)
def test_k_takes_legal_steps_only(weight_type: str, group: int, step: int) -> None:
    op = "w4a16" if group else "mmq"
    case = Case(op, weight_type, "float32", 17, 96, 1024, group)
    cases = ragged_cases(SPECS[op], PANEL, case)
    assert all(c.K % step == 0 for c in cases)
    assert min(c.K for c in cases) == step
    for ragged in cases:
        SPECS[op].make_inputs(ragged, 0)


@pytest.mark.parametrize("op", ["mmq", "w4a16"])
def test_every_tile_of_a_space_has_some(op: str) -> None:
    spec = SPECS[op]
    assert spec.space is not None
    case = Case(op, "Q4_1" if op == "mmq" else "uint4", "float32", 16, 96, 512, 32 * (op != "mmq"))
    for tile in spec.space().candidates(case.problem(cpu_device().arch)):
        cases = ragged_cases(spec, tile, case)
        assert len(cases) >= 5
        assert all(c.M * c.N * c.K <= 1 << 25 for c in cases)
        assert len({c.id for c in cases}) == len(cases)
        for c in cases:
            spec.space().check(tile, c.problem(cpu_device().arch))


def test_edge_weights_do_not_reach_one_row_weights() -> None:
    cases = of_mmq(case=replace(MMQ, flags=("edge",)))
    assert not any("edge" in c.flags for c in cases)


def test_outliers_stay_off_short_float16_rows() -> None:
    """One of 6e4 on weights of a short row could overflow the output: the case's own fault."""
    tile = Tile.of("dot", unroll=1, threads=0)
    loud = [c for c in of_mmq(tile) if "outliers" in c.flags]
    assert all(c.K >= 256 for c in loud)
    loud32 = [c for c in of_mmq(tile, replace(MMQ, act_dtype="float32")) if "outliers" in c.flags]
    assert loud32


def a_spec(space: TileSpace | None, square: bool = False) -> OpSpec:
    cases = [
        Case("own", "rows", "float32", m, k if square else 8, k) for m in (1, 5) for k in (7, 33)
    ]
    return replace(SPECS["mmq"], name="own", cases=tuple(cases), space=space and (lambda: space))


def test_a_space_that_names_no_pieces_has_all_its_numbers_tried() -> None:
    tile = Tile.of("own", rows=4, tile_k=128, deep=True, kind="x", huge=1 << 20)
    space = TileSpace("own", {}, (), lambda problem: tile)
    cases = ragged_cases(a_spec(space), tile, Case("own", "rows", "float32", 64, 64, 64))
    assert {3, 5, 9} <= {c.M for c in cases}
    assert {127, 129, 257, 3, 5, 9} <= {c.N for c in cases}
    assert {127, 129, 128, 3, 5, 4} <= {c.K for c in cases}
    assert max(c.M for c in cases) <= 65


def test_an_op_that_maps_rows_to_rows_keeps_its_columns() -> None:
    tile = Tile.of("own", block=64)
    cases = ragged_cases(a_spec(None, square=True), tile, Case("own", "rows", "float32", 4, 64, 64))
    assert all(c.N == c.K for c in cases)
    assert {63, 65} <= {c.K for c in cases}


def test_shapes_the_rules_forbid_are_left_out() -> None:
    tile = Tile.of("own", block=64)
    whole = Rule("whole", "K is cut into whole blocks", lambda t, p: p.K % t.block == 0)
    never = Rule("arch", "only for another device", lambda t, p: p.arch == "sm_90")
    space = TileSpace("own", {}, (whole, never), lambda problem: tile)
    cases = ragged_cases(a_spec(space), tile, Case("own", "rows", "float32", 4, 64, 64))
    assert cases
    assert all(c.K % 64 == 0 for c in cases)
    assert any(c.N % 64 for c in cases)


def rowed(**rules: object) -> OpSpec:
    """mmq whose tiles obey these rules, with extents of 8 x 48 x 512."""
    space = TileSpace(
        name="mmq/test",
        fields={"panel": {name: (value,) for name, value in PANEL}},
        rules=tuple(Rule(name, "for this test", holds) for name, holds in rules.items()),  # type: ignore[arg-type]
        default=lambda problem: PANEL,
        extents=lambda tile: {"M": (8,), "N": (48,), "K": (512,)},
    )  # fmt: skip
    return replace(SPECS["mmq"], space=lambda: space)


def test_a_tile_for_one_row_only_gets_products_of_one_row() -> None:
    spec = rowed(one_row=lambda tile, problem: problem.M == 1)
    cases = ragged_cases(spec, PANEL, replace(MMQ, M=1))
    assert {c.M for c in cases} == {1}
    assert {c.K % 512 != 0 for c in cases} == {c.N % 48 != 0 for c in cases} == {True, False}


def test_a_tile_for_a_long_k_only_gets_products_as_long() -> None:
    spec = rowed(long=lambda tile, problem: problem.K >= 2048)
    cases = ragged_cases(spec, PANEL, replace(MMQ, K=4096))
    assert all(2048 <= c.K <= 4096 for c in cases)
    assert {c.K % 512 != 0 for c in cases} == {c.N % 48 != 0 for c in cases} == {True, False}
