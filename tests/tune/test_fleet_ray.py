"""A real Ray cluster of two workers, one of which is killed in the middle of a run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tilewright.errors import TilewrightError
from tilewright.tiles.table import load_table
from tilewright.tune.record import Event, read_events

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed: pip install -c constraints.txt -e '.[fleet]'",
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="workers get CPUs of their own on Linux"),
]

HERE = Path(__file__).parent
SHAPES = ("2,128", "16,128", "128,128", "1024,128")  # too far apart to be near each other
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)]),
    "RAY_AUTH_MODE": "disabled",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, Any]]:
    with subprocess.Popen(
        [sys.executable, str(HERE / "ray_cluster.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()
        assert process.wait(60) == 0


def start(cluster: dict[str, Any], table: Path, *more: str) -> subprocess.Popen[str]:
    shapes = [part for shape in SHAPES for part in ("--shape", shape)]
    command = [
        sys.executable, "-c", "from tilewright.cli.main import main; main()",
        "tune", "--spec", f"{HERE / 'sleep_op.py'}:SPEC", *shapes, "--m", "16",
        "--ray", cluster["address"], "--out", str(table), "--budget", "120", "--blocks", "6",
        "--cache", "hot", "--strategy", "exhaustive", "--json", *more,
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


def log_of(table: Path) -> list[Event]:
    """What is in the log now; nothing as long as there is none."""
    try:
        return read_events(table.with_suffix(".tune.sqlite"))
    except TilewrightError:
        return []


def of(events: Sequence[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event.kind in kinds]


def wait_for(table: Path, met: Callable[[list[Event]], bool]) -> list[Event]:
    """The log, read while it is written, as soon as it meets a condition."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        events = log_of(table)
        if met(events):
            return events
        time.sleep(0.05)
    raise AssertionError("the run never came that far")


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=150)
    assert process.returncode in (0, 130), err
    report: dict[str, Any] = json.loads(out)
    return report


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended with one before it
            os.kill(pid, signal.SIGKILL)


def node_of(cluster: dict[str, Any], cpu: int) -> list[int]:
    """The processes of the node that runs on this CPU."""
    for raylet in map(psutil.Process, cluster["raylets"]):
        if raylet.is_running() and raylet.cpu_affinity() == [cpu]:
            return [raylet.pid, *(child.pid for child in raylet.children(recursive=True))]
    raise AssertionError(f"no node runs on CPU {cpu}")


def just_begun(events: Sequence[Event]) -> dict[str, Any]:
    """Devices whose problem has a round of samples, most of them still to come: -> problem."""
    rounds = Counter((event.data["device"], event.problem) for event in of(events, "sampled"))
    done = {event.problem for event in of(events, "row", "done")}
    return {at: problem for (at, problem), n in rounds.items() if n <= 3 and problem not in done}


def test_a_node_killed_in_the_middle_loses_no_finished_row(
    cluster: dict[str, Any], tmp_path: Path
) -> None:
    table = tmp_path / "nap.json"
    process = start(cluster, table)
    before = wait_for(table, lambda log: bool(of(log, "row")) and bool(just_begun(log)))
    victim, interrupted = next(iter(just_begun(before).items()))
    finished = {row.problem: row for row in load_table(table).rows}
    assert finished
    kill(node_of(cluster, int(victim.rpartition("cpu")[2])))
    report = finish(process)

    events, whole = log_of(table), load_table(table)
    # the table is whole, and what was finished before is as it was
    assert len(whole.rows) == len(SHAPES)
    assert all(row.tile.ms == 1 for row in whole.rows)
    assert {row.problem: row for row in whole.rows if row.problem in finished} == finished
    # nothing twice
    assert set(Counter(e.problem for e in of(events, "row")).values()) == {1}
    verdicts = Counter((e.problem, e.tile) for e in of(events, "passed", "rejected"))
    assert set(verdicts.values()) == {1}
    finals = Counter((e.problem, e.data["device"]) for e in of(events, "compared"))
    assert set(finals.values()) == {1}
    # no figure of the dead device in a row of another
    by_problem: dict[Any, set[str]] = {}
    for event in of(events, "compared"):
        by_problem.setdefault(event.problem, set()).add(event.data["device"])
    for row in whole.rows:
        assert row.source.removeprefix("tuned on ") in by_problem[row.problem]
    (again,) = [row for row in whole.rows if row.problem == interrupted]
    assert again.source != f"tuned on {victim}"
    # the loss is on record, and in the report
    lost = of(events, "lost")
    assert {event.data["device"] for event in lost} == {victim}
    (dead,) = [worker for worker in report["workers"] if worker["state"] == "out"]
    assert dead["name"] == victim
    assert dead["losses"]
    assert report["exit_code"] == 0
    assert not report["refused"]


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_a_run_that_was_ended_is_continued(
    how: str, cluster: dict[str, Any], tmp_path: Path
) -> None:
    table = tmp_path / "nap.json"
    process = start(cluster, table)
    wait_for(table, lambda log: bool(of(log, "row")) and bool(just_begun(log)))
    process.send_signal(signal.Signals[how])
    if how == "SIGINT":
        assert finish(process)["exit_code"] == 130
    else:
        process.communicate(timeout=30)
    kept = {row.problem: row for row in load_table(table).rows}
    assert 1 <= len(kept) < len(SHAPES)
    finish(start(cluster, table, "--resume"))
    whole = {row.problem: row for row in load_table(table).rows}
    assert len(whole) == len(SHAPES)
    assert {problem: whole[problem] for problem in kept} == kept
    events = log_of(table)
    assert set(Counter(e.problem for e in of(events, "row")).values()) == {1}
    verdicts = Counter((e.problem, e.tile) for e in of(events, "passed", "rejected"))
    assert set(verdicts.values()) == {1}
