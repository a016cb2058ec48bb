"""Scales and minimums of GGUF sub-blocks in Gluon, from the tensors of `tilewright.layout.blocks`.

A thread has rows of the weight to itself, so every field is a vector of rows, and numbers of a
block are picked at compile time. Of 128 columns, half a K-quant's block, `load_fields` reads what
there is, one byte or float16 a row at a time, and `numbers_of` makes of them what a sub-block's
weights are computed with::

    "half"      d[, m]                       scale = d              minimum = m
    "exponent"  e                            scale = 2^(e - 128)
    "bytes"     d, 8 signed bytes            scale = d * byte
    "nibbles"   d, dmin, 8 bytes             scale = d * low        minimum = -dmin * high
    "six"       d[, dmin], 4 or 2 bytes of   scale = d * (number - SUB_OFFSET)
                low bits, 2 or 1 of high     minimum = -dmin * number

Products of float16 and an integer of 8 bits are exact in float32.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.layout.blocks import BlockForm

__all__ = ["NUMBERS", "load_fields", "math_of", "most_of", "numbers_of"]


@gluon.jit
def load_fields(
    s_ptrs, m_ptrs, t_ptrs, k, subs, stride_sb, stride_mb, stride_tb, SCALING: gl.constexpr,
    MINIMUMS: gl.constexpr, BYTES: gl.constexpr, SUB: gl.constexpr,
):  # fmt: skip
    """What the scales of columns 128 k to 128 k + 127 are made of: tuples of scales, minimums and
    bytes.

    Args:
        s_ptrs, m_ptrs, t_ptrs: of the rows' first scale, minimum and byte.
        subs: sub-blocks a row has; past them scales and minimums are zero.
    """
    scales = ()
    minimums = ()
    numbers = ()
    if SCALING == "half" or SCALING == "exponent":
        for j in gl.static_range(4):
            at = 4 * k + j
            scales = scales + (gl.load(s_ptrs + at * stride_sb, mask=at < subs, other=0),)
            if MINIMUMS:
                minimums = minimums + (gl.load(m_ptrs + at * stride_mb, mask=at < subs, other=0),)
    else:
        at = k // 2
        half = k % 2
        scales = scales + (gl.load(s_ptrs + at * stride_sb),)
        if MINIMUMS:
            minimums = minimums + (gl.load(m_ptrs + at * stride_mb),)
        first = t_ptrs + at * BYTES * stride_tb
        if SCALING == "six":
            COUNT: gl.constexpr = BYTES * 4 // 3  # numbers of a block
            for j in gl.static_range(COUNT // 4):
                numbers = numbers + (gl.load(first + (half * (COUNT // 4) + j) * stride_tb),)
            for j in gl.static_range(COUNT // 8):
                at_high = COUNT // 2 + half * (COUNT // 8) + j
                numbers = numbers + (gl.load(first + at_high * stride_tb),)
        else:
            for j in gl.static_range(8):
                numbers = numbers + (gl.load(first + (half * 8 + j) * stride_tb),)
    return scales, minimums, numbers


@gluon.jit
def _six(numbers, J: gl.constexpr):
    """Number J of this half of a block."""
    LOWS: gl.constexpr = len(numbers) * 2 // 3
    low = numbers[J // 2].to(gl.int32) >> (4 * (J % 2))
    high = numbers[LOWS + J // 4].to(gl.int32) >> (2 * (J % 4))
    return (low & 15) | ((high & 3) << 4)


@gluon.jit
def _number_of(numbers, J: gl.constexpr, SCALING: gl.constexpr, MINIMUMS: gl.constexpr,
               SUB_OFFSET: gl.constexpr):  # fmt: skip
    """The integers that d and dmin of sub-block J are multiplied with."""
    if SCALING == "bytes":
        number = (numbers[J].to(gl.int32) ^ 128) - 128
        return number, number
    elif SCALING == "nibbles":
        number = numbers[J].to(gl.int32)
        return number & 15, number >> 4
    elif MINIMUMS:
        return _six(numbers, 2 * J), _six(numbers, 2 * J + 1)
    else:
        number = _six(numbers, J) - SUB_OFFSET
        return number, number


@gluon.jit
def _bits(v):
    """float32 as int32."""
    return v.to(gl.int32, bitcast=True)


@gluon.jit
def _half(v):
    """float32 rounded to float16, twice in an int32."""
    bits = v.to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def numbers_of(
    fields, J: gl.constexpr, SCALING: gl.constexpr, MINIMUMS: gl.constexpr,
    SUB_OFFSET: gl.constexpr, MATH: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """What the weights of sub-block J of the 128 columns are made with: int32 vectors, one for each
    of the numbers that `hopper_parts` lists for MATH.

    Args:
        MOST: what sub-scale times code can be at most.
    """
    scales, minimums, numbers = fields
    if SCALING == "exponent":
        e = scales[J].to(gl.int32)
        bits = gl.where(e < 2, 0x00200000 << gl.minimum(e, 1), (e - 1) << 23)  # subnormals
        return (bits,)
    elif SCALING == "half":
        scale = scales[J].to(gl.float32)
        if MATH == "once":
            return (_half(scale),)
        elif MATH == "sum":
            return _half(scale), _half(minimums[J].to(gl.float32))
        elif MATH == "float sum":
            return _bits(scale), _bits(minimums[J].to(gl.float32))
        else:
            return (_bits(scale),)
    else:
        d = scales[0].to(gl.float32)
        number, other = _number_of(numbers, J, SCALING, MINIMUMS, SUB_OFFSET)
        scale = d * number.to(gl.float32)
        if MATH == "split":
            rest = scale - scale.to(gl.float16).to(gl.float32)
            return _half(scale), _half(rest)
        elif MATH == "float":
            return (_bits(scale),)
        else:
            minimum = -minimums[0].to(gl.float32) * other.to(gl.float32)
            if MATH == "float sum":
                return _bits(scale), _bits(minimum)
            else:
                t = gl.where(d == 0, 0.0, minimum * (1.0 / d))
                t = gl.minimum(gl.maximum(t, -2048.0), 2048.0 - MOST)
                t = (t + 12582912.0) - 12582912.0  # to the nearest integer
                return _half(number.to(gl.float32)), _half(t), _half(d), _half(minimum - t * d)


def math_of(form: BlockForm, act_dtype: torch.dtype) -> str:
    """How weights of a type are computed from their codes, as `hopper_parts` lists it.

    Powers of two may lie outside of float16 and bfloat16 has too few bits: float32 then.
    """
    half = act_dtype == torch.float16
    if half and form.scaling == "half":
        return "once" if form.minimum_at is None else "sum"
    if half and form.scaling != "exponent":
        return "split" if form.minimum_at is None else "integers"
    return "float" if form.minimum_at is None else "float sum"


NUMBERS = {"once": 1, "sum": 2, "split": 2, "integers": 4, "float": 1, "float sum": 2}
"""By what `math_of` says: how many numbers a sub-block has."""


def most_of(form: BlockForm) -> int:
    """What sub-scale times code can be at most, where both are not negative."""
    code = (1 << (form.low.bits + form.high_bits)) - 1
    return code * (63 if form.scaling == "six" else 15)
