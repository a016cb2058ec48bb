"""Triton and Gluon kernels compiled for a chip that is not there: no GPU, no driver, nothing run.

::

    (found,) = cross_compile(lambda: launch_w4a16(x, weight, None, y, tile), "gfx1151")
    found.asm["amdgcn"], found.metadata["shared"]

A launcher runs as it always does, on operands of the meta device (`torch.empty(..., device="meta")`
or `operand.to("meta")`): a shape and a dtype without memory. What it passes to a kernel, options
and tensor descriptors included, is what is compiled; Triton's own binder derives the signature, so
no list of arguments is written down twice. Meta tensors count as aligned to 16 bytes, and as
spanning 2 GB where they do.

Triton's file cache is neither read nor written. A kernel of a process that interprets
(TRITON_INTERPRET=1) cannot be compiled in it. While something is compiled no other thread may
launch a kernel: Triton's driver is one for all of them, and is replaced for the time.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from tilewright.device import INTERPRETER, arch_of
from tilewright.errors import TileError, UnsupportedError

__all__ = [
    "Compiled",
    "check_arch",
    "check_triton",
    "cross_compile",
    "target_arch",
    "target_units",
    "warp_size",
]

_UNITS = {"sm_80": 108, "sm_90": 132, "gfx90a": 104, "gfx942": 304, "gfx1151": 20, "gfx1100": 48}
_UNITS_UNKNOWN = 64

_LOCK = threading.Lock()
_crossing: str | None = None

_ARCH = re.compile(
    r"gfx(9(0[0-9ac]|4[0-2]|50)|10(1[0-3]|3[0-6])|11(0[0-3]|5[0-3])|12(0[01]|5[01]))"
    r"|sm_(7[025]|8[0-9]|90|10[0-3]|110|12[01])"
)
"""What AMD and NVIDIA have made: LLVM ends the process for some names of no chip."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """One kernel, compiled.

    Attributes:
        name: the kernel's function.
        arch: what it was compiled for.
        asm: text by stage: "ttgir", "llir", "ptx" or "amdgcn"; bytes of "cubin" or "hsaco".
        metadata: of the compiler: "shared" (bytes), "num_warps", "num_stages" and more.
        log: what ptxas -v printed; empty on AMD.
        grid: the launch's grid, or None if it was a function of the arguments.
    """

    name: str
    arch: str
    asm: Mapping[str, str | bytes]
    metadata: Mapping[str, Any]
    log: str
    grid: tuple[int, ...] | None

    def text(self, stage: str) -> str:
        """The text of a stage; empty if there was none."""
        found = self.asm.get(stage, "")
        return found if isinstance(found, str) else ""


def warp_size(arch: str) -> int:
    """Lanes of a warp: 64 on CDNA (gfx9), 32 elsewhere."""
    return 64 if arch.startswith("gfx9") else 32


def check_arch(arch: str) -> None:
    """Raise UnsupportedError unless `arch` is the name of a GPU architecture."""
    if not _ARCH.fullmatch(arch):
        raise UnsupportedError(
            f"arch is {arch!r}; a kernel is compiled for an AMD gfx name or an NVIDIA compute "
            "capability, such as gfx1151, gfx1100, gfx1201, gfx90a, gfx942, sm_80 or sm_90"
        )


def check_triton() -> None:
    """Raise UnsupportedError unless triton is installed and this process compiles with it."""
    try:
        from triton import knobs, language
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise UnsupportedError(
            "kernels are compiled by triton, which is not installed; "
            "pip install 'tilewright[triton]' (Linux)"
        ) from error
    if knobs.runtime.interpret or not isinstance(language.cdiv, JITFunction):
        raise UnsupportedError(
            "TRITON_INTERPRET is set, or was when triton was imported: this process interprets "
            "kernels; compile them in one where it is not set"
        )


def target_arch(device: torch.device) -> str:
    """The arch that kernels launched now are compiled for.

    Inside `cross_compile` that is its arch, else the arch of the GPU `device`, such as "gfx1151" or
    "sm_90"; "interpreter" for a tensor of the CPU. A launcher asks here when a constexpr of its
    kernel depends on the chip.
    """
    if _crossing is not None:
        return _crossing
    return INTERPRETER if device.type == "cpu" else arch_of(device)


def target_units(device: torch.device) -> int:
    """Multiprocessors or compute units of the chip that kernels launched now are meant for.

    Inside `cross_compile` a usual number for its arch; 1 for a tensor of the CPU. A launcher asks
    here for the size of a persistent grid.
    """
    if _crossing is not None:
        return _UNITS.get(_crossing, _UNITS_UNKNOWN)
    return 1 if device.type == "cpu" else _gpu_units(device)


@lru_cache(maxsize=64)
def _gpu_units(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def cross_compile(launch: Callable[[], object], arch: str) -> tuple[Compiled, ...]:
    """Compile for `arch` every kernel that `launch` launches, in their order; none runs.

    Args:
        launch: calls a launcher, or an op, on operands of the meta device.
        arch: such as "gfx1151", "gfx90a" or "sm_90".

    Raises:
        UnsupportedError: `arch` is no name of a GPU; triton is not installed; this process
            interprets kernels; `launch` asks for the device, as an autotuned kernel does, or
            launches nothing.
        TileError: the compiler refuses, with what it said.
    """
    check_arch(arch)
    check_triton()
    from triton.runtime.jit import JITFunction

    found: list[Compiled] = []
    logs = io.StringIO()
    device = f"cross:{arch}"
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        logs.seek(0)
        logs.truncate()
        self.device_caches.pop(device, None)
        try:
            with contextlib.redirect_stdout(logs), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's, about its own next versions
                kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        except (UnsupportedError, TileError):
            raise
        except Exception as error:
            raise TileError(_refusal(self.__name__, arch, error, logs.getvalue())) from error
        finally:
            self.device_caches.pop(device, None)
        found.append(
            Compiled(
                name=self.__name__,
                arch=arch,
                asm=dict(kernel.asm),
                metadata=kernel.metadata._asdict(),
                log=logs.getvalue(),
                grid=None if callable(grid) else tuple(grid),
            )
        )
        return kernel

    with _LOCK, _target(arch, device):
        JITFunction.run = compile_only
        try:
            launch()
        finally:
            JITFunction.run = run
    if not found:
        raise UnsupportedError("nothing was launched: only Triton and Gluon kernels are compiled")
    return tuple(found)


@contextlib.contextmanager
def _target(arch: str, device: str) -> Iterator[None]:
    """Triton compiles for `arch`, anew, and keeps ptxas' log."""
    global _crossing
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    if arch.startswith("sm_"):
        target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    else:
        target = GPUTarget("hip", arch, warp_size(arch))
    active, properties = driver._active, torch.cuda.get_device_properties

    def of_meta(device: Any = None) -> Any:
        """What a launcher may ask of the device of its operands."""
        if isinstance(device, torch.device) and device.type == "meta":
            units = _UNITS.get(arch, _UNITS_UNKNOWN)
            return SimpleNamespace(name=arch, multi_processor_count=units, gcnArchName=arch)
        return properties(device)

    with (
        tempfile.TemporaryDirectory(prefix="tilewright-isa-") as cache,
        knobs.compilation.scope(),
        knobs.cache.scope(),
        knobs.nvidia.scope(),
    ):
        knobs.cache.dir = cache
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        driver.set_active(_NoDevice(target, device))
        torch.cuda.get_device_properties = of_meta
        _crossing = arch
        try:
            yield
        finally:
            _crossing = None
            torch.cuda.get_device_properties = properties
            driver.set_active(active)


class _NoDevice:
    """Stands where Triton expects a GPU's driver: it knows a target and nothing else."""

    def __init__(self, target: Any, device: str) -> None:
        self._target = target
        self._device = device

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        return self._device

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            f"the launch asks the GPU's driver for {name!r}, and there is no GPU: an autotuned "
            "kernel cannot be compiled this way; launch it with one configuration"
        )


def _refusal(kernel: str, arch: str, error: Exception, printed: str) -> str:
    """One line of what a compiler said, which may be pages long."""
    lines = [line.strip() for line in f"{printed}\n{error}".splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)]
    said = (telling[0] if telling else lines[-1] if lines else "")[:300]
    if "PassManager" in said:
        said += "; the compiler's own lines are on stderr"
    return f"{kernel} does not compile for {arch}: {type(error).__name__}: {said}"
