"""Operands as functions of a wave: how an instruction reads its sources and writes its result.

A reader returns an array with one element a lane, of the type that the operation computes with; a
writer takes one and changes the active lanes only. Both are made once an instruction, before
anything runs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.isa.emulate_state import Wave, bits_of, mask_of
from tilewright.isa.emulate_text import EXEC, NULL, Instruction, Operand

__all__ = ["Array", "Reader", "Writer", "mask_reader", "mask_writer", "reader", "writer"]

Array = npt.NDArray[Any]
Reader = Callable[[Wave], Array]
Writer = Callable[[Wave, Array], None]

TYPES: dict[str, tuple[int, Any]] = {
    "u16": (16, np.uint16), "i16": (16, np.int16), "f16": (16, np.float16),
    "u32": (32, np.uint32), "i32": (32, np.int32), "f32": (32, np.float32),
    "u64": (64, np.uint64), "i64": (64, np.int64), "f64": (64, np.float64),
}  # fmt: skip
"""Element types of operands: bits and numpy type."""

_WORD = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def constant_bits(op: Operand, bits: int) -> int:
    """A constant as an operation of 16, 32 or 64 bits reads it."""
    if op.kind == "float":
        code = {16: "<e", 32: "<f", 64: "<d"}[bits]
        return int.from_bytes(struct.pack(code, op.value), "little")
    return int(op.value) & ((1 << bits) - 1)


def raw_reader(ins: Instruction, op: Operand, bits: int, lanes: int, high: bool = False) -> Reader:
    """The bits of a source, without its modifiers. `high` picks the upper half for 16 bits."""
    high = high or bool(op.high)
    at = op.index
    if op.kind in ("int", "float"):
        value = constant_bits(op, bits)
        if bits == 16 and high:
            value = op.bits32 >> 16 if op.kind == "int" else 0
        if bits == 64 and op.kind == "int" and ins.mnemonic.find("f64") > 0 and int(op.value) > 64:
            value = int(op.value) << 32  # a literal of a double is its upper half
        fixed = np.full(lanes, value, dtype=_WORD[bits])
        return lambda w: fixed
    if op.kind not in ("v", "s"):
        raise ins.refuse(f"operand {op.text!r} is not known")
    if op.kind == "s":
        if bits == 64:
            return lambda w: np.full(lanes, w.s[at] | w.s[at + 1] << 32, dtype=np.uint64)
        if bits == 32:
            return lambda w: np.full(lanes, w.s[at], dtype=np.uint32)
        shift = 16 if high else 0
        return lambda w: np.full(lanes, w.s[at] >> shift & 0xFFFF, dtype=np.uint16)
    if bits == 32:
        return lambda w: w.v[at]
    if bits == 64:
        return lambda w: w.v[at].astype(np.uint64) | w.v[at + 1].astype(np.uint64) << np.uint64(32)
    if high:
        return lambda w: (w.v[at] >> np.uint32(16)).astype(np.uint16)
    return lambda w: w.v[at].astype(np.uint16)


def reader(
    ins: Instruction, op: Operand, kind: str, lanes: int, high: bool = False, selected: str = ""
) -> Reader:
    """A source as an array of `kind`, its modifiers applied.

    Args:
        high: read the upper half of the register (op_sel).
        selected: an SDWA selector such as "BYTE_0" or "WORD_1".
    """
    bits, dtype = TYPES[kind]
    read = raw_reader(ins, op, bits, lanes, high)
    word = _WORD[bits]
    if selected and selected != "DWORD":
        read = _select(raw_reader(ins, op, 32, lanes), selected, op.sign_extend, word)
    if not (op.negate or op.absolute):
        return read if dtype is word else lambda w: read(w).view(dtype)
    if kind[0] == "i" and op.negate:
        raise ins.refuse(f"a sign modifier on the integer operand {op.text!r}")
    sign = word(1 << (bits - 1))
    keep = word((1 << (bits - 1)) - 1) if op.absolute else word((1 << bits) - 1)
    flip = sign if op.negate else word(0)
    return lambda w: ((read(w) & keep) ^ flip).view(dtype)


def _select(read: Reader, selected: str, extend: bool, word: Any) -> Reader:
    """Part of a 32-bit source, extended to the width of the operation."""
    name, _, number = selected.partition("_")
    bits = {"BYTE": 8, "WORD": 16}[name]
    down = np.uint32(int(number) * bits)
    if extend:
        up = np.int32(32 - bits)
        return lambda w: (
            ((((read(w) >> down).view(np.int32)) << up) >> up).view(np.uint32).astype(word)
        )
    mask = np.uint32((1 << bits) - 1)
    return lambda w: (read(w) >> down & mask).astype(word)


def writer(
    ins: Instruction, op: Operand, kind: str, *, high: bool = False, keep: bool = True
) -> Writer:
    """Where a result of `kind` goes.

    Args:
        high: a result of 16 bits goes to the upper half of the register.
        keep: the other half keeps its value; else it becomes 0.
    """
    bits, _ = TYPES[kind]
    at = op.index
    if op.kind != "v":
        raise ins.refuse(f"a result in {op.text!r}")
    if bits == 32:
        return lambda w, value: w.put(at, value.view(np.uint32))
    if bits == 64:

        def write64(w: Wave, value: Array) -> None:
            words = value.view(np.uint64)
            w.put(at, words.astype(np.uint32))
            w.put(at + 1, (words >> np.uint64(32)).astype(np.uint32))

        return write64
    high = high or bool(op.high)
    shift = np.uint32(16 if high else 0)
    other = np.uint32(0 if not keep else 0xFFFF if high else 0xFFFF0000)

    def write16(w: Wave, value: Array) -> None:
        w.put(at, value.view(np.uint16).astype(np.uint32) << shift | w.v[at] & other)

    return write16


def mask_reader(ins: Instruction, op: Operand, lanes: int) -> Reader:
    """A lane mask in scalar registers as booleans."""
    if op.kind == "int":
        fixed = mask_of(int(op.value), lanes)
        return lambda w: fixed
    if op.kind != "s":
        raise ins.refuse(f"a lane mask in {op.text!r}")
    at = op.index
    return lambda w: mask_of(w.bits(at), lanes)


def mask_writer(ins: Instruction, op: Operand) -> Writer:
    """A lane mask to scalar registers: inactive lanes give 0."""
    at = op.index
    if op.kind != "s":
        raise ins.refuse(f"a lane mask in {op.text!r}")
    if at == NULL:
        return lambda w, value: None
    if at == EXEC:
        return lambda w, value: w.set_bits(EXEC, bits_of(value & w.mask))
    return lambda w, value: w.set_bits(at, bits_of(value & w.mask))
