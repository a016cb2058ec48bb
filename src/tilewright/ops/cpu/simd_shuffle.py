"""What moves numbers between lanes, inside Numba functions: lookups, transposes, reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from tilewright.ops.cpu.simd import (
    CPU_FEATURES,
    I32,
    I64,
    X86,
    f32x16,
    i8x16,
    i32x16,
    ir_call,
    ir_const,
    ir_fma,
    ir_load,
    ir_shuffle,
    ir_store,
)

__all__ = ["lookup16", "max_f32", "sum_f32", "sum_i8", "transpose16", "transpose4"]


@intrinsic
def lookup16(typingctx: Any, table: Any, index: Any) -> Any:
    """Lane j is table[index[j]]; every index must lie in 0..15."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if X86 and "ssse3" in CPU_FEATURES:
            return ir_call(builder, "llvm.x86.ssse3.pshuf.b.128", i8x16.llvm, *args)
        result = ir_const(i8x16.llvm, 0)
        for lane in range(16):
            position = builder.extract_element(args[1], I32(lane))
            value = builder.extract_element(args[0], builder.zext(position, I32))
            result = builder.insert_element(result, value, I32(lane))
        return result

    return i8x16(i8x16, i8x16), codegen


@intrinsic
def transpose4(typingctx: Any, src: Any, stride: Any, dst: Any, dst_stride: Any) -> Any:
    """Transpose 16 rows of 16 bytes, taken four bytes at a time.

    Row r lies at src + r * stride. Afterwards the 4-byte word k of row r lies at
    dst + k * dst_stride + 4 * r: 16 rows in the lanes, as `dot4` wants them.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        base, step, target, target_step = args
        rows = []
        word = ir.VectorType(I32, 4)
        for r in range(16):
            address = builder.add(base, builder.mul(step, I64(r)))
            rows.append(ir_load(builder, address, word))
        rows = _interleave_all(builder, rows)  # [row 0, 4, 8, 12 | ...] per word, in four pieces
        for k in range(4):
            pieces = rows[4 * k : 4 * k + 4]
            low = ir_shuffle(builder, pieces[0], pieces[1], list(range(8)))
            high = ir_shuffle(builder, pieces[2], pieces[3], list(range(8)))
            column = ir_shuffle(builder, low, high, list(range(16)))
            ir_store(builder, builder.add(target, builder.mul(target_step, I64(k))), column)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


def _interleave_all(builder: Any, rows: list[Any]) -> list[Any]:
    """log2(lanes) rounds of a perfect shuffle: afterwards the rows' lanes are transposed."""
    lanes = rows[0].type.count
    half = len(rows) // 2
    low = [x for i in range(lanes // 2) for x in (i, lanes + i)]
    high = [x for i in range(lanes // 2, lanes) for x in (i, lanes + i)]
    for _ in range(len(rows).bit_length() - 1):
        rows = [
            ir_shuffle(builder, rows[i], rows[i + half], index)
            for i in range(half)
            for index in (low, high)
        ]
    return rows


@intrinsic
def transpose16(typingctx: Any, src: Any, stride: Any, scale: Any, minimum: Any, dst: Any,
                dst_stride: Any) -> Any:  # fmt: skip
    """Dequantize and transpose 16 rows of 16 signed bytes.

    Row r lies at src + r * stride. Afterwards the float32 scale[r] * byte[r, k] + minimum[r] lies
    at dst + k * dst_stride + 4 * r.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        base, step, scale, minimum, target, target_step = args
        rows = [
            ir_load(builder, builder.add(base, builder.mul(step, I64(r))), i8x16.llvm)
            for r in range(16)
        ]
        for k, column in enumerate(_interleave_all(builder, rows)):
            value = builder.sitofp(builder.sext(column, i32x16.llvm), f32x16.llvm)
            value = ir_fma(builder, value, scale, minimum)
            ir_store(builder, builder.add(target, builder.mul(target_step, I64(k))), value)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, f32x16, f32x16, i64, i64), codegen


def _pairwise(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Lane 0 of 16 lanes combined from the halves down: one fixed order."""
    lanes = 16
    while lanes > 1:
        lanes //= 2
        low = ir_shuffle(builder, value, value, list(range(lanes)))
        high = ir_shuffle(builder, value, value, list(range(lanes, 2 * lanes)))
        value = combine(low, high)
    return builder.extract_element(value, I32(0))


@intrinsic
def sum_f32(typingctx: Any, a: Any) -> Any:
    """Sum of the lanes of an f32x16, pairwise from the halves down: one fixed order."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _pairwise(builder, args[0], builder.fadd)

    return types.float32(f32x16), codegen


@intrinsic
def sum_i8(typingctx: Any, a: Any) -> Any:
    """Sum of the 16 signed bytes of an i8x16 as int64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = builder.sext(args[0], i32x16.llvm)
        return builder.sext(_pairwise(builder, value, builder.add), I64)

    return types.int64(i8x16), codegen


@intrinsic
def max_f32(typingctx: Any, a: Any) -> Any:
    """The largest lane of an f32x16."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def larger(low: Any, high: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", low, high), low, high)

        return _pairwise(builder, args[0], larger)

    return types.float32(f32x16), codegen
