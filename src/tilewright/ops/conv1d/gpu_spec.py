"""conv1d on a GPU as the gate, the tuner and verify see it: `SPEC.on("cuda")`.

Cases, oracle and error model are the CPU's: the kernel adds the same products in float32.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any

import torch

from tilewright.device import arch_of
from tilewright.errors import UnsupportedError
from tilewright.ops.contract import Case, Corruption, Inputs, OpSpec, Results
from tilewright.ops.space import TileSpace
from tilewright.ops.w4a16.gpu_spec import on_device

__all__ = ["gpu_spec"]

_SOURCES = (
    "tilewright.ops.conv1d.triton_conv",
    "tilewright.ops.conv1d.gpu",
    "tilewright.ops.ssd.triton_output",
    "tilewright.ops.ssd.triton_parts",
    "tilewright.ops.w4a16.triton_parts",
)
_MOST_INTERPRETED = 1 << 14  # outputs of a case that an interpreter bears


def _space() -> TileSpace:
    from tilewright.ops.conv1d.triton_space import TRITON_SPACE

    return TRITON_SPACE


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Results:
    from tilewright.ops.conv1d.gpu import gpu_conv
    from tilewright.ops.conv1d.spec import operands, results

    args = operands(inputs)
    if args.y.numel() == 0:
        from tilewright.ops.conv1d.op import pass_on

        pass_on(args)
    else:
        gpu_conv(args, tile)
    return results(args)


def _moved(inputs: Inputs, device: str) -> Inputs:
    """The operands of the kernel on `device`, with all that lies around them."""
    source = inputs.source
    changed = {
        f.name: on_device(value, device)
        for f in fields(source)
        if isinstance(value := getattr(source, f.name), torch.Tensor)
    }
    return replace(inputs, x=on_device(inputs.x, device), weight=replace(source, **changed))


def _corruption(of_cpu: Corruption, device: str) -> Corruption:
    def corrupt(inputs: Inputs) -> Inputs | None:
        corrupted = of_cpu(inputs)
        return None if corrupted is None else _moved(corrupted, device)

    return corrupt


@functools.cache
def gpu_spec(arch: str | None = None, device: str = "cuda") -> OpSpec:
    """conv1d on GPUs.

    Args:
        arch: choose tiles for it; None for that of the current GPU.
        device: where operands lie: "cpu" for the interpreter.

    Raises:
        UnsupportedError: arch is None, and torch sees no GPU.
    """
    from tilewright.ops.conv1d.spec import SPEC as CPU_SPEC

    if arch is None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "device is 'cuda', and torch sees no GPU: install a build of torch for it, or stay "
                "on the CPU"
            )
        arch = arch_of(torch.device("cuda", torch.cuda.current_device()))

    def make_inputs(case: Case, seed: int) -> Inputs:
        return _moved(CPU_SPEC.make_inputs(case, seed), device)

    large = device != "cpu"
    return replace(
        CPU_SPEC,
        cases=tuple(c for c in CPU_SPEC.cases if large or c.M * c.N <= _MOST_INTERPRETED),
        make_inputs=make_inputs,
        run=_run,
        corruptions={
            name: _corruption(corrupt, device) for name, corrupt in CPU_SPEC.corruptions.items()
        },
        space=_space,
        sources=_SOURCES,
        arch=lambda: arch,
        uses={"triton": ("triton",)},
        devices={},
    )
