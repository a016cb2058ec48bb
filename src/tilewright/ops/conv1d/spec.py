"""conv1d as verify, the gate, the tuner and the tests see it.

A case has M tokens in all, N channels and K = W taps (its weight type: "w4"). A run returns y and
the leaving states; the judge sees them as one matrix, rows of tokens over rows of states::

    [M + S (W - 1), N]    y [b, L, D] as [M, D]
                          states [S, D, W - 1] as [S (W - 1), D]

The error of y: K products and additions of float32, within the walk of `tilewright.ops.check`, then
what silu makes of it, by its derivative and two roundings of its own that grow with its argument.
States are tokens, and have no error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.device import INTERPRETER, cpu_device
from tilewright.ops.cases import ordered, sequence_lengths
from tilewright.ops.check import ErrorModel, half_ulp
from tilewright.ops.contract import DTYPES, Case, Inputs, OpSpec, Results, rng_for
from tilewright.ops.conv1d.args import ConvArgs
from tilewright.ops.conv1d.reference import conv_reference, conv_terms
from tilewright.ops.space import TileSpace
from tilewright.ops.ssd.draw import guarded
from tilewright.tiles.tile import Problem

__all__ = ["SPEC", "ConvOperand", "operands", "results"]

F64 = npt.NDArray[np.float64]

WEIGHT_TYPES = ("w2", "w3", "w4", "w5", "w8")
_OP = "conv1d"
_UNIT = 2.0**-24


@dataclass(frozen=True, eq=False)
class ConvOperand:
    """What the convolution reads beside x: see `tilewright.ops.conv1d.op.causal_conv1d`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None
    initial_states: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


def _width(case: Case) -> int:
    return int(case.weight_type.removeprefix("w"))


def _case(w: int, m: int, n: int, dtype: str, *flags: str, sequences: int = 0) -> Case:
    return Case(_OP, f"w{w}", dtype, m, n, w, flags=flags, sequences=sequences)


def _cases() -> tuple[Case, ...]:
    fp32, fp16, bf16 = dtypes = tuple(DTYPES)
    cases: list[Case] = []
    for i, name in enumerate(WEIGHT_TYPES):
        w = int(name[1:])
        for j, m in enumerate((0, 1, 2, w - 1, w, 17, 63, 130)):
            cases.append(_case(w, m, (16, 33, 97)[j % 3], dtypes[(i + j) % 3]))
        cases += [_case(w, 17, 40, dtype, "bias", "silu") for dtype in dtypes]
        cases += [_case(w, 40, 33, dtype, "initial", "packed", "silu") for dtype in dtypes]
        cases += [
            _case(w, 33, 48, dtypes[i % 3], "strided", "bias"),
            _case(w, 33, 48, dtypes[i % 3], "transposed", "silu"),
            _case(w, 34, 20, fp16, "initial", "transposed", sequences=2),
            _case(w, 30, 20, bf16, "bias", "packed", "silu", "strided", sequences=9),
            _case(w, 3, 8, fp32, "initial", "packed", sequences=6),
            _case(w, 1, 17, bf16, "initial", "bias", "silu"),
            _case(w, 0, 17, fp32, "initial", "packed"),
        ]
    for channels in (4352, 10240):  # of Mamba2-2.7B's and Nemotron-H-8B's x, B and C
        cases.append(_case(4, 70, channels, fp16, "bias", "silu", "strided"))
    return ordered(cases)


def _fit(case: Case) -> Case:
    """The nearest case: K is the number of taps, and sequences are of one length."""
    sequences = case.sequences
    if "packed" not in case.flags and sequences and case.M % sequences:
        sequences = math.gcd(case.M, sequences)
    return replace(case, K=_width(case), group=0, sequences=sequences)


def _make_inputs(case: Case, seed: int) -> Inputs:
    w = _width(case) if case.weight_type in WEIGHT_TYPES else 0
    if case.K != w:
        raise ValueError(
            f"weight_type is {case.weight_type!r}, K {case.K}; conv1d has {list(WEIGHT_TYPES)}, "
            "and K is the number of taps"
        )
    lengths = sequence_lengths(case)
    packed = "packed" in case.flags
    rows, length = (1, case.M) if packed else (len(lengths), lengths[0])
    rng = rng_for(seed, case.id, "operands")

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return guarded((scale * rng.standard_normal(shape)).astype(np.float32), case.dtype)

    x = _laid_out(rng.standard_normal((rows, length, case.N)).astype(np.float32), case)
    operand = ConvOperand(
        weight=normal(case.N, w, scale=w**-0.5),
        bias=normal(case.N) if "bias" in case.flags else None,
        activation="silu" if "silu" in case.flags else None,
        initial_states=normal(len(lengths), case.N, w - 1) if "initial" in case.flags else None,
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)) if packed else None,
    )
    return Inputs(case, x, operand, operand)


def _laid_out(values: npt.NDArray[np.float32], case: Case) -> torch.Tensor:
    """x alone; "strided", as columns of a wider projection; "transposed", its tokens fastest."""
    rows, length, n = values.shape
    if not {"strided", "transposed"} & set(case.flags):
        return guarded(values, case.dtype)
    tall, wide = length + 3, n + 40
    buffer = torch.full((rows * tall * wide,), float("nan"), dtype=case.dtype)
    if "transposed" in case.flags:
        whole = buffer.view(rows, wide, tall).transpose(1, 2)
    else:
        whole = buffer.view(rows, tall, wide)
    return whole[:, 1 : 1 + length, 24 : 24 + n].copy_(torch.from_numpy(values))


def _bounds(inputs: Inputs) -> list[tuple[int, int, int]]:
    o: ConvOperand = inputs.source
    if o.cu_seqlens is None:
        return [(row, 0, inputs.x.shape[1]) for row in range(inputs.x.shape[0])]
    at = o.cu_seqlens.tolist()
    return [(0, first, last) for first, last in zip(at[:-1], at[1:], strict=True)]


def _f64(value: torch.Tensor) -> F64:
    return np.asarray(value.detach().cpu().double().numpy())


def _f64_or_none(value: torch.Tensor | None) -> F64 | None:
    return None if value is None else _f64(value)


def _matrix(y: Any, states: Any) -> torch.Tensor:
    """y [b, L, D] and states [S, D, W - 1] as one float [M + S (W - 1), D]."""
    channels = y.shape[2]
    rows = states.permute(0, 2, 1).reshape(-1, channels)
    return torch.cat([y.reshape(-1, channels), rows])


def _judged(y: Any, states: Any) -> torch.Tensor:
    return _matrix(y, states).to(torch.float32)


def _reference(inputs: Inputs) -> F64:
    o: ConvOperand = inputs.source
    x, weight = _f64(inputs.x), _f64(o.weight)
    y, states = conv_reference(
        x,
        weight,
        _f64_or_none(o.bias),
        o.activation == "silu",
        _f64_or_none(o.initial_states),
        _bounds(inputs),
    )
    return np.asarray(_matrix(torch.from_numpy(y), torch.from_numpy(states)).numpy())


def _error_model(inputs: Inputs, ref: F64) -> ErrorModel:
    o: ConvOperand = inputs.source
    case = inputs.case
    x, weight, bias = _f64(inputs.x), _f64(o.weight), _f64_or_none(o.bias)
    terms, _ = conv_terms(x, weight, _f64_or_none(o.initial_states), _bounds(inputs))
    total = terms.sum(axis=-1)
    square = (terms**2).sum(axis=-1) + total**2
    if bias is not None:
        square += bias**2
        total = total + bias
    variance = _UNIT**2 / 3 * (case.K + 8) * square
    if o.activation == "silu":
        sigmoid = 1.0 / (1.0 + np.exp(-total))
        slope = sigmoid * (1.0 + total * (1.0 - sigmoid))
        own = _UNIT**2 / 3 * (10.0 + total**2) * (total * sigmoid) ** 2
        variance = slope**2 * variance + own
    sigma = np.zeros(ref.shape)
    sigma[: case.M] = np.sqrt(variance).reshape(case.M, case.N)
    rounding = np.zeros(ref.shape)
    if case.act_dtype != "float32":
        rounding[: case.M] = half_ulp(np.abs(ref[: case.M]) + 7 * sigma[: case.M], case.dtype)
    return ErrorModel(sigma, torch.float32, rounding=rounding)


def operands(inputs: Inputs) -> ConvArgs:
    """The operands as launchers take them, with new results."""
    from tilewright.ops.conv1d.op import conv_args

    o: ConvOperand = inputs.weight
    return conv_args(
        inputs.x, o.weight, o.bias, activation=o.activation, initial_states=o.initial_states,
        cu_seqlens=o.cu_seqlens,
    )  # fmt: skip


def results(args: ConvArgs) -> Results:
    """What a launch has written, as a run returns it."""
    return Results((args.y, args.final_states), _judged)


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Results:
    from tilewright.ops.conv1d.op import causal_conv1d

    o: ConvOperand = inputs.weight
    made = causal_conv1d(
        inputs.x, o.weight, o.bias, activation=o.activation, initial_states=o.initial_states,
        cu_seqlens=o.cu_seqlens, tile=tile,
    )  # fmt: skip
    return Results(made, _judged)


def _space() -> TileSpace:
    from tilewright.ops.conv1d.space import CPU_SPACE

    return CPU_SPACE


def _flops(problem: Problem) -> float:
    return 2.0 * problem.M * problem.N * problem.K


def _bytes(problem: Problem) -> float:
    return float(DTYPES[problem.act_dtype].itemsize * problem.N * (2 * problem.M + problem.K))


def _changed(inputs: Inputs, **new: torch.Tensor) -> Inputs:
    operand = replace(inputs.source, **new)
    return replace(inputs, source=operand, weight=operand)


def _next_channel(inputs: Inputs) -> Inputs | None:
    """One channel takes the taps of the next."""
    weight = inputs.source.weight
    if len(weight) < 2:
        return None
    weight = weight.clone()
    weight[0] = weight[1]
    return _changed(inputs, weight=weight)


def _swapped_taps(inputs: Inputs) -> Inputs | None:
    """The last two taps of the last channel exchanged."""
    weight = inputs.source.weight.clone()
    weight[-1, -2:] = weight[-1, -2:].flip(0)
    return _changed(inputs, weight=weight)


def _arch() -> str:
    return cpu_device().arch


def _on_gpu(arch: str | None) -> OpSpec:
    from tilewright.ops.conv1d.gpu_spec import gpu_spec

    return gpu_spec(arch)


def _interpreted(arch: str | None) -> OpSpec:
    from tilewright.ops.conv1d.gpu_spec import gpu_spec

    return gpu_spec(INTERPRETER, "cpu")


SPEC = OpSpec(
    name=_OP,
    title="SSM_CONV",
    version=1,
    weight_types=WEIGHT_TYPES,
    cases=_cases(),
    make_inputs=_make_inputs,
    reference=_reference,
    error_model=_error_model,
    run=_run,
    flops=_flops,
    bytes=_bytes,
    corruptions={"taps of the next channel": _next_channel, "swapped taps": _swapped_taps},
    space=_space,
    sources=("tilewright.ops.conv1d.shifted",),
    arch=_arch,
    uses={"shifted": ("torch",)},
    devices={"cuda": _on_gpu, "interpreter": _interpreted},
    fit=_fit,
)
