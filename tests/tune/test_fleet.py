"""Tuning by several workers, in threads of this process: who does what, and what a loss costs."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tilewright.errors import GateError, UnsupportedError
from tilewright.ops.choose import running_of
from tilewright.tiles.table import forget, load_table, problem_text
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.fleet import FleetReport, Refused, tune_fleet
from tilewright.tune.fleet_hub import Interrupts
from tilewright.tune.outcome import Outcome, PlantedOutcome
from tilewright.tune.record import Event, read_events
from tilewright.tune.rounds import Timing
from tilewright.tune.tuner import Progress, Settings, tune
from tune.fake_fleet import FakeFleet, FakeWorker
from tune.toy_op import ARCH, FLAT, Machine, ScriptedGate, loop, problem

DEFAULT = loop(16, 1)
BEST = loop(64, 2)
COSTS = {DEFAULT: 100.0, BEST: 60.0, loop(64, 4): 70.0, loop(128, 2): 80.0, FLAT: 180.0}
HOT = Settings(timing=Timing(cache="hot", sample_us=500.0, blocks=6), least_slice_s=0.0)
PROBLEMS = [problem(group=g) for g in (0, 16, 32, 64)]  # none is near another


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path))
    forget()
    yield tmp_path / f"{ARCH}.toy.json"
    forget()


def cost(tile: Tile) -> float:
    return COSTS.get(tile, 120.0)


def worker(**options: Any) -> FakeWorker:
    return FakeWorker(Machine(cost), **options)


def go(fleet: FakeFleet, problems: Any = None, **options: Any) -> FleetReport:
    return tune_fleet(
        problems or PROBLEMS,
        fleet,
        specs={"toy": Machine().spec()},
        **{"settings": HOT, "budget_s": 600.0, "strategy": "exhaustive", **options},
    )


def log(table: Path) -> list[Event]:
    return read_events(table.with_suffix(".tune.sqlite"))


def of(events: list[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event.kind in kinds]


def test_every_problem_is_tuned_by_one_device_and_the_row_says_which(table: Path) -> None:
    fleet = FakeFleet({"a": worker(), "b": worker()})
    report = go(fleet)
    (tuned,) = report.tables
    assert [p.status for p in tuned.problems] == ["improved"] * 4
    rows = load_table(table).rows
    assert [row.tile for row in rows] == [BEST] * 4
    by_problem: dict[Problem, set[str]] = {}
    for event in of(log(table), "sampled", "compared", "timing", "timed", "row"):
        assert event.problem is not None
        by_problem.setdefault(event.problem, set()).add(event.data["device"])
    assert len(by_problem) == 4
    assert all(len(devices) == 1 for devices in by_problem.values())
    for row in rows:
        assert {row.source.removeprefix("tuned on ")} == by_problem[row.problem]
    assert fleet.closed


def test_workers_share_problems_and_candidates(table: Path) -> None:
    fleet = FakeFleet({"a": worker(), "b": worker()})
    report = go(fleet)
    assert sum(w["timed"] for w in report.workers) == len(PROBLEMS)
    tried = report.tables[0].problems[0].tried
    assert sum(w["verified"] for w in report.workers) == tried * len(PROBLEMS)


def test_one_problem_is_verified_by_all_and_timed_by_one(table: Path) -> None:
    fleet = FakeFleet({"a": worker(), "b": worker()})
    report = go(fleet, [problem()])
    assert all(w["verified"] > 0 for w in report.workers)
    assert sorted(w["timed"] for w in report.workers) == [0, 1]
    verified = {event.data["device"] for event in of(log(table), "passed")}
    assert len(verified) == 2


def test_a_gate_says_no_wherever_it_runs(table: Path) -> None:
    wrong = {BEST: Outcome(False, "oracle", "off by one", "toy-case")}
    fleet = FakeFleet({"a": worker(verdicts=wrong), "b": worker(verdicts=wrong)})
    report = go(fleet)
    assert [row.tile for row in load_table(table).rows] == [loop(64, 4)] * 4
    assert all(p.rejected == {"oracle": 1} for p in report.tables[0].problems)


def kill_at(fleets: list[FakeFleet], method: str, nth: int) -> Any:
    """Kills the worker that gets the nth call of a method, in the middle of it."""
    seen: Counter[str] = Counter()

    def before(handle: str, asked: str, arguments: tuple[Any, ...]) -> None:
        seen[asked] += 1
        if asked == method and seen[asked] == nth:
            fleets[0].kill(handle)

    return before


@pytest.mark.parametrize("method", ["check", "open", "sample", "finals"])
def test_a_worker_lost_in_the_middle_loses_no_finished_row(method: str, table: Path) -> None:
    late = {"check": 20, "sample": 5}.get(method, 3)
    fleets: list[FakeFleet] = []
    fleet = FakeFleet({"a": worker(), "b": worker()}, kill_at(fleets, method, late))
    fleets.append(fleet)
    report = go(fleet)
    events = log(table)
    # whole, and each row once
    assert [p.status for p in report.tables[0].problems] == ["improved"] * 4
    assert [row.tile for row in load_table(table).rows] == [BEST] * 4
    rows = Counter(event.problem for event in of(events, "row"))
    assert set(rows.values()) == {1}
    assert len(rows) == 4
    # no candidate verified twice, and no finished problem measured twice
    verdicts = Counter((event.problem, event.tile) for event in of(events, "passed", "rejected"))
    assert set(verdicts.values()) == {1}
    finals = Counter((e.problem, e.data["device"]) for e in of(events, "compared"))
    assert set(finals.values()) == {1}
    done = {event.problem: event.number for event in of(events, "row")}
    assert all(e.number < done[e.problem] for e in of(events, "sampled", "compared"))
    # the loss is on record
    lost = of(events, "lost")[0].data
    assert "it was killed" in lost["reason"]
    assert {w["name"] for w in report.workers if w["state"] == "out"} == {lost["device"]}
    assert report.workers[0]["state"] != report.workers[1]["state"]
    assert report.exit_code == 0


def test_figures_of_a_lost_device_do_not_mix_with_those_of_another(table: Path) -> None:
    """The first device takes twice as long for everything; its samples stay in the log only."""
    begun = threading.Event()

    def before(handle: str, method: str, arguments: tuple[Any, ...]) -> None:
        if handle == "a" and method == "finals":
            begun.set()
            fleet.kill("a")
        if handle == "b" and method == "sample":
            assert begun.wait(30)  # so that the other one has samples too

    slow = FakeWorker(Machine(lambda tile: 2 * cost(tile)))
    fleet = FakeFleet({"a": slow, "b": worker()}, before)
    report = go(fleet)
    for found in report.tables[0].problems:
        incumbent = str(found.incumbent)
        assert {round(block["us"][incumbent] / 100.0) for block in found.rounds} == {1}
        assert all(us < 110 for c in found.candidates for us in c.incumbent_us)
        assert found.row is not None
        assert found.row.source.startswith("tuned on b/")
    used = {event.data["device"][0] for event in of(log(table), "sampled")}
    assert used == {"a", "b"}


def test_a_worker_whose_node_lives_is_started_again(table: Path) -> None:
    fleets: list[FakeFleet] = []
    fleet = FakeFleet({"a": worker(restarts=1)}, kill_at(fleets, "finals", 2))
    fleets.append(fleet)
    report = go(fleet)
    assert [p.status for p in report.tables[0].problems] == ["improved"] * 4
    assert [e.data["then"] for e in of(log(table), "lost")] == ["restarted", "another turn"]
    # the same device, started again: the samples it had taken are used
    rounds = Counter(
        (event.problem, str(tile))
        for event in of(log(table), "sampled")
        for tile in event.data["block"]["us"]
        if tile != str(DEFAULT)
    )
    assert max(rounds.values()) == HOT.timing.rounds


def test_a_problem_that_keeps_killing_workers_is_given_up_with_the_reason(table: Path) -> None:
    bad = PROBLEMS[1]

    def before(handle: str, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "open" and arguments[0]["group"] == bad.group:
            fleet.kill(handle)

    fleet = FakeFleet({"a": worker(restarts=9), "b": worker(restarts=9)}, before)
    report = go(fleet)
    found = {p.problem.group: p for p in report.tables[0].problems}
    assert found[bad.group].status == "skipped"
    assert "given up: 3 workers were lost with it" in found[bad.group].reason
    assert [found[p.group].status for p in PROBLEMS if p != bad] == ["improved"] * 3
    assert len(load_table(table).rows) == 3
    attempts = [e.data["attempt"] for e in of(log(table), "lost") if e.problem == bad]
    assert attempts == [1, 2, 3]
    assert report.exit_code == 1
    (reasons,) = report.given_up.values()
    assert list(reasons) == [problem_text(bad)]


def test_a_candidate_that_keeps_killing_workers_is_rejected(table: Path) -> None:
    def before(handle: str, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "check" and Tile.from_mapping(arguments[1]) == BEST:
            fleet.kill(handle)

    fleet = FakeFleet({"a": worker(restarts=9), "b": worker(restarts=9)}, before)
    report = go(fleet, [problem()])
    (found,) = report.tables[0].problems
    assert found.rejected == {"lost": 1}
    reason = next(c.outcome.reason for c in found.candidates if c.tile == BEST)
    assert "3 workers were lost with it" in reason
    assert "it was killed" in reason
    assert [e.tile for e in of(log(table), "retried")] == [BEST] * 3
    assert found.winner == loop(64, 4)


def test_when_every_worker_is_lost_what_was_finished_stays(table: Path) -> None:
    fleets: list[FakeFleet] = []
    fleet = FakeFleet({"a": worker()}, kill_at(fleets, "finals", 3))
    fleets.append(fleet)
    report = go(fleet)
    statuses = [p.status for p in report.tables[0].problems]
    assert statuses == ["improved", "improved", "skipped", "skipped"]
    assert [p.reason for p in report.tables[0].problems[2:]] == ["no worker is left"] * 2
    assert len(load_table(table).rows) == 2
    assert report.exit_code == 1
    # the next run finishes the rest, and nothing twice
    again = go(FakeFleet({"a": worker()}), resume=True)
    assert [p.status for p in again.tables[0].problems] == ["improved"] * 4
    assert Counter(Counter(e.problem for e in of(log(table), "row")).values()) == {1: 4}
    verdicts = Counter((e.problem, e.tile) for e in of(log(table), "passed"))
    assert set(verdicts.values()) == {1}


def test_a_resumed_run_on_another_device_takes_its_own_samples(table: Path) -> None:
    fleets: list[FakeFleet] = []
    slow = FakeWorker(Machine(lambda tile: 2 * cost(tile)))
    fleet = FakeFleet({"a": slow}, kill_at(fleets, "finals", 1))
    fleets.append(fleet)
    go(fleet)
    report = go(FakeFleet({"b": worker()}), resume=True)
    (first, *_) = report.tables[0].problems
    assert {round(block["us"][str(DEFAULT)] / 100.0) for block in first.rounds} == {1}
    assert report.tables[0].settings["resumed"].startswith("run 1")


def test_a_local_run_does_not_continue_that_of_a_fleet(table: Path) -> None:
    go(FakeFleet({"a": worker()}))
    machine = Machine(cost)
    local = tune(
        PROBLEMS, specs={"toy": machine.spec()}, gate=ScriptedGate(machine), clock=machine.clock,
        settings=HOT, strategy="exhaustive", resume=True,
    )  # fmt: skip
    assert local.settings["resumed"].startswith("nothing")


def presses(interrupts: Interrupts, times: int, method: str, nth: int) -> Any:
    seen: Counter[str] = Counter()

    def before(handle: str, asked: str, arguments: tuple[Any, ...]) -> None:
        seen[asked] += 1
        if asked == method and seen[asked] == nth:
            for _ in range(times):
                interrupts.add()
            time.sleep(0.5)  # it is still at it when they are heard

    return before


def test_after_ctrl_c_the_best_so_far_gets_its_finals(table: Path) -> None:
    interrupts = Interrupts()
    early = FakeWorker(Machine(lambda tile: 60.0 if tile == loop(16, 2) else 100.0))
    fleet = FakeFleet({"a": early}, presses(interrupts, 1, "sample", 3))
    report = go(fleet, interrupts=interrupts)
    first, second, *rest = report.tables[0].problems
    assert (first.status, second.status) == ("improved", "improved")
    assert second.tried < first.tried
    assert [p.reason for p in rest] == ["interrupted before it was begun"] * 2
    assert len(load_table(table).rows) == 2
    assert report.tables[0].interrupted
    assert report.exit_code == 130


def test_ctrl_c_twice_leaves_at_once_and_keeps_what_was_finished(table: Path) -> None:
    interrupts = Interrupts()
    fleet = FakeFleet({"a": worker()}, presses(interrupts, 2, "finals", 2))
    report = go(fleet, interrupts=interrupts)
    assert [p.status for p in report.tables[0].problems] == ["improved", "kept", *["skipped"] * 2]
    assert len(load_table(table).rows) == 1
    assert not of(log(table), "done")
    again = go(FakeFleet({"a": worker()}), resume=True)
    assert [p.status for p in again.tables[0].problems] == ["improved"] * 4


def test_ctrl_c_while_the_planted_tiles_are_verified_begins_nothing(table: Path) -> None:
    interrupts = Interrupts()
    report = go(
        FakeFleet({"a": worker()}, presses(interrupts, 1, "planted", 1)), interrupts=interrupts
    )
    assert [p.status for p in report.tables[0].problems] == ["skipped"] * 4
    assert report.exit_code == 130


def test_a_gate_that_passes_a_planted_tile_stops_everything(table: Path) -> None:
    right, wrong = Outcome(False, "oracle", "wrong"), Outcome(True)
    fleet = FakeFleet({
        "a": worker(planted=[PlantedOutcome(FLAT, "drops the tail", right)]),
        "b": worker(planted=[PlantedOutcome(FLAT, "drops the tail", wrong)]),
    })  # fmt: skip
    with pytest.raises(GateError, match=r"drops the tail; by the gate on b/"):
        go(fleet)
    assert not table.exists()
    assert fleet.closed


def test_planted_tiles_are_reported_once_however_many_workers() -> None:
    right = Outcome(False, "oracle", "wrong")
    planted = [
        PlantedOutcome(FLAT, "drops the tail", right),
        PlantedOutcome(BEST, "writes too far", right),
    ]
    report = go(FakeFleet({"a": worker(planted=planted), "b": worker(planted=planted)}))
    assert [p.fault for p in report.tables[0].planted] == ["drops the tail", "writes too far"]


def test_devices_of_different_arch_get_tables_of_their_own(tmp_path: Path) -> None:
    other = {"arch": "cpu-neon", "device": "An ARM", "units": 4}
    fleet = FakeFleet({"a": worker(), "b": worker(about=other), "c": worker(about=other)})
    report = go(fleet, out=tmp_path / "fleet")
    assert len(report.tables) == 2
    here = load_table(tmp_path / "fleet" / f"{ARCH}.toy.json")
    there = load_table(tmp_path / "fleet" / "cpu-neon.toy.json")
    assert there.header.arch == "cpu-neon"
    assert there.header.valid_for == ("cpu-neon",)
    assert (there.header.units, there.header.device) == (4, "An ARM")
    assert all(row.source.startswith("tuned on a/") for row in here.rows)
    assert all(row.source[9] in "bc" for row in there.rows)
    assert len(here.rows) == len(there.rows) == 4
    assert {note[0] for note in there.header.notes} == {"b", "c"}


def test_unit_counts_of_one_arch_get_tables_of_their_own(tmp_path: Path) -> None:
    fleet = FakeFleet({"a": worker(about={"units": 4}), "b": worker(about={"units": 8})})
    go(fleet, out=tmp_path / "fleet")
    names = sorted(path.name for path in (tmp_path / "fleet").glob("*.json"))
    assert names == [f"{ARCH}.4-units.toy.json", f"{ARCH}.8-units.toy.json"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"out": Path("one.json")}, r"out is one\.json, one table, but the fleet needs 2"),
        ({"log": Path("one.sqlite")}, r"log is one\.sqlite, one file, but the fleet needs 2"),
    ],
    ids=["out", "log"],
)
def test_one_file_for_two_tables_is_refused(option: dict[str, Path], message: str) -> None:
    fleet = FakeFleet({"a": worker(), "b": worker(about={"arch": "cpu-neon"})})
    with pytest.raises(UnsupportedError, match=message):
        go(fleet, **option)
    assert fleet.closed


def running(**changed: Any) -> dict[str, Any]:
    now = running_of(Machine().spec())
    toy = {"compiler": now.compiler, "kernel_hash": now.kernel_hash, "op_version": now.op_version}
    return {"running": {"toy": {**toy, **changed}}}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"about": {"version": "0.0.1"}}, r"it has tilewright 0\.0\.1, this machine has"),
        ({"about": running(kernel_hash="f" * 64)}, "its kernels of toy are ffffffffffff, here"),
        ({"about": running(op_version=7)}, "its toy is version 7, here it is 1"),
        ({"about": running(compiler="numba 0.1")}, r"it has numba 0\.1; here are numba"),
        ({"about": {"failed": "toy.py: there is no such file"}}, r"toy\.py: there is no such file"),
        ({"starts": "it did not start within 5 s"}, "it did not start within 5 s"),
    ],
    ids=["version", "kernel-hash", "op-version", "compiler", "op-missing", "not-started"],
)
def test_a_worker_with_other_code_is_refused_by_name(bad: dict[str, Any], reason: str) -> None:
    said: list[Refused] = []
    fleet = FakeFleet({"a": worker(), "b": worker(**bad)})
    report = go(fleet, on_refused=said.append)
    assert report.refused == said
    (refused,) = said
    assert refused.worker.startswith("worker b")
    assert re.search(reason, refused.reason)
    assert [w["name"][0] for w in report.workers] == ["a"]
    assert not [m for m, _ in fleet.workers["b"].asked if m != "about"]
    with pytest.raises(UnsupportedError, match=f"no worker of the fleet.*worker b.*{reason}"):
        go(FakeFleet({"b": worker(**bad)}))


def test_devices_of_one_name_are_told_apart() -> None:
    twin = {"host": "node", "place": "cpu0"}
    report = go(FakeFleet({"a": worker(about=twin), "b": worker(about=twin)}))
    assert sorted(w["name"] for w in report.workers) == ["node/cpu0#1", "node/cpu0#2"]


def test_workers_on_the_same_cpus_are_never_timed_together(table: Path) -> None:
    same = {"boot": "one", "uses": ["cpu0", "cpu1"]}
    fleet = FakeFleet({"a": worker(about=same), "b": worker(about=same)})
    go(fleet)
    timing = {"sample", "finals"}
    busy = [set(now.values()) for now in fleet.together if len(now) > 1]
    assert not [methods for methods in busy if methods & timing]


def test_workers_on_cpus_of_their_own_are_timed_together(table: Path) -> None:
    """The control of the test above: without the overlap they do run at the same time."""
    met = threading.Barrier(2, timeout=20)
    first: set[str] = set()

    def before(handle: str, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "finals" and handle not in first:
            first.add(handle)
            met.wait()

    apart = [{"boot": "one", "uses": [f"cpu{n}"]} for n in (0, 1)]
    go(FakeFleet({"a": worker(about=apart[0]), "b": worker(about=apart[1])}, before))
    assert first == {"a", "b"}


def test_results_are_readable_while_they_are_written(table: Path) -> None:
    seen: list[int] = []

    def on_event(progress: Progress) -> None:
        if progress.kind == "done":
            seen.append(len(of(log(table), "row")))

    go(FakeFleet({"a": worker(), "b": worker()}), on_event=on_event)
    assert len(seen) == 4
    assert all(count >= n for n, count in enumerate(seen, 1))


def test_progress_adds_up_over_devices() -> None:
    last: list[tuple[str, int, int, int]] = []

    def on_event(progress: Progress) -> None:
        last.append((progress.text, progress.tried, progress.index, progress.problems))

    report = go(FakeFleet({"a": worker(), "b": worker()}), on_event=on_event)
    tried = sum(p.tried for p in report.tables[0].problems)
    assert last[-1][1:] == (tried, 4, 4)
    assert {text[0] for text, *_ in last if "/" in text} == {"a", "b"}


def test_an_error_of_ours_in_one_device_ends_the_run(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("tilewright.tune.tuner.save_table", fails)
    fleet = FakeFleet({"a": worker(), "b": worker()})
    with pytest.raises(OSError, match="no space left"):
        go(fleet)
    assert fleet.closed
    assert of(log(table), "row")  # what was decided is in the log, from which --resume goes on


def test_an_error_of_a_worker_fails_the_problem_and_names_it() -> None:
    def before(handle: str, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "open":
            raise MemoryError("operands of 90 GiB")

    report = go(FakeFleet({"a": worker()}, before), [problem()])
    (found,) = report.tables[0].problems
    assert found.status == "failed"
    assert re.search(r"a/.*MemoryError: operands of 90 GiB", found.reason)
    assert report.exit_code == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "best"}, "strategy is 'best'"),
        ({"problems": [problem(op="conv")]}, "op is 'conv'; there are toy"),
    ],
    ids=["strategy", "op"],
)
def test_a_wrong_request_is_refused_before_a_worker_starts(
    options: dict[str, Any], message: str
) -> None:
    fleet = FakeFleet({"a": worker()})
    with pytest.raises(UnsupportedError, match=message):
        go(fleet, **options)
    assert not fleet.workers["a"].asked


@pytest.mark.parametrize(
    ("codes", "given_up", "code"),
    [
        ([0, 0], False, 0),
        ([5, 0], False, 5),
        ([5, 6], False, 6),
        ([5, 0], True, 1),
        ([130, 0], True, 130),
        ([130, 3], True, 3),
    ],
)
def test_the_exit_code_is_the_gravest(codes: list[int], given_up: bool, code: int) -> None:
    report = FleetReport(
        tables=[SimpleNamespace(exit_code=c) for c in codes],  # type: ignore[misc]
        given_up={"cpu, 2 units": {"toy": "lost"} if given_up else {}},
    )
    assert report.exit_code == code


def test_the_report_is_plain_data() -> None:
    report = go(FakeFleet({"a": worker(), "b": worker(about={"version": "9"})}))
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [w["name"][0] for w in data["workers"]] == ["a"]
    assert data["refused"][0]["worker"] == "worker b (b)"
    (placed,) = data["timed_on"].values()
    assert set(placed) == {problem_text(p) for p in PROBLEMS}
