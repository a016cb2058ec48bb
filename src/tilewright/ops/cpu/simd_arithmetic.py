"""Vectors of constants, and arithmetic lane by lane, inside Numba functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from tilewright.ops.cpu.simd import (
    I8,
    VecType,
    f32x16,
    i8x16,
    i32x16,
    ir_call,
    ir_const,
    ir_fma,
    ir_splat,
)

__all__ = [
    "absolute",
    "add",
    "band",
    "bor",
    "bxor",
    "const_i8x16",
    "div",
    "exp",
    "fma",
    "fmax",
    "mul",
    "shl_u8",
    "shr_u8",
    "splat_f32",
    "splat_i32",
    "splat_i8",
    "sub",
    "zeros_f32",
]


def _make_splat(result: VecType, source: Any, narrow: bool) -> Any:
    @intrinsic
    def splat(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            scalar = builder.trunc(args[0], result.llvm.element) if narrow else args[0]
            return ir_splat(builder, scalar, result.lanes)

        return result(source), codegen

    return splat


splat_f32 = _make_splat(f32x16, types.float32, False)
splat_i32 = _make_splat(i32x16, types.int64, True)
splat_i8 = _make_splat(i8x16, types.int64, True)


@intrinsic
def zeros_f32(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir_const(f32x16.llvm, 0.0)

    return f32x16(), codegen


def const_i8x16(values: Sequence[int]) -> Any:
    """An intrinsic without arguments that returns these 16 signed bytes."""

    @intrinsic
    def constant(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir.Constant(i8x16.llvm, list(values))

        return i8x16(), codegen

    return constant


def _binary(int_op: str, float_op: str = "") -> Any:
    @intrinsic
    def op(typingctx: Any, a: Any, b: Any) -> Any:
        if a != b or not isinstance(a, VecType) or (a.elem == "f32" and not float_op):
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return getattr(builder, float_op if a.elem == "f32" else int_op)(*args)

        return a(a, b), codegen

    return op


add = _binary("add", "fadd")
sub = _binary("sub", "fsub")
mul = _binary("mul", "fmul")
band = _binary("and_")
bor = _binary("or_")
bxor = _binary("xor")


@intrinsic
def shr_u8(typingctx: Any, a: Any, bits: Any) -> Any:
    """Logical shift right of each byte of an i8x16 by the same number of bits."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.lshr(args[0], ir_splat(builder, builder.trunc(args[1], I8), 16))

    return i8x16(i8x16, types.int64), codegen


@intrinsic
def shl_u8(typingctx: Any, a: Any, bits: Any) -> Any:
    """Shift left of each byte of an i8x16 by the same number of bits."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.shl(args[0], ir_splat(builder, builder.trunc(args[1], I8), 16))

    return i8x16(i8x16, types.int64), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c on f32x16, rounded once where the CPU has the instruction."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir_fma(builder, *args)

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def div(typingctx: Any, a: Any, b: Any) -> Any:
    """a / b, lane by lane, correctly rounded."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def absolute(typingctx: Any, a: Any) -> Any:
    """Magnitude of each lane of an f32x16."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir_call(builder, "llvm.fabs.v16f32", f32x16.llvm, args[0])

    return f32x16(f32x16), codegen


@intrinsic
def fmax(typingctx: Any, a: Any, b: Any) -> Any:
    """The larger of each pair of lanes; b where a is NaN."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def exp(typingctx: Any, a: Any) -> Any:
    """e^a for each lane; 0 below -87.3, and the error stays within 2 units of the last place.

    a = n ln2 + r with |r| <= ln2 / 2 (ln2 in two pieces, after Cody and Waite); e^r by its Taylor
    polynomial of degree 7, whose remainder at ln2 / 2 is below 1e-8; 2^n from the exponent bits.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vec = f32x16.llvm
        low, high = ir_const(vec, -87.33654022216797), ir_const(vec, 88.0)
        x = builder.select(builder.fcmp_ordered("<", args[0], high), args[0], high)
        tiny = builder.fcmp_unordered("<", x, low)
        clamped = builder.select(tiny, low, x)
        log2_e = ir_const(vec, 1.4426950216293335)
        n = ir_call(builder, "llvm.rint.v16f32", vec, builder.fmul(clamped, log2_e))
        r = ir_fma(builder, n, ir_const(vec, -0.693145751953125), clamped)
        r = ir_fma(builder, n, ir_const(vec, -1.4286068202862268e-06), r)
        total = ir_const(vec, 1.0 / 5040)
        for factorial in (720, 120, 24, 6, 2, 1, 1):
            total = ir_fma(builder, total, r, ir_const(vec, 1.0 / factorial))
        whole = builder.add(builder.fptosi(n, i32x16.llvm), ir_const(i32x16.llvm, 127))
        power = builder.bitcast(builder.shl(whole, ir_const(i32x16.llvm, 23)), vec)
        result = builder.fmul(total, power)
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        result = builder.select(tiny, ir_const(vec, 0.0), result)
        return builder.select(nan, args[0], result)

    return f32x16(f32x16), codegen
