"""mmq on Hopper, for prefill: GGUF blocks become weights in registers under wgmma.

::

    y[m, n] = sum_k x[m, k] * (scale[n, k / SUB] * code[n, k] + minimum[n, k / SUB]) + bias[n]

One program runs on each multiprocessor and walks whole tiles, or there is one for each share of a
tile's K. One warp issues TMA loads of x, 64 columns at a time. Two warps take care of the weight,
128 columns at a time: TMA loads of its words, and what its scales are made of, from which they
compute float32 scales and minimums into shared memory. Both run ahead through rings of buffers::

    x [BM, 64]    low [BN, 4 LOW]    high [BN, 4 HIGH]    scales, minimums [128 / SUB, BN]

The other warps turn words into wgmma's register operand (`hopper_parts`), a k16 step at a time, two
products in flight: the dequantization of a step runs under the products of the two before. The
product is transposed, so acc is [BN, BM]: BN rows of the weight, BM rows of x.

Fields of a tile ("hopper")
    block_n     64 (4 warps multiply) or 128 (8 warps): rows of the weight
    block_m     16 to 256, a power of two: rows of x
    num_stages  steps of 64 columns of x in flight, from 3 on
    w_stages    steps of 128 columns of the weight in flight, from 2 on
    split_k     shares of K, for few tiles, a program each: float32 sums of a share go to the
                workspace, and the program with the last one adds them in their order, so that two
                launches agree. 0: the steps of all tiles in a row are cut evenly among as many
                programs as multiprocessors, and a tile where programs meet has shares
    group_m     rows of tiles that are walked column by column, to share x and w in the cache

Limits: float16 and bfloat16; any M and N; K a multiple of 128 for types with a plane of one bit.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from typing import Any

import torch
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

from tilewright.layout.blocks import BlockForm, GpuBlocks
from tilewright.ops.cross import target_units
from tilewright.ops.gluon_compat import block_barrier, tma_load, tma_store
from tilewright.ops.mmq.hopper_memory import next_buffer, of_16_bits, words_descriptor
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
from tilewright.ops.w4a16.hopper_parts import accumulator_of_halves, flat_halves, flat_layout
from tilewright.tiles.tile import Tile

__all__ = ["launch_mmq_hopper", "workspace_mmq_hopper"]

X_REGISTERS = 24
W_REGISTERS = 80
STEP = 256  # columns of the least share of K: of a block of a K-quant
_AHEAD = 3  # such steps, by which what scales are made of is brought near


@gluon.jit
def _begin(program, total):
    """The first of a program's steps, of `total` that all share."""
    each = total // gl.num_programs(0)
    return program * each + gl.minimum(program, total - each * gl.num_programs(0))


@gluon.jit
def _range(tiles, steps, SPLIT: gl.constexpr):
    """This program's work: first and last + 1, and how many pieces that is. It is steps of all
    tiles in a row with SPLIT 0, else pieces, of which programs take every so manieth: whole tiles,
    or one share each (`_programs`)."""
    program = gl.program_id(0)
    if SPLIT == 0:
        begin = _begin(program, tiles * steps)
        end = _begin(program + 1, tiles * steps)
        count = (end - 1) // steps - begin // steps + 1
    else:
        begin = program
        end = tiles * SPLIT
        count = (end - begin + gl.num_programs(0) - 1) // gl.num_programs(0)
    return begin, end, count


@gluon.jit
def _item(j, begin, end, tiles_m, tiles_n, steps, SPLIT: gl.constexpr, GROUP_M: gl.constexpr):
    """This program's piece j: its tile's row and column (bands of GROUP_M rows, column by column)
    and number, its share, and the steps of K that it sums.

    With SPLIT 0 the last tile comes first: a program begins with the share that it leaves to the
    next one, and ends with the tile whose shares others left long ago.
    """
    if SPLIT == 0:
        share = gl.program_id(0)
        t = (end - 1) // steps - j
        first = gl.maximum(begin - t * steps, 0)
        last = gl.minimum(end - t * steps, steps)
    else:
        i = begin + j * gl.num_programs(0)
        share = i % SPLIT
        t = i // SPLIT
        first = share * steps // SPLIT
        last = (share + 1) * steps // SPLIT
    band = t // (GROUP_M * tiles_n)
    rows = gl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    r = t % (GROUP_M * tiles_n)
    return band * GROUP_M + r % rows, r // rows, t, share, first, last


@gluon.jit
def _x_producer(
    x_desc, xs, full, empty, tiles_m, tiles_n, steps, BM: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warp: x of every 64 columns, as buffers become free."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    begin, end, count = _range(tiles_m * tiles_n, steps, SPLIT)
    for j in range(count):
        pid_m, _pid_n, _t, _share, first, last = _item(
            j, begin, end, tiles_m, tiles_n, steps, SPLIT, GROUP_M
        )
        for k in range(4 * first, 4 * last):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, BM * 128)
            tma_load(x_desc, [pid_m * BM, k * 64], bar, xs.index(stage))
            stage, phase = next_buffer(stage, phase, STAGES)


@gluon.jit
def _store_numbers(buffer, numbers):
    """A tuple of 1 or 2 vectors of rows to shared memory [BN, 1 or 2]."""
    if len(numbers) == 1:
        buffer.store(gl.reshape(numbers[0], (buffer.shape[0], 1)))
    else:
        buffer.store(gl.join(numbers[0], numbers[1]))


@gluon.jit
def _w_producer(
    low_desc, high_desc, s_ptr, m_ptr, t_ptr, stride_sb, stride_mb, stride_tb, lows, highs, ns,
    full, empty, N, subs, tiles_m, tiles_n, steps, LOW: gl.constexpr, HIGH: gl.constexpr,
    SCALING: gl.constexpr, MINIMUMS: gl.constexpr, BYTES: gl.constexpr, SUB_OFFSET: gl.constexpr,
    SUB: gl.constexpr, MATH: gl.constexpr, MOST: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, SPLIT: gl.constexpr, GROUP_M: gl.constexpr,
    AHEAD: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """Two warps: words of every 128 columns, and scales and minimums, as buffers become free."""
    SUBS: gl.constexpr = 128 // SUB
    ROWS: gl.constexpr = gl.BlockedLayout([BN // (32 * WARPS)], [32], [WARPS], [0])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    begin, end, count = _range(tiles_m * tiles_n, steps, SPLIT)
    for piece in range(count):
        _pid_m, pid_n, _t, _share, first, last = _item(
            piece, begin, end, tiles_m, tiles_n, steps, SPLIT, GROUP_M
        )
        rows = gl.minimum(pid_n * BN + gl.arange(0, BN, ROWS), N - 1)
        if FAULT == "hopper-scale-row":
            rows = gl.minimum(rows + 1, N - 1)
        for k in range(first - AHEAD, last):
            if k + AHEAD < last:
                prefetch_fields(
                    s_ptr, m_ptr, t_ptr, pid_n * BN, N, k + AHEAD, subs, stride_sb,
                    stride_mb, stride_tb, SCALING, MINIMUMS, BYTES, SUB, BN, WARPS,
                )  # fmt: skip
            if k >= first:
                fields = load_fields(
                    s_ptr + rows, m_ptr + rows, t_ptr + rows, k, subs, stride_sb, stride_mb,
                    stride_tb, SCALING, MINIMUMS, BYTES,
                )  # fmt: skip
                if FAULT == "hopper-no-minimum":
                    fields = (fields[0], (gl.zeros_like(fields[1][0]),), fields[2])
                for half in gl.static_range(2):
                    mbarrier.wait(empty.index(stage), phase)
                    bar = full.index(stage)
                    mbarrier.expect(bar, BN * 16 * (LOW + HIGH))
                    at = 2 * k + half
                    tma_load(low_desc, [pid_n * BN, at * (4 * LOW)], bar, lows.index(stage))
                    if HIGH:
                        tma_load(high_desc, [pid_n * BN, at * (4 * HIGH)], bar, highs.index(stage))
                    for j in gl.static_range(SUBS):
                        numbers = numbers_of(
                            fields, half * SUBS + j, SCALING, MINIMUMS, SUB_OFFSET, MATH, MOST
                        )
                        _store_numbers(ns.index(stage * SUBS + j), numbers)
                    mbarrier.arrive(bar, count=1)
                    stage, phase = next_buffer(stage, phase, STAGES)


@gluon.jit
def _leave(acc, part_ptr, count_ptr, t, share, SPLIT: gl.constexpr, FLAT: gl.constexpr,
           FAULT: gl.constexpr):  # fmt: skip
    """Put this share of tile t in its slot of the workspace, and count it."""
    HALF: gl.constexpr = acc.shape[0] * acc.shape[1] // 2
    a, b = flat_halves(acc, FLAT)
    slot = share
    if SPLIT > 0:
        slot += t * (SPLIT - 1)
    ptrs = part_ptr + slot.to(gl.int64) * (2 * HALF) + gl.arange(0, HALF, FLAT)
    if FAULT != "hopper-stale-partial":
        gl.store(ptrs, a)
        gl.store(ptrs + HALF, b)
    block_barrier()
    gl.atomic_add(count_ptr + t, 1, sem="release")


@gluon.jit
def _collect(acc, part_ptr, count_ptr, t, share, tiles, steps, SPLIT: gl.constexpr,
             ACC: gl.constexpr, FLAT: gl.constexpr, FAULT: gl.constexpr):  # fmt: skip
    """acc, the last share of tile t, plus the others in their order.

    Whoever makes them is a program of a lower number, which began before this one did, and leaves
    them before it waits for anybody: with shares a program has one piece, and with SPLIT 0 the
    share that others wait for is the first that it makes. So this ends with any number of
    multiprocessors, even where programs of another launch hold the rest and wait as well.
    """
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    HALF: gl.constexpr = BN * BM // 2
    if SPLIT == 0:
        # From the program on that has step t * steps; the first ones have one step more.
        each = tiles * steps // gl.num_programs(0)
        more = tiles * steps - each * gl.num_programs(0)
        slot = t * steps // (each + 1)
        slot = gl.where(slot < more, slot, (t * steps - more) // each)
        shares = share - slot
    else:
        slot = t * (SPLIT - 1)
        shares = share  # of the last: a number not known before keeps the loops below small
    arrived = gl.atomic_add(count_ptr + t, 0, sem="acquire")
    while arrived < shares:
        arrived = gl.atomic_add(count_ptr + t, 0, sem="acquire")
    a, b = flat_halves(acc, FLAT)
    ptrs = part_ptr + slot.to(gl.int64) * (2 * HALF) + gl.arange(0, HALF, FLAT)
    if FAULT == "hopper-lost-partial" or FAULT == "hopper-lost-neighbour":
        shares -= 1
    for i in range(shares):
        a += gl.load(ptrs + i * (2 * HALF), cache_modifier=".cg")
    for i in range(shares):
        b += gl.load(ptrs + i * (2 * HALF) + HALF, cache_modifier=".cg")
    gl.store(count_ptr + t, 0)  # ready for the next launch
    return accumulator_of_halves(a, b, BN, BM, ACC)


@gluon.jit
def _store(acc, y, ys, bias_ptr, pid_m, pid_n, M, N, HAS_BIAS: gl.constexpr, TMA_Y: gl.constexpr,
           ACC: gl.constexpr, DTYPE: gl.constexpr, FAULT: gl.constexpr):  # fmt: skip
    """Add the bias, round, and write a tile: through shared memory and TMA, or with masks."""
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    offs_n = pid_n * BN + gl.arange(0, BN, gl.SliceLayout(1, ACC))
    if HAS_BIAS:
        bias = gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
        acc += gl.expand_dims(bias.to(gl.float32), 1)
    if TMA_Y and BM == 256:  # one half after the other: shared memory is short
        a, b = gl.split(gl.permute(gl.reshape(acc, (BN, 2, BM // 2)), (0, 2, 1)))
        tma.store_wait(0)
        ys.store(gl.permute(a.to(DTYPE), (1, 0)))
        fence_async_shared()
        tma_store(y, [pid_m * BM, pid_n * BN], ys)
        tma.store_wait(0)
        ys.store(gl.permute(b.to(DTYPE), (1, 0)))
        fence_async_shared()
        tma_store(y, [pid_m * BM + BM // 2, pid_n * BN], ys)
    elif TMA_Y:
        tma.store_wait(0)
        ys.store(gl.permute(acc.to(DTYPE), (1, 0)))
        fence_async_shared()
        tma_store(y, [pid_m * BM, pid_n * BN], ys)
    else:
        offs_m = pid_m * BM + gl.arange(0, BM, gl.SliceLayout(0, ACC))
        rows_m = M
        if FAULT == "hopper-past-the-end":
            rows_m = M + 1
        rows_n = N
        if FAULT == "hopper-partial-rows":
            rows_n = N // 16 * 16
        mask = (offs_n < rows_n)[:, None] & (offs_m < rows_m)[None, :]
        rows = offs_m.to(gl.int64)[None, :] * N
        gl.store(y + rows + offs_n[:, None], acc.to(DTYPE), mask=mask)


@gluon.jit
def _load_all(buffers, first, COUNT: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr):
    """The numbers of COUNT sub-blocks, from buffer `first` on."""
    found = ()
    for i in gl.static_range(COUNT):
        found = found + (load_numbers(buffers.index(first + i), PAIRS, WARPS),)
    return found


@gluon.jit
def _consumer(
    y, bias_ptr, part_ptr, count_ptr, xs, lows, highs, ns, ys, x_full, x_empty, w_full, w_empty, M,
    N, tiles_m, tiles_n, steps, LOW: gl.constexpr, HIGH: gl.constexpr, CODES: gl.constexpr,
    OFFSET: gl.constexpr, MATH: gl.constexpr, SUB: gl.constexpr, BN: gl.constexpr,
    BM: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr, TMA_Y: gl.constexpr,
    STAGES: gl.constexpr, W_STAGES: gl.constexpr, SPLIT: gl.constexpr, GROUP_M: gl.constexpr,
    DTYPE: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """The warps that multiply. Phase n of empty[s] says that buffer s is free for its n-th use;
    a step frees the buffer of the step before, so all but the last are free from the start."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16]
    )
    FLAT: gl.constexpr = flat_layout(BN, BM, WARPS)
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
    begin, end, count = _range(tiles_m * tiles_n, steps, SPLIT)
    for j in range(count):
        pid_m, pid_n, t, share, first, last = _item(
            j, begin, end, tiles_m, tiles_n, steps, SPLIT, GROUP_M
        )
        acc = gl.zeros((BN, BM), gl.float32, ACC)
        for _k in range(2 * first, 2 * last):
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
        if SPLIT != 1 and last < steps:
            _leave(acc, part_ptr, count_ptr, t, share, SPLIT, FLAT, FAULT)
        else:
            if SPLIT != 1:
                acc = _collect(acc, part_ptr, count_ptr, t, share, tiles_m * tiles_n, steps,
                               SPLIT, ACC, FLAT, FAULT)  # fmt: skip
            _store(acc, y, ys, bias_ptr, pid_m, pid_n, M, N, HAS_BIAS, TMA_Y, ACC, DTYPE, FAULT)
    if TMA_Y:
        tma.store_wait(0)


@gluon.constexpr_function
def _minus(OFFSET, CODES):
    """The bits of -(1024 + offset) as float16, twice, as int32."""
    offset = OFFSET if CODES == "offset" else 128  # bytes are met as 128 + code
    twice = 0x10001 * (0x8000 | 0x6400 | offset)
    return twice - (1 << 32)


# One compiled kernel serves every size: the problem's numbers are not compiled in.
@gluon.jit(do_not_specialize=["M", "N", "subs", "steps", "stride_sb", "stride_mb", "stride_tb"])
def _mmq_hopper_kernel(
    x_desc, low_desc, high_desc, s_ptr, m_ptr, t_ptr, y, bias_ptr, part_ptr, count_ptr, M, N, subs,
    steps,
    stride_sb, stride_mb, stride_tb,
    LOW: gl.constexpr, HIGH: gl.constexpr, CODES: gl.constexpr, OFFSET: gl.constexpr,
    SCALING: gl.constexpr, MINIMUMS: gl.constexpr, BYTES: gl.constexpr, SUB_OFFSET: gl.constexpr,
    SUB: gl.constexpr, MATH: gl.constexpr, COUNT: gl.constexpr, MOST: gl.constexpr,
    HAS_BIAS: gl.constexpr, TMA_Y: gl.constexpr, BN: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, W_STAGES: gl.constexpr, SPLIT: gl.constexpr,
    GROUP_M: gl.constexpr, AHEAD: gl.constexpr, X_REGISTERS: gl.constexpr,
    W_REGISTERS: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """`subs` sub-blocks a row of the weight, `steps` of 256 columns."""
    DTYPE: gl.constexpr = x_desc.dtype
    SUBS: gl.constexpr = 128 // SUB
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    W_WARPS: gl.constexpr = 2
    WARPS: gl.constexpr = gl.num_warps()
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, BM, 64], x_desc.layout)
    lows = gl.allocate_shared_memory(gl.int32, [W_STAGES, BN, 4 * LOW], low_desc.layout)
    highs = lows
    if HIGH:
        highs = gl.allocate_shared_memory(gl.int32, [W_STAGES, BN, 4 * HIGH], high_desc.layout)
    ns = gl.allocate_shared_memory(gl.int32, [W_STAGES * SUBS, BN, COUNT], ROWS)
    ys = xs
    if TMA_Y:
        ys = gl.allocate_shared_memory(DTYPE, [min(BM, 128), BN], y.layout)
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
    if FAULT == "hopper-k-tail":
        steps = subs * SUB // 256
    tiles_m = (M + BM - 1) // BM
    tiles_n = (N + BN - 1) // BN
    gl.warp_specialize(
        [
            (_consumer, (
                y, bias_ptr, part_ptr, count_ptr, xs, lows, highs, ns, ys, x_full, x_empty, w_full,
                w_empty, M, N, tiles_m, tiles_n, steps, LOW, HIGH, CODES, OFFSET, MATH, SUB, BN,
                BM, WARPS, HAS_BIAS, TMA_Y, STAGES, W_STAGES, SPLIT, GROUP_M, DTYPE, FAULT,
            )),
            (_x_producer, (
                x_desc, xs, x_full, x_empty, tiles_m, tiles_n, steps, BM, STAGES, SPLIT, GROUP_M,
            )),
            (_w_producer, (
                low_desc, high_desc, s_ptr, m_ptr, t_ptr, stride_sb, stride_mb, stride_tb, lows,
                highs, ns, w_full, w_empty, N, subs, tiles_m, tiles_n, steps, LOW, HIGH,
                SCALING, MINIMUMS, BYTES, SUB_OFFSET, SUB, MATH, MOST, BN, W_STAGES, W_WARPS, SPLIT,
                GROUP_M, AHEAD, FAULT,
            )),
        ],
        [1, W_WARPS],
        [X_REGISTERS, W_REGISTERS],
    )  # fmt: skip


def num_warps(block_n: int) -> int:
    """Warps that multiply: one warpgroup for each 64 rows of the weight, two at most."""
    return 4 if block_n == 64 else 8


def workspace_mmq_hopper(tile: Tile, M: int, N: int, K: int, units: int) -> tuple[int, int]:
    """What a launch needs of the workspace: floats for sums of shares, and counters.

    Args:
        tile: of the algorithm "hopper".
        M, N, K: of the problem.
        units: multiprocessors of the device.
    """
    if tile.split_k == 1:
        return 0, 0
    tiles = -(-M // tile.block_m) * -(-N // tile.block_n)
    slots = units if tile.split_k == 0 else tiles * (tile.split_k - 1)
    return slots * tile.block_m * tile.block_n, tiles


def _programs(tiles: int, steps: int, split_k: int, units: int) -> int:
    """Programs of a launch: as many as multiprocessors, or as there are tiles (steps, cut evenly).

    With shares one a piece, however many. If a program took a second one it might wait for a
    program of a higher number, which may never begin while other launches, whose programs wait
    likewise, hold the multiprocessors.
    """
    if split_k > 1:
        return tiles * split_k
    return min(units, tiles * (steps if split_k == 0 else 1))


def launch_mmq_hopper(
    x: torch.Tensor,
    weight: GpuBlocks,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    workspace: Any,
) -> None:
    """Write x @ W.T + bias to y. Neither chooses, allocates nor checks a rule.

    Args:
        x: [M, K], M >= 1, float16 or bfloat16. Its first element lies at a multiple of 16 bytes,
            its columns next to each other, its rows a multiple of 16 bytes apart: what TMA reads.
        weight: on the device of x, sm_90.
        bias: [N] of any floating dtype, contiguous.
        y: [M, N] of the dtype of x, contiguous. Faster where N % 8 == 0 and its first element lies
            at a multiple of 16 bytes.
        tile: of the algorithm "hopper" (module docstring).
        workspace: of what `workspace_mmq_hopper` says. Counters are zero, and zero again when the
            kernel ends; it serves one stream at a time.
    """
    m, k = x.shape
    n, bn, bm = weight.N, tile.block_n, tile.block_m
    form: BlockForm = weight.form
    math = math_of(form, x.dtype)
    scales, minimums, subs = weight.scales, weight.minimums, weight.sub_scales
    low = words_descriptor(weight.low, bn, form.low.bits)
    high = low if weight.high is None else words_descriptor(weight.high, bn, form.high_bits)
    row = x.stride(0) if m > 1 else -(-k // 8) * 8
    x_desc = TensorDescriptor(x, [m, k], [row, 1], [bm, 64], of_16_bits())
    split = tile.split_k
    tma_y = n % 8 == 0 and y.data_ptr() % 16 == 0
    out = y
    if tma_y:
        out = TensorDescriptor(y, [m, n], [n, 1], [min(bm, 128), bn], of_16_bits())
    partials = workspace.partials if split != 1 else scales
    counters = workspace.counters if split != 1 else weight.low
    steps = -(-k // STEP)
    tiles = -(-m // bm) * -(-n // bn)
    _mmq_hopper_kernel[(_programs(tiles, steps, split, target_units(x.device)),)](
        x_desc, low, high, scales, scales if minimums is None else minimums,
        scales if subs is None else subs, out, scales if bias is None else bias, partials,
        counters, m, n, k // form.sub, steps,
        scales.stride(1), 0 if minimums is None else minimums.stride(1),
        0 if subs is None else subs.stride(1),
        LOW=form.low.bits, HIGH=form.high_bits, CODES=form.codes, OFFSET=form.offset,
        SCALING=form.scaling, MINIMUMS=minimums is not None, BYTES=form.sub_bytes,
        SUB_OFFSET=form.sub_offset, SUB=form.sub, MATH=math, COUNT=NUMBERS[math],
        MOST=most_of(form), HAS_BIAS=bias is not None,
        TMA_Y=tma_y, BN=bn, BM=bm, STAGES=tile.num_stages, W_STAGES=tile.w_stages, SPLIT=split,
        GROUP_M=tile.group_m, AHEAD=_AHEAD, X_REGISTERS=X_REGISTERS, W_REGISTERS=W_REGISTERS,
        FAULT=tile.as_dict().get("planted", ""), num_warps=num_warps(bn),
    )  # fmt: skip
