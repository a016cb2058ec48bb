"""Plans, orders, blocks and warm-up, on a clock that only moves when told."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from tilewright.errors import MeasureError
from tilewright.measure import Block, MachineState, ReplayClock, SamplePlan
from tilewright.measure.sample import block_orders, plan_samples, run_blocks, warm_up


@pytest.mark.parametrize("arms", [2, 3, 5])
def test_orders_put_every_arm_in_every_position_equally_often(arms: int) -> None:
    names = "ABCDE"[:arms]
    orders = list(block_orders(names, 4 * arms, np.random.default_rng(0)))
    assert all(sorted(order) == sorted(names) for order in orders)
    for name in names:
        assert Counter(o.index(name) for o in orders) == dict.fromkeys(range(arms), 4)


def test_orders_are_random_and_fair_to_two_arms() -> None:
    orders = list(block_orders("ABC", 6000, np.random.default_rng(1)))
    counts = Counter(orders)
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())
    assert list(block_orders("ABC", 6000, np.random.default_rng(1))) == orders
    assert list(block_orders("ABC", 6000, np.random.default_rng(2))) != orders


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_orders_stop_at_the_number_asked(blocks: int) -> None:
    assert len(list(block_orders("ABC", blocks, np.random.default_rng(0)))) == blocks


@pytest.mark.parametrize(
    ("launch_us", "resolution_us", "launches", "readings"),
    [
        (1000.0, 0.01, 1, 15),
        (5000.0, 0.01, 1, 3),
        (50_000.0, 0.01, 1, 1),
        (0.5, 0.01, 2, 15),
        (0.3, 1.0, 512, 15),
        (99.0, 1.0, 2, 15),
        (100.0, 1.0, 1, 15),
    ],
)
def test_a_reading_spans_100_steps_of_the_clock(
    launch_us: float, resolution_us: float, launches: int, readings: int
) -> None:
    clock = ReplayClock(resolution_us)
    arms = {"A": clock.replay([launch_us]), "B": clock.replay([launch_us * 1.5])}
    plan = plan_samples(arms, clock, sample_us=24_000.0)
    assert plan == SamplePlan(launches, readings)
    assert plan.launches * launch_us >= 100 * resolution_us


def test_the_shorter_arm_sets_the_launches_of_all() -> None:
    clock = ReplayClock(1.0)
    arms = {"long": clock.replay([60.0]), "short": clock.replay([10.0])}
    assert plan_samples(arms, clock).launches == 16


def test_a_launch_that_does_nothing_is_an_error() -> None:
    clock = ReplayClock(1.0)
    with pytest.raises(MeasureError, match=r"launches of A take 0.000 us, under 100 steps"):
        plan_samples({"A": clock.replay([0.0])}, clock, flush=lambda: None)


def test_cold_readings_flush_before_every_launch_and_do_not_time_it() -> None:
    clock = ReplayClock(1.0)
    log: list[str] = []

    def flush() -> None:
        log.append("flush")
        clock.advance(1e6)

    def launch() -> None:
        log.append("launch")
        clock.advance(30.0)

    assert plan_samples({"A": launch}, clock, flush=flush).launches == 4
    log.clear()
    assert SamplePlan(launches=4, readings=3).take(clock, launch, flush) == 30.0
    assert log == ["flush", "launch"] * 12


def test_a_sample_is_the_median_reading_for_one_launch() -> None:
    clock = ReplayClock()
    launch = clock.replay([10.0, 20.0, 500.0, 500.0, 30.0, 30.0])
    assert SamplePlan(launches=2, readings=3).take(clock, launch) == 30.0


def test_warm_up_runs_until_times_settle() -> None:
    clock = ReplayClock()
    times = [100.0, 60.0, 50.0, 49.9, 49.9, 49.9]
    slow, steady = clock.replay(times), clock.replay([10.0])
    warm_up({"slow": slow, "steady": steady}, clock)
    assert clock.now_us() == pytest.approx(sum(times[:4]) + 4 * 10.0)


@pytest.mark.parametrize(
    ("options", "rounds"), [({"rounds": 5}, 5), ({"budget_us": 0.0}, 1)], ids=["rounds", "budget"]
)
def test_warm_up_is_bounded(options: dict[str, float], rounds: int) -> None:
    clock = ReplayClock()
    warm_up({"A": clock.replay([1.0, 2.0])}, clock, **options)
    assert clock.now_us() == sum([1.0, 2.0, 1.0, 2.0, 1.0][:rounds])


def test_blocks_hold_every_arm_once_and_are_reported_as_they_finish() -> None:
    clock = ReplayClock()
    arms = {"A": clock.replay([10.0]), "B": clock.replay([20.0])}
    seen: list[Block] = []
    blocks, interrupted = run_blocks(
        arms, 5, clock, SamplePlan(), rng=np.random.default_rng(0), on_block=seen.append
    )
    assert seen == blocks
    assert not interrupted
    assert [block.us for block in blocks] == [{"A": 10.0, "B": 20.0}] * 5
    assert all(tuple(block.us) == block.order for block in blocks)


def test_interrupt_drops_the_block_it_fell_in_and_restores_the_collector() -> None:
    clock = ReplayClock()
    left = iter(range(7))

    def launch() -> None:
        assert not gc.isenabled()
        clock.advance(1.0)
        if next(left, None) is None:
            raise KeyboardInterrupt

    blocks, interrupted = run_blocks(
        {"A": launch, "B": launch}, 9, clock, SamplePlan(), rng=np.random.default_rng(0)
    )
    assert (len(blocks), interrupted) == (3, True)
    assert gc.isenabled()


def test_block_survives_json() -> None:
    state = MachineState(load_1m=0.5, throttle=("cpu-thermal",))
    block = Block(("B", "A"), {"B": 2.0, "A": 1.0}, state)
    assert Block.from_dict(block.to_dict()) == block


def test_position_balance_cancels_a_linear_drift() -> None:
    clock = ReplayClock()

    def launch() -> None:
        clock.advance(100.0 + 0.01 * clock.now_us())

    blocks, _ = run_blocks(
        {"A": launch, "B": launch, "control": launch},
        30,
        clock,
        SamplePlan(),
        rng=np.random.default_rng(3),
    )
    means = [np.mean([block.us[name] for block in blocks]) for name in ("A", "B", "control")]
    trend = blocks[-1].us["A"] / blocks[0].us["A"] - 1
    assert trend > 0.5
    assert all(abs(x / y - 1) < 0.02 * trend for x, y in pairwise(means))
