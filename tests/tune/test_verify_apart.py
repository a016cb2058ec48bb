"""Cases and gate trials in processes side by side: the rows of one, whatever ends a process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tilewright.cli.main import cli
from tilewright.ops.catalog import SPECS
from tilewright.tune.apart import Died, apart
from tilewright.tune.gate_proof import ProofRow, prove
from tilewright.tune.verify import VerifyRow, verify_op
from tilewright.tune.verify_apart import prove_apart, verify_apart
from user_specs import write_spec

IN_A_CHILD = "__import__('multiprocessing').parent_process() is not None and inputs.case.M == 5"
RUN = "    return kernel(inputs.x.reshape(rows_of(inputs), -1))\n"


def does(what: str, number: int) -> Any:
    """A task of these tests."""
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leaves":
        os._exit(7)
    if what == "raises":
        raise ZeroDivisionError("by a task")
    if what == "waits":
        time.sleep(60)
    return number, os.getpid()


def test_every_task_has_its_result_though_processes_die() -> None:
    kinds = ["fine", "killed", "fine", "raises", "leaves", "fine", "fine"]
    tasks = [(kind, i) for i, kind in enumerate(kinds)]

    found = dict(apart(does, tasks, jobs=2))

    assert sorted(found) == list(range(len(tasks)))
    assert found[1] == Died("its process ended with SIGKILL")
    assert found[3] == Died("ZeroDivisionError: by a task")
    assert found[4] == Died("its process ended with exit code 7")
    pids = {i: found[i][1] for i in (0, 2, 5, 6)}
    assert all(found[i][0] == i for i in pids)
    assert os.getpid() not in pids.values()


def test_a_spent_process_gets_no_other_task() -> None:
    tasks = [("fine", i) for i in range(3)]
    found = dict(apart(does, tasks, jobs=1, spent=lambda result: result[0] == 0))
    assert found[0][1] != found[1][1] == found[2][1]


def test_no_task_needs_no_process() -> None:
    assert list(apart(does, [], jobs=3)) == []


def test_whoever_stops_early_ends_the_processes() -> None:
    running = apart(does, [("fine", 0), ("waits", 1)], jobs=2)
    (_, (_, pid)) = next(running)
    start = time.monotonic()
    running.close()
    assert time.monotonic() - start < 30
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_no_result_is_waited_for_beyond_the_limit() -> None:
    start = time.monotonic()
    assert list(apart(does, [("waits", 0), ("waits", 1)], jobs=2, limit_s=0.2)) == []
    assert time.monotonic() - start < 30


def bare(row: VerifyRow) -> VerifyRow:
    return replace(row, seconds=0.0)


def test_rows_are_those_of_one_process_in_their_order() -> None:
    cases = {
        "conv1d": [c for c in SPECS["conv1d"].cases if c.M in (2, 17)][:6],
        "mmq": [c for c in SPECS["mmq"].cases if c.id.startswith("Q4_1-M5-")][:3],
    }
    seen: list[tuple[int, int]] = []

    report = verify_apart(
        cases, jobs=2, seed=3, on_case=lambda row, done, total: seen.append((done, total))
    )

    alone = [
        row
        for op, some in cases.items()
        for row in verify_op(SPECS[op], seed=3, cases=some, threads=1).rows
    ]
    assert [bare(row) for row in report.rows] == [bare(row) for row in alone]
    assert report.passed
    assert report.planned == 9
    assert seen == [(i + 1, 9) for i in range(9)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("__import__('os')._exit(7)", "crashed: its process ended with exit code 7"),
        (
            "globals().__setitem__('FAULT', True)",
            "crashed: RuntimeError: CUDA error: an illegal memory access",
        ),
    ],
    ids=["exit", "a-fault-that-stays"],
)
def test_one_case_does_not_fail_the_next(body: str, reason: str, tmp_path: Path) -> None:
    fault = "CUDA error: an illegal memory access"
    stays = f"    if 'FAULT' in globals():\n        raise RuntimeError('{fault}')\n"
    path = write_spec(tmp_path, RUN, f"    if {IN_A_CHILD}:\n        {body}\n{stays}{RUN}")
    source = f"{path}:SPEC"
    from tilewright.ops.catalog import load_spec

    report = verify_apart({source: load_spec(source).cases}, jobs=1)

    assert [row.passed for row in report.rows] == [True, False, True]
    assert report.rows[1].reason == reason
    assert report.rows[1].case == load_spec(source).cases[1].id


def test_a_process_whose_fault_left_no_verdict_runs_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Callable[[Any], bool]] = []

    def none(*_: Any, spent: Callable[[Any], bool], **__: Any) -> Iterator[Any]:
        asked.append(spent)
        return iter(())

    monkeypatch.setattr("tilewright.tune.verify_apart.apart", none)
    verify_apart({"conv1d": SPECS["conv1d"].cases[:1]}, jobs=1)
    prove_apart("conv1d", jobs=1)
    for spent in asked:
        assert spent(Died("AcceleratorError: CUDA error: an illegal memory access"))
        assert not spent(Died("GateError: no operands"))
    assert len(asked) == 2


def test_ctrl_c_gives_the_rows_that_are_there() -> None:
    def stop(row: VerifyRow, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    cases = [c for c in SPECS["conv1d"].cases if c.M == 1][:5]
    report = verify_apart({"conv1d": cases}, jobs=1, on_case=stop)
    assert (len(report.rows), report.complete, report.planned) == (2, False, 5)
    assert not report.passed


def said(row: ProofRow) -> tuple[Any, ...]:
    return (row.tile, row.planted, row.fault, row.case, row.result.passed, row.result.check)


def test_the_gates_proof_is_that_of_one_process() -> None:
    def wanted(case: Any) -> bool:
        return bool(case.weight_type == "w4")

    proof = prove_apart("conv1d", jobs=2, wanted=wanted)
    alone = prove(SPECS["conv1d"], wanted=wanted)
    assert proof.passed
    assert [said(row) for row in proof.rows] == [said(row) for row in alone.rows]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["verify", *arguments])


def test_jobs_of_the_verb() -> None:
    few = ("--op", "conv1d", "--case", "w4-M17", "-j", "2")
    result = invoke(*few)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("SSM_CONV w4 ")
    assert invoke("--op", "conv1d", "--jobs", "0").exit_code == 2


def test_a_case_that_ends_its_process_fails_the_verb(tmp_path: Path) -> None:
    path = write_spec(
        tmp_path, RUN, f"    if {IN_A_CHILD}:\n        __import__('os')._exit(7)\n{RUN}"
    )
    result = invoke("--spec", f"{path}:SPEC", "--jobs", "2")
    assert result.exit_code == 3
    (failed,) = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    assert "crashed: its process ended with exit code 7" in failed
