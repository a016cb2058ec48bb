"""The oracle of mmq: float64 from the codes of the file's blocks, never from a kernel's layout.

y[m, n] = sum_k x[m, k] * (scale[n, k // sub] * code[n, k] + minimum[n, k // sub]) + bias[n]

The codes come from `tilewright.formats.blocks`, which is held bit for bit to the dequantizer of
the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.ops.check import WeightRows

__all__ = ["BlockSource", "mmq_reference", "mmq_rows"]

F64 = npt.NDArray[np.float64]

# Weights that are held in float64 at a time: few enough for a core's cache.
_VALUES_AT_A_TIME = 1 << 19


@dataclass(frozen=True, eq=False)
class BlockSource:
    """A GGUF weight as it lies in a file.

    Attributes:
        type_name: a key of BLOCK_TYPES.
        raw: uint8 [N, row_bytes].
    """

    type_name: str
    raw: npt.NDArray[np.uint8]

    @property
    def N(self) -> int:
        return int(self.raw.shape[0])

    @property
    def K(self) -> int:
        block = BLOCK_TYPES[self.type_name]
        return int(self.raw.shape[1]) // block.block_bytes * block.block_size


def mmq_rows(source: BlockSource) -> Iterator[WeightRows]:
    """The weight in float64, a few rows at a time, as scale * code and minimum [n, K]."""
    block = BLOCK_TYPES[source.type_name]
    step = max(1, _VALUES_AT_A_TIME // source.K)
    for at in range(0, source.N, step):
        codes = block.codes(source.raw[at : at + step])
        main = codes.codes.astype(np.float64)
        main.reshape(len(main), -1, codes.sub)[...] *= codes.scale[:, :, None]
        offset = None
        if codes.minimum is not None:
            offset = np.repeat(codes.minimum.astype(np.float64), codes.sub, axis=1)
        yield WeightRows(main, offset)


def mmq_reference(x: F64, source: BlockSource, bias: F64 | None = None) -> F64:
    """x @ W.T + bias in float64.

    Args:
        x: float64 [M, K].
        source: the weight.
        bias: [N] or None.

    Returns:
        float64 [M, N].
    """
    y = np.empty((len(x), source.N))
    at = 0
    for rows in mmq_rows(source):
        weight = rows.value()
        y[:, at : at + len(weight)] = x @ weight.T
        at += len(weight)
    return y if bias is None else y + bias
