"""What the decoding kernel of mmq is made of: how the tensors of a unit lie, its scales and its x.

A unit is 16 words of a row, 4 words a lane: 256, 128 or 64 columns of codes of 2, 4 or 8 bits. Lane
t of four holds the columns t * C .. t * C + C - 1, C = 128 / bits. Tensors of a unit are

    words    [R, W, 8, 4, 4]    row 8 r + g, warp w, lane t, word d of the lane
    scales   [R, W, 8, 4]       or [R, W, 8, 4, S], one for every 4 / S words

As operands the columns ``c = 2 KEPT q + 4 i + 2 j + h`` of lane t stand in the order (q, j, t, i,
h): each lane then has loaded just what a matrix unit of NVIDIA's wants from it, four columns in
neighbouring registers, and nothing moves between lanes. The sum is the same in any order. KEPT is
what the compiler keeps together in a lane: it looks at the narrowest number that weights are made
of.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there. Its tuples
# grow.

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.w4a16.triton_parts import to_float32

__all__: list[str] = []


@triton.jit
def places(R: tl.constexpr, W: tl.constexpr, FLIPPED: tl.constexpr):
    """Indices r, w, g, t of tensors [R, W, 8, 4]; FLIPPED, of [4, 8, W, R].

    Dimensions without neighbours in memory are given to lanes, warps and registers in the order in
    which the compiler takes them: the last first from Triton 3.7 on, the first first in 3.6.
    """
    if FLIPPED:
        r = tl.arange(0, R)[None, None, None, :]
        w = tl.arange(0, W)[None, None, :, None]
        g = tl.arange(0, 8)[None, :, None, None]
        t = tl.arange(0, 4)[:, None, None, None]
    else:
        r = tl.arange(0, R)[:, None, None, None]
        w = tl.arange(0, W)[None, :, None, None]
        g = tl.arange(0, 8)[None, None, :, None]
        t = tl.arange(0, 4)[None, None, None, :]
    return r, w, g, t


@triton.jit
def in_places(v, FLIPPED: tl.constexpr):
    """A loaded tensor [R, W, 8, 4, ...], the right way round if it was FLIPPED."""
    if FLIPPED:
        if len(v.shape) == 5:
            v = v.permute(3, 2, 1, 0, 4)
        else:
            v = v.permute(3, 2, 1, 0)
    return v


@triton.jit
def joined(parts, COUNT: tl.constexpr):
    """COUNT tensors [...], 1 to 8 of them, as one [..., COUNT]; registers are only renamed."""
    if COUNT == 1:
        made = parts[0][:, :, :, :, None]
    elif COUNT == 2:
        made = tl.join(parts[0], parts[1])
    elif COUNT == 4:
        made = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        made = tl.join(even, odd)
    return made


@triton.jit
def by_word(scale, COUNT: tl.constexpr):
    """Scales [R, W, 8, 4, COUNT] as one for each word, [R, W, 8, 4, 4]."""
    R: tl.constexpr = scale.shape[0]
    W: tl.constexpr = scale.shape[1]
    made = tl.broadcast_to(scale[:, :, :, :, :, None], (R, W, 8, 4, COUNT, 4 // COUNT))
    return made.reshape(R, W, 8, 4, 4)


@triton.jit
def load_scales(
    s_ptrs, m_ptrs, t_ptrs, sub, stride_sb, stride_mb, stride_tb,
    SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr, COUNT: tl.constexpr,
    LOG_PARTS: tl.constexpr,
):  # fmt: skip
    """What the scales of a lane's columns are made of, as it lies in memory: four tensors.

    Args:
        s_ptrs, m_ptrs, t_ptrs: of the rows, [R, 1, 8, 1], in the dimensions of `places`.
        sub: the first sub-block of a lane, [1, W, 1, 4], likewise.
        COUNT: how many sub-blocks a lane has.
        LOG_PARTS: of how many a block has, 2^LOG_PARTS.
    """
    if SCALING == "half" or SCALING == "exponent":
        b0 = tl.load(s_ptrs + sub * stride_sb)
        b1 = b0
        if MINIMUMS:
            b1 = tl.load(m_ptrs + sub * stride_mb)
        return b0, b1, b0, b0
    else:
        at = t_ptrs + (sub >> LOG_PARTS) * (BYTES * stride_tb)
        i = sub & ((1 << LOG_PARTS) - 1)
        if SCALING == "six":
            PER: tl.constexpr = 2 if MINIMUMS else 1  # numbers a sub-block
            NUMBERS: tl.constexpr = BYTES * 4 // 3
            b0 = tl.load(at + (i * PER >> 1) * stride_tb)
            b1 = tl.load(at + (NUMBERS // 2 + (i * PER >> 2)) * stride_tb)
            b2 = b0
            if COUNT == 4:
                b2 = tl.load(at + ((i >> 1) + 1) * stride_tb)
            return b0, b1, b2, b0
        else:
            b0 = tl.load(at + i * stride_tb)
            b1 = tl.load(at + (i + 1) * stride_tb)
            b2 = b0
            b3 = b0
            if COUNT == 4:
                b2 = tl.load(at + (i + 2) * stride_tb)
                b3 = tl.load(at + (i + 3) * stride_tb)
            return b0, b1, b2, b3


@triton.jit
def numbers_of(
    b0, b1, b2, b3, sub, SCALING: tl.constexpr, MINIMUMS: tl.constexpr, SUB_OFFSET: tl.constexpr,
    COUNT: tl.constexpr, PACKED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Scales and minimums of `load_scales`, [R, W, 8, 4, COUNT].

    Returns:
        The integers, int32, where there are sub-scales, minimums positive; else float16 or, of
        exponents, float32, minimums as they are added; PACKED, `two_powers` of `dtype`.
    """
    if SCALING == "exponent" and PACKED:
        a, b = two_powers(b0, dtype)
        return a[:, :, :, :, None], b[:, :, :, :, None]
    elif SCALING == "exponent":
        e = b0.to(tl.uint32)
        bits = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23)  # 2^-128 and 2^-127 are subnormal
        scale = bits.to(tl.uint32).to(tl.float32, bitcast=True)[:, :, :, :, None]
        return scale, scale
    elif SCALING == "half":
        return b0[:, :, :, :, None], b1[:, :, :, :, None]
    else:
        n0 = b0.to(tl.int32)
        n1 = b1.to(tl.int32)
        n2 = b2.to(tl.int32)
        n3 = b3.to(tl.int32)
        if SCALING == "bytes":
            numbers = tl.join((n0 ^ 128) - 128, (n1 ^ 128) - 128)
            return numbers, numbers
        elif SCALING == "nibbles":
            all4 = joined((n0, n1, n2, n3), 4).reshape(b0.shape[0], b0.shape[1], 8, 4, 4)
            return all4 & 15, all4 >> 4
        elif MINIMUMS:  # number 2 i and its neighbour
            high = n1 >> (4 * (sub & 1))
            scale = (n0 & 15) | ((high & 3) << 4)
            minimum = (n0 >> 4) | ((high & 12) << 2)
            return scale[:, :, :, :, None], minimum[:, :, :, :, None]
        elif COUNT == 1:
            scale = ((n0 >> (4 * (sub & 1))) & 15) | (((n1 >> (2 * (sub & 3))) & 3) << 4)
            scale = scale[:, :, :, :, None] - SUB_OFFSET
            return scale, scale
        else:  # four, of which the first is a multiple of four
            s0 = (n0 & 15) | ((n1 & 3) << 4)
            s1 = (n0 >> 4) | ((n1 & 12) << 2)
            s2 = (n2 & 15) | (n1 & 48)
            s3 = (n2 >> 4) | ((n1 >> 2) & 48)
            scale = joined((s0, s1, s2, s3), 4).reshape(b0.shape[0], b0.shape[1], 8, 4, 4)
            scale = scale - SUB_OFFSET
            return scale, scale


@triton.jit
def two_powers(e, dtype: tl.constexpr):
    """2^(e - 128) as a product of two numbers of `dtype` that can hold all of them but those at
    which every weight is infinite or zero."""
    k = tl.minimum(e.to(tl.int32), 158) - 128 if dtype == tl.float16 else e.to(tl.int32) - 128
    k = tl.maximum(k, -48) if dtype == tl.float16 else k
    first = (k + 1) >> 1
    a = ((first + 127) << 23).to(tl.float32, bitcast=True).to(dtype)
    b = ((k - first + 127) << 23).to(tl.float32, bitcast=True).to(dtype)
    return a, b


@triton.jit
def left_operand(w, KEPT: tl.constexpr):
    """Weights [R, W, 8, 4, 4, P, 2] as [W, 8 R, K], in the order of the module."""
    R: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[1]
    C: tl.constexpr = 8 * w.shape[5]
    w = w.reshape(R, W, 8, 4, C // (2 * KEPT), KEPT // 2, 2, 2)
    return w.permute(1, 0, 2, 4, 6, 3, 5, 7).reshape(W, 8 * R, 4 * C)


@triton.jit
def constant_operand(v, P: tl.constexpr, KEPT: tl.constexpr):
    """A number of each word, [R, W, 8, 4, 4], for all of the word's columns: [W, 8 R, K].

    Joined, as weights are: the compiler takes the number of columns that a lane keeps from that.
    """
    R: tl.constexpr = v.shape[0]
    W: tl.constexpr = v.shape[1]
    two = tl.join(v, v)[:, :, :, :, :, None, :]
    return left_operand(tl.broadcast_to(two, (R, W, 8, 4, 4, P, 2)), KEPT)


@triton.jit
def load_x(
    x_ptrs, at, K, stride_xk, mask_m, P: tl.constexpr, WHOLE: tl.constexpr,
    INTERPRET: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """x of a unit, [ROWS, W, 8, 4, C]; 0 past K and M.

    Args:
        x_ptrs: of the rows, [ROWS, 1, 8, 1, 1], in the dimensions of `places`.
        at: the first column of each lane, [1, W, 1, 4, 1], likewise.
        mask_m: which rows there are, as x_ptrs.
    """
    i = tl.arange(0, 8)[None, None, None, None, :]
    mask = mask_m
    if not WHOLE:
        mask = mask_m & (at < K)
    parts = ()
    for c in tl.static_range(P):  # 8 columns at a time, in the order in which they lie
        x = tl.load(x_ptrs + (at + (c * 8 + i)) * stride_xk, mask=mask, other=0.0)
        if INTERPRET and x.dtype == tl.bfloat16:
            x = to_float32(x, INTERPRET)
        parts = parts + (in_places(x, FLIPPED),)
    ROWS: tl.constexpr = parts[0].shape[0]
    W: tl.constexpr = parts[0].shape[1]
    x = joined(parts, P).reshape(ROWS, W, 8, 4, 8, P)
    return x.permute(0, 1, 2, 3, 5, 4).reshape(ROWS, W, 8, 4, 8 * P)


@triton.jit
def right_operand(x, KEPT: tl.constexpr):
    """x [ROWS, W, 8, 4, C] as [W, K, 8 ROWS], in the order of the module."""
    ROWS: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[4]
    x = x.reshape(ROWS, W, 8, 4, C // (2 * KEPT), KEPT // 2, 2, 2)
    return x.permute(1, 4, 6, 3, 5, 7, 0, 2).reshape(W, 4 * C, 8 * ROWS)
