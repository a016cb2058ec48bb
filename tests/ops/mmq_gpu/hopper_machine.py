"""Runs mmq's Hopper kernel on the CPU: programs, their partitions, barriers and TMA, in threads.

What `hopper_numpy` does for weights, this does for the whole kernel file. Shared memory is arrays,
an mbarrier counts arrivals and bytes as the PTX manual says, TMA copies at once and fills with
zeros past the end, wgmma is a product at once. It finds a wrong index, count, phase or share, and
partitions that wait for each other; it knows nothing of what is in flight.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from by_path import module_once

HOME = "tilewright.ops.mmq"
WAITS_S = 60.0


hopper_numpy: Any = module_once("mmq_hopper_numpy", Path(__file__).with_name("hopper_numpy.py"))
base, Tensor = hopper_numpy.base, hopper_numpy.Tensor
Tensor.__getitem__ = lambda self, at: Tensor(self.data[at], self.dtype.name)


def _fetched(self: Any, dtype: Any) -> Any:
    """An address that is only fetched: it must be of the memory too."""
    self.cells(None)
    return self


base.Pointer.to = _fetched
HERE = threading.local()  # program, programs, warps, gave_up


class Stuck(Exception):
    """A partition waited for nobody."""


def wait_until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + WAITS_S
    while not ready():
        if time.monotonic() > end or HERE.run.failed:
            HERE.run.failed = True
            raise Stuck
        time.sleep(2e-5)


class Barrier:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = self.pending = self.bytes = self.completed = 0

    def change(self, arrivals: int, received: int) -> None:
        with self.lock:
            self.pending -= arrivals
            self.bytes += received
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.completed += 1
                self.pending = self.count


class Shared:
    """Shared memory: an array, of which tiles are taken without a copy."""

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name = data, name

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, i: Any) -> Any:
        found = self.data[int(base.unwrap(i))]
        return found[0] if found.dtype == object else Shared(found, self.name)

    def slice(self, start: int, length: int, dim: int) -> Shared:
        at = [slice(None)] * self.data.ndim
        at[dim] = slice(start, start + length)
        return Shared(self.data[tuple(at)], self.name)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.transpose(order), self.name)

    def load(self, layout: Any) -> Any:
        return Tensor(self.data.copy(), self.name)

    def store(self, value: Any) -> None:
        assert value.data.shape == self.data.shape
        self.data[...] = value.data


def allocate(dtype: Any, shape: list[int], layout: Any) -> Shared:
    if layout == "barriers":
        data = np.empty(shape, dtype=object)
        for i in np.ndindex(*data.shape):
            data[i] = Barrier()
        return Shared(data, "int64")
    filled = np.zeros(shape, dtype.stored)
    filled.view(np.uint8)[...] = 0x7E  # no number that is expected
    return Shared(filled, dtype.name)


class Descriptor:
    """A view of global memory that TMA copies tiles of."""

    def __init__(self, tensor: torch.Tensor, shape: Any, strides: Any, block: Any, layout: Any):
        assert tensor.data_ptr() % 16 == 0
        assert strides[0] * tensor.element_size() % 16 == 0
        view = tensor.as_strided(tuple(shape), tuple(strides))
        self.name = str(tensor.dtype).removeprefix("torch.")
        self.dtype = base.BY_NAME[self.name]
        raw = view.view(torch.int16) if tensor.dtype == torch.bfloat16 else view
        self.array = raw.numpy().view(self.dtype.stored)
        self.block, self.layout = list(block), layout

    def tile(self, at: list[Any]) -> tuple[Any, tuple[slice, ...]]:
        first = [int(base.unwrap(a)) for a in at]
        ends = [min(f + b, s) for f, b, s in zip(first, self.block, self.array.shape, strict=True)]
        inside = tuple(slice(0, max(0, e - f)) for f, e in zip(first, ends, strict=True))
        ours = tuple(slice(f, max(f, e)) for f, e in zip(first, ends, strict=True))
        return self.array[ours], inside


def tma_load(desc: Descriptor, at: list[Any], bar: Barrier, out: Shared) -> None:
    assert out.shape == desc.block
    held, inside = desc.tile(at)
    out.data[...] = 0
    out.data[inside] = held
    bar.change(0, -out.data.nbytes)


def tma_store(desc: Descriptor, at: list[Any], values: Shared) -> None:
    held, inside = desc.tile(at)
    held[...] = values.data[inside]


def _as_float(v: Any) -> Any:
    return Tensor(v.data, v.dtype.name if hasattr(v, "dtype") else v.name).to(
        base.BY_NAME["float32"]
    ).data  # fmt: skip


def warpgroup_mma(w: Any, x: Shared, acc: Any, is_async: bool) -> Any:
    return Tensor((acc.data + _as_float(w) @ _as_float(x)).astype(np.float32))


def warp_specialize(parts: Any, warps: Any, registers: Any) -> None:
    mine = dict(HERE.__dict__)
    errors: list[BaseException] = []

    def one(fn: Any, args: Any) -> None:
        HERE.__dict__.update(mine)
        try:
            with np.errstate(all="ignore"):
                fn(*args)
        except BaseException as error:
            HERE.run.failed = True
            errors.append(error)

    threads = [threading.Thread(target=one, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda e: isinstance(e, Stuck)):
        raise error


class Kernel:
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            given = [base.Pointer.of(v) if isinstance(v, torch.Tensor) else v for v in args]
            run = SimpleNamespace(failed=False)
            errors: list[BaseException] = []

            def program(i: int) -> None:
                HERE.__dict__.update(program=i, programs=grid[0], warps=num_warps, run=run)
                try:
                    self.fn(*given, **constants)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=program, args=(i,)) for i in range(grid[0])]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for error in sorted(errors, key=lambda e: isinstance(e, Stuck)):
                raise error

        return launch


def jit(fn: Any = None, **_: Any) -> Any:
    return Kernel(fn) if fn is not None else Kernel


def _language() -> Any:
    gl = hopper_numpy._language()
    lock = threading.Lock()

    def atomic_add(pointer: Any, value: int, sem: str) -> Any:
        if value == 0:
            wait_until(lambda: True)
            time.sleep(2e-5)
        with lock:
            return base.atomic_add(pointer, value, sem)

    def collecting(pointer: Any, mask: Any = None, other: Any = 0, **_: Any) -> Any:
        return base.load(pointer, mask, other)

    gl.atomic_add, gl.load = atomic_add, collecting
    gl.program_id = lambda axis: Tensor(np.int32(HERE.program))
    gl.num_programs = lambda axis: HERE.programs
    gl.num_warps = lambda: HERE.warps
    gl.to_tensor = lambda v: Tensor(np.int32(v))
    gl.allocate_shared_memory = allocate
    gl.warp_specialize = warp_specialize
    nothing = lambda *_, **__: None  # noqa: E731
    gl.NVMMADistributedLayout = gl.SwizzledSharedLayout = gl.BlockedLayout = nothing
    gl.NVMMASharedLayout = nothing
    gl.inline_asm_elementwise = lambda asm, constraints, args, **rest: (
        None if "prefetch" in asm
        else hopper_numpy.inline_asm_elementwise(asm, constraints, args, **rest)
    )  # fmt: skip
    plain = gl.where
    gl.where = lambda at, a, b: plain(at, a, b) if isinstance(a, Tensor | float) else Tensor(
        np.where(base.unwrap(at), base.unwrap(a), base.unwrap(b)).astype(np.int32)
    )  # fmt: skip
    return gl


def machine() -> Any:
    """The module `hopper_gemm`, whose launcher takes tensors of the CPU."""
    gluon: Any = ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.constexpr_function, gluon.language = jit, Kernel, _language()
    hopper: Any = ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.fence_async_shared = lambda: None
    hopper.warpgroup_mma = warpgroup_mma
    hopper.warpgroup_mma_wait = lambda n, accs: accs[0]
    hopper.tma = SimpleNamespace(store_wait=lambda n: None)

    def init(bar: Barrier, count: int) -> None:
        bar.count = bar.pending = count

    hopper.mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=init,
        wait=lambda bar, phase: wait_until(lambda: bar.completed & 1 != int(base.unwrap(phase))),
        expect=lambda bar, size: bar.change(1, size),
        arrive=lambda bar, count: bar.change(count, 0),
    )  # fmt: skip
    host: Any = ModuleType("triton.experimental.gluon.nvidia.hopper")
    host.TensorDescriptor = Descriptor
    compat: Any = ModuleType("tilewright.ops.gluon_compat")
    compat.block_barrier, compat.tma_load, compat.tma_store = lambda: None, tma_load, tma_store
    experimental: Any = ModuleType("triton.experimental")
    experimental.gluon = gluon
    nvidia: Any = ModuleType("triton.experimental.gluon.language.nvidia")
    modules: dict[str, Any] = {
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gluon.language,
        "triton.experimental.gluon.language.nvidia": nvidia,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia": ModuleType("triton.experimental.gluon.nvidia"),
        "triton.experimental.gluon.nvidia.hopper": host,
        "tilewright.ops.gluon_compat": compat,
    }
    names = ("hopper_math", "hopper_memory", "hopper_parts", "hopper_scales", "hopper_gemm")
    own = [f"{HOME}.{name}" for name in names]
    own = ["tilewright.ops.w4a16.hopper_parts", *own]
    importlib.import_module("tilewright.ops.w4a16")
    with base._instead({**modules, **dict.fromkeys(own)}):
        for name in own:
            spec = importlib.util.find_spec(name.rpartition(".")[0])
            assert spec is not None
            assert spec.origin is not None
            path = Path(spec.origin).with_name(f"{name.rpartition('.')[2]}.py")
            found = hopper_numpy.module_at(name, path)
        found.range = lambda *ends: (
            Tensor(np.int32(i)) for i in range(*(int(base.unwrap(end)) for end in ends))
        )
        return found
