"""What the inner loop of a compiled kernel issues, counted in its assembly text.

AMD: the amdgcn text of the compiler. NVIDIA: SASS as nvdisasm prints it. Every instruction is of
one kind; VALU instructions, the NVIDIA ones of the same purpose included, also belong to one of a
few forms that tell how weights are unpacked. A dual-issue line (`v_dual_... :: v_dual_...`) counts
once, as it is issued. Counts are static: an instruction behind a branch inside the loop counts too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.errors import UnsupportedError

__all__ = [
    "FORMS",
    "KINDS",
    "WGMMA",
    "Instruction",
    "Loop",
    "count",
    "inner_loop",
    "least_rows",
    "loops",
    "matrix_macs",
    "parse",
    "vendor_of",
]

KINDS = (
    "matrix", "valu", "scalar", "lds_read", "lds_write", "shuffle", "global_load", "global_store",
    "barrier", "wait", "control",
)  # fmt: skip
"""Every instruction is one of these."""

FORMS = ("packed", "and_or", "shift", "permute", "convert")
"""Forms of VALU instructions: two 16-bit lanes at once; and-with-or in one; and so on."""

# The first pattern that matches the whole mnemonic decides.
_KIND_PATTERNS: Mapping[str, Sequence[tuple[str, str]]] = {
    "amd": (
        ("matrix", r"v_(wmma|swmmac|mfma|smfmac)_.*"),
        ("shuffle", r"ds_(b?permute|swizzle).*|v_(permlane|readlane|writelane).*"),
        ("valu", r"v_.*"),
        ("lds_read", r"ds_(read|load).*"),
        ("lds_write", r"ds_.*"),
        ("global_load", r"(global|buffer|flat|scratch|image)_load.*"),
        ("global_store", r"(global|buffer|flat|scratch|image)_(store|atomic).*"),
        ("barrier", r"s_barrier.*"),
        ("wait", r"s_wait.*"),
        ("control", r"s_(c?branch|endpgm|nop|clause|delay_alu|sleep|setprio|set_inst|call|swappc"
                    r"|getpc|setpc|sendmsg|icache).*|buffer_.*|global_.*"),
        ("scalar", r"s_.*"),
    ),
    "nvidia": (
        ("matrix", r"(HGMMA|HMMA|IMMA|IGMMA|QGMMA|QMMA|OMMA|DMMA|UTC\w*MMA)(\..*)?"),
        ("shuffle", r"(SHFL|MOVM)(\..*)?"),
        ("lds_read", r"(LDS|LDSM)(\..*)?"),
        ("lds_write", r"(STS|STSM|ATOMS)(\..*)?"),
        ("global_load", r"(LD|LDG|LDL|LDGSTS|UBLKCP|UTMALDG)(\..*)?"),
        ("global_store", r"(ST|STG|STL|RED|REDG|ATOM|ATOMG|UTMASTG|UTMAREDG)(\..*)?"),
        ("wait", r"(DEPBAR|LDGDEPBAR|WARPGROUP|WARPSYNC|UTMACMDFLUSH)(\..*)?|SYNCS\.PHASECHK.*"),
        ("barrier", r"(BAR|SYNCS|ARRIVES|UCGABAR_\w+)(\..*)?"),
        ("control", r"(U?BRA|BRX|BSSY|BSYNC|BREAK|EXIT|NOP|MEMBAR|FENCE|ERRBAR|CCTL\w*|YIELD|RET"
                    r"|CALL|NANOSLEEP|ELECT|USETMAXREG|BPT|ACQBULK|PREEXIT)(\..*)?"),
        ("scalar", r"(U[A-Z0-9]+|R2UR|S2UR|S2R|CS2R|LDC|LDCU)(\..*)?"),
        ("valu", r"[A-Z].*"),
    ),
}  # fmt: skip

_FORM_PATTERNS: Mapping[str, Sequence[tuple[str, str]]] = {
    "amd": (
        ("packed", r"v_pk_.*"),
        ("and_or", r"v_and_or_b32.*"),
        ("shift", r"v_(lshr|lshl|ashr)rev_.*|v_bfe_.*|v_lshl_.*"),
        ("permute", r"v_(perm|pack|alignbit|alignbyte|bfi)_.*"),
        ("convert", r"v_cvt_.*"),
    ),
    "nvidia": (
        ("convert", r"(I2F|I2FP|F2F|F2FP|F2I)(\..*)?|HADD2\.F32.*"),
        ("packed", r"(HADD2|HMUL2|HFMA2)(\..*)?"),
        ("and_or", r"LOP3(\..*)?"),
        ("shift", r"(SHF|SHL|SHR)(\..*)?"),
        ("permute", r"PRMT(\..*)?"),
    ),
}

WGMMA = re.compile(r"[HIQ]GMMA\.")
"""Mnemonics of Hopper's matrix instructions that run on their own."""

_AMD_LINE = re.compile(r"\s*((?:v|s|ds|buffer|global|flat|scratch|image)_\w+)\b\s*(.*)")
_AMD_LABEL = re.compile(r"(\.?L\w+):")
_NVIDIA_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_NVIDIA_LABEL = re.compile(r"(\.L_x_\w+):")
_AMD_BRANCH = re.compile(r"s_(?:c?branch)\w*")
_NVIDIA_BRANCH = re.compile(r"U?BRA(?:\..*)?")
_TARGET = re.compile(r"\.?L[\w$]+$")
_NVIDIA_TARGET = re.compile(r"`\((\.L_x_\w+)\)")


@dataclass(frozen=True)
class Instruction:
    """One line of a listing.

    Attributes:
        mnemonic: such as "v_pk_add_f16" or "HGMMA.64x64x16.F32".
        operands: the rest of the line.
        label: where it may jump to; "" for anything but a branch.
        predicate: of NVIDIA's, when it runs at all, such as "@!UP0"; "" for always.
    """

    mnemonic: str
    operands: str
    label: str = ""
    predicate: str = ""


@dataclass(frozen=True)
class Loop:
    """A loop without a loop inside: what lies from its label to the branch back to it."""

    label: str
    body: tuple[Instruction, ...]


def vendor_of(arch: str) -> str:
    """ "amd" for gfx names, "nvidia" for sm_ names.

    Raises:
        UnsupportedError: neither.
    """
    if arch.startswith("gfx"):
        return "amd"
    if arch.startswith("sm_"):
        return "nvidia"
    raise UnsupportedError(f"arch is {arch!r}; assembly is read of gfx... and of sm_...")


def parse(text: str, vendor: str) -> list[Instruction | str]:
    """The instructions of a listing in order, and its labels as strings."""
    return list(_amd(text) if vendor == "amd" else _nvidia(text))


def _amd(text: str) -> Iterator[Instruction | str]:
    for line in text.splitlines():
        if line.lstrip().startswith(".amdgpu_metadata"):
            return
        code = line.partition(";")[0].rstrip()
        if label := _AMD_LABEL.match(code):
            yield label[1]
        elif found := _AMD_LINE.fullmatch(code):
            name, operands = found[1], found[2].strip()
            target = _TARGET.search(operands) if _AMD_BRANCH.fullmatch(name) else None
            yield Instruction(name, operands, target[0] if target else "")


def _nvidia(text: str) -> Iterator[Instruction | str]:
    for line in text.splitlines():
        if label := _NVIDIA_LABEL.match(line.strip()):
            yield label[1]
        elif found := _NVIDIA_LINE.match(line):
            name, operands = found[2], found[3].strip()
            target = _NVIDIA_TARGET.search(operands) if _NVIDIA_BRANCH.fullmatch(name) else None
            yield Instruction(name, operands, target[1] if target else "", (found[1] or "").strip())


def loops(listing: Sequence[Instruction | str]) -> list[Loop]:
    """The innermost loops, in the order of the text."""
    at = {item: i for i, item in enumerate(listing) if isinstance(item, str)}
    spans = {
        (at[item.label], i)
        for i, item in enumerate(listing)
        if isinstance(item, Instruction) and at.get(item.label, i) < i
    }
    innermost = [
        (start, end)
        for start, end in spans
        if not any((s, e) != (start, end) and start <= s and e <= end for s, e in spans)
    ]
    return [
        Loop(
            str(listing[start]),
            tuple(item for item in listing[start : end + 1] if isinstance(item, Instruction)),
        )
        for start, end in sorted(innermost)
    ]


def inner_loop(listing: Sequence[Instruction | str], vendor: str) -> Loop | None:
    """The loop that multiplies: the one with the most matrix instructions; where none has any, the
    longest one that issues VALU instructions. None if the kernel has no such loop.
    """

    def weight(loop: Loop) -> tuple[int, int]:
        counts = count(loop.body, vendor)
        return counts["matrix"], counts["valu"]

    found = max(loops(listing), key=weight, default=None)
    return found if found is not None and any(weight(found)) else None


def count(body: Sequence[Instruction], vendor: str) -> dict[str, int]:
    """Instructions by kind and by form, and "total" of them all."""
    counts = {"total": len(body), **dict.fromkeys((*KINDS, *FORMS), 0)}
    for instruction in body:
        kind = _first(_KIND_PATTERNS[vendor], instruction.mnemonic)
        if kind:
            counts[kind] += 1
        form = _first(_FORM_PATTERNS[vendor], instruction.mnemonic) if kind == "valu" else ""
        if form:
            counts[form] += 1
    return counts


def _first(patterns: Sequence[tuple[str, str]], mnemonic: str) -> str:
    return next((name for name, pattern in patterns if re.fullmatch(pattern, mnemonic)), "")


def matrix_macs(body: Sequence[Instruction]) -> int:
    """Products of two numbers that a wave's matrix instructions make; a quarter of what a HGMMA
    does, which four warps share. 0 for an instruction whose name does not tell its shape.
    """
    return sum(_macs(instruction.mnemonic) for instruction in body)


def least_rows(body: Sequence[Instruction]) -> int:
    """Rows of x that a matrix instruction multiplies at least, the shorter side of its product,
    however few there are; 1 without one.
    """
    shapes = (_shape(instruction.mnemonic) for instruction in body)
    return min((min(m, n) for m, n, _ in filter(None, shapes)), default=1)


def _macs(mnemonic: str) -> int:
    shape = _shape(mnemonic)
    return math.prod(shape) // (4 if "GMMA" in mnemonic else 1) if shape else 0


def _shape(mnemonic: str) -> tuple[int, int, int] | None:
    """M, N and K of a matrix instruction; None of another, or where its name does not tell."""
    if shape := re.match(r"(?:v_\w+?_|[HIQ]GMMA\.)(?:\w+?_)?(\d+)x(\d+)x(\d+)", mnemonic):
        return int(shape[1]), int(shape[2]), int(shape[3])
    if shape := re.match(r"[HI]MMA\.(16)(8)(\d+)", mnemonic):
        return 16, 8, int(shape[3])
    return None
