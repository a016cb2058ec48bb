"""The device of this machine that an arch names, and the units that it gives kernels."""

from __future__ import annotations

import functools
from dataclasses import replace

from tilewright.device import INTERPRETER, Device, arch_of, cpu_device

__all__ = ["INTERPRETER", "local_archs", "local_device", "local_units"]


def local_archs() -> list[str]:
    """The archs of this machine's devices: the CPU's, then those of its GPUs."""
    return [cpu_device().arch, *_gpus()]


def local_device(arch: str) -> Device | None:
    """The device of this arch; None if this machine has none.

    Units of the CPU are the threads that torch gives kernels now, of a GPU its multiprocessors.
    """
    if arch == cpu_device().arch:
        return replace(cpu_device(), units=local_units(arch) or 1)
    if arch == INTERPRETER:
        return Device(arch, "Triton's interpreter", 1, 0)
    return _gpus().get(arch)


def local_units(arch: str) -> int | None:
    """`local_device(arch).units`, in less time; None if this machine has no such device."""
    if arch == cpu_device().arch:
        import torch

        return torch.get_num_threads()
    device = local_device(arch)
    return None if device is None else device.units


@functools.cache
def _gpus() -> dict[str, Device]:
    """The GPUs that torch sees, the first of each arch; asking starts CUDA or HIP."""
    import torch

    found: dict[str, Device] = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = arch_of(torch.device("cuda", index))
        cache = int(getattr(properties, "L2_cache_size", 0) or 0)
        found.setdefault(
            arch, Device(arch, properties.name, properties.multi_processor_count, cache)
        )
    return found
