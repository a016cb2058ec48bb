"""What this CPU can do at most, measured: float32 arithmetic in registers, reading from memory.

Arithmetic: every thread runs independent chains of fused multiply-adds on 16-lane registers and
touches no memory. Bandwidth: every thread reads its share of a buffer of several times the
last-level cache. The best of many short runs counts, since a ceiling is what can be reached.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np

from tilewright.errors import MeasureError
from tilewright.measure import Ceiling, last_level_cache_bytes
from tilewright.ops.cpu.args import share
from tilewright.ops.cpu.runtime import Program, compile_kernel, default_threads, specialize
from tilewright.ops.cpu.simd import has_avx512
from tilewright.ops.cpu.simd_arithmetic import add, fma, zeros_f32
from tilewright.ops.cpu.simd_memory import load_f32x16, load_i64, store_f32x16

__all__ = ["measure_ceiling"]

_STEPS = 20_000
_FLOPS_A_STEP = 12 * 16 * 2
_RUNS = 60
_READ_RUNS = 12
_CACHES = 4
_MOST_BYTES = 1 << 29
HALVES = 1


def _multiply_add(args, thread, threads):  # type: ignore[no-untyped-def]
    """12 chains, as 2 x 6 where only 6 fit the registers; each ends in memory, so none is idle."""
    source = load_i64(args)
    x = load_f32x16(source)
    y = load_f32x16(source + 64)
    total = zeros_f32()
    for half in range(HALVES):
        at = source + 64 * half  # chains begin differently, or the compiler would run one of them
        a0, a1, a2 = load_f32x16(at), load_f32x16(at + 128), load_f32x16(at + 256)
        a3, a4, a5 = load_f32x16(at + 384), load_f32x16(at + 512), load_f32x16(at + 640)
        b0, b1, b2 = load_f32x16(at + 768), load_f32x16(at + 896), load_f32x16(at + 1024)
        b3, b4, b5 = load_f32x16(at + 1152), load_f32x16(at + 1280), load_f32x16(at + 1408)
        for _step in range(load_i64(args + 16)):
            a0, a1, a2 = fma(x, y, a0), fma(x, y, a1), fma(x, y, a2)
            a3, a4, a5 = fma(x, y, a3), fma(x, y, a4), fma(x, y, a5)
            if HALVES == 1:
                b0, b1, b2 = fma(x, y, b0), fma(x, y, b1), fma(x, y, b2)
                b3, b4, b5 = fma(x, y, b3), fma(x, y, b4), fma(x, y, b5)
        total = add(total, add(add(add(a0, a1), add(a2, a3)), add(a4, a5)))
        total = add(total, add(add(add(b0, b1), add(b2, b3)), add(b4, b5)))
    store_f32x16(load_i64(args + 8) + 64 * thread, total)


def _read(args, thread, threads):  # type: ignore[no-untyped-def]
    """Sum of this thread's share of 64-byte lines, in four chains."""
    source = load_i64(args)
    first, last = share(load_i64(args + 16), thread, threads)
    a0 = a1 = a2 = a3 = zeros_f32()
    for i in range(first // 4, last // 4):
        at = source + 256 * i
        a0 = add(a0, load_f32x16(at))
        a1 = add(a1, load_f32x16(at + 64))
        a2 = add(a2, load_f32x16(at + 128))
        a3 = add(a3, load_f32x16(at + 192))
    store_f32x16(load_i64(args + 8) + 64 * thread, add(add(a0, a1), add(a2, a3)))


def measure_ceiling(threads: int | None = None) -> Ceiling:
    """Peak float32 GFLOP/s and read bandwidth in GB/s of `threads` threads (None: torch's).

    Raises:
        MeasureError: the size of the last-level cache is unknown.
    """
    threads = threads or default_threads()
    # The cache of compiled kernels is keyed by the kernels' own folder, which this file is not in.
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    halves = 1 if has_avx512() else 2
    multiply = compile_kernel(
        specialize(_multiply_add, "peak_fma", HALVES=halves), f"peak-fma-{halves}-{own}"
    )
    read = compile_kernel(specialize(_read, "peak_read"), f"peak-read-{own}")
    out = np.zeros(16 * threads, np.float32)
    values = np.linspace(0.5, 1.0, 16 * 25, dtype=np.float32)
    args = np.array([values.ctypes.data, out.ctypes.data, _STEPS], np.int64)
    us = _best(Program([(multiply, args)]), threads, _RUNS)
    gflops = threads * _STEPS * _FLOPS_A_STEP / us / 1e3

    size = min(_CACHES * last_level_cache_bytes(), _MOST_BYTES) // 4096 * 4096
    buffer = np.ones(size // 4, np.float32)
    args = np.array([buffer.ctypes.data, out.ctypes.data, size // 64], np.int64)
    us = _best(Program([(read, args)]), threads, _READ_RUNS)
    read_values = float(out.sum())
    if abs(read_values - buffer.size) > 1e-3 * buffer.size:
        raise MeasureError(
            f"the bandwidth test read {read_values:.0f} values of {buffer.size}; "
            "its figure is not used"
        )
    return Ceiling(gflops=gflops, gbps=size / us / 1e3)


def _best(program: Program, threads: int, runs: int) -> float:
    """The shortest run, in microseconds."""
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter_ns()
        program.run(threads)
        best = min(best, (time.perf_counter_ns() - start) / 1e3)
    return best
