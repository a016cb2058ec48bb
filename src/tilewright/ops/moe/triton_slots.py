"""Few slots times their experts on matrix units, in Triton: no sorting, one launch.

::

    y[s, n] = sum_k x[s // DIV, k] * W[ids[s]][n, k]                   for every slot s
    y[s, n] = act(gate) * up,  gate = .. W[e][n, k], up = .. W[e][N + n, k]     if FUSED

A program takes one slot and BLOCK_N rows of its expert, which the id itself names, and asks for all
it needs at once: its warps stand along K, each with a group of NS sub-blocks a step (8, or 16 where
a unit has as many), as units of 64 to 256 columns (`tilewright.ops.mmq.gemv_parts` draws them). A
program's bytes are on their way before it waits for any.

There is one row of x, and a matrix unit multiplies by eight columns. So column n of the right
operand is x where it meets sub-block n of the group, and 0 elsewhere: the product is a sum of its
own for each sub-block ::

    part[r, n] = sum of code[r, k] * x[k] over the columns k of sub-block n            exact codes
    y[r]       = sum over n of scale[r, n] * part[r, n] + minimum[r, n] * sum of x[k]    float32

and weights are never rounded: codes less their offset are exact in 16 bits. Scales are read as they
lie, rows next to each other, and meet the sums in shared memory. A program reads x twice: in long
vectors for its sums, which brings it into the L1, and a lane at a time for the matrix units.
Columns past K are 0 in x. A slot whose id names no expert gets NaN.
"""

# mypy: disable-error-code="no-untyped-def, assignment, unreachable, var-annotated"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there. Its tuples
# grow, also those that begin empty.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.layout.blocks import BlockForm, GpuBlocks
from tilewright.layout.experts import GpuExperts
from tilewright.ops.cross import target_arch
from tilewright.ops.mmq.gemv_parts import (
    by_word,
    in_places,
    joined,
    left_operand,
    places,
    right_operand,
)
from tilewright.ops.mmq.gemv_weights import (
    exact_pair,
    in_halves,
    levels,
    packed_bit,
    packed_pair,
    weights_plain,
)
from tilewright.ops.mmq.triton_outputs import store
from tilewright.ops.mmq.triton_parts import scales_of
from tilewright.ops.moe.triton_parts import (
    activated,
    check_interpreted,
    operands,
    rows_of,
    six_scales,
)
from tilewright.ops.w4a16.triton_gemm import asm_of, spans_wide
from tilewright.ops.w4a16.triton_parts import to_float32
from tilewright.tiles.tile import Tile

__all__ = ["INTERPRETED", "group_columns", "launch_moe_slots"]

_FLIPPED: bool = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7)


@triton.jit
def codes_packed(
    low, high, dtype: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """Codes less their offset, or a table's levels, [R, W, 8, 4, 4, P, 2] of `dtype`: as
    `gemv_weights.weights_packed` makes weights, without a scale. All of it is exact."""
    P: tl.constexpr = 16 // LOW
    even = low
    odd = low
    if CODES == "iq4" or CODES == "fp4":
        even, odd = levels(low, CODES)
    pairs = ()
    for p in tl.static_range(P):
        at = packed_bit(p, LOW, CODES, dtype)
        pair = packed_pair(low, high, even, odd, p, at, LOW, HIGH, CODES, dtype)
        pairs = pairs + (exact_pair(pair, at, CODES, OFFSET, dtype),)
    return in_halves(pairs, P, dtype)


@triton.jit
def masked_x(
    x_ptr, first, at, K, stride_xk, SUB: tl.constexpr, NS: tl.constexpr, C: tl.constexpr,
    EVEN: tl.constexpr, INTERPRET: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """x of a unit for each of NS sub-blocks, [NS / 8, W, 8, 4, C]: 0 where a column belongs to
    another, and past K.

    Args:
        first: the group's column that each lane begins with, [1, 1, 1, 4] as `places` has it.
        at: that of x, [1, W, 1, 4] likewise.
    """
    W: tl.constexpr = at.shape[2] if FLIPPED else at.shape[1]
    r, _, g, _ = places(NS // 8, W, FLIPPED)
    n = (r * 8 + g)[:, :, :, :, None]
    i = tl.arange(0, 8)[None, None, None, None, :]
    column = at[:, :, :, :, None]
    local = first[:, :, :, :, None]
    parts = ()
    for c in tl.static_range(C // 8):  # 8 columns at a time, in the order in which they lie
        mask = (local + (c * 8 + i)) // SUB == n
        if not EVEN:
            mask = mask & (column + (c * 8 + i) < K)
        x = tl.load(x_ptr + (column + (c * 8 + i) + n * 0) * stride_xk, mask=mask, other=0.0)
        if INTERPRET and x.dtype == tl.bfloat16:
            x = to_float32(x, INTERPRET)
        parts = parts + (in_places(x, FLIPPED),)
    x = joined(parts, C // 8).reshape(NS // 8, W, 8, 4, 8, C // 8)
    return x.permute(0, 1, 2, 3, 5, 4).reshape(NS // 8, W, 8, 4, C)


@triton.jit
def _unit_words(
    low_ptrs, high_ptrs, unit, units, K, stride_hk,
    LOW: tl.constexpr, HIGH: tl.constexpr, EVEN: tl.constexpr, FLIPPED: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """The words of one unit of each warp, of both planes, [R, W, 8, 4, ..]: units past the last,
    and lanes past K, take the last that is there. stride_hk is 1, and the compiler is not told:
    lanes would load their neighbours' words with their own."""
    C: tl.constexpr = 128 // LOW
    PER: tl.constexpr = LOW // HIGH if HIGH > 0 else 1  # words of low that a word of high serves
    _, _, _, t = places(1, W, FLIPPED)
    lane = t
    if not EVEN:
        unit = tl.minimum(unit, units - 1)
        lane = tl.minimum(t, (K - unit * (4 * C)) // C - 1)
    low = tl.load(low_ptrs + (unit * 16 + lane * 4)[:, :, :, :, None])
    high = low
    if HIGH > 0:
        word = unit * (16 // PER) + lane * (4 // PER)
        if PER == 4:
            high = tl.load(high_ptrs + word * stride_hk)[:, :, :, :, None]
        else:
            two = tl.arange(0, 2)[None, None, None, None, :]
            high = tl.load(high_ptrs[:, :, :, :, None] + word[:, :, :, :, None] + two)
    return in_places(low, FLIPPED), in_places(high, FLIPPED)


@triton.jit(do_not_specialize=["experts", "stride_hk", "stride_ym"])
def _moe_slots_kernel(
    x_ptr, low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, y_ptr, ids_ptr, N, K, experts,
    stride_xm, stride_xk, stride_le, stride_ln, stride_he, stride_hn, stride_hk, stride_se,
    stride_sn, stride_sb, stride_me, stride_mn, stride_mb, stride_te, stride_tn, stride_tb,
    stride_ym, stride_yn,
    DIV: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr,
    OFFSET: tl.constexpr, SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr,
    SUB_OFFSET: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, FUSED: tl.constexpr,
    ACT: tl.constexpr, BLOCK_N: tl.constexpr, W: tl.constexpr, NS: tl.constexpr,
    EVEN: tl.constexpr, EVEN_N: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr,
    ASM: tl.constexpr, FLIPPED: tl.constexpr, INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of one slot."""
    H: tl.constexpr = BLOCK_N // 2 if FUSED else BLOCK_N  # columns of y
    R: tl.constexpr = BLOCK_N // 8
    P: tl.constexpr = 16 // LOW
    C: tl.constexpr = 8 * P  # columns of a lane
    UNITS: tl.constexpr = NS * SUB // (4 * C)  # of a group
    PER: tl.constexpr = LOW // HIGH if HIGH > 0 else 1
    KEPT: tl.constexpr = 4
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    pid_n = tl.program_id(0)
    slot = tl.program_id(1)
    expert = tl.load(ids_ptr + slot)
    if FAULT == "slots-first-choice":  # the other choices of a token go to its first
        expert = tl.load(ids_ptr + slot // DIV * DIV)
    offs_n = pid_n * H + tl.arange(0, H)
    mask_y = offs_n < N
    y_ptrs = y_ptr + slot.to(tl.int64) * stride_ym + offs_n * stride_yn
    if (expert < 0) | (expert >= experts):
        store(y_ptrs, tl.full((H,), float("nan"), tl.float32), mask_y, INTERPRET)
        return

    e = expert.to(tl.int64)
    r, warp, g, t = places(R, W, FLIPPED)
    place = r * 8 + g  # of a row in the tile
    if FUSED:
        n = pid_n * H + place % H
        if not EVEN_N:
            n = tl.minimum(n, N - 1)
        row = (place // H) * N + n
    else:
        row = pid_n * BLOCK_N + place
        if not EVEN_N:
            row = tl.minimum(row, N - 1)
    row_n = rows_of(pid_n, N, BLOCK_N, FUSED, EVEN_N)
    if WIDE:  # x spans 2^31 elements
        stride_xk = tl.cast(stride_xk, tl.int64)
    low_ptrs = (low_ptr + e * stride_le + row * stride_ln)[:, :, :, :, None]
    low_ptrs += tl.arange(0, 4)[None, None, None, None, :]
    high_ptrs = high_ptr + e * stride_he + row * stride_hn
    s_ptrs = s_ptr + e * stride_se + row_n[:, None] * stride_sn
    m_ptrs = m_ptr + e * stride_me + row_n[:, None] * stride_mn
    t_ptrs = t_ptr + e * stride_te + row_n[:, None] * stride_tn
    x_ptr += (slot // DIV).to(tl.int64) * stride_xm

    d = tl.arange(0, 4)[None, None, None, None, :]
    units = tl.cdiv(K, 4 * C)
    if FAULT == "slots-k-tail":
        units = K // (4 * C)
    acc = tl.zeros((BLOCK_N, W * NS), tl.float32)
    for step in range(0, tl.cdiv(units, W * UNITS)):
        words = ()
        for u in tl.static_range(UNITS):
            words = words + _unit_words(
                low_ptrs, high_ptrs, (step * W + warp) * UNITS + u, units, K, stride_hk, LOW, HIGH,
                EVEN, FLIPPED, W,
            )  # fmt: skip
        sub = step * (W * NS) + tl.arange(0, W * NS)
        sums = tl.zeros((1, W * NS), tl.float32)
        if MINIMUMS and FAULT != "slots-no-minimum":
            column = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
            mask = None if EVEN else column < K
            other = None if EVEN else 0.0
            x_sub = tl.load(x_ptr + column * stride_xk, mask=mask, other=other)
            sums = tl.sum(to_float32(x_sub, INTERPRET), 1)[None, :]
        if SCALING == "six" and MINIMUMS:
            scale, minimum = six_scales(
                s_ptrs, m_ptrs, t_ptrs, sub, K // SUB, stride_sb, stride_mb, stride_tb, BYTES,
                BLOCK // SUB,
            )  # fmt: skip
        else:
            scale, minimum = scales_of(
                s_ptrs, m_ptrs, t_ptrs, sub, K // SUB, stride_sb, stride_mb, stride_tb, SCALING,
                MINIMUMS, BYTES, SUB_OFFSET, SUB, BLOCK, EVEN, "",
            )  # fmt: skip
        part = tl.zeros((W, BLOCK_N, NS), tl.float32)
        # Always so: or the assembler moves loads behind products, which wait for them one by one.
        if N > 0:
            for u in tl.static_range(UNITS):
                low = words[2 * u]
                high = low
                if HIGH > 0:
                    high = by_word(words[2 * u + 1], 4 // PER) >> (HIGH * P * (d % PER))
                if PACKED:
                    w = codes_packed(low, high, dtype, LOW, HIGH, CODES, OFFSET)
                else:
                    one = tl.full((R, W, 8, 4, 4), 1.0, tl.float32)
                    w = weights_plain(
                        low, high, one, one, dtype, LOW, HIGH, CODES, OFFSET, False, ASM, INTERPRET
                    )
                first = u * (4 * C) + t * C
                x = masked_x(
                    x_ptr, first, (step * W + warp) * (NS * SUB) + first, K, stride_xk, SUB, NS, C,
                    EVEN, INTERPRET, FLIPPED,
                )  # fmt: skip
                part = tl.dot(left_operand(w, KEPT), right_operand(x, KEPT), part)
        acc += part.permute(1, 0, 2).reshape(BLOCK_N, W * NS) * scale
        if MINIMUMS and FAULT != "slots-no-minimum":
            acc += minimum * sums

    y = tl.sum(acc, 1)
    if FUSED:
        gate, up = tl.split(y.reshape(2, H).permute(1, 0))
        y = activated(gate, up, ACT)
    store(y_ptrs, y, mask_y, INTERPRET)


INTERPRETED: bool = not isinstance(_moe_slots_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


def _sub_blocks(form: BlockForm) -> int:
    """Sub-blocks of a group."""
    return max(8, 512 // form.low.bits // form.sub)


def group_columns(form: BlockForm) -> int:
    """Columns that a warp takes in a step."""
    return _sub_blocks(form) * form.sub


def launch_moe_slots(
    x: torch.Tensor,
    experts: GpuExperts,
    ids: torch.Tensor,
    y: torch.Tensor,
    tile: Tile,
    *,
    share: int,
    act: str = "",
) -> None:
    """Write the product of every slot. Neither chooses, allocates nor checks a rule.

    Args:
        x: [slots / share, K] float16 or bfloat16, any strides.
        experts: GGUF blocks [E, N, K], on the device of x; fused, [E, 2 N, K]: gate's rows before
            up's.
        ids: int32 or int64 [slots], contiguous; at most 65535 of them.
        y: [slots, N] of any floating dtype and strides.
        tile: algorithm "slots" of `gpu_space.MOE_SPACE`.
        share: consecutive slots that read one row of x.
        act: "" for a plain product; fused, a value of `triton_parts.ACTIVATIONS`.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    check_interpreted(x, INTERPRETED)
    planes = experts.planes
    assert isinstance(planes, GpuBlocks)
    form = planes.form
    n, k, fused = y.shape[1], x.shape[1], bool(act)
    columns = tile.block_n // 2 if fused else tile.block_n
    tensors, strides, constants = operands(experts, 256)
    del constants["HAS_PERM"]
    asm = asm_of(target_arch(x.device), torch.float16)
    packed = asm_of(target_arch(x.device), x.dtype) == "nv" and (
        x.dtype == torch.float16 or form.codes in ("offset", "fp4")
    )
    _moe_slots_kernel[(triton.cdiv(n, columns), ids.numel())](
        x, *tensors[:5], y, ids, n, k, experts.E, *x.stride(), *strides[:4], 1, *strides[4:-2],
        *y.stride(),
        DIV=share, **constants, FUSED=fused, ACT=act, BLOCK_N=tile.block_n, W=tile.num_warps,
        NS=_sub_blocks(form), EVEN=k % (group_columns(form) * tile.num_warps) == 0,
        EVEN_N=n % columns == 0, WIDE=spans_wide(x), PACKED=packed, ASM=asm, FLIPPED=_FLIPPED,
        INTERPRET=INTERPRETED, FAULT=tile.as_dict().get("planted", ""), num_warps=tile.num_warps,
        num_stages=1,
    )  # fmt: skip
