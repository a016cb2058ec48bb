"""W4A16 on Hopper, for decode: few rows of x, the weights' bytes are the cost.

::

    y[m, n] = sum_k x[m, k] * s[n, k // G] * (q[n, k] - z[n, k // G]) + bias[n]

Words go from memory straight into registers, 16 bytes a lane, in the order in which they lie: one
word is a lane's whole A operand of mma.m16n8k16 (`tilewright.layout.hopper`). A program computes
`block_n` rows of the weight for all rows of x; its warps stand side by side along those rows
(`warps_n`) and along K (`warps_k`)::

    step      unroll blocks of 64 columns, one after the other in memory
    K         step 0 to warp 0, step 1 to warp 1, ... so that a program reads one stream
    registers the words, scales and x of the next step are on their way while a step is multiplied

Codes are multiplied as they are; a group's zero point comes off its sum, in float32::

    sum_k x (q - z) = sum_k x q - z sum_k x

    float16   word & 000F000F, a subnormal pair: q / 2^24. word & 00F000F0: q / 2^20
    bfloat16  word >> 4 p & 000F000F | 43004300: 128 + q

Products are exact. The powers of two go into the scale; the sum of x is one more product, with
ones. Warps along K meet in shared memory. With `split_k` a row block's K is also cut among
programs: each leaves its sums in the workspace, and the last to arrive adds them in the order of K.
Arrival is counted; no sum depends on it, and counters end as they began, at zero.

Fields of a tile ("hopper_decode")
    block_m   8 or 16: rows of x, at least M
    block_n   16 to 64: rows of the weight
    warps_n   warps along block_n, each with 16 to 64 rows
    warps_k   4, 8, 16: warps along K
    unroll    1 or 2: blocks of 64 columns that a warp has in flight
    split_k   1, 2, 4, 8: programs along K
    x_load    "pairs": each lane loads just the columns that it multiplies, 4 bytes at a time.
              "vectors": 16 bytes at a time, which change lanes in shared memory

Limits: float16 and bfloat16; M up to block_m; any N and K; G of 32, a multiple of 64 that steps do
not straddle, or all of K.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.layout.hopper import BLOCK, HopperW4
from tilewright.ops.gluon_compat import block_barrier
from tilewright.ops.mma_fragments import along
from tilewright.ops.w4a16.hopper_decode_parts import (
    add_part,
    load_scales,
    load_words,
    load_x,
    loaded_layout,
    meeting_layout,
    split_steps,
    sums_layout,
    turn_x,
    turned_layout,
    words_layout,
)
from tilewright.tiles.tile import Tile

__all__ = ["launch_w4a16_hopper_decode", "workspace_hopper_decode"]


@gluon.jit
def _store(c, y_ptr, bias_ptr, m, n, M, N, HAS_BIAS: gl.constexpr, FAULT: gl.constexpr):
    """Add the bias, round, and write what lies inside y."""
    rows = M
    columns = N
    if FAULT == "past-the-end":
        rows = M + 1
    elif FAULT == "partial-rows":
        columns = N // 16 * 16
    if HAS_BIAS:
        c += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    mask = (m < rows) & (n < columns)
    gl.store(y_ptr + m.to(gl.int64) * N + n, c.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _join_parts(c, y_ptr, bias_ptr, part_ptr, count_ptr, m, n, here, M, N, TILE: gl.constexpr,
                SPLIT_K: gl.constexpr, HAS_BIAS: gl.constexpr, FAULT: gl.constexpr):  # fmt: skip
    """Leave c in the workspace; the last program to arrive adds the parts and stores the tile.
    `here` is each sum's place in the TILE sums of a part."""
    COUNT: gl.constexpr = SPLIT_K - 1 if FAULT == "lost-partial" else SPLIT_K
    pid = gl.program_id(0)
    part = gl.program_id(1)
    parts = part_ptr + pid.to(gl.int64) * (SPLIT_K * TILE) + here
    if FAULT == "stale-partial":
        if part < SPLIT_K - 1:
            gl.store(parts + part * TILE, c)
    else:
        gl.store(parts + part * TILE, c)
    block_barrier()
    arrived = gl.atomic_add(count_ptr + pid, 1, sem="acq_rel")
    if arrived == SPLIT_K - 1:
        total = gl.zeros_like(c)
        for i in gl.static_range(COUNT):
            total += gl.load(parts + i * TILE, cache_modifier=".cg")
        _store(total, y_ptr, bias_ptr, m, n, M, N, HAS_BIAS, FAULT)
        gl.store(count_ptr + pid, 0)  # ready for the next launch


@gluon.jit
def _w4a16_decode_kernel(
    x_ptr, q_ptr, s_ptr, z_ptr, bias_ptr, y_ptr, part_ptr, count_ptr, M, N, K, stride_xm,
    GROUP: gl.constexpr, ASYM: gl.constexpr, HAS_BIAS: gl.constexpr, EVEN: gl.constexpr,
    WARPS_N: gl.constexpr, WARPS_K: gl.constexpr, BLOCKS: gl.constexpr, MB: gl.constexpr,
    UNROLL: gl.constexpr, SPLIT_K: gl.constexpr, VECTORS: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """BLOCKS of 16 rows of the weight, MB of 8 rows of x. GROUP is 0 when one group is all of K.
    EVEN: every warp of every program takes the same number of whole steps."""
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    WORDS: gl.constexpr = words_layout(WARPS_N, WARPS_K, BLOCKS)
    ACC: gl.constexpr = sums_layout(WARPS_N, WARPS_K, BLOCKS, MB)
    OUT: gl.constexpr = meeting_layout(WARPS_N * WARPS_K, WARPS_K, BLOCKS, MB)
    LOADED: gl.constexpr = loaded_layout(WARPS_N, WARPS_K, MB, 2 * UNROLL)
    TURNED: gl.constexpr = turned_layout(WARPS_N, WARPS_K, MB, 2 * UNROLL)
    LANES: gl.constexpr = gl.SliceLayout(3, ACC)  # [WARPS_K, BLOCKS, 32]
    X: gl.constexpr = gl.SliceLayout(1, ACC)  # [WARPS_K, 32, MB]
    PARTS: gl.constexpr = max(1, UNROLL * 64 // GROUP) if GROUP > 0 else 1
    COUNT: gl.constexpr = 4 * UNROLL // PARTS  # k16 steps that share a scale
    NEXT: gl.constexpr = 0 if FAULT == "group-straddled" else 2
    LOADS: gl.constexpr = 1 if VECTORS else 8 * UNROLL
    ROUND: gl.constexpr = UNROLL * WARPS_K  # blocks of 64 columns that a program takes at a time
    pid = gl.program_id(0)
    blocks_k = (K + 63) // 64
    groups = K // GROUP if GROUP > 0 else 1
    steps = (blocks_k + UNROLL - 1) // UNROLL
    first = gl.program_id(1) * steps // SPLIT_K
    last = (gl.program_id(1) + 1) * steps // SPLIT_K
    end = gl.minimum(last * UNROLL, blocks_k)
    if FAULT == "k-tail":
        end = gl.minimum(end, K // (64 * UNROLL) * UNROLL)

    # The blocks of 16 rows lie next to each other in one block of 64 rows, or fill some; past the
    # weight's end they are read from its last one.
    row_end = (N + 63) // 64 - 1
    block_q = (first + along(0, WARPS_K, WORDS, 4)) * UNROLL
    at = along(1, BLOCKS, WORDS, 4)
    row = gl.minimum(pid * BLOCKS // 4 + at // 4, row_end).to(gl.int64)
    q_ptrs = q_ptr + (row * (blocks_k * 512) + pid * BLOCKS % 4 * 128 + at % 4 * 128)
    q_ptrs = q_ptrs + along(2, 32, WORDS, 4) * 4 + along(3, 4, WORDS, 4) + block_q * 512

    block_s = (first + along(0, WARPS_K, LANES, 3)) * UNROLL
    at = along(1, BLOCKS, LANES, 3)
    lrow = along(2, 32, LANES, 3) // 4
    if FAULT == "scale-row":
        lrow = (lrow + 1) % 8
    row = gl.minimum(pid * BLOCKS // 4 + at // 4, row_end).to(gl.int64)
    offs_s = row * (groups * 32) + pid * BLOCKS % 4 * 8 + at % 4 * 8 + lrow
    s_ptrs = s_ptr.to(gl.pointer_type(gl.int32)) + offs_s
    z_ptrs = z_ptr + offs_s

    if VECTORS:  # [WARPS_K, 8, 4 (segment), MB, 2 UNROLL, 4 (pair)]
        half = along(4, 2 * UNROLL, LOADED, 6)
        m = along(1, 8, LOADED, 6) + along(3, MB, LOADED, 6) * 8
        block_x = (first + along(0, WARPS_K, LOADED, 6)) * UNROLL
        pair = block_x * 32 + half * 16 + along(2, 4, LOADED, 6) * 4 + along(5, 4, LOADED, 6)
        block_x = block_x + half // 2
    else:  # [WARPS_K, 32, MB]
        lane = along(1, 32, X, 3)
        m = lane // 4 + along(2, MB, X, 3) * 8
        block_x = (first + along(0, WARPS_K, X, 3)) * UNROLL
        pair = block_x * 32 + lane % 4
    m = gl.minimum(m, M - 1)  # rows past x repeat its last one: what they add is not stored
    x_ptrs = x_ptr.to(gl.pointer_type(gl.int32)) + m.to(gl.int64) * (stride_xm // 2) + pair

    zero = gl.zeros((WARPS_K, BLOCKS, 32, MB), gl.float32, ACC)
    acc = (zero, zero, zero, zero)
    next_q = load_words(q_ptrs, block_q, end, UNROLL, EVEN)
    next_s = load_scales(s_ptrs, z_ptrs, block_s, end, groups - 1, GROUP, UNROLL, PARTS, ASYM)
    next_x = load_x(x_ptrs, block_x, end, pair, K, LOADS, EVEN)
    for _ in range(0, (last - first + WARPS_K - 1) // WARPS_K):
        words, scales, x = next_q, next_s, next_x
        block_q += ROUND
        block_s += ROUND
        block_x += ROUND
        pair += ROUND * 32
        q_ptrs += ROUND * 512
        x_ptrs += ROUND * 32
        next_q = load_words(q_ptrs, block_q, end, UNROLL, EVEN)
        next_s = load_scales(s_ptrs, z_ptrs, block_s, end, groups - 1, GROUP, UNROLL, PARTS, ASYM)
        next_x = load_x(x_ptrs, block_x, end, pair, K, LOADS, EVEN)
        if VECTORS:
            x = turn_x(x[0], TURNED, X)
        k16 = ()
        for u in gl.static_range(UNROLL):
            k16 = k16 + split_steps(words[u], LANES)
        for part in gl.static_range(PARTS):
            acc = add_part(
                acc, k16, x, scales[NEXT * part], scales[NEXT * part + 1], part * COUNT, COUNT,
                DTYPE,
            )  # fmt: skip

    # Warps along K meet: [WARPS_K, BLOCKS, 32, MB, r8, m1] to [BLOCKS, 32, MB, r8, m1].
    c = gl.join(gl.join(acc[0], acc[2]), gl.join(acc[1], acc[3]))
    c = gl.sum(gl.convert_layout(c, OUT), 0)
    SUM: gl.constexpr = c.type.layout
    lane = along(1, 32, SUM, 5)
    n = along(0, BLOCKS, SUM, 5) * 16 + lane // 4 + along(3, 2, SUM, 5) * 8
    m = lane % 4 * 2 + along(2, MB, SUM, 5) * 8 + along(4, 2, SUM, 5)
    here = n * (8 * MB) + m
    n = n + pid * (BLOCKS * 16)
    if SPLIT_K == 1:
        _store(c, y_ptr, bias_ptr, m, n, M, N, HAS_BIAS, FAULT)
    else:
        _join_parts(
            c, y_ptr, bias_ptr, part_ptr, count_ptr, m, n, here, M, N, BLOCKS * 16 * MB * 8,
            SPLIT_K, HAS_BIAS, FAULT,
        )  # fmt: skip


def workspace_hopper_decode(tile: Tile, M: int, N: int, K: int, units: int) -> tuple[int, int]:
    """What a launch needs of the workspace: floats for partial sums, and counters.

    Args:
        tile: of the algorithm "hopper_decode".
        M, N, K: of the problem.
        units: multiprocessors of the device; of no account here.
    """
    if tile.split_k == 1:
        return 0, 0
    tiles = -(-N // tile.block_n)
    return tiles * tile.split_k * tile.block_n * tile.block_m, tiles


@functools.lru_cache(maxsize=1024)
def _constants(tile: Tile) -> dict[str, Any]:
    """A tile as the kernel's constants. Made once: looking fields up takes as long as a launch."""
    return {
        "WARPS_N": tile.warps_n, "WARPS_K": tile.warps_k, "BLOCKS": tile.block_n // 16,
        "MB": tile.block_m // 8, "UNROLL": tile.unroll, "SPLIT_K": tile.split_k,
        "VECTORS": tile.x_load == "vectors", "FAULT": tile.as_dict().get("planted", ""),
        "num_warps": tile.warps_n * tile.warps_k,
    }  # fmt: skip


def launch_w4a16_hopper_decode(
    x: torch.Tensor,
    weight: HopperW4,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    workspace: Any,
) -> None:
    """Write x @ W.T + bias to y. Neither chooses, allocates nor checks a rule.

    Args:
        x: [M, K], 1 <= M <= block_m, of `weight.dtype`, columns in the weight's order
            (`weight.perm` is the caller's). Its first element lies at a multiple of 16 bytes, its
            columns next to each other, its rows a multiple of 16 bytes apart. Copy it otherwise.
        weight: on the device of x, sm_90.
        bias: [N] of any floating dtype, contiguous.
        y: [M, N] of the dtype of x, contiguous.
        tile: of the algorithm "hopper_decode" (module docstring), or a planted one.
        workspace: `.partials` float32 and `.counters` int32, zero, of at least the sizes that
            `workspace_hopper_decode` says; either may be None where that is 0. Counters are zero
            again when the kernel ends. It serves one stream at a time.
    """
    m, k = x.shape
    n = weight.N
    constants = _constants(tile)
    split = constants["SPLIT_K"]
    columns = BLOCK * constants["UNROLL"] * constants["WARPS_K"] * split
    _w4a16_decode_kernel[(-(-n // (16 * constants["BLOCKS"])), split)](
        x, weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias, y,
        workspace.partials if split > 1 else weight.words,
        workspace.counters if split > 1 else weight.words,
        m, n, k, x.stride(0) if m > 1 else -(-k // 8) * 8,
        GROUP=0 if weight.group_size == k else weight.group_size, ASYM=weight.zeros is not None,
        HAS_BIAS=bias is not None, EVEN=k % columns == 0, **constants,
    )  # fmt: skip
