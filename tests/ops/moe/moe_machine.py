"""Runs moe's Hopper kernel on the CPU, on the machine that `mmq_gpu/hopper_machine.py` is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from by_path import module_once

MODULES = (
    "tilewright.ops.mmq.hopper_math",
    "tilewright.ops.mmq.hopper_memory",
    "tilewright.ops.mmq.hopper_scales",
    "tilewright.ops.moe.hopper_parts",
    "tilewright.ops.moe.hopper_gemm",
)


host: Any = module_once(
    "mmq_hopper_machine", Path(__file__).parents[1] / "mmq_gpu" / "hopper_machine.py"
)
base, Tensor = host.base, host.Tensor


def _in_known_words(asm: str) -> str:
    """Shifts to the left and constants by instructions that `hopper_numpy` reads: bits which a
    rotation brings back on the other side are masked out by what follows."""
    asm = re.sub(
        r"shl\.b32 (\w+), (\S+), (\d+);",
        lambda m: f"shf.r.wrap.b32 {m[1]}, {m[2]}, {m[2]}, {32 - int(m[3])};", asm,
    )  # fmt: skip
    return re.sub(r"mov\.b32 (\w+), (0x\w+);", r"and.b32 \1, \2, 0xffffffff;", asm)


def _float(v: Any) -> Any:
    return np.asarray(v, dtype=np.float32)


def _half_bits(v: Any) -> Any:
    return _float(v).astype(np.float16).view(np.uint16).astype(np.uint32)


_NUMBERS: dict[str, Any] = {
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "lop3.b32": lambda a, b, c, _: (a & b) | c,
    "cvt.rn.f32.u32": _float,
    "mul.rn.f32": lambda a, b: _float(a) * _float(b),
    "max.f32": lambda a, b: np.fmax(_float(a), _float(b)),
    "min.f32": lambda a, b: np.fmin(_float(a), _float(b)),
    "add.rn.f32": lambda a, b: _float(a) + _float(b),
    "sub.rn.f32": lambda a, b: _float(a) - _float(b),
    "fma.rn.f32": lambda a, b, c: _float(np.float64(a) * np.float64(b) + np.float64(c)),
    "cvt.rn.f16x2.f32": lambda a, b: (_half_bits(a) << 16 | _half_bits(b)).view(np.int32),
}


def _numbers(asm: str, args: Any) -> Any:
    """A block of PTX of a scale's numbers: bytes and float32 in, two words out."""
    held = {f"${2 + i}": v for i, v in enumerate(np.broadcast_arrays(*map(base.unwrap, args)))}

    def value(name: str) -> Any:
        if name.startswith("0f"):
            return np.uint32(int(name[2:], 16)).view(np.float32)
        return held[name] if name in held else np.int32(int(name, 0))

    for line in asm.strip().strip("{}").split(";"):
        opcode, *names = re.split(r"[,\s]+", line.strip())
        if not names or opcode == ".reg":
            continue
        assert opcode != "lop3.b32" or names[-1] == "0xEA"
        held[names[0]] = _NUMBERS[opcode](*map(value, names[1:]))
    return tuple(Tensor(np.ascontiguousarray(held[f"${i}"])) for i in range(2))


class Kernel(host.Kernel):  # type: ignore[misc,name-defined]
    def __getitem__(self, grid: tuple[int]) -> Any:
        launch = super().__getitem__(grid)
        return lambda *args, maxnreg=None, **constants: launch(*args, **constants)


def _jit(fn: Any = None, **_: Any) -> Any:
    return Kernel(fn) if fn is not None else Kernel


def _language() -> Any:
    gl = host._language()
    words = gl.inline_asm_elementwise

    def inline_asm_elementwise(asm: str, constraints: str, args: Any, **rest: Any) -> Any:
        if constraints.startswith("=r,=r"):
            return _numbers(asm, args)
        return words(_in_known_words(asm), constraints, args, **rest)

    gl.inline_asm_elementwise = inline_asm_elementwise
    gl.permute = lambda v, order: Tensor(v.data.transpose(order), v.dtype.name)
    gl.split = lambda v: tuple(Tensor(v.data[..., i], v.dtype.name) for i in range(2))
    return gl


def kernel() -> Any:
    """The module `hopper_gemm`, whose launcher takes tensors of the CPU."""
    gluon: Any = ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.constexpr_function, gluon.language = _jit, Kernel, _language()
    hopper: Any = ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.fence_async_shared = lambda: None
    hopper.warpgroup_mma = host.warpgroup_mma
    hopper.warpgroup_mma_wait = lambda n, accs: accs[0]

    def init(bar: Any, count: int) -> None:
        bar.count = bar.pending = count

    hopper.mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=init,
        wait=lambda bar, phase: host.wait_until(
            lambda: bar.completed & 1 != int(base.unwrap(phase))
        ),
        expect=lambda bar, size: bar.change(1, size),
        arrive=lambda bar, count: bar.change(count, 0),
    )  # fmt: skip
    descriptors: Any = ModuleType("triton.experimental.gluon.nvidia.hopper")
    descriptors.TensorDescriptor = host.Descriptor
    compat: Any = ModuleType("tilewright.ops.gluon_compat")
    compat.tma_load = host.tma_load
    experimental: Any = ModuleType("triton.experimental")
    experimental.gluon = gluon
    modules: dict[str, Any] = {
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gluon.language,
        "triton.experimental.gluon.language.nvidia": ModuleType("nvidia"),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia": ModuleType("nvidia"),
        "triton.experimental.gluon.nvidia.hopper": descriptors,
        "tilewright.ops.gluon_compat": compat,
    }
    with base._instead({**modules, **dict.fromkeys(MODULES)}):
        for name in MODULES:
            spec = importlib.util.find_spec(name.rpartition(".")[0])
            assert spec is not None
            assert spec.origin is not None
            path = Path(spec.origin).with_name(f"{name.rpartition('.')[2]}.py")
            found: Any = host.hopper_numpy.module_at(name, path)
        found.range = lambda *ends: (
            Tensor(np.int32(i)) for i in range(*(int(base.unwrap(end)) for end in ends))
        )
        return found


def routed(ids: torch.Tensor, experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted slots and the plan of ids [slots], as `triton_gather` draws them."""
    known = torch.where((ids >= 0) & (ids < experts), ids, experts)
    slots = torch.argsort(known, stable=True)
    tiles: list[int] = []
    for e in range(experts + 1):
        rows = (known[slots] == e).nonzero()[:, 0].tolist()
        for at in range(0, len(rows), block_m):
            tiles += [e, rows[at], min(rows[at] + block_m, rows[-1] + 1)]
    return slots.int(), torch.tensor([len(tiles) // 3, *tiles], dtype=torch.int32)


def reordered(x: torch.Tensor) -> torch.Tensor:
    """Rows as `triton_gather` writes them, from the table that `hopper_parts` documents."""
    width = -(-x.shape[1] // 128) * 128
    s, kh, lk, i = np.indices((8, 2, 4, 2)).reshape(4, -1)
    columns = torch.from_numpy(32 * lk + 4 * s + 2 * kh + i)
    every = torch.cat([128 * b + columns for b in range(width // 128)])
    return torch.nn.functional.pad(x, (0, width - x.shape[1]))[:, every].contiguous()
