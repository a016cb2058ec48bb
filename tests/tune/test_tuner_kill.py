"""kill -9 at any point, then --resume: no row lost, nothing measured twice, no table half written;
Ctrl-C keeps the best verified row."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright.tiles.table import forget, load_table
from tilewright.tiles.tile import Tile
from tilewright.tune.record import Event, read_events, read_runs
from tilewright.tune.result import TuneReport
from tilewright.tune.rounds import Timing
from tilewright.tune.tuner import Progress, Settings, log_path, tune
from tune.toy_op import SPACE, Machine, ScriptedGate, loop, problem

CHILD = Path(__file__).with_name("tuner_child.py")
DEFAULT = loop(16, 1)
BEST = loop(64, 2)


@pytest.fixture(autouse=True)
def _no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tables").mkdir()
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path / "tables"))
    forget()
    yield
    forget()


def child(out: Path, point: str, count: int) -> subprocess.CompletedProcess[str]:
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    return subprocess.run(
        [sys.executable, str(CHILD), str(out), point, str(count)],
        capture_output=True, text=True, env=env, timeout=120,
    )  # fmt: skip


def rounds_by_tile(events: list[Event]) -> Counter[tuple[Any, str]]:
    """Samples of each tile of each problem, the incumbent's not counted."""
    counts: Counter[tuple[Any, str]] = Counter()
    for event in events:
        if event.kind == "sampled":
            counts.update(
                (event.problem, name) for name in event.data["block"]["us"]
                if name != event.data["incumbent"]
            )  # fmt: skip
    return counts


def answered(events: list[Event]) -> Counter[tuple[Any, Tile | None]]:
    return Counter((e.problem, e.tile) for e in events if e.kind in ("passed", "rejected"))


def rows_in(events: list[Event]) -> set[tuple[int, str]]:
    return {(e.data["row"]["N"], str(e.tile)) for e in events if e.kind == "row"}


def rows_of(out: Path) -> set[tuple[int, str]]:
    return {(r.problem.N, str(r.tile)) for r in load_table(out).rows} if out.exists() else set()


def test_a_tuner_killed_again_and_again_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    out = tmp_path / "tables" / "out.json"
    kills = [
        ("rejected", 1),  # in the gate of the first problem
        ("sampled", 2),  # between batches
        ("passed", 3),  # in the second problem
        ("finals", 1),  # before the finals were measured
        ("save", 1),  # the row is in the log, the table does not have it yet
        ("saved", 1),  # its row is in both, the run has not ended
    ]
    log = log_path(out)
    before: Counter[tuple[Any, str]] = Counter()
    for point, count in kills:
        done = child(out, point, count)
        assert done.returncode == -signal.SIGKILL, (point, done.stdout, done.stderr)
        events = read_events(log)
        assert rows_of(out) <= rows_in(events), "a row stands in the table but not in the log"
        assert before <= rounds_by_tile(events), "samples were lost"
        before = rounds_by_tile(events)
    last = child(out, "never", 1)
    assert last.returncode == 0, last.stderr
    assert last.stdout.strip() == "0 ['improved', 'improved']"
    events = read_events(log)
    assert len(read_runs(log)) == 1
    assert [e.kind for e in events].count("resumed") == len(kills)
    assert set(answered(events).values()) == {1}, "a tile was verified twice"
    assert set(rounds_by_tile(events).values()) == {3}, "a tile was measured twice"
    assert Counter(e.problem for e in events if e.kind == "row") == {problem(N=64): 1,
                                                                      problem(N=4): 1}  # fmt: skip
    assert rows_of(out) == rows_in(events) == {(64, str(BEST)), (4, str(BEST))}


def test_a_row_whose_table_was_lost_is_written_again(tmp_path: Path) -> None:
    out = tmp_path / "tables" / "out.json"
    assert child(out, "save", 1).returncode == -signal.SIGKILL
    assert not out.exists()
    assert not list(out.parent.glob("*.json"))
    assert rows_in(read_events(log_path(out))) == {(64, str(BEST))}
    assert child(out, "never", 1).returncode == 0
    assert (64, str(BEST)) in rows_of(out)


def run(tmp_path: Path, machine: Machine, gate: ScriptedGate | None = None, **options: Any) -> Any:
    return tune(
        options.pop("problems", [problem(N=64), problem(N=4)]),
        specs={"toy": machine.spec()},
        gate=gate or ScriptedGate(machine),
        clock=machine.clock,
        out=tmp_path / "out.json",
        settings=Settings(timing=Timing(cache="hot")),
        **options,
    )


def fast() -> Machine:
    return Machine(lambda tile: 60.0 if tile == BEST else 100.0)


def test_a_finished_run_resumed_measures_nothing(tmp_path: Path) -> None:
    first: TuneReport = run(tmp_path, fast())
    machine = fast()
    gate = ScriptedGate(machine)
    again: TuneReport = run(tmp_path, machine, gate, resume=True)
    assert gate.asked == []
    assert machine.runs == {}
    before, after = first.to_dict()["problems"], again.to_dict()["problems"]
    for one, other in zip(before, after, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert again.exit_code == first.exit_code == 0


def test_without_resume_everything_is_done_again(tmp_path: Path) -> None:
    run(tmp_path, fast())
    machine = fast()
    gate = ScriptedGate(machine)
    run(tmp_path, machine, gate)
    assert gate.asked
    assert len(read_runs(tmp_path / "out.tune.sqlite")) == 2


@pytest.mark.parametrize("changed", [{"seed": 5}, {"strategy": "random"}], ids=["seed", "strategy"])
def test_a_run_of_other_settings_is_not_resumed_and_said(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    run(tmp_path, fast())
    machine = fast()
    gate = ScriptedGate(machine)
    report = run(tmp_path, machine, gate, resume=True, **changed)
    assert gate.asked
    assert report.settings["resumed"].startswith("nothing: the log has no run of these ops")


def started(tmp_path: Path) -> list[Tile | None]:
    return [e.tile for e in read_events(tmp_path / "out.tune.sqlite") if e.kind == "started"]


@pytest.mark.parametrize("strategy", ["local", "random", "exhaustive"])
@pytest.mark.parametrize("count", [2, 7, 11])
def test_a_search_goes_on_where_it_was(tmp_path: Path, strategy: str, count: int) -> None:
    """It climbs from the best of all that was ever measured, and not from the tile in use again."""
    costs = {tile: 80.0 + zlib.crc32(str(tile).encode()) % 40 for tile in SPACE.every()}
    options: dict[str, Any] = {"strategy": strategy, "problems": [problem(N=64)]}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, Machine(costs.__getitem__, noise=0.0), **options)
    machine = Machine(costs.__getitem__, noise=0.0)

    class Died(BaseException):
        """In the place of the death of the process."""

    def die(tile: Tile) -> None:
        if len(gate.asked) == count:
            raise Died

    gate = ScriptedGate(machine, on_check=die)
    with pytest.raises(Died):
        run(parts, machine, gate, **options)
    run(parts, Machine(costs.__getitem__, noise=0.0), resume=True, **options)
    again = started(parts)
    assert again[count - 1] == again[count]  # at work when the tuner died
    assert [*again[:count], *again[count + 1 :]] == started(whole)


class CtrlC:
    """Presses Ctrl-C when a tile has run, or an event has come, so often."""

    def __init__(self, kind: str, *counts: int) -> None:
        self.kind, self.counts, self.seen = kind, set(counts), 0

    def __call__(self, progress: Progress) -> None:
        if progress.kind == self.kind:
            self.seen += 1
            if self.seen in self.counts:
                raise KeyboardInterrupt


def test_ctrl_c_in_the_search_still_holds_the_finals_of_the_best(tmp_path: Path) -> None:
    machine = Machine(lambda tile: 100.0 - tile.tile_k / 4)
    report: TuneReport = run(tmp_path, machine, on_event=CtrlC("sampled", 2))
    first, second = report.problems
    assert report.interrupted
    assert report.exit_code == 130
    assert first.status == "improved"
    assert first.tried < first.space_size
    assert (second.status, second.reason) == ("skipped", "interrupted before it was begun")
    assert rows_of(tmp_path / "out.json") == {(64, str(first.winner))}


def test_ctrl_c_while_a_candidate_is_verified(tmp_path: Path) -> None:
    machine = fast()
    gate = ScriptedGate(machine)

    def press(tile: Tile) -> None:
        if len(gate.asked) == 5:
            raise KeyboardInterrupt

    gate.on_check = press
    report: TuneReport = run(tmp_path, machine, gate)
    assert report.interrupted
    assert [p.status for p in report.problems] == ["kept", "skipped"]
    gate.on_check = lambda tile: None
    report = run(tmp_path, machine, gate, resume=True)
    assert [p.status for p in report.problems] == ["improved", "improved"]
    assert set(answered(read_events(tmp_path / "out.tune.sqlite")).values()) == {1}


def test_a_second_ctrl_c_ends_the_finals_too_and_changes_nothing(tmp_path: Path) -> None:
    machine = Machine(lambda tile: 100.0 - tile.tile_k / 4)
    events = CtrlC("sampled", 2)
    finals = CtrlC("finals", 1)

    def both(progress: Progress) -> None:
        events(progress)
        finals(progress)

    report: TuneReport = run(tmp_path, machine, on_event=both)
    assert [p.status for p in report.problems] == ["kept", "skipped"]
    assert report.problems[0].reason == "interrupted before the end of its finals"
    assert not (tmp_path / "out.json").exists()
    resumed: TuneReport = run(tmp_path, machine, resume=True)
    assert [p.status for p in resumed.problems] == ["improved", "improved"]
    assert set(rounds_by_tile(read_events(tmp_path / "out.tune.sqlite")).values()) == {3}


def test_ctrl_c_before_anything_was_verified(tmp_path: Path) -> None:
    report: TuneReport = run(tmp_path, fast(), on_event=CtrlC("problem", 1))
    assert [p.status for p in report.problems] == ["kept", "skipped"]
    assert report.exit_code == 130


def test_a_tile_that_takes_the_tuner_down_three_times_is_not_tried_again(tmp_path: Path) -> None:
    class Died(BaseException):
        """In the place of the death of the process."""

    def die(tile: Tile) -> None:
        if tile == BEST:
            raise Died

    for _ in range(3):
        machine = fast()
        with pytest.raises(Died):
            run(tmp_path, machine, ScriptedGate(machine, on_check=die), resume=True)
    machine = fast()
    gate = ScriptedGate(machine, on_check=die)
    report: TuneReport = run(tmp_path, machine, gate, resume=True, problems=[problem(N=64)])
    (found,) = report.problems
    assert found.rejected == {"lost": 1}
    assert BEST not in [tile for _, tile in gate.asked]


@pytest.mark.parametrize("tile", [DEFAULT, BEST], ids=["the tile in use", "a candidate"])
def test_ctrl_c_at_the_same_tile_again_and_again_is_not_held_against_it(
    tmp_path: Path, tile: Tile
) -> None:
    def press(at: Tile) -> None:
        if at == tile:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"resume": True, "problems": [problem(N=64)]}
    for _ in range(4):
        machine = fast()
        report: TuneReport = run(
            tmp_path, machine, ScriptedGate(machine, on_check=press), **options
        )
        assert report.exit_code == 130
    (found,) = run(tmp_path, fast(), **options).problems
    assert (found.status, found.winner, found.rejected) == ("improved", BEST, {})


def test_ctrl_c_in_the_finals_again_and_again_is_not_held_against_the_finalists(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"resume": True, "problems": [problem(N=64)]}
    for _ in range(4):
        machine = fast()
        armed: list[bool] = []

        def press(progress: Progress, armed: list[bool] = armed) -> None:
            armed[:] = [True] if progress.kind == "finals" else armed

        def cost(tile: Tile, armed: list[bool] = armed) -> float:
            if armed:
                raise KeyboardInterrupt
            return 60.0 if tile == BEST else 100.0

        machine.cost = cost
        report: TuneReport = run(tmp_path, machine, on_event=press, **options)
        assert report.exit_code == 130
    (found,) = run(tmp_path, fast(), **options).problems
    assert (found.status, found.winner, found.rejected) == ("improved", BEST, {})
