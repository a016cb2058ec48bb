"""Wrong safetensors files: every one ends in an error that names the file and what it can."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.byte_files import gguf_file, safetensors_file
from tilewright.errors import FormatError
from tilewright.formats.checkpoint import read_checkpoint

F16 = np.float16

TWO: dict[str, Any] = {
    "a": np.arange(4, dtype=np.float32),
    "b": np.arange(6, dtype=F16).reshape(2, 3),
}
GOOD = safetensors_file(TWO)
DATA_START = len(GOOD) - 28


def header_of(text: str | bytes, data: bytes = b"") -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + data


# id: (content, message, tensor, offset)
BAD_FILES: dict[str, tuple[bytes, str, str | None, int | None]] = {
    "empty": (b"", "the header claims 0 bytes; the file has 0", None, 0),
    "short": (b"\x02\x00", "the header claims 2 bytes; the file has 2", None, 0),
    "pickle": (b"\x80\x04" + GOOD, "a pickle or zip archive", None, 0),
    "zip": (b"PK\x03\x04" + GOOD, "a pickle or zip archive", None, 0),
    "gguf": (gguf_file(), "this is a GGUF file; safetensors files are read", None, 0),
    "header-beyond-file": (struct.pack("<Q", 2**63) + b"{}", "claims 9223372036854775808", None, 0),
    "header-cut": (GOOD[:40], "it is truncated or no safetensors file", None, 0),
    "not-json": (header_of("{nonsense"), "header of 9 bytes is damaged", None, 8),
    "not-utf8": (header_of(b'{"\xff":1}'), "header of 7 bytes is damaged", None, 8),
    "deep": (header_of('{"a":' + "[" * 50_000), "is damaged", None, 8),
    "list": (header_of("[]"), "header of 2 bytes is damaged", None, 8),
    "entry": (header_of('{"a": 3}'), "its entry in the header is damaged", "a", None),
    "entry-infinity": (
        header_of('{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}'),
        "its entry in the header is damaged",
        "a",
        None,
    ),
    "entry-cut": (header_of('{"a": {"dtype": "F32"}}'), "its entry in the header", "a", None),
    "dtype": (
        safetensors_file(TWO, {"a": {"dtype": "F99"}}), "damaged", None, None
    ),
    "data-cut": (
        GOOD[:-1],
        f"its data end at byte {len(GOOD)} of a file of {len(GOOD) - 1}",
        "b",
        DATA_START + 16,
    ),
    "past-end": (
        safetensors_file(TWO, {"a": {"data_offsets": [0, 1 << 40]}}), "its data end", "a", None
    ),
    "backwards": (
        safetensors_file(TWO, {"b": {"data_offsets": [28, 16]}}), "its data end at", "b", None
    ),
    "shape-too-large": (
        safetensors_file(TWO, {"a": {"shape": [2**40, 2**40]}}), "does not fill its 16", "a", None
    ),
    "overlap": (
        safetensors_file(TWO, {"b": {"data_offsets": [4, 16]}}),
        "its data do not follow those before it",
        "b",
        None,
    ),
    "trailing": (GOOD + b"x", "the file is damaged", None, None),
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message", "tensor", "offset"), BAD_FILES.values(), ids=BAD_FILES
)
def test_bad_safetensors_file(
    tmp_path: Path, content: bytes, message: str, tensor: str | None, offset: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=message) as caught:
        read_checkpoint(tmp_path)
    assert caught.value.file == tmp_path / "model.safetensors"
    assert caught.value.tensor == tensor
    if offset is not None:
        assert caught.value.offset == offset


def test_good_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    checkpoint = read_checkpoint(tmp_path)
    assert sorted(checkpoint.dense) == ["a", "b"]
    for name, values in TWO.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).numpy(), values)


def test_every_truncation_of_a_good_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for length in range(len(GOOD)):
        (tmp_path / "model.safetensors").write_bytes(GOOD[:length])
        with pytest.raises(FormatError, match=r"model\.safetensors"):
            read_checkpoint(tmp_path)


@pytest.mark.parametrize("second", [2, 3, 4, 5])
def test_a_header_that_is_as_long_as_a_pickle_begins_is_read(second: int, tmp_path: Path) -> None:
    """Its length, the file's first bytes, reads 0x80 and a pickle's protocol."""
    padded = GOOD[8:DATA_START].ljust(0x80 + 256 * second) + GOOD[DATA_START:]
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 0x80 + 256 * second) + padded)
    (tmp_path / "config.json").write_text("{}")
    assert sorted(read_checkpoint(tmp_path).dense) == ["a", "b"]
