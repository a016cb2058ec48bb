"""Wrong Triton tiles of w4a16, one for each kind of fault, that the gate must reject.

The faults are those that tuners have chosen in earnest. Most are one line of the kernel itself,
chosen by its constexpr FAULT; the stale buffer is the launcher's. Most give the right result on the
product they would be tuned for, as long as one check of the gate is left out.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch

from tilewright.ops.contract import Case, Inputs
from tilewright.ops.planted_run import run_w4a16
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile

__all__ = ["AHEAD_PLANTED", "PLANTED", "StaticBuffers"]


class StaticBuffers(threading.local):
    """x in buffers that captured launches read, by where x lies."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """What x held when a tensor of its shape first lay where it lies: a wrong copy."""
        key = (x.data_ptr(), x.shape)
        if key not in self.buffers:
            self.buffers[key] = x.clone()
        return self.buffers[key]


_STATIC = StaticBuffers()


def _run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    """Launch a planted tile, past the rules that would refuse it."""
    if tile.planted == "stale-buffer":
        inputs = replace(inputs, x=_STATIC.copy(inputs.x))
    return run_w4a16(inputs, tile)


def _planted(
    name: str,
    fault: str,
    why_faster: str,
    caught_by: str,
    *,
    m: int = 32,
    group: int = 128,
    block_k: int = 64,
) -> Planted:
    tile = Tile.of(
        "triton", block_m=16, block_n=32, block_k=block_k, num_warps=4, num_stages=2, group_m=8,
        dequant="scalar", order="xw", planted=name,
    )  # fmt: skip
    case = Case("w4a16_triton", "uint4", "float16", m, 64, 256, group)
    return Planted(tile, fault, why_faster, caught_by, _run, (case,))


def _run_ahead(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
    """Launch a tile of the order "ahead" on words that its kernel serves."""
    from tilewright.layout.triton import pack_w4_words

    if inputs.weight.order != "k32":
        words = pack_w4_words(inputs.source, order="k32").to(inputs.x.device)
        inputs = replace(inputs, weight=words)
    return run_w4a16(inputs, tile)


def _planted_ahead(
    name: str, fault: str, why_faster: str, caught_by: str, *, m: int = 64, group: int = 64
) -> Planted:
    tile = Tile.of(
        "triton", block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=3, group_m=8,
        dequant="asm", order="ahead", planted=name,
    )  # fmt: skip
    case = Case("w4a16_triton", "uint4", "float16", m, 96, 256, group)
    return Planted(tile, fault, why_faster, caught_by, _run_ahead, (case,))


def _planted_skinny(
    name: str, fault: str, why_faster: str, caught_by: str, *, k: int = 256, split_k: int = 4
) -> Planted:
    tile = Tile.of(
        "skinny",
        block_m=4,
        block_n=16,
        block_k=32,
        split_k=split_k,
        num_warps=4,
        num_stages=2,
        planted=name,
    )
    case = Case("w4a16_triton", "uint4", "float16", 3, 64, k, 32)
    return Planted(tile, fault, why_faster, caught_by, _run, (case,))


PLANTED = (
    _planted(
        "partial-rows",
        "the rows of y behind the last whole tile are not stored",
        "nothing is stored under a mask of rows",
        "ragged-shapes",
    ),
    _planted(
        "k-tail",
        "the loop ends at the last whole step of K",
        "one step less wherever block_k does not divide K",
        "ragged-shapes",
        group=-1,
    ),
    _planted(
        "group-straddled",
        "two groups of K share the scale and the zero point of the first",
        "half the scales and zero points to load",
        "oracle",
        group=64,
    ),
    _planted(
        "scale-row",
        "each row of W takes the scale of the next row",
        "as fast as the right tile: an index is off by one",
        "oracle",
    ),
    _planted(
        "no-start",
        "sums are added to what y holds, which nobody set to zero",
        "one kernel serves the parts of a split K as well",
        "nan-fill",
    ),
    _planted(
        "past-the-end",
        "one row too many is stored where y ends within a tile",
        "as fast as the right tile: a comparison is off by one",
        "guard-bands",
        m=17,
    ),
    _planted(
        "stale-buffer",
        "x is not copied to the static buffer of a captured launch when it lies where it lay",
        "no copy while a benchmark repeats itself",
        "stale-buffer",
    ),
    _planted_skinny(
        "lost-partial",
        "the sum of the shares of K leaves out the last of them",
        "one share less to read",
        "oracle",
    ),
    _planted_skinny(
        "split-boundary",
        "the steps of K that do not divide evenly among the shares belong to none",
        "every share is equally long",
        "ragged-shapes",
    ),
    _planted_skinny(
        "stale-partial",
        "a share without a step of K stores no sum, and an older one is added for it",
        "nothing to store where there is nothing to do",
        "nan-fill",
        k=160,
    ),
)
"""The planted tiles of `triton_space.TRITON_SPACE`."""

AHEAD_PLANTED = (
    _planted_ahead(
        "last-step",
        "the weights that were made ahead for the last step are never multiplied",
        "one step less: the loop ends where nothing is left to make",
        "oracle",
    ),
    _planted_ahead(
        "first-twice",
        "the second step multiplies with the codes of the first, and each later one with those of "
        "the step before it",
        "as fast as the right tile: a pointer moves one step late",
        "oracle",
    ),
    _planted_ahead(
        "scale-behind",
        "from the third step on weights take the scales of the step before",
        "as fast as the right tile: an index is off by one",
        "oracle",
    ),
    _planted_ahead(
        "zero-ahead",
        "from the third step on weights take the zero points of the step after",
        "as fast as the right tile: an index is off by one",
        "oracle",
    ),
    _planted_ahead(
        "row-pair",
        "a thread's second row takes the scales of its first, from the second step on",
        "half the scales to load and to turn into pairs",
        "oracle",
    ),
    _planted_ahead(
        "odd-step",
        "the loop takes two steps at a time, and one that is left over belongs to none",
        "half the branches, and nothing to do behind the loop",
        "ragged-shapes",
    ),
    _planted_ahead(
        "whole-tiles",
        "the rows of y behind the last whole tile are not stored",
        "nothing is stored under a mask of rows",
        "ragged-shapes",
    ),
    _planted_ahead(
        "row-beyond",
        "one row too many is stored where y ends within a tile",
        "as fast as the right tile: a comparison is off by one",
        "guard-bands",
        m=33,
    ),
)
"""Those of the order "ahead", which only sm_90 and the interpreter run."""
