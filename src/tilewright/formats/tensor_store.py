"""The tensors of one or several safetensors files, by name, read when asked for.

::

    header length u64 | header JSON | data
    header: {"name": {"dtype": "F16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}

The `safetensors` package parses and maps the files. Before it sees one, the header's length is
held against the file's; when it refuses one, the header is looked at again here to name the
tensor and the byte at fault, which its errors do not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from tilewright.errors import FormatError
from tilewright.formats.sniff import existing_file, guess, is_pickle

if TYPE_CHECKING:
    import torch

__all__ = ["Stored", "TensorStore", "read_json"]

MAX_HEADER_BYTES = 100_000_000  # the package's own limit
_MAX_DIAGNOSED_BYTES = 16 << 20
_MAX_JSON_BYTES = 64 << 20
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file whose top is an object. Raises FormatError otherwise, or beyond 64 MiB."""
    existing_file(path)
    size = path.stat().st_size
    if size > _MAX_JSON_BYTES:
        raise FormatError(f"{size} bytes of JSON; at most {_MAX_JSON_BYTES} are read", file=path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"this is not valid JSON ({error})", file=path) from None
    if not isinstance(value, dict):
        raise FormatError(f"it holds a {type(value).__name__}; a JSON object is needed", file=path)
    return value


@dataclass(frozen=True)
class Stored:
    """What a file's header says of a tensor. `dtype` is safetensors' name, such as "BF16"."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class TensorStore:
    """The tensors of `files`, which are opened and checked at once; data are read on demand.

    Raises:
        FormatError: a file is missing, is no safetensors file, or is damaged; or two files hold
            a tensor of the same name.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._handles: dict[Path, Any] = {}
        self._stored: dict[str, Stored] = {}
        for file in files:
            handle = _open(existing_file(file))
            self._handles[file] = handle
            for name in handle.keys():
                if name in self._stored:
                    other = self._stored[name].file.name
                    raise FormatError(f"{other} holds this tensor too", file=file, tensor=name)
                part = handle.get_slice(name)
                self._stored[name] = Stored(file, part.get_dtype(), tuple(part.get_shape()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __getitem__(self, name: str) -> Stored:
        return self._stored[name]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored, a view of the mapped file where the package gives one.

        Raises:
            FormatError: there is no such tensor, or torch has no such dtype.
        """
        if name not in self._stored:
            some = ", ".join(list(self._stored)[:3])
            raise FormatError(
                f"no such tensor among {len(self._stored)} (the first are: {some})",
                file=self._files[0].parent,
                tensor=name,
            )
        file = self._stored[name].file
        try:
            return self._handles[file].get_tensor(name)
        except (SafetensorError, AttributeError, RuntimeError, TypeError) as error:
            raise FormatError(f"it cannot be read: {error}", file=file, tensor=name) from error

    def check(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], why: str) -> None:
        """Raise FormatError unless `name` is stored with one of `dtypes` and with `shape`.

        Args:
            name: the tensor.
            dtypes: safetensors' names of the dtypes that are allowed.
            shape: the shape it must have.
            why: what says so, for the message.
        """
        stored = self._stored.get(name)
        if stored is None:
            raise FormatError(
                f"this tensor is missing; {why} needs it", file=self._home(name), tensor=name
            )
        if stored.dtype not in dtypes or stored.shape != shape:
            raise self.fault(
                name,
                f"it is {stored.dtype} {list(stored.shape)}; "
                f"{why} needs {' or '.join(dtypes)} {list(shape)}",
            )

    def _home(self, missing: str) -> Path:
        """The file that holds the siblings of a missing tensor, or the first file."""
        prefix = missing.rpartition(".")[0] + "."
        siblings = (stored.file for name, stored in self._stored.items() if name.startswith(prefix))
        return next(siblings, self._files[0])

    def fault(self, name: str, message: str, element: int | None = None) -> FormatError:
        """A FormatError that names the file of `name`, it, and where its data (or one flat
        element of them) start in the file."""
        stored = self._stored[name]
        offset = _data_start(stored.file, name)
        if offset is not None and element is not None:
            offset += element * _BITS[stored.dtype] // 8
        return FormatError(message, file=stored.file, tensor=name, offset=offset)


def _open(file: Path) -> Any:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(16)
    if is_pickle(head) or head[:4] == b"GGUF":
        raise FormatError(
            f"this is {guess(head)}; safetensors files are read: convert it", file=file, offset=0
        )
    length = int.from_bytes(head[:8], "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise FormatError(
            f"the header claims {length} bytes; the file has {size} and at most "
            f"{MAX_HEADER_BYTES} are allowed: it is truncated or no safetensors file",
            file=file,
            offset=0,
        )
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise _diagnose(file, size, length, str(error)) from None


def _header(file: Path) -> tuple[dict[str, Any] | None, int]:
    """The header as JSON, None if it is none or too large to look at, and where data start."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _MAX_DIAGNOSED_BYTES:
            return None, 8 + length
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError):
            return None, 8 + length
    return header if isinstance(header, dict) else None, 8 + length


def _data_start(file: Path, name: str) -> int | None:
    header, start = _header(file)
    return None if header is None else start + int(header[name]["data_offsets"][0])


def _diagnose(file: Path, size: int, length: int, said: str) -> FormatError:
    """What is wrong with a file that the package refused, said more exactly."""
    header, start = _header(file)
    where: dict[str, Any] = {"file": file}
    if header is None:
        return FormatError(f"its header of {length} bytes is damaged ({said})", offset=8, **where)
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        where["tensor"] = name
        try:
            dtype, shape = entry["dtype"], [int(n) for n in entry["shape"]]
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError, OverflowError):  # OverflowError: int(inf)
            return FormatError(f"its entry in the header is damaged ({said})", **where)
        where["offset"] = start + begin
        if not 0 <= begin <= end or start + end > size:
            return FormatError(
                f"its data end at byte {start + end} of a file of {size}; "
                "the file is truncated or damaged, fetch it again",
                **where,
            )
        bits = _BITS.get(dtype) if isinstance(dtype, str) else None
        if bits is not None and math.prod(shape) * bits != 8 * (end - begin):
            return FormatError(
                f"{dtype} {shape} does not fill its {end - begin} bytes ({said})", **where
            )
        spans.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            where |= {"tensor": name, "offset": start + begin}
            return FormatError(f"its data do not follow those before it ({said})", **where)
        reached = end
    return FormatError(f"the file is damaged ({said}); fetch it again", file=file)
