"""What the Hopper kernels share: layouts, and weights dequantized in the registers of wgmma.

Both kernels compute the transposed product, acc[n, m] += w[n, k] x[m, k], so that the weights are
wgmma's A operand, which may come from registers, and x lies in shared memory as its B operand::

    words [BN / 64, 4, 128] --load--> [BN / 2, 16] --dequantize--> w [BN, 16 j] --wgmma--> acc

A word holds a thread's eight values of one k16 step (`tilewright.layout.hopper`), so every change
of shape below only renames registers; `assert_trivial` holds the compiler to it. Fields of a word
are met in pairs, k1 = 0 in the low half::

    float16   even field  (x & 000F000F) | 6400  = 1024 + q       - (1024 + z)
              odd field   (x & 00F000F0) | 6400  = 1024 + 16 q    / 16 - (64 + z), one fma
    bfloat16  any field   (x & 000F000F) | 4300  = 128 + q        - (128 + z)

All of them are exact; the product with the scale, in the same dtype, is rounded once. bfloat16 has
too few bits for the odd field's form and shifts instead. Scales and zero points come as one word
and one byte for a thread's two rows: even fields belong to the first, odd fields to the second.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "TileLayouts",
    "accumulator_of_halves",
    "dequantize",
    "flat_halves",
    "flat_layout",
    "load_scales",
    "load_words",
    "load_zeros",
    "rows_layout",
    "split_steps",
    "sums_layout",
    "tile_layouts",
    "words_layout",
]

_FP16_ASM = gl.constexpr("""{
.reg .b32 t0, t1, t2, t3, u;
shr.u32 u, $8, 8;
lop3.b32 t0, $8, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 t1, $8, 0x00F000F0, 0x64006400, 0xEA;
lop3.b32 t2, u,  0x000F000F, 0x64006400, 0xEA;
lop3.b32 t3, u,  0x00F000F0, 0x64006400, 0xEA;
sub.f16x2 t0, t0, $10;
fma.rn.f16x2 t1, t1, $13, $12;
sub.f16x2 t2, t2, $10;
fma.rn.f16x2 t3, t3, $13, $12;
mul.f16x2 t0, t0, $9;
mul.f16x2 t1, t1, $11;
mul.f16x2 t2, t2, $9;
mul.f16x2 t3, t3, $11;
mov.b32 {$0, $1}, t0;
mov.b32 {$2, $3}, t1;
mov.b32 {$4, $5}, t2;
mov.b32 {$6, $7}, t3;
}""")

_BF16_ASM = gl.constexpr("""{
.reg .b32 t0, t1, t2, t3, u1, u2, u3;
shr.u32 u1, $8, 4;
shr.u32 u2, $8, 8;
shr.u32 u3, $8, 12;
lop3.b32 t0, $8, 0x000F000F, $13, 0xEA;
lop3.b32 t1, u1, 0x000F000F, $13, 0xEA;
lop3.b32 t2, u2, 0x000F000F, $13, 0xEA;
lop3.b32 t3, u3, 0x000F000F, $13, 0xEA;
sub.bf16x2 t0, t0, $10;
sub.bf16x2 t1, t1, $12;
sub.bf16x2 t2, t2, $10;
sub.bf16x2 t3, t3, $12;
mul.bf16x2 t0, t0, $9;
mul.bf16x2 t1, t1, $11;
mul.bf16x2 t2, t2, $9;
mul.bf16x2 t3, t3, $11;
mov.b32 {$0, $1}, t0;
mov.b32 {$2, $3}, t1;
mov.b32 {$4, $5}, t2;
mov.b32 {$6, $7}, t3;
}""")


@gluon.jit
def _low_pair(word):
    """Both halves of the result are the low half of `word`."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _high_pair(word):
    """Both halves of the result are the high half of `word`."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def load_words(buffer, WORDS: gl.constexpr):
    """Words of one or two 64-wide blocks of K, shared memory [BN / 64, 4 blocks, 128]: each block's
    words [BN / 2, 16]."""
    NB: gl.constexpr = buffer.shape[0]
    words = buffer.load(WORDS)
    if buffer.shape[1] == 4:
        return (gl.reshape(words, (NB * 32, 16)),)
    else:
        both = gl.permute(gl.reshape(words, (NB, 2, 32, 16)), (0, 2, 3, 1))
        return gl.split(gl.reshape(both, (NB * 32, 16, 2)))


@gluon.jit
def _by_group(v):
    """[BN / 64, groups, 32] as one tensor [BN / 2] a group, of 1, 2 or 4 groups."""
    ROWS: gl.constexpr = v.shape[0] * 32
    if v.shape[1] == 1:
        return (gl.reshape(v, (ROWS,)),)
    elif v.shape[1] == 2:
        return gl.split(gl.reshape(gl.permute(v, (0, 2, 1)), (ROWS, 2)))
    else:
        even, odd = gl.split(gl.reshape(gl.permute(v, (0, 2, 1)), (ROWS, 2, 2)))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        return first, second, third, fourth


@gluon.jit
def load_scales(buffer, ROW_WORDS: gl.constexpr):
    """Scale words, shared memory int32 [BN / 64, groups, 32], to a pair (row, row + 8) a group."""
    groups = _by_group(buffer.load(ROW_WORDS))
    pairs = ()
    for g in gl.static_range(len(groups)):
        pairs = pairs + ((_low_pair(groups[g]), _high_pair(groups[g])),)
    return pairs


@gluon.jit
def _zero_pairs(zeros, DTYPE: gl.constexpr):
    """Zero bytes int32 [BN / 2] to what `dequantize` subtracts, for row and row + 8."""
    twice = _low_pair(zeros)
    if DTYPE == gl.float16:
        return (twice & 0x000F000F) | 0x64006400, (twice & 0x00F000F0) | -0x2BFF2C00  # D400D400
    else:
        return (twice & 0x000F000F) | 0x43004300, ((twice >> 4) & 0x000F000F) | 0x43004300


@gluon.jit
def load_zeros(buffer, scales, ROW_WORDS: gl.constexpr, DTYPE: gl.constexpr, ASYM: gl.constexpr):
    """Zero bytes, shared memory uint8 [BN / 64, groups, 32], to a pair (row, row + 8) a group.

    Without ASYM the buffer is not read and every zero point is 8, in the shape of `scales`.
    """
    pairs = ()
    if ASYM:
        groups = _by_group(buffer.load(ROW_WORDS).to(gl.int32))
        for g in gl.static_range(len(groups)):
            pairs = pairs + (_zero_pairs(groups[g], DTYPE),)
    else:
        for g in gl.static_range(len(scales)):
            pairs = pairs + (_zero_pairs(gl.full_like(scales[g][0], 0x88), DTYPE),)
    return pairs


@gluon.jit
def split_steps(words):
    """[BN / 2, 16] = (lk, j) into the words [BN / 2, 4] of its four k16 steps j."""
    even, odd = gl.split(gl.reshape(words, (words.shape[0], 4, 2, 2)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def dequantize(words, scales, zeros, ACC: gl.constexpr, DTYPE: gl.constexpr):
    """int32 [BN / 2, 4 J], a pair of scales and of zeros, to w [BN, 16 J] as wgmma's A operand."""
    ROWS: gl.constexpr = words.shape[0] * 2
    J: gl.constexpr = words.shape[1] // 4
    ROW: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    q, s0 = gl.broadcast(
        words, gl.expand_dims(gl.convert_layout(scales[0], ROW, assert_trivial=True), 1)
    )
    q, s1 = gl.broadcast(
        words, gl.expand_dims(gl.convert_layout(scales[1], ROW, assert_trivial=True), 1)
    )
    q, z0 = gl.broadcast(
        words, gl.expand_dims(gl.convert_layout(zeros[0], ROW, assert_trivial=True), 1)
    )
    q, z1 = gl.broadcast(
        words, gl.expand_dims(gl.convert_layout(zeros[1], ROW, assert_trivial=True), 1)
    )
    if DTYPE == gl.float16:
        a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
            _FP16_ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r",
            [words, s0, z0, s1, z1, gl.full_like(words, 0x2C002C00)],  # 1 / 16, twice
            dtype=(gl.float16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
            _BF16_ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r",
            [words, s0, z0, s1, z1, gl.full_like(words, 0x43004300)],  # 128, twice
            dtype=(gl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    low = gl.join(gl.join(a0, b0), gl.join(c0, d0))  # [.., r8, kh] of k1 = 0
    high = gl.join(gl.join(a1, b1), gl.join(c1, d1))
    w = gl.reshape(gl.join(low, high), (ROWS // 16, 8, 4, J, 2, 2, 2))
    w = gl.permute(w, (0, 4, 1, 3, 5, 2, 6))  # [warp, r8, lrow, j, kh, lk, k1]
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    return gl.convert_layout(gl.reshape(w, (ROWS, 16 * J)), A, assert_trivial=True)


@gluon.jit
def flat_halves(acc, FLAT: gl.constexpr):
    """acc [BN, BM] as two vectors (r8 = 0 and 1) that warps store and load in 16-byte pieces."""
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    v = gl.reshape(acc, (BN // 16, 2, 8, BM // 16, 2, 4, 2))  # [warp, r8, lrow, m16, m8, lk, m1]
    v = gl.reshape(gl.permute(v, (0, 3, 2, 5, 4, 6, 1)), (BN * BM // 2, 2))
    first, second = gl.split(v)
    return (
        gl.convert_layout(first, FLAT, assert_trivial=True),
        gl.convert_layout(second, FLAT, assert_trivial=True),
    )


@gluon.jit
def accumulator_of_halves(first, second, BN: gl.constexpr, BM: gl.constexpr, ACC: gl.constexpr):
    """What `flat_halves` made, as [BN, BM] again."""
    v = gl.reshape(gl.join(first, second), (BN // 16, BM // 16, 8, 4, 2, 2, 2))
    v = gl.permute(v, (0, 6, 2, 1, 4, 3, 5))  # from [warp, m16, lrow, lk, m8, m1, r8]
    return gl.convert_layout(gl.reshape(v, (BN, BM)), ACC, assert_trivial=True)


class TileLayouts(NamedTuple):
    """Register and shared layouts of one tile.

    Attributes:
        words: registers of the words [BN / 64, 4 blocks, 128] of 64-wide blocks of K.
        row_words: registers of scale words and zero bytes [BN / 64, groups, 32].
        acc: registers of the accumulator [BN, BM].
        flat: registers of each of `flat_halves` [BN * BM / 2].
        x_shared: of x [BM, 64] and y [BM, BN]: 16 bits, swizzled by 128 bytes.
        words_shared, zeros_shared: of words and scale words, and of zero bytes: not swizzled.
    """

    words: Any
    row_words: Any
    acc: Any
    flat: Any
    x_shared: Any
    words_shared: Any
    zeros_shared: Any


@gluon.constexpr_function
def _powers(first, end):
    """first, 2 first, 4 first, ... below `end`."""
    return [first << i for i in range((end // first).bit_length() - 1)]


@gluon.constexpr_function
def words_layout(block_n, num_warps, blocks):
    """Registers of words [BN / 64, 4 blocks, 128]. As arguments of the kernel, this and the layouts
    below would be hashed at every launch."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]] + [[0, 4, 0]] * (blocks - 1)
        + [[r // 32, r // 8 % 4, 0] for r in _powers(8 * num_warps, block_n // 2)],
        [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 0, 64]],
        [[r // 32, r // 8 % 4, 0] for r in _powers(8, 8 * num_warps)],
        [],
        [block_n // 64, 4 * blocks, 128],
    )  # fmt: skip


@gluon.constexpr_function
def rows_layout(block_n, num_warps, groups):
    """Registers of scale words and zero bytes [BN / 64, groups, 32]."""
    return gl.DistributedLinearLayout(
        [[0, g, 0] for g in _powers(1, groups)]
        + [[r // 32, 0, r % 32] for r in _powers(8 * num_warps, block_n // 2)],
        [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[r // 32, 0, r % 32] for r in _powers(8, 8 * num_warps)],
        [],
        [block_n // 64, groups, 32],
    )


@gluon.constexpr_function
def sums_layout(block_m, num_warps):
    """Registers of the accumulator [BN, BM]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, block_m, 16]
    )


@gluon.constexpr_function
def flat_layout(block_n, block_m, num_warps):
    """Registers of each of `flat_halves` [BN * BM / 2]."""
    warp = 8 * block_m  # what one warp holds of 16 rows
    half = block_n * block_m // 2
    return gl.DistributedLinearLayout(
        [[1], [2]] + [[i] for i in _powers(128, warp) + _powers(warp * num_warps, half)],
        [[4], [8], [16], [32], [64]],
        [[i] for i in _powers(warp, warp * num_warps)],
        [],
        [half],
    )


def tile_layouts(
    block_n: int, block_m: int, num_warps: int, blocks: int = 1, groups: int = 1
) -> TileLayouts:
    """Layouts of a tile of `block_n` rows of the weight and `block_m` rows of x.

    Args:
        block_n: a power of two and a multiple of 16 * num_warps, so at least 64.
        block_m: a power of two, 8 to 256.
        num_warps: of the partition that multiplies, 4 or 8.
        blocks: of 64 columns that are loaded together, 1 or 2.
        groups: of scales that are loaded together, 1, 2 or 4.
    """
    return TileLayouts(
        words=words_layout(block_n, num_warps, blocks),
        row_words=rows_layout(block_n, num_warps, groups),
        acc=sums_layout(block_m, num_warps),
        flat=flat_layout(block_n, block_m, num_warps),
        x_shared=gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
        words_shared=gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3),
        zeros_shared=gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=3),
    )
