"""Conversions between vectors of bits, bytes and float32 inside Numba functions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from tilewright.ops.cpu.simd import (
    F32,
    I8,
    I16,
    I32,
    f32x16,
    i8x16,
    i32x16,
    ir_call,
    ir_const,
    ir_splat,
)

__all__ = ["bits16", "f32_from_bits", "flip_sign", "round_i8", "to_f32"]


@intrinsic
def f32_from_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 whose bit pattern is the low half of `bits`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], I32), F32)

    return types.float32(types.int64), codegen


@intrinsic
def to_f32(typingctx: Any, a: Any) -> Any:
    """i8x16 (signed) or i32x16 to f32x16; exact."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = args[0]
        if a.elem == "i8":
            value = builder.sext(value, i32x16.llvm)
        return builder.sitofp(value, f32x16.llvm)

    return f32x16(a), codegen


@intrinsic
def bits16(typingctx: Any, mask: Any, value: Any) -> Any:
    """An i8x16 whose lane j is `value` where bit j of `mask` is set, else 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.trunc(args[0], I16), ir.VectorType(ir.IntType(1), 16))
        full = ir_splat(builder, builder.trunc(args[1], I8), 16)
        return builder.select(lanes, full, ir_const(i8x16.llvm, 0))

    return i8x16(types.int64, types.int64), codegen


@intrinsic
def flip_sign(typingctx: Any, a: Any) -> Any:
    """Add 128 to each byte: signed q becomes unsigned q + 128."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.xor(args[0], ir_const(i8x16.llvm, -128))

    return i8x16(i8x16), codegen


@intrinsic
def round_i8(typingctx: Any, a: Any) -> Any:
    """Round each lane half away from zero and clamp to -127..127; NaN gives 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = args[0]
        vec = f32x16.llvm
        value = builder.select(builder.fcmp_ordered("ord", value, value), value, ir_const(vec, 0.0))
        for sign, limit in (("<", 127.0), (">", -127.0)):
            bound = ir_const(vec, limit)
            value = builder.select(builder.fcmp_ordered(sign, value, bound), value, bound)
        # The largest float below one half, so that 0.49999997 does not round up.
        half = ir_const(vec, 0.4999999701976776)
        half = ir_call(builder, "llvm.copysign.v16f32", vec, half, value)
        whole = builder.fptosi(builder.fadd(value, half), i32x16.llvm)
        return builder.trunc(whole, i8x16.llvm)

    return i8x16(f32x16), codegen
