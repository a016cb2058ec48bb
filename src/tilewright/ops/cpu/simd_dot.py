"""Dot products of bytes in LLVM IR, by the instructions that the CPU has for them."""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir

from tilewright.ops.cpu.simd import (
    CPU_FEATURES,
    I16,
    I32,
    X86,
    has_vnni,
    ir_call,
    ir_const,
    ir_shuffle,
)

__all__ = ["dot4"]


def dot4(builder: Any, acc: Any, unsigned: Any, signed: Any, small: bool) -> Any:
    """IR of acc[i] += sum of unsigned[4i + j] * signed[4i + j] over j in 0..3, 16 lanes of int32.

    Args:
        builder: the llvmlite builder.
        acc: <16 x i32>.
        unsigned: <64 x i8>, read as 0..255.
        signed: <64 x i8>, read as -128..127.
        small: the caller promises abs(signed) <= 64, so that a pair of products fits int16
            (255 * 64 * 2 < 32768) and AVX2's saturating vpmaddubsw is exact.
    """
    i32v = ir.VectorType(I32, 16)
    if has_vnni():
        name = "llvm.x86.avx512.vpdpbusd.512"
        if binding.llvm_version_info < (21,):
            cast = (builder.bitcast(unsigned, i32v), builder.bitcast(signed, i32v))
            return ir_call(builder, name, i32v, acc, *cast)
        return ir_call(builder, name, i32v, acc, unsigned, signed)
    if X86 and "avx2" in CPU_FEATURES:
        halves = []
        for start in (0, 32):
            index = list(range(start, start + 32))
            u = ir_shuffle(builder, unsigned, unsigned, index)
            w = ir_shuffle(builder, signed, signed, index)
            halves.append(_avx2_small(builder, u, w) if small else _avx2_wide(builder, u, w))
        return builder.add(acc, ir_shuffle(builder, halves[0], halves[1], list(range(16))))
    u, w = builder.bitcast(unsigned, i32v), builder.bitcast(signed, i32v)
    for j in range(4):
        byte = builder.and_(builder.lshr(u, ir_const(i32v, 8 * j)), ir_const(i32v, 255))
        code = builder.ashr(builder.shl(w, ir_const(i32v, 24 - 8 * j)), ir_const(i32v, 24))
        acc = builder.add(acc, builder.mul(byte, code))
    return acc


def _avx2_small(builder: Any, unsigned: Any, signed: Any) -> Any:
    """<8 x i32> sums of four products of 32 bytes, where pairs of products fit int16."""
    shorts = ir.VectorType(I16, 16)
    pairs = ir_call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, unsigned, signed)
    ones = ir_const(shorts, 1)
    return ir_call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), pairs, ones)


def _avx2_wide(builder: Any, unsigned: Any, signed: Any) -> Any:
    """The same for any bytes: even and odd ones apart, as int16."""
    shorts, quads = ir.VectorType(I16, 16), ir.VectorType(I32, 8)
    u, w = builder.bitcast(unsigned, shorts), builder.bitcast(signed, shorts)
    eight = ir_const(shorts, 8)
    even = (builder.and_(u, ir_const(shorts, 255)), builder.ashr(builder.shl(w, eight), eight))
    odd = (builder.lshr(u, eight), builder.ashr(w, eight))
    name = "llvm.x86.avx2.pmadd.wd"
    return builder.add(ir_call(builder, name, quads, *even), ir_call(builder, name, quads, *odd))
