"""An op whose tiles sleep for as long as they say: real time, of which a busy machine adds little.

Loaded by the workers of a real Ray cluster in `test_fleet_ray`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from toy_op import Machine, right

from tilewright.ops.contract import Inputs, OpSpec
from tilewright.ops.space import TileSpace
from tilewright.tiles.tile import Tile


def nap(ms: int, turns: int = 1) -> Tile:
    return Tile.of("nap", ms=ms, turns=turns)


SPACE = TileSpace(
    "toy/cpu", {"nap": {"ms": (2, 4, 6, 8), "turns": (1, 2)}}, (), lambda problem: nap(8)
)


def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    y = right(inputs)
    chosen = nap(8) if tile is None else tile
    for _ in range(chosen.turns):
        time.sleep(chosen.ms / 1e3 / chosen.turns)
    return y


SPEC: OpSpec = Machine().spec(SPACE).with_run(run)
