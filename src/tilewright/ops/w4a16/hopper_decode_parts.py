"""Device functions and register layouts of the Hopper decode kernel.

Tensors have a dimension of 32 for the lanes of a warp, lane = 4 lrow + lk as in
`tilewright.layout.hopper`, and one for the warps along K, so that one element is what one lane
holds, and an elementwise mma.sync is a product of whole fragments::

    words   [WARPS_K, BLOCKS, 32, 4]    of 16 rows by 64 columns: one word for each k16 step
    scales  [WARPS_K, BLOCKS, 32]       scale words and zero bytes of a lane's two rows
    x       [WARPS_K, 32, MB]           pairs of columns of 8 rows of x
    sums    [WARPS_K, BLOCKS, 32, MB]   four such tensors: (row, row + 8) x two rows of x
"""

# mypy: disable-error-code="no-untyped-def,no-redef,assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.ops.mma_fragments import bits, mma, unstack

__all__ = [
    "add_part",
    "load_scales",
    "load_words",
    "load_x",
    "loaded_layout",
    "meeting_layout",
    "split_steps",
    "sums_layout",
    "turn_x",
    "turned_layout",
    "words_layout",
]


@gluon.jit
def _operand(q, DTYPE: gl.constexpr):
    """A word's four pairs as they are multiplied: (row, row + 8) for kh 0, and for kh 1."""
    if DTYPE == gl.float16:
        h = q >> 8
        return q & 0x000F000F, q & 0x00F000F0, h & 0x000F000F, h & 0x00F000F0
    else:
        return (
            (q & 0x000F000F) | 0x43004300,
            ((q >> 4) & 0x000F000F) | 0x43004300,
            ((q >> 8) & 0x000F000F) | 0x43004300,
            ((q >> 12) & 0x000F000F) | 0x43004300,
        )


@gluon.jit
def _scales(word, DTYPE: gl.constexpr):
    """A scale word as float32, for row and row + 8, times the power of two that codes lack."""
    if DTYPE == gl.float16:
        low = (word & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (word >> 16).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
        return low * 16777216.0, high * 1048576.0
    else:
        return (
            (word << 16).to(gl.float32, bitcast=True),
            (word & -65536).to(gl.float32, bitcast=True),
        )


@gluon.jit
def _zeros(byte, DTYPE: gl.constexpr):
    """Zero bytes as float32, for row and row + 8, in the units of the codes."""
    low = (byte & 15).to(gl.float32)
    high = (byte >> 4).to(gl.float32)
    if DTYPE == gl.float16:
        return low * (1.0 / 16777216.0), high * (1.0 / 1048576.0)
    else:
        return low + 128.0, high + 128.0


@gluon.jit
def load_words(ptrs, block, end, UNROLL: gl.constexpr, EVEN: gl.constexpr):
    """The words of a step, one tensor for each 64 columns. `block` is each warp's first block of K;
    where one is not before `end`, the result is undefined if EVEN, else zero."""
    words = ()
    for u in gl.static_range(UNROLL):
        live = block + u < end
        if EVEN:
            w = gl.load(ptrs + u * 512, mask=live, eviction_policy="evict_first")
        else:
            w = gl.load(ptrs + u * 512, mask=live, other=0, eviction_policy="evict_first")
        words = words + (w,)
    return words


@gluon.jit
def load_x(ptrs, block, end, pair, K, COUNT: gl.constexpr, EVEN: gl.constexpr):
    """COUNT loads of pairs of columns of x, 8 columns apart. `block` and `pair` are the block of K
    and the pair of columns of the first load, for every element."""
    pairs = ()
    for i in gl.static_range(COUNT):
        live = block + i // 8 < end
        if EVEN:
            v = gl.load(ptrs + i * 4, mask=live)
        else:
            column = 2 * pair + i * 8
            v = gl.load(ptrs + i * 4, mask=live & (column < K), other=0)
            # The last column of an odd K stands alone: what lies behind it is not x.
            v = gl.where(column + 1 == K, v & 0xFFFF, v)
        pairs = pairs + (v,)
    return pairs


@gluon.jit
def load_scales(s_ptrs, z_ptrs, block, end, last, GROUP: gl.constexpr, UNROLL: gl.constexpr,
                PARTS: gl.constexpr, ASYM: gl.constexpr):  # fmt: skip
    """Scale words and zero bytes of a step's parts, in turn. `last` is the last group."""
    found = ()
    for part in gl.static_range(PARTS):
        if GROUP == 0:
            g = block * 0
        else:
            g = gl.minimum((block * 64 + part * (UNROLL * 64 // PARTS)) // GROUP, last)
        live = block < end
        s = gl.load(s_ptrs + g * 32, mask=live, other=0)
        z = gl.full_like(s, 0x88)
        if ASYM:
            z = gl.load(z_ptrs + g * 32, mask=live, other=0).to(gl.int32)
        found = found + (s, z)
    return found


@gluon.jit
def split_steps(words, LANES: gl.constexpr):
    """Words of 64 columns as those of its four k16 steps."""
    steps = unstack(words, 4)
    return (
        gl.convert_layout(steps[0], LANES, assert_trivial=True),
        gl.convert_layout(steps[1], LANES, assert_trivial=True),
        gl.convert_layout(steps[2], LANES, assert_trivial=True),
        gl.convert_layout(steps[3], LANES, assert_trivial=True),
    )


@gluon.jit
def turn_x(v, TURNED: gl.constexpr, X: gl.constexpr):
    """x as it was loaded, 8 columns a lane, [WARPS_K, 8, 4 (segment), MB, LOADS, 4 (pair)], to the
    pairs of columns that the products take, through shared memory: what a lane loads belongs to
    four lanes."""
    LOADS: gl.constexpr = v.shape[4]
    v = gl.permute(gl.convert_layout(v, TURNED), (0, 1, 5, 3, 4, 2))
    v = gl.reshape(v, (v.shape[0], 32, v.shape[3], LOADS, 2, 2))  # the last dimension is kh
    low, high = gl.split(v)
    b0, b2 = gl.split(low)
    b1, b3 = gl.split(high)
    b0 = unstack(b0, LOADS)
    b1 = unstack(b1, LOADS)
    b2 = unstack(b2, LOADS)
    b3 = unstack(b3, LOADS)
    turned = ()
    for i in gl.static_range(LOADS):
        turned = turned + (
            gl.convert_layout(b0[i], X, assert_trivial=True),
            gl.convert_layout(b1[i], X, assert_trivial=True),
            gl.convert_layout(b2[i], X, assert_trivial=True),
            gl.convert_layout(b3[i], X, assert_trivial=True),
        )
    return turned


@gluon.jit
def add_part(acc, steps, x, scale, zero, FIRST: gl.constexpr, COUNT: gl.constexpr,
             DTYPE: gl.constexpr):  # fmt: skip
    """acc + s (q x - z x) over COUNT k16 steps that share a scale, from step FIRST on."""
    ONE: gl.constexpr = 0x3C003C00 if DTYPE == gl.float16 else 0x3F803F80  # 1.0, twice
    none = gl.zeros_like(acc[0])
    raw = (none, none, none, none)
    none_x = gl.zeros_like(x[0].to(gl.float32))
    total = (none_x, none_x, none_x, none_x)
    one = gl.full_like(x[0], ONE)
    for i in gl.static_range(FIRST, FIRST + COUNT):
        b0 = x[2 * i]
        b1 = x[2 * i + 1]
        total = mma((one, one, one, one), (b0, b1), total, DTYPE)
        q, b0 = gl.broadcast(gl.expand_dims(steps[i], 3), gl.expand_dims(b0, 1))
        q, b1 = gl.broadcast(q, gl.expand_dims(b1, 1))
        raw = mma(_operand(q, DTYPE), (b0, b1), raw, DTYPE)
    s0, s1 = _scales(gl.expand_dims(scale, 3), DTYPE)
    z0, z1 = _zeros(gl.expand_dims(zero, 3), DTYPE)
    even = gl.expand_dims(total[0], 1)  # sums of x, the same for every row of the weight
    odd = gl.expand_dims(total[1], 1)
    return (
        acc[0] + s0 * (raw[0] - z0 * even),
        acc[1] + s0 * (raw[1] - z0 * odd),
        acc[2] + s1 * (raw[2] - z1 * even),
        acc[3] + s1 * (raw[3] - z1 * odd),
    )


@gluon.constexpr_function
def words_layout(warps_n, warps_k, blocks):
    """Registers of words [warps_k, blocks, 32, 4]. As arguments of the kernel, layouts would be
    hashed at every launch."""
    return gl.DistributedLinearLayout(
        bits(4, 3, 4) + bits(blocks // warps_n, 1, 4, warps_n),
        bits(32, 2, 4),
        bits(warps_n, 1, 4) + bits(warps_k, 0, 4),
        [],
        [warps_k, blocks, 32, 4],
    )


@gluon.constexpr_function
def sums_layout(warps_n, warps_k, blocks, mb):
    """Registers of sums [warps_k, blocks, 32, mb]."""
    return gl.DistributedLinearLayout(
        bits(blocks // warps_n, 1, 4, warps_n) + bits(mb, 3, 4),
        bits(32, 2, 4),
        bits(warps_n, 1, 4) + bits(warps_k, 0, 4),
        [],
        [warps_k, blocks, 32, mb],
    )


@gluon.constexpr_function
def loaded_layout(warps_n, warps_k, mb, loads):
    """x as it is loaded, 8 columns a lane, [warps_k, 8, 4 (segment), mb, loads, 4 (pair)]: warps
    along N share the loads."""
    along_n = warps_n.bit_length() - 1
    idle = [[0] * 6] * along_n
    rest = bits(loads, 4, 6) + bits(mb, 3, 6)
    return gl.DistributedLinearLayout(
        bits(4, 5, 6) + rest[along_n:],
        bits(4, 2, 6) + bits(8, 1, 6),
        (rest + idle)[:along_n] + bits(warps_k, 0, 6),
        [],
        [warps_k, 8, 4, mb, loads, 4],
    )


@gluon.constexpr_function
def turned_layout(warps_n, warps_k, mb, loads):
    """x as it is multiplied, of the same shape: pairs across lanes, and all of it in each of the
    warps along N."""
    idle = [[0] * 6] * (warps_n.bit_length() - 1)
    return gl.DistributedLinearLayout(
        bits(4, 2, 6) + bits(loads, 4, 6) + bits(mb, 3, 6),
        bits(4, 5, 6) + bits(8, 1, 6),
        idle + bits(warps_k, 0, 6),
        [],
        [warps_k, 8, 4, mb, loads, 4],
    )


@gluon.constexpr_function
def meeting_layout(warps, warps_k, blocks, mb):
    """Sums [warps_k, blocks, 32, mb, r8, m1] with warps_k in one thread. What lies next to each
    other in y, rows of the weight, comes first: to lanes, then warps, then registers."""
    order = (
        bits(8, 2, 6, 4) + bits(2, 4, 6) + bits(blocks, 1, 6) + bits(2, 5, 6)
        + bits(4, 2, 6) + bits(mb, 3, 6)
    )  # fmt: skip
    end = 5 + warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        bits(warps_k, 0, 6) + order[end:],
        order[:5],
        order[5:end] + [[0] * 6] * max(0, end - len(order)),
        [],
        [warps_k, blocks, 32, mb, 2, 2],
    )
