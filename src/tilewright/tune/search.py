"""Which candidate to try next: exhaustive, random, and a local search without a model.

A strategy hands out batches of tiles (`ask`) and is told what came of them (`tell`): a score, the
incumbent's time over the tile's, or None for a tile that was rejected or not timed. It never
proposes a tile twice, and given the same seed and the same answers it proposes the same tiles,
which is what lets an interrupted run continue from its log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tilewright.errors import UnsupportedError
from tilewright.ops.space import TileSpace
from tilewright.tiles.tile import Tile

__all__ = ["STRATEGIES", "Exhaustive", "Local", "Random", "Strategy", "make_strategy", "neighbours"]

Scores = Mapping[Tile, float | None]


class Strategy(Protocol):
    """What the tuner asks of a search."""

    def ask(self) -> list[Tile]:
        """The next tiles to try together; empty when there is nothing left to try."""
        ...

    def tell(self, scores: Scores) -> None:
        """What came of the tiles of the last batch."""
        ...


class _Listed:
    """Tiles of a list in its order, `batch` at a time."""

    def __init__(self, tiles: Sequence[Tile], batch: int) -> None:
        self._left = list(tiles)
        self._batch = batch

    def ask(self) -> list[Tile]:
        asked, self._left = self._left[: self._batch], self._left[self._batch :]
        return asked

    def tell(self, scores: Scores) -> None:
        pass


class Exhaustive(_Listed):
    """Every candidate, in the order of the space."""


class Random(_Listed):
    """Every candidate in random order, so that a part of them is a fair sample of the space."""

    def __init__(self, tiles: Sequence[Tile], batch: int, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(tiles))
        super().__init__([tiles[i] for i in order], batch)


class Local:
    """Greedy climbing over neighbours that differ in one field, with random restarts.

    It begins with one random tile of each algorithm and climbs from the best of these and the
    incumbent: a batch of untried neighbours at a time, moving to the best of them as soon as it
    beats the present tile. At a top it restarts from a random tile that was not tried. When
    `patience` restarts in a row have led to nothing better, it is done, and leaves the time that is
    left to other problems.

    Args:
        tiles: the candidates.
        space: their space; its order of field values says which values are next to each other.
        incumbent: the tile in use, whose score is 1; None if there is none.
        batch: tiles in a batch, at least 1.
        seed: draws starts and the order of neighbours.
        patience: restarts in vain before it is done.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        space: TileSpace,
        incumbent: Tile | None,
        batch: int,
        seed: int,
        patience: float = 4,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._space = space
        self._batch = batch
        self._legal = set(tiles)
        self._untried = dict.fromkeys(tiles[i] for i in self._rng.permutation(len(tiles)))
        self._score: dict[Tile, float] = {}
        if incumbent is not None:
            self._score[incumbent] = 1.0
        self._at: Tile | None = incumbent
        self._started = False
        self._restarting = False
        self._patience = patience
        self._in_vain = 0

    def ask(self) -> list[Tile]:
        if not self._started:
            self._started = True
            starts = self._one_of_each_algorithm()
            if starts:
                return self._take(starts)
        if self._at is not None:
            near = neighbours(self._at, self._space, self._legal)
            fresh = [near[i] for i in self._rng.permutation(len(near)) if near[i] in self._untried]
            if fresh:
                return self._take(fresh[: self._batch])
        if self._in_vain >= self._patience and self._score:
            return []
        self._in_vain += 1
        self._restarting = True
        return self._take(list(self._untried)[:1])

    def tell(self, scores: Scores) -> None:
        good = {tile: s for tile, s in scores.items() if s is not None and math.isfinite(s)}
        best = max(good, key=lambda tile: good[tile], default=None)
        if best is not None and good[best] > max(self._score.values(), default=-math.inf):
            self._in_vain = 0
        self._score.update(good)
        if self._restarting:
            self._restarting = False
            self._at = best
        elif best is not None and (
            self._at is None or good[best] > self._score.get(self._at, -math.inf)
        ):
            self._at = best

    def _one_of_each_algorithm(self) -> list[Tile]:
        found: dict[Any, Tile] = {}
        if self._at is not None:
            found[self._at.algorithm] = self._at
        for tile in self._untried:
            found.setdefault(tile.algorithm, tile)
        return [tile for tile in found.values() if tile in self._untried]

    def _take(self, tiles: list[Tile]) -> list[Tile]:
        for tile in tiles:
            del self._untried[tile]
        return tiles


def neighbours(tile: Tile, space: TileSpace, legal: set[Tile]) -> list[Tile]:
    """Legal tiles that differ from `tile` in one field, by the least step up or down in its values.

    Values that give no legal tile are stepped over.
    """
    values = space.fields.get(tile.algorithm, {})
    found = []
    for name, allowed in values.items():
        at = allowed.index(getattr(tile, name)) if getattr(tile, name) in allowed else None
        if at is None:
            continue
        for path in (allowed[at + 1 :], allowed[:at][::-1]):
            for value in path:
                moved = tile.replace(**{name: value})
                if moved in legal:
                    found.append(moved)
                    break
    return found


Maker = Callable[[Sequence[Tile], TileSpace, Tile | None, int, int], Strategy]

STRATEGIES: Mapping[str, Maker] = {
    "local": Local,
    "random": lambda tiles, space, incumbent, batch, seed: Random(tiles, batch, seed),
    "exhaustive": lambda tiles, space, incumbent, batch, seed: Exhaustive(tiles, batch),
}
"""Strategies by the name `tune --strategy` gives them."""


def make_strategy(
    name: str,
    tiles: Sequence[Tile],
    *,
    space: TileSpace,
    incumbent: Tile | None,
    batch: int,
    seed: int,
) -> Strategy:
    """The strategy of this name over `tiles`, which do not hold the incumbent.

    Raises:
        UnsupportedError: there is none of this name.
    """
    if name not in STRATEGIES:
        raise UnsupportedError(f"strategy is {name!r}; use one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](tiles, space, incumbent, batch, seed)
