"""Tiles of y and their parts: where they lie, how they are stored, and the sum of parts.

A slot of the workspace is [BLOCK_N, BLOCK_M] float32 and holds what one program summed of one tile;
`tilewright.ops.mmq.schedule` says whose lies where. Slots are added in the order of their steps.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.mmq.int8_parts import first_step_of, unit_of_step
from tilewright.ops.mmq.triton_outputs import store, tile_of
from tilewright.ops.w4a16.triton_parts import to_float32

__all__: list[str] = []


@triton.jit
def store_tile(
    acc, b_ptr, y_ptr, pid_m, pid_n, M, N, stride_ym, stride_yn,
    HAS_BIAS: tl.constexpr, GUARDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sums, and the bias, rounded once to the dtype of y."""
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[None, :]
    if GUARDED:
        mask = mask & (offs_n < N)[:, None]
    if HAS_BIAS:
        acc += to_float32(tl.load(b_ptr + tl.minimum(offs_n, N - 1)), INTERPRET)[:, None]
    y_ptrs = y_ptr + offs_m.to(tl.int64)[None, :] * stride_ym
    y_ptrs += offs_n.to(tl.int64)[:, None] * stride_yn
    store(y_ptrs, acc, mask, INTERPRET)


@triton.jit
def slot_ptrs(p_ptr, slot, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    return p_ptr + tl.cast(slot, tl.int64) * (BLOCK_N * BLOCK_M) + at


@triton.jit
def fix_up_kernel(
    p_ptr, b_ptr, y_ptr, M, N, K, units, stride_ym, stride_yn,
    HAS_BIAS: tl.constexpr, GUARDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr, SCHEDULE: tl.constexpr, SPLIT: tl.constexpr,
    INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """One tile of y from its slots, in the order of their steps; nothing if y holds it already."""
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if SCHEDULE == "split-k":
        for share in range(SPLIT):
            slot = share * tl.num_programs(0) + tile
            acc += tl.load(slot_ptrs(p_ptr, slot, BLOCK_M, BLOCK_N))
    else:
        steps = K // 32
        total = tiles_m * tiles_n * steps
        first = unit_of_step(tile * steps, total, units)
        last = unit_of_step(tile * steps + steps - 1, total, units)
        if first == last:
            return
        if FAULT == "lost-part":
            last -= 1
        for unit in range(first, last + 1):
            begins = first_step_of(unit, total, units) // steps
            slot = 2 * unit + tl.cast(tile != begins, tl.int32)
            acc += tl.load(slot_ptrs(p_ptr, slot, BLOCK_M, BLOCK_N))
    store_tile(
        acc, b_ptr, y_ptr, pid_m, pid_n, M, N, stride_ym, stride_yn,
        HAS_BIAS, GUARDED, BLOCK_M, BLOCK_N, INTERPRET,
    )  # fmt: skip
