"""Operands of the convolution's kernels: checked and allocated by the op before them.

b sequences of one length L (or, packed, b = 1 and L tokens in all of S sequences), D channels,
W taps::

    x, y                   [b, L, D]      dtype of x; x with any strides, y contiguous
    weight                 [D, W]         floating point, contiguous; the last tap meets the token
    bias                   [D]            floating point, or None
    states (in and out)    [S, D, W - 1]  dtype of x, contiguous: the tokens before, oldest first
    cu_seqlens             [S + 1]        int32, ascending from 0 to L; or None
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ConvArgs"]


@dataclass(frozen=True, eq=False)
class ConvArgs:
    """One convolution; a launcher writes all of `y` and of `final_states`, and nothing else.

    Attributes:
        silu: whether y goes through silu.
        initial_states: None for zeros.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool
    initial_states: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    y: torch.Tensor
    final_states: torch.Tensor

    @property
    def batch(self) -> int:
        """b: 1 when packed."""
        return int(self.x.shape[0])

    @property
    def length(self) -> int:
        """L: of each sequence, or of all of them together when packed."""
        return int(self.x.shape[1])

    @property
    def channels(self) -> int:
        return int(self.x.shape[2])

    @property
    def width(self) -> int:
        """W, the number of taps."""
        return int(self.weight.shape[1])

    @property
    def sequences(self) -> int:
        return int(self.final_states.shape[0])
