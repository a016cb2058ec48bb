"""How the tuner spends its time: rounds, shares of the budget, and the check of the gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.errors import GateError
from tilewright.ops.space import TileSpace
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.outcome import Outcome, PlantedOutcome
from tilewright.tune.tuner import Target, ordered_targets
from tune.scripted_tuner import BEST, DEFAULT, HOT, a_table, cost, go
from tune.toy_op import FLAT, Machine, ScriptedGate, loop, problem


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from a_table(tmp_path, monkeypatch)


def test_rounds_hold_the_incumbent_and_each_tile_once_in_varying_order() -> None:
    (found,) = go(strategy="exhaustive").problems
    assert found.rounds
    orders = set()
    for block in found.rounds:
        assert str(DEFAULT) in block["us"]
        assert sorted(block["order"]) == sorted(block["us"])
        orders.add(block["order"].index(str(DEFAULT)))
    assert len(orders) > 1
    for candidate in found.candidates:
        if candidate.tile == DEFAULT:
            assert candidate.us == []
            continue
        assert len(candidate.us) == len(candidate.incumbent_us) == 3
        assert candidate.score == pytest.approx(100 / cost(candidate.tile), rel=0.02)


def test_a_hopeless_tile_is_sampled_only_once() -> None:
    machine = Machine(lambda tile: 1000.0 if tile == FLAT else cost(tile))
    (found,) = go(machine).problems
    (slow,) = [c for c in found.candidates if c.tile == FLAT]
    assert len(slow.us) == 1


def test_the_largest_share_comes_first_and_gets_most_of_the_budget() -> None:
    machine = Machine(cost)
    gate = ScriptedGate(machine, seconds=3.0)
    targets = [Target(problem(N=8), 1.0, "small"), Target(problem(N=64), 3.0, "large")]
    report = go(machine, gate, problems=targets, budget_s=40.0)
    assert [p.name for p in report.problems] == ["large", "small"]
    large, small = report.problems
    assert large.share == 0.75
    assert large.tried > small.tried > 0
    assert large.reason == small.reason.split("; ")[-1] == "the budget ended its search"
    assert report.seconds <= 43.0


def test_what_the_budget_does_not_reach_is_skipped_and_said(table: Path) -> None:
    machine = Machine(cost)
    gate = ScriptedGate(machine, seconds=2.0)
    problems = [problem(N=n) for n in (8, 16, 32, 64)]
    report = go(machine, gate, problems=problems, budget_s=12.0)
    statuses = [p.status for p in report.problems]
    assert statuses == ["kept", "kept", "skipped", "skipped"]
    assert report.problems[-1].reason == "the budget ended before it"
    assert report.seconds <= 13.0


def test_the_search_ends_in_time_for_the_finals() -> None:
    machine = Machine(lambda tile: 50.0 if tile == loop(16, 4) else cost(tile))
    gate = ScriptedGate(machine, seconds=1.5)
    report = go(machine, gate, strategy="exhaustive", budget_s=10.0)
    (found,) = report.problems
    assert found.tried < found.space_size
    assert (found.winner, found.status) == (loop(16, 4), "improved")
    assert report.seconds < 11.5


def test_finals_that_are_short_of_time_take_the_least_blocks() -> None:
    machine = Machine(cost)
    gate = ScriptedGate(machine, seconds=1.5)
    (found,) = go(machine, gate, budget_s=10.0).problems
    assert found.comparisons
    assert {c["settings"]["blocks_asked"] for c in found.comparisons} == {20}


def test_equal_problems_are_tuned_once() -> None:
    report = go(problems=[Target(problem(M=10), 1.0, "a"), Target(problem(M=16), 2.0, "b")])
    (found,) = report.problems
    assert (found.problem.M, found.share, found.name) == (16, 1.0, "a")


def test_a_target_s_own_tiles_are_tried_in_their_order() -> None:
    illegal = Tile.of("loop", tile_k=16, unroll=3)
    wanted = (BEST, illegal, FLAT, DEFAULT, BEST)
    gate = ScriptedGate(machine := Machine(cost))
    (found,) = go(
        machine, gate, problems=[Target(problem(), tiles=wanted)], strategy="exhaustive"
    ).problems
    assert [tile for _, tile in gate.asked] == [DEFAULT, BEST, FLAT]
    assert (found.winner, found.space_size) == (BEST, 3)


@pytest.mark.parametrize("whole_first", [False, True])
def test_equal_targets_share_their_tiles_or_the_space(whole_first: bool) -> None:
    machine = Machine(cost)
    some = [Target(problem(M=10), tiles=(FLAT,)), Target(problem(M=16), tiles=(BEST,))]
    specs = {"toy": machine.spec()}
    (both,) = ordered_targets(some, specs)
    assert both.tiles == (FLAT, BEST)
    with_space = [Target(problem()), *some] if whole_first else [*some, Target(problem())]
    (whole,) = ordered_targets(with_space, specs)
    assert whole.tiles == ()


def test_tiles_that_fix_the_threads_are_left_to_the_caller() -> None:
    space = TileSpace(
        "toy/cpu", {"loop": {"tile_k": (16, 32), "threads": (0, 1, 2)}}, (),
        lambda p: Tile.of("loop", tile_k=16, threads=0),
    )  # fmt: skip
    (found,) = go(Machine(), space=space).problems
    assert {c.tile.threads for c in found.candidates} == {0}


def test_only_allowed_candidates_are_tried() -> None:
    settings = replace(HOT, allow=lambda tile: tile.algorithm == "flat")
    (found,) = go(settings=settings).problems
    assert {c.tile for c in found.candidates} == {DEFAULT, FLAT}


def test_a_planted_tile_that_passes_stops_everything(table: Path) -> None:
    machine = Machine(cost)
    wrong = [
        PlantedOutcome(FLAT, "rows are missing", Outcome(False, "nan-fill", "NaN")),
        PlantedOutcome(BEST, "the tail of K is dropped", Outcome(True)),
    ]
    gate = ScriptedGate(machine, wrong_on_purpose=wrong)
    with pytest.raises(GateError, match="which is wrong on purpose .the tail of K is dropped"):
        go(machine, gate)
    assert machine.runs == {}
    assert gate.asked == []
    assert not table.exists()


def test_the_check_of_the_gate_does_not_use_up_the_budget() -> None:
    machine = Machine(cost)

    class SlowProof(ScriptedGate):
        def planted(self, problem: Problem) -> list[PlantedOutcome]:
            self.machine.clock.advance(100e6)
            return [PlantedOutcome(FLAT, "wrong", Outcome(False, "nan-fill", "NaN"))]

    report = go(machine, SlowProof(machine), budget_s=10.0)
    assert report.problems[0].status == "improved"
    assert 100.0 < report.seconds < 111.0


def test_a_small_budget_still_begins_the_first_problem() -> None:
    report = go(budget_s=0.5, problems=[problem(N=8), problem(N=64)])
    assert report.problems[0].tried > 0
    assert report.exit_code == 0


def test_a_run_that_begins_nothing_does_not_claim_to_hold() -> None:
    report = go()
    report.problems[0].status, report.problems[0].verdict = "skipped", ""
    assert report.exit_code == 5


def test_planted_tiles_that_are_rejected_are_in_the_report() -> None:
    machine = Machine(cost)
    wrong = [PlantedOutcome(FLAT, "rows are missing", Outcome(False, "nan-fill", "NaN in row 3"))]
    report = go(machine, ScriptedGate(machine, wrong_on_purpose=wrong))
    (planted,) = report.to_dict()["planted"]
    assert planted["fault"] == "rows are missing"
    assert (planted["status"], planted["check"]) == ("rejected", "nan-fill")
