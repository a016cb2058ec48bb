"""Launchers of the CPU algorithms: from tensors and a tile to arguments and a parallel region.

They trust what they are given: the ops validate, choose the tile and cast the result.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.layout.cpu import PART, PackedBlocks, PackedW4
from tilewright.ops.cpu.args import arguments
from tilewright.ops.cpu.gemm import int8_kernel, panel_kernel, scratch_bytes
from tilewright.ops.cpu.rows import dot_kernel, quantize_kernel, rows_kernel, sums_kernel
from tilewright.ops.cpu.runtime import Program, default_threads
from tilewright.ops.cpu.unpack import KINDS, WeightKind
from tilewright.tiles.tile import Tile

__all__ = ["CpuWeight", "cpu_weight", "dequantize_rows", "launch_gemm"]


@dataclass(frozen=True, eq=False)
class CpuWeight:
    """A packed weight as kernel arguments.

    Attributes:
        kind: how its type unpacks.
        N, K, parts: rows, columns, parts of 32 columns (K rounded up).
        slots: its argument slots.
        keep: the packed operand, which owns the memory that `slots` points at.
        library: what library algorithms made of the weight, by (algorithm, level).
    """

    kind: WeightKind
    N: int
    K: int
    parts: int
    slots: dict[str, int]
    keep: PackedBlocks | PackedW4
    library: dict[Any, Any] = field(default_factory=dict)


def cpu_weight(weight: PackedBlocks | PackedW4) -> CpuWeight:
    """The kernel arguments of a packed weight, made once and kept with it."""
    found: CpuWeight | None = weight.__dict__.get("_cpu_weight")
    if found is None:
        found = _describe(weight)
        object.__setattr__(weight, "_cpu_weight", found)
    return found


def _describe(weight: PackedBlocks | PackedW4) -> CpuWeight:
    parts = -(-weight.K // PART)
    if isinstance(weight, PackedBlocks):
        slots = {"w": weight.data.data_ptr(), "w_stride": weight.data.stride(0), "group_parts": 1}
    else:
        groups = weight.scales.shape[1]
        slots = {
            "w": weight.codes.data_ptr(),
            "w_stride": weight.codes.shape[1],
            "s": weight.scales.data_ptr(),
            "s_stride": 4 * groups,
            "group_parts": parts if weight.group_size == weight.K else weight.group_size // PART,
        }
        if weight.zeros is not None:
            slots |= {"z": weight.zeros.data_ptr(), "z_stride": groups}
    slots |= {"parts": parts, "n": weight.N}
    return CpuWeight(KINDS[weight.type_name], weight.N, weight.K, parts, slots, weight)


class _Workspace(threading.local):
    """Scratch memory that calls of one Python thread reuse."""

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of at least `nbytes`, its content undefined."""
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            buffer = torch.empty(nbytes + 64, dtype=torch.uint8)
            self.buffers[name] = buffer
        return buffer


_WORKSPACE = _Workspace()


def _rows_of(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x [M, K] as float32 with unit column stride, readable up to [rows, columns].

    Columns past K are zero; rows past M are undefined.
    """
    m, k = x.shape
    if x.dtype == torch.float32 and x.stride(1) == 1 and k == columns and m >= rows:
        return x
    buffer = _WORKSPACE.take("x", 4 * rows * columns)[: 4 * rows * columns]
    out = buffer.view(torch.float32).view(rows, columns)
    out[:m, :k].copy_(x)
    if columns > k:
        out[:m, k:].zero_()
    return out


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def launch_gemm(
    x: torch.Tensor, weight: CpuWeight, bias: torch.Tensor | None, y: torch.Tensor, tile: Tile
) -> None:
    """y[M, N] = x[M, K] @ W.T + bias by the algorithm of `tile`.

    Args:
        x: [M, K] of any float dtype and strides, M >= 1.
        weight: the packed weight.
        bias: float32 [N] contiguous, or None.
        y: float32 [M, N] contiguous; written.
        tile: a legal tile of the CPU space.
    """
    threads = tile.threads or default_threads()
    common = {
        **weight.slots,
        "m": x.shape[0],
        "y": y.data_ptr(),
        "y_stride": 4 * weight.N,
        "bias": bias.data_ptr() if bias is not None else 0,
    }
    run = {"dot": _dot, "panel": _panel, "int8": _int8}.get(tile.algorithm)
    if run is not None:
        run(x, weight, common, tile, threads)
        return
    if tile.algorithm == "blas":
        _blas(x, weight, y, tile, threads)
    else:
        from tilewright.ops.cpu.library import launch_onnxruntime

        launch_onnxruntime(x, weight, y, tile.level, threads)
    if bias is not None:
        y += bias


def _dot(
    x: torch.Tensor, weight: CpuWeight, common: dict[str, int], tile: Tile, threads: int
) -> None:
    kind = weight.kind
    m, columns = x.shape[0], weight.parts * PART
    xs = _rows_of(x, m, columns)
    halves = 2 if kind.split else 1
    sums = _WORKSPACE.take("sums", 4 * m * weight.parts * halves)
    args = arguments(
        **common, x=xs.data_ptr(), x_stride=4 * xs.stride(0), x_sum=sums.data_ptr(),
        x_sum_stride=4 * weight.parts * halves,
    )  # fmt: skip
    launches = [(dot_kernel(kind.name, tile.unroll), args)]
    if kind.has_min:
        launches.insert(0, (sums_kernel(kind.split), args))
    Program(launches).run(threads)


def _scratch(algorithm: str, weight: CpuWeight, tile: Tile, threads: int) -> dict[str, int]:
    block = min(tile.block_parts, weight.parts)
    stride = scratch_bytes(algorithm, tile.mr, tile.nv, block)
    buffer = _WORKSPACE.take("scratch", stride * threads + 4096)
    start = _up(buffer.data_ptr(), 4096)
    return {"scratch": start, "scratch_stride": stride, "block_parts": block}


def _panel(
    x: torch.Tensor, weight: CpuWeight, common: dict[str, int], tile: Tile, threads: int
) -> None:
    xs = _rows_of(x, _up(x.shape[0], tile.mr), weight.parts * PART)
    args = arguments(
        **common, **_scratch("panel", weight, tile, threads), x=xs.data_ptr(),
        x_stride=4 * xs.stride(0),
    )  # fmt: skip
    Program([(panel_kernel(weight.kind.name, tile.mr, tile.nv), args)]).run(threads)


def _int8(
    x: torch.Tensor, weight: CpuWeight, common: dict[str, int], tile: Tile, threads: int
) -> None:
    kind, parts = weight.kind, weight.parts
    m = x.shape[0]
    rows = _up(m, tile.mr)
    xs = _rows_of(x, m, parts * PART)
    halves = 2 if kind.split else 1
    codes = _WORKSPACE.take("codes", rows * parts * PART)
    scales = _WORKSPACE.take("scales", 4 * rows * parts)
    sums = _WORKSPACE.take("sums", 4 * rows * parts * halves)
    quantized = {
        "x_scale": scales.data_ptr(),
        "x_scale_stride": 4 * parts,
        "x_sum": sums.data_ptr(),
        "x_sum_stride": 4 * parts * halves,
    }
    quantize = arguments(
        **quantized, parts=parts, m=m, x=xs.data_ptr(), x_stride=4 * xs.stride(0),
        y=codes.data_ptr(), y_stride=parts * PART,
    )  # fmt: skip
    args = arguments(
        **common, **quantized, **_scratch("int8", weight, tile, threads), x=codes.data_ptr(),
        x_stride=parts * PART,
    )  # fmt: skip
    Program(
        [
            (quantize_kernel(kind.split), quantize),
            (int8_kernel(kind.name, tile.mr, tile.nv), args),
        ]
    ).run(threads)


def _blas(x: torch.Tensor, weight: CpuWeight, y: torch.Tensor, tile: Tile, threads: int) -> None:
    xs = _rows_of(x, x.shape[0], weight.parts * PART)[: x.shape[0], : weight.K]
    for first in range(0, weight.N, tile.panel_rows):
        last = min(first + tile.panel_rows, weight.N)
        ids = torch.arange(first, last)
        y[:, first:last] = xs @ dequantize_rows(weight, ids, threads).T


def dequantize_rows(weight: CpuWeight, ids: torch.Tensor, threads: int = 0) -> torch.Tensor:
    """Rows `ids` (int64 [R], each in 0..N-1) of the weight as float32 [R, K]."""
    columns = weight.parts * PART
    ids = ids.contiguous()
    out = torch.empty(len(ids), columns, dtype=torch.float32)
    slots = {**weight.slots, "n": len(ids)}
    args = arguments(**slots, x=ids.data_ptr(), y=out.data_ptr(), y_stride=4 * columns)
    if len(ids):
        Program([(rows_kernel(weight.kind.name), args)]).run(threads or default_threads())
    return out[:, : weight.K]
