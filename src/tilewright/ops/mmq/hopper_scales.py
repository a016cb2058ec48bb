"""Scales and minimums of GGUF sub-blocks in Gluon, from the tensors of `tilewright.layout.blocks`.

A thread has rows of the weight to itself, so every field is a vector of rows, and numbers of a
block are picked at compile time. Of 256 columns, a K-quant's block, `load_fields` reads what there
is, one byte or float16 a row at a time, and `numbers_of` makes of them what a sub-block's weights
are computed with::

    "half"      d[, m]                       scale = d              minimum = m
    "exponent"  e                            scale = 2^(e - 128)
    "bytes"     d, 16 signed bytes           scale = d * byte
    "nibbles"   d, dmin, 16 bytes            scale = d * low        minimum = -dmin * high
    "six"       d[, dmin], 12 or 6 bytes     scale = d * (number - SUB_OFFSET)
                                             minimum = -dmin * number

Products of float16 and an integer of 8 bits are exact in float32.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.layout.blocks import BlockForm
from tilewright.ops.mmq.hopper_memory import fetch

__all__ = ["NUMBERS", "load_fields", "math_of", "most_of", "numbers_of", "prefetch_fields"]


@gluon.jit
def prefetch_fields(
    s_ptr, m_ptr, t_ptr, n, N, k, subs, stride_sb, stride_mb, stride_tb, SCALING: gl.constexpr,
    MINIMUMS: gl.constexpr, BYTES: gl.constexpr, SUB: gl.constexpr, BN: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Bring what `load_fields` will read of the BN rows from n on, of N, into the L2: a line a
    lane."""
    i = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    LINES: gl.constexpr = max(1, BN // 64)  # of 128 bytes, of float16 of BN rows
    if SCALING == "half" or SCALING == "exponent":
        at = gl.minimum(8 * k + i // LINES % 8, subs - 1)
    else:
        at = gl.minimum(i * 0 + k, subs * SUB // 256 - 1)
        fetch(t_ptr + (at * BYTES + i % BYTES) * stride_tb + n)
    at_row = gl.minimum(n + i % LINES * 64, N - 1)  # an address of nobody might fault
    fetch(s_ptr + at * stride_sb + at_row)
    if MINIMUMS:
        fetch(m_ptr + at * stride_mb + at_row)


@gluon.jit
def load_fields(
    s_ptrs, m_ptrs, t_ptrs, k, subs, stride_sb, stride_mb, stride_tb, SCALING: gl.constexpr,
    MINIMUMS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """What the scales of columns 256 k to 256 k + 255 are made of: tuples of scales, minimums and
    bytes.

    Args:
        s_ptrs, m_ptrs, t_ptrs: of the rows' first scale, minimum and byte.
        subs: sub-blocks a row has; past them scales and minimums are zero.
    """
    scales = ()
    minimums = ()
    numbers = ()
    if SCALING == "half" or SCALING == "exponent":
        for j in gl.static_range(8):
            at = 8 * k + j
            scales = scales + (gl.load(s_ptrs + at * stride_sb, mask=at < subs, other=0),)
            if MINIMUMS:
                minimums = minimums + (gl.load(m_ptrs + at * stride_mb, mask=at < subs, other=0),)
    else:
        scales = scales + (gl.load(s_ptrs + k * stride_sb),)
        if MINIMUMS:
            minimums = minimums + (gl.load(m_ptrs + k * stride_mb),)
        for j in gl.static_range(BYTES):
            numbers = numbers + (gl.load(t_ptrs + (k * BYTES + j) * stride_tb),)
    return scales, minimums, numbers


@gluon.jit
def _six(numbers, J: gl.constexpr):
    """Number J of a block."""
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
    """float32 rounded to float16, in the lower half of an int32."""
    return v.to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF


@gluon.jit
def _halves(a, b):
    """Both float32 rounded to float16, the first in the lower half of an int32."""
    return _half(a) | (_half(b) << 16)


@gluon.jit
def numbers_of(
    fields, J: gl.constexpr, SCALING: gl.constexpr, MINIMUMS: gl.constexpr,
    SUB_OFFSET: gl.constexpr, MATH: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """What the weights of sub-block J of the 256 columns are made with: int32 vectors, one for each
    of the words that `hopper_math` lists for MATH.

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
            return (_halves(scale, minimums[J].to(gl.float32)),)
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
            return (_halves(scale, rest),)
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
                return _halves(number.to(gl.float32), t), _halves(d, minimum - t * d)


def math_of(form: BlockForm, act_dtype: torch.dtype) -> str:
    """How weights of a type are computed from their codes, as `hopper_math` lists it.

    Powers of two may lie outside of float16 and bfloat16 has too few bits: float32 then.
    """
    half = act_dtype == torch.float16
    if half and form.scaling == "half":
        return "once" if form.minimum_at is None else "sum"
    if half and form.scaling != "exponent":
        return "split" if form.minimum_at is None else "integers"
    return "float" if form.minimum_at is None else "float sum"


NUMBERS = {"once": 1, "sum": 1, "split": 1, "integers": 2, "float": 1, "float sum": 2}
"""By what `math_of` says: how many words a sub-block's numbers take."""


def most_of(form: BlockForm) -> int:
    """What sub-scale times code can be at most, where both are not negative."""
    code = (1 << (form.low.bits + form.high_bits)) - 1
    return code * (63 if form.scaling == "six" else 15)
