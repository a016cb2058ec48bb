"""What mmq asks for before it launches: of which device, and on which."""

from __future__ import annotations

import importlib
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewright.device import INTERPRETER
from tilewright.layout.blocks import GpuBlocks
from tilewright.ops import cross
from tilewright.ops.catalog import spec_for
from tilewright.ops.mmq import gpu
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.ops.w4a16.gpu import Kernel
from tilewright.ops.workspace import NO_WORKSPACE
from tilewright.tiles.tile import Problem, Tile

SPEC = spec_for("mmq", INTERPRETER)
WEIGHT = GpuBlocks(
    "Q4_0", torch.empty(8, 4, dtype=torch.int32, device="meta"), None,
    torch.empty(8, 1, dtype=torch.float16, device="meta"), None, None, 8, 32,
)  # fmt: skip


@pytest.fixture
def asked(monkeypatch) -> list[object]:
    """What is asked of a GPU of 7 multiprocessors, in its order."""
    seen: list[object] = []

    def needs(tile, m, n, k, units):
        seen.append(("units", units))
        return 0, 0

    @contextmanager
    def on(device):
        seen.append("on")
        yield
        seen.append("off")

    monkeypatch.setattr(cross, "_gpu_units", lambda device: 7)
    monkeypatch.setattr(gpu, "workspace", lambda *given: seen.append("workspace") or NO_WORKSPACE)
    monkeypatch.setattr(gpu, "launching_on", on)
    monkeypatch.setattr(
        gpu, "kernel_of", lambda name: Kernel(lambda *given: seen.append("launch"), needs)
    )
    return seen


def test_workspace_is_for_the_units_that_the_launcher_counts(asked):
    """Those of the device itself, which need not be those of the first one of its arch."""
    x = torch.empty(3, 32, dtype=torch.float16, device="meta")
    y = gpu.allocate_and_launch(x, WEIGHT, None, Tile.of("int8"))
    assert y.shape == (3, 8)
    assert asked == [("units", 7), "on", "workspace", "launch", "off"]


def test_tiles_of_the_vendors_library_depend_on_torch():
    assert set(SPEC.uses) == set(SPEC.space().fields)
    assert "torch" in SPEC.uses["dense"]
    assert not [name for name, uses in SPEC.uses.items() if "triton" not in uses]


def test_sources_name_all_that_kernels_are_made_of():
    """Modules with device functions that they import are among them."""

    def text_of(module):
        return Path(importlib.util.find_spec(module).origin).read_text()

    missing = {
        found
        for name in SPEC.sources
        for found in re.findall(r"^\s*from (tilewright\.\S+) import", text_of(name), re.M)
        if re.search(r"@(triton|gluon)\.jit|_either\(", text_of(found))
    } - set(SPEC.sources)
    assert not missing


@pytest.mark.parametrize("m", [1, 16, 17, 512, 4096])
@pytest.mark.parametrize("weight_type", ["Q4_0", "Q6_K"])
def test_leave_to_round_x_costs_nothing_where_it_is_no_help(weight_type, m):
    """On sm_90, where kernels that do not round x are the faster ones, both get the same tile."""
    asked = Problem("mmq", "sm_90", "float16", weight_type, "int8", m, 4096, 14336, 0)
    tile = TRITON_SPACE.default(asked)
    TRITON_SPACE.check(tile, asked)
    assert tile == TRITON_SPACE.default(replace(asked, activations="float"))
    assert tile.algorithm in ("decode", "gemv", "hopper", "dense")
    elsewhere = TRITON_SPACE.default(replace(asked, arch="sm_80"))
    assert (elsewhere.algorithm == "int8") == (m > 16)
