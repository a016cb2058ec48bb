"""Operands of Hopper's matrix instructions that are overwritten while they are read.

wgmma (HGMMA, IGMMA, QGMMA) runs on its own until WARPGROUP.DEPBAR waits for its group. Where its
left operand comes from registers, they must hold it until then: PTX leaves the result undefined
otherwise, ptxas neither waits nor warns, and the sums are wrong now and then only. So no run of the
kernel proves that it is right. The machine code does: here each of its instructions is held against
the products that are pending when it is issued, every loop gone through twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tilewright.isa.count import WGMMA, Instruction, parse
from tilewright.isa.sass import sass
from tilewright.ops.cross import Compiled

__all__ = ["Overwritten", "overwritten", "overwritten_operands"]

_LEFT = re.compile(r"R\d+, R(\d+),")
_LEFT_REGISTERS = 4  # of a thread, for 32 bytes of each of 64 rows
_WAIT = re.compile(r"gsb0, 0x([0-9a-f]+)")
_WARP_MATRIX = re.compile(r"[HIQD]MMA\.(?!.*\.F16$)")  # of one warp: waited for, four registers
_FIRST = re.compile(r"(?:U?P\w+, )*R(\d+)\b")
_WITHOUT_RESULT = re.compile(
    r"(ST|STS|STG|STL|STSM|RED|LDGSTS|[IFD]SETP|HSETP2|FCHK|PLOP3|R2P|R2UR|VOTEU|U\w+|BAR|BRA|BRX|EXIT|CALL|RET|"
    r"WARP\w*|DEPBAR|LDGDEPBAR|SYNCS|FENCE|MEMBAR|ERRBAR|CCTL\w*|B(SYNC|SSY|REAK|MOV)|NOP|"
    r"NANOSLEEP|YIELD|ACQBULK|CGAERRBAR)(\.|$)"
)


@dataclass(frozen=True)
class Overwritten:
    """An instruction that writes registers which a matrix instruction may still be reading.

    Attributes:
        by: the instruction that writes.
        of: the matrix instruction.
    """

    by: str
    of: str

    def __str__(self) -> str:
        return f"{self.by!r} writes the left operand of {self.of!r} while it may be read"


def overwritten_operands(compiled: Compiled) -> tuple[Overwritten, ...]:
    """What `overwritten` finds in a kernel for an NVIDIA chip; nothing for other makers' chips.

    Raises:
        UnsupportedError: the machine code cannot be disassembled.
    """
    cubin = compiled.asm.get("cubin")
    return overwritten(sass(cubin)) if isinstance(cubin, bytes) else ()


def overwritten(listing: str) -> tuple[Overwritten, ...]:
    """Overwritten left operands in a SASS listing with labels, each once, in their order."""
    items = parse(listing, "nvidia")
    found = dict.fromkeys(_scan(_instructions(items)))
    at = {item: i for i, item in enumerate(items) if isinstance(item, str)}
    for i, item in enumerate(items):
        if isinstance(item, Instruction) and at.get(item.label, i) < i:
            body = list(_instructions(items[at[item.label] : i + 1]))
            found.update(dict.fromkeys(_scan([*body, *body])))
    return tuple(found)


def _instructions(items: Sequence[Instruction | str]) -> Iterator[Instruction]:
    return (item for item in items if isinstance(item, Instruction))


def _scan(trace: Iterable[Instruction]) -> Iterator[Overwritten]:
    """Groups that are committed and not waited for lie in `groups`, the open one in `group`."""
    groups: list[list[tuple[int, Instruction]]] = []
    group: list[tuple[int, Instruction]] = []
    for instruction in trace:
        name, operands = instruction.mnemonic, instruction.operands
        if name.startswith("WARPGROUP.DEPBAR"):
            if wait := _WAIT.search(operands):
                kept = int(wait[1], 16)
                groups = groups[-kept:] if kept else []
        elif WGMMA.match(name):
            if left := _LEFT.match(operands):
                group.append((int(left[1]), instruction))
            if "gsb0" in operands:
                groups.append(group)
                group = []
        else:
            written = _written(name, operands)
            for first, product in (pair for pairs in (*groups, group) for pair in pairs):
                if written.start < first + _LEFT_REGISTERS and first < written.stop:
                    yield Overwritten(_text(instruction), _text(product))


def _written(name: str, operands: str) -> range:
    """The registers of a thread that an instruction writes."""
    first = _FIRST.match(operands)
    if first is None or _WITHOUT_RESULT.match(name):
        return range(0)
    count = 1
    if (
        ".128" in name
        or (name.startswith("LDSM") and name.endswith(".4"))
        or _WARP_MATRIX.match(name)
    ):
        count = 4
    elif (
        ".64" in name
        or ".WIDE" in name
        or (name.startswith("LDSM") and name.endswith(".2"))
        or (name.startswith("CS2R") and not name.startswith("CS2R.32"))
        or name.startswith(("DADD", "DMUL", "DFMA", "I2F.F64", "F2F.F64", "F2I.S64", "F2I.U64"))
    ):
        count = 2
    return range(int(first[1]), int(first[1]) + count)


def _text(instruction: Instruction) -> str:
    return f"{instruction.mnemonic} {instruction.operands}"
