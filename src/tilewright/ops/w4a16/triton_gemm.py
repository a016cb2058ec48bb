"""W4A16 in portable Triton: NVIDIA, AMD, and the interpreter.

::

    y[m, n] = sum_k x[m, k] * s[n, k // G] * (q[n, k] - z[n, k // G]) + bias[n]

One program computes BLOCK_M x BLOCK_N of y. A step of its K loop loads x [BLOCK_M, BLOCK_K] and
the words of w [BLOCK_K / 8, BLOCK_N], unpacks and dequantizes them in registers, and multiplies::

    words [BLOCK_K / 8, BLOCK_N]  --dequantize-->  w [BLOCK_K, BLOCK_N]  --dot-->  acc [M, N] fp32

Words, scales and zero points lie as `tilewright.layout.triton` draws them; every operand has its
own strides. A step reads one scale a column, so BLOCK_K divides the group, unless one group is all
of K. Sums are float32, the bias is added to them, and the result is rounded once. Weights are
rounded once too, to the dtype of x: (q - z) is exact in any of them.

DEQUANT
    "scalar"  shift and mask each code, convert, (q - z) * s in float32, round to the dtype of x.
    "packed"  two codes an instruction: ``word >> 4 p & 0x000F000F | 0x64006400`` is the float16
              pair 1024 + q. In bfloat16 0x43004300 gives 128 + q. Subtract 1024 + z: exact. In
              float16 with float16 scales, multiply there; else in float32.

The interpreter holds bfloat16 as integers: it truncates where it should round, and would multiply
the bit patterns in a dot. There (INTERPRET) the kernel rounds by hand and multiplies in float32,
which changes no product.

FAULT plants one of the errors that tuners have chosen before, for the gate to find (see
`triton_planted`). It is "" in every tile of the space, and the compiler then sees none of it.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.errors import UnsupportedError
from tilewright.layout.triton import WordsW4
from tilewright.tiles.tile import Tile

__all__ = ["INTERPRETED", "launch_w4a16"]

_ROWS_OF_TILES: tl.constexpr = tl.constexpr(8)


@triton.jit
def _bits_to_float(bits):
    """bfloat16 patterns (integers below 2^16) as float32, exact."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _bfloat16_bits(v):
    """float32 rounded to the nearest bfloat16, ties to even; its pattern as uint32."""
    bits = v.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(v == v, rounded, 0x7FC0)


@triton.jit
def _operand(v, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 rounded to `dtype`, as tl.dot takes it."""
    if INTERPRET and dtype == tl.bfloat16:
        return _bits_to_float(_bfloat16_bits(v))
    else:
        return v.to(dtype)


@triton.jit
def _float32(v, INTERPRET: tl.constexpr):
    """A loaded scale or bias, or a tile of x, as float32."""
    if INTERPRET and v.dtype == tl.bfloat16:
        return _bits_to_float(v.to(tl.uint16, bitcast=True))
    else:
        return v.to(tl.float32)


@triton.jit
def _halves(pair, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """The low and the high 16 bits of int32 lanes: float16 as it is, bfloat16 as float32."""
    if dtype == tl.float16:
        low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    elif INTERPRET:
        low = _bits_to_float(pair & 0xFFFF)
        high = _bits_to_float(pair >> 16)
    else:
        low = (pair & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _dequantize_scalar(q, zero, scale, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """Words [BLOCK_K / 8, BLOCK_N] to weights [BLOCK_K, BLOCK_N], a code at a time."""
    j = tl.arange(0, 8)
    bit = (j // 2) * 4 + (j % 2) * 16
    code = (q[:, None, :] >> bit[None, :, None]) & 0xF  # [BLOCK_K / 8, 8, BLOCK_N]
    w = (code - zero[None, None, :]).to(tl.float32) * scale[None, None, :]
    return _operand(w, dtype, INTERPRET).reshape(q.shape[0] * 8, q.shape[1])


@triton.jit
def _dequantize_packed(q, zero, scale, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """Words [BLOCK_K / 8, BLOCK_N] to weights [BLOCK_K, BLOCK_N], two codes at a time."""
    one: tl.constexpr = 0x64006400 if dtype == tl.float16 else 0x43004300
    if dtype == tl.float16:
        offset = (zero + 1024).to(tl.float16)[None, :]
    else:
        offset = (zero + 128).to(tl.float32)[None, :]
    l0, h0 = _halves((q & 0x000F000F) | one, dtype, INTERPRET)
    l1, h1 = _halves(((q >> 4) & 0x000F000F) | one, dtype, INTERPRET)
    l2, h2 = _halves(((q >> 8) & 0x000F000F) | one, dtype, INTERPRET)
    l3, h3 = _halves(((q >> 12) & 0x000F000F) | one, dtype, INTERPRET)
    # Code j = 4 p1 + 2 p0 + half: joined so that the permute only renames registers.
    low = tl.join(tl.join(l0 - offset, l2 - offset), tl.join(l1 - offset, l3 - offset))
    high = tl.join(tl.join(h0 - offset, h2 - offset), tl.join(h1 - offset, h3 - offset))
    w = tl.join(low, high).permute(0, 2, 3, 4, 1).reshape(q.shape[0] * 8, q.shape[1])
    if dtype == tl.float16 and scale.dtype == tl.float16:
        return w * scale[None, :]
    else:
        return _operand(w.to(tl.float32) * scale.to(tl.float32)[None, :], dtype, INTERPRET)


@triton.jit
def _w4a16_kernel(
    x_ptr, q_ptr, s_ptr, z_ptr, b_ptr, y_ptr,
    M, N, K,
    stride_xm, stride_xk, stride_qn, stride_qk, stride_sn, stride_sg, stride_zn, stride_zg,
    stride_ym, stride_yn,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, DEQUANT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr, INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """One tile of y. GROUP is 0 when one group is all of K; ZEROS is "none", "bytes", "packed"."""
    # Which tile: bands of 8 rows of tiles, column after column, so that x and w stay in the cache.
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = pid // (_ROWS_OF_TILES * tiles_n)
    band_rows = tl.minimum(tiles_m - band * _ROWS_OF_TILES, _ROWS_OF_TILES)
    in_band = pid % (_ROWS_OF_TILES * tiles_n)
    pid_m = band * _ROWS_OF_TILES + in_band % band_rows
    pid_n = in_band // band_rows

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_w = tl.arange(0, BLOCK_K // 8)
    mask_m = offs_m < M
    mask_n = offs_n < N
    if WIDE:  # some operand spans 2^31 elements
        offs_m = offs_m.to(tl.int64)
        offs_n = offs_n.to(tl.int64)
        offs_k = offs_k.to(tl.int64)
        offs_w = offs_w.to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_s = offs_n
    mask_s = mask_n
    if FAULT == "scale-row":
        row_s = offs_n + 1
        mask_s = row_s < N

    x_ptrs = x_ptr + offs_m[:, None] * stride_xm  # [BLOCK_M, 1]
    q_ptrs = q_ptr + offs_n[None, :] * stride_qn  # [1, BLOCK_N]
    s_ptrs = s_ptr + row_s * stride_sn
    z_ptrs = z_ptr
    if ZEROS == "bytes":
        z_ptrs = z_ptr + offs_n * stride_zn
    elif ZEROS == "packed":
        z_ptrs = z_ptr + (offs_n // 8) * stride_zn
    zero = tl.full((BLOCK_N,), 8, tl.int32)
    y_ptrs = y_ptr + offs_m[:, None] * stride_ym + offs_n[None, :] * stride_yn
    mask_y = mask_m[:, None] & mask_n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FAULT == "no-start":  # sums are added to what y holds
        acc += _float32(tl.load(y_ptrs, mask=mask_y, other=0.0), INTERPRET)
    end_k = K
    if FAULT == "k-tail":
        end_k = K // BLOCK_K * BLOCK_K

    for k in range(0, end_k, BLOCK_K):
        at_k = offs_k + k
        at_w = offs_w + k // 8
        mask_k = at_k < K
        x = tl.load(
            x_ptrs + at_k[None, :] * stride_xk, mask=mask_m[:, None] & mask_k[None, :], other=0.0
        )  # [BLOCK_M, BLOCK_K]
        q = tl.load(
            q_ptrs + at_w[:, None] * stride_qk,
            mask=mask_n[None, :] & (at_w < tl.cdiv(K, 8))[:, None],
            other=0,
        )  # [BLOCK_K / 8, BLOCK_N]
        g = 0
        if GROUP > 0:
            g = k // GROUP
            if FAULT == "group-straddled":  # two groups share the first one's scale
                g = k // (2 * GROUP) * 2
        scale = tl.load(s_ptrs + g * stride_sg, mask=mask_s, other=0.0)
        if ZEROS == "bytes":
            zero = tl.load(z_ptrs + g * stride_zg, mask=mask_n, other=0).to(tl.int32)
        elif ZEROS == "packed":
            eight = tl.load(z_ptrs + g * stride_zg, mask=mask_n, other=0)
            zero = (eight >> ((offs_n % 8) * 4).to(tl.int32)) & 0xF
        if scale.dtype == tl.bfloat16:
            scale = _float32(scale, INTERPRET)
        if DEQUANT == "packed":
            w = _dequantize_packed(q, zero, scale, dtype, INTERPRET)
        else:
            w = _dequantize_scalar(q, zero, scale.to(tl.float32), dtype, INTERPRET)
        if INTERPRET and dtype == tl.bfloat16:
            x = _float32(x, INTERPRET)
        acc = tl.dot(x, w, acc, input_precision="ieee")

    if HAS_BIAS:
        bias = tl.load(b_ptr + offs_n, mask=mask_n, other=0.0)
        acc += _float32(bias, INTERPRET)[None, :]
    if FAULT == "partial-rows":  # the last rows are no whole tile: skipped
        mask_y = mask_y & (offs_m < M // BLOCK_M * BLOCK_M)[:, None]
    elif FAULT == "past-the-end":  # one row too many
        mask_y = (offs_m < M + 1)[:, None] & mask_n[None, :]
    if INTERPRET and dtype == tl.bfloat16:
        acc = _bfloat16_bits(acc).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(y_ptrs, acc.to(dtype), mask=mask_y)


INTERPRETED: bool = not isinstance(_w4a16_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


def launch_w4a16(
    x: torch.Tensor,
    weight: WordsW4,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """Write x @ W.T + bias to y. Neither chooses, allocates nor checks a rule.

    Args:
        x: [M, K], M >= 1, columns in the weight's order (`weight.perm` is the caller's).
        weight: on the device of x.
        bias: [N] of any floating dtype, contiguous.
        y: [M, N] of the dtype of x, any strides.
        tile: of `triton_space.TRITON_SPACE`, or a planted one.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    if x.device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            "w4a16: x is on the CPU, where Triton only interprets; set TRITON_INTERPRET=1 before "
            "the first import of the kernel, or move x to a GPU"
        )
    m, k = x.shape
    z = weight.zeros
    zeros = "none" if z is None else "bytes" if z.dtype == torch.uint8 else "packed"
    zero_strides = (0, 0) if z is None else z.stride()
    tensors = [t for t in (x, weight.words, weight.scales, z, y) if t is not None]
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(weight.N, tile.block_n),)
    _w4a16_kernel[grid](
        x, weight.words, weight.scales, weight.words if z is None else z,
        weight.scales if bias is None else bias, y,
        m, weight.N, k,
        *x.stride(), *weight.words.stride(), *weight.scales.stride(), *zero_strides, *y.stride(),
        GROUP=0 if weight.group_size == weight.K else weight.group_size,
        ZEROS=zeros, HAS_BIAS=bias is not None, DEQUANT=tile.dequant,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        WIDE=any(spans_wide(t) for t in tensors), INTERPRET=INTERPRETED,
        FAULT=tile.as_dict().get("planted", ""),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def spans_wide(tensor: torch.Tensor, block: int = 512) -> bool:
    """Whether an offset into `tensor`, or one that a tile of up to `block` rows masks, passes 2^31.

    Masked offsets count: they are computed before they are masked.
    """
    return sum((n + block) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) > (
        2**31 - 1
    )
