"""Sums of mmq's kernel for one row of x (`decode_gemv`): words to pairs of codes, products with x,
and their scales. Tensors are those of `decode_parts`, [W, 32].
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.ops.mma_fragments import mma

__all__ = ["add_scaled", "add_words"]


@gluon.jit
def _masked(a, mask, c):
    """a & mask | c in one instruction."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r",
        [a, gl.full_like(a, mask), c], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _flipped(a, mask, c):
    """a & mask ^ c in one instruction."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0x6A;", "=r,r,r,r",
        [a, gl.full_like(a, mask), gl.full_like(a, c)], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _pair(
    low, high, P: gl.constexpr, AT: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr,
    SIGNED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Pair P of a word as it is multiplied: subnormal float16 q / 2^24, odd ones of 4 bits
    q / 2^20; in bfloat16 128 + q. Codes with a sign are larger by 128.

    Args:
        AT: bit of `high` at which this word's upper bits begin.
    """
    HALF: gl.constexpr = DTYPE == gl.float16
    BIT: gl.constexpr = LOW * P % 8 if HALF else 0  # where the codes stay
    MASK: gl.constexpr = (((1 << LOW) - 1) << BIT) * 0x00010001
    UP: gl.constexpr = BIT + LOW - AT - HIGH * P
    MOST: gl.constexpr = (((1 << HIGH) - 1) << (BIT + LOW)) * 0x00010001
    pair = low
    if LOW * P > BIT:
        pair = low >> (LOW * P - BIT)
    if SIGNED:
        pair = _flipped(pair, MASK, 0x00800080)
    elif HALF:
        pair = pair & MASK
    else:
        pair = _masked(pair, MASK, gl.full_like(pair, 0x43004300))
    if HIGH > 0:
        if UP > 0:
            upper = high << UP
        else:
            upper = high >> -UP
        pair = _masked(upper, MOST, pair)
    return pair


@gluon.jit
def _add_word(
    even, odd, a, b, a_high, b_high, x, D: gl.constexpr, U: gl.constexpr, AT: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, SIGNED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Two products, or one, with codes times x of word D of a unit of two rows; U of x's units."""
    p0 = _pair(a, a_high, 0, AT, LOW, HIGH, SIGNED, DTYPE)
    r0 = _pair(b, b_high, 0, AT, LOW, HIGH, SIGNED, DTYPE)
    p1 = _pair(a, a_high, 1, AT, LOW, HIGH, SIGNED, DTYPE)
    r1 = _pair(b, b_high, 1, AT, LOW, HIGH, SIGNED, DTYPE)
    if LOW == 4:
        X: gl.constexpr = 2 * (4 * U + D)
        p2 = _pair(a, a_high, 2, AT, LOW, HIGH, SIGNED, DTYPE)
        r2 = _pair(b, b_high, 2, AT, LOW, HIGH, SIGNED, DTYPE)
        p3 = _pair(a, a_high, 3, AT, LOW, HIGH, SIGNED, DTYPE)
        r3 = _pair(b, b_high, 3, AT, LOW, HIGH, SIGNED, DTYPE)
        even = mma((p0, r0, p2, r2), (x[X],), even, DTYPE)
        odd = mma((p1, r1, p3, r3), (x[X + 1],), odd, DTYPE)
    else:
        Y: gl.constexpr = 4 * U + D
        if D % 2 == 0:
            even = mma((p0, r0, p1, r1), (x[Y],), even, DTYPE)
        else:
            odd = mma((p0, r0, p1, r1), (x[Y],), odd, DTYPE)
    return even, odd


@gluon.jit
def add_words(
    sums, words, high, x, owner, Q: gl.constexpr, U: gl.constexpr, LOW: gl.constexpr,
    HIGH: gl.constexpr, SIGNED: gl.constexpr, UNITS: gl.constexpr, SETS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """sums with codes times x of a unit of two rows.

    With one set of sub-blocks a lane's x is of one unit, which serves for words of every unit: they
    are summed apart, and a column keeps the sum of its own.

    Args:
        sums: two products (of four numbers) a set: of even pairs and of odd ones.
        words: of `words_of`.
        high: of `load_high`, of all rows and units.
        owner: the unit of a lane's columns.
    """
    OWN: gl.constexpr = SETS == 1
    SET: gl.constexpr = 0 if OWN else 8 * U
    PER: gl.constexpr = LOW // HIGH if HIGH > 0 else 1
    EACH: gl.constexpr = 4 // PER if HIGH > 0 else 1  # words of high of a row and a unit
    zero = gl.zeros_like(sums[0])
    even = (zero, zero, zero, zero)
    odd = even
    for d in gl.static_range(4):
        one = words[4 * U + d]
        two = words[4 * (UNITS + U) + d]
        a = one
        b = two
        if HIGH > 0:
            a = high[((2 * Q) * UNITS + U) * EACH + d // PER]
            b = high[((2 * Q + 1) * UNITS + U) * EACH + d // PER]
        even, odd = _add_word(
            even, odd, one, two, a, b, x, d, 0 if OWN else U, HIGH * (16 // LOW) * (d % PER), LOW,
            HIGH, SIGNED, DTYPE,
        )  # fmt: skip
    made = even + odd
    found = ()
    for i in gl.static_range(8 * SETS):
        if i // 8 * 8 != SET:
            found = found + (sums[i],)
        elif OWN and U > 0:
            found = found + (gl.where(owner == U, made[i], sums[i]),)
        else:
            found = found + (made[i % 8],)
    return found


@gluon.jit
def _half(packed, ROW: gl.constexpr):
    """float32 of the float16 of a row, of a packed number."""
    v = packed
    if ROW >= 2:
        v = packed >> 32
    v = v.to(gl.int32)
    if ROW % 2 == 1:
        v = v >> 16
    return (v & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _byte(packed, ROW: gl.constexpr, OFFSET: gl.constexpr):
    """float32 of the byte of a row, less OFFSET: it is put below the exponent of 2^23."""
    word = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r",
        [packed, gl.full_like(packed, 0x4B000000), gl.full_like(packed, 0x7540 + ROW)],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return word.to(gl.float32, bitcast=True) - (8388608.0 + OFFSET)


@gluon.jit
def _row_scaled(
    a, sums, totals, scales, ROW: gl.constexpr, S: gl.constexpr, UNIT: gl.constexpr,
    EVENS: gl.constexpr, OFF: gl.constexpr, SCALING: gl.constexpr, MINIMUMS: gl.constexpr,
):  # fmt: skip
    """a with the sums of set S of a row of a lane."""
    R: gl.constexpr = 8 * S + 2 * (ROW % 2)  # of a product's four numbers
    t0 = totals[2 * S]
    t1 = totals[2 * S + 1]
    v0 = sums[R] * EVENS + sums[R + 4]
    v1 = sums[R + 1] * EVENS + sums[R + 5]
    if OFF > 0:
        v0 -= t0 * (OFF / UNIT)
        v1 -= t1 * (OFF / UNIT)
    if SCALING == "half":
        a += _half(scales[0], ROW) * UNIT * v0
        a += _half(scales[1], ROW) * UNIT * v1
        if MINIMUMS:
            a += _half(scales[2], ROW) * t0 + _half(scales[3], ROW) * t1
    elif SCALING == "six":
        low0 = scales[2].to(gl.int32)
        low1 = scales[3].to(gl.int32)
        up = scales[4].to(gl.int32)
        s0 = _byte((low0 & 0x0F0F0F0F) | ((up & 0x03030303) << 4), ROW, 0)
        s1 = _byte((low1 & 0x0F0F0F0F) | (up & 0x30303030), ROW, 0)
        a += _half(scales[0], ROW) * UNIT * (s0 * v0 + s1 * v1)
        if MINIMUMS:
            m0 = _byte(((low0 >> 4) & 0x0F0F0F0F) | ((up & 0x0C0C0C0C) << 2), ROW, 0)
            m1 = _byte(((low1 >> 4) & 0x0F0F0F0F) | ((up >> 2) & 0x30303030), ROW, 0)
            a -= _half(scales[1], ROW) * (m0 * t0 + m1 * t1)
    else:
        s0 = _byte(scales[1 + 2 * S].to(gl.int32) ^ -2139062144, ROW, 128)  # 0x80808080
        s1 = _byte(scales[2 + 2 * S].to(gl.int32) ^ -2139062144, ROW, 128)
        a += _half(scales[0], ROW) * UNIT * (s0 * v0 + s1 * v1)
    return a


@gluon.jit
def add_scaled(
    acc, sums, totals, scales, Q: gl.constexpr, LOW: gl.constexpr, OFF: gl.constexpr,
    SCALING: gl.constexpr, MINIMUMS: gl.constexpr, SETS: gl.constexpr, ROWS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """acc with the sums of two rows, 2 Q and 2 Q + 1 of a lane.

    Args:
        totals: sums of x of sub-blocks 2 t and 2 t + 1, of each set.
        OFF: what codes are too large by.
    """
    HALF: gl.constexpr = DTYPE == gl.float16
    UNIT: gl.constexpr = (1048576.0 if LOW == 4 else 16777216.0) if HALF else 1.0
    EVENS: gl.constexpr = 16.0 if HALF and LOW == 4 else 1.0
    found = ()
    for i in gl.static_range(ROWS):
        a = acc[i]
        if i // 2 == Q:
            for s in gl.static_range(SETS):
                a = _row_scaled(a, sums, totals, scales, i, s, UNIT, EVENS, OFF, SCALING, MINIMUMS)
        found = found + (a,)
    return found
