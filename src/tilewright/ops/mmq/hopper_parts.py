"""GGUF blocks to weights in the registers of wgmma: layouts and device functions.

The product is transposed, acc[n, m] += w[n, k] x[m, k], so that the weights are wgmma's A operand,
which may come from registers. Of a k16 step a thread (lrow, lk) of a warp holds rows lrow and
lrow + 8 (r8), and of each 8 columns (kh) the pair 2 lk, 2 lk + 1: lk = 2 lk1 + lk0. Pairs are the
elements of tensors [BN, 2 (kh), 2 (lk1), 2 (lk0)], and a pair lies in the two halves of one word of
`tilewright.layout.blocks`, which up to eight threads read, each rotating its own pair into place::

    bits of the plane   columns of a word   words of a k16 step        its pair's lowest bit
    8                   4                   [BN, kh, lk1]              8 lk0
    4                   8                   [BN, kh]                   4 lk
    2                   16                  [BN]                       8 kh + 2 lk
    1                   32                  [BN], of two steps e0      8 e0 + 4 kh + lk

    (rotated & mask) | 64006400  = 1024 + code, twice, the plane of upper bits added above the lower
    - (1024 + offset)            = code, exactly

From there each sub-block's numbers, which `hopper_scales` makes, lead to a weight that is rounded
once (`hopper_math`).

Every change of shape only renames registers; `assert_trivial` holds the compiler to it.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.ops.mmq.hopper_math import code_lines, pair_of, weight_lines

__all__ = ["dequantize", "load_numbers", "load_words", "pairs_layout", "turns_of"]


@gluon.constexpr_function
def _dequant_asm(low, high, codes, math, dtype):
    """PTX from words to a pair of weights: two halves out; in come the low word and its turn, the
    high word and its turn if there is one, -(1024 + offset) twice, and the numbers of `math`."""
    mask = {8: 0x00FF00FF, 4: 0x000F000F, 2: 0x00030003}[low]
    lines = [".reg .b32 t, u, v;", "shf.r.wrap.b32 t, $2, $2, $3;"]
    lines += code_lines(codes, mask, "t")
    at = 4
    if high:
        upper = ((1 << high) - 1) << low
        lines.append(f"shf.r.wrap.b32 u, ${at}, ${at}, ${at + 1};")
        lines.append(f"lop3.b32 t, u, {upper << 16 | upper:#010x}, t, 0xEA;")
        at += 2
    lines.append(f"add.rn.f16x2 t, t, ${at};")
    lines += weight_lines(math, dtype, at + 1)
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _rows(BN, WARPS, RANK):
    """Bases of rows: of registers, lanes and warps."""

    def row(n):
        return [n] + [0] * (RANK - 1)

    registers, n = [row(8)], 16 * WARPS
    while n < BN:
        registers.append(row(n))
        n *= 2
    warps, n = [], 1
    while n < WARPS:
        warps.append(row(16 * n))
        n *= 2
    return registers, [row(1), row(2), row(4)], warps


@gluon.constexpr_function
def pairs_layout(BN, WARPS):
    """Of pairs [BN, kh, lk1, lk0]."""
    registers, lanes, warps = _rows(BN, WARPS, 4)
    return gl.DistributedLinearLayout(
        [[0, 1, 0, 0], *registers], [[0, 0, 0, 1], [0, 0, 1, 0], *lanes], warps, [], [BN, 2, 2, 2]
    )


@gluon.constexpr_function
def rows_of(PAIRS):
    """Of what belongs to rows, [BN]."""
    return gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, PAIRS)))


@gluon.constexpr_function
def words_of(PAIRS, BITS):
    """Of the words of a k16 step."""
    if BITS == 8:
        return gl.SliceLayout(3, PAIRS)
    if BITS == 4:
        return gl.SliceLayout(2, gl.SliceLayout(3, PAIRS))
    return rows_of(PAIRS)


@gluon.constexpr_function
def _loaded_layout(BN, WARPS, BITS):
    """Of the words of 64 columns, [BN, 2 BITS], as they are loaded."""
    registers, lanes, warps = _rows(BN, WARPS, 2)
    columns = [[0, 1 << i] for i in range((2 * BITS).bit_length() - 1)]
    shared = [[0, 0], [0, 0]]
    if BITS == 8:
        shared[1] = columns.pop(0)
    return gl.DistributedLinearLayout(
        [*columns, *registers], [*shared, *lanes], warps, [], [BN, 2 * BITS]
    )


@gluon.jit
def load_words(buffer, BITS: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr):
    """Words of 64 columns, shared memory [BN, 2 BITS], as a tuple of four k16 steps."""
    BN: gl.constexpr = buffer.shape[0]
    v = buffer.load(_loaded_layout(BN, WARPS, BITS))
    TO: gl.constexpr = words_of(PAIRS, BITS)
    if BITS == 8:
        v = gl.permute(gl.reshape(v, (BN, 2, 2, 2, 2)), (0, 3, 4, 2, 1))  # [.., e0, e1]
    elif BITS == 4:
        v = gl.permute(gl.reshape(v, (BN, 2, 2, 2)), (0, 3, 2, 1))
    elif BITS == 2:
        v = gl.permute(gl.reshape(v, (BN, 2, 2)), (0, 2, 1))
    first, second = gl.split(v)
    if BITS == 1:
        a = gl.convert_layout(first, TO, assert_trivial=True)
        c = gl.convert_layout(second, TO, assert_trivial=True)
        return a, a, c, c
    else:
        a, b = gl.split(first)
        c, d = gl.split(second)
        return (
            gl.convert_layout(a, TO, assert_trivial=True),
            gl.convert_layout(b, TO, assert_trivial=True),
            gl.convert_layout(c, TO, assert_trivial=True),
            gl.convert_layout(d, TO, assert_trivial=True),
        )


@gluon.constexpr_function
def _only(layout, dim):
    """The layout of a vector along dimension `dim` of pairs."""
    for other in reversed(range(4)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _along(DIM: gl.constexpr, PAIRS: gl.constexpr):
    """0 and 1 along dimension DIM of pairs, with size 1 in the others."""
    v = gl.arange(0, 2, _only(PAIRS, DIM))
    for other in gl.static_range(4):
        if other != DIM:
            v = gl.expand_dims(v, other)
    return v


@gluon.jit
def turns_of(BITS: gl.constexpr, AT: gl.constexpr, PAIRS: gl.constexpr):
    """By how many bits words of a plane are rotated to the right so that each thread's pair comes
    to bit AT: for steps e0 = 0 and 1."""
    lk = _along(2, PAIRS) * 2 + _along(3, PAIRS)
    if BITS == 8:
        turn = _along(3, PAIRS) * 8 - AT
        return turn, turn
    elif BITS == 4:
        turn = lk * 4 - AT
        return turn, turn
    elif BITS == 2:
        turn = _along(1, PAIRS) * 8 + lk * 2 - AT
        return turn, turn
    else:
        turn = _along(1, PAIRS) * 4 + lk - AT
        return turn, turn + 8


@gluon.jit
def _expand(v, RANK: gl.constexpr):
    for dim in gl.static_range(RANK, 4):
        v = gl.expand_dims(v, dim)
    return v


@gluon.constexpr_function
def _numbers_layout(BN, WARPS, COUNT):
    """Of the numbers of a sub-block of each row, [BN, COUNT], as they are loaded."""
    registers, lanes, warps = _rows(BN, WARPS, 2)
    columns = [[0, 1 << i] for i in range(COUNT.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [*columns, *registers], [[0, 0], [0, 0], *lanes], warps, [], [BN, COUNT]
    )


@gluon.jit
def load_numbers(buffer, PAIRS: gl.constexpr, WARPS: gl.constexpr):
    """Numbers of a sub-block of each row, shared memory int32 [BN, 1 or 2], as a tuple."""
    BN: gl.constexpr = buffer.shape[0]
    COUNT: gl.constexpr = buffer.shape[1]
    TO: gl.constexpr = rows_of(PAIRS)
    v = buffer.load(_numbers_layout(BN, WARPS, COUNT))
    if COUNT == 1:
        return (gl.convert_layout(gl.reshape(v, (BN,)), TO, assert_trivial=True),)
    else:
        a, b = gl.split(v)
        return (
            gl.convert_layout(a, TO, assert_trivial=True),
            gl.convert_layout(b, TO, assert_trivial=True),
        )


@gluon.jit
def dequantize(
    low, high, low_turn, high_turn, offset, numbers, LOW: gl.constexpr, HIGH: gl.constexpr,
    CODES: gl.constexpr, MATH: gl.constexpr, ACC: gl.constexpr, PAIRS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """A k16 step of the weight [BN, 16] as wgmma's A operand.

    Args:
        low, high: words of the step, as `load_words` gives them.
        low_turn, high_turn: of `turns_of`.
        offset: int32, the bits of -(1024 + offset), twice, as float16.
        numbers: of the step's sub-block, as `load_numbers` gives them.
    """
    BN: gl.constexpr = numbers[0].shape[0]
    full = gl.zeros((BN, 2, 2, 2), gl.int32, PAIRS)
    args = (
        full + _expand(low, len(low.shape)),
        full + low_turn,
    )
    if HIGH:
        args = args + (full + _expand(high, len(high.shape)), full + high_turn)
    args = args + (full + offset,)
    for i in gl.static_range(len(numbers)):
        args = args + (full + _expand(numbers[i], 1),)
    ASM: gl.constexpr = _dequant_asm(LOW, HIGH, CODES, MATH, DTYPE)
    first, second = pair_of(args, ASM, DTYPE)
    w = gl.reshape(gl.join(first, second), (BN, 16))
    return gl.convert_layout(w, gl.DotOperandLayout(0, ACC, 2), assert_trivial=True)
