"""4-bit weights as the Hopper kernels read them: the register operand of wgmma, word by word.

A warp of wgmma holds 16 rows and, a step, 16 columns of its register operand; a thread of it 2 rows
and 4 columns, in four registers of two 16-bit values. One int32 word is exactly those eight codes,
so that a thread unpacks what it loads and hands it on: no value changes its lane.

Words are int32 [Nb, Kb, 4, 128], Nb = ceil(N / 64) and Kb = ceil(K / 64). Block (b, kb) is 64 rows
by 64 columns. Of word [b, kb, w, lrow * 16 + lk * 4 + j], the code at bit 4 r8 + 8 kh + 16 k1 is

    row     n = 64 b + 16 w + 8 r8 + lrow         w 0..3 (warp), r8 0..1, lrow 0..7
    column  k = 64 kb + 16 j + 8 kh + 2 lk + k1   j 0..3 (step), kh 0..1, lk 0..3, k1 0..1

::

    bits   31..28  27..24  23..20  19..16 | 15..12  11..8   7..4    3..0
    r8          1       0       1       0 |      1      0      1      0
    kh          1       1       0       0 |      1      1      0      0
    k1          1       1       1       1 |      0      0      0      0

A thread (lrow, lk) loads the words of its four steps j as 16 bytes.

Scales [Nb, groups, 64] are of the activations' dtype, row n of block b at 16 w + 2 lrow + r8: the
scales of a thread's two rows are one 32-bit word. Zero points are uint8 [Nb, groups, 32], byte
8 w + lrow = z(row with r8 = 0) | z(row with r8 = 1) << 4; symmetric weights (zero 8) have none.

Rows past N and columns past K hold codes equal to their zero point, and rows past N scale 0: they
add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.errors import LayoutError
from tilewright.formats.w4 import SYMMETRIC_ZERO, W4Codes

__all__ = ["BLOCK", "HopperW4", "pack_w4_hopper", "unpack_w4_hopper"]

BLOCK = 64
"""Rows and columns of one block of words."""

_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class HopperW4:
    """4-bit weights of one matrix, in the layout of the module docstring.

    Attributes:
        words: int32 [Nb, Kb, 4, 128], contiguous.
        scales: [Nb, groups, 64] of `dtype`, contiguous.
        zeros: uint8 [Nb, groups, 32], contiguous; None for symmetric weights, whose zero is 8.
        N, K: rows and columns of the weight.
        group_size: values that share a scale; K for one group a row.
        perm: int64 [K] or None; column k multiplies x[..., perm[k]] (act-order).
        dtype: of the activations that this weight multiplies, float16 or bfloat16.
        handles: what launchers keep with the weight, such as descriptors of its memory.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    N: int
    K: int
    group_size: int
    perm: torch.Tensor | None
    dtype: torch.dtype
    handles: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def type_name(self) -> str:
        return "uint4b8" if self.zeros is None else "uint4"

    @property
    def nbytes(self) -> int:
        tensors = (self.words, self.scales, self.zeros)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def to(self, device: torch.device | str) -> HopperW4:
        """The same weight on another device."""
        return replace(
            self,
            words=self.words.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            perm=None if self.perm is None else self.perm.to(device),
        )


def pack_w4_hopper(
    weight: W4Codes, *, act_dtype: torch.dtype, device: torch.device | str = "cpu"
) -> HopperW4:
    """Rewrite 4-bit codes into the layout of the module docstring, on `device`.

    Args:
        weight: checked codes, any N and K.
        act_dtype: float16 or bfloat16, of the activations to come; scales are rounded to it.
        device: where the work is done and the result lies.

    Raises:
        LayoutError: another act_dtype; a group size other than 32, a multiple of 64, or all of K;
            a scale that act_dtype cannot hold as exactly as it holds a number in its normal range.
    """
    if act_dtype not in _DTYPES:
        raise LayoutError(
            f"act_dtype is {act_dtype}; the Hopper kernels multiply float16 and bfloat16. Convert "
            "the activations, or pack the weight for the portable kernels"
        )
    group = weight.group_size
    if group not in (weight.K, BLOCK // 2) and group % BLOCK:
        raise LayoutError(
            f"group_size={group}: the Hopper kernels need {BLOCK // 2}, a multiple of {BLOCK}, or "
            f"one group a row (K={weight.K}); re-quantize with 32, 64, 128, 256 or -1"
        )
    rows, columns = -weight.N % BLOCK, -weight.K % BLOCK
    codes = _tensor(weight.codes, device)
    if weight.zeros is None:
        codes = F.pad(codes, (0, columns, 0, rows), value=SYMMETRIC_ZERO)
        zeros = None
    else:
        z = _tensor(weight.zeros, device)
        codes = torch.cat([codes, z[:, -1:].expand(-1, columns)], dim=1)
        codes = F.pad(codes, (0, 0, 0, rows), value=SYMMETRIC_ZERO)
        zeros = _zero_bytes(F.pad(z, (0, 0, 0, rows), value=SYMMETRIC_ZERO))
    scales = _rounded(_tensor(weight.scales, device), act_dtype)
    return HopperW4(
        words=_words(codes),
        scales=_by_rows(F.pad(scales, (0, 0, 0, rows))).flatten(2),
        zeros=zeros,
        N=weight.N,
        K=weight.K,
        group_size=group,
        perm=None if weight.perm is None else _tensor(weight.perm, device),
        dtype=act_dtype,
    )


def unpack_w4_hopper(weight: HopperW4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K], scales [N, groups] and zeros uint8 [N, groups]; for checks only."""
    nb, kb = weight.words.shape[:2]
    octets = weight.words.view(torch.uint8).view(nb, kb, 4, 8, 4, 4, 2, 2)
    pair = torch.stack([octets & 15, octets >> 4], dim=3)  # b, kb, w, r8, lrow, lk, j, k1, kh
    codes = pair.permute(0, 2, 3, 4, 1, 6, 8, 5, 7).reshape(nb * BLOCK, kb * BLOCK)
    scales = _by_columns(weight.scales.unflatten(2, (4, 8, 2)))[: weight.N]
    if weight.zeros is None:
        zeros = torch.full_like(scales, SYMMETRIC_ZERO, dtype=torch.uint8)
    else:
        both = torch.stack([weight.zeros & 15, weight.zeros >> 4], dim=-1)
        zeros = _by_columns(both.unflatten(2, (4, 8)))[: weight.N]
    return codes[: weight.N, : weight.K].contiguous(), scales.contiguous(), zeros.contiguous()


def _tensor(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """A copy of `array` on `device`: the packed weight must not follow later writes to it."""
    return torch.tensor(array, device=device)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [64 Nb, 64 Kb] as int32 [Nb, Kb, 4, 128]; a word's four bytes are (k1, kh)."""
    nb, kb = codes.shape[0] // BLOCK, codes.shape[1] // BLOCK
    t = codes.view(nb, 4, 2, 8, kb, 4, 2, 4, 2)  # b, w, r8, lrow, kb, j, kh, lk, k1
    octets = t[:, :, 0] | (t[:, :, 1] << 4)  # b, w, lrow, kb, j, kh, lk, k1
    octets = octets.permute(0, 3, 1, 2, 6, 4, 7, 5).contiguous()  # b, kb, w, lrow, lk, j, k1, kh
    return octets.view(-1).view(torch.int32).view(nb, kb, 4, 128)


def _by_rows(table: torch.Tensor) -> torch.Tensor:
    """[64 Nb, groups] as contiguous [Nb, groups, 4 (w), 8 (lrow), 2 (r8)]."""
    return table.view(-1, 4, 2, 8, table.shape[1]).permute(0, 4, 1, 3, 2).contiguous()


def _by_columns(table: torch.Tensor) -> torch.Tensor:
    """[Nb, groups, 4, 8, 2] as [64 Nb, groups]: what `_by_rows` undoes."""
    return table.permute(0, 2, 4, 3, 1).flatten(0, 3)


def _zero_bytes(zeros: torch.Tensor) -> torch.Tensor:
    """uint8 [64 Nb, groups] as uint8 [Nb, groups, 32]."""
    pairs = _by_rows(zeros)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).flatten(2)


def _rounded(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 scales rounded to `dtype`; LayoutError where that is more than a rounding."""
    rounded = scales.to(dtype)
    lost = (rounded.double() - scales.double()).abs() > scales.double().abs() * (
        torch.finfo(dtype).eps / 2
    )
    if bool(lost.any()):
        worst = scales[lost].abs()
        n, g = (int(i) for i in lost.nonzero()[0])
        raise LayoutError(
            f"scales: {int(lost.sum())} of {scales.numel()} over- or underflow in {dtype}, the "
            f"first in row {n}, group {g}; magnitudes {worst.min():.3g} to {worst.max():.3g}. Use "
            "bfloat16 activations, or pack the weight for the portable kernels"
        )
    return rounded
