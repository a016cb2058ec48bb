"""The tile space of w4a16 on Hopper: defaults, rules, and planted tiles."""

from __future__ import annotations

import itertools

import pytest

from tilewright.errors import TileError
from tilewright.ops.w4a16.hopper_space import HOPPER_SPACE, decode_registers, smem_bytes
from tilewright.tiles.tile import Problem, Tile, m_bucket

BATCHES = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 200, 256, 500, 512, 1024, 4096, 8192)
SHAPES = ((24576, 4096), (4096, 12288), (4096, 4096), (6144, 4096), (97, 576), (1, 7), (33, 4095))
GROUPS = (32, 64, 128, 192, 256, -1)

DECODE = Tile.of(
    "hopper_decode", block_m=8, block_n=64, warps_n=1, warps_k=4, unroll=2, split_k=1,
    x_load="pairs",
)  # fmt: skip
PREFILL = Tile.of(
    "hopper", block_n=128, block_m=256, block_k=64, num_stages=4, ctas=1, group_m=4, split_k=1
)


def problem(
    M: int = 8, N: int = 4096, K: int = 4096, group: int = 128, dtype: str = "float16"
) -> Problem:
    return Problem("w4a16", "sm_90", dtype, "uint4", "float", M, N, K, group)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", BATCHES)
def test_every_problem_has_a_legal_default(m: int, n: int, k: int) -> None:
    for group, dtype in itertools.product(GROUPS, ("float16", "bfloat16")):
        if group == -1 or k % group == 0:
            p = problem(m, n, k, group, dtype)
            HOPPER_SPACE.check(HOPPER_SPACE.default(p), p)


@pytest.mark.parametrize("m", BATCHES)
def test_a_tile_of_a_bucket_serves_all_of_it(m: int) -> None:
    bucket = problem(m_bucket(m))
    for tile in HOPPER_SPACE.candidates(bucket):
        HOPPER_SPACE.check(tile, problem(m))


@pytest.mark.parametrize("m", [1, 16, 64, 512, 8192])
def test_the_default_is_one_of_several_candidates(m: int) -> None:
    candidates = HOPPER_SPACE.candidates(problem(m))
    assert HOPPER_SPACE.default(problem(m)) in candidates
    assert 30 < len(candidates) < 800


def test_few_rows_are_decoded_and_many_are_not() -> None:
    assert HOPPER_SPACE.default(problem(16)).algorithm == "hopper_decode"
    assert HOPPER_SPACE.default(problem(17)).algorithm == "hopper"
    assert {t.algorithm for t in HOPPER_SPACE.candidates(problem(17))} == {"hopper"}


BROKEN = {
    "16-bit activations": (DECODE, problem(dtype="float32")),
    "tile size": (PREFILL.replace(block_n=256), problem(512)),
    "tile size, shared": (
        PREFILL.replace(block_m=128, block_k=64, num_stages=4, ctas=2),
        problem(128),
    ),
    "shared memory": (PREFILL.replace(num_stages=6), problem(512)),
    "shared memory, shared": (
        PREFILL.replace(block_n=64, block_m=128, num_stages=6, ctas=2),
        problem(128),
    ),
    "loads ahead": (PREFILL.replace(num_stages=2), problem(512)),
    "rows of x": (DECODE, problem(9)),
    "idle rows": (DECODE.replace(block_m=16), problem(8)),
    "idle rows, prefill": (PREFILL, problem(128)),
    "small tiles": (PREFILL.replace(block_m=64), problem(512)),
    "warps": (DECODE.replace(warps_k=16, warps_n=2), problem()),
    "warps, rows": (DECODE.replace(block_n=16, warps_n=2), problem()),
    "registers": (DECODE.replace(warps_k=16, x_load="vectors"), problem()),
    "one scale": (DECODE, problem(K=4224, group=192)),
    "one scale, prefill": (
        PREFILL.replace(block_m=128, block_k=128, num_stages=3),
        problem(128, K=4224, group=192),
    ),
    "parts of K": (DECODE.replace(split_k=8), problem(K=768)),
    "few programs": (DECODE.replace(split_k=8), problem(N=24576)),
    "few programs, prefill": (PREFILL.replace(split_k=2), problem(8192)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rules(name: str) -> None:
    tile, at = BROKEN[name]
    rule = name.partition(",")[0]
    assert HOPPER_SPACE.broken_rule(tile, at) is not None
    with pytest.raises(TileError, match=f"breaks rule '{rule}'"):
        HOPPER_SPACE.check(tile, at)


def test_sizes_of_a_tile_by_hand() -> None:
    # Four steps of x 256 x 64 halves, 2 blocks of 2 KiB words, scales and zeros of two groups; y.
    step = 32768 + 4096 + 512 + 128
    assert smem_bytes(PREFILL) == 4 * (step + 16) + 256 * 128 * 2 + 1024
    # Two steps of 8 words x 4 and 16 pairs of x, and two times 16 sums.
    assert decode_registers(DECODE) == 2 * (32 + 16 + 16)


def test_extents() -> None:
    assert HOPPER_SPACE.extents is not None
    assert HOPPER_SPACE.extents(DECODE) == {"M": (8,), "N": (64,), "K": (128, 512)}
    assert HOPPER_SPACE.extents(PREFILL) == {"M": (256,), "N": (128,), "K": (64, 256)}


def test_planted_tiles_pretend_to_be_legal_ones() -> None:
    faults = [p.name for p in HOPPER_SPACE.planted]
    assert len(set(faults)) == len(faults) == 15
    for planted in HOPPER_SPACE.planted:
        for case in planted.cases:
            at = case.problem("sm_90")
            HOPPER_SPACE.check(planted.honest, at)
            with pytest.raises(TileError, match="has the fields"):
                HOPPER_SPACE.check(planted.tile, at)
