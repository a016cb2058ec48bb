"""The states of the SSD: what a chunk or a segment adds, and what enters each.

::

    S_end[p, n] = 2^(sum_end - sum_begin) S_begin[p, n]
                  + sum_t (dt[t] 2^(sum_end - sum_t) x[t, p]) B[t, n]

`_states_kernel` holds BLOCK_P x BLOCK_N of one head's state in registers, float32, and walks over
tokens in blocks of BLOCK_T. MODE says from where to where, and what it leaves:

    "walk"     a whole sequence; the state that enters each chunk, as an operand of a dot, and the
               sequence's final state
    "chunk"    one chunk from a state of zero; what it adds, and the logarithm of its decay
    "segment"  the same for one of SEGMENTS runs of chunks of a sequence; none for the last

`_pass_kernel` turns what chunks or segments add into what enters them, one after the other.

The x that is multiplied is rounded to its own dtype once, with its step and its decay.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.ops.ssd.args import ScanArgs
from tilewright.ops.ssd.triton_parts import (
    as_operand,
    decay,
    extent,
    first_slot,
    locate,
    operand,
    store_narrow,
    to_float32,
    unit_of,
)
from tilewright.ops.ssd.triton_prepare import INTERPRETED

__all__ = ["launch_pass", "launch_states"]


@triton.jit
def _states_kernel(
    x_ptr, b_ptr, steps_ptr, sums_ptr, init_ptr, cu_ptr, out_ptr, final_ptr, log_ptr,
    L, H, P, N, S, NC, GROUP,
    stride_xb, stride_xl, stride_xh, stride_xp, stride_bb, stride_bl, stride_bg, stride_bn,
    MODE: tl.constexpr, SEGMENTS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_INIT: tl.constexpr, PACKED: tl.constexpr, INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK_P x BLOCK_N of one head's state, over a sequence, a chunk or a segment."""
    # Which part: heads come first, so that those that share B run together.
    h = tl.program_id(0) % H
    place = tl.program_id(0) // H  # a sequence, a slot, or a segment of a sequence
    blocks_n = tl.cdiv(N, BLOCK_N)
    offs_p = tl.program_id(1) // blocks_n * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.program_id(1) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_t = tl.arange(0, BLOCK_T)
    mask_p = offs_p < P
    mask_n = offs_n < N
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if MODE == "chunk":
        batch, start, end = locate(place, cu_ptr, L, S, NC, CHUNK, PACKED)
        if start >= end:
            return
        slot = place
        end = tl.minimum(start + CHUNK, end)
    else:
        if MODE == "segment" and place % SEGMENTS == SEGMENTS - 1:
            return
        seq = place // SEGMENTS
        batch, begin, end = extent(seq, cu_ptr, L, PACKED)
        share = tl.cdiv(tl.cdiv(end - begin, CHUNK), SEGMENTS)
        slot = first_slot(seq, begin, NC, CHUNK, PACKED) + place % SEGMENTS * share
        start = begin + place % SEGMENTS * share * CHUNK
        if SEGMENTS > 1:
            end = tl.minimum(start + share * CHUNK, end)
    if FAULT == "partial-chunk" and MODE != "chunk":
        end = start + (end - start) // CHUNK * CHUNK

    group = h // GROUP
    if FAULT == "wrong-groups":
        group = h % (H // GROUP)
    x_ptr += batch.to(tl.int64) * stride_xb + start.to(tl.int64) * stride_xl
    x_ptr += h.to(tl.int64) * stride_xh
    b_ptr += batch.to(tl.int64) * stride_bb + start.to(tl.int64) * stride_bl
    b_ptr += group.to(tl.int64) * stride_bg
    # Pointers move as numbers, and offsets stay: pointers of every element would fill registers.
    offs_x = offs_p[:, None] * stride_xp + offs_t[None, :] * stride_xl
    offs_b = offs_t[:, None] * stride_bl + offs_n[None, :] * stride_bn
    offs_s = offs_p[:, None] * N + offs_n[None, :]
    mask_s = mask_p[:, None] & mask_n[None, :]
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if MODE == "walk" and HAS_INIT:
        at = (seq.to(tl.int64) * H + h) * P * N
        state = tl.load(init_ptr + at + offs_s, mask=mask_s, other=0.0)

    log = 0.0  # of the decay since the start
    before = 0.0  # the chunk's sum at the end of the last block
    for first in range(0, end - start, BLOCK_T):
        in_chunk = first % CHUNK
        here = slot + first // CHUNK
        line = (here.to(tl.int64) * H + h) * CHUNK
        if CHUNK == BLOCK_T:
            before = 0.0
        else:
            before = tl.where(in_chunk == 0, 0.0, before)
        after = tl.load(sums_ptr + line + in_chunk + BLOCK_T - 1)
        sums = tl.load(sums_ptr + line + in_chunk + offs_t)
        steps = tl.load(steps_ptr + line + in_chunk + offs_t)
        mask_t = offs_t < end - start - first
        x = tl.load(x_ptr + offs_x, mask=mask_p[:, None] & mask_t[None, :], other=0.0)
        b = tl.load(b_ptr + offs_b, mask=mask_t[:, None] & mask_n[None, :], other=0.0)
        x_ptr += BLOCK_T * stride_xl
        b_ptr += BLOCK_T * stride_bl
        if MODE == "walk":
            at = (here.to(tl.int64) * H + h) * P * N
            store_narrow(out_ptr + at + offs_s, state, mask_s & (in_chunk == 0), INTERPRET)
        weights = steps * decay(after - sums)
        unit = unit_of(weights, dtype)
        weights *= 1.0 / unit
        scaled = operand(to_float32(x, INTERPRET) * weights[None, :], dtype, INTERPRET)
        state *= decay(after - before) / unit
        state = tl.dot(scaled, as_operand(b, INTERPRET), state, input_precision="ieee")
        state *= unit
        log += after - before
        before = after

    at = (place.to(tl.int64) * H + h) * P * N
    if MODE == "walk":
        tl.store(final_ptr + at + offs_s, state, mask=mask_s)
    else:
        tl.store(out_ptr + at + offs_s, state, mask=mask_s)
        tl.store(log_ptr + place * H + h, log)


@triton.jit
def _pass_kernel(
    added_ptr, log_ptr, init_ptr, cu_ptr, enter_ptr, final_ptr,
    L, H, SIZE, NC,
    SEGMENTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    HAS_INIT: tl.constexpr, PACKED: tl.constexpr, INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK numbers of one head's state: what enters each chunk (SEGMENTS 0) or segment."""
    h = tl.program_id(1)
    blocks = tl.cdiv(SIZE, BLOCK)
    seq = tl.program_id(0) // blocks  # a grid's other dimensions end at 65535
    offs = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    if SEGMENTS == 0:
        _, begin, end = extent(seq, cu_ptr, L, PACKED)
        place = first_slot(seq, begin, NC, CHUNK, PACKED)
        count = tl.cdiv(end - begin, CHUNK)
        if FAULT == "partial-chunk":
            count = (end - begin) // CHUNK
    else:
        place = seq * SEGMENTS
        count = seq * 0 + SEGMENTS
    ends = (seq.to(tl.int64) * H + h) * SIZE + offs
    state = tl.zeros((BLOCK,), tl.float32)
    if HAS_INIT:
        state = tl.load(init_ptr + ends, mask=mask, other=0.0)
    for i in range(0, count):
        at = ((place + i).to(tl.int64) * H + h) * SIZE + offs
        is_read = mask & ((SEGMENTS == 0) | (i < count - 1))
        added = tl.load(added_ptr + at, mask=is_read, other=0.0)
        log = tl.load(log_ptr + (place + i) * H + h, mask=(SEGMENTS == 0) | (i < count - 1),
                      other=0.0)  # fmt: skip
        store_narrow(enter_ptr + at, state, mask, INTERPRET)
        state = state * decay(log) + added
    if SEGMENTS == 0:
        tl.store(final_ptr + ends, state, mask=mask)


def launch_states(
    args: ScanArgs,
    mode: str,
    places: int,
    steps: torch.Tensor,
    sums: torch.Tensor,
    out: torch.Tensor,
    log: torch.Tensor | None,
    *,
    chunk: int,
    block_t: int,
    block_p: int,
    block_n: int,
    segments: int = 1,
    num_warps: int = 4,
    num_stages: int = 3,
    fault: str = "",
) -> None:
    """Write states of `places` sequences, slots, or segments: see the module.

    Args:
        mode: "walk", "chunk" or "segment".
        steps, sums: as `launch_prepare` leaves them.
        out: [places, H, P, N] float32; of "walk" [slots, H, P, N] of x's dtype.
        log: float32 [places, H]; None for "walk".
    """
    x, b, packed = args.x, args.B, args.cu_seqlens is not None
    block_n = min(block_n, max(16, triton.next_power_of_2(args.d_state)))
    grid = (
        args.heads * places,
        triton.cdiv(args.head_dim, block_p) * triton.cdiv(args.d_state, block_n),
    )
    _states_kernel[grid](
        x, b, steps, sums, sums if args.initial_states is None else args.initial_states,
        args.cu_seqlens if packed else steps, out, args.final_states, sums if log is None else log,
        args.length, args.heads, args.head_dim, args.d_state, args.sequences,
        max(1, triton.cdiv(args.length, chunk)), args.heads // args.groups,
        *x.stride(), *b.stride(),
        MODE=mode, SEGMENTS=segments, CHUNK=chunk, BLOCK_T=block_t, BLOCK_P=block_p,
        BLOCK_N=block_n, HAS_INIT=args.initial_states is not None, PACKED=packed,
        INTERPRET=INTERPRETED, FAULT=fault, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def launch_pass(
    args: ScanArgs,
    added: torch.Tensor,
    log: torch.Tensor,
    enter: torch.Tensor,
    *,
    chunk: int,
    segments: int,
    fault: str = "",
) -> None:
    """Write what enters each chunk (segments 0, and final states) or each segment to `enter`, which
    may be `added` itself."""
    size, packed = args.head_dim * args.d_state, args.cu_seqlens is not None
    block = min(1024, triton.next_power_of_2(size))
    grid = (triton.cdiv(size, block) * args.sequences, args.heads)
    _pass_kernel[grid](
        added, log, log if args.initial_states is None else args.initial_states,
        args.cu_seqlens if packed else log, enter, args.final_states,
        args.length, args.heads, size, max(1, triton.cdiv(args.length, chunk)),
        SEGMENTS=segments, CHUNK=chunk, BLOCK=block,
        HAS_INIT=args.initial_states is not None, PACKED=packed, INTERPRET=INTERPRETED,
        FAULT=fault, num_warps=4, num_stages=3,
    )  # fmt: skip
