"""The Hopper decode kernel's source, run in numpy, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ops.w4a16.gluon_numpy import Kernel, kernel_on_numpy
from tilewright.formats.w4 import W4Codes
from tilewright.layout.hopper import pack_w4_hopper
from tilewright.ops.check import ErrorModel, check_output, product_sigma
from tilewright.ops.w4a16.hopper_planted import DECODE_PLANTED
from tilewright.ops.w4a16.reference import w4a16_reference, w4a16_rows
from tilewright.tiles.tile import Tile

PAIRS = Tile.of(
    "hopper_decode", block_m=8, block_n=64, warps_n=1, warps_k=4, unroll=2, split_k=1,
    x_load="pairs",
)  # fmt: skip
VECTORS = PAIRS.replace(block_n=32, warps_k=8, split_k=2, x_load="vectors")
WIDE = PAIRS.replace(block_m=16, block_n=32, warps_n=2, unroll=1)

# (M, N, K, group): within a fragment, a block, a step; whole and ragged along each of them.
SHAPES = [
    (1, 64, 512, 128),
    (8, 128, 1024, 128),
    (3, 100, 576, 64),
    (7, 33, 160, 32),
    (8, 1, 768, 256),
    (5, 72, 1031, -1),
    (1, 16, 7, -1),
    (8, 97, 2048, 1024),
]
TILES = {
    "pairs": PAIRS,
    "pairs split": PAIRS.replace(block_n=16, unroll=1, split_k=4),
    "vectors split": VECTORS,
    "vectors": VECTORS.replace(warps_k=4, unroll=1, split_k=1),
    "two warps along N": PAIRS.replace(warps_n=2, x_load="vectors"),
    "16 rows": WIDE,
    "16 rows, vectors": WIDE.replace(x_load="vectors", split_k=2),
}
DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def decode() -> ModuleType:
    return kernel_on_numpy()


@pytest.fixture
def backwards() -> Iterator[None]:
    Kernel.backwards = True
    yield
    Kernel.backwards = False


class Operands:
    def __init__(
        self, m: int, n: int, k: int, group: int, dtype: torch.dtype, asym: bool, bias: bool
    ) -> None:
        rng = np.random.default_rng((m, n, k))
        g = k if group == -1 else group
        scales = torch.from_numpy(rng.lognormal(0, 0.3, (n, k // g)) / (7 * np.sqrt(k)))
        zeros = rng.integers(0, 16, (n, k // g), dtype=np.uint8) if asym else None
        self.codes = W4Codes(
            rng.integers(0, 16, (n, k), dtype=np.uint8), scales.to(dtype).float().numpy(), zeros,
            g, None, dtype,
        )  # fmt: skip
        # Rows 16 bytes apart, as the op hands them over, between NaN.
        row = -(-k // 8) * 8 + 8
        x = torch.full((m, row), float("nan"), dtype=dtype)
        x[:, :k] = torch.from_numpy(rng.standard_normal((m, k)))
        self.x = x[:, :k]
        self.bias = torch.from_numpy(rng.standard_normal(n)).to(dtype) if bias else None
        self.weight = pack_w4_hopper(self.codes, act_dtype=dtype)

    def run(self, decode: ModuleType, tile: Tile) -> torch.Tensor:
        m, n, k = len(self.x), self.codes.N, self.codes.K
        y = torch.full((m, n), float("nan"), dtype=self.x.dtype)
        floats, counters = decode.workspace_hopper_decode(tile, m, n, k, 132)
        space = SimpleNamespace(
            partials=torch.full((floats,), float("nan")),
            counters=torch.zeros(counters, dtype=torch.int32),
        )
        decode.launch_w4a16_hopper_decode(self.x, self.weight, self.bias, y, tile, space)
        if not space.counters.any():
            return y
        raise AssertionError("counters are not zero again")

    def check(self, y: torch.Tensor) -> Any:
        x = self.x.double().numpy()
        bias = None if self.bias is None else self.bias.double().numpy()
        # The kernel rounds no weight: what is left is float32's own error, larger where bfloat16
        # codes carry 128 until the zero point takes it off.
        unit = 0.0 if self.x.dtype == torch.float16 else 2.0**-16
        sigma = product_sigma(x, w4a16_rows(self.codes), bias=bias, weight_unit=unit)
        return check_output(
            y, w4a16_reference(x, self.codes, bias), ErrorModel(sigma, self.x.dtype)
        )


CASES = {
    f"{shape} {name} {('fp16', 'bf16')[(i + j) % 2]}": (shape, tile, DTYPES[(i + j) % 2], i % 3 > 0)
    for i, shape in enumerate(SHAPES)
    for j, (name, tile) in enumerate(TILES.items())
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_the_oracle(
    decode: ModuleType, case: tuple[tuple[int, int, int, int], Tile, torch.dtype, bool]
) -> None:
    (m, n, k, group), tile, dtype, asym = case
    operands = Operands(m, n, k, group, dtype, asym=asym, bias=n % 2 == 0)
    found = operands.check(operands.run(decode, tile))
    assert found.passed, found.reason


def test_sixteen_rows(decode: ModuleType) -> None:
    operands = Operands(15, 40, 320, 64, torch.float16, asym=True, bias=True)
    found = operands.check(operands.run(decode, WIDE.replace(x_load="vectors")))
    assert found.passed, found.reason


@pytest.mark.usefixtures("backwards")
def test_the_order_of_arrival_changes_no_bit(decode: ModuleType) -> None:
    operands = Operands(5, 72, 1031, -1, torch.float16, asym=True, bias=True)
    last_first = operands.run(decode, TILES["pairs split"])
    Kernel.backwards = False
    assert torch.equal(last_first, operands.run(decode, TILES["pairs split"]))


@pytest.mark.parametrize("fault", DECODE_PLANTED, ids=lambda p: p.name)
def test_planted_tiles_are_wrong(decode: ModuleType, fault: Any) -> None:
    case = fault.cases[0]
    m, n, k, group = case.M, case.N, case.K, case.group
    if fault.name == "partial-rows":
        n += 1
    elif fault.name == "k-tail":
        k += 1
    operands = Operands(m, n, k, group, torch.float16, asym=True, bias=False)
    assert operands.check(operands.run(decode, fault.honest)).passed
    if fault.name == "past-the-end":
        with pytest.raises(IndexError, match="offsets"):
            operands.run(decode, fault.tile)
    else:
        assert not operands.check(operands.run(decode, fault.tile)).passed


@pytest.mark.parametrize("name", ["partial-rows", "k-tail"])
def test_planted_tiles_are_right_where_they_were_tuned(decode: ModuleType, name: str) -> None:
    (fault,) = (p for p in DECODE_PLANTED if p.name == name)
    case = fault.cases[0]
    operands = Operands(case.M, case.N, case.K, case.group, torch.float16, asym=True, bias=False)
    assert operands.check(operands.run(decode, fault.tile)).passed
