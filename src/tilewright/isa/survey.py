"""Tiles on chips, each compiled and read: what `tilewright isa` prints."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewright.errors import TileError, TilewrightError, UnsupportedError
from tilewright.isa.compile import compile_tile, default_tile, space_for
from tilewright.isa.figures import Figures, figures
from tilewright.isa.sass import listing_text
from tilewright.ops.contract import OpSpec
from tilewright.ops.cross import Compiled
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.revisions import Revision

__all__ = ["Entry", "survey", "survey_revision", "write_asm"]

_TIME_LIMIT_S = 1800.0
_NO_WEIGHTS = ("ssd", "conv1d")
"""Ops without a weight that tiles of x are multiplied with: nothing is reckoned per weight."""


@dataclass(frozen=True)
class Entry:
    """One tile on one chip.

    Attributes:
        arch: the chip.
        tile: the tile as text.
        revision: of the sources that were compiled; "" for these.
        kernels: `Figures.as_dict` of each kernel that a launch of it launches; empty if it does not
            compile.
        error: why it does not compile, or why no such tile runs there; "" if it does.
    """

    arch: str
    tile: str
    revision: str
    kernels: tuple[dict[str, Any], ...]
    error: str = ""

    @property
    def failures(self) -> tuple[str, ...]:
        """What forbids the tile although it compiles."""
        return tuple(
            f"{kernel['kernel']}: {line}"
            for kernel in self.kernels
            # Revisions from before `faults` look for none.
            for line in (*kernel["resources"]["failures"], *kernel.get("faults", ()))
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "arch": self.arch,
            "tile": self.tile,
            "revision": self.revision,
            "kernels": list(self.kernels),
            "error": self.error,
        }


def survey(
    op: str | OpSpec,
    problem: Problem,
    archs: Sequence[str],
    tiles: Sequence[Tile] = (),
    *,
    on_compiled: Callable[[str, int, tuple[Compiled, ...]], None] | None = None,
) -> list[Entry]:
    """Compile every tile for every arch; one that does not compile is an entry with its error.

    Args:
        problem: the product; its arch is replaced by each of `archs`.
        tiles: fields that one leaves out are those of the space's default where that is of the same
            algorithm; none takes the default of the arch's own space.
        on_compiled: (arch, index of the tile, its kernels), before they are read.

    Raises:
        UnsupportedError: no triton, an unknown op or arch: nothing would compile.
        TileError: no space of the op has the algorithm of a tile.
    """
    entries = []
    for arch in archs:
        here = replace(problem, arch=arch)
        for index, given in enumerate(tiles or [default_tile(op, here)]):
            tile = _completed(op, here, given)
            try:
                compiled = compile_tile(op, here, tile)
            except TileError as error:
                entries.append(Entry(arch, str(tile), "", (), str(error)))
                continue
            if on_compiled is not None:
                on_compiled(arch, index, compiled)
            space = space_for(op, arch, tile)
            if op in _NO_WEIGHTS:
                space = None
            found = _multiplying([figures(kernel, tile, space) for kernel in compiled])
            entries.append(Entry(arch, str(tile), "", tuple(f.as_dict() for f in found)))
    return entries


def _multiplying(found: Sequence[Figures]) -> list[Figures]:
    """The figures of a launch, those per weight only where weights are multiplied: in the kernels
    with matrix instructions, or, where none has any, in the one with the longest inner loop.
    """
    most = max(found, key=lambda f: (f.counts["matrix"], f.counts["valu"]))
    return [
        f if f.counts["matrix"] or f is most
        else replace(f, k_step=None, valu_per_pair=None, issued_per_pair=None)
        for f in found
    ]  # fmt: skip


def _completed(op: str | OpSpec, problem: Problem, tile: Tile) -> Tile:
    space = space_for(op, problem.arch, tile)
    default = None if space is None else space.default(problem)
    if default is None or default.algorithm != tile.algorithm:
        return tile
    return Tile.from_mapping({**default.as_dict(), **tile.as_dict()})


def survey_revision(revision: Revision, arguments: Sequence[str]) -> list[Entry]:
    """The same by the sources of another revision, in a process of its own.

    Args:
        arguments: those of `tilewright isa`, without the form of its output.

    Raises:
        TilewrightError: the revision's `isa` fails; its own message is in it.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(revision.source), before]))
    try:
        done = subprocess.run(
            [revision.python, "-P", "-m", "tilewright", "isa", *arguments, "-o", "json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TilewrightError(f"revision {revision.title}: {error}") from error
    try:
        rows = json.loads(done.stdout)["results"]
        return [
            Entry(r["arch"], r["tile"], revision.title, tuple(r["kernels"]), r["error"])
            for r in rows
        ]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        if "No such command" in done.stderr:
            raise UnsupportedError(
                f"revision {revision.title} has no `tilewright isa`; take a later one"
            ) from error
        said = [line for line in done.stderr.splitlines() if line.strip()]
        last = said[-1].removeprefix("error: ") if said else "it prints no result"
        raise TilewrightError(f"revision {revision.title}: {last}") from error


def write_asm(folder: Path, stem: str, compiled: Sequence[Compiled]) -> list[Path]:
    """Write what each kernel became: "<stem>-<kernel>.amdgcn", or .ptx, .sass and .ptxas.log; and
    .ttgir, what the machine code was made from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kernel in compiled:
        stages = {stage: kernel.text(stage) for stage in ("ttgir", "ptx")}
        nvidia = kernel.arch.startswith("sm_")
        stages["sass" if nvidia else "amdgcn"] = listing_text(kernel)
        stages["ptxas.log"] = kernel.log if nvidia else ""
        for stage, text in stages.items():
            if text:
                path = folder / f"{stem}-{kernel.name.strip('_')}.{stage}"
                path.write_text(text, encoding="utf-8")
                written.append(path)
    return written
