"""What the parts of a tuning run know of each other: targets, settings, progress, the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilewright.measure import Block, Clock, Comparison
from tilewright.ops.contract import OpSpec
from tilewright.ops.space import TileSpace
from tilewright.tiles.table import TableRow
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.outcome import Gatekeeper
from tilewright.tune.rounds import Timing

__all__ = ["Host", "Log", "Progress", "Settings", "Stopwatch", "Target", "leaves_threads"]


def leaves_threads(tile: Tile) -> bool:
    """Whether a tile leaves the number of threads to the caller, whose it is."""
    return tile.as_dict().get("threads", 0) == 0


@dataclass(frozen=True)
class Target:
    """A problem to tune.

    Attributes:
        problem: any M; it is bucketed.
        share: of the time, in any unit; larger ones come first and get more of the budget.
        name: where the product occurs.
        tiles: candidates, in the order in which an exhaustive search tries them; those that break
            a rule for the problem are left out. Empty for all of the space.
    """

    problem: Problem
    share: float = 1.0
    name: str = ""
    tiles: tuple[Tile, ...] = ()

    def candidates(self, space: TileSpace, allow: Callable[[Tile], bool]) -> list[Tile]:
        """The tiles to try: legal, and allowed."""
        if not self.tiles:
            return [tile for tile in space.candidates(self.problem) if allow(tile)]
        return [
            tile for tile in dict.fromkeys(self.tiles)
            if allow(tile) and space.is_legal(tile, self.problem)
        ]  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What seldom needs changing.

    Attributes:
        batch: candidates that are verified and timed together.
        finalists: how many of the best are measured again.
        least_slice_s: a problem is not begun with less of the budget than this, and no problem
            gets a smaller part while there is more.
        timing: how samples are taken.
        allow: candidates for which it is False are not tried.
        planted: verify each op's planted wrong tiles before anything is timed.
        keep_rows: write a row for the tile in use too, where none was faster for certain: a table
            to ship then says all that was measured. Else only where a row nearby would hide it.
    """

    batch: int = 6
    finalists: int = 3
    least_slice_s: float = 5.0
    timing: Timing = Timing()
    allow: Callable[[Tile], bool] = leaves_threads
    planted: bool = True
    keep_rows: bool = False


@dataclass
class Progress:
    """Where a run stands; handed to `on_event` after every event.

    Attributes:
        kind: of the event, as in `tilewright.tune.record`.
        index, problems: the present problem, from 1, and how many there are.
        problem: the present one.
        tried, rejected: candidates so far, all problems together.
        best: score of the present problem's best candidate, above 1 if faster; None so far.
        best_tile: that candidate.
        seconds_left: of the budget.
        text: what is being done.
    """

    kind: str = ""
    index: int = 0
    problems: int = 0
    problem: Problem | None = None
    tried: int = 0
    rejected: int = 0
    best: float | None = None
    best_tile: Tile | None = None
    seconds_left: float = 0.0
    text: str = ""


class Log(Protocol):
    """What a problem asks of the log; `tilewright.tune.record.Record` is one."""

    def add(
        self, kind: str, problem: Problem | None = None, tile: Tile | None = None, **data: Any
    ) -> None:
        """Write one event."""
        ...


class Stopwatch(Protocol):
    """What times the tiles of one problem: `tilewright.tune.rounds.Bench`, whose methods these
    are, or a worker of a fleet."""

    cold: bool
    faults: dict[Tile, tuple[str, str]]

    def run(
        self, incumbent: Tile, tiles: Sequence[Tile], rounds: int
    ) -> tuple[list[Block], bool]: ...

    def finals(self, incumbent: Tile, finalists: Sequence[Tile]) -> dict[Tile, Comparison]: ...

    def finals_us(self, finalists: int) -> float: ...


class Host(Protocol):
    """What a problem asks of the run that it belongs to.

    Attributes:
        stopping: Ctrl-C was pressed: nothing new is begun.
    """

    specs: Mapping[str, OpSpec]
    strategy: str
    seed: int
    units: int
    settings: Settings
    clock: Clock
    gate: Gatekeeper
    progress: Progress
    stopping: bool

    @property
    def record(self) -> Log: ...

    def tell(self, kind: str, text: str = "") -> None:
        """Report progress."""
        ...

    def put(self, row: TableRow) -> None:
        """Put a row that the log holds into the table."""
        ...
