"""The gate rejects every planted tile of moe's Hopper kernel, which runs in numpy here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from by_path import module_once
from quick import one_in
from tilewright.errors import TileError
from tilewright.ops.contract import Inputs, OpSpec
from tilewright.ops.moe.gpu_space import MOE_SPACE
from tilewright.ops.moe.gpu_spec import gpu_spec
from tilewright.ops.moe.hopper_planted import PLANTED
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile
from tilewright.tune.gate import CHECKS, gate

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SPEC = gpu_spec("sm_90", "cpu")
machine: Any = module_once("moe_machine", Path(__file__).with_name("moe_machine.py"))
by_name = pytest.mark.parametrize("wrong", PLANTED, ids=lambda wrong: wrong.name)
some_by_name = pytest.mark.parametrize("wrong", one_in(2, PLANTED), ids=lambda wrong: wrong.name)
RIGHT = one_in(3, {(wrong.honest, wrong.cases): wrong for wrong in PLANTED}.values())


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: the gate's own fill is what is tested."""


@pytest.fixture(scope="module")
def on_numpy() -> OpSpec:
    """moe on sm_90, whose "hopper" tiles run on the machine of `moe_machine`."""
    kernel = machine.kernel()
    kernel.target_units = lambda device: 3

    def run(inputs: Inputs, tile: Tile, threads: int | None = None) -> torch.Tensor:
        experts, ids = inputs.weight.experts, inputs.weight.ids
        slots, plan = machine.routed(ids.reshape(-1), experts.E, tile.block_m)
        rows = machine.reordered(inputs.x[slots // ids.shape[1]])
        y = torch.empty(*ids.shape, experts.N, dtype=inputs.x.dtype)
        kernel.launch_moe_hopper(rows, experts, slots, plan, y.view(-1, experts.N), tile)
        return y

    return SPEC.with_run(run)


@by_name
def test_a_planted_tile_is_rejected_for_its_fault(on_numpy: OpSpec, wrong: Planted) -> None:
    (case,) = wrong.cases
    result = gate(on_numpy, wrong.tile, [case])
    assert not result.passed
    assert result.check == wrong.caught_by, result


@some_by_name
def test_without_its_check_a_planted_tile_passes(on_numpy: OpSpec, wrong: Planted) -> None:
    """Each is right on the product it would be tuned for, but for what the one check sees."""
    checks = set(CHECKS) - {wrong.caught_by, "ragged-shapes"}
    result = gate(on_numpy, wrong.tile, list(wrong.cases), _checks=checks)
    assert result.passed, result


@pytest.mark.parametrize("wrong", RIGHT, ids=lambda wrong: wrong.name)
def test_the_tile_it_pretends_to_be_is_right(on_numpy: OpSpec, wrong: Planted) -> None:
    result = gate(on_numpy, wrong.honest, list(wrong.cases))
    assert result.passed, result
    assert result.cases > 1


def test_planted_tiles_are_of_the_space_of_hopper_alone() -> None:
    assert set(PLANTED) <= set(SPEC.space().planted)
    assert not set(PLANTED) & set(gpu_spec("sm_80", "cpu").space().planted)
    for wrong in PLANTED:
        problem = wrong.cases[0].problem("sm_90")
        MOE_SPACE.check(wrong.honest, problem)
        with pytest.raises(TileError, match="has the fields"):
            MOE_SPACE.check(wrong.tile, problem)
