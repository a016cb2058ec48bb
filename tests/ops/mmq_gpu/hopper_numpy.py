"""Makes weights with the Hopper kernel's own source on the CPU: Gluon in numpy, its PTX too.

Tensors are numpy arrays without layouts, as in the tests of w4a16's decode kernel, whose stand-in
for `gluon.language` this is; here it also has shared memory, which is an array that is loaded, and
a reader of the few PTX instructions that `hopper_parts` is made of. It checks indices, turns and
arithmetic; it knows nothing of registers, layouts or races.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from by_path import module_at
from tilewright.layout.blocks import GpuBlocks

BASE = Path(__file__).parents[1] / "w4a16" / "gluon_numpy.py"
KERNELS = ("hopper_math", "hopper_memory", "hopper_parts", "hopper_scales")
HOME = "tilewright.ops.mmq"


base: Any = module_at("gluon_numpy_of_mmq", BASE)
Tensor = base.Tensor


def _more_operators() -> None:
    def of(name: str, reverse: bool = False) -> Any:
        def apply(self: Any, other: Any) -> Any:
            other = base.unwrap(other)
            if isinstance(other, int | float):
                other = self.data.dtype.type(other)
            a, b = (other, self.data) if reverse else (self.data, other)
            with np.errstate(all="ignore"):
                return Tensor(getattr(np, name)(a, b))

        return apply

    Tensor.__xor__ = of("bitwise_xor")
    Tensor.__truediv__ = of("divide")
    Tensor.__rtruediv__ = of("divide", reverse=True)
    Tensor.__gt__, Tensor.__ge__ = of("greater"), of("greater_equal")
    Tensor.__rfloordiv__ = of("floor_divide", reverse=True)
    Tensor.__rlshift__ = of("left_shift", reverse=True)
    Tensor.__rsub__ = of("subtract", reverse=True)
    Tensor.__neg__ = lambda self: Tensor(-self.data)


_more_operators()


class Buffer(Tensor):  # type: ignore[misc,valid-type]
    """Shared memory."""

    def load(self, layout: Any) -> Any:
        return Tensor(self.data)


def _half(v: Any) -> Any:
    return np.ascontiguousarray(v, dtype=np.uint32).view(np.float16).reshape(*v.shape, 2)


def _pair(v: Any) -> Any:
    with np.errstate(over="ignore"):
        halves = np.ascontiguousarray(v.astype(np.float16))
    return halves.view(np.uint32).reshape(v.shape[:-1])


def _exact(f: Any, *operands: Any) -> Any:
    """float16 pairs, from float64 arithmetic."""
    return _pair(f(*(_half(v).astype(np.float64) for v in operands)))


def _prmt(a: Any, b: Any, selector: Any) -> Any:
    octets = [(v >> (8 * i)) & 255 for v in (a, b) for i in range(4)]
    out = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> (4 * i)) & 15
        assert (nibble < 8).all(), "a selector that spreads a sign"
        picked = np.choose(nibble, [np.broadcast_to(o, nibble.shape) for o in octets])
        out = out | (picked.astype(np.uint32) << (8 * i))
    return out


def _bits(v: Any) -> Any:
    return np.ascontiguousarray(v, dtype=np.float32).view(np.uint32)


def _float(v: Any) -> Any:
    return np.ascontiguousarray(v, dtype=np.uint32).view(np.float32)


def _lop3(a: Any, b: Any, c: Any, table: int) -> Any:
    if table not in (0xEA, 0x6A):
        raise NotImplementedError(f"lop3 {table:#x}")
    return (a & b) | c if table == 0xEA else (a & b) ^ c


def _bfloat16_pair(high: Any, low: Any) -> Any:
    high, low = base.rounded(_float(high)), base.rounded(_float(low))
    return (high.astype(np.uint32) << 16) | low


def run_ptx(asm: str, args: Sequence[Any], outputs: int) -> list[Any]:
    """The 16-bit outputs of a block of PTX whose inputs are 32-bit words."""
    held: dict[str, Any] = {f"${outputs + i}": v for i, v in enumerate(args)}

    def value(name: str) -> Any:
        return held[name] if name in held else np.uint32(int(name, 0))

    for line in asm.strip().strip("{}").split(";"):
        words = line.split(None, 1)
        if not words or words[0] == ".reg":
            continue
        opcode = words[0]
        names = [n for n in re.split(r"[,\s{}]+", words[1]) if n]
        if opcode == "mov.b32":
            if words[1].lstrip().startswith("{"):
                whole = held[names[2]]
                held[names[0]], held[names[1]] = whole & 0xFFFF, whole >> 16
            else:
                held[names[0]] = held[names[1]] | (held[names[2]] << 16)
            continue
        target, *rest = names
        v = [value(n) for n in rest]
        shape = np.broadcast_shapes(*(np.shape(a) for a in v))
        v = [np.broadcast_to(np.asarray(a, dtype=np.uint32), shape) for a in v]
        if opcode == "shf.r.wrap.b32":
            assert rest[0] == rest[1]
            n = v[2] & 31
            held[target] = (v[0] >> n) | (v[0] << ((32 - n) & 31))
        elif opcode == "lop3.b32":
            held[target] = _lop3(v[0], v[1], v[2], int(rest[3], 0))
        elif opcode == "prmt.b32":
            held[target] = _prmt(*v)
        elif opcode == "and.b32":
            held[target] = v[0] & v[1]
        elif opcode == "shr.u32":
            held[target] = v[0] >> v[1]
        elif opcode == "add.rn.f16x2":
            held[target] = _exact(lambda a, b: a + b, *v)
        elif opcode == "mul.rn.f16x2":
            held[target] = _exact(lambda a, b: a * b, *v)
        elif opcode == "fma.rn.f16x2":
            held[target] = _exact(lambda a, b, c: a * b + c, *v)
        elif opcode == "cvt.f32.f16":
            half = np.ascontiguousarray(v[0].astype(np.uint16)).view(np.float16)
            held[target] = _bits(half.astype(np.float32))
        elif opcode == "mul.rn.f32":
            held[target] = _bits(_float(v[0]) * _float(v[1]))
        elif opcode == "fma.rn.f32":
            wide = [_float(a).astype(np.float64) for a in v]
            held[target] = _bits(wide[0] * wide[1] + wide[2])
        elif opcode == "cvt.rn.f16x2.f32":
            held[target] = _pair(np.stack([_float(v[1]), _float(v[0])], axis=-1))
        elif opcode == "cvt.rn.bf16x2.f32":
            held[target] = _bfloat16_pair(v[0], v[1])
        else:
            raise NotImplementedError(line)
    return [held[f"${i}"] for i in range(outputs)]


def inline_asm_elementwise(asm: str, constraints: str, args: Any, dtype: Any, **_: Any) -> Any:
    assert constraints == "=h,=h" + ",r" * len(args)
    words = [base.unwrap(a).astype(np.int32).view(np.uint32) for a in args]
    name = dtype[0].name
    return tuple(
        Tensor(np.ascontiguousarray(v.astype(np.uint16)).view(base.BY_NAME[name].stored), name)
        for v in run_ptx(asm, words, 2)
    )


def _alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Both as numbers of one dtype, that of the one which is a tensor."""
    a, b = base.unwrap(a), base.unwrap(b)
    dtype = (a if hasattr(a, "dtype") else np.asarray(b)).dtype
    return dtype.type(a) if not np.ndim(a) else a, dtype.type(b) if not np.ndim(b) else b


def _language() -> Any:
    gl = base._language()
    gl.inline_asm_elementwise = inline_asm_elementwise
    gl.load = lambda pointer, mask=None, other=0: base.load(pointer, mask, other)
    gl.maximum = lambda a, b: Tensor(np.maximum(*_alike(a, b)))
    gl.minimum = lambda a, b: Tensor(np.minimum(*_alike(a, b)))
    gl.DotOperandLayout = lambda *_: None
    gl.join = lambda a, b: Tensor(np.stack([a.data, b.data], axis=-1), a.dtype.name)
    gl.reshape = lambda v, shape: Tensor(v.data.reshape(shape), v.dtype.name)
    gl.where = lambda at, a, b: Tensor(
        np.where(base.unwrap(at), *(np.float32(v) if isinstance(v, float) else base.unwrap(v)
                                    for v in (a, b)))
    )  # fmt: skip
    gl.int16 = base.Dtype("int16", np.int16)
    base.BY_NAME.setdefault("int16", gl.int16)
    return gl


def kernels_on_numpy() -> SimpleNamespace:
    """The modules of `KERNELS` by name."""
    gluon: Any = ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.constexpr_function, gluon.language = base.Kernel, base.Kernel, _language()
    experimental: Any = ModuleType("triton.experimental")
    experimental.gluon = gluon
    host: Any = ModuleType("triton.experimental.gluon.nvidia.hopper")
    host.TensorDescriptor = None  # nothing is loaded by TMA here
    modules: dict[str, Any] = {
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gluon.language,
        "triton.experimental.gluon.nvidia": ModuleType("triton.experimental.gluon.nvidia"),
        "triton.experimental.gluon.nvidia.hopper": host,
    }
    real = importlib.util.find_spec(HOME)
    assert real is not None
    assert real.origin is not None
    with base._instead({**modules, **{f"{HOME}.{name}": None for name in KERNELS}}):
        return SimpleNamespace(
            **{
                name: module_at(f"{HOME}.{name}", Path(real.origin).with_name(f"{name}.py"))
                for name in KERNELS
            }
        )


@np.errstate(all="ignore")  # what `where` does not choose may be anything
def weights(kernels: Any, weight: GpuBlocks, dtype: torch.dtype) -> np.ndarray:
    """W [N, K] as the kernel makes it, step after step, in float64; N is a multiple of 16."""
    parts, scales = kernels.hopper_parts, kernels.hopper_scales
    form, n = weight.form, weight.N
    low, high = form.low.bits, form.high_bits
    name = str(dtype).removeprefix("torch.")
    math, minimums = scales.math_of(form, dtype), weight.minimums is not None
    subs, tensors = weight.K // form.sub, (weight.scales, weight.minimums, weight.sub_scales)
    pointers = [
        base.Pointer.of(weight.scales if t is None else t)
        + Tensor(np.arange(n) * (weight.scales if t is None else t).stride(0))
        for t in tensors
    ]
    strides = [0 if t is None else t.stride(1) for t in tensors]
    turns = parts.turns_of(low, 0, None), parts.turns_of(high, low, None) if high else (None, None)
    offset = form.offset if form.codes == "offset" else 128
    minus = Tensor(np.int32(0x10001 * (0xE400 | offset) - (1 << 32)))
    steps = []
    for k in range(-(-weight.K // 256)):
        fields = scales.load_fields(
            *pointers, k, subs, *strides, form.scaling, minimums, form.sub_bytes
        )
        for block in range(4):
            words = [
                parts.load_words(
                    _columns(plane, (4 * k + block) * 2 * bits, 2 * bits), bits, None, 4
                )
                for plane, bits in ((weight.low, low), (weight.high, high))
                if plane is not None
            ]
            for e in range(4):
                numbers = scales.numbers_of(
                    fields, (block * 64 + e * 16) // form.sub, form.scaling, minimums,
                    form.sub_offset, math, scales.most_of(form),
                )  # fmt: skip
                w = parts.dequantize(
                    words[0][e], words[-1][e], turns[0][e % 2], turns[1][e % 2], minus, numbers,
                    low, high, form.codes, math, None, None, base.BY_NAME[name],
                )  # fmt: skip
                steps.append(w.to(base.BY_NAME["float32"]).data.astype(np.float64))
    return np.concatenate(steps, axis=1)[:, : weight.K]


def _columns(plane: torch.Tensor, first: int, count: int) -> Buffer:
    """Words of 64 columns, zeros past the last one."""
    found = plane[:, first : first + count].numpy()
    return Buffer(np.pad(found, ((0, 0), (0, count - found.shape[1]))))
