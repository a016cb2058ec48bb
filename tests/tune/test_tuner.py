"""The tuner's logic on a clock that moves only when a tile runs: every figure is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewright.errors import GateError, TileError, UnsupportedError
from tilewright.ops.choose import running_of
from tilewright.ops.space import TileSpace
from tilewright.tiles.table import forget, load_table, lookup, save_table, user_table_path
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.outcome import Outcome, PlantedOutcome
from tilewright.tune.record import read_events
from tilewright.tune.result import TuneReport
from tilewright.tune.rounds import Timing
from tilewright.tune.tuner import Progress, Settings, Target, tune
from tune.toy_op import ARCH, FLAT, SPACE, Machine, ScriptedGate, loop, problem

DEFAULT = loop(16, 1)
BEST = loop(64, 2)
COSTS = {DEFAULT: 100.0, BEST: 60.0, loop(64, 4): 70.0, loop(128, 2): 80.0, FLAT: 180.0}
HOT = Settings(timing=Timing(cache="hot"))


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path))
    forget()
    yield tmp_path / f"{ARCH}.toy.json"
    forget()


def cost(tile: Tile) -> float:
    return COSTS.get(tile, 120.0)


def go(
    machine: Machine | None = None,
    gate: ScriptedGate | None = None,
    problems: Any = None,
    space: TileSpace = SPACE,
    **options: Any,
) -> TuneReport:
    machine = machine or Machine(cost)
    return tune(
        problems or [problem()],
        specs={"toy": machine.spec(space)},
        gate=gate or ScriptedGate(machine),
        clock=machine.clock,
        **{"settings": HOT, "budget_s": 60.0, **options},
    )


def chosen(at: Problem | None = None, space: TileSpace = SPACE) -> Any:
    """What an op gets now."""
    import torch

    return lookup(
        at or problem(), space, units=torch.get_num_threads(),
        running=running_of(Machine().spec()),
    )  # fmt: skip


def rejecting(*tiles: Tile, kind: str = "oracle") -> dict[Tile, Outcome]:
    return {tile: Outcome(False, kind, f"{kind} says no", "toy-case") for tile in tiles}


@pytest.mark.parametrize("strategy", ["local", "random", "exhaustive"])
def test_the_fastest_tile_wins_and_the_op_gets_it(strategy: str, table: Path) -> None:
    assert chosen().how == "default"
    report = go(strategy=strategy)
    (found,) = report.problems
    assert (found.status, found.verdict) == ("improved", "DISJOINT")
    assert (found.incumbent, found.how, found.winner) == (DEFAULT, "default", BEST)
    assert found.ratio == pytest.approx(100 / 60, rel=0.01)
    assert found.space_size == found.tried == len(SPACE.candidates(problem()))
    assert report.exit_code == 0
    for m in (9, 16):  # every batch of the bucket
        choice = chosen(problem(M=m))
        assert (choice.tile, choice.how) == (BEST, "exact")
    (row,) = load_table(table).rows
    assert row == found.row
    assert row.median_us == pytest.approx(60, rel=0.01)
    assert 0 < row.spread_us < 1
    assert row.samples == 80  # four times the least number of blocks: there was time
    assert (row.oracle_error, row.tried, row.rejected) == (0.25, found.tried, {})
    header = load_table(table).header
    assert header.arch == ARCH
    assert header.op_versions == {"toy": 1}


def test_a_second_run_starts_from_the_table_and_keeps_it(table: Path) -> None:
    go()
    before = table.read_bytes()
    (found,) = go().problems
    assert (found.status, found.how, found.incumbent) == ("kept", "exact", BEST)
    assert found.winner == BEST
    assert found.verdict == ""
    assert found.reason == "none looked faster; every candidate was tried"
    assert table.read_bytes() == before


def test_a_wrong_tile_cannot_win_however_fast(table: Path) -> None:
    """The fastest configuration of a whole session was wrong."""
    machine = Machine(lambda tile: 1.0 if tile == loop(128, 4) else cost(tile))
    report = go(machine, ScriptedGate(machine, rejecting(loop(128, 4), FLAT)))
    (found,) = report.problems
    assert found.winner == BEST
    assert found.rejected == {"oracle": 2}
    assert found.row is not None
    assert found.row.rejected == {"oracle": 2}
    assert loop(128, 4) not in machine.runs
    rejected = [c for c in found.candidates if c.status == "rejected"]
    assert {c.tile for c in rejected} == {loop(128, 4), FLAT}
    for candidate in rejected:
        assert candidate.us == []
        assert candidate.score is None
        assert (candidate.outcome.check, candidate.outcome.case) == ("oracle", "toy-case")
    assert report.exit_code == 0


@pytest.mark.parametrize("kind", ["crash", "timeout", "memory", "compile", "error", "nan-fill"])
def test_every_reason_is_counted_and_none_is_fatal(kind: str) -> None:
    machine = Machine(cost)
    (found,) = go(machine, ScriptedGate(machine, rejecting(loop(64, 4), kind=kind))).problems
    assert (found.winner, found.rejected) == (BEST, {kind: 1})


def test_all_candidates_failing_is_an_error_and_not_the_first_candidate(table: Path) -> None:
    """All failed, and the first was returned with an infinite time."""
    machine = Machine(cost)
    report = go(machine, ScriptedGate(machine, rejecting(*SPACE.every())))
    (found,) = report.problems
    assert (found.status, found.winner, found.row) == ("failed", None, None)
    assert found.reason == f"no tile passed the gate; of {found.tried} tried: oracle {found.tried}"
    assert report.exit_code == 3
    assert not table.exists()
    assert machine.runs == {}


def test_the_tile_in_use_is_no_yardstick_of_rightness(table: Path) -> None:
    """The first candidate once served as the reference."""
    machine = Machine(cost)
    report = go(machine, ScriptedGate(machine, rejecting(DEFAULT)))
    (found,) = report.problems
    assert (found.status, found.winner) == ("repaired", BEST)
    assert found.reason == f"the tile in use, {DEFAULT}, is wrong: oracle: oracle says no"
    assert DEFAULT not in machine.runs
    assert report.exit_code == 3
    assert chosen().tile == BEST


def test_a_wrong_row_of_the_table_falls_back_to_the_default_as_yardstick(table: Path) -> None:
    go()
    machine = Machine(cost)
    everything = [tile for tile in SPACE.every() if tile != DEFAULT]
    (found,) = go(machine, ScriptedGate(machine, rejecting(*everything))).problems
    assert (found.status, found.incumbent, found.winner) == ("repaired", BEST, DEFAULT)
    assert chosen().tile == DEFAULT


def test_a_default_that_is_illegal_is_replaced(table: Path) -> None:
    """A default needed more shared memory than the chip has."""
    space = TileSpace("toy/cpu", SPACE.fields, SPACE.rules, lambda p: loop(64, 1))
    at = problem(K=96)
    with pytest.raises(TileError, match="its default for toy"):
        chosen(at, space)
    report = go(problems=[at], space=space)
    (found,) = report.problems
    assert (found.status, found.incumbent) == ("repaired", None)
    assert "is not legal" in found.reason
    assert found.winner is not None
    assert SPACE.broken_rule(found.winner, at) is None
    forget()
    assert chosen(at, space).tile == found.winner


def test_tiles_that_break_a_rule_are_never_tried() -> None:
    """tile_k=256 on K=384 dropped the K tail, 57 % error, and won."""
    at = problem(K=96)
    machine = Machine(lambda tile: 1.0 if tile.tile_k > 32 else cost(tile))
    (found,) = go(machine, problems=[at]).problems
    assert {c.tile.tile_k for c in found.candidates} == {16, 32}
    assert {tile.tile_k for tile in machine.runs} <= {16, 32}


@pytest.mark.parametrize("us", [math.nan, math.inf, 0.0, -5.0])
def test_a_time_that_is_none_never_wins(us: float, table: Path) -> None:
    """An infinite time won; NaN was treated as a wildcard."""

    class Clock:
        """The replayed clock, but for the tile whose time is none."""

        name = "replay"

        def __init__(self, machine: Machine) -> None:
            self._machine = machine
            self.resolution_us = machine.clock.resolution_us
            self.now_us = machine.clock.now_us

        def time_us(self, launch: Callable[[], Any], launches: int) -> float:
            before = self._machine.runs.get(BEST, 0)
            took = self._machine.clock.time_us(launch, launches)
            return us if 5 < self._machine.runs.get(BEST, 0) != before else took

    machine = Machine(cost)
    report = tune(
        [problem()], specs={"toy": machine.spec()}, gate=ScriptedGate(machine),
        clock=Clock(machine), settings=HOT,
    )  # fmt: skip
    (found,) = report.problems
    assert found.winner == loop(64, 4)
    assert found.rejected == {"time": 1}
    (bad,) = [c for c in found.candidates if c.status == "rejected"]
    assert bad.tile == BEST
    assert bad.score is None
    json.dumps(report.to_dict(), allow_nan=False)


def test_an_output_that_is_wrong_only_when_timed_is_rejected_after_the_finals(table: Path) -> None:
    """WRONG_RESULT was only printed."""
    machine = Machine(cost, wrong=lambda tile: tile == BEST)
    report = go(machine, ScriptedGate(machine))  # the gate is blind here
    (found,) = report.problems
    assert found.rejected == {"after-timing": 1}
    assert (found.winner, found.verdict) == (loop(64, 4), "DISJOINT")
    voided = [c for c in found.comparisons if c["judgement"]["verdict"] == "VOID"]
    assert len(voided) == 3
    assert "the oracle says" in voided[0]["judgement"]["reasons"][0]
    assert chosen().tile == loop(64, 4)


def test_operands_that_a_tile_changes_do_not_reach_the_oracle(table: Path) -> None:
    """An in-place op corrupted its input across repetitions."""
    machine = Machine(cost)
    plain = machine.spec()

    def run(inputs: Any, tile: Any = None, threads: Any = None) -> Any:
        y = machine.run(inputs, tile, threads)
        if tile == BEST:
            inputs.x.mul_(0.5)
        return y

    report = tune(
        [problem()], specs={"toy": plain.with_run(run)}, gate=ScriptedGate(machine),
        clock=machine.clock, settings=HOT,
    )  # fmt: skip
    (found,) = report.problems
    assert found.rejected == {"inputs": 1}
    assert (found.winner, found.status) == (loop(64, 4), "improved")
    (bad,) = [c for c in found.candidates if c.status == "rejected"]
    assert bad.tile == BEST


def test_a_slow_tile_that_changes_the_operands_leaves_the_finals_alone(table: Path) -> None:
    machine = Machine(cost)

    def run(inputs: Any, tile: Any = None, threads: Any = None) -> Any:
        y = machine.run(inputs, tile, threads)
        if tile == FLAT:
            inputs.x.mul_(0.5)
        return y

    report = tune(
        [problem()], specs={"toy": machine.spec().with_run(run)}, gate=ScriptedGate(machine),
        clock=machine.clock, settings=HOT,
    )  # fmt: skip
    (found,) = report.problems
    assert (found.winner, found.status, found.rejected) == (BEST, "improved", {})


def test_a_tile_that_raises_while_it_is_timed_is_rejected(table: Path) -> None:
    machine = Machine(cost)

    def explode(tile: Tile) -> float:
        if tile == BEST and machine.runs.get(BEST, 0) > 5:
            raise RuntimeError("the sixth time")
        return cost(tile)

    machine.cost = explode
    (found,) = go(machine).problems
    assert found.winner == loop(64, 4)
    assert found.rejected == {"error": 1}
    (bad,) = [c for c in found.candidates if c.status == "rejected"]
    assert bad.outcome.reason == "RuntimeError: the sixth time"


def test_the_tile_in_use_raising_while_it_is_timed_fails_the_problem() -> None:
    machine = Machine(cost)

    def explode(tile: Tile) -> float:
        if tile == DEFAULT and machine.runs.get(DEFAULT, 0) > 5:
            raise RuntimeError("the sixth time")
        return cost(tile)

    machine.cost = explode
    report = go(machine)
    assert report.problems[0].status == "failed"
    assert "the tile in use" in report.problems[0].reason
    assert report.exit_code == 3


def test_the_best_of_equal_tiles_does_not_get_into_the_table() -> None:
    """The best of many identical configurations shows a gain that is not there."""
    improved = looked_faster = 0
    for seed in range(20):
        machine = Machine(lambda tile: 100.0, noise=0.01, seed=seed)
        (found,) = go(machine, strategy="exhaustive", seed=seed).problems
        best = found.best
        assert best is not None
        assert best.score is not None
        looked_faster += best.score > 1.0
        improved += found.status == "improved"
        if found.row is not None:
            user_table_path(ARCH, "toy").unlink()
    assert looked_faster >= 18
    assert improved <= 1


def test_a_small_gain_under_noise_is_found_on_fresh_data() -> None:
    machine = Machine(lambda tile: 97.0 if tile == BEST else 100.0, noise=0.01)
    (found,) = go(machine, strategy="exhaustive").problems
    assert (found.status, found.winner) == ("improved", BEST)
    assert found.verdict in ("FASTER", "DISJOINT")
    final = found.comparisons[-1]
    assert len(final["blocks"]) == 80
    searched = {tuple(block["us"].items()) for block in found.rounds}
    assert not searched & {tuple(block["us"].items()) for block in final["blocks"]}


def test_a_difference_within_delta_changes_nothing(table: Path) -> None:
    machine = Machine(lambda tile: 99.8 if tile == BEST else 100.0, noise=0.0001)
    report = go(machine)
    (found,) = report.problems
    assert (found.status, found.verdict) == ("kept", "SAME")
    assert found.winner == DEFAULT
    assert not table.exists()
    assert report.exit_code == 0


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


def test_rows_of_other_problems_stay_in_the_table(table: Path) -> None:
    go(problems=[problem(N=64)])
    go(problems=[problem(N=8)])
    assert sorted(row.problem.N for row in load_table(table).rows) == [8, 64]


def stale(path: Path, **changed: Any) -> None:
    found = load_table(path)
    save_table(path, replace(found, header=replace(found.header, **changed)))
    forget()


@pytest.mark.parametrize(
    "changed",
    [{"kernel_hash": "old"}, {"compiler": "numba 0.1"}, {"op_versions": {"toy": 0}}],
    ids=["kernels", "compiler", "op"],
)
def test_a_stale_table_is_verified_anew_before_it_is_used(
    table: Path, changed: dict[str, Any]
) -> None:
    """A stale table stayed in use after the compiler changed."""
    go(problems=[problem(N=64), problem(N=8)])
    stale(table, **changed)
    assert chosen(problem(N=64)).how == "default"
    machine = Machine(cost)
    gate = ScriptedGate(machine)
    report = go(machine, gate, problems=[problem(N=1)])
    assert (report.refreshed, report.dropped) == (2, [])
    assert gate.asked[:2] == [(problem(N=8), BEST), (problem(N=64), BEST)]
    assert chosen(problem(N=64)).how == "exact"
    notes = load_table(table).header.notes
    assert len(notes) == 1
    assert "2 rows verified anew" in notes[0]


def test_a_stale_row_that_fails_is_dropped(table: Path) -> None:
    go(problems=[problem(N=64), problem(N=8)])
    stale(table, kernel_hash="old")
    machine = Machine(cost)
    gate = ScriptedGate(machine, rejecting(BEST, kind="guard-bands"))
    report = go(machine, gate, problems=[problem(N=8)])
    assert report.refreshed == 0
    assert {p.N for p, _, _ in report.dropped} == {8, 64}
    assert report.dropped[0][2] == "guard-bands: guard-bands says no"
    assert chosen(problem(N=64)).tile != BEST


@pytest.mark.parametrize(("name", "value"), [("units", 77), ("arch", "a40")])
def test_a_table_of_another_machine_is_not_added_to(table: Path, name: str, value: Any) -> None:
    go()
    found = load_table(table)
    header = replace(found.header, valid_for=(ARCH, "a40"), **{name: value})
    rows = tuple(replace(r, problem=replace(r.problem, arch=header.arch)) for r in found.rows)
    save_table(table, replace(found, header=header, rows=rows))
    before = table.read_bytes()
    with pytest.raises(TileError, match=f"is of {name} {value}"):
        go()
    assert table.read_bytes() == before


def test_a_table_elsewhere_leaves_the_lookups_alone(tmp_path: Path) -> None:
    out = tmp_path / "elsewhere" / "mine.json"
    report = go(out=out)
    assert report.table == str(out)
    assert load_table(out).rows[0].tile == BEST
    assert chosen().how == "default"
    assert (tmp_path / "elsewhere" / "mine.tune.sqlite").is_file()


def test_progress_counts_and_shows_the_best_so_far() -> None:
    seen: list[Progress] = []
    machine = Machine(cost)
    gate = ScriptedGate(machine, rejecting(FLAT))
    go(machine, gate, on_event=lambda p: seen.append(replace(p)))
    last = seen[-1]
    assert (last.kind, last.tried, last.rejected) == ("finished", 13, 1)
    assert (last.index, last.problems) == (1, 1)
    assert last.best == pytest.approx(100 / 60, rel=0.02)
    assert last.best_tile == BEST
    left = [p.seconds_left for p in seen]
    assert left == sorted(left, reverse=True)
    assert [p.tried for p in seen] == sorted(p.tried for p in seen)


def test_the_report_is_plain_data_and_complete() -> None:
    report = go(provenance={"command": "tune"}).to_dict()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    (found,) = report["problems"]
    assert len(found["candidates"]) == found["tried"]
    assert {"tile", "status", "reason", "check", "us", "score"} <= set(found["candidates"][0])
    assert report["provenance"] == {"command": "tune"}
    assert report["header"]["arch"] == ARCH
    assert found["comparisons"][0]["judgement"]["verdict"] == "DISJOINT"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strategy": "bayes"}, UnsupportedError, "strategy is 'bayes'"),
        ({"problems": [Target(problem(), 0.0)]}, UnsupportedError, "there is no problem to tune"),
        ({"problems": [problem(op="conv")]}, UnsupportedError, "op is 'conv'; there are toy"),
    ],
    ids=["strategy", "no share", "op"],
)
def test_a_wrong_request_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        go(**options)


def test_events_of_a_run_tell_its_story(table: Path) -> None:
    machine = Machine(cost)
    go(machine, ScriptedGate(machine, rejecting(FLAT)))
    kinds = [event.kind for event in read_events(table.with_suffix(".tune.sqlite"))]
    assert kinds[:3] == ["started", "passed", "problem"]
    assert kinds[-2:] == ["row", "finished"]
    assert kinds.count("started") == 13
    assert kinds.count("rejected") == 1
    assert kinds.count("compared") == 1
