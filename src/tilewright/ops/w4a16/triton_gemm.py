"""W4A16 in portable Triton: NVIDIA, AMD, and the interpreter.

::

    y[m, n] = sum_k x[m, k] * s[n, k // G] * (q[n, k] - z[n, k // G]) + bias[n]

One program computes BLOCK_M x BLOCK_N of y. A step of its K loop loads x and the words of w, makes
weights of them in registers (`triton_parts`), and multiplies, in one of two orders::

    "xw"   x [BLOCK_M, BLOCK_K] . w [BLOCK_K, BLOCK_N]      acc [BLOCK_M, BLOCK_N] fp32
    "wx"   w [BLOCK_N, BLOCK_K] . x^T [BLOCK_K, BLOCK_M]    acc [BLOCK_N, BLOCK_M] fp32

On Hopper the left operand of a dot may come from registers: "wx" with words of the order "k32"
takes weights there without a trip through shared memory. Elsewhere an operand goes through it.
Each step then waits for its products (AWAIT, see `tilewright.ops.wgmma`). A third order, "ahead",
is the kernel of `triton_ahead`; what that does not serve is multiplied as "wx".

Words, scales and zero points lie as `tilewright.layout.triton` draws them; every operand has its
own strides. A step reads one scale a column, so BLOCK_K divides the group, unless one group is all
of K. Sums are float32, the bias is added to them, and the result is rounded once. Weights are
rounded once too, to the dtype of x: (q - z) is exact in any of them. Where one group is all of K
the sums are multiplied by its scale, and no weight is rounded: a row has but 16 different ones,
whose roundings would not average out.

Rows past M and N repeat the last row, and are not stored: no load needs a mask for them. Columns
past K are masked where BLOCK_K does not divide K (EVEN_K).

DEQUANT
    "scalar"  shift and mask each code, convert, (q - z) * s in float32, round to the dtype of x.
    "packed"  two codes an instruction, see `triton_parts`.
    "asm"     the same in the chip's own packed instructions (ASM), where it has them.

The interpreter holds bfloat16 as integers: it truncates where it should round, and would multiply
the bit patterns in a dot. There (INTERPRET) the kernel rounds by hand and multiplies in float32,
which changes no product.

FAULT plants one of the errors that tuners have chosen before, for the gate to find (see
`triton_planted`). It is "" in every tile of the space, and the compiler then sees none of it.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.errors import UnsupportedError
from tilewright.layout.triton import WordsW4
from tilewright.ops.cross import target_arch
from tilewright.ops.w4a16.triton_ahead import launch_ahead, serves
from tilewright.ops.w4a16.triton_parts import (
    bfloat16_bits,
    dequantize_asm,
    dequantize_packed,
    dequantize_scalar,
    to_float32,
)
from tilewright.ops.wgmma import awaited, has_wgmma
from tilewright.tiles.tile import Tile

__all__ = ["INTERPRETED", "launch_shares", "launch_w4a16", "weight_arguments"]


@triton.jit
def _w4a16_kernel(
    x_ptr, q_ptr, s_ptr, z_ptr, b_ptr, y_ptr, p_ptr,
    M, N, K,
    stride_xm, stride_xk, stride_qn, stride_qk, stride_sn, stride_sg, stride_zn, stride_zg,
    stride_ym, stride_yn,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, SCALES: tl.constexpr, WORDS: tl.constexpr,
    HAS_BIAS: tl.constexpr, DEQUANT: tl.constexpr, ASM: tl.constexpr, ROUND: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, AWAIT: tl.constexpr,
    INTERPRET: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """One tile of y, or of one share of it. GROUP is 0 when one group is all of K; ZEROS is "none",
    "bytes" or "packed"; SCALES "one", or "two" where a load takes the scales of two rows."""
    # Which tile: bands of GROUP_M rows of tiles, column after column: x and w stay in the cache.
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = pid // (GROUP_M * tiles_n)
    band_rows = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    in_band = pid % (GROUP_M * tiles_n)
    pid_m = band * GROUP_M + in_band % band_rows
    pid_n = in_band // band_rows

    AXIS: tl.constexpr = 1 if ORDER == "xw" else 0  # of n in w and acc
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_w = tl.arange(0, BLOCK_K // 8)
    row_m = tl.minimum(offs_m, M - 1)
    row_n = tl.minimum(offs_n, N - 1)
    row_s = row_n
    if FAULT == "scale-row":
        row_s = tl.minimum(offs_n + 1, N - 1)
    # Where weights stay in registers, all that they are made of must be loaded in their layout,
    # and Triton finds the way back to a load only: hence loads, of nothing, for what is computed.
    shift_z = (row_n % 8) * 4
    shift_s = (row_s % 2) * 16
    one = tl.full((BLOCK_N,), 1.0, tl.float32)
    if s_ptr.dtype.element_ty == tl.bfloat16:
        one = tl.full((BLOCK_N,), 0x3F80, tl.uint16).to(tl.bfloat16, bitcast=True)
    elif s_ptr.dtype.element_ty == tl.float16:
        one = tl.full((BLOCK_N,), 1.0, tl.float16)
    if ASM == "nv" and ORDER == "wx" and WORDS == "k32":
        nothing = (row_n < 0) & (N < 0)
        shift_z = tl.load(q_ptr + row_n * 0, mask=nothing, other=shift_z)
        shift_s = tl.load(q_ptr + row_n * 0, mask=nothing, other=shift_s)
        one = tl.load(s_ptr + row_n * 0, mask=nothing, other=one)
    if WIDE:  # some operand spans 2^31 elements
        offs_m = offs_m.to(tl.int64)
        offs_n = offs_n.to(tl.int64)
        offs_k = offs_k.to(tl.int64)
        offs_w = offs_w.to(tl.int64)
        row_m = row_m.to(tl.int64)
        row_n = row_n.to(tl.int64)
        row_s = row_s.to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    x_ptrs = x_ptr + tl.expand_dims(row_m * stride_xm, AXIS)
    x_ptrs += tl.expand_dims(offs_k * stride_xk, 1 - AXIS)
    q_ptrs = q_ptr + tl.expand_dims(row_n * stride_qn, 1 - AXIS)
    q_ptrs += tl.expand_dims(offs_w * stride_qk, AXIS)
    if SCALES == "two":
        s_ptrs = s_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row_s // 2
        stride_sg = stride_sg // 2
    else:
        s_ptrs = s_ptr + row_s * stride_sn
    z_ptrs = z_ptr
    if ZEROS == "bytes":
        z_ptrs = z_ptr + row_n * stride_zn
    elif ZEROS == "packed":
        z_ptrs = z_ptr + (row_n // 8) * stride_zn
    zero = tl.full((BLOCK_N,), 8, tl.int32)
    if AXIS == 1:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if FAULT == "no-start":  # sums are added to what y holds
        held = tl.expand_dims(row_m * stride_ym, AXIS) + tl.expand_dims(row_n * stride_yn, 1 - AXIS)
        acc += to_float32(tl.load(y_ptr + held), INTERPRET)
    start_k = 0
    end_k = K
    if FAULT == "k-tail":
        end_k = K // BLOCK_K * BLOCK_K
    if SPLIT > 1:
        share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
        start_k = tl.program_id(1) * share
        end_k = tl.minimum(start_k + share, K)
        x_ptrs += start_k.to(tl.int64) * stride_xk
        q_ptrs += start_k // 8 * stride_qk
    WORD_K: tl.constexpr = 8 if WORDS == "k8" else 32

    for k in range(start_k, end_k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
            q = tl.load(q_ptrs)
        else:
            mask_k = offs_k < K - k
            mask_w = offs_w < tl.cdiv(K, WORD_K) * (WORD_K // 8) - k // 8
            x = tl.load(x_ptrs, mask=tl.expand_dims(mask_k, 1 - AXIS), other=0.0)
            q = tl.load(q_ptrs, mask=tl.expand_dims(mask_w, AXIS), other=0)
        x_ptrs += BLOCK_K * stride_xk
        q_ptrs += BLOCK_K // 8 * stride_qk
        g = 0
        if GROUP > 0:
            g = k // GROUP
            if FAULT == "group-straddled":  # two groups share the first one's scale
                g = k // (2 * GROUP) * 2
        scale = one
        if GROUP > 0:
            scale = tl.load(s_ptrs + g * stride_sg)
        if ZEROS == "bytes":
            zero = tl.load(z_ptrs + g * stride_zg).to(tl.int32)
        elif ZEROS == "packed":
            zero = (tl.load(z_ptrs + g * stride_zg) >> shift_z) & 0xF
        z = tl.expand_dims(zero, 1 - AXIS)
        if ASM != "none":
            if SCALES == "two" and GROUP > 0:
                bits = (scale >> shift_s) & 0xFFFF
            else:
                bits = scale.to(tl.uint16, bitcast=True).to(tl.int32)
            w = dequantize_asm(q, z, tl.expand_dims(bits, 1 - AXIS), dtype, AXIS, WORDS, ASM)
        elif DEQUANT == "packed":
            s = tl.expand_dims(scale, 1 - AXIS)
            w = dequantize_packed(q, z, s, dtype, AXIS, WORDS, ROUND, INTERPRET)
        else:
            s = tl.expand_dims(to_float32(scale, INTERPRET), 1 - AXIS)
            w = dequantize_scalar(q, z, s, dtype, AXIS, WORDS, INTERPRET)
        if INTERPRET and dtype == tl.bfloat16:
            x = to_float32(x, INTERPRET)
        if AXIS == 1:
            acc = tl.dot(x, w, acc, input_precision="ieee")
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee")
            if AWAIT:
                acc = awaited(acc)

    if GROUP == 0:
        scale = tl.load(s_ptr + row_s * stride_sn)
        acc *= tl.expand_dims(to_float32(scale, INTERPRET), 1 - AXIS)
    y_ptrs = y_ptr + tl.expand_dims(offs_m * stride_ym, AXIS)
    y_ptrs += tl.expand_dims(offs_n * stride_yn, 1 - AXIS)
    mask_y = tl.expand_dims(offs_m < M, AXIS) & tl.expand_dims(offs_n < N, 1 - AXIS)
    if SPLIT > 1:
        row_p = (tl.program_id(1) * M + offs_m).to(tl.int64) * N
        p_ptrs = p_ptr + tl.expand_dims(row_p, AXIS) + tl.expand_dims(offs_n, 1 - AXIS)
        tl.store(p_ptrs, acc, mask=mask_y)
        return
    if HAS_BIAS:
        bias = tl.load(b_ptr + row_n)
        acc += tl.expand_dims(to_float32(bias, INTERPRET), 1 - AXIS)
    if FAULT == "partial-rows":  # the last rows are no whole tile: skipped
        mask_y = mask_y & tl.expand_dims(offs_m < M // BLOCK_M * BLOCK_M, AXIS)
    elif FAULT == "past-the-end":  # one row too many
        mask_y = tl.expand_dims(offs_m < M + 1, AXIS) & tl.expand_dims(offs_n < N, 1 - AXIS)
    if INTERPRET and dtype == tl.bfloat16:
        acc = bfloat16_bits(acc).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(y_ptrs, acc.to(dtype), mask=mask_y)


INTERPRETED: bool = not isinstance(_w4a16_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: tensors of the CPU are served."""


def launch_w4a16(
    x: torch.Tensor,
    weight: WordsW4,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    workspace: Any = None,
) -> None:
    """Write x @ W.T + bias to y. Neither chooses, allocates nor checks a rule.

    Args:
        x: [M, K], M >= 1, any strides, columns in the weight's order (`weight.perm` is the
            caller's).
        weight: on the device of x.
        bias: [N] of any floating dtype, contiguous.
        y: [M, N] of the dtype of x, any strides.
        tile: "triton" of `triton_space.TRITON_SPACE`, or a planted one.
        workspace: not used.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    if tile.order == "ahead":
        arch = target_arch(x.device)
        arguments = weight_arguments(weight, x.dtype, tile.dequant, arch)
        if serves(tile, x, weight, arguments, wide=_wide(x, y, weight), interpreted=INTERPRETED):
            check_device(x)
            launch_ahead(
                x, weight, weight_strides(weight), bias, y, tile, arguments,
                awaited=has_wgmma(arch), interpreted=INTERPRETED,
            )  # fmt: skip
            return
        tile = tile.replace(order="wx")
    launch_shares(x, weight, bias, y, None, tile, order=tile.order, dequant=tile.dequant)


def launch_shares(
    x: torch.Tensor,
    weight: WordsW4,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    partials: torch.Tensor | None,
    tile: Tile,
    *,
    order: str,
    dequant: str,
) -> None:
    """Write x @ W.T + bias to y; or its parts to `partials`, in as many shares of K as it has rows.

    Args:
        partials: float32 [shares, M, N], contiguous; None to write y.
        tile: its blocks, warps and stages are used; group_m where it has one.
        order, dequant: as of a "triton" tile.
    """
    check_device(x)
    m, k = x.shape
    arguments = weight_arguments(weight, x.dtype, dequant, target_arch(x.device))
    shares = 1 if partials is None else len(partials)
    fields = tile.as_dict()
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(weight.N, tile.block_n), shares)
    _w4a16_kernel[grid](
        x, weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias, y, weight.scales if partials is None else partials,
        m, weight.N, k,
        *x.stride(), *weight_strides(weight), *y.stride(),
        **arguments,
        HAS_BIAS=bias is not None, DEQUANT="packed" if dequant == "asm" else dequant, ORDER=order,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        GROUP_M=fields.get("group_m", 8), SPLIT=shares,
        EVEN_K=k % max(tile.block_k, 32) == 0,
        WIDE=_wide(x, y, weight),
        AWAIT=order == "wx" and has_wgmma(target_arch(x.device)), INTERPRET=INTERPRETED,
        FAULT=fields.get("planted", ""), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _wide(x: torch.Tensor, y: torch.Tensor, weight: WordsW4) -> bool:
    return any(spans_wide(t) for t in (x, y, *weight_tensors(weight)))


def check_device(x: torch.Tensor) -> None:
    """Raise UnsupportedError for a tensor of the CPU unless kernels are interpreted."""
    if x.device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            "w4a16: x is on the CPU, where Triton only interprets; set TRITON_INTERPRET=1 before "
            "the first import of the kernel, or move x to a GPU"
        )


def weight_tensors(weight: WordsW4) -> tuple[torch.Tensor, ...]:
    """Words, scales, and zero points if there are any."""
    tensors = (weight.words, weight.scales, weight.zeros)
    return tuple(t for t in tensors if t is not None)


def weight_strides(weight: WordsW4) -> tuple[int, ...]:
    """Strides of words, scales and zero points, each by row and column."""
    zeros = (0, 0) if weight.zeros is None else weight.zeros.stride()
    return (*weight.words.stride(), *weight.scales.stride(), *zeros)


def weight_arguments(
    weight: WordsW4, dtype: torch.dtype, dequant: str, arch: str
) -> dict[str, int | str]:
    """The constexprs of a kernel that say how a weight lies and in whose instructions it is made.

    Args:
        dtype: of the activations.
        dequant: "scalar", "packed" or "asm".
        arch: that the kernel is compiled for.
    """
    z, s = weight.zeros, weight.scales
    asm = asm_of(arch, dtype) if dequant == "asm" and s.dtype == dtype else "none"
    pairs = (
        asm != "none" and weight.N % 2 == 0 and s.stride(0) == 1 and s.stride(1) % 2 == 0
        and s.storage_offset() % 2 == 0
    )  # fmt: skip
    return {
        "GROUP": 0 if weight.group_size == weight.K else weight.group_size,
        "ZEROS": "none" if z is None else "bytes" if z.dtype == torch.uint8 else "packed",
        "SCALES": "two" if pairs else "one",
        "WORDS": weight.order,
        "ASM": asm,
        "ROUND": dtype == torch.bfloat16 and arch.startswith("gfx") and arch != "gfx950",
    }


def asm_of(arch: str, dtype: torch.dtype) -> str:
    """Whose packed instructions of `dtype` a chip has: "amd", "cdna", "nv", or "none"."""
    if arch.startswith("gfx"):
        name = "cdna" if arch.startswith("gfx9") else "amd"
        return name if dtype == torch.float16 else "none"
    if arch.startswith("sm_"):
        least = {torch.float16: 80, torch.bfloat16: 90}.get(dtype, 1000)
        return "nv" if int(arch.removeprefix("sm_")) >= least else "none"
    return "none"


def spans_wide(tensor: torch.Tensor, block: int = 512) -> bool:
    """Whether an offset into `tensor`, or one that a tile of up to `block` rows masks, passes 2^31.

    Masked offsets count: they are computed before they are masked.
    """
    return sum((n + block) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) > (
        2**31 - 1
    )
