"""The tile space of the Triton kernel: rules, limits of chips, defaults, planted tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewright.errors import TileError
from tilewright.ops.w4a16.triton_planted import AHEAD_PLANTED, PLANTED
from tilewright.ops.w4a16.triton_space import (
    RULES,
    TRITON_SPACE,
    ahead_registers,
    smem_bytes,
    smem_limit_bytes,
    space_on,
    warp_size,
)
from tilewright.tiles.tile import Problem, Tile

ARCHS = ("interpreter", "gfx1151", "gfx1201", "gfx90a", "gfx942", "sm_80", "sm_89", "sm_90")
BASE = Tile.of(
    "triton",
    block_m=64,
    block_n=64,
    block_k=32,
    num_warps=4,
    num_stages=2,
    group_m=8,
    dequant="packed",
    order="xw",
)

AHEAD = {
    "order": "ahead", "dequant": "asm", "block_m": 256, "block_n": 128, "block_k": 64,
    "num_warps": 8, "num_stages": 4,
}  # fmt: skip


def problem(arch="gfx1151", dtype="float16", m=512, group=128, k=4096) -> Problem:
    return Problem("w4a16_triton", arch, dtype, "uint4", "float", m, 4096, k, group)


@pytest.mark.parametrize(
    ("changes", "at", "rule"),
    [
        ({"block_k": 256}, {}, "one scale a step"),
        ({"block_k": 64}, {"group": 32}, "one scale a step"),
        ({"block_k": 64}, {"group": 96}, "one scale a step"),
        ({}, {"dtype": "float32"}, "packed for 16 bits"),
        ({"block_m": 48}, {}, "powers of two"),
        ({"block_n": 8}, {}, "powers of two"),
        ({"block_k": 24}, {"group": -1}, "powers of two"),
        ({"block_k": 16, "block_n": 24}, {}, "powers of two"),
        ({"block_k": 4}, {}, "whole words"),
        ({"block_m": 256, "block_k": 64, "num_stages": 3}, {}, "shared memory"),
        ({"block_m": 256, "block_n": 64, "block_k": 128}, {"arch": "sm_89"}, "shared memory"),
        ({"block_m": 128, "block_n": 256, "num_warps": 4}, {}, "registers"),
        ({"block_m": 128, "block_n": 512, "num_warps": 16}, {"arch": "sm_90"}, "registers"),
        ({"dequant": "asm"}, {"dtype": "bfloat16"}, "packed maths"),
        ({"dequant": "asm"}, {"arch": "sm_80", "dtype": "bfloat16"}, "packed maths"),
        ({"block_m": 128, "block_n": 32, "block_k": 64, "num_warps": 2}, {}, "spills"),
        ({"num_warps": 16}, {"arch": "gfx90a"}, "spills"),
        ({"block_m": 128, "block_n": 256, "num_warps": 8, "num_stages": 1}, {}, "spills"),
        ({"order": "wx", "block_n": 128}, {"arch": "sm_90"}, "one product after another"),
        ({"order": "wx", "num_warps": 8}, {"arch": "sm_90"}, "one product after another"),
        (AHEAD | {"num_warps": 4}, {"arch": "sm_90"}, "one product after another"),
        (AHEAD | {"dequant": "packed"}, {"arch": "sm_90"}, "made ahead"),
        (AHEAD | {"block_m": 32}, {"arch": "sm_90"}, "made ahead"),
        (AHEAD | {"block_n": 32, "num_warps": 2}, {"arch": "sm_90"}, "made ahead"),
        (AHEAD | {"block_k": 256}, {"arch": "sm_90", "group": -1}, "made ahead"),
        (AHEAD, {"arch": "sm_80"}, "made ahead"),
        (AHEAD, {"arch": "gfx942"}, "made ahead"),
        (AHEAD | {"block_k": 128, "num_stages": 3}, {"arch": "sm_90"}, "two steps in registers"),
    ],
)
def test_a_tile_breaks_the_rule(changes, at, rule):
    broken = [r.name for r in RULES if not r.holds(BASE.replace(**changes), problem(**at))]
    assert rule in broken


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({}, {}),
        ({"block_k": 128, "num_stages": 1}, {}),
        ({"block_k": 256}, {"group": -1, "arch": "sm_80"}),
        ({"block_k": 256}, {"group": 384, "k": 384, "arch": "sm_80"}),
        ({"block_k": 64}, {"group": 64}),
        ({"dequant": "scalar"}, {"dtype": "float32"}),
        # Tiles that a vendor's tuner chose on gfx1151.
        ({"block_m": 128, "block_n": 512, "num_warps": 16, "num_stages": 1, "dequant": "asm"}, {}),
        ({"block_m": 128, "block_n": 256, "num_warps": 8, "num_stages": 1, "dequant": "asm"}, {}),
        ({"block_m": 64, "block_n": 16, "block_k": 64, "num_warps": 1, "num_stages": 1}, {}),
        ({"block_m": 128, "block_n": 256, "num_warps": 8}, {"arch": "sm_90"}),
        (AHEAD, {"arch": "sm_90"}),
        (AHEAD, {"arch": "sm_90", "dtype": "bfloat16", "group": -1}),
        (AHEAD, {"arch": "interpreter"}),
    ],
)
def test_a_tile_keeps_every_rule(changes, at):
    TRITON_SPACE.check(BASE.replace(**changes), problem(**at))


SKINNY = Tile.of("skinny", block_m=4, block_n=32, block_k=128, split_k=4, num_warps=4, num_stages=2)


@pytest.mark.parametrize(
    ("changes", "at", "rule"),
    [
        ({"block_m": 4}, {"m": 5}, "few rows"),
        ({"block_k": 256}, {"m": 4}, "one scale a step"),
        ({"block_n": 128, "num_warps": 1}, {"m": 4}, "registers"),
        ({"block_m": 128, "block_n": 128, "num_stages": 4}, {"m": 4}, "shared memory"),
        ({"block_m": 128, "block_n": 128, "num_warps": 2}, {"arch": "sm_90"}, "registers"),
    ],
)
def test_a_skinny_tile_breaks_the_rule(changes, at, rule):
    broken = [r.name for r in RULES if not r.holds(SKINNY.replace(**changes), problem(**at))]
    assert rule in broken


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({}, {"m": 4}),
        ({"block_m": 16, "num_stages": 1}, {"m": 40}),
        ({"block_m": 16, "block_n": 64, "num_stages": 4}, {"m": 5, "arch": "sm_90"}),
        ({"block_m": 1, "block_n": 64}, {"m": 1, "dtype": "float32"}),
    ],
)
def test_a_skinny_tile_keeps_every_rule(changes, at):
    TRITON_SPACE.check(SKINNY.replace(**changes), problem(**at))


def test_every_rule_says_why():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(len(rule.why) > 20 for rule in RULES)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("group", [32, 64, 96, 128, 256, -1])
def test_the_default_is_legal(arch, dtype, group):
    for m in (1, 16, 17, 32, 64, 512, 8192):
        at = problem(arch, dtype, m, group, 4096 if group != 96 else 960)
        TRITON_SPACE.check(TRITON_SPACE.default(at), at)


@pytest.mark.parametrize(
    ("arch", "limit"),
    [
        ("gfx1151", 65536),
        ("gfx90a", 65536),
        ("gfx950", 163840),
        ("sm_80", 166912),
        ("sm_89", 101376),
        ("sm_90", 232448),
        ("sm_999", 49152),
        ("interpreter", None),
    ],
)
def test_limits_of_chips(arch, limit):
    assert smem_limit_bytes(arch) == limit


def test_warps():
    assert [warp_size(arch) for arch in ("gfx90a", "gfx1151", "sm_90")] == [64, 32, 32]


def test_a_default_never_needs_more_than_the_smallest_chip():
    """A default of 147 KB on a chip of 99 KB was a public failure of a hand-made table."""
    for m in (33, 64, 512):
        at = problem("sm_999", m=m)
        assert smem_bytes(TRITON_SPACE.default(at), at) <= 48 * 1024


def test_candidates_differ_by_chip():
    compared = ("interpreter", "gfx1151", "sm_80", "sm_89", "sm_90")
    counts = {arch: len(TRITON_SPACE.candidates(problem(arch))) for arch in compared}
    assert counts["gfx1151"] < counts["interpreter"]
    assert counts["sm_89"] < counts["sm_80"] < counts["interpreter"]
    assert counts["sm_90"] < counts["interpreter"]
    assert all(count > 100 for count in counts.values())


@pytest.fixture(scope="module")
def every_tile():
    return set(TRITON_SPACE.every())


TWO_STEPS = next(rule for rule in RULES if rule.name == "two steps in registers")
# Of the tiles that multiply by wgmma, those that spill: block_m, block_n, block_k, num_warps,
# num_stages. Compiled for sm_90 in float16 with Triton 3.7. With Triton 3.6 and 3.9, and in
# bfloat16, the same do, but for one or two of these with one group for all of K.
SPILLING = {
    (256, 64, 64, 4, 1), *((256, 64, 128, 4, stages) for stages in (1, 2, 3)),
    (256, 128, 128, 8, 1), *((128, 256, 128, 16, stages) for stages in (1, 2, 3, 4)),
}  # fmt: skip
OF_SEVERAL_GROUPS = {(256, 128, 128, 8, 2), (256, 128, 128, 8, 3)}  # with zero points, by 5


@pytest.fixture(scope="module")
def by_wgmma(every_tile) -> dict[tuple[int, ...], Tile]:
    """Tiles of the order "ahead" with four warps or more, without the field that changes no code,
    by the others."""
    return {
        (t.block_m, t.block_n, t.block_k, t.num_warps, t.num_stages): t
        for t in every_tile
        if t.algorithm == "triton" and t.order == "ahead" and t.num_warps >= 4
        if t.dequant == "asm"
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("weight_type", ["uint4", "uint4b8"])
@pytest.mark.parametrize(("group", "tiles"), [(32, 32), (128, 94), (-1, 94), (4096, 94)])
def test_just_the_tiles_that_spill_are_refused(by_wgmma, group, tiles, weight_type, dtype):
    at = replace(problem("sm_90", dtype, 4096, group), weight_type=weight_type)
    others = [rule for rule in TRITON_SPACE.rules if rule is not TWO_STEPS]
    ahead = {k: t for k, t in by_wgmma.items() if all(rule.holds(t, at) for rule in others)}
    assert len(ahead) == tiles
    refused = {key for key, tile in ahead.items() if not TWO_STEPS.holds(tile, at)}
    spilling = SPILLING | (OF_SEVERAL_GROUPS if (group, weight_type) == (128, "uint4") else set())
    assert refused == (spilling if group != 32 else set())
    assert len(refused) == {32: 0}.get(group, 11 if spilling > SPILLING else 9)


def test_the_registers_of_a_tile_by_hand():
    """256 x 128 over 256 threads: 128 sums, 16 pairs of weights, 8 copies of x, 2 zero points."""
    tile = BASE.replace(**AHEAD)
    assert ahead_registers(tile, problem("sm_90")) == 128 + 16 + 8 + 2
    assert ahead_registers(tile, problem("sm_90", group=-1)) == 128 + 16 + 8
    assert ahead_registers(tile.replace(num_stages=1), problem("sm_90")) == 128 + 16 + 24 + 2
    small = tile.replace(block_m=64, block_n=64, num_warps=2)  # x in registers too, 32 pairs
    assert ahead_registers(small, problem("sm_90")) == 64 + 32 + 32 + 8 + 2


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "sm_90"])
def test_other_chips_do_not_know_that_rule(every_tile, arch):
    at = problem(arch)
    assert all(TWO_STEPS.holds(tile, at) for tile in every_tile)


def test_no_tile_of_another_order_knows_it(every_tile):
    at = problem("sm_90")
    others = [t for t in every_tile if t.as_dict().get("order") != "ahead"]
    assert all(TWO_STEPS.holds(tile, at) for tile in others)


@pytest.mark.parametrize("planted", [*PLANTED, *AHEAD_PLANTED], ids=lambda planted: planted.name)
def test_a_planted_tile_is_outside_the_space_and_pretends_to_be_inside(planted, every_tile):
    for case in planted.cases:
        at = case.problem("interpreter")
        TRITON_SPACE.check(planted.honest, at)
        with pytest.raises(TileError, match="has the fields"):
            TRITON_SPACE.check(planted.tile, at)
    assert planted.tile not in every_tile


def test_there_is_a_planted_tile_for_each_kind_of_fault():
    assert [planted.name for planted in PLANTED] == [
        "partial-rows", "k-tail", "group-straddled", "scale-row", "no-start", "past-the-end",
        "stale-buffer", "lost-partial", "split-boundary", "stale-partial",
    ]  # fmt: skip
    assert [planted.name for planted in AHEAD_PLANTED] == [
        "last-step", "first-twice", "scale-behind", "zero-ahead", "row-pair", "odd-step",
        "whole-tiles", "row-beyond",
    ]  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
def test_a_chip_is_shown_the_planted_tiles_whose_kernel_serves_it(arch):
    """Elsewhere those of "ahead" would be multiplied as "wx", and be right."""
    served = arch in ("sm_90", "interpreter")
    expected = (*PLANTED, *AHEAD_PLANTED) if served else PLANTED
    assert space_on(arch).planted == expected
    assert TRITON_SPACE.planted == PLANTED
    if served:
        for planted in AHEAD_PLANTED:
            space_on(arch).check(planted.honest, planted.cases[0].problem(arch))
