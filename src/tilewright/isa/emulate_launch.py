"""A launcher's kernels compiled for a chip that is not there, and executed.

::

    y = torch.full((m, n), float("nan"), dtype=x.dtype)
    emulate_launch(launch_w4a16, (x, weight, None, y, tile, NO_WORKSPACE), "gfx1151")

The launcher runs once, on twins of its operands that have no memory (`ops.cross`); whatever it
passes to a kernel is compiled and then executed on the real operands, which are written in place.
No list of arguments is written down twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from tilewright.errors import GateError, UnsupportedError
from tilewright.isa.emulate import EmulatedRun, emulate
from tilewright.ops.contract import Case, Inputs
from tilewright.ops.cross import check_arch, cross_compile
from tilewright.ops.w4a16.gpu_spec import gpu_spec
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile

__all__ = ["emulate_launch", "emulate_w4a16"]

_UNITS = 8  # compute units that split-K tiles are planned for; any number gives the same sums


class _Twins:
    """Meta tensors that stand for real ones, and the way back, for views of them too."""

    def __init__(self) -> None:
        self._real: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # a storage's identity is its address: keep it alive

    def of(self, value: Any) -> Any:
        """The value with each tensor in it replaced: tensors, tuples and dataclasses of them."""
        if isinstance(value, torch.Tensor):
            twin = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            self._real[_identity(twin)] = value
            self._kept.append(twin)
            return twin
        if is_dataclass(value) and not isinstance(value, type):
            held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
            tensors = {n: self.of(v) for n, v in held.items() if isinstance(v, torch.Tensor)}
            return replace(value, **tensors) if tensors else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.of(v) for v in value))
        return value

    def back(self, value: Any) -> Any:
        """The real memory behind what a launcher passes on."""
        if not isinstance(value, torch.Tensor):
            return value
        real = self._real.get(_identity(value))
        if real is None:
            raise UnsupportedError(
                f"the launcher passes a tensor {list(value.shape)} that is no part of its "
                "operands: a launcher allocates nothing"
            )
        start = real.storage_offset() * real.element_size()
        start += value.storage_offset() * value.element_size()
        whole = torch.empty(0, dtype=value.dtype)
        size = value.element_size()
        return whole.set_(real.untyped_storage(), start // size, value.shape, value.stride())


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def emulate_launch(
    launch: Callable[..., object],
    operands: Sequence[Any],
    arch: str,
    *,
    workgroups: Iterable[tuple[int, int, int]] | None = None,
    last_wave_first: bool = False,
) -> tuple[EmulatedRun, ...]:
    """Run what `launch(*operands)` launches as an AMD chip would, in the launches' order.

    Args:
        launch: allocates nothing and launches Triton or Gluon kernels.
        operands: its arguments; tensors (also in dataclasses and named tuples) on the CPU.
        arch: one of `emulate.ARCHS`.
        workgroups: run only these of each grid.
        last_wave_first: as of `emulate`.

    Raises:
        UnsupportedError: as `cross_compile` and `emulate`; a tensor that is no operand's.
        TileError: the compiler refuses.
        GateError: as `emulate`.
    """
    check_arch(arch)
    from triton.runtime.jit import JITFunction

    twins = _Twins()
    fakes = [twins.of(value) for value in operands]
    launched: list[tuple[Any, tuple[int, ...], list[Any]]] = []

    def recorded() -> None:
        compile_only = JITFunction.run  # what cross_compile put there

        def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = compile_only(self, *args, grid=grid, warmup=warmup, **kwargs)
            named = {n: v for n, v in kwargs.items() if n in self.arg_names}
            bound = self.signature.bind(*args, **named)
            bound.apply_defaults()
            sizes = grid(dict(bound.arguments)) if callable(grid) else grid
            signature = kernel.src.signature
            passed = [
                twins.back(v) for n, v in bound.arguments.items() if signature[n] != "constexpr"
            ]
            launched.append((kernel, tuple(sizes), passed))
            return kernel

        JITFunction.run = record
        try:
            launch(*fakes)
        finally:
            JITFunction.run = compile_only

    cross_compile(recorded, arch)
    return tuple(
        emulate(
            kernel,
            grid=grid,
            args=args,
            arch=arch,
            workgroups=workgroups,
            last_wave_first=last_wave_first,
        )
        for kernel, grid, args in launched
    )


def emulate_w4a16(
    tile: Tile,
    case: Case,
    arch: str,
    *,
    seed: int = 0,
    inputs: Inputs | None = None,
    last_wave_first: bool = False,
) -> torch.Tensor:
    """y of one case of w4a16, computed by the tile's own kernel as `arch` would run it.

    Args:
        tile: of the algorithm "triton", "skinny" or "amd", or a planted one.
        case: of w4a16 with M >= 1; keep it small: a workgroup takes about a tenth of a second.
        arch: one of `emulate.ARCHS`.
        seed: of the operands: `gpu_spec(arch, "cpu").make_inputs(case, seed)`. That spec's oracle
            and error model judge the result.
        inputs: operands instead of those, corrupted ones for instance.
        last_wave_first: as of `emulate`.

    Returns:
        y [M, N] of the case's dtype. Outputs that the kernel does not write stay NaN.

    Raises:
        GateError: the kernel accesses memory outside its operands, or leaves arrival counters
            that are not zero; else as `emulate_launch`.
    """
    from tilewright.ops.w4a16.gpu import kernel_of

    if inputs is None:
        inputs = gpu_spec(arch, "cpu").make_inputs(case, seed)
    weight, x = inputs.weight, inputs.x.reshape(-1, case.K)
    if weight.perm is not None:
        x = x.index_select(1, weight.perm)
    y = torch.full((case.M, case.N), float("nan"), dtype=case.dtype)
    kernel = kernel_of(tile.algorithm)
    floats, counters = (0, 0)
    if kernel.needs is not None:
        floats, counters = kernel.needs(tile, case.M, case.N, case.K, _UNITS)
    space = Workspace(
        torch.full((floats,), float("nan")) if floats else None,
        torch.zeros(counters, dtype=torch.int32) if counters else None,
    )
    operands = (x, weight, inputs.bias, y, tile, space)
    emulate_launch(kernel.launch, operands, arch, last_wave_first=last_wave_first)
    if space.counters is not None and np.any(space.counters.numpy()):
        raise GateError(f"{case.id} on {arch}: the kernel leaves arrival counters that are not 0")
    return y
