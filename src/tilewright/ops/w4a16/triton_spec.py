"""w4a16 on Triton as the gate and the tuner see it.

``tilewright verify --spec tilewright.ops.w4a16.triton_spec:SPEC``

Operands and oracle are those of the CPU's w4a16, so both are held to the same numbers; only the
packing differs, and the error model: this kernel rounds weights to the dtype of x. On a machine
without a GPU set TRITON_INTERPRET=1; the cases are small enough for the interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.device import INTERPRETER, arch_of
from tilewright.layout.triton import pack_w4_words
from tilewright.ops.cases import Shape, ordered
from tilewright.ops.check import ErrorModel, product_sigma
from tilewright.ops.contract import DTYPES, Case, Corruption, Inputs, OpSpec
from tilewright.ops.space import TileSpace
from tilewright.ops.w4a16.gpu_spec import WEIGHT_UNITS, on_device
from tilewright.ops.w4a16.reference import w4a16_rows
from tilewright.ops.w4a16.spec import SPEC as CPU_SPEC
from tilewright.ops.w4a16.triton_op import OP, w4a16_triton
from tilewright.ops.w4a16.triton_space import space_on

__all__ = ["SPEC", "on_device"]

F64 = npt.NDArray[np.float64]

_BATCHES = (1, 5, 16, 17, 33, 63)
# N and K that fit no tile: K ends within a step, within a word; N within a packed zero point.
_RAGGED: tuple[Shape, ...] = (
    (33, 192, 64),
    (40, 160, 32),
    (97, 384, 128),
    (1, 96, 32),
    (24, 200, -1),
    (31, 132, -1),
)
_WHOLE: Shape = (64, 256, 128)


def _cases() -> tuple[Case, ...]:
    cases: list[Case] = []
    dtypes = tuple(DTYPES)
    for weight_type in CPU_SPEC.weight_types:

        def case(
            dtype: str, m: int, shape: Shape, *flags: str, weight_type: str = weight_type
        ) -> Case:
            return Case(OP, weight_type, dtype, m, *shape, "float", flags)

        for i, shape in enumerate((*_RAGGED, _WHOLE)):
            for j, m in enumerate(_BATCHES):
                cases.append(case(dtypes[(i + j) % 3], m, shape))
        cases += [
            case("float16", 0, _WHOLE),
            case("float16", 17, _RAGGED[0]),
            case("bfloat16", 17, _RAGGED[0]),
            case("float16", 130, _RAGGED[0]),
            *(case(dtype, 17, _RAGGED[1], "outliers") for dtype in dtypes),
            *(case(dtype, 17, _RAGGED[0], "edge") for dtype in dtypes),
            case("float16", 5, _RAGGED[0], "strided"),
            case("bfloat16", 17, _WHOLE, "transposed"),
            case("float32", 6, _RAGGED[2], "ndim3"),
            case("float16", 17, _RAGGED[2], "bias"),
            case("bfloat16", 16, _RAGGED[1], "bias"),
            case("float16", 17, _WHOLE, "act_order"),
            case("bfloat16", 5, _RAGGED[0], "act_order", "bias", "outliers", "strided"),
        ]
    return ordered(cases)


def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    from tilewright.ops.w4a16.triton_gemm import INTERPRETED

    return "cpu" if INTERPRETED else "cuda"


def _repacked(inputs: Inputs, case: Case) -> Inputs:
    device = _device()
    return Inputs(
        case,
        on_device(inputs.x, device),
        inputs.source,
        pack_w4_words(inputs.source).to(device),
        None if inputs.bias is None else inputs.bias.to(device),
    )


def _make_inputs(case: Case, seed: int) -> Inputs:
    return _repacked(CPU_SPEC.make_inputs(replace(case, op=CPU_SPEC.name), seed), case)


def _error_model(inputs: Inputs, ref: F64) -> ErrorModel:
    x = inputs.x64()
    sigma = product_sigma(
        x if inputs.source.perm is None else x[:, inputs.source.perm],
        w4a16_rows(inputs.source),
        bias=inputs.bias64(),
        weight_unit=WEIGHT_UNITS[inputs.case.act_dtype],
    )
    return ErrorModel(sigma.reshape(ref.shape), inputs.case.dtype)


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    return w4a16_triton(inputs.x, inputs.weight, inputs.bias, tile=tile)


def _corruption(of_cpu: Corruption) -> Corruption:
    def corrupt(inputs: Inputs) -> Inputs | None:
        corrupted = of_cpu(inputs)
        return None if corrupted is None else _repacked(corrupted, inputs.case)

    return corrupt


def _space() -> TileSpace:
    return space_on(INTERPRETER if _device() == "cpu" else arch_of(torch.device("cuda")))


SPEC = OpSpec(
    name=OP,
    title="W4A16 Triton",
    version=1,
    weight_types=CPU_SPEC.weight_types,
    cases=_cases(),
    make_inputs=_make_inputs,
    reference=CPU_SPEC.reference,
    error_model=_error_model,
    run=_run,
    flops=CPU_SPEC.flops,
    bytes=CPU_SPEC.bytes,
    corruptions={name: _corruption(corrupt) for name, corrupt in CPU_SPEC.corruptions.items()},
    space=_space,
)
