"""How often the verdict is wrong, and how often it finds what is there: simulated machines."""

from __future__ import annotations

from collections import Counter
from math import exp

import numpy as np
import pytest

from measure.simulate import Machine, simulated_runs
from tilewright.measure import ReplayClock, SamplePlan, Verdict, compare, judge
from tilewright.measure.stats import median_interval, sign_test
from tilewright.measure.verdict import control_differs

MACHINES = {
    "no drift": Machine(),
    "1 % linear drift": Machine(drift=0.01),
    "slow wander": Machine(wander=0.02),
    "first-in-block penalty": Machine(first=0.005),
}
DIFFERENT = (Verdict.FASTER, Verdict.SLOWER, Verdict.DISJOINT)
RUNS = 1000


def verdicts(us: dict[str, np.ndarray], **options: float) -> Counter[Verdict]:
    rows = zip(us["A"], us["B"], us["control"], strict=True)
    return Counter(judge(a, b, c, resamples=2000, **options).verdict for a, b, c in rows)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_equal_arms_are_told_apart_in_at_most_7_percent(machine: Machine) -> None:
    us = simulated_runs(machine, runs=RUNS, blocks=20, seed=1)
    # A delta of nearly zero keeps SAME from hiding a false alarm of the test itself.
    counts = verdicts(us, delta=1e-9)
    assert sum(counts[v] for v in DIFFERENT) <= 0.07 * RUNS
    assert counts[Verdict.VOID] <= 0.02 * RUNS
    counts = verdicts(us)
    assert sum(counts[v] for v in DIFFERENT) <= 0.01 * RUNS


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
@pytest.mark.parametrize("blocks", [6, 8, 40])
def test_false_alarms_stay_rare_at_other_run_lengths(machine: Machine, blocks: int) -> None:
    us = simulated_runs(machine, runs=600, blocks=blocks, seed=2)
    log_ratio = np.log(us["A"] / us["B"])
    _, low, high = median_interval(log_ratio)
    assert np.mean((low * high > 0) & (sign_test(log_ratio) <= 0.05)) <= 0.07


@pytest.mark.parametrize(
    ("gain", "expected"),
    [(0.005, Verdict.FASTER), (-0.005, Verdict.SLOWER), (0.05, Verdict.DISJOINT)],
    ids=["0.5 % faster", "0.5 % slower", "5 % faster"],
)
def test_real_differences_under_2_percent_drift_are_found(gain: float, expected: Verdict) -> None:
    us = simulated_runs(Machine(drift=0.02), runs=RUNS, blocks=20, gain=gain, seed=3)
    assert verdicts(us)[expected] >= 0.95 * RUNS


def test_equal_arms_on_a_quiet_machine_are_the_same() -> None:
    us = simulated_runs(Machine(), runs=300, blocks=20, seed=4)
    assert verdicts(us)[Verdict.SAME] >= 0.97 * 300


def test_a_difference_far_below_delta_is_the_same_however_sure() -> None:
    us = simulated_runs(Machine(noise=0.0002), runs=50, blocks=20, gain=0.001, seed=5)
    assert verdicts(us) == {Verdict.SAME: 50}


def test_fixed_order_would_be_fooled_where_random_order_is_not() -> None:
    """The schedule earns its place: A first in every block turns a penalty into a gain."""
    machine = Machine(first=0.005)
    rng = np.random.default_rng(6)
    fooled = 0
    for _ in range(200):
        places = np.exp(machine.disturbance(20, rng).reshape(20, 3))
        log_ratio = np.log(places[:, 0] / places[:, 1])
        fooled += sign_test(log_ratio) <= 0.05
    assert fooled >= 190


def test_replayed_clock_gives_the_verdicts_of_the_simulation() -> None:
    """`compare` itself, on a clock that replays each machine's times place by place."""
    alarms = found = 0
    for run in range(60):
        alarms += _replayed(Machine(wander=0.02), gain=0.0, seed=run) in DIFFERENT
        found += _replayed(Machine(drift=0.02), gain=0.01, seed=run) in DIFFERENT
    assert alarms <= 4
    assert found >= 57


def _replayed(machine: Machine, *, gain: float, seed: int) -> Verdict:
    clock = ReplayClock()
    rng = np.random.default_rng((seed, 7))
    places = iter(machine.disturbance(20, rng))

    def arm(base_us: float) -> object:
        return lambda: clock.advance(base_us * exp(next(places, 0.0)))

    plan = SamplePlan(launches=1, readings=1)
    comparison = compare(
        arm(100.0), arm(100.0 / (1 + gain)), clock=clock, plan=plan, seed=seed, warm_up_us=0.0
    )
    assert len(comparison.blocks) == 20
    return comparison.verdict


@pytest.mark.parametrize(
    ("shift", "differs"), [(0.02, True), (0.001, False), (0.0, False)], ids=["2 %", "0.1 %", "none"]
)
@pytest.mark.parametrize("blocks", [6, 20])
def test_control_differs_only_beyond_delta(shift: float, differs: bool, blocks: int) -> None:
    rows = np.random.default_rng(8).normal(shift, 0.0005, (50, blocks))
    assert np.mean(control_differs(rows, delta=0.005)) == differs


def test_unresolved_names_the_blocks_that_would_do() -> None:
    us = simulated_runs(Machine(noise=0.01), runs=20, blocks=20, seed=9)
    unresolved = 0
    for a, b, c in zip(us["A"], us["B"], us["control"], strict=True):
        judgement = judge(a, b, c)
        if judgement.verdict is Verdict.UNRESOLVED:
            unresolved += 1
            assert judgement.blocks_needed is not None
            assert judgement.blocks_needed > 20
            assert judgement.reasons == (
                f"about {judgement.blocks_needed} blocks would resolve it",
            )
    assert unresolved >= 15


def test_an_effect_within_the_controls_own_spread_is_unresolved() -> None:
    rng = np.random.default_rng(10)
    a = np.full(20, 100.0)
    control = a * np.exp(rng.normal(0, 0.05, 20))
    judgement = judge(a, a / 1.01, control)
    assert judgement.low > 1.005
    assert (judgement.control_high - judgement.control_low) / 2 > 0.01
    assert judgement.verdict is Verdict.UNRESOLVED


@pytest.mark.parametrize(
    ("verdict", "ratio", "code"),
    [
        (Verdict.FASTER, 1.1, 0),
        (Verdict.SAME, 1.0, 0),
        (Verdict.DISJOINT, 1.1, 0),
        (Verdict.DISJOINT, 0.9, 4),
        (Verdict.SLOWER, 0.9, 4),
        (Verdict.UNRESOLVED, 1.0, 5),
        (Verdict.VOID, 1.1, 6),
    ],
)
def test_exit_codes(verdict: Verdict, ratio: float, code: int) -> None:
    from tilewright.measure import Judgement

    figures = {"low": ratio, "high": ratio, "p": 1.0, "p_adjusted": 1.0}
    control = {"control": 1.0, "control_low": 1.0, "control_high": 1.0}
    assert Judgement(verdict, ratio, **figures, **control).exit_code == code
