"""Row kernels: decode's dot product, embedding lookup, sums and 8-bit quantization of x.

``dot``       one row of x at a time: unpack a part of W, multiply, add into one 16-lane sum. Reads
              every packed byte once and writes nothing but y: what decode needs.
``rows``      dequantizes whole rows of W (embedding lookup).
``sums``      sums of x over parts, which the minima of a weight type multiply.
``quantize``  x to 8 bits per part of 32: d = max|x| / 127, q = x / d rounded half away from zero
              (ggml's Q8_0 rule, with d kept in float32).

K is cut into parts of 32 values; x rows are zero-padded to whole parts. A thread takes whole rows,
so every result is computed by one thread in one order whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tilewright.ops.cpu import args as A
from tilewright.ops.cpu.args import share
from tilewright.ops.cpu.runtime import Kernel, compile_kernel, specialize
from tilewright.ops.cpu.simd_arithmetic import absolute, add, fma, fmax, mul, splat_f32, zeros_f32
from tilewright.ops.cpu.simd_convert import flip_sign, round_i8, to_f32
from tilewright.ops.cpu.simd_memory import (
    load_f32,
    load_f32x16,
    load_i64,
    store_f32,
    store_f32x16,
    store_i8x16,
)
from tilewright.ops.cpu.simd_shuffle import max_f32, sum_f32, sum_i8
from tilewright.ops.cpu.unpack import KINDS

__all__ = ["dot_kernel", "quantize_kernel", "rows_kernel", "sums_kernel", "weight_kernel"]

# What `specialize` binds; the values here only give the names a type.
UNPACK: Any = KINDS["Q4_0"].unpack
HAS_MIN = 0
SPLIT = 0
UNROLL = 4


@njit
def _multiply_part(v0, v1, s0, s1, x, acc, split):  # type: ignore[no-untyped-def]
    """acc plus the products of one part of W with 32 values of x; minima are left out."""
    x0 = load_f32x16(x)
    x1 = load_f32x16(x + 64)
    if split:
        acc = fma(mul(to_f32(v0), splat_f32(s0)), x0, acc)
        return fma(mul(to_f32(v1), splat_f32(s1)), x1, acc)
    t = fma(to_f32(v1), x1, mul(to_f32(v0), x0))
    return fma(t, splat_f32(s0), acc)


@njit
def _minimum_part(m0, m1, x_sum, j, split):  # type: ignore[no-untyped-def]
    """What the minima of part j add: minimum times the sum of x it stands beside."""
    if split:
        return m0 * load_f32(x_sum + 8 * j) + m1 * load_f32(x_sum + 8 * j + 4)
    return m0 * load_f32(x_sum + 4 * j)


def _dot(args, thread, threads):  # type: ignore[no-untyped-def]
    w, w_stride = load_i64(args + A.W), load_i64(args + A.W_STRIDE)
    s, s_stride = load_i64(args + A.S), load_i64(args + A.S_STRIDE)
    z, z_stride = load_i64(args + A.Z), load_i64(args + A.Z_STRIDE)
    group_parts, parts = load_i64(args + A.GROUP_PARTS), load_i64(args + A.PARTS)
    bias, accumulate = load_i64(args + A.BIAS), load_i64(args + A.ACCUMULATE)
    first, last = share(load_i64(args + A.N), thread, threads)
    for m in range(load_i64(args + A.M)):
        x = load_i64(args + A.X) + m * load_i64(args + A.X_STRIDE)
        x_sum = load_i64(args + A.X_SUM) + m * load_i64(args + A.X_SUM_STRIDE)
        y = load_i64(args + A.Y) + m * load_i64(args + A.Y_STRIDE)
        for n in range(first, last):
            row = w + n * w_stride
            acc = zeros_f32()
            low = np.float32(0.0)
            whole = parts - parts % UNROLL
            for j0 in range(0, whole, UNROLL):
                for u in range(UNROLL):  # a constant, which LLVM unrolls
                    j = j0 + u
                    v0, v1, s0, s1, m0, m1 = UNPACK(row, s + n * s_stride, z + n * z_stride, j,
                                                    group_parts)  # fmt: skip
                    acc = _multiply_part(v0, v1, s0, s1, x + 128 * j, acc, SPLIT)
                    if HAS_MIN:
                        low += _minimum_part(m0, m1, x_sum, j, SPLIT)
            for j in range(whole, parts):
                v0, v1, s0, s1, m0, m1 = UNPACK(row, s + n * s_stride, z + n * z_stride, j,
                                                group_parts)  # fmt: skip
                acc = _multiply_part(v0, v1, s0, s1, x + 128 * j, acc, SPLIT)
                if HAS_MIN:
                    low += _minimum_part(m0, m1, x_sum, j, SPLIT)
            total = sum_f32(acc) + low
            if bias != 0:
                total += load_f32(bias + 4 * n)
            if accumulate != 0:
                total += load_f32(y + 4 * n)
            store_f32(y + 4 * n, total)


def _sums(args, thread, threads):  # type: ignore[no-untyped-def]
    """Sums of x over each part (or half part when SPLIT), which minima multiply."""
    parts = load_i64(args + A.PARTS)
    first, last = share(load_i64(args + A.M), thread, threads)
    for m in range(first, last):
        x = load_i64(args + A.X) + m * load_i64(args + A.X_STRIDE)
        out = load_i64(args + A.X_SUM) + m * load_i64(args + A.X_SUM_STRIDE)
        for j in range(parts):
            a = sum_f32(load_f32x16(x + 128 * j))
            b = sum_f32(load_f32x16(x + 128 * j + 64))
            if SPLIT:
                store_f32(out + 8 * j, a)
                store_f32(out + 8 * j + 4, b)
            else:
                store_f32(out + 4 * j, a + b)


def _rows(args, thread, threads):  # type: ignore[no-untyped-def]
    """Dequantize whole rows to float32: y[n] = W[ids[n]], ids int64 at `x` (embedding lookup)."""
    w, w_stride = load_i64(args + A.W), load_i64(args + A.W_STRIDE)
    s, s_stride = load_i64(args + A.S), load_i64(args + A.S_STRIDE)
    z, z_stride = load_i64(args + A.Z), load_i64(args + A.Z_STRIDE)
    ids, y, y_stride = load_i64(args + A.X), load_i64(args + A.Y), load_i64(args + A.Y_STRIDE)
    first, last = share(load_i64(args + A.N), thread, threads)
    for i in range(first, last):
        n = load_i64(ids + 8 * i)
        out = y + i * y_stride
        for j in range(load_i64(args + A.PARTS)):
            v0, v1, s0, s1, m0, m1 = UNPACK(w + n * w_stride, s + n * s_stride, z + n * z_stride,
                                            j, load_i64(args + A.GROUP_PARTS))  # fmt: skip
            if HAS_MIN:
                a = add(mul(to_f32(v0), splat_f32(s0)), splat_f32(m0))
                b = add(mul(to_f32(v1), splat_f32(s1)), splat_f32(m1))
            else:
                a = mul(to_f32(v0), splat_f32(s0))
                b = mul(to_f32(v1), splat_f32(s1))
            store_f32x16(out + 128 * j, a)
            store_f32x16(out + 128 * j + 64, b)


def _quantize(args, thread, threads):  # type: ignore[no-untyped-def]
    """x rows to uint8 q + 128 at `y`, with d at `x_scale` and d * sum(q) at `x_sum`.

    An all-zero part gives d = 0 and q = 0; a part that holds Inf or NaN gives d = NaN, so that
    every output it touches is NaN and none is silently wrong.
    """
    parts = load_i64(args + A.PARTS)
    first, last = share(load_i64(args + A.M), thread, threads)
    for m in range(first, last):
        x = load_i64(args + A.X) + m * load_i64(args + A.X_STRIDE)
        q = load_i64(args + A.Y) + m * load_i64(args + A.Y_STRIDE)
        scale = load_i64(args + A.X_SCALE) + m * load_i64(args + A.X_SCALE_STRIDE)
        sums = load_i64(args + A.X_SUM) + m * load_i64(args + A.X_SUM_STRIDE)
        for j in range(parts):
            x0 = load_f32x16(x + 128 * j)
            x1 = load_f32x16(x + 128 * j + 64)
            top = max_f32(fmax(absolute(x0), absolute(x1)))
            poison = sum_f32(fma(x0, zeros_f32(), mul(x1, zeros_f32())))  # NaN if any is not finite
            d = top / np.float32(127.0) + poison
            inverse = np.float32(0.0)
            if d > np.float32(0.0):
                inverse = np.float32(1.0) / d
            q0 = round_i8(mul(x0, splat_f32(inverse)))
            q1 = round_i8(mul(x1, splat_f32(inverse)))
            store_i8x16(q + 32 * j, flip_sign(q0))
            store_i8x16(q + 32 * j + 16, flip_sign(q1))
            store_f32(scale + 4 * j, d)
            a, b = np.float32(sum_i8(q0)), np.float32(sum_i8(q1))
            if SPLIT:
                store_f32(sums + 8 * j, d * a)
                store_f32(sums + 8 * j + 4, d * b)
            else:
                store_f32(sums + 4 * j, d * (a + b))


_CACHE: dict[str, Kernel] = {}


def weight_kernel(template: Any, algorithm: str, weight: str, **constants: int) -> Kernel:
    """The kernel of `template` for one weight type, compiled on first use."""
    name = "-".join([algorithm, weight, *(f"{k}{v}" for k, v in sorted(constants.items()))])
    if name not in _CACHE:
        kind = KINDS[weight]
        bound = {k.upper(): v for k, v in constants.items()}
        function = specialize(
            template, name.replace("-", "_"), UNPACK=kind.unpack, HAS_MIN=int(kind.has_min),
            SPLIT=int(kind.split), SMALL=int(kind.small), **bound,
        )  # fmt: skip
        _CACHE[name] = compile_kernel(function, name)
    return _CACHE[name]


def _shared_kernel(template: Any, algorithm: str, split: bool) -> Kernel:
    name = f"{algorithm}-{'halves' if split else 'parts'}"
    if name not in _CACHE:
        function = specialize(template, name.replace("-", "_"), SPLIT=int(split))
        _CACHE[name] = compile_kernel(function, name)
    return _CACHE[name]


def dot_kernel(weight: str, unroll: int) -> Kernel:
    """y[m] (+)= W x[m] + bias; args: weights, parts, n, m, x, x_sum, y, bias, accumulate."""
    return weight_kernel(_dot, "dot", weight, unroll=unroll)


def rows_kernel(weight: str) -> Kernel:
    """y[i] = W[ids[i]] in float32; args: weights, parts, n (ids), x (int64 ids), y."""
    return weight_kernel(_rows, "rows", weight)


def sums_kernel(split: bool) -> Kernel:
    """x_sum[m, part] (or half part when `split`); args: parts, m, x, x_sum."""
    return _shared_kernel(_sums, "sums", split)


def quantize_kernel(split: bool) -> Kernel:
    """Quantize x to y = q + 128 (uint8), x_scale, x_sum; args: parts, m, x, y, x_scale, x_sum."""
    return _shared_kernel(_quantize, "quantize", split)
