from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilewright.errors import TilewrightError
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.record import Memory, Record, read_events, read_runs
from tune.toy_op import loop, problem

MARK = {"kernel_hash": "abc", "seed": 0}
A, B = loop(16), loop(32)


def recalled(record: Record) -> Memory:
    return record.recall()[problem()]


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.sqlite"
    with Record(path) as record:
        run = record.begin(MARK, {"budget_s": 60.0})
        record.add("started", problem(), A)
        record.add("passed", problem(), A, outcome={"passed": True, "oracle_error": 0.5})
        record.add("finished")
    first, second, third = read_events(path)
    assert (first.kind, first.problem, first.tile, first.run) == ("started", problem(), A, run)
    assert second.data == {"outcome": {"passed": True, "oracle_error": 0.5}}
    assert (third.kind, third.problem, third.tile, third.data) == ("finished", None, None, {})
    assert first.number < second.number < third.number
    (info,) = read_runs(path)
    assert (info.fingerprint, info.settings) == (MARK, {"budget_s": 60.0})


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET kind = 'passed'",
        "DELETE FROM events",
        "UPDATE runs SET settings = '{}'",
        "DELETE FROM runs",
        "INSERT OR REPLACE INTO events SELECT event, run, at, 'x', problem, tile, data FROM events",
    ],
)
def test_the_log_is_only_ever_added_to(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "log.sqlite"
    with Record(path) as record:
        record.begin(MARK, {})
        record.add("started", problem(), A)
        before = read_events(path)
        other = sqlite3.connect(path)
        other.execute("PRAGMA recursive_triggers = ON")
        with pytest.raises(sqlite3.IntegrityError, match="only ever added to"), other:
            other.execute(statement)
        other.close()
        assert read_events(path) == before


def test_a_log_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    with Record(path) as record:
        record.begin(MARK, {})
        for count in range(1, 4):
            record.add("started", problem(), A)
            assert len(read_events(path)) == count


def test_one_tuner_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    with Record(path), pytest.raises(TilewrightError, match="another process is tuning"):
        Record(path)
    Record(path).close()  # free again


@pytest.mark.parametrize("content", ["no database at all, but text" * 50, None])
def test_another_programs_file_is_refused_and_left_alone(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "theirs.sqlite"
    if content is None:
        base = sqlite3.connect(path)
        base.execute("CREATE TABLE theirs (x)")
        base.close()
    else:
        path.write_text(content)
    before = path.read_bytes()
    with pytest.raises(TilewrightError, match="is no tuning log"):
        Record(path)
    with pytest.raises(TilewrightError, match="is no tuning log"):
        read_events(path)
    assert path.read_bytes() == before


def test_a_missing_log_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(TilewrightError, match=r"there is no such tuning log"):
        read_runs(tmp_path / "nothing.sqlite")


def test_resume_takes_the_newest_run_of_the_same_kernels(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    with Record(path) as record:
        record.begin(MARK, {"n": 1})
        wanted = record.begin(MARK, {"n": 2})
        record.begin({**MARK, "kernel_hash": "def"}, {"n": 3})
    with Record(path) as record:
        found = record.resume(MARK)
        assert found is not None
        assert (found.run, found.settings) == (wanted, {"n": 2})
        assert record.resume({**MARK, "kernel_hash": "new"}) is None


def test_recall_gives_the_state_of_each_problem(tmp_path: Path) -> None:
    other = problem(N=64)
    with Record(tmp_path / "log.sqlite") as record:
        record.begin(MARK, {})
        record.add("problem", problem(), A, how="default")
        record.add("started", problem(), B)
        record.add("passed", problem(), B, outcome={"passed": True})
        record.add("timing", problem(), tiles=[B.as_dict()])
        record.add("sampled", problem(), block={"us": {}}, tiles=[B.as_dict()], incumbent="A")
        record.add("timed", problem(), tiles=[B.as_dict()])
        record.add("problem", other, A, how="default")
        record.add("done", other, None, status="kept")
        memory = recalled(record)
        assert memory.incumbent == A
        assert memory.outcomes == {B: {"outcome": {"passed": True}}}
        assert len(memory.rounds) == 1
        assert memory.done is None
        assert memory.lost == set()
        done = record.recall()[other].done
        assert done is not None
        assert done["status"] == "kept"


def test_samples_against_another_incumbent_are_forgotten(tmp_path: Path) -> None:
    with Record(tmp_path / "log.sqlite") as record:
        record.begin(MARK, {})
        record.add("problem", problem(), A)
        record.add("sampled", problem(), block={}, tiles=[], incumbent="A")
        record.add("compared", problem(), comparisons=[], tiles=[])
        record.add("problem", problem(), A)
        assert len(recalled(record).rounds) == 1
        record.add("problem", problem(), B)
        memory = recalled(record)
        assert (memory.rounds, memory.compared, memory.incumbent) == ([], [], B)


@pytest.mark.parametrize(
    ("begun", "answered", "lost"), [(2, False, False), (3, False, True), (3, True, False)]
)
def test_a_tile_that_never_comes_back_is_lost(
    tmp_path: Path, begun: int, answered: bool, lost: bool
) -> None:
    with Record(tmp_path / "log.sqlite") as record:
        record.begin(MARK, {})
        record.add("started", problem(), B)
        record.add("passed", problem(), B, outcome={})
        for _ in range(begun):
            record.add("timing", problem(), tiles=[B.as_dict()])
        if answered:
            record.add("timed", problem(), tiles=[B.as_dict()])
        assert (B in recalled(record).lost) is lost


def test_events_of_other_runs_are_not_recalled(tmp_path: Path) -> None:
    with Record(tmp_path / "log.sqlite") as record:
        record.begin(MARK, {})
        record.add("passed", problem(), A, outcome={})
        record.begin(MARK, {})
        assert record.recall() == {}


def test_what_is_no_number_of_json_is_not_written(tmp_path: Path) -> None:
    with Record(tmp_path / "log.sqlite") as record:
        record.begin(MARK, {})
        with pytest.raises(ValueError):
            record.add("sampled", problem(), us=float("nan"))
        assert record.recall() == {}


def test_tiles_keep_the_types_of_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    tile = Tile.of("x", flag=True, count=1, text="1", part=0.5)
    with Record(path) as record:
        record.begin(MARK, {})
        record.add("started", problem(), tile)
    (event,) = read_events(path)
    assert event.tile is not None
    assert [(k, type(v)) for k, v in event.tile] == [(k, type(v)) for k, v in tile]
    assert isinstance(event.problem, Problem)


_WRITER = """
import sys
from tune.toy_op import loop, problem
from tilewright.tune.record import Record
record = Record(sys.argv[1])
record.resume({}) or record.begin({}, {})
for count in range(10**9):
    record.add("sampled", problem(), loop(), count=count, filler="x" * 500)
    if count == 20:
        print("ready", flush=True)
"""


def test_events_are_whole_and_in_order_whenever_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    for step in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, env=env
        )
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.02 + 0.017 * step)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        events = read_events(path)
        counts: list[list[int]] = []
        for event in events:
            if event.kind == "resumed" or not counts:
                counts.append([])
            if event.kind == "sampled":
                counts[-1].append(event.data["count"])
        assert len(counts) == step + 1
        assert all(part == list(range(len(part))) for part in counts)
        assert all(len(part) > 20 for part in counts)
