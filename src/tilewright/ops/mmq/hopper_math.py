"""PTX that makes weights of GGUF codes on Hopper: the rows of a table, and the numbers of MATH.

`hopper_parts`, here and of moe, bring two codes of a word to the lowest bits of the two halves of a
register, each in a way of its own. What is made of them is the same::

    code_lines     1024 + bits of a code, twice, as float16; of a table 1024 + 128 + level
                   and what is too much is taken off by whoever asked: code, exactly
    weight_lines   code and a sub-block's numbers to weights

Numbers are those that `hopper_scales` makes; each way leads to a weight that is rounded once (MATH,
[numbers]; what is not said to round is exact)::

    "once"       [d]            code * d, rounded
    "sum"        [d m]          code * d + m, rounded
    "split"      [s rest]       code * s + (code * rest), rounded; s + rest is the scale, and the
                                inner product, a thousandth of the outer, rounded itself
    "integers"   [sc t, d rest] (code * sc + t) * d + rest, rounded; the sum is an integer below
                                2049, t * d + rest the minimum, and rest at most half of d
    "float"      [scale]        code * scale, rounded, from float32 to the dtype of x
    "float sum"  [scale, min]   code * scale + minimum in float32, and rounded to the dtype of x

The first four are packed float16 arithmetic, two weights an instruction; their numbers are halves
of words, the first the lower.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.formats.blocks import IQ4_TABLE, MXFP4_TABLE

__all__ = ["code_lines", "pair_of", "weight_lines"]


def _table(levels):
    """Four words of the bytes 128 + level."""
    return gl.constexpr(
        tuple(
            f"{int.from_bytes(bytes(128 + v for v in levels[i : i + 4]), 'little'):#010x}"
            for i in range(0, 16, 4)
        )
    )


_IQ4_BYTES = _table([int(v) for v in IQ4_TABLE])
_FP4_BYTES = _table([int(v) for v in MXFP4_TABLE])


@gluon.constexpr_function
def code_lines(codes, mask, source):
    """1024 + code, twice, in t, of `source`, whose bits of two codes are those of `mask`.

    Codes that are signed, or of a table's four bits, lie at bits 0 and 16, and come as
    1024 + 128 + code. u and v are free registers.
    """
    if codes in ("iq4", "fp4"):
        # A byte of the table for each code, of the lower or the upper eight, as bit 3 says.
        table = _IQ4_BYTES if codes == "iq4" else _FP4_BYTES
        return [
            f"prmt.b32 t, {source}, {source}, 0x2020;",
            "and.b32 u, t, 0x0707;",
            f"prmt.b32 v, {table[0]}, {table[1]}, u;",
            f"prmt.b32 u, {table[2]}, {table[3]}, u;",
            "shr.u32 t, t, 1;",
            "lop3.b32 t, t, 0x0404, 0x0200, 0xEA;",
            "prmt.b32 t, v, u, t;",
            "lop3.b32 t, t, 0x00FF00FF, 0x64006400, 0xEA;",
        ]
    if codes == "signed":
        return [f"lop3.b32 t, {source}, {mask:#010x}, 0x64806480, 0x6A;"]
    return [f"lop3.b32 t, {source}, {mask:#010x}, 0x64006400, 0xEA;"]


@gluon.constexpr_function
def weight_lines(math, dtype, first):
    """From t, code twice as float16, and the numbers of `math`, operands from `first` on, to two
    weights, $0 and $1. u is a free register."""
    a, b = f"${first}", f"${first + 1}"
    lines = []
    if math in ("once", "sum", "split", "integers"):
        # Each half of a word, twice: ptxas makes operands of them, not instructions.
        lines += [".reg .b16 h, g;", ".reg .b32 a0, a1, b0, b1;"]
        for word, name in ((a, "a"), (b, "b"))[: 2 if math == "integers" else 1]:
            lines.append(f"mov.b32 {{h, g}}, {word};")
            lines.append(f"mov.b32 {name}0, {{h, h}};")
            lines.append(f"mov.b32 {name}1, {{g, g}};")
    if math == "once":
        lines.append("mul.rn.f16x2 t, t, a0;")
    elif math == "sum":
        lines.append("fma.rn.f16x2 t, t, a0, a1;")
    elif math == "split":
        lines += ["mul.rn.f16x2 u, t, a1;", "fma.rn.f16x2 t, t, a0, u;"]
    elif math == "integers":
        lines += ["fma.rn.f16x2 t, t, a0, a1;", "fma.rn.f16x2 t, t, b0, b1;"]
    else:
        lines += [
            ".reg .b16 h0, h1;",
            ".reg .f32 f0, f1;",
            "mov.b32 {h0, h1}, t;",
            "cvt.f32.f16 f0, h0;",
            "cvt.f32.f16 f1, h1;",
        ]
        if math == "float sum":
            lines += [f"fma.rn.f32 f0, f0, {a}, {b};", f"fma.rn.f32 f1, f1, {a}, {b};"]
        else:
            lines += [f"mul.rn.f32 f0, f0, {a};", f"mul.rn.f32 f1, f1, {a};"]
        kind = "f16" if dtype == gl.float16 else "bf16"
        lines.append(f"cvt.rn.{kind}x2.f32 t, f1, f0;")
    lines.append("mov.b32 {$0, $1}, t;")
    return lines


@gluon.constexpr_function
def _constraints(count):
    return "=h,=h" + ",r" * count


@gluon.jit
def pair_of(args, ASM: gl.constexpr, DTYPE: gl.constexpr):
    """What a block of PTX makes of words: two numbers of DTYPE, float16 or bfloat16."""
    TYPES: gl.constexpr = _constraints(len(args))
    if DTYPE == gl.float16:
        first, second = gl.inline_asm_elementwise(
            ASM, TYPES, args, dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    else:
        first, second = gl.inline_asm_elementwise(
            ASM, TYPES, args, dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    return first, second
