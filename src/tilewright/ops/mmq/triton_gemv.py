"""mmq for few rows of x in Triton, for decoding: the weights' bytes are the cost.

::

    y[m, n] = sum_k x[m, k] * (scale[n, k / SUB] * code[n, k] + minimum[n, k / SUB]) + bias[n]

A program computes BLOCK_N rows of the weight for all rows of x. Its warps stand along K: warp w
takes unit ``step * W * UNITS + w * UNITS``, of 64 to 256 columns, and the ones behind it, so that a
program reads BLOCK_N streams from front to back, 16 bytes a lane. At the end the warps' sums meet.
Words lie as `tilewright.layout.blocks` draws them; how a unit's become weights is told in
`gemv_parts`.

block_m >= 8, 16-bit x    matrix units. Weights of the K-quants and IQ4_XS enter without d, as code
                          times sub-scale, and d multiplies the sums of its block (POST); minimums
                          are a product of their own. Both are exact, or there is no minimum and
                          the weight is rounded once. Of other types, and of Q4_K and Q5_K in
                          bfloat16, the whole weight is rounded once, as in `triton_gemm`.
else                      sums of products in float32, a row of x at a time: weights are not
                          rounded.

With SPLIT > 1 the grid has a second dimension, of shares of K: their sums go to `partials` [SPLIT,
M, N] float32, and a second kernel adds them in their order; two launches agree bit for bit.

Rows of the weight past N repeat the last one and are not stored. Columns past K are not read of
the weight, whose last ones are read again, and are 0 in x.

FAULT plants one of the errors of `gemv_space` for the gate to find. It is "" in every tile of the
space, and the compiler then sees none of it.
"""

# mypy: disable-error-code="no-untyped-def, assignment, unreachable, var-annotated"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there. Its tuples
# grow, also those that begin empty.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.errors import UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import GpuBlocks
from tilewright.ops.cross import target_arch
from tilewright.ops.mmq.gemv_parts import (
    by_word,
    constant_operand,
    in_places,
    left_operand,
    load_scales,
    load_x,
    numbers_of,
    places,
    right_operand,
)
from tilewright.ops.mmq.gemv_weights import weights_packed, weights_plain
from tilewright.ops.mmq.triton_outputs import launch_sum, store
from tilewright.ops.w4a16.triton_gemm import asm_of, spans_wide
from tilewright.ops.w4a16.triton_parts import to_float32
from tilewright.tiles.tile import Tile

__all__ = ["INTERPRETED", "launch_gemv", "workspace_gemv"]

_FLIPPED: bool = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7)
_LEAST_DOT = 8  # rows of x from which matrix units multiply


@triton.jit
def _store_tile(
    y, y_ptr, p_ptr, b_ptr, offs_m, offs_n, row_n, share, M, N, stride_ym, stride_yn,
    SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_N, m] to y, or to the partials of a share of K."""
    rows = M
    if FAULT == "gemv-past-the-end":
        rows = M + 1
    mask = (offs_n < N)[:, None] & (offs_m < rows)[None, :]
    if SPLIT > 1:
        at = (share * M + offs_m)[None, :] * tl.cast(N, tl.int64) + offs_n[:, None]
        tl.store(p_ptr + at, y, mask=mask)
    else:
        if HAS_BIAS:
            y += to_float32(tl.load(b_ptr + row_n), INTERPRET)[:, None]
        row_y = offs_m[None, :].to(tl.int64) * stride_ym
        store(y_ptr + row_y + offs_n[:, None].to(tl.int64) * stride_yn, y, mask, INTERPRET)


@triton.jit
def _fetch_words(
    low_ptrs, high_ptrs, step, end, K, stride_hk,
    LOW: tl.constexpr, HIGH: tl.constexpr, W: tl.constexpr, UNITS: tl.constexpr,
    EVEN: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """The words of the units of a step, of both planes: two tensors each.

    Units from `end` on are the one before it, lanes past K the last one that is there. stride_hk is
    1, and the compiler is not told: lanes would load their neighbours' words with their own.
    """
    C: tl.constexpr = 128 // LOW
    PER: tl.constexpr = LOW // HIGH if HIGH > 0 else 1  # words of low that a word of high serves
    _, warp, _, t = places(1, W, FLIPPED)
    found = ()
    for u in tl.static_range(UNITS):
        unit = tl.minimum((step * W + warp) * UNITS + u, end - 1)
        lane = t
        if not EVEN:
            lane = tl.minimum(t, (K - unit * (4 * C)) // C - 1)
        low = tl.load(low_ptrs + (unit * 16 + lane * 4)[:, :, :, :, None])
        high = low
        if HIGH > 0:
            word = unit * (16 // PER) + lane * (4 // PER)
            if PER == 4:
                high = tl.load(high_ptrs + word * stride_hk)[:, :, :, :, None]
            else:
                two = tl.arange(0, 2)[None, None, None, None, :]
                high = tl.load(high_ptrs[:, :, :, :, None] + word[:, :, :, :, None] + two)
        found = found + (in_places(low, FLIPPED), in_places(high, FLIPPED))
    return found


@triton.jit
def _fetch_x(
    x_ptrs, step, K, stride_xk, mask_m,
    LOW: tl.constexpr, W: tl.constexpr, UNITS: tl.constexpr, WHOLE: tl.constexpr,
    INTERPRET: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """x of the units of a step, [ROWS, W, 8, 4, C] each; 0 past K and M."""
    C: tl.constexpr = 128 // LOW
    _, warp, _, t = places(1, W, FLIPPED)
    found = ()
    for u in tl.static_range(UNITS):
        column = (((step * W + warp) * UNITS + u) * (4 * C) + t * C)[:, :, :, :, None]
        x = load_x(x_ptrs, column, K, stride_xk, mask_m, C // 8, WHOLE, INTERPRET, FLIPPED)
        found = found + (x,)
    return found


@triton.jit
def _fetch_scales(
    s_ptrs, m_ptrs, t_ptrs, d_ptrs, e_ptrs, step, end, K, stride_sb, stride_mb, stride_tb,
    LOW: tl.constexpr, SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr,
    SUB: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr, UNITS: tl.constexpr,
    POST: tl.constexpr, EVEN: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """What the scales of the units of a step are made of, six tensors each: four of `load_scales`,
    d and dmin. What a type lacks is another one of them. Units and lanes as in `_fetch_words`.
    """
    C: tl.constexpr = 128 // LOW
    COUNT: tl.constexpr = C // SUB if C > SUB else 1
    LOG_PARTS: tl.constexpr = 0 if BYTES == 0 else (3 if BLOCK // SUB == 8 else 4)
    BLOCK_UNITS: tl.constexpr = BLOCK // (4 * C) if POST else 1
    _, warp, _, t = places(1, W, FLIPPED)
    found = ()
    for u in tl.static_range(UNITS):
        unit = tl.minimum((step * W + warp) * UNITS + u, end - 1)
        lane = t
        if not EVEN:
            lane = tl.minimum(t, (K - unit * (4 * C)) // C - 1)
        sub = unit * (4 * C // SUB) + lane * C // SUB
        b0, b1, b2, b3 = load_scales(
            s_ptrs, m_ptrs, t_ptrs, sub, stride_sb, stride_mb, stride_tb, SCALING, MINIMUMS, BYTES,
            COUNT, LOG_PARTS,
        )  # fmt: skip
        scale = b0
        minimum = b0
        if BYTES > 0 and not POST:
            scale = tl.load(s_ptrs + (sub >> LOG_PARTS) * stride_sb)
            if MINIMUMS:
                minimum = tl.load(m_ptrs + (sub >> LOG_PARTS) * stride_mb)
        scale = in_places(scale, FLIPPED)
        minimum = in_places(minimum, FLIPPED)
        if POST:
            if (u + 1) % BLOCK_UNITS == 0 or u + 1 == UNITS:  # where a block, or a step, ends
                at = tl.minimum((step * W + tl.arange(0, W)) * UNITS + u, end - 1)
                block = (at // BLOCK_UNITS)[:, None]
                scale = tl.load(d_ptrs + block * stride_sb)
                if MINIMUMS:
                    minimum = tl.load(e_ptrs + block * stride_mb)
        b0 = in_places(b0, FLIPPED)
        b1 = in_places(b1, FLIPPED)
        b2 = in_places(b2, FLIPPED)
        b3 = in_places(b3, FLIPPED)
        found = found + (b0, b1, b2, b3, scale, minimum)
    return found


@triton.jit(
    do_not_specialize=[
        "M", "stride_hk", "stride_sn", "stride_sb", "stride_mn", "stride_mb", "stride_tn",
        "stride_tb",
    ]
)  # fmt: skip
def _gemv_kernel(
    x_ptr, low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, b_ptr, y_ptr, p_ptr,
    M, N, K,
    stride_xm, stride_xk, stride_ln, stride_hn, stride_hk, stride_sn, stride_sb, stride_mn,
    stride_mb, stride_tn, stride_tb, stride_ym, stride_yn,
    LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr, OFFSET: tl.constexpr,
    SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr, SUB_OFFSET: tl.constexpr,
    SUB: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, W: tl.constexpr, UNITS: tl.constexpr,
    AHEAD: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr, POST: tl.constexpr,
    PACKED: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    WIDE: tl.constexpr, FLIPPED: tl.constexpr, INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of y, or of one share of them."""
    P: tl.constexpr = 16 // LOW
    C: tl.constexpr = 8 * P  # columns of a lane
    COUNT: tl.constexpr = C // SUB if C > SUB else 1
    SUBS: tl.constexpr = BYTES > 0
    R: tl.constexpr = BLOCK_N // 8
    ROWS: tl.constexpr = BLOCK_M // 8 if DOT else 1
    ADDED: tl.constexpr = MINIMUMS and FAULT != "gemv-no-minimum"
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WTYPE: tl.constexpr = dtype if DOT else tl.float32
    PER: tl.constexpr = LOW // HIGH if HIGH > 0 else 1  # words of low that a word of high serves
    BLOCK_UNITS: tl.constexpr = BLOCK // (4 * C) if POST else 1
    KEPT: tl.constexpr = 8 if (SUBS or SCALING == "exponent") and AHEAD == 0 else 4
    PLAIN_ADDED: tl.constexpr = ADDED and not POST
    pid_n = tl.program_id(0)
    share = tl.program_id(1)

    r, _, g, _ = places(R, W, FLIPPED)
    d = tl.arange(0, 4)[None, None, None, None, :]
    row = tl.minimum(pid_n * BLOCK_N + r * 8 + g, N - 1)
    if WIDE:  # some operand spans 2^31 elements
        row = row.to(tl.int64)
        stride_xk = tl.cast(stride_xk, tl.int64)
    low_ptrs = (low_ptr + row * stride_ln)[:, :, :, :, None] + d
    high_ptrs = high_ptr + row * stride_hn
    s_ptrs = s_ptr + row * stride_sn
    m_ptrs = m_ptr + row * stride_mn
    t_ptrs = t_ptr + row * stride_tn
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_n = tl.minimum(offs_n, N - 1)
    if WIDE:
        row_n = row_n.to(tl.int64)
    d_ptrs = s_ptr + (row_n * stride_sn)[None, :]
    e_ptrs = m_ptr + (row_n * stride_mn)[None, :]
    offs_m = tl.arange(0, 8 * ROWS)
    r_s, warp_s, g_s, t_s = places(R, W, False)
    r, warp, g, t = places(ROWS, W, FLIPPED)
    row_m = (r * 8 + g)[:, :, :, :, None]
    mask_m = row_m < M
    x_ptrs = x_ptr + row_m.to(tl.int64) * stride_xm
    if not DOT:  # the same row for all: each lane of a column reads it
        mask_m = row_m < 8
        x_ptrs = x_ptr + row_m * 0

    units = tl.cdiv(K, 4 * C)
    if FAULT == "gemv-k-tail":
        units = K // (4 * C)
    steps = tl.cdiv(units, W * UNITS)
    each = tl.cdiv(steps, SPLIT)
    first = share * each
    last = tl.minimum(first + each, steps)

    acc = tl.zeros((W, BLOCK_N, BLOCK_M), tl.float32)
    none = tl.zeros((R, W, 8, 4), tl.float32)
    sums = (none,) * BLOCK_M
    end = tl.minimum(units, last * (W * UNITS))
    words = ()
    scales = ()
    if AHEAD > 0:
        words = _fetch_words(
            low_ptrs, high_ptrs, first, end, K, stride_hk, LOW, HIGH, W, UNITS, EVEN, FLIPPED
        )
        scales = _fetch_scales(
            s_ptrs, m_ptrs, t_ptrs, d_ptrs, e_ptrs, first, end, K, stride_sb, stride_mb, stride_tb,
            LOW, SCALING, MINIMUMS, BYTES, SUB, BLOCK, W, UNITS, POST, EVEN, FLIPPED,
        )  # fmt: skip
    for step in range(first, last):
        part = acc
        part_m = acc
        now_w = words
        now_s = scales
        now_x = ()
        found_w = _fetch_words(
            low_ptrs, high_ptrs, step + 1 if AHEAD > 0 else step, end, K, stride_hk, LOW, HIGH, W,
            UNITS, EVEN, FLIPPED,
        )  # fmt: skip
        found_s = _fetch_scales(
            s_ptrs, m_ptrs, t_ptrs, d_ptrs, e_ptrs, step + 1 if AHEAD > 0 else step, end, K,
            stride_sb, stride_mb, stride_tb, LOW, SCALING, MINIMUMS, BYTES, SUB, BLOCK, W, UNITS,
            POST, EVEN, FLIPPED,
        )  # fmt: skip
        if AHEAD > 0:
            words = found_w
            scales = found_s
            if AHEAD > 1:  # or the assembler moves these loads past those of x, to the loop's end
                tl.inline_asm_elementwise(
                    "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [first],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
        else:
            now_w = found_w
            now_s = found_s
        if DOT:
            now_x = _fetch_x(
                x_ptrs, step, K, stride_xk, mask_m, LOW, W, UNITS, WHOLE, INTERPRET, FLIPPED
            )
        for u in tl.static_range(UNITS):
            low = now_w[2 * u]
            high = low
            if HIGH > 0:
                high = by_word(now_w[2 * u + 1], 4 // PER) >> (HIGH * P * (d % PER))
            column = (((step * W + warp) * UNITS + u) * (4 * C) + t * C)[:, :, :, :, None]
            sub = tl.minimum((step * W + warp_s) * UNITS + u, end - 1) * (4 * C // SUB)
            sub += t_s * C // SUB
            b0 = now_s[6 * u]
            b1 = now_s[6 * u + 1]
            b2 = now_s[6 * u + 2]
            b3 = now_s[6 * u + 3]
            scale, minimum = numbers_of(
                b0, b1, b2, b3, sub, SCALING, MINIMUMS, SUB_OFFSET, COUNT, PACKED, dtype
            )
            if PACKED:
                w = weights_packed(
                    low, high, by_word(scale.to(dtype), COUNT), by_word(minimum.to(dtype), COUNT),
                    dtype, LOW, HIGH, CODES, OFFSET, SUBS, ADDED,
                )  # fmt: skip
            else:
                scale = scale.to(tl.float32)
                least = minimum.to(tl.float32)
                if SUBS and not POST:
                    scale *= now_s[6 * u + 4].to(tl.float32)[:, :, :, :, None]
                    if MINIMUMS:
                        least *= -now_s[6 * u + 5].to(tl.float32)[:, :, :, :, None]
                w = weights_plain(
                    low, high, by_word(scale, COUNT), by_word(least, COUNT), WTYPE, LOW, HIGH,
                    CODES, OFFSET, PLAIN_ADDED, ASM, INTERPRET,
                )  # fmt: skip

            if DOT:
                x = right_operand(now_x[u], KEPT)
                if POST:
                    if u % BLOCK_UNITS == 0:
                        part = tl.zeros((W, BLOCK_N, BLOCK_M), tl.float32)
                        part_m = part
                    part = tl.dot(left_operand(w, KEPT), x, part)
                    if ADDED:
                        least = constant_operand(by_word(minimum.to(w.dtype), COUNT), P, KEPT)
                        part_m = tl.dot(least, x, part_m)
                    if (u + 1) % BLOCK_UNITS == 0 or u + 1 == UNITS:
                        acc += part * now_s[6 * u + 4].to(tl.float32)[:, :, None]
                        if ADDED:
                            acc -= part_m * now_s[6 * u + 5].to(tl.float32)[:, :, None]
                else:
                    acc = tl.dot(left_operand(w, KEPT), x, acc)
            else:
                added = ()
                for m in tl.static_range(BLOCK_M):
                    x_m = x_ptrs + tl.cast(tl.minimum(m, M - 1), tl.int64) * stride_xm
                    x = load_x(x_m, column, K, stride_xk, mask_m, P, WHOLE, INTERPRET, FLIPPED)
                    x = to_float32(x, INTERPRET)
                    product = w.reshape(R, W, 8, 4, C) * x
                    added = added + (sums[m] + tl.sum(product, 4),)
                sums = added

    if DOT:
        y = tl.sum(acc, 0)
        _store_tile(
            y, y_ptr, p_ptr, b_ptr, offs_m, offs_n, row_n, share, M, N, stride_ym, stride_yn,
            SPLIT, HAS_BIAS, INTERPRET, FAULT,
        )  # fmt: skip
    else:
        for m in tl.static_range(BLOCK_M):
            y = tl.sum(tl.sum(sums[m], 3), 1).reshape(BLOCK_N)
            one = m + tl.arange(0, 1)
            _store_tile(
                y[:, None], y_ptr, p_ptr, b_ptr, one, offs_n, row_n, share, M, N, stride_ym,
                stride_yn, SPLIT, HAS_BIAS, INTERPRET, FAULT,
            )  # fmt: skip


INTERPRETED: bool = not isinstance(_gemv_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


def workspace_gemv(tile: Tile, M: int, N: int, K: int, units: int) -> tuple[int, int]:
    """Floats of partial sums and arrival counters that a tile needs: the shares, and none."""
    return (tile.split_k * M * N if tile.split_k > 1 else 0), 0


def launch_gemv(
    x: torch.Tensor,
    weight: GpuBlocks,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    workspace: Any,
) -> None:
    """Write x @ W.T + bias to y. Neither chooses, allocates nor checks a rule.

    Args:
        x: [M, K], 1 <= M <= tile.block_m, any strides.
        weight: on the device of x.
        bias: [N] of any floating dtype, contiguous.
        y: [M, N] of the dtype of x, any strides.
        tile: "gemv" of `triton_space.TRITON_SPACE`, or a planted one.
        workspace: `partials` of what `workspace_gemv` says; any content.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    if x.device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            "mmq: x is on the CPU, where Triton only interprets; set TRITON_INTERPRET=1 before "
            "the first import of the kernel, or move x to a GPU"
        )
    m, k = x.shape
    n, form, block = weight.N, weight.form, BLOCK_TYPES[weight.type_name].block_size
    high, scales = weight.high, weight.scales
    minimums, subs = weight.minimums, weight.sub_scales
    fault = tile.as_dict().get("planted", "")
    partials = workspace.partials if tile.split_k > 1 else scales
    dot = tile.block_m >= _LEAST_DOT and x.dtype != torch.float32
    exact = x.dtype == torch.float16 or form.scaling == "nibbles"  # code times sub-scale
    post = dot and form.sub_bytes > 0 and (exact or form.minimum_at is None)
    arch = target_arch(x.device)
    asm = asm_of(arch, torch.float16)
    packed = (
        dot and asm_of(arch, x.dtype) == "nv"
        and (x.dtype == torch.float16 or form.codes == "fp4" or (post and form.codes == "offset"))
    )  # fmt: skip
    unit = 512 // form.low.bits  # columns
    _gemv_kernel[(triton.cdiv(n, tile.block_n), tile.split_k)](
        x, weight.low, weight.low if high is None else high, scales,
        scales if minimums is None else minimums, scales if subs is None else subs,
        scales if bias is None else bias, y, partials,
        m, n, k,
        *x.stride(), weight.low.stride(0), *((0, 1) if high is None else high.stride()),
        *scales.stride(), *(scales if minimums is None else minimums).stride(),
        *(scales if subs is None else subs).stride(), *y.stride(),
        LOW=form.low.bits, HIGH=form.high_bits, CODES=form.codes, OFFSET=form.offset,
        SCALING=form.scaling, MINIMUMS=minimums is not None, BYTES=form.sub_bytes,
        SUB_OFFSET=form.sub_offset, SUB=form.sub, BLOCK=block, HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, W=tile.num_warps, UNITS=tile.units,
        AHEAD=tile.ahead if asm == "nv" else min(tile.ahead, 1), SPLIT=tile.split_k, DOT=dot,
        POST=post, PACKED=packed, ASM=asm,
        EVEN=k % unit == 0, WHOLE=k % (unit * tile.num_warps * tile.units) == 0,
        WIDE=any(spans_wide(t) for t in (x, y, *weight.tensors)),
        FLIPPED=_FLIPPED, INTERPRET=INTERPRETED, FAULT=fault, num_warps=tile.num_warps,
        num_stages=1,
    )  # fmt: skip
    if tile.split_k > 1:
        launch_sum(partials, bias, y, tile.split_k, fault.removeprefix("gemv-"), few_rows=True)
