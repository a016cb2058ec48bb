"""The verify engine, on ops whose faults are known because the tests put them there."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from stand_ins import library, stand_in
from tilewright.errors import UnsupportedError
from tilewright.ops.catalog import SPECS
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.verify import (
    MODEL_BATCHES,
    VerifyReport,
    control_cases,
    negative_controls,
    problems_to_cases,
    verify_op,
)

RIGHT = stand_in(library)
SPEC = SPECS["mmq"].with_run(RIGHT)
W4 = SPECS["w4a16"].with_run(RIGHT)


def some_cases(spec=SPEC, count=6, path="float", weight_type="Q4_1"):
    weight_type = weight_type if spec is SPEC else "uint4"
    return [
        c for c in spec.cases
        if c.weight_type == weight_type and c.activations == path and c.M in (5, 16, 17)
        and c.N >= 16 and not c.flags
    ][:count]  # fmt: skip


def breaking(fault, only=None):
    """SPEC with `fault(y, inputs)` applied to right results, in one case or in all."""

    def run(inputs, tile=None, threads=None):
        y = RIGHT(inputs)
        if only is not None and inputs.case.id != only:
            return y
        return fault(y, inputs)

    return SPEC.with_run(run)


def test_right_op_passes():
    report = verify_op(SPEC, cases=some_cases(), seed=11)
    assert report.passed
    assert report.complete
    assert report.planned == len(report.rows) == 6
    assert [str(group) for group in report.groups()] == ["MMQ Q4_1 6/6 passed"]
    for row, case in zip(report.rows, some_cases(), strict=True):
        assert (row.op, row.case, row.seed, row.tile) == ("mmq", case.id, 11, None)
        assert row.passed
        assert row.reason == ""
        assert 0 < row.nmse < 1e-4
        assert 0 < row.worst_ratio <= 1
        assert row.seconds > 0


def test_groups_are_by_type_and_path():
    cases = [*some_cases(), *some_cases(path="int8"), *some_cases(weight_type="Q6_K", count=2)]
    report = verify_op(breaking(lambda y, _: y * 2, some_cases()[1].id), cases=cases)
    assert [str(group) for group in report.groups()] == [
        "MMQ Q4_1 5/6 passed", "MMQ Q4_1 int8 6/6 passed", "MMQ Q6_K 2/2 passed",
    ]  # fmt: skip
    assert not report.passed


FAULTS = {
    "zeroed": lambda y, _: y.index_fill(0, torch.tensor([3]), 0),
    "nan": lambda y, _: y.index_fill(1, torch.tensor([15]), float("nan")),
    "tail column": lambda y, _: torch.cat([y[:, :-1], y[:, -2:-1]], dim=1),
    "shape": lambda y, _: y[:-1],
    "dtype": lambda y, _: y.double(),
    "no tensor": lambda y, _: y.tolist(),
    "raises": lambda y, _: y.no_such_method(),
    "changed x": lambda y, inputs: (inputs.x.mul_(2), y)[1],
    "row of another": lambda y, _: y.roll(1, dims=0),
}
REASONS = {
    "zeroed": "element [3,",
    "nan": "outputs are NaN or Inf, the first at [0, 15]",
    "tail column": "times its limit",
    "shape": "shape is",
    "dtype": "dtype is torch.float64",
    "no tensor": "crashed: TypeError: the op returned a list; it must return a tensor",
    "raises": "crashed: AttributeError: 'Tensor' object has no attribute 'no_such_method'",
    "changed x": "the op changed its input x",
    "row of another": "times its limit",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_one_case_fails_that_case_and_no_other(fault):
    cases = some_cases()
    report = verify_op(breaking(FAULTS[fault], cases[2].id), cases=cases)
    assert [row.case for row in report.failures] == [cases[2].id]
    assert REASONS[fault] in report.failures[0].reason
    assert not report.failures[0].worst_ratio <= 1
    assert report.complete


def test_same_seed_repeats_and_another_differs():
    first, second, other = (verify_op(SPEC, cases=some_cases(), seed=s) for s in (1, 1, 2))
    assert [r.nmse for r in first.rows] == [r.nmse for r in second.rows]
    assert all(a.nmse != b.nmse for a, b in zip(first.rows, other.rows, strict=True))


def test_broken_oracle_is_a_failed_row():
    def reference(inputs):
        raise RuntimeError("no oracle today")

    report = verify_op(replace(SPEC, reference=reference), cases=some_cases(count=2))
    assert len(report.failures) == 2
    assert "its operands or its oracle failed: RuntimeError: no oracle" in report.rows[0].reason


def test_on_case_sees_every_row():
    seen = []
    report = verify_op(
        SPEC, cases=some_cases(), on_case=lambda row, done, total: seen.append((row, done, total))
    )
    assert [row for row, _, _ in seen] == list(report.rows)
    assert [(done, total) for _, done, total in seen] == [(i, 6) for i in range(1, 7)]


@pytest.mark.parametrize("where", ["op", "callback"])
def test_interrupt_keeps_what_ran(where):
    cases = some_cases()

    def interrupt(*_):
        raise KeyboardInterrupt

    if where == "op":
        report = verify_op(breaking(interrupt, cases[3].id), cases=cases)
        assert len(report.rows) == 3
    else:
        report = verify_op(
            SPEC, cases=cases, on_case=lambda row, done, total: done == 3 and interrupt()
        )
        assert len(report.rows) == 3
    assert not report.complete
    assert report.planned == 6
    assert not report.passed
    assert not report.failures


def test_every_tile_runs_every_case():
    good, bad = Tile.of("dot", rows=1), Tile.of("dot", rows=2)

    def run(inputs, tile=None, threads=None):
        y = RIGHT(inputs)
        if tile == bad:
            y[-1] = 0
        return y

    report = verify_op(SPEC.with_run(run), cases=some_cases(count=3), tiles=[good, bad])
    assert [(r.tile, r.passed) for r in report.rows] == [
        ("dot(rows=1)", True), ("dot(rows=2)", False),
    ] * 3  # fmt: skip
    by_case = verify_op(
        SPEC.with_run(run),
        cases=some_cases(count=3),
        tiles=lambda case: [good] if case == some_cases()[1] else [],
    )
    assert [(r.case, r.tile) for r in by_case.rows] == [(some_cases()[1].id, "dot(rows=1)")]


def test_threads_reach_the_op():
    seen = []

    def run(inputs, tile=None, threads=None):
        seen.append(threads)
        return RIGHT(inputs)

    verify_op(SPEC.with_run(run), cases=some_cases(count=1), threads=3)
    assert seen == [3]


def test_nothing_verified_is_not_a_pass():
    report = verify_op(SPEC, cases=[])
    assert not report.passed
    assert report.groups() == ()


def test_join():
    one = verify_op(SPEC, cases=some_cases(count=2))
    two = verify_op(W4, cases=some_cases(W4, count=3))
    both = VerifyReport.join([one, two])
    assert [str(g) for g in both.groups()] == ["MMQ Q4_1 2/2 passed", "W4A16 uint4 3/3 passed"]
    assert both.passed
    assert both.planned == 5
    assert not VerifyReport.join([one, replace(two, complete=False)]).passed
    with pytest.raises(ValueError, match=r"reports hold seeds \[0, 5\]"):
        VerifyReport.join([one, verify_op(SPEC, cases=some_cases(count=1), seed=5)])


def test_report_is_plain_json():
    cases = some_cases(count=3)
    report = verify_op(breaking(FAULTS["nan"], cases[1].id), cases=cases)
    plain = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert plain["passed"] is False
    assert plain["groups"] == [{"label": "MMQ Q4_1", "passed": 2, "total": 3}]
    assert plain["rows"][1]["worst_ratio"] is None
    assert plain["rows"][1]["worst_index"] == [0, 15]
    assert plain["rows"][0]["case"] == cases[0].id


def problem(n=576, k=1536, **fields):
    given = {"op": "mmq", "arch": "cpu", "act_dtype": "float32", "weight_type": "Q4_1",
             "activations": "float", "M": 1, "N": n, "K": k, "group": 32, **fields}  # fmt: skip
    return Problem(**given)


def test_problems_become_cases_once_each():
    problems = [
        problem(),
        problem(M=512),
        problem(activations="int8"),
        problem(1536, 576),
        problem(op="w4a16", weight_type="uint4", group=128),
    ]
    cases = problems_to_cases(problems)
    assert {op: len(some) for op, some in cases.items()} == {"mmq": 15, "w4a16": 5}
    assert {c.M for c in cases["mmq"]} == set(MODEL_BATCHES)
    assert {c.group for c in cases["mmq"]} == {0}
    assert {c.group for c in cases["w4a16"]} == {128}
    shapes = {(c.N, c.K, c.activations) for c in cases["mmq"]}
    assert shapes == {(576, 1536, "float"), (576, 1536, "int8"), (1536, 576, "float")}
    for op, spec in (("mmq", SPEC), ("w4a16", W4)):
        assert verify_op(spec, cases=cases[op][:2]).passed


def test_large_vocabulary_runs_at_small_batches():
    assert {c.M for c in problems_to_cases([problem(262144, 640)])["mmq"]} == {1, 5, 16, 17}


def test_model_without_packed_products_is_an_error():
    with pytest.raises(UnsupportedError, match="no product that runs packed"):
        problems_to_cases([])


@pytest.mark.parametrize("spec", [SPEC, W4], ids=["mmq", "w4a16"])
def test_control_cases_cover_every_type_and_path(spec):
    cases = control_cases(spec)
    assert sorted((c.weight_type, c.activations) for c in cases) == sorted(
        (t, p) for t in spec.weight_types for p in ("float", "int8")
    )
    assert all(c.M == 17 and c.N >= 16 for c in cases)


@pytest.mark.parametrize("spec", [SPEC, W4], ids=["mmq", "w4a16"])
def test_every_control_is_caught_on_the_weight_only_path(spec):
    seen = []
    controls = negative_controls(spec, on_control=seen.append)
    assert list(controls) == seen
    assert all(c.passed for c in controls)
    weight_only = [c for c in controls if "int8" not in c.label]
    assert all(c.visible and c.caught and c.effect > 2 and c.reason for c in weight_only)
    assert {c.name for c in weight_only} == {*spec.corruptions, "zeroed outputs"}
    assert sum(c.caught for c in controls) > 0.95 * len(controls)


def test_op_that_ignores_its_weight_fails_its_controls():
    """Right on good weights because it looks them up elsewhere: a cache keyed by shape, say."""
    good: dict[str, torch.Tensor] = {}

    def run(inputs, tile=None, threads=None):
        return good.setdefault(inputs.case.id, RIGHT(inputs)).clone()

    spec = SPEC.with_run(run)
    cases = some_cases(count=1)
    assert verify_op(spec, cases=cases).passed
    controls = negative_controls(spec, cases=cases)
    missed = {c.name for c in controls if not c.passed}
    assert missed == {"flipped code bit", "wrong scale", "swapped minimum"}


def test_control_that_cannot_be_seen_is_not_counted_as_caught():
    """With one row, the int8 path hides a change of the weight that the loud row drowns."""
    cases = [c for c in SPEC.cases if c.activations == "int8" and c.M == 1 and not c.flags]
    controls = negative_controls(SPEC, cases=cases[::5])
    hidden = [c for c in controls if not c.visible]
    assert hidden
    assert all(c.passed for c in hidden)
    assert all(c.effect <= 2 for c in hidden)
    assert all(c.caught for c in controls if c.visible)


def test_cases_without_rows_have_no_controls():
    empty = [c for c in SPEC.cases if c.M == 0][:1]
    assert negative_controls(SPEC, cases=empty) == ()


def test_zeroed_outputs_zero_one_in_two_thousand():
    (case,) = some_cases(count=1)
    seen = []

    def run(inputs, tile=None, threads=None):
        y = RIGHT(inputs)
        seen.append(y.clone())
        return y

    controls = negative_controls(SPEC.with_run(run), cases=[case])
    (control,) = [c for c in controls if c.name == "zeroed outputs"]
    assert control.caught
    assert "is 0, the oracle says" in control.reason
    assert np.isfinite(control.effect)
