"""Expert weights of a mixture: [E, N, K], one packed matrix an expert, and who gets which rows.

GGUF stores the experts of a layer as one tensor, whose slices are packed matrices as they lie; a
4-bit checkpoint stores them one by one. Both end up as a tuple of packed matrices of one type and
shape, and no weight is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tilewright.errors import LayoutError
from tilewright.formats.w4 import W4Codes
from tilewright.layout.cpu import PackedBlocks, PackedW4, pack_blocks, pack_w4

__all__ = ["PackedExperts", "Routing", "pack_expert_blocks", "pack_expert_w4", "route"]


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """The packed matrices of all experts, of one type, shape and group.

    Attributes:
        each: the matrix [N, K] of every expert, by its number.

    Raises:
        LayoutError: there is no expert, or two of them differ.
    """

    each: tuple[PackedBlocks | PackedW4, ...]

    def __post_init__(self) -> None:
        if not self.each:
            raise LayoutError("experts are empty; pass one packed matrix an expert")
        first = _kind(self.each[0])
        for number, one in enumerate(self.each):
            if _kind(one) != first:
                raise LayoutError(
                    f"expert {number} is {_kind(one)} (type, N, K, group), expert 0 is {first}; "
                    "the experts of one tensor must agree"
                )

    @property
    def E(self) -> int:
        """How many experts there are."""
        return len(self.each)

    @property
    def N(self) -> int:
        """Rows of each matrix: output features."""
        return self.each[0].N

    @property
    def K(self) -> int:
        """Columns of each matrix: input features."""
        return self.each[0].K

    @property
    def type_name(self) -> str:
        """A GGUF type name, "uint4" (with zero points) or "uint4b8" (symmetric)."""
        return self.each[0].type_name

    @property
    def group(self) -> int:
        """Values that share one scale: -1 for a whole row; 0 when the GGUF type fixes it."""
        return _kind(self.each[0])[3]

    @property
    def op(self) -> str:
        """The op whose kernels and tiles multiply one expert: "mmq" or "w4a16"."""
        return "w4a16" if isinstance(self.each[0], PackedW4) else "mmq"

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.each)


def _kind(one: PackedBlocks | PackedW4) -> tuple[str, int, int, int]:
    group = 0
    if isinstance(one, PackedW4):
        group = -1 if one.group_size == one.K else one.group_size
    return (one.type_name, one.N, one.K, group)


def pack_expert_blocks(raw: np.ndarray | torch.Tensor, type_name: str) -> PackedExperts:
    """Describe a GGUF tensor of stacked experts to the kernels; nothing is copied.

    Args:
        raw: uint8 [E, N, row_bytes], rows contiguous; experts may lie apart.
        type_name: one of the packed GGUF types.

    Raises:
        LayoutError: `raw` is not such an array, or its rows are no whole number of blocks.
    """
    if raw.ndim != 3:
        raise LayoutError(f"raw has shape {list(raw.shape)}; pass uint8 [E, N, row_bytes]")
    return PackedExperts(tuple(pack_blocks(expert, type_name) for expert in raw))


def pack_expert_w4(codes: Sequence[W4Codes]) -> PackedExperts:
    """Rewrite the 4-bit codes of every expert into the CPU's layout.

    Raises:
        LayoutError: there are none, they differ, or their group size has no kernel.
    """
    return PackedExperts(tuple(pack_w4(one) for one in codes))


@dataclass(frozen=True, eq=False)
class Routing:
    """The slots of all tokens, sorted by expert.

    A slot is one (token, choice) pair: slot s is choice s % top_k of token s // top_k.

    Attributes:
        slots: int64 [T * top_k], ordered by expert, and as they came within an expert.
        tokens: int64 [T * top_k], the token of each.
        spans: (expert, first, last + 1) of every expert with rows, in ascending order.
    """

    slots: torch.Tensor
    tokens: torch.Tensor
    spans: tuple[tuple[int, int, int], ...]


def route(ids: torch.Tensor, experts: int) -> Routing:
    """Sort the slots of `ids` (int [T, top_k], each in 0..experts-1) by expert."""
    flat = ids.reshape(-1).to(torch.int64)
    slots = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=experts).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    spans = tuple((e, a, b) for e, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a)
    return Routing(slots, slots // ids.shape[1] if ids.shape[1] else slots, spans)
