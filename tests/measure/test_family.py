"""A control of its own, and comparisons of separate runs judged as one family."""

from __future__ import annotations

import pytest

from tilewright.measure import Comparison, ReplayClock, Verdict, adjust_family, compare

NOISE = [100.0, 100.3, 99.8, 100.1, 99.9, 100.2, 99.7]


def run(b_us: list[float], control_us: list[float] | None = None, **options: object) -> Comparison:
    clock = ReplayClock()
    control = None if control_us is None else clock.replay(control_us)
    return compare(
        clock.replay(NOISE), clock.replay(b_us), control=control, clock=clock, sample_us=1.0,
        **options,
    )  # fmt: skip


def test_a_control_of_its_own_is_what_is_sampled() -> None:
    comparison = run([90.0, 90.2, 89.9], control_us=[100.0, 100.1, 99.9])
    assert comparison.verdict is Verdict.DISJOINT
    assert set(comparison.samples_us("control").round(6)) == {100.0, 100.1, 99.9}


def test_a_control_that_is_another_machine_voids() -> None:
    comparison = run([90.0, 90.2, 89.9], control_us=[103.0, 103.1, 102.9])
    assert comparison.verdict is Verdict.VOID
    assert comparison.judgement.reasons[0].startswith("the control differs")


def test_a_find_of_one_run_is_weighed_against_the_others() -> None:
    found = run([97.0, 97.5, 96.5], blocks=6)
    assert found.verdict is Verdict.DISJOINT
    others = [run(NOISE[i:] + NOISE[:i], blocks=6) for i in range(1, 7)]
    (alone,) = adjust_family([found])
    assert alone == found
    among, *rest = adjust_family([found, *others])
    assert among.judgement.p_adjusted == pytest.approx(7 * 2**-5)
    assert among.verdict is Verdict.UNRESOLVED
    assert [c.b for c in rest] == [c.b for c in others]


def test_void_stays_void_with_its_reasons() -> None:
    void = run([90.0], post_check=lambda: "row 3 is NaN")
    (judged,) = adjust_family([void])
    assert judged.verdict is Verdict.VOID
    assert judged.judgement.reasons == void.judgement.reasons


def test_no_family() -> None:
    assert adjust_family([]) == []
