"""The oracle of moe: float64 from the codes of the expert that the ids name, slot by slot.

y[t, j, n] = sum_k x[t, k] * W[ids[t, j]][n, k]

Each expert's weight comes from the oracle of its own op (`mmq`, `w4a16`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewright.formats.w4 import W4Codes
from tilewright.ops.check import WeightRows
from tilewright.ops.mmq.reference import BlockSource, mmq_reference, mmq_rows
from tilewright.ops.w4a16.reference import w4a16_reference, w4a16_rows

__all__ = ["MoeSource", "expert_product", "expert_rows", "expert_x", "moe_reference"]

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MoeSource:
    """Experts as they lie in a checkpoint, and which of them each token chose.

    Attributes:
        experts: the weight of every expert: blocks of a file, or 4-bit codes.
        ids: int64 [T, top_k].
    """

    experts: tuple[BlockSource | W4Codes, ...]
    ids: npt.NDArray[np.int64]

    def chosen(self) -> Iterator[tuple[int, npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
        """(expert, its tokens, their choices) for every expert that some token chose."""
        for expert in np.unique(self.ids):
            tokens, choices = np.nonzero(self.ids == expert)
            yield int(expert), tokens, choices


def expert_rows(weight: BlockSource | W4Codes) -> Iterator[WeightRows]:
    """One expert's weight in float64, a few rows at a time."""
    return mmq_rows(weight) if isinstance(weight, BlockSource) else w4a16_rows(weight)


def expert_x(x: F64, weight: BlockSource | W4Codes) -> F64:
    """x with its columns in the order of the weight's."""
    perm = getattr(weight, "perm", None)
    return x if perm is None else x[:, perm]


def expert_product(x: F64, weight: BlockSource | W4Codes) -> F64:
    """float64 [n, K] times one expert's weight, [n, N]."""
    if isinstance(weight, BlockSource):
        return mmq_reference(x, weight)
    return w4a16_reference(x, weight)


def moe_reference(x: F64, source: MoeSource) -> F64:
    """The product of every token with the experts it chose.

    Args:
        x: float64 [T, K].
        source: experts and ids.

    Returns:
        float64 [T, top_k, N].
    """
    y = np.empty((*source.ids.shape, source.experts[0].N))
    for expert, tokens, choices in source.chosen():
        y[tokens, choices] = expert_product(x[tokens], source.experts[expert])
    return y
