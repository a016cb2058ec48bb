"""Tile spaces: which tiles an op may be launched with, and why the others may not.

A space names its fields and their values, states its rules as code, and gives a default for every
problem. Tuner, lookup and op call the same `check`, so a tile that breaks a rule can neither be
proposed, nor loaded from a table, nor launched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.errors import TileError
from tilewright.tiles.tile import Problem, Tile

if TYPE_CHECKING:
    from tilewright.ops.contract import Case

__all__ = ["Planted", "Rule", "TileSpace"]


@dataclass(frozen=True)
class Rule:
    """One condition on a tile.

    Attributes:
        name: short and stable; reports group rejections by it.
        why: one sentence for a newcomer.
        holds: (tile, problem) -> whether the tile obeys.
    """

    name: str
    why: str
    holds: Callable[[Tile, Problem], bool]


@dataclass(frozen=True)
class Planted:
    """A wrong tile that would win if nothing but time were looked at: the gate must reject it.

    It lies outside the space: `candidates` does not propose it, `check` refuses it, and the op
    cannot be launched with it. Only the gate and tests run it, through `run`.

    Attributes:
        tile: a tile of the space with one field more, `planted`, that names the fault.
        fault: what it does wrong, in one sentence.
        why_faster: why a tuner that measures only time would take it.
        caught_by: the one check of the gate that catches it: without that check it passes.
        run: as `OpSpec.run`.
        cases: products on which it measures as well as or better than the right tile.
    """

    tile: Tile
    fault: str
    why_faster: str
    caught_by: str
    run: Callable[..., Any]
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        """The name of the fault, such as "partial-rows"."""
        return str(self.tile.planted)

    @property
    def honest(self) -> Tile:
        """The tile that it pretends to be, which may break a rule."""
        return Tile.from_mapping({k: v for k, v in self.tile if k != "planted"})


@dataclass(frozen=True)
class TileSpace:
    """The tiles of one op on one backend.

    Attributes:
        name: such as "mmq/cpu".
        fields: per algorithm, the values each of its fields may take.
        rules: every tile must obey every rule.
        default: the tile a problem gets when no table names one.
        extents: how much of M, N and K one piece of a tile covers, by dimension; the gate looks
            for faults around these numbers. None takes every number of the tile for one.
        planted: wrong tiles, one at least for each kind of fault that the kernels could have.
    """

    name: str
    fields: Mapping[str, Mapping[str, tuple[Any, ...]]]
    rules: tuple[Rule, ...]
    default: Callable[[Problem], Tile]
    extents: Callable[[Tile], Mapping[str, tuple[int, ...]]] | None = None
    planted: tuple[Planted, ...] = ()

    def check(self, tile: Tile, problem: Problem) -> None:
        """Raise TileError, naming field or rule, if `tile` may not run `problem`."""
        values = tile.as_dict()
        algorithm = values.pop("algorithm")
        fields = self.fields.get(algorithm)
        if fields is None:
            raise TileError(
                f"tile {tile}: algorithm {algorithm!r} is not in {self.name}; "
                f"use one of {', '.join(self.fields)}"
            )
        if set(values) != set(fields):
            raise TileError(
                f"tile {tile}: {self.name} {algorithm} has the fields {sorted(fields)}, "
                f"not {sorted(values)}"
            )
        for name, value in values.items():
            if value not in fields[name]:
                raise TileError(f"tile {tile}: {name}={value!r} is none of {fields[name]}")
        for rule in self.rules:
            if not rule.holds(tile, problem):
                raise TileError(f"tile {tile} breaks rule {rule.name!r}: {rule.why}")

    def broken_rule(self, tile: Tile, problem: Problem) -> Rule | None:
        """The first rule that `tile` breaks for `problem`, or None."""
        return next((r for r in self.rules if not r.holds(tile, problem)), None)

    def is_legal(self, tile: Tile, problem: Problem) -> bool:
        """Whether `check` lets `tile` run `problem`."""
        try:
            self.check(tile, problem)
        except TileError:
            return False
        return True

    def every(self) -> Iterator[Tile]:
        """Every combination of field values, legal or not."""
        for algorithm, fields in self.fields.items():
            names = list(fields)
            for values in itertools.product(*(fields[n] for n in names)):
                yield Tile.of(algorithm, **dict(zip(names, values, strict=True)))

    def candidates(self, problem: Problem) -> list[Tile]:
        """Every tile that obeys the rules for `problem`."""
        return [t for t in self.every() if self.broken_rule(t, problem) is None]
