"""Packed and mixed-precision vector instructions.

Packed (VOP3P) operations do one thing to both halves of their registers; op_sel and op_sel_hi pick
the halves that the low and the high result read, neg_lo and neg_hi flip their signs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.isa.emulate_arith import OPERATIONS, fma, join_halves
from tilewright.isa.emulate_operands import Array, Reader, reader, writer
from tilewright.isa.emulate_state import Wave
from tilewright.isa.emulate_text import Instruction, Operand

__all__ = ["compile_packed"]

Run = Callable[[Wave], None]

_PACKED = {
    "add_f16", "sub_f16", "mul_f16", "fma_f16", "min_f16", "max_f16", "min_num_f16", "max_num_f16",
    "minimum_f16", "maximum_f16", "add_u16", "sub_u16", "mul_lo_u16", "mad_u16", "min_u16",
    "max_u16", "min_i16", "max_i16", "lshlrev_b16", "lshrrev_b16", "ashrrev_i16",
}  # fmt: skip


def compile_packed(ins: Instruction, lanes: int) -> Run | None:
    """The function of one packed or mixed instruction; None if it is none of them."""
    name = ins.mnemonic.removesuffix("_e64").removesuffix("_e32")
    if name.startswith(("v_fma_mix", "v_mad_mix")):
        return _mix(ins, name, lanes)
    if name in ("v_dot2_f32_f16", "v_dot2_f32_bf16"):
        return _dot2(ins, name, lanes)
    if not name.startswith("v_pk_"):
        return None
    stem = name.removeprefix("v_pk_")
    if stem == "mov_b32":
        return _pair_of_registers(ins, lanes, None)
    if stem in ("add_f32", "mul_f32", "fma_f32"):
        return _pair_of_registers(ins, lanes, OPERATIONS[f"v_{stem}"][2])
    if stem == "fmac_f16":
        return _halves(ins, "fma_f16", lanes, (*ins.operands[1:], ins.operands[0]))
    if stem in _PACKED:
        return _halves(ins, stem, lanes, ins.operands[1:])
    return None


def _half(ins: Instruction, op: Operand, kind: str, lanes: int, high: int, flip: int) -> Reader:
    """One half of a packed source as an array of `kind`."""
    read = reader(ins, op, kind, lanes, high=bool(high))
    if not flip:
        return read
    if kind != "f16":
        raise ins.refuse("a sign modifier on packed integers")
    sign = np.uint16(0x8000)
    return lambda w: (read(w).view(np.uint16) ^ sign).view(np.float16)


def _halves(ins: Instruction, stem: str, lanes: int, sources: tuple[Operand, ...]) -> Run:
    kind, kinds, function = OPERATIONS[f"v_{stem}"]
    n = len(kinds)
    ones, zeros = (1,) * n, (0,) * n
    sides = [
        [
            _half(ins, op, source, lanes, sel, flip)
            for op, source, sel, flip in zip(
                sources, kinds, ins.pair(pick, default), ins.pair(sign, zeros), strict=False
            )
        ]
        for pick, default, sign in (("op_sel", zeros, "neg_lo"), ("op_sel_hi", ones, "neg_hi"))
    ]
    write = writer(ins, ins.operands[0], "u32")
    clamp = "clamp" in ins.modifiers
    if clamp and kind != "f16":
        raise ins.refuse("clamp of packed integers")

    def run(w: Wave) -> None:
        low, high = (function(*(read(w) for read in side)) for side in sides)
        if clamp:
            low, high = (np.clip(np.nan_to_num(x, nan=0.0), 0, 1) for x in (low, high))
        write(w, join_halves(low.astype(low.dtype), high))

    return run


def _pair_of_registers(ins: Instruction, lanes: int, function: Any) -> Run:
    """v_pk_*_f32 and v_pk_mov_b32: sources are pairs of registers."""
    target, *sources = ins.operands
    n = len(sources)
    low, high = ins.pair("op_sel", (0,) * n), ins.pair("op_sel_hi", (1,) * n)
    minus = ins.pair("neg_lo", (0,) * n), ins.pair("neg_hi", (0,) * n)
    kind = "u32" if function is None else "f32"

    def read(op: Operand, upper: int, negate: int) -> Reader:
        at = op.index + upper if op.kind in "vs" and op.count == 2 else op.index
        one = reader(ins, Operand(op.kind, op.text, at, value=op.value), kind, lanes)
        return (lambda w: -one(w)) if negate else one

    if function is None:
        picked = [read(sources[0], low[0], 0), read(sources[1], low[1], 0)]
        parts: list[Reader] = [(lambda w, r=r: r(w).copy()) for r in picked]  # type: ignore[misc]
    else:
        sides = [
            [read(op, sel[i], sign[i]) for i, op in enumerate(sources)]
            for sel, sign in ((low, minus[0]), (high, minus[1]))
        ]
        parts = [
            (lambda w, side=side: function(*(r(w) for r in side)))  # type: ignore[misc]
            for side in sides
        ]

    def run(w: Wave) -> None:
        first, second = (part(w) for part in parts)
        w.put(target.index, first.view(np.uint32))
        w.put(target.index + 1, second.view(np.uint32))

    return run


def _mix(ins: Instruction, name: str, lanes: int) -> Run:
    """a * b + c in float32 of sources that are float32 registers or halves of float16."""
    half, which = ins.pair("op_sel_hi", (0, 0, 0)), ins.pair("op_sel", (0, 0, 0))
    minus, size = ins.pair("neg_lo", (0, 0, 0)), ins.pair("neg_hi", (0, 0, 0))

    def read(n: int) -> Reader:
        op = ins.operands[1 + n]
        one = reader(ins, op, "f16" if half[n] else "f32", lanes, high=bool(half[n] and which[n]))

        def value(w: Wave) -> Array:
            x = one(w).astype(np.float32)
            x = np.abs(x) if size[n] else x
            return -x if minus[n] else x

        return value

    reads = [read(n) for n in range(3)]
    target = ins.operands[0]
    if name.endswith("_f32"):
        write = writer(ins, target, "f32")
        return lambda w: write(w, fma(*(r(w) for r in reads)))
    write = writer(ins, target, "f16", high="mixhi" in name)

    def run(w: Wave) -> None:
        # Rounded twice, as the instruction is defined: to float32, then to float16.
        write(w, fma(*(r(w) for r in reads)).astype(np.float16))

    return run


def _bfloat(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _dot2(ins: Instruction, name: str, lanes: int) -> Run:
    """Two products of halves added to a float32."""
    target, *sources = ins.operands
    kind = "u16" if "bf16" in name else "f16"
    n = len(sources)
    low, high = ins.pair("op_sel", (0,) * n), ins.pair("op_sel_hi", (1,) * n)
    signs = ins.pair("neg_lo", (0,) * n), ins.pair("neg_hi", (0,) * n)
    factors = [
        [reader(ins, op, kind, lanes, high=bool(sel[i])) for i, op in enumerate(sources[:2])]
        for sel in (low, high)
    ]
    add, write = reader(ins, sources[2], "f32", lanes), writer(ins, target, "f32")

    def run(w: Wave) -> None:
        total = add(w).astype(np.float64)
        for side, sign in zip(factors, signs, strict=True):
            x, y = ((_bfloat(r(w)) if kind == "u16" else r(w)).astype(np.float64) for r in side)
            total = total + (-1 if sign[0] ^ sign[1] else 1) * x * y
        write(w, total.astype(np.float32))

    return run
