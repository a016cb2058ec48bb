"""SASS, the machine code of NVIDIA's chips, from a cubin: nvdisasm of Triton's own package."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tilewright.errors import UnsupportedError
from tilewright.ops.cross import Compiled

__all__ = ["listing_text", "sass"]

_TIME_LIMIT_S = 120.0


def listing_text(compiled: Compiled) -> str:
    """The assembly that `count.parse` reads: amdgcn as it is, a cubin disassembled.

    Raises:
        UnsupportedError: as `sass`.
    """
    if compiled.arch.startswith("gfx"):
        return compiled.text("amdgcn")
    cubin = compiled.asm["cubin"]
    assert isinstance(cubin, bytes)
    return sass(cubin)


def sass(cubin: bytes) -> str:
    """The listing of a cubin, with labels.

    Raises:
        UnsupportedError: Triton's package has no nvdisasm, or it fails.
    """
    from triton import knobs

    try:
        tool = knobs.nvidia.nvdisasm.path
    except RuntimeError as error:
        raise UnsupportedError(
            "this triton brings no nvdisasm; install triton from PyPI, or name one in "
            "TRITON_NVDISASM_PATH"
        ) from error
    with tempfile.TemporaryDirectory(prefix="tilewright-isa-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        try:
            done = subprocess.run(
                [tool, "-c", str(file)], capture_output=True, text=True, timeout=_TIME_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnsupportedError(f"nvdisasm does not run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UnsupportedError(f"nvdisasm fails: {said[-1] if said else done.returncode}")
    return done.stdout
