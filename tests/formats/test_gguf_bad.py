"""read_gguf on wrong files: every one ends in an error that says what and where."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from formats.byte_files import (
    ARRAY,
    STRING,
    UINT8,
    array,
    gguf_file,
    info,
    key,
    string,
    u32_key,
    write,
)
from tilewright.errors import FormatError, UnsupportedError
from tilewright.formats.gguf import read_gguf

F32, Q4_K = 0, 12
ONE = np.ones(1, "<f4").tobytes()
NESTED = array(ARRAY, 1, array(ARRAY, 1, array(ARRAY, 1, array(ARRAY, 1, array(UINT8, 0)))))

# name: (content, message, tensor, offset); tensor and offset are None where not known.
BAD: dict[str, tuple[bytes, str, str | None, int | None]] = {
    "empty": (b"", "the file is empty", None, 0),
    "magic": (gguf_file(magic=b"GGUX"), "no GGUF file .unknown: it starts with b'GGUX'", None, 0),
    "short": (b"GG", "no GGUF file", None, 0),
    "ggml": (gguf_file(magic=b"tjgg"), "before GGUF; convert it", None, 0),
    "pickle": (b"\x80\x02ctorch\n", "a pickle or zip archive", None, 0),
    "zip": (b"PK\x03\x04" + bytes(40), "a pickle or zip archive", None, 0),
    "safetensors": (b"\x40" + bytes(7) + b'{"a":1}', "perhaps a safetensors file", None, 0),
    "cut-in-version": (b"GGUF\x03", "the version takes .* 1 x 4 bytes and 1 are left", None, 4),
    "cut-in-counts": (gguf_file()[:20], "the key count takes", None, 16),
    "many-tensors": (gguf_file(tensor_count=2**63), "claims 9223372036854775808 tensors", None, 8),
    "many-keys": (gguf_file(key_count=2**63), "claims 9223372036854775808 keys", None, 8),
    "tensors-beyond-file": (gguf_file(tensor_count=60000), "list of 60000 tensors", None, 24),
    "keys-beyond-file": (gguf_file(key_count=60000), "list of 60000 keys", None, 24),
    "long-key": (
        gguf_file([struct.pack("<Q", 2**63) + bytes(20)]),
        "key 0 is 9223372036854775808 bytes long; 1..65535",
        None,
        24,
    ),
    "key-beyond-file": (
        gguf_file([struct.pack("<Q", 60000) + bytes(20)]), "key 0 takes at least", None, 32
    ),
    "empty-key": (gguf_file([key("", 4, bytes(4))]), "key 0 is 0 bytes long", None, 24),
    "key-text": (gguf_file([key(b"\xff", 4, bytes(4))]), "key 0 is not UTF-8", None, 24),
    "key-twice": (gguf_file([u32_key("a", 1), u32_key("a", 1)]), "key 'a' appears twice", None, 41),
    "value-type": (gguf_file([key("a", 13, bytes(8))]), "is of type 13; 0..12 are known", None, 37),
    "string-beyond-file": (
        gguf_file([key("a", STRING, struct.pack("<Q", 1 << 40))]),
        "the value of key 'a' takes at least 1099511627776 x 1 bytes",
        None,
        45,
    ),
    "array-beyond-file": (
        gguf_file([key("a", ARRAY, array(UINT8, 1 << 62))]),
        "takes at least 4611686018427387904 x 1 bytes",
        None,
        49,
    ),
    "array-count-overflow": (
        gguf_file([key("a", ARRAY, array(10, 1 << 61))]), "x 8 bytes", None, 49
    ),
    "array-item-type": (
        gguf_file([key("a", ARRAY, array(99, 1, bytes(8)))]), "holds values of type 99", None, 49
    ),
    "strings-beyond-file": (
        gguf_file([key("a", ARRAY, array(STRING, 2, string("x") + struct.pack("<Q", 1 << 63)))]),
        "run past the end of the file after 2 of 2",
        None,
        49,
    ),
    "strings-cut": (
        gguf_file([key("a", ARRAY, array(STRING, 2, struct.pack("<Q", 33) + bytes(39)))]),
        "run past the end of the file after 1 of 2",
        None,
        49,
    ),
    "nested-arrays": (
        gguf_file([key("a", ARRAY, array(ARRAY, 1, NESTED))]), "nests arrays more than 4", None, 85
    ),
    "alignment-type": (
        gguf_file([key("general.alignment", UINT8, b"\x20")]), "must be a uint32", None, 53
    ),
    "alignment-zero": (gguf_file([u32_key("general.alignment", 0)]), "power of two", None, 53),
    "alignment-odd": (gguf_file([u32_key("general.alignment", 48)]), "is 48; it must", None, 53),
    "name-text": (gguf_file(infos=[info(b"\xff", [1], F32)]), "tensor 0 is not UTF-8", None, 24),
    "name-empty": (gguf_file(infos=[info("", [1, 1], F32)]), "tensor 0 is 0 bytes long", None, 24),
    "name-twice": (
        gguf_file(infos=[info("w", [1], F32), info("w", [1], F32, 32)], data=bytes(36)),
        "this name appears twice",
        "w",
        57,
    ),
    "rank": (gguf_file(infos=[info("w", [1] * 5, F32)], data=ONE), "has 5 dimensions", "w", 33),
    "rank-huge": (
        gguf_file(infos=[string("w") + struct.pack("<I", 2**32 - 1) + bytes(40)]),
        "has 4294967295 dimensions; at most 4",
        "w",
        33,
    ),
    "zero-dim": (gguf_file(infos=[info("w", [0], F32)]), "are zero or overflow", "w", 37),
    "dims-overflow": (
        gguf_file(infos=[info("w", [2**32, 2**32], F32)]), "zero or overflow 63 bits", "w", 45
    ),
    "type-id": (gguf_file(infos=[info("w", [1], 99)]), "type id is 99; known are 0 F32", "w", 45),
    "type-retired": (gguf_file(infos=[info("w", [32], 4)]), "its type id is 4;", "w", 45),
    "shape": (
        gguf_file(infos=[info("w", [640, 2], Q4_K)], data=bytes(1000)),
        "rows of 640 values do not divide into Q4_K blocks of 256",
        "w",
        53,
    ),
    "unaligned": (
        gguf_file(infos=[info("w", [1], F32, 4)], data=ONE * 2), "offset 4 is no multiple", "w", 49
    ),
    "past-end": (
        gguf_file(infos=[info("w", [1], F32, 32)], data=bytes(32)),
        "its 4 bytes run past the end of the file at 96",
        "w",
        96,
    ),
    "far-past-end": (
        gguf_file(infos=[info("w", [1], F32, 2**63)], data=ONE), "run past the end", "w", 2**63 + 64
    ),
    "truncated": (
        gguf_file(infos=[info("w", [256, 4], Q4_K)], data=bytes(575)), "its 576 bytes run", "w", 96
    ),
    "overlap": (
        gguf_file(infos=[info("b", [4, 4], F32, 0), info("c", [1], F32, 32)], data=bytes(64)),
        "its data overlap those of tensor 'b'",
        "c",
        160,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message", "tensor", "offset"), BAD.values(), ids=BAD)
def test_bad_file(
    tmp_path: Path, content: bytes, message: str, tensor: str | None, offset: int | None
) -> None:
    path = write(tmp_path / "bad.gguf", content)
    with pytest.raises(FormatError, match=message) as caught:
        read_gguf(path)
    error = caught.value
    assert (error.file, error.tensor, error.offset) == (path, tensor, offset)
    assert str(error).startswith(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf_file(version=3 << 24), "big-endian; only little-endian files are read"),
        (gguf_file(version=1), "of version 1; versions 2 and 3 are read"),
        (gguf_file(version=4), "of version 4; versions 2 and 3 are read"),
    ],
    ids=["big-endian", "version-1", "version-4"],
)
def test_unsupported_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path / "m.gguf", content)
    with pytest.raises(UnsupportedError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_text_that_is_not_utf8_is_named_when_it_is_read(tmp_path: Path) -> None:
    strings = array(STRING, 2, string("ok") + string(b"\xff\xfe"))
    content = gguf_file([key("bad", STRING, string(b"\xff")), key("some", ARRAY, strings)])
    metadata = read_gguf(write(tmp_path / "m.gguf", content)).metadata
    with pytest.raises(FormatError, match="the value of key 'bad' is not UTF-8"):
        metadata["bad"]
    with pytest.raises(FormatError, match="the value of key 'some': string 1 is not UTF-8"):
        metadata["some"]


def test_every_truncation_of_a_good_file_is_refused(tmp_path: Path) -> None:
    content = gguf_file(
        [u32_key("a", 1), key("s", ARRAY, array(STRING, 2, string("xy") + string("")))],
        [info("w", [256, 2], Q4_K), info("v", [1], F32, 288)],
        bytes(292),
    )
    path = tmp_path / "m.gguf"
    read_gguf(write(path, content))
    for length in range(len(content)):
        with pytest.raises(FormatError, match="m.gguf"):
            read_gguf(write(path, content[:length]))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="none.gguf: there is no such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(FormatError, match="this is a folder"):
        read_gguf(tmp_path)
