"""Products of sorted rows with their experts on Hopper: GGUF weights in registers under wgmma.

::

    y[s, n] = sum_k x[s // DIV, k] * W[expert of s][n, k]              for every slot s

It is mmq's Hopper kernel (`tilewright.ops.mmq.hopper_gemm`, `hopper_parts`, `hopper_scales`), whose
pieces of work are tiles of sorted slots: one program or two run on each multiprocessor and walk
pieces, one warp loads x by TMA, two or four take care of the weight and of what its
scales are made of, and the others dequantize and multiply, a product of [BN, 16] by [16, BM] at a
time.

    x      [R, K]      rows in the order of the sorted slots (`triton_gather`)
    low    [E N, W]    experts below each other: a tile that ends behind the last row of its expert
                       reads the next one's, and does not store what it gets
    plan   [1 + 3 T]   how many tiles there are, and of each (expert, first, last + 1)

Tiles of ids that name no expert take no steps, and store NaN. All roles walk the same list, of
which `plan` holds no empty tile: pieces are as even as the routing is.

Fields of a tile ("hopper"): block_n 64 (4 warps multiply) or 128 (8 warps) rows of the weight,
block_m rows of x, num_stages steps of 64 columns of x and w_stages of 128 of the weight in flight,
w_warps that prepare the weight, 2 or 4, programs on a multiprocessor: 1, or 2 with w_warps 2 where
registers suffice (`gpu_space`).
Limits: float16 and bfloat16; K a multiple of 128 for types with a plane of one bit.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewright.layout.blocks import GpuBlocks
from tilewright.layout.experts import GpuExperts
from tilewright.ops.cross import target_units
from tilewright.ops.gluon_compat import tma_load
from tilewright.ops.mmq.hopper_parts import (
    dequantize,
    load_numbers,
    load_words,
    pairs_layout,
    turns_of,
)
from tilewright.ops.mmq.hopper_scales import (
    NUMBERS,
    load_fields,
    math_of,
    most_of,
    numbers_of,
    prefetch_fields,
)
from tilewright.tiles.tile import Tile

__all__ = ["launch_moe_hopper"]

X_REGISTERS = 24
W_REGISTERS = 80
_STEP = 256  # columns of the weight in a step of the producer


@gluon.jit
def _piece(plan_ptr, i, tiles_n, steps, experts):
    """Piece of work i: expert, first slot, slots, column of tiles, and steps of K to sum."""
    t = i // tiles_n
    expert = gl.load(plan_ptr + 1 + 3 * t)
    first = gl.load(plan_ptr + 2 + 3 * t)
    last = gl.load(plan_ptr + 3 + 3 * t)
    return expert, first, last - first, i % tiles_n, gl.where(expert < experts, steps, 0)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The ring's next buffer, and the parity of its turn."""
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), phase ^ wraps.to(gl.int32)


@gluon.jit
def _x_producer(
    x_desc, plan_ptr, xs, full, empty, tiles_n, steps, experts, BM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: x of every 64 columns, as buffers become free."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(gl.program_id(0), gl.load(plan_ptr) * tiles_n, gl.num_programs(0)):
        _e, first, _count, _pid_n, here = _piece(plan_ptr, i, tiles_n, steps, experts)
        for k in range(0, 4 * here):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, BM * 128)
            tma_load(x_desc, [first, k * 64], bar, xs.index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _store_numbers(buffer, numbers):
    """A tuple of 1 or 2 vectors of rows to shared memory [BN, 1 or 2]."""
    if len(numbers) == 1:
        buffer.store(gl.reshape(numbers[0], (buffer.shape[0], 1)))
    else:
        buffer.store(gl.join(numbers[0], numbers[1]))


@gluon.jit
def _weight_step(
    low_desc, high_desc, lows, highs, ns, full, empty, fields, row, k, stage, phase,
    LOW: gl.constexpr, HIGH: gl.constexpr, SCALING: gl.constexpr, MINIMUMS: gl.constexpr,
    SUB_OFFSET: gl.constexpr, SUB: gl.constexpr, MATH: gl.constexpr, MOST: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The words and numbers of columns 256 k to 256 k + 255, into two buffers."""
    SUBS: gl.constexpr = 128 // SUB
    for half in gl.static_range(2):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, BN * 16 * (LOW + HIGH))
        at = 2 * k + half
        tma_load(low_desc, [row, at * (4 * LOW)], bar, lows.index(stage))
        if HIGH:
            tma_load(high_desc, [row, at * (4 * HIGH)], bar, highs.index(stage))
        for j in gl.static_range(SUBS):
            numbers = numbers_of(fields, half * SUBS + j, SCALING, MINIMUMS, SUB_OFFSET, MATH, MOST)
            _store_numbers(ns.index(stage * SUBS + j), numbers)
        mbarrier.arrive(bar, count=1)
        stage, phase = _next(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _w_producer(
    low_desc, high_desc, s_ptr, m_ptr, t_ptr, plan_ptr, stride_se, stride_sb, stride_me, stride_mb,
    stride_te, stride_tb, lows, highs, ns, full, empty, N, subs, tiles_n, steps, experts,
    LOW: gl.constexpr, HIGH: gl.constexpr, SCALING: gl.constexpr, MINIMUMS: gl.constexpr,
    BYTES: gl.constexpr, SUB_OFFSET: gl.constexpr, SUB: gl.constexpr, MATH: gl.constexpr,
    MOST: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Two or four warps: words of 128 columns, and scales and minimums, as buffers become free.

    What scales are made of comes from far away: two warps bring it into the L2, AHEAD steps early;
    four, with half as many rows each, load it into registers a step early."""
    ROWS: gl.constexpr = gl.BlockedLayout([BN // (32 * WARPS)], [32], [WARPS], [0])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(gl.program_id(0), gl.load(plan_ptr) * tiles_n, gl.num_programs(0)):
        expert, _first, _count, pid_n, here = _piece(plan_ptr, i, tiles_n, steps, experts)
        e = gl.where(here > 0, expert, 0).to(gl.int64)
        n = gl.minimum(pid_n * BN + gl.arange(0, BN, ROWS), N - 1)
        s_ptrs = s_ptr + e * stride_se + n
        m_ptrs = m_ptr + e * stride_me + n
        t_ptrs = t_ptr + e * stride_te + n
        row = e.to(gl.int32) * N + pid_n * BN
        if AHEAD > 0:
            for k in range(-AHEAD, here):
                if k + AHEAD < here:
                    prefetch_fields(
                        s_ptr + e * stride_se, m_ptr + e * stride_me, t_ptr + e * stride_te,
                        pid_n * BN, N, k + AHEAD, subs, stride_sb, stride_mb, stride_tb, SCALING,
                        MINIMUMS, BYTES, SUB, BN, WARPS,
                    )  # fmt: skip
                if k >= 0:
                    fields = load_fields(
                        s_ptrs, m_ptrs, t_ptrs, k, subs, stride_sb, stride_mb, stride_tb, SCALING,
                        MINIMUMS, BYTES,
                    )  # fmt: skip
                    stage, phase = _weight_step(
                        low_desc, high_desc, lows, highs, ns, full, empty, fields, row, k, stage,
                        phase, LOW, HIGH, SCALING, MINIMUMS, SUB_OFFSET, SUB, MATH, MOST, BN,
                        STAGES,
                    )  # fmt: skip
        else:
            fields = load_fields(
                s_ptrs, m_ptrs, t_ptrs, 0, subs, stride_sb, stride_mb, stride_tb, SCALING,
                MINIMUMS, BYTES,
            )  # fmt: skip
            for k in range(0, here):
                ahead = load_fields(
                    s_ptrs, m_ptrs, t_ptrs, gl.minimum(k + 1, here - 1), subs, stride_sb, stride_mb,
                    stride_tb, SCALING, MINIMUMS, BYTES,
                )  # fmt: skip
                stage, phase = _weight_step(
                    low_desc, high_desc, lows, highs, ns, full, empty, fields, row, k, stage,
                    phase, LOW, HIGH, SCALING, MINIMUMS, SUB_OFFSET, SUB, MATH, MOST, BN, STAGES,
                )  # fmt: skip
                fields = ahead


@gluon.jit
def _load_all(buffers, first, COUNT: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr):
    """The numbers of COUNT sub-blocks, from buffer `first` on."""
    found = ()
    for i in gl.static_range(COUNT):
        found = found + (load_numbers(buffers.index(first + i), PAIRS, WARPS),)
    return found


@gluon.jit
def _consumer(
    y, slots_ptr, plan_ptr, xs, lows, highs, ns, x_full, x_empty, w_full, w_empty, N, stride_ym,
    tiles_n, steps, experts, LOW: gl.constexpr, HIGH: gl.constexpr, CODES: gl.constexpr,
    OFFSET: gl.constexpr, MATH: gl.constexpr, SUB: gl.constexpr, BN: gl.constexpr,
    BM: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, W_STAGES: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """The warps that multiply. Phase n of empty[s] says that buffer s is free for its n-th use;
    a step frees the buffer of the step before, so all but the last are free from the start."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16]
    )
    PAIRS: gl.constexpr = pairs_layout(BN, WARPS)
    SUBS: gl.constexpr = 128 // SUB
    for i in gl.static_range(STAGES - 1):
        mbarrier.arrive(x_empty.index(i), count=1)
    for i in gl.static_range(W_STAGES - 1):
        mbarrier.arrive(w_empty.index(i), count=1)
    low_turns = turns_of(LOW, 0, PAIRS)
    high_turns = low_turns
    if HIGH:
        high_turns = turns_of(HIGH, LOW, PAIRS)
    # 1024 + code is exact, and so is what is left of it.
    offset = gl.full_like(low_turns[0], _minus(OFFSET, CODES))
    it = 0
    for i in range(gl.program_id(0), gl.load(plan_ptr) * tiles_n, gl.num_programs(0)):
        expert, first, count, pid_n, here = _piece(plan_ptr, i, tiles_n, steps, experts)
        # A product with an unknown expert has no steps: its sums are NaN from the start.
        acc = gl.zeros((BN, BM), gl.float32, ACC) + gl.where(expert < experts, 0.0, float("nan"))
        for _k in range(0, 2 * here):
            w_stage = it % W_STAGES
            mbarrier.wait(w_full.index(w_stage), (it // W_STAGES) & 1)
            for half in gl.static_range(2):
                x_it = 2 * it + half
                stage = x_it % STAGES
                mbarrier.wait(x_full.index(stage), (x_it // STAGES) & 1)
                x = xs.index(stage)
                low = load_words(
                    lows.index(w_stage).slice(half * 2 * LOW, 2 * LOW, dim=1), LOW, PAIRS, WARPS
                )
                high = low
                if HIGH:
                    high = load_words(
                        highs.index(w_stage).slice(half * 2 * HIGH, 2 * HIGH, dim=1), HIGH, PAIRS,
                        WARPS,
                    )  # fmt: skip
                sub = w_stage * SUBS + half * (SUBS // 2)
                numbers = _load_all(ns, sub, SUBS // 2, PAIRS, WARPS)
                for e in gl.static_range(4):
                    w = dequantize(
                        low[e], high[e], low_turns[e % 2], high_turns[e % 2], offset,
                        numbers[e * 16 // SUB], LOW, HIGH, CODES, MATH, ACC, PAIRS, DTYPE,
                    )  # fmt: skip
                    at = x.slice(e * 16, 16, dim=1).permute((1, 0))
                    acc = warpgroup_mma(w, at, acc, is_async=True)
                    acc = warpgroup_mma_wait(2, [acc])
                    if e == 1:
                        # All but two products are done: the buffers of the step before are read.
                        mbarrier.arrive(x_empty.index((x_it + STAGES - 1) % STAGES), count=1)
                        if half == 0:
                            mbarrier.arrive(w_empty.index((it + W_STAGES - 1) % W_STAGES), count=1)
            it += 1
        acc = warpgroup_mma_wait(0, [acc])
        offs_n = pid_n * BN + gl.arange(0, BN, gl.SliceLayout(1, ACC))
        offs_m = gl.arange(0, BM, gl.SliceLayout(0, ACC))
        slot = gl.load(slots_ptr + first + gl.minimum(offs_m, count - 1))
        mask = (offs_n < N)[:, None] & (offs_m < count)[None, :]
        rows = slot.to(gl.int64)[None, :] * stride_ym
        gl.store(y + rows + offs_n[:, None], acc.to(y.dtype.element_ty), mask=mask)


@gluon.constexpr_function
def _minus(OFFSET, CODES):
    """The bits of -(1024 + offset) as float16, twice, as int32."""
    offset = OFFSET if CODES == "offset" else 128  # bytes are met as 128 + code
    twice = 0x10001 * (0x8000 | 0x6400 | offset)
    return twice - (1 << 32)


# One compiled kernel serves every size: the problem's numbers are not compiled in.
@gluon.jit(
    do_not_specialize=[
        "N", "subs", "steps", "experts", "stride_se", "stride_sb", "stride_me", "stride_mb",
        "stride_te", "stride_tb", "stride_ym",
    ]
)  # fmt: skip
def _moe_hopper_kernel(
    x_desc, low_desc, high_desc, s_ptr, m_ptr, t_ptr, y, slots_ptr, plan_ptr, N, subs, steps,
    experts, stride_se, stride_sb, stride_me, stride_mb, stride_te, stride_tb, stride_ym,
    LOW: gl.constexpr, HIGH: gl.constexpr, CODES: gl.constexpr, OFFSET: gl.constexpr,
    SCALING: gl.constexpr, MINIMUMS: gl.constexpr, BYTES: gl.constexpr, SUB_OFFSET: gl.constexpr,
    SUB: gl.constexpr, MATH: gl.constexpr, COUNT: gl.constexpr, MOST: gl.constexpr,
    BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, W_STAGES: gl.constexpr,
    W_WARPS: gl.constexpr, X_REGISTERS: gl.constexpr, W_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`subs` sub-blocks a row of the weight, `steps` of 256 columns."""
    DTYPE: gl.constexpr = x_desc.dtype
    SUBS: gl.constexpr = 128 // SUB
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    WARPS: gl.constexpr = gl.num_warps()
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, BM, 64], x_desc.layout)
    lows = gl.allocate_shared_memory(gl.int32, [W_STAGES, BN, 4 * LOW], low_desc.layout)
    highs = lows
    if HIGH:
        highs = gl.allocate_shared_memory(gl.int32, [W_STAGES, BN, 4 * HIGH], high_desc.layout)
    ns = gl.allocate_shared_memory(gl.int32, [W_STAGES * SUBS, BN, COUNT], ROWS)
    x_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=1)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(w_full.index(i), count=2)  # the words, and the scales
        mbarrier.init(w_empty.index(i), count=1)
    fence_async_shared()
    tiles_n = (N + BN - 1) // BN
    gl.warp_specialize(
        [
            (_consumer, (
                y, slots_ptr, plan_ptr, xs, lows, highs, ns, x_full, x_empty, w_full, w_empty, N,
                stride_ym, tiles_n, steps, experts, LOW, HIGH, CODES, OFFSET, MATH, SUB, BN, BM,
                WARPS, STAGES, W_STAGES, DTYPE,
            )),
            (_x_producer, (
                x_desc, plan_ptr, xs, x_full, x_empty, tiles_n, steps, experts, BM, STAGES,
            )),
            (_w_producer, (
                low_desc, high_desc, s_ptr, m_ptr, t_ptr, plan_ptr, stride_se, stride_sb, stride_me,
                stride_mb, stride_te, stride_tb, lows, highs, ns, w_full, w_empty, N, subs, tiles_n,
                steps, experts, LOW, HIGH, SCALING, MINIMUMS, BYTES, SUB_OFFSET, SUB, MATH, MOST,
                BN, W_STAGES, W_WARPS, 3 if W_WARPS == 2 else 0,
            )),
        ],
        [1, W_WARPS],
        [X_REGISTERS, W_REGISTERS],
    )  # fmt: skip


@functools.lru_cache
def _shared(columns: int) -> Any:
    """Of rows of so many words, as TMA swizzles them."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=4 * columns if columns > 4 else 0, element_bitwidth=32, rank=2
    )


@functools.lru_cache
def _sixteen() -> Any:
    """Of x: 16 bits, swizzled by 128 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _descriptor(words: torch.Tensor, block_n: int, bits: int) -> Any:
    """Of the words of all experts [E, N, W], as rows below each other."""
    box = 4 * bits
    experts, n, w = words.shape
    return TensorDescriptor(
        words, [experts * n, w], [words.stride(1), 1], [block_n, box], _shared(box)
    )


def launch_moe_hopper(
    x: torch.Tensor,
    experts: GpuExperts,
    slots: torch.Tensor,
    plan: torch.Tensor,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """Write the product of every slot. Neither chooses, allocates nor checks a rule.

    Args:
        x: [slots, K] float16 or bfloat16, contiguous, rows a multiple of 16 bytes: those of the
            sorted slots.
        experts: GGUF blocks [E, N, K], `is_stacked`, on the device of x, sm_90.
        slots: int32 [slots], sorted.
        plan: of `triton_gather.launch_gather`, with the tile's block_m.
        y: [slots, N] of any floating dtype, columns contiguous.
        tile: algorithm "hopper" of `gpu_space.MOE_SPACE`.
    """
    planes = experts.planes
    assert isinstance(planes, GpuBlocks)
    (rows, k), n, form = x.shape, y.shape[1], planes.form
    math = math_of(form, x.dtype)
    bn, bm = tile.block_n, tile.block_m
    scales, minimums, subs = planes.scales, planes.minimums, planes.sub_scales
    m, t = scales if minimums is None else minimums, scales if subs is None else subs
    low = _descriptor(planes.low, bn, form.low.bits)
    high = low if planes.high is None else _descriptor(planes.high, bn, form.high_bits)
    x_desc = TensorDescriptor(x, [rows, k], [k, 1], [bm, 64], _sixteen())
    most = (rows // bm + experts.E + 1) * -(-n // bn)
    warps = 4 if bn == 64 else 8
    all_warps = warps + (4 if tile.w_warps == 2 else 8)  # the producers are whole warp groups
    most_registers = 65536 // (32 * all_warps * tile.programs) // 8 * 8
    more = {"maxnreg": most_registers} if tile.programs > 1 else {}  # registers for all programs
    _moe_hopper_kernel[(min(tile.programs * target_units(x.device), most),)](
        x_desc, low, high, scales, m, t, y, slots, plan, n, k // form.sub, -(-k // _STEP),
        experts.E, scales.stride(0), scales.stride(2), m.stride(0), m.stride(2), t.stride(0),
        t.stride(2), y.stride(0),
        LOW=form.low.bits, HIGH=form.high_bits, CODES=form.codes, OFFSET=form.offset,
        SCALING=form.scaling, MINIMUMS=minimums is not None, BYTES=form.sub_bytes,
        SUB_OFFSET=form.sub_offset, SUB=form.sub, MATH=math, COUNT=NUMBERS[math],
        MOST=most_of(form), BN=bn, BM=bm, STAGES=tile.num_stages, W_STAGES=tile.w_stages,
        W_WARPS=tile.w_warps, X_REGISTERS=X_REGISTERS, W_REGISTERS=W_REGISTERS,
        num_warps=warps, **more,
    )  # fmt: skip
