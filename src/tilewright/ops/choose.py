"""The one way from a problem to its tile, and what identifies the code that would run it."""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata

from tilewright.ops.catalog import SPECS, spec_for
from tilewright.ops.contract import OpSpec
from tilewright.ops.kernel_files import kernel_files, named_sources
from tilewright.tiles.table import Choice, Running, Space, lookup
from tilewright.tiles.tile import Problem

__all__ = ["choose_tile", "compiler", "running", "running_of"]

_COMPILED = ("numba", "llvmlite")
_PACKAGES = (*_COMPILED, "torch", "onnxruntime", "triton")
_USES = {
    "dot": _COMPILED,
    "panel": _COMPILED,
    "int8": _COMPILED,
    "blas": (*_COMPILED, "torch"),
    "onnxruntime": ("onnxruntime",),
}


def choose_tile(problem: Problem, space: Space, *, units: int | None = None) -> Choice:
    """`tilewright.tiles.table.lookup` for an op of the catalog, held to the code that is running.

    Raises:
        TileError: as `lookup`.
    """
    now = functools.partial(running, problem.op, problem.arch)
    return lookup(problem, space, units=units, running=now)


@functools.cache
def running(op: str, arch: str) -> Running:
    """What identifies the kernels of an op of the catalog on an arch.

    Raises:
        UnsupportedError: there is no such op.
    """
    return running_of(spec_for(op, arch))


def running_of(spec: OpSpec) -> Running:
    """What identifies the kernels of `spec`: the sources of the CPU kernels for the catalog's own
    op on the CPU, else every file of `kernel_files`.
    """
    if spec.name in SPECS and not named_sources(spec):
        from tilewright.ops.cpu.runtime import kernel_hash

        return Running(compiler(), kernel_hash(), spec.version, _USES)
    # In an order that does not depend on where the files lie: the same on every machine of a fleet.
    files = sorted(
        f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in kernel_files(spec)
    )
    digest = hashlib.sha256("\n".join(files).encode()).hexdigest()
    return Running(compiler(), digest, spec.version, spec.uses)


@functools.cache
def compiler() -> str:
    """Compilers and libraries that kernels may depend on: "numba 0.65.1, llvmlite 0.47.0, ..."."""
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
