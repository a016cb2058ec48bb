"""4-bit weights as the Triton kernels read them: eight codes a word, ordered for fast unpacking.

Of the consecutive columns 8i .. 8i+7, column 8i + j lies in word i at bit j // 2 * 4 + j % 2 * 16::

    bits   31..28 27..24 23..20 19..16 | 15..12 11..8  7..4   3..0
    code        7      5      3      1 |      6      4    2      0

``word >> 4 p & 0x000F000F`` is then a pair of 16-bit lanes with the codes 2p and 2p + 1: one
instruction serves two weights. It is the order of ExLlama's kernels, and of vLLM's hybrid W4A16.

Zero points are bytes [N, groups], or packed eight rows a word, row n at bit 4 (n % 8) of word
n // 8: an eighth of the traffic where groups are small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from tilewright.formats.w4 import SYMMETRIC_ZERO, W4Codes

__all__ = ["CODE_BITS", "WordsW4", "pack_w4_words"]

CODE_BITS = tuple(j // 2 * 4 + j % 2 * 16 for j in range(8))
"""The lowest bit of each of a word's eight codes."""


@dataclass(frozen=True, eq=False)
class WordsW4:
    """4-bit weights of one matrix, in the layout of the module docstring.

    Attributes:
        words: int32 [N, ceil(K / 8)], any strides; codes past K are zero points.
        scales: [N, groups] of the checkpoint's own dtype.
        zeros: int32 [ceil(N / 8), groups] packed, uint8 [N, groups], or None for symmetric
            weights, whose zero is 8.
        N, K: rows and columns of the weight.
        group_size: values that share a scale; K for one group a row.
        perm: int64 [K] or None; column k multiplies x[..., perm[k]] (act-order).
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    N: int
    K: int
    group_size: int
    perm: torch.Tensor | None

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


def pack_w4_words(weight: W4Codes, *, pack_zeros: bool = True) -> WordsW4:
    """Rewrite 4-bit codes into words; every group size and any N and K are packed.

    Args:
        weight: checked codes.
        pack_zeros: pack the zero points as well; else they stay bytes.
    """
    n, k = weight.codes.shape
    codes = weight.codes
    if k % 8:
        fill = np.full((n, -k % 8), SYMMETRIC_ZERO, dtype=np.uint8)
        if weight.zeros is not None:
            fill[:] = weight.zeros[:, -1:]
        codes = np.concatenate([codes, fill], axis=1)
    zeros = None
    if weight.zeros is not None:
        zeros = torch.from_numpy(_zero_words(weight.zeros) if pack_zeros else weight.zeros.copy())
    return WordsW4(
        words=torch.from_numpy(_words(codes.reshape(n, -1, 8), CODE_BITS)),
        scales=torch.from_numpy(np.ascontiguousarray(weight.scales)).to(weight.scale_dtype),
        zeros=zeros,
        N=n,
        K=k,
        group_size=weight.group_size,
        perm=None if weight.perm is None else torch.from_numpy(weight.perm.copy()),
    )


def _words(codes: npt.NDArray[np.uint8], bits: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """[..., 8] codes as int32 [...], code j shifted to bits[j]."""
    words = np.zeros(codes.shape[:-1], dtype=np.uint32)
    for j, bit in enumerate(bits):
        words |= codes[..., j].astype(np.uint32) << np.uint32(bit)
    return words.view(np.int32)


def _zero_words(zeros: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """uint8 [N, groups] as int32 [ceil(N / 8), groups]."""
    n, groups = zeros.shape
    padded = np.zeros((-(-n // 8) * 8, groups), dtype=np.uint8)
    padded[:n] = zeros
    return _words(padded.reshape(-1, 8, groups).transpose(0, 2, 1), tuple(range(0, 32, 4)))
