"""Runs mmq's kernel for one row of x on the CPU: its own source, Gluon in numpy.

What `ops/w4a16/gluon_numpy.py` does for w4a16's decode kernel, whose stand-in for `gluon.language`
this is; with pointers that are cast. It checks indices, masks, fragments and sums; it knows nothing
of registers, layouts or races.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from by_path import module_at
from tilewright.layout.blocks import GpuBlocks
from tilewright.tiles.tile import Tile

BASE = Path(__file__).parents[1] / "w4a16" / "gluon_numpy.py"
HOME = "tilewright.ops.mmq"
KERNELS = (
    "tilewright.ops.mma_fragments",
    *(f"{HOME}.{name}" for name in ("hopper_memory", "decode_parts", "decode_sums", "decode_gemv")),
)


base: Any = module_at("gluon_numpy_of_decode", BASE)
Tensor = base.Tensor
base.BY_NAME["int16"] = base.Dtype("int16", np.int16)
for _name in ("xor", "truediv"):
    setattr(Tensor, f"__{_name}__", base._operator(f"__{_name}__"))


class PointerTo:
    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype


def _cast(self: Any, to: Any) -> Any:
    """A pointer to another type, or the address in bytes as an int64."""
    size = self.dtype.element_ty.stored.itemsize
    if not isinstance(to, PointerTo):
        return Tensor(np.int64(self.offset * size))
    at, rest = divmod(int(self.offset) * size, to.dtype.stored.itemsize)
    assert rest == 0, "a pointer that is not aligned to what it is cast to"
    return base.Pointer(self.memory, to.dtype.name, at)


base.Pointer.to = _cast


def _prmt(a: Any, b: Any, selector: Any) -> Any:
    octets = [(v.astype(np.int64) >> (8 * i)) & 255 for v in (a, b) for i in range(4)]
    out = np.zeros(a.shape, np.int64)
    for i in range(4):
        nibble = (selector >> (4 * i)) & 15
        assert (nibble < 8).all(), "a selector that spreads a sign"
        out |= np.choose(nibble, octets) << (8 * i)
    return out.astype(np.int32)


def inline_asm_elementwise(asm: str, constraints: str, args: Any, **rest: Any) -> Any:
    if asm.startswith(("griddepcontrol.", "{ prefetch.")):
        return None  # programs run one after the other, and memory has no caches
    if asm.startswith("mov.b64"):
        low, high = (base.unwrap(v).astype(np.int64) for v in args)
        return Tensor((low & 0xFFFFFFFF) | (high << 32))
    if "mma.sync" in asm:
        two = base.unwrap(args[4])
        args = [*args[:4], Tensor(two.astype(np.int32)), Tensor((two >> 32).astype(np.int32)),
                *args[5:]]  # fmt: skip
        wide = [Tensor(np.expand_dims(base.unwrap(v), -1)) for v in args]
        made = base.inline_asm_elementwise(asm[asm.index("mma.sync") :], constraints, wide)
        return tuple(Tensor(v.data[..., 0]) for v in made)
    a, b, c = (base.unwrap(v).astype(np.int32) for v in args)
    if asm == "lop3.b32 $0, $1, $2, $3, 0xEA;":
        return Tensor((a & b) | c)
    if asm == "lop3.b32 $0, $1, $2, $3, 0x6A;":
        return Tensor((a & b) ^ c)
    assert asm == "prmt.b32 $0, $1, $2, $3;"
    return Tensor(_prmt(a, b, c))


class Kernel(base.Kernel):
    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(
            *args: Any, num_warps: int, launch_pdl: bool, maxnreg: int | None, **constants: Any
        ) -> None:
            given = [base.Pointer.of(v) if isinstance(v, torch.Tensor) else v for v in args]
            for program in range(grid[0]):
                base.Kernel.where = (program, 0)
                self.fn(*given, **constants)

        return launch


def jit(fn: Any = None, **_: Any) -> Any:
    return Kernel(fn) if fn is not None else Kernel


def machine() -> Any:
    """The module `decode_gemv`, whose launcher takes tensors of the CPU."""
    gl: Any = base._language()
    gl.int16, gl.pointer_type = base.BY_NAME["int16"], PointerTo
    gl.inline_asm_elementwise = inline_asm_elementwise
    gl.full = lambda shape, value, dtype, layout: Tensor(np.full(shape, value, dtype.stored))
    gl.full_like = lambda v, value: Tensor(np.full(v.shape, value, np.int32))
    gl.where = lambda at, a, b: Tensor(np.where(base.unwrap(at), base.unwrap(a), base.unwrap(b)))
    gluon: Any = ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.constexpr_function, gluon.language = jit, Kernel, gl
    experimental: Any = ModuleType("triton.experimental")
    experimental.gluon = gluon
    host: Any = ModuleType("triton.experimental.gluon.nvidia.hopper")
    host.TensorDescriptor = None  # nothing is loaded by TMA here
    modules: dict[str, Any] = {
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gl,
        "triton.experimental.gluon.nvidia": ModuleType("triton.experimental.gluon.nvidia"),
        "triton.experimental.gluon.nvidia.hopper": host,
    }
    importlib.import_module(HOME)
    with base._instead({**modules, **dict.fromkeys(KERNELS)}):
        for name in KERNELS:
            found = base.module_of(name)
        return found


def product(
    kernel: Any, x: torch.Tensor, weight: GpuBlocks, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    """y [1, N]. Zeros and x lie in one storage, as they do in the memory of a GPU."""
    size = 4 * kernel.ZEROS
    memory = torch.zeros(size + 2 * weight.K, dtype=torch.uint8)
    memory[size:] = x.contiguous().view(torch.uint8).flatten()
    space = SimpleNamespace(partials=None, counters=memory[:size].view(torch.int32))
    y = torch.full((1, weight.N), float("nan"), dtype=x.dtype)
    with np.errstate(all="ignore"):
        kernel.launch_decode(memory[size:].view(x.dtype)[None], weight, bias, y, tile, space)
    return y
