"""The convolution's Triton kernels in the interpreter, held to the float64 oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import triton_interpreter  # noqa: F401
from tilewright.device import INTERPRETER
from tilewright.errors import TileError
from tilewright.ops.catalog import spec_for
from tilewright.ops.conv1d.gpu import gpu_conv, gpu_conv_step
from tilewright.ops.conv1d.op import causal_conv1d_step, conv_args
from tilewright.ops.conv1d.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Tile
from tilewright.tune.gate import CHECKS, gate
from tilewright.tune.verify import control_cases, negative_controls, verify_op

SPEC = spec_for("conv1d", INTERPRETER)


def tile(block_l: int, block_d: int, num_warps: int = 4) -> Tile:
    return Tile.of("triton", block_l=block_l, block_d=block_d, num_warps=num_warps)


def test_cases_pass() -> None:
    report = verify_op(SPEC, cases=SPEC.cases[::2])
    assert report.passed, report.failures[0].reason


@pytest.mark.parametrize("one", [tile(4, 32), tile(64, 32), tile(8, 256)], ids=str)
def test_tiles_of_other_sizes_pass(one: Tile) -> None:
    cases = [c for c in SPEC.cases if c.M > 1 and {"packed", "initial"} & set(c.flags)][::3]
    report = verify_op(SPEC, cases=cases, tiles=[one])
    assert report.passed, report.failures[0].reason


def test_many_packed_sequences_are_found_by_halving() -> None:
    """Sequences of 0 to 3 tokens, more of them than tokens in a block."""
    lengths = [i % 4 for i in range(70)]
    x, weight = torch.randn(1, sum(lengths), 5), torch.randn(5, 4)
    initial = torch.randn(70, 5, 3)
    at = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    args = conv_args(x, weight, initial_states=initial, cu_seqlens=at)
    gpu_conv(args, tile(16, 32))
    for i, (first, last) in enumerate(zip(at[:-1].tolist(), at[1:].tolist(), strict=True)):
        tokens = torch.cat([initial[i].T, x[0, first:last]])
        for t in range(last - first):
            want = (tokens[t : t + 4].T * weight).sum(dim=1)
            torch.testing.assert_close(args.y[0, first + t], want, atol=1e-5, rtol=1e-5)
        assert torch.equal(args.final_states[i], tokens[-3:].T)


def test_more_rows_than_a_grid_is_deep_are_convolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA ends a grid at 65535 but in its first dimension."""
    from tilewright.ops.conv1d import triton_conv

    grids: dict[str, tuple[int, ...]] = {}

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: grids.setdefault(self.name, grid)

    for name in ("_conv_kernel", "_state_kernel"):
        monkeypatch.setattr(triton_conv, name, Recorder(name))
    monkeypatch.setattr(triton_conv, "_check", lambda _: None)
    x = torch.empty(70_000, 20, 40, device="meta")
    triton_conv.launch_conv(conv_args(x, torch.empty(40, 4, device="meta")), tile(16, 32))
    assert grids == {"_conv_kernel": (140_000, 2), "_state_kernel": (70_000, 2)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("apart", [False, True], ids=["whole", "strided"])
def test_a_step_is_the_cpus(dtype: torch.dtype, width: int, apart: bool) -> None:
    wide = torch.randn(3, 600, width - 1).to(dtype)
    state = wide[:, ::2] if apart else wide[:, :300].clone()
    x = torch.randn(3, 900).to(dtype)[:, 5:305]
    weight, bias = torch.randn(300, width), torch.randn(300)
    theirs = state.clone()
    want = causal_conv1d_step(theirs, x, weight, bias, "silu")
    y = torch.empty(3, 300, dtype=dtype)
    gpu_conv_step(state, x, weight, bias, True, y)
    torch.testing.assert_close(y, want)
    assert torch.equal(state, theirs)


@pytest.mark.parametrize("planted", TRITON_SPACE.planted, ids=lambda p: p.name)
def test_the_gate_rejects_a_planted_tile_by_the_check_it_names(planted: Any) -> None:
    spec, (case,) = SPEC.with_run(planted.run), planted.cases
    found = gate(spec, planted.tile, [case])
    assert not found.passed
    assert found.check == planted.caught_by
    if planted.caught_by == "oracle":  # otherwise the ragged shapes were seen to be wrong alone
        without = [c for c in CHECKS if c != planted.caught_by]
        assert gate(spec, planted.tile, [case], _checks=without).passed
    else:
        assert "right on the tuned shapes" in found.reason
    TRITON_SPACE.check(planted.honest, case.problem("sm_90"))


def test_controls_are_caught() -> None:
    cases = [c for c in control_cases(SPEC) if c.weight_type == "w4"]
    controls = negative_controls(SPEC, cases=cases)
    assert {c.name for c in controls} == {*SPEC.corruptions, "zeroed outputs"}
    assert all(c.visible and c.caught for c in controls)


def test_a_tile_with_too_many_sums_is_refused() -> None:
    args = conv_args(torch.zeros(1, 9, 6), torch.zeros(6, 4))
    with pytest.raises(TileError, match="breaks rule 'registers'"):
        gpu_conv(args, tile(128, 256, 1))


_COMPILE = """
import json, re, sys, torch
from tilewright.ops.conv1d.args import ConvArgs
from tilewright.ops.conv1d.triton_conv import launch_conv, launch_conv_step
from tilewright.ops.cross import cross_compile
from tilewright.tiles.tile import Tile

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

found = {}
tile = Tile.of("triton", block_l=16, block_d=128, num_warps=4)
for arch in ("sm_90", "gfx90a", "gfx942", "gfx1151"):
    for packed in (False, True):
        s = 5 if packed else 1
        args = ConvArgs(
            meta(1, 1000, 513), meta(513, 4), meta(513), True, meta(s, 513, 3),
            meta(6, dtype=torch.int32) if packed else None, meta(1, 1000, 513), meta(s, 513, 3))
        kernels = cross_compile(lambda: launch_conv(args, tile), arch)
        if not packed:
            kernels += cross_compile(lambda: launch_conv_step(
                meta(8, 513, 3), meta(8, 513), meta(513, 4), meta(513), True, meta(8, 513)), arch)
        text = "".join((k.text("amdgcn") or k.text("ptx")) + k.log for k in kernels)
        spills = re.findall(r"vgpr_spill_count:\\s+(\\d+)|(\\d+) bytes spill stores", text)
        found[f"{arch} {packed}"] = [len(kernels), max(int(a or b) for a, b in spills)]
print(json.dumps(found))
"""


def test_kernels_compile_for_chips_that_are_not_here_and_spill_nothing(tmp_path: Any) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 8
    for name, (kernels, spilled) in found.items():
        assert kernels == (2 if name.endswith("True") else 3), name
        assert spilled == 0, name
