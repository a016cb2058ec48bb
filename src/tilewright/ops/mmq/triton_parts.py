"""GGUF blocks to weights in Triton: codes out of words, scales out of their integers.

::

    low, high [N, W] words  --codes_of-->     code  [N, K] int32, the table looked up, less offset
    d, sub_scales           --scales_of-->    scale, minimum [N, K / SUB] float32
                            --weights_of-->   w = code * scale + minimum, rounded once

Bits lie as `tilewright.layout.blocks` draws them; constexprs are the fields of its `BlockForm`, and
BLOCK is the columns of a block of the file. Integers come first: d * sub-scale and dmin * minimum
have at most 18 significant bits and d * sub-scale * code at most 24, so in float32 all of them are
exact, whatever the type. Only the sum with the minimum rounds, and then the conversion to the dtype
of x.

Tables need no memory. MXFP4's magnitudes are eight nibbles of one constant; the levels of IQ4 are
the bytes of four, of which two bits of a code select one and the others a byte.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.w4a16.triton_parts import operand, to_float32

__all__: list[str] = []


@triton.jit
def iq4_level(code):
    """The level of a code 0 .. 15 of IQ4_NL and IQ4_XS, int32."""
    # Bytes of a word, lowest first: -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113
    low = tl.where(code < 4, -0x4052677F + tl.zeros_like(code), -0x09152231)
    high = tl.where(code < 12, 0x26190D01 + tl.zeros_like(code), 0x71594535)
    word = tl.where(code < 8, low, high)
    return (word << (24 - 8 * (code & 3))) >> 24


@triton.jit
def fp4_double(code):
    """Twice the E2M1 number of a code 0 .. 15, int32."""
    magnitudes = -0x379BCDF0 + tl.zeros_like(code)  # 0xC8643210: 0 1 2 3 4 6 8 12
    magnitude = (magnitudes >> (4 * (code & 7))) & 15
    return tl.where(code < 8, magnitude, -magnitude)


@triton.jit
def codes_of(
    low, high, LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr
):
    """The codes of words of both planes.

    Args:
        low: int32 [N, W].
        high: int32 [N, W], shifted so that the bits of this word's codes begin at bit 0; not read
            where HIGH is 0.

    Returns:
        int32 [N, W * 32 / LOW], columns in order.
    """
    COLUMNS: tl.constexpr = 32 // LOW
    j = tl.arange(0, COLUMNS)
    half = 16 * (j % 2)
    code = (low[:, :, None] >> (LOW * (j // 2) + half)[None, None, :]) & ((1 << LOW) - 1)
    if HIGH > 0:
        upper = (high[:, :, None] >> (HIGH * (j // 2) + half)[None, None, :]) & ((1 << HIGH) - 1)
        code = code | (upper << LOW)
    if CODES == "iq4":
        code = iq4_level(code)
    elif CODES == "fp4":
        code = fp4_double(code)
    elif CODES == "signed":
        code = (code ^ 128) - 128
    else:
        code = code - OFFSET
    return code.reshape(low.shape[0], low.shape[1] * COLUMNS)


@triton.jit
def six_bits(t_ptrs, at, i, stride_tb, mask, other, BYTES: tl.constexpr, COUNT: tl.constexpr):
    """Number i of the COUNT numbers of 6 bits in each block's BYTES bytes, int32.

    Args:
        t_ptrs: of the rows, [N, 1].
        at: of the blocks, [1, S].
        i: [1, S].
    """
    first = at * BYTES + i // 2
    second = at * BYTES + COUNT // 2 + i // 4
    low = tl.load(t_ptrs + first * stride_tb, mask=mask, other=other).to(tl.int32)
    high = tl.load(t_ptrs + second * stride_tb, mask=mask, other=other).to(tl.int32)
    return ((low >> (4 * (i % 2))) & 15) | (((high >> (2 * (i % 4))) & 3) << 4)


@triton.jit
def scales_of(
    s_ptrs, m_ptrs, t_ptrs, sub, subs, stride_sb, stride_mb, stride_tb,
    SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr, SUB_OFFSET: tl.constexpr,
    SUB: tl.constexpr, BLOCK: tl.constexpr, EVEN_K: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """Scale and minimum of some sub-blocks of each row, float32 [N, S]; 0 past the last one.

    Args:
        s_ptrs, m_ptrs, t_ptrs: of the rows of scales, minimums and sub-scales, [N, 1].
        sub: the sub-blocks of K, [S].
        subs: how many there are.
    """
    PARTS: tl.constexpr = BLOCK // SUB
    at = (sub // PARTS)[None, :]
    i = (sub % PARTS)[None, :]
    if FAULT == "sub-scale":  # of the neighbour
        i = i ^ 1
    mask = None if EVEN_K else (sub < subs)[None, :]
    other = None if EVEN_K else 0
    scale = tl.load(s_ptrs + at * stride_sb, mask=mask, other=other)
    if SCALING == "exponent":
        e = scale.to(tl.uint32)
        bits = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23)  # 2^-128 and 2^-127 are subnormal
        scale = bits.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        scale = scale.to(tl.float32)
    minimum = scale
    if MINIMUMS:
        minimum = tl.load(m_ptrs + at * stride_mb, mask=mask, other=other).to(tl.float32)
    if SCALING == "bytes":
        numbers = tl.load(t_ptrs + (at * BYTES + i) * stride_tb, mask=mask, other=other)
        numbers = numbers.to(tl.int32)
        scale = scale * ((numbers ^ 128) - 128).to(tl.float32)
    elif SCALING == "nibbles":
        numbers = tl.load(t_ptrs + (at * BYTES + i) * stride_tb, mask=mask, other=other)
        numbers = numbers.to(tl.int32)
        scale = scale * (numbers & 15).to(tl.float32)
        minimum = -minimum * (numbers >> 4).to(tl.float32)
    elif SCALING == "six":
        COUNT: tl.constexpr = BYTES * 4 // 3
        if MINIMUMS:
            numbers = six_bits(t_ptrs, at, 2 * i, stride_tb, mask, other, BYTES, COUNT)
            others = six_bits(t_ptrs, at, 2 * i + 1, stride_tb, mask, other, BYTES, COUNT)
            minimum = -minimum * others.to(tl.float32)
        else:
            numbers = six_bits(t_ptrs, at, i, stride_tb, mask, other, BYTES, COUNT)
        scale = scale * (numbers - SUB_OFFSET).to(tl.float32)
    return scale, minimum


@triton.jit
def weights_of(
    code, scale, minimum, dtype: tl.constexpr, MINIMUMS: tl.constexpr, SUB: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Codes [N, K] and what belongs to their sub-blocks [N, K / SUB] as weights of `dtype`."""
    N: tl.constexpr = code.shape[0]
    K: tl.constexpr = code.shape[1]
    w = code.to(tl.float32).reshape(N, K // SUB, SUB) * scale[:, :, None]
    if MINIMUMS:
        w = w + minimum[:, :, None]
    return operand(w.reshape(N, K), dtype, INTERPRET)


@triton.jit
def bias_of(b_ptrs, INTERPRET: tl.constexpr):
    """A bias of any dtype as float32."""
    return to_float32(tl.load(b_ptrs), INTERPRET)
