"""GGUF and safetensors files written byte by byte, so that a test can write wrong ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, value_type: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", value_type) + value


def u32_key(name: str, value: int) -> bytes:
    return key(name, UINT32, struct.pack("<I", value))


def array(item_type: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", item_type, count) + items


def info(name: str | bytes, dims: Sequence[int], type_id: int, offset: int = 0) -> bytes:
    """One entry of the tensor list; dims as in the file: fastest first."""
    head = string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
    return head + struct.pack("<IQ", type_id, offset)


def gguf_file(
    keys: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(infos) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head += b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


_DTYPES = {"float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64", "uint8": "U8"}


def safetensors_file(
    tensors: Mapping[str, npt.NDArray[Any]], changes: Mapping[str, Mapping[str, Any]] | None = None
) -> bytes:
    """A safetensors file; `changes` replaces fields of the header's entries, by tensor."""
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        end = len(data) + values.nbytes
        header[name] = {
            "dtype": _DTYPES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [len(data), end],
        }
        data += np.ascontiguousarray(values).tobytes()
    for name, change in (changes or {}).items():
        header[name].update(change)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
