"""moe's Hopper kernel in numpy: its weights, its roles and barriers, and which rows it stores."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from by_path import module_once
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.experts import pack_gpu_experts
from tilewright.ops.contract import Case
from tilewright.ops.mmq.spec import SPEC
from tilewright.tiles.tile import Tile

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

E, TOKENS, TOP_K = 4, 30, 2
UNITS = 3  # multiprocessors
machine: Any = module_once("moe_machine", Path(__file__).with_name("moe_machine.py"))


@pytest.fixture(scope="module")
def kernel() -> Any:
    found = machine.kernel()
    found.target_units = lambda device: UNITS
    return found


def hopper(block_n: int, block_m: int, num_stages: int, programs: int) -> Tile:
    return Tile.of("hopper", block_n=block_n, block_m=block_m, num_stages=num_stages,
                   programs=programs)  # fmt: skip


def product(
    kernel: Any, name: str, n: int, k: int, tile: Tile, dtype: torch.dtype, *flags: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel stores, and the product of the codes in float64; both [slots, n]."""
    drawn = [
        SPEC.make_inputs(Case("mmq", name, "float16", 1, n, k, 0, "float", flags), i).source.raw
        for i in range(E)
    ]
    experts = pack_gpu_experts(np.stack(drawn), name, arch="sm_90")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, k, generator=generator).to(dtype)
    ids = torch.randint(0, E - 1, (TOKENS * TOP_K,), generator=generator)  # the last one has none
    ids[3] = -1
    slots, plan = machine.routed(ids, E, tile.block_m)
    y = torch.full((len(ids), n), 7.0).to(dtype)
    rows = machine.reordered(x[slots // TOP_K])
    kernel.launch_moe_hopper(rows, experts, slots, plan, y, tile)

    exact = []
    for raw in drawn:
        codes = BLOCK_TYPES[name].codes(raw)
        w = codes.codes.astype(np.float64).reshape(n, -1, codes.sub)
        w = w * codes.scale.astype(np.float64)[:, :, None]
        if codes.minimum is not None:
            w = w + codes.minimum.astype(np.float64)[:, :, None]
        exact.append(torch.from_numpy(w.reshape(n, -1)))
    nothing = torch.full((n,), torch.nan, dtype=torch.float64)
    right = [exact[e] @ x[s // TOP_K].double() if e >= 0 else nothing
             for s, e in enumerate(ids.tolist())]  # fmt: skip
    return y, torch.stack(right)


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    there = ~torch.isnan(right)
    assert torch.equal(torch.isnan(found), ~there)
    return float((found.double() - right)[there].norm() / right[there].norm())


MOST = {torch.float16: 3.3e-4, torch.bfloat16: 2.6e-3}
"""Two roundings, of weights and of results: 2^-12 to 2^-11 each."""


QUICK = ("Q4_K", "Q6_K", "Q4_0", "Q5_0")
"""Types of bfloat16 that the default tests multiply: one of each way to make its numbers."""
EVERY = [
    pytest.param(
        name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}",
        marks=[] if dtype == torch.float16 or name in QUICK else pytest.mark.slow,
    )
    for name in BLOCK_TYPES for dtype in MOST
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_products_of_every_type(kernel: Any, name: str, dtype: torch.dtype) -> None:
    k = {256: 512, 32: 352}[BLOCK_TYPES[name].block_size]  # the last step is a part of one
    if name.startswith("Q5_") and k == 352:
        k = 384
    tile = hopper(128, 32, 3, 1) if dtype == torch.float16 else hopper(64, 16, 2, 2)
    found, right = product(kernel, name, 72, k, tile, dtype)
    assert error(found, right) < MOST[dtype]


@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_tiles_of_every_height(kernel: Any, block_m: int) -> None:
    found, right = product(kernel, "Q4_K", 72, 768, hopper(128, block_m, 4, 1), torch.float16)
    assert error(found, right) < MOST[torch.float16]


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K"])
def test_scales_of_zero_and_of_any_size(kernel: Any, name: str) -> None:
    found, right = product(kernel, name, 72, 512, hopper(128, 32, 3, 1), torch.float16, "edge")
    there = ~torch.isnan(right)
    size = right.abs().amax(1, keepdim=True).clamp(min=1e-3).expand_as(right)
    fits = there & (size < 3e4)
    assert fits.any()
    assert ((found.double() - right).abs() <= 4e-3 * size)[fits].all()


@pytest.mark.parametrize("change", ["column", "number"])
def test_a_wrong_index_would_be_found(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    if change == "column":
        monkeypatch.setattr(machine, "reordered", lambda x: x.contiguous())
    else:
        plain = kernel.numbers_of_steps.fn
        swapped = lambda *args: plain(*args)[::-1]  # noqa: E731
        monkeypatch.setattr(kernel, "numbers_of_steps", swapped)
    found, right = product(kernel, "Q4_K", 72, 512, hopper(128, 32, 3, 1), torch.float16)
    assert error(found, right) > 0.1
