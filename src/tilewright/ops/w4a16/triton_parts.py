"""What the portable Triton kernels of w4a16 share: words to weights, and numbers of bfloat16.

::

    words [.., KW]  --unpack-->  pairs of 16-bit numbers  --(pair - offset) * scale-->  w [.., BK]

Eight codes of a word lie in four pairs of 16-bit lanes (`tilewright.layout.triton`). Masked and
shifted, ``word >> 4 p & 0x000F000F``, then or-ed with the pattern of 1024 (float16) or 128
(bfloat16), a pair is exactly 1024 + q or 128 + q; the offset 1024 + z or 128 + z takes the power of
two away again, exactly. One multiplication by the scale follows, and rounds once.

ASM says in whose instructions a pair is computed:

    "none"  Triton's own operations, half by half; the compiler may join them. In the interpreter,
            and wherever the two below do not serve.
    "amd"   v_and_or_b32, v_pk_add_f16, v_pk_mul_f16: float16.
    "cdna"  the same, and a wait: the compiler, which does not look into assembly, does not know
            that a matrix instruction may not read these registers at once.
    "nv"    lop3, sub and mul on f16x2, and on bf16x2 from sm_90 on.

All give the same numbers: (q - z) is exact in any of them, and the product is rounded once.

W is dequantized as [BLOCK_K, BLOCK_N], the right operand of a dot ("xw"), or as [BLOCK_N, BLOCK_K],
the left one ("wx"); AXIS is the dimension of a vector over N in it, 1 or 0.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import triton
import triton.language as tl

__all__: list[str] = []


@triton.jit
def bits_to_float(bits):
    """bfloat16 patterns (integers below 2^16) as float32, exact."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_to_float(pair):
    """The bfloat16 in the high half of int32 lanes as float32, exact."""
    return (pair.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_bits(v):
    """float32 rounded to the nearest bfloat16, ties to even; its pattern as uint32."""
    bits = v.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(v == v, rounded, 0x7FC0)


@triton.jit
def operand(v, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 rounded to `dtype`, as tl.dot takes it."""
    if INTERPRET and dtype == tl.bfloat16:
        return bits_to_float(bfloat16_bits(v))
    else:
        return v.to(dtype)


@triton.jit
def to_float32(v, INTERPRET: tl.constexpr):
    """A loaded scale or bias, or a tile of x, as float32."""
    if INTERPRET and v.dtype == tl.bfloat16:
        return bits_to_float(v.to(tl.uint16, bitcast=True))
    else:
        return v.to(tl.float32)


@triton.jit
def halves(pair, dtype: tl.constexpr):
    """The low and the high 16 bits of int32 lanes as `dtype`."""
    low = (pair & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return low, high


@triton.jit
def code_pair(q, P: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """Codes 2P and 2P + 1 of words as the pair 1024 + q (float16) or 128 + q (bfloat16)."""
    shifted = q >> (4 * P) if P > 0 else q
    if ASM == "nv":
        if dtype == tl.float16:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x000F000F, 0x64006400, 0xEA;",
                "=r,r", [shifted], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;",
                "=r,r", [shifted], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
    elif ASM == "amd" or ASM == "cdna":
        return tl.inline_asm_elementwise(
            # Vector registers alone: RDNA4's hazards of scalar ones are not seen in assembly.
            "v_and_or_b32 $0, $1, $2, $3", "=v,v,v,v",
            [
                shifted,
                tl.full(q.shape, 0x000F000F, tl.int32),
                tl.full(q.shape, 0x64006400, tl.int32),
            ],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        one: tl.constexpr = 0x64006400 if dtype == tl.float16 else 0x43004300
        return (shifted & 0x000F000F) | one


@triton.jit
def scaled_pair(pair, offset, scale, dtype: tl.constexpr, ASM: tl.constexpr):
    """(pair - offset) * scale on both halves of int32 lanes, in the instructions of `ASM`."""
    if ASM == "cdna":
        return tl.inline_asm_elementwise(
            "v_pk_add_f16 $0, $1, $2 neg_lo:[0,1] neg_hi:[0,1]\nv_pk_mul_f16 $0, $0, $3\ns_nop 1",
            "=&v,v,v,v", [pair, offset, scale], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif ASM == "amd":
        return tl.inline_asm_elementwise(
            "v_pk_add_f16 $0, $1, $2 neg_lo:[0,1] neg_hi:[0,1]\nv_pk_mul_f16 $0, $0, $3",
            "=&v,v,v,v", [pair, offset, scale], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; sub.rn.f16x2 t, $1, $2; mul.rn.f16x2 $0, t, $3; }",
            "=r,r,r,r", [pair, offset, scale], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; sub.rn.bf16x2 t, $1, $2; mul.rn.bf16x2 $0, t, $3; }",
            "=r,r,r,r", [pair, offset, scale], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def twice(bits):
    """16-bit patterns in both halves of int32 lanes."""
    return bits | (bits << 16)


@triton.jit
def offset_pair(zero, dtype: tl.constexpr):
    """1024 + z or 128 + z in both halves of int32 lanes: what `code_pair` gives for a code z."""
    one: tl.constexpr = 0x6400 if dtype == tl.float16 else 0x4300
    return twice(zero + one)


@triton.jit
def by_column(j0, j1, j2, j3, j4, j5, j6, j7, AXIS: tl.constexpr, WORDS: tl.constexpr):
    """Eight tensors of the shape of the words, one for each code of a word, as w.

    Code j = 4 p1 + 2 p0 + h. Joined so that the permutations only rename registers.
    """
    low = tl.join(tl.join(j0, j4), tl.join(j2, j6))  # [.., p1, p0] with h = 0
    high = tl.join(tl.join(j1, j5), tl.join(j3, j7))
    w = tl.join(low, high)
    N: tl.constexpr = j0.shape[AXIS]
    K: tl.constexpr = j0.shape[1 - AXIS] * 8
    if AXIS == 0:
        if WORDS == "k32":  # column 8 p + 2 c + h of 32, in word c of 4
            w = w.reshape(N, K // 32, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5)
        return w.reshape(N, K)
    else:
        if WORDS == "k32":
            w = w.reshape(K // 32, 4, N, 2, 2, 2).permute(0, 3, 4, 1, 5, 2)
        else:
            w = w.permute(0, 2, 3, 4, 1)
        return w.reshape(K, N)


@triton.jit
def dequantize_scalar(
    q, zero, scale, dtype: tl.constexpr, AXIS: tl.constexpr, WORDS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Words to weights, a code at a time: (q - z) * s in float32, rounded to `dtype`.

    Args:
        q: int32 [BLOCK_K / 8, BLOCK_N], or [BLOCK_N, BLOCK_K / 8] for AXIS 0.
        zero, scale: int32 and float32, [1, BLOCK_N] or [BLOCK_N, 1].
    """
    j = tl.arange(0, 8)
    bit = (j // 2) * 4 + (j % 2) * 16
    N: tl.constexpr = q.shape[AXIS]
    K: tl.constexpr = q.shape[1 - AXIS] * 8
    if AXIS == 0:
        code = (q[:, :, None] >> bit[None, None, :]) & 15
        if WORDS == "k32":
            code = code.reshape(N, K // 32, 4, 4, 2).permute(0, 1, 3, 2, 4)
        code = code.reshape(N, K)
    else:
        code = (q[:, None, :] >> bit[None, :, None]) & 15
        if WORDS == "k32":
            code = code.reshape(K // 32, 4, 4, 2, N).permute(0, 2, 1, 3, 4)
        code = code.reshape(K, N)
    return operand((code - zero).to(tl.float32) * scale, dtype, INTERPRET)


@triton.jit
def rounded_half(v):
    """float32 rounded to the nearest bfloat16, ties to even; NaN is not looked for."""
    bits = v.to(tl.uint32, bitcast=True)
    half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return half.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def weight_half(code, offset, scale, ROUND: tl.constexpr):
    """(code - offset) * scale of float32 codes: float32, or bfloat16 where ROUND."""
    w = (code - offset) * scale
    return rounded_half(w) if ROUND else w


@triton.jit
def dequantize_packed(
    q, zero, scale, dtype: tl.constexpr, AXIS: tl.constexpr, WORDS: tl.constexpr,
    ROUND: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Words to weights, two codes at a time, in Triton's own operations.

    Args:
        q, zero: as in `dequantize_scalar`.
        scale: [1, BLOCK_N] or [BLOCK_N, 1]. float16 weights with float16 scales are multiplied in
            float16, others in float32.
        ROUND: bfloat16 is rounded in integers, for chips without an instruction for it: there the
            compiler would look for NaN in every weight, and scales are finite.
    """
    p0 = code_pair(q, 0, dtype, "none")
    p1 = code_pair(q, 1, dtype, "none")
    p2 = code_pair(q, 2, dtype, "none")
    p3 = code_pair(q, 3, dtype, "none")
    if dtype == tl.float16:
        o = (zero + 1024).to(tl.float16)
        j0, j1 = halves(p0, dtype)
        j2, j3 = halves(p1, dtype)
        j4, j5 = halves(p2, dtype)
        j6, j7 = halves(p3, dtype)
        w = by_column(j0 - o, j1 - o, j2 - o, j3 - o, j4 - o, j5 - o, j6 - o, j7 - o, AXIS, WORDS)
        if scale.dtype == tl.float16:
            return w * scale
        else:
            return (w.to(tl.float32) * to_float32(scale, INTERPRET)).to(dtype)
    else:
        o = (zero + 128).to(tl.float32)
        s = to_float32(scale, INTERPRET)
        j0 = weight_half(bits_to_float(p0 & 0xFFFF), o, s, ROUND)
        j1 = weight_half(high_to_float(p0), o, s, ROUND)
        j2 = weight_half(bits_to_float(p1 & 0xFFFF), o, s, ROUND)
        j3 = weight_half(high_to_float(p1), o, s, ROUND)
        j4 = weight_half(bits_to_float(p2 & 0xFFFF), o, s, ROUND)
        j5 = weight_half(high_to_float(p2), o, s, ROUND)
        j6 = weight_half(bits_to_float(p3 & 0xFFFF), o, s, ROUND)
        j7 = weight_half(high_to_float(p3), o, s, ROUND)
        w = by_column(j0, j1, j2, j3, j4, j5, j6, j7, AXIS, WORDS)
        return w if ROUND else operand(w, dtype, INTERPRET)


@triton.jit
def dequantize_asm(
    q, zero, scale_bits, dtype: tl.constexpr, AXIS: tl.constexpr, WORDS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Words to weights, two codes an instruction.

    Args:
        q, zero: as in `dequantize_scalar`.
        scale_bits: int32 [1, BLOCK_N] or [BLOCK_N, 1], patterns of scales of `dtype`.
    """
    offset = tl.broadcast_to(offset_pair(zero, dtype), q.shape)
    scale = tl.broadcast_to(twice(scale_bits), q.shape)
    j0, j1 = halves(scaled_pair(code_pair(q, 0, dtype, ASM), offset, scale, dtype, ASM), dtype)
    j2, j3 = halves(scaled_pair(code_pair(q, 1, dtype, ASM), offset, scale, dtype, ASM), dtype)
    j4, j5 = halves(scaled_pair(code_pair(q, 2, dtype, ASM), offset, scale, dtype, ASM), dtype)
    j6, j7 = halves(scaled_pair(code_pair(q, 3, dtype, ASM), offset, scale, dtype, ASM), dtype)
    return by_column(j0, j1, j2, j3, j4, j5, j6, j7, AXIS, WORDS)
