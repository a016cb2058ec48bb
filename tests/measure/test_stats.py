"""The statistics against scipy, enumeration and published small-sample figures."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from scipy import stats as reference

from tilewright.measure.stats import (
    blocks_to_resolve,
    disjoint_p,
    holm,
    median_interval,
    ranges_disjoint,
    sign_test,
)

# n per arm, chance of disjoint ranges, p of a unanimous sign test: two significant digits.
SMALL_SAMPLES = [
    (3, 0.10, 0.25),
    (4, 0.029, 0.125),
    (5, 0.0079, 0.063),
    (6, 0.0022, 0.031),
    (7, 0.00058, 0.016),
    (8, 0.00016, 0.0078),
]


@pytest.mark.parametrize(("n", "disjoint", "unanimous"), SMALL_SAMPLES)
def test_small_sample_table(n: int, disjoint: float, unanimous: float) -> None:
    assert disjoint_p(n) == 2 / comb(2 * n, n) == pytest.approx(disjoint, rel=0.035)
    for values in (np.full(n, 0.1), np.full(n, -0.1)):
        assert sign_test(values) == 2.0 ** (1 - n) == pytest.approx(unanimous, rel=0.025)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_disjoint_p_counts_the_splits_of_ranks(n: int) -> None:
    ranks = set(range(2 * n))
    disjoint = sum(
        max(a) < min(ranks - set(a)) or min(a) > max(ranks - set(a))
        for a in combinations(range(2 * n), n)
    )
    assert disjoint_p(n) == disjoint / comb(2 * n, n)


@pytest.mark.parametrize(
    ("a", "b", "disjoint"),
    [([1, 2], [3, 4], True), ([3, 4], [1, 2], True), ([1, 3], [2, 4], False), ([1], [1], False)],
)
def test_ranges_disjoint(a: list[float], b: list[float], disjoint: bool) -> None:
    assert ranges_disjoint(np.array(a), np.array(b)) is disjoint


@pytest.mark.parametrize("n", [1, 5, 6, 7, 20, 101])
def test_sign_test_equals_scipy(n: int) -> None:
    for plus in range(n + 1):
        values = np.array([1.0] * plus + [-1.0] * (n - plus))
        assert sign_test(values) == pytest.approx(reference.binomtest(plus, n, 0.5).pvalue)


def test_sign_test_leaves_zeros_out_and_takes_a_batch() -> None:
    rows = np.array([[1.0, 1, 1, 1, 1, 1, 0, 0], [0.0] * 8, [1.0, -1, 1, -1, 1, -1, 0, 0]])
    assert sign_test(rows).tolist() == [2**-5, 1.0, 1.0]


@pytest.mark.parametrize("n", [6, 7, 20, 21])
def test_interval_equals_scipy_percentile_bootstrap(n: int) -> None:
    values = np.random.default_rng(n).normal(size=n)
    median, low, high = median_interval(values, resamples=40_000, seed=1)
    ours = np.array([low, high])
    theirs = reference.bootstrap(
        (values,), np.median, method="percentile", n_resamples=40_000, rng=np.random.default_rng(2)
    ).confidence_interval
    assert median == np.median(values)
    # Quantiles of two independent sets of draws over the same few order statistics.
    assert ours == pytest.approx(np.array(theirs), abs=0.05)


def test_interval_of_a_batch_equals_row_by_row() -> None:
    rows = np.random.default_rng(0).normal(size=(4, 12))
    batch = np.stack(median_interval(rows, seed=3))
    single = np.stack([median_interval(row, seed=3) for row in rows], axis=1)
    assert np.array_equal(batch, single)


def test_interval_covers_the_true_median() -> None:
    rows = np.random.default_rng(5).normal(loc=0.3, size=(4000, 20))
    _, low, high = median_interval(rows)
    covered = np.mean((low <= 0.3) & (high >= 0.3))
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize(
    ("raw", "adjusted"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.05], [0.05]),
        ([0.6, 0.7], [1.0, 1.0]),
        ([], []),
    ],
    ids=["four", "one", "capped", "none"],
)
def test_holm_worked_by_hand(raw: list[float], adjusted: list[float]) -> None:
    assert holm(raw) == pytest.approx(adjusted)


@pytest.mark.parametrize("effect", [0.0, 0.002, 0.004, 0.008])
def test_blocks_to_resolve_is_enough_for_four_of_five_runs(effect: float) -> None:
    rng = np.random.default_rng(11)
    pilot = rng.normal(effect, 0.01, 20)
    pilot += effect - np.median(pilot)
    _, low, high = median_interval(pilot)
    needed = blocks_to_resolve(pilot, float(low), float(high))
    runs = rng.normal(effect, np.std(pilot), (400, needed))
    _, low, high = median_interval(runs, resamples=1000)
    limit = np.log1p(0.005)
    resolved = (low * high > 0) | ((low > -limit) & (high < limit))
    assert 20 < needed < 4000
    assert resolved.mean() > 0.65
