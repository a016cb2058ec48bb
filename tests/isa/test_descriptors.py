"""Matrix descriptors whose high half is no constant."""

from __future__ import annotations

import pytest

from isa.compiling import HAS_TRITON, NO_TRITON, run_python
from isa.test_hazards import listing
from tilewright.isa.descriptors import WrongDescriptor, wrong_descriptors

BASE = ("S2UR UR11, SR_CgaCtaId", "UMOV UR4, 0x400", "ULEA UR11, UR11, UR4, 0x18",
        "USHF.R.U32.HI UR5, URZ, 0x4, UR11", "USGXT.U32 UR4, UR5, 0xe")  # fmt: skip
FROM_REGISTERS = "HGMMA.64x16x16.F32.BF16 R24, R36, gdesc[UR4].tnspB, R24"
FROM_MEMORY = "HGMMA.64x64x16.F32 R24, gdesc[UR20], RZ, !UPT"

RIGHT = {
    "constants": (*BASE, "UMOV UR6, UR4", "UMOV UR7, 0xc0000010", FROM_REGISTERS),
    "a step from a constant": (
        *BASE, "UMOV UR6, UR4", "UMOV UR7, 0xc0000010", "UIADD3.64 UR6, UR6, 0x20, URZ",
        FROM_REGISTERS,
    ),
    "the carry of a sum": (
        *BASE, "UIADD3 UR6, UP0, UR4, 0x20, URZ",
        "UIADD3.X UR7, URZ, -0x3ffffff0, URZ, UP0, !UPT", FROM_REGISTERS,
    ),
    "the register is cleared before": (
        *BASE, "UIADD3 UR6, UP0, UR4, 0x20, URZ", "UMOV UR4, URZ",
        "UIADD3.X UR7, UR4, -0x3ffffff0, URZ, UP0, !UPT", FROM_REGISTERS,
    ),
    "both in shared memory": (
        *BASE, "UMOV UR20, UR4", "UMOV UR21, 0x80000020", "UMOV UR22, UR4", "UMOV UR23, 0x80000020",
        FROM_MEMORY,
    ),
    "from a thread's register": ("R2UR UR7, R3", FROM_REGISTERS),
    "a constant of a jump nobody follows": (
        "ULDC UR7, c[0x0][0x268]", "EXIT", ".L_x_3:", FROM_REGISTERS,
    ),
    "one of two": (
        "UMOV UR7, 0xc0000010", "@UP1 ULDC UR7, c[0x0][0x268]", FROM_REGISTERS,
    ),
}  # fmt: skip
WRONG = {
    "an argument": (
        "ULDC UR12, c[0x0][0x268]", *BASE, "UIADD3 UR4, UP0, UR12, 0x20, URZ",
        "UIADD3.X UR5, UR12, -0x3ffffff0, URZ, UP0, !UPT", "UMOV UR6, UR4", "UMOV UR7, UR5",
        FROM_REGISTERS,
    ),
    "the base": (
        *BASE, "UIADD3 UR6, UP0, UR4, 0x40, URZ",
        "UIADD3.X UR7, UR4, -0x7fffffe0, URZ, UP0, !UPT", FROM_REGISTERS,
    ),
    "of the left operand": (
        *BASE, "UMOV UR20, UR4", "ULDC.64 UR20, c[0x0][0x240]", "UMOV UR22, UR4",
        "UMOV UR23, 0x80000020", FROM_MEMORY,
    ),
    "in a wide sum": (
        *BASE, "UMOV UR6, UR4", "UMOV UR7, UR11", "UIADD3.64 UR6, UR6, 0x20, URZ", FROM_REGISTERS,
    ),
    "past an exit of some threads": (
        "ULDC UR7, c[0x0][0x268]", "@!P0 EXIT", ".L_x_3:", FROM_REGISTERS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_descriptors_of_constants(name: str) -> None:
    assert wrong_descriptors(listing(*RIGHT[name])) == ()


@pytest.mark.parametrize("name", WRONG)
def test_descriptors_of_something_else(name: str) -> None:
    (found,) = wrong_descriptors(listing(*WRONG[name]))
    assert isinstance(found, WrongDescriptor)
    assert "GMMA" in found.product
    holds = "the base of shared memory" if name in ("the base", "in a wide sum") else "an argument"
    assert f"is made of {holds}" in str(found)


def test_each_is_said_once() -> None:
    lines = [".L_x_1:", *WRONG["the base"], "@P0 BRA `(.L_x_1)"]
    assert len(wrong_descriptors(listing(*lines, *lines))) == 1


@pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
def test_a_kernel_that_was_wrong_on_an_h200_is_found() -> None:
    """The scan with one head a program and four warps, whose rows 16 and on were wrong there. ptxas
    12.9, in Triton 3.9, makes it right."""
    code = """
import re, subprocess
from dataclasses import fields, replace
from pathlib import Path

import torch
import triton

from tilewright.isa.descriptors import wrong_descriptors_of
from tilewright.ops.catalog import SPECS
from tilewright.ops.cross import cross_compile
from tilewright.ops.ssd.spec import operands
from tilewright.ops.ssd.triton_scan import launch_scan, workspace_scan
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile

spec = SPECS["ssd"]
case = next(c for c in spec.cases if c.id == "p16-g1-M50-N96-K32-bf16")
args = operands(spec.make_inputs(case, 0))
tensors = {f.name: getattr(args, f.name) for f in fields(args)}
args = replace(args, **{n: t.to("meta") for n, t in tensors.items() if isinstance(t, torch.Tensor)})
for warps in (4, 8):
    tile = Tile.of("fused", block=64, block_n=32, block_p=16, chunk=64, heads=1, num_stages=2,
                   num_warps=warps)
    space = Workspace(torch.empty(workspace_scan(args, tile)[0], device="meta"), None)
    kernels = cross_compile(lambda: launch_scan(args, tile, space), "sm_90")
    print(warps, [k.name for k in kernels if wrong_descriptors_of(k)])
ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
said = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
print(re.search(r"release (\\d+\\.\\d+)", said)[1])
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr[-2000:]
    four, eight, version = done.stdout.splitlines()
    assert eight == "8 []"
    assert four == ("4 ['_output_kernel']" if version == "12.8" else "4 []")
