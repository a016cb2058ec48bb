"""Tile ladders that others published for W4A16 on AMD, as data.

They are those of vLLM's hybrid W4A16 kernel for RDNA and its later change for gfx1151; CDNA has a
generic one. A ladder says, from the first line that matches: rows and columns of an output tile,
step of K, warps, and loads ahead where it names them. A step is never longer than a group.

What a ladder leaves open is filled with this package's own choice: see `make_published_tables`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["SHAPES", "TABLES", "PublishedTable", "Step"]

SHAPES = (
    # Qwen3-4B, -8B and -32B: qkv, o, gate and up, down, each fused as engines fuse them.
    (6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728),
    (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288),
    (10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600),
    # Llama-3-8B (its qkv and o are Qwen3-8B's) and -70B.
    (28672, 4096), (4096, 14336),
    (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672),
    # SmolLM2 135M.
    (960, 576), (576, 576), (3072, 576), (576, 1536),
)  # fmt: skip
"""(N, K) of the products of the models that tables are made for."""


@dataclass(frozen=True)
class Step:
    """One line of a ladder; `stages` None where the publication names none."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int | None = None


Ladder = Callable[[str, int, int, int, int], Step]
"""(act_dtype, M, N, K, group) -> the step that is published for it."""


@dataclass(frozen=True)
class PublishedTable:
    """A table to make.

    Attributes:
        file: its name among the shipped tables.
        archs: what it is valid for, the first one its own.
        device: the chips' names, for people.
        ladder: the published choice.
        note: where it comes from and what it was measured on there.
    """

    file: str
    archs: tuple[str, ...]
    device: str
    ladder: Ladder
    note: str


def _tall(n: int, k: int) -> bool:
    return k >= 2 * n


# gfx1151 at M <= 128, by (group, K, N).
_OVERRIDES = {
    (32, 2048, 6144): Step(128, 32, 32, 4, 4),
    (32, 2048, 2048): Step(128, 32, 32, 4, 4),
    (32, 2048, 16384): Step(128, 32, 32, 4, 4),
    (32, 8192, 2048): Step(128, 64, 32, 8, 2),
    (128, 4096, 6144): Step(128, 64, 128, 8, 1),
    (128, 12288, 4096): Step(128, 64, 128, 8, 1),
    (128, 4096, 4096): Step(128, 32, 128, 4, 1),
    (128, 4096, 24576): Step(64, 32, 128, 2, 1),
}


def _gfx1151(dtype: str, m: int, n: int, k: int, group: int) -> Step:
    if dtype == "float16" and m > 128:
        return _gfx1151_packed(m, n, k)
    if m <= 128 and (group, k, n) in _OVERRIDES:
        return _OVERRIDES[group, k, n]
    if m <= 32:
        return Step(32, 32, 128, 4)
    if m <= 64:
        return Step(64, 64, 32, 4)
    if m <= 128:
        if _tall(n, k):
            return Step(64, 16, 64, 1)
        return Step(64, 64, 64, 4) if n > k else Step(64, 32, 64, 4)
    if m <= 1024:
        if _tall(n, k):
            return Step(64, 64, 64, 4)
        return Step(128, 64, 64, 8) if n >= 4 * k else Step(64, 128, 32, 4)
    return Step(128, 512, 32, 16) if _tall(n, k) else Step(128, 64, 64, 8)


def _gfx1151_packed(m: int, n: int, k: int) -> Step:
    """float16 from M = 129 on, one load ahead; narrow outputs get narrow tiles."""
    if m <= 256:
        step = Step(128, 128, 32, 8, 1)
    elif m >= 2048 and n <= 2048 and k >= 4096:
        step = Step(64, 256, 32, 8, 1)
    else:
        step = Step(128, 256, 32, 8, 1)
    if n <= 1024 and m <= 512:
        step = Step(step.block_m, min(step.block_n, 32), step.block_k, step.warps, step.stages)
    return step


def _gfx12(dtype: str, m: int, n: int, k: int, group: int) -> Step:
    tall = _tall(n, k)
    if m <= 32:
        return Step(16, 16, 128, 4)
    if m <= 64:
        if tall:
            return Step(64, 32, 128, 8)
        return Step(64, 32, 64, 8) if n > k else Step(32, 64, 128, 4)
    if m <= 128:
        if tall:
            return Step(64, 16, 64, 1)
        return Step(64, 128, 64, 8) if n >= 2 * k else Step(64, 64, 64, 8)
    if tall:
        return Step(128, 64, 64, 8)
    if m <= 512:
        return Step(128, 128, 64, 8) if n >= 4 * k else Step(64, 128, 64, 8)
    return Step(256, 64, 64, 8) if n >= 4 * k else Step(128, 128, 32, 8)


def _generic(dtype: str, m: int, n: int, k: int, group: int) -> Step:
    if m <= 32:
        return Step(32, 64, 32, 4)
    return Step(64, 64, 32, 4) if m <= 64 else Step(128, 128, 32, 4)


TABLES = (
    PublishedTable(
        "gfx1151.json", ("gfx1151",), "Radeon 8060S", _gfx1151,
        "the ladder of vLLM's RDNA hybrid W4A16 kernel for gfx1151, with the tiles for packed "
        "float16 that a later change proposed; tuned there on a Radeon 8060S",
    ),
    PublishedTable(
        "gfx11.json", ("gfx1100", "gfx1101"), "RDNA3", _generic,
        "the ladder of vLLM's RDNA hybrid W4A16 kernel for the other chips of gfx11; gfx1102 and "
        "gfx1103 are left out: their register files are smaller, and its largest tile spills there",
    ),
    PublishedTable(
        "gfx12.json", ("gfx1201", "gfx1200"), "RDNA4", _gfx12,
        "the ladder of vLLM's RDNA hybrid W4A16 kernel for gfx12; swept there on a gfx1201",
    ),
    PublishedTable(
        "gfx90a.json", ("gfx90a",), "CDNA2", _generic,
        "vLLM's generic W4A16 ladder; it has none for CDNA",
    ),
    PublishedTable(
        "gfx942.json", ("gfx942",), "CDNA3", _generic,
        "vLLM's generic W4A16 ladder; it has none for CDNA",
    ),
)  # fmt: skip
