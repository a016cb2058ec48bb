"""What a GGUF block type is: the base class, its codes, and the registry of the types.

A row of a quantized GGUF tensor is a run of blocks. Each block holds `block_size` values in
`block_bytes` bytes: packed integers and the scales that turn them into numbers. Every type
states the same thing in its own bytes::

    value[k] = scale[k // sub] * code[k] + minimum[k // sub]      (float32, in this order)

so a kernel or an oracle that handles `BlockCodes` handles every type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tilewright.errors import FormatError

__all__ = ["BLOCK_TYPES", "BlockCodes", "BlockType", "half", "register"]

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
F32 = npt.NDArray[np.float32]

# Values that are decoded at a time: bounds the temporaries of `dequantize` to a few MB.
_VALUES_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class BlockCodes:
    """The integers and scales of a tensor, before they become numbers.

    Attributes:
        codes: int8 [N, K], signed: a type's offset or table is already applied.
        scale: float32 [N, K/sub].
        minimum: float32 [N, K/sub], added to scale*code; None for types that have none.
        sub: consecutive values along K that share one scale (16 or 32).
    """

    codes: I8
    scale: F32
    minimum: F32 | None
    sub: int


class BlockType(ABC):
    """One block type of GGUF. A subclass draws its bytes and implements `unpack`.

    Attributes:
        name: its name in ggml, such as "Q4_K".
        type_id: its number in the file.
        block_size: values in a block (32 or 256).
        block_bytes: bytes of a block.
        sub: consecutive values that share one scale.
        scale_fields: where in a block its float16 scales lie (byte offsets).
    """

    name: ClassVar[str]
    sub: ClassVar[int]
    scale_fields: ClassVar[tuple[int, ...]]
    type_id: int
    block_size: int
    block_bytes: int

    def __init__(self) -> None:
        ggml_type = GGMLQuantizationType[self.name]
        self.type_id = int(ggml_type)
        self.block_size, self.block_bytes = GGML_QUANT_SIZES[ggml_type]

    def __repr__(self) -> str:
        return f"BlockType({self.name}: {self.block_size} values in {self.block_bytes} bytes)"

    @abstractmethod
    def unpack(self, blocks: U8) -> tuple[I8, F32, F32 | None]:
        """Bytes of B blocks [B, block_bytes] -> codes [B, block_size], scale and minimum
        [B, block_size/sub]."""

    def faulty(self, blocks: U8) -> npt.NDArray[np.intp]:
        """Block and byte offset in it, as [F, 2], of every scale that is NaN or Inf."""
        found = []
        for at in self.scale_fields:
            bits = np.ascontiguousarray(blocks[:, at : at + 2]).view("<u2")[:, 0]
            bad = np.flatnonzero((bits & 0x7C00) == 0x7C00)
            found.append(np.stack([bad, np.full_like(bad, at)], axis=1))
        faults = np.concatenate(found)
        return faults[np.lexsort((faults[:, 1], faults[:, 0]))]

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of `k` values. Raises FormatError if k is no multiple of block_size."""
        if k % self.block_size:
            raise FormatError(
                f"a row of {k} values does not divide into {self.name} blocks of {self.block_size}"
            )
        return k // self.block_size * self.block_bytes

    def codes(self, raw: U8) -> BlockCodes:
        """Rows of bytes -> codes and scales.

        Args:
            raw: uint8 [N, row_bytes], whole blocks in each row.

        Returns:
            BlockCodes with codes [N, K]; K = row_bytes / block_bytes * block_size.

        Raises:
            FormatError: raw is not uint8 [N, row_bytes] with whole blocks.
        """
        blocks, shape = self._blocks(raw)
        with np.errstate(all="ignore"):
            codes, scale, minimum = self.unpack(blocks)
        n, k = shape
        return BlockCodes(
            codes=codes.reshape(n, k),
            scale=scale.reshape(n, k // self.sub),
            minimum=None if minimum is None else minimum.reshape(n, k // self.sub),
            sub=self.sub,
        )

    def dequantize(self, raw: U8) -> F32:
        """Rows of bytes uint8 [N, row_bytes] -> values float32 [N, K].

        Equal bit for bit to ``gguf.quants.dequantize``. Temporaries stay within a few MB
        whatever the size of `raw`.

        Raises:
            FormatError: raw is not uint8 [N, row_bytes] with whole blocks.
        """
        blocks, shape = self._blocks(raw)
        out = np.empty((len(blocks), self.block_size // self.sub, self.sub), dtype=np.float32)
        step = max(1, _VALUES_AT_A_TIME // self.block_size)
        with np.errstate(all="ignore"):  # a damaged scale gives Inf or NaN, as it must
            for at in range(0, len(blocks), step):
                codes, scale, minimum = self.unpack(blocks[at : at + step])
                part = out[at : at + step]
                np.multiply(
                    codes.reshape(part.shape), scale[:, :, None], out=part, dtype=np.float32
                )
                if minimum is not None:
                    part += minimum[:, :, None]
        return out.reshape(shape)

    def _blocks(self, raw: U8) -> tuple[U8, tuple[int, int]]:
        if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] % self.block_bytes:
            raise FormatError(
                f"raw is {raw.dtype} {list(raw.shape)}; {self.name} takes uint8 [N, row_bytes] "
                f"with row_bytes a multiple of {self.block_bytes}"
            )
        k = raw.shape[1] // self.block_bytes * self.block_size
        blocks = np.ascontiguousarray(np.asarray(raw)).reshape(-1, self.block_bytes)
        return blocks, (raw.shape[0], k)


BLOCK_TYPES: dict[str, BlockType] = {}
"""The block types by name. Importing `tilewright.formats.blocks` fills it."""

T = TypeVar("T", bound=type[BlockType])


def register(cls: T) -> T:
    """Class decorator: put one instance of a block type into BLOCK_TYPES."""
    instance = cls()
    if instance.name in BLOCK_TYPES:
        raise ValueError(f"block type {instance.name!r} is registered twice")
    BLOCK_TYPES[instance.name] = instance
    return cls


def half(blocks: U8, at: int) -> F32:
    """The float16 at byte `at` of every block, as float32 [B, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
