"""Everything that is read off one compiled kernel, and no time among it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilewright.isa.count import (
    Instruction,
    count,
    inner_loop,
    least_rows,
    matrix_macs,
    parse,
    vendor_of,
)
from tilewright.isa.descriptors import wrong_descriptors
from tilewright.isa.hazards import overwritten
from tilewright.isa.resources import Resources, resources
from tilewright.isa.sass import listing_text
from tilewright.ops.cross import Compiled, warp_size
from tilewright.ops.space import TileSpace
from tilewright.tiles.tile import Tile

__all__ = ["LABEL", "Figures", "figures"]

LABEL = "legality and resources, not speed"
"""What every output of this room says of itself."""


@dataclass(frozen=True)
class Figures:
    """One kernel as its assembly and its compiler tell.

    Attributes:
        kernel: the kernel's function.
        arch: what it was compiled for.
        compiler: "triton 3.7.1".
        loop: label of the inner loop; "" if it has none, and counts are of the whole kernel.
        counts: by `count`: what a wave issues in one iteration.
        matrix: the matrix instructions by name, and where a HGMMA takes its left operand from.
        k_step: columns of K that an iteration covers, by the matrix instructions' shapes; by the
            tile where there are none; None without a loop or a space.
        valu_per_pair: VALU instructions for each two weights, a lane's work: addresses and loop
            overhead are in it, and work that several waves repeat counts as often as it is done.
        issued_per_pair: the same of all instructions.
        resources: registers, spills, shared memory, resident waves.
        faults: why its results would be wrong although it compiles, as `hazards` and `descriptors`
            find in the machine code of Hopper's matrix instructions.
    """

    kernel: str
    arch: str
    compiler: str
    loop: str
    counts: Mapping[str, int]
    matrix: str
    k_step: int | None
    valu_per_pair: float | None
    issued_per_pair: float | None
    resources: Resources
    faults: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As JSON writes it."""
        return {**asdict(self), "counts": dict(self.counts)}


def figures(compiled: Compiled, tile: Tile, space: TileSpace | None = None) -> Figures:
    """Read a compiled kernel.

    Args:
        tile: what it was launched with.
        space: names the extents of the tile; without it nothing is reckoned per weight.

    Raises:
        UnsupportedError: the machine code cannot be disassembled.
    """
    vendor = vendor_of(compiled.arch)
    text = listing_text(compiled)
    listing = parse(text, vendor)
    loop = inner_loop(listing, vendor)
    body = loop.body if loop else tuple(i for i in listing if not isinstance(i, str))
    counts = count(body, vendor)
    warps = _multiplying_warps(compiled)
    k_step = None
    per_pair: dict[str, float | None] = {"valu": None, "total": None}
    extents = space.extents(tile) if space is not None and space.extents is not None else {}
    if loop is not None and all(extents.get(d) for d in "MNK"):
        m, n, k = (min(extents[d]) for d in "MNK")
        m = max(m, least_rows(body))  # rows that are not there are multiplied too
        k_step = _k_step(matrix_macs(body) * warps // (m * n), k)
        pairs, lanes = k_step * n / 2, warps * warp_size(compiled.arch)
        per_pair = {what: round(counts[what] * lanes / pairs, 2) for what in per_pair}
    return Figures(
        kernel=compiled.name,
        arch=compiled.arch,
        compiler=f"triton {compiled.metadata.get('triton_version', '')}".strip(),
        loop=loop.label if loop else "",
        counts=counts,
        matrix=", ".join(_matrix_names(body, vendor)),
        k_step=k_step,
        valu_per_pair=per_pair["valu"],
        issued_per_pair=per_pair["total"],
        resources=resources(compiled),
        faults=_faults(text) if vendor == "nvidia" else (),
    )


def _faults(text: str) -> tuple[str, ...]:
    return tuple(str(found) for found in (*overwritten(text), *wrong_descriptors(text)))


def _k_step(multiplied: int, step: int) -> int:
    """Columns of K an iteration: as many whole steps of the tile, a power of two of them, as its
    matrix instructions multiply. What they do beside, such as sums of x, is less than that again.
    """
    steps = multiplied // step
    return step << (steps.bit_length() - 1) if steps else step


def _multiplying_warps(compiled: Compiled) -> int:
    """Warps of the kernel's own body; a warp-specialized kernel has more, which only load."""
    found = re.search(r'"ttg\.num-warps" = (\d+)', compiled.text("ttgir"))
    return int(found[1]) if found else int(compiled.metadata["num_warps"])


def _matrix_names(body: Sequence[Instruction], vendor: str) -> list[str]:
    """The matrix instructions, each once; of a HGMMA also where its left operand comes from."""
    names: dict[str, None] = {}
    for instruction in body:
        if not count([instruction], vendor)["matrix"]:
            continue
        name = instruction.mnemonic
        if "GMMA" in name:
            left = instruction.operands.split(", ")[1:2]
            in_registers = bool(left) and left[0].startswith("R")
            name += " (A in registers)" if in_registers else " (A in shared memory)"
        names[name] = None
    return list(names)
