"""What the tuner leaves behind: the table, stale rows verified anew, the report and the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewright.errors import TileError, UnsupportedError
from tilewright.tiles.table import forget, load_table, save_table
from tilewright.tune.record import read_events
from tilewright.tune.tuner import Progress, Target
from tune.scripted_tuner import BEST, DEFAULT, HOT, a_table, chosen, cost, go, rejecting
from tune.toy_op import ARCH, FLAT, Machine, ScriptedGate, problem


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from a_table(tmp_path, monkeypatch)


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


def test_a_damaged_table_is_an_error_before_a_log_is_begun(table: Path) -> None:
    table.write_text("no table")
    with pytest.raises(TileError, match="no valid JSON"):
        go()
    assert [path.name for path in table.parent.iterdir()] == [table.name]


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


def test_a_tile_that_stays_in_use_is_not_ousted_by_a_row_nearby(table: Path) -> None:
    """Only the default is right for N = 32, and the row found for N = 64 would come near."""

    class Gate(ScriptedGate):
        def check(self, at: Any, tile: Any) -> Any:
            outcome = super().check(at, tile)
            return rejecting(tile)[tile] if at.N == 32 and tile != DEFAULT else outcome

    machine = Machine(cost)
    both = [Target(problem(N=32), 2.0), Target(problem(N=64), 1.0)]
    report = go(machine, Gate(machine), problems=both)

    assert [found.status for found in report.problems] == ["kept", "improved"]
    assert chosen(problem(N=64)).tile == BEST
    assert (chosen(problem(N=32)).tile, chosen(problem(N=32)).how) == (DEFAULT, "exact")
    resumed = go(machine, Gate(machine), problems=both, resume=True)
    assert resumed.problems[0].row == report.problems[0].row


def test_a_kept_tile_alone_makes_no_table(table: Path) -> None:
    machine = Machine(lambda tile: 10.0 if tile == DEFAULT else 50.0)
    report = go(machine)
    assert report.problems[0].status == "kept"
    assert report.problems[0].held is not None
    assert not table.exists()


def test_a_kept_tile_gets_its_row_where_all_rows_are_wanted(table: Path) -> None:
    machine = Machine(lambda tile: 10.0 if tile == DEFAULT else 50.0)
    report = go(machine, settings=replace(HOT, keep_rows=True))
    row = load_table(table).rows[0]
    assert report.problems[0].status == "kept"
    assert row == report.problems[0].row == report.problems[0].held
    assert (row.tile, row.source, row.samples > 0) == (DEFAULT, "tuned", True)
    assert chosen(problem()).how == "exact"


def test_ops_of_different_files_share_a_header_and_a_users_op_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilewright.ops.catalog import SPECS
    from tilewright.tune import refresh

    hashes = {"mmq": "aa", "w4a16": "bb"}
    known = refresh.running_of

    def running(spec: Any) -> Any:
        found = known(spec)
        return replace(found, kernel_hash=hashes.get(spec.name, found.kernel_hash))

    monkeypatch.setattr(refresh, "running_of", running)
    header = refresh.new_header([SPECS["w4a16"], SPECS["mmq"]], ARCH)
    assert header.kernel_hash == "mmq=aa, w4a16=bb"
    assert (header.hash_of("mmq"), header.hash_of("w4a16")) == ("aa", "bb")
    assert header.hash_of("moe") == ""
    with pytest.raises(TileError, match="an op of your own by itself"):
        refresh.new_header([SPECS["mmq"], Machine().spec()], ARCH)
