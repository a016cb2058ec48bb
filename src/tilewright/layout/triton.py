"""4-bit weights as the Triton kernels read them: eight codes a word, ordered for fast unpacking.

The eight codes of a word lie in two 16-bit halves, four in each::

    bits   31..28 27..24 23..20 19..16 | 15..12 11..8  7..4   3..0
    code        7      5      3      1 |      6      4    2      0

``word >> 4 p & 0x000F000F`` is then a pair of 16-bit lanes with the codes 2p and 2p + 1: one
instruction serves two weights. It is the order of ExLlama's kernels, and of vLLM's hybrid W4A16.
Which columns the codes are is the order of the words:

    "k8"   word i holds the columns 8i .. 8i + 7: code j is column 8i + j.
    "k32"  four words share the 32 columns from 32i on: code j = 2p + h of word 4i + c is column
           32i + 8p + 2c + h. In a matrix fragment of NVIDIA's tensor cores a thread holds the
           columns 2c + h and 8 + 2c + h of every 16: here they are in one word, and weights become
           an operand without leaving their registers. Scales and zero points of this order lie
           group after group in memory, all rows of a group together; their shapes are the same.

Zero points are bytes [N, groups], or packed eight rows a word, row n at bit 4 (n % 8) of word
n // 8: an eighth of the traffic where groups are small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.errors import LayoutError
from tilewright.formats.w4 import SYMMETRIC_ZERO, W4Codes

__all__ = ["CODE_BITS", "WORD_ORDERS", "WordsW4", "pack_w4_words", "unpack_w4_words"]

CODE_BITS = tuple(j // 2 * 4 + j % 2 * 16 for j in range(8))
"""The lowest bit of each of a word's eight codes."""

WORD_ORDERS = {"k8": 8, "k32": 32}
"""By order: the columns that its words fill; K is padded to a multiple."""


@dataclass(frozen=True, eq=False)
class WordsW4:
    """4-bit weights of one matrix, in the layout of the module docstring.

    Attributes:
        words: int32 [N, ceil(K / 8)], for "k32" [N, 4 ceil(K / 32)], any strides; codes past K are
            zero points.
        scales: [N, groups] of the checkpoint's own dtype, any strides.
        zeros: int32 [ceil(N / 8), groups] packed, uint8 [N, groups], or None for symmetric
            weights, whose zero is 8.
        N, K: rows and columns of the weight.
        group_size: values that share a scale; K for one group a row.
        perm: int64 [K] or None; column k multiplies x[..., perm[k]] (act-order).
        order: of the words, a key of `WORD_ORDERS`.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    N: int
    K: int
    group_size: int
    perm: torch.Tensor | None
    order: str = "k8"

    @property
    def type_name(self) -> str:
        return "uint4b8" if self.zeros is None else "uint4"

    @property
    def nbytes(self) -> int:
        tensors = (self.words, self.scales, self.zeros)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def to(self, device: torch.device | str) -> WordsW4:
        """The same weight on another device."""
        return replace(
            self,
            words=self.words.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            perm=None if self.perm is None else self.perm.to(device),
        )


def pack_w4_words(
    weight: W4Codes,
    *,
    pack_zeros: bool = True,
    order: str = "k8",
    device: torch.device | str = "cpu",
) -> WordsW4:
    """Rewrite 4-bit codes into words; every group size and any N and K are packed.

    Args:
        weight: checked codes.
        pack_zeros: pack the zero points as well; else they stay bytes.
        order: of the words, a key of `WORD_ORDERS`: "k8" for any GPU, "k32" for NVIDIA's.
        device: where the work is done and the result lies.

    Raises:
        LayoutError: an unknown order.
    """
    if order not in WORD_ORDERS:
        raise LayoutError(f"order is {order!r}; words are ordered as one of {list(WORD_ORDERS)}")
    codes = _tensor(weight.codes, device)
    zeros = None if weight.zeros is None else _tensor(weight.zeros, device)
    past = -weight.K % WORD_ORDERS[order]
    if past:
        fill = zeros[:, -1:] if zeros is not None else codes.new_full((1, 1), SYMMETRIC_ZERO)
        codes = torch.cat([codes, fill.expand(weight.N, past)], dim=1)
    scales = _tensor(weight.scales, device).to(weight.scale_dtype)
    if zeros is not None and pack_zeros:
        zeros = _zero_words(zeros)
    if order == "k32":
        scales = scales.T.contiguous().T
        zeros = None if zeros is None else zeros.T.contiguous().T
    return WordsW4(
        words=_words(codes, order),
        scales=scales,
        zeros=zeros,
        N=weight.N,
        K=weight.K,
        group_size=weight.group_size,
        perm=None if weight.perm is None else _tensor(weight.perm, device),
        order=order,
    )


def unpack_w4_words(weight: WordsW4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K], scales [N, groups] and zeros uint8 [N, groups]; for checks only."""
    words = weight.words
    shifts = torch.tensor(CODE_BITS, dtype=torch.int32, device=words.device)
    codes = ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)  # [N, words, 8]
    if weight.order == "k32":
        codes = codes.unflatten(1, (-1, 4)).unflatten(3, (4, 2)).transpose(2, 3)
    if weight.zeros is None:
        zeros = torch.full_like(weight.scales, SYMMETRIC_ZERO, dtype=torch.uint8)
    elif weight.zeros.dtype == torch.uint8:
        zeros = weight.zeros
    else:
        rows = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
        zeros = ((weight.zeros.unsqueeze(1) >> rows[:, None]) & 15).to(torch.uint8).flatten(0, 1)
    return codes.flatten(1)[:, : weight.K].contiguous(), weight.scales, zeros[: weight.N]


def _tensor(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """A copy of `array` on `device`: the packed weight must not follow later writes to it."""
    return torch.tensor(array, device=device)


def _words(codes: torch.Tensor, order: str) -> torch.Tensor:
    """uint8 [N, K] as int32 [N, K / 8]; a word's bytes, low to high, are (h, p1), a byte's halves
    p0, of code j = 4 p1 + 2 p0 + h."""
    n, k = codes.shape
    if order == "k8":
        by_code = codes.view(n, k // 8, 2, 2, 2)
    else:
        by_code = codes.view(n, k // 32, 4, 4, 2).transpose(2, 3).reshape(n, k // 8, 2, 2, 2)
    nibbles = by_code.permute(0, 1, 4, 2, 3)
    octets = (nibbles[..., 0] | (nibbles[..., 1] << 4)).contiguous()
    return octets.view(-1).view(torch.int32).view(n, k // 8)


def _zero_words(zeros: torch.Tensor) -> torch.Tensor:
    """uint8 [N, groups] as int32 [ceil(N / 8), groups]."""
    n, groups = zeros.shape
    rows = F.pad(zeros, (0, 0, 0, -n % 8)).view(-1, 4, 2, groups)
    octets = (rows[:, :, 0] | (rows[:, :, 1] << 4)).transpose(1, 2).contiguous()
    return octets.view(-1).view(torch.int32).view(-1, groups)
