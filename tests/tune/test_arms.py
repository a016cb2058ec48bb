"""Contests on replayed clocks: the family, the exit codes, Ctrl-C, what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tilewright.errors import MeasureError, UnsupportedError
from tilewright.measure import Comparison, ReplayClock, SamplePlan, Verdict
from tilewright.tune.arms import (
    ArmInfo,
    CompareResult,
    CompareRow,
    Contest,
    Settings,
    exit_code_of,
    run_contests,
)
from tilewright.tune.commands import CommandArm, command_contest

NOISE = [100.0, 100.3, 99.8, 100.1, 99.9, 100.2, 99.7]
QUICK = Settings(blocks=8, sample_us=1.0)


def contest(label: str, b_us: float = 100.0, **options: Any) -> Contest:
    """B takes `b_us` where A takes 100."""
    clock = options.pop("clock", None) or ReplayClock()
    b = [us * b_us / 100.0 for us in NOISE[3:] + NOISE[:3]]
    return Contest(
        label, options.pop("cache", "hot"), clock.replay(NOISE), clock.replay(b), clock=clock,
        **options,
    )  # fmt: skip


def result(*rows: CompareRow, **options: Any) -> CompareResult:
    return CompareResult("tile", "mmq", ArmInfo("A", "a"), ArmInfo("B", "b"), rows, **options)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 5], 5),
        ([5, 6], 6),
        ([6, 4, 5], 4),
        ([4, 3, 6], 3),
    ],
)
def test_the_code_that_says_most_is_the_runs(codes: list[int], code: int) -> None:
    assert exit_code_of(codes) == code


@pytest.mark.parametrize(
    ("b_us", "options", "verdict", "code"),
    [
        (90.0, {}, "DISJOINT", 0),
        (99.45, {}, "FASTER", 0),
        (100.55, {}, "SLOWER", 4),
        (110.0, {}, "DISJOINT", 4),
        (90.0, {"post_check": lambda: "row 3 is NaN"}, "VOID", 6),
    ],
    ids=["disjoint faster", "faster", "slower", "disjoint slower", "void"],
)
def test_verdicts_and_their_codes(
    b_us: float, options: dict[str, Any], verdict: str, code: int
) -> None:
    rows, interrupted = run_contests(
        [contest("x", b_us, **options)], Settings(blocks=20, sample_us=1.0)
    )
    assert not interrupted
    assert rows[0].verdict == verdict
    assert result(*rows).exit_code == code


def test_noise_alone_is_unresolved_at_few_blocks() -> None:
    clock = ReplayClock()
    wide = [100.0, 104.0, 97.0, 103.0, 98.0, 101.0, 99.0]
    same = Contest("x", "hot", clock.replay(wide), clock.replay(wide[3:] + wide[:3]), clock=clock)
    rows, _ = run_contests([same], QUICK)
    assert rows[0].verdict == "UNRESOLVED"
    assert result(*rows).exit_code == 5


def test_verdicts_are_adjusted_over_all_contests() -> None:
    alone, _ = run_contests([contest("x", 97.0)], Settings(blocks=6, sample_us=1.0))
    among, _ = run_contests(
        [contest("x", 97.0), *(contest(f"y{i}") for i in range(6))],
        Settings(blocks=6, sample_us=1.0),
    )
    first, family = _comparison(alone[0]), _comparison(among[0])
    assert first.verdict is Verdict.DISJOINT
    assert family.judgement.p_adjusted == pytest.approx(7 * first.judgement.p)
    assert family.verdict is Verdict.UNRESOLVED


def _comparison(row: CompareRow) -> Comparison:
    assert row.comparison is not None
    return row.comparison


def test_contests_are_made_when_their_turn_comes() -> None:
    order: list[str] = []

    def made() -> Iterator[Contest]:
        for name in ("first", "second"):
            order.append(f"make {name}")
            yield contest(name)

    run_contests(made(), QUICK, on_block=lambda label, n, block: order.append(label))
    assert order == [
        "make first", *["first hot"] * 8, "make second", *["second hot"] * 8
    ]  # fmt: skip


def test_a_row_that_needs_no_timing_is_passed_on() -> None:
    row = CompareRow("same", "cold", None, note="both arms run one tile")
    rows, _ = run_contests([row, contest("x")], QUICK)
    assert rows[0] == row
    assert row.verdict == "SAME"
    assert row.exit_code == 0


def test_a_state_of_its_own_is_named() -> None:
    rows, _ = run_contests([contest("pp512", cache="as run")], QUICK)
    assert _comparison(rows[0]).settings["cache"] == "as run"


def stop_after(count: int) -> Callable[[str, int, Any], None]:
    seen = 0

    def on_block(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            raise KeyboardInterrupt

    return on_block


def test_ctrl_c_keeps_finished_blocks_and_contests() -> None:
    rows, interrupted = run_contests(
        [contest("a"), contest("b"), contest("c")], QUICK, on_block=stop_after(11)
    )
    assert interrupted
    assert [(row.label, len(_comparison(row).blocks)) for row in rows] == [("a", 8), ("b", 3)]


def test_ctrl_c_between_contests_keeps_those_before() -> None:
    def made() -> Iterator[Contest]:
        yield contest("a")
        raise KeyboardInterrupt

    rows, interrupted = run_contests(made(), QUICK)
    assert interrupted
    assert [row.label for row in rows] == ["a"]


def test_ctrl_c_before_anything_is_passed_on() -> None:
    def made() -> Iterator[Contest]:
        raise KeyboardInterrupt
        yield contest("a")

    with pytest.raises(KeyboardInterrupt):
        run_contests(made(), QUICK)


def test_a_result_is_plain_json_and_comparisons_come_back() -> None:
    rows, _ = run_contests([contest("x", 90.0)], QUICK)
    whole = json.loads(json.dumps(result(*rows, faults=("wrong",)).to_dict(), allow_nan=False))
    assert whole["exit_code"] == 3
    assert whole["arms"]["a"]["title"] == "a"
    assert Comparison.from_dict(whole["rows"][0]["comparison"]) == rows[0].comparison


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ("", UnsupportedError, "command A is empty"),
        ("echo 'x", UnsupportedError, "No closing quotation"),
    ],
)
def test_commands_that_are_none(command: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CommandArm("A", command)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program-here", "No such file"),
        ("sh -c 'echo bad >&2; exit 3'", "failed with code 3: sh -c .*\nbad"),
        ("sleep 5", "ran past its limit of 0.2 s"),
    ],
)
def test_commands_that_fail_are_never_timed(command: str, message: str) -> None:
    with pytest.raises(MeasureError, match=message):
        CommandArm("A", command, 0.2)()


def test_commands_report_their_wall_time_and_output() -> None:
    arm = CommandArm("A", "sh -c 'sleep 0.05; echo hi'")
    assert 50_000 < arm() < 5_000_000
    arm()
    (runs,) = arm.outputs.values()
    assert runs == 2


def test_commands_whose_output_must_be_the_same_void_when_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"A": 100.0, "B": 50.0}

    def call(arm: CommandArm) -> float:
        text = arm.name if arm.name == "B" and len(arm.outputs) else "same"
        arm.outputs[text] = arm.outputs.get(text, 0) + 1
        return times[arm.name]

    monkeypatch.setattr(CommandArm, "__call__", call)
    for same_output, verdict in ((True, "VOID"), (False, "DISJOINT")):
        a, b = CommandArm("A", "a"), CommandArm("B", "b")
        asked = command_contest(a, b, same_output=same_output)
        assert asked.plan == SamplePlan()
        (row,), _ = run_contests([asked], Settings(blocks=8, warm_up_us=0.0))
        assert row.verdict == verdict
