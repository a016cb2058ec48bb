"""How the planted tiles are launched: the right launches with one argument, or one step, wrong.

Each function is called as `tilewright.ops.cpu.launch.launch_gemm`.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from typing import Any

import torch
from numba import njit

from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.cpu import PART
from tilewright.ops.cpu.args import arguments
from tilewright.ops.cpu.gemm import _panel, int8_kernel, panel_kernel
from tilewright.ops.cpu.launch import _WORKSPACE, _rows_of, _scratch, _up, dequantize_rows
from tilewright.ops.cpu.rows import dot_kernel, quantize_kernel, sums_kernel
from tilewright.ops.cpu.runtime import Program, compile_kernel, default_threads, specialize
from tilewright.ops.cpu.unpack import KINDS
from tilewright.tiles.tile import Tile

__all__ = [
    "WARM",
    "alternating_blocks",
    "dot_tail",
    "group_straddled",
    "k_tail",
    "no_start",
    "partial_columns",
    "partial_rows",
    "past_the_end",
    "quantized_in_place",
    "scale_row",
    "stale_x",
    "tail_sums",
    "unpadded_tail",
    "warmed_up",
    "weights_by_shape",
    "x_scale_row",
]

WARM = 8
"""Launches at one address after which "warmed-up" trusts what it holds."""


class _Memory(threading.local):
    """What the faults of this thread remember from launch to launch."""

    def __init__(self) -> None:
        self.launches: Counter[Any] = Counter()
        self.last: Any = None
        self.dense: dict[Any, torch.Tensor] = {}


_MEMORY = _Memory()


def _common(weight: Any, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> Any:
    return {
        **weight.slots, "m": x.shape[0], "y": y.data_ptr(), "y_stride": 4 * weight.N,
        "bias": 0 if bias is None else bias.data_ptr(),
    }  # fmt: skip


def _threads(tile: Tile) -> int:
    return tile.threads or default_threads()


def _panel_slots(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> dict[str, int]:
    """The arguments that the right panel launch has."""
    xs = _rows_of(x, _up(x.shape[0], tile.mr), weight.parts * PART)
    return {
        **_common(weight, x, bias, y), **_scratch("panel", weight, tile, _threads(tile)),
        "x": xs.data_ptr(), "x_stride": 4 * xs.stride(0),
    }  # fmt: skip


def _run_panel(weight: Any, tile: Tile, *launches: dict[str, int], kernel: Any = None) -> None:
    kernel = kernel or panel_kernel(weight.kind.name, tile.mr, tile.nv)
    Program([(kernel, arguments(**slots)) for slots in launches]).run(_threads(tile))


def partial_rows(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    slots = _panel_slots(x, weight, bias, y, tile)
    _run_panel(weight, tile, slots | {"m": x.shape[0] // tile.mr * tile.mr})


def partial_columns(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    width = 16 * tile.nv
    slots = _panel_slots(x, weight, bias, y, tile)
    _run_panel(weight, tile, slots | {"n": weight.N // width * width})


def k_tail(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    slots = _panel_slots(x, weight, bias, y, tile)
    block = slots["block_parts"]
    _run_panel(weight, tile, slots | {"parts": weight.parts // block * block})


def past_the_end(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    slots = _panel_slots(x, weight, bias, y, tile)
    _run_panel(weight, tile, slots | {"m": _up(x.shape[0], tile.mr)})


def no_start(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    slots = _panel_slots(x, weight, bias, y, tile)
    _run_panel(weight, tile, slots | {"accumulate": int(bias is None)})


def scale_row(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    _run_panel(weight, tile, _panel_slots(x, weight, bias, y, tile) | {"s_stride": 0})


def group_straddled(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    slots = _panel_slots(x, weight, bias, y, tile)
    _run_panel(weight, tile, slots, kernel=_straddling_kernel(weight.kind.name, tile.mr, tile.nv))


@functools.cache
def _straddling_kernel(name: str, mr: int, nv: int) -> Any:
    """The panel kernel of a type with one scale for two parts: the even one's."""
    kind = KINDS[name]
    unpack = kind.unpack

    @njit
    def in_block(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
        v0, v1, _, _, _, _ = unpack(row, scales, zeros, j, group_parts)
        _, _, s0, s1, m0, m1 = unpack(row, scales, zeros, j - j % 2, group_parts)
        return v0, v1, s0, s1, m0, m1

    @njit
    def apart(row, scales, zeros, j, group_parts):  # type: ignore[no-untyped-def]
        odd = j % 2  # its 16 bytes of codes, with the scale and zero point of the part before
        return unpack(row + 16 * odd, scales, zeros, j - odd, group_parts)

    shared = in_block if name in BLOCK_TYPES else apart
    full = f"planted-panel-{name}-mr{mr}-nv{nv}"
    function = specialize(
        _panel, full.replace("-", "_"), UNPACK=shared, HAS_MIN=int(kind.has_min),
        SPLIT=int(kind.split), MR=mr, NV=nv,
    )  # fmt: skip
    return compile_kernel(function, full)


def alternating_blocks(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    _MEMORY.launches[weight] += 1
    if _MEMORY.launches[weight] % 2 == 0:
        tile = tile.replace(block_parts=2 * tile.block_parts)
    _run_panel(weight, tile, _panel_slots(x, weight, bias, y, tile))


def _run_dot(weight: Any, tile: Tile, x: torch.Tensor, slots: dict[str, int]) -> None:
    stride = 4 * weight.parts * (2 if weight.kind.split else 1)
    sums = _WORKSPACE.take("sums", slots["m"] * stride)
    args = arguments(
        **slots, x=x.data_ptr(), x_stride=4 * x.stride(0), x_sum=sums.data_ptr(),
        x_sum_stride=stride,
    )  # fmt: skip
    launches = [(dot_kernel(weight.kind.name, tile.unroll), args)]
    if weight.kind.has_min:
        launches.insert(0, (sums_kernel(weight.kind.split), args))
    Program(launches).run(_threads(tile))


def dot_tail(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    xs = _rows_of(x, x.shape[0], weight.parts * PART)
    whole = weight.parts - weight.parts % tile.unroll
    _run_dot(weight, tile, xs, _common(weight, x, bias, y) | {"parts": whole})


def unpadded_tail(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    xs = x
    if x.dtype != torch.float32 or x.stride(1) != 1:
        xs = _rows_of(x, x.shape[0], weight.parts * PART)
    _run_dot(weight, tile, xs, _common(weight, x, bias, y))


def _int8_slots(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> tuple[Any, Any]:
    """The arguments that the two right launches have: quantize, and the GEMM on what it wrote."""
    m, parts, halves = x.shape[0], weight.parts, 2 if weight.kind.split else 1
    rows = _up(m, tile.mr)
    xs = _rows_of(x, m, parts * PART)
    codes = _WORKSPACE.take("codes", rows * parts * PART)
    both = {
        "x_scale": _WORKSPACE.take("scales", 4 * rows * parts).data_ptr(),
        "x_scale_stride": 4 * parts,
        "x_sum": _WORKSPACE.take("sums", 4 * rows * parts * halves).data_ptr(),
        "x_sum_stride": 4 * parts * halves,
    }
    quantize = both | {
        "parts": parts, "m": m, "x": xs.data_ptr(), "x_stride": 4 * xs.stride(0),
        "y": codes.data_ptr(), "y_stride": parts * PART,
    }  # fmt: skip
    multiply = {
        **_common(weight, x, bias, y), **both, **_scratch("int8", weight, tile, _threads(tile)),
        "x": codes.data_ptr(), "x_stride": parts * PART,
    }  # fmt: skip
    return quantize, multiply


def _run_int8(
    weight: Any, tile: Tile, quantize: dict[str, int] | None, *multiply: Any, sums: Any = None
) -> None:
    launches = []
    if quantize is not None:
        launches.append((quantize_kernel(weight.kind.split), arguments(**quantize)))
    if sums is not None:
        launches.append((sums_kernel(weight.kind.split), arguments(**sums)))
    gemm = int8_kernel(weight.kind.name, tile.mr, tile.nv)
    launches += [(gemm, arguments(**slots)) for slots in multiply]
    Program(launches).run(_threads(tile))


def x_scale_row(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    quantize, multiply = _int8_slots(x, weight, bias, y, tile)
    _run_int8(weight, tile, quantize, multiply | {"x_scale_stride": 0})


def stale_x(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    quantize, multiply = _int8_slots(x, weight, bias, y, tile)
    seen = (x.data_ptr(), tuple(x.shape), quantize["y"])
    _run_int8(weight, tile, None if seen == _MEMORY.last else quantize, multiply)
    _MEMORY.last = seen


def warmed_up(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    quantize, multiply = _int8_slots(x, weight, bias, y, tile)
    seen = (x.data_ptr(), tuple(x.shape), quantize["y"])
    _MEMORY.launches[seen] += 1
    warm = _MEMORY.launches[seen] > WARM
    _run_int8(weight, tile, None if warm else quantize, multiply)


def quantized_in_place(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    """Codes take the first quarter of each row of x: no workspace, one stream less to memory."""
    quantize, multiply = _int8_slots(x, weight, bias, y, tile)
    if quantize["x"] == x.data_ptr() and x.shape[0] % tile.mr == 0:
        here = {"x": x.data_ptr(), "x_stride": 4 * x.stride(0)}
        quantize = quantize | {"y": here["x"], "y_stride": here["x_stride"]}
        multiply = multiply | here
    _run_int8(weight, tile, quantize, multiply)


def tail_sums(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    """The last, narrower panel multiplies minima by the sums of x, not of its rounded values."""
    quantize, multiply = _int8_slots(x, weight, bias, y, tile)
    body = weight.N // (16 * tile.nv) * 16 * tile.nv
    if body == weight.N:
        _run_int8(weight, tile, quantize, multiply)
        return
    exact = _WORKSPACE.take("exact sums", x.shape[0] * quantize["x_sum_stride"]).data_ptr()
    sums = {k: quantize[k] for k in ("parts", "m", "x", "x_stride", "x_sum_stride")}
    tail = multiply | {
        "n": weight.N - body,
        "w": multiply["w"] + body * multiply["w_stride"],
        "y": multiply["y"] + 4 * body,
        "bias": multiply["bias"] + 4 * body if multiply["bias"] else 0,
        "x_sum": exact,
    }
    whole = multiply | {"n": body}
    _run_int8(weight, tile, quantize, whole, tail, sums=sums | {"x_sum": exact})


def weights_by_shape(x: Any, weight: Any, bias: Any, y: Any, tile: Tile) -> None:
    key = (weight.kind.name, weight.N, weight.K)
    if key not in _MEMORY.dense:
        _MEMORY.dense = {key: dequantize_rows(weight, torch.arange(weight.N), _threads(tile))}
    torch.mm(x.float(), _MEMORY.dense[key].T, out=y)
    if bias is not None:
        y += bias
