"""Compilation, the kernel cache, programs, and code for CPUs other than this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tilewright.ops.cpu import runtime
from tilewright.ops.cpu.runtime import Program, compile_kernel, specialize
from tilewright.ops.cpu.simd import X86
from tilewright.ops.cpu.simd_arithmetic import exp
from tilewright.ops.cpu.simd_memory import load_f32x16, load_i64, store_f32, store_f32x16

SOURCE = Path(__file__).parents[3]


def _fill(args: int, thread: int, threads: int) -> None:
    y = load_i64(args)
    n = load_i64(args + 8)
    for i in range(thread, n, threads):
        store_f32(y + 4 * i, np.float32(FACTOR * i))


FACTOR = 1


def _filled(factor: int, name: str, threads: int) -> np.ndarray:
    kernel = compile_kernel(specialize(_fill, name, FACTOR=factor), name)
    y = np.full(100, np.nan, dtype=np.float32)
    args = np.array([y.ctypes.data, len(y)], dtype=np.int64)
    Program([(kernel, args)]).run(threads)
    return y


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    runtime._cache_folder.cache_clear()
    yield tmp_path
    runtime._cache_folder.cache_clear()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_thread_does_its_share(threads: int, private_cache: Path) -> None:
    assert np.array_equal(_filled(3, "fill-3", threads), np.arange(100) * 3.0)


def test_a_cached_kernel_gives_what_the_compiled_one_gave(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _filled(2, "fill-2", 1)
    (cached,) = private_cache.glob("kernels/*/fill-2.kernel")
    assert cached.stat().st_size > 0
    compiled: list[str] = []
    monkeypatch.setattr(runtime.CFunc, "compile", lambda self: compiled.append("again"))
    assert np.array_equal(_filled(2, "fill-2", 1), first)
    assert not compiled


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_cache_file_is_compiled_anew(private_cache: Path, damage: str) -> None:
    first = _filled(7, "fill-7", 1)
    (cached,) = private_cache.glob("kernels/*/fill-7.kernel")
    data = bytearray(cached.read_bytes())
    if damage == "truncate":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[-40] ^= 0xFF
    else:
        data = bytearray()
    cached.write_bytes(bytes(data))
    assert np.array_equal(_filled(7, "fill-7", 1), first)


def test_a_change_of_any_kernel_source_changes_the_cache_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(runtime.__file__).parent
    for source in folder.glob("*.py"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(runtime, "__file__", str(tmp_path / "runtime.py"))
    compute = runtime.kernel_hash.__wrapped__
    before = compute()
    assert before == runtime.kernel_hash()
    for name in ("unpack.py", "microkernel.py", "simd.py", "simd_dot.py", "gemm.py", "rows.py"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "\n")
        assert compute() != before
        (tmp_path / name).write_text(text)


def test_program_refuses_arguments_kernels_cannot_read() -> None:
    kernel = compile_kernel(specialize(_fill, "fill-1", FACTOR=1), "fill-1")
    with pytest.raises(TypeError, match="contiguous int64"):
        Program([(kernel, np.zeros(2, dtype=np.int32))])


def test_exp_is_within_two_units_of_the_last_place() -> None:
    def template(args: int, thread: int, threads: int) -> None:
        x = load_i64(args)
        for i in range(load_i64(args + 8) // 16):
            at = x + 64 * i
            store_f32x16(at, exp(load_f32x16(at)))

    x = np.linspace(-90, 88, 4096, dtype=np.float32)
    right = np.exp(x.astype(np.float64))
    args = np.array([x.ctypes.data, len(x)], dtype=np.int64)
    Program([(compile_kernel(template, "exp-test"), args)]).run(1)
    spacing = np.spacing(np.maximum(right, np.finfo(np.float32).tiny).astype(np.float32))
    assert np.all(np.abs(x - right)[right > 1e-37] <= 2 * spacing[right > 1e-37])
    assert np.all(x[right < 1e-38] == 0)
    special = np.full(16, np.nan, dtype=np.float32)
    special[1:4] = [np.inf, -np.inf, 200.0]
    args = np.array([special.ctypes.data, 16], dtype=np.int64)
    Program([(compile_kernel(template, "exp-test"), args)]).run(1)
    assert np.isnan(special[0])
    assert special[1] > 1e38
    assert special[2] == 0
    assert special[3] > 1e38


OTHER_CPUS = {
    "avx2": ("haswell", "+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c"),
    "sse2": ("x86-64", "+sse2"),
}


@pytest.mark.skipif(not X86, reason="the feature names are x86's")
@pytest.mark.parametrize("cpu", list(OTHER_CPUS))
def test_kernels_are_right_on_lesser_cpus(cpu: str, tmp_path: Path) -> None:
    """The lowerings for older instruction sets, compiled and run here."""
    name, features = OTHER_CPUS[cpu]
    script = """
import torch
from ops.cpu.weights import blocks, error
from tilewright.device import cpu_device
from tilewright.ops.mmq.op import mmq_gemm
from tilewright.ops.mmq.space import CPU_SPACE
from tilewright.tiles.tile import Problem
print(cpu_device().arch)
for kind in ("Q4_1", "Q8_0"):
    packed, values = blocks(kind, 37, 128)
    for m, activations in ((1, "float"), (9, "float"), (9, "int8")):
        x = (torch.arange(m * 128) * 37 % 255 - 127).float().reshape(m, 128)
        x[:, ::32] = 127
        y = mmq_gemm(x, packed, activations=activations)
        assert error(y, x.double().numpy() @ values.T) < 1e-6, (kind, m, activations)
"""
    env = {
        **os.environ,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": features,
        "TILEWRIGHT_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(SOURCE / "src"), str(SOURCE / "tests")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("cpu-avx2" if cpu == "avx2" else "cpu")
