"""The planted tiles: outside the space, real launches, right where a tuner would look at them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.device import cpu_device
from tilewright.errors import TileError
from tilewright.ops.catalog import SPECS
from tilewright.ops.check import check_output
from tilewright.ops.contract import Case, Inputs, OpSpec
from tilewright.ops.cpu import planted_launches
from tilewright.ops.cpu.launch import launch_gemm
from tilewright.ops.cpu.planted import planted_tiles
from tilewright.ops.gemm import launched
from tilewright.ops.space import Planted, TileSpace
from tilewright.tiles.tile import Problem, Tile

# Kinds of fault that knowledge of such kernels asks for, and which planted tile stands for each.
KINDS = {
    "partial rows covered": {"partial-rows"},
    "partial columns covered": {"partial-columns"},
    "K tail dropped": {"k-tail", "dot-tail"},
    "group straddled": {"group-straddled"},
    "wrong scale row": {"scale-row", "x-scale-row"},
    "written past the end": {"past-the-end"},
    "stale shared buffer": {"stale-x", "warmed-up", "weights-by-shape"},
    "unpadded tail read": {"unpadded-tail"},
    "input corrupted in place": {"quantized-in-place"},
    "output not started": {"no-start"},
    "order changes from run to run": {"alternating-blocks"},
    "a little too much error in one place": {"tail-sums"},
}
ONLY_W4 = {"scale-row", "unpadded-tail"}
ONLY_MMQ = {"tail-sums"}

OPS = ("mmq", "w4a16")
ALL = [(op, planted) for op in OPS for planted in planted_tiles(op, wide=True)]
each_planted = pytest.mark.parametrize(
    ("op", "planted"), ALL, ids=[f"{op}-{planted.name}" for op, planted in ALL]
)


def space_of(op: str) -> TileSpace:
    spec = SPECS[op]
    assert spec.space is not None
    return spec.space()


def problem(case: Case) -> Problem:
    return case.problem(cpu_device().arch)


def test_every_kind_of_fault_is_planted() -> None:
    named = {name for names in KINDS.values() for name in names}
    assert {p.name for p in space_of("mmq").planted} == named - ONLY_W4
    assert {p.name for p in space_of("w4a16").planted} == named - ONLY_MMQ


@pytest.mark.parametrize("wide", [True, False], ids=["512-bit", "256-bit"])
@pytest.mark.parametrize("op", OPS)
def test_names_say_what_is_wrong_and_why_it_would_win(op: str, wide: bool) -> None:
    several = planted_tiles(op, wide=wide)
    assert len({p.name for p in several}) == len(several)
    for planted in several:
        assert len(planted.fault) > 20
        assert planted.why_faster
        assert planted.cases
        assert getattr(planted_launches, planted.name.replace("-", "_"))
        types = [case.weight_type for case in planted.cases]
        assert len(set(types)) == len(types)


@each_planted
def test_it_is_no_tile_of_the_space(op: str, planted: Planted) -> None:
    space = space_of(op)
    case = planted.cases[0]
    with pytest.raises(TileError, match=r"has the fields \[.*\], not \[.*'planted'"):
        space.check(planted.tile, problem(case))
    honest = problem(case)
    space.check(planted.honest, honest)
    assert planted.tile not in space.candidates(honest)


@pytest.mark.parametrize("op", OPS)
def test_the_op_cannot_be_launched_with_it(op: str) -> None:
    spec = SPECS[op]
    for planted in space_of(op).planted:
        inputs = spec.make_inputs(planted.cases[0], 0)
        with pytest.raises(TileError, match="planted"):
            spec.run(inputs, tile=planted.tile)


def test_a_table_cannot_bring_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with a planted tile in it, as a hand or a broken tuner may write it."""
    from tilewright.ops.choose import choose_tile, running
    from tilewright.tiles.table import FOLDER_VARIABLE, forget
    from tilewright.tiles.table_file import TableHeader, TableRow, TileTable, save_table

    planted = space_of("mmq").planted[0]
    wanted = problem(planted.cases[0]).bucketed()
    code = running("mmq", wanted.arch)
    units = torch.get_num_threads()
    header = TableHeader(
        arch=wanted.arch, valid_for=(wanted.arch,), units=units, device="a CPU",
        compiler=code.compiler, kernel_hash=code.kernel_hash,
        op_versions={"mmq": code.op_version}, date="2026-01-01", source="test", notes=(),
    )  # fmt: skip
    row = TableRow(
        problem=wanted, tile=planted.tile, median_us=1.0, spread_us=0.1, samples=20,
        oracle_error=0.1, tried=2, rejected={}, source="tuned",
    )  # fmt: skip
    save_table(tmp_path / f"{wanted.arch}.json", TileTable(header, (row,)))
    assert planted.name in (tmp_path / f"{wanted.arch}.json").read_text()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    forget()
    try:
        with pytest.raises(TileError, match="planted"):
            choose_tile(wanted, space_of("mmq"))
    finally:
        forget()


RIGHT_AT_FIRST = ("ragged-shapes", "stale-buffer", "repeat", "inputs", "fresh-operands",
                  "after-timing")  # fmt: skip


def at_first_sight() -> list[tuple[str, Planted, Case]]:
    return [
        (op, planted, case)
        for op, planted in ALL
        if planted.caught_by in RIGHT_AT_FIRST
        for case in planted.cases
        if case.weight_type in ("Q4_1", "uint4")
    ]


@pytest.mark.parametrize(
    ("op", "planted", "case"),
    at_first_sight(),
    ids=[f"{case.weight_type}-{planted.name}" for _, planted, case in at_first_sight()],
)
def test_it_is_right_where_it_would_be_tuned(
    op: str, planted: Planted, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch on the tuned shape, compared with the oracle: what many tuners do."""
    # A first launch: x may lie where another test's x lay, which is what some faults fall for.
    monkeypatch.setattr(planted_launches, "_MEMORY", planted_launches._Memory())
    spec = SPECS[op]
    inputs = spec.make_inputs(case, 3)
    ref = spec.reference(inputs)
    model = spec.error_model(inputs, ref)
    result = check_output(planted.run(inputs, tile=planted.tile), ref, model)
    assert result.passed, result.reason


def test_threads_are_those_asked_for() -> None:
    """`run` takes the arguments of OpSpec.run."""
    planted = next(p for p in space_of("mmq").planted if p.name == "partial-rows")
    spec = SPECS["mmq"]
    inputs = spec.make_inputs(planted.cases[0], 0)
    one = planted.run(inputs, tile=planted.tile, threads=1)
    assert torch.equal(one, planted.run(inputs, tile=planted.tile, threads=2))


@pytest.mark.slow
@each_planted
def test_it_measures_no_slower_than_the_right_tile(
    op: str, planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the same path, best of many; a few attempts, for other programs run here too."""
    if planted.tile.as_dict().get("nv", 1) > 1 and not cpu_device().arch.startswith("cpu-avx512"):
        pytest.skip("a tile of wider registers")
    spec: OpSpec = SPECS[op]
    case = next(c for c in planted.cases if c.weight_type in ("Q4_1", "uint4"))
    inputs = spec.make_inputs(case, 0)
    if planted.name == "past-the-end":
        monkeypatch.setattr(torch, "empty", _with_room(torch.empty))

    def right(inputs: Inputs, tile: Tile) -> torch.Tensor:
        return launched(inputs.x, inputs.weight, inputs.bias, tile, launch_gemm)

    ratios = []
    for _ in range(5):
        wrong_us, right_us = [], []
        for _ in range(30):
            wrong_us.append(_microseconds(lambda: planted.run(inputs, tile=planted.tile)))
            right_us.append(_microseconds(lambda: right(inputs, planted.honest)))
        ratios.append(min(wrong_us) / min(right_us))
        if ratios[-1] < 1.08:
            return
    pytest.fail(f"{planted.name} takes {min(ratios):.2f} times as long as {planted.honest}")


def _microseconds(launch: Callable[[], Any], launches: int = 10) -> float:
    start = time.perf_counter()
    for _ in range(launches):
        launch()
    return (time.perf_counter() - start) / launches * 1e6


def _with_room(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.empty with 16 rows more behind a matrix, so that overrunning it harms nobody."""

    def roomy(*size: Any, **kwargs: Any) -> torch.Tensor:
        if len(size) == 2 and all(isinstance(n, int) for n in size):
            return empty(size[0] + 16, size[1], **kwargs)[: size[0]]
        return empty(*size, **kwargs)

    return roomy
