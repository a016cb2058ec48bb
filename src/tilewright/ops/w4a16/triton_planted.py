"""Wrong Triton tiles of w4a16, one for each kind of fault, that the gate must reject.

The faults are those that tuners have chosen in earnest. Most are one line of the kernel itself,
chosen by its constexpr FAULT; the stale buffer is the launcher's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewright.ops.contract import Case, Inputs
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile

__all__ = ["PLANTED"]

_STATIC: dict[tuple[object, ...], torch.Tensor] = {}


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    """Launch a planted tile, past the rules that would refuse it."""
    from tilewright.ops.w4a16.triton_op import allocate_and_launch

    x = inputs.x
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], inputs.weight.N)
    if tile.planted == "stale-buffer":
        x = _static_copy(x)
    return allocate_and_launch(x, inputs.weight, inputs.bias, tile)


def _static_copy(x: torch.Tensor) -> torch.Tensor:
    """x in a buffer that captured launches read, filled when its shape is first seen."""
    key = (x.shape, x.dtype, x.device)
    if key not in _STATIC:
        _STATIC[key] = x.clone()
    return _STATIC[key]


def _case(m: int, n: int, k: int, group: int, dtype: str = "float16") -> Case:
    return Case("w4a16_triton", "uint4", dtype, m, n, k, group)


def _planted(
    name: str, fault: str, why_faster: str, caught_by: str, *cases: Case, **fields: Any
) -> Planted:
    tile = Tile.of(
        "triton",
        **{
            "block_m": 16, "block_n": 32, "block_k": 32, "num_warps": 4, "num_stages": 2,
            "dequant": "packed", "planted": name, **fields,
        },
    )  # fmt: skip
    return Planted(tile, fault, why_faster, caught_by, _run, cases)


_SMALL = _case(17, 64, 256, 128)

PLANTED = (
    _planted(
        "partial-rows",
        "Rows of y beyond the last whole tile are not stored.",
        "The last, ragged row of tiles is not computed.",
        "nan-fill",
        _SMALL,
    ),
    _planted(
        "k-tail",
        "The loop ends at the last whole step of K.",
        "One step less wherever block_k does not divide K.",
        "ragged-shapes",
        replace(_SMALL, K=256, group=-1),
        block_k=128,
    ),
    _planted(
        "group-straddled",
        "Two groups of K are multiplied with the scale and the zero point of the first.",
        "Half as many scales and zero points are loaded.",
        "oracle",
        replace(_SMALL, group=64),
    ),
    _planted(
        "scale-row",
        "Each row of W is multiplied with the scale of the next row.",
        "It is as fast as the right tile: the index is off by one.",
        "oracle",
        _SMALL,
    ),
    _planted(
        "past-the-end",
        "One row is stored beyond the last one where y ends within a tile.",
        "The mask of the store is looser.",
        "guard-bands",
        _SMALL,
    ),
    _planted(
        "stale-buffer",
        "x is copied to a static buffer only when its shape is first seen.",
        "Every launch but the first saves the copy.",
        "stale-buffer",
        _SMALL,
    ),
)
"""The planted tiles of `triton_space.TRITON_SPACE`."""
