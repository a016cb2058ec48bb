"""w4a16: 4-bit weights with one scale a group times float activations.

Weight types: "uint4" has a zero point a group, "uint4b8" the constant 8. Groups of 32, 64, 128,
256 values, or all of K.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.device import INTERPRETER, cpu_device
from tilewright.formats.w4 import W4Codes
from tilewright.ops.cases import Shape, edge_scales, grid_cases, ordered, special_cases
from tilewright.ops.check import ErrorModel, activation_variance, product_sigma
from tilewright.ops.contract import (
    DTYPES,
    Case,
    Inputs,
    OpSpec,
    draw_activations,
    draw_bias,
    rng_for,
)
from tilewright.ops.space import TileSpace
from tilewright.ops.w4a16.reference import w4a16_reference, w4a16_rows
from tilewright.tiles.tile import Problem

__all__ = ["SPEC", "draw_inputs"]

F64 = npt.NDArray[np.float64]

WEIGHT_TYPES = ("uint4", "uint4b8")

# Root mean square of (code - zero) for random codes, and random zeros where there are any.
_RMS = {"uint4": 6.52, "uint4b8": 4.64}

_SHAPES: tuple[Shape, ...] = (
    (16, 96, 32),
    (97, 576, 32),
    (33, 192, 64),
    (128, 576, 64),
    (1, 384, 128),
    (97, 640, 128),
    (33, 256, 256),
    (128, 768, 256),
    (16, 96, -1),
    (33, 200, -1),
)
_RAGGED: Shape = (97, 384, 128)
_WHOLE: Shape = (128, 320, 32)
_LONG: Shape = (33, 4352, 128)


def _cases() -> tuple[Case, ...]:
    cases: list[Case] = []
    for weight_type in WEIGHT_TYPES:
        for path in ("float", "int8"):
            shapes = _SHAPES if path == "float" else _SHAPES[1::2]
            cases += grid_cases("w4a16", weight_type, shapes, activations=path)
            cases += special_cases("w4a16", weight_type, _RAGGED, _WHOLE, activations=path)
            for m, dtype in zip((1, 6, 17), DTYPES, strict=True):
                for n, k, group in (_WHOLE, _RAGGED):
                    cases.append(
                        Case("w4a16", weight_type, dtype, m, n, k, group, path, ("act_order",))
                    )
                cases.append(Case("w4a16", weight_type, dtype, m, *_LONG, path))
            cases.append(
                Case("w4a16", weight_type, "float32", 5, *_WHOLE, path,
                     ("act_order", "bias", "outliers", "strided"))
            )  # fmt: skip
    return ordered(cases)


def _group(case: Case) -> int:
    return case.K if case.group == -1 else case.group


def draw_inputs(case: Case, seed: int) -> Inputs:
    """The operands of a case on the CPU, the weight as codes only: nothing is packed.

    Raises:
        ValueError: the case is none of this op.
    """
    if case.weight_type not in WEIGHT_TYPES:
        raise ValueError(f"weight_type is {case.weight_type!r}; w4a16 has {WEIGHT_TYPES}")
    if case.group == 0 or case.K % _group(case):
        raise ValueError(f"group is {case.group}; it must divide K = {case.K}, or be -1")
    codes = _draw_codes(case.weight_key, seed)
    return Inputs(case, draw_activations(case, seed), codes, None, draw_bias(case, seed))


def _make_inputs(case: Case, seed: int) -> Inputs:
    inputs = draw_inputs(case, seed)
    return replace(inputs, weight=_packed(inputs.source))


@functools.lru_cache(maxsize=2)  # the gate goes back and forth between two seeds
def _draw_codes(key: tuple[Any, ...], seed: int) -> W4Codes:
    _, weight_type, act_dtype, n, k, group, flags = key
    rng = rng_for(seed, *key)
    g = k if group == -1 else group
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scales = rng.lognormal(0.0, 0.3, (n, k // g)) / (np.sqrt(k) * _RMS[weight_type])
    zeros = None
    if weight_type == "uint4":
        zeros = rng.integers(0, 16, (n, k // g), dtype=np.uint8)
    if "edge" in flags:
        edge_scales(scales, act_dtype)
        codes[6::8], codes[7::8] = 0, 15
        if zeros is not None:
            zeros[6::8], zeros[7::8] = 15, 0
    scale_dtype = torch.bfloat16 if act_dtype == "bfloat16" else torch.float16
    stored = torch.from_numpy(scales).to(scale_dtype).float().numpy()
    perm = rng.permutation(k).astype(np.int64) if "act_order" in flags else None
    return W4Codes(codes, stored, zeros, g, perm, scale_dtype)


@functools.lru_cache(maxsize=2)
def _packed(codes: W4Codes) -> Any:
    return _pack(codes)


def _pack(codes: W4Codes) -> Any:
    from tilewright.layout.cpu import pack_w4

    return pack_w4(codes)


def _ordered_x(inputs: Inputs) -> F64:
    x = inputs.x64()
    return x if inputs.source.perm is None else x[:, inputs.source.perm]


def _reference(inputs: Inputs) -> F64:
    y = w4a16_reference(inputs.x64(), inputs.source, inputs.bias64())
    return y.reshape(*inputs.x.shape[:-1], inputs.case.N)


def _error_model(inputs: Inputs, ref: F64) -> ErrorModel:
    x = _ordered_x(inputs)
    variance = activation_variance(x) if inputs.case.activations == "int8" else None
    sigma = product_sigma(x, w4a16_rows(inputs.source), bias=inputs.bias64(), x_variance=variance)
    return ErrorModel(sigma.reshape(ref.shape), inputs.case.dtype, variance is None)


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    from tilewright.ops.w4a16.op import w4a16_gemm

    return w4a16_gemm(
        inputs.x, inputs.weight, inputs.bias,
        activations=inputs.case.activations, tile=tile, threads=threads,
    )  # fmt: skip


def _space() -> TileSpace:
    from tilewright.ops.w4a16.space import CPU_SPACE

    return CPU_SPACE


def _flops(problem: Problem) -> float:
    return 2.0 * problem.M * problem.N * problem.K


def _bytes(problem: Problem) -> float:
    groups = problem.K / (problem.K if problem.group == -1 else problem.group)
    zeros = 0.5 if problem.weight_type == "uint4" else 0.0
    weight = problem.N * (problem.K / 2 + groups * (2 + zeros))
    size = DTYPES[problem.act_dtype].itemsize
    return weight + size * problem.M * (problem.K + problem.N)


def _corrupted(inputs: Inputs, **changed: Any) -> Inputs:
    codes = replace(inputs.source, **changed)
    return replace(inputs, source=codes, weight=_pack(codes))


def _heaviest(inputs: Inputs) -> tuple[int, int]:
    """The column of the codes that meets the largest activations, and its group."""
    column = int(np.argmax((_ordered_x(inputs) ** 2).sum(axis=0)))
    return column, column // inputs.source.group_size


def _typical_row(scales: npt.NDArray[np.float32]) -> int:
    """The row with the median scale among those whose scale is not zero."""
    rows = np.flatnonzero(scales)
    return int(rows[np.argsort(np.abs(scales[rows]))[len(rows) // 2]]) if len(rows) else 0


def _flip_nibble(inputs: Inputs) -> Inputs | None:
    """The top bit of one code, where the largest activations are."""
    column, group = _heaviest(inputs)
    codes = inputs.source.codes.copy()
    codes[_typical_row(inputs.source.scales[:, group]), column] ^= 8
    return _corrupted(inputs, codes=codes)


def _wrong_scale(inputs: Inputs) -> Inputs | None:
    """The scale of one group taken from the next row, as an index that is one off does."""
    _, group = _heaviest(inputs)
    column = inputs.source.scales[:, group]
    other = np.roll(column, -1) if len(column) > 1 else 2 * column
    change = np.abs(other - column) / np.where(column == 0, np.inf, np.abs(column))
    row = int(np.argmax(change))
    if not change[row] > 0:
        return None
    scales = inputs.source.scales.copy()
    scales[row, group] = other[row]
    return _corrupted(inputs, scales=scales)


def _swapped_zero(inputs: Inputs) -> Inputs | None:
    """The zero points of two neighbouring rows of one group exchanged."""
    if inputs.source.zeros is None or inputs.case.N < 2:
        return None
    _, group = _heaviest(inputs)
    column = inputs.source.zeros[:, group].astype(np.int64)
    change = np.abs(np.diff(column)) * (inputs.source.scales[:-1, group] != 0)
    row = int(np.argmax(change))
    if change[row] == 0:
        return None
    zeros = inputs.source.zeros.copy()
    zeros[[row, row + 1], group] = zeros[[row + 1, row], group]
    return _corrupted(inputs, zeros=zeros)


def _arch() -> str:
    return cpu_device().arch


def _on_gpu(arch: str | None) -> OpSpec:
    from tilewright.ops.w4a16.gpu_spec import gpu_spec

    return gpu_spec(arch)


def _interpreted(arch: str | None) -> OpSpec:
    from tilewright.ops.w4a16.gpu_spec import gpu_spec

    return gpu_spec(INTERPRETER, "cpu")


SPEC = OpSpec(
    name="w4a16",
    title="W4A16",
    version=1,
    weight_types=WEIGHT_TYPES,
    cases=_cases(),
    make_inputs=_make_inputs,
    reference=_reference,
    error_model=_error_model,
    run=_run,
    flops=_flops,
    bytes=_bytes,
    corruptions={
        "flipped nibble": _flip_nibble,
        "wrong scale": _wrong_scale,
        "swapped zero point": _swapped_zero,
    },
    space=_space,
    arch=_arch,
    devices={"cuda": _on_gpu, "interpreter": _interpreted},
)
