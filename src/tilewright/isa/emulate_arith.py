"""What the vector instructions compute: one numpy function an operation.

`OPERATIONS` maps a mnemonic without its encoding suffix to (type of the result, types of the
sources, function). The function sees whole lanes, active or not: the writer masks.

Float results are rounded to nearest even and keep denormals, as compilers set the mode. The
approximate instructions (rcp, rsq, sqrt, exp, log, sin, cos) give the correctly rounded value here,
where the hardware promises an ulp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.isa.emulate_operands import Array

__all__ = ["COMPARISONS", "OPERATIONS", "fma", "to_half_toward_zero"]

Operation = tuple[str, tuple[str, ...], Callable[..., Array]]

_F64 = np.float64


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once, for float16 and float32 (and twice, for float64).

    The product is exact in float64. The sum is rounded to odd there, so that the second rounding,
    to the narrower type, sees which side of a tie the exact sum lies on.
    """
    if a.dtype == _F64:
        return a * b + c
    p, q = a.astype(_F64) * b.astype(_F64), c.astype(_F64)
    s = p + q
    t = s - p
    error = (p - (s - t)) + (q - t)
    bits = s.view(np.int64)
    fix = np.isfinite(s) & (error != 0) & (bits & 1 == 0)
    toward = np.where((error > 0) == (s > 0), 1, -1)
    return np.where(fix, bits + toward, bits).view(_F64).astype(a.dtype)


def to_half_toward_zero(a: Array) -> Array:
    """float32 to float16, rounded toward zero."""
    half = a.astype(np.float16)
    past = np.abs(half.astype(_F64)) > np.abs(a.astype(_F64))
    return np.where(past, half.view(np.uint16) - np.uint16(1), half.view(np.uint16)).view(
        np.float16
    )


def _by_double(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda a: function(a.astype(_F64)).astype(a.dtype)


def _to_int(low: int, high: int, dtype: Any) -> Callable[[Array], Array]:
    """Toward zero, saturating; NaN gives 0."""

    def convert(a: Array) -> Array:
        wide = np.nan_to_num(np.trunc(a.astype(_F64)), nan=0.0, posinf=high, neginf=low)
        return np.clip(wide, low, high).astype(dtype)

    return convert


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _fmin(a: Array, b: Array) -> Array:
    return np.where(np.signbit(b) & (a == b), b, np.fmin(a, b))  # -0 is below +0


def _fmax(a: Array, b: Array) -> Array:
    return np.where(np.signbit(a) & (a == b), b, np.fmax(a, b))


def _wide(a: Array) -> Array:
    return a.astype(np.uint64) if a.dtype.kind == "u" else a.astype(np.int64)


def _shift(bits: int) -> Callable[[Array], Array]:
    return lambda a: a & a.dtype.type(bits - 1)


def _reverse_bits(a: Array) -> Array:
    for n, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        a = (a >> np.uint32(n) & np.uint32(mask)) | (a & np.uint32(mask)) << np.uint32(n)
    return a >> np.uint32(16) | a << np.uint32(16)


def _highest(a: Array) -> Array:
    """Zeros above the highest one; all ones for 0."""
    exponent = np.frexp(a.astype(_F64))[1]
    return np.where(a == 0, -1, 32 - exponent).astype(np.int32).view(np.uint32)


def _lowest(a: Array) -> Array:
    """Zeros below the lowest one; all ones for 0."""
    one = a & (~a + np.uint32(1))
    return np.where(a == 0, -1, np.frexp(one.astype(_F64))[1] - 1).astype(np.int32).view(np.uint32)


def _field(a: Array, offset: Array, width: Array) -> Array:
    n = width & 31
    return (a >> (offset & a.dtype.type(31))) & ((np.uint32(1) << n) - np.uint32(1))


def _signed_field(a: Array, offset: Array, width: Array) -> Array:
    n = (width & np.uint32(31)).astype(np.int64)
    value = (a >> (offset & np.uint32(31)).view(np.int32)).astype(np.int64) & ((1 << n) - 1)
    sign = np.where(n > 0, 1 << np.maximum(n - 1, 0), 0)
    return ((value ^ sign) - sign).astype(np.int32)


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """Bytes of {a, b} picked by each byte of the selector: 0 .. 3 of b, 4 .. 7 of a, 8 .. 11 the
    signs of the odd bytes, 12 is 0x00 and more is 0xFF."""
    table = np.empty((a.size, 14), dtype=np.uint8)
    table[:, :8] = np.stack([b, a], axis=1).view(np.uint8)
    table[:, 8:12] = (table[:, 1:8:2] >> 7) * 0xFF
    table[:, 12], table[:, 13] = 0, 0xFF
    picked = np.minimum(np.ascontiguousarray(selector).view(np.uint8).reshape(-1, 4), 13)
    return np.take_along_axis(table, picked.astype(np.intp), axis=1).view(np.uint32)[:, 0]


def _ldexp(a: Array, n: Array) -> Array:
    return np.ldexp(a.astype(_F64), n).astype(a.dtype)


def _frexp_exponent(a: Array) -> Array:
    exponent = np.where(np.isfinite(a), np.frexp(a)[1], 0)
    return exponent.astype(np.int16 if a.dtype == np.float16 else np.int32)


def _div_fixup(q: Array, d: Array, n: Array) -> Array:
    sign = np.signbit(d) ^ np.signbit(n)
    size = np.abs(q)
    size = np.where(np.isinf(d) | (n == 0), q.dtype.type(0), size)
    size = np.where((d == 0) | np.isinf(n), q.dtype.type(np.inf), size)
    out = np.where(sign, -size, size)
    bad = (d == 0) & (n == 0) | np.isinf(d) & np.isinf(n) | np.isnan(d) | np.isnan(n)
    return np.where(bad, q.dtype.type(np.nan), out)


def _lane_count(base: int) -> Callable[[Array, Array], Array]:
    """mbcnt: ones of a mask below this lane, in the mask's own 32 lanes."""

    def count(mask: Array, add: Array) -> Array:
        lane = np.arange(mask.size) - base
        below = ((np.uint64(1) << np.clip(lane, 0, 32).astype(np.uint64)) - np.uint64(1)).astype(
            np.uint32
        )
        return np.bitwise_count(mask & below).astype(np.uint32) + add

    return count


def _pack_saturated(low: int, high: int, dtype: Any) -> Callable[[Array, Array], Array]:
    def pack(a: Array, b: Array) -> Array:
        halves = [np.clip(x, low, high).astype(dtype).view(np.uint16) for x in (a, b)]
        return halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << np.uint32(16)

    return pack


def join_halves(a: Array, b: Array) -> Array:
    """Two arrays of 16 bits as one of 32, the first below."""
    low, high = a.view(np.uint16).astype(np.uint32), b.view(np.uint16).astype(np.uint32)
    return low | high << np.uint32(16)


def halves_of(words: Array, kind: str) -> tuple[Array, Array]:
    """The halves of 32-bit words as float64: float16, or bfloat16 for "bf16"."""
    if kind == "bf16":
        low, high = words << np.uint32(16), words & np.uint32(0xFFFF0000)
        return low.view(np.float32).astype(_F64), high.view(np.float32).astype(_F64)
    pair = words.view(np.float16).reshape(-1, 2).astype(_F64)
    return pair[:, 0], pair[:, 1]


def _dot2(kind: str) -> Callable[[Array, Array, Array], Array]:
    def dot(a: Array, b: Array, c: Array) -> Array:
        (a0, a1), (b0, b1) = halves_of(a, kind), halves_of(b, kind)
        return (c.astype(_F64) + a0 * b0 + a1 * b1).astype(np.float32)

    return dot


def _floats() -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    for t in ("f16", "f32", "f64"):
        unary = {
            "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rndne": np.rint,
            "fract": lambda a: a - np.floor(a),
            "frexp_mant": lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a),
            "rcp": _by_double(lambda a: 1.0 / a), "rsq": _by_double(lambda a: 1.0 / np.sqrt(a)),
            "rcp_iflag": _by_double(lambda a: 1.0 / a),
            "sqrt": _by_double(np.sqrt), "exp": _by_double(np.exp2), "log": _by_double(np.log2),
            "sin": _by_double(lambda a: np.sin(2 * np.pi * a)),
            "cos": _by_double(lambda a: np.cos(2 * np.pi * a)),
        }  # fmt: skip
        binary = {
            "add": np.add, "sub": np.subtract, "subrev": lambda a, b: b - a, "mul": np.multiply,
            "min": _fmin, "max": _fmax, "min_num": _fmin, "max_num": _fmax,
            "minimum": np.minimum, "maximum": np.maximum,
            "mul_legacy": lambda a, b: np.where((a == 0) | (b == 0), a.dtype.type(0), a * b),
        }  # fmt: skip
        binary["mul_dx9_zero"] = binary["mul_legacy"]
        ternary = {
            "fma": fma, "fmaak": fma, "fmamk": lambda a, k, b: fma(a, k, b), "mad": fma,
            "max3": lambda a, b, c: _fmax(_fmax(a, b), c),
            "min3": lambda a, b, c: _fmin(_fmin(a, b), c),
            "med3": _median, "div_fixup": _div_fixup,
            "maxmin": lambda a, b, c: _fmin(_fmax(a, b), c),
            "minmax": lambda a, b, c: _fmax(_fmin(a, b), c),
        }  # fmt: skip
        ternary |= {
            "maximum3": lambda a, b, c: np.maximum(np.maximum(a, b), c),
            "minimum3": lambda a, b, c: np.minimum(np.minimum(a, b), c),
        }
        for name in ("max3", "min3", "med3"):
            ternary[f"{name}_num"] = ternary[name]
        groups: tuple[dict[str, Any], ...] = (unary, binary, ternary)
        for count, group in enumerate(groups, 1):
            found |= {f"v_{n}_{t}": (t, (t,) * count, f) for n, f in group.items()}
        whole = "i16" if t == "f16" else "i32"
        found[f"v_frexp_exp_{whole}_{t}"] = (whole, (t,), _frexp_exponent)
        found[f"v_ldexp_{t}"] = (t, (t, whole), _ldexp)
    for kind in ("f16", "bf16"):
        found[f"v_dot2_f32_{kind}"] = ("f32", ("u32", "u32", "f32"), _dot2(kind))
    return found


def _conversions() -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    limits = {"u32": (0, 2**32 - 1), "i32": (-(2**31), 2**31 - 1),
              "u16": (0, 2**16 - 1), "i16": (-(2**15), 2**15 - 1)}  # fmt: skip
    types = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "u32": np.uint32,
             "i32": np.int32, "u16": np.uint16, "i16": np.int16}  # fmt: skip

    def cast(name: str) -> Callable[[Array], Array]:
        return lambda a: a.astype(types[name])

    pairs = (
        "f16<f32 f32<f16 f64<f32 f32<f64 f32<u32 f32<i32 f64<u32 f64<i32 f16<u16 f16<i16 u32<u16"
        " i32<i16"
    )
    for pair in pairs.split():
        to, _, source = pair.partition("<")
        found[f"v_cvt_{to}_{source}"] = (to, (source,), cast(to))
    for pair in "u32<f32 i32<f32 u32<f64 i32<f64 u16<f16 i16<f16".split():
        to, _, source = pair.partition("<")
        found[f"v_cvt_{to}_{source}"] = (to, (source,), _to_int(*limits[to], types[to]))
    for byte in range(4):
        shift = np.uint32(8 * byte)
        found[f"v_cvt_f32_ubyte{byte}"] = (
            "f32", ("u32",),
            lambda a, shift=shift: (a >> shift & np.uint32(0xFF)).astype(np.float32),
        )  # fmt: skip
    found["v_cvt_pkrtz_f16_f32"] = (
        "u32", ("f32", "f32"),
        lambda a, b: join_halves(to_half_toward_zero(a), to_half_toward_zero(b)),
    )  # fmt: skip
    found["v_cvt_pk_rtz_f16_f32"] = found["v_cvt_pkrtz_f16_f32"]
    found["v_cvt_pk_u16_u32"] = ("u32", ("u32", "u32"), _pack_saturated(0, 65535, np.uint16))
    found["v_cvt_pk_i16_i32"] = ("u32", ("i32", "i32"), _pack_saturated(-32768, 32767, np.int16))
    found["v_pack_b32_f16"] = ("u32", ("f16", "f16"), join_halves)
    return found


def _integers() -> dict[str, Operation]:
    u, i, s5 = ("u32",), ("i32",), _shift(32)

    def high(a: Array, b: Array) -> Array:
        return ((_wide(a) * _wide(b)) >> _wide(a).dtype.type(32)).astype(a.dtype)

    def low24(a: Array) -> Array:
        if a.dtype == np.uint32:
            return a & np.uint32(0xFFFFFF)
        return (a << np.int32(8)) >> np.int32(8)

    one: dict[str, Any] = {
        "mov_b32": np.copy, "not_b32": np.invert, "bfrev_b32": _reverse_bits,
        "ffbh_u32": _highest, "clz_i32_u32": _highest, "ffbl_b32": _lowest, "ctz_i32_b32": _lowest,
    }  # fmt: skip
    two: dict[str, Any] = {
        "add_u32": np.add, "add_nc_u32": np.add, "sub_u32": np.subtract, "sub_nc_u32": np.subtract,
        "subrev_u32": lambda a, b: b - a, "subrev_nc_u32": lambda a, b: b - a,
        "mul_lo_u32": np.multiply, "mul_hi_u32": high,
        "mul_u32_u24": lambda a, b: low24(a) * low24(b),
        "mul_hi_u32_u24": lambda a, b: high(low24(a), low24(b)),
        "and_b32": np.bitwise_and, "or_b32": np.bitwise_or, "xor_b32": np.bitwise_xor,
        "xnor_b32": lambda a, b: ~(a ^ b),
        "lshlrev_b32": lambda n, a: a << s5(n), "lshrrev_b32": lambda n, a: a >> s5(n),
        "min_u32": np.minimum, "max_u32": np.maximum,
        "bfm_b32": lambda n, at: ((np.uint32(1) << s5(n)) - np.uint32(1)) << s5(at),
        "bcnt_u32_b32": lambda a, b: np.bitwise_count(a).astype(np.uint32) + b,
        "mbcnt_lo_u32_b32": _lane_count(0), "mbcnt_hi_u32_b32": _lane_count(32),
    }  # fmt: skip
    three: dict[str, Any] = {
        "and_or_b32": lambda a, b, c: a & b | c, "or3_b32": lambda a, b, c: a | b | c,
        "xor3_b32": lambda a, b, c: a ^ b ^ c, "xad_u32": lambda a, b, c: (a ^ b) + c,
        "lshl_or_b32": lambda a, n, c: a << s5(n) | c,
        "lshl_add_u32": lambda a, n, c: (a << s5(n)) + c,
        "add_lshl_u32": lambda a, b, n: (a + b) << s5(n),
        "add3_u32": lambda a, b, c: a + b + c, "bfe_u32": _field,
        "bfi_b32": lambda m, a, b: m & a | ~m & b, "perm_b32": _permute,
        "alignbit_b32": lambda a, b, n: (
            (a.astype(np.uint64) << np.uint64(32) | b) >> s5(n).astype(np.uint64)
        ).astype(np.uint32),
        "alignbyte_b32": lambda a, b, n: (
            (a.astype(np.uint64) << np.uint64(32) | b) >> (np.uint64(8) * (n & np.uint32(3)))
        ).astype(np.uint32),
        "mad_u32_u24": lambda a, b, c: low24(a) * low24(b) + c,
        "min3_u32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
        "max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c), "med3_u32": _median,
        "minmax_u32": lambda a, b, c: np.maximum(np.minimum(a, b), c),
        "maxmin_u32": lambda a, b, c: np.minimum(np.maximum(a, b), c),
    }  # fmt: skip
    signed: dict[str, tuple[int, Any]] = {
        "ashrrev_i32": (2, lambda n, a: a >> (n & np.int32(31))), "mul_hi_i32": (2, high),
        "add_nc_i32": (2, np.add), "sub_nc_i32": (2, np.subtract),
        "add_i32": (2, np.add), "sub_i32": (2, np.subtract),
        "min_i32": (2, np.minimum), "max_i32": (2, np.maximum),
        "mul_i32_i24": (2, lambda a, b: low24(a) * low24(b)),
        "mad_i32_i24": (3, lambda a, b, c: low24(a) * low24(b) + c),
        "min3_i32": (3, lambda a, b, c: np.minimum(np.minimum(a, b), c)),
        "max3_i32": (3, lambda a, b, c: np.maximum(np.maximum(a, b), c)), "med3_i32": (3, _median),
        "minmax_i32": (3, lambda a, b, c: np.maximum(np.minimum(a, b), c)),
        "maxmin_i32": (3, lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    }  # fmt: skip
    found: dict[str, Operation] = {}
    for count, group in enumerate((one, two, three), 1):
        found |= {f"v_{name}": ("u32", u * count, f) for name, f in group.items()}
    found |= {f"v_{name}": ("i32", i * count, f) for name, (count, f) in signed.items()}
    found["v_bfe_i32"] = ("i32", ("i32", "u32", "u32"), _signed_field)
    return found


def _narrow_and_wide() -> dict[str, Operation]:
    h, q, s4, s6 = ("u16",), ("u64",), _shift(16), _shift(64)
    short: dict[str, Any] = {
        "add_u16": np.add, "sub_u16": np.subtract, "subrev_u16": lambda a, b: b - a,
        "mul_lo_u16": np.multiply, "and_b16": np.bitwise_and, "or_b16": np.bitwise_or,
        "xor_b16": np.bitwise_xor, "min_u16": np.minimum, "max_u16": np.maximum,
        "lshlrev_b16": lambda n, a: a << s4(n), "lshrrev_b16": lambda n, a: a >> s4(n),
    }  # fmt: skip
    signed = ("i16",)
    short |= {"add_nc_u16": short["add_u16"], "sub_nc_u16": short["sub_u16"]}
    found: dict[str, Operation] = {f"v_{n}": ("u16", h * 2, f) for n, f in short.items()}
    found |= {
        "v_mov_b16": ("u16", h, np.copy), "v_not_b16": ("u16", h, np.invert),
        "v_mad_u16": ("u16", h * 3, lambda a, b, c: a * b + c),
        "v_ashrrev_i16": ("i16", signed * 2, lambda n, a: a >> (n & np.int16(15))),
        "v_min_i16": ("i16", signed * 2, np.minimum),
        "v_max_i16": ("i16", signed * 2, np.maximum),
        "v_add_i16": ("i16", signed * 2, np.add), "v_sub_i16": ("i16", signed * 2, np.subtract),
        "v_add_nc_i16": ("i16", signed * 2, np.add),
        "v_sub_nc_i16": ("i16", signed * 2, np.subtract),
        "v_mad_i16": ("i16", signed * 3, lambda a, b, c: a * b + c),
        "v_mad_u32_u16": ("u32", ("u16", "u16", "u32"), lambda a, b, c: _u32(a) * _u32(b) + c),
        "v_mad_i32_i16": (
            "i32", ("i16", "i16", "i32"), lambda a, b, c: a.astype(np.int32) * b + c
        ),
        "v_mov_b64": ("u64", q, np.copy),
        "v_lshlrev_b64": ("u64", ("u32", "u64"), lambda n, a: a << s6(n).astype(np.uint64)),
        "v_lshrrev_b64": ("u64", ("u32", "u64"), lambda n, a: a >> s6(n).astype(np.uint64)),
        "v_ashrrev_i64": ("i64", ("u32", "i64"), lambda n, a: a >> s6(n).astype(np.int64)),
        "v_lshl_add_u64": (
            "u64", ("u64", "u32", "u64"), lambda a, n, c: (a << _shift(8)(n).astype(np.uint64)) + c
        ),
        "v_add_nc_u64": ("u64", q * 2, np.add), "v_sub_nc_u64": ("u64", q * 2, np.subtract),
    }  # fmt: skip
    for t, dtype in (("u16", h), ("i16", signed)):
        for name, two in (("min", np.minimum), ("max", np.maximum)):
            found[f"v_{name}3_{t}"] = (
                t, dtype * 3, lambda a, b, c, two=two: two(two(a, b), c)
            )  # fmt: skip
        found[f"v_med3_{t}"] = (t, dtype * 3, _median)
    return found


def _u32(a: Array) -> Array:
    return a.astype(np.uint32)


OPERATIONS: dict[str, Operation] = {
    **_floats(),
    **_conversions(),
    **_integers(),
    **_narrow_and_wide(),
}
"""Mnemonic without suffix -> (result type, source types, function)."""

_NAN: dict[str, Callable[[Array, Array], Array]] = {
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "lg": lambda a, b: (a < b) | (a > b), "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)), "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b), "nlt": lambda a, b: ~(a < b), "neq": lambda a, b: ~(a == b),
}  # fmt: skip
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": np.not_equal, **_NAN,
}  # fmt: skip
"""Of v_cmp_<name>_<type>."""
