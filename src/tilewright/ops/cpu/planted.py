"""Wrong tiles of the CPU kernels, one for each kind of fault: what the gate must reject.

Each is a real launch of a real kernel with one argument wrong, or with a kernel that is specialized
wrongly, such as a hurried change could leave behind. On the products in `Planted.cases` it takes
as long as the right tile or less, and most of them are even right there; a tuner that looks at time
alone would choose every one.

They are no tiles of the space: each has a field `planted` that the space does not know, so that
neither `candidates` nor a table nor an op's `tile=` can bring one to a user. `Planted.run` is the
only way in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.cpu import PART
from tilewright.ops.contract import Case, Inputs
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile

__all__ = ["planted_tiles"]

_LARGE_MINIMA = ("Q4_1", "Q5_1", "Q4_K")  # beside their codes: rounded sums of x matter
_SMALL_BLOCKS = ("uint4", "uint4b8", *(k for k, b in BLOCK_TYPES.items() if b.block_size == PART))


@dataclass(frozen=True)
class _Fault:
    """One kind of fault.

    Attributes:
        name: its launcher is the function of this name in `planted_launches`, with underscores.
        shape: M, N, K of a product from the tile's pieces.
        only: weight types that can have it; none for all.
        group: of w4a16 products.
    """

    name: str
    algorithm: str
    fault: str
    why_faster: str
    caught_by: str
    shape: Callable[[int, int, int], tuple[int, int, int]]
    only: tuple[str, ...] = ()
    group: int = 32


_FAULTS = (
    _Fault(
        "partial-rows", "panel",
        "the rows behind the last whole tile of M are not computed",
        "no edge tile, no copy from scratch",
        "ragged-shapes", lambda m, n, k: (4 * m, 8 * n, 2 * k),
    ),
    _Fault(
        "partial-columns", "panel",
        "the columns behind the last whole panel of N are not computed",
        "no edge tile, no narrow panel to unpack",
        "ragged-shapes", lambda m, n, k: (4 * m, 8 * n, 2 * k),
    ),
    _Fault(
        "k-tail", "panel",
        "the values of K behind the last whole block are dropped",
        "no short last block",
        "ragged-shapes", lambda m, n, k: (4 * m, 8 * n, 2 * k),
    ),
    _Fault(
        "dot-tail", "dot",
        "the parts of K behind the last whole step of the unrolled loop are dropped",
        "no remainder loop",
        "ragged-shapes", lambda m, n, k: (1, 1024, 8 * k), _SMALL_BLOCKS,
    ),
    _Fault(
        "past-the-end", "panel",
        "the last tile of M is stored whole, behind the end of y",
        "no edge tile, no copy from scratch",
        "guard-bands", lambda m, n, k: (4 * m + 1, 8 * n, 2 * k),
    ),
    _Fault(
        "no-start", "panel",
        "sums are added to what y holds, which nobody set to zero",
        "one way through the loop over K, no first block",
        "nan-fill", lambda m, n, k: (4 * m, 8 * n, 2 * k),
    ),
    _Fault(
        "group-straddled", "panel",
        "two parts of K share the scale of the first, though each has its own",
        "half the scales to unpack",
        "oracle", lambda m, n, k: (4 * m, 8 * n, 2 * k),
    ),
    _Fault(
        "scale-row", "panel",
        "every row of W takes the scales of row 0",
        "one row of scales, which stays in the first-level cache",
        "oracle", lambda m, n, k: (4 * m, 8 * n, 2 * k), ("uint4", "uint4b8"),
    ),
    _Fault(
        "x-scale-row", "int8",
        "every row of x takes the scales of row 0",
        "one row of scales, which stays in the first-level cache",
        "oracle", lambda m, n, k: (8 * m, 8 * n, k),
    ),
    _Fault(
        "tail-sums", "int8",
        "the last, narrower panel multiplies minima by the sums of x before its rounding",
        "the sums of the weight-only path serve both",
        "block-error", lambda m, n, k: (128, 16 * n + 17, 512), _LARGE_MINIMA,
    ),
    _Fault(
        "stale-x", "int8",
        "x is not quantized again when it lies where it lay at the last launch",
        "no quantizing while a benchmark repeats itself",
        "stale-buffer", lambda m, n, k: (8 * m, 8 * n, k),
    ),
    _Fault(
        "warmed-up", "int8",
        "x is not quantized again after 8 launches at one address",
        "no quantizing once a benchmark is warm",
        "after-timing", lambda m, n, k: (8 * m, 8 * n, k),
    ),
    _Fault(
        "quantized-in-place", "int8",
        "the 8-bit codes of x are written over x",
        "no workspace to bring into the cache",
        "inputs", lambda m, n, k: (8 * m, 8 * n, k),
    ),
    _Fault(
        "alternating-blocks", "panel",
        "every second launch cuts K into blocks twice as long, and sums in another order",
        "it tries blocks while it runs, and is as fast as the better ones",
        "repeat", lambda m, n, k: (4 * m, 8 * n, 3 * k),
    ),
    _Fault(
        "weights-by-shape", "blas",
        "dequantized weights are kept by type and shape, whatever weight they came from",
        "W is dequantized once",
        "fresh-operands", lambda m, n, k: (32, 256, 512),
    ),
    _Fault(
        "unpadded-tail", "dot",
        "rows of x whose length is no multiple of 32 are read in place, past their end",
        "no copy of x",
        "edge-reads", lambda m, n, k: (2, 256, 1000), ("uint4", "uint4b8"), -1,
    ),
)  # fmt: skip

_WEIGHT_TYPES = {"mmq": tuple(BLOCK_TYPES), "w4a16": ("uint4", "uint4b8")}


def _tile(fault: _Fault, wide: bool) -> Tile:
    """The tile that the space gives by default, which the planted one pretends to be."""
    fields: dict[str, Any] = {
        "panel": {"mr": 8, "nv": 3, "block_parts": 16}
        if wide
        else {"mr": 6, "nv": 1, "block_parts": 16},
        "int8": {"mr": 4, "nv": 3, "block_parts": 32}
        if wide
        else {"mr": 2, "nv": 1, "block_parts": 32},
        "dot": {"unroll": 4},
        "blas": {"panel_rows": 256},
    }[fault.algorithm]
    return Tile.of(fault.algorithm, **fields, threads=0, planted=fault.name)


def _cases(op: str, fault: _Fault, tile: Tile) -> tuple[Case, ...]:
    """One product a weight type that has the fault, in float32."""
    fields = tile.as_dict()
    m, n = fields.get("mr", 1), 16 * fields.get("nv", 1)
    k = PART * fields.get("block_parts", fields.get("unroll", 1))
    rows, columns, depth = fault.shape(m, n, k)
    path = "int8" if fault.algorithm == "int8" else "float"
    group = fault.group if op == "w4a16" else 0
    return tuple(
        Case(op, name, "float32", rows, columns, depth, group, path)
        for name in _WEIGHT_TYPES[op]
        if not fault.only or name in fault.only
    )


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    """Launch a planted tile; the kernels are imported here, so that a space only lists names."""
    from tilewright.ops.cpu import planted_launches
    from tilewright.ops.gemm import launched

    launch = getattr(planted_launches, tile.planted.replace("-", "_"))
    if threads is not None:
        tile = tile.replace(threads=threads)
    return launched(inputs.x, inputs.weight, inputs.bias, tile, launch)


@functools.cache
def planted_tiles(op: str, *, wide: bool) -> tuple[Planted, ...]:
    """The wrong tiles of `op` ("mmq" or "w4a16").

    Args:
        wide: pretend to be the tiles of a CPU with 512-bit registers.
    """
    found = []
    for fault in _FAULTS:
        tile = _tile(fault, wide)
        cases = _cases(op, fault, tile)
        if cases:
            found.append(Planted(tile, fault.fault, fault.why_faster, fault.caught_by, _run, cases))
    return tuple(found)
