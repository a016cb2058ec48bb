"""mmq's Hopper kernel: its arithmetic, in numpy, and its tiles."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilewright.errors import TileError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for
from tilewright.ops.contract import Case
from tilewright.ops.mmq.spec import SPEC
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.tiles.tile import Tile

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )


@pytest.fixture(scope="module")
def emulated() -> Any:
    path = Path(__file__).with_name("hopper_numpy.py")
    spec = importlib.util.spec_from_file_location("mmq_hopper_numpy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.kernels = module.kernels_on_numpy()
    return module


def drawn(name: str, n: int, k: int, seed: int = 0, *flags: str) -> np.ndarray:
    return SPEC.make_inputs(
        Case("mmq", name, "float16", 1, n, k, 0, "float", flags), seed
    ).source.raw


def exact(name: str, raw: np.ndarray) -> np.ndarray:
    """W in float64, from the codes of the file's blocks."""
    codes = BLOCK_TYPES[name].codes(raw)
    w = codes.codes.astype(np.float64).reshape(len(raw), -1, codes.sub)
    w = w * codes.scale.astype(np.float64)[:, :, None]
    if codes.minimum is not None:
        w = w + codes.minimum.astype(np.float64)[:, :, None]
    return w.reshape(len(raw), -1)


def packed(name: str, raw: np.ndarray) -> GpuBlocks:
    made = pack_blocks_for(raw, name, arch="sm_90")
    assert isinstance(made, GpuBlocks)
    return made


UNIT = {torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 2.0**-134)}
"""Half a unit in the last place: of a number, and of the smallest."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_weight_is_rounded_once(emulated: Any, name: str, dtype: torch.dtype) -> None:
    k = 768 if BLOCK_TYPES[name].block_size == 256 else 416  # the last step is a part of one
    raw = drawn(name, 16, k)
    found, right = emulated.weights(emulated.kernels, packed(name, raw), dtype), exact(name, raw)
    relative, least = UNIT[dtype]
    error = np.abs(found - right)
    # What is left beside that rounding: of the inner product of "split", of float32 sums.
    assert (error <= (relative * 1.002) * np.abs(right) + 2.0**-19 * np.abs(right).max()
            + least).all()  # fmt: skip
    assert np.linalg.norm(error) <= 0.45 * relative * np.linalg.norm(right) * 1.01


@pytest.mark.parametrize("name", [n for n in BLOCK_TYPES if n != "MXFP4"])
def test_scales_of_zero_and_of_any_size(emulated: Any, name: str) -> None:
    raw = drawn(name, 16, 512, 0, "edge")
    found = emulated.weights(emulated.kernels, packed(name, raw), torch.float16)
    right = exact(name, raw)
    with np.errstate(over="ignore"):
        fits = np.isfinite(right.astype(np.float16))
    rows = np.abs(right).max(axis=1, keepdims=True)
    assert np.isfinite(found[fits]).all()
    bound = 2 * 2.0**-11 * np.abs(right) + 2.0**-14 * np.minimum(rows, 1) * 2.0**-5 + 2.0**-24
    assert (np.abs(found - right) <= bound)[fits].all()


def test_a_wrong_turn_would_be_found(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = drawn("Q6_K", 16, 256)
    parts = emulated.kernels.hopper_parts
    right = parts.turns_of

    def wrong(bits: int, at: int, pairs: Any) -> Any:
        first, second = right(bits, at, pairs)
        return first + 4, second

    monkeypatch.setattr(parts, "turns_of", wrong)
    found = emulated.weights(emulated.kernels, packed("Q6_K", raw), torch.float16)
    want = exact("Q6_K", raw)
    assert np.linalg.norm(found - want) > 0.1 * np.linalg.norm(want)


TILE = Tile.of(
    "hopper", block_n=128, block_m=128, num_stages=4, w_stages=3, split_k=1, group_m=4
)  # fmt: skip
PROBLEM = Case("mmq", "Q4_K", "float16", 512, 4096, 14336).problem("sm_90")


@pytest.mark.parametrize(
    ("fields", "problem", "rule"),
    [
        ({}, {"arch": "sm_80"}, "sm_90"),
        ({}, {"act_dtype": "float32"}, "16-bit activations"),
        ({}, {"activations": "int8"}, "16-bit activations"),
        ({}, {"weight_type": "Q5_0", "K": 1056}, "whole words a row"),
        ({"block_m": 256, "block_n": 64}, {}, ""),
        ({"block_m": 256, "num_stages": 6}, {}, "shared memory"),
        ({}, {"M": 40}, "idle rows"),
        ({"block_m": 64}, {"M": 4096}, "small tiles"),
        ({"split_k": 2}, {"N": 14336}, "shares"),
        ({"split_k": 8, "block_m": 128}, {"M": 128, "N": 256, "K": 1024}, "shares"),
    ],
)
def test_a_rule_and_what_breaks_it(
    fields: dict[str, Any], problem: dict[str, Any], rule: str
) -> None:
    TRITON_SPACE.check(TILE, PROBLEM)
    tile, changed = TILE.replace(**fields), replace(PROBLEM, **problem)
    if not rule:
        TRITON_SPACE.check(tile, changed)
        return
    with pytest.raises(TileError, match=f"breaks rule 'hopper {rule}'"):
        TRITON_SPACE.check(tile, changed)


@pytest.mark.parametrize("m", [17, 32, 64, 100, 128, 300, 512, 900])
@pytest.mark.parametrize("shape", [(4096, 14336), (14336, 4096), (520, 1024), (97, 512)])
def test_the_default_of_many_rows_on_hopper(m: int, shape: tuple[int, int]) -> None:
    for name in BLOCK_TYPES:
        for dtype in ("float16", "bfloat16"):
            problem = Case("mmq", name, dtype, m, *shape).problem("sm_90")
            tile = TRITON_SPACE.default(problem)
            assert tile.algorithm == "hopper"
            TRITON_SPACE.check(tile, problem)


def test_shares_and_their_sums_take_a_float_an_output() -> None:
    from tilewright.ops.mmq.gpu import kernel_of

    needs = kernel_of("hopper").needs
    assert needs is not None
    assert needs(TILE.replace(split_k=4), 100, 40, 1024, 132) == (16000, 0)
    assert needs(TILE, 100, 40, 1024, 132) == (0, 0)
