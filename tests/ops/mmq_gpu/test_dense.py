"""mmq through slabs of dequantized weights, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

import triton_interpreter
from quick import one_in
from tilewright.device import INTERPRETER
from tilewright.errors import TileError
from tilewright.layout.blocks import BLOCK_FORMS
from tilewright.ops.catalog import spec_for
from tilewright.ops.contract import Case
from tilewright.ops.mmq.dense_space import PLANTED, default
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.gate import CHECKS, gate

with triton_interpreter.interpreting():
    from tilewright.ops.mmq.dense_gemm import launch_dense, workspace_dense

SPEC = spec_for("mmq", INTERPRETER)
TILE = Tile.of("dense", block_n=16, block_k=64, num_warps=2, slab_n=512)
by_name = pytest.mark.parametrize("wrong", PLANTED, ids=lambda wrong: wrong.name)


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: the gate's own fill is what is tested."""


@pytest.mark.parametrize("weight_type", list(BLOCK_FORMS))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_slab_holds_what_gguf_dequantizes(weight_type: str, dtype: str) -> None:
    """x is the identity, so y is the rounded weight itself."""
    k = 288 if gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[weight_type]][0] == 32 else 256
    case = Case("mmq", weight_type, dtype, 64, 40, k)
    inputs = SPEC.make_inputs(case, 0)
    x = torch.eye(k, dtype=inputs.x.dtype)
    y = torch.full((k, 40), float("nan"), dtype=x.dtype)
    floats, counters = workspace_dense(TILE, k, 40, k, 1)
    assert counters == 0
    scratch = Workspace(torch.full((floats,), float("nan")), None)
    launch_dense(x, inputs.weight, None, y, TILE, scratch)
    raw = np.asarray(inputs.source.raw)
    right = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[weight_type])
    torch.testing.assert_close(
        y.T.float(), torch.from_numpy(right).to(x.dtype).float(), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("weight_type", "dtype", "m", "n", "k", "flags"),
    [
        pytest.param("Q4_K", "float16", 64, 530, 256, (), marks=pytest.mark.slow),
        ("Q6_K", "bfloat16", 65, 33, 512, ("bias",)),
        ("Q5_0", "float16", 130, 40, 96, ("strided",)),
        pytest.param("IQ4_XS", "float16", 64, 1030, 256, ("bias",), marks=pytest.mark.slow),
    ],
)
def test_a_right_tile_passes_every_check(
    weight_type: str, dtype: str, m: int, n: int, k: int, flags: tuple[str, ...]
) -> None:
    case = Case("mmq", weight_type, dtype, m, n, k, flags=flags)
    result = gate(SPEC, TILE, [case], _checks=set(CHECKS) - {"ragged-shapes"})
    assert result.passed, result


@by_name
def test_a_planted_tile_is_rejected_for_its_fault(wrong) -> None:
    (case,) = wrong.cases
    result = gate(SPEC.with_run(wrong.run), wrong.tile, [case])
    assert not result.passed
    assert result.check == wrong.caught_by, result


@pytest.mark.parametrize("wrong", one_in(3, PLANTED), ids=lambda wrong: wrong.name)
def test_the_tile_it_pretends_to_be_is_right(wrong) -> None:
    (case,) = wrong.cases
    TRITON_SPACE.check(wrong.honest, case.problem(INTERPRETER))
    result = gate(SPEC, wrong.honest, [case], _checks=set(CHECKS) - {"ragged-shapes"})
    assert result.passed, result


PROBLEM = Problem("mmq", "sm_90", "float16", "Q4_K", "float", 4096, 4096, 4096, 0)


@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({}, True),
        ({"act_dtype": "bfloat16", "arch": "sm_80"}, True),
        ({"M": 512}, False),
        ({"act_dtype": "float32"}, False),
        ({"activations": "int8"}, True),  # allowed, and not the faster way
        ({"arch": "gfx942"}, False),
        ({"arch": INTERPRETER}, False),
    ],
    ids=str,
)
def test_by_default_it_serves_many_rows_on_nvidia(changes: dict, served: bool) -> None:
    problem = replace(PROBLEM, **changes)
    tile = default(problem)
    assert (tile is not None) == served
    assert (TRITON_SPACE.default(problem).algorithm == "dense") == served
    if tile is not None:
        TRITON_SPACE.check(tile, problem)


@pytest.mark.parametrize(
    ("changes", "fields", "rule"),
    [
        ({"act_dtype": "float32"}, {}, "weights of 16 bits"),
        ({"M": 32}, {}, "many rows"),
        ({}, {"block_n": 64, "block_k": 256}, "registers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_does_not_serve(changes: dict, fields: dict, rule: str) -> None:
    with pytest.raises(TileError, match=f"dense {rule}"):
        TRITON_SPACE.check(TILE.replace(**fields), replace(PROBLEM, **changes))
