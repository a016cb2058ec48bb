"""An op whose tiles take the times they are told to, on a clock that moves only when they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tilewright.device import cpu_device
from tilewright.measure import ReplayClock
from tilewright.ops.check import ErrorModel
from tilewright.ops.contract import Case, Inputs, OpSpec, rng_for
from tilewright.ops.space import Rule, TileSpace
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.outcome import Outcome, PlantedOutcome

ARCH = cpu_device().arch
K_DIVIDES = Rule(
    "tile_k divides K",
    "a tile that does not divide K drops the tail",
    lambda tile, problem: problem.K % tile.tile_k == 0,
)
SPACE = TileSpace(
    name="toy/cpu",
    fields={
        "loop": {"tile_k": (16, 32, 64, 128), "unroll": (1, 2, 4)},
        "flat": {"tile_k": (16,), "unroll": (1,)},
    },
    rules=(K_DIVIDES,),
    default=lambda problem: loop(16, 1),
)


def loop(tile_k: int = 32, unroll: int = 1) -> Tile:
    return Tile.of("loop", tile_k=tile_k, unroll=unroll)


FLAT = Tile.of("flat", tile_k=16, unroll=1)


def problem(**changed: Any) -> Problem:
    plain = Problem("toy", ARCH, "float32", "dense", "float", 16, 8, 128, 0)
    return replace(plain, **changed)


def make_inputs(case: Case, seed: int) -> Inputs:
    rng = rng_for(seed, case.id)
    weight = rng.standard_normal((case.N, case.K))
    x = torch.from_numpy(rng.standard_normal((case.M, case.K)).astype(np.float32))
    return Inputs(case, x, weight, torch.from_numpy(weight.astype(np.float32)))


def reference(inputs: Inputs) -> Any:
    return inputs.x64() @ np.asarray(inputs.source).T


def error_model(inputs: Inputs, ref: Any) -> ErrorModel:
    return ErrorModel(np.full(ref.shape, 1e-5), torch.float32)


def right(inputs: Inputs) -> torch.Tensor:
    y = inputs.x.numpy().astype(np.float64) @ np.asarray(inputs.source).T
    return torch.from_numpy(y.astype(np.float32))


@dataclass
class Machine:
    """What the tiles cost, and how the clock moves.

    Attributes:
        cost: tile -> microseconds a launch; the default takes 100.
        noise: relative standard deviation of each launch.
        wrong: tiles whose output is wrong.
        runs: launches so far, by tile.
    """

    cost: Callable[[Tile], float] = lambda tile: 100.0
    noise: float = 0.002
    wrong: Callable[[Tile], bool] = lambda tile: False
    seed: int = 0
    clock: ReplayClock = field(default_factory=ReplayClock)
    runs: dict[Tile, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def run(self, inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        self.runs[tile] = self.runs.get(tile, 0) + 1
        self.clock.advance(self.cost(tile) * float(np.exp(self._rng.normal(0.0, self.noise))))
        y = right(inputs)
        if self.wrong(tile):
            y[-1] = 0.0
        return y

    def spec(self, space: TileSpace = SPACE) -> OpSpec:
        return OpSpec(
            name="toy", title="Toy", version=1, weight_types=("dense",),
            cases=(Case("toy", "dense", "float32", 3, 5, 128),),
            make_inputs=make_inputs, reference=reference, error_model=error_model, run=self.run,
            flops=lambda p: 2.0 * p.M * p.N * p.K, bytes=lambda p: 4.0 * p.N * p.K,
            corruptions={}, space=lambda: space,
        )  # fmt: skip


@dataclass
class ScriptedGate:
    """Says what it is told to, and takes `seconds` of the machine's clock for it."""

    machine: Machine
    verdicts: Mapping[Tile, Outcome] = field(default_factory=dict)
    seconds: float = 0.01
    wrong_on_purpose: list[PlantedOutcome] = field(default_factory=list)
    asked: list[tuple[Problem, Tile]] = field(default_factory=list)
    on_check: Callable[[Tile], Any] = lambda tile: None

    def prepare(self, problem: Problem) -> None:
        pass

    def check(self, problem: Problem, tile: Tile) -> Outcome:
        self.asked.append((problem, tile))
        self.machine.clock.advance(self.seconds * 1e6)
        self.on_check(tile)
        return self.verdicts.get(tile, Outcome(True, oracle_error=0.25))

    def planted(self, problem: Problem) -> list[PlantedOutcome]:
        return self.wrong_on_purpose

    def close(self) -> None:
        pass
