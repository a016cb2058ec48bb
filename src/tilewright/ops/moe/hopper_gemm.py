"""Products of sorted rows with their experts on Hopper: GGUF weights in registers under wgmma.

::

    y[s, n] = sum_k x[s // DIV, k] * W[expert of s][n, k]              for every slot s

Pieces of work are tiles of sorted slots by block_n rows of the weight: one program or two run on
each multiprocessor and walk pieces. A ring of buffers holds what 128 columns take::

    x [BM, 128]    low [BN, 4 LOW]    high [BN, 4 HIGH]    scales, minimums [BN, 128 / SUB]

Four warps load x and words by TMA and make numbers of what scales and minimums are made of
(`tilewright.ops.mmq.hopper_scales`), and the others dequantize (`hopper_parts`) and multiply, a
product of [BN, 32] by [32, BM] at a time. The product is transposed, so acc is [BN, BM].

    x      [R, K]      rows in the order of the sorted slots, columns in that of `hopper_parts`
    low    [E N, W]    experts below each other: a tile that ends behind the last row of its expert
                       reads the next one's, and does not store what it gets
    plan   [1 + 3 T]   how many tiles there are, and of each (expert, first, last + 1)

Tiles of ids that name no expert take no steps, and store NaN. All roles walk the same list, of
which `plan` holds no empty tile: pieces are as even as the routing is.

Fields of a tile ("hopper"): block_n 64 (4 warps multiply) or 128 (8 warps) rows of the weight,
block_m rows of x, num_stages steps of 128 columns in flight, programs on a multiprocessor: 1, or 2
where registers suffice (`gpu_space`).
FAULT plants one of the errors of `hopper_planted` for the gate to find. It is "" in every tile of
the space, and the compiler then sees none of it.
Limits: float16 and bfloat16; K a multiple of 128 for types with a plane of one bit.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

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
from tilewright.ops.mmq.hopper_memory import next_buffer, of_16_bits, words_descriptor
from tilewright.ops.mmq.hopper_scales import NUMBERS, load_fields, math_of, most_of
from tilewright.ops.moe.hopper_parts import dequantize, load_own, numbers_of_steps, store_numbers
from tilewright.tiles.tile import Tile

__all__ = ["launch_moe_hopper"]

_WARPS, _REGISTERS = 4, 80  # that load, and make numbers
_STEP = 256  # columns of which numbers are made at a time
_BATCH = 2  # k16 steps that are dequantized, and multiplied, together


@gluon.jit
def _piece(plan_ptr, i, tiles_n, steps, experts, FAULT: gl.constexpr):
    """Piece of work i: expert, first slot, slots, column of tiles, and steps of K to sum."""
    t = i // tiles_n
    expert = gl.load(plan_ptr + 1 + 3 * t)
    first = gl.load(plan_ptr + 2 + 3 * t)
    last = gl.load(plan_ptr + 3 + 3 * t)
    if FAULT == "hopper-expert-bounds":  # of tiles that hold whole experts
        first += (t > 0).to(gl.int32)
        last += (t + 1 < gl.load(plan_ptr)).to(gl.int32)
    return expert, first, last - first, i % tiles_n, gl.where(expert < experts, steps, 0)


@gluon.jit
def _producer(
    x_desc, low_desc, high_desc, s_ptr, m_ptr, t_ptr, plan_ptr, stride_se, stride_sb, stride_me,
    stride_mb, stride_te, stride_tb, xs, lows, highs, ns, full, empty, N, subs, tiles_n, steps,
    experts, LOW: gl.constexpr, HIGH: gl.constexpr, SCALING: gl.constexpr, MINIMUMS: gl.constexpr,
    BYTES: gl.constexpr, SUB_OFFSET: gl.constexpr, SUB: gl.constexpr, MATH: gl.constexpr,
    MOST: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """x, words and numbers of every 128 columns, as buffers become free: one warp on each of a
    multiprocessor's schedulers, for making numbers takes half as many instructions as all else.

    What they are made of comes from far away: it is loaded into registers a step early."""
    SUBS: gl.constexpr = 128 // SUB
    ROWS: gl.constexpr = gl.BlockedLayout([max(1, BN // (32 * WARPS))], [32], [WARPS], [0])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(gl.program_id(0), gl.load(plan_ptr) * tiles_n, gl.num_programs(0)):
        expert, first, _count, pid_n, here = _piece(plan_ptr, i, tiles_n, steps, experts, FAULT)
        e = gl.where(here > 0, expert, 0)
        row = e * N + pid_n * BN
        if FAULT == "hopper-expert-rows":
            row = (e * tiles_n + pid_n) * BN
        n = gl.minimum(pid_n * BN + gl.arange(0, BN, ROWS), N - 1)
        if FAULT == "hopper-scale-row":
            n = gl.minimum(n + 1, N - 1)
        s_ptrs = s_ptr + e.to(gl.int64) * stride_se + n
        m_ptrs = m_ptr + e.to(gl.int64) * stride_me + n
        t_ptrs = t_ptr + e.to(gl.int64) * stride_te + n
        fields = load_fields(
            s_ptrs, m_ptrs, t_ptrs, 0, subs, stride_sb, stride_mb, stride_tb, SCALING, MINIMUMS,
            BYTES,
        )  # fmt: skip
        for k in range(0, here):
            ahead = load_fields(
                s_ptrs, m_ptrs, t_ptrs, gl.minimum(k + 1, here - 1), subs, stride_sb, stride_mb,
                stride_tb, SCALING, MINIMUMS, BYTES,
            )  # fmt: skip
            if FAULT == "hopper-no-minimum":
                fields = (fields[0], (gl.zeros_like(fields[1][0]),), fields[2])
            for half in gl.static_range(2):
                mbarrier.wait(empty.index(stage), phase)
                bar = full.index(stage)
                mbarrier.expect(bar, BM * 256 + BN * 16 * (LOW + HIGH))
                at = 2 * k + half
                tma_load(low_desc, [row, at * (4 * LOW)], bar, lows.index(stage))
                if HIGH:
                    tma_load(high_desc, [row, at * (4 * HIGH)], bar, highs.index(stage))
                tma_load(x_desc, [first, at * 128], bar, xs.index(2 * stage))
                tma_load(x_desc, [first, at * 128 + 64], bar, xs.index(2 * stage + 1))
                numbers = numbers_of_steps(
                    fields, half * SUBS, SUBS, SCALING, MINIMUMS, SUB_OFFSET, MATH, MOST
                )
                store_numbers(ns.index(stage), numbers, SUBS)
                mbarrier.arrive(bar, count=1)
                stage, phase = next_buffer(stage, phase, STAGES)
            if FAULT != "hopper-stale-numbers":
                fields = ahead


@gluon.jit
def _consumer(
    y, slots_ptr, plan_ptr, xs, lows, highs, ns, full, empty, N, stride_ym, tiles_n, steps, experts,
    LOW: gl.constexpr, HIGH: gl.constexpr, CODES: gl.constexpr, OFFSET: gl.constexpr,
    MATH: gl.constexpr, SUB: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr,
    WARPS: gl.constexpr, STAGES: gl.constexpr, BATCH: gl.constexpr, DTYPE: gl.constexpr,
    FAULT: gl.constexpr,
):  # fmt: skip
    """The warps that multiply, BATCH k16 steps at a time, one batch in flight while the next is
    dequantized. Phase n of empty[s] says that buffer s is free for its n-th use; a step frees the
    buffer of the step before, so all but the last are free from the start."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16]
    )
    for i in gl.static_range(STAGES - 1):
        mbarrier.arrive(empty.index(i), count=1)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    before = gl.to_tensor(STAGES - 1)
    for i in range(gl.program_id(0), gl.load(plan_ptr) * tiles_n, gl.num_programs(0)):
        expert, first, count, pid_n, here = _piece(plan_ptr, i, tiles_n, steps, experts, FAULT)
        # A product with an unknown expert has no steps: its sums are NaN from the start.
        acc = gl.zeros((BN, BM), gl.float32, ACC) + gl.where(expert < experts, 0.0, float("nan"))
        for _k in range(0, 2 * here):
            mbarrier.wait(full.index(stage), phase)
            low = load_own(lows.index(stage), WARPS)
            high = low
            if HIGH:
                high = load_own(highs.index(stage), WARPS)
            numbers = load_own(ns.index(stage), WARPS)
            for b in gl.static_range(8 // BATCH):
                w = dequantize(
                    low, high, numbers, b * BATCH, BATCH, LOW, HIGH, CODES, OFFSET, MATH, SUB, ACC,
                    DTYPE,
                )  # fmt: skip
                x = xs.index(2 * stage + b * BATCH // 4)
                at = x.slice(b * BATCH % 4 * 16, BATCH * 16, dim=1).permute((1, 0))
                acc = warpgroup_mma(w, at, acc, is_async=True)
                acc = warpgroup_mma_wait(1, [acc])
                if b == 0:  # all products but this one are done: nobody reads the buffer before
                    mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage, phase = next_buffer(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, [acc])
        offs_n = pid_n * BN + gl.arange(0, BN, gl.SliceLayout(1, ACC))
        offs_m = gl.arange(0, BM, gl.SliceLayout(0, ACC))
        slot = gl.load(slots_ptr + first + gl.minimum(offs_m, count - 1))
        rows_n = N
        if FAULT == "hopper-past-the-end":
            rows_n = N + 1
        elif FAULT == "hopper-partial-columns":
            rows_n = N // BN * BN
        if FAULT == "hopper-missing-tail":
            count = count // BM * BM
        mask = (offs_n < rows_n)[:, None] & (offs_m < count)[None, :]
        rows = slot.to(gl.int64)[None, :] * stride_ym
        gl.store(y + rows + offs_n[:, None], acc.to(y.dtype.element_ty), mask=mask)


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
    BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, BATCH: gl.constexpr,
    P_WARPS: gl.constexpr, P_REGISTERS: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """`subs` sub-blocks a row of the weight, `steps` of 256 columns."""
    DTYPE: gl.constexpr = x_desc.dtype
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    WARPS: gl.constexpr = gl.num_warps()
    xs = gl.allocate_shared_memory(DTYPE, [2 * STAGES, BM, 64], x_desc.layout)
    lows = gl.allocate_shared_memory(gl.int32, [STAGES, BN, 4 * LOW], low_desc.layout)
    highs = lows
    if HIGH:
        highs = gl.allocate_shared_memory(gl.int32, [STAGES, BN, 4 * HIGH], high_desc.layout)
    ns = gl.allocate_shared_memory(gl.int32, [STAGES, BN, 128 // SUB * COUNT], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # what TMA brings, and the numbers
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    if FAULT == "hopper-k-tail":
        steps = subs * SUB // 256
    tiles_n = (N + BN - 1) // BN
    gl.warp_specialize(
        [
            (_consumer, (
                y, slots_ptr, plan_ptr, xs, lows, highs, ns, full, empty, N, stride_ym, tiles_n,
                steps, experts, LOW, HIGH, CODES, OFFSET, MATH, SUB, BN, BM, WARPS, STAGES, BATCH,
                DTYPE, FAULT,
            )),
            (_producer, (
                x_desc, low_desc, high_desc, s_ptr, m_ptr, t_ptr, plan_ptr, stride_se, stride_sb,
                stride_me, stride_mb, stride_te, stride_tb, xs, lows, highs, ns, full, empty, N,
                subs, tiles_n, steps, experts, LOW, HIGH, SCALING, MINIMUMS, BYTES, SUB_OFFSET, SUB,
                MATH, MOST, BN, BM, STAGES, P_WARPS, FAULT,
            )),
        ],
        [P_WARPS],
        [P_REGISTERS],
    )  # fmt: skip


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
        x: [slots, row_columns(K)] float16 or bfloat16, contiguous: rows of the sorted slots, as
            `triton_gather.launch_gather` or `triton_scatter.launch_scatter` writes them.
        experts: GGUF blocks [E, N, K], `is_stacked`, on the device of x, sm_90.
        slots: int32 [slots], sorted.
        plan: of `triton_gather.launch_gather`, with the tile's block_m.
        y: [slots, N] of any floating dtype, columns contiguous.
        tile: algorithm "hopper" of `gpu_space.MOE_SPACE`.
    """
    planes = experts.planes
    assert isinstance(planes, GpuBlocks)
    (rows, width), n, k, form = x.shape, y.shape[1], experts.K, planes.form
    math = math_of(form, x.dtype)
    bn, bm = tile.block_n, tile.block_m
    scales, minimums, subs = planes.scales, planes.minimums, planes.sub_scales
    m, t = scales if minimums is None else minimums, scales if subs is None else subs
    low = words_descriptor(planes.low, bn, form.low.bits)
    high = low if planes.high is None else words_descriptor(planes.high, bn, form.high_bits)
    x_desc = TensorDescriptor(x, [rows, width], [width, 1], [bm, 64], of_16_bits())
    most = (rows // bm + experts.E + 1) * -(-n // bn)
    warps = 4 if bn == 64 else 8
    most_registers = 65536 // (32 * (warps + _WARPS) * tile.programs) // 8 * 8
    more = {"maxnreg": most_registers} if tile.programs > 1 else {}  # registers for all programs
    _moe_hopper_kernel[(min(tile.programs * target_units(x.device), most),)](
        x_desc, low, high, scales, m, t, y, slots, plan, n, k // form.sub, -(-k // _STEP),
        experts.E, scales.stride(0), scales.stride(2), m.stride(0), m.stride(2), t.stride(0),
        t.stride(2), y.stride(0),
        LOW=form.low.bits, HIGH=form.high_bits, CODES=form.codes, OFFSET=form.offset,
        SCALING=form.scaling, MINIMUMS=minimums is not None, BYTES=form.sub_bytes,
        SUB_OFFSET=form.sub_offset, SUB=form.sub, MATH=math, COUNT=NUMBERS[math],
        MOST=most_of(form), BN=bn, BM=bm, STAGES=tile.num_stages, BATCH=_BATCH,
        P_WARPS=_WARPS, P_REGISTERS=_REGISTERS, FAULT=tile.as_dict().get("planted", ""),
        num_warps=warps, **more,
    )  # fmt: skip
