from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tilewright.errors import UnsupportedError
from tilewright.ops.space import Rule, TileSpace
from tilewright.tiles.tile import Tile
from tilewright.tune.search import STRATEGIES, Local, Strategy, make_strategy, neighbours
from tune.toy_op import FLAT, SPACE, loop, problem

WIDE = TileSpace(
    name="wide/cpu",
    fields={"grid": {name: tuple(range(10)) for name in ("a", "b", "c")}, "lib": {"level": (0, 1)}},
    rules=(
        Rule(
            "not too large", "they do not fit", lambda t, p: t.algorithm == "lib" or t.a + t.b < 17
        ),
    ),
    default=lambda p: Tile.of("grid", a=0, b=0, c=0),
)
CANDIDATES = WIDE.candidates(problem())
START = WIDE.default(problem())


def strategy(
    name: str,
    seed: int = 0,
    batch: int = 6,
    incumbent: Tile | None = START,
    patience: float = math.inf,
) -> Strategy:
    tiles = [tile for tile in CANDIDATES if tile != incumbent]
    if name == "local":
        return Local(tiles, WIDE, incumbent, batch, seed, patience)
    return make_strategy(name, tiles, space=WIDE, incumbent=incumbent, batch=batch, seed=seed)


def drain(search: Strategy, score: Callable[[Tile], float | None]) -> list[Tile]:
    """Every tile asked for, in order."""
    asked: list[Tile] = []
    while batch := search.ask():
        asked += batch
        search.tell({tile: score(tile) for tile in batch})
    return asked


def bowl(tile: Tile) -> float:
    """One optimum, at a=7, b=3, c=5; the library is slow."""
    if tile.algorithm == "lib":
        return 0.5
    return 10.0 / (1 + abs(tile.a - 7) + abs(tile.b - 3) + abs(tile.c - 5))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("batch", [1, 6])
def test_every_candidate_is_tried_once_and_no_other(name: str, batch: int) -> None:
    asked = drain(strategy(name, batch=batch), bowl)
    assert len(asked) == len(set(asked))
    assert set(asked) == set(CANDIDATES) - {START}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_seed_and_answers_give_the_same_tiles(name: str) -> None:
    assert drain(strategy(name, 3), bowl) == drain(strategy(name, 3), bowl)


@pytest.mark.parametrize("name", ["local", "random"])
def test_another_seed_gives_another_order(name: str) -> None:
    assert drain(strategy(name, 1), bowl) != drain(strategy(name, 2), bowl)


def test_exhaustive_keeps_the_order_of_the_space() -> None:
    assert drain(strategy("exhaustive"), bowl) == [t for t in CANDIDATES if t != START]


@pytest.mark.parametrize("seed", range(8))
def test_local_search_finds_the_top_of_a_hill_in_a_tenth_of_the_space(seed: int) -> None:
    asked = drain(strategy("local", seed), bowl)
    top = Tile.of("grid", a=7, b=3, c=5)
    assert asked.index(top) < len(CANDIDATES) / 10


def test_local_search_begins_with_one_tile_of_each_other_algorithm() -> None:
    first = strategy("local").ask()
    assert [tile.algorithm for tile in first] == ["lib"]


def test_local_search_is_done_when_restarts_find_nothing_better() -> None:
    asked = drain(strategy("local", patience=4), bowl)
    top = Tile.of("grid", a=7, b=3, c=5)
    assert top in asked
    assert len(asked) < len(CANDIDATES) / 3
    assert len(drain(strategy("local", patience=1), bowl)) < len(asked)


def test_local_search_does_not_give_up_while_nothing_was_right() -> None:
    asked = drain(strategy("local", incumbent=None, patience=2), lambda tile: None)
    assert set(asked) == set(CANDIDATES)


def test_local_search_leaves_a_top_that_is_not_the_best() -> None:
    """Two hills: from the start one climbs the lower; restarts find the other."""

    def hills(tile: Tile) -> float:
        if tile.algorithm == "lib":
            return 0.1
        low = 5.0 / (1 + tile.a + tile.b + tile.c)
        high = 9.0 / (1 + 2 * (9 - tile.a + abs(7 - tile.b) + 9 - tile.c))
        return max(low, high)

    asked = drain(strategy("local", 4), hills)
    assert asked.index(Tile.of("grid", a=9, b=7, c=9)) < len(CANDIDATES) / 2


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), float("-inf")])
def test_a_tile_without_a_finite_score_is_never_climbed_to(bad: float | None) -> None:
    """NaN once counted as a wildcard, and an infinite time once won."""
    at = Tile.of("grid", a=5, b=5, c=5)
    search = strategy("local", batch=3, incumbent=at)
    search.tell(dict.fromkeys(search.ask(), 0.5))  # the library
    first = search.ask()
    search.tell(dict.fromkeys(first, bad))
    near = neighbours(at, WIDE, set(CANDIDATES))
    assert set(first) | set(search.ask()) == set(near)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_search_in_which_all_are_rejected_ends(name: str) -> None:
    asked = drain(strategy(name, incumbent=None), lambda tile: None)
    assert set(asked) == set(CANDIDATES)


def test_neighbours_differ_in_one_field_by_one_step_and_are_legal() -> None:
    legal = set(CANDIDATES)
    at = Tile.of("grid", a=9, b=7, c=0)
    assert set(neighbours(at, WIDE, legal)) == {
        Tile.of("grid", a=8, b=7, c=0),
        Tile.of("grid", a=9, b=6, c=0),
        Tile.of("grid", a=9, b=7, c=1),
    }


def test_neighbours_step_over_values_that_are_not_legal() -> None:
    legal = {loop(16), loop(128), loop(128, 4)}
    assert neighbours(loop(16), SPACE, legal) == [loop(128)]
    assert set(neighbours(loop(128), SPACE, legal)) == {loop(16), loop(128, 4)}
    assert neighbours(FLAT, SPACE, legal) == []


def test_an_unknown_strategy_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnsupportedError, match="strategy is 'bayes'; use one of local, random"):
        strategy("bayes")
