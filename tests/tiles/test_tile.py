from __future__ import annotations

import pytest

from tilewright.errors import TileError
from tilewright.tiles.tile import Problem, Tile, m_bucket


@pytest.mark.parametrize(
    ("m", "bucket"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (16, 16), (17, 32), (511, 512), (512, 512),
     (513, 1024), (8192, 8192), (100_000, 8192)],
)  # fmt: skip
def test_the_bucket_is_the_next_power_of_two(m: int, bucket: int) -> None:
    assert m_bucket(m) == bucket


def test_buckets_are_fixed_points_so_a_row_is_found_under_its_own_key() -> None:
    for m in range(1, 9000):
        assert m_bucket(m_bucket(m)) == m_bucket(m)


def test_every_part_of_a_problem_is_part_of_the_key() -> None:
    plain = Problem("mmq", "a", "float32", "Q4_0", "float", 16, 32, 64, 0)
    others = {
        "op": "w4a16", "arch": "b", "act_dtype": "float16", "weight_type": "Q4_1",
        "activations": "int8", "M": 17, "N": 33, "K": 96, "group": 32,
    }  # fmt: skip
    assert set(others) == set(plain.__dict__)
    keys = {plain.bucketed()}
    keys |= {
        Problem(**{**plain.__dict__, name: value}).bucketed() for name, value in others.items()
    }
    assert len(keys) == 1 + len(others)


def test_a_tile_reads_as_text_and_as_fields() -> None:
    tile = Tile.of("panel", nv=2, mr=4)
    assert str(tile) == "panel(mr=4, nv=2)"
    assert (tile.algorithm, tile.mr, tile.nv) == ("panel", 4, 2)
    assert Tile.from_mapping(tile.as_dict()) == tile
    assert tile.replace(mr=8) == Tile.of("panel", mr=8, nv=2)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Tile.from_mapping({"mr": 4}), "names no 'algorithm'"),
        (lambda: Tile.of("panel", mr=4).replace(nv=2), "no field"),
    ],
    ids=["no algorithm", "unknown field"],
)
def test_a_wrong_tile_is_an_error_with_a_reason(act: object, message: str) -> None:
    with pytest.raises(TileError, match=message):
        act()  # type: ignore[operator]
