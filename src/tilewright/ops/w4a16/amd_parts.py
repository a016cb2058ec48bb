"""Device functions of the Gluon W4A16 kernel for AMD: four words in, eight weights a word out.

float16, two codes an instruction, and exact until the scale is multiplied::

    word & 0x000F000F | 0x64006400          1024 + q      minus 1024 + z
    word & 0x00F000F0 | 0x64006400          1024 + 16 q   times 1/16, minus 64 + z

and the same again for word >> 8: one shift, four and-or, four packed additions or fused
multiply-adds and four packed multiplications for eight weights.

bfloat16 has no packed maths on these chips, and rounding (q - z) * s to it would cost more than all
the rest. q - z itself is exact in bfloat16: `v_fma_mix_f32` reads one half of the float16 pair
above and subtracts in float32, whose upper 16 bits then are the bfloat16; `v_perm_b32` joins two of
them. The scale is multiplied to the sums in float32, which is more exact as well.

The instructions are spelled out since the compiler, given the same maths, splits the pairs into
halves. It does not see into inline assembly, so two rules of CDNA are kept by hand (`_together`): a
matrix instruction may read what a vector instruction wrote two cycles later at the earliest; and
what a matrix instruction still adds, some cycles on, no vector instruction may overwrite. All words
of a step are therefore dequantized before its first matrix instruction.
"""

# mypy: disable-error-code="no-untyped-def"
# Gluon reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["issued", "weights"]


def _pairs(word: int) -> tuple[str, ...]:
    """Codes of operand `word` to pairs in $0 to $3; its masks and 0x64006400 are the next three."""
    low, high, magic = word + 1, word + 2, word + 3
    return (
        f"v_lshrrev_b32 $2, 8, ${word}",
        f"v_and_or_b32 $0, ${word}, ${low}, ${magic}",
        f"v_and_or_b32 $1, ${word}, ${high}, ${magic}",
        f"v_and_or_b32 $3, $2, ${high}, ${magic}",
        f"v_and_or_b32 $2, $2, ${low}, ${magic}",
    )


def _bfloat16(even: int, odd: int) -> tuple[str, ...]:
    """Pairs $even, of 1024 + q, and $odd, of 1024 + 16 q, to bfloat16; $4 and $5 are scratch."""
    one, sixteen = f"${even}, 1.0, -$11", f"${odd}, $10, -$12"
    half = "op_sel_hi:[1,0,0]"
    return (
        f"v_fma_mix_f32 $4, {one} {half}",
        f"v_fma_mix_f32 $5, {sixteen} {half}",
        f"v_fma_mix_f32 ${even}, {one} op_sel:[1,0,0] {half}",
        f"v_fma_mix_f32 ${odd}, {sixteen} op_sel:[1,0,0] {half}",
        f"v_perm_b32 ${even}, ${even}, $4, $13",
        f"v_perm_b32 ${odd}, ${odd}, $5, $13",
    )


_MINUS_ZERO = (
    "v_pk_add_f16 $0, $0, $9 neg_lo:[0,1] neg_hi:[0,1]",
    "v_pk_fma_f16 $1, $1, $8, $10 neg_lo:[0,0,1] neg_hi:[0,0,1]",
    "v_pk_add_f16 $2, $2, $9 neg_lo:[0,1] neg_hi:[0,1]",
    "v_pk_fma_f16 $3, $3, $8, $10 neg_lo:[0,0,1] neg_hi:[0,0,1]",
)
_TIMES_SCALE = tuple(f"v_pk_mul_f16 ${i}, ${i}, $11" for i in range(4))


def _block(*parts: tuple[str, ...]) -> gl.constexpr:
    return gl.constexpr("\n\t".join(line for part in parts for line in part))


_CODES = (_pairs(4), _MINUS_ZERO)
_ASM_CODES: gl.constexpr = _block(*_CODES)
_ASM_SCALED: gl.constexpr = _block(*_CODES, _TIMES_SCALE)
_ASM_BFLOAT16: gl.constexpr = _block(_pairs(6), _bfloat16(0, 1), _bfloat16(2, 3))


# Constants are vector registers too: gfx12 must wait before it overwrites a scalar register that a
# vector instruction has read, and the compiler knows that of its own instructions only.
def _registers(outputs: int, inputs: int) -> gl.constexpr:
    return gl.constexpr(",".join(["=&v"] * outputs + ["v"] * inputs))


_IO_CODES: gl.constexpr = _registers(4, 7)
_IO_SCALED: gl.constexpr = _registers(4, 8)
_IO_BFLOAT16: gl.constexpr = _registers(6, 8)


@gluon.jit
def issued(q):
    """q, after every load that precedes: the compiler would move loads ahead to where they are
    first needed, one step later, to have their registers until then."""
    return gl.inline_asm_elementwise("", "=v,0", [q], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _words_of_a_thread(layout):
    return 2 ** len(layout.reg_bases)


@gluon.constexpr_function
def _same_registers(count):
    return ",".join(["=v"] * count + [str(i) for i in range(count)])


@gluon.jit
def _together(p0, p1, p2, p3):
    """The same pairs, at once: no matrix instruction of the step comes before the last of them, or
    sooner than two cycles behind it."""
    PACK: gl.constexpr = _words_of_a_thread(p0.type.layout)
    return gl.inline_asm_elementwise(
        "s_nop 1",
        _same_registers(4 * PACK),
        [p0, p1, p2, p3],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=PACK,
    )


@gluon.jit
def _column(values, q):
    """Values [BLOCK_N] for every word of q [BLOCK_K / 8, BLOCK_N]."""
    q, spread = gl.broadcast(q, gl.expand_dims(values, 0))
    return spread


@gluon.jit
def _half2(half):
    """A 16-bit number in both halves of an int32."""
    bits = half.to(gl.uint16, bitcast=True).to(gl.uint32)
    return (bits | (bits << 16)).to(gl.int32, bitcast=True)


@gluon.jit
def _float16_pairs(q, zero, scale, SCALED: gl.constexpr):
    """Words to four float16 pairs each: (q - z) * s, or q - z."""
    low_codes = gl.full_like(q, 0x000F000F)
    high_codes = gl.full_like(q, 0x00F000F0)
    magic = gl.full_like(q, 0x64006400)
    sixteenth = gl.full_like(q, 0x2C002C00)
    zero2 = zero | (zero << 16)
    offset = _column(zero2 | 0x64006400, q)  # 1024 + z
    offset16 = _column((zero2 << 4) | 0x54005400, q)  # 64 + z
    if SCALED:
        scale2 = _column(_half2(scale), q)
        return gl.inline_asm_elementwise(
            _ASM_SCALED,
            _IO_SCALED,
            [q, low_codes, high_codes, magic, sixteenth, offset, offset16, scale2],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            _ASM_CODES,
            _IO_CODES,
            [q, low_codes, high_codes, magic, sixteenth, offset, offset16],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )


@gluon.jit
def _bfloat16_pairs(q, zero):
    """Words to four bfloat16 pairs each: q - z."""
    low_codes = gl.full_like(q, 0x000F000F)
    high_codes = gl.full_like(q, 0x00F000F0)
    magic = gl.full_like(q, 0x64006400)
    upper = gl.full_like(q, 0x07060302)  # the upper two bytes of each of two words
    offset = _column((zero + 1024).to(gl.float32), q)
    offset16 = _column((zero + 64).to(gl.float32), q)
    sixteenth = gl.full_like(offset, 0.0625)
    p0, p1, p2, p3, _, _ = gl.inline_asm_elementwise(
        _ASM_BFLOAT16,
        _IO_BFLOAT16,
        [q, low_codes, high_codes, magic, sixteenth, offset, offset16, upper],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return p0, p1, p2, p3


@gluon.jit
def _halves(pair):
    return (pair & 0xFFFF).to(gl.uint16), (pair >> 16).to(gl.uint16)


@gluon.jit
def weights(
    q, zero, scale,
    dtype: gl.constexpr, SCALED: gl.constexpr, CDNA: gl.constexpr, SPLIT: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """Words [BLOCK_K / 8, BLOCK_N] to weights [BLOCK_K, BLOCK_N] as the matrix units take them.

    Nothing moves between threads: `OPERAND` is the layout that q's was derived from.

    Args:
        q: int32 words of `WordsW4`, order "k8".
        zero: int32 [BLOCK_N], 0 to 15.
        scale: float16 [BLOCK_N], multiplied if SCALED.
        dtype: float16 or bfloat16; SCALED needs float16.
        SPLIT: as of `amd_layouts.words_layout`.
    """
    if dtype == gl.float16:
        p0, p1, p2, p3 = _float16_pairs(q, zero, scale, SCALED)
    else:
        p0, p1, p2, p3 = _bfloat16_pairs(q, zero)
    if CDNA:
        p0, p1, p2, p3 = _together(p0, p1, p2, p3)
    l0, h0 = _halves(p0)
    l1, h1 = _halves(p1)
    l2, h2 = _halves(p2)
    l3, h3 = _halves(p3)
    # Code j = 4 p1 + 2 p0 + half: joined so that the permute only renames registers.
    low = gl.join(gl.join(l0, l2), gl.join(l1, l3))
    high = gl.join(gl.join(h0, h2), gl.join(h1, h3))
    w = gl.permute(gl.join(low, high), (0, 2, 3, 4, 1))
    w = gl.reshape(w, (SPLIT, q.shape[0] // SPLIT, 8, q.shape[1]))
    w = gl.permute(w, (1, 0, 2, 3))
    w = gl.reshape(w, (q.shape[0] * 8, q.shape[1])).to(dtype, bitcast=True)
    return gl.convert_layout(w, OPERAND, assert_trivial=True)
