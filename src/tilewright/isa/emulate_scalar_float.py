"""Floats in scalar registers, which are Python integers: RDNA3.5 and later."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np

from tilewright.isa.emulate_arith import fma

__all__ = ["SCALAR_FLOATS", "Result", "to_float"]

Result = tuple[int, bool | int | None]
"""A result and the condition bit; None leaves the bit alone."""


def to_float(bits: int) -> float:
    """The float32 of a register."""
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])


def _bits(value: float) -> int:
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return 0xFF800000 if value < 0 else 0x7F800000


def _two(function: Callable[[float, float], float]) -> Callable[[int, int], Result]:
    """A sum or product: exact or rounded harmlessly in double precision, then rounded."""
    return lambda a, b: (_bits(function(to_float(a), to_float(b))), None)


def _whole(function: Callable[[float], float]) -> Callable[[int], Result]:
    """Rounding to an integer, which keeps the sign of zero."""

    def run(a: int) -> Result:
        value = to_float(a)
        if not math.isfinite(value):
            return a, None
        return _bits(math.copysign(function(value), value)), None

    return run


def _number(pick: Callable[[float, float], float]) -> Callable[[int, int], Result]:
    """The smaller or larger; of a number and NaN, the number."""

    def run(a: int, b: int) -> Result:
        x, y = to_float(a), to_float(b)
        if math.isnan(x) or math.isnan(y):
            return (b if math.isnan(x) else a), None
        return _bits(pick(x, y)), None

    return run


def _to_int(low: int, high: int) -> Callable[[int], Result]:
    """Toward zero, saturating; NaN gives 0."""

    def convert(a: int) -> Result:
        value = to_float(a)
        return (0 if math.isnan(value) else int(max(low, min(high, value)))), None

    return convert


def _fused(a: int, b: int, c: int) -> Result:
    one = fma(*(np.array([x], dtype=np.uint32).view(np.float32) for x in (a, b, c)))
    return int(one.view(np.uint32)[0]), None


def _half(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0])


def _half_bits(value: float) -> int:
    with np.errstate(over="ignore"):
        return int(np.float64(value).astype(np.float16).view(np.uint16))


def _two_halves(function: Callable[[float, float], float]) -> Callable[[int, int], Result]:
    return lambda a, b: (_half_bits(function(_half(a), _half(b))), None)


def _half_number(pick: Callable[[float, float], float]) -> Callable[[int, int], Result]:
    def run(a: int, b: int) -> Result:
        x, y = _half(a), _half(b)
        if math.isnan(x) or math.isnan(y):
            return (b if math.isnan(x) else a) & 0xFFFF, None
        return _half_bits(pick(x, y)), None

    return run


def _signed(a: int) -> int:
    return a - (1 << 32) if a >> 31 else a


SCALAR_FLOATS: dict[str, tuple[int, tuple[int, ...], Callable[..., Result]]] = {
    "s_add_f32": (32, (32, 32), _two(lambda a, b: a + b)),
    "s_sub_f32": (32, (32, 32), _two(lambda a, b: a - b)),
    "s_mul_f32": (32, (32, 32), _two(lambda a, b: a * b)),
    "s_fmac_f32": (32, (32, 32, 32), lambda d, a, b: _fused(a, b, d)),
    "s_fmaak_f32": (32, (32, 32, 32), _fused),
    "s_fmamk_f32": (32, (32, 32, 32), lambda a, k, b: _fused(a, k, b)),
    "s_floor_f32": (32, (32,), _whole(math.floor)),
    "s_ceil_f32": (32, (32,), _whole(math.ceil)),
    "s_trunc_f32": (32, (32,), _whole(math.trunc)),
    "s_rndne_f32": (32, (32,), _whole(round)),
    "s_cvt_f32_u32": (32, (32,), lambda a: (_bits(float(a)), None)),
    "s_cvt_f32_i32": (32, (32,), lambda a: (_bits(float(_signed(a))), None)),
    "s_cvt_u32_f32": (32, (32,), _to_int(0, 2**32 - 1)),
    "s_cvt_i32_f32": (32, (32,), _to_int(-(2**31), 2**31 - 1)),
    "s_cvt_f16_f32": (32, (32,), lambda a: (_half_bits(to_float(a)), None)),
    "s_cvt_f32_f16": (32, (32,), lambda a: (_bits(_half(a)), None)),
    "s_cvt_hi_f32_f16": (32, (32,), lambda a: (_bits(_half(a >> 16)), None)),
    "s_add_f16": (32, (32, 32), _two_halves(lambda a, b: a + b)),
    "s_sub_f16": (32, (32, 32), _two_halves(lambda a, b: a - b)),
    "s_mul_f16": (32, (32, 32), _two_halves(lambda a, b: a * b)),
    **{
        f"s_{name}{suffix}_f16": (32, (32, 32), _half_number(pick))
        for name, pick in (("min", min), ("max", max))
        for suffix in ("", "_num")
    },
    **{
        f"s_{name}{suffix}_f32": (32, (32, 32), _number(pick))
        for name, pick in (("min", min), ("max", max))
        for suffix in ("", "_num")
    },
}
"""Mnemonic -> (bits of the result, bits of the sources, function)."""
