"""Timing tiles of one problem in this process: rounds of the search, and the finals.

Every round visits the incumbent and each tile of a batch once, in random position-balanced order,
so that drift falls on all alike and a tile is judged by the ratio to the incumbent's time of the
same round. Finals are a paired comparison on fresh data (`tilewright.measure.compare`), after
which the very outputs that were timed are held to the oracle again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tilewright.errors import MeasureError
from tilewright.measure import (
    Block,
    Clock,
    Comparison,
    CpuClock,
    CpuFlusher,
    EventClock,
    GpuFlusher,
)
from tilewright.measure.compare import compare_many
from tilewright.measure.sample import SamplePlan, plan_samples, run_blocks
from tilewright.measure.state import StateProbe
from tilewright.ops.contract import Inputs, OpSpec
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.gate import GateResult, recheck, watch
from tilewright.tune.gate_memory import Snapshot
from tilewright.tune.outcome import problem_case

__all__ = ["COLD_ROWS", "Bench", "LaunchFailed", "Timing", "state_probe"]

MORE_BLOCKS = 4
_LEAST_READINGS = 3  # whose median one interruption cannot move
_LONG_US = 50_000.0  # a launch that is long enough by itself
_SETUP_US = 400_000.0  # of finals: warming up, and the check after them

COLD_ROWS = 8
"""Up to this many rows a product is timed with cold caches: in decode, weights come from memory."""


class LaunchFailed(Exception):
    """A tile that had passed the gate raised while it was timed."""

    def __init__(self, tile: Tile, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.tile = tile


@dataclass(frozen=True)
class Timing:
    """How samples are taken.

    Attributes:
        rounds: rounds of a batch in the search.
        blocks: least blocks of the finals; up to `MORE_BLOCKS` times as many where there is time.
        sample_us: time that a sample fills with hot caches; it takes 3 readings at least.
        cut: a tile that is this many times slower than the incumbent is not sampled again.
        cache: "hot", "cold", or "auto" for cold up to `COLD_ROWS` rows.
        delta: relative difference below which two tiles count as the same.
    """

    rounds: int = 3
    blocks: int = 20
    sample_us: float = 5_000.0
    cut: float = 2.0
    cache: str = "auto"
    delta: float = 0.005

    def cold(self, problem: Problem) -> bool:
        return self.cache == "cold" or (self.cache == "auto" and problem.M <= COLD_ROWS)


class Bench:
    """The operands of one problem and the tiles that run on them.

    Args:
        spec: the op.
        problem: M is a bucket.
        timing: how.
        seed: draws the operands and the orders.
        clock: None is the CPU's.
        flush: empties the caches; None makes one for the clock's device when it is needed.
        ends_us: reading of the clock at which the finals should have ended; None takes the least
            number of blocks.
    """

    def __init__(
        self,
        spec: OpSpec,
        problem: Problem,
        timing: Timing,
        *,
        seed: int = 0,
        clock: Clock | None = None,
        flush: Callable[[], Any] | None = None,
        ends_us: float | None = None,
    ) -> None:
        self._spec = spec
        self._ends_us = ends_us
        self._timing = timing
        self._seed = seed
        self._clock: Clock = CpuClock() if clock is None else clock
        self._rng = np.random.default_rng(seed)
        self.cold = timing.cold(problem)
        self._flush = (flush or _flusher(self._clock)) if self.cold else None
        self._inputs = watch(spec.make_inputs(problem_case(problem, spec), seed))
        self._pristine = Snapshot(self._inputs)
        self._outputs: dict[Tile, Any] = {}
        self._judge = _remembering(spec)
        self._sample_cost_us = 0.0  # with flushes and whatever else a sample takes
        self.faults: dict[Tile, tuple[str, str]] = {}

    def run(self, incumbent: Tile, tiles: Sequence[Tile], rounds: int) -> tuple[list[Block], bool]:
        """Sample the incumbent and each tile once a round.

        Tiles that turn out `cut` times slower than the incumbent are left out after the first.

        Returns:
            (blocks with tile texts as names, whether Ctrl-C ended them early).

        Raises:
            LaunchFailed: a tile raised.
        """
        self._outputs.clear()  # of other batches: all together they can be larger than memory
        launches = {tile: self._launch(tile) for tile in (incumbent, *tiles)}
        plan = self._plan(launches)
        arms = {str(tile): launch for tile, launch in launches.items()}
        name = str(incumbent)
        began_us = self._clock.now_us()
        done: list[Block] = []
        for first in (True, False):
            count = 1 if first else rounds - 1
            if not count or (not first and len(arms) == 1 and tiles):
                break
            blocks, interrupted = run_blocks(
                arms, count, self._clock, plan, rng=self._rng, flush=self._flush
            )
            done += blocks
            if interrupted:
                return done, True
            if first:
                limit = self._timing.cut * blocks[0].us[name]
                arms = {k: run for k, run in arms.items() if k == name or blocks[0].us[k] <= limit}
        samples = sum(len(block.us) for block in done)
        self._sample_cost_us = (self._clock.now_us() - began_us) / samples
        return done, False

    def finals(self, incumbent: Tile, finalists: Sequence[Tile]) -> dict[Tile, Comparison]:
        """Fresh paired comparisons of finalists with the incumbent, Holm over the family.

        The number of blocks is settled before the first: as many as end by `ends_us`.

        Where an output that was timed is wrong, every comparison is VOID, and `faults` says whose
        it was: by tile, the check that does not hold and the reason.

        Raises:
            LaunchFailed: a tile raised.
            KeyboardInterrupt: before the first block was finished.
        """
        self._pristine.restore()  # whatever a tile of the search has done to them
        self._outputs.clear()
        launches = {tile: self._launch(tile) for tile in (incumbent, *finalists)}
        plan = self._plan(launches)

        def post_check() -> str | None:
            self.faults = self._faults((incumbent, *finalists))
            return "; ".join(f"{tile}: {why}" for tile, (_, why) in self.faults.items()) or None

        found = compare_many(
            launches[incumbent],
            {str(tile): launches[tile] for tile in finalists},
            baseline_name=str(incumbent),
            blocks=self._blocks(len(finalists)),
            cold=self.cold,
            clock=self._clock,
            seed=self._seed,
            delta=self._timing.delta,
            plan=plan,
            warm_up_us=200_000.0,
            flush=self._flush,
            probe=state_probe(self._clock),
            post_check=post_check,
        )
        return {tile: found[str(tile)] for tile in finalists}

    def finals_us(self, finalists: int) -> float:
        """About how long the least finals will take, in microseconds."""
        return self._timing.blocks * self._block_us(finalists) + _SETUP_US

    def _blocks(self, finalists: int) -> int:
        if self._ends_us is None:
            return self._timing.blocks
        left_us = self._ends_us - self._clock.now_us() - _SETUP_US
        room = left_us / max(self._block_us(finalists), 1.0)
        return int(min(MORE_BLOCKS * self._timing.blocks, max(self._timing.blocks, room)))

    def _block_us(self, finalists: int) -> float:
        return (finalists + 2) * max(self._timing.sample_us, self._sample_cost_us)

    def _faults(self, tiles: Sequence[Tile]) -> dict[Tile, tuple[str, str]]:
        """Tiles whose last timed output is wrong, or that changed the operands: check, reason."""
        found = {tile: self._recheck(tile) for tile in tiles}
        if any(result.check == "inputs" for result in found.values()):
            # All of them ran on what one of them had changed: each shows once more, by itself.
            for tile in tiles:
                try:
                    self._outputs[tile] = self._spec.run(self._inputs, tile=tile)
                except Exception as error:
                    raise LaunchFailed(tile, error) from error
                found[tile] = self._recheck(tile)
        return {
            tile: (str(result.check), result.reason)
            for tile, result in found.items()
            if not result.passed
        }

    def _recheck(self, tile: Tile) -> GateResult:
        return recheck(self._judge, self._inputs, self._outputs[tile], tile=tile)

    def _launch(self, tile: Tile) -> Callable[[], None]:
        run, inputs, outputs = self._spec.run, self._inputs, self._outputs

        def launch() -> None:
            try:
                outputs[tile] = run(inputs, tile=tile)
            except Exception as error:
                raise LaunchFailed(tile, error) from error

        return launch

    def _plan(self, arms: Mapping[Tile, Callable[[], None]]) -> SamplePlan:
        """The one plan that all arms share.

        Raises:
            LaunchFailed: a tile raised, or cannot be timed by this clock.
        """
        sample_us = 1.0 if self.cold else self._timing.sample_us
        plans, took = [], []
        for tile, launch in arms.items():
            launch()  # loads what the gate has compiled
            took.append(self._clock.time_us(launch, 1))
            try:
                plans.append(
                    plan_samples(
                        {str(tile): launch}, self._clock, flush=self._flush, sample_us=sample_us
                    )
                )
            except MeasureError as error:
                raise LaunchFailed(tile, error) from error
        if self.cold:
            return SamplePlan(max(p.launches for p in plans), _LEAST_READINGS)
        least = 1 if any(us > _LONG_US for us in took) else _LEAST_READINGS
        readings = max(least, min(p.readings for p in plans))
        return SamplePlan(max(p.launches for p in plans), readings)


def state_probe(clock: Clock) -> StateProbe | None:
    """What watches the machine under this clock; nothing under a replayed one."""
    if clock.name == "replay":
        return None
    return StateProbe(gpu=clock.device_id if isinstance(clock, EventClock) else None)


def _flusher(clock: Clock) -> Callable[[], Any]:
    return GpuFlusher(clock.device) if isinstance(clock, EventClock) else CpuFlusher()


def _remembering(spec: OpSpec) -> OpSpec:
    """The spec with the oracle's results kept by the content of x: `recheck` holds every tile to
    the same two, having seen that the weight is what it was.
    """
    kept: dict[tuple[str, bytes], Any] = {}

    def key(inputs: Inputs, what: str) -> tuple[str, bytes]:
        x = inputs.x.detach().contiguous().cpu().view(-1).view(torch.uint8)
        return what, hashlib.sha256(x.numpy().data).digest()

    def reference(inputs: Inputs) -> Any:
        at = key(inputs, "reference")
        if at not in kept:
            kept[at] = spec.reference(inputs)
        return kept[at].copy()

    def error_model(inputs: Inputs, ref: Any) -> Any:
        at = key(inputs, "model")
        if at not in kept:
            kept[at] = spec.error_model(inputs, ref)
        return kept[at]

    return replace(spec, reference=reference, error_model=error_model)
