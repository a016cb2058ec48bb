"""Registers that a pending matrix instruction reads and another instruction writes."""

from __future__ import annotations

import pytest

from isa.compiling import HAS_TRITON, NO_TRITON, run_python
from tilewright.isa.hazards import Overwritten, overwritten

PRODUCT = "HGMMA.64x64x16.F32 R24, {left}, gdesc[UR16], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x{pending}"


def listing(*lines: str) -> str:
    """As nvdisasm prints it; a line that ends in a colon is a label."""
    return "\n".join(
        f"{line}" if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;"
        for i, line in enumerate(lines)
    )


def product(left: int) -> str:
    return PRODUCT.format(left=f"R{left}")


def wait(pending: int) -> str:
    return WAIT.format(pending=f"{pending:x}")


RIGHT = {
    "waited for": (product(80), wait(0), "HADD2 R80, R1, R2"),
    "other registers": (product(80), "HADD2 R84, R1, R2", "HADD2 R79, R1, R2"),
    "an older product is complete": (product(80), product(84), wait(1), "HADD2 R83, R1, R2"),
    "left operand in shared memory": (
        "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24, gsb0", "HADD2 R24, R1, R2",
    ),
    "a store reads": (product(80), "STS [R80], R81", "STSM.16.M88.4 [R80], R80"),
    "comparisons read": (product(80), "HSETP2.GT.AND P0, PT, R80, R1, PT", "FCHK P0, R81, R2"),
    "a loop that waits": (
        ".L_x_1:", "HADD2 R80, R1, R2", product(80), wait(0), "@P0 BRA `(.L_x_1)",
    ),
    "a loop over two operands": (
        ".L_x_1:", "HADD2 R80, R1, R2", product(80), wait(1), "HADD2 R84, R1, R2", product(84),
        wait(1), "@P0 BRA `(.L_x_1)",
    ),
}  # fmt: skip
WRONG = {
    "at once": (product(80), "HADD2 R83, R1, R2"),
    "predicated": (product(80), "@!P1 IMAD R81, R1, R2, RZ"),
    "by a wide load": (product(80), "LDS.128 R77, [R3]"),
    "by a matrix load": (product(80), "LDSM.16.M88.4 R80, [R3]"),
    "by a wide multiplication": (product(80), "IMAD.WIDE R79, R1, 0x4, R2"),
    "by zeros for two": (product(80), "CS2R R79, SRZ"),
    "by the sums of one warp": (product(80), "HMMA.16816.F32 R77, R4, R8, RZ"),
    "by a conversion to 64 bits": (product(80), "F2I.S64.TRUNC R79, R1"),
    "behind a wait for another": (product(80), product(84), wait(1), "HADD2 R84, R1, R2"),
    "in an open group": (
        product(80).removesuffix(", gsb0"), wait(0), "HADD2 R80, R1, R2",
    ),
    "in the next step of a loop": (
        ".L_x_1:", "HADD2 R80, R1, R2", product(80), wait(1), "@P0 BRA `(.L_x_1)",
    ),
    "of 8-bit numbers": (
        product(80).replace("HGMMA.64x64x16.F32", "IGMMA.64x64x32.S8.S8"), "HADD2 R80, R1, R2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_operands_that_hold_until_the_wait(name):
    assert overwritten(listing(*RIGHT[name])) == ()


@pytest.mark.parametrize("name", WRONG)
def test_operands_that_do_not(name):
    (found,) = overwritten(listing(*WRONG[name]))
    assert isinstance(found, Overwritten)
    assert "GMMA" in found.of
    assert found.by.split()[0] in " ".join(WRONG[name])


@pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
@pytest.mark.parametrize(
    "types",
    [
        ("w4a16 uint4", "mmq Q4_K"),
        pytest.param(("w4a16 uint4b8", "mmq Q6_K", "mmq Q8_0"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_kernels_for_hopper_overwrite_none(types):
    """Those of the catalog, by default tile of its GPU spaces, for many rows and for few."""
    code = """
import sys
from tilewright.isa.compile import compile_tile, default_tile
from tilewright.isa.hazards import overwritten_operands
from tilewright.tiles.tile import Problem

for op, weight_type in (name.split() for name in sys.argv[1:]):
    for m in (8, 64, 512, 4096):
        group = 128 if op == "w4a16" else 0
        problem = Problem(op, "sm_90", "float16", weight_type, "float", m, 4096, 4096, group)
        tile = default_tile(op, problem)
        for kernel in compile_tile(op, problem, tile):
            found = overwritten_operands(kernel)
            assert not found, f"{problem} {tile} {kernel.name}: {found[0]}"
            print("held", kernel.name)
"""
    done = run_python(code, *types)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("held") >= 4 * len(types)
