"""What the GPU benchmarks say about the device and the packages that they ran on."""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any

__all__ = ["describe", "versions"]

_PACKAGES = ("triton", "humming-kernels", "gemlite", "nvidia-cublas", "nvidia-ml-py")


@functools.cache
def describe() -> dict[str, Any]:
    """Name, arch, units, memory, L2, CUDA and driver of the current GPU."""
    import torch

    from tilewright.device import arch_of

    properties = torch.cuda.get_device_properties(0)
    found = {
        "name": properties.name,
        "arch": arch_of(torch.device("cuda", 0)),
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
    }
    try:
        import pynvml

        pynvml.nvmlInit()
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # without the management library the driver stays unnamed
        pass
    return found


def versions() -> dict[str, str]:
    """Versions of the peers and of what they and we compile with, where they are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
