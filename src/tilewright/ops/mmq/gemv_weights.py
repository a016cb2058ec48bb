"""Words and scales of a unit to its weights, for mmq's decoding kernel; see `gemv_parts`.

Two codes at a time, in the halves of int32 lanes. `weights_packed` keeps them there, in the packed
instructions of NVIDIA's chips; `weights_plain` leaves them for float32, on any chip.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there. Its tuples
# grow.

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.mmq.gemv_parts import joined
from tilewright.ops.mmq.triton_parts import fp4_double, iq4_level
from tilewright.ops.w4a16.triton_parts import operand, twice

__all__: list[str] = []


@triton.jit
def codes_pair(low, high, P: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Codes 2 P and 2 P + 1 of words in the halves of int32 lanes.

    Args:
        high: shifted so that the bits of this word's first code begin at bit 0; not read where
            HIGH is 0.
    """
    LEAST: tl.constexpr = ((1 << LOW) - 1) * 0x00010001
    pair = (low >> (LOW * P) if P > 0 else low) & LEAST
    if HIGH > 0:
        MOST: tl.constexpr = (((1 << HIGH) - 1) << LOW) * 0x00010001
        SHIFT: tl.constexpr = LOW - HIGH * P
        if SHIFT > 0:
            upper = high << SHIFT
        else:
            upper = high >> -SHIFT
        pair = pair | (upper & MOST)
    return pair


@triton.jit
def masked_pair(a, mask, c, FLIP: tl.constexpr):
    """a & mask | c, or with FLIP a & mask ^ c, in one instruction."""
    if FLIP:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;", "=r,r,r,r", [a, mask, c], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [a, mask, c], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def fused_pair(a, b, c, dtype: tl.constexpr):
    """a * b + c on both halves of int32 lanes, rounded once."""
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip


@triton.jit
def less_pair(a, b, dtype: tl.constexpr):
    """a - b on both halves of int32 lanes."""
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def pattern(v):
    """The pattern of 16-bit numbers in both halves of int32 lanes."""
    return twice(v.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit
def levels(low, CODES: tl.constexpr):
    """What the codes of words stand for, above -128 ("iq4") or -16 ("fp4"): bytes of two int32,
    code 2 p + h in byte p of the h-th. The table's 16 bytes are permuted by the codes."""
    if CODES == "iq4":
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 l, h, s, a, b;
            and.b32 l, $2, 0x77777777;
            shr.u32 h, l, 16;
            shr.u32 s, $2, 1;
            lop3.b32 s, s, 0x44444444, 0x32103210, 0xEA;
            prmt.b32 a, 0x3F2D1801, 0x766A5D4F, l;
            prmt.b32 b, 0xA6998D81, 0xF1D9C5B5, l;
            prmt.b32 $0, a, b, s;
            shr.u32 s, s, 16;
            prmt.b32 a, 0x3F2D1801, 0x766A5D4F, h;
            prmt.b32 b, 0xA6998D81, 0xF1D9C5B5, h;
            prmt.b32 $1, a, b, s;
            }""",
            "=&r,=&r,r", [low], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 l, h, s, a, b;
            and.b32 l, $2, 0x77777777;
            shr.u32 h, l, 16;
            shr.u32 s, $2, 1;
            lop3.b32 s, s, 0x44444444, 0x32103210, 0xEA;
            prmt.b32 a, 0x13121110, 0x1C181614, l;
            prmt.b32 b, 0x0D0E0F10, 0x04080A0C, l;
            prmt.b32 $0, a, b, s;
            shr.u32 s, s, 16;
            prmt.b32 a, 0x13121110, 0x1C181614, h;
            prmt.b32 b, 0x0D0E0F10, 0x04080A0C, h;
            prmt.b32 $1, a, b, s;
            }""",
            "=&r,=&r,r", [low], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def level_pair(even, odd, P: tl.constexpr):
    """Bytes P of both in the lower bytes of the halves; what is in the upper bytes is open."""
    places_of: tl.constexpr = P * 0x11 + (4 + P) * 0x1100
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r",
        [even, odd, tl.full(even.shape, places_of, tl.int32)], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def packed_bit(P: tl.constexpr, LOW: tl.constexpr, CODES: tl.constexpr, dtype: tl.constexpr):
    """The bit at which `packed_pair` leaves the codes of pair P."""
    if dtype == tl.float16 and not (CODES == "iq4" or CODES == "fp4"):
        return LOW * P % 8
    else:
        return 0


@triton.jit
def packed_pair(
    low, high, even, odd, P: tl.constexpr, AT: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, CODES: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Pair P of words: 1024 + 2^AT code in float16, which has ten bits for them, so that a word is
    shifted only once a byte, and 128 + code in bfloat16, which has seven.

    Args:
        even, odd: of `levels`, for codes of a table.
        AT: of `packed_bit`.
    """
    ONES: tl.constexpr = 0x64006400 if dtype == tl.float16 else 0x43004300
    TABLE: tl.constexpr = CODES == "iq4" or CODES == "fp4"
    zero = tl.zeros_like(low)
    pair = low
    if LOW * P - AT > 0 and not TABLE:
        pair = low >> (LOW * P - AT)
    if TABLE:
        pair = masked_pair(level_pair(even, odd, P), zero + 0x00FF00FF, zero + ONES, False)
    elif CODES == "signed":
        pair = masked_pair(pair, zero + 0x00FF00FF, zero + (ONES ^ 0x00800080), True)
    else:
        mask = zero + (((1 << LOW) - 1) << AT) * 0x00010001
        pair = masked_pair(pair, mask, zero + ONES, False)
    if HIGH > 0:
        if AT + LOW - HIGH * P > 0:
            upper = high << (AT + LOW - HIGH * P)
        else:
            upper = high >> (HIGH * P - AT - LOW)
        most = zero + (((1 << HIGH) - 1) << (LOW + AT)) * 0x00010001
        pair = masked_pair(upper, most, pair, False)
    return pair


@triton.jit
def exact_pair(
    pair, AT: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """What the codes of a `packed_pair` stand for: less their offset, or a table's levels."""
    ONE: tl.constexpr = 1024 if dtype == tl.float16 else 128
    FLIP: tl.constexpr = CODES == "signed"
    OFF: tl.constexpr = 128 if FLIP or CODES == "iq4" else (16 if CODES == "fp4" else OFFSET)
    if AT == 0:
        return less_pair(pair, pattern((tl.zeros_like(pair) + (ONE + OFF)).to(dtype)), dtype)
    else:
        f = pattern(tl.full(pair.shape, 1.0 / (1 << AT), dtype))
        less = pattern(tl.full(pair.shape, 0.0 - ONE / (1 << AT) - OFF, dtype))
        return fused_pair(pair, f, less, dtype)


@triton.jit
def in_halves(pairs, P: tl.constexpr, dtype: tl.constexpr):
    """Pairs of words [R, W, 8, 4, 4] as numbers [R, W, 8, 4, 4, P, 2] of `dtype`."""
    R: tl.constexpr = pairs[0].shape[0]
    W: tl.constexpr = pairs[0].shape[1]
    w = joined(pairs, P).reshape(R, W, 8, 4, 4, P)
    first = (w & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    second = (w >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.join(first, second)


@triton.jit
def weights_packed(
    low, high, scale, minimum, dtype: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    CODES: tl.constexpr, OFFSET: tl.constexpr, SUBS: tl.constexpr, MINIMUMS: tl.constexpr,
):  # fmt: skip
    """Weights [R, W, 8, 4, 4, P, 2] of a unit, two at a time, in the packed instructions of NVIDIA.

    Args:
        scale, minimum: of each word, in `dtype`: with SUBS integers, and minimums are not added; of
            `two_powers` for "fp4".
    """
    P: tl.constexpr = 16 // LOW
    ONE: tl.constexpr = 1024 if dtype == tl.float16 else 128
    AT_ONCE: tl.constexpr = SUBS and CODES == "offset" and OFFSET == 0
    s = pattern(scale)
    c = tl.zeros_like(low) - 0x7FFF8000  # -0: it leaves every product as it is
    if MINIMUMS and not SUBS:
        c = pattern(minimum)
    even = low
    odd = low
    if CODES == "iq4" or CODES == "fp4":
        even, odd = levels(low, CODES)
    pairs = ()
    for p in tl.static_range(P):
        at = packed_bit(p, LOW, CODES, dtype)
        pair = packed_pair(low, high, even, odd, p, at, LOW, HIGH, CODES, dtype)
        if AT_ONCE:  # (1024 + 2^s code) f - 1024 f with f = scale / 2^s: exact if code scale is
            f = s
            if at > 0:
                f = fused_pair(s, pattern(tl.full(low.shape, 1.0 / (1 << at), dtype)), c, dtype)
            less = pattern(tl.full(low.shape, 0.0 - ONE / (1 << at), dtype))
            pair = fused_pair(pair, f, fused_pair(s, less, c, dtype), dtype)
        else:
            pair = fused_pair(exact_pair(pair, at, CODES, OFFSET, dtype), s, c, dtype)
            if CODES == "fp4":
                pair = fused_pair(pair, pattern(minimum), c, dtype)
        pairs = pairs + (pair,)
    return in_halves(pairs, P, dtype)


@triton.jit
def code_value(code, CODES: tl.constexpr, OFFSET: tl.constexpr):
    """The integer that a code stands for."""
    if CODES == "iq4":
        return iq4_level(code)
    elif CODES == "fp4":
        return fp4_double(code)
    elif CODES == "signed":
        return (code ^ 128) - 128
    else:
        return code - OFFSET


@triton.jit
def weights_plain(
    low, high, scale, minimum, dtype: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    CODES: tl.constexpr, OFFSET: tl.constexpr, ADDED: tl.constexpr, ASM: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Weights [R, W, 8, 4, 4, P, 2] of a unit in float32 maths, rounded once to `dtype`.

    Args:
        scale, minimum: float32 of each word; the minimum is added where ADDED.
    """
    P: tl.constexpr = 16 // LOW
    TABLE: tl.constexpr = ASM == "nv" and (CODES == "iq4" or CODES == "fp4")
    LESS: tl.constexpr = 128 if CODES == "iq4" else 16
    SMALL: tl.constexpr = CODES == "offset" and LOW + HIGH < 8
    FUSED: tl.constexpr = SMALL and ADDED and dtype == tl.bfloat16
    TAKEN: tl.constexpr = 128 + OFFSET
    firsts = ()
    seconds = ()
    even = low
    odd = low
    if TABLE:
        even, odd = levels(low, CODES)
    for p in tl.static_range(P):
        pair = codes_pair(low, high, p, LOW, HIGH)
        if TABLE:
            pair = level_pair(even, odd, p)
            first = ((pair & 255) - LESS).to(tl.float32)
            second = (((pair >> 16) & 255) - LESS).to(tl.float32)
        elif SMALL:  # or-ed into the pattern of 128 in bfloat16, exactly 128 + code
            pair = pair | 0x43004300
            first = (pair << 16).to(tl.float32, bitcast=True)
            second = (pair & -0x10000).to(tl.float32, bitcast=True)
            if not FUSED:
                first -= TAKEN
                second -= TAKEN
        else:
            first = code_value(pair & 0xFFFF, CODES, OFFSET).to(tl.float32)
            second = code_value((pair >> 16) & 0xFFFF, CODES, OFFSET).to(tl.float32)
        if FUSED:  # off by 2^-17 scales at most
            first = first * scale + (minimum - scale * TAKEN)
            second = second * scale + (minimum - scale * TAKEN)
        elif ADDED:
            first = first * scale + minimum
            second = second * scale + minimum
        else:
            first *= scale
            second *= scale
        firsts = firsts + (operand(first, dtype, INTERPRET),)
        seconds = seconds + (operand(second, dtype, INTERPRET),)
    R: tl.constexpr = low.shape[0]
    W: tl.constexpr = low.shape[1]
    first = joined(firsts, P).reshape(R, W, 8, 4, 4, P)
    second = joined(seconds, P).reshape(R, W, 8, 4, 4, P)
    return tl.join(first, second)
