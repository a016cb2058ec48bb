"""The ladders of mmq and ssd: they parse, and every tile is legal on the chips they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilewright.ops.catalog import load_spec
from tilewright.ops.mmq.triton_space import TRITON_SPACE as MMQ
from tilewright.ops.ssd.triton_space import TRITON_SPACE as SSD
from tilewright.tiles.tile import Problem
from tilewright.tune.ladder_file import read_ladder, stack

LADDERS = Path(__file__).parents[2] / "benchmarks" / "ladders"
pytestmark = pytest.mark.skipif(not LADDERS.is_dir(), reason="benchmarks/ is not part of this copy")
SPACES: dict[str, Any] = {"mmq-seed.toml": MMQ, "ssd-chunks.toml": SSD}
# With loads ahead, as it was measured, the scan's blocks do not fit 64 KB of LDS.
ON = [("mmq-seed.toml", arch) for arch in ("sm_90", "gfx90a", "gfx942")]
ON += [("ssd-chunks.toml", "sm_90")]


@pytest.mark.parametrize(("name", "arch"), ON)
def test_every_rung_has_a_legal_tile_for_every_product(name: str, arch: str) -> None:
    ladder = read_ladder(LADDERS / name)
    assert ladder.spec is not None
    assert set(load_spec(ladder.spec).weight_types) >= {p.type for p in ladder.products}
    for i in range(len(ladder.rungs) + 1):
        change = stack(ladder.base, ladder.rungs[:i])
        for product in ladder.products:
            rules = [r for r in change.tiles if r.type is None or product.type.endswith("_K")]
            for m in product.m:
                problem = Problem(
                    ladder.spec, arch, product.dtype, product.type, change.activations or "float",
                    m, *product.shape, product.group or 0,
                )  # fmt: skip
                SPACES[name].check(rules[-1].tile, problem)


def test_the_sweep_has_every_chunk_of_the_study() -> None:
    ladder = read_ladder(LADDERS / "ssd-chunks.toml")
    tiles = [c.tiles[-1].tile for c in (ladder.base, *ladder.rungs)]
    assert [tile.chunk for tile in tiles] == [64, 128, 192, 256, 512]


def test_stream_k_goes_first_for_k_quants_and_then_for_all() -> None:
    ladder = read_ladder(LADDERS / "mmq-seed.toml")
    schedules = [
        [(rule.type, rule.tile.schedule) for rule in change.tiles]
        for change in (ladder.base, *ladder.rungs[:2])
    ]
    assert schedules == [
        [(None, "stream-k")], [("Q?_K", "data-parallel")], [(None, "data-parallel")],
    ]  # fmt: skip
