"""Loads Triton so that it interprets, for this process alone: import it before any kernel.

Triton decides when it is imported, and again for each kernel as it is defined; `interpreting` sets
the variable for the time of such an import. The environment stays as it was, so that processes
which tests start decide for themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

__all__ = ["interpreting"]

_VARIABLE = "TRITON_INTERPRET"


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels defined in this block are interpreted."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


with interpreting():
    import triton.language as tl

    if type(tl.cdiv).__name__ != "InterpretedFunction":
        raise RuntimeError(
            "triton was imported before tests/triton_interpreter.py, to compile; run pytest anew, "
            "with the Triton tests among the files it collects"
        )
    # The first launch would import it otherwise, when the variable is gone again.
    import_module("triton.experimental.gluon")
    import_module("tilewright.ops.w4a16.triton_gemm")
    import_module("tilewright.ops.w4a16.triton_skinny")
    import_module("tilewright.ops.conv1d.triton_conv")
    import_module("tilewright.ops.mmq.triton_gemm")
    import_module("tilewright.ops.mmq.triton_gemv")
    import_module("tilewright.ops.mmq.triton_int8")
    import_module("tilewright.ops.moe.triton_combine")
    import_module("tilewright.ops.moe.triton_gather")
    import_module("tilewright.ops.moe.triton_gemm")
    import_module("tilewright.ops.moe.triton_gemv")
    import_module("tilewright.ops.moe.triton_route")
    import_module("tilewright.ops.moe.triton_scatter")
    import_module("tilewright.ops.moe.triton_slots")
    import_module("tilewright.ops.ssd.triton_scan")
    import_module("tilewright.ops.ssd.triton_step")
