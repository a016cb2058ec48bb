"""Paired statistics over blocks: median log ratio, bootstrap, exact sign test, Holm.

Every function takes the block as its last axis, so that thousands of simulated runs go through
the very code that judges one real run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "blocks_to_resolve",
    "disjoint_p",
    "holm",
    "median_interval",
    "ranges_disjoint",
    "sign_test",
]

Floats = NDArray[np.float64]

# Chance with which a run of the suggested length should resolve the question.
_RESOLVING_POWER = 0.8


def median_interval(
    values: Floats, *, alpha: float = 0.05, resamples: int = 4000, seed: int = 0
) -> tuple[Any, Any, Any]:
    """Median over the last axis with its percentile bootstrap interval.

    A resample's median depends only on which ranks were drawn, so the ranks are drawn once and
    applied to every row's sorted values. Efron, "Bootstrap methods" (1979), percentile method.

    Args:
        values: float64 [..., n].
        alpha: 1 - confidence.
        resamples: bootstrap draws.
        seed: seed of the draws.

    Returns:
        (median, low, high), each float64 [...].
    """
    ordered = np.sort(values, axis=-1)
    n = ordered.shape[-1]
    below, above = _median_ranks(n, resamples, seed)
    medians = (ordered[..., below] + ordered[..., above]) / 2
    low, high = np.quantile(medians, (alpha / 2, 1 - alpha / 2), axis=-1)
    return np.median(ordered, axis=-1), low, high


@lru_cache(maxsize=64)
def _median_ranks(n: int, resamples: int, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Ranks of the two middle values of each resample; equal when n is odd."""
    drawn = np.random.default_rng((seed, n)).integers(0, n, (resamples, n))
    drawn.sort(axis=1)
    return drawn[:, (n - 1) // 2], drawn[:, n // 2]


def sign_test(values: Floats) -> Any:
    """Exact two-sided sign test of a zero median over the last axis; zeros are left out.

    Args:
        values: float64 [..., n].

    Returns:
        p, float64 [...]; 1 where every value is zero.
    """
    plus = np.count_nonzero(values > 0, axis=-1)
    minus = np.count_nonzero(values < 0, axis=-1)
    n = values.shape[-1]
    table = np.array(
        [[_sign_p(k, m) if k <= m else 1.0 for k in range(n + 1)] for m in range(n + 1)]
    )
    return table[plus + minus, plus]


@lru_cache(maxsize=65536)
def _sign_p(plus: int, trials: int) -> float:
    """Chance of a split at least as uneven as plus : trials - plus from a fair coin."""
    few = min(plus, trials - plus)
    tail = sum(math.comb(trials, k) for k in range(few + 1))
    return min(1.0, tail / 2 ** (trials - 1)) if trials else 1.0


def disjoint_p(n: int) -> float:
    """Chance that the ranges of two samples of `n` equal arms do not overlap: 2 / C(2n, n)."""
    return 2 / math.comb(2 * n, n)


def ranges_disjoint(a: Floats, b: Floats) -> bool:
    """Whether every value of `a` lies on one side of every value of `b`."""
    return bool(a.max() < b.min() or b.max() < a.min())


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (1979): p values that control the family-wise error.

    Args:
        p: raw p values of the family.

    Returns:
        Adjusted p values in the order given.
    """
    adjusted = [0.0] * len(p)
    running = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        running = max(running, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = running
    return adjusted


def blocks_to_resolve(
    log_ratio: Floats, low: float, high: float, *, alpha: float = 0.05, delta: float = 0.005
) -> int:
    """Number of blocks at which about 4 of 5 runs would find either a difference or none.

    The interval's half-width shrinks with the square root of the number of blocks. The question
    is resolved when the interval leaves zero and the sign test agrees, or when the interval fits
    into +-delta; the cheaper of the two counts.

    Args:
        log_ratio: float64 [n], the log ratios of the blocks measured so far.
        low, high: their bootstrap interval.
        alpha: significance of the sign test.
        delta: relative difference below which two arms count as the same.
    """
    n = log_ratio.shape[-1]
    effect = abs(float(np.median(log_ratio)))
    half = max((high - low) / 2, 1e-12)
    normal = NormalDist()
    z_alpha, z_power = normal.inv_cdf(1 - alpha / 2), normal.inv_cdf(_RESOLVING_POWER)
    needed_half = half * (z_alpha + z_power) / z_alpha

    room = math.log1p(delta) - effect
    same = n * (needed_half / room) ** 2 if room > 0 else math.inf
    differs = math.inf
    if effect > 0:
        sigma = half * math.sqrt(n) / (z_alpha * math.sqrt(math.pi / 2))  # of one block
        lead = normal.cdf(effect / sigma) - 0.5
        by_sign = ((z_alpha + z_power) / (2 * lead)) ** 2 if lead > 0 else math.inf
        differs = max(n * (needed_half / effect) ** 2, by_sign)
    return max(n + 1, math.ceil(min(same, differs)))
