"""Device functions and register layouts of mmq's kernel for one row of x (`decode_gemv`).

Tensors have a dimension of 32 for the lanes of a warp, lane = 4 g + t, and one for the warps along
K, so that one element is what one lane holds, and an elementwise mma.sync is a product of whole
fragments::

    words    [W, 32, 4]     16 bytes of a row
    others   [W, 32]        a word of codes, a pair of columns of x, a sum

A lane has ROWS rows of the weight, ROWS g and those behind it: numbers of neighbouring rows lie
together and are loaded as one. The first of two rows is row g of a product, the second row g + 8.
Of a product's columns lane t holds 2 t and 2 t + 1: the sub-blocks whose scales it applies.
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.ops.mma_fragments import along, bits, unstack

__all__ = [
    "begin_dependents",
    "lanes_layout",
    "load_high",
    "load_scales",
    "load_totals",
    "load_x",
    "paired",
    "pairs_of",
    "rows_layout",
    "wait_for_others",
    "words_layout",
    "words_of",
]


@gluon.constexpr_function
def lanes_layout(w):
    """Registers of [w, 32]."""
    return gl.DistributedLinearLayout([], bits(32, 1, 2), bits(w, 0, 2), [], [w, 32])


@gluon.constexpr_function
def words_layout(w):
    """Registers of [w, 32, 4]."""
    return gl.DistributedLinearLayout(bits(4, 2, 3), bits(32, 1, 3), bits(w, 0, 3), [], [w, 32, 4])


@gluon.constexpr_function
def rows_layout(w, parts):
    """Registers of [parts, w, 32, 4]."""
    return gl.DistributedLinearLayout(
        bits(4, 3, 4) + bits(parts, 0, 4), bits(32, 2, 4), bits(w, 1, 4), [], [parts, w, 32, 4]
    )


@gluon.jit
def _joined(low, high):
    """Two registers as one of 64 bits: they stand next to each other, as a product wants them."""
    return gl.inline_asm_elementwise(
        "mov.b64 $0, {$1, $2};", "=l,r,r", [low, high], dtype=gl.int64, is_pure=True, pack=1
    )


@gluon.jit
def paired(x, LOW: gl.constexpr):
    """Pairs of columns of `load_x` as operands: of each piece the pairs (0, 2) and (1, 3), with 8
    bits (0, 1) and (2, 3)."""
    found = ()
    for i in gl.static_range(len(x) // 4):
        if LOW == 4:
            found = found + (
                _joined(x[4 * i], x[4 * i + 2]),
                _joined(x[4 * i + 1], x[4 * i + 3]),
            )
        else:
            found = found + (
                _joined(x[4 * i], x[4 * i + 1]),
                _joined(x[4 * i + 2], x[4 * i + 3]),
            )
    return found


@gluon.jit
def _four(words, LANES: gl.constexpr):
    """[W, 32, 4] as four [W, 32]."""
    four = unstack(words, 4)
    return (
        gl.convert_layout(four[0], LANES, assert_trivial=True),
        gl.convert_layout(four[1], LANES, assert_trivial=True),
        gl.convert_layout(four[2], LANES, assert_trivial=True),
        gl.convert_layout(four[3], LANES, assert_trivial=True),
    )


@gluon.jit
def _halves(t):
    """[2 n, ...] as two [n, ...], n the first and the last of dimension 0."""
    t = gl.reshape(t, (2, t.shape[0] // 2, t.shape[1], 32, 4))
    return gl.split(gl.permute(t, (1, 2, 3, 4, 0)))


@gluon.jit
def pairs_of(parts, COUNT: gl.constexpr):
    """Words of all rows, [2 COUNT UNITS, W, 32, 4], as those of two rows each."""
    if COUNT == 1:
        return (parts,)
    else:
        return _halves(parts)


@gluon.jit
def words_of(parts, UNITS: gl.constexpr, LANES: gl.constexpr):
    """Words of two rows, [2 UNITS, W, 32, 4], as [W, 32] each: by row, unit and word."""
    one, two = _halves(parts)
    rows = (one, two)
    if UNITS == 2:
        rows = _halves(one) + _halves(two)
    elif UNITS == 4:
        a, b = _halves(one)
        c, d = _halves(two)
        rows = _halves(a) + _halves(b) + _halves(c) + _halves(d)
    found = ()
    for i in gl.static_range(2 * UNITS):
        found = found + _four(gl.reshape(rows[i], rows[i].shape[1:]), LANES)
    return found


@gluon.jit
def wait_for_others():
    """Until all kernels before this one have ended and what they wrote is to be seen."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def begin_dependents():
    """A kernel behind this one that waits by itself may take the place of programs that end."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_x(
    z_ptr, places, live, OWN: gl.constexpr, C: gl.constexpr, EVEN: gl.constexpr,
    WORDS: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """x of a step, four pairs of columns of each piece; zeros in lanes of other sub-blocks, and
    where a warp is not live.

    Args:
        places: from z_ptr in 16 bytes, [W, 32]: of the one unit that a lane has columns of (OWN),
            else of each half of a unit.
    """
    found = ()
    EACH: gl.constexpr = C // 8  # pieces of a unit
    for i in gl.static_range(EACH if OWN else 8):
        at = places[0] if OWN else places[i % EACH // (EACH // 2)]
        if not EVEN:
            at = gl.where(live, at, at * 0)
        at = gl.expand_dims(at * 4, 2) + along(2, 4, WORDS, 3)
        if OWN:
            pairs = gl.load(z_ptr + at + i * 4)
        else:
            pairs = gl.load(z_ptr + at + (i // EACH * (C // 2) + i % (EACH // 2)) * 4)
        found = found + _four(pairs, LANES)
    return found


@gluon.jit
def load_totals(
    x_ptr, first, steps, SETS: gl.constexpr, W: gl.constexpr, WORDS: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """x of a step once more, as the operand whose product with ones is the sums of sub-blocks:
    lane 4 g + t has a quarter of sub-block g, of each of two sets if they have 16 columns. Two
    numbers of 64 bits; 0 where a warp, whose first step is `first` and its own number, has none."""
    if SETS == 1:
        step = first + along(0, W, WORDS, 3)
        at = step * 128 + along(1, 32, WORDS, 3) * 4 + along(2, 4, WORDS, 3)
        pointer = x_ptr.to(gl.pointer_type(gl.int32))
        x = _four(gl.load(pointer + at, mask=step + at * 0 < steps, other=0), LANES)
        return (_joined(x[0], x[1]), _joined(x[2], x[3]))
    else:
        step = first + along(0, W, LANES, 2)
        at = step * 64 + along(1, 32, LANES, 2)
        pointer = x_ptr.to(gl.pointer_type(gl.int64))
        live = step + at * 0 < steps
        return (
            gl.load(pointer + at, mask=live, other=0),
            gl.load(pointer + at + 32, mask=live, other=0),
        )


@gluon.jit
def load_high(
    high_ptr, at, live, step, ROWS: gl.constexpr, UNITS: gl.constexpr, HIGH: gl.constexpr,
):  # fmt: skip
    """The upper bits of a step: a word of each row and unit, with two bits two of them."""
    found = ()
    if HIGH == 1:
        for i in gl.static_range(ROWS):
            for u in gl.static_range(UNITS):
                found = found + (gl.load(high_ptr + at[i] + (step * 8 + u * 4), mask=live),)
    elif HIGH == 2:
        pointer = high_ptr.to(gl.pointer_type(gl.int64))
        for i in gl.static_range(ROWS):
            for u in gl.static_range(UNITS):
                two = gl.load(pointer + at[i] + (step * 8 + u * 4), mask=live)
                found = found + (two.to(gl.int32), (two >> 32).to(gl.int32))
    return found


@gluon.jit
def load_scales(
    s_ptr, m_ptr, t_ptr, row, t, step, live, stride_sb, stride_mb, stride_tb,
    ROWS: gl.constexpr, SCALING: gl.constexpr, MINIMUMS: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    """What the scales of a step are made of, of ROWS rows each; 0 where a warp is not live.

    Args:
        row: the first row of a lane, in ROWS rows.
        step: of 256 columns.

    Returns:
        "half": of sub-blocks 2 t and 2 t + 1 the scales, then the minimums if there are. Else d,
        dmin if there is, and bytes: "six" the lower bits of both and the upper ones, "bytes" those
        of 2 t and 2 t + 1 of each set.
    """
    HALVES: gl.constexpr = gl.int32 if ROWS == 2 else gl.int64
    BYTES: gl.constexpr = gl.int16 if ROWS == 2 else gl.int32
    s_ptr = s_ptr.to(gl.pointer_type(HALVES))
    m_ptr = m_ptr.to(gl.pointer_type(HALVES))
    found = ()
    if SCALING == "half":
        for j in gl.static_range(2):
            sub = step * 8 + 2 * t + j
            found = found + (gl.load(s_ptr + row + sub * (stride_sb // ROWS), mask=live, other=0),)
        if MINIMUMS:
            for j in gl.static_range(2):
                sub = step * 8 + 2 * t + j
                at = row + sub * (stride_mb // ROWS)
                found = found + (gl.load(m_ptr + at, mask=live, other=0),)
    else:
        t_ptr = t_ptr.to(gl.pointer_type(BYTES))
        stride_tb = stride_tb // ROWS
        found = (gl.load(s_ptr + row + step * (stride_sb // ROWS), mask=live, other=0),)
        if MINIMUMS:
            at = row + step * (stride_mb // ROWS)
            found = found + (gl.load(m_ptr + at, mask=live, other=0),)
        if SCALING == "six":
            at = row + (step * 12 + 2 * t) * stride_tb
            high = row + (step * 12 + 8 + t) * stride_tb
            found = found + (
                gl.load(t_ptr + at, mask=live, other=0),
                gl.load(t_ptr + at + stride_tb, mask=live, other=0),
                gl.load(t_ptr + high, mask=live, other=0),
            )
        else:
            for s in gl.static_range(SETS):
                at = row + (step * 16 + 8 * s + 2 * t) * stride_tb
                found = found + (
                    gl.load(t_ptr + at, mask=live, other=0),
                    gl.load(t_ptr + at + stride_tb, mask=live, other=0),
                )
    return found
