"""What a wave holds, and the memory it may touch.

Vector registers are rows of uint32 [512, lanes] (accumulation registers from row 256); scalar
registers are Python integers. Registers and LDS start as all ones, which is NaN in every float
format, so that what was never written shows in the result.

Tensors get addresses of their own, far apart, with gaps that nothing may touch: an access outside
the elements that the arguments span is an error and not somebody else's data.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tilewright.errors import GateError
from tilewright.isa.emulate_text import EXEC

__all__ = ["PRIVATE", "SPARE_ROW", "Memory", "MemoryFault", "Wave", "Words", "bits_of", "mask_of"]

Words = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]

_FIRST_ADDRESS = 0x1000_0000_0000
_GAP = 1 << 33
PRIVATE = 1 << 46
"""Where the descriptor points that gfx90a's kernels reach their scratch by."""
_UNWRITTEN = 0xFFFFFFFF
SPARE_ROW = 512
"""A vector register of the emulator's own, behind the 256 vector and 256 accumulation registers."""


class MemoryFault(GateError):
    """An access outside every tensor, or outside the workgroup's LDS."""


def mask_of(bits: int, lanes: int) -> Mask:
    """The lowest `lanes` bits as booleans."""
    raw = np.frombuffer((bits & ((1 << lanes) - 1)).to_bytes(lanes // 8, "little"), dtype=np.uint8)
    return np.unpackbits(raw, bitorder="little").view(np.bool_)


def bits_of(mask: Mask) -> int:
    """Booleans as an integer, lane 0 lowest."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


@dataclass
class _Region:
    start: int
    stop: int
    data: npt.NDArray[np.uint8]  # data[0] lies at `start`


class Memory:
    """Tensors at addresses of their own; bytes are read and written in place."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        self._storages: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}
        self._next = _FIRST_ADDRESS
        self._starts: list[int] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Make the elements that `tensor` spans accessible; returns its address."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._storages:
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._storages[key] = (self._place(data.size), data)
        base, data = self._storages[key]
        size = tensor.element_size()
        low = int(tensor.storage_offset()) * size
        if tensor.numel() == 0:
            return base + low
        reach = sum(
            (int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)
        )
        self._open(base + low, base + low + (reach + 1) * size, base, data)
        return base + low

    def add_bytes(self, raw: bytes) -> int:
        """A block of its own, for kernel arguments; returns its address."""
        data = np.frombuffer(bytearray(raw), dtype=np.uint8)
        base = self._place(data.size)
        self._open(base, base + data.size, base, data)
        return base

    def _place(self, size: int) -> int:
        base = self._next
        self._next += -(-(size + _GAP) // _GAP) * _GAP
        return base

    def _open(self, start: int, stop: int, base: int, data: npt.NDArray[np.uint8]) -> None:
        """Join [start, stop) with the regions that it overlaps or touches."""
        touching = [r for r in self._regions if r.start <= stop and start <= r.stop]
        start = min([start, *(r.start for r in touching)])
        stop = max([stop, *(r.stop for r in touching)])
        self._regions = [r for r in self._regions if r not in touching]
        self._regions.append(_Region(start, stop, data[start - base : stop - base]))
        self._regions.sort(key=lambda r: r.start)
        self._starts = [r.start for r in self._regions]

    def _find(self, low: int, high: int) -> _Region | None:
        """The region that holds [low, high)."""
        at = bisect.bisect_right(self._starts, low) - 1
        if at >= 0 and high <= self._regions[at].stop:
            return self._regions[at]
        return None

    def _fault(self, address: int, size: int, verb: str) -> MemoryFault:
        near = min(
            self._regions,
            key=lambda r: min(abs(address - r.start), abs(address - r.stop)),
            default=None,
        )
        where = "there is no memory at all"
        if near is not None:
            where = (
                f"the nearest tensor spans {near.stop - near.start} bytes and the access begins at "
                f"its byte {address - near.start}"
            )
        return MemoryFault(f"{verb} of {size} bytes at address {address:#x}: {where}")

    def read(self, addresses: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.uint8]:
        """[n] addresses -> uint8 [n, size]."""
        if addresses.size == 0:
            return np.zeros((0, size), dtype=np.uint8)
        region = self._find(int(addresses.min()), int(addresses.max()) + size)
        if region is not None:
            return region.data[(addresses - region.start)[:, None] + np.arange(size)]
        out = np.empty((addresses.size, size), dtype=np.uint8)
        for lane, address in enumerate(addresses.tolist()):
            one = self._find(address, address + size)
            if one is None:
                raise self._fault(address, size, "read")
            out[lane] = one.data[address - one.start : address - one.start + size]
        return out

    def write(self, addresses: npt.NDArray[np.int64], values: npt.NDArray[np.uint8]) -> None:
        """Write uint8 [n, size] to [n] addresses; of two lanes at one address the later wins."""
        if addresses.size == 0:
            return
        size = values.shape[1]
        region = self._find(int(addresses.min()), int(addresses.max()) + size)
        if region is not None:
            region.data[(addresses - region.start)[:, None] + np.arange(size)] = values
            return
        for lane, address in enumerate(addresses.tolist()):
            one = self._find(address, address + size)
            if one is None:
                raise self._fault(address, size, "write")
            one.data[address - one.start : address - one.start + size] = values[lane]

    def read_scalar(self, address: int, words: int, size: int = 4) -> list[int]:
        """`words` little-endian integers of `size` bytes."""
        region = self._find(address, address + words * size)
        if region is None:
            raise self._fault(address, words * size, "scalar read")
        at = address - region.start
        raw = region.data[at : at + words * size].tobytes()
        return [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]


class Wave:
    """One wave's registers.

    Attributes:
        v: uint32 [513, lanes].
        s: 128 scalar registers, each below 2^32.
        scc: the scalar condition bit.
        number: its place in the workgroup.
        pc, steps: the next instruction; how many ran.
        mask: which lanes are active; `full` if all are.
        lds: the workgroup's shared memory, bytes.
        scratch: bytes [lanes, n] of private memory.
    """

    def __init__(
        self,
        lanes: int,
        memory: Memory,
        lds: npt.NDArray[np.uint8],
        scratch_bytes: int = 0,
        number: int = 0,
    ) -> None:
        self.number = number
        self.lanes = lanes
        self.memory = memory
        self.lds = lds
        self.scratch = np.full((lanes, scratch_bytes), 0xFF, dtype=np.uint8)
        self.v = np.full((SPARE_ROW + 1, lanes), _UNWRITTEN, dtype=np.uint32)
        self.s = [_UNWRITTEN] * 128
        self.scc = 0
        self.pc = 0
        self.steps = 0
        self.done = False
        self.full = True
        self._mask: Mask | None = None
        self.s[EXEC + 1] = 0
        self.set_bits(EXEC, (1 << lanes) - 1)

    @property
    def mask(self) -> Mask:
        if self._mask is None:
            bits = self.s[EXEC] | self.s[EXEC + 1] << 32
            self._mask = mask_of(bits, self.lanes)
            self.full = bool(self._mask.all())
        return self._mask

    def set(self, index: int, value: int) -> None:
        """Write one scalar register."""
        self.s[index] = value & 0xFFFFFFFF
        if index >= EXEC:
            self._mask = None
            self.full = False
            _ = self.mask

    def set64(self, index: int, value: int) -> None:
        """Write a pair of scalar registers."""
        self.set(index, value)
        self.set(index + 1, value >> 32)

    def set_bits(self, index: int, value: int) -> None:
        """Write a lane mask: one scalar register of a wave of 32, two of a wave of 64."""
        self.set(index, value)
        if self.lanes == 64:
            self.set(index + 1, value >> 32)

    def bits(self, index: int) -> int:
        """Read a lane mask."""
        return self.s[index] if self.lanes == 32 else self.s[index] | self.s[index + 1] << 32

    @contextlib.contextmanager
    def narrowed(self, lanes: Mask) -> Iterator[None]:
        """Within it only those of the active lanes write that `lanes` names."""
        before, full = self.mask, self.full
        self._mask = before & lanes
        self.full = bool(self._mask.all())
        try:
            yield
        finally:
            self._mask, self.full = before, full

    def put(self, index: int, words: Words) -> None:
        """Write one vector register in the active lanes."""
        if self.full:
            self.v[index] = words
        else:
            np.copyto(self.v[index], words, where=self.mask)
