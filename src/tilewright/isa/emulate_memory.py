"""Loads and stores as functions of a wave: scalar, global, buffer, LDS, scratch.

Every access is checked. A buffer access past the descriptor's own size reads 0 and writes nothing,
as the hardware does it, which compilers use for masks; below that size it must lie in a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.isa.emulate_address import Addresses, addresses_of, offset_of
from tilewright.isa.emulate_atomic import compile_atomic
from tilewright.isa.emulate_operands import Array, raw_reader
from tilewright.isa.emulate_scalar import scalar_reader, signed
from tilewright.isa.emulate_state import PRIVATE, MemoryFault, Wave
from tilewright.isa.emulate_text import Instruction, Operand

__all__ = ["compile_memory"]

Run = Callable[[Wave], None]
_WIDTHS = {
    "b8": 1, "byte": 1, "b16": 2, "short": 2, "b32": 4, "dword": 4, "b64": 8, "dwordx2": 8,
    "b96": 12, "dwordx3": 12, "b128": 16, "dwordx4": 16,
}  # fmt: skip
_NARROW = {
    "u8": (1, False), "ubyte": (1, False), "i8": (1, True), "sbyte": (1, True),
    "u16": (2, False), "ushort": (2, False), "i16": (2, True), "sshort": (2, True),
    "b16": (2, False), "short": (2, False),
}  # fmt: skip
_SCALAR = re.compile(r"s_(?:buffer_)?load_(dword(?:x(\d+))?|b(\d+)|[ui](8|16))$")
_NAME = re.compile(r"(global|flat|buffer|ds|scratch)_(load|store|read|write)_(.+?)(_d16_hi|_d16)?$")


def compile_memory(ins: Instruction, lanes: int) -> Run | None:
    """The function of one memory instruction; None if it is none that this module knows."""
    name = ins.mnemonic
    if name.startswith(("s_load_", "s_buffer_load_")):
        return _scalar_load(ins)
    if "lds" in ins.modifiers or "tfe" in ins.modifiers or "gds" in ins.modifiers:
        raise ins.refuse("loads straight to LDS, and global data share")
    if "_atomic_" in name:
        return compile_atomic(ins, lanes)
    if name.startswith("ds_") and name.endswith(("permute_b32", "swizzle_b32")):
        return _ds_permute(ins, lanes)
    if name.startswith(("ds_read2", "ds_write2", "ds_load_2addr", "ds_store_2addr")):
        return _two_places(ins, lanes)
    match = _NAME.match(name)
    if match is None:
        return None
    space, verb, width, part = match.groups()
    if width.endswith(("_d16_hi", "_d16")):
        width, _, tail = width.partition("_d16")
        part = f"_d16{tail}"
    elif width.startswith("d16_"):  # gfx11: load_d16_b16, load_d16_hi_u8
        part = "_d16_hi" if "hi_" in width else "_d16"
        width = width.removeprefix("d16_").removeprefix("hi_")
    is_load = verb in ("load", "read")
    if is_load and (part or width in _NARROW) and width in _NARROW:
        size, extend = _NARROW[width]
    elif width in _WIDTHS:
        size, extend = _WIDTHS[width], False
    else:
        return None
    addresses, data = addresses_of(ins, space, is_load, lanes)
    memory = _memory(space)
    if is_load:
        return _load(memory, addresses, data.index, size, extend, part or "")
    return _store(ins, memory, addresses, data, size, part or "", lanes)


def _scalar_load(ins: Instruction) -> Run | None:
    match = _SCALAR.match(ins.mnemonic)
    if match is None:
        return None
    _, words, bits, narrow = match.groups()
    count = int(words) if words else int(bits) // 32 if bits else 1
    target, base, *offsets = ins.operands
    first, at = target.index, base.index
    buffer = "buffer" in ins.mnemonic
    reads = [scalar_reader(ins, op) for op in offsets]
    fixed = offset_of(ins)
    is_signed = ins.mnemonic.startswith("s_load_i")

    def run(w: Wave) -> None:
        start = w.s[at] | w.s[at + 1] << 32
        if buffer:
            start &= (1 << 48) - 1
        start += sum(signed(read(w)) if op.kind == "int" else read(w)
                     for read, op in zip(reads, offsets, strict=True)) + fixed  # fmt: skip
        size = int(narrow) // 8 if narrow else 4
        for n, value in enumerate(w.memory.read_scalar(start, count, size)):
            w.set(first + n, signed(value, 8 * size) if is_signed else value)

    return run


class _Private:
    """LDS and scratch with the interface of `Memory`: addresses are offsets."""

    def __init__(self, what: str, data: Array) -> None:
        self._what, self._data = what, data

    def check(self, addresses: Array, size: int) -> None:
        end = self._data.shape[-1]
        bad = (addresses < 0) | (addresses + size > end)
        if bad.any():
            raise MemoryFault(
                f"an access of {size} bytes at {self._what} address {int(addresses[bad][0]):#x}, "
                f"of which the kernel has {end} bytes"
            )

    def read(self, addresses: Array, size: int) -> Array:
        self.check(addresses, size)
        return self._data[addresses[:, None] + np.arange(size)]

    def write(self, addresses: Array, values: Array) -> None:
        self.check(addresses, values.shape[1])
        self._data[addresses[:, None] + np.arange(values.shape[1])] = values


class _Scratch(_Private):
    def __init__(self, data: Array, mask: Array) -> None:
        super().__init__("scratch", data)
        self._lanes = np.flatnonzero(mask)

    def read(self, addresses: Array, size: int) -> Array:
        self.check(addresses, size)
        at = addresses[:, None] + np.arange(size)
        return self._data[self._lanes[:, None], at]

    def write(self, addresses: Array, values: Array) -> None:
        self.check(addresses, values.shape[1])
        at = addresses[:, None] + np.arange(values.shape[1])
        self._data[self._lanes[:, None], at] = values


class _Buffers:
    """Tensors, and behind the private segment's descriptor a wave's own scratch."""

    def __init__(self, wave: Wave, mask: Array) -> None:
        self._memory = wave.memory
        self._scratch = _Scratch(wave.scratch, mask)

    def read(self, addresses: Array, size: int) -> Array:
        if addresses.size and addresses[0] >= PRIVATE:
            return self._scratch.read(addresses - PRIVATE, size)
        return self._memory.read(addresses, size)

    def write(self, addresses: Array, values: Array) -> None:
        if addresses.size and addresses[0] >= PRIVATE:
            self._scratch.write(addresses - PRIVATE, values)
        else:
            self._memory.write(addresses, values)


def _memory(space: str) -> Callable[[Wave, Array], Any]:
    if space == "ds":
        return lambda w, mask: _Private("LDS", w.lds)
    if space == "scratch":
        return lambda w, mask: _Scratch(w.scratch, mask)
    if space == "buffer":
        return _Buffers
    return lambda w, mask: w.memory


def _words(raw: Array, lanes: int, mask: Array, extend: bool = False) -> Array:
    """uint8 [active, size] as uint32 [words, lanes]; inactive lanes are 0."""
    active, size = raw.shape
    count = -(-size // 4)
    padded = np.zeros((active, 4 * count), dtype=np.uint8)
    padded[:, :size] = raw
    if extend and size < 4:
        padded[:, size:] = np.where(raw[:, -1:] >> 7, 0xFF, 0)
    out = np.zeros((count, lanes), dtype=np.uint32)
    out[:, mask] = padded.view(np.uint32).T
    return out


def _load(
    memory: Callable[[Wave, Array], Any], addresses: Addresses, at: int, size: int,
    extend: bool, part: str,
) -> Run:  # fmt: skip
    def run(w: Wave) -> None:
        places, mask = addresses(w)
        raw = memory(w, mask).read(places[mask], size)
        words = _words(raw, w.lanes, mask, extend)
        if part:
            half = words[0] & np.uint32(0xFFFF)
            old = w.v[at]
            if part == "_d16_hi":
                words = [half << np.uint32(16) | old & np.uint32(0xFFFF)]  # type: ignore[assignment]
            else:
                words = [half | old & np.uint32(0xFFFF0000)]  # type: ignore[assignment]
        for n, row in enumerate(words):
            w.put(at + n, row)

    return run


def _bytes(w: Wave, at: int, size: int, mask: Array, high: bool = False) -> Array:
    """Registers as uint8 [active, size]."""
    rows = w.v[at : at + -(-size // 4)][:, mask]
    if high:
        rows = rows >> np.uint32(16)
    return np.ascontiguousarray(rows.T).view(np.uint8)[:, :size]


def _store(
    ins: Instruction, memory: Callable[[Wave, Array], Any], addresses: Addresses, data: Operand,
    size: int, part: str, lanes: int,
) -> Run:  # fmt: skip
    if data.kind != "v":
        raise ins.refuse(f"a store of {data.text!r}")
    high = part == "_d16_hi" or bool(data.high)

    def run(w: Wave) -> None:
        places, mask = addresses(w)
        memory(w, mask).write(places[mask], _bytes(w, data.index, size, mask, high))

    return run


def _two_places(ins: Instruction, lanes: int) -> Run | None:
    """LDS accesses at two offsets, each in units of the width (or of 64 of it)."""
    match = re.match(r"ds_(?:read2|write2|load_2addr|store_2addr)(st64|_stride64)?_b(32|64)$",
                     ins.mnemonic)  # fmt: skip
    if match is None:
        return None
    size = int(match.group(2)) // 8
    unit = size * (64 if match.group(1) else 1)
    offsets = [int(ins.modifiers.get(f"offset{n}", "0"), 0) * unit for n in range(2)]
    words = size // 4
    is_load = "read" in ins.mnemonic or "load" in ins.mnemonic
    address = raw_reader(ins, ins.operands[1 if is_load else 0], 32, lanes)
    data = ins.operands[0:1] if is_load else ins.operands[1:3]

    def run(w: Wave) -> None:
        mask = w.mask
        places = address(w).astype(np.int64)[mask]
        lds = _Private("LDS", w.lds)
        if is_load:
            rows = [_words(lds.read(places + o, size), w.lanes, mask) for o in offsets]
            for n, row in enumerate(np.concatenate(rows)):
                w.put(data[0].index + n, row)
        else:
            for op, o in zip(data, offsets, strict=True):
                lds.write(places + o, _bytes(w, op.index, 4 * words, mask))

    return run


def _ds_permute(ins: Instruction, lanes: int) -> Run:
    """Values move between lanes; addresses are four times the lane."""
    if ins.mnemonic == "ds_swizzle_b32":
        return _swizzle(ins, lanes)
    target, address, value = ins.operands
    where = raw_reader(ins, address, 32, lanes)
    what = raw_reader(ins, value, 32, lanes)
    fixed = np.uint32(offset_of(ins))
    push = ins.mnemonic == "ds_permute_b32"

    def run(w: Wave) -> None:
        lane = ((where(w) + fixed) >> np.uint32(2)) % np.uint32(lanes)
        mask, values = w.mask, what(w)
        if push:
            out = np.zeros(lanes, dtype=np.uint32)
            out[lane[mask]] = values[mask]
        else:
            out = np.where(mask[lane], values[lane], np.uint32(0))
        w.put(target.index, out)

    return run


def _swizzle_code(ins: Instruction, text: str) -> int:
    """The number that a named pattern stands for: and, or and exclusive-or of the lane."""
    name, *rest = [part.strip().strip('"') for part in text[len("swizzle(") : -1].split(",")]
    if name == "BITMASK_PERM":
        bits = [{"0": (0, 0), "1": (0, 1), "p": (1, 0), "i": (1, 0)}[c] for c in rest[0]]
        keep, put = (int("".join(str(b[n]) for b in bits), 2) for n in range(2))
        flip = int("".join(str(int(c == "i")) for c in rest[0]), 2)
        return keep | put << 5 | flip << 10
    numbers = [int(n, 0) for n in rest]
    if name == "QUAD_PERM":
        return 0x8000 | sum(n << 2 * i for i, n in enumerate(numbers))
    if name == "SWAP":
        return 0x1F | numbers[0] << 10
    if name == "REVERSE":
        return 0x1F | (numbers[0] - 1) << 10
    if name == "BROADCAST":
        return (0x1F & -numbers[0]) | numbers[1] << 5
    raise ins.refuse(f"the pattern {name!r}")


def _swizzle(ins: Instruction, lanes: int) -> Run:
    text = ins.modifiers.get("offset", "0")
    if text.startswith("swizzle"):
        text = str(_swizzle_code(ins, text))
    code, lane = int(text, 0), np.arange(lanes)
    if code >> 15:
        picked = lane // 4 * 4 + (code >> 2 * (lane % 4) & 3)
    else:
        inside = ((lane & 31 & code) | code >> 5 & 31) ^ (code >> 10 & 31)
        picked = lane // 32 * 32 + inside
    source, target = ins.operands[1].index, ins.operands[0].index
    return lambda w: w.put(
        target, np.where(w.mask[picked], w.v[source][picked], np.uint32(0)).astype(np.uint32)
    )
