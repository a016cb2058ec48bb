"""The W4A16 ladder files: they parse, every tile is legal, and the control changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.ops.catalog import load_spec
from tilewright.ops.w4a16.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Problem
from tilewright.tune.ladder_file import read_ladder, stack

LADDERS = Path(__file__).parents[2] / "benchmarks" / "ladders"
pytestmark = pytest.mark.skipif(not LADDERS.is_dir(), reason="benchmarks/ is not part of this copy")
FILES = sorted(path.name for path in LADDERS.glob("w4a16-*.toml"))


def test_they_are_there() -> None:
    assert FILES == ["w4a16-h200.toml", "w4a16-seed-bf16.toml", "w4a16-seed.toml"]


@pytest.mark.parametrize("name", FILES)
def test_every_rung_has_a_legal_tile_for_every_product(name: str) -> None:
    ladder = read_ladder(LADDERS / name)
    assert ladder.spec is not None
    assert set(load_spec(ladder.spec).weight_types) >= {p.type for p in ladder.products}
    for i in range(len(ladder.rungs) + 1):
        rule = stack(ladder.base, ladder.rungs[:i]).tiles[-1]
        for product in ladder.products:
            for m in product.m:
                assert product.group is not None
                problem = Problem(
                    "w4a16", "sm_90", product.dtype, product.type, "float", m, *product.shape,
                    product.group,
                )  # fmt: skip
                TRITON_SPACE.check(rule.tile, problem)


def test_the_control_has_the_rungs_of_the_seed_and_none_of_their_tiles() -> None:
    seed = read_ladder(LADDERS / "w4a16-seed.toml")
    control = read_ladder(LADDERS / "w4a16-seed-bf16.toml")
    assert [r.name for r in control.rungs] == [r.name for r in seed.rungs]
    assert control.base.tiles == seed.base.tiles
    assert all(not rung.tiles for rung in control.rungs)
    assert {p.dtype for p in control.products} == {"bfloat16"}
    assert {p.dtype for p in seed.products} == {"float16"}


def test_the_seed_in_full_is_legal_on_its_own_chip() -> None:
    seed = read_ladder(LADDERS / "w4a16-seed.toml")
    problem = Problem("w4a16", "gfx1151", "float16", "uint4", "float", 2048, 24576, 4096, 128)
    # There the pairs are made by the chip's own instructions; compiled from source they spill.
    TRITON_SPACE.check(seed.rungs[-1].tiles[-1].tile.replace(dequant="asm"), problem)


def test_each_rung_of_the_seed_changes_what_its_name_says() -> None:
    seed = read_ladder(LADDERS / "w4a16-seed.toml")
    tiles = [seed.base.tiles[-1].tile, *(rung.tiles[-1].tile for rung in seed.rungs)]
    changes = [
        {key for key, value in after if before.as_dict()[key] != value}
        for before, after in zip(tiles, tiles[1:], strict=False)
    ]
    assert changes == [{"dequant"}, {"block_n", "block_k"}, {"num_stages"}]
