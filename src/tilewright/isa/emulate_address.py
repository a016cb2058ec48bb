"""How vector memory instructions form the addresses of their lanes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright.isa.emulate_operands import Array, raw_reader
from tilewright.isa.emulate_scalar import scalar_reader
from tilewright.isa.emulate_state import MemoryFault, Wave
from tilewright.isa.emulate_text import Instruction, Operand

__all__ = ["Addresses", "addresses_of", "offset_of"]

Addresses = Callable[[Wave], tuple[Array, Array]]
"""Of a wave: byte addresses [lanes], int64, and which lanes access memory."""


def offset_of(ins: Instruction) -> int:
    """The constant that an instruction adds to its addresses."""
    return int(ins.modifiers.get("offset", "0"), 0)


def addresses_of(
    ins: Instruction, space: str, is_load: bool, lanes: int
) -> tuple[Addresses, Operand]:
    """How an access forms its addresses, and the operand that it loads to or stores."""
    operands = list(ins.operands)
    fixed = np.int64(offset_of(ins))
    if space == "ds":
        data, at = (operands[0], operands[1]) if is_load else (operands[1], operands[0])
        base = raw_reader(ins, at, 32, lanes)
        return (lambda w: (base(w).astype(np.int64) + fixed, w.mask)), data
    if space == "buffer":
        return _buffer_addresses(ins, lanes), operands[0]
    if space == "scratch":
        data = operands.pop(0 if is_load else 1)
        terms = [_term(ins, op, lanes) for op in operands if op.kind != "off"]
        return (lambda w: (sum((t(w) for t in terms), fixed * np.ones(lanes, int)), w.mask)), data
    data = operands.pop(0 if is_load else 1)
    vector, *rest = operands
    scalar = rest[0] if rest and rest[0].kind == "s" else None
    if scalar is None:
        wide = raw_reader(ins, vector, 64, lanes)
        return (lambda w: (wide(w).astype(np.int64) + fixed, w.mask)), data
    low, pair = raw_reader(ins, vector, 32, lanes), scalar.index
    return (
        lambda w: (low(w).astype(np.int64) + (w.s[pair] | w.s[pair + 1] << 32) + fixed, w.mask)
    ), data


def _term(ins: Instruction, op: Operand, lanes: int) -> Callable[[Wave], Array]:
    read = raw_reader(ins, op, 32, lanes)
    return lambda w: read(w).astype(np.int64)


def _buffer_addresses(ins: Instruction, lanes: int) -> Addresses:
    """base + soffset + instruction offset (+ offset of the lane) (+ index * stride)."""
    operands = ins.operands[1:]
    fixed = offset_of(ins)
    offen, idxen = "offen" in ins.modifiers, "idxen" in ins.modifiers
    vector = operands[0]
    descriptor = next(op for op in operands if op.kind == "s" and op.count == 4)
    soffset = scalar_reader(ins, operands[operands.index(descriptor) + 1])
    at = descriptor.index
    index = raw_reader(ins, vector, 32, lanes) if idxen else None
    lane_offset = None
    if offen:
        row = Operand("v", vector.text, vector.index + (1 if idxen else 0))
        lane_offset = raw_reader(ins, row, 32, lanes)

    def run(w: Wave) -> tuple[Array, Array]:
        base = w.s[at] | (w.s[at + 1] & 0xFFFF) << 32
        stride, records = w.s[at + 1] >> 16 & 0x3FFF, w.s[at + 2]
        if w.s[at + 1] >> 31:
            raise MemoryFault("a swizzled buffer descriptor, which the emulator does not form")
        offset = np.full(lanes, fixed, dtype=np.int64)
        if lane_offset is not None:
            offset += lane_offset(w)
        inside = offset < records
        if index is not None:
            number = index(w).astype(np.int64)
            inside = number < records if stride else offset + number * stride < records
            offset += number * stride
        return base + offset + soffset(w), w.mask & inside

    return run
