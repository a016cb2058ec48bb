"""Four-bit weights with one scale a group, as every safetensors format here ends up.

::

    weight[n, k] = scales[n, k // G] * (codes[n, k] - zeros[n, k // G])

The codes are one byte each: a form to check and to pack from, not to multiply with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tilewright.errors import FormatError

if TYPE_CHECKING:
    import torch

__all__ = ["SYMMETRIC_ZERO", "W4Codes"]

SYMMETRIC_ZERO = 8
"""The zero point of symmetric weights, whatever a checkpoint stores for it."""


@dataclass(frozen=True, eq=False)
class W4Codes:
    """One linear's 4-bit weight, unpacked and checked.

    Attributes:
        codes: uint8 [N, K], each 0..15.
        scales: float32 [N, K/G], finite; may be negative.
        zeros: uint8 [N, K/G], each 0..15; None when symmetric: the constant 8.
        group_size: G, the consecutive columns of `codes` that share a scale; K when one scale
            serves the whole row.
        perm: int64 [K], a permutation: column k of `codes` multiplies x[..., perm[k]]. None
            when the columns are in order.
        scale_dtype: the dtype in which the checkpoint stores its scales.

    Raises:
        FormatError: an array has another shape, dtype or range than stated above.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.uint8] | None
    group_size: int
    perm: npt.NDArray[np.int64] | None
    scale_dtype: torch.dtype

    def __post_init__(self) -> None:
        _require("codes", self.codes, np.uint8, None)
        n, k = self.codes.shape
        g = self.group_size
        if isinstance(g, bool) or not isinstance(g, int) or g < 1 or k % g:
            raise FormatError(
                f"group_size is {g!r}; it must be a positive divisor of K = {k} "
                "(K itself when one scale serves the row)"
            )
        if self.codes.size and int(self.codes.max()) > 15:
            raise FormatError(f"codes reach {int(self.codes.max())}; 4-bit codes are 0..15")
        _require("scales", self.scales, np.float32, (n, k // g))
        if not np.isfinite(self.scales).all():
            raise FormatError("scales hold NaN or Inf; every scale must be finite")
        if self.zeros is not None:
            _require("zeros", self.zeros, np.uint8, (n, k // g))
            if self.zeros.size and int(self.zeros.max()) > 15:
                raise FormatError(f"zeros reach {int(self.zeros.max())}; 4-bit zeros are 0..15")
        if self.perm is not None:
            _require("perm", self.perm, np.int64, (k,))
            if not np.array_equal(np.sort(self.perm), np.arange(k)):
                raise FormatError(f"perm is no permutation of 0..{k - 1}")

    @property
    def N(self) -> int:
        """Rows of the weight: output features."""
        return int(self.codes.shape[0])

    @property
    def K(self) -> int:
        """Columns of the weight: input features."""
        return int(self.codes.shape[1])

    @property
    def symmetric(self) -> bool:
        """True when the zero point is the constant 8."""
        return self.zeros is None

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The weight as float32 [N, K], its columns in the order of x (perm undone)."""
        grouped = self.codes.reshape(self.N, -1, self.group_size).astype(np.float32)
        zeros = SYMMETRIC_ZERO if self.zeros is None else self.zeros[:, :, None]
        weight = (self.scales[:, :, None] * (grouped - np.float32(zeros))).reshape(self.N, self.K)
        if self.perm is None:
            return weight
        ordered = np.empty_like(weight)
        ordered[:, self.perm] = weight
        return ordered


def _require(
    name: str, array: object, dtype: type[np.generic], shape: tuple[int, ...] | None
) -> None:
    if not isinstance(array, np.ndarray):
        raise FormatError(f"{name} is a {type(array).__name__}; it must be a numpy array")
    wrong_shape = array.ndim != 2 if shape is None else array.shape != shape
    if array.dtype != dtype or wrong_shape:
        expected = "[N, K]" if shape is None else list(shape)
        raise FormatError(
            f"{name} is {array.dtype} {list(array.shape)}; "
            f"it must be {np.dtype(dtype).name} {expected}"
        )
