"""Register-tiled inner loops of the two GEMMs, emitted as LLVM IR for a given tile size.

Both compute an MR x (16 NV) tile of C for rows of x and one weight panel, with every accumulator in
a register. MR, NV and the traits of the weight type are compile-time integers, so each tile is its
own straight-line loop; that is what Numba's Python subset cannot express.

``tile_f32``: b is float32 [K, 16 NV], its rows `ldb` bytes apart.

    for k:  b_v = b[k, 16v : 16v+16];   acc[i, v] += x[i, k] * b_v

``tile_i8``: panel w is int8 [K/4, 16 NV, 4] (see `dot4`), x is uint8 q + 128.

    for block:  t[i, v]   = corr[block, v]                 int32, -128 * sum of the block's codes
                t[i, v]  += dot4(x[i, k..k+3], w[k/4, v])  for the block's k
                acc[i, v] += float(t[i, v]) * (scale[block, v] * dx[i, part])
                acc[i, v] += minimum[block, v] * sx[i, block]       (types with minima)

A block is a part of 32 values, or 16 for types with a scale per 16.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from tilewright.ops.cpu.simd import I32, I64, ir_const, ir_fma, ir_load, ir_splat, ir_store
from tilewright.ops.cpu.simd_dot import dot4

__all__ = ["tile_f32", "tile_i8"]

_V = ir.VectorType(ir.FloatType(), 16)
_VI = ir.VectorType(I32, 16)
_VB = ir.VectorType(ir.IntType(8), 64)
_UNROLL = 4


def _offset(builder: Any, base: Any, bytes_: int) -> Any:
    return builder.add(base, I64(bytes_)) if bytes_ else base


class _Loop:
    """``for i in range(count)`` with loop-carried values, in IR."""

    def __init__(self, builder: Any, count: Any, carried: list[Any]) -> None:
        self.builder = builder
        before = builder.block
        self.body = builder.append_basic_block("tile.body")
        self.after = builder.append_basic_block("tile.after")
        builder.cbranch(builder.icmp_signed(">", count, I64(0)), self.body, self.after)
        builder.position_at_end(self.body)
        self.count = count
        self.index = builder.phi(I64)
        self.index.add_incoming(I64(0), before)
        self.values = []
        self._before = before
        self._initial = carried
        for value in carried:
            phi = builder.phi(value.type)
            phi.add_incoming(value, before)
            self.values.append(phi)

    def close(self, updated: list[Any]) -> list[Any]:
        builder = self.builder
        end = builder.block
        following = builder.add(self.index, I64(1))
        self.index.add_incoming(following, end)
        for phi, value in zip(self.values, updated, strict=True):
            phi.add_incoming(value, end)
        again = builder.icmp_signed("<", following, self.count)
        builder.cbranch(again, self.body, self.after)
        builder.position_at_end(self.after)
        results = []
        for initial, value in zip(self._initial, updated, strict=True):
            phi = builder.phi(value.type)
            phi.add_incoming(initial, self._before)
            phi.add_incoming(value, end)
            results.append(phi)
        return results


def _rows(builder: Any, base: Any, stride: Any, count: int) -> list[Any]:
    return [builder.add(base, builder.mul(stride, I64(i))) for i in range(count)]


def _finish(
    builder: Any, acc: list[Any], c: Any, ldc: Any, mr: int, nv: int, accumulate: Any
) -> None:
    """Store the tile, added to what C holds when `accumulate` is not 0."""
    keep = builder.icmp_signed("!=", accumulate, I64(0))
    with builder.if_else(keep) as (then, otherwise):
        with then:
            for i, row in enumerate(_rows(builder, c, ldc, mr)):
                for v in range(nv):
                    at = _offset(builder, row, 64 * v)
                    old = ir_load(builder, at, _V)
                    ir_store(builder, at, builder.fadd(old, acc[i * nv + v]))
        with otherwise:
            for i, row in enumerate(_rows(builder, c, ldc, mr)):
                for v in range(nv):
                    ir_store(builder, _offset(builder, row, 64 * v), acc[i * nv + v])


def _literals(*values: Any) -> bool:
    return all(isinstance(v, types.IntegerLiteral) for v in values)


@intrinsic(prefer_literal=True)
def tile_f32(typingctx: Any, mr: Any, nv: Any, x: Any, ldx: Any, b: Any, ldb: Any, k: Any, c: Any,
             ldc: Any, accumulate: Any) -> Any:  # fmt: skip
    """C tile from float32 x rows and a float32 panel; k is a multiple of 4, strides in bytes."""
    if not _literals(mr, nv):
        return None
    m, n = mr.literal_value, nv.literal_value

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, _, x, ldx, b, ldb, k, c, ldc, accumulate = args
        rows = _rows(builder, x, ldx, m)
        steps = builder.ashr(k, I64(2))
        loop = _Loop(builder, steps, [ir_const(_V, 0.0)] * (m * n))
        acc = list(loop.values)
        a_at = builder.mul(loop.index, I64(4 * _UNROLL))
        step = builder.mul(builder.mul(loop.index, I64(_UNROLL)), ldb)
        b_rows = _rows(builder, builder.add(b, step), ldb, _UNROLL)
        for u in range(_UNROLL):
            panel = [ir_load(builder, _offset(builder, b_rows[u], 64 * v), _V) for v in range(n)]
            for i in range(m):
                at = _offset(builder, builder.add(rows[i], a_at), 4 * u)
                xi = ir_splat(builder, ir_load(builder, at, ir.FloatType()), 16)
                for v in range(n):
                    acc[i * n + v] = ir_fma(builder, xi, panel[v], acc[i * n + v])
        _finish(builder, loop.close(acc), c, ldc, m, n, accumulate)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(mr, nv, i64, i64, i64, i64, i64, i64, i64, i64), codegen


@intrinsic(prefer_literal=True)
def tile_i8(typingctx: Any, mr: Any, nv: Any, split: Any, has_min: Any, small: Any, x: Any,
            ldx: Any, dx: Any, lddx: Any, sx: Any, ldsx: Any, w: Any, corr: Any, scale: Any,
            minimum: Any, parts: Any, c: Any, ldc: Any, accumulate: Any) -> Any:  # fmt: skip
    """C tile from 8-bit activations and an 8-bit panel; strides in bytes."""
    if not _literals(mr, nv, split, has_min, small):
        return None
    m, n = mr.literal_value, nv.literal_value
    halves = 2 if split.literal_value else 1
    minima, narrow = bool(has_min.literal_value), bool(small.literal_value)
    words = 8 // halves

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x, ldx, dx, lddx, sx, ldsx, w, corr, scale, minimum, parts, c, ldc, accumulate = args[5:]
        x_rows = _rows(builder, x, ldx, m)
        d_rows = _rows(builder, dx, lddx, m)
        s_rows = _rows(builder, sx, ldsx, m)
        loop = _Loop(builder, parts, [ir_const(_V, 0.0)] * (m * n))
        acc = list(loop.values)
        x_at = builder.mul(loop.index, I64(32))
        d_at = builder.mul(loop.index, I64(4))
        s_at = builder.mul(loop.index, I64(4 * halves))
        w_at = builder.add(w, builder.mul(loop.index, I64(8 * 64 * n)))
        v_at = builder.mul(loop.index, I64(64 * n * halves))
        for h in range(halves):
            block = [64 * (h * n + v) for v in range(n)]
            start = [ir_load(builder, _offset(builder, builder.add(corr, v_at), o), _VI)
                     for o in block]  # fmt: skip
            total = [start[v] for _ in range(m) for v in range(n)]
            for q in range(words):
                word = h * words + q
                panel = [ir_load(builder, _offset(builder, w_at, 64 * (word * n + v)), _VB)
                         for v in range(n)]  # fmt: skip
                for i in range(m):
                    at = _offset(builder, builder.add(x_rows[i], x_at), 4 * word)
                    xi = builder.bitcast(ir_splat(builder, ir_load(builder, at, I32), 16), _VB)
                    for v in range(n):
                        t = i * n + v
                        total[t] = dot4(builder, total[t], xi, panel[v], narrow)
            scales = [ir_load(builder, _offset(builder, builder.add(scale, v_at), o), _V)
                      for o in block]  # fmt: skip
            mins = []
            if minima:
                mins = [ir_load(builder, _offset(builder, builder.add(minimum, v_at), o), _V)
                        for o in block]  # fmt: skip
            for i in range(m):
                d = ir_splat(builder, ir_load(builder, builder.add(d_rows[i], d_at),
                                          ir.FloatType()), 16)  # fmt: skip
                if minima:
                    at = _offset(builder, builder.add(s_rows[i], s_at), 4 * h)
                    s = ir_splat(builder, ir_load(builder, at, ir.FloatType()), 16)
                for v in range(n):
                    t = i * n + v
                    dot = builder.fmul(builder.sitofp(total[t], _V), scales[v])
                    acc[t] = ir_fma(builder, dot, d, acc[t])
                    if minima:
                        acc[t] = ir_fma(builder, mins[v], s, acc[t])
        _finish(builder, loop.close(acc), c, ldc, m, n, accumulate)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(mr, nv, split, has_min, small, *([i64] * 14)), codegen
