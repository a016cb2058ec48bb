"""`pin`: tiles that come before every table, for as long as a block runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiles import tile_tables as t
from tilewright.errors import TileError
from tilewright.ops.space import TileSpace
from tilewright.tiles import table as tables
from tilewright.tiles.table import Choice, forget, lookup, pin
from tilewright.tiles.tile import Problem, Tile

DEFAULT = t.wide(32, 1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder, with no shipped tables behind it."""
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path))
    monkeypatch.setattr(tables, "shipped_folder", lambda: tmp_path / "none")
    forget()
    yield tmp_path
    forget()


def look(problem: Problem | None = None, space: TileSpace = t.SPACE) -> Choice:
    return lookup(problem or t.problem(), space, units=t.UNITS, running=t.RUNNING)


def test_a_pinned_tile_comes_before_a_table_and_goes_with_its_block(folder: Path) -> None:
    t.put(folder, t.row(t.wide(128)))
    assert look().tile == t.wide(128)
    with pin({t.problem(): t.wide(64)}, "set by a test"):
        assert look() == Choice(t.wide(64), "pinned", None, "set by a test")
        forget()
        assert look().how == "pinned"
    assert (look().how, look().tile) == ("exact", t.wide(128))


def test_a_pin_holds_for_its_bucket_and_for_nothing_else() -> None:
    with pin({t.problem(M=300): t.wide(64)}):
        assert {look(t.problem(M=m)).how for m in (257, 300, 512)} == {"pinned"}
        others = (
            t.problem(M=256),
            t.problem(M=513),
            t.problem(M=300, N=128),
            t.problem(M=300, K=128),
            t.problem(M=300, act_dtype="float16"),
            t.problem(M=300, arch="test9"),
        )
        assert [look(other) for other in others] == [Choice(DEFAULT, "default")] * len(others)


def test_the_innermost_pin_decides_and_the_outer_one_returns() -> None:
    with pin({t.problem(): t.wide(64), t.problem(N=128): t.wide(128)}):
        with pin({t.problem(): t.wide(256)}):
            assert (look().tile, look(t.problem(N=128)).tile) == (t.wide(256), t.wide(128))
        assert look().tile == t.wide(64)


def test_a_pin_goes_when_its_block_fails_and_out_of_order() -> None:
    with pytest.raises(RuntimeError), pin({t.problem(): t.wide(64)}):
        raise RuntimeError
    assert look().how == "default"
    first, second = pin({t.problem(): t.wide(64)}), pin({t.problem(): t.wide(64)})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert look().how == "pinned"
    second.__exit__(None, None, None)
    assert look().how == "default"


def test_a_pin_holds_in_every_thread() -> None:
    found: list[str] = []
    with pin({t.problem(): t.wide(64)}):
        thread = threading.Thread(target=lambda: found.append(look().how))
        thread.start()
        thread.join()
    assert found == ["pinned"]


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (Tile.of("turbo", level=1), "'turbo' is not in toy/test"),
        (t.wide(48), "tile_k=48 is none of"),
        (t.wide(256), "tile_k divides K"),
    ],
    ids=["algorithm", "value", "rule"],
)
def test_a_pinned_tile_that_the_space_refuses_is_an_error_every_time(
    tile: Tile, message: str
) -> None:
    with pin({t.problem(K=384): tile}):
        for _ in range(2):
            with pytest.raises(TileError, match=message):
                look(t.problem(K=384))


def test_the_space_of_each_lookup_is_asked() -> None:
    other = TileSpace("other/test", {"turbo": {"level": (1,)}}, (), lambda p: Tile.of("turbo"))
    with pin({t.problem(): t.wide(64)}):
        assert look().how == "pinned"
        with pytest.raises(TileError, match="'wide' is not in other/test"):
            look(space=other)


def test_two_tiles_for_one_bucket_are_an_error() -> None:
    two = {t.problem(M=300): t.wide(64), t.problem(M=400): t.wide(128)}
    with pytest.raises(ValueError, match="two tiles are pinned to toy .* M=512"), pin(two):
        pass
    assert look(t.problem(M=300)).how == "default"
    with pin({t.problem(M=300): t.wide(64), t.problem(M=400): t.wide(64)}):
        assert look(t.problem(M=512)).tile == t.wide(64)
