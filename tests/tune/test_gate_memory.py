"""Guard bands, NaN, copies: what each of them shows and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tilewright.ops.contract import Case, Inputs
from tilewright.tune.gate_memory import Guards, Snapshot, operand_bytes, rehoused


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: filling memory is what is tested."""


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
dtypes = pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)

MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    "empty": lambda d: torch.empty(3, 5, dtype=d),
    "empty_like": lambda d: torch.empty_like(torch.zeros(3, 5, dtype=d)),
    "new_empty": lambda d: torch.zeros(1).new_empty((3, 5), dtype=d),
    "empty_strided": lambda d: torch.empty_strided((3, 5), (1, 3), dtype=d),
    "new_empty_strided": lambda d: torch.zeros(1).new_empty_strided((3, 5), (8, 1), dtype=d),
}


def beside(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """One element at `offset` from the first of a tensor: its neighbour in memory."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)


@pytest.mark.parametrize("make", MAKERS)
@dtypes
def test_what_is_allocated_keeps_its_form_and_holds_nan(make: str, dtype: torch.dtype) -> None:
    plain = MAKERS[make](dtype)
    guards = Guards()
    with guards:
        tensor = MAKERS[make](dtype)
    assert tensor.shape == plain.shape
    assert tensor.stride() == plain.stride()
    assert tensor.dtype == dtype
    assert tensor.data_ptr() % 64 == 0
    if dtype.is_floating_point:
        assert torch.isnan(tensor).all()
    elif dtype.itemsize == 1:
        assert torch.isnan(tensor.contiguous().view(-1)[:12].view(torch.float32)).all()
    else:
        assert (tensor == torch.iinfo(dtype).min + 90).all()
    tensor.fill_(1)
    assert guards.broken() is None


def test_zeros_stand_for_fresh_pages_when_the_fill_is_left_out() -> None:
    with Guards(nan=False):
        assert (torch.empty(7) == 0).all()


def test_other_allocations_are_left_alone() -> None:
    with Guards() as guards:
        assert (torch.zeros(4) == 0).all()
        assert (torch.ones(2) + torch.arange(2)).tolist() == [1, 2]
        assert torch.empty(0).numel() == 0
        assert torch.empty(4, device="meta").device.type == "meta"
    assert guards.broken() is None
    torch.empty(3)  # no longer guarded


@dtypes
@pytest.mark.parametrize(
    ("offset", "side", "gap"),
    [(-1, "before", 0), (-9, "before", 8), (15, "behind", 0), (25, "behind", 10)],
)
def test_a_write_outside_is_found(dtype: torch.dtype, offset: int, side: str, gap: int) -> None:
    guards = Guards()
    with guards:
        y = torch.empty(3, 5, dtype=dtype)
    beside(y, offset).fill_(1)
    found = guards.broken()
    assert found is not None
    name = str(dtype).removeprefix("torch.")
    assert f"bytes {side} the {name} [3, 5] buffer were written" in found
    assert f"the nearest {gap * dtype.itemsize} bytes from it" in found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_adding_to_what_lies_behind_shows_too(dtype: torch.dtype) -> None:
    """NaN plus a number is NaN: the pattern of the bands must change all the same."""
    guards = Guards()
    with guards:
        y = torch.empty(8, dtype=dtype)
    behind = beside(y, 8).numpy() if dtype is not torch.bfloat16 else None
    if behind is None:
        beside(y, 8).add_(1)
    else:
        with np.errstate(invalid="ignore"):
            behind += 1
    assert guards.broken() is not None


def test_a_workspace_is_watched_for_as_long_as_it_lives() -> None:
    guards = Guards()
    with guards:
        kept = torch.empty(16)
        torch.empty(16)
    assert guards.broken() is None
    beside(kept, 16).fill_(0)
    found = guards.broken()
    assert found is not None
    assert "float32 [16]" in found
    del kept
    assert guards.broken() is None


@pytest.mark.parametrize("rows", [1, 40])
def test_bands_hold_sixteen_rows_of_a_wide_output(rows: int) -> None:
    """So that the overrun of a whole row tile harms nobody's memory."""
    with Guards():
        y = torch.empty(rows, 30_000)
    room = y.untyped_storage().nbytes() - y.nbytes
    assert room >= 2 * 16 * 30_000 * 4


@pytest.mark.parametrize("nan", [True, False])
def test_x_moves_into_a_buffer_of_nan_with_its_strides(nan: bool) -> None:
    x = torch.randn(6, 10).as_strided((3, 4), (20, 2))
    moved = rehoused(x, nan=nan)
    assert torch.equal(moved, x)
    assert moved.stride() == x.stride()
    whole = torch.empty(0).set_(moved.untyped_storage())
    outside = whole[torch.isnan(whole)] if nan else whole[whole == 0]
    assert len(outside) == len(whole) - x.numel()
    assert torch.isnan(beside(moved, 1)).all() == nan
    assert torch.isnan(beside(moved, -1)).all() == nan


def test_x_that_cannot_move_stays() -> None:
    for x in (torch.empty(0, 8), torch.randn(1, 4).expand(3, 4)):
        assert rehoused(x) is x
    ids = torch.arange(5)
    assert torch.equal(rehoused(ids), ids)


@dataclass(frozen=True, eq=False)
class Packed:
    codes: torch.Tensor
    scales: np.ndarray
    name: str = "packed"


def operands(**changed: Any) -> Inputs:
    case = Case("toy", "rows", "float32", 2, 3, 4)
    fields: dict[str, Any] = {
        "x": torch.randn(4, 4)[1:3],
        "source": {"codes": [np.arange(12.0).reshape(3, 4)], "K": 4},
        "weight": Packed(torch.arange(12, dtype=torch.uint8), np.ones((4, 6), order="F")[1:, ::2]),
        "bias": torch.zeros(3),
    }
    return Inputs(case, **{**fields, **changed})


CHANGES: dict[str, Callable[[Inputs], Any]] = {
    "x": lambda i: i.x[0, 0].fill_(7),
    "weight.codes": lambda i: i.weight.codes[3].fill_(99),
    "weight.scales": lambda i: i.weight.scales.__setitem__((0, 0), 5.0),
    "source['codes'][0]": lambda i: i.source["codes"][0].__setitem__((2, 3), -1.0),
    "bias": lambda i: i.bias[2].fill_(1e-30),  # type: ignore[index]
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_operand_is_named_and_put_back(name: str) -> None:
    inputs = operands()
    snapshot = Snapshot(inputs)
    assert snapshot.changed() is None
    CHANGES[name](inputs)
    assert snapshot.changed() == name
    snapshot.restore()
    assert snapshot.changed() is None


def test_what_lies_around_an_operand_counts() -> None:
    inputs = operands()
    snapshot = Snapshot(inputs)
    beside(inputs.x, -1).fill_(3)
    assert snapshot.changed() == "x"


def test_nan_equals_itself_bit_for_bit() -> None:
    inputs = operands(x=torch.full((2, 4), float("nan")))
    assert Snapshot(inputs).changed() is None


def test_read_only_and_shared_memory() -> None:
    fixed = np.ones(4)
    fixed.flags.writeable = False
    x = torch.zeros(2, 4)
    inputs = operands(source=fixed, weight=x, bias=None, x=x)
    assert operand_bytes(inputs) == x.nbytes
