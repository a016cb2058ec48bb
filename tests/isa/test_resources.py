"""Resources from what compilers print, worked out by hand."""

from __future__ import annotations

import pytest

from tilewright.isa.resources import amd_resources, nvidia_resources

AMD = """\
; NumVgprs: 40
; ScratchSize: 0
; Occupancy: 16
; NumVgprs: 133
; ScratchSize: 48
; Occupancy: {occupancy}
  - .agpr_count:     {agprs}
    .sgpr_count:     46
    .vgpr_count:     133
    .vgpr_spill_count: 12
"""

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_kernel' for 'sm_90a'
ptxas info    : Function properties for _kernel
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers
"""
SERIALIZED = (
    "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline"
)


def test_of_several_functions_in_an_amd_text_the_kernel_counts() -> None:
    found = amd_resources(AMD.format(occupancy=10, agprs=4), "gfx1201", 16384, 4)
    assert (found.vgprs, found.agprs, found.sgprs, found.spills) == (133, 4, 46, 12)
    assert found.scratch_bytes == 48
    assert found.lds_bytes == 16384


@pytest.mark.parametrize(
    ("arch", "lds_bytes", "warps", "programs", "waves"),
    [
        ("gfx1201", 0, 4, 10, 10.0),  # registers alone: 10 waves a SIMD, 4 SIMDs
        ("gfx1201", 16384, 4, 8, 8.0),  # 128 KB of a work-group processor
        ("gfx90a", 16384, 4, 4, 4.0),  # 64 KB of a CU
        ("gfx950", 16384, 4, 10, 10.0),  # 160 KB of a CU
        ("gfx90a", 40000, 2, 1, 0.5),
        ("gfx1151", 1024, 8, 5, 10.0),
    ],
)
def test_resident_waves_of_amd(
    arch: str, lds_bytes: int, warps: int, programs: int, waves: float
) -> None:
    found = amd_resources(AMD.format(occupancy=10, agprs=0), arch, lds_bytes, warps)
    assert (found.programs, found.waves) == (programs, waves)


def test_figures_that_a_text_lacks_are_none() -> None:
    found = amd_resources("", "gfx1151", 0, 4)
    assert (found.vgprs, found.spills, found.programs, found.waves) == (None, None, None, None)
    found = nvidia_resources("", "sm_90", 0, 4)
    assert (found.vgprs, found.spills, found.programs, found.waves) == (None, None, None, None)


def test_ptxas_figures() -> None:
    found = nvidia_resources(PTXAS.format(registers=88), "sm_90", 26880, 4)
    assert (found.vgprs, found.spills, found.scratch_bytes) == (88, 24, 16)
    assert (found.agprs, found.sgprs) == (None, None)
    assert (found.warnings, found.failures) == ((), ())


@pytest.mark.parametrize(
    ("arch", "registers", "lds_bytes", "warps", "programs", "waves"),
    [
        ("sm_90", 88, 26880, 4, 5, 5.0),  # 65536 / (88 * 128) = 5.8
        ("sm_90", 33, 1024, 1, 32, 8.0),  # 32 programs at most
        ("sm_90", 33, 1024, 4, 12, 12.0),  # a warp's registers come in steps of 256: 40 a thread
        ("sm_90", 168, 200 * 1024, 8, 1, 2.0),  # 228 KB of shared memory
        ("sm_75", 32, 1024, 4, 8, 8.0),  # 32 warps
        ("sm_86", 32, 49 * 1024, 4, 2, 2.0),  # 100 KB, 1 KB of each program reserved
    ],
)
def test_resident_warps_of_nvidia(
    arch: str, registers: int, lds_bytes: int, warps: int, programs: int, waves: float
) -> None:
    found = nvidia_resources(PTXAS.format(registers=registers), arch, lds_bytes, warps)
    assert (found.programs, found.waves) == (programs, waves)


def test_serialized_wgmma_is_a_failure_and_another_warning_is_not() -> None:
    other = "ptxas warning : Value of threads per SM is out of range"
    log = PTXAS.format(registers=255) + SERIALIZED + "\n" + other + "\n"
    found = nvidia_resources(log, "sm_90", 0, 4)
    assert found.failures == (SERIALIZED,)
    assert found.warnings == (SERIALIZED, other)
