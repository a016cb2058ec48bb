"""Parameters that run by default: no group and no pair of values is left out."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from job_process import in_two_runs, some_slow
from quick import latin, one_in

ECHO = """
import json, pathlib, sys
jobs = json.load(sys.stdin)
with pathlib.Path(__file__).with_name("runs").open("a") as file:
    print(*jobs, file=file)
json.dump({name: {"got": job} for name, job in jobs.items()}, sys.stdout)
"""


def quick(params: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(param.values) for param in params if not param.marks]


def test_one_value_in_so_many_of_each_group_is_quick():
    values = [f"{group}{i}" for group in "abc" for i in range(6)] + ["d0"]
    params = one_in(3, values, key=lambda value: value[0])
    assert [param.values[0] for param in params] == values
    assert [value for (value,) in quick(params)] == ["a0", "a3", "b2", "b5", "c1", "c4", "d0"]
    assert all(param.marks == (pytest.mark.slow,) or not param.marks for param in params)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 4), (2, 3, 4), (2, 2, 2, 3)])
def test_of_any_two_axes_every_pair_of_values_is_quick_somewhere(sizes: tuple[int, ...]):
    axes = [[f"{axis}.{i}" for i in range(size)] for axis, size in enumerate(sizes)]
    params = latin(2, *axes)
    assert [tuple(param.values) for param in params] == list(itertools.product(*axes))
    found = quick(params)
    assert len(found) <= len(params) / 2 + 1
    assert {value for values in found for value in values} == {v for axis in axes for v in axis}
    if len(sizes) > 2:
        for a, b in itertools.combinations(range(len(sizes)), 2):
            assert {(v[a], v[b]) for v in found} == set(itertools.product(axes[a], axes[b]))


def test_a_tuple_on_an_axis_is_several_parameters():
    assert quick(latin(2, ("x", "y"), ((1, 2), (3, 4)))) == [("x", 1, 2), ("y", 3, 4)]


def test_slow_jobs_run_when_one_of_them_is_asked_for(tmp_path: Path):
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    jobs = {"a": 1, "b": 2, "c": 3}
    found = in_two_runs(script, jobs, {"b"}, tmp_path)
    assert (found["c"], found["a"]) == ({"got": 3}, {"got": 1})
    assert (tmp_path / "runs").read_text() == "a c\n"
    assert dict(found) == {name: {"got": job} for name, job in jobs.items()}
    assert (tmp_path / "runs").read_text() == "a c\nb\n"
    with pytest.raises(KeyError):
        found["d"]
    marked = [param for param in some_slow(jobs, {"b"}) if not isinstance(param, str)]
    assert [param.values for param in marked] == [("b",)]
