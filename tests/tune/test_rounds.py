"""The bench of one problem: what it keeps while it times many tiles."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tilewright.ops.contract import Inputs
from tilewright.tiles.tile import Tile
from tilewright.tune.rounds import Bench, Timing
from tune.toy_op import Machine, loop, problem

HOT = Timing(cache="hot", sample_us=500.0, blocks=6)


def test_outputs_of_earlier_batches_are_let_go() -> None:
    """A large product's outputs, one of every tile of a search, would fill the memory."""
    made: list[tuple[Tile, weakref.ref[torch.Tensor]]] = []
    machine = Machine()
    spec = machine.spec()

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        y = machine.run(inputs, tile, threads)
        made.append((tile, weakref.ref(y)))
        return y

    bench = Bench(spec.with_run(run), problem(), HOT, clock=machine.clock)
    tiles = [loop(k, u) for k in (32, 64, 128) for u in (1, 2)]
    incumbent = loop(16, 1)
    for tile in tiles:
        bench.run(incumbent, [tile], rounds=2)
        assert {of for of, y in made if y() is not None} == {incumbent, tile}
    bench.finals(incumbent, tiles[:2])
    assert {of for of, y in made if y() is not None} == {incumbent, *tiles[:2]}
    assert bench.faults == {}
