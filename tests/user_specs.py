"""A small honest spec as the text of a file, for tests to spoil in one place."""

from __future__ import annotations

from pathlib import Path

__all__ = ["HONEST", "write_spec"]

HONEST = """\
import numpy as np
import torch

from tilewright.ops.check import ErrorModel
from tilewright.ops.contract import Case, Inputs, OpSpec, draw_activations
from tilewright.ops.space import Planted, Rule, TileSpace
from tilewright.tiles.tile import Tile


def kernel(x):
    e = torch.exp(x - x.max(dim=1, keepdim=True).values)
    return e / e.sum(dim=1, keepdim=True)


def run(inputs, tile=None, threads=None):
    if tile is not None:
        SPACE.check(tile, inputs.case.problem("cpu-of-a-test"))
    return kernel(inputs.x.reshape(rows_of(inputs), -1))


def run_planted(inputs, tile=None, threads=None):
    y = torch.empty(inputs.x.shape)
    y[: len(y) // 16 * 16] = kernel(inputs.x)[: len(y) // 16 * 16]
    return y


def rows_of(inputs):
    return inputs.case.M


def make_inputs(case, seed):
    return Inputs(case, draw_activations(case, seed))


def reference(inputs):
    x = inputs.x64().reshape(rows_of(inputs), -1)
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def error_model(inputs, ref):
    return ErrorModel(2.0**-24 * ref * (8 + inputs.case.K**0.5), inputs.case.dtype)


SIZES = ((1, 33), (5, 64), (17, 40))
CASES = tuple(Case("rowsoftmax", "rows", "float32", m, k, k) for m, k in SIZES)
PLANTED = Planted(
    Tile.of("rows", block=16, planted="partial-rows"), "Rows beyond the last block are left out.",
    "They are not computed.", "nan-fill", run_planted, CASES[2:],
)
SPACE = TileSpace(
    "rowsoftmax/cpu",
    {"rows": {"block": (16, 64)}},
    (Rule("row", "a block is no longer than four rows", lambda t, p: t.block <= 4 * p.K),),
    lambda problem: Tile.of("rows", block=16),
    planted=(PLANTED,),
)
SPEC = OpSpec(
    "rowsoftmax", "Row softmax", version=1, weight_types=("rows",), cases=CASES,
    make_inputs=make_inputs, reference=reference, error_model=error_model, run=run,
    flops=lambda p: 5.0 * p.M * p.K, bytes=lambda p: 8.0 * p.M * p.K, space=lambda: SPACE,
)
"""


def write_spec(folder: Path, old: str = "", new: str = "", *, name: str = "spec.py") -> Path:
    """Write the honest spec, or one in which `old` has become `new`, and give its path."""
    text = HONEST
    if old:
        if old not in text:
            raise ValueError(f"the honest spec has no {old!r}")
        text = text.replace(old, new)
    path = folder / name
    path.write_text(text)
    return path
