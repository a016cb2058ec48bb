"""GGUF blocks to 8-bit operands in Triton: four codes of a word at a time, and their scales.

::

    low, high [N, W] words --codes8_of-->   code  [N, W * 32 / LOW] int8, the table looked up
    d, sub_scales          --scales_of-->   scale, minimum [N] float32 of one sub-block or two

Bits lie as `tilewright.layout.blocks` draws them; constexprs are the fields of its `BlockForm`. A
word has F = 8 / LOW fields of four codes, which one mask selects: field f is the four numbers
``word >> LOW f & mask``, one a byte. Byte b of it is the code of column::

    j = 2 (f + F (b % 2)) + b / 2

of the word's 32 / LOW. No code is moved to its place: the columns of x are stored in the order in
which codes come out (`quantize_rows`). A step is a block of 32 columns, in one of two orders of
(word r, field f, byte b), of which the last varies fastest::

    SUB 32, LOW 4   f r b    what one thread of a matrix unit takes of a row lies in one word
    else            r f b    words, and with them sub-blocks of 16 columns, keep their order
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.ops.mmq.triton_parts import fp4_double, iq4_level

__all__: list[str] = []


@triton.jit
def _moved(word, TO: tl.constexpr, FROM: tl.constexpr):
    """Bits that begin at FROM moved to begin at TO; others come along."""
    if TO > FROM:
        return word << (TO - FROM)
    elif FROM > TO:
        return word >> (FROM - TO)
    else:
        return word


@triton.jit
def _field(low, high, f: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Four codes of each word, one a byte, no sign and no offset."""
    F: tl.constexpr = 8 // LOW
    EACH: tl.constexpr = 0x01010101
    code = low
    if LOW < 8:
        code = _moved(low, 0, LOW * f) & (EACH * ((1 << LOW) - 1))
    if HIGH > 0:
        # Bytes 0 and 2 hold pair f of a half of the word, bytes 1 and 3 pair f + F.
        TOP: tl.constexpr = ((1 << HIGH) - 1) << LOW
        code = code | (_moved(high, LOW, HIGH * f) & (TOP * 0x00010001))
        code = code | (_moved(high, LOW + 8, HIGH * (f + F)) & (TOP * 0x01000100))
    return code


@triton.jit
def _bytes_of(words):
    """int32 [N, W] -> int8 [N, 4 W], the lowest byte first."""
    pairs0 = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    pairs1 = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.join(pairs0, pairs1).reshape(words.shape[0], words.shape[1] * 4)


@triton.jit
def codes8_of(
    low, high, LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr,
    SUB: tl.constexpr,
):  # fmt: skip
    """The codes of words of both planes as int8, in the order of the module.

    Args:
        low: int32 [N, W].
        high: int32 [N, W], shifted so that the bits of this word's codes begin at bit 0; not read
            where HIGH is 0.

    Returns:
        int8 [N, W * 32 / LOW].
    """
    N: tl.constexpr = low.shape[0]
    W: tl.constexpr = low.shape[1]
    F: tl.constexpr = 8 // LOW
    if F == 1:
        words = low
    elif F == 2:
        words = tl.join(_field(low, high, 0, LOW, HIGH), _field(low, high, 1, LOW, HIGH))
        if SUB == 32:
            words = words.permute(0, 2, 1)
        words = words.reshape(N, 2 * W)
    else:
        even = tl.join(_field(low, high, 0, LOW, HIGH), _field(low, high, 2, LOW, HIGH))
        odd = tl.join(_field(low, high, 1, LOW, HIGH), _field(low, high, 3, LOW, HIGH))
        words = tl.join(even, odd).reshape(N, 4 * W)
    if CODES == "offset" and OFFSET > 0:
        # A code and 128 - OFFSET fit a byte, and the top bit taken over leaves code - OFFSET.
        BIAS: tl.constexpr = (128 - OFFSET) * 0x01010101
        words = (words + BIAS) ^ -0x7F7F7F80
    if CODES == "iq4":
        return iq4_level(_bytes_of(words).to(tl.int32)).to(tl.int8)
    elif CODES == "fp4":
        return fp4_double(_bytes_of(words).to(tl.int32)).to(tl.int8)
    else:
        return _bytes_of(words)


@triton.jit
def raw_of(
    s_ptrs, m_ptrs, t_ptrs, block, stride_sb, stride_mb, stride_tb,
    SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the scales of a block of 32 columns are made of, as it lies in memory, [N] each: d, its
    like for minimums, and two bytes of integers. Loaded a step before `scales_of` needs it.

    Args:
        s_ptrs, m_ptrs, t_ptrs: of the rows of scales, minimums and sub-scales, [N].
        block: of K, one number, not negative.
    """
    PARTS: tl.constexpr = BLOCK // 32
    at = block
    i = 0
    if PARTS == 8:
        at = block >> 3
        i = tl.cast(block & 7, tl.int32)
    scale = tl.load(s_ptrs + at * stride_sb)
    minimum = scale
    first = scale
    second = scale
    if MINIMUMS:
        minimum = tl.load(m_ptrs + at * stride_mb)
    if BYTES > 0:
        t_ptrs += at * BYTES * stride_tb
        if SCALING == "six":
            COUNT: tl.constexpr = BYTES * 4 // 3
            EACH: tl.constexpr = COUNT // PARTS  # numbers of a block of 32 columns, 1 or 2
            first = tl.load(t_ptrs + (i * EACH >> 1) * stride_tb)
            second = tl.load(t_ptrs + (COUNT // 2 + (i * EACH >> 2)) * stride_tb)
        else:
            first = tl.load(t_ptrs + 2 * i * stride_tb)
            second = tl.load(t_ptrs + (2 * i + 1) * stride_tb)
    return scale, minimum, first, second


@triton.jit
def scales_of(
    scale, minimum, first, second, block,
    SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr, SUB_OFFSET: tl.constexpr,
):  # fmt: skip
    """Scales and minimums of a block of 32 columns from what `raw_of` loaded, float32 [N]: of its
    halves where SUB is 16, else twice the same. Exact, as in `triton_parts`."""
    if SCALING == "exponent":
        e = scale.to(tl.uint32)
        bits = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23)  # 2^-128 and 2^-127 are subnormal
        d = bits.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        d = scale.to(tl.float32)
    low = minimum.to(tl.float32)
    if SCALING == "half" or SCALING == "exponent":
        return d, low, d, low
    first = first.to(tl.int32)
    second = second.to(tl.int32)
    if SCALING == "bytes":
        one = d * ((first ^ 128) - 128).to(tl.float32)
        return one, low, d * ((second ^ 128) - 128).to(tl.float32), low
    elif SCALING == "nibbles":
        one = d * (first & 15).to(tl.float32)
        other = d * (second & 15).to(tl.float32)
        return (
            one, -low * (first >> 4).to(tl.float32),
            other, -low * (second >> 4).to(tl.float32),
        )  # fmt: skip
    else:
        i = tl.cast(block & 7, tl.int32)
        if BYTES == 6:  # one number a block of 32 columns
            number = ((first >> (4 * (i & 1))) & 15) | (((second >> (2 * (i & 3))) & 3) << 4)
            one = d * (number - SUB_OFFSET).to(tl.float32)
            return one, low, one, low
        else:
            second = second >> (4 * (i & 1))
            even = (first & 15) | ((second & 3) << 4)
            odd = (first >> 4) | (((second >> 2) & 3) << 4)
            if MINIMUMS:
                one = d * even.to(tl.float32)
                least = -low * odd.to(tl.float32)
                return one, least, one, least
            else:
                one = d * (even - SUB_OFFSET).to(tl.float32)
                return one, low, d * (odd - SUB_OFFSET).to(tl.float32), low


@triton.jit
def first_step_of(unit, total, units):
    """`schedule.first_step`."""
    return unit * (total // units) + tl.minimum(unit, total % units)


@triton.jit
def unit_of_step(step, total, units):
    """`schedule.unit_of`."""
    least = total // units
    longer = total % units
    edge = longer * (least + 1)
    after = longer + (step - edge) // tl.maximum(least, 1)
    return tl.where(step < edge, step // (least + 1), after)
