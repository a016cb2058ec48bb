from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright.errors import GateError, TilewrightError
from tilewright.tiles.tile import Tile
from tilewright.tune.isolate import IsolatedGate, Limits
from tune.toy_op import problem

SOURCE = f"{Path(__file__).with_name('wild_op.py')}:SPEC"
LIMITS = Limits(check_s=60.0, memory_bytes=512 << 20)


def tile(does: str) -> Tile:
    return Tile.of("wild", does=does)


@pytest.fixture(scope="module")
def gate() -> Iterator[IsolatedGate]:
    with IsolatedGate({"toy": SOURCE}, threads=1, limits=LIMITS) as gate:
        gate.prepare(problem())
        yield gate


def test_a_right_tile_passes_and_prints_do_not_disturb(gate: IsolatedGate) -> None:
    starts = gate.starts
    for does in ("fine", "print", "fine"):
        outcome = gate.check(problem(), tile(does))
        assert outcome.passed, outcome
        assert (outcome.kind, outcome.reason, outcome.check) == ("", "", None)
        assert outcome.seconds > 0
        assert outcome.compile_s is not None
        assert outcome.oracle_error is not None
    assert gate.starts == starts


@pytest.mark.parametrize(
    ("does", "kind", "reason"),
    [
        ("raise", "error", "ZeroDivisionError: by a tile"),
        ("compile", "compile", "TypingError"),
        ("memory", "memory", "MemoryError"),
        ("wrong", "oracle", "the oracle says"),
    ],
)
def test_a_fault_that_the_worker_survives_is_an_outcome(
    gate: IsolatedGate, does: str, kind: str, reason: str
) -> None:
    starts = gate.starts
    outcome = gate.check(problem(), tile(does))
    assert not outcome.passed
    assert outcome.kind == kind
    assert reason in outcome.reason
    assert gate.check(problem(), tile("fine")).passed
    assert gate.starts == starts


@pytest.mark.parametrize(
    ("does", "kind", "reason"),
    [
        ("crash", "crash", "SIGSEGV"),
        ("exit", "crash", "exit code 7"),
        ("touch", "memory", "512 MiB are allowed"),
    ],
)
def test_a_fault_that_ends_the_worker_is_an_outcome_and_another_one_starts(
    gate: IsolatedGate, does: str, kind: str, reason: str
) -> None:
    outcome = gate.check(problem(), tile(does))
    assert not outcome.passed
    assert outcome.kind == kind
    assert reason in outcome.reason
    starts = gate.starts
    assert gate.check(problem(), tile("fine")).passed
    assert gate.starts == starts + 1


def test_a_fault_of_a_gpu_is_one_tiles_and_not_those_of_all_that_follow(
    gate: IsolatedGate,
) -> None:
    assert gate.check(problem(), tile("fine")).passed
    starts = gate.starts
    outcome = gate.check(problem(), tile("fault"))
    assert outcome.kind == "error"
    assert "an illegal memory access" in outcome.reason
    assert gate.check(problem(), tile("fine")).passed
    assert gate.starts == starts + 1


def test_a_tile_that_hangs_is_ended_at_its_time_limit(gate: IsolatedGate) -> None:
    assert gate.check(problem(), tile("fine")).passed
    gate.limits = Limits(check_s=1.0)
    try:
        start = time.monotonic()
        outcome = gate.check(problem(), tile("hang"))
        assert 1.0 <= time.monotonic() - start < 10.0
    finally:
        gate.limits = LIMITS
    assert outcome.kind == "timeout"
    assert outcome.reason == "no answer within 1 s; it was ended"


def test_a_tile_outside_the_space_is_not_run(gate: IsolatedGate) -> None:
    outcome = gate.check(problem(), Tile.of("wild", does="anything"))
    assert outcome.kind == "rule"
    assert "does='anything' is none of" in outcome.reason


def test_an_oracle_that_fails_is_an_error_and_not_a_wrong_tile(gate: IsolatedGate) -> None:
    with pytest.raises(GateError, match="no operands of .*|act_dtype is 'float8'"):
        gate.prepare(problem(act_dtype="float8"))


def test_a_worker_that_cannot_load_the_op_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('no such luck')\n")
    with (
        IsolatedGate({"toy": f"{broken}:SPEC"}) as gate,
        pytest.raises(TilewrightError, match="does not start.*no such luck"),
    ):
        gate.prepare(problem())


def test_a_python_that_does_not_exist_is_an_error_of_ours() -> None:
    with (
        IsolatedGate({"toy": SOURCE}, python="/no/such/python") as gate,
        pytest.raises(TilewrightError, match="cannot be started"),
    ):
        gate.prepare(problem())


_TUNER = """
import sys
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.isolate import IsolatedGate
from tune.toy_op import problem
gate = IsolatedGate({"toy": sys.argv[1]})
gate.prepare(problem())
print(gate.pid, flush=True)
gate.check(problem(), Tile.of("wild", does="hang"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel to end the worker")
def test_the_worker_dies_with_a_tuner_that_is_killed() -> None:
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    tuner = subprocess.Popen(
        [sys.executable, "-c", _TUNER, SOURCE], stdout=subprocess.PIPE, env=env
    )
    assert tuner.stdout is not None
    worker = int(tuner.stdout.readline())
    tuner.send_signal(signal.SIGKILL)
    tuner.wait()
    tuner.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(worker):
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
