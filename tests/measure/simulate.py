"""Times that a noisy machine could have given, with a known truth.

The arms run in the orders that `block_orders` draws; the disturbance acts on the place in the
sequence, whoever runs there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.measure.sample import block_orders

Floats = NDArray[np.float64]
ARMS = ("A", "B", "control")


@dataclass(frozen=True)
class Machine:
    """How a machine disturbs times; every field is relative.

    Attributes:
        noise: standard deviation of one sample.
        drift: linear change from the first sample to the last.
        wander: standard deviation that a random walk reaches at the end.
        first: penalty of the first sample in each block.
    """

    noise: float = 0.002
    drift: float = 0.0
    wander: float = 0.0
    first: float = 0.0

    def disturbance(self, blocks: int, rng: np.random.Generator) -> Floats:
        """Log factor of each place of a run: float64 [blocks * 3]."""
        places = blocks * len(ARMS)
        walk = np.cumsum(rng.normal(size=places)) * self.wander / np.sqrt(places)
        first = np.where(np.arange(places) % len(ARMS) == 0, self.first, 0.0)
        trend = self.drift * np.arange(places) / (places - 1)
        return rng.normal(0.0, self.noise, places) + walk + first + trend


def simulated_runs(
    machine: Machine, *, runs: int, blocks: int, gain: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """Samples of A, B (`gain` faster) and control: float64 [runs, blocks] each."""
    rng = np.random.default_rng(seed)
    us = {name: np.empty((runs, blocks)) for name in ARMS}
    for run in range(runs):
        log_factor = machine.disturbance(blocks, rng).reshape(blocks, len(ARMS))
        for block, order in enumerate(block_orders(ARMS, blocks, rng)):
            for place, name in enumerate(order):
                us[name][run, block] = 100.0 * np.exp(log_factor[block, place])
    us["B"] /= 1.0 + gain
    return us
