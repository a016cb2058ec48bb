"""mmq on a GPU as the gate, the tuner and verify see it: `SPEC.on("cuda")`.

Operands and oracle are the CPU's: float64 from the codes of the file's blocks. Packing, tiles and
the error model are the GPU's: weights are rounded to the dtype of x before they are multiplied; or,
where that is asked for, x is to 8 bits, and a tile of either kind may serve. The result of a large
weight is judged on some of its columns, as w4a16's is.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.device import arch_of
from tilewright.errors import UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for
from tilewright.ops.cases import Shape, ordered
from tilewright.ops.check import ErrorModel, activation_variance, product_sigma
from tilewright.ops.contract import DTYPES, Case, Corruption, Inputs, OpSpec
from tilewright.ops.mmq.reference import BlockSource, mmq_reference, mmq_rows
from tilewright.ops.pieces import in_pieces
from tilewright.ops.space import TileSpace
from tilewright.ops.w4a16.gpu_spec import WEIGHT_UNITS, judged_columns, on_device

__all__ = ["gpu_spec"]

F64 = npt.NDArray[np.float64]

_SOURCES = (
    "tilewright.ops.mmq.triton_gemm",
    "tilewright.ops.mmq.triton_outputs",
    "tilewright.ops.mmq.triton_parts",
    "tilewright.ops.mmq.decode_gemv",
    "tilewright.ops.mmq.decode_parts",
    "tilewright.ops.mmq.decode_sums",
    "tilewright.ops.mmq.triton_gemv",
    "tilewright.ops.mmq.gemv_parts",
    "tilewright.ops.mmq.gemv_weights",
    "tilewright.ops.mmq.triton_int8",
    "tilewright.ops.mmq.int8_parts",
    "tilewright.ops.mmq.int8_fix_up",
    "tilewright.ops.mmq.hopper_gemm",
    "tilewright.ops.mmq.hopper_math",
    "tilewright.ops.mmq.hopper_memory",
    "tilewright.ops.mmq.hopper_parts",
    "tilewright.ops.mmq.hopper_scales",
    "tilewright.ops.mmq.dense_gemm",
    "tilewright.ops.mmq.quantize_rows",
    "tilewright.ops.mmq.schedule",
    "tilewright.ops.mmq.gpu",
    "tilewright.ops.w4a16.gpu",
    "tilewright.ops.w4a16.hopper_parts",
    "tilewright.ops.w4a16.triton_ahead",
    "tilewright.ops.w4a16.triton_gemm",
    "tilewright.ops.w4a16.triton_parts",
    "tilewright.ops.gluon_compat",
    "tilewright.ops.mma_fragments",
    "tilewright.ops.wgmma",
    "tilewright.ops.workspace",
    "tilewright.layout.blocks",
)

_BATCHES = (1, 5, 16, 17, 33, 63)
# N that fit no tile; K of one block, of several, and one that ends within a step.
_SHAPES_32: tuple[Shape, ...] = ((33, 96, 0), (40, 320, 0), (97, 288, 0))
_SHAPES_256: tuple[Shape, ...] = ((33, 256, 0), (40, 768, 0), (97, 512, 0))
_LARGE: tuple[Shape, ...] = ((1000, 2048, 0), (520, 10752, 0), (4096, 4096, 0))


def _cases(weight_types: tuple[str, ...], large: bool) -> tuple[Case, ...]:
    cases: list[Case] = []
    dtypes = tuple(DTYPES)
    fp32, fp16, bf16 = dtypes
    for t, weight_type in enumerate(weight_types):
        shapes = _SHAPES_32 if BLOCK_TYPES[weight_type].block_size == 32 else _SHAPES_256

        def case(
            dtype: str, m: int, shape: Shape, *flags: str, weight_type: str = weight_type
        ) -> Case:
            return Case("mmq", weight_type, dtype, m, *shape, "float", flags)

        def eight(
            dtype: str, m: int, shape: Shape, *flags: str, weight_type: str = weight_type
        ) -> Case:
            return Case("mmq", weight_type, dtype, m, *shape, "int8", flags)

        for i, shape in enumerate(shapes):
            for j, m in enumerate(_BATCHES):
                if (i + j) % 2 == 0:
                    cases.append(case(dtypes[(t + i + j // 2) % 3], m, shape))
        first, second, third = shapes
        cases += [
            case(fp16, 0, first),
            case(fp16, 130, first),
            *(case(dtype, 17, first, "outliers") for dtype in dtypes),
            *(case(dtype, 5, second, "edge") for dtype in dtypes),
            case(fp16, 5, first, "strided"),
            case(bf16, 17, first, "transposed"),
            case(fp32, 6, first, "ndim3"),
            case(fp16, 17, first, "bias"),
            case(bf16, 5, second, "bias", "outliers", "strided"),
        ]
        # Rows that fill whole tiles, where kernels leave out what they compare others with; long K;
        # and x in 8 bits, with a row, with few, and with enough of them.
        of_32 = BLOCK_TYPES[weight_type].block_size == 32
        whole: Shape = (128, shapes[1][1], 0)
        long: Shape = (33, 10944 if of_32 else 10752, 0)
        cases += [
            case(dtypes[t % 3], 17, whole),
            case(dtypes[(t + 1) % 3], 5, long),
            case(dtypes[(t + 2) % 3], 17, (128, 14336, 0)),
            eight(dtypes[t % 3], 1, first),
            eight(dtypes[(t + 1) % 3], 17, second, "bias"),
            eight(dtypes[(t + 2) % 3], 33, whole, "outliers"),
            eight(dtypes[t % 3], 63, third, "strided"),
            eight(fp16, 17, long),
            *(eight(dtype, 17, second, "edge") for dtype in (fp32, bf16)),
        ]
        if large:
            for i, shape in enumerate(_LARGE):
                for j, m in enumerate((1, 8, 32, 64, 300, 512)):
                    cases.append(case(dtypes[1 + (i + j) % 2], m, shape))
            cases += [eight(fp16, m, (4096, 4096, 0)) for m in (17, 130, 512)]
            cases.append(eight(bf16, 512, (1000, 14336, 0)))
    return ordered(cases)


def _judged(inputs: Inputs) -> tuple[npt.NDArray[np.int64] | None, BlockSource, F64 | None]:
    case, bias, source = inputs.case, inputs.bias64(), inputs.source
    columns = judged_columns(case.M, case.N, case.K) if case.M else None
    if columns is not None:
        source = BlockSource(source.type_name, source.raw[columns])
        bias = None if bias is None else bias[columns]
    return columns, source, bias


def _rows(source: BlockSource, rows: slice) -> BlockSource:
    return BlockSource(source.type_name, source.raw[rows])


def _reference(inputs: Inputs) -> F64:
    _, source, bias = _judged(inputs)
    x = inputs.x64()

    def product(some: slice, rows: slice) -> F64:
        return mmq_reference(x[some], _rows(source, rows), None if bias is None else bias[rows])

    y = in_pieces(len(x), source.N, source.K, product)
    return y.reshape(*inputs.x.shape[:-1], source.N)


def _error_model(inputs: Inputs, ref: F64) -> ErrorModel:
    columns, source, bias = _judged(inputs)
    x = inputs.x64()
    variance = activation_variance(x) if inputs.case.activations == "int8" else None

    def deviation(some: slice, rows: slice) -> F64:
        return product_sigma(
            x[some],
            mmq_rows(_rows(source, rows)),
            bias=None if bias is None else bias[rows],
            x_variance=None if variance is None else variance[some],
            weight_unit=WEIGHT_UNITS[inputs.case.act_dtype],
        )

    sigma = in_pieces(len(x), source.N, source.K, deviation).reshape(ref.shape)
    return ErrorModel(sigma, inputs.case.dtype, variance is None, columns=columns, of=inputs.case.N)


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    from tilewright.ops.mmq.op import mmq_gemm

    return mmq_gemm(
        inputs.x, inputs.weight, inputs.bias, activations=inputs.case.activations, tile=tile
    )


def _space(arch: str) -> TileSpace:
    from tilewright.ops.mmq.triton_space import TRITON_SPACE

    if arch != "sm_90":
        return TRITON_SPACE
    from tilewright.ops.mmq.hopper_planted import PLANTED

    return replace(TRITON_SPACE, planted=(*TRITON_SPACE.planted, *PLANTED))


def _corruption(of_cpu: Corruption, repack: Any) -> Corruption:
    def corrupt(inputs: Inputs) -> Inputs | None:
        corrupted = of_cpu(inputs)
        return None if corrupted is None else repack(corrupted)

    return corrupt


@functools.cache
def gpu_spec(arch: str | None = None, device: str = "cuda") -> OpSpec:
    """mmq on GPUs.

    Args:
        arch: choose tiles for it; None for that of the current GPU.
        device: where operands lie: "cpu" for the interpreter.

    Raises:
        UnsupportedError: arch is None, and torch sees no GPU.
    """
    from tilewright.ops.mmq.spec import SPEC as CPU_SPEC

    if arch is None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "device is 'cuda', and torch sees no GPU: install a build of torch for it, or stay "
                "on the CPU"
            )
        arch = arch_of(torch.device("cuda", torch.cuda.current_device()))

    @functools.lru_cache(maxsize=4)  # two large ones, as `mmq.spec` keeps them, and others between
    def packed(source: BlockSource) -> GpuBlocks:
        made = pack_blocks_for(source.raw, source.type_name, device, arch=arch)
        assert isinstance(made, GpuBlocks)
        return made

    def repack(inputs: Inputs) -> Inputs:
        return replace(
            inputs,
            x=on_device(inputs.x, device),
            weight=packed(inputs.source),
            bias=None if inputs.bias is None else inputs.bias.to(device),
        )

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
        uses={**dict.fromkeys(space.fields, ("triton",)), "dense": ("triton", "torch")},
        devices={},
    )
