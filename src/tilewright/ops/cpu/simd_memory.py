"""Loads and stores of vectors and scalars inside Numba functions.

Addresses are int64 byte addresses. Nothing is assumed to be aligned.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from tilewright.ops.cpu.simd import (
    CPU_FEATURES,
    F32,
    I8,
    I16,
    I32,
    I64,
    X86,
    VecType,
    f32x16,
    i8x16,
    i32x16,
    ir_load,
    ir_store,
)

__all__ = [
    "load_f16",
    "load_f32",
    "load_f32x16",
    "load_i32x16",
    "load_i64",
    "load_i8",
    "load_i8x16",
    "load_u16",
    "load_u32",
    "load_u8",
    "store_f32",
    "store_f32x16",
    "store_i32",
    "store_i32x16",
    "store_i8x16",
    "store_u8",
]


def _vector_load(result: VecType) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir_load(builder, args[0], result.llvm)

        return result(types.int64), codegen

    return load


load_f32x16 = _vector_load(f32x16)
load_i32x16 = _vector_load(i32x16)
load_i8x16 = _vector_load(i8x16)


def _scalar_load(elem: Any, result: Any, extend: str | None) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = ir_load(builder, args[0], elem)
            return getattr(builder, extend)(value, I64) if extend else value

        return result(types.int64), codegen

    return load


load_u8 = _scalar_load(I8, types.int64, "zext")
load_i8 = _scalar_load(I8, types.int64, "sext")
load_u16 = _scalar_load(I16, types.int64, "zext")
load_u32 = _scalar_load(I32, types.int64, "zext")
load_i64 = _scalar_load(I64, types.int64, None)
load_f32 = _scalar_load(F32, types.float32, None)


@intrinsic
def load_f16(typingctx: Any, address: Any) -> Any:
    """One IEEE half at `address` as float32, exact, denormals included."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if "f16c" in CPU_FEATURES or not X86:
            return builder.fpext(ir_load(builder, args[0], ir.HalfType()), F32)
        # Without F16C: place exponent and mantissa, then multiply by 2^112 to rebias.
        half = builder.zext(ir_load(builder, args[0], I16), I32)
        magnitude = builder.shl(builder.and_(half, I32(0x7FFF)), I32(13))
        value = builder.fmul(builder.bitcast(magnitude, F32), ir.Constant(F32, 2.0**112))
        sign = builder.shl(builder.and_(half, I32(0x8000)), I32(16))
        return builder.bitcast(builder.or_(builder.bitcast(value, I32), sign), F32)

    return types.float32(types.int64), codegen


def _vector_store(vec: VecType) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            ir_store(builder, args[0], args[1])
            return context.get_dummy_value()

        return types.void(types.int64, vec), codegen

    return store


store_f32x16 = _vector_store(f32x16)
store_i32x16 = _vector_store(i32x16)
store_i8x16 = _vector_store(i8x16)


@intrinsic
def store_f32(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ir_store(builder, args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def store_i32(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ir_store(builder, args[0], builder.trunc(args[1], I32))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store_u8(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ir_store(builder, args[0], builder.trunc(args[1], I8))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
