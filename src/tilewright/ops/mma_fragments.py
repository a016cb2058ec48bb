"""Device functions in Gluon for kernels whose tensors are fragments of mma.sync.

Such tensors have a dimension of 32 for the lanes of a warp, so that one element is what one lane
holds, and an elementwise mma.sync multiplies whole fragments, lane = 4 g + t as the PTX manual
draws them::

    a    four words: pairs of columns (2 t, 2 t + 1) of rows g and g + 8, then columns 8 further on
    b    two words: pairs of rows (2 t, 2 t + 1) of column g, then rows 8 further on
    c    four sums: columns 2 t and 2 t + 1 of row g, then of row g + 8
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["along", "bits", "mma", "unstack"]

_WORDS_ASM = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
)
_PAIR_ASM = (
    "{{ .reg .b32 l, h; mov.b64 {{l, h}}, $8; mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{l, h}}, {{$9, $10, $11, $12}}; }}"
)
_FP16_WORDS = gl.constexpr(_WORDS_ASM.format("f16"))
_BF16_WORDS = gl.constexpr(_WORDS_ASM.format("bf16"))
_FP16_PAIR = gl.constexpr(_PAIR_ASM.format("f16"))
_BF16_PAIR = gl.constexpr(_PAIR_ASM.format("bf16"))


@gluon.constexpr_function
def _only(layout, rank, dim):
    """The layout of a vector along dimension `dim` of a tensor."""
    for other in reversed(range(rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def along(DIM: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr, RANK: gl.constexpr):
    """0 to COUNT - 1 along dimension DIM of a tensor, with size 1 in the others."""
    v = gl.arange(0, COUNT, _only(LAYOUT, RANK, DIM))
    for other in gl.static_range(RANK):
        if other != DIM:
            v = gl.expand_dims(v, other)
    return v


@gluon.constexpr_function
def bits(count, dim, rank, first=1):
    """Bases that count to `count` in steps of `first` along one dimension."""
    return [
        [first << i if d == dim else 0 for d in range(rank)] for i in range(count.bit_length() - 1)
    ]


@gluon.jit
def unstack(t, COUNT: gl.constexpr):
    """The COUNT slices of t along its last dimension, a power of two and at least 2."""
    if COUNT == 2:
        a, b = gl.split(t)
        return a, b
    else:
        even, odd = gl.split(gl.reshape(t, t.shape[:-1] + [COUNT // 2, 2]))
        evens = unstack(even, COUNT // 2)
        odds = unstack(odd, COUNT // 2)
        slices = ()
        for i in gl.static_range(COUNT // 2):
            slices = slices + (evens[i], odds[i])
        return slices


@gluon.jit
def mma(a, b, c, DTYPE: gl.constexpr):
    """c + a b of m16n8k16; a and c are tuples of four, b of two words or of one of 64 bits, whose
    halves then stand next to each other from the start."""
    if len(b) == 1:
        return gl.inline_asm_elementwise(
            _FP16_PAIR if DTYPE == gl.float16 else _BF16_PAIR,
            "=f,=f,=f,=f,r,r,r,r,l,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], c[0], c[1], c[2], c[3]],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            _FP16_WORDS if DTYPE == gl.float16 else _BF16_WORDS,
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip
