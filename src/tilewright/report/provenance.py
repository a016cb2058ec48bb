"""Where a figure comes from: command, versions, device, date, load."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tilewright import __version__
from tilewright.device import arch_of, cpu_device

__all__ = ["provenance"]

_PACKAGES = ("torch", "triton", "transformers", "numba", "numpy", "onnxruntime", "gguf")


def provenance(command: Sequence[str] | str, *, threads: int | None = None) -> dict[str, Any]:
    """A record that lets someone else repeat a run, as JSON values.

    Args:
        command: what was run; a path in it is cut to its last part, which is what matters. The
            record has it as a shell takes it.
        threads: threads the run was given; None is not recorded.
    """
    words = command.split() if isinstance(command, str) else list(command)
    words = [" ".join(map(_last_part, word.split(" "))) for word in words]
    device = cpu_device()
    record: dict[str, Any] = {
        "command": " ".join(words) if isinstance(command, str) else shlex.join(words),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tilewright": __version__,
        "python": platform.python_version(),
        "versions": _versions(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device.name,
        "arch": device.arch,
        "units": device.units,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    if threads is not None:
        record["threads"] = threads
    gpu = _gpu()
    if gpu is not None:
        record["gpu"] = gpu
    return record


def _gpu() -> dict[str, Any] | None:
    """The current GPU, if this process has used one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    index = torch.cuda.current_device()
    found = torch.cuda.get_device_properties(index)
    hip = torch.version.hip
    return {
        "device": found.name,
        "arch": arch_of(torch.device("cuda", index)),
        "units": found.multi_processor_count,
        "runtime": f"HIP {hip}" if hip else f"CUDA {torch.version.cuda}",
    }


def _last_part(word: str) -> str:
    return Path(word).name if os.sep in word else word


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
