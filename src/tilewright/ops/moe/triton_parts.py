"""What the Triton kernels of moe share: a step's weights of one expert, activations, arguments.

The weight of an expert lies as `tilewright.layout.experts` says, which is as one matrix of
`tilewright.layout.blocks` or of `tilewright.layout.triton` lies. `weight_tile` loads a step of it
and dequantizes, by `tilewright.ops.mmq.triton_parts` where it is of a GGUF type; integers come
first, and what is rounded is rounded once, to the dtype of the product. A dense tensor is read as
one whose words are its numbers.

Rows of a fused product are half gate and half up: row r of BLOCK_N is row ``r % H`` of the tile's H
rows of gate where ``r < H``, else of up, H = BLOCK_N / 2. One dot serves both.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's arguments: only constexpr may stand there.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.errors import UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import GpuBlocks
from tilewright.layout.experts import GpuExperts
from tilewright.ops.mmq.triton_parts import codes_of, scales_of, weights_of
from tilewright.ops.w4a16.triton_gemm import spans_wide
from tilewright.ops.w4a16.triton_parts import operand, to_float32
from tilewright.tiles.tile import Tile

__all__ = ["ACTIVATIONS", "Call", "call_of", "check_interpreted", "operands"]

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""What may stand between gate and up, by transformers' names, as the kernels call it."""


@triton.jit
def rows_of(pid_n, N, BLOCK_N: tl.constexpr, FUSED: tl.constexpr, EVEN_N: tl.constexpr):
    """The rows of the weight that a tile reads, [BLOCK_N]; past the end, the last one again."""
    r = tl.arange(0, BLOCK_N)
    if FUSED:
        H: tl.constexpr = BLOCK_N // 2
        n = pid_n * H + r % H
        if not EVEN_N:
            n = tl.minimum(n, N - 1)
        return (r // H) * N + n
    else:
        n = pid_n * BLOCK_N + r
        if not EVEN_N:
            n = tl.minimum(n, N - 1)
        return n


@triton.jit
def weight_pointers(
    low_ptr, high_ptr, s_ptr, m_ptr, t_ptr, expert, row_n,
    stride_le, stride_ln, stride_he, stride_hn, stride_se, stride_sn, stride_me, stride_mn,
    stride_te, stride_tn, LOW: tl.constexpr, SCALING: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What `weight_tile` takes first: pointers to the rows `row_n` of an expert, an int64."""
    e = expert
    offs_w = tl.arange(0, BLOCK_K * LOW // 32)
    low_ptrs = low_ptr + e * stride_le + row_n[:, None] * stride_ln + offs_w[None, :]
    high_ptrs = high_ptr + e * stride_he + row_n[:, None] * stride_hn
    s_ptrs = s_ptr + e * stride_se + row_n[:, None] * stride_sn
    # A word of zero points serves eight rows.
    m_ptrs = m_ptr + e * stride_me
    m_ptrs += (row_n // 8 if SCALING == "group" else row_n)[:, None] * stride_mn
    t_ptrs = t_ptr + e * stride_te + row_n[:, None] * stride_tn
    return low_ptrs, high_ptrs, s_ptrs, m_ptrs, t_ptrs


@triton.jit
def step_columns(perm_ptr, column, K, HAS_PERM: tl.constexpr, EVEN_K: tl.constexpr):
    """The columns of x that a step's columns of the weight meet, those past K among them."""
    if HAS_PERM:
        if EVEN_K:
            column = tl.load(perm_ptr + column)
        else:
            column = tl.load(perm_ptr + column, mask=column < K, other=0)
    return column


@triton.jit
def group_scales(
    s_ptrs, z_ptrs, row_n, group, groups, stride_sb, stride_zb,
    ZEROS: tl.constexpr, EVEN_K: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Scale float32 and zero point int32 of some groups of 4-bit codes of each row, [N, S]."""
    at = group[None, :]
    mask = None if EVEN_K else at < groups
    other = None if EVEN_K else 0
    scale = to_float32(tl.load(s_ptrs + at * stride_sb, mask=mask, other=other), INTERPRET)
    zero = tl.full(scale.shape, 8, tl.int32)
    if ZEROS:
        words = tl.load(z_ptrs + at * stride_zb, mask=mask, other=other)
        zero = (words >> (4 * (row_n % 8))[:, None]) & 15
    return scale, zero


@triton.jit
def six_scales(
    s_ptrs, m_ptrs, t_ptrs, sub, subs, stride_sb, stride_mb, stride_tb, BYTES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """`scales_of` for numbers of 6 bits, scale and minimum next to each other: in two loads."""
    sub = tl.minimum(sub, subs - 1)  # past the last one x is 0
    at = (sub // PARTS)[None, :]
    i = (sub % PARTS)[None, :]
    scale = tl.load(s_ptrs + at * stride_sb).to(tl.float32)
    minimum = tl.load(m_ptrs + at * stride_mb).to(tl.float32)
    low = tl.load(t_ptrs + (at * BYTES + i) * stride_tb).to(tl.int32)
    high = tl.load(t_ptrs + (at * BYTES + BYTES * 2 // 3 + i // 2) * stride_tb).to(tl.int32)
    high = high >> (4 * (i % 2))
    scale = scale * ((low & 15) | ((high & 3) << 4)).to(tl.float32)
    return scale, -minimum * ((low >> 4) | ((high & 12) << 2)).to(tl.float32)


@triton.jit
def weight_tile(
    low_ptrs, high_ptrs, s_ptrs, m_ptrs, t_ptrs, row_n, k, K, group,
    stride_sb, stride_mb, stride_tb,
    dtype: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr,
    OFFSET: tl.constexpr, SCALING: tl.constexpr, MINIMUMS: tl.constexpr, BYTES: tl.constexpr,
    SUB_OFFSET: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The weights of BLOCK_K columns from `k` on, `dtype` [N, BLOCK_K].

    Args:
        low_ptrs: of the words of the first step, [N, BLOCK_K * LOW / 32].
        high_ptrs, s_ptrs, m_ptrs, t_ptrs: of the rows of the other tensors, [N, 1].
        row_n: the rows, [N]: a word of zero points serves eight.
        group: columns of a scale, of 4-bit codes.
    """
    COLUMNS: tl.constexpr = 32 // LOW  # of a word
    offs_w = tl.arange(0, BLOCK_K // COLUMNS)
    word = k // COLUMNS
    mask = None
    other = None
    if not EVEN_K:
        mask = (offs_w * COLUMNS < K - k)[None, :]
        other = 0
    low = tl.load(low_ptrs + word, mask=mask, other=other)
    high = low
    if HIGH > 0:
        WORDS: tl.constexpr = LOW // HIGH  # of low that a word of high serves
        high = tl.load(high_ptrs + ((word + offs_w) // WORDS)[None, :], mask=mask, other=other)
        high = high >> (HIGH * (16 // LOW) * (offs_w % WORDS))[None, :]
    if SCALING == "dense":
        return operand(to_float32(low, INTERPRET), dtype, INTERPRET)
    else:  # Triton compiles what stands behind a return, too
        code = codes_of(low, high, LOW, HIGH, CODES, OFFSET)
        sub = tl.arange(0, BLOCK_K // SUB)
        if SCALING == "group":
            N: tl.constexpr = code.shape[0]
            scale, zero = group_scales(
                s_ptrs, m_ptrs, row_n, (k + sub * SUB) // group, tl.cdiv(K, group), stride_sb,
                stride_mb, MINIMUMS, EVEN_K, INTERPRET,
            )  # fmt: skip
            code = (code.reshape(N, BLOCK_K // SUB, SUB) - zero[:, :, None]).reshape(N, BLOCK_K)
            return weights_of(code, scale, scale, dtype, False, SUB, INTERPRET)
        elif SCALING == "six" and MINIMUMS:
            scale, minimum = six_scales(
                s_ptrs, m_ptrs, t_ptrs, k // SUB + sub, K // SUB, stride_sb, stride_mb, stride_tb,
                BYTES, BLOCK // SUB,
            )  # fmt: skip
            return weights_of(code, scale, minimum, dtype, True, SUB, INTERPRET)
        else:
            scale, minimum = scales_of(
                s_ptrs, m_ptrs, t_ptrs, k // SUB + sub, K // SUB, stride_sb, stride_mb, stride_tb,
                SCALING, MINIMUMS, BYTES, SUB_OFFSET, SUB, BLOCK, EVEN_K, "",
            )  # fmt: skip
            return weights_of(code, scale, minimum, dtype, MINIMUMS, SUB, INTERPRET)


@triton.jit
def activated(gate, up, ACT: tl.constexpr):
    """act(gate) * up, float32."""
    if ACT == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACT == "gelu":
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    else:  # gelu, by its tanh form: 0.5 (1 + tanh(u)) = sigmoid(2 u)
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2 * u) * up


class Call(NamedTuple):
    """What kernels of every algorithm are given of a product, but where its slots lie.

    Attributes:
        columns: of y, that a program makes.
        tensors: x, the weight's, y.
        sizes: N, K, experts.
        strides: of the same tensors.
        constants: constexprs, warps and stages.
    """

    columns: int
    tensors: tuple[torch.Tensor, ...]
    sizes: tuple[int, int, int]
    strides: tuple[int, ...]
    constants: dict[str, Any]


def call_of(
    x: torch.Tensor,
    experts: GpuExperts | torch.Tensor,
    y: torch.Tensor,
    tile: Tile,
    rows: int,
    *,
    share: int,
    act: str,
    interpreted: bool,
) -> Call:
    """The arguments of a launch that `triton_gemm` and `triton_gemv` have in common.

    Args:
        x, experts, y, tile, share, act: of the launcher.
        rows: of the weight, that a program takes; of gate and up together, where act says so.
        interpreted: what the kernel's module says: `INTERPRETED`.

    Raises:
        UnsupportedError: x is on the CPU and the kernel was not imported for the interpreter.
    """
    check_interpreted(x, interpreted)
    n, k, fused = y.shape[1], x.shape[1], bool(act)
    columns = rows // 2 if fused else rows
    count = experts.shape[0] if isinstance(experts, torch.Tensor) else experts.E
    tensors, strides, constants = operands(experts, tile.block_k)
    constants |= {
        "DIV": share, "FUSED": fused, "ACT": act, "BLOCK_N": rows, "BLOCK_K": tile.block_k,
        "EVEN_K": k % tile.block_k == 0, "EVEN_N": n % columns == 0, "WIDE": spans_wide(x),
        "INTERPRET": interpreted, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
    return Call(
        columns, (x, *tensors, y), (n, k, count), (*x.stride(), *strides, *y.stride()), constants
    )


def check_interpreted(x: torch.Tensor, interpreted: bool) -> None:
    """Raise UnsupportedError if x is on the CPU and the kernel was compiled, not interpreted."""
    if x.device.type == "cpu" and not interpreted:
        raise UnsupportedError(
            "moe: x is on the CPU, where Triton only interprets; set TRITON_INTERPRET=1 before the "
            "first import of the kernel, or move x to a GPU"
        )


def operands(
    experts: GpuExperts | torch.Tensor, block_k: int
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """What a kernel is given of a weight, in the order of its arguments.

    Returns:
        Tensors low, high, scales, minimums or zero points, sub-scales, perm, with low's (scales',
        for perm) where there is none; the strides of each over experts, rows and columns as far as
        kernels need them, and the group size; constexprs.
    """
    planes = experts if isinstance(experts, torch.Tensor) else experts.planes
    if isinstance(planes, torch.Tensor):
        low, high, scales, minimums, subs, perm, group = planes, None, planes, None, None, None, 0
        constants: dict[str, Any] = {
            "LOW": 32, "HIGH": 0, "CODES": "offset", "OFFSET": 0, "SCALING": "dense", "BYTES": 0,
            "SUB_OFFSET": 0, "SUB": block_k, "BLOCK": block_k,
        }  # fmt: skip
    elif isinstance(planes, GpuBlocks):
        form = planes.form
        low, high, scales = planes.low, planes.high, planes.scales
        minimums, subs, perm, group = planes.minimums, planes.sub_scales, None, 0
        constants = {
            "LOW": form.low.bits, "HIGH": form.high_bits, "CODES": form.codes,
            "OFFSET": form.offset, "SCALING": form.scaling, "BYTES": form.sub_bytes,
            "SUB_OFFSET": form.sub_offset, "SUB": form.sub,
            "BLOCK": BLOCK_TYPES[planes.type_name].block_size,
        }  # fmt: skip
    else:
        low, high, scales = planes.words, None, planes.scales
        minimums, subs, perm, group = planes.zeros, None, planes.perm, planes.group_size
        # A whole row may share a scale, whatever its length: then a step has one as well.
        sub = min(group, block_k) if group & (group - 1) == 0 else block_k
        constants = {
            "LOW": 4, "HIGH": 0, "CODES": "offset", "OFFSET": 0, "SCALING": "group", "BYTES": 0,
            "SUB_OFFSET": 0, "SUB": sub, "BLOCK": sub,
        }  # fmt: skip
    least = low if high is None else high
    m, t = scales if minimums is None else minimums, scales if subs is None else subs
    strides = (
        low.stride(0), low.stride(1), least.stride(0), least.stride(1), *scales.stride(),
        *m.stride(), *t.stride(), 0 if perm is None else perm.stride(0), group,
    )  # fmt: skip
    constants |= {"MINIMUMS": minimums is not None, "HAS_PERM": perm is not None}
    tensors = (low, least, scales, m, t, scales if perm is None else perm)
    return tensors, strides, constants
