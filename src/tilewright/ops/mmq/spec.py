"""mmq: GGUF blocks, as they lie in the file, times float activations.

Weights are random bytes with scales drawn so that they look like a trained layer's: zero mean,
standard deviation about 1 / sqrt(K), scales that vary by a third from block to block.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.device import INTERPRETER, cpu_device
from tilewright.formats.blocks import BLOCK_TYPES
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
from tilewright.ops.mmq.reference import BlockSource, mmq_reference, mmq_rows
from tilewright.ops.space import TileSpace
from tilewright.tiles.tile import Problem

__all__ = ["SPEC"]

F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

# Per type: root mean square of the value, and mean of the part above the minimum in units of the
# minimum's own scale, for random bytes with all float16 scales 1 (MXFP4: exponent byte 128).
_RANDOM_BYTES: dict[str, tuple[float, float]] = {
    "Q4_0": (4.64, 0.0),
    "Q4_1": (4.61, 7.5),
    "Q5_0": (9.25, 0.0),
    "Q5_1": (9.23, 15.5),
    "Q8_0": (73.9, 0.0),
    "Q2_K": (13.9, 1.5),
    "Q3_K": (43.4, 0.0),
    "Q4_K": (261.0, 7.5),
    "Q5_K": (532.0, 15.5),
    "Q6_K": (1366.0, 0.0),
    "IQ4_NL": (68.4, 0.0),
    "IQ4_XS": (1265.0, 0.0),
    "MXFP4": (5.86, 0.0),
}

WEIGHT_TYPES = tuple(_RANDOM_BYTES)

_GUARD = 64
_LARGE = 1 << 22  # values of a weight that takes longer to draw than to multiply

_SHAPES_32: tuple[Shape, ...] = (
    (1, 32, 0),
    (16, 96, 0),
    (33, 576, 0),
    (97, 256, 0),
    (128, 1024, 0),
    (576, 512, 0),
)
_SHAPES_256: tuple[Shape, ...] = (
    (1, 256, 0),
    (16, 512, 0),
    (33, 768, 0),
    (97, 256, 0),
    (128, 1024, 0),
    (576, 512, 0),
)


def _cases() -> tuple[Case, ...]:
    cases: list[Case] = []
    for name in WEIGHT_TYPES:
        small = BLOCK_TYPES[name].block_size == 32
        shapes = _SHAPES_32 if small else _SHAPES_256
        ragged: Shape = (97, 288 if small else 512, 0)
        whole: Shape = (128, 320 if small else 256, 0)
        long = (33, 10944 if small else 4352, 0)
        for path, dtypes in (("float", 2), ("int8", 1)):
            cases += grid_cases("mmq", name, shapes, activations=path, dtypes=dtypes)
            cases += special_cases("mmq", name, ragged, whole, activations=path)
            cases += [
                Case("mmq", name, dtype, m, *long, path)
                for m, dtype in zip((1, 6, 17), DTYPES, strict=True)
            ]
    return ordered(cases)


def _make_inputs(case: Case, seed: int) -> Inputs:
    if case.weight_type not in _RANDOM_BYTES:
        raise ValueError(f"weight_type is {case.weight_type!r}; mmq has {list(WEIGHT_TYPES)}")
    draw = _draw_large if case.N * case.K >= _LARGE else _draw_small
    source, packed = draw(case.weight_key, seed)
    return Inputs(case, draw_activations(case, seed), source, packed, draw_bias(case, seed))


def _draw_weight(key: tuple[Any, ...], seed: int) -> tuple[BlockSource, Any]:
    _, type_name, act_dtype, n, k, _, flags = key
    rng = rng_for(seed, *key)
    block = BLOCK_TYPES[type_name]
    raw = _guarded(n, block.row_bytes(k))
    raw[...] = np.frombuffer(rng.bytes(raw.size), dtype=np.uint8).reshape(raw.shape)
    blocks = raw.reshape(n, -1, block.block_bytes)
    rms, ratio = _RANDOM_BYTES[type_name]
    unit = 1.0 / (np.sqrt(k) * rms)
    if type_name == "MXFP4":
        centre = 128 + round(np.log2(unit))
        blocks[:, :, 0] = centre + rng.integers(-1, 2, blocks.shape[:2])
        if "edge" in flags:
            _mxfp4_edges(blocks, centre + 3 if act_dtype == "float16" else 160)
    else:
        scale = unit * rng.lognormal(0.0, 0.3, blocks.shape[:2])
        minimum = ratio * scale * rng.normal(1.0, 0.2, blocks.shape[:2])
        if block.name in ("Q4_1", "Q5_1"):
            minimum = -minimum  # added as it is; the K-quants subtract theirs
        if "edge" in flags:
            edge_scales(scale, act_dtype)
            if ratio:
                edge_scales(minimum, act_dtype)
        for at, values in zip(block.scale_fields, (scale, minimum), strict=False):
            _put_half(blocks, at, values)
    source = BlockSource(type_name, raw)
    return source, _pack(source)


# Kept apart: the gate draws two large weights, which serve all tiles of a problem and its other
# numbers of rows, and many small ones between.
_draw_small = functools.lru_cache(maxsize=1)(_draw_weight)
_draw_large = functools.lru_cache(maxsize=2)(_draw_weight)


def _guarded(n: int, row_bytes: int) -> U8:
    """uint8 [n, row_bytes] inside a buffer of 0xFF, which reads as NaN for a scale."""
    buffer = np.full(_GUARD + n * row_bytes + _GUARD, 0xFF, dtype=np.uint8)
    return buffer[_GUARD : _GUARD + n * row_bytes].reshape(n, row_bytes)


def _put_half(blocks: U8, at: int, values: F64) -> None:
    halves = values.astype("<f2")
    blocks[:, :, at : at + 2] = halves.view(np.uint8).reshape(*halves.shape, 2)


def _mxfp4_edges(blocks: U8, huge: int) -> None:
    blocks[1::8, :, 1:] = 0
    blocks[2::8, 0, 1:] = 0
    blocks[3::8, :, 1:] |= 0x88  # every value negative
    blocks[4::8, :, 0] = huge
    blocks[5::8, :, 0] = 10


def _pack(source: BlockSource) -> Any:
    from tilewright.layout.cpu import pack_blocks

    return pack_blocks(source.raw, source.type_name)


def _reference(inputs: Inputs) -> F64:
    y = mmq_reference(inputs.x64(), inputs.source, inputs.bias64())
    return y.reshape(*inputs.x.shape[:-1], inputs.case.N)


def _error_model(inputs: Inputs, ref: F64) -> ErrorModel:
    x = inputs.x64()
    variance = activation_variance(x) if inputs.case.activations == "int8" else None
    sigma = product_sigma(x, mmq_rows(inputs.source), bias=inputs.bias64(), x_variance=variance)
    return ErrorModel(sigma.reshape(ref.shape), inputs.case.dtype, variance is None)


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    from tilewright.ops.mmq.op import mmq_gemm

    return mmq_gemm(
        inputs.x, inputs.weight, inputs.bias,
        activations=inputs.case.activations, tile=tile, threads=threads,
    )  # fmt: skip


def _space() -> TileSpace:
    from tilewright.ops.mmq.space import CPU_SPACE

    return CPU_SPACE


def _flops(problem: Problem) -> float:
    return 2.0 * problem.M * problem.N * problem.K


def _bytes(problem: Problem) -> float:
    block = BLOCK_TYPES[problem.weight_type]
    weight = problem.N * problem.K / block.block_size * block.block_bytes
    size = DTYPES[problem.act_dtype].itemsize
    return weight + size * problem.M * (problem.K + problem.N)


def _corrupted(inputs: Inputs, row: int, block: int, new: U8) -> Inputs:
    """Inputs with one block of one row replaced."""
    source: BlockSource = inputs.source
    size = BLOCK_TYPES[source.type_name].block_bytes
    raw = _guarded(*source.raw.shape)
    raw[...] = source.raw
    raw[row, block * size : (block + 1) * size] = new
    changed = BlockSource(source.type_name, raw)
    return replace(inputs, source=changed, weight=_pack(changed))


def _block_column(inputs: Inputs, column: int) -> tuple[int, U8, npt.NDArray[np.float32]]:
    """The block of every row that holds this column: its number, its bytes [N, block_bytes], and
    the scale [N] of the column's value."""
    block = BLOCK_TYPES[inputs.source.type_name]
    number = column // block.block_size
    raw = inputs.source.raw[:, number * block.block_bytes : (number + 1) * block.block_bytes]
    scale = block.codes(raw).scale[:, column % block.block_size // block.sub]
    return number, raw, scale


def _heaviest(inputs: Inputs) -> int:
    """The column that meets the largest activations."""
    return int(np.argmax((inputs.x64() ** 2).sum(axis=0)))


def _flip_code(inputs: Inputs) -> Inputs | None:
    """The bit of one code that changes it most, where the largest activations are.

    Which bit of the block that is, the block's own decoder tells: flip each bit in turn and keep
    those that change this one code and nothing else.
    """
    column = _heaviest(inputs)
    block = BLOCK_TYPES[inputs.source.type_name]
    number, raw, scale = _block_column(inputs, column)
    rows = np.flatnonzero(scale)
    if not len(rows):
        return None
    row = int(rows[np.argsort(np.abs(scale[rows]))[len(rows) // 2]])
    bits = 8 * block.block_bytes
    flipped = np.repeat(raw[row : row + 1], bits, axis=0)
    flipped[np.arange(bits), np.arange(bits) // 8] ^= (1 << (np.arange(bits) % 8)).astype(np.uint8)
    before, after = block.codes(raw[row : row + 1]), block.codes(flipped)
    change = np.abs(after.codes.astype(np.int64) - before.codes)
    change[~(after.scale == before.scale).all(axis=1)] = 0
    if before.minimum is not None and after.minimum is not None:
        change[~(after.minimum == before.minimum).all(axis=1)] = 0
    at = column % block.block_size
    others = np.delete(change, at, axis=1).any(axis=1)
    bit = int(np.argmax(np.where(others, 0, change[:, at])))
    return _corrupted(inputs, row, number, flipped[bit])


def _wrong_scale(inputs: Inputs) -> Inputs | None:
    """The scale field of one block taken from the next row, as an index that is one off does."""
    block = BLOCK_TYPES[inputs.source.type_name]
    at = block.scale_fields[0]
    size = 1 if block.name == "MXFP4" else 2
    number, raw, scale = _block_column(inputs, _heaviest(inputs))
    taken = raw.copy()
    if len(raw) > 1:
        taken[:, at : at + size] = np.roll(raw, -1, axis=0)[:, at : at + size]
    else:
        taken[:, at + size - 1] ^= 1 if size == 1 else 4  # one bit of the exponent
    other = block.codes(taken).scale
    before = block.codes(raw).scale
    change = np.abs(other - before).max(axis=1) / np.where(scale == 0, np.inf, np.abs(scale))
    row = int(np.argmax(change))
    return _corrupted(inputs, row, number, taken[row]) if change[row] > 0 else None


def _swapped_minimum(inputs: Inputs) -> Inputs | None:
    """The scale of one block's minima exchanged with the next row's (one of the two changes)."""
    block = BLOCK_TYPES[inputs.source.type_name]
    if len(block.scale_fields) < 2 or inputs.case.N < 2:
        return None
    at = block.scale_fields[1]
    number, raw, scale = _block_column(inputs, _heaviest(inputs))
    taken = raw.copy()
    taken[:, at : at + 2] = np.roll(raw, -1, axis=0)[:, at : at + 2]
    before, after = block.codes(raw).minimum, block.codes(taken).minimum
    if before is None or after is None:
        return None
    change = np.abs(after - before).max(axis=1) / np.where(scale == 0, np.inf, np.abs(scale))
    row = int(np.argmax(change))
    return _corrupted(inputs, row, number, taken[row]) if change[row] > 0 else None


def _arch() -> str:
    return cpu_device().arch


def _on_gpu(arch: str | None) -> OpSpec:
    from tilewright.ops.mmq.gpu_spec import gpu_spec

    return gpu_spec(arch)


def _interpreted(arch: str | None) -> OpSpec:
    from tilewright.ops.mmq.gpu_spec import gpu_spec

    return gpu_spec(INTERPRETER, "cpu")


SPEC = OpSpec(
    name="mmq",
    title="MMQ",
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
        "flipped code bit": _flip_code,
        "wrong scale": _wrong_scale,
        "swapped minimum": _swapped_minimum,
    },
    space=_space,
    arch=_arch,
    devices={"cuda": _on_gpu, "interpreter": _interpreted},
)
