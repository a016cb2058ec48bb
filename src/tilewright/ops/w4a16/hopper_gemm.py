"""W4A16 on Hopper, for prefill: weights dequantized in registers under wgmma.

::

    y[m, n] = sum_k x[m, k] * s[n, k // G] * (q[n, k] - z[n, k // G]) + bias[n]

One program runs on each multiprocessor, or `ctas` of them. Two producer warps, one for x and one
for the weights, issue TMA loads into a ring of `num_stages` buffers. A step of K is one or two
blocks of 64 columns, and a buffer holds a step::

    x [blocks, BM, 64] swizzled    words [BN / 64, 4 blocks, 128]    scales, zeros [BN / 64, groups]

The other warps turn a block's words into wgmma's register operand (`hopper_parts`), four k16 slices
in turn, two in flight: the dequantization of one slice runs under the products of the two before.
Sums are float32, the bias is added to them, and the result is rounded once. The product is
transposed, so acc is [BN, BM]: BN rows of the weight, BM rows of x.

Fields of a tile ("hopper")
    block_n     64 (4 warps multiply), 128 or 256 (8 warps): rows of the weight
    block_m     16 to 256, a power of two: rows of x; at most 32768 / block_n
    block_k     64 or 128: columns of a step; it divides G, or G divides it, unless G is all of K
    num_stages  steps in flight, at least 2; `smem_hopper` says what they take
    split_k     1: whole tiles only. 2 to 8: each tile's K in so many parts, where there are fewer
                tiles than programs. 0: tiles that fill no whole round are cut, and at most one
                round more, so that programs end at about the same time
    ctas        programs that a multiprocessor runs at once, sharing its registers: 2 leave them for
                tiles of at most 8192 outputs
    group_m     rows of tiles that are walked column by column, to share x and w in the cache

A tile cut in parts is finished by the program with its last steps of K: the others leave float32
sums in the workspace, and it adds them in the order of K. A program leaves its part first of all it
does, and adds parts of others last, after its whole tiles. It waits only for programs of lower
numbers, which began before it did. Counters of arrivals end as they began, at zero.

Limits: float16 and bfloat16; any M, N and K; G of 32, a multiple of 64, or all of K.
"""

# mypy: disable-error-code="no-untyped-def,no-redef"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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

from tilewright.layout.hopper import BLOCK, HopperW4
from tilewright.ops.gluon_compat import block_barrier, tma_load, tma_store
from tilewright.ops.w4a16.hopper_parts import (
    accumulator_of_halves,
    dequantize,
    flat_halves,
    flat_layout,
    load_scales,
    load_words,
    load_zeros,
    rows_layout,
    split_steps,
    sums_layout,
    tile_layouts,
    words_layout,
)
from tilewright.tiles.tile import Tile

__all__ = ["launch_w4a16_hopper", "smem_hopper", "workspace_hopper"]

PRODUCER_REGISTERS = 24
_LEAST_STEPS = 4  # of K, that a program gets when tiles are cut evenly
_HAND_OVER = 3  # blocks of K that it takes about as long as to leave a part, or to add one


@gluon.jit
def _tile_of(t, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Tile t's row and column: bands of GROUP_M rows, walked column by column."""
    band = t // (GROUP_M * tiles_n)
    rows = min(tiles_m - band * GROUP_M, GROUP_M)
    r = t % (GROUP_M * tiles_n)
    return band * GROUP_M + r % rows, r // rows


@gluon.jit
def _work(tiles, cut, sharers, steps):
    """This program's stretch of the cut tiles' steps: its first, the end, its parts of tiles; how
    many of those come before whole tiles; and its whole tiles.

    Parts come in falling order: that of the last tile, which another program waits for, is summed
    first. That of the first tile comes after all whole tiles if it must wait for others.
    """
    program = gl.program_id(0)
    start = program * (cut * steps) // max(sharers, 1)
    end = (program + 1) * (cut * steps) // max(sharers, 1)
    parts = (end + steps - 1) // steps - start // steps
    parts = gl.where((end > start) & (program < sharers), parts, 0)
    waits = (parts > 0) & (start % steps > 0) & (end >= (start // steps + 1) * steps)
    programs = gl.num_programs(0)
    whole = (tiles - cut - program + programs - 1) // programs
    return start, end, parts, gl.where(waits, parts - 1, parts), whole


@gluon.jit
def _item(i, start, end, parts, early, whole, cut, steps):
    """Item i of a program: its tile and the steps of K that it sums."""
    part = gl.where(i < early, i, i - whole)
    t = (end - 1) // steps - part
    first = max(start - t * steps, 0)
    last = min(end - t * steps, steps)
    if (i >= early) & (i < early + whole):
        t = cut + gl.program_id(0) + (i - early) * gl.num_programs(0)
        first = 0
        last = steps
    return t, first, last


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The ring's next buffer, and the parity of its turn."""
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), phase ^ wraps.to(gl.int32)


@gluon.jit
def _x_producer(
    x_desc, xs, full, empty, tiles_m, tiles_n, cut, sharers, steps, BM: gl.constexpr,
    KB: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warp: x of every step, as buffers become free."""
    start, end, parts, early, whole = _work(tiles_m * tiles_n, cut, sharers, steps)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(parts + whole):
        t, first, last = _item(i, start, end, parts, early, whole, cut, steps)
        pid_m, pid_n = _tile_of(t, tiles_m, tiles_n, GROUP_M)
        for k in range(first, last):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, KB * BM * 128)
            for b in gl.static_range(KB):
                tma_load(x_desc, [pid_m * BM, (k * KB + b) * 64], bar, xs.index(stage * KB + b))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _w_producer(
    w_desc, s_desc, z_desc, ws, ss, zs, full, empty, tiles_m, tiles_n, cut, sharers, steps,
    BN: gl.constexpr, KB: gl.constexpr, GROUPS: gl.constexpr, GROUP_STEPS: gl.constexpr,
    ASYM: gl.constexpr, STAGES: gl.constexpr, ZERO_SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warp: words, scales and zero points of every step, as buffers become free."""
    BYTES: gl.constexpr = KB * BN * 32 + GROUPS * BN * 2 + ASYM * GROUPS * BN // 2
    start, end, parts, early, whole = _work(tiles_m * tiles_n, cut, sharers, steps)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(parts + whole):
        t, first, last = _item(i, start, end, parts, early, whole, cut, steps)
        pid_m, pid_n = _tile_of(t, tiles_m, tiles_n, GROUP_M)
        n = pid_n * (BN // 64)
        for k in range(first, last):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            if GROUP_STEPS == 0:
                g = 0
            else:
                g = k // GROUP_STEPS * GROUPS
            tma_load(w_desc, [n, k * (4 * KB), 0], bar, ws.index(stage))
            tma_load(s_desc, [n, g, 0], bar, ss.index(stage))
            if ASYM:
                tma_load(z_desc, [n, g, 0], bar, zs.index(stage * ZERO_SLOTS))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _half_block(
    acc, words, s, z, x, H: gl.constexpr, KB: gl.constexpr, ACC: gl.constexpr, DTYPE: gl.constexpr
):
    """Half H of a step's 2 KB: 32 of K. Four products a step or more exceed the two in flight, so
    that no register of a pending product is written again, not even by the next step."""
    G: gl.constexpr = H * len(s) // (2 * KB)
    AT: gl.constexpr = H % 2 * 2
    q = split_steps(words[H // 2])
    w = dequantize(q[AT], s[G], z[G], ACC, DTYPE)
    acc = warpgroup_mma(w, x.slice(AT * 16, 16, dim=1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(2, [acc])
    w = dequantize(q[AT + 1], s[G], z[G], ACC, DTYPE)
    acc = warpgroup_mma(w, x.slice(AT * 16 + 16, 16, dim=1).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma_wait(2, [acc])


@gluon.jit
def _leave(acc, part_ptr, count_ptr, t, FLAT: gl.constexpr):
    """Put this program's part of tile t in its slot of the workspace, and count it."""
    HALF: gl.constexpr = acc.shape[0] * acc.shape[1] // 2
    a, b = flat_halves(acc, FLAT)
    slot = part_ptr + gl.program_id(0).to(gl.int64) * (2 * HALF) + gl.arange(0, HALF, FLAT)
    gl.store(slot, a)
    gl.store(slot + HALF, b)
    block_barrier()
    gl.atomic_add(count_ptr + t, 1, sem="release")


@gluon.jit
def _collect(acc, part_ptr, count_ptr, t, cut, sharers, steps, ACC: gl.constexpr,
             FLAT: gl.constexpr):  # fmt: skip
    """acc, the last part of tile t, plus the parts that programs before this one left of it.

    Those began before this one did, and left their parts of this tile first of all they do.
    """
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    HALF: gl.constexpr = BN * BM // 2
    program = gl.program_id(0)
    first = ((t * steps + 1) * sharers - 1) // (cut * steps)
    arrived = gl.atomic_add(count_ptr + t, 0, sem="acquire")
    while arrived < program - first:
        arrived = gl.atomic_add(count_ptr + t, 0, sem="acquire")
    a, b = flat_halves(acc, FLAT)
    slot = part_ptr + first.to(gl.int64) * (2 * HALF) + gl.arange(0, HALF, FLAT)
    for _p in range(first, program):
        a += gl.load(slot, cache_modifier=".cg")
        b += gl.load(slot + HALF, cache_modifier=".cg")
        slot += 2 * HALF
    gl.store(count_ptr + t, 0)  # ready for the next launch
    return accumulator_of_halves(a, b, BN, BM, ACC)


@gluon.jit
def _store(acc, y, ys, bias_ptr, pid_m, pid_n, M, N, HAS_BIAS: gl.constexpr, TMA_Y: gl.constexpr,
           ACC: gl.constexpr, DTYPE: gl.constexpr):  # fmt: skip
    """Add the bias, round, and write a tile: through shared memory and TMA, or with masks."""
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    offs_n = pid_n * BN + gl.arange(0, BN, gl.SliceLayout(1, ACC))
    if HAS_BIAS:
        bias = gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
        acc += gl.expand_dims(bias.to(gl.float32), 1)
    if TMA_Y:
        tma.store_wait(0)
        ys.store(gl.permute(acc.to(DTYPE), (1, 0)))
        fence_async_shared()
        tma_store(y, [pid_m * BM, pid_n * BN], ys)
    else:
        offs_m = pid_m * BM + gl.arange(0, BM, gl.SliceLayout(0, ACC))
        mask = (offs_n < N)[:, None] & (offs_m < M)[None, :]
        rows = offs_m.to(gl.int64)[None, :] * N
        gl.store(y + rows + offs_n[:, None], acc.to(DTYPE), mask=mask)


@gluon.jit
def _consumer(
    y, bias_ptr, part_ptr, count_ptr, xs, ws, ss, zs, ys, full, empty, M, N, tiles_m, tiles_n, cut,
    sharers, steps, BN: gl.constexpr, BM: gl.constexpr, KB: gl.constexpr, ASYM: gl.constexpr,
    HAS_BIAS: gl.constexpr, TMA_Y: gl.constexpr, CUT: gl.constexpr, STAGES: gl.constexpr,
    ZERO_SLOTS: gl.constexpr, GROUP_M: gl.constexpr, WORDS: gl.constexpr, ROW_WORDS: gl.constexpr,
    ACC: gl.constexpr, FLAT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The warps that multiply. Phase n of empty[s] says that buffer s is free for its n-th use;
    a step frees the buffer of the step before, so all but the last are free from the start."""
    for i in gl.static_range(STAGES - 1):
        mbarrier.arrive(empty.index(i), count=1)
    start, end, parts, early, whole = _work(tiles_m * tiles_n, cut, sharers, steps)
    it = 0
    for i in range(parts + whole):
        t, first, last = _item(i, start, end, parts, early, whole, cut, steps)
        pid_m, pid_n = _tile_of(t, tiles_m, tiles_n, GROUP_M)
        acc = gl.zeros((BN, BM), gl.float32, ACC)
        for _k in range(first, last):
            stage = it % STAGES
            mbarrier.wait(full.index(stage), (it // STAGES) & 1)
            words = load_words(ws.index(stage), WORDS)
            s = load_scales(ss.index(stage), ROW_WORDS)
            z = load_zeros(zs.index(stage * ZERO_SLOTS), s, ROW_WORDS, DTYPE, ASYM)
            for h in gl.static_range(2 * KB):
                x = xs.index(stage * KB + h // 2)
                acc = _half_block(acc, words, s, z, x, h, KB, ACC, DTYPE)
                if h == 0:
                    # All but two products are done: the buffers of the step before are read.
                    mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
            it += 1
        acc = warpgroup_mma_wait(0, [acc])
        if CUT and last < steps:
            _leave(acc, part_ptr, count_ptr, t, FLAT)
        else:
            if CUT and first > 0:
                acc = _collect(acc, part_ptr, count_ptr, t, cut, sharers, steps, ACC, FLAT)
            _store(acc, y, ys, bias_ptr, pid_m, pid_n, M, N, HAS_BIAS, TMA_Y, ACC, DTYPE)
    if TMA_Y:
        tma.store_wait(0)


# One compiled kernel serves every size: the problem's numbers are not compiled in.
@gluon.jit(do_not_specialize=["M", "N", "cut", "sharers", "steps"])
def _w4a16_hopper_kernel(
    x_desc, w_desc, s_desc, z_desc, y, bias_ptr, part_ptr, count_ptr, M, N, cut, sharers,
    steps, BN: gl.constexpr, BM: gl.constexpr, KB: gl.constexpr, GROUPS: gl.constexpr,
    GROUP_STEPS: gl.constexpr, ASYM: gl.constexpr, HAS_BIAS: gl.constexpr, TMA_Y: gl.constexpr,
    CUT: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, WARPS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`cut` tiles are cut in parts. A step is KB blocks of K and loads GROUPS of scales, new ones
    every GROUP_STEPS steps (0: one group serves all of K)."""
    DTYPE: gl.constexpr = x_desc.dtype
    WORDS: gl.constexpr = words_layout(BN, WARPS, KB)
    ROW_WORDS: gl.constexpr = rows_layout(BN, WARPS, GROUPS)
    ACC: gl.constexpr = sums_layout(BM, WARPS)
    FLAT: gl.constexpr = flat_layout(BN, BM, WARPS)
    # TMA writes to multiples of 128 bytes, and a step's zero points may take less.
    ZERO_SLOTS: gl.constexpr = max(1, 256 // (BN * GROUPS))
    xs = gl.allocate_shared_memory(DTYPE, [STAGES * KB, BM, 64], x_desc.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, BN // 64, 4 * KB, 128], w_desc.layout)
    ss = gl.allocate_shared_memory(gl.int32, [STAGES, BN // 64, GROUPS, 32], s_desc.layout)
    if ASYM:
        zs = gl.allocate_shared_memory(
            gl.uint8, [STAGES * ZERO_SLOTS, BN // 64, GROUPS, 32], z_desc.layout
        )
    else:
        zs = ss
    if TMA_Y:
        ys = gl.allocate_shared_memory(DTYPE, [BM, BN], y.layout)
    else:
        ys = xs
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # one a producer
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    tiles_m = (M + BM - 1) // BM
    tiles_n = (N + BN - 1) // BN
    gl.warp_specialize(
        [
            (_consumer, (
                y, bias_ptr, part_ptr, count_ptr, xs, ws, ss, zs, ys, full, empty, M, N, tiles_m,
                tiles_n, cut, sharers, steps, BN, BM, KB, ASYM, HAS_BIAS, TMA_Y, CUT, STAGES,
                ZERO_SLOTS, GROUP_M, WORDS, ROW_WORDS, ACC, FLAT, DTYPE,
            )),
            (_x_producer, (
                x_desc, xs, full, empty, tiles_m, tiles_n, cut, sharers, steps, BM, KB, STAGES,
                GROUP_M,
            )),
            (_w_producer, (
                w_desc, s_desc, z_desc, ws, ss, zs, full, empty, tiles_m, tiles_n, cut, sharers,
                steps, BN, KB, GROUPS, GROUP_STEPS, ASYM, STAGES, ZERO_SLOTS, GROUP_M,
            )),
        ],
        [1, 1],
        [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


class _Plan(NamedTuple):
    """How a tile covers a problem.

    Attributes:
        programs: of the launch.
        cut: tiles that are cut in parts, the first ones.
        sharers: programs, the first ones, that share their steps of K evenly.
    """

    programs: int
    cut: int = 0
    sharers: int = 0


@functools.lru_cache(maxsize=4096)
def _plan(tile: Tile, M: int, N: int, K: int, units: int) -> _Plan:
    units = units * tile.ctas
    tiles = -(-M // tile.block_m) * -(-N // tile.block_n)
    steps = -(-K // tile.block_k)
    plan = _Plan(min(units, tiles))
    if tile.split_k > 1 and tiles < units:
        programs = tiles * min(tile.split_k, steps)
        plan = _Plan(programs, tiles, programs)
    elif tile.split_k == 0:
        plan = _balanced(tiles, steps, units, BLOCK / tile.block_k)
    if (steps == 1 and plan.cut) or plan.cut * steps * plan.programs >= 2**31:  # of int32
        return _Plan(min(units, tiles))
    return plan


def _balanced(tiles: int, steps: int, units: int, block: float) -> _Plan:
    """What split_k = 0 stands for; `block` is 64 columns of K in steps.

    Without a whole round every program gets an even stretch of all steps. With some, either the
    tiles beyond them are cut in two or more parts each, or a program's stretch is one to two tiles
    long: most then leave a part and add others, where a program of a tile in two parts does one.
    """
    programs = min(units, tiles * max(1, steps // _LEAST_STEPS))
    rounds, cut = divmod(tiles, programs)
    if not cut:
        return _Plan(programs)
    if rounds == 0:
        return _Plan(programs, cut, programs)
    parts = min(range(1, 9), key=lambda n: steps / n + n * _HAND_OVER * block)
    parts = min(parts, programs // cut, steps)
    even = steps * cut / programs + 4 * _HAND_OVER * block
    if parts > 1 and steps / parts + parts * _HAND_OVER * block < even:
        return _Plan(programs, cut, cut * parts)
    return _Plan(programs, programs + cut, programs)


def workspace_hopper(tile: Tile, M: int, N: int, K: int, units: int) -> tuple[int, int]:
    """What a launch needs of the workspace: floats for partial sums, and counters.

    Args:
        tile: of the algorithm "hopper".
        M, N, K: of the problem.
        units: multiprocessors of the device.
    """
    plan = _plan(tile, M, N, K, units)
    if not plan.cut:
        return 0, 0
    return plan.sharers * tile.block_n * tile.block_m, plan.cut


def smem_hopper(tile: Tile) -> int:
    """Bytes of shared memory that a program of this tile allots, at most."""
    bn, bm, blocks = tile.block_n, tile.block_m, tile.block_k // BLOCK
    step = blocks * (bm * 128 + bn * 32 + bn * 4 + max(128, bn))  # two groups a block
    return int(tile.num_stages * (step + 16) + bm * bn * 2 + 1024)


@functools.lru_cache
def _units(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _groups(block_k: int, group_size: int, K: int) -> tuple[int, int]:
    """Groups of scales that a step of K loads, and steps that one load serves (0: all)."""
    if group_size >= K:
        return 1, 0
    return max(1, block_k // group_size), max(1, group_size // block_k)


def num_warps(block_n: int) -> int:
    """Warps that multiply: one warpgroup for each 64 rows of the weight, two at most."""
    return 4 if block_n == BLOCK else 8


def registers(tile: Tile) -> int | None:
    """Registers of a thread, on average, that let `ctas` programs run on a multiprocessor."""
    if tile.ctas == 1:
        return None
    threads = 32 * (num_warps(tile.block_n) + 4)  # the producer takes a whole warpgroup's place
    return 65536 // (tile.ctas * threads) // 8 * 8


@functools.lru_cache(maxsize=1024)
def _constants(tile: Tile, group_size: int, K: int) -> dict[str, Any]:
    """A tile as the kernel's constants. Made once: looking fields up takes as long as a launch."""
    groups, group_steps = _groups(tile.block_k, group_size, K)
    warps = num_warps(tile.block_n)
    return {
        "BN": tile.block_n, "BM": tile.block_m, "KB": tile.block_k // BLOCK, "GROUPS": groups,
        "GROUP_STEPS": group_steps, "STAGES": tile.num_stages, "GROUP_M": tile.group_m,
        "WARPS": warps, "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "num_warps": warps, "maxnreg": registers(tile),
    }  # fmt: skip


def _weight_descriptors(
    weight: HopperW4, block_n: int, blocks: int, groups: int
) -> tuple[Any, Any, Any, Any]:
    """TMA descriptors of words, scale words and zero bytes, kept with the weight, and the layout
    that x and y have in shared memory."""
    key = ("hopper", block_n, blocks, groups)
    if key not in weight.handles:
        rows = block_n // BLOCK
        layouts = tile_layouts(block_n, 8, num_warps(block_n), blocks, groups)
        words = weight.words.view(weight.words.shape[0], -1, 128)
        scales = weight.scales.view(torch.int32)
        w = TensorDescriptor.from_tensor(words, [rows, 4 * blocks, 128], layouts.words_shared)
        s = TensorDescriptor.from_tensor(scales, [rows, groups, 32], layouts.words_shared)
        z = s
        if weight.zeros is not None:
            z = TensorDescriptor.from_tensor(weight.zeros, [rows, groups, 32], layouts.zeros_shared)
        weight.handles[key] = (w, s, z, layouts.x_shared)
    found: tuple[Any, Any, Any, Any] = weight.handles[key]
    return found


def launch_w4a16_hopper(
    x: torch.Tensor,
    weight: HopperW4,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    workspace: Any,
) -> None:
    """Write x @ W.T + bias to y. Neither chooses, allocates nor checks a rule.

    Args:
        x: [M, K], M >= 1, of `weight.dtype`, columns in the weight's order (`weight.perm` is the
            caller's). Its first element lies at a multiple of 16 bytes, its columns next to each
            other, its rows a multiple of 16 bytes apart: what TMA reads. Copy it otherwise.
        weight: on the device of x, sm_90.
        bias: [N] of any floating dtype, contiguous.
        y: [M, N] of the dtype of x, contiguous. Faster where N % 8 == 0 and its first element lies
            at a multiple of 16 bytes.
        tile: of the algorithm "hopper" (module docstring).
        workspace: `.partials` float32 and `.counters` int32, zero, of at least the sizes that
            `workspace_hopper` says; either may be None where that is 0. Counters are zero again
            when the kernel ends. It serves one stream at a time.
    """
    m, k = x.shape
    n = weight.N
    plan = _plan(tile, m, n, k, _units(x.device))
    how = _constants(tile, weight.group_size, k)
    bn, bm, blocks, groups = how["BN"], how["BM"], how["KB"], how["GROUPS"]
    assert not plan.cut or workspace.partials.numel() >= plan.sharers * bn * bm
    w_desc, s_desc, z_desc, shared = _weight_descriptors(weight, bn, blocks, groups)
    row = x.stride(0) if m > 1 else -(-k // 8) * 8
    x_desc = TensorDescriptor(x, [m, k], [row, 1], [bm, BLOCK], shared)
    tma_y = n % 8 == 0 and y.data_ptr() % 16 == 0
    _w4a16_hopper_kernel[(plan.programs,)](
        x_desc, w_desc, s_desc, z_desc,
        TensorDescriptor(y, [m, n], [n, 1], [bm, bn], shared) if tma_y else y,
        weight.scales if bias is None else bias,
        workspace.partials if plan.cut else weight.words,
        workspace.counters if plan.cut else weight.words,
        m, n, plan.cut, plan.sharers, -(-k // (BLOCK * blocks)),
        ASYM=weight.zeros is not None, HAS_BIAS=bias is not None, TMA_Y=tma_y, CUT=plan.cut > 0,
        **how,
    )  # fmt: skip
