"""An op whose tiles misbehave in each of the ways that a candidate may; loaded by the worker."""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import Any

import numpy as np
import torch
from toy_op import Machine, right

from tilewright.ops.contract import Inputs, OpSpec
from tilewright.ops.space import TileSpace
from tilewright.tiles.tile import Tile

KINDS = (
    "fine", "crash", "exit", "hang", "memory", "touch", "raise", "compile", "wrong", "print",
    "slow", "fault",
)  # fmt: skip
FAULTS: list[str] = []  # once a GPU has met one, every later launch of the process reports it


def tile(does: str) -> Tile:
    return Tile.of("wild", does=does)


SPACE = TileSpace("toy/cpu", {"wild": {"does": KINDS}}, (), lambda problem: tile("fine"))


def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    does = "fine" if tile is None else tile.does
    y = right(inputs)
    if does == "fault":
        FAULTS.append("CUDA error: an illegal memory access was encountered")
    if FAULTS:
        raise RuntimeError(FAULTS[0])
    if does == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif does == "exit":
        os._exit(7)
    elif does == "hang":
        while True:
            pass
    elif does == "memory":
        np.ones(1 << 30)
    elif does == "touch":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        held = []
        for _ in range(100):
            held.append(np.ones(1 << 24))
            time.sleep(0.03)
    elif does == "raise":
        raise ZeroDivisionError("by a tile")
    elif does == "compile":
        _miscompile()
    elif does == "wrong":
        y[-1, -1] += 1.0
    elif does == "print":
        print("a kernel that talks", flush=True)
        os.write(1, b"even like this\n")
    elif does == "slow":
        time.sleep(0.2)
    return y


def _miscompile() -> None:
    import numba

    @numba.njit
    def add(a: Any, b: Any) -> Any:
        return a + b

    add(1, "one")


SPEC: OpSpec = Machine().spec(SPACE).with_run(run)
