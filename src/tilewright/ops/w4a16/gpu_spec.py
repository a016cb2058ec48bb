"""w4a16 on a GPU as the gate, the tuner and verify see it: `SPEC.on("cuda")`.

Operands and oracle are the CPU's; packing, tiles and error model are those of the layout family
that the arch at hand takes. The result of a large weight is judged on some of its columns
(`ErrorModel.columns`), the first and the last among them: the float64 oracle would otherwise take
minutes for what the GPU computes in a millisecond.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.device import arch_of
from tilewright.formats.w4 import W4Codes
from tilewright.layout.cpu import PackedW4
from tilewright.layout.hopper import HopperW4
from tilewright.layout.pack import family_of, pack_w4_for
from tilewright.layout.triton import WordsW4
from tilewright.ops.cases import ordered
from tilewright.ops.check import ErrorModel, product_sigma
from tilewright.ops.contract import Case, Corruption, Inputs, OpSpec, rng_for
from tilewright.ops.pieces import in_pieces
from tilewright.ops.space import TileSpace
from tilewright.ops.w4a16.amd_space import AMD_ARCHS
from tilewright.ops.w4a16.reference import w4a16_reference, w4a16_rows
from tilewright.tiles.tile import Tile

__all__ = ["gpu_spec", "judged_columns", "on_device", "rows_of"]

F64 = npt.NDArray[np.float64]

_SOURCES = {
    "hopper": ("hopper_gemm", "hopper_decode", "hopper_decode_parts", "hopper_parts"),
    "words": (
        "triton_gemm",
        "triton_ahead",
        "triton_skinny",
        "triton_parts",
        "amd_gemm",
        "amd_parts",
        "amd_layouts",
        "amd_space",
    ),
}
_LAYOUTS = {"hopper": "hopper", "words": "triton"}


def _sources(family: str) -> tuple[str, ...]:
    """What the kernels of a family are made of, their launchers included."""
    return (
        *(f"tilewright.ops.w4a16.{name}" for name in _SOURCES[family]),
        "tilewright.ops.w4a16.gpu",
        "tilewright.ops.workspace",
        "tilewright.ops.gluon_compat",
        f"tilewright.ops.{'wgmma' if family == 'words' else 'mma_fragments'}",
        f"tilewright.layout.{_LAYOUTS[family]}",
    )


WEIGHT_UNITS = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of the weights that are multiplied, by the dtype of x."""

_MOST_OUTPUTS = 1 << 19
_MOST_VALUES = 1 << 24  # of the weight, in float64 at a time
_PIECE = 16  # columns that are judged together: the width of the check's tiles


def judged_columns(m: int, n: int, k: int) -> npt.NDArray[np.int64] | None:
    """The columns of y [m, n] that the oracle computes, in whole pieces of 16; None for all.

    The first and the last 64 are among them; the others are drawn, the same in every process.
    """
    most = min(_MOST_OUTPUTS // max(m, 1), _MOST_VALUES // k)
    most = max(2 * 8, most // _PIECE) * _PIECE
    if n <= most:
        return None
    pieces = -(-n // _PIECE)
    edges = [*range(4), *range(pieces - 4, pieces)]
    rng = rng_for(0, "columns", m, n, k)
    middle = rng.choice(np.arange(4, pieces - 4), most // _PIECE - len(edges), replace=False)
    first = np.sort(np.concatenate([edges, middle])) * _PIECE
    columns = (first[:, None] + np.arange(_PIECE)).reshape(-1)
    return np.asarray(columns[columns < n], dtype=np.int64)


def on_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A view on another device with its strides and with all that lies around it."""
    whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def rows_of(codes: W4Codes, columns: npt.NDArray[np.int64] | slice | None) -> W4Codes:
    """The rows of the weight that make those columns of y."""
    if columns is None:
        return codes
    zeros = None if codes.zeros is None else codes.zeros[columns]
    return replace(codes, codes=codes.codes[columns], scales=codes.scales[columns], zeros=zeros)


def _judged(inputs: Inputs) -> tuple[npt.NDArray[np.int64] | None, W4Codes, F64 | None]:
    case, bias = inputs.case, inputs.bias64()
    columns = judged_columns(case.M, case.N, case.K)
    if bias is not None and columns is not None:
        bias = bias[columns]
    return columns, rows_of(inputs.source, columns), bias


def _reference(inputs: Inputs) -> F64:
    columns, codes, bias = _judged(inputs)
    x = inputs.x64()

    def product(some: slice, rows: slice) -> F64:
        return w4a16_reference(x[some], rows_of(codes, rows), None if bias is None else bias[rows])

    n = inputs.case.N if columns is None else len(columns)
    return in_pieces(len(x), n, codes.K, product).reshape(*inputs.x.shape[:-1], n)


def _error_model(inputs: Inputs, ref: F64) -> ErrorModel:
    columns, codes, bias = _judged(inputs)
    x = inputs.x64()
    x = x if codes.perm is None else x[:, codes.perm]

    def deviation(some: slice, rows: slice) -> F64:
        return product_sigma(
            x[some],
            w4a16_rows(rows_of(codes, rows)),
            bias=None if bias is None else bias[rows],
            weight_unit=WEIGHT_UNITS[inputs.case.act_dtype],
        )

    sigma = in_pieces(len(x), len(codes.codes), codes.K, deviation).reshape(ref.shape)
    return ErrorModel(sigma, inputs.case.dtype, columns=columns, of=inputs.case.N)


def _run(inputs: Inputs, tile: Tile | None = None, threads: int | None = None) -> torch.Tensor:
    from tilewright.ops.w4a16.op import w4a16_gemm

    return w4a16_gemm(inputs.x, inputs.weight, inputs.bias, tile=tile)


def _cases(family: str) -> tuple[Case, ...]:
    """Those of the portable kernels, and on Hopper more K, N and rows than an interpreter bears."""
    from tilewright.ops.w4a16.triton_spec import SPEC as PORTABLE

    cases = [replace(case, op="w4a16") for case in PORTABLE.cases]
    if family != "hopper":
        return ordered(cases)
    cases = [case for case in cases if case.act_dtype != "float32"]
    # (N, K, group): within a fragment, a block and a tile; one group a step and several.
    shapes = (
        (520, 1024, 128),
        (1000, 2048, 32),
        (384, 1536, 64),
        (264, 1280, 256),
        (136, 1000, -1),
    )
    for weight_type in PORTABLE.weight_types:
        for i, (n, k, group) in enumerate(shapes):
            for j, m in enumerate((1, 3, 8, 17, 64, 100, 129, 300)):
                dtype = ("float16", "bfloat16")[(i + j) % 2]
                flags = (("bias",), (), ("strided",), ("outliers",))[(i + 2 * j) % 4]
                cases.append(Case("w4a16", weight_type, dtype, m, n, k, group, "float", flags))
        for m in (1, 16, 512, 1024, 4096, 8192):
            for dtype in ("float16", "bfloat16"):
                cases.append(Case("w4a16", weight_type, dtype, m, 4096, 4096, 128))
    return ordered(cases)


def _corruption(of_cpu: Corruption, repack: Any) -> Corruption:
    def corrupt(inputs: Inputs) -> Inputs | None:
        corrupted = of_cpu(inputs)
        return None if corrupted is None else repack(corrupted)

    return corrupt


@functools.cache
def gpu_spec(arch: str | None = None, device: str = "cuda") -> OpSpec:
    """w4a16 on this machine's GPU.

    Args:
        arch: pack and choose tiles for it; None for that of the current GPU.
        device: where operands lie: "cpu" for the interpreter.

    Raises:
        UnsupportedError: torch sees no GPU.
    """
    from tilewright.ops.w4a16.spec import SPEC as CPU_SPEC

    if arch is None:
        arch = arch_of(_gpu())
    family = family_of(arch)
    if family == "hopper":
        from tilewright.ops.w4a16.hopper_space import HOPPER_SPACE as space
    else:
        from tilewright.ops.w4a16.triton_space import space_on

        space = space_on(arch)
    if arch in AMD_ARCHS:
        from tilewright.ops.w4a16.amd_planted import AMD_PLANTED

        space = replace(space, planted=(*space.planted, *AMD_PLANTED))

    @functools.lru_cache(maxsize=2)
    def packed(codes: W4Codes, dtype: torch.dtype) -> PackedW4 | WordsW4 | HopperW4:
        family = family_of(arch, dtype)
        return pack_w4_for(codes, device, act_dtype=dtype, arch=arch, family=family)

    def repack(inputs: Inputs) -> Inputs:
        return replace(
            inputs,
            x=on_device(inputs.x, device),
            weight=packed(inputs.source, inputs.case.dtype),
            bias=None if inputs.bias is None else inputs.bias.to(device),
        )

    def make_inputs(case: Case, seed: int) -> Inputs:
        return repack(_drawn(case, seed))

    def get_space() -> TileSpace:
        return space

    return replace(
        CPU_SPEC,
        cases=_cases(family),
        make_inputs=make_inputs,
        reference=_reference,
        error_model=_error_model,
        run=_run,
        corruptions={
            name: _corruption(corrupt, repack) for name, corrupt in CPU_SPEC.corruptions.items()
        },
        space=get_space,
        sources=_sources(family),
        arch=lambda: arch,
        uses=dict.fromkeys(space.fields, ("triton",)),
        devices={},
    )


def _drawn(case: Case, seed: int) -> Inputs:
    """Operands as on the CPU, without packing the weight for its kernels."""
    from tilewright.ops.w4a16.spec import draw_inputs

    return draw_inputs(case, seed)


def _gpu() -> torch.device:
    from tilewright.errors import UnsupportedError

    if not torch.cuda.is_available():
        raise UnsupportedError(
            "device is 'cuda', and torch sees no GPU: install a build of torch for it, or stay on "
            "the CPU"
        )
    return torch.device("cuda", torch.cuda.current_device())
