"""Which code a call runs: the Python functions that handle arrays, and the compiled kernels.

Python functions are seen by a profile hook. A call of a compiled kernel (a Numba dispatcher, a
Triton kernel) makes no Python frame, so while a call is traced every such kernel that is a global
of a user's module is replaced by one that notes the call and passes it on.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np
import torch

__all__ = ["Trace", "shared_code", "traced"]

_LIBRARIES = ("numpy", "torch", "scipy", "numba", "llvmlite", "triton", "ml_dtypes")
# This package's own code that both sides may use.
_NEUTRAL = (
    "formats", "tiles", "errors.py", "device.py", "ops/contract.py", "ops/check.py", "ops/user_spec"
)  # fmt: skip
_NEUTRAL_NAMES = ("reference.py", "spec.py")
_KERNEL_HOMES = ("numba.", "triton.")
_PACKAGE = Path(__file__).parents[1]


@dataclass
class Trace:
    """What one call ran.

    Attributes:
        functions: name of each function of neither the standard library nor a neutral one, by
            where it is defined -> whether it took or gave an array.
        kernels: names of the compiled kernels.
        error: what the call raised, or None.
    """

    functions: dict[tuple[str, str, int], bool] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)
    error: Exception | None = None


def traced(call: Callable[[], Any]) -> Trace:
    """Make a call and say what code it ran. An exception of the call ends up in the trace."""
    trace = Trace()
    before = sys.getprofile()

    def profile(frame: FrameType, event: str, value: Any) -> None:
        if event not in ("call", "return") or not _is_users(frame.f_code.co_filename):
            return
        key = _key(frame.f_code)
        handled = trace.functions.get(key, False)
        if event == "call":
            handled = handled or any(map(_is_array, frame.f_locals.values()))
        else:
            handled = handled or _is_array(value)
        trace.functions[key] = handled

    with _watched(trace):
        sys.setprofile(profile)
        try:
            call()
        except Exception as error:
            trace.error = error
        finally:
            sys.setprofile(before)
    return trace


def shared_code(one: Trace, other: Trace) -> list[str]:
    """Names of what both calls ran: kernels, and functions that handled arrays in either."""
    functions = [
        f"{name}() at {Path(file).name}:{line}"
        for (file, name, line), handled in one.functions.items()
        if (file, name, line) in other.functions and (handled or other.functions[file, name, line])
    ]
    return sorted(f"the compiled kernel {name}" for name in one.kernels & other.kernels) + functions


def _key(code: CodeType) -> tuple[str, str, int]:
    # Not the code object: an interpreter of kernels makes a new one each time.
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, torch.Tensor))


@cache
def _is_users(file: str) -> bool:
    """Whether code of this file counts: a user's, or a kernel side of this package."""
    if file.startswith("<"):
        return False
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        inside = path.relative_to(_PACKAGE).as_posix()
        return not inside.startswith(_NEUTRAL) and path.name not in _NEUTRAL_NAMES
    paths = sysconfig.get_paths()
    for site in (Path(paths["purelib"]), Path(paths["platlib"])):
        if path.is_relative_to(site):
            return path.relative_to(site).parts[0].removesuffix(".py") not in _LIBRARIES
    return not any(path.is_relative_to(paths[name]) for name in ("stdlib", "platstdlib"))


class _Noted:
    """Stands in for a compiled kernel: notes that it is used, and is otherwise that kernel."""

    def __init__(self, kernel: Any, name: str, trace: Trace) -> None:
        self._kernel = kernel
        self._name = name
        self._trace = trace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._trace.kernels.add(self._name)
        return self._kernel(*args, **kwargs)

    def __getitem__(self, grid: Any) -> Any:
        self._trace.kernels.add(self._name)
        return self._kernel[grid]

    def __getattr__(self, name: str) -> Any:
        self._trace.kernels.add(self._name)  # .run, .py_func: other ways to the same code
        return getattr(self._kernel, name)


@contextmanager
def _watched(trace: Trace) -> Iterator[None]:
    replaced: list[tuple[ModuleType, str, Any]] = []
    try:
        for module in _users_modules():
            for name, value in list(vars(module).items()):
                if _is_kernel(value):
                    replaced.append((module, name, value))
                    setattr(module, name, _Noted(value, _kernel_name(value, module, name), trace))
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def _kernel_name(kernel: Any, module: ModuleType, name: str) -> str:
    """Its own name and file, whatever names other modules import it by."""
    home = sys.modules.get(getattr(kernel, "__module__", ""), module)
    own = getattr(kernel, "__name__", name)
    return f"{own} of {Path(home.__file__ or module.__name__).name}"


def _users_modules() -> Iterator[ModuleType]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is None or Path(file).is_relative_to(_PACKAGE):
            continue
        if _is_users(file):
            yield module


def _is_kernel(value: Any) -> bool:
    home = getattr(type(value), "__module__", None) or ""
    return home.startswith(_KERNEL_HOMES) and callable(value) and not isinstance(value, type)
