"""moe on a GPU as the gate, the tuner and verify see it: `SPEC.on("cuda")`.

Operands and oracle are the CPU's: float64 from the codes of the expert that the ids name. Packing,
tiles and the error model are the GPU's: weights are rounded to the dtype of x before matrix units
multiply them. As many and as large experts as models have are judged on some of their columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.device import arch_of
from tilewright.errors import UnsupportedError
from tilewright.layout.experts import GpuExperts, pack_gpu_experts, pack_gpu_experts_w4
from tilewright.ops.cases import ordered
from tilewright.ops.check import ErrorModel, product_sigma
from tilewright.ops.contract import DTYPES, Case, Corruption, Inputs, OpSpec
from tilewright.ops.mmq.reference import BlockSource
from tilewright.ops.moe.reference import MoeSource, expert_product, expert_rows, expert_x
from tilewright.ops.pieces import oracle_pool
from tilewright.ops.space import TileSpace
from tilewright.ops.w4a16.gpu_spec import WEIGHT_UNITS, judged_columns, on_device, rows_of

__all__ = ["gpu_spec"]

F64 = npt.NDArray[np.float64]

_SOURCES = (
    "tilewright.ops.moe.gpu",
    "tilewright.ops.moe.hopper_gemm",
    "tilewright.ops.moe.hopper_parts",
    "tilewright.ops.moe.triton_combine",
    "tilewright.ops.moe.triton_gather",
    "tilewright.ops.moe.triton_gemm",
    "tilewright.ops.moe.triton_gemv",
    "tilewright.ops.moe.triton_parts",
    "tilewright.ops.moe.triton_route",
    "tilewright.ops.moe.triton_scatter",
    "tilewright.ops.moe.triton_slots",
    "tilewright.ops.mmq.gemv_parts",
    "tilewright.ops.mmq.gemv_weights",
    "tilewright.ops.mmq.hopper_math",
    "tilewright.ops.mmq.hopper_memory",
    "tilewright.ops.mmq.hopper_scales",
    "tilewright.ops.mmq.triton_outputs",
    "tilewright.ops.mmq.triton_parts",
    "tilewright.ops.w4a16.triton_ahead",
    "tilewright.ops.w4a16.triton_gemm",
    "tilewright.ops.w4a16.triton_parts",
    "tilewright.ops.gluon_compat",
    "tilewright.ops.wgmma",
    "tilewright.layout.blocks",
    "tilewright.layout.experts",
    "tilewright.layout.triton",
)


_MOST_VALUES = 1 << 26  # of all experts' weights, for which the oracle takes a second or two


def _cases(weight_types: tuple[str, ...], large: bool) -> tuple[Case, ...]:
    """Few slots and many, on both sides of every height of a tile, and every routing."""
    fp32, fp16, bf16 = tuple(DTYPES)
    cases: list[Case] = []
    for t, name in enumerate(weight_types):
        four_bit = name.startswith("uint4")
        unit = 256 if name.endswith("_K") or name == "IQ4_XS" else 32
        long, short = (512, 256) if unit == 256 else (320, 96)
        groups = {96: 32, 320: 64, 384: 128, 200: -1, 2048: 128} if four_bit else {}

        def case(
            dtype: str, m: int, n: int, k: int, mixture: tuple[int, int], *flags: str,
            routing: str = "even", name: str = name, groups: dict[int, int] = groups,
        ) -> Case:  # fmt: skip
            return Case(
                "moe", name, dtype, m, n, k, groups.get(k, 0), "float", flags, *mixture, routing
            )

        shapes = ((33, short, (4, 1)), (72, long, (8, 2)), (16, short, (8, 8)), (40, long, (5, 4)))
        for i, (n, k, mixture) in enumerate(shapes):
            for j, m in enumerate((1, 5, 17, 33)):
                if (i + j + t) % 2 == 0:
                    cases.append(case((fp32, fp16, bf16)[(t + i + j // 2) % 3], m, n, k, mixture))
        cases += [
            case(fp16, 0, 33, short, (4, 2)),
            case(fp16, 9, 33, long, (4, 2), "outliers"),
            case(bf16, 1, 33, long, (4, 2), "outliers"),
            case(fp16, 17, 33, short, (4, 2), "strided"),
            case(fp32, 5, 40, long, (4, 2), "transposed"),
            case(fp32, 17, 33, short, (3, 2), "edge"),
            case(bf16, 33, 33, short, (8, 2), routing="hot"),
            case(fp16, 17, 40, long, (8, 3), routing="few"),
            case(bf16, 5, 33, short, (3, 4), routing="repeat"),
            case(fp32, 65, 33, short, (1, 1)),
        ]
        if four_bit:
            cases += [
                case(fp16, 17, 33, long, (4, 2), "act_order"),
                case(bf16, 1, 33, long, (4, 2), "act_order"),
                case(bf16, 17, 33, 384, (4, 2)),
                case(fp32, 5, 33, 200, (4, 2)),
                case(fp16, 33, 33, 200, (4, 2)),
            ]
        if name in ("Q4_0", "Q4_K", "uint4"):  # as many experts as models have
            cases.append(case(fp16, 9, 16, short, (512, 8)))
        if large:
            for j, m in enumerate((1, 8, 64, 200)):
                cases.append(case((fp16, bf16)[j % 2], m, 768, 2048, (16, 8)))
    return ordered(cases)


def _judged(inputs: Inputs) -> tuple[npt.NDArray[np.int64] | None, MoeSource]:
    """The columns that the oracle computes, the same of every expert (None for all), and the rows
    of the weights that make them."""
    case, source = inputs.case, inputs.source
    if case.experts * case.N * case.K <= _MOST_VALUES:
        return None, source
    columns = judged_columns(case.M * case.top_k, case.N, case.K * case.experts)
    if columns is None:
        return None, source
    experts = tuple(
        BlockSource(one.type_name, one.raw[columns])
        if isinstance(one, BlockSource)
        else rows_of(one, columns)
        for one in source.experts
    )
    return columns, MoeSource(experts, source.ids)


def _of_each(inputs: Inputs, product: Callable[[F64, Any], F64]) -> F64:
    """[T, top_k, judged columns] of product(rows of x, weight) of every expert; of large ones
    several side by side: most of it is unpacking codes, which takes one core each."""
    columns, source = _judged(inputs)
    x = inputs.x64()
    whole = np.empty((*source.ids.shape, source.experts[0].N))

    def one(chosen: tuple[int, Any, Any]) -> None:
        expert, tokens, choices = chosen
        whole[tokens, choices] = product(x[tokens], source.experts[expert])

    if columns is None:
        for chosen in source.chosen():
            one(chosen)
    else:
        with oracle_pool() as pool:
            list(pool.map(one, source.chosen()))
    return whole


def _reference(inputs: Inputs) -> F64:
    return _of_each(inputs, expert_product)


def _error_model(inputs: Inputs, ref: F64) -> ErrorModel:
    unit = WEIGHT_UNITS[inputs.case.act_dtype]

    def deviation(x: F64, weight: Any) -> F64:
        return product_sigma(expert_x(x, weight), expert_rows(weight), weight_unit=unit)

    columns, _ = _judged(inputs)
    sigma = _of_each(inputs, deviation)
    return ErrorModel(sigma, inputs.case.dtype, columns=columns, of=inputs.case.N)


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    from tilewright.ops.moe.op import moe_gemm

    return moe_gemm(inputs.x, inputs.weight.experts, inputs.weight.ids, tile=tile)


def _space(arch: str) -> TileSpace:
    from tilewright.ops.moe.gpu_space import MOE_SPACE

    if arch != "sm_90":
        return MOE_SPACE
    from tilewright.ops.moe.hopper_planted import PLANTED

    return replace(MOE_SPACE, planted=(*MOE_SPACE.planted, *PLANTED))


def _corruption(of_cpu: Corruption, repack: Any) -> Corruption:
    def corrupt(inputs: Inputs) -> Inputs | None:
        corrupted = of_cpu(inputs)
        return None if corrupted is None else repack(corrupted)

    return corrupt


@functools.cache
def gpu_spec(arch: str | None = None, device: str = "cuda") -> OpSpec:
    """moe on GPUs.

    Args:
        arch: choose tiles for it; None for that of the current GPU.
        device: where operands lie: "cpu" for the interpreter.

    Raises:
        UnsupportedError: arch is None, and torch sees no GPU.
    """
    from tilewright.ops.moe.spec import SPEC as CPU_SPEC
    from tilewright.ops.moe.spec import MoeOperand

    if arch is None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "device is 'cuda', and torch sees no GPU: install a build of torch for it, or stay "
                "on the CPU"
            )
        arch = arch_of(torch.device("cuda", torch.cuda.current_device()))

    @functools.lru_cache(maxsize=4)  # two of many values, as `moe.spec` keeps them, and others
    def packed(experts: tuple[Any, ...]) -> GpuExperts:
        if not isinstance(experts[0], BlockSource):
            return pack_gpu_experts_w4(experts, device)
        raw = np.stack([one.raw for one in experts])
        return pack_gpu_experts(raw, experts[0].type_name, device, arch)

    def repack(inputs: Inputs) -> Inputs:
        source: MoeSource = inputs.source
        ids = torch.from_numpy(source.ids).to(device)
        operand = MoeOperand(packed(source.experts), ids)
        return replace(inputs, x=on_device(inputs.x, device), weight=operand)

    def make_inputs(case: Case, seed: int) -> Inputs:
        return repack(CPU_SPEC.make_inputs(case, seed))

    space = _space(arch)
    return replace(
        CPU_SPEC,
        cases=_cases(CPU_SPEC.weight_types, large=device != "cpu"),
        make_inputs=make_inputs,
        reference=_reference,
        error_model=_error_model,
        run=_run,
        corruptions={
            name: _corruption(corrupt, repack) for name, corrupt in CPU_SPEC.corruptions.items()
        },
        space=lambda: space,
        sources=_SOURCES,
        arch=lambda: arch,
        uses=dict.fromkeys(space.fields, ("triton",)),
        devices={},
    )
