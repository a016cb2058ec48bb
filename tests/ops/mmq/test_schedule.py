"""Every step of every tile is summed once, whoever sums it; the device reckons as Python does."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import pytest
import torch

from tilewright.ops.mmq.schedule import (
    SCHEDULES,
    first_step,
    segments,
    slots,
    slots_of,
    unit_of,
)
from triton_interpreter import interpreting

with interpreting():
    import triton
    import triton.language as tl

    parts = import_module("tilewright.ops.mmq.int8_parts")
    first_step_of, unit_of_step = parts.first_step_of, parts.unit_of_step

    @triton.jit
    def _reckon(steps_ptr, units_ptr, first_ptr, total, units, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        tl.store(first_ptr + at, first_step_of(at, total, units), mask=at <= units)
        step = tl.load(steps_ptr + at)
        tl.store(units_ptr + at, unit_of_step(step, total, units))


UNITS = (1, 7, 104, 132, 304)
SIZES = ((1, 1), (1, 448), (2, 1), (3, 5), (17, 7), (128, 448), (131, 342))  # tiles, steps
by_units = pytest.mark.parametrize("units", UNITS)
by_size = pytest.mark.parametrize(("tiles", "steps"), SIZES, ids=lambda n: str(n))


def arguments(schedule: str) -> list[dict[str, int]]:
    if schedule == "stream-k":
        return [{"units": units} for units in UNITS]
    return [{"split_k": split} for split in (2, 4, 8)] if schedule == "split-k" else [{}]


HOW = [(schedule, more) for schedule in SCHEDULES for more in arguments(schedule)]
by_schedule = pytest.mark.parametrize(
    ("schedule", "more"), HOW, ids=["-".join([s, *map(str, m.values())]) for s, m in HOW]
)


@by_schedule
@by_size
def test_every_step_of_every_tile_is_summed_once(schedule, more, tiles, steps):
    found = Counter(
        (s.tile, step)
        for s in segments(schedule, tiles, steps, **more)
        for step in range(s.first, s.last)
    )
    assert found == {(tile, step): 1 for tile in range(tiles) for step in range(steps)}


@by_schedule
@by_size
def test_the_second_pass_finds_every_part_in_order(schedule, more, tiles, steps):
    """The parts of a tile lie in slots of their own, which the second pass reads by their steps; a
    tile without parts has been stored whole."""
    made = segments(schedule, tiles, steps, **more)
    used = [s.slot for s in made if s.slot is not None]
    assert len(set(used)) == len(used)
    assert all(0 <= slot < slots(schedule, tiles, **more) for slot in used)
    for tile in range(tiles):
        of_tile = sorted((s for s in made if s.tile == tile), key=lambda s: (s.first, s.unit))
        parts = [s.slot for s in of_tile if s.slot is not None]
        assert slots_of(schedule, tile, tiles, steps, **more) == parts
        assert parts or [(s.first, s.last) for s in of_tile] == [(0, steps)]


@by_units
@by_size
def test_units_have_the_same_number_of_steps_but_for_one(units, tiles, steps):
    total = tiles * steps
    ends = [first_step(unit, total, units) for unit in range(units + 1)]
    shares = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    assert ends[0] == 0
    assert ends[-1] == total
    assert max(shares) - min(shares) <= 1


@by_units
@by_size
def test_the_device_reckons_as_python_does(units, tiles, steps):
    total = tiles * steps
    size = 512
    at = torch.linspace(0, total - 1, size).int()
    found = torch.full((size,), -1, dtype=torch.int32)
    first = torch.full((size,), -1, dtype=torch.int32)
    _reckon[(1,)](at, found, first, total, units, SIZE=size)
    assert found.tolist() == [unit_of(step, total, units) for step in at.tolist()]
    assert first[: units + 1].tolist() == [first_step(u, total, units) for u in range(units + 1)]


def test_no_number_passes_2_to_the_31():
    """A product far larger than any model has: its steps times its units would."""
    tiles, steps, units = 1002 * 64, 1664, 304  # 128,256 x 8,192 outputs, K = 53,248
    total = tiles * steps
    assert total < 2**31 < total * units
    found = torch.full((512,), -1, dtype=torch.int32)
    first = torch.full((512,), -1, dtype=torch.int32)
    at = torch.tensor([total - 1 - 1000 * i for i in range(512)], dtype=torch.int32)
    _reckon[(1,)](at, found, first, total, units, SIZE=512)
    assert first[units] == total
    assert found.tolist() == [unit_of(step, total, units) for step in at.tolist()]
