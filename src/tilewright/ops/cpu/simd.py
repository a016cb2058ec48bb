"""Vectors of fixed width inside Numba functions.

Numba leaves vectorization to LLVM's loop passes, which neither keep a 4-bit unpack in registers nor
use the 8-bit dot instructions. These intrinsics put LLVM's own vector types into Numba code:
``f32x16``, ``i32x16``, ``i8x16`` are first-class values, and ``add(a, b)`` is one instruction of
LLVM IR. The IR is generic, so every CPU that LLVM knows runs it and gives the same numbers; a
16-lane value is one AVX-512 register, two AVX2 registers or four NEON registers. Only `dot4` and
`lookup16` have lowerings for particular instruction sets, each with a generic one beside it.

Here: what the CPU has, the types, and the IR that several intrinsics emit (``ir_...``). The
intrinsics lie beside it: `simd_memory` (loads, stores), `simd_arithmetic` (lane by lane),
`simd_convert` (between types), `simd_shuffle` (across lanes) and `simd_dot` (products of bytes).
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.extending import models, register_model

__all__ = [
    "CPU_FEATURES",
    "F32",
    "I16",
    "I32",
    "I64",
    "I8",
    "VecType",
    "X86",
    "f32x16",
    "has_avx512",
    "has_vnni",
    "i32x16",
    "i8x16",
    "ir_call",
    "ir_const",
    "ir_fma",
    "ir_load",
    "ir_shuffle",
    "ir_splat",
    "ir_store",
]


def _cpu_features() -> frozenset[str]:
    """The features Numba compiles for: the host's, or what NUMBA_CPU_FEATURES says."""
    from numba.core.registry import cpu_target

    flags = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(flag[1:] for flag in flags.split(",") if flag.startswith("+"))


CPU_FEATURES = _cpu_features()
X86 = platform.machine().lower() in ("x86_64", "amd64")


def has_avx512() -> bool:
    """Whether 512-bit registers with byte operations are there."""
    return X86 and {"avx512f", "avx512bw", "avx512vl"} <= CPU_FEATURES


def has_vnni() -> bool:
    """Whether the 512-bit 8-bit dot product (vpdpbusd) is there."""
    return has_avx512() and "avx512vnni" in CPU_FEATURES


class VecType(types.Type):
    """A vector of `lanes` numbers of an LLVM scalar type, such as f32x16."""

    def __init__(self, elem: str, lanes: int) -> None:
        self.elem = elem
        self.lanes = lanes
        super().__init__(name=f"{elem}x{lanes}")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(_SCALARS[self.elem], self.lanes)


I8, I16, I32, I64, F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
)
_SCALARS: dict[str, Any] = {"i8": I8, "i16": I16, "i32": I32, "f32": F32}

f32x16 = VecType("f32", 16)
i32x16 = VecType("i32", 16)
i8x16 = VecType("i8", 16)


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: VecType) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


def _pointer(builder: Any, address: Any, elem: Any) -> Any:
    return builder.inttoptr(address, elem.as_pointer())


def ir_load(builder: Any, address: Any, elem: Any, align: int = 1) -> Any:
    """IR of the `elem` at an address."""
    value = builder.load(_pointer(builder, address, elem), typ=elem)
    value.align = align
    return value


def ir_store(builder: Any, address: Any, value: Any) -> Any:
    """IR that stores a value at an address of any alignment."""
    instruction = builder.store(value, _pointer(builder, address, value.type))
    instruction.align = 1
    return instruction


def ir_const(vec: ir.VectorType, value: float) -> ir.Constant:
    """A constant vector of equal lanes."""
    if isinstance(vec.element, ir.FloatType):
        value = float(np.float32(value))  # LLVM refuses constants that float32 cannot hold
    return ir.Constant(vec, [value] * vec.count)


def ir_splat(builder: Any, scalar: Any, lanes: int) -> Any:
    """IR of a vector whose lanes all are `scalar`."""
    vec = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vec, ir.Undefined), scalar, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vec, ir.Undefined), mask)


def ir_shuffle(builder: Any, a: Any, b: Any, indices: list[int]) -> Any:
    """IR of the named lanes of a (from 0) and b (following those of a)."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(indices)), indices))


def ir_call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """IR of a call of LLVM's intrinsic `name`."""
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def ir_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """IR of a * b + c, rounded once where the CPU has the instruction."""
    if X86 and "fma" not in CPU_FEATURES:  # LLVM would call libm lane by lane
        return builder.fadd(builder.fmul(a, b), c)
    return ir_call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)
