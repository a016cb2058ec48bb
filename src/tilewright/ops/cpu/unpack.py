"""Packed weights to vectors: one function a weight type, 32 values ("a part") at a time.

``unpack(row, scales, zeros, j, group_parts)`` reads part j of one weight row and returns
``(v0, v1, s0, s1, m0, m1)``: values 0..15 are s0 * v0 + m0 and values 16..31 are s1 * v1 + m1,
where v0 and v1 are i8x16 of small signed codes. GGUF blocks carry their scales, so only `row` is
used; W4A16 keeps scales and zero points apart, one per `group_parts` parts.

`WeightKind` says what a kernel may assume of a type: whether there is a minimum, whether the two
halves of a part have scales of their own, and whether codes stay within +-64 (`dot4` cares).
Byte layouts: the block formats of ggml, also drawn in `tilewright.formats.blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from tilewright.ops.cpu.simd_arithmetic import band, bor, const_i8x16, shl_u8, shr_u8, splat_i8, sub
from tilewright.ops.cpu.simd_convert import bits16, f32_from_bits
from tilewright.ops.cpu.simd_memory import (
    load_f16,
    load_f32,
    load_i8,
    load_i8x16,
    load_u8,
    load_u16,
    load_u32,
)
from tilewright.ops.cpu.simd_shuffle import lookup16

__all__ = ["KINDS", "WeightKind"]

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class WeightKind:
    """How one weight type unpacks.

    Attributes:
        name: GGUF type name, or "uint4" / "uint4b8" for W4A16 with and without zero points.
        unpack: the device function of the module docstring.
        has_min: whether m0 and m1 can differ from 0.
        split: whether the two halves of a part have scales of their own.
        small: whether every code lies within -64..64.
    """

    name: str
    unpack: Callable[..., Any]
    has_min: bool
    split: bool
    small: bool


KINDS: dict[str, WeightKind] = {}


def _kind(name: str, *, has_min: bool = False, split: bool = False, small: bool = True) -> Any:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = njit(function)
        KINDS[name] = WeightKind(name, compiled, has_min, split, small)
        return compiled

    return register


iq4_table = const_i8x16(_IQ4)
fp4_table = const_i8x16(_FP4)


@njit
def f32(value):  # type: ignore[no-untyped-def]
    return np.float32(value)


@_kind("Q4_0")
def _q4_0(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 18 * j
    d = load_f16(at)
    q = load_i8x16(at + 2)
    v0 = sub(band(q, splat_i8(15)), splat_i8(8))
    v1 = sub(shr_u8(q, 4), splat_i8(8))
    return v0, v1, d, d, d, d


@_kind("Q4_1", has_min=True)
def _q4_1(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 20 * j
    d = load_f16(at)
    m = load_f16(at + 2)
    q = load_i8x16(at + 4)
    return band(q, splat_i8(15)), shr_u8(q, 4), d, d, m, m


@_kind("Q5_0")
def _q5_0(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 22 * j
    d = load_f16(at)
    high = load_u32(at + 2)
    q = load_i8x16(at + 6)
    v0 = sub(bor(band(q, splat_i8(15)), bits16(high, 16)), splat_i8(16))
    v1 = sub(bor(shr_u8(q, 4), bits16(high >> 16, 16)), splat_i8(16))
    return v0, v1, d, d, d, d


@_kind("Q5_1", has_min=True)
def _q5_1(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 24 * j
    d = load_f16(at)
    m = load_f16(at + 2)
    high = load_u32(at + 4)
    q = load_i8x16(at + 8)
    v0 = bor(band(q, splat_i8(15)), bits16(high, 16))
    v1 = bor(shr_u8(q, 4), bits16(high >> 16, 16))
    return v0, v1, d, d, m, m


@_kind("Q8_0", small=False)
def _q8_0(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 34 * j
    d = load_f16(at)
    return load_i8x16(at + 2), load_i8x16(at + 18), d, d, d, d


@njit
def _k_scale_min(at, i):  # type: ignore[no-untyped-def]
    """The 6-bit scale and minimum of sub-block i from the 12 packed bytes at `at`."""
    if i < 4:
        return load_u8(at + i) & 63, load_u8(at + i + 4) & 63
    low = load_u8(at + i + 4)
    return (
        (low & 15) | ((load_u8(at + i - 4) >> 6) << 4),
        (low >> 4) | ((load_u8(at + i) >> 6) << 4),
    )


@_kind("Q4_K", has_min=True)
def _q4_k(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 144 * (j >> 3)
    i = j & 7
    sc, mn = _k_scale_min(at + 4, i)
    s = load_f16(at) * f32(sc)
    m = -(load_f16(at + 2) * f32(mn))
    qs = at + 16 + 32 * (i >> 1)
    shift = 4 * (i & 1)
    v0 = band(shr_u8(load_i8x16(qs), shift), splat_i8(15))
    v1 = band(shr_u8(load_i8x16(qs + 16), shift), splat_i8(15))
    return v0, v1, s, s, m, m


@_kind("Q5_K", has_min=True)
def _q5_k(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 176 * (j >> 3)
    i = j & 7
    sc, mn = _k_scale_min(at + 4, i)
    s = load_f16(at) * f32(sc)
    m = -(load_f16(at + 2) * f32(mn))
    qs = at + 48 + 32 * (i >> 1)
    shift = 4 * (i & 1)
    one = splat_i8(1)
    h0 = shl_u8(band(shr_u8(load_i8x16(at + 16), i), one), 4)
    h1 = shl_u8(band(shr_u8(load_i8x16(at + 32), i), one), 4)
    v0 = bor(band(shr_u8(load_i8x16(qs), shift), splat_i8(15)), h0)
    v1 = bor(band(shr_u8(load_i8x16(qs + 16), shift), splat_i8(15)), h1)
    return v0, v1, s, s, m, m


@_kind("Q6_K", split=True)
def _q6_k(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 210 * (j >> 3)
    half = (j >> 2) & 1
    t = j & 3
    ql = at + 64 * half + 32 * (t & 1)
    qh = at + 128 + 32 * half
    sc = at + 192 + 8 * half + 2 * t
    d = load_f16(at + 208)
    shift = 4 * (t >> 1)
    three = splat_i8(3)
    h0 = shl_u8(band(shr_u8(load_i8x16(qh), 2 * t), three), 4)
    h1 = shl_u8(band(shr_u8(load_i8x16(qh + 16), 2 * t), three), 4)
    v0 = bor(band(shr_u8(load_i8x16(ql), shift), splat_i8(15)), h0)
    v1 = bor(band(shr_u8(load_i8x16(ql + 16), shift), splat_i8(15)), h1)
    s0 = d * f32(load_i8(sc))
    s1 = d * f32(load_i8(sc + 1))
    return sub(v0, splat_i8(32)), sub(v1, splat_i8(32)), s0, s1, s0, s1


@njit
def _q3_scale(at, i):  # type: ignore[no-untyped-def]
    """The 6-bit scale of sub-block i (0..15) from the 12 packed bytes at `at`, less 32."""
    low = (load_u8(at + (i & 7)) >> (4 * (i >> 3))) & 15
    high = (load_u8(at + 8 + (i & 3)) >> (2 * (i >> 2))) & 3
    return (low | (high << 4)) - 32


@_kind("Q3_K", split=True)
def _q3_k(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 110 * (j >> 3)
    half = (j >> 2) & 1
    t = j & 3
    qs = at + 32 + 32 * half
    bit = 4 * half + t
    d = load_f16(at + 108)
    one = splat_i8(1)
    three = splat_i8(3)
    h0 = shl_u8(band(shr_u8(load_i8x16(at), bit), one), 2)
    h1 = shl_u8(band(shr_u8(load_i8x16(at + 16), bit), one), 2)
    v0 = bor(band(shr_u8(load_i8x16(qs), 2 * t), three), h0)
    v1 = bor(band(shr_u8(load_i8x16(qs + 16), 2 * t), three), h1)
    i = 8 * half + 2 * t
    s0 = d * f32(_q3_scale(at + 96, i))
    s1 = d * f32(_q3_scale(at + 96, i + 1))
    return sub(v0, splat_i8(4)), sub(v1, splat_i8(4)), s0, s1, s0, s1


@_kind("Q2_K", has_min=True, split=True)
def _q2_k(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 84 * (j >> 3)
    half = (j >> 2) & 1
    t = j & 3
    qs = at + 16 + 32 * half
    d = load_f16(at + 80)
    dmin = load_f16(at + 82)
    sc0 = load_u8(at + 8 * half + 2 * t)
    sc1 = load_u8(at + 8 * half + 2 * t + 1)
    three = splat_i8(3)
    v0 = band(shr_u8(load_i8x16(qs), 2 * t), three)
    v1 = band(shr_u8(load_i8x16(qs + 16), 2 * t), three)
    m0 = -(dmin * f32(sc0 >> 4))
    m1 = -(dmin * f32(sc1 >> 4))
    return v0, v1, d * f32(sc0 & 15), d * f32(sc1 & 15), m0, m1


@_kind("IQ4_NL", small=False)
def _iq4_nl(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 18 * j
    d = load_f16(at)
    q = load_i8x16(at + 2)
    table = iq4_table()
    v0 = lookup16(table, band(q, splat_i8(15)))
    v1 = lookup16(table, shr_u8(q, 4))
    return v0, v1, d, d, d, d


@_kind("IQ4_XS", small=False)
def _iq4_xs(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 136 * (j >> 3)
    i = j & 7
    low = (load_u8(at + 4 + (i >> 1)) >> (4 * (i & 1))) & 15
    high = (load_u16(at + 2) >> (2 * i)) & 3
    s = load_f16(at) * f32((low | (high << 4)) - 32)
    q = load_i8x16(at + 8 + 16 * i)
    table = iq4_table()
    v0 = lookup16(table, band(q, splat_i8(15)))
    v1 = lookup16(table, shr_u8(q, 4))
    return v0, v1, s, s, s, s


@_kind("MXFP4")
def _mxfp4(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    at = row + 17 * j
    e = load_u8(at)
    # 2^(e - 128); the two smallest are denormal.
    bits = (e - 1) << 23 if e >= 2 else 0x200000 << e
    s = f32_from_bits(bits)
    q = load_i8x16(at + 1)
    table = fp4_table()
    v0 = lookup16(table, band(q, splat_i8(15)))
    v1 = lookup16(table, shr_u8(q, 4))
    return v0, v1, s, s, s, s


@_kind("uint4b8")
def _uint4b8(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    q = load_i8x16(row + 16 * j)
    s = load_f32(scales + 4 * (j // group_parts))
    v0 = sub(band(q, splat_i8(15)), splat_i8(8))
    v1 = sub(shr_u8(q, 4), splat_i8(8))
    return v0, v1, s, s, s, s


@_kind("uint4")
def _uint4(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
    q = load_i8x16(row + 16 * j)
    g = j // group_parts
    s = load_f32(scales + 4 * g)
    z = splat_i8(load_u8(zeros + g))
    v0 = sub(band(q, splat_i8(15)), z)
    v1 = sub(shr_u8(q, 4), z)
    return v0, v1, s, s, s, s
