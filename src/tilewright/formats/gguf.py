"""Read a GGUF file: metadata, and tensors as views of the mapped file.

The `gguf` package supplies the type tables and the dequantizers of types that do not run packed.
Its reader is not used: it loops over counts that the file supplies, unchecked, and builds several
objects for every element of a metadata array, seconds for a vocabulary of 262,144 tokens.
`gguf_walk` checks every count first, and reading the same file through it takes milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from tilewright.errors import FormatError, UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.formats.gguf_walk import Metadata, walk
from tilewright.formats.sniff import existing_file

__all__ = ["GGUFFile", "GGUFTensor", "check_scales", "read_gguf"]

_BYTES_AT_A_TIME = 8 << 20
_NO_VALUES = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "Q1_0"})
_PART = re.compile(r"^(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """A tensor as it lies in the file.

    Attributes:
        name: its name, such as "blk.0.attn_q.weight".
        type_name: ggml's name of its type, such as "Q4_K".
        shape: in numpy's order, the fastest axis last: [N, K] for a linear's weight, [E, N, K]
            for stacked experts, [K] for a norm, [] for a scalar.
        raw: read-only uint8 view of the mapped file, shape[:-1] + [row_bytes]; flat for 1-D.
        offset: where its data start in `file`, in bytes.
        file: the file it lies in; one of several for a split model.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]
    offset: int
    file: Path

    @property
    def packed(self) -> bool:
        """True if the type is one that kernels multiply as it lies in the file."""
        return self.type_name in BLOCK_TYPES

    @property
    def nbytes(self) -> int:
        """Bytes of its data in the file."""
        return int(self.raw.nbytes)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Its values as a new float32 array of `shape`.

        Raises:
            UnsupportedError: the type is an integer or float64 one, or one that the gguf
                package cannot dequantize.
        """
        if self.type_name in BLOCK_TYPES:
            rows = self.raw.reshape(-1, self.raw.shape[-1])
            return BLOCK_TYPES[self.type_name].dequantize(rows).reshape(self.shape)
        if self.type_name == "F32":
            return self._as("<f4").astype(np.float32)
        if self.type_name == "F16":
            with np.errstate(invalid="ignore"):
                return self._as("<f2").astype(np.float32)
        if self.type_name == "BF16":
            return (self._as("<u2").astype(np.uint32) << 16).view(np.float32)
        return self._dequantize_by_package()

    def _as(self, dtype: str) -> npt.NDArray[Any]:
        return np.asarray(self.raw).view(dtype).reshape(self.shape)

    def _dequantize_by_package(self) -> npt.NDArray[np.float32]:
        if self.type_name in _NO_VALUES:
            raise UnsupportedError(
                f"{self.file}, tensor {self.name!r}: {self.type_name} has no dequantizer; "
                "requantize the model to a type that `tilewright.formats.blocks` lists"
            )
        out = np.empty(self.shape, dtype=np.float32)
        rows = out.reshape(-1, self.shape[-1])
        for at, values in _package_rows(self):
            rows[at : at + len(values)] = values
        return out


def _package_rows(tensor: GGUFTensor) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """(first row, values [rows, K]) in pieces, by the gguf package's dequantizer."""
    ggml_type = GGMLQuantizationType[tensor.type_name]
    raw = np.asarray(tensor.raw).reshape(-1, tensor.raw.shape[-1])
    step = max(1, _BYTES_AT_A_TIME // raw.shape[1])
    for at in range(0, len(raw), step):
        with np.errstate(all="ignore"):
            yield at, gguf_dequantize(raw[at : at + step], ggml_type)


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """A GGUF model.

    Attributes:
        path: the file that was asked for.
        metadata: key -> bool, int, float, str or list of them, decoded on first use; of a split
            model, those of its first part.
        tensors: name -> tensor, in the order of the file.
        parts: all files of the model, one unless it is split.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: dict[str, GGUFTensor]
    parts: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        """Its `general.architecture`. Raises FormatError if the file has none."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise FormatError(
                f"general.architecture is {name!r}; a model names its architecture there",
                file=self.path,
            )
        return name


def read_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file. Its tensors are views of the mapped file: nothing is copied.

    Of a split model (`NAME-00001-of-00003.gguf`) any part may be given; all are read.

    Raises:
        FormatError: the file is missing, damaged, truncated, or no GGUF file; file, tensor and
            offset are named where they are known.
        UnsupportedError: a big-endian file, or a version other than 2 and 3.
    """
    path = existing_file(path)
    metadata, tensors = _read_one(path)
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return GGUFFile(path, metadata, tensors, (path,))

    parts = _part_paths(path, count)
    first, tensors = metadata, {}
    for number, part in enumerate(parts):
        metadata, more = _read_one(part)
        if number == 0:
            first = metadata
        said = (metadata.get("split.no"), metadata.get("split.count"))
        if said != (number, count):
            raise FormatError(
                f"split.no and split.count are {said}; this part's name and the others "
                f"say {(number, count)}",
                file=part,
            )
        twice = tensors.keys() & more.keys()
        if twice:
            name = min(twice)
            raise FormatError("an earlier part has this tensor too", file=part, tensor=name)
        tensors.update(more)
    total = first.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise FormatError(
            f"split.tensors.count is {total} and the {count} parts hold {len(tensors)} tensors",
            file=parts[0],
        )
    return GGUFFile(path, first, tensors, parts)


def _part_paths(path: Path, count: int) -> tuple[Path, ...]:
    match = _PART.match(path.name)
    if match is None or int(match["count"]) != count:
        raise FormatError(
            f"this is one of {count} parts; their names must end in "
            f"-00001-of-{count:05d}.gguf ... for all to be found: rename it back",
            file=path,
        )
    names = (f"{match['prefix']}-{no:05d}-of-{count:05d}.gguf" for no in range(1, count + 1))
    return tuple(existing_file(path.with_name(name)) for name in names)


def _read_one(path: Path) -> tuple[Metadata, dict[str, GGUFTensor]]:
    try:
        if path.stat().st_size == 0:
            raise FormatError("the file is empty; fetch it again", file=path, offset=0)
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise FormatError(f"it cannot be read: {error.strerror}", file=path) from error
    walked = walk(data, path)
    tensors = {}
    for info in walked.tensors:
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[info.type_name]]
        *outer, k = info.shape or (1,)
        raw = data[info.offset : info.offset + info.nbytes]
        raw = raw.reshape(*outer, k // block_size * block_bytes)
        tensors[info.name] = GGUFTensor(
            info.name, info.type_name, info.shape, raw, info.offset, path
        )
    return walked.metadata, tensors


def check_scales(tensor: GGUFTensor) -> None:
    """Raise FormatError if a block scale of `tensor` is NaN or Inf; reads all of its data.

    The error names file, tensor and byte offset of the first such scale. Types that do not run
    packed are dequantized piece by piece and their values checked, the offset then being the
    row's. F32, F16, BF16 and integer tensors have no scales and pass.
    """
    block = BLOCK_TYPES.get(tensor.type_name)
    if block is not None:
        blocks = np.asarray(tensor.raw).reshape(-1, block.block_bytes)
        step = _BYTES_AT_A_TIME // block.block_bytes
        for at in range(0, len(blocks), step):
            faults = block.faulty(blocks[at : at + step])
            if len(faults):
                where = (at + int(faults[0, 0])) * block.block_bytes + int(faults[0, 1])
                raise _bad_scale(tensor, where, f"a {block.name} block scale is NaN or Inf")
    elif tensor.type_name not in _NO_VALUES | {"F32", "F16", "BF16"}:
        for at, values in _package_rows(tensor):
            bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
            if len(bad):
                where = (at + int(bad[0])) * tensor.raw.shape[-1]
                raise _bad_scale(tensor, where, "a scale of this row is NaN or Inf")


def _bad_scale(tensor: GGUFTensor, where: int, message: str) -> FormatError:
    return FormatError(
        f"{message}; the file is damaged or was badly quantized",
        file=tensor.file,
        tensor=tensor.name,
        offset=tensor.offset + where,
    )
