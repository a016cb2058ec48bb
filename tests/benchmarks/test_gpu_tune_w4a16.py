"""The list of tiles that W4A16 is tuned with on Hopper: legal, warmed for every kind, tried."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright.ops.w4a16.hopper_space import HOPPER_SPACE
from tilewright.tiles.tile import m_bucket

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = pytest.mark.skipif(
    not (GPU / "tune_w4a16.py").exists(), reason="benchmarks/ is not part of this copy"
)
KINDS = [("float16", 128), ("bfloat16", 128), ("float16", 32), ("bfloat16", 32)]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(GPU), str(GPU.parent), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module("tune_w4a16")
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and GPU.parent in Path(file).parents:
            del sys.modules[name]


def test_every_problem_is_a_bucket_with_legal_tiles(script: Any) -> None:
    targets = script.targets(KINDS, list(script.ROWS))
    problems = [target.problem for target in targets]
    assert len(set(problems)) == len(problems)
    assert {(p.act_dtype, p.group) for p in problems} == set(KINDS)
    for target in targets:
        assert target.problem.M == m_bucket(target.problem.M)
        assert len(target.tiles) > 1
        for tile in target.tiles:
            HOPPER_SPACE.check(tile, target.problem)


def test_the_first_kind_comes_first_with_all_rows(script: Any) -> None:
    targets = script.targets(KINDS, list(script.ROWS))
    count = len(script.ROWS) * len(script.SHAPES[128])
    assert all(target.share == 2.0 for target in targets[:count])
    assert all(target.share == 1.0 for target in targets[count:])
    assert {target.problem.M for target in targets[:count]} == set(script.ROWS)
    assert {target.problem.M for target in targets[count:]} == set(script.OTHER_ROWS)


def test_every_tile_is_warmed_for_every_kind(script: Any) -> None:
    jobs = script.jobs(KINDS)
    assert sum(job.tile is None for job in jobs) == len(HOPPER_SPACE.planted)
    warmed = {(job.problem.act_dtype, job.problem.group, job.tile) for job in jobs if job.tile}
    assert warmed == {(*kind, tile) for kind in KINDS for tile in script.SHORTLIST}
