"""ssd on a GPU as the gate, the tuner and verify see it: `SPEC.on("cuda")`.

Operands and oracle are the CPU's: the float64 recurrence. Tiles and error model are the GPU's:
operands are rounded to the dtype of x before matrix units multiply them, and the forms that walk
round D with them, as part of what x is multiplied with.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.device import arch_of
from tilewright.errors import UnsupportedError
from tilewright.ops.cases import ordered
from tilewright.ops.check import ErrorModel
from tilewright.ops.contract import Case, Corruption, Inputs, OpSpec, Results
from tilewright.ops.space import TileSpace
from tilewright.ops.w4a16.gpu_spec import WEIGHT_UNITS, on_device

__all__ = ["gpu_spec"]

F64 = npt.NDArray[np.float64]

_SOURCES = (
    *(
        f"tilewright.ops.ssd.{name}"
        for name in (
            "triton_parts", "triton_prepare", "triton_states", "triton_output", "triton_walk",
            "triton_scan", "hopper_walk", "gpu",
        )
    ),
    "tilewright.ops.w4a16.triton_parts",
    "tilewright.ops.workspace",
    "tilewright.ops.gluon_compat",
)  # fmt: skip
_STEPS = {"float16": 2.0**-24}
"""Distance of a type's smallest numbers, where weights are small enough to meet them."""

_EXP = 4.0
"""Relative error of a GPU's exp2 in units of float32's roundoff: ex2.approx's 2^-22."""

_MOST_INTERPRETED = 1 << 14  # outputs of a case that an interpreter bears


def _cases(cases: tuple[Case, ...], large: bool) -> tuple[Case, ...]:
    """The CPU's; fewer where they are interpreted, longer ones on a GPU."""
    if not large:
        return tuple(c for c in cases if c.M * c.N <= _MOST_INTERPRETED and c.K <= 128)
    fp16, bf16 = "float16", "bfloat16"
    more = []
    for p, n, k, group in ((64, 512, 128, 8), (64, 256, 64, 2), (80, 640, 128, 4)):
        for m, flags in (
            (1024, ()), (1000, ("initial",)), (2049, ("gate",)), (777, ("packed", "strided")),
            (4096, ("strided", "gate", "initial")),
        ):  # fmt: skip
            more += [Case("ssd", f"p{p}", d, m, n, k, group, flags=flags) for d in (fp16, bf16)]
    return ordered((*cases, *more))


def _error_model(inputs: Inputs, ref: F64) -> ErrorModel:
    from tilewright.ops.ssd.spec import head_dim, judged_heads, scan_error_model

    case, source = inputs.case, inputs.source
    unit = WEIGHT_UNITS[case.act_dtype]
    model = scan_error_model(inputs, ref, unit, _STEPS.get(case.act_dtype, 0.0), _EXP)
    if not unit or source.D is None or not case.M:
        return model
    heads = judged_heads(case)
    skip = source.D[heads].double().view(len(heads), -1) * inputs.x.cpu()[:, :, heads].double()
    if source.z is not None:
        skip = skip * torch.nn.functional.silu(source.z[:, :, heads].double())
    rounded = unit**2 / 3 * skip.reshape(case.M, len(heads) * head_dim(case)).numpy() ** 2
    sigma = model.sigma.copy()
    sigma[: case.M] = np.sqrt(sigma[: case.M] ** 2 + rounded)
    return replace(model, sigma=sigma)


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Results:
    from tilewright.ops.ssd.gpu import gpu_scan
    from tilewright.ops.ssd.spec import chunk_of, operands, results

    args = operands(inputs)
    gpu_scan(args, None if tile is not None else chunk_of(inputs.case), tile)
    return results(args)


def _space() -> TileSpace:
    from tilewright.ops.ssd.triton_space import TRITON_SPACE

    return TRITON_SPACE


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
    """ssd on GPUs.

    Args:
        arch: choose tiles for it; None for that of the current GPU.
        device: where operands lie: "cpu" for the interpreter.

    Raises:
        UnsupportedError: arch is None, and torch sees no GPU.
    """
    from tilewright.ops.ssd.spec import SPEC as CPU_SPEC

    if arch is None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "device is 'cuda', and torch sees no GPU: install a build of torch for it, or stay "
                "on the CPU"
            )
        arch = arch_of(torch.device("cuda", torch.cuda.current_device()))

    def make_inputs(case: Case, seed: int) -> Inputs:
        return _moved(CPU_SPEC.make_inputs(case, seed), device)

    return replace(
        CPU_SPEC,
        cases=_cases(CPU_SPEC.cases, large=device != "cpu"),
        make_inputs=make_inputs,
        error_model=_error_model,
        run=_run,
        corruptions={
            name: _corruption(corrupt, device) for name, corrupt in CPU_SPEC.corruptions.items()
        },
        space=_space,
        sources=_SOURCES,
        arch=lambda: arch,
        uses=dict.fromkeys(_space().fields, ("triton",)),
        devices={},
    )
