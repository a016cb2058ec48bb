"""The tuning of several ops on a GPU, with no GPU: problems, shortlists, warming, one table."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_interpreter  # noqa: F401
from tilewright.device import INTERPRETER
from tilewright.measure import ReplayClock
from tilewright.ops.catalog import spec_for, specs_on
from tilewright.ops.choose import running_of
from tilewright.ops.contract import Inputs, OpSpec
from tilewright.tiles.table import forget, load_table, save_table
from tilewright.tiles.tile import Problem, Tile, m_bucket
from tilewright.tune.apart import Died
from tilewright.tune.outcome import Outcome, PlantedOutcome
from tilewright.tune.refresh import stale_rows
from tilewright.tune.rounds import Timing
from tilewright.tune.tuner import tune

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = pytest.mark.skipif(
    not (GPU / "tune_ops.py").exists(), reason="benchmarks/ is not part of this copy"
)
OPS = ("mmq", "moe", "ssd", "conv1d")
SMALL = {
    "mmq": Problem("mmq", INTERPRETER, "float16", "Q4_0", "float", 16, 64, 64, 0),
    "moe": Problem("moe", INTERPRETER, "float16", "Q4_0", "float", 8, 16, 32, 0),
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    monkeypatch.setattr(sys, "path", [str(GPU), str(GPU.parent), *sys.path])
    monkeypatch.setenv("TILEWRIGHT_TILES", str(tmp_path))
    forget()
    before = set(sys.modules)
    yield importlib.import_module
    forget()
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and GPU.parent in Path(file).parents:
            del sys.modules[name]


@pytest.mark.parametrize("op", OPS)
def test_problems_are_buckets_that_the_op_has_operands_for(script: Any, op: str) -> None:
    asked = script("tune_problems").wanted(op)
    spec = spec_for(op, "sm_90" if op != "moe" else INTERPRETER)
    problems = [one.problem for one in asked]
    assert len(set(problems)) == len(problems)
    assert [one.rank for one in asked] == sorted(one.rank for one in asked)
    for problem in problems:
        assert (problem.op, problem.arch) == (op, "sm_90")
        assert problem.M == m_bucket(problem.M)
        assert problem.weight_type in spec.weight_types
        spec.space().check(spec.space().default(problem), problem)


@pytest.mark.parametrize("op", OPS)
def test_shortlists_begin_with_the_default_and_hold_only_legal_tiles(script: Any, op: str) -> None:
    problems = script("tune_problems")
    asked = [replace(one, tiles=40) for one in problems.wanted(op)]
    space = spec_for(op, INTERPRETER).space()
    lists = problems.shortlists(asked, space)
    assert set(lists) == {one.problem for one in asked}
    for problem, tiles in lists.items():
        assert tiles[0] == space.default(problem)
        assert len(set(tiles)) == len(tiles) > 1, problem
        for tile in tiles:
            space.check(tile, problem)
    assert len({t.algorithm for tiles in lists.values() for t in tiles}) > 1 or op == "conv1d"


def test_a_kind_compiles_no_more_tiles_than_it_may(script: Any) -> None:
    asked, tuning = script("tune_problems").wanted("mmq"), script("tuning")
    space = spec_for("mmq", INTERPRETER).space()
    for most in (3, 1000):
        lists = script("tune_problems").shortlists(asked, space, most)
        jobs = [job for job in tuning.jobs_of(lists) if job.tile is not None]
        tiles = [(tuning.kind_of_problem(job.problem), job.tile) for job in jobs]
        assert len(set(tiles)) == len(tiles)
        for one in asked:
            kind = tuning.kind_of_problem(one.problem)
            own = max(o.tiles for o in asked if tuning.kind_of_problem(o.problem) == kind)
            assert 0 < sum(kind == of for of, _ in tiles) <= min(own, most)


@pytest.mark.parametrize("op", OPS)
def test_small_products_are_like_the_problem_and_legal(script: Any, op: str) -> None:
    tuning = script("tuning")
    spec = spec_for(op, INTERPRETER)
    for one in script("tune_problems").wanted(op):
        tile = spec.space().default(one.problem)
        case = tuning.small_case(spec, one.problem, tile)
        small = case.problem("sm_90")
        spec.space().check(tile, small)
        assert tuning.kind_of_problem(small) == tuning.kind_of_problem(one.problem)
        assert (small.K, small.M == 1) == (one.problem.K, one.problem.M == 1)
        assert small.M * small.N <= one.problem.M * one.problem.N


@pytest.mark.slow  # 10 s an op in the interpreter
@pytest.mark.parametrize("op", ["mmq", "moe"])
def test_warming_gates_a_tile(script: Any, op: str) -> None:
    tuning = script("tuning")
    tile = spec_for(op, INTERPRETER).space().default(SMALL[op])
    _, good, text = tuning.warm(tuning.Job(SMALL[op], tile))
    assert good, text
    assert text.startswith(str(tile))


@pytest.mark.parametrize("op", ["mmq", "moe"])
def test_warming_wants_planted_tiles_rejected(script: Any, op: str) -> None:
    tuning = script("tuning")
    planted = spec_for(op, INTERPRETER).space().planted
    number = next(i for i, wrong in enumerate(planted) if wrong.caught_by == "oracle")
    _, good, text = tuning.warm(tuning.Job(SMALL[op], planted=number))
    assert good, text
    assert text.startswith("planted: ")
    assert "rejected by" in text


def test_a_tile_that_ends_its_process_takes_no_other_with_it(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning = script("tuning")
    space = spec_for("mmq", INTERPRETER).space()
    tiles = space.candidates(SMALL["mmq"])[:3]
    jobs = [tuning.Job(SMALL["mmq"], planted=0), *(tuning.Job(SMALL["mmq"], t) for t in tiles)]
    fault = (jobs[2], False, "x rejected by 'launch': AcceleratorError: CUDA error: an illegal one")

    def apart(function: Any, tasks: Any, *, spent: Any, **_: Any) -> Iterator[tuple[int, Any]]:
        right = (jobs[1], True, "it passed")
        assert [spent(r) for r in (right, fault, Died("exit code 7"))] == [False, True, False]
        assert (function, tasks) == (tuning.warm, [(job,) for job in jobs])
        yield from ((1, right), (2, fault), (0, Died("its process ended with SIGSEGV")))

    monkeypatch.setattr(tuning, "apart", apart)
    assert tuning.compiled(jobs, 2, 60.0) == {(tuning.kind_of_problem(SMALL["mmq"]), tiles[0])}
    said = capsys.readouterr().out
    assert "NOT AS IT SHOULD BE: x rejected by 'launch'" in said
    assert (
        "NOT AS IT SHOULD BE: planted tile 0: Died(reason='its process ended with SIGSEGV')" in said
    )
    assert "compiling took too long" in said
    assert "3 of 4 compiled, 1 right" in said


class Machine:
    """Ops whose tiles take no time but that of a clock: all but the default are twice as fast."""

    def __init__(self) -> None:
        self.clock = ReplayClock()
        self.checked: list[tuple[Problem, Tile]] = []
        self.stop_at = -1
        self.right: dict[Any, torch.Tensor] = {}

    def spec(self, op: str) -> OpSpec:
        spec = spec_for(op, INTERPRETER)

        def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
            slow = tile == spec.space().default(inputs.case.problem(INTERPRETER))
            self.clock.advance(100.0 if slow else 50.0)
            key = (inputs.case, inputs.x64().tobytes())
            if key not in self.right:
                self.right[key] = torch.from_numpy(spec.reference(inputs)).to(inputs.x.dtype)
            return self.right[key].clone()

        return spec.with_run(run)

    def prepare(self, problem: Problem) -> None:
        pass

    def check(self, problem: Problem, tile: Tile) -> Outcome:
        self.checked.append((problem, tile))
        self.clock.advance(10_000.0)
        if len(self.checked) == self.stop_at:
            raise KeyboardInterrupt
        return Outcome(True, oracle_error=0.25)

    def planted(self, problem: Problem) -> list[PlantedOutcome]:
        return []

    def close(self) -> None:
        pass


@pytest.fixture
def run(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs `tune_ops.run` on small problems of mmq and moe, on a machine."""
    ops = script("tune_ops")
    monkeypatch.setattr(ops, "ARCH", INTERPRETER)
    # Emptying this machine's caches is not what takes the time here.
    tuning = script("tuning")
    monkeypatch.setattr(tuning, "Timing", lambda **given: Timing(**{**given, "cache": "hot"}))

    def wanted(op: str) -> list[Any]:
        rows = (SMALL[op], replace(SMALL[op], M=2 * SMALL[op].M))
        return [ops.Wanted(problem, "a model", i, 5) for i, problem in enumerate(rows)]

    monkeypatch.setattr(ops, "wanted", wanted)
    monkeypatch.setattr(
        ops, "compiled",
        lambda jobs, *_: {(ops.kind_of_problem(j.problem), j.tile) for j in jobs if j.tile},
    )  # fmt: skip

    def go(machine: Machine, *words: str) -> Any:
        specs = {op: machine.spec(op) for op in SMALL}
        monkeypatch.setattr(
            ops, "tune",
            lambda *args, **more: tune(*args, specs=specs, clock=machine.clock, **more),
        )  # fmt: skip
        out = str(tmp_path / "made" / "table.json")
        words = ("--out", out, "--report", str(tmp_path / "reports"), "--tiles", "3", *words)
        return ops.run(ops.parsed(words), machine)

    return go


def rows_by_op(path: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in load_table(path).rows:
        found.setdefault(row.problem.op, []).append(row.problem.M)
    return found


def test_ops_share_a_table_and_keep_each_other_s_rows(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "made" / "table.json"
    machine = Machine()
    (first,) = run(machine, "--ops", "mmq")
    assert [p.status for p in first.problems] == ["improved", "improved"]
    assert rows_by_op(out) == {"mmq": [16, 32]}
    before = load_table(out)
    machine = Machine()
    (second,) = run(machine, "--ops", "moe")
    assert second.refreshed == 0
    assert {problem.op for problem, _ in machine.checked} == {"moe"}  # none of mmq's anew
    table = load_table(out)
    assert rows_by_op(out) == {"mmq": [16, 32], "moe": [8, 16]}
    assert [row for row in table.rows if row.problem.op == "mmq"] == list(before.rows)
    assert stale_rows(table, specs_on(INTERPRETER)) == []
    for op in SMALL:
        assert table.header.hash_of(op) == running_of(spec_for(op, INTERPRETER)).kernel_hash
    assert table.header.hash_of("mmq") != table.header.hash_of("moe")


def test_tiles_that_were_not_warmed_are_not_tried(
    run: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = script("tune_ops")
    default = spec_for("mmq", INTERPRETER).space().default(SMALL["mmq"])
    monkeypatch.setattr(
        ops, "compiled", lambda jobs, *_: {(ops.kind_of_problem(SMALL["mmq"]), default)}
    )
    machine = Machine()
    (report,) = run(machine, "--ops", "mmq,moe")
    assert set(machine.checked) <= {
        (p.problem, t) for p in report.problems for t in (default, p.incumbent)
    }
    assert report.problems[0].status == "kept"


def test_an_interrupted_run_leaves_its_rows_and_report(run: Any, tmp_path: Path) -> None:
    machine = Machine()
    machine.stop_at = 4  # while the second problem's first tile is verified
    (report,) = run(machine, "--ops", "mmq,moe")
    assert report.interrupted
    assert rows_by_op(tmp_path / "made" / "table.json") == {"mmq": [16]}
    (written,) = (tmp_path / "reports").iterdir()
    whole = json.loads(written.read_text())
    assert (written.name, whole["interrupted"]) == ("mmq.json", True)
    assert [p["status"] for p in whole["problems"]] == ["improved", "kept"]


def test_no_op_is_begun_after_the_limit(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Machine(), "--limit", "3", "--ops", "mmq,moe") == []
    assert "mmq: no time" in capsys.readouterr().out


def test_what_a_budget_cannot_reach_is_not_compiled(
    run: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Problem] = []

    def note(jobs: Any, *_: Any) -> set[Any]:
        compiled.extend(job.problem for job in jobs if job.tile)
        return {(script("tuning").kind_of_problem(j.problem), j.tile) for j in jobs if j.tile}

    monkeypatch.setattr(script("tune_ops"), "compiled", note)
    (report,) = run(Machine(), "--ops", "mmq", "--budget", "mmq=3")
    assert [p.problem for p in report.problems] == [SMALL["mmq"]]
    assert set(compiled) == {SMALL["mmq"]}


def test_rows_in_force_are_begun_with_and_stale_ones_left_out(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(Machine(), "--ops", "mmq")
    made = tmp_path / "made" / "table.json"
    table = load_table(made)
    base = tmp_path / "base.json"
    save_table(base, table)
    made.unlink()
    run(Machine(), "--ops", "moe", "--base", str(base))
    assert rows_by_op(made) == {"mmq": [16, 32], "moe": [8, 16]}
    made.unlink()
    hashes = ", ".join(
        f"{op}={'0' * 64 if op == 'mmq' else table.header.hash_of(op)}" for op in OPS
    )
    save_table(base, replace(table, header=replace(table.header, kernel_hash=hashes)))
    capsys.readouterr()
    run(Machine(), "--ops", "moe", "--base", str(base))
    assert rows_by_op(made) == {"moe": [8, 16]}
    assert "2 of 2 rows of" in capsys.readouterr().out


def test_the_end_that_a_job_runner_sends_is_taken_as_ctrl_c(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = script("tune_ops")

    def run(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(ops, "run", run)
    monkeypatch.setattr(sys, "argv", ["tune_ops.py"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            ops.main()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_threads_are_limited_only_while_compiling(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with script("tuning").one_thread_each():
        assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "MKL_NUM_THREADS" not in os.environ
