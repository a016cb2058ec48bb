"""Damaged files, by the thousand: only our own errors come out, soon, and in little memory.

Everything is derived from fixed seeds, so a failure comes back.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from formats.byte_files import (
    ARRAY,
    STRING,
    array,
    gguf_file,
    info,
    key,
    string,
    u32_key,
    write,
)
from formats.w4_files import (
    awq,
    awq_config,
    compressed_config,
    compressed_tensors,
    gptq,
    gptq_config,
    random_weight,
    write_checkpoint,
)
from tilewright.errors import FormatError, UnsupportedError
from tilewright.formats.checkpoint import read_checkpoint
from tilewright.formats.gguf import check_scales, read_gguf

fuzz = settings(
    derandomize=True,
    database=None,
    deadline=timedelta(seconds=2),
    max_examples=250,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
torch.zeros(1)  # loaded before any allocation is measured
READ_BYTES = 1 << 20
"""What opening a file of a few KB may take: interpreter objects, not the file's claims."""


def base_gguf() -> bytes:
    """A small file that has every kind of value and most kinds of tensor."""
    rng = np.random.default_rng(0)
    keys = [
        key("general.architecture", STRING, string("llama")),
        u32_key("general.alignment", 32),
        key("tokens", ARRAY, array(STRING, 3, string("a") + string("") + string("日本"))),
        key("scores", ARRAY, array(6, 3, np.ones(3, "<f4").tobytes())),
        key("flags", ARRAY, array(7, 2, b"\x00\x01")),
        key("nested", ARRAY, array(ARRAY, 2, array(5, 1, bytes(4)) * 2)),
        *(key(f"scalar{t}", t, bytes(8)[:size]) for t, size in ((0, 1), (10, 8), (12, 8))),
    ]
    infos, data = [], b""
    for name in ("F32", "F16", "BF16", "I32", "Q4_0", "Q5_1", "Q3_K", "Q6_K", "IQ2_XS", "MXFP4"):
        ggml_type = gguf.GGMLQuantizationType[name]
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        infos.append(info(f"t.{name}", [256, 2], ggml_type, len(data)))
        raw = rng.integers(0, 60, 512 // block_size * block_bytes, dtype=np.uint8).tobytes()
        data += raw + bytes(-len(raw) % 32)
    return gguf_file(keys, infos, data)


GOOD_GGUF = base_gguf()
NASTY = (0, 1, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


@st.composite
def damaged(draw: st.DrawFn, good: bytes, head: int) -> bytes:
    """A few bytes changed, numbers blown up, pieces cut out or repeated, the end cut off.

    Three of four places are within the first `head` bytes, where the structure is.
    """
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        end = max(1, len(content) if draw(st.integers(0, 3)) == 0 else min(head, len(content)))
        at = draw(st.integers(0, end - 1))
        kind = draw(st.sampled_from(["flip", "byte", "u32", "u64", "cut", "repeat", "end"]))
        if kind == "flip" and content:
            content[at % len(content)] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte" and content:
            content[at % len(content)] = draw(st.integers(0, 255))
        elif kind == "u32":
            content[at : at + 4] = struct.pack("<I", draw(st.sampled_from(NASTY)) & 0xFFFFFFFF)
        elif kind == "u64":
            content[at : at + 8] = struct.pack("<Q", draw(st.sampled_from(NASTY)))
        elif kind == "cut":
            del content[at : at + draw(st.integers(1, 40))]
        elif kind == "repeat":
            content[at:at] = content[at : at + draw(st.integers(1, 40))]
        else:
            del content[at:]
    return bytes(content)


def fresh(path: Path, content: bytes) -> Path:
    """Write a new file: one that is mapped must not be changed under its reader."""
    path.unlink(missing_ok=True)
    return write(path, content)


def peak_bytes(act: Callable[[], Any]) -> int:
    """Python's and numpy's peak allocation during `act`, whose own errors are expected."""
    tracemalloc.start()
    try:
        act()
    except (FormatError, UnsupportedError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def use_gguf(path: Path) -> None:
    """Read everything that a file holds, going on after each error of ours."""
    file = read_gguf(path)
    for name in file.metadata:
        try:
            file.metadata[name]
        except FormatError:
            pass
    for tensor in file.tensors.values():
        for act in (lambda t=tensor: check_scales(t), tensor.dequantize):
            try:
                act()
            except (FormatError, UnsupportedError):
                pass


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", GOOD_GGUF)
    use_gguf(path)
    assert len(read_gguf(path).tensors) == 10


@fuzz
@given(content=damaged(GOOD_GGUF, head=GOOD_GGUF.index(b"t.MXFP4") + 60))
def test_damaged_gguf(tmp_path: Path, content: bytes) -> None:
    path = fresh(tmp_path / "m.gguf", content)
    assert peak_bytes(lambda: read_gguf(path)) < READ_BYTES
    assert peak_bytes(lambda: use_gguf(path)) < READ_BYTES + 32 * len(content)


u64s = st.one_of(st.sampled_from(NASTY), st.integers(0, 600))


@st.composite
def made_up_gguf(draw: st.DrawFn) -> bytes:
    """A header of the right grammar and wild numbers."""
    keys = []
    for i in range(draw(st.integers(0, 3))):
        value_type = draw(st.integers(0, 13))
        if value_type == ARRAY:
            value = array(draw(st.integers(0, 13)), draw(u64s), draw(st.binary(max_size=40)))
        elif value_type == STRING:
            value = struct.pack("<Q", draw(u64s)) + draw(st.binary(max_size=40))
        else:
            value = draw(st.binary(max_size=8))
        name = draw(st.sampled_from([f"k{i}", "general.alignment", "split.count"]))
        keys.append(key(name, value_type, value))
    infos = []
    for i in range(draw(st.integers(0, 3))):
        dims = draw(st.lists(u64s, max_size=5))
        type_id = draw(st.sampled_from([0, 1, 2, 8, 12, 14, 24, 30, 39, 99]))
        infos.append(info(f"t{i}", dims, type_id, draw(st.sampled_from((0, 32, 64, *NASTY)))))
    counts = st.one_of(st.none(), u64s)
    return gguf_file(
        keys,
        infos,
        draw(st.binary(max_size=300)),
        tensor_count=draw(counts),
        key_count=draw(counts),
    )


@fuzz
@given(content=made_up_gguf())
def test_made_up_gguf(tmp_path: Path, content: bytes) -> None:
    path = fresh(tmp_path / "m.gguf", content)
    assert peak_bytes(lambda: use_gguf(path)) < READ_BYTES + 32 * len(content)


@fuzz
@given(content=st.binary(max_size=200).map(lambda tail: b"GGUF\x03\0\0\0" + tail))
def test_noise_after_the_magic(tmp_path: Path, content: bytes) -> None:
    path = fresh(tmp_path / "m.gguf", content)
    assert peak_bytes(lambda: use_gguf(path)) < READ_BYTES + 32 * len(content)


SIZE = 1 << 18
GREEDY: dict[str, bytes] = {
    "bytes": gguf_file([key("a", ARRAY, array(0, SIZE, bytes(SIZE)))]),
    "int16s": gguf_file([key("a", ARRAY, array(3, SIZE // 2, b"\x55\x55" * (SIZE // 2)))]),
    "empty-strings": gguf_file([key("a", ARRAY, array(STRING, SIZE // 8, bytes(SIZE)))]),
    "empty-arrays": gguf_file(
        [key("a", ARRAY, array(ARRAY, SIZE // 12, array(0, 0) * (SIZE // 12)))]
    ),
    "keys": gguf_file([key(f"{i:x}", 0, b"\0") for i in range(12_000)]),
    "tensors": gguf_file(
        [u32_key("general.alignment", 1)],
        [info(f"{i:x}", [1], 24, i) for i in range(5_000)],
        bytes(5_000),
        alignment=1,
    ),
}


@pytest.mark.parametrize("content", GREEDY.values(), ids=GREEDY)
def test_greedy_gguf(tmp_path: Path, content: bytes) -> None:
    """Valid files, of 200 KB and more, whose every byte makes as many objects as it can."""
    path = write(tmp_path / "m.gguf", content)
    assert peak_bytes(lambda: read_gguf(path)) < 32 * len(content)
    file = read_gguf(path)
    assert peak_bytes(lambda: dict(file.metadata)) < 24 * len(content)


W4_CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq, gptq_config(32, False, desc_act=True)),
    "awq": (awq, awq_config()),
    "compressed-tensors": (compressed_tensors, compressed_config(32, False)),
}


def good_checkpoint(folder: Path, name: str) -> bytes:
    pack, config = W4_CASES[name]
    tensors = pack(*random_weight(16, 64, 32, symmetric=False))
    if name == "gptq":
        tensors["g_idx"] = (np.arange(64) % 2).astype(np.int32)
    dense = {"m.q_proj.bias": np.ones(16, np.float16)}
    write_checkpoint(folder, config, tensors, dense=dense)
    return (folder / "model.safetensors").read_bytes()


def use_checkpoint(folder: Path) -> None:
    checkpoint = read_checkpoint(folder)
    for act, names in (
        (checkpoint.linear, checkpoint.linears),
        (checkpoint.tensor, checkpoint.dense),
    ):
        for name in names:
            try:
                act(name)
            except (FormatError, UnsupportedError):
                pass


@pytest.mark.parametrize("name", W4_CASES)
def test_damaged_safetensors(tmp_path: Path, name: str) -> None:
    good = good_checkpoint(tmp_path, name)
    use_checkpoint(tmp_path)
    head = 8 + int.from_bytes(good[:8], "little")
    path = tmp_path / "model.safetensors"

    @settings(fuzz, max_examples=100)
    @given(content=damaged(good, head))
    def run(content: bytes) -> None:
        fresh(path, content)
        assert peak_bytes(lambda: use_checkpoint(tmp_path)) < READ_BYTES + 32 * len(content)

    run()


@st.composite
def damaged_header(draw: st.DrawFn, good: bytes) -> bytes:
    """A safetensors file whose header is still JSON, with fields changed."""
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    numbers = st.one_of(st.sampled_from(NASTY), st.integers(-5, 100), st.floats(), st.none())
    dtypes = st.sampled_from(
        ["F16", "BF16", "F64", "I8", "U16", "U64", "BOOL", "F8_E4M3", "F4", "C64", "", 3, None]
    )
    for _ in range(draw(st.integers(1, 3))):
        entry = header[draw(st.sampled_from(sorted(header)))]
        kind = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        if kind == "dtype":
            entry["dtype"] = draw(dtypes)
        elif draw(st.booleans()) and isinstance(entry[kind], list) and entry[kind]:
            at = draw(st.integers(0, len(entry[kind]) - 1))
            entry[kind][at] = draw(numbers)
        else:
            entry[kind] = draw(st.one_of(st.lists(numbers, max_size=4), numbers))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + good[8 + length :]


@pytest.mark.parametrize("name", W4_CASES)
def test_damaged_safetensors_header(tmp_path: Path, name: str) -> None:
    good = good_checkpoint(tmp_path, name)
    path = tmp_path / "model.safetensors"

    @settings(fuzz, max_examples=100)
    @given(content=damaged_header(good))
    def run(content: bytes) -> None:
        fresh(path, content)
        assert peak_bytes(lambda: use_checkpoint(tmp_path)) < READ_BYTES + 32 * len(content)

    run()


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 300), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def fields_of(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every (object, key) of a nested config."""
    found = []
    for name, value in config.items():
        found.append((config, name))
        if isinstance(value, dict):
            found.extend(fields_of(value))
    return found


@pytest.mark.parametrize("name", W4_CASES)
def test_damaged_config(tmp_path: Path, name: str) -> None:
    good_checkpoint(tmp_path, name)
    path = tmp_path / "config.json"
    good = path.read_text()

    @settings(fuzz, max_examples=100)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        config = json.loads(good)
        for _ in range(data.draw(st.integers(1, 3))):
            owner, field = data.draw(st.sampled_from(fields_of(config)))
            owner[field] = data.draw(json_values)
        path.write_text(json.dumps(config))
        assert peak_bytes(lambda: use_checkpoint(tmp_path)) < 2 * READ_BYTES

    run()
