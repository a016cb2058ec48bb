"""W4A16 in Gluon for AMD's matrix units: RDNA3, RDNA4, CDNA2 and CDNA3.

::

    y[m, n] = sum_k x[m, k] * s[n, k // G] * (q[n, k] - z[n, k // G]) + bias[n]

One program computes BLOCK_M x BLOCK_N of y. In a step of its K loop each thread loads those words
of w whose codes it will hand to the matrix units, and dequantizes them where they are: weights
never pass through shared memory, and no barrier waits for them. x passes through it, or, where few
rows make that cheaper, is loaded as the matrix units take it ("direct": no barrier at all)::

    words [BLOCK_K / 8, BLOCK_N]  --amd_parts.weights-->  w [BLOCK_K, BLOCK_N] --.
                                                                                 +--> acc fp32
    x [BLOCK_M, BLOCK_K]  --(shared memory)-->  operand  ------------------------'

Words, scales and zero points lie as `tilewright.layout.triton` draws them, words in order "k8". A
step reads one scale a column, so BLOCK_K divides the group, unless one group is all of K.

SCALE, three ways:
    "weights"  q - z is exact and is multiplied by the scale in float16, one rounding.
    "steps"    the matrix units get q - z itself, and the sums of each step are multiplied by the
               scale in float32. Weights are not rounded, registers for a step's sums are needed.
    "end"      as "steps", once behind the loop: wherever one group is all of K.

Rows and columns past the edges are read from the last valid row (what becomes of them is not
stored), K past its end as zero. Offsets within a tile are 32 bits, those of a tile 64. One output
has one program, which adds in one order: two launches agree bit for bit.

Tile fields (`amd_space.AMD_FIELDS`)::

    block_m, block_n, block_k   of a program and a step
    num_warps, warps_m          warps, and how many of them along M. The others lie along N. Warps
                                along M dequantize the same weights: 1 unless block_n is small.
    num_stages                  2: loads of the next step fly during this one; 1: no registers
                                for that
    x_path                      "shared" or "direct"
    scale                       "weights" or "steps"; "steps" is what bfloat16 takes, and float16
                                with scales of another dtype. It multiplies block_m numbers where
                                "weights" multiplies block_k.
"""

# mypy: disable-error-code="no-untyped-def"
# Gluon reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.errors import UnsupportedError
from tilewright.layout.triton import WordsW4
from tilewright.ops.cross import target_arch
from tilewright.ops.gluon_compat import block_barrier
from tilewright.ops.w4a16.amd_layouts import layouts_of, words_layout
from tilewright.ops.w4a16.amd_parts import issued, weights
from tilewright.ops.w4a16.amd_space import amd_family
from tilewright.tiles.tile import Tile

__all__ = ["launch_w4a16_amd", "workspace_amd"]

_ROWS_OF_TILES: gl.constexpr = gl.constexpr(8)


@gluon.jit
def _multiply(x, w, acc, UNIT: gl.constexpr):
    if UNIT == "wmma1":
        return gl.amd.rdna3.wmma(x, w, acc)
    elif UNIT == "wmma2":
        return gl.amd.rdna4.wmma(x, w, acc)
    else:
        return gl.amd.cdna3.mfma(x, w, acc)


@gluon.jit
def _load(ptr, offsets, mask, MASKED: gl.constexpr):
    if MASKED:
        return gl.amd.cdna3.buffer_load(ptr, offsets, mask=mask, other=0)
    else:
        return gl.amd.cdna3.buffer_load(ptr, offsets)


@gluon.jit
def _load_step(
    k, K, x_ptr, x_offs, x_k, stride_xk, q_ptr, q_offs, q_k, stride_qk, K_TAIL: gl.constexpr
):
    """x [BLOCK_M, BLOCK_K] and words [BLOCK_K / 8, BLOCK_N] of the step that begins at k."""
    at_k = k.to(gl.int64)
    mask_x = (k + x_k < K)[None, :]
    mask_q = (k // 8 + q_k < gl.cdiv(K, 8))[:, None]
    x = _load(x_ptr + at_k * stride_xk, x_offs, mask_x, K_TAIL)
    q = _load(q_ptr + at_k // 8 * stride_qk, q_offs, mask_q, K_TAIL)
    return x, q


@gluon.jit
def _load_group(
    k, s_ptr, s_offs, stride_sg, z_ptr, z_offs, stride_zg,
    GROUP: gl.constexpr, ZEROS: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """Scales [BLOCK_N] and what holds the zero points [BLOCK_N] of the group that k lies in."""
    g = k.to(gl.int64) // GROUP
    if FAULT == "group-straddled":  # two groups share the first one's scale
        g = g // 2 * 2
    scale = gl.amd.cdna3.buffer_load(s_ptr + g * stride_sg, s_offs)
    if ZEROS == "none":
        zero = z_offs
    else:
        zero = gl.amd.cdna3.buffer_load(z_ptr + g * stride_zg, z_offs).to(gl.int32)
    return scale, zero


@gluon.jit
def _w4a16_amd_kernel(
    x_ptr, q_ptr, s_ptr, z_ptr, b_ptr, y_ptr,
    M, N, K,
    stride_xm, stride_xk, stride_qn, stride_qk, stride_sn, stride_sg, stride_zn, stride_zg,
    stride_ym, stride_yn,
    GROUP: gl.constexpr, ZEROS: gl.constexpr, HAS_BIAS: gl.constexpr, K_TAIL: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    AHEAD: gl.constexpr, DIRECT: gl.constexpr, SCALE: gl.constexpr, UNIT: gl.constexpr,
    ACC: gl.constexpr, K_WIDTH: gl.constexpr, SPLIT: gl.constexpr, X_LAYOUT: gl.constexpr,
    X_SHARED: gl.constexpr, Y_LAYOUT: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """One tile of y. ZEROS is "none", "bytes" or "packed"; SCALE as in the module's docstring."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, K_WIDTH)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, K_WIDTH)
    WORDS: gl.constexpr = words_layout(gl.to_linear_layout(RIGHT, [BLOCK_K, BLOCK_N]), SPLIT)
    XL: gl.constexpr = LEFT if DIRECT else X_LAYOUT
    COLUMNS: gl.constexpr = gl.SliceLayout(0, WORDS)
    SCALES: gl.constexpr = COLUMNS if SCALE == "weights" else gl.SliceLayout(0, ACC)
    dtype: gl.constexpr = x_ptr.dtype.element_ty

    # Which tile: bands of 8 rows of tiles, column after column, so that x and w stay in the cache.
    pid = gl.program_id(0)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    band = pid // (_ROWS_OF_TILES * tiles_n)
    band_rows = min(tiles_m - band * _ROWS_OF_TILES, _ROWS_OF_TILES)
    in_band = pid % (_ROWS_OF_TILES * tiles_n)
    start_m = (band * _ROWS_OF_TILES + in_band % band_rows) * BLOCK_M
    start_n = in_band // band_rows * BLOCK_N
    rows = M - start_m
    columns = N - start_n

    x_ptr += start_m.to(gl.int64) * stride_xm
    q_ptr += start_n.to(gl.int64) * stride_qn
    s_ptr += start_n.to(gl.int64) * stride_sn
    x_m = gl.minimum(gl.arange(0, BLOCK_M, gl.SliceLayout(1, XL)), rows - 1)
    x_k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, XL))
    x_k = (x_k // 8 % SPLIT * (BLOCK_K // 8 // SPLIT) + x_k // 8 // SPLIT) * 8 + x_k % 8
    x_offs = x_m[:, None] * stride_xm + x_k[None, :] * stride_xk
    q_n = gl.minimum(gl.arange(0, BLOCK_N, COLUMNS), columns - 1)
    q_k = gl.arange(0, BLOCK_K // 8, gl.SliceLayout(1, WORDS))
    q_offs = q_k[:, None] * stride_qk + q_n[None, :] * stride_qn
    s_n = gl.arange(0, BLOCK_N, SCALES)
    if FAULT == "scale-row":
        s_n += 1
    s_offs = gl.minimum(s_n, columns - 1) * stride_sn
    z_offs = gl.full((BLOCK_N,), 8, gl.int32, COLUMNS)
    z_bit = q_n % 8 * 4  # a tile begins at a multiple of 16
    if ZEROS == "bytes":
        z_ptr += start_n.to(gl.int64) * stride_zn
        z_offs = q_n * stride_zn
    elif ZEROS == "packed":
        z_ptr += start_n.to(gl.int64) // 8 * stride_zn
        z_offs = q_n // 8 * stride_zn
    y_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, Y_LAYOUT))
    y_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, Y_LAYOUT))
    y_ptr += start_m.to(gl.int64) * stride_ym + start_n.to(gl.int64) * stride_yn
    y_offs = y_m[:, None] * stride_ym + y_n[None, :] * stride_yn
    mask_y = (y_m < rows)[:, None] & (y_n < columns)[None, :]

    if not DIRECT:
        shared = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_K], X_SHARED)
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, ACC)
    if FAULT == "no-start":  # sums are added to what y holds
        before = gl.amd.cdna3.buffer_load(y_ptr, y_offs, mask=mask_y, other=0)
        acc += gl.convert_layout(before.to(gl.float32), ACC)
    end_k = K
    if FAULT == "k-tail":
        end_k = K // BLOCK_K * BLOCK_K
    last_k = gl.cdiv(K, BLOCK_K) * BLOCK_K - BLOCK_K

    first = pid * 0
    x, q = _load_step(
        first, K, x_ptr, x_offs, x_k, stride_xk, q_ptr, q_offs, q_k, stride_qk, K_TAIL
    )
    scale, zero = _load_group(
        first, s_ptr, s_offs, stride_sg, z_ptr, z_offs, stride_zg, GROUP, ZEROS, FAULT
    )
    for k in range(0, end_k, BLOCK_K):
        if not AHEAD:
            x, q = _load_step(
                k, K, x_ptr, x_offs, x_k, stride_xk, q_ptr, q_offs, q_k, stride_qk, K_TAIL
            )
            if SCALE != "end":
                scale, zero = _load_group(
                    k, s_ptr, s_offs, stride_sg, z_ptr, z_offs, stride_zg, GROUP, ZEROS, FAULT
                )
        if DIRECT:
            left = x
        else:
            shared.store(x)
            block_barrier()
        words = q
        scale_now = scale
        zero_now = zero
        if AHEAD:  # the last step loads itself again: no branch, and no address past the end
            ahead = min(k + BLOCK_K, last_k)
            x, q = _load_step(
                ahead, K, x_ptr, x_offs, x_k, stride_xk, q_ptr, q_offs, q_k, stride_qk, K_TAIL
            )
            if SCALE != "end":
                scale, zero = _load_group(
                    ahead, s_ptr, s_offs, stride_sg, z_ptr, z_offs, stride_zg, GROUP, ZEROS, FAULT
                )
            words = issued(words)
        if not DIRECT:
            left = shared.load(LEFT)
        if ZEROS == "packed":
            zero_now = (zero_now >> z_bit) & 15
        w = weights(
            words, zero_now, scale_now, dtype, SCALE == "weights", UNIT == "mfma", SPLIT, RIGHT
        )
        if SCALE == "steps":
            sums = _multiply(left, w, gl.zeros((BLOCK_M, BLOCK_N), gl.float32, ACC), UNIT)
            acc += sums * scale_now.to(gl.float32)[None, :]
        else:
            acc = _multiply(left, w, acc, UNIT)

    if SCALE == "end":
        acc *= scale.to(gl.float32)[None, :]
    if HAS_BIAS:
        b_offs = gl.minimum(gl.arange(0, BLOCK_N, gl.SliceLayout(0, ACC)), columns - 1)
        acc += gl.amd.cdna3.buffer_load(b_ptr + start_n, b_offs).to(gl.float32)[None, :]
    if FAULT == "partial-rows":  # the last rows are no whole tile: skipped
        mask_y = mask_y & (rows >= BLOCK_M)
    elif FAULT == "past-the-end":  # one row too many
        mask_y = (y_m < rows + 1)[:, None] & (y_n < columns)[None, :]
    y = gl.convert_layout(acc.to(dtype), Y_LAYOUT)
    gl.amd.cdna3.buffer_store(y, y_ptr, y_offs, mask=mask_y)


def launch_w4a16_amd(
    x: torch.Tensor,
    weight: WordsW4,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    workspace: Any = None,
) -> None:
    """Write x @ W.T + bias to y. Neither chooses, allocates nor checks a rule.

    Args:
        x: [M, K] float16 or bfloat16, M >= 1, columns in the weight's order (`weight.perm` is the
            caller's), any strides; contiguous rows at multiples of 16 bytes are loaded fastest.
        weight: words in order "k8", on the device of x; any strides, scales of any dtype.
        bias: [N] of any floating dtype, contiguous.
        y: [M, N] of the dtype of x, any strides.
        tile: of the algorithm "amd", or a planted one.
        workspace: not used; this kernel needs none.

    Raises:
        UnsupportedError: the words are in another order, or the device is none of
            `amd_space.AMD_ARCHS`.
    """
    if weight.order != "k8":
        raise UnsupportedError(
            f"w4a16 amd: the words are in order {weight.order!r}; this kernel reads 'k8' - pack "
            "the weight with pack_w4_words(..., order='k8')"
        )
    arch = target_arch(x.device)
    scale = _scale(x, weight, tile)
    layouts = layouts_of(tile, arch, scales_steps=scale == "steps")
    family = amd_family(arch)
    m, k = x.shape
    z = weight.zeros
    zeros = "none" if z is None else "bytes" if z.dtype == torch.uint8 else "packed"
    grid = (-(-m // tile.block_m) * -(-weight.N // tile.block_n),)
    _w4a16_amd_kernel[grid](
        x, weight.words, weight.scales, weight.words if z is None else z,
        weight.scales if bias is None else bias, y,
        m, weight.N, k,
        *x.stride(), *weight.words.stride(), *weight.scales.stride(),
        *((0, 0) if z is None else z.stride()), *y.stride(),
        GROUP=weight.group_size, ZEROS=zeros, HAS_BIAS=bias is not None,
        K_TAIL=k % tile.block_k != 0,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        AHEAD=tile.num_stages > 1, DIRECT=tile.x_path == "direct",
        SCALE=scale, UNIT=family.instruction,
        ACC=layouts.acc, K_WIDTH=layouts.k_width, SPLIT=layouts.split, X_LAYOUT=layouts.x,
        X_SHARED=layouts.shared, Y_LAYOUT=layouts.y, FAULT=tile.as_dict().get("planted", ""),
        num_warps=tile.num_warps, num_stages=1,
    )  # fmt: skip


def _scale(x: torch.Tensor, weight: WordsW4, tile: Tile) -> str:
    """What the scales are multiplied to: the kernel's SCALE."""
    if weight.group_size == weight.K:
        return "end"
    both = x.dtype == torch.float16 and weight.scales.dtype == torch.float16
    return "weights" if both and tile.scale == "weights" else "steps"


def workspace_amd(tile: Tile, M: int, N: int, K: int, units: int) -> tuple[int, int]:
    """(float32 partial sums, int32 counters) that the tile needs: none."""
    return 0, 0
