"""`compare` as its callers see it: verdicts, errors, interruption, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tilewright.errors import GateError, MeasureError
from tilewright.measure import (
    Ceiling,
    Comparison,
    CpuClock,
    MachineState,
    ReplayClock,
    ReportedClock,
    Verdict,
    Work,
    compare,
    compare_many,
    judge,
)


class Probe:
    """A probe that reports a fixed state."""

    def __init__(self, *throttle: str) -> None:
        self.state = MachineState(load_1m=0.1, throttle=throttle)

    def sample(self) -> MachineState:
        return self.state


def run(b_us: float = 90.0, a_us: float = 100.0, **options: Any) -> Comparison:
    clock = ReplayClock()
    wobble = [1.0, 1.001, 0.999, 1.0005, 0.9995]
    a = clock.replay([a_us * w for w in wobble])
    b = clock.replay([b_us * w for w in wobble[::-1]])
    return compare(a, b, clock=clock, **options)


@pytest.mark.parametrize(
    ("b_us", "verdict", "code"),
    [(90.0, Verdict.DISJOINT, 0), (110.0, Verdict.DISJOINT, 4), (100.0, Verdict.SAME, 0)],
    ids=["faster", "slower", "same"],
)
def test_verdict_and_ratio(b_us: float, verdict: Verdict, code: int) -> None:
    comparison = run(b_us)
    low, high = comparison.interval
    assert comparison.verdict is verdict
    assert comparison.exit_code == code
    assert comparison.ratio == pytest.approx(100.0 / b_us, rel=0.002)
    assert low <= comparison.ratio <= high
    assert len(comparison.blocks) == 20
    assert str(verdict) in str(comparison)


def test_outliers_stay_in_the_samples() -> None:
    clock = ReplayClock()
    spikes = [100.0] * 22 + [900.0]
    comparison = compare(clock.replay(spikes), clock.replay(spikes), clock=clock, sample_us=1.0)
    all_samples = np.concatenate([comparison.samples_us(n) for n in ("A", "B", "control")])
    assert all_samples.max() == 900.0
    assert all_samples.size == 60


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"post_check": lambda: False}, "the check after timing failed"),
        ({"post_check": lambda: "row 3 is NaN"}, "the check after timing failed: row 3 is NaN"),
        ({"probe": Probe("gpu-hw-thermal")}, "throttled: gpu-hw-thermal"),
    ],
    ids=["check false", "check reason", "throttling"],
)
def test_void_with_its_reason(options: dict[str, Any], reason: str) -> None:
    comparison = run(**options)
    assert comparison.verdict is Verdict.VOID
    assert comparison.exit_code == 6
    assert comparison.judgement.reasons == (reason,)


def test_void_when_the_check_raises_a_gate_error() -> None:
    def check() -> None:
        raise GateError("block 7 is off by 0.3")

    comparison = run(post_check=check)
    assert comparison.verdict is Verdict.VOID
    assert "block 7 is off by 0.3" in str(comparison)


def test_void_when_the_control_differs() -> None:
    us = np.full(20, 100.0)
    judgement = judge(us, us * 0.8, us * 1.02)
    assert judgement.verdict is Verdict.VOID
    assert judgement.reasons[0].startswith("the control differs: A against itself gives 0.98")


@pytest.mark.parametrize("check", [None, lambda: None, lambda: True], ids=["none", "None", "True"])
def test_a_check_that_passes_leaves_the_verdict(check: Callable[[], Any] | None) -> None:
    assert run(post_check=check).verdict is Verdict.DISJOINT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 5}, "blocks is 5; at least 6 are needed"),
        ({"alpha": 0.0}, "alpha is 0.0; give a significance between 0 and 1"),
        ({"delta": -0.1}, "delta is -0.1; give a relative difference"),
        ({"b_name": "A"}, "an arm is named 'A', a name already in use"),
        ({"b_name": "control"}, "an arm is named 'control', a name already in use"),
        ({"a_name": "control"}, "the baseline is named 'control'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MeasureError, match=message):
        run(**options)


def test_no_candidates() -> None:
    with pytest.raises(MeasureError, match="candidates is empty"):
        compare_many(lambda: None, {}, clock=ReplayClock())


def test_a_result_above_the_roofline_is_an_error() -> None:
    ceiling = Ceiling(gflops=100.0)  # 100 us allow 1e7 operations
    assert run(work=Work(flops=0.8e7), ceiling=ceiling).verdict is Verdict.DISJOINT
    with pytest.raises(MeasureError, match=r"B took .* us, but 9.5e\+06 operations"):
        run(work=Work(flops=0.95e7), ceiling=ceiling)


@pytest.mark.parametrize(
    ("moved", "cold", "fails"),
    [(1e6, False, False), (1e6, True, True), (1e8, False, True)],
    ids=["hot, fits the cache", "cold", "hot, larger than the cache"],
)
def test_bandwidth_binds_only_what_comes_from_memory(moved: float, cold: bool, fails: bool) -> None:
    options: dict[str, Any] = {
        "work": Work(bytes=moved),
        "ceiling": Ceiling(gbps=1.0),
        "cold": cold,
        "flush": lambda: None,
        "cache_bytes": 1 << 20,
    }
    if fails:
        with pytest.raises(MeasureError, match="it skipped work, or the clock or the ceiling"):
            run(**options)
    else:
        assert run(**options).verdict is Verdict.DISJOINT


def test_cold_and_hot_are_named_results() -> None:
    flushes: list[int] = []
    cold = run(cold=True, flush=lambda: flushes.append(1))
    assert cold.settings["cache"] == "cold"
    assert len(flushes) >= 60
    flushes.clear()
    assert run(flush=lambda: flushes.append(1)).settings["cache"] == "hot"
    assert not flushes


@pytest.mark.parametrize(("stop_after", "verdict"), [(8, "DISJOINT"), (3, "UNRESOLVED")])
def test_interrupt_keeps_finished_blocks(stop_after: int, verdict: str) -> None:
    done: list[object] = []

    def stop(block: object) -> None:
        done.append(block)
        if len(done) == stop_after:
            raise KeyboardInterrupt

    comparison = run(on_block=stop)
    assert comparison.interrupted
    assert len(comparison.blocks) == stop_after
    assert comparison.verdict == verdict
    assert comparison.settings["blocks_asked"] == 20


def test_interrupt_before_the_first_block_is_passed_on() -> None:
    clock = ReplayClock()
    ready = False

    def launch() -> None:
        if ready:
            raise KeyboardInterrupt
        clock.advance(100.0)

    class Armed(Probe):
        def sample(self) -> MachineState:
            nonlocal ready
            ready = True
            return self.state

    with pytest.raises(KeyboardInterrupt):
        compare(launch, launch, clock=clock, probe=Armed())


def test_comparison_survives_json() -> None:
    comparison = run(probe=Probe(), a_name="before", b_name="after")
    row = json.loads(comparison.to_json())
    assert Comparison.from_dict(row) == comparison
    assert len(row["blocks"]) == 20
    assert set(row["blocks"][0]["us"]) == {"before", "after", "control"}


def test_many_share_blocks_and_are_corrected_by_holm() -> None:
    rng = np.random.default_rng(0)
    clock = ReplayClock()
    names = [f"same{i}" for i in range(9)]
    arms = {name: clock.replay(100.0 * (1 + 0.01 * rng.normal(size=97))) for name in names}
    arms["fast"] = clock.replay(80.0 * (1 + 0.01 * rng.normal(size=97)))
    base = clock.replay(100.0 * (1 + 0.01 * rng.normal(size=97)))
    result = compare_many(base, arms, clock=clock, sample_us=1.0)
    assert list(result) == [*names, "fast"]
    assert result["fast"].verdict is Verdict.DISJOINT
    assert result["fast"].judgement.p_adjusted == pytest.approx(10 * result["fast"].judgement.p)
    assert all(result[n].verdict in (Verdict.UNRESOLVED, Verdict.SAME) for n in names)
    orders = {tuple(sorted(block.order)) for c in result.values() for block in c.blocks}
    assert orders == {tuple(sorted([*arms, "A", "control"]))}
    base_samples = [c.samples_us("A").tolist() for c in result.values()]
    assert all(samples == base_samples[0] for samples in base_samples)


def test_holm_turns_a_lucky_find_among_many_down() -> None:
    """p = 0.031 is found alone and not among ten."""

    def b_times() -> list[float]:
        return [97.0, 97.5, 96.5]

    def build() -> tuple[ReplayClock, Callable[[], Any], dict[str, Callable[[], Any]]]:
        clock = ReplayClock()
        noise = [100.0, 100.3, 99.8, 100.1, 99.9, 100.2, 99.7]
        others = {f"x{i}": clock.replay(noise[i % 7 :] + noise[: i % 7]) for i in range(9)}
        return clock, clock.replay(noise), {"B": clock.replay(b_times()), **others}

    clock, base, arms = build()
    alone = compare(base, arms["B"], clock=clock, blocks=6, sample_us=1.0)
    clock, base, arms = build()
    among = compare_many(base, arms, clock=clock, blocks=6, sample_us=1.0)["B"]
    assert alone.judgement.p == among.judgement.p == 2**-5
    assert alone.verdict is Verdict.DISJOINT
    assert among.verdict is Verdict.UNRESOLVED


def test_another_process_reports_its_own_time() -> None:
    comparison = compare(lambda: 100.0, lambda: 50.0, clock=ReportedClock(), warm_up_us=0.0)
    assert comparison.ratio == pytest.approx(2.0)


def test_real_clock_tells_a_real_difference() -> None:
    rng = np.random.default_rng(0)
    small, large = rng.random(20_000), rng.random(80_000)
    comparison = compare(
        lambda: large.sum(), lambda: small.sum(), clock=CpuClock(), blocks=8, sample_us=500.0
    )
    assert comparison.ratio > 1.5
    assert comparison.blocks[0].state is not None
