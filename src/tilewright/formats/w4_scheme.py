"""What the formats of 4-bit safetensors checkpoints share: their scheme and its pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewright.errors import FormatError, UnsupportedError
from tilewright.formats.tensor_store import TensorStore
from tilewright.formats.w4 import W4Codes

if TYPE_CHECKING:
    import torch

__all__ = [
    "SCALE_DTYPES",
    "Fields",
    "LinearReader",
    "W4Scheme",
    "group_count",
    "group_order",
    "read_scales",
    "unpack_nibbles",
]

GROUP_SIZES = (32, 64, 128, 256, -1)
SCALE_DTYPES = ("F16", "BF16", "F32")

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class W4Scheme:
    """How a checkpoint's linears are quantized, as its config states it.

    Attributes:
        format: "compressed-tensors", "gptq" or "awq".
        version: "pack-quantized"; "v1" or "v2" of GPTQ; "gemm" of AWQ.
        group_size: 32, 64, 128, 256, or -1: one group is the whole row.
        symmetric: True when the zero point is the constant 8.
        act_order: True when columns were quantized out of order (GPTQ's desc_act).
    """

    format: str
    version: str
    group_size: int
    symmetric: bool
    act_order: bool = False

    @property
    def weight_type(self) -> str:
        """Its name in a tile table: "uint4b8" when symmetric, else "uint4"."""
        return "uint4b8" if self.symmetric else "uint4"


class LinearReader(Protocol):
    """One format: which tensors make a linear, how they are checked, how they are unpacked."""

    main: str
    """Suffix of the tensor that every quantized linear has."""
    others: tuple[str, ...]
    """Suffixes of the tensors that may go with it."""

    def scheme(self, config: Mapping[str, Any], file: Path) -> W4Scheme:
        """Read the quantization config found in `file`."""

    def check(self, store: TensorStore, prefix: str, scheme: W4Scheme) -> None:
        """Hold dtypes and shapes of a linear's tensors against the scheme; reads no data."""

    def linear(self, store: TensorStore, prefix: str, scheme: W4Scheme) -> W4Codes:
        """Unpack a linear that `check` has passed."""


class Fields:
    """The fields of a quantization config, read with their types checked."""

    def __init__(self, config: Mapping[str, Any], file: Path) -> None:
        self.config = config
        self.file = file

    def _get(self, names: tuple[str, ...], kind: type, allowed: str) -> Any:
        for name in names:
            if name in self.config:
                value = self.config[name]
                if type(value) is not kind:
                    raise self.wrong(name, value, allowed)
                return value
        raise FormatError(
            f"the quantization config has no {names[0]!r}; {allowed} is needed there",
            file=self.file,
        )

    def integer(self, *names: str) -> int:
        value: int = self._get(names, int, "an integer")
        return value

    def boolean(self, *names: str) -> bool:
        value: bool = self._get(names, bool, "true or false")
        return value

    def flag(self, name: str) -> bool:
        """A boolean that is false when it is absent or null."""
        return self.config.get(name) is not None and self.boolean(name)

    def text(self, name: str, default: str) -> str:
        """A string in lower case; `default` when it is absent or null."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value.lower()

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; empty when it is absent or null."""
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return value

    def wrong(self, name: str, value: object, allowed: str) -> FormatError:
        return FormatError(
            f"{name!r} of the quantization config is {value!r}; it must be {allowed}",
            file=self.file,
        )

    def unsupported(self, name: str, value: object, allowed: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.file}: {name!r} of the quantization config is {value!r}; "
            f"this version reads {allowed}"
        )

    def four_bits(self, *names: str) -> None:
        bits = self.integer(*names)
        if bits != 4:
            raise self.unsupported(names[0], bits, "4 bits only")

    def group_size(self, *names: str) -> int:
        size = self.integer(*names)
        if size not in GROUP_SIZES:
            raise self.unsupported(names[0], size, f"group sizes {GROUP_SIZES}")
        return size


def group_count(store: TensorStore, name: str, k: int, scheme: W4Scheme) -> int:
    """Groups in a row of `k` values. `name` is the linear's main tensor, for messages.

    Raises:
        FormatError: the row is empty.
        UnsupportedError: k is no multiple of the group size.
    """
    if k == 0 or 0 in store[name].shape:
        raise store.fault(name, f"its shape {list(store[name].shape)} is empty")
    size = k if scheme.group_size == -1 else scheme.group_size
    if k % size:
        raise UnsupportedError(
            f"{store[name].file}, tensor {name!r}: rows of {k} values do not divide into groups "
            f"of {size}, the config's group size; requantize with a group size that divides"
        )
    return k // size


def unpack_nibbles(words: npt.NDArray[np.int32]) -> U8:
    """int32 [R, C], nibble i of a word at bits 4i -> uint8 [R, 8*C] in that order."""
    rows, columns = words.shape
    packed = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    out = np.empty((rows, columns * 4, 2), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :, 0])
    np.right_shift(packed, 4, out=out[:, :, 1])
    return out.reshape(rows, columns * 8)


def read_scales(store: TensorStore, name: str) -> tuple[F32, torch.dtype]:
    """A 2-D tensor of scales as float32, and the dtype in which it is stored.

    Raises:
        FormatError: a scale is NaN or Inf; the offset is that of the first such.
    """
    tensor = store.tensor(name)
    scales: F32 = tensor.float().numpy()
    bad = np.flatnonzero(~np.isfinite(scales))
    if len(bad):
        value = scales.reshape(-1)[bad[0]]
        raise store.fault(
            name,
            f"{len(bad)} of {scales.size} scales are NaN or Inf, the first is {value}; "
            "the file is damaged or was badly quantized",
            int(bad[0]),
        )
    return scales, tensor.dtype


def group_order(store: TensorStore, name: str, groups: int) -> I64 | None:
    """The order of columns that makes a linear's groups contiguous; None if they are already.

    `name` is int [K]: the group of each column. With the order `perm`, column perm[j] belongs
    to group j // G.

    Raises:
        FormatError: a group number is not in 0..groups-1.
        UnsupportedError: the groups are not of one size.
    """
    index = store.tensor(name).numpy().astype(np.int64)
    k = len(index)
    bad = np.flatnonzero((index < 0) | (index >= groups))
    if len(bad):
        raise store.fault(
            name, f"group {index[bad[0]]} is not in 0..{groups - 1}", element=int(bad[0])
        )
    size = k // groups
    if np.array_equal(index, np.arange(k) // size):
        return None
    members = np.bincount(index, minlength=groups)
    if (members != size).any():
        raise UnsupportedError(
            f"{store[name].file}, tensor {name!r}: its groups have {members.min()} to "
            f"{members.max()} columns; groups of exactly {size}, the config's group size, are read"
        )
    return np.argsort(index, kind="stable")
