"""GGUF blocks to weights in the registers of wgmma, where x's columns may lie in another order.

The product is transposed, acc[n, m] += w[n, k] x[m, k], and weights are wgmma's A operand, which
comes from registers: of each k16 step a thread (row, lk) holds, of rows `row` and `row + 8`, the
pairs 2 lk, 2 lk + 1 of both halves kh of 8 columns. Which columns of the matrix those are is free,
as long as x agrees (`triton_gather.reordered` moves it). So of every 128 columns a thread takes 32
neighbours, a whole number of words, and one or two sub-blocks, all of them its own::

    column 32 lk + 4 s + 2 kh + i of 128   is k = 16 s + 8 kh + 2 lk + i

    plane of b bits     words lk b ... lk b + b - 1 of the 4 b words of 128 columns
    numbers             of one sub-block of 32 columns, or two of 16, of the 4 or 8

Each word is loaded once, and pair j = 2 s + kh lies at a place in it that is known when the kernel
is compiled: two pairs of 4 bits come out without a shift::

    word >> .. & mask << a | 64006400   = 1024 + 2^a code, twice, the plane of upper bits added
    .. / 2^a - (1024 / 2^a + offset)    = code, exactly

From there a sub-block's numbers (`tilewright.ops.mmq.hopper_scales`) lead to a weight that is
rounded once, as `tilewright.ops.mmq.hopper_math` tells (MATH).

Every change of shape only renames registers; `assert_trivial` holds the compiler to it.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.ops.mmq.hopper_math import code_lines, pair_of, weight_lines
from tilewright.ops.mmq.hopper_scales import numbers_of

__all__ = ["dequantize", "load_own", "numbers_of_steps", "store_numbers"]


@gluon.constexpr_function
def _twice(exponent, fraction, sign):
    """The bits of the float16 2^exponent (1 + fraction / 1024), or less that, twice."""
    return f"{0x10001 * (sign << 15 | (exponent + 15) << 10 | fraction):#010x}"


@gluon.constexpr_function
def _less(value):
    """The bits of minus an integer below 2048 as float16, twice."""
    exponent = value.bit_length() - 1
    return _twice(exponent, (value << 10 >> exponent) - 1024, 1)


@gluon.constexpr_function
def _moved(name, source, right):
    """PTX of a word shifted to the right, or to the left; the name of what holds it."""
    if right == 0:
        return [], source
    how = f"shr.u32 {name}, {source}, {right};" if right > 0 else (
        f"shl.b32 {name}, {source}, {-right};"
    )  # fmt: skip
    return [how], name


@gluon.constexpr_function
def _dequant_asm(low, high, codes, offset, math, dtype, j):
    """PTX from words to pair j of a lane's 32 columns: two halves out; in come the low word, the
    high word if there is one, and the numbers of `math`."""
    at = low * (j % (16 // low))
    shift = at % 8 if codes == "offset" and low + high + at % 8 <= 10 else 0
    code = (1 << low) - 1
    mask = (code << 16 | code) << shift
    lines = [".reg .b32 t, u, v, c;"]
    moves, t = _moved("t", "$2", at - shift)
    lines += moves
    lines += code_lines(codes, mask, t)
    if codes != "offset":  # bytes are met as 128 + code
        offset = 128
    first = 3
    if high:
        upper = ((1 << high) - 1) << (low + shift)
        moves, u = _moved("u", "$3", high * (j % (16 // high)) - low - shift)
        lines += moves
        lines.append(f"lop3.b32 t, {u}, {upper << 16 | upper:#010x}, t, 0xEA;")
        first = 4
    lines.append(f"mov.b32 c, {_less((1024 >> shift) + offset)};")
    if shift:
        lines += [f"mov.b32 v, {_twice(-shift, 0, 0)};", "fma.rn.f16x2 t, t, v, c;"]
    else:
        lines.append("add.rn.f16x2 t, t, c;")
    lines += weight_lines(math, dtype, first)
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _own_layout(BN, WARPS, OWN):
    """Of [BN, 4 OWN]: columns lk OWN and after are of lane lk, rows as wgmma's operand has them."""
    registers = [[0, 1 << i] for i in range(OWN.bit_length() - 1)] + [[8, 0]]
    n = 16 * WARPS
    while n < BN:
        registers.append([n, 0])
        n *= 2
    lanes = [[0, OWN], [0, 2 * OWN], [1, 0], [2, 0], [4, 0]]
    warps, n = [], 1
    while n < WARPS:
        warps.append([16 * n, 0])
        n *= 2
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BN, 4 * OWN])


@gluon.constexpr_function
def _reversed(i, bits):
    return sum((i >> b & 1) << (bits - 1 - b) for b in range(bits))


@gluon.jit
def load_own(buffer, WARPS: gl.constexpr):
    """Shared memory int32 [BN, 4 OWN], a lane's columns next to each other, as OWN tensors
    [BN, 4]."""
    BN: gl.constexpr = buffer.shape[0]
    OWN: gl.constexpr = buffer.shape[1] // 4
    BITS: gl.constexpr = OWN.bit_length() - 1
    TO: gl.constexpr = _own_layout(BN, WARPS, 1)
    parts = (buffer.load(_own_layout(BN, WARPS, OWN)),)
    for bit in gl.static_range(BITS):  # the lowest bit of the column first
        halves = ()
        for i in gl.static_range(1 << bit):
            halves = halves + gl.split(gl.reshape(parts[i], (BN, 4 * OWN >> (bit + 1), 2)))
        parts = halves
    found = ()
    for i in gl.static_range(OWN):
        part = gl.reshape(parts[_reversed(i, BITS)], (BN, 4))
        found = found + (gl.convert_layout(part, TO, assert_trivial=True),)
    return found


@gluon.jit
def _joined(parts, COUNT: gl.constexpr):
    """A power of two of tensors along a new last dimension, in their order."""
    BITS: gl.constexpr = COUNT.bit_length() - 1
    for bit in gl.static_range(BITS):  # the highest bit of the number first
        halves = ()
        for i in gl.static_range(COUNT >> (bit + 1)):
            halves = halves + (gl.join(parts[i], parts[i + (COUNT >> (bit + 1))]),)
        parts = halves
    return parts[0]


@gluon.jit
def store_numbers(buffer, numbers, SUBS: gl.constexpr):
    """Tuples of 1 or 2 vectors of rows, one for each of SUBS sub-blocks, to shared memory
    [BN, SUBS * COUNT], those of a sub-block next to each other."""
    BN: gl.constexpr = buffer.shape[0]
    COUNT: gl.constexpr = buffer.shape[1] // SUBS
    flat = ()
    for j in gl.static_range(SUBS):
        for c in gl.static_range(COUNT):
            flat = flat + (numbers[j][c],)
    buffer.store(gl.reshape(_joined(flat, SUBS * COUNT), (BN, SUBS * COUNT)))


@gluon.constexpr_function
def _six_asm(odd, most):
    """PTX from a byte with the low bits of a scale and a minimum and one with the high bits of two
    of each to what "integers" is made with: [scale t] and [d rest] of float16. In come both bytes,
    d, -dmin, -d and 1 / d; `odd` says which of the two."""
    lines = [
        ".reg .b32 s, m, u;",
        ".reg .f32 f, g, t, r;",
        "and.b32 s, $2, 15;",
        "shr.u32 m, $2, 4;",
    ]
    if odd:
        lines += ["lop3.b32 s, $3, 0x30, s, 0xEA;", "shr.u32 u, $3, 2;"]
    else:
        lines += ["shl.b32 u, $3, 4;", "lop3.b32 s, u, 0x30, s, 0xEA;", "shl.b32 u, $3, 2;"]
    lines += [
        "lop3.b32 m, u, 0x30, m, 0xEA;",
        "cvt.rn.f32.u32 f, s;",
        "cvt.rn.f32.u32 g, m;",
        "mul.rn.f32 g, g, $5;",
        "mul.rn.f32 t, g, $7;",
        "max.f32 t, t, 0fC5000000;",
        f"min.f32 t, t, {_float32(2048 - most)};",
        "add.rn.f32 t, t, 0f4B400000;",
        "sub.rn.f32 t, t, 0f4B400000;",  # to the nearest integer
        "fma.rn.f32 r, t, $6, g;",
        "cvt.rn.f16x2.f32 $0, t, f;",
        "cvt.rn.f16x2.f32 $1, r, $4;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _float32(value):
    """PTX of an integer from 1 to 2047 as float32."""
    exponent = value.bit_length() - 1
    return f"0f{(exponent + 127) << 23 | (value - (1 << exponent)) << (23 - exponent):08X}"


@gluon.jit
def _six(low, high, d, less_dmin, less_d, inverse, ODD: gl.constexpr, MOST: gl.constexpr):
    """The numbers of a sub-block of Q4_K or Q5_K for "integers"."""
    ASM: gl.constexpr = _six_asm(ODD, MOST)
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,r,r,f,f,f,f", (low, high, d, less_dmin, less_d, inverse),
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def numbers_of_steps(
    fields, FIRST: gl.constexpr, SUBS: gl.constexpr, SCALING: gl.constexpr, MINIMUMS: gl.constexpr,
    SUB_OFFSET: gl.constexpr, MATH: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """`numbers_of` of SUBS sub-blocks from FIRST on."""
    numbers = ()
    if SCALING == "six" and MATH == "integers":
        scales, minimums, octets = fields
        d = scales[0].to(gl.float32)
        less_dmin = -minimums[0].to(gl.float32)
        inverse = gl.where(d == 0, 0.0, 1.0 / d)
        for j in gl.static_range(FIRST, FIRST + SUBS):
            low = octets[j].to(gl.int32)
            high = octets[len(octets) * 2 // 3 + j // 2].to(gl.int32)
            numbers = numbers + (_six(low, high, d, less_dmin, -d, inverse, j % 2, MOST),)
    else:
        for j in gl.static_range(FIRST, FIRST + SUBS):
            numbers = numbers + (numbers_of(fields, j, SCALING, MINIMUMS, SUB_OFFSET, MATH, MOST),)
    return numbers


@gluon.jit
def _pair(
    low, high, numbers, J: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr,
    CODES: gl.constexpr, OFFSET: gl.constexpr, MATH: gl.constexpr, SUB: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Pair J of the 16 that every lane has of 128 columns, [BN, lk, 2]."""
    COUNT: gl.constexpr = len(numbers) * SUB // 32
    args = (low[J * LOW // 16],)
    if HIGH:
        args = args + (high[J * HIGH // 16],)
    for c in gl.static_range(COUNT):
        args = args + (numbers[2 * J // SUB * COUNT + c],)
    ASM: gl.constexpr = _dequant_asm(LOW, HIGH, CODES, OFFSET, MATH, DTYPE, J)
    first, second = pair_of(args, ASM, DTYPE)
    return gl.join(first, second)


@gluon.jit
def dequantize(
    low, high, numbers, S: gl.constexpr, STEPS: gl.constexpr, LOW: gl.constexpr,
    HIGH: gl.constexpr, CODES: gl.constexpr, OFFSET: gl.constexpr, MATH: gl.constexpr,
    SUB: gl.constexpr, ACC: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Steps S to S + STEPS - 1 of the eight k16 steps of 128 columns, [BN, 16 STEPS], as wgmma's A
    operand.

    Args:
        low, high: words of the 128 columns, as `load_own` gives them.
        numbers: of their sub-blocks, likewise.
    """
    BN: gl.constexpr = low[0].shape[0]
    pairs = ()
    for j in gl.static_range(2 * STEPS):
        pairs = pairs + (
            _pair(low, high, numbers, 2 * S + j, LOW, HIGH, CODES, OFFSET, MATH, SUB, DTYPE),
        )
    w = _joined(pairs, 2 * STEPS)  # [BN, lk, i, s, kh]
    if STEPS == 1:
        w = gl.permute(w, (0, 3, 1, 2))
    elif STEPS == 2:
        w = gl.permute(w, (0, 3, 4, 1, 2))
    else:
        w = gl.permute(w, (0, 3, 4, 5, 1, 2))
    w = gl.reshape(w, (BN, 16 * STEPS))
    return gl.convert_layout(w, gl.DotOperandLayout(0, ACC, 2), assert_trivial=True)
