"""Climbing on a replayed clock: what is timed against what, what is carried, every exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tilewright.errors import GateError, MeasureError
from tilewright.measure import Comparison, ReplayClock, SamplePlan
from tilewright.tune.agreement import Agreement
from tilewright.tune.arms import Settings
from tilewright.tune.ladder import run_ladder
from tilewright.tune.ladder_file import ChangeSet, Ladder
from tilewright.tune.ladder_result import LadderResult

NOISE = [1.0, 1.003, 0.998, 1.001, 0.999, 1.002, 0.997]
QUICK = Settings(blocks=12, warm_up_us=0.0)
# What each change set does to the time of a prompt; decode is left alone by all but "decode".
FACTORS = {
    "half": 0.5,
    "tenth": 0.9,
    "slow": 1.2,
    "wrong": 0.25,
    "mute": 0.25,
    "none": 1.0,
    "decode": 0.8,
}


class FakeBench:
    """Arms whose times follow from their change sets."""

    def __init__(self, ladder: Ladder, wrong: Mapping[str, str] | None = None) -> None:
        self.clock = ReplayClock()
        self.plan: SamplePlan | None = SamplePlan()
        self.own_control = False
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.checked: list[str] = []
        self.unsteady = 0.0
        self.control_factor = 1.0
        self.fault_after = ""
        self.refuse = ""
        self._ladder, self._wrong = ladder, wrong or {}

    @contextmanager
    def open(self, name: str, change: ChangeSet) -> Iterator[Any]:
        if name == self.refuse:
            raise MeasureError(f"{name} cannot be opened")
        self.opened.append(name)
        yield SimpleNamespace(name=name, change=change)
        self.closed.append(name)

    def verify(self, arm: Any) -> str:
        self.checked.append(arm.name)
        for word, reason in self._wrong.items():
            if arm.change.env.get(word):
                raise GateError(reason)
        return "5/5 products right"

    def agree(self, base: Any, arm: Any, *, same_function: bool) -> Agreement | None:
        assert base.name == self._ladder.base.name
        faults = ("mean KL divergence is 9 nats",) if arm.change.env.get("mute") else ()
        return Agreement(4, 4, 32, (), 256, 0.0, 0.0, 1.0, same_function, faults)

    def tests(self) -> dict[str, int]:
        return {"pp512": 512, "tg32": 32} if self._ladder.control else {"pp512": 512}

    def launch(self, arm: Any, test: str) -> Callable[[], Any]:
        us = 1000.0
        for word in arm.change.env:
            if test == "pp512" or word == "decode":
                us *= FACTORS.get(word, 1.0)
        if arm.name.endswith("again"):
            us *= self.control_factor
        wide = [1 + self.unsteady * (n - 1) / 0.003 for n in NOISE]
        shift = len(arm.name) % 7
        return self.clock.replay([us * n for n in wide[shift:] + wide[:shift]])

    def probe(self, arms: Sequence[Any]) -> None:
        return None

    def post_check(self, arms: Sequence[Any]) -> Callable[[], Any]:
        names = [arm.name for arm in arms]
        return lambda: "its logits changed" if self.fault_after in names else None

    def details(self, arm: Any) -> dict[str, Any]:
        return {"decoder": "Fake"}


def ladder(*rungs: str, control: tuple[str, ...] = ("tg32",), moves: str = "") -> Ladder:
    """A rung a word; what a rung does is its environment's names."""
    return Ladder(
        "a ladder",
        ChangeSet("base"),
        tuple(
            ChangeSet(name, env={name: "1"}, moves=control if name == moves else ())
            for name in rungs
        ),
        model="m",
        tests=("pp512",),
        control=control,
    )


def climb(
    *rungs: str, bench: Callable[[FakeBench], None] | None = None, **options: Any
) -> tuple[LadderResult, FakeBench]:
    wrong = options.pop("wrong", None)
    file = ladder(
        *rungs, control=options.pop("control", ("tg32",)), moves=options.pop("moves", "")
    )  # fmt: skip
    fake = FakeBench(file, wrong)
    if bench is not None:
        bench(fake)
    result = run_ladder(file, fake, options.pop("settings", QUICK), subject="m", **options)
    return result, fake


def prompt(result: LadderResult, rung: int) -> tuple[Comparison, Comparison]:
    test = result.rungs[rung].tests[0]
    assert test.test == "pp512"
    return test.below, test.base


def test_each_rung_is_held_against_the_one_below_and_the_base() -> None:
    result, fake = climb("half", "tenth")
    below, base = prompt(result, 1)
    assert below.a == "half"
    assert below.b == base.b == "tenth"
    assert base.a == "base"
    assert below.ratio == pytest.approx(1 / 0.9, rel=0.004)
    assert base.ratio == pytest.approx(1 / 0.45, rel=0.004)
    assert below.verdict == base.verdict == "DISJOINT"
    assert result.rungs[1].below == "half"
    first_below, first_base = prompt(result, 0)
    assert first_below.ratio == first_base.ratio
    assert result.exit_code == 0
    assert result.rungs[1].tests[0].us == pytest.approx(450.0, rel=0.01)
    assert result.rungs[1].tests[0].base_us == pytest.approx(1000.0, rel=0.01)
    assert fake.closed[-1] == "base"
    assert sorted(fake.opened) == sorted(fake.closed)


def test_the_control_stays_where_it_is() -> None:
    result, _ = climb("half")
    control = result.rungs[0].tests[1]
    assert control.control
    assert control.below.verdict in ("SAME", "UNRESOLVED")
    assert result.rungs[0].moved == ()


def test_a_control_that_moves_gives_6_unless_the_rung_says_so() -> None:
    result, _ = climb("decode")
    (moved,) = result.rungs[0].moved
    assert moved.test == "tg32"
    assert result.exit_code == 6
    result, _ = climb("decode", moves="decode")
    assert result.rungs[0].moved == ()
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [({"wrong": "Q4_1 is off by 3x"}, "Q4_1 is off by 3x"), ({}, "mean KL divergence is 9 nats")],
    ids=["products", "words"],
)
def test_a_wrong_rung_is_shown_with_its_gain_and_not_carried(
    wrong: dict[str, str], fault: str
) -> None:
    name = "wrong" if wrong else "mute"
    result, fake = climb(name, "tenth", wrong=wrong)
    bad, good = result.rungs
    assert not bad.right
    assert bad.faults == (fault,)
    assert bad.to_dict()["status"] == "WRONG"
    assert bad.tests[0].base.ratio == pytest.approx(4.0, rel=0.004)
    assert good.right
    assert good.below == "base"
    assert good.tests[0].base.ratio == pytest.approx(1 / 0.9, rel=0.004)
    assert result.exit_code == 3
    assert result.left_out == ()
    assert fake.closed[0] == name


def test_a_slow_rung_gives_4_and_is_carried() -> None:
    result, _ = climb("slow", "half")
    assert prompt(result, 0)[0].exit_code == 4
    assert result.rungs[1].below == "slow"
    assert result.exit_code == 4


def test_noise_gives_5() -> None:
    def unsteady(bench: FakeBench) -> None:
        bench.unsteady = 0.05

    result, _ = climb("none", bench=unsteady, settings=Settings(blocks=8, warm_up_us=0.0))
    assert prompt(result, 0)[0].verdict == "UNRESOLVED"
    assert result.exit_code == 5


def test_a_failed_check_after_timing_voids_both_comparisons() -> None:
    def break_half(bench: FakeBench) -> None:
        bench.fault_after = "half"

    result, _ = climb("half", bench=break_half)
    below, base = prompt(result, 0)
    assert below.verdict == base.verdict == "VOID"
    assert below.judgement.reasons == ("the check after timing failed: its logits changed",)
    assert result.exit_code == 6


def test_a_control_of_its_own_is_another_arm_of_the_base() -> None:
    def own(bench: FakeBench) -> None:
        bench.own_control = True
        bench.control_factor = 1.04

    result, fake = climb("half", bench=own)
    assert fake.opened == ["base", "base again", "half"]
    below, base = prompt(result, 0)
    assert base.judgement.control == pytest.approx(1 / 1.04, rel=0.004)
    assert below.verdict == base.verdict == "VOID"
    assert below.judgement.reasons[0].startswith("the control differs")
    assert len(below.judgement.reasons) == 1


def test_leave_one_out_takes_each_change_from_the_whole() -> None:
    result, fake = climb("half", "tenth", "none")
    assert [left.name for left in result.left_out] == ["half", "tenth", "none"]
    worth = {left.name: left.comparisons["pp512"] for left in result.left_out}
    assert worth["half"].ratio == pytest.approx(2.0, rel=0.004)
    assert worth["half"].a == "without half"
    assert worth["half"].b == "none"
    assert worth["tenth"].ratio == pytest.approx(1 / 0.9, rel=0.004)
    assert worth["none"].ratio == pytest.approx(1.0, rel=0.004)
    assert fake.checked[-2:] == ["without half", "without tenth"]
    assert all(list(left.comparisons) == ["pp512"] for left in result.left_out)


def test_leave_one_out_can_be_left_out() -> None:
    assert climb("half", "tenth", leave_one_out=False)[0].left_out == ()
    assert climb("half")[0].left_out == ()


def test_a_stack_that_does_not_work_without_a_change_says_why() -> None:
    def refuse(bench: FakeBench) -> None:
        bench.refuse = "without half"

    result, _ = climb("half", "tenth", bench=refuse)
    assert result.left_out[0].reason == "without half cannot be opened"
    assert result.left_out[0].comparisons == {}
    assert list(result.left_out[1].comparisons) == ["pp512"]


def test_verdicts_are_adjusted_over_the_rungs() -> None:
    few = Settings(blocks=6, warm_up_us=0.0)
    alone, _ = climb("half", control=(), settings=few)
    assert prompt(alone, 0)[0].judgement.p_adjusted == pytest.approx(2**-5)
    assert prompt(alone, 0)[0].verdict == "DISJOINT"
    four, _ = climb("half", "tenth", "slow", "none", control=(), settings=few, leave_one_out=False)
    assert prompt(four, 0)[0].judgement.p_adjusted == pytest.approx(4 * 2**-5)
    assert prompt(four, 0)[0].verdict == "UNRESOLVED"


def test_a_wrong_base_is_not_timed() -> None:
    file = Ladder(
        "x", ChangeSet("base", env={"bad": "1"}), (ChangeSet("half"),), "m", tests=("pp512",)
    )
    with pytest.raises(GateError, match="the base is off"):
        run_ladder(file, FakeBench(file, {"bad": "the base is off"}), QUICK)


def test_an_arm_that_cannot_be_opened_is_an_error() -> None:
    def refuse(bench: FakeBench) -> None:
        bench.refuse = "half"

    with pytest.raises(MeasureError, match="half cannot be opened"):
        climb("half", bench=refuse)


def stop_after(count: int) -> Callable[..., None]:
    seen = 0

    def on_block(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            raise KeyboardInterrupt

    return on_block


def test_ctrl_c_keeps_what_was_finished() -> None:
    result, fake = climb("half", "tenth", on_block=stop_after(12 + 12 + 7))
    assert result.interrupted
    assert [rung.name for rung in result.rungs] == ["half", "tenth"]
    assert len(result.rungs[1].tests) == 1
    assert len(prompt(result, 1)[0].blocks) == 7
    assert prompt(result, 1)[0].interrupted
    assert result.left_out == ()
    assert sorted(fake.opened) == sorted(fake.closed)


def test_ctrl_c_during_leave_one_out_keeps_the_rungs() -> None:
    result, _ = climb("half", "tenth", on_block=stop_after(4 * 12 + 3))
    assert result.interrupted
    assert all(len(rung.tests) == 2 for rung in result.rungs)
    assert [len(c.blocks) for left in result.left_out for c in left.comparisons.values()] == [3]


def test_ctrl_c_before_the_first_rung_is_passed_on() -> None:
    def interrupt(bench: FakeBench) -> None:
        def verify(arm: Any) -> str:
            raise KeyboardInterrupt

        bench.verify = verify  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt):
        climb("half", bench=interrupt)


def test_a_result_is_plain_json_and_its_comparisons_come_back() -> None:
    result, _ = climb("half", "wrong", "tenth", wrong={"wrong": "off"})
    whole = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert whole["exit_code"] == 3
    assert [rung["status"] for rung in whole["rungs"]] == ["right", "WRONG", "right"]
    assert whole["rungs"][2]["below"] == "half"
    row = whole["rungs"][0]["tests"][0]["below"]
    assert Comparison.from_dict(row) == result.rungs[0].tests[0].below
    assert row["settings"]["cache"] == "as run"
    assert [left["name"] for left in whole["left_out"]] == ["half", "tenth"]
