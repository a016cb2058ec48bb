"""Walk the header of a GGUF file without trusting it.

::

    magic "GGUF" | version u32 | tensor count u64 | key count u64
    key count    x  key string | type u32 | value
    tensor count x  name string | n_dims u32 | n_dims x u64 | type u32 | offset u64
    padding to general.alignment (32 unless the key says otherwise)
    tensor data, each at its offset from here, a multiple of the alignment

A string is a u64 length and that many bytes; an array is a type u32, a count u64 and that many
values. All little-endian. Every count and length is held against the bytes that are left before
it is used, so the work and the memory are bounded by the size of the file.

Values are located here and decoded when asked for (`Metadata`): a vocabulary of 262,144 strings
costs nothing to a reader that does not want it.

Source of the format: the GGUF specification in the ggml repository.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tilewright.errors import FormatError, UnsupportedError
from tilewright.formats.sniff import guess

__all__ = ["Metadata", "TensorInfo", "Walked", "walk"]

MAX_KEYS = MAX_TENSORS = 1 << 16  # real files have under 100 keys and a few thousand tensors
MAX_NAME_BYTES = (1 << 16) - 1
MAX_DIMS = 4
MAX_NESTING = 4
DEFAULT_ALIGNMENT = 32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    _UINT32: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_SMALLEST = {_STRING: 8, _ARRAY: 12}  # bytes that an empty one takes


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in numpy's order; `offset` counts from the file's start."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Walked:
    """The header of one file: its version, its metadata and its tensors."""

    version: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]


class Metadata(Mapping[str, Any]):
    """The key-value pairs of a GGUF file, each decoded on first use.

    Values are bool, int, float, str, or lists of them. Reading a key raises FormatError if its
    text is not UTF-8, and KeyError if the file lacks it.
    """

    def __init__(
        self, data: np.memmap[Any, Any], file: Path, places: dict[str, tuple[int, int]]
    ) -> None:
        self._data = data
        self._file = file
        self._places = places
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            value_type, at = self._places[key]
            cursor = Cursor(self._data, self._file)
            cursor.at = at
            self._values[key] = cursor.value(value_type, f"the value of key {key!r}")
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"Metadata({len(self)} keys)"


class Cursor:
    """A place in the file; every read checks that its bytes are there."""

    def __init__(self, data: np.memmap[Any, Any], file: Path) -> None:
        self.view = memoryview(data)  # type: ignore[arg-type]
        self.size = len(self.view)
        self.file = file
        self.at = 0

    def fail(self, message: str, at: int | None = None) -> FormatError:
        return FormatError(message, file=self.file, offset=self.at if at is None else at)

    def need(self, count: int, item_bytes: int, what: str) -> None:
        """Raise FormatError unless `count` items of at least `item_bytes` can follow."""
        left = self.size - self.at
        if count * item_bytes > left:
            raise self.fail(
                f"{what} takes at least {count} x {item_bytes} bytes and {left} are left; "
                "the file is truncated or damaged, fetch it again"
            )

    def u32(self, what: str) -> int:
        self.need(1, 4, what)
        (value,) = _U32.unpack_from(self.view, self.at)
        self.at += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(1, 8, what)
        (value,) = _U64.unpack_from(self.view, self.at)
        self.at += 8
        return int(value)

    def string(self, what: str) -> str:
        start = self.at
        length = self.u64(f"the length of {what}")
        self.need(length, 1, what)
        raw = bytes(self.view[self.at : self.at + length])
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 ({error.reason})", start) from None

    def name(self, what: str) -> str:
        start = self.at
        length = self.u64(f"the length of {what}")
        if not 1 <= length <= MAX_NAME_BYTES:
            raise self.fail(f"{what} is {length} bytes long; 1..{MAX_NAME_BYTES} is allowed", start)
        self.at = start
        return self.string(what)

    def array_head(self, what: str) -> tuple[int, int]:
        """Type and count of an array, held against the bytes left."""
        item_type = self.u32(f"the item type of {what}")
        count = self.u64(f"the count of {what}")
        if item_type in _SCALARS:
            smallest = _SCALARS[item_type].itemsize
        elif item_type in _SMALLEST:
            smallest = _SMALLEST[item_type]
        else:
            raise self.fail(f"{what} holds values of type {item_type}; 0..12 are known")
        self.need(count, smallest, what)
        return item_type, count

    def skip(self, value_type: int, what: str, depth: int = 0) -> None:
        """Move past a value, checking its lengths and decoding nothing."""
        if value_type in _SCALARS:
            self.need(1, _SCALARS[value_type].itemsize, what)
            self.at += _SCALARS[value_type].itemsize
        elif value_type == _STRING:
            length = self.u64(f"the length of {what}")
            self.need(length, 1, what)
            self.at += length
        elif value_type == _ARRAY:
            if depth == MAX_NESTING:
                raise self.fail(f"{what} nests arrays more than {MAX_NESTING} deep")
            item_type, count = self.array_head(what)
            if item_type in _SCALARS:
                self.at += count * _SCALARS[item_type].itemsize
            elif item_type == _STRING:
                self._skip_strings(count, what)
            else:
                for _ in range(count):
                    self.skip(item_type, what, depth + 1)
        else:
            raise self.fail(f"{what} is of type {value_type}; 0..12 are known")

    def _skip_strings(self, count: int, what: str) -> None:
        view, at, unpack = self.view, self.at, _U64.unpack_from
        last = self.size - 8
        for done in range(count):
            if at > last:
                raise self._strings_past_end(what, done, count)
            at += 8 + unpack(view, at)[0]
        if at > self.size:
            raise self._strings_past_end(what, count, count)
        self.at = at

    def _strings_past_end(self, what: str, done: int, count: int) -> FormatError:
        return self.fail(
            f"the strings of {what} run past the end of the file after {done} of {count}; "
            "the file is truncated or damaged, fetch it again"
        )

    def value(self, value_type: int, what: str) -> Any:
        """Decode a value that `skip` has passed before."""
        if value_type == _STRING:
            return self.string(what)
        if value_type == _ARRAY:
            item_type, count = self.array_head(what)
            if item_type in _SCALARS:
                return self._scalars(item_type, count)
            if item_type == _STRING:
                return self._strings(count, what)
            return [self.value(item_type, what) for _ in range(count)]
        return self._scalars(value_type, 1)[0]

    def _strings(self, count: int, what: str) -> list[str]:
        view, at, unpack = self.view, self.at, _U64.unpack_from
        values = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(view, at)[0]
                values.append(str(view[start:at], "utf-8"))
        except UnicodeDecodeError as error:
            message = f"{what}: string {len(values)} is not UTF-8 ({error.reason})"
            raise self.fail(message, start) from None
        self.at = at
        return values

    def _scalars(self, value_type: int, count: int) -> list[Any]:
        dtype = _SCALARS[value_type]
        values = np.frombuffer(self.view, dtype, count, self.at)
        self.at += values.nbytes
        return (values != 0).tolist() if value_type == _BOOL else values.tolist()


def walk(data: np.memmap[Any, Any], file: Path) -> Walked:
    """Read and check the header of a GGUF file.

    Args:
        data: the whole file as uint8 [bytes], normally a memory map.
        file: its path, for messages.

    Raises:
        FormatError: the file is damaged, truncated, or no GGUF file; file and offset are named.
        UnsupportedError: a GGUF file that is big-endian or of a version other than 2 and 3.
    """
    cursor = Cursor(data, file)
    magic = bytes(cursor.view[:16])
    if magic[:4] != b"GGUF":
        raise FormatError(f"this is no GGUF file ({guess(magic)})", file=file, offset=0)
    cursor.at = 4
    version = _version(cursor)
    tensor_count = cursor.u64("the tensor count")
    key_count = cursor.u64("the key count")
    for count, limit, smallest, what in (
        (tensor_count, MAX_TENSORS, 25, "tensors"),
        (key_count, MAX_KEYS, 14, "keys"),
    ):
        if count > limit:
            raise cursor.fail(f"the header claims {count} {what}; at most {limit} are read", 8)
        cursor.need(count, smallest, f"the list of {count} {what}")

    places: dict[str, tuple[int, int]] = {}
    for i in range(key_count):
        start = cursor.at
        key = cursor.name(f"key {i}")
        if key in places:
            raise cursor.fail(f"key {key!r} appears twice", start)
        value_type = cursor.u32(f"the type of key {key!r}")
        places[key] = (value_type, cursor.at)
        cursor.skip(value_type, f"the value of key {key!r}")

    alignment = _alignment(cursor, places)
    infos: dict[str, TensorInfo] = {}
    for i in range(tensor_count):
        start = cursor.at
        info = _tensor_info(cursor, i, alignment)
        if info.name in infos:
            raise FormatError("this name appears twice", file=file, tensor=info.name, offset=start)
        infos[info.name] = info

    data_start = -(-cursor.at // alignment) * alignment
    tensors = _placed(list(infos.values()), data_start, cursor)
    return Walked(version, Metadata(data, file, places), tensors)


def _version(cursor: Cursor) -> int:
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(
            f"{cursor.file}: this GGUF file is big-endian; only little-endian files are read: "
            "convert it with the gguf package's gguf-convert-endian"
        )
    if version not in (2, 3):
        raise UnsupportedError(
            f"{cursor.file}: this GGUF file is of version {version}; versions 2 and 3 are read"
        )
    return version


def _alignment(cursor: Cursor, places: Mapping[str, tuple[int, int]]) -> int:
    if "general.alignment" not in places:
        return DEFAULT_ALIGNMENT
    value_type, at = places["general.alignment"]
    if value_type != _UINT32:
        raise cursor.fail(f"general.alignment is of type {value_type}; it must be a uint32", at)
    (alignment,) = _U32.unpack_from(cursor.view, at)
    if alignment == 0 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment}; it must be a power of two", at)
    return int(alignment)


def _tensor_info(cursor: Cursor, index: int, alignment: int) -> TensorInfo:
    """One entry of the tensor list; its offset still counts from the start of the data."""
    name = cursor.name(f"the name of tensor {index}")

    def fail(message: str, at: int) -> FormatError:
        return FormatError(message, file=cursor.file, tensor=name, offset=at)

    at = cursor.at
    n_dims = cursor.u32(f"the rank of tensor {name!r}")
    if n_dims > MAX_DIMS:
        raise fail(f"it has {n_dims} dimensions; at most {MAX_DIMS} are allowed", at)
    elements = 1
    dims = []
    for _ in range(n_dims):
        at = cursor.at
        dims.append(cursor.u64(f"the shape of tensor {name!r}"))
        elements *= dims[-1]
        if not 0 < elements < 1 << 63:
            raise fail(f"its dimensions {dims} are zero or overflow 63 bits", at)
    at = cursor.at
    type_id = cursor.u32(f"the type of tensor {name!r}")
    try:
        ggml_type = GGMLQuantizationType(type_id)
        block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    except (ValueError, KeyError):
        known = ", ".join(f"{t.value} {t.name}" for t in GGML_QUANT_SIZES)
        raise fail(f"its type id is {type_id}; known are {known}", at) from None
    row = dims[0] if dims else 1
    if row % block_size:
        raise fail(
            f"rows of {row} values do not divide into {ggml_type.name} blocks of {block_size}", at
        )
    at = cursor.at
    offset = cursor.u64(f"the offset of tensor {name!r}")
    if offset % alignment:
        raise fail(f"its offset {offset} is no multiple of the alignment {alignment}", at)
    nbytes = elements // block_size * block_bytes
    return TensorInfo(name, ggml_type.name, tuple(reversed(dims)), offset, nbytes)


def _placed(infos: list[TensorInfo], data_start: int, cursor: Cursor) -> tuple[TensorInfo, ...]:
    """The tensors with absolute offsets, inside the file and clear of each other."""
    placed = [
        TensorInfo(i.name, i.type_name, i.shape, data_start + i.offset, i.nbytes) for i in infos
    ]
    end, before = data_start, ""
    for info in sorted(placed, key=lambda i: i.offset):
        where: dict[str, Any] = {"file": cursor.file, "tensor": info.name, "offset": info.offset}
        if info.offset + info.nbytes > cursor.size:
            raise FormatError(
                f"its {info.nbytes} bytes run past the end of the file at {cursor.size}; "
                "the file is truncated or damaged, fetch it again",
                **where,
            )
        if info.offset < end:
            raise FormatError(f"its data overlap those of tensor {before!r}", **where)
        end, before = info.offset + info.nbytes, info.name
    return tuple(placed)
