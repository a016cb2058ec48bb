"""Which AMD tiles are legal: each rule with a tile that breaks it, and what is left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isa.compiling import HAS_TRITON, NO_TRITON
from ops.w4a16.amd_jobs import ARCHS, TILES, run_amd
from tilewright.errors import TileError, UnsupportedError
from tilewright.ops.w4a16.amd_planted import AMD_PLANTED
from tilewright.ops.w4a16.amd_space import AMD_ARCHS, AMD_RULES, amd_family
from tilewright.ops.w4a16.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Problem, Tile

PROBLEM = Problem("w4a16", "gfx1151", "float16", "uint4", "float", 256, 4096, 4096, 128)
TILE = Tile.from_mapping(TILES["square"])

BROKEN = {
    "amd: chips": (TILE, replace(PROBLEM, arch="gfx1030")),
    "amd: 16 bits": (TILE, replace(PROBLEM, act_dtype="float32")),
    "amd: warps": (TILE.replace(block_n=32), PROBLEM),
    "amd: shared memory": (
        TILE.replace(block_m=256, block_n=64, block_k=256, num_warps=4),
        replace(PROBLEM, group=256, arch="gfx90a"),
    ),
    "amd: scale": (TILE, replace(PROBLEM, act_dtype="bfloat16")),
    "amd: registers": (TILE.replace(x_path="direct", num_stages=2), PROBLEM),
    "one scale a step": (TILE.replace(block_k=256), PROBLEM),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_tile_that_breaks_a_rule_is_refused_with_the_rules_sentence(name):
    tile, problem = BROKEN[name]
    rule = next(r for r in TRITON_SPACE.rules if r.name == name)
    assert not rule.holds(tile, problem)
    with pytest.raises(TileError, match="breaks rule"):
        TRITON_SPACE.check(tile, problem)
    assert rule.holds(TILE, PROBLEM)


def test_every_rule_of_the_chips_has_a_tile_that_breaks_it():
    assert {rule.name for rule in AMD_RULES} <= set(BROKEN)


@pytest.mark.parametrize("algorithm", ["triton", "skinny"])
def test_rules_pass_tiles_of_other_algorithms(algorithm):
    tile = next(t for t in TRITON_SPACE.every() if t.algorithm == algorithm)
    float32 = replace(PROBLEM, arch="sm_80", act_dtype="float32")
    assert all(rule.holds(tile, float32) for rule in AMD_RULES)


@pytest.mark.parametrize("arch", AMD_ARCHS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("group", [32, 64, 128, 256, -1])
def test_every_problem_has_tiles(arch, dtype, group):
    problem = replace(PROBLEM, arch=arch, act_dtype=dtype, group=group)
    legal = [
        name
        for name, fields in TILES.items()
        if TRITON_SPACE.broken_rule(Tile.from_mapping(fields), problem) is None
    ]
    assert "small" in legal
    assert ("direct" in legal) == (group != 32)
    assert ("square" in legal) == (group not in (32, -1) and dtype == "float16")


def test_planted_tiles_lie_outside_the_space_and_their_honest_ones_inside():
    for planted in AMD_PLANTED:
        problem = planted.cases[0].problem("gfx1151")
        with pytest.raises(TileError, match="planted"):
            TRITON_SPACE.check(planted.tile, problem)
        TRITON_SPACE.check(planted.honest, problem)


def test_an_arch_that_is_not_served_is_named_with_those_that_are():
    with pytest.raises(UnsupportedError, match=r"serves gfx1100, .*gfx942, not 'gfx1030'"):
        amd_family("gfx1030")


@pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
def test_a_launch_that_cannot_be_served_says_why():
    found = run_amd(
        {
            "order": {
                "kind": "compiled", "arch": ARCHS[0], "tile": TILES["square"], "order": "k32"
            },
            "arch": {"kind": "compiled", "arch": "gfx1030", "tile": TILES["square"]},
            "nvidia": {"kind": "compiled", "arch": "sm_90", "tile": TILES["square"]},
        }
    )  # fmt: skip
    assert "words are in order 'k32'; this kernel reads 'k8'" in found["order"]["error"]
    assert "pack_w4_words" in found["order"]["error"]
    for name, arch in (("arch", "gfx1030"), ("nvidia", "sm_90")):
        assert found[name]["error"].startswith("UnsupportedError: w4a16 amd: the kernel serves")
        assert f"not '{arch}'; use a tile of the algorithm 'triton'" in found[name]["error"]
