"""mmq's Hopper kernel: its arithmetic, in numpy, and its tiles."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from by_path import module_at
from tilewright.errors import TileError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for
from tilewright.ops.contract import Case
from tilewright.ops.mmq.gpu_spec import gpu_spec
from tilewright.ops.mmq.hopper_planted import PLANTED
from tilewright.ops.mmq.spec import SPEC
from tilewright.ops.mmq.triton_space import TRITON_SPACE
from tilewright.ops.space import Planted
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )


@pytest.fixture(scope="module")
def emulated() -> Any:
    module: Any = module_at("mmq_hopper_numpy", Path(__file__).with_name("hopper_numpy.py"))
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


@pytest.fixture(scope="module")
def machine() -> Any:
    module: Any = module_at("mmq_hopper_machine", Path(__file__).with_name("hopper_machine.py"))
    return module.machine()


def multiplied(
    machine: Any, name: str, m: int, n: int, k: int, tile: Tile, units: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the kernel makes of a product with a bias, the right one, and the counters it left."""
    machine.target_units = lambda device: units
    raw = drawn(name, n, k)
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    y = torch.full((m, n), torch.nan, dtype=dtype)
    floats, counters = machine.workspace_mmq_hopper(tile, m, n, k, units)
    space = Workspace(torch.full((floats,), torch.nan), torch.zeros(counters, dtype=torch.int32))
    machine.launch_mmq_hopper(x, packed(name, raw), bias, y, tile, space)
    assert space.counters is not None
    right = x.double() @ torch.from_numpy(exact(name, raw)).T + bias.double()
    return y, right, space.counters


def tile_of(block_n: int, block_m: int, stages: int, w_stages: int, split_k: int = 1) -> Tile:
    return Tile.of(
        "hopper", block_n=block_n, block_m=block_m, num_stages=stages, w_stages=w_stages,
        split_k=split_k, group_m=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "tile", "units"),
    [
        ("Q4_K", 70, 136, 1024, tile_of(64, 32, 3, 2), 4),  # programs of two tiles and of three
        ("Q6_K", 130, 100, 512, tile_of(128, 128, 4, 3), 132),  # y in no 16 bytes, past M and N
        ("Q8_0", 300, 64, 288, tile_of(64, 256, 3, 2), 1),  # K ends within a step; y in halves
        ("Q5_0", 17, 72, 640, tile_of(64, 16, 4, 3, 2), 2),  # more pieces than multiprocessors
        ("Q4_0", 33, 130, 1312, tile_of(128, 32, 3, 4, 4), 132),
        ("Q2_K", 20, 65, 2048, tile_of(64, 32, 5, 2, 8), 16),
        ("MXFP4", 16, 64, 32, tile_of(64, 16, 3, 2), 132),
        # Cut evenly: programs with one step more than others; shares of three programs; as many
        # programs as steps; a program alone.
        ("Q4_K", 70, 136, 1024, tile_of(64, 32, 3, 2, 0), 5),
        ("Q2_K", 20, 65, 2048, tile_of(64, 32, 5, 2, 0), 7),
        ("Q6_K", 130, 100, 512, tile_of(128, 128, 4, 3, 0), 132),
        ("Q8_0", 300, 64, 288, tile_of(64, 256, 3, 2, 0), 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_the_whole_kernel(
    machine: Any, name: str, m: int, n: int, k: int, tile: Tile, units: int, dtype: torch.dtype
) -> None:
    y, right, counters = multiplied(machine, name, m, n, k, tile, units, dtype)
    error = float((y.double() - right).norm() / right.norm())
    assert error <= (3e-4 if dtype == torch.float16 else 2.5e-3)
    assert not counters.any()  # ready for the next launch
    again, _, _ = multiplied(machine, name, m, n, k, tile, units, dtype)
    assert torch.equal(y, again)


def test_a_lost_share_would_be_found(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = tile_of(64, 16, 3, 2, 2)
    monkeypatch.setattr(machine, "_collect", lambda acc, *_: acc)
    y, right, _ = multiplied(machine, "Q4_K", 16, 64, 1024, tile, 132, torch.float16)
    assert float((y.double() - right).norm() / right.norm()) > 0.1


def launched(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tile: Tile, m: int, n: int, k: int, units: int
) -> list[list[tuple[int, int, int]]]:
    """The pieces of every program of a launch, in the order in which it takes them: the tile, and
    the first and the last + 1 of the steps of K that it sums. From the kernel's own functions."""
    seen: dict[str, Any] = {}

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: seen.update(grid=grid, args=args, **constants)

    with monkeypatch.context() as patch:
        patch.setattr(machine, "target_units", lambda device: units)
        patch.setattr(machine, "_mmq_hopper_kernel", Recorded())
        x = torch.empty(m, k, dtype=torch.float16)
        y = torch.empty(m, n, dtype=torch.float16)
        floats, counters = machine.workspace_mmq_hopper(tile, m, n, k, units)
        space = Workspace(torch.empty(floats), torch.zeros(counters, dtype=torch.int32))
        machine.launch_mmq_hopper(x, packed("Q4_K", drawn("Q4_K", n, k)), None, y, tile, space)
        (programs,) = seen["grid"]
        tiles_m, tiles_n = -(-m // tile.block_m), -(-n // tile.block_n)
        steps, split, group_m = -(-k // 256), seen["SPLIT"], seen["GROUP_M"]
        patch.setattr(machine.gl, "num_programs", lambda axis: programs)
        found: list[list[tuple[int, int, int]]] = []
        for program in range(programs):
            number = machine.gl.to_tensor(program)
            patch.setattr(machine.gl, "program_id", lambda axis, number=number: number)
            begin, end, count = machine._range(tiles_m * tiles_n, steps, split)
            pieces = []
            for j in range(int(count.data)):
                _, _, t, _, first, last = machine._item(
                    machine.gl.to_tensor(j), begin, end, tiles_m, tiles_n, steps, split, group_m
                )
                pieces.append((int(t.data), int(first.data), int(last.data)))
            found.append(pieces)
    return found


@pytest.mark.parametrize("units", [1, 7, 104, 132, 304])
@pytest.mark.parametrize("split_k", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("tiles", [1, 9, 66, 130])
def test_programs_wait_for_programs_of_lower_numbers_alone(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tiles: int, split_k: int, units: int
) -> None:
    """The device begins programs in the order of their numbers. So they end even one after the
    other, where another launch whose programs wait has all other multiprocessors."""
    steps = 17
    programs = launched(
        machine, monkeypatch, tile_of(64, 16, 3, 2, split_k), 16 * tiles, 64, 256 * steps, units
    )
    summed = np.zeros((tiles, steps), dtype=int)
    for program, pieces in enumerate(programs):
        for t, first, last in pieces:
            if last == steps and first > 0:  # the last share of a tile: all others have been left
                assert summed[t, :first].all(), f"program {program} waits for a later one"
            summed[t, first:last] += 1
    assert (summed == 1).all()
    if split_k == 1:
        assert len(programs) == min(units, tiles)


HOPPER_PLANTED = [p for p in PLANTED if p.tile.algorithm == "hopper"]


def planted_error(machine: Any, of: Tile, m: int, n: int, k: int, weight_type: str) -> float:
    y, right, _ = multiplied(machine, weight_type, m, n, k, of, 132, torch.float16)
    return float((y.double() - right).norm() / right.norm())


@pytest.mark.parametrize("wrong", HOPPER_PLANTED, ids=lambda wrong: wrong.name)
def test_a_planted_tile_is_wrong_and_what_it_pretends_to_be_is_right(
    machine: Any, wrong: Planted
) -> None:
    (case,) = wrong.cases
    m, n, k = case.M, case.N, case.K
    if wrong.caught_by == "ragged-shapes":  # right on the product it would be tuned for
        assert planted_error(machine, wrong.tile, m, n, k, case.weight_type) <= 3e-4
        n, k = n + 1, k + 32 * (case.weight_type == "Q4_0")
    assert planted_error(machine, wrong.honest, m, n, k, case.weight_type) <= 3e-4
    if wrong.name == "hopper-past-the-end":
        with pytest.raises(IndexError, match="offsets"):
            planted_error(machine, wrong.tile, m, n, k, case.weight_type)
    else:
        assert not planted_error(machine, wrong.tile, m, n, k, case.weight_type) <= 0.1


def test_planted_tiles_are_of_the_space_of_hopper_alone() -> None:
    assert set(PLANTED) <= set(gpu_spec("sm_90").space().planted)
    assert not set(PLANTED) & set(gpu_spec("sm_80").space().planted)
    for wrong in PLANTED:
        problem = wrong.cases[0].problem("sm_90")
        TRITON_SPACE.check(wrong.honest, problem)
        with pytest.raises(TileError, match="has the fields"):
            TRITON_SPACE.check(wrong.tile, problem)


TILE = Tile.of(
    "hopper", block_n=128, block_m=128, num_stages=4, w_stages=3, split_k=1, group_m=4
)  # fmt: skip
PROBLEM = Case("mmq", "Q4_K", "float16", 512, 4096, 14336).problem("sm_90")


@pytest.mark.parametrize(
    ("fields", "problem", "rule"),
    [
        ({}, {"arch": "sm_80"}, "sm_90"),
        ({}, {"act_dtype": "float32"}, "16-bit activations"),
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


def test_all_shares_but_the_last_of_a_tile_take_its_outputs_in_floats() -> None:
    from tilewright.ops.mmq.gpu import kernel_of

    needs = kernel_of("hopper").needs
    assert needs is not None
    assert needs(TILE.replace(split_k=4), 300, 200, 1024, 132) == (6 * 3 * 128 * 128, 6)
    assert needs(TILE, 300, 200, 1024, 132) == (0, 0)
    assert needs(TILE.replace(split_k=0), 300, 200, 1024, 132) == (132 * 128 * 128, 6)
