"""What a compiled kernel takes of its chip: registers, spills, shared memory, resident waves.

AMD: the compiler's figures in the amdgcn text. NVIDIA: the log of ptxas -v. Shared memory (LDS) is
the launch's. Resident programs follow from registers and shared memory, with the sizes of the
vendors' public documents; allocation granularity of LDS is left out.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from tilewright.ops.cross import Compiled

__all__ = ["Resources", "resources"]

_KIB = 1024
_SCHEDULERS = 4  # SIMDs of a CU (CDNA) or a work-group processor (RDNA), schedulers of an SM
_AMD_LDS = {"gfx950": 160 * _KIB, "gfx9": 64 * _KIB}  # of a CU; RDNA: of a work-group processor
_AMD_LDS_RDNA = 128 * _KIB
_NVIDIA_REGISTERS = 65536
# Shared memory, resident warps, resident programs of one multiprocessor.
_NVIDIA_SM = {
    "sm_70": (96 * _KIB, 64, 32),
    "sm_75": (64 * _KIB, 32, 16),
    "sm_80": (164 * _KIB, 64, 32),
    "sm_86": (100 * _KIB, 48, 16),
    "sm_87": (164 * _KIB, 48, 16),
    "sm_89": (100 * _KIB, 48, 24),
    "sm_90": (228 * _KIB, 64, 32),
    "sm_100": (228 * _KIB, 64, 32),
    "sm_103": (228 * _KIB, 64, 32),
    "sm_120": (100 * _KIB, 48, 24),
    "sm_121": (100 * _KIB, 48, 24),
}
_NVIDIA_RESERVED = _KIB  # of shared memory, a program

# wgmma serialized and its kin: the kernel is right and slow, so a tile must not ship with one.
_SERIOUS = re.compile(r"C75\d\d")


@dataclass(frozen=True)
class Resources:
    """Figures of one kernel; None where a vendor has no such thing or does not tell.

    Attributes:
        vgprs: vector registers a lane; on gfx90a and gfx942 with the accumulation registers.
        agprs: accumulation registers among them (CDNA).
        sgprs: scalar registers a wave (AMD).
        spills: vector registers spilled (AMD), or bytes a thread stores to spill (NVIDIA).
        scratch_bytes: private memory a lane.
        lds_bytes: shared memory a program.
        programs: programs resident on a CU (CDNA), work-group processor (RDNA) or SM.
        waves: waves resident on each of its four SIMDs or schedulers.
        warnings: warnings of ptxas.
        failures: those among them that forbid a tile: C75xx.
    """

    vgprs: int | None
    agprs: int | None
    sgprs: int | None
    spills: int | None
    scratch_bytes: int | None
    lds_bytes: int
    programs: int | None
    waves: float | None
    warnings: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def resources(compiled: Compiled) -> Resources:
    """The resources of a kernel that `cross_compile` has compiled."""
    lds, warps = int(compiled.metadata["shared"]), int(compiled.metadata["num_warps"])
    if compiled.arch.startswith("gfx"):
        return amd_resources(compiled.text("amdgcn"), compiled.arch, lds, warps)
    warps = max(warps, _required_threads(compiled.text("ptx")) // 32)
    return nvidia_resources(compiled.log, compiled.arch, lds, warps)


def amd_resources(text: str, arch: str, lds_bytes: int, num_warps: int) -> Resources:
    """From amdgcn text; of several functions the last, the kernel, counts."""

    def last(pattern: str) -> int | None:
        found = re.findall(pattern, text)
        return int(found[-1]) if found else None

    by_registers = last(r"; Occupancy:\s*(\d+)")
    programs = waves = None
    if by_registers is not None:
        programs = by_registers * _SCHEDULERS // num_warps
        if lds_bytes:
            programs = min(programs, _amd_lds(arch) // lds_bytes)
        waves = programs * num_warps / _SCHEDULERS
    return Resources(
        vgprs=last(r"\.vgpr_count:\s*(\d+)"),
        agprs=last(r"\.agpr_count:\s*(\d+)"),
        sgprs=last(r"\.sgpr_count:\s*(\d+)"),
        spills=last(r"\.vgpr_spill_count:\s*(\d+)"),
        scratch_bytes=last(r"; ScratchSize:\s*(\d+)"),
        lds_bytes=lds_bytes,
        programs=programs,
        waves=waves,
    )


def _amd_lds(arch: str) -> int:
    if arch in _AMD_LDS:
        return _AMD_LDS[arch]
    return _AMD_LDS["gfx9"] if arch.startswith("gfx9") else _AMD_LDS_RDNA


def nvidia_resources(log: str, arch: str, lds_bytes: int, num_warps: int) -> Resources:
    """From what ptxas -v printed.

    Args:
        num_warps: of a program, with those that a warp-specialized kernel adds.
    """

    def first(pattern: str) -> int | None:
        found = re.search(pattern, log)
        return int(found[1]) if found else None

    registers = first(r"Used (\d+) registers")
    warnings = tuple(
        line.strip() for line in log.splitlines() if re.search(r"warning|C75\d\d", line)
    )
    programs = waves = None
    if registers is not None and arch in _NVIDIA_SM:
        shared, warps_limit, programs_limit = _NVIDIA_SM[arch]
        each_warp = -(-registers * 32 // 256) * 256
        programs = min(
            _NVIDIA_REGISTERS // (each_warp * num_warps),
            shared // (lds_bytes + _NVIDIA_RESERVED),
            warps_limit // num_warps,
            programs_limit,
        )
        waves = programs * num_warps / _SCHEDULERS
    return Resources(
        vgprs=registers,
        agprs=None,
        sgprs=None,
        spills=first(r"(\d+) bytes spill stores"),
        scratch_bytes=first(r"(\d+) bytes stack frame"),
        lds_bytes=lds_bytes,
        programs=programs,
        waves=waves,
        warnings=warnings,
        failures=tuple(line for line in warnings if _SERIOUS.search(line)),
    )


def _required_threads(ptx: str) -> int:
    """Threads of a program as PTX demands them; 0 if it does not."""
    found = re.search(r"\.reqntid (\d+)", ptx)
    return int(found[1]) if found else 0
