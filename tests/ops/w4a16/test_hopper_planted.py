"""Wrong launches of the Hopper prefill kernel, held to the gate with a model of the kernel.

The model does in float64, from what it is told, what the kernel does on an H200: x, the packed
weight, its group and the workspace are all that it knows. So the gate sees here what a wrong
description makes of a right kernel; the kernel itself is tested elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tilewright.layout.hopper import HopperW4, unpack_w4_hopper
from tilewright.ops.contract import OpSpec
from tilewright.ops.w4a16 import gpu
from tilewright.ops.w4a16.gpu_spec import gpu_spec
from tilewright.ops.w4a16.hopper_planted import DECODE_PLANTED, HOPPER_PLANTED, PREFILL_PLANTED
from tilewright.tiles.tile import Tile
from tilewright.tune.gate import CHECKS, gate

by_name = pytest.mark.parametrize("wrong", PREFILL_PLANTED, ids=lambda wrong: wrong.name)


def parts_of(tile: Tile, columns: int) -> int:
    """In how many parts a launch cuts K, where tiles are few."""
    return min(tile.split_k, -(-columns // tile.block_k)) if tile.split_k > 1 else 1


def needs(tile: Tile, M: int, N: int, K: int, units: int) -> tuple[int, int]:
    """Each part of each tile leaves its sums, and each tile counts them."""
    tiles, parts = -(-M // tile.block_m) * -(-N // tile.block_n), parts_of(tile, K)
    return (tiles * parts * tile.block_m * tile.block_n, tiles) if parts > 1 else (0, 0)


def launch(
    x: torch.Tensor, weight: HopperW4, bias: Any, y: torch.Tensor, tile: Tile, workspace: Any
) -> None:
    """What `launch_w4a16_hopper` promises, and what TMA asks of its operands."""
    m, k = x.shape
    assert m >= 1
    assert k == weight.K
    assert x.stride(1) == 1
    assert x.stride(0) % 8 == 0 or m == 1
    assert x.data_ptr() % 16 == y.data_ptr() % 16 == 0
    assert all(t.is_contiguous() for t in (weight.words, weight.scales, y))
    codes, scales, zeros = unpack_w4_hopper(weight)
    columns = torch.arange(k)
    group = columns // weight.group_size if weight.group_size < k else columns * 0
    assert int(group[-1]) < scales.shape[1]
    w = (codes.double() - zeros.double()[:, group]) * scales.double()[:, group]
    parts, steps = parts_of(tile, k), -(-k // tile.block_k)
    sums = torch.zeros(m, weight.N, dtype=torch.float64)
    for part in range(parts):
        first, last = (steps * n // parts * tile.block_k for n in (part, part + 1))
        some = x[:, first:last].double() @ w[:, first:last].T
        if part < parts - 1:  # left in the workspace; the last adds what the others left
            assert workspace.partials.numel() >= needs(tile, m, weight.N, k, 1)[0]
            some = some.to(workspace.partials.dtype).double()
        sums += some
    if bias is not None:
        sums += bias.double()
    y.as_strided((m, weight.N), (weight.N, 1)).copy_(sums)


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: the gate's own fill is what is tested."""


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> OpSpec:
    """w4a16 on Hopper, with the model for its prefill kernel."""
    real = gpu.kernel_of

    def kernel_of(algorithm: str) -> gpu.Kernel:
        return gpu.Kernel(launch, needs) if algorithm == "hopper" else real(algorithm)

    monkeypatch.setattr(gpu, "kernel_of", kernel_of)
    return gpu_spec("sm_90", "cpu")


@by_name
def test_a_wrong_launch_is_rejected_for_its_fault(spec, wrong):
    (case,) = wrong.cases
    result = gate(spec.with_run(wrong.run), wrong.tile, [case])
    assert not result.passed
    assert result.check == wrong.caught_by, result


@by_name
def test_without_its_check_it_passes(spec, wrong):
    """Each is right on the product it would be tuned for, but for what the one check sees."""
    checks = set(CHECKS) - {wrong.caught_by, "ragged-shapes"}
    (case,) = wrong.cases
    result = gate(spec.with_run(wrong.run), wrong.tile, [case], _checks=checks)
    assert result.passed, result


@by_name
def test_the_right_launch_passes_every_check(spec, wrong):
    def run(inputs: Any, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        return gpu.allocate_and_launch(inputs.x, inputs.weight, inputs.bias, tile)

    (case,) = wrong.cases
    result = gate(spec.with_run(run), wrong.honest, [case])
    assert result.passed, result
    assert result.cases > 3


FAR = ["whole-steps", "even-parts", "wide-groups", "zero-row", "half-partials"]


@pytest.mark.parametrize("name", FAR)
def test_it_is_wrong_by_far(spec, name):
    """Not by the luck of one draw: the mean square error is many times what a right one has."""
    wrong = next(p for p in PREFILL_PLANTED if p.name == name)
    (case,) = wrong.cases
    if wrong.caught_by == "ragged-shapes":
        case = dataclasses.replace(case, K=case.K + (case.group if case.group > 0 else 4))
    for seed in range(3):
        inputs = spec.make_inputs(case, seed)
        ref = spec.reference(inputs)
        model = spec.error_model(inputs, ref)
        error = wrong.run(inputs, tile=wrong.tile).double().numpy() - ref
        ratio = float((error**2).mean() / (model.sigma**2).mean())
        assert ratio > 9, (case, ratio)


def test_the_rows_written_are_those_of_x(spec):
    wrong = next(p for p in PREFILL_PLANTED if p.name == "row-beyond")
    (case,) = wrong.cases
    assert case.M % wrong.tile.block_m, "y ends within a tile"
    result = gate(spec.with_run(wrong.run), wrong.tile, [case])
    assert f"{2 * case.N} bytes behind" in result.reason


def test_products_are_cut_in_parts_where_the_fault_is_in_the_parts():
    """The launcher cuts K where there are fewer tiles than multiprocessors."""
    hopper_gemm = pytest.importorskip("tilewright.ops.w4a16.hopper_gemm")
    for wrong in PREFILL_PLANTED:
        (case,) = wrong.cases
        plan = hopper_gemm._plan(wrong.honest, case.M, case.N, case.K, 132)
        assert plan.cut * parts_of(wrong.tile, case.K) == plan.sharers
        assert (plan.cut > 0) is (wrong.tile.split_k > 1)
        floats, counters = hopper_gemm.workspace_hopper(wrong.honest, case.M, case.N, case.K, 132)
        assert (floats, counters) == needs(wrong.honest, case.M, case.N, case.K, 132)


def test_each_kernel_has_its_own():
    assert {wrong.tile.algorithm for wrong in PREFILL_PLANTED} == {"hopper"}
    assert {wrong.tile.algorithm for wrong in DECODE_PLANTED} == {"hopper_decode"}
    assert (*DECODE_PLANTED, *PREFILL_PLANTED) == HOPPER_PLANTED
    assert len(PREFILL_PLANTED) == 8
