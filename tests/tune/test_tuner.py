"""Who wins: the tuner's logic on a clock that moves only when a tile runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright.errors import TileError
from tilewright.ops.space import TileSpace
from tilewright.tiles.table import forget, load_table, user_table_path
from tilewright.tiles.tile import Tile
from tilewright.tune.tuner import tune
from tune.scripted_tuner import BEST, DEFAULT, HOT, a_table, chosen, cost, go, rejecting
from tune.toy_op import ARCH, FLAT, SPACE, Machine, ScriptedGate, loop, problem


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from a_table(tmp_path, monkeypatch)


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
