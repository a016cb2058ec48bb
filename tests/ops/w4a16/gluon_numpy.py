"""Runs the Hopper decode kernel's own source on the CPU: `gluon.language` in numpy.

Tensors are numpy arrays without layouts, a program after the other. The kernel gives the lanes of a
warp a dimension of their own, so mma.sync is a product along that dimension, with the fragments as
the PTX manual draws them. Loads and stores are held to their buffers; a masked load without
`other` yields garbage. It checks indices, masks, groups and sums; it knows nothing of registers,
layouts or races.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

HOME = "tilewright.ops.w4a16"
KERNELS = ("tilewright.ops.mma_fragments", f"{HOME}.hopper_decode_parts", f"{HOME}.hopper_decode")
GARBAGE = 0x7E017E01  # a pair of NaN


class Dtype:
    def __init__(self, name: str, stored: Any) -> None:
        self.name, self.stored = name, np.dtype(stored)


BY_NAME = {
    name: Dtype(name, stored)
    for name, stored in {
        "int32": np.int32, "int64": np.int64, "uint8": np.uint8, "uint16": np.uint16,
        "float16": np.float16, "bfloat16": np.uint16, "float32": np.float32, "bool": np.bool_,
    }.items()
}  # fmt: skip


def rounded(v: Any) -> Any:
    """float32 to the patterns of bfloat16, to nearest even."""
    bits = v.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def unwrap(v: Any) -> Any:
    return v.data if isinstance(v, Tensor) else v


class Tensor:
    """A numpy array with its Triton dtype. Sums and products are those of numpy."""

    def __init__(self, data: Any, dtype: str = "") -> None:
        self.data = np.asarray(data)
        self.dtype = BY_NAME[dtype or self.data.dtype.name]
        self.type = SimpleNamespace(layout=None)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def to(self, dtype: Dtype, bitcast: bool = False) -> Tensor:
        if bitcast:
            return Tensor(self.data.view(dtype.stored), dtype.name)
        data = self.data
        if self.dtype.name == "bfloat16":
            data = (data.astype(np.uint32) << 16).view(np.float32)
        if dtype.name == "bfloat16":
            return Tensor(rounded(data), "bfloat16")
        return Tensor(data.astype(dtype.stored), dtype.name)

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


def _operator(name: str) -> Callable[[Any, Any], Any]:
    def apply(self: Any, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        other = unwrap(other)
        if isinstance(other, int) and self.data.dtype == np.int32:
            other = np.int32(other)
        return Tensor(getattr(self.data, name)(other))

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "rshift", "lshift", "eq", "lt"):
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("add", "sub", "mul"):
    setattr(Tensor, f"__r{_name}__", _operator(f"__r{_name}__"))
Tensor.__hash__ = None  # type: ignore[assignment]


class Pointer:
    """Offsets, in elements, into the storage of a tensor."""

    def __init__(self, memory: Any, dtype: str, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=BY_NAME[dtype])

    @classmethod
    def of(cls, t: torch.Tensor) -> Pointer:
        memory = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy()
        return cls(memory, str(t.dtype).removeprefix("torch."), t.storage_offset())

    def __add__(self, other: Any) -> Pointer:
        return Pointer(
            self.memory, self.dtype.element_ty.name, self.offset + unwrap(other).astype(np.int64)
            if isinstance(other, Tensor) else self.offset + other,
        )  # fmt: skip

    def to(self, dtype: Dtype) -> Pointer:
        scale = self.dtype.element_ty.stored.itemsize / dtype.stored.itemsize
        return Pointer(self.memory, dtype.name, int(self.offset * scale))

    def cells(self, mask: Any) -> tuple[Any, Any, Any]:
        """The memory in elements, and offsets and mask of one shape; all within the memory."""
        stored = self.dtype.element_ty.stored
        memory = self.memory[: len(self.memory) // stored.itemsize * stored.itemsize].view(stored)
        mask = True if mask is None else unwrap(mask)
        offset, mask = np.broadcast_arrays(self.offset, mask)
        used = offset[mask]
        if used.size and (used.min() < 0 or used.max() >= len(memory)):
            raise IndexError(f"offsets {used.min()} to {used.max()} of {len(memory)} elements")
        return memory, offset, mask


def load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Tensor:
    memory, offset, mask = pointer.cells(mask)
    fill = GARBAGE if other is None else other
    data = np.full(offset.shape, 0, memory.dtype)
    data[...] = np.array(fill).astype(memory.dtype)
    data[mask] = memory[offset[mask]]
    return Tensor(data, pointer.dtype.element_ty.name)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    memory, offset, mask = pointer.cells(mask)
    data = np.broadcast_to(np.asarray(unwrap(value)), offset.shape)
    memory[offset[mask]] = data[mask]


def atomic_add(pointer: Pointer, value: int, sem: str) -> Tensor:
    memory, offset, _ = pointer.cells(None)
    old = memory[offset].copy()
    memory[offset] += value
    return Tensor(old)


def halves(word: Any, kind: str) -> Any:
    """int32 [...] as float64 [..., 2], the low half first."""
    pair = np.stack([word & 0xFFFF, (word >> 16) & 0xFFFF], axis=-1).astype(np.uint16)
    if kind == "f16":
        return pair.view(np.float16).astype(np.float64)
    return (pair.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def mma(kind: str, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Any]:
    """mma.m16n8k16 for every warp of arrays [.., 32, n]."""
    lane = np.arange(32)
    shape = np.moveaxis(a[0], -2, 0).shape[1:]
    left, right = np.zeros((16, 16, *shape)), np.zeros((16, 8, *shape))
    for i, word in enumerate(a):  # (row, row + 8) for k, then for k + 8
        values = halves(np.moveaxis(word, -2, 0), kind)
        for k1 in range(2):
            left[lane // 4 + 8 * (i % 2), lane % 4 * 2 + 8 * (i // 2) + k1] = values[..., k1]
    for i, word in enumerate(b):
        values = halves(np.moveaxis(word, -2, 0), kind)
        for k1 in range(2):
            right[lane % 4 * 2 + 8 * i + k1, lane // 4] = values[..., k1]
    product = np.einsum("rk...,kn...->rn...", left, right)
    sums = []
    for i, old in enumerate(c):
        part = product[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2]
        sums.append((old + np.moveaxis(part, 0, -2)).astype(np.float32))
    return sums


def inline_asm_elementwise(asm: str, constraints: str, args: Any, **_: Any) -> tuple[Tensor, ...]:
    assert asm.startswith("mma.sync.aligned.m16n8k16.row.col.f32.")
    values = [unwrap(v) for v in args]
    kind = asm.split(".")[7]
    return tuple(Tensor(v) for v in mma(kind, values[:4], values[4:6], values[6:]))


class Kernel:
    """A function of a kernel file; `order` shuffles the programs of a launch along K."""

    where: tuple[int, int] = (0, 0)
    backwards = False

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            given = [Pointer.of(v) if isinstance(v, torch.Tensor) else v for v in args]
            parts = range(grid[1])
            for along_k in reversed(parts) if Kernel.backwards else parts:
                for along_n in range(grid[0]):
                    Kernel.where = (along_n, along_k)
                    self.fn(*given, **constants)

        return launch


def _language() -> Any:
    gl: Any = ModuleType("triton.experimental.gluon.language")
    for dtype in BY_NAME.values():
        setattr(gl, dtype.name, dtype)
    gl.constexpr = lambda value: value
    gl.SliceLayout = gl.DistributedLinearLayout = lambda *_: None
    gl.pointer_type = lambda dtype: dtype
    gl.static_range = range
    gl.program_id = lambda axis: Tensor(np.int32(Kernel.where[axis]))
    gl.arange = lambda start, end, layout: Tensor(np.arange(start, end, dtype=np.int32))
    gl.zeros = lambda shape, dtype, layout: Tensor(np.zeros(shape, dtype.stored))
    gl.zeros_like = lambda v: Tensor(np.zeros_like(v.data))
    gl.full_like = lambda v, value: Tensor(np.full_like(v.data, value))
    gl.minimum = lambda a, b: Tensor(np.minimum(unwrap(a), unwrap(b)))
    gl.where = lambda at, a, b: Tensor(np.where(unwrap(at), unwrap(a), unwrap(b)))
    gl.expand_dims = lambda v, dim: Tensor(np.expand_dims(v.data, dim))
    gl.broadcast = lambda a, b: tuple(map(Tensor, np.broadcast_arrays(a.data, b.data)))
    gl.reshape = lambda v, shape: Tensor(v.data.reshape(shape))
    gl.permute = lambda v, dims: Tensor(v.data.transpose(dims))
    gl.join = lambda a, b: Tensor(np.stack([a.data, b.data], axis=-1))
    gl.split = lambda v: (Tensor(v.data[..., 0]), Tensor(v.data[..., 1]))
    gl.sum = lambda v, axis: Tensor(v.data.sum(axis=axis, dtype=np.float32))
    gl.convert_layout = lambda v, layout, assert_trivial=False: v
    gl.load, gl.store, gl.atomic_add = load, store, atomic_add
    gl.inline_asm_elementwise = inline_asm_elementwise
    return gl


@contextlib.contextmanager
def _instead(modules: dict[str, Any]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def kernel_on_numpy() -> ModuleType:
    """The module `hopper_decode`, whose launcher takes tensors of the CPU."""
    gluon: Any = ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.constexpr_function, gluon.language = Kernel, Kernel, _language()
    experimental: Any = ModuleType("triton.experimental")
    experimental.gluon = gluon
    compat: Any = ModuleType("tilewright.ops.gluon_compat")
    compat.block_barrier = lambda: None
    modules: dict[str, Any] = {
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gluon.language,
        "tilewright.ops.gluon_compat": compat,
    }
    importlib.import_module(HOME)
    with _instead({**modules, **dict.fromkeys(KERNELS)}):
        for name in KERNELS:
            module = module_of(name)
        return module


def module_of(name: str) -> ModuleType:
    """The module of that name, run again: it takes what sys.modules holds now."""
    home, _, file = name.rpartition(".")
    origin = sys.modules[home].__file__
    assert origin is not None
    spec = importlib.util.spec_from_file_location(name, Path(origin).with_name(f"{file}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
