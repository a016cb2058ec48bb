"""mmq for one row of x on Hopper: the weights' bytes are the cost.

::

    y[n] = sum_k x[k] * (scale[n, k / SUB] * (code[n, k] - OFFSET) + minimum[n, k / SUB]) + bias[n]

A program computes `block_n` rows of the weight; its warps stand along K and take 256 columns of
those rows at a time, 256 * num_warps columns apart. Words lie as `tilewright.layout.blocks` draws
them and come straight into registers, 16 bytes a lane, as do scales, upper bits and x; no warp
waits for another before its last step.

Codes are multiplied as they are, on matrix units (m16n8k16: 16 rows of the weight, 16 columns). x
is one row, and of the product's 8 columns each belongs to one of the 8 sub-blocks of a step::

    B[k, j] = x[k] if column k lies in sub-block j, else 0
    D[n, j] = sum_k code[n, k] B[k, j]      the sum of sub-block j alone
    T[j]    = sum_k x[k] of sub-block j     one more product, of ones with x in full
    y[n]   += sum_j scale[n, j] (D[n, j] - OFFSET T[j]) + minimum[n, j] T[j]

so that scales cost a step what they would cost a sub-block otherwise, in float32. In B a lane holds
columns of x or nothing but zeros: lanes of the second kind read zeros from the workspace. With
sub-blocks of 32 columns a lane has columns of one unit of words at most, and loads no others.

    float16    word & 000F000F, a subnormal pair: q / 2^24. word & 00F000F0: q / 2^20, a sum apart.
    bfloat16   word >> 4 p & 000F000F | 43004300: 128 + q, and 128 T comes off too.

Products are exact; weights are not rounded. The kernel is launched before others have ended
(programmatic dependent launch), computes where things lie, fetches its first words into the L2, and
waits for those others before it reads. At the end the warps' sums meet in shared memory. Nothing
depends on the order in which programs run.

Limits: sm_90, M = 1, float16 and bfloat16, K a multiple of 256, N of block_n, types of
`decode_space.TYPES`. Infinite x gives NaN where codes have an offset.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.layout.blocks import GpuBlocks
from tilewright.ops.mma_fragments import along, mma
from tilewright.ops.mmq.decode_parts import (
    begin_dependents,
    lanes_layout,
    load_high,
    load_scales,
    load_totals,
    load_x,
    paired,
    pairs_of,
    rows_layout,
    wait_for_others,
    words_layout,
    words_of,
)
from tilewright.ops.mmq.decode_sums import add_scaled, add_words
from tilewright.ops.mmq.hopper_memory import fetch
from tilewright.tiles.tile import Tile

__all__ = ["launch_decode", "workspace_decode"]

COLUMNS = 256  # of a step of a warp
FIRST = gl.constexpr(2112)  # warps that run at once: 16 on each of 132 multiprocessors
ZEROS = 128  # int32 of the workspace that lanes without a column read: 512 bytes


@gluon.jit(do_not_specialize=["stride_sb", "stride_mb", "stride_tb"])
def _decode_kernel(
    x_ptr, low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, b_ptr, y_ptr, z_ptr,
    K, stride_ln, stride_hn, stride_sb, stride_mb, stride_tb,
    LOW: gl.constexpr, HIGH: gl.constexpr, SIGNED: gl.constexpr, OFFSET: gl.constexpr,
    SCALING: gl.constexpr, MINIMUMS: gl.constexpr, SUB: gl.constexpr, HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr, W: gl.constexpr, EVEN: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """8 ROWS rows of the weight, ROWS of them a lane; lane = 4 g + t. EVEN: every warp takes the
    same number of steps."""
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    C: gl.constexpr = 128 // LOW  # columns of a lane in a unit
    UNITS: gl.constexpr = 256 // (4 * C)
    SETS: gl.constexpr = 256 // SUB // 8  # of 8 sub-blocks
    PATTERNS: gl.constexpr = 2 if LOW == 4 else 4
    OWN: gl.constexpr = SETS == 1
    LANES: gl.constexpr = lanes_layout(W)  # [W, 32]
    WORDS: gl.constexpr = words_layout(W)  # [W, 32, 4]
    ALL: gl.constexpr = rows_layout(W, ROWS * UNITS)  # [ROWS * UNITS, W, 32, 4]
    STEP: gl.constexpr = W * (256 * LOW // 32)  # words of a row that all warps take at once
    SLICE: gl.constexpr = gl.SliceLayout(2, WORDS)
    ZERO: gl.constexpr = 0 if DTYPE == gl.float16 else 128  # what pairs of codes are larger by
    OFF: gl.constexpr = ZERO if FAULT == "decode-no-offset" else OFFSET + ZERO
    SUBTRACTED: gl.constexpr = MINIMUMS and FAULT != "decode-no-minimum"
    pid = gl.program_id(0)
    steps = K // 256
    rounds = (steps + W - 1) // W
    if FAULT == "decode-k-tail":
        rounds = steps // W

    # Where x lies, in 16 bytes from the zeros; 0 in lanes that have none of a pattern's columns.
    # Patterns are units, of which a lane has columns of one at most, or halves of a unit.
    warp = along(0, W, SLICE, 2)
    lane = along(1, 32, SLICE, 2)
    t = lane % 4
    distance = (x_ptr.to(gl.int64) - z_ptr.to(gl.int64)) // 16
    places = ()
    moves = ()
    own = (lane * 0 + warp * 0).to(gl.int64)
    move = own
    for p in gl.static_range(PATTERNS):
        column = t * C + p * (4 * C if OWN else C // 2)
        active = (column // SUB) % 8 == lane // 4
        at = distance + warp * 32 + column // 8
        if OWN:
            own = gl.where(active, at, own)
            move = gl.where(active, W * 32, move)
        else:
            places = places + (gl.where(active, at, at * 0),)
            moves = moves + (gl.where(active, W * 32, 0).to(gl.int64),)
    if OWN:
        places = (own,)
        moves = (move,)

    part = along(0, ROWS * UNITS, ALL, 4)
    first = along(1, W, ALL, 4)
    lane_w = along(2, 32, ALL, 4)
    row_w = pid * (8 * ROWS) + lane_w // 4 * ROWS + part // UNITS
    offset = first * (256 * LOW // 32) + part % UNITS * 16 + lane_w % 4 * 4 + along(3, 4, ALL, 4)
    ptrs = low_ptr + (row_w.to(gl.int64) * stride_ln + offset)
    first += offset * 0

    warp = along(0, W, LANES, 2)
    lane = along(1, 32, LANES, 2)
    t = lane % 4
    owner = t // 2 if LOW == 4 else t  # the unit of columns 2 t and 2 t + 1
    row = pid * 8 + lane // 4  # of ROWS rows
    h_ptrs = ()
    for i in gl.static_range(ROWS):
        at = (row.to(gl.int64) * ROWS + i) * stride_hn + warp * (256 * HIGH // 32) + t * HIGH
        if HIGH == 2:
            at = at // 2
        h_ptrs = h_ptrs + (at,)
    if FAULT == "decode-scale-row":
        row = pid * 8 + (lane // 4 + 1) % 8

    # Nothing is read before the kernels before this one have ended; only fetched, and that by the
    # programs which then have nothing else to do.
    if pid * W < FIRST:
        FETCHED: gl.constexpr = 8 * ROWS
        fetched = pid * FETCHED + lane % FETCHED
        near = gl.minimum(warp + lane // FETCHED * W, steps - 1)
        fetch(low_ptr + fetched.to(gl.int64) * stride_ln + near * (256 * LOW // 32))
    wait_for_others()
    begin_dependents()

    zero = gl.zeros((W, 32), gl.float32, LANES)
    acc = (zero,) * ROWS
    next_w = gl.load(ptrs, mask=first < steps, eviction_policy="evict_first")
    live = warp + lane * 0 < steps
    next_s = load_scales(s_ptr, m_ptr, t_ptr, row, t, warp, live, stride_sb, stride_mb, stride_tb,
                         ROWS, SCALING, MINIMUMS, SETS)  # fmt: skip
    next_h = load_high(high_ptr, h_ptrs, live, 0, ROWS, UNITS, HIGH)
    live_x = along(0, W, SLICE, 2) + along(1, 32, SLICE, 2) * 0 < steps
    next_x = load_x(z_ptr, places, live_x, OWN, C, EVEN, WORDS, LANES)
    next_t = load_totals(x_ptr, 0, steps, SETS, W, WORDS, LANES)
    for it in range(0, rounds):
        x, ones_x, scales, high = paired(next_x, LOW), next_t, next_s, next_h
        words = pairs_of(next_w, ROWS // 2)
        next_w = gl.load(ptrs + (it + 1) * STEP, mask=first + (it + 1) * W < steps,
                         eviction_policy="evict_first")  # fmt: skip
        step = (it + 1) * W + warp
        live = step + lane * 0 < steps
        next_s = load_scales(s_ptr, m_ptr, t_ptr, row, t, step, live, stride_sb, stride_mb,
                             stride_tb, ROWS, SCALING, MINIMUMS, SETS)  # fmt: skip
        next_h = load_high(high_ptr, h_ptrs, live, (it + 1) * W, ROWS, UNITS, HIGH)
        places_next = ()
        for p in gl.static_range(len(places)):
            places_next = places_next + (places[p] + moves[p],)
        places = places_next
        live_x = (it + 1) * W + along(0, W, SLICE, 2) + along(1, 32, SLICE, 2) * 0 < steps
        next_x = load_x(z_ptr, places, live_x, OWN, C, False, WORDS, LANES)
        next_t = load_totals(x_ptr, (it + 1) * W, steps, SETS, W, WORDS, LANES)

        one = gl.full((W, 32), 0x3C003C00 if DTYPE == gl.float16 else 0x3F803F80, gl.int32, LANES)
        ones = (one, one, one, one)
        none = (zero, zero, zero, zero)
        first_t = mma(ones, (ones_x[0],), none, DTYPE)
        if SETS == 1:
            first_t = mma(ones, (ones_x[1],), first_t, DTYPE)
            totals = (first_t[0], first_t[1])
        else:
            second_t = mma(ones, (ones_x[1],), none, DTYPE)
            totals = (first_t[0], first_t[1], second_t[0], second_t[1])
        for q in gl.static_range(ROWS // 2):
            sums = (zero,) * (8 * SETS)
            of_rows = words_of(words[q], UNITS, LANES)
            for u in gl.static_range(UNITS):
                sums = add_words(sums, of_rows, high, x, owner, q, u, LOW, HIGH, SIGNED, UNITS,
                                 SETS, DTYPE)  # fmt: skip
            acc = add_scaled(acc, sums, totals, scales, q, LOW, OFF, SCALING, SUBTRACTED, SETS,
                             ROWS, DTYPE)  # fmt: skip

    if FAULT == "decode-lost-warp":
        lost = acc
        acc = ()
        for i in gl.static_range(ROWS):
            acc = acc + (gl.where(warp == W - 1, 0.0, lost[i]),)
    y = acc[0]
    if ROWS == 2:
        y = gl.join(acc[0], acc[1])
    else:
        y = gl.join(gl.join(acc[0], acc[2]), gl.join(acc[1], acc[3]))
    y = gl.sum(gl.sum(gl.reshape(y, (W, 8, 4, ROWS)), 2), 0)
    y = gl.reshape(y, (8 * ROWS,))
    n = pid * (8 * ROWS) + gl.arange(0, 8 * ROWS, y.type.layout)
    if HAS_BIAS:
        y += gl.load(b_ptr + n).to(gl.float32)
    gl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty))


def workspace_decode(tile: Tile, M: int, N: int, K: int, units: int) -> tuple[int, int]:
    """Floats of partial sums and counters that a tile needs: none, and zeros to read."""
    return 0, ZEROS


@functools.cache
def _dependent() -> bool:
    """Whether the kernel may be launched before others have ended: before CUDA 12.3 a driver cannot
    capture such a launch."""
    version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return version is None or not torch.cuda.is_available() or version() >= 12030


@functools.lru_cache(maxsize=1024)
def _constants(tile: Tile, weight_type: str) -> dict[str, Any]:
    """A tile and a type as the kernel's constants. Made once: it takes as long as a launch."""
    from tilewright.layout.blocks import BLOCK_FORMS

    form = BLOCK_FORMS[weight_type]
    signed = form.codes == "signed"
    # A few registers more than two programs of 8 warps have; one alone took 1.1 to 1.3 times as
    # long.
    crowded = form.high_bits > 0 and tile.block_n == 16 and tile.num_warps == 8
    return {
        "LOW": form.low.bits, "HIGH": form.high_bits, "SIGNED": signed,
        "OFFSET": 128 if signed else form.offset, "SCALING": form.scaling,
        "MINIMUMS": form.minimum_at is not None, "SUB": form.sub, "ROWS": tile.block_n // 8,
        "W": tile.num_warps, "num_warps": tile.num_warps,
        "FAULT": tile.as_dict().get("planted", ""), "launch_pdl": _dependent(),
        "maxnreg": 128 if crowded else None,
    }  # fmt: skip


def launch_decode(
    x: torch.Tensor,
    weight: GpuBlocks,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    workspace: Any,
) -> None:
    """Write x @ W.T + bias to y. Neither chooses, allocates nor checks a rule.

    Args:
        x: [1, K] of float16 or bfloat16, contiguous, at a multiple of 16 bytes. Copy it otherwise.
        weight: on the device of x.
        bias: [N] of any floating dtype, contiguous.
        y: [1, N] of the dtype of x, contiguous.
        tile: "decode" of `triton_space.TRITON_SPACE`.
        workspace: `counters`, zero, of what `workspace_decode` says; they stay zero.
    """
    n, k = weight.N, weight.K
    high, scales, minimums, subs = weight.high, weight.scales, weight.minimums, weight.sub_scales
    _decode_kernel[(n // tile.block_n,)](
        x, weight.low, weight.low if high is None else high, scales,
        scales if minimums is None else minimums, scales if subs is None else subs,
        scales if bias is None else bias, y, workspace.counters,
        k, weight.low.stride(0), 0 if high is None else high.stride(0), scales.stride(1),
        0 if minimums is None else minimums.stride(1), 0 if subs is None else subs.stride(1),
        HAS_BIAS=bias is not None, EVEN=k % (COLUMNS * tile.num_warps) == 0,
        **_constants(tile, weight.type_name),
    )  # fmt: skip
