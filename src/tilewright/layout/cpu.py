"""Packed weights as the CPU kernels read them.

GGUF blocks stay exactly as they lie in the file: `pack_blocks` copies nothing.

W4A16 codes are rewritten once, at load, in parts of 32 values a row; K is padded with zero weights
to whole parts::

    byte  0         1        ...  15
    low   value 0   value 1  ...  value 15
    high  value 16  value 17 ...  value 31

Scales are float32 [N, groups], zero points uint8 [N, groups] (none for symmetric weights, whose
zero is 8).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tilewright.errors import LayoutError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.formats.w4 import W4Codes

__all__ = ["PART", "PackedBlocks", "PackedW4", "pack_blocks", "pack_w4"]

PART = 32


@dataclass(frozen=True, eq=False)
class PackedBlocks:
    """GGUF blocks of one weight matrix.

    Attributes:
        type_name: GGUF type, such as "Q4_K".
        data: uint8 [N, row_bytes], rows contiguous; may be a view of a mapped file.
        N, K: rows and columns of the weight.
    """

    type_name: str
    data: torch.Tensor
    N: int
    K: int

    @property
    def nbytes(self) -> int:
        return self.data.numel()


@dataclass(frozen=True, eq=False)
class PackedW4:
    """4-bit weights of one matrix, in the layout of the module docstring.

    Attributes:
        codes: uint8 [N, Kp / 2], Kp = K rounded up to 32.
        scales: float32 [N, groups].
        zeros: uint8 [N, groups], or None for symmetric weights.
        N, K: rows and columns of the weight.
        group_size: values that share a scale; K for one group a row.
        perm: int64 [K] or None; column k multiplies x[..., perm[k]] (act-order).
    """

    codes: torch.Tensor
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
        tensors = (self.codes, self.scales, self.zeros)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def pack_blocks(raw: np.ndarray | torch.Tensor, type_name: str) -> PackedBlocks:
    """Describe GGUF blocks to the kernels; nothing is copied.

    Args:
        raw: uint8 [N, row_bytes], each row contiguous.
        type_name: one of the packed GGUF types.

    Raises:
        LayoutError: `raw` is not such an array, or its rows are no whole number of blocks.
    """
    kind = BLOCK_TYPES.get(type_name)
    if kind is None:
        raise LayoutError(
            f"type_name={type_name!r} is no packed block type; use one of {', '.join(BLOCK_TYPES)}"
        )
    if isinstance(raw, np.ndarray):
        if raw.dtype != np.uint8:
            raise LayoutError(f"raw has dtype {raw.dtype}; pass the file's bytes as uint8")
        raw = _from_numpy(raw)
    if raw.dtype != torch.uint8 or raw.dim() != 2 or (raw.numel() and raw.stride(1) != 1):
        raise LayoutError(
            f"raw must be uint8 [N, row_bytes] with contiguous rows; got {raw.dtype} "
            f"{list(raw.shape)} with strides {raw.stride()}"
        )
    n, row_bytes = raw.shape
    if row_bytes % kind.block_bytes or not row_bytes:
        raise LayoutError(
            f"raw has rows of {row_bytes} bytes; {type_name} needs a multiple of "
            f"{kind.block_bytes} ({kind.block_size} values a block)"
        )
    return PackedBlocks(type_name, raw, n, row_bytes // kind.block_bytes * kind.block_size)


def _from_numpy(array: np.ndarray) -> torch.Tensor:
    """A tensor over the same memory, for read-only maps too (kernels never write weights)."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def pack_w4(weight: W4Codes) -> PackedW4:
    """Rewrite 4-bit codes into the layout of the module docstring.

    Raises:
        LayoutError: the group size is neither a multiple of 32 nor all of K.
    """
    n, k = weight.codes.shape
    group = weight.group_size
    if group != k and group % PART:
        raise LayoutError(
            f"group_size={group}: the CPU kernels need a multiple of {PART}, or one group a row "
            f"(K={k}); re-quantize with 32, 64, 128, 256 or -1"
        )
    padded = -(-k // PART) * PART
    codes = np.ascontiguousarray(weight.codes)
    if padded != k:
        fill = np.full((n, padded - k), 8, dtype=np.uint8)
        if weight.zeros is not None:
            fill[:] = weight.zeros[:, -1:]
        codes = np.concatenate([codes, fill], axis=1)
    halves = codes.reshape(n, padded // PART, 2, PART // 2)
    packed = (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(n, padded // 2)
    zeros = None
    if weight.zeros is not None:
        zeros = torch.from_numpy(np.ascontiguousarray(weight.zeros, dtype=np.uint8))
    perm = None
    if weight.perm is not None:
        perm = torch.from_numpy(np.ascontiguousarray(weight.perm, dtype=np.int64))
    scales = torch.from_numpy(np.ascontiguousarray(weight.scales, dtype=np.float32))
    return PackedW4(torch.from_numpy(packed), scales, zeros, n, k, group, perm)
