"""Memory that shows what a kernel did to it.

``Guards``    every buffer that an op allocates lies between guard bands and starts as NaN.
``rehoused``  a copy of an operand that lies between NaN, with the same strides.
``Snapshot``  a copy of every byte of the operands: says what an op changed, and puts it back.

Guard bands hold signalling NaN, one pattern for each dtype: arithmetic on it gives a quiet NaN, so
a kernel that adds to memory behind its output shows as surely as one that overwrites it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.ops.contract import Inputs

__all__ = ["Guards", "Snapshot", "operand_bytes", "rehoused"]

_LEAST_BAND = 1 << 16
_MOST_BAND = 1 << 24
_ROWS = 16  # that an output may be overrun by without leaving its band
_ALIGN = 4096

# One 64-bit word of guard band: signalling NaN of the buffer's own dtype. The last serves float32
# and raw bytes that an op will view as float32.
_BANDS = {
    torch.float64: 0xFFF5A5A5A5A5A5A5,
    torch.float16: 0xFDA5FDA5FDA5FDA5,
    torch.bfloat16: 0xFFA5FFA5FFA5FFA5,
}
_BAND = 0xFFA5A5A5FFA5A5A5

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty_strided.default,
}


def _word(dtype: torch.dtype) -> int:
    return _BANDS.get(dtype, _BAND) - (1 << 64)  # as a signed 64-bit number


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor, as uint8."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of a strided tensor."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _band_bytes(tensor: torch.Tensor) -> int:
    """Bytes of guard on one side: room for some rows more than the tensor has."""
    row = tensor.shape[-1] if tensor.dim() > 1 else 0
    want = min(max(_LEAST_BAND, _ROWS * row * tensor.element_size()), _MOST_BAND)
    return -(-want // _ALIGN) * _ALIGN


class Guards(TorchDispatchMode):
    """Inside ``with guards:`` whatever torch allocates without content is guarded and filled.

    Reaches `torch.empty` and its kin on every device, outputs and workspaces alike, in the thread
    that entered it; not memory that comes from elsewhere (numpy, or a library's own allocator).

    Args:
        nan: fill with NaN (0xFF in bytes, which is NaN in every float type; the smallest number
            but 90 in wider integers); zeros otherwise.
    """

    def __init__(self, *, nan: bool = True) -> None:
        super().__init__()
        self._nan = nan
        self._buffers: list[_Buffer] = []
        self._held: list[torch.Tensor] = []  # what the launch would otherwise free before a look

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _EMPTY and made.layout is torch.strided and made.numel():
            if made.device.type != "meta":
                return self._guarded(made)
        return made

    def _guarded(self, made: torch.Tensor) -> torch.Tensor:
        band = _band_bytes(made)
        inner = -(-_span(made) * made.element_size() // 8) * 8
        buffer = torch.empty(band + inner + band, dtype=torch.uint8, device=made.device)
        buffer.view(torch.int64).fill_(_word(made.dtype))
        body = buffer[band : band + _span(made) * made.element_size()].view(made.dtype)
        self._fill(body)
        weak = StorageWeakRef(buffer.untyped_storage())
        self._buffers.append(_Buffer(weak, made.dtype, tuple(made.shape), band, body.nbytes))
        self._held.append(buffer)
        return body.as_strided(made.shape, made.stride(), body.storage_offset())

    def _fill(self, body: torch.Tensor) -> None:
        if not self._nan:
            body.zero_()
        elif body.is_floating_point() or body.is_complex():
            body.fill_(float("nan"))
        elif body.element_size() == 1:
            body.view(torch.uint8).fill_(0xFF)
        else:
            body.fill_(torch.iinfo(body.dtype).min + 90)

    def broken(self) -> str | None:
        """What was written outside the buffers allocated so far, or None.

        Buffers of earlier launches are looked at again for as long as the op keeps them.
        """
        found = None
        alive = []
        for buffer in self._buffers:
            whole = buffer.whole()
            if whole is not None:
                alive.append(buffer)
                found = found or buffer.overrun(whole)
        self._buffers = alive
        self._held = []
        return found


@dataclass(frozen=True)
class _Buffer:
    """A guarded buffer, kept alive by nobody but the op.

    Attributes:
        weak: its storage.
        dtype, shape: of the tensor that lies in it.
        start, used: bytes before the tensor, and from its first to its last.
    """

    weak: StorageWeakRef
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    used: int

    def whole(self) -> torch.Tensor | None:
        """All bytes, bands included; None if the buffer is gone."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        if storage is None:
            return None
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return whole.set_(storage)

    def overrun(self, whole: torch.Tensor) -> str | None:
        """What was written into the bands."""
        word = torch.tensor([_word(self.dtype)], dtype=torch.int64, device=whole.device)
        pattern = word.view(torch.uint8)
        end = self.start + self.used
        for first, last, side in ((0, self.start, "before"), (end, len(whole), "behind")):
            size = last - first
            expected = pattern.roll(-(first % 8)).repeat(-(-size // 8))[:size]
            if torch.equal(whole[first:last], expected):
                continue
            wrong = torch.nonzero(whole[first:last] != expected).view(-1)
            gap = size - 1 - int(wrong[-1]) if side == "before" else int(wrong[0])
            return (
                f"{len(wrong)} bytes {side} the {str(self.dtype).removeprefix('torch.')} "
                f"{list(self.shape)} buffer were written, the nearest {gap} bytes from it"
            )
        return None


def rehoused(x: torch.Tensor, *, nan: bool = True) -> torch.Tensor:
    """A copy of x with its strides, in a buffer of NaN: around it, and in every gap between rows.

    A kernel that reads past an edge and uses what it finds there returns NaN.

    Args:
        nan: False for zeros. Integers always lie between zeros.
    """
    if not x.numel() or any(s == 0 and n > 1 for n, s in zip(x.shape, x.stride(), strict=True)):
        return x
    band = _band_bytes(x) // x.element_size()
    value = float("nan") if nan and x.is_floating_point() else 0
    buffer = torch.full((band + _span(x) + band,), value, dtype=x.dtype, device=x.device)
    copy = buffer.as_strided(x.shape, x.stride(), band)
    copy.copy_(x)
    return copy


class Snapshot:
    """Every byte of the operands of one launch, the memory around them included.

    Tensors and writable numpy arrays are found in the fields of `Inputs`, in dataclasses, lists,
    tuples and mappings there. Where x lies on a GPU only what lies there too: its kernels do not
    reach the host's memory, in which the oracle's source lies.
    """

    def __init__(self, inputs: Inputs) -> None:
        reached = inputs.x.device
        self._blocks = [
            (name, live, live.clone())
            for name, live in _operands(inputs)
            if reached.type == "cpu" or live.device == reached
        ]

    def changed(self) -> str | None:
        """The first operand that no longer holds what it held, such as "x" or "weight.data"."""
        for name, live, saved in self._blocks:
            if not torch.equal(live, saved):
                return name
        return None

    def restore(self) -> None:
        """Put every byte back."""
        for _, live, saved in self._blocks:
            live.copy_(saved)


def operand_bytes(inputs: Inputs) -> int:
    """Bytes of all operands of a launch."""
    return sum(len(live) for _, live in _operands(inputs))


def _operands(inputs: Inputs) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and bytes of every block of memory behind the operands, each once; the source, in
    which a packed weight may lie, is named last."""
    seen = set()
    names = [field.name for field in fields(inputs) if field.name != "case"]
    for of in sorted(names, key=lambda name: name == "source"):
        for name, live in _blocks(of, getattr(inputs, of)):
            place = (live.device, live.data_ptr(), len(live))
            if len(live) and place not in seen:
                seen.add(place)
                yield name, live


def _blocks(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            yield name, _bytes_of(value)
    elif isinstance(value, np.ndarray):
        root = value
        while isinstance(root.base, np.ndarray):
            root = root.base
        if root.flags.writeable and not root.dtype.hasobject:
            flat = _flat(root)
            if flat is not None:
                yield name, torch.from_numpy(flat.view(np.uint8))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _blocks(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _blocks(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _blocks(f"{name}[{at}]", item)


def _flat(root: np.ndarray) -> np.ndarray | None:
    """All elements of a contiguous array as one dimension over the same memory."""
    if root.flags.c_contiguous:
        return root.reshape(-1)
    if root.flags.f_contiguous:
        return root.T.reshape(-1)
    return None
