"""Compiles one small Gluon kernel a shim of ops/gluon_compat.py; prints what came of each, JSON.

Run by test_gluon_compat.py in a process of its own, since Triton either compiles or interprets.
Put another release of Triton first on PYTHONPATH to try the shims on that one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewright.ops.gluon_compat import (
    GluonASTSource,
    block_barrier,
    padded_layout,
    tma_load,
    tma_store,
    wmma_layout,
)


@gluon.jit
def multiply(y_ptr, ACC: gl.constexpr, KIND: gl.constexpr):
    a = gl.full((64, 64), 1.0, gl.float16, gl.DotOperandLayout(0, ACC, 16 if KIND == 3 else 8))
    b = gl.full((64, 64), 2.0, gl.float16, gl.DotOperandLayout(1, ACC, 16 if KIND == 3 else 8))
    acc = gl.zeros((64, 64), gl.float32, ACC)
    acc = gl.amd.rdna3.wmma(a, b, acc) if KIND == 3 else gl.amd.rdna4.wmma(a, b, acc)
    rows = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    columns = gl.arange(0, 64, gl.SliceLayout(0, ACC))
    gl.store(y_ptr + rows[:, None] * 64 + columns[None, :], acc)


@gluon.jit
def exchange(y_ptr, SHARED: gl.constexpr, IN: gl.constexpr, OUT: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.float32, [64, 64], SHARED)
    rows = gl.arange(0, 64, gl.SliceLayout(1, IN))
    columns = gl.arange(0, 64, gl.SliceLayout(0, IN))
    memory.store(gl.load(y_ptr + rows[:, None] * 64 + columns[None, :]))
    block_barrier()
    rows_out = gl.arange(0, 64, gl.SliceLayout(1, OUT))
    columns_out = gl.arange(0, 64, gl.SliceLayout(0, OUT))
    gl.store(y_ptr + rows_out[:, None] + columns_out[None, :] * 64, memory.load(OUT))


@gluon.jit
def copy(source, target, BYTES: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.float16, [64, 64], source.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, BYTES)
    tma_load(source, [0, 0], full, memory)
    mbarrier.wait(full, 0)
    fence_async_shared()
    tma_store(target, [0, 0], memory)
    tma.store_wait(0)


def compiled(fn: Any, types: dict[str, str], constants: dict[str, Any], target: GPUTarget) -> Any:
    names = fn.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(fn, signature, constexprs, {})
    return triton.compile(source, target=target, options={"num_warps": 4})


def wmma(arch: str, version: int) -> list[str]:
    constants = {"ACC": wmma_layout(version, [1, 4]), "KIND": version + 2}
    kernel = compiled(multiply, {"y_ptr": "*fp32"}, constants, GPUTarget("hip", arch, 32))
    return sorted(set(re.findall(r"v_wmma_\w+", kernel.asm["amdgcn"])))


def padded() -> list[str]:
    bases = [[0, 1 << i] for i in range(6)] + [[1 << i, 0] for i in range(6)]
    constants = {
        "SHARED": padded_layout([(64, 4)], bases, [64, 64]),
        "IN": gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]),
        "OUT": gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1]),
    }
    kernel = compiled(exchange, {"y_ptr": "*fp32"}, constants, GPUTarget("hip", "gfx1151", 32))
    return [f"{kernel.metadata.shared} bytes"]


def tma_copy() -> list[str]:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    descriptor = f"tensordesc<fp16[64, 64],{layout!r}>"
    types = {"source": descriptor, "target": descriptor}
    kernel = compiled(copy, types, {"BYTES": 8192}, GPUTarget("cuda", 90, 32))
    return sorted(set(re.findall(r"cp\.async\.bulk\.tensor\.2d\.\w+", kernel.asm["ptx"])))


JOBS: dict[str, Callable[[], list[str]]] = {
    "gfx1151": lambda: wmma("gfx1151", 1),
    "gfx1201": lambda: wmma("gfx1201", 2),
    "padded": padded,
    "tma": tma_copy,
}

if __name__ == "__main__":
    json.dump({name: job() for name, job in JOBS.items()}, sys.stdout)
    print(f"triton {triton.__version__}", file=sys.stderr)
