"""The persistent form of the SSD for Hopper, in Gluon: TMA, and warps of three kinds.

One program walks over the chunks of one head (64 of its channels), of 64 tokens each::

    loader       1 warp       x, B, C, sums and steps of a chunk to shared memory, STAGES ahead
    two maskers  4 warps each, of every other chunk
                 M[i, j] = (C B^T)[i, j] 2^(sum_i - sum_j) dt[j]  (j <= i), + D where i = j
    walker       4 warps      y^T = 2^sum_i (S C^T) + x^T M^T;  S = 2^last S + X^T B,
                              X[j] = dt[j] 2^(last - sum_j) x[j]

All products are wgmma. The state S [64, N] stays in the walker's registers as float32 sums, and is
the left operand of the next chunk's first product as it lies. x^T is read from shared memory once,
and is the left operand of the second product; weighted, that of the third. A chunk waits for the
one before it in the walker alone: what needs no state is done by the maskers, up to two chunks
ahead of it. The walker's three products of a chunk run side by side; under them it weights x and
stores y of the chunk before, where it is whole, by TMA.

Rows of x behind its 64 channels are another head's, and only make outputs that are not stored. In a
sequence's last chunk, rows of x and B behind its end are another sequence's: a masker clears them
in shared memory, since their zero steps would not keep Inf and NaN out.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewright.ops.gluon_compat import block_barrier, tma_load, tma_store
from tilewright.ops.ssd.args import ScanArgs

__all__ = ["CHUNK", "launch_walk_hopper", "serves"]

CHUNK = 64
_ROWS = 64  # channels of a program: wgmma's rows
_MASKERS = 2
_REGISTERS = (104, 24)  # of a masker's and a loader's thread; the walker takes what is left


@gluon.jit
def _span(cu_ptr, L, H, NC, SEGMENTS: gl.constexpr, PACKED: gl.constexpr, Q: gl.constexpr):
    """Of this program: head, sequence, segment, its first token, its end, its first slot."""
    h = gl.program_id(0) % H
    place = gl.program_id(0) // H
    seq = place // SEGMENTS
    segment = place % SEGMENTS
    if PACKED:
        begin = gl.load(cu_ptr + seq)
        end = gl.load(cu_ptr + seq + 1)
        slot = begin // Q + seq
    else:
        begin = seq * L
        end = begin + L
        slot = seq * NC
    share = (((end - begin + Q - 1) // Q) + SEGMENTS - 1) // SEGMENTS
    slot += segment * share
    start = begin + segment * share * Q
    if SEGMENTS > 1:
        end = gl.minimum(start + share * Q, end)
    return h, seq, segment, start, end, slot


@gluon.jit
def _loader(
    x_desc, b_desc, c_desc, sums_desc, steps_desc, xs, bs, cs, sums, steps, full, empty,
    cu_ptr, L, H, P, GROUP, NC, SEGMENTS: gl.constexpr, PACKED: gl.constexpr, Q: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: all of a chunk, as buffers become free."""
    h, seq, segment, start, end, slot = _span(cu_ptr, L, H, NC, SEGMENTS, PACKED, Q)
    g = h // GROUP
    BYTES: gl.constexpr = (64 * Q + 2 * Q * N) * 2 + 2 * Q * 4
    column = h * P + gl.program_id(1) * 64
    count = (end - start + Q - 1) // Q
    for t in range(count):
        stage = t % STAGES
        mbarrier.wait(empty.index(stage), (t // STAGES) & 1)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        row = start + t * Q
        tma_load(c_desc, [row, g * N], bar, cs.index(stage))
        tma_load(sums_desc, [(slot + t) * H + h, 0], bar, sums.index(stage))
        tma_load(steps_desc, [(slot + t) * H + h, 0], bar, steps.index(stage))
        tma_load(x_desc, [row, column], bar, xs.index(stage))
        tma_load(b_desc, [row, g * N], bar, bs.index(stage))


@gluon.jit
def _masker(
    xs, bs, cs, sums, steps, ms, weights, grown, full, empty, mfull, d_ptr, sums_ptr, units_ptr,
    stride_dh, cu_ptr, L, H, NC, FIRST: gl.constexpr, MASKERS: gl.constexpr,
    SEGMENTS: gl.constexpr, PACKED: gl.constexpr, Q: gl.constexpr, STAGES: gl.constexpr,
    D: gl.constexpr, DTYPE: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr,
    LINE: gl.constexpr,
):  # fmt: skip
    """Four warps: of the chunks FIRST, FIRST + MASKERS, ... M, the weights of x and the growth of
    y, MASKERS chunks ahead of the walker at most."""
    h, seq, segment, start, end, slot = _span(cu_ptr, L, H, NC, SEGMENTS, PACKED, Q)
    i = gl.arange(0, Q, gl.SliceLayout(1, TILE))
    j = gl.arange(0, Q, gl.SliceLayout(0, TILE))
    row = gl.arange(0, Q, gl.SliceLayout(1, ROWS))
    below = i[:, None] >= j[None, :]
    if D == "head":
        d = gl.load(d_ptr + h * stride_dh).to(gl.float32)
        diagonal = i[:, None] == j[None, :]
    count = (end - start + Q - 1) // Q
    line = (slot.to(gl.int64) + FIRST) * H + h
    last, unit = _scalars(sums_ptr + line * Q, units_ptr + line, count > FIRST, Q, DTYPE)
    for t in range(FIRST, count, MASKERS):
        stage = t % STAGES
        half = t % MASKERS
        line += MASKERS * H
        after, next_unit = _scalars(
            sums_ptr + line * Q, units_ptr + line, t + MASKERS < count, Q, DTYPE
        )
        mbarrier.wait(full.index(stage), (t // STAGES) & 1)
        m = gl.zeros((Q, Q), gl.float32, TILE)
        b_t = bs.index(stage).permute((1, 0))
        m = warpgroup_mma(cs.index(stage), b_t, m, use_acc=False, is_async=True)
        left = end - start - t * Q
        sums_line = sums.index(stage).load(LINE)
        weight = gl.exp2(gl.minimum(last - sums_line, 0.0)) * steps.index(stage).load(LINE)
        if DTYPE == gl.float16:
            weight = weight * (1.0 / unit)
        growth = gl.exp2(sums_line)
        sums_j = sums.index(stage).load(TILE)
        sums_i = sums.index(stage).permute((1, 0)).load(TILE)
        steps_j = steps.index(stage).load(TILE)
        decays = gl.exp2(gl.minimum(sums_i - sums_j, 0.0)) * steps_j
        m = warpgroup_mma_wait(0, [m])
        m = gl.where(below, m * decays, 0.0)
        if D == "head":
            m = gl.where(diagonal, m + d, m)
        before = t - MASKERS  # the chunk whose M lies there
        mbarrier.wait(empty.index(before % STAGES), (before // STAGES + 1) & 1, pred=before >= 0)
        ms.index(half).store(m.to(DTYPE))
        weights.index(half).store(weight)
        grown.index(half).store(growth)
        if left < Q:
            keep = (row < left)[:, None]
            x = xs.index(stage).load(ROWS)
            xs.index(stage).store(gl.where(keep, x, 0.0).to(DTYPE))
            b = bs.index(stage).load(ROWS)
            bs.index(stage).store(gl.where(keep, b, 0.0).to(DTYPE))
        fence_async_shared()
        mbarrier.arrive(mfull.index(half), count=1)
        last = after
        unit = next_unit


@gluon.jit
def _scalars(sums_ptr, unit_ptr, is_there, Q: gl.constexpr, DTYPE: gl.constexpr):
    """A chunk's last sum; and its unit, where float16 holds too few small numbers without."""
    last = gl.load(sums_ptr + Q - 1, mask=is_there, other=0.0)
    unit = 1.0
    if DTYPE == gl.float16:
        unit = gl.load(unit_ptr, mask=is_there, other=1.0)
    return last, unit


@gluon.jit
def _walker(
    y_desc, y_ptr, z_ptr, d_ptr, enter_ptr, final_ptr, sums_ptr, units_ptr, xs, bs, cs, ms,
    weights, grown, ys, full, empty, mfull, cu_ptr, L, H, P, NC, stride_dh,
    stride_zb, stride_zl, stride_zh, stride_zp,
    SEGMENTS: gl.constexpr, PACKED: gl.constexpr, Q: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, MASKERS: gl.constexpr, D: gl.constexpr, HAS_Z: gl.constexpr,
    HAS_ENTER: gl.constexpr, TMA_Y: gl.constexpr, DTYPE: gl.constexpr, ACC_Y: gl.constexpr,
    ACC_S: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The state, chunk after chunk. Phase n of empty[s] says that buffer s is free for its n-th
    use; all are free from the start."""
    for s in gl.static_range(STAGES):
        mbarrier.arrive(empty.index(s), count=1)
    h, seq, segment, start, end, slot = _span(cu_ptr, L, H, NC, SEGMENTS, PACKED, Q)
    A_Y: gl.constexpr = gl.DotOperandLayout(0, ACC_Y, 2)
    A_S: gl.constexpr = gl.DotOperandLayout(0, ACC_S, 2)
    first_p = gl.program_id(1) * 64
    state = gl.zeros((64, N), gl.float32, ACC_S)
    state_p = first_p + gl.arange(0, 64, gl.SliceLayout(1, ACC_S))
    state_n = gl.arange(0, N, gl.SliceLayout(0, ACC_S))
    offs_s = state_p[:, None] * N + state_n[None, :]
    mask_s = (state_p < P)[:, None] & (state_n >= 0)[None, :]
    if HAS_ENTER:
        at = gl.program_id(0).to(gl.int64) * P * N
        state = gl.load(enter_ptr + at + offs_s, mask=mask_s, other=0.0)
    out_p = first_p + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    out_i = gl.arange(0, Q, gl.SliceLayout(0, OUT))
    y_ptr += (start.to(gl.int64) * H + h) * P
    offs_y = out_p[:, None] + (out_i * H)[None, :] * P
    if HAS_Z:
        if PACKED:
            z_ptr += start.to(gl.int64) * stride_zl
        else:
            z_ptr += seq.to(gl.int64) * stride_zb + (start - seq * L).to(gl.int64) * stride_zl
        z_ptr += h.to(gl.int64) * stride_zh
        offs_z = out_p[:, None] * stride_zp + out_i[None, :] * stride_zl
    if D == "full":
        d = gl.load(d_ptr + h * stride_dh + out_p, mask=out_p < P, other=0.0).to(gl.float32)
    count = (end - start + Q - 1) // Q
    line = slot.to(gl.int64) * H + h
    last, unit = _scalars(sums_ptr + line * Q, units_ptr + line, count > 0, Q, DTYPE)
    whole = first_p + 64 <= P
    for t in range(count):
        stage = t % STAGES
        half = t % MASKERS
        left = end - start - t * Q
        line += H
        after, next_unit = _scalars(sums_ptr + line * Q, units_ptr + line, t + 1 < count, Q, DTYPE)
        kept = gl.exp2(last)
        if DTYPE == gl.float16:
            kept = kept / unit
        mbarrier.wait(full.index(stage), (t // STAGES) & 1)
        x = xs.index(stage)
        entered = gl.convert_layout(state.to(DTYPE), A_Y)
        state = state * kept
        mbarrier.wait(mfull.index(half), (t // MASKERS) & 1)
        growth = grown.index(half).load(ACC_Y)
        # Three products side by side: nothing touches their sums until they are done, or ptxas
        # would run them one after the other; and what is multiplied is held until then.
        y = gl.zeros((64, Q), gl.float32, ACC_Y)
        own = gl.zeros((64, Q), gl.float32, ACC_Y)
        y = warpgroup_mma(entered, cs.index(stage).permute((1, 0)), y, use_acc=False, is_async=True)
        x_t = x.permute((1, 0)).load(A_Y)
        own = warpgroup_mma(x_t, ms.index(half).permute((1, 0)), own, use_acc=False, is_async=True)
        scaled = (x_t.to(gl.float32) * weights.index(half).load(A_Y)).to(DTYPE)
        scaled = gl.convert_layout(scaled, A_S)
        state = warpgroup_mma(scaled, bs.index(stage), state, is_async=True)
        if TMA_Y:
            if (t > 0) & whole:  # the chunk before is whole, since this one follows it
                fence_async_shared()
                block_barrier()
                row = start + (t - 1) * Q
                tma_store(y_desc, [row, h * P + first_p], ys.index((t - 1) % 2))
            tma.store_wait(1)
        y, own, entered, x_t = warpgroup_mma_wait(1, [y, own, entered, x_t])
        y = y * growth + own
        if HAS_Z or D == "full":
            mask_y = (out_p < P)[:, None] & (out_i < left)[None, :]
            out = gl.convert_layout(y, OUT)
            if D == "full":
                out += d[:, None] * x.permute((1, 0)).load(OUT).to(gl.float32)
            if HAS_Z:
                z = gl.load(z_ptr + offs_z, mask=mask_y, other=0.0).to(gl.float32)
                out = out * (z / (1.0 + gl.exp2(-1.4426950408889634 * z)))
                z_ptr += Q * stride_zl
            gl.store(y_ptr + offs_y, out.to(DTYPE), mask=mask_y)
        elif TMA_Y and (left >= Q) & whole:
            ys.index(t % 2).permute((1, 0)).store(y.to(DTYPE))
        else:
            mask_y = (out_p < P)[:, None] & (out_i < left)[None, :]
            gl.store(y_ptr + offs_y, gl.convert_layout(y.to(DTYPE), OUT), mask=mask_y)
        y_ptr += Q * H * P
        state, scaled = warpgroup_mma_wait(0, [state, scaled])
        if DTYPE == gl.float16:
            state = state * unit
        last = after
        unit = next_unit
        mbarrier.arrive(empty.index(stage), count=1)
    if TMA_Y:
        if (count > 0) & whole & ((end - start) % Q == 0):
            fence_async_shared()
            block_barrier()
            row = start + (count - 1) * Q
            tma_store(y_desc, [row, h * P + first_p], ys.index((count - 1) % 2))
        tma.store_wait(0)
    if segment == SEGMENTS - 1:
        at = (seq.to(gl.int64) * H + h) * P * N
        gl.store(final_ptr + at + offs_s, state, mask=mask_s)


@gluon.jit
def _walk_hopper_kernel(
    x_desc, b_desc, c_desc, sums_desc, steps_desc, y_desc, y_ptr, z_ptr, d_ptr, sums_ptr,
    units_ptr, enter_ptr, final_ptr, cu_ptr, L, H, P, GROUP, NC, stride_dh,
    stride_zb, stride_zl, stride_zh, stride_zp,
    SEGMENTS: gl.constexpr, PACKED: gl.constexpr, Q: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr, HAS_Z: gl.constexpr, HAS_ENTER: gl.constexpr,
    TMA_Y: gl.constexpr, ACC_Y: gl.constexpr, ACC_S: gl.constexpr, OUT: gl.constexpr,
    ROWS: gl.constexpr, TILE: gl.constexpr, LINE: gl.constexpr, M_SHARED: gl.constexpr,
    MASKERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """64 channels of one head over one segment."""
    DTYPE: gl.constexpr = x_desc.dtype
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, Q, 64], x_desc.layout)
    bs = gl.allocate_shared_memory(DTYPE, [STAGES, Q, N], b_desc.layout)
    cs = gl.allocate_shared_memory(DTYPE, [STAGES, Q, N], c_desc.layout)
    ms = gl.allocate_shared_memory(DTYPE, [MASKERS, Q, Q], M_SHARED)
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, 1, Q], sums_desc.layout)
    steps = gl.allocate_shared_memory(gl.float32, [STAGES, 1, Q], steps_desc.layout)
    weights = gl.allocate_shared_memory(gl.float32, [MASKERS, 1, Q], sums_desc.layout)
    grown = gl.allocate_shared_memory(gl.float32, [MASKERS, 1, Q], sums_desc.layout)
    ys = gl.allocate_shared_memory(DTYPE, [2, Q if TMA_Y else 8, 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mfull = gl.allocate_shared_memory(gl.int64, [MASKERS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(MASKERS):
        mbarrier.init(mfull.index(s), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_walker, (
                y_desc, y_ptr, z_ptr, d_ptr, enter_ptr, final_ptr, sums_ptr, units_ptr, xs, bs, cs,
                ms, weights, grown, ys, full, empty, mfull, cu_ptr, L, H, P, NC, stride_dh,
                stride_zb, stride_zl, stride_zh, stride_zp, SEGMENTS, PACKED, Q, N, STAGES, MASKERS,
                D, HAS_Z, HAS_ENTER, TMA_Y, DTYPE, ACC_Y, ACC_S, OUT,
            )),
            (_masker, (
                xs, bs, cs, sums, steps, ms, weights, grown, full, empty, mfull, d_ptr, sums_ptr,
                units_ptr, stride_dh, cu_ptr, L, H, NC, 0, MASKERS, SEGMENTS, PACKED, Q,
                STAGES, D, DTYPE, TILE, ROWS, LINE,
            )),
            (_masker, (
                xs, bs, cs, sums, steps, ms, weights, grown, full, empty, mfull, d_ptr, sums_ptr,
                units_ptr, stride_dh, cu_ptr, L, H, NC, 1, MASKERS, SEGMENTS, PACKED, Q,
                STAGES, D, DTYPE, TILE, ROWS, LINE,
            )),
            (_loader, (
                x_desc, b_desc, c_desc, sums_desc, steps_desc, xs, bs, cs, sums, steps, full,
                empty, cu_ptr, L, H, P, GROUP, NC, SEGMENTS, PACKED, Q, N, STAGES,
            )),
        ],
        [4, 4, 1],
        [REGISTERS[0], REGISTERS[0], REGISTERS[1]],
    )  # fmt: skip


@functools.cache
def _layouts(d_state: int, dtype: Any) -> dict[str, Any]:
    sums = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    return {
        "TILE": sums,
        "ACC_Y": sums,
        "ACC_S": gl.NVMMADistributedLayout([3, 0], [4, 1], [16, d_state, 16]),
        "OUT": gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]),
        "ROWS": gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]),
        "LINE": gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]),
        "M_SHARED": gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype),
    }


def _rows(given: torch.Tensor, columns: int) -> tuple[list[int], list[int]] | None:
    """[b, L, A, B] as a matrix of all tokens over A B columns: its shape and strides; None where it
    is none that TMA reads."""
    b, length, heads, width = given.shape
    row = given.stride(1)
    fits = (
        given.stride(3) == 1 and (heads == 1 or given.stride(2) == width)
        and (b == 1 or given.stride(0) == length * row)
        and row * given.element_size() % 16 == 0 and given.data_ptr() % 16 == 0
        and row >= heads * width
    )  # fmt: skip
    return ([b * length, columns], [row, 1]) if fits else None


def serves(args: ScanArgs) -> bool:
    """Whether the operands lie as this kernel reads them: rows of x, B and C that begin at
    multiples of 16 bytes, their columns next to each other; D contiguous; N 64 or 128."""
    if args.x.dtype not in (torch.float16, torch.bfloat16) or args.d_state not in (64, 128):
        return False
    return all(_rows(t, 1) is not None for t in (args.x, args.B, args.C))


def launch_walk_hopper(
    args: ScanArgs,
    slots: int,
    steps: torch.Tensor,
    sums: torch.Tensor,
    units: torch.Tensor | None,
    enter: torch.Tensor | None,
    *,
    segments: int,
    num_stages: int,
) -> None:
    """Write y and the final states, in chunks of 64.

    Args:
        args: that `serves`.
        steps, sums, units: as `launch_prepare` leaves them, of `slots` slots; units for float16.
        enter: as of `triton_walk.launch_walk`.
    """
    x, z, d, packed = args.x, args.z, args.D, args.cu_seqlens is not None
    n, heads = args.d_state, args.heads
    if enter is None and args.initial_states is not None:
        enter = args.initial_states
    dtype = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    # Memory that a user gives for y may begin anywhere.
    by_tma = z is None and (d is None or d.dim() == 1) and args.y.data_ptr() % 16 == 0

    def descriptor(t: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
        kind = gl.float32 if t.dtype == torch.float32 else dtype
        if kind == gl.float32:
            layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        else:
            layout = gl.NVMMASharedLayout.get_default_for(block, kind)
        return TensorDescriptor(t, shape, strides, block, layout)

    def tokens(t: torch.Tensor, columns: int, width: int) -> Any:
        found = _rows(t, columns)
        assert found is not None
        return descriptor(t, *found, [CHUNK, width])

    lines = slots * heads
    _walk_hopper_kernel[(heads * args.sequences * segments, triton.cdiv(args.head_dim, _ROWS))](
        tokens(x, heads * args.head_dim, _ROWS), tokens(args.B, args.groups * n, n),
        tokens(args.C, args.groups * n, n),
        descriptor(sums, [lines, CHUNK], [CHUNK, 1], [1, CHUNK]),
        descriptor(steps, [lines, CHUNK], [CHUNK, 1], [1, CHUNK]),
        tokens(args.y if by_tma else x, heads * args.head_dim, _ROWS),
        args.y, x if z is None else z, sums if d is None else d, sums,
        sums if units is None else units,
        sums if enter is None else enter, args.final_states,
        args.cu_seqlens if packed else sums,
        args.length, heads, args.head_dim, heads // args.groups,
        max(1, triton.cdiv(args.length, CHUNK)),
        0 if d is None else d.stride(0), *(x if z is None else z).stride(),
        SEGMENTS=segments, PACKED=packed, Q=CHUNK, N=n, STAGES=num_stages,
        D="none" if d is None else "head" if d.dim() == 1 else "full",
        HAS_Z=z is not None, HAS_ENTER=enter is not None, TMA_Y=by_tma,
        MASKERS=_MASKERS, REGISTERS=_REGISTERS,
        **_layouts(n, dtype),
        num_warps=4,
    )  # fmt: skip
