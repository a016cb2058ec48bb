"""An op whose tiles sleep for as long as they say: real time, of which a busy machine adds little.

Loaded by the command and the workers of a real Ray cluster in `test_fleet_ray`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from toy_op import Machine, right

from tilewright.ops.contract import Case, Inputs, OpSpec
from tilewright.ops.space import Planted, TileSpace
from tilewright.tiles.tile import Tile

CASES = (Case("nap", "dense", "float32", 3, 5, 128), Case("nap", "dense", "float32", 16, 16, 128))


def nap(ms: int, turns: int = 1) -> Tile:
    return Tile.of("nap", ms=ms, turns=turns)


def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    y = right(inputs)
    chosen = nap(4) if tile is None else tile
    for _ in range(chosen.turns):
        time.sleep(chosen.ms / 1e3 / chosen.turns)
    return y


def forgets_a_row(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    y = right(inputs)
    y[-1] = 0.0
    return y


SPACE = TileSpace(
    "nap/cpu",
    {"nap": {"ms": (1, 2, 3, 4), "turns": (1, 2)}},
    (),
    lambda problem: nap(4),
    planted=(
        Planted(
            tile=Tile.of("nap", ms=1, turns=1, planted="last-row"),
            fault="leaves the last row zero",
            why_faster="it does not sleep",
            caught_by="oracle",
            run=forgets_a_row,
            cases=CASES[:1],
        ),
    ),
)
SPEC: OpSpec = replace(Machine().spec(SPACE), name="nap", title="Nap", cases=CASES, run=run)
