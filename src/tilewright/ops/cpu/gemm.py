"""GEMM kernels for prefill: a thread unpacks a panel of W once and runs all rows of x over it.

``panel``  dequantizes 16 NV rows of W into a float32 panel [K, 16 NV] in the thread's scratch and
           runs `tile_f32` over MR rows of x at a time. Weight-only: x stays float32.
``int8``   the panel holds codes, x comes quantized from the ``quantize`` kernel, and `tile_i8` sums
           exact integers and applies scales and minima in float32.

K is processed `block_parts` parts at a time so that the panel stays in the L2 cache. x must be
readable up to a multiple of MR rows; y and W need no padding. A thread takes whole panels, so
results do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from tilewright.ops.cpu import args as A
from tilewright.ops.cpu.args import share
from tilewright.ops.cpu.microkernel import tile_f32, tile_i8
from tilewright.ops.cpu.rows import weight_kernel
from tilewright.ops.cpu.runtime import Kernel
from tilewright.ops.cpu.simd_arithmetic import zeros_f32
from tilewright.ops.cpu.simd_memory import (
    load_f32,
    load_f32x16,
    load_i64,
    store_f32,
    store_i8x16,
    store_i32,
)
from tilewright.ops.cpu.simd_shuffle import sum_i8, transpose4, transpose16
from tilewright.ops.cpu.unpack import KINDS

__all__ = ["int8_kernel", "panel_kernel", "scratch_bytes"]

# What `specialize` binds; the values here only give the names a type.
UNPACK: Any = KINDS["Q4_0"].unpack
HAS_MIN = 0
SPLIT = 0
SMALL = 1
MR = 4
NV = 2


@njit
def _copy_tile(tile, rows, columns, width, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
    """Copy the valid corner of a tile in scratch to y."""
    for i in range(rows):
        for c in range(columns):
            at = y + i * y_stride + 4 * c
            value = load_f32(tile + 4 * (i * width + c))
            if accumulate != 0:
                value += load_f32(at)
            store_f32(at, value)


@njit
def _start_rows(y, y_stride, m, first, columns, bias):  # type: ignore[no-untyped-def]
    """Put the bias into columns of y before panels add to them."""
    for i in range(m):
        for c in range(columns):
            value = load_f32(bias + 4 * (first + c))
            store_f32(y + i * y_stride + 4 * (first + c), value)


def _panel(args, thread, threads):  # type: ignore[no-untyped-def]
    w, w_stride = load_i64(args + A.W), load_i64(args + A.W_STRIDE)
    s, s_stride = load_i64(args + A.S), load_i64(args + A.S_STRIDE)
    z, z_stride = load_i64(args + A.Z), load_i64(args + A.Z_STRIDE)
    group_parts, parts = load_i64(args + A.GROUP_PARTS), load_i64(args + A.PARTS)
    n_rows, m_rows = load_i64(args + A.N), load_i64(args + A.M)
    x, x_stride = load_i64(args + A.X), load_i64(args + A.X_STRIDE)
    y, y_stride = load_i64(args + A.Y), load_i64(args + A.Y_STRIDE)
    bias, accumulate = load_i64(args + A.BIAS), load_i64(args + A.ACCUMULATE)
    block = load_i64(args + A.BLOCK_PARTS)
    scratch = load_i64(args + A.SCRATCH) + thread * load_i64(args + A.SCRATCH_STRIDE)
    # Scratch: codes of 16 rows of one part [16][32], scales [2][16], minima [2][16], edge tile.
    staged, scales, minima = scratch, scratch + 512, scratch + 640
    edge = scratch + 768
    panel = edge + 64 * NV * MR
    width = 16 * NV
    first, last = share((n_rows + width - 1) // width, thread, threads)
    for p in range(first, last):
        n0 = p * width
        columns = min(width, n_rows - n0)
        add_to = accumulate
        if bias != 0 and accumulate == 0:
            _start_rows(y, y_stride, m_rows, n0, columns, bias)
            add_to = 1
        for j0 in range(0, parts, block):
            some = min(block, parts - j0)
            for v in range(NV):
                for j in range(j0, j0 + some):
                    for r in range(16):
                        n = min(n0 + 16 * v + r, n_rows - 1)  # rows past the end: never stored
                        v0, v1, s0, s1, m0, m1 = UNPACK(
                            w + n * w_stride, s + n * s_stride, z + n * z_stride, j, group_parts
                        )
                        store_i8x16(staged + 32 * r, v0)
                        store_i8x16(staged + 32 * r + 16, v1)
                        store_f32(scales + 4 * r, s0)
                        store_f32(scales + 64 + 4 * r, s1)
                        if HAS_MIN:
                            store_f32(minima + 4 * r, m0)
                            store_f32(minima + 64 + 4 * r, m1)
                    out = panel + 64 * (32 * NV * (j - j0) + v)
                    for h in range(2):
                        sv = load_f32x16(scales + 64 * h)
                        mv = zeros_f32()
                        if HAS_MIN:
                            mv = load_f32x16(minima + 64 * h)
                        transpose16(staged + 16 * h, 32, sv, mv, out + 1024 * NV * h, 64 * NV)
            i = 0
            while i < m_rows:
                xi = x + i * x_stride + 128 * j0
                out = y + i * y_stride + 4 * n0
                if columns == width and i + MR <= m_rows:
                    tile_f32(MR, NV, xi, x_stride, panel, 64 * NV, 32 * some, out, y_stride, add_to)
                else:
                    tile_f32(MR, NV, xi, x_stride, panel, 64 * NV, 32 * some, edge, 4 * width, 0)
                    _copy_tile(edge, min(MR, m_rows - i), columns, width, out, y_stride, add_to)
                i += MR
            add_to = 1


def _int8(args, thread, threads):  # type: ignore[no-untyped-def]
    w, w_stride = load_i64(args + A.W), load_i64(args + A.W_STRIDE)
    s, s_stride = load_i64(args + A.S), load_i64(args + A.S_STRIDE)
    z, z_stride = load_i64(args + A.Z), load_i64(args + A.Z_STRIDE)
    group_parts, parts = load_i64(args + A.GROUP_PARTS), load_i64(args + A.PARTS)
    n_rows, m_rows = load_i64(args + A.N), load_i64(args + A.M)
    x, x_stride = load_i64(args + A.X), load_i64(args + A.X_STRIDE)
    dx, dx_stride = load_i64(args + A.X_SCALE), load_i64(args + A.X_SCALE_STRIDE)
    sx, sx_stride = load_i64(args + A.X_SUM), load_i64(args + A.X_SUM_STRIDE)
    y, y_stride = load_i64(args + A.Y), load_i64(args + A.Y_STRIDE)
    bias, accumulate = load_i64(args + A.BIAS), load_i64(args + A.ACCUMULATE)
    block = load_i64(args + A.BLOCK_PARTS)
    scratch = load_i64(args + A.SCRATCH) + thread * load_i64(args + A.SCRATCH_STRIDE)
    width = 16 * NV
    halves = 1 + SPLIT
    staged = scratch
    edge = scratch + 512
    corr = edge + 4 * width * MR
    scales = corr + 4 * width * halves * block
    minima = scales + 4 * width * halves * block
    panel = minima + 4 * width * halves * block
    first, last = share((n_rows + width - 1) // width, thread, threads)
    for p in range(first, last):
        n0 = p * width
        columns = min(width, n_rows - n0)
        add_to = accumulate
        if bias != 0 and accumulate == 0:
            _start_rows(y, y_stride, m_rows, n0, columns, bias)
            add_to = 1
        for j0 in range(0, parts, block):
            some = min(block, parts - j0)
            for v in range(NV):
                for j in range(j0, j0 + some):
                    jj = j - j0
                    for r in range(16):
                        n = min(n0 + 16 * v + r, n_rows - 1)  # rows past the end: never stored
                        v0, v1, s0, s1, m0, m1 = UNPACK(
                            w + n * w_stride, s + n * s_stride, z + n * z_stride, j, group_parts
                        )
                        store_i8x16(staged + 32 * r, v0)
                        store_i8x16(staged + 32 * r + 16, v1)
                        at = 4 * (width * halves * jj + 16 * v + r)
                        store_f32(scales + at, s0)
                        if HAS_MIN:
                            store_f32(minima + at, m0)
                        if SPLIT:
                            store_i32(corr + at, -128 * sum_i8(v0))
                            store_i32(corr + at + 4 * width, -128 * sum_i8(v1))
                            store_f32(scales + at + 4 * width, s1)
                            if HAS_MIN:
                                store_f32(minima + at + 4 * width, m1)
                        else:
                            store_i32(corr + at, -128 * (sum_i8(v0) + sum_i8(v1)))
                    out = panel + 64 * (8 * NV * jj + v)
                    transpose4(staged, 32, out, 64 * NV)
                    transpose4(staged + 16, 32, out + 256 * NV, 64 * NV)
            i = 0
            while i < m_rows:
                xi = x + i * x_stride + 32 * j0
                di = dx + i * dx_stride + 4 * j0
                si = sx + i * sx_stride + 4 * halves * j0
                out = y + i * y_stride + 4 * n0
                if columns == width and i + MR <= m_rows:
                    tile_i8(MR, NV, SPLIT, HAS_MIN, SMALL, xi, x_stride, di, dx_stride, si,
                            sx_stride, panel, corr, scales, minima, some, out, y_stride,
                            add_to)  # fmt: skip
                else:
                    tile_i8(MR, NV, SPLIT, HAS_MIN, SMALL, xi, x_stride, di, dx_stride, si,
                            sx_stride, panel, corr, scales, minima, some, edge, 4 * width,
                            0)  # fmt: skip
                    _copy_tile(edge, min(MR, m_rows - i), columns, width, out, y_stride, add_to)
                i += MR
            add_to = 1


def panel_kernel(weight: str, mr: int, nv: int) -> Kernel:
    """Weight-only GEMM; args: weights, parts, n, m, x, y, bias, accumulate, scratch, block."""
    return weight_kernel(_panel, "panel", weight, mr=mr, nv=nv)


def int8_kernel(weight: str, mr: int, nv: int) -> Kernel:
    """GEMM on quantized x; args as `panel_kernel`, with uint8 x, x_scale and x_sum."""
    return weight_kernel(_int8, "int8", weight, mr=mr, nv=nv)


def scratch_bytes(algorithm: str, mr: int, nv: int, block_parts: int) -> int:
    """Scratch one thread needs, in bytes, rounded up to a page."""
    width = 16 * nv
    if algorithm == "panel":
        need = 768 + 4 * width * mr + 4 * 32 * block_parts * width
    else:
        need = 512 + 4 * width * mr + (3 * 4 * 2 + 32) * width * block_parts
    return -(-need // 4096) * 4096
