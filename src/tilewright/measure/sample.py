"""Taking samples: how many launches make one, and in which order the arms are sampled."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from tilewright.errors import MeasureError
from tilewright.measure.clock import Clock, Launch
from tilewright.measure.state import MachineState, StateProbe

__all__ = ["Block", "SamplePlan", "block_orders", "plan_samples", "run_blocks", "warm_up"]

# A reading spans this many steps of the clock, so that a step is at most 1 % of it.
READING_STEPS = 100
_SAMPLE_US = 20_000.0
_MOST_READINGS = 15
_MOST_LAUNCHES = 1 << 22
_MOST_COLD_LAUNCHES = 32
_SETTLED = 0.02


@dataclass(frozen=True)
class SamplePlan:
    """A sample is the median of `readings`; a reading is the mean of `launches` calls.

    With a hot cache a reading times its launches back to back. With a cold one each launch is
    timed by itself after a flush, and the reading adds up: the clock's rounding averages out.
    """

    launches: int = 1
    readings: int = 1

    def take(self, clock: Clock, launch: Launch, flush: Callable[[], Any] | None = None) -> float:
        """One sample, in microseconds a launch."""
        return median(
            reading_us(clock, launch, self.launches, flush) / self.launches
            for _ in range(self.readings)
        )


def reading_us(
    clock: Clock, launch: Launch, launches: int, flush: Callable[[], Any] | None = None
) -> float:
    """Time of `launches` calls, in microseconds; `flush` runs untimed before each of them."""
    if flush is None:
        return clock.time_us(launch, launches)
    total = 0.0
    for _ in range(launches):
        flush()
        total += clock.time_us(launch, 1)
    return total


@dataclass(frozen=True)
class Block:
    """One visit to every arm.

    Attributes:
        order: names of the arms as they ran.
        us: sample of each arm, microseconds a launch.
        state: the machine's state over the block; None when it was not watched.
    """

    order: tuple[str, ...]
    us: dict[str, float]
    state: MachineState | None = None

    def to_dict(self) -> dict[str, Any]:
        state = None if self.state is None else self.state.to_dict()
        return {"order": list(self.order), "us": dict(self.us), "state": state}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Block:
        state = row.get("state")
        return cls(
            tuple(row["order"]),
            dict(row["us"]),
            MachineState.from_dict(state) if state is not None else None,
        )


def warm_up(
    arms: Mapping[str, Launch], clock: Clock, *, rounds: int = 20, budget_us: float = 2e6
) -> None:
    """Run the arms in turn until each one's time changes by less than 2 % between rounds.

    Stops after `rounds`, or when `budget_us` is spent; every arm has run at least once by then.
    """
    start = clock.now_us()
    last: dict[str, float] = {}
    for _ in range(rounds):
        settled = bool(last)
        for name, launch in arms.items():
            us = clock.time_us(launch, 1)
            settled &= abs(us - last.get(name, math.inf)) <= _SETTLED * us
            last[name] = us
        if settled or clock.now_us() - start > budget_us:
            return


def plan_samples(
    arms: Mapping[str, Launch],
    clock: Clock,
    *,
    flush: Callable[[], Any] | None = None,
    sample_us: float = _SAMPLE_US,
) -> SamplePlan:
    """The one plan that all arms of a comparison share.

    `launches` is the least power of two at which every arm's reading spans 100 steps of the
    clock. `readings` is odd and fills about `sample_us`.

    Raises:
        MeasureError: a launch is too short for the clock.
    """
    floor = READING_STEPS * clock.resolution_us
    launches, longest = 1, 0.0
    for name, launch in arms.items():
        us = reading_us(clock, launch, launches, flush)
        while us < floor:
            if launches >= (_MOST_LAUNCHES if flush is None else _MOST_COLD_LAUNCHES):
                raise MeasureError(
                    f"{launches} launches of {name} take {us:.3f} us, under {READING_STEPS} steps "
                    f"of the clock ({floor:.3f} us): give a launch more work"
                )
            launches *= 2
            us = reading_us(clock, launch, launches, flush)
        longest = max(longest, us / launches)
    readings = min(_MOST_READINGS, max(1, int(sample_us / (longest * launches))))
    return SamplePlan(launches, readings - (readings + 1) % 2)


def block_orders(
    arms: Sequence[str], blocks: int, rng: np.random.Generator
) -> Iterator[tuple[str, ...]]:
    """Random, position-balanced orders.

    A random order's rotations, shuffled, then a new random order: over any full cycle each arm
    runs once in each position, and swapping two arms' names leaves the chances unchanged.
    """
    count = len(arms)
    done = 0
    while done < blocks:
        base = rng.permutation(count)
        for shift in rng.permutation(count)[: blocks - done]:
            yield tuple(arms[base[(i + shift) % count]] for i in range(count))
            done += 1


@contextmanager
def _no_collector() -> Iterator[None]:
    """Keep Python's cycle collector out of the readings."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def run_blocks(
    arms: Mapping[str, Launch],
    blocks: int,
    clock: Clock,
    plan: SamplePlan,
    *,
    rng: np.random.Generator,
    flush: Callable[[], Any] | None = None,
    probe: StateProbe | None = None,
    on_block: Callable[[Block], Any] | None = None,
) -> tuple[list[Block], bool]:
    """Sample every arm once a block, in random position-balanced order.

    Args:
        arms: launch of each arm, the control among them.
        blocks: how many.
        clock, plan: how a sample is taken.
        rng: draws the orders.
        flush: empties the caches before each reading.
        probe: records the machine's state.
        on_block: called after each finished block.

    Returns:
        (finished blocks, whether Ctrl-C ended the run early). Ctrl-C drops the block it fell in.
    """
    finished: list[Block] = []
    try:
        if probe is not None:
            probe.sample()
        for order in block_orders(list(arms), blocks, rng):
            with _no_collector():
                us = {name: plan.take(clock, arms[name], flush) for name in order}
            block = Block(order, us, probe.sample() if probe is not None else None)
            finished.append(block)
            if on_block is not None:
                on_block(block)
    except KeyboardInterrupt:
        return finished, True
    return finished, False
