"""Tuning a toy op on a clock that moves only when a tile runs, and where its table lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.ops.choose import running_of
from tilewright.ops.space import TileSpace
from tilewright.tiles.table import forget, lookup
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.outcome import Outcome
from tilewright.tune.result import TuneReport
from tilewright.tune.rounds import Timing
from tilewright.tune.tuner import Settings, tune
from tune.toy_op import ARCH, FLAT, SPACE, Machine, ScriptedGate, loop, problem

DEFAULT = loop(16, 1)
BEST = loop(64, 2)
COSTS = {DEFAULT: 100.0, BEST: 60.0, loop(64, 4): 70.0, loop(128, 2): 80.0, FLAT: 180.0}
HOT = Settings(timing=Timing(cache="hot"))


def a_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fixture's body: the table that `go` writes and lookups read, in an empty folder."""
    monkeypatch.setenv("TILEWRIGHT_TILES", str(folder))
    forget()
    yield folder / f"{ARCH}.toy.json"
    forget()


def cost(tile: Tile) -> float:
    return COSTS.get(tile, 120.0)


def go(
    machine: Machine | None = None,
    gate: ScriptedGate | None = None,
    problems: Any = None,
    space: TileSpace = SPACE,
    **options: Any,
) -> TuneReport:
    machine = machine or Machine(cost)
    return tune(
        problems or [problem()],
        specs={"toy": machine.spec(space)},
        gate=gate or ScriptedGate(machine),
        clock=machine.clock,
        **{"settings": HOT, "budget_s": 60.0, **options},
    )


def chosen(at: Problem | None = None, space: TileSpace = SPACE) -> Any:
    """What an op gets now."""
    return lookup(
        at or problem(), space, units=torch.get_num_threads(),
        running=running_of(Machine().spec()),
    )  # fmt: skip


def rejecting(*tiles: Tile, kind: str = "oracle") -> dict[Tile, Outcome]:
    return {tile: Outcome(False, kind, f"{kind} says no", "toy-case") for tile in tiles}
