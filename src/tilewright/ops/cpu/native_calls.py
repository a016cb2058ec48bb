"""Calls of compiled functions by their addresses, inside Numba functions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from tilewright.ops.cpu.simd import I32, I64

__all__ = ["call_int", "call_kernel", "call_void"]


@intrinsic
def call_kernel(typingctx: Any, address: Any, args: Any, thread: Any, threads: Any) -> Any:
    """Call the compiled kernel ``void f(int64 args, int64 thread, int64 threads)`` at `address`."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def call_int(typingctx: Any, address: Any) -> Any:
    """Call ``int f(void)`` at `address`."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind = ir.FunctionType(I32, [])
        result = builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return builder.sext(result, I64)

    return types.int64(types.int64), codegen


@intrinsic
def call_void(typingctx: Any, address: Any) -> Any:
    """Call ``void f(void)`` at `address`."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
