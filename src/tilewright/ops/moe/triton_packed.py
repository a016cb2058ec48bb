"""Products of sorted rows with their experts, GGUF weights two at a time: for some rows an expert.

::

    y[s, n] = sum_k x[s // DIV, k] * W[expert of s][n, k]              for every slot s
    y[s, n] = act(gate) * up,  gate = .. W[e][n, k], up = .. W[e][N + n, k]     if FUSED

    w [BLOCK_N, BLOCK_K] . x^T [BLOCK_K, BLOCK_M]     acc [BLOCK_N, BLOCK_M] float32

Tiles are those of `triton_gemm`; this kernel is for float16, and for types whose codes are numbers
or signed bytes. A word's codes become weights in its own lane: in a fragment of the left operand
lane c of four has the columns 2 c + h and 8 + 2 c + h of every 16, h = 0 and 1, and a sum over K
has any order. So position ``8 p + 2 c + h`` of a block of four words is pair p of word c, column
``C c + 2 p + h``, C the columns of a word. x comes with its columns in that order (`prepare`).

Two codes make two weights, in float16:

types of one scale a sub-block     q scale + minimum, both float16: rounded once
the K-quants                       q times sub-scale, integers: exact below 2048, else rounded once.
                                   d multiplies the sums of a block of 256 columns, in float32.

The minimums of a K-quant are a product of their own: of dmin's integers with the means of x over
sub-blocks. Means come as two float16, the second what the first left, and are summed in float32.

What scales are made of are single bytes and float16 numbers, which no asynchronous copy moves: they
are loaded a step ahead. Chips without the packed instructions (ASM false) compute the same weights
in float32 and round them.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there. Its tuples
# grow.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.errors import UnsupportedError
from tilewright.layout.blocks import BlockForm, GpuBlocks
from tilewright.layout.experts import GpuExperts
from tilewright.ops.cross import target_arch
from tilewright.ops.moe.triton_parts import activated, operands, rows_of, store
from tilewright.ops.w4a16.triton_gemm import asm_of
from tilewright.ops.w4a16.triton_parts import twice
from tilewright.tiles.tile import Tile

__all__ = ["INTERPRETED", "launch_moe_packed", "launch_prepare"]

_BLOCK = 256  # columns of a K-quant's block


@triton.jit
def _fields(
    s_ptrs, m_ptrs, t_ptrs, sub, subs, stride_sb, stride_mb, stride_tb,
    SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What the scales of a step's sub-blocks of each row are made of.

    Sub-blocks past the last one are read as that one: their x is 0, or their product not used.

    Returns:
        scale and minimum of each, [N, S]; of a K-quant, which takes steps within a block, d and
        dmin of the block, [N, 1], and two bytes of each, [N, S].
    """
    sub = tl.minimum(sub, subs - 1)
    if BYTES == 0:
        s = tl.load(s_ptrs + sub[None, :] * stride_sb)
        m = s
        if MINIMUMS:
            m = tl.load(m_ptrs + sub[None, :] * stride_mb)
        return s, m, s, s
    else:
        block = tl.min(sub, 0) // PARTS
        i = (sub % PARTS)[None, :]
        d = tl.load(s_ptrs + block * stride_sb)
        m = d
        if MINIMUMS:
            m = tl.load(m_ptrs + block * stride_mb)
        t_ptrs += block * BYTES * stride_tb
        if SCALING == "six":
            COUNT: tl.constexpr = BYTES * 4 // 3
            PER: tl.constexpr = 2 if MINIMUMS else 1  # numbers a sub-block
            b0 = tl.load(t_ptrs + (i * PER // 2) * stride_tb)
            b1 = tl.load(t_ptrs + (COUNT // 2 + i * PER // 4) * stride_tb)
        else:
            b0 = tl.load(t_ptrs + i * stride_tb)
            b1 = b0
        return d, m, b0, b1


@triton.jit
def _integers(
    b0, b1, sub, SCALING: tl.constexpr, MINIMUMS: tl.constexpr, SUB_OFFSET: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """What d and dmin are multiplied with, int32 [N, S]."""
    i = (sub % PARTS)[None, :]
    n0 = b0.to(tl.int32)
    n1 = b1.to(tl.int32)
    if SCALING == "bytes":
        number = (n0 ^ 128) - 128
        return number, number
    elif SCALING == "nibbles":
        return n0 & 15, n0 >> 4
    elif MINIMUMS:
        n1 = n1 >> (4 * (i % 2))
        return (n0 & 15) | ((n1 & 3) << 4), (n0 >> 4) | ((n1 & 12) << 2)
    else:
        number = ((n0 >> (4 * (i % 2))) & 15) | (((n1 >> (2 * (i % 4))) & 3) << 4)
        return number - SUB_OFFSET, number


@triton.jit
def pattern(v):
    """The bits of float16 numbers in both halves of int32 lanes."""
    return twice(v.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit
def fused_pair(a, b, c):
    """a * b + c on both halves of int32 lanes, float16, rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def less_pair(a, b):
    """a - b on both halves of int32 lanes, float16."""
    return tl.inline_asm_elementwise(
        "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def masked_pair(a, mask, c, FLIP: tl.constexpr):
    """a & mask | c, or with FLIP a & mask ^ c, in one instruction."""
    if FLIP:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;", "=r,r,r,r", [a, mask, c], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [a, mask, c], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def times_pair(a, b):
    """a * b on both halves of int32 lanes, float16."""
    return tl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _by_word(v, WORDS: tl.constexpr):
    """A number of each sub-block, [N, S], for each of its WORDS words: [N, S * WORDS]."""
    N: tl.constexpr = v.shape[0]
    S: tl.constexpr = v.shape[1]
    return tl.broadcast_to(v[:, :, None], (N, S, WORDS)).reshape(N, S * WORDS)


@triton.jit
def _in_order(pairs, P: tl.constexpr):
    """P tensors of pairs [N, W] of words as float16 [N, 2 P W], in the order of the module."""
    if P == 2:
        w = tl.join(pairs[0], pairs[1])
    elif P == 4:
        w = tl.join(tl.join(pairs[0], pairs[2]), tl.join(pairs[1], pairs[3]))
    else:
        even = tl.join(tl.join(pairs[0], pairs[4]), tl.join(pairs[2], pairs[6]))
        odd = tl.join(tl.join(pairs[1], pairs[5]), tl.join(pairs[3], pairs[7]))
        w = tl.join(even, odd)
    N: tl.constexpr = pairs[0].shape[0]
    W: tl.constexpr = pairs[0].shape[1]
    first = (w & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    second = (w >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    w = tl.join(first, second).reshape(N, W // 4, 4, P, 2)
    return w.permute(0, 1, 3, 2, 4).reshape(N, 2 * P * W)


@triton.jit
def _weights_asm(
    low, high, scale, minimum, LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr,
    OFFSET: tl.constexpr, ADDED: tl.constexpr, SUBS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Weights [N, BLOCK_K] in the packed instructions of NVIDIA.

    A pair of codes or-ed into the pattern of 1024 is exactly 1024 + 2^at code; a word is shifted
    only once a byte.

    Args:
        scale, minimum: float16 [N, S]; the minimum is added where ADDED.
        SUBS: scales are integers of 6 bits or 8.
    """
    P: tl.constexpr = 16 // LOW
    FLIP: tl.constexpr = CODES == "signed"
    OFF: tl.constexpr = 128 if FLIP else OFFSET
    AT_ONCE: tl.constexpr = SUBS and OFF == 0
    zero = tl.zeros_like(low)
    s = _by_word(pattern(scale), WORDS)
    least = zero - 0x7FFF8000  # -0: it leaves every product as it is
    if ADDED:
        least = _by_word(pattern(minimum), WORDS)
    pairs = ()
    for p in tl.static_range(P):
        at = LOW * p % 8
        pair = low
        if LOW * p - at > 0:
            pair = low >> (LOW * p - at)
        if FLIP:
            pair = masked_pair(pair, zero + 0x00FF00FF, zero + 0x64806480, True)
        else:
            mask = zero + (((1 << LOW) - 1) << at) * 0x00010001
            pair = masked_pair(pair, mask, zero + 0x64006400, False)
        if HIGH > 0:
            if at + LOW - HIGH * p > 0:
                upper = high << (at + LOW - HIGH * p)
            else:
                upper = high >> (HIGH * p - at - LOW)
            most = zero + (((1 << HIGH) - 1) << (LOW + at)) * 0x00010001
            pair = masked_pair(upper, most, pair, False)
        f = pattern(tl.full(low.shape, 1.0 / (1 << at), tl.float16))
        if AT_ONCE:  # (1024 + 2^at code) f - 1024 f with f = scale / 2^at, exact
            f = times_pair(s, f)
            less = times_pair(s, pattern(tl.full(low.shape, -1024.0 / (1 << at), tl.float16)))
            pair = fused_pair(pair, f, less)
        else:
            if at == 0:
                pair = less_pair(pair, pattern(tl.full(low.shape, 1024 + OFF, tl.float16)))
            else:
                less = pattern(tl.full(low.shape, -1024.0 / (1 << at) - OFF, tl.float16))
                pair = fused_pair(pair, f, less)
            if ADDED:
                pair = fused_pair(pair, s, least)
            else:
                pair = times_pair(pair, s)
        pairs = pairs + (pair,)
    return _in_order(pairs, P)


@triton.jit
def _weights_plain(
    low, high, scale, minimum, LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr,
    OFFSET: tl.constexpr, ADDED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The same in float32, rounded once."""
    P: tl.constexpr = 16 // LOW
    LEAST: tl.constexpr = ((1 << LOW) - 1) * 0x00010001
    s = _by_word(scale.to(tl.float32), WORDS)
    m = _by_word(minimum.to(tl.float32), WORDS)
    pairs = ()
    for p in tl.static_range(P):
        pair = (low >> (LOW * p)) & LEAST
        if HIGH > 0:
            pair = pair | (((high >> (HIGH * p)) & (((1 << HIGH) - 1) * 0x00010001)) << LOW)
        one = pair & 0xFFFF
        two = (pair >> 16) & 0xFFFF
        if CODES == "signed":
            one = (one ^ 128) - 128
            two = (two ^ 128) - 128
        first = (one - OFFSET).to(tl.float32) * s
        second = (two - OFFSET).to(tl.float32) * s
        if ADDED:
            first += m
            second += m
        first = first.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
        second = second.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
        pairs = pairs + (first | (second << 16),)
    return _in_order(pairs, P)


@triton.jit(do_not_specialize=["experts", "tiles_m"])
def _moe_packed_kernel(
    x_ptr, means_ptr, low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, y_ptr, slots_ptr, tiles_ptr,
    N, K, experts, tiles_m,
    stride_le, stride_ln, stride_he, stride_hn, stride_se, stride_sn, stride_sb, stride_me,
    stride_mn, stride_mb, stride_te, stride_tn, stride_tb, stride_ym, stride_yn,
    DIV: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr,
    OFFSET: tl.constexpr, SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr,
    SUB_OFFSET: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr,
    FUSED: tl.constexpr, ACT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of y; x [.., K] is contiguous."""
    H: tl.constexpr = BLOCK_N // 2 if FUSED else BLOCK_N  # columns of y
    COLUMNS: tl.constexpr = 32 // LOW  # of a word
    PER: tl.constexpr = LOW // HIGH if HIGH > 0 else 1  # words of low that a word of high serves
    WORDS: tl.constexpr = SUB // COLUMNS  # of a sub-block
    PARTS: tl.constexpr = BLOCK // SUB
    S: tl.constexpr = BLOCK_K // SUB  # sub-blocks of a step
    SUBS: tl.constexpr = BYTES > 0
    ADDED: tl.constexpr = MINIMUMS and not SUBS
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, H)
    band = pid // (GROUP_M * tiles_n)
    band_rows = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    in_band = pid % (GROUP_M * tiles_n)
    pid_m = band * GROUP_M + in_band % band_rows
    pid_n = in_band // band_rows

    expert = tl.load(tiles_ptr + 3 * pid_m)
    if expert < 0:
        return
    first = tl.load(tiles_ptr + 3 * pid_m + 1)
    last = tl.load(tiles_ptr + 3 * pid_m + 2)
    offs_m = first + tl.arange(0, BLOCK_M)
    slot = tl.load(slots_ptr + tl.minimum(offs_m, last - 1))
    offs_n = pid_n * H + tl.arange(0, H)
    y_ptrs = y_ptr + slot.to(tl.int64)[None, :] * stride_ym + offs_n[:, None] * stride_yn
    mask_y = (offs_m < last)[None, :] & (offs_n < N)[:, None]
    if expert >= experts:  # an id that names none
        store(y_ptrs, tl.full((H, BLOCK_M), float("nan"), tl.float32), mask_y, INTERPRET)
        return

    e = expert.to(tl.int64)
    row_n = rows_of(pid_n, N, BLOCK_N, FUSED, EVEN_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_w = tl.arange(0, BLOCK_K // COLUMNS)
    offs_s = tl.arange(0, S)
    row_x = (slot // DIV).to(tl.int64)[None, :]
    x_ptrs = x_ptr + row_x * K + offs_k[:, None]
    means_ptrs = means_ptr + row_x * (K // SUB * 2) + tl.arange(0, 2 * S)[:, None]
    low_ptrs = low_ptr + e * stride_le + row_n[:, None] * stride_ln + offs_w[None, :]
    high_ptrs = high_ptr + e * stride_he + row_n[:, None] * stride_hn
    s_ptrs = s_ptr + e * stride_se + row_n[:, None] * stride_sn
    m_ptrs = m_ptr + e * stride_me + row_n[:, None] * stride_mn
    t_ptrs = t_ptr + e * stride_te + row_n[:, None] * stride_tn
    subs = K // SUB

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    ahead = _fields(
        s_ptrs, m_ptrs, t_ptrs, offs_s, subs, stride_sb, stride_mb, stride_tb, SCALING, MINIMUMS,
        BYTES, PARTS,
    )  # fmt: skip
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K
        word = k // COLUMNS
        if EVEN_K:
            x = tl.load(x_ptrs + k)
            low = tl.load(low_ptrs + word)
        else:
            x = tl.load(x_ptrs + k, mask=(offs_k < K - k)[:, None], other=0.0)
            mask_w = (offs_w * COLUMNS < K - k)[None, :]
            low = tl.load(low_ptrs + word, mask=mask_w, other=0)
        high = low
        if HIGH > 0:
            at = ((word + offs_w) // PER)[None, :]
            if EVEN_K:
                high = tl.load(high_ptrs + at)
            else:
                high = tl.load(high_ptrs + at, mask=mask_w, other=0)
            high = high >> (HIGH * (16 // LOW) * (offs_w % PER))[None, :]
        fields = ahead
        ahead = _fields(
            s_ptrs, m_ptrs, t_ptrs, (k + BLOCK_K) // SUB + offs_s, subs, stride_sb, stride_mb,
            stride_tb, SCALING, MINIMUMS, BYTES, PARTS,
        )  # fmt: skip
        d, m, b0, b1 = fields
        scale = d
        minimum = m
        if SUBS:
            number, other = _integers(
                b0, b1, k // SUB + offs_s, SCALING, MINIMUMS, SUB_OFFSET, PARTS
            )
            scale = number.to(tl.float16)
            minimum = other.to(tl.float16)
        if ASM:
            w = _weights_asm(
                low, high, scale, minimum, LOW, HIGH, CODES, OFFSET, ADDED, SUBS, WORDS
            )
        else:
            w = _weights_plain(low, high, scale, minimum, LOW, HIGH, CODES, OFFSET, ADDED, WORDS)
        if SUBS:
            acc += tl.dot(w, x) * d.to(tl.float32)
            if MINIMUMS:  # first the means of the step's sub-blocks, then what they left
                means = tl.load(means_ptrs + step * (2 * S))
                twice = tl.join(minimum, minimum).permute(0, 2, 1).reshape(BLOCK_N, 2 * S)
                acc -= tl.dot(twice, means) * (m.to(tl.float32) * SUB)
        else:
            acc = tl.dot(w, x, acc)

    if FUSED:
        gate, up = tl.split(acc.reshape(2, H, BLOCK_M).permute(1, 2, 0))
        store(y_ptrs, activated(gate, up, ACT), mask_y, INTERPRET)
    else:
        store(y_ptrs, acc, mask_y, INTERPRET)


INTERPRETED: bool = not isinstance(_moe_packed_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


@triton.jit
def _prepare_kernel(
    x_ptr, out_ptr, means_ptr, K, stride_xm, stride_xk,
    P: tl.constexpr, SUB: tl.constexpr, STEP: tl.constexpr, MEANS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """STEP columns of a row of x in their order, and the means of their sub-blocks."""
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * STEP
    offs = k + tl.arange(0, STEP)
    mask = offs < K
    C: tl.constexpr = 2 * P
    at = offs % (4 * C)  # 8 p + 2 c + h is column C c + 2 p + h
    column = offs - at + at % 8 // 2 * C + at // 8 * 2 + at % 2
    x = tl.load(x_ptr + row * stride_xm + column.to(tl.int64) * stride_xk, mask=mask, other=0.0)
    tl.store(out_ptr + row * K + offs, x, mask=mask)
    if MEANS:  # a sub-block need not be whole in the order above
        x = tl.load(x_ptr + row * stride_xm + offs.to(tl.int64) * stride_xk, mask=mask, other=0.0)
        S: tl.constexpr = STEP // SUB
        mean = tl.sum(x.to(tl.float32).reshape(S, SUB), 1) / SUB
        first = mean.to(tl.float16)
        rest = (mean - first.to(tl.float32)).to(tl.float16)
        to = means_ptr + row * (K // SUB * 2) + tl.program_id(0) * (2 * S) + tl.arange(0, S)
        inside = k + tl.arange(0, S) * SUB < K
        tl.store(to, first, mask=inside)
        tl.store(to + S, rest, mask=inside)


def launch_prepare(
    x: torch.Tensor, form: BlockForm, out: torch.Tensor, means: torch.Tensor | None
) -> None:
    """Write x as `launch_moe_packed` reads it.

    Args:
        x: float16 [M, K], any strides.
        form: of the weight's type.
        out: float16 [M, K], contiguous: x with its columns in the order of the module.
        means: float16 [M, 2 K / form.sub], contiguous, for K-quants with minimums: of every 256
            columns the means of x over sub-blocks, then what is left of them; else None.
    """
    m, k = x.shape
    step = _BLOCK if form.sub_bytes else 512
    for at in range(0, m, 65535):  # the second dimension of a grid ends there
        some = x[at : at + 65535]
        _prepare_kernel[(triton.cdiv(k, step), len(some))](
            some, out[at:], out if means is None else means[at:], k, *x.stride(),
            P=16 // form.low.bits, SUB=form.sub, STEP=step, MEANS=means is not None,
            INTERPRET=INTERPRETED, num_warps=1,
        )  # fmt: skip


def launch_moe_packed(
    x: torch.Tensor,
    means: torch.Tensor | None,
    experts: GpuExperts,
    slots: torch.Tensor,
    tiles: torch.Tensor,
    y: torch.Tensor,
    tile: Tile,
    *,
    share: int,
    act: str = "",
) -> None:
    """Write the product of every slot. Neither chooses, allocates nor checks a rule.

    Args:
        x, means: of `launch_prepare`, [slots / share, ..].
        experts: GGUF blocks [E, N, K] of a type whose codes are numbers, on the device of x; fused,
            [E, 2 N, K]: gate's rows before up's.
        slots, tiles: of `triton_route.launch_route`, with the tile's block_m.
        y: [slots, N] of any floating dtype and strides.
        tile: algorithm "packed" of `gpu_space.MOE_SPACE`.
        share: consecutive slots that read one row of x.
        act: "" for a plain product; fused, a value of `triton_parts.ACTIVATIONS`.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    if x.device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            "moe: x is on the CPU, where Triton only interprets; set TRITON_INTERPRET=1 before the "
            "first import of the kernel, or move x to a GPU"
        )
    planes = experts.planes
    assert isinstance(planes, GpuBlocks)
    n, k, fused = y.shape[1], x.shape[1], bool(act)
    columns = tile.block_n // 2 if fused else tile.block_n
    (low, high, scales, minimums, subs, _), strides, constants = operands(experts, tile.block_k)
    del constants["HAS_PERM"]
    _moe_packed_kernel[(len(tiles) * triton.cdiv(n, columns),)](
        x, x if means is None else means, low, high, scales, minimums, subs, y, slots, tiles, n, k,
        experts.E, len(tiles),
        *strides[:-2], *y.stride(),
        DIV=share, **constants, ASM=asm_of(target_arch(x.device), x.dtype) == "nv",
        FUSED=fused, ACT=act,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        EVEN_K=k % tile.block_k == 0, EVEN_N=n % columns == 0, INTERPRET=INTERPRETED,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
