"""Tiles drawn from the whole space of w4a16, executed as AMD chips would."""

from __future__ import annotations

import random
from typing import Any

import pytest

from isa.compiling import HAS_TRITON, NO_TRITON
from isa.emulating import ARCHS, emulated, w4a16
from tilewright.errors import TileError
from tilewright.ops.contract import DTYPES, Case
from tilewright.ops.w4a16.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Tile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON),
    pytest.mark.timeout(1200),
]

EACH = 4  # of every algorithm on every architecture
OUTPUTS = 64 * 128  # the largest block: a larger one compiles for a minute
FLAGS = ("bias", "strided", "outliers", "act_order")


def drawn(rng: random.Random, algorithm: str, arch: str) -> dict[str, Any] | None:
    """A job that obeys the rules, or None."""
    tile = Tile.of(
        algorithm, **{n: rng.choice(v) for n, v in TRITON_SPACE.fields[algorithm].items()}
    )
    dtype = rng.choice([d for d in DTYPES if d != "float32" or algorithm != "amd"])
    group = rng.choice((32, 64, 128, 256, -1))
    k = rng.choice((72, 100, 136, 200)) if group == -1 else group * rng.choice((1, 2, 3))
    n, m = rng.choice((16, 31, 40, 64, 97)), rng.choice((1, 2, 3, 5, 16, 17, 33))
    flags = [flag for flag in FLAGS if rng.random() < 0.25]
    weight_type = rng.choice(("uint4", "uint4b8"))
    case = Case("w4a16", weight_type, dtype, m, n, k, group)
    try:
        TRITON_SPACE.check(tile, case.problem(arch))
    except TileError:
        return None
    if tile.block_m * tile.block_n > OUTPUTS or tile.num_warps > 8:
        return None
    job = w4a16(arch, tile, dtype, (m, n, k, group), *flags, weight_type=weight_type)
    return {**job, "last_wave_first": rng.random() < 0.5}


def jobs() -> dict[str, dict[str, Any]]:
    rng = random.Random(0)
    found: dict[str, dict[str, Any]] = {}
    for algorithm in TRITON_SPACE.fields:
        for arch in ARCHS:
            count = 0
            while count < EACH:
                job = drawn(rng, algorithm, arch)
                if job is not None:
                    found[f"{arch} {algorithm} {count}"] = job
                    count += 1
    return found


JOBS = jobs()


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return emulated(JOBS, tmp_path_factory.mktemp("triton"), timeout=1100)


@pytest.mark.parametrize("name", JOBS)
def test_a_tile_of_the_space_is_right(executed, name):
    assert executed[name] == {"ok": True, "reason": ""}, JOBS[name]
