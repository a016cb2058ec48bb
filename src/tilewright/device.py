"""What a kernel runs on. Asked on call, never at import."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = [
    "INTERPRETER",
    "Device",
    "arch_of",
    "check_triton",
    "cpu_device",
    "has_triton",
    "kind_of",
    "launching_on",
]

INTERPRETER = "interpreter"
"""Arch of Triton's interpreter, which runs kernels for GPUs on the CPU, one after the other."""


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def check_triton(op: str) -> None:
    """Raise UnsupportedError, on behalf of `op`, if Triton is not installed."""
    if not has_triton():
        raise UnsupportedError(f"{op}: triton is not installed; pip install 'tilewright[triton]'")


@dataclass(frozen=True)
class Device:
    """A processor that kernels are chosen and tuned for.

    Attributes:
        arch: key of tile tables: "cpu-avx512_vnni", "cpu-avx512", "cpu-avx2", "cpu-neon", "cpu";
            "sm_90", "gfx1151" and the like for GPUs.
        name: the maker's name; for people, never a key.
        units: cores this process may use; multiprocessors or compute units of a GPU.
        last_level_cache_bytes: largest cache, 0 when unknown.
    """

    arch: str
    name: str
    units: int
    last_level_cache_bytes: int


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _last_level_cache() -> int:
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdigit():
            largest = max(largest, int(digits) * factor)
    return largest


def _cpu_arch() -> str:
    from numba.core.registry import cpu_target

    flags = cpu_target.target_context.codegen().magic_tuple()[2]
    features = {flag[1:] for flag in flags.split(",") if flag.startswith("+")}
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        if {"avx512f", "avx512bw", "avx512vl"} <= features:
            return "cpu-avx512_vnni" if "avx512vnni" in features else "cpu-avx512"
        return "cpu-avx2" if {"avx2", "fma"} <= features else "cpu"
    return "cpu-neon" if machine in ("arm64", "aarch64") else "cpu"


@functools.cache
def cpu_device() -> Device:
    """The CPU of this machine."""
    if hasattr(os, "sched_getaffinity"):
        units = len(os.sched_getaffinity(0))
    else:
        units = os.cpu_count() or 1
    return Device(_cpu_arch(), _cpu_name(), units, _last_level_cache())


def arch_of(device: torch.device) -> str:
    """The arch of a torch device: "sm_90", "gfx1151"; the CPU's own for "cpu".

    Raises:
        UnsupportedError: torch sees no such GPU.
    """
    if device.type == "cpu":
        return cpu_device().arch
    return _gpu_arch(0 if device.index is None else device.index)


@functools.cache
def _gpu_arch(index: int) -> str:
    import torch

    try:
        properties = torch.cuda.get_device_properties(index)
    except (AssertionError, RuntimeError) as error:  # a build for CPUs, no driver, no such GPU
        raise UnsupportedError(
            f"device is 'cuda:{index}', and torch sees {torch.cuda.device_count()} GPUs: install a "
            "build of torch for your GPU, name one that is there, or stay on 'cpu'"
        ) from error
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def kind_of(arch: str) -> str:
    """The kind of device that an arch is: "cpu", "interpreter", or "cuda" for any GPU."""
    if arch == INTERPRETER:
        return INTERPRETER
    return "cpu" if arch.startswith("cpu") else "cuda"


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` torch's current GPU, which Triton launches on, while the block runs.

    Nothing to do, and next to no time, if it is already or is no GPU.
    """
    import torch

    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)
