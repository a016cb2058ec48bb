"""mmq with 8-bit activations in portable Triton: integer dots of codes, scaled once a sub-block.

::

    y[m, n] = sum_b d[b, m] * sum_s (scale[n, s] * dot(code[n, s], q[m, s])
                                     + minimum[n, s] * sum(q[m, s])) + bias[n]

    b: blocks of 32 columns, d and q of which `quantize_rows` writes; s: the sub-blocks of b,
    one of 32 columns or two of 16

    code [BLOCK_N, 32] int8 . q^T [32, BLOCK_M] int8     dot   [BLOCK_N, BLOCK_M] int32, exact
                                                         acc   [BLOCK_N, BLOCK_M] float32

A first kernel rounds x. In the second a step is one block of 32 columns: its codes come out of
their words four at a time (`int8_parts`), go through one integer dot a scale, and what it gives is
scaled in float32: d, scale and minimum are never rounded to less. What scales are made of is loaded
a step ahead: nobody else waits for it, so the compiler would not. Weights lie as
`tilewright.layout.blocks` draws them, for all 13 types.

Sub-blocks of 16 columns have two scales in one block. HALVES says how: "mask" multiplies twice by
32 columns, of which half are zeros, where matrix units take no fewer; "apart" twice by 16.

SCHEDULE says who sums which steps (`schedule`). Sums of a part of a tile go to a slot of the
workspace, [BLOCK_N, BLOCK_M] float32, and a third kernel adds the slots of each tile in the order
of their steps.

Rows of x past M are there, as zeros (MP of them, whole tiles), and are not stored. Rows of w past N
are computed from the last one, and not stored; but where N is a multiple of 128 nothing is
compared with N at all (GUARDED), and block_n must divide 128.

FAULT plants one of the errors of `int8_planted` for the gate to find. It is "" in every tile of the
space, and the compiler then sees none of it.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.errors import UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import GpuBlocks
from tilewright.ops.cross import target_arch, target_units
from tilewright.ops.mmq.int8_fix_up import fix_up_kernel, slot_ptrs, store_tile
from tilewright.ops.mmq.int8_parts import codes8_of, first_step_of, raw_of, scales_of
from tilewright.ops.mmq.quantize_rows import launch_quantize_rows
from tilewright.ops.mmq.schedule import GUARD_ROWS, WARP_ROWS, slots
from tilewright.ops.mmq.triton_outputs import tile_of
from tilewright.ops.w4a16.triton_gemm import spans_wide
from tilewright.tiles.tile import Tile

__all__ = ["launch_int8", "workspace_int8"]

_ALIGN = 64  # floats: parts of the workspace begin at multiples of 256 bytes


@triton.jit
def _operands_of(
    q_ptrs, low_ptrs, high_ptrs, r,
    LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr,
    SUB: tl.constexpr,
):  # fmt: skip
    """Codes and x of the columns of words `r` [1, W]."""
    x = tl.load(q_ptrs)
    low = tl.load(low_ptrs + r)
    high = low
    if HIGH > 0:
        WORDS: tl.constexpr = LOW // HIGH  # of low that a word of high serves
        high = tl.load(high_ptrs + r // WORDS) >> (HIGH * (16 // LOW) * (r % WORDS))
    return codes8_of(low, high, LOW, HIGH, CODES, OFFSET, SUB), x


@triton.jit
def _sums_of(
    q_ptr, d_ptr, sum_ptr, low_ptr, high_ptr, s_ptr, m_ptr, t_ptr,
    pid_m, pid_n, first, last,
    MP, N, K, stride_ln, stride_hn, stride_sn, stride_sb, stride_mn, stride_mb, stride_tn,
    stride_tb,
    LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr,
    SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr, SUB_OFFSET: tl.constexpr,
    SUB: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, GUARDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FILLED: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """Blocks first .. last - 1 of one tile, [BLOCK_N, BLOCK_M] float32."""
    # Offsets within a tile are small; where it begins may lie past 2^31.
    start_m = pid_m * BLOCK_M
    start_n = pid_n * BLOCK_N
    row_m = tl.arange(0, BLOCK_M)
    row_n = tl.arange(0, BLOCK_N)
    if GUARDED or FAULT != "":
        row_n = tl.minimum(row_n, N - 1 - start_n)
    wide_n = tl.cast(start_n, tl.int64)
    # 32 columns at once, or 16
    COLUMNS: tl.constexpr = 16 if HALVES == "apart" else 32
    stored = tl.arange(0, COLUMNS)
    r = tl.arange(0, COLUMNS * LOW // 32)[None, :]
    q_ptrs = q_ptr + tl.cast(start_m, tl.int64) * 32 + (row_m * 32)[None, :] + stored[:, None]
    low_ptrs = low_ptr + wide_n * stride_ln + (row_n * stride_ln)[:, None]
    high_ptrs = high_ptr + wide_n * stride_hn + (row_n * stride_hn)[:, None]
    s_ptrs = s_ptr + wide_n * stride_sn + row_n * stride_sn
    m_ptrs = m_ptr + wide_n * stride_mn + row_n * stride_mn
    t_ptrs = t_ptr + wide_n * stride_tn + row_n * stride_tn
    d_ptrs = d_ptr + start_m + row_m
    sum_ptrs = sum_ptr + start_m + row_m

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    STEP: tl.constexpr = 2 if FAULT == "iter-k" else 1
    start = tl.minimum(first, K // 32 - 1)
    if WIDE:
        start = tl.cast(start, tl.int64)
    scale, minimum, byte0, byte1 = raw_of(
        s_ptrs, m_ptrs, t_ptrs, start, stride_sb, stride_mb, stride_tb,
        SCALING, MINIMUMS, BYTES, BLOCK,
    )  # fmt: skip
    for block in tl.range(first, last, STEP, num_stages=STAGES):
        at = block
        after = tl.minimum(block + 1, K // 32 - 1)
        if WIDE:
            at = tl.cast(block, tl.int64)
            after = tl.cast(after, tl.int64)
        at_m = at * MP
        d = tl.load(d_ptrs + at_m)
        next_scale, next_minimum, next0, next1 = raw_of(
            s_ptrs, m_ptrs, t_ptrs, after, stride_sb, stride_mb, stride_tb,
            SCALING, MINIMUMS, BYTES, BLOCK,
        )  # fmt: skip
        one, least, other, other_least = scales_of(
            scale, minimum, byte0, byte1, block, SCALING, MINIMUMS, BYTES, SUB_OFFSET
        )
        w, x = _operands_of(
            q_ptrs + at_m * 32, low_ptrs + at * LOW, high_ptrs + at * HIGH, r,
            LOW, HIGH, CODES, OFFSET, SUB,
        )  # fmt: skip
        if HALVES == "none":
            dot = tl.dot(w, x, out_dtype=tl.int32)
            if FAULT == "iter-k":  # the next 32 columns take this block's scales
                w, x = _operands_of(
                    q_ptrs + after * MP * 32, low_ptrs + after * LOW, high_ptrs + after * HIGH, r,
                    LOW, HIGH, CODES, OFFSET, SUB,
                )  # fmt: skip
                dot += tl.dot(w, x, out_dtype=tl.int32)
            if FILLED < BLOCK_N:  # rows without weights, or without a warp, stay zero
                dot = tl.where((tl.arange(0, BLOCK_N) < FILLED)[:, None], dot, 0)
            part = dot.to(tl.float32) * one[:, None]
            if MINIMUMS:
                part += least[:, None] * tl.load(sum_ptrs + at_m)[None, :]
        else:
            if HALVES == "mask":
                second = (stored >= 16)[None, :]
                dot = tl.dot(tl.where(second, 0, w).to(tl.int8), x, out_dtype=tl.int32)
                dot_other = tl.dot(tl.where(second, w, 0).to(tl.int8), x, out_dtype=tl.int32)
            else:
                dot = tl.dot(w, x, out_dtype=tl.int32)
                w, x = _operands_of(
                    q_ptrs + at_m * 32 + 16, low_ptrs + at * LOW, high_ptrs + at * HIGH,
                    r + LOW // 2, LOW, HIGH, CODES, OFFSET, SUB,
                )  # fmt: skip
                dot_other = tl.dot(w, x, out_dtype=tl.int32)
            part = dot.to(tl.float32) * one[:, None] + dot_other.to(tl.float32) * other[:, None]
            if MINIMUMS:
                part += least[:, None] * tl.load(sum_ptrs + 2 * at_m)[None, :]
                part += other_least[:, None] * tl.load(sum_ptrs + 2 * at_m + MP)[None, :]
        acc += part * d[None, :]
        scale, minimum, byte0, byte1 = next_scale, next_minimum, next0, next1
    return acc


@triton.jit
def _mmq_int8_kernel(
    q_ptr, d_ptr, sum_ptr, low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, b_ptr, y_ptr, p_ptr,
    M, MP, N, K,
    stride_ln, stride_hn, stride_sn, stride_sb, stride_mn, stride_mb, stride_tn, stride_tb,
    stride_ym, stride_yn,
    LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr,
    SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr, SUB_OFFSET: tl.constexpr,
    SUB: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
    HAS_BIAS: tl.constexpr, GUARDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FILLED: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr,
    GROUP_M: tl.constexpr, SCHEDULE: tl.constexpr, SPLIT: tl.constexpr,
    INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """The segments of one program. FILLED is BLOCK_N, but for two faults."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = K // 32
    if SCHEDULE == "stream-k":
        units = tl.num_programs(0)
        total = tiles_m * tiles_n * steps
        at = first_step_of(pid, total, units)
        end = first_step_of(pid + 1, total, units)
        if FAULT == "unit-edge":  # steps that are left over belong to nobody
            at = pid * (total // units)
            end = at + total // units
        start = at // steps
        while at < end:
            tile = at // steps
            first = at - tile * steps
            last = tl.minimum(steps, first + end - at)
            pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
            acc = _sums_of(
                q_ptr, d_ptr, sum_ptr, low_ptr, high_ptr, s_ptr, m_ptr, t_ptr,
                pid_m, pid_n, first, last, MP, N, K,
                stride_ln, stride_hn, stride_sn, stride_sb, stride_mn, stride_mb, stride_tn,
                stride_tb,
                LOW, HIGH, CODES, OFFSET, SCALING, MINIMUMS, BYTES, SUB_OFFSET, SUB, BLOCK, HALVES,
                GUARDED, BLOCK_M, BLOCK_N, FILLED, STAGES, WIDE, FAULT,
            )  # fmt: skip
            if last - first == steps:
                store_tile(
                    acc, b_ptr, y_ptr, pid_m, pid_n, M, N, stride_ym, stride_yn,
                    HAS_BIAS, GUARDED, BLOCK_M, BLOCK_N, INTERPRET,
                )  # fmt: skip
            else:
                slot = 2 * pid + tl.cast(tile != start, tl.int32)
                tl.store(slot_ptrs(p_ptr, slot, BLOCK_M, BLOCK_N), acc)
            at += last - first
    else:
        first = 0
        last = steps
        if SCHEDULE == "split-k":
            each = tl.cdiv(steps, SPLIT)
            first = tl.minimum(tl.program_id(1) * each, steps)
            last = tl.minimum(first + each, steps)
        pid_m, pid_n = tile_of(pid, tiles_m, tiles_n, GROUP_M)
        acc = _sums_of(
            q_ptr, d_ptr, sum_ptr, low_ptr, high_ptr, s_ptr, m_ptr, t_ptr,
            pid_m, pid_n, first, last, MP, N, K,
            stride_ln, stride_hn, stride_sn, stride_sb, stride_mn, stride_mb, stride_tn, stride_tb,
            LOW, HIGH, CODES, OFFSET, SCALING, MINIMUMS, BYTES, SUB_OFFSET, SUB, BLOCK, HALVES,
            GUARDED, BLOCK_M, BLOCK_N, FILLED, STAGES, WIDE, FAULT,
        )  # fmt: skip
        if SCHEDULE == "split-k":
            slot = tl.program_id(1) * tl.num_programs(0) + pid
            tl.store(slot_ptrs(p_ptr, slot, BLOCK_M, BLOCK_N), acc)
        else:
            store_tile(
                acc, b_ptr, y_ptr, pid_m, pid_n, M, N, stride_ym, stride_yn,
                HAS_BIAS, GUARDED, BLOCK_M, BLOCK_N, INTERPRET,
            )  # fmt: skip


INTERPRETED: bool = not isinstance(_mmq_int8_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


class _Plan(NamedTuple):
    """Where the parts of the workspace begin and end, in floats; rows of x in whole tiles; tiles;
    programs of stream-k."""

    scales: int
    sums: int
    partials: int
    floats: int
    rows: int
    tiles: int
    units: int


def _rows_of(tile: Tile) -> tuple[int, int]:
    """Rows of w that a program covers, and those that it multiplies: block_n both, but for a
    planted tile that trusts its warps for the one or for the other."""
    rows, by_warps = tile.block_n, WARP_ROWS * tile.num_warps
    fault = tile.as_dict().get("planted", "")
    if fault == "rows-alone":
        return by_warps, rows
    return rows, by_warps if fault == "warps-alone" else rows


def _plan(tile: Tile, m: int, n: int, k: int, units: int) -> _Plan:
    rows, _ = _rows_of(tile)
    tiles_m = triton.cdiv(m, tile.block_m)
    tiles, padded = tiles_m * triton.cdiv(n, rows), tiles_m * tile.block_m
    units = tile.units or units
    ends = [0]
    for floats in (
        padded * k // 4,
        padded * k // 32,
        padded * k // 16,
    ):  # sums for sub-blocks of 16, the most
        ends.append(ends[-1] + triton.cdiv(floats, _ALIGN) * _ALIGN)
    held = slots(tile.schedule, tiles, split_k=tile.split_k, units=units)
    floats = ends[3] + held * tile.block_m * rows
    return _Plan(ends[1], ends[2], ends[3], floats, padded, tiles, units)


def workspace_int8(tile: Tile, M: int, N: int, K: int, units: int) -> tuple[int, int]:
    """Floats and arrival counters that a tile needs: x in 8 bits, its scales and sums, the parts of
    tiles; no counters.

    Args:
        units: of the device; a tile of "stream-k" whose `units` is 0 runs so many programs.
    """
    return _plan(tile, M, N, K, units).floats, 0


def launch_int8(
    x: torch.Tensor,
    weight: GpuBlocks,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    workspace: Any,
) -> None:
    """Write x @ W.T + bias to y, x rounded to 8 bits. Neither chooses, allocates nor checks a rule.

    Args:
        x: [M, K], M >= 1, any strides.
        weight: on the device of x.
        bias: [N] of any floating dtype, contiguous.
        y: [M, N] of the dtype of x, any strides.
        tile: "int8" of `triton_space.TRITON_SPACE`, or a planted one.
        workspace: `partials` of what `workspace_int8` says, any content, 16-byte aligned.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    if x.device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            "mmq: x is on the CPU, where Triton only interprets; set TRITON_INTERPRET=1 before "
            "the first import of the kernel, or move x to a GPU"
        )
    m, k = x.shape
    n, form, block = weight.N, weight.form, BLOCK_TYPES[weight.type_name].block_size
    high, scales = weight.high, weight.scales
    minimums, subs = weight.minimums, weight.sub_scales
    rows, filled = _rows_of(tile)
    plan = _plan(tile, m, n, k, target_units(x.device))
    space = workspace.partials
    codes = space[: plan.scales].view(torch.int8)
    x_scales, sums = space[plan.scales :], space[plan.sums :]
    partials = space[plan.partials :] if plan.floats > plan.partials else x_scales
    launch_quantize_rows(
        x, codes, x_scales, None if minimums is None else sums,
        padded=plan.rows, low=form.low.bits, sub=form.sub,
    )  # fmt: skip
    shared = {
        "HAS_BIAS": bias is not None, "GUARDED": n % GUARD_ROWS != 0,
        "BLOCK_M": tile.block_m, "BLOCK_N": rows, "GROUP_M": tile.group_m,
        "SCHEDULE": tile.schedule, "SPLIT": tile.split_k, "INTERPRET": INTERPRETED,
        "FAULT": tile.as_dict().get("planted", ""),
    }  # fmt: skip
    some_bias = scales if bias is None else bias
    programs = plan.units if tile.schedule == "stream-k" else plan.tiles
    _mmq_int8_kernel[(programs, tile.split_k if tile.schedule == "split-k" else 1)](
        codes, x_scales, sums, weight.low, weight.low if high is None else high, scales,
        scales if minimums is None else minimums, scales if subs is None else subs,
        some_bias, y, partials,
        m, plan.rows, n, k,
        weight.low.stride(0), 0 if high is None else high.stride(0),
        *scales.stride(), *(scales if minimums is None else minimums).stride(),
        *(scales if subs is None else subs).stride(), *y.stride(),
        LOW=form.low.bits, HIGH=form.high_bits, CODES=form.codes, OFFSET=form.offset,
        SCALING=form.scaling, MINIMUMS=minimums is not None, BYTES=form.sub_bytes,
        SUB_OFFSET=form.sub_offset, SUB=form.sub, BLOCK=block,
        HALVES=_halves(form.sub, target_arch(x.device)),
        FILLED=filled, STAGES=tile.num_stages,
        WIDE=plan.rows * k >= 2**31 or any(spans_wide(t) for t in weight.tensors), **shared,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if tile.schedule != "data-parallel":
        fix_up_kernel[(plan.tiles,)](
            partials, some_bias, y, m, n, k, plan.units, *y.stride(), **shared,
            num_warps=tile.num_warps,
        )  # fmt: skip


def _halves(sub: int, arch: str) -> str:
    """How a block of 32 columns with two scales is multiplied: see the module."""
    if sub == 32:
        return "none"
    return "apart" if arch.startswith("gfx") else "mask"
