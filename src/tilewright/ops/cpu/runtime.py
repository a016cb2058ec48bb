"""Compiling CPU kernels once, keeping them on disk, and running them on torch's own threads.

A kernel is a Numba function ``void kernel(int64 args, int64 thread, int64 threads)``: `args` is the
address of an int64 array that holds its addresses and sizes, and each of the `threads` threads
works on its own share. Nothing else is passed, so a launch costs about a microsecond.

Threads. torch brings an OpenMP runtime whose threads spin for a while after each of torch's own
operators. A second pool (Numba's) would fight them for the cores, so kernels run in a parallel
region of the runtime that torch already started (`GOMP_parallel`, which LLVM's libomp exports
too). Where none is found, kernels run on the calling thread.

Programs. A `Program` is a list of launches that one parallel region runs in order, with a barrier
behind each: a decode step of a model is some two hundred launches and enters one region.

Cache. Compiled objects lie in the user's cache folder under a key over the source of every CPU
kernel file, the CPU's name and features, and the versions of Numba and llvmlite. (Numba's own
cache looks at one source file only, and would serve a stale kernel when a helper in another file
changed.)
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import numpy as np
from numba.core import types
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from tilewright.ops.cpu.native_calls import call_int, call_kernel, call_void
from tilewright.ops.cpu.simd_memory import load_i64

__all__ = ["Kernel", "Program", "compile_kernel", "default_threads", "kernel_hash", "specialize"]

_SIGNATURE = ((types.int64, types.int64, types.int64), types.void)
_ENTRY_SIGNATURE = ((types.int64,), types.void)


@functools.cache
def kernel_hash() -> str:
    """SHA-256 over the sources of the CPU kernels: changes when any of them does."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _cache_folder() -> Path | None:
    import llvmlite
    import numba
    from platformdirs import user_cache_dir

    root = os.environ.get("TILEWRIGHT_CACHE_DIR") or user_cache_dir("tilewright")
    target = cpu_target.target_context.codegen().magic_tuple()
    parts = [kernel_hash(), numba.__version__, llvmlite.__version__, *map(str, target)]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    folder = Path(root) / "kernels" / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def specialize(template: Callable[..., None], name: str, **constants: Any) -> Callable[..., None]:
    """A copy of a kernel function with some of its global names bound to other values.

    Numba compiles globals as constants, so a template that calls `UNPACK` and loops over `SUB`
    becomes one kernel per weight type without closures.
    """
    function = cast(FunctionType, template)
    scope = {**function.__globals__, **constants}
    copy = FunctionType(function.__code__, scope, name)
    copy.__qualname__ = name
    copy.__module__ = template.__module__
    return copy


class Kernel:
    """A compiled kernel: `name` and the `address` of its machine code."""

    def __init__(self, name: str, address: int, keep: Any) -> None:
        self.name = name
        self.address = address
        self._keep = keep

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"


def _save(path: Path, symbol: str, library: Any) -> None:
    name, kind, blob = library.serialize_using_object_code()
    if kind != "object":
        return
    code, bitcode = blob
    header = json.dumps(
        {
            "symbol": symbol,
            "name": name,
            "code": len(code),
            "bitcode": len(bitcode),
            "sha256": hashlib.sha256(code + bitcode).hexdigest(),
        }
    ).encode()
    payload = len(header).to_bytes(8, "little") + header + code + bitcode
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(payload)
    os.replace(temporary, path)


def _load(path: Path) -> tuple[str, Any] | None:
    """The cached library, or None when there is none or it is damaged."""
    try:
        payload = path.read_bytes()
        size = int.from_bytes(payload[:8], "little")
        header = json.loads(payload[8 : 8 + size])
        code = payload[8 + size : 8 + size + header["code"]]
        bitcode = payload[8 + size + header["code"] :]
    except (OSError, ValueError, KeyError):
        return None
    if hashlib.sha256(code + bitcode).hexdigest() != header["sha256"]:
        return None
    rtsys.initialize(cpu_target.target_context)  # symbols that every Numba object refers to
    codegen = cpu_target.target_context.codegen()
    library = codegen.unserialize_library((header["name"], "object", (code, bitcode)))
    return header["symbol"], library


def compile_kernel(function: Callable[..., None], name: str, signature: Any = _SIGNATURE) -> Kernel:
    """Compile `function`, or take it from the disk cache.

    Args:
        function: a kernel as the module docstring describes it.
        name: unique among the kernels; the cache file is named after it.
        signature: Numba argument and return types.
    """
    folder = _cache_folder()
    path = folder / f"{name}.kernel" if folder else None
    if path is not None and (found := _load(path)) is not None:
        symbol, library = found
        return Kernel(name, library.get_pointer_to_function(symbol), library)
    compiled = CFunc(function, signature, locals={}, options={"error_model": "numpy"})
    compiled.compile()
    if path is not None:
        try:
            _save(path, compiled.native_name, compiled._library)
        except OSError:
            pass  # a full or read-only disk costs the next start its compile time, nothing else
    return Kernel(name, compiled.address, compiled)


def _entry(data: int) -> None:
    """Thread body of a parallel region: run every launch of a program in order."""
    get_thread = load_i64(data)
    get_threads = load_i64(data + 8)
    barrier = load_i64(data + 16)
    count = load_i64(data + 24)
    thread = 0
    threads = 1
    if get_thread != 0:
        thread = call_int(get_thread)
        threads = call_int(get_threads)
    for i in range(count):
        at = data + 32 + 16 * i
        call_kernel(load_i64(at), load_i64(at + 8), thread, threads)
        if get_thread != 0:
            call_void(barrier)


class _OpenMP:
    """The OpenMP runtime that torch loaded, or none."""

    def __init__(self) -> None:
        self.get_thread = self.get_threads = self.barrier = 0
        self.parallel: Any = None
        library = self._find()
        if library is None:
            return
        try:
            parallel = library.GOMP_parallel
            symbols = [
                library.omp_get_thread_num,
                library.omp_get_num_threads,
                library.GOMP_barrier,
            ]
        except AttributeError:
            return
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        self.parallel = parallel
        self.get_thread, self.get_threads, self.barrier = (
            ctypes.cast(s, ctypes.c_void_p).value or 0 for s in symbols
        )

    @staticmethod
    def _find() -> ctypes.CDLL | None:
        """A handle whose symbols resolve to torch's own runtime.

        A process may hold several OpenMP runtimes (other packages bring theirs); looking symbols
        up through libtorch_cpu finds the one that torch links.
        """
        import torch

        folder = Path(torch.__file__).parent / "lib"
        for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
            if (folder / name).exists():
                return ctypes.CDLL(str(folder / name))
        return None


@functools.cache
def _runtime() -> tuple[_OpenMP, int, Any]:
    entry = compile_kernel(_entry, "entry", _ENTRY_SIGNATURE)
    direct = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry.address)
    return _OpenMP(), entry.address, direct


def default_threads() -> int:
    """Threads a launch uses when none are named: torch's setting for its own operators."""
    import torch

    return torch.get_num_threads()


class Program:
    """Kernel launches that run in order inside one parallel region.

    Args:
        launches: pairs of a kernel and its int64 argument array. The arrays are kept alive, and
            may be changed between runs; what their addresses point at is the caller's to keep.
    """

    def __init__(self, launches: Sequence[tuple[Kernel, np.ndarray]]) -> None:
        openmp, self._entry, self._direct = _runtime()
        self._openmp = openmp
        self._launches = list(launches)
        body = []
        for kernel, args in self._launches:
            if args.dtype != np.int64 or not args.flags.c_contiguous:
                raise TypeError(f"args of {kernel.name} must be contiguous int64")
            body += [kernel.address, args.ctypes.data]
        handles = [openmp.get_thread, openmp.get_threads, openmp.barrier]
        count = len(self._launches)
        self._parallel = np.array([*handles, count, *body], dtype=np.int64)
        self._serial = np.array([0, 0, 0, count, *body], dtype=np.int64)
        self._parallel_data = self._parallel.ctypes.data
        self._serial_data = self._serial.ctypes.data

    def __len__(self) -> int:
        return len(self._launches)

    def run(self, threads: int) -> None:
        """Run every launch on `threads` threads and return when the last has finished."""
        if threads > 1 and self._openmp.parallel is not None:
            self._openmp.parallel(self._entry, self._parallel_data, threads, 0)
        else:
            self._direct(self._serial_data)


def launch(kernel: Kernel, args: np.ndarray, threads: int) -> None:
    """Run one kernel on `threads` threads."""
    Program([(kernel, args)]).run(threads)
