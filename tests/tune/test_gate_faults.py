"""Wrong tiles of the CPU kernels fall, each to its own check; right ones pass, on every seed."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tilewright.device import cpu_device
from tilewright.ops.catalog import SPECS
from tilewright.ops.contract import Case, OpSpec
from tilewright.ops.space import Planted
from tilewright.tiles.tile import Tile
from tilewright.tune.gate import CHECKS, gate, planted, recheck, watch
from tilewright.tune.gate_proof import trial_of

FEW = ("Q4_1", "Q6_K", "uint4", "uint4b8")
"""A type with minima, one with two scales a part and blocks of 256, and both 4-bit types."""

Fault = tuple[OpSpec, Planted, Case]


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: the gate's own fill is what is tested."""


def faults() -> list[Fault]:
    return [(s, p, case) for s in SPECS.values() for p in planted(s) for case in p.cases]


def names(some: list[Fault]) -> list[str]:
    return [f"{case.weight_type}-{p.name}" for _, p, case in some]


def mark(some: list[Fault]) -> list[object]:
    return [
        pytest.param(*f, id=name, marks=[] if f[2].weight_type in FEW else pytest.mark.slow)
        for f, name in zip(some, names(some), strict=True)
    ]


each_fault = pytest.mark.parametrize(("spec", "wrong", "case"), mark(faults()))


@each_fault
def test_a_planted_tile_is_rejected_by_its_check(spec: OpSpec, wrong: Planted, case: Case) -> None:
    result = trial_of(spec.with_run(wrong.run), wrong.tile, case)
    assert not result.passed
    assert result.check == wrong.caught_by, result
    assert result.reason
    assert result.case is not None
    assert wrong.name in str(result)


@each_fault
def test_the_tile_it_pretends_to_be_passes(spec: OpSpec, wrong: Planted, case: Case) -> None:
    result = trial_of(spec, wrong.honest, case)
    assert result.passed, result
    assert result.worst < 1


@each_fault
def test_without_its_check_it_gets_through(spec: OpSpec, wrong: Planted, case: Case) -> None:
    """So each check earns its place, and none does the work of another here."""
    without = set(CHECKS) - {wrong.caught_by}
    result = gate(spec.with_run(wrong.run), wrong.tile, [case], _checks=without)
    assert result.passed, result


def test_every_check_has_a_tile_that_only_it_catches() -> None:
    few = {wrong.caught_by for _, wrong, case in faults() if case.weight_type in FEW}
    assert few == set(CHECKS)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_seeds_and_dtypes_see_the_plain_faults(seed: int, dtype: str) -> None:
    """Faults of coverage do not hide behind the rounding of 16-bit outputs."""
    covered = {"partial-rows", "partial-columns", "k-tail", "dot-tail", "past-the-end", "no-start",
               "group-straddled", "scale-row", "x-scale-row", "weights-by-shape"}  # fmt: skip
    for spec, wrong, case in faults():
        if wrong.name in covered and case.weight_type in ("Q4_1", "uint4"):
            other = replace(case, act_dtype=dtype)
            result = gate(spec.with_run(wrong.run), wrong.tile, [other], seed=seed)
            assert not result.passed, (wrong.name, other.id)


def test_the_fault_that_opens_after_timing_needs_the_tile() -> None:
    """Results of the very buffers timed are right; the next x is what it is wrong for.

    In a thread of its own, as the gate does it: the fault remembers addresses, by thread, and those
    of another test's buffers may come again.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_warm_up_and_recheck).result()


def _warm_up_and_recheck() -> None:
    spec = SPECS["mmq"]
    wrong = next(p for p in planted(spec) if p.name == "warmed-up")
    case = next(c for c in wrong.cases if c.weight_type == "Q4_1")
    run = spec.with_run(wrong.run)
    inputs = watch(spec.make_inputs(case, 0))
    for _ in range(20):
        y = wrong.run(inputs, tile=wrong.tile)
    assert recheck(run, inputs, y).passed
    result = recheck(run, inputs, y, tile=wrong.tile)
    assert result.check == "after-timing"
    assert "another x" in result.reason


def right_cases() -> list[tuple[OpSpec, Case]]:
    """One ragged product of each weight type and path, with few rows and with many."""
    found = []
    for spec in SPECS.values():
        for weight_type in spec.weight_types:
            for path in ("float", "int8"):
                if spec.name not in ("mmq", "w4a16"):  # experts, scans: shapes of their own
                    kind = (weight_type, path)
                    own = [c for c in spec.cases if (c.weight_type, c.activations) == kind and c.M]
                    found += [(spec, c) for c in (*own[:1], *own[-1:])]
                    continue
                k = 768 if spec.name == "mmq" else 576
                group = 0 if spec.name == "mmq" else 64
                case = Case(spec.name, weight_type, "float32", 17, 97, k, group, path)
                found += [(spec, replace(case, M=1, act_dtype="bfloat16")), (spec, case)]
    return found


@pytest.mark.parametrize(
    ("spec", "case"),
    [
        pytest.param(s, c, id=c.id, marks=[] if c.weight_type in FEW[::2] else pytest.mark.slow)
        for s, c in right_cases()
    ],
)
def test_no_false_alarm_on_many_seeds(spec: OpSpec, case: Case) -> None:
    """The default tile, with operands of ten seeds and twenty draws of ragged ones; what an op
    without a space of its own chooses."""
    tile = None if spec.space is None else spec.space().default(case.problem(cpu_device().arch))
    for seed in range(0, 20, 2):
        result = gate(spec, tile, [case], seed=seed)
        assert result.passed, result


def sampled(count: int) -> list[tuple[OpSpec, Tile, Case]]:
    """Tiles of every algorithm of the spaces, drawn once and for all."""
    rng = random.Random(20)
    found = []
    for op, weight_type, group in (("mmq", "Q4_1", 0), ("w4a16", "uint4", 32)):
        spec = SPECS[op]
        assert spec.space is not None
        for path in ("float", "int8"):
            case = Case(op, weight_type, "float32", 9, 65, 320, group, path)
            legal = spec.space().candidates(case.problem(cpu_device().arch))
            one = [t for t in legal if t.threads <= 2]
            for algorithm in dict.fromkeys(tile.algorithm for tile in one):
                of_it = [tile for tile in one if tile.algorithm == algorithm]
                some = rng.sample(of_it, min(count, len(of_it)))
                found += [(spec, tile, case) for tile in some]
    return found


@pytest.mark.parametrize(
    ("spec", "tile", "case"),
    [pytest.param(*f, id=f"{f[2].weight_type}-{f[2].activations}-{f[1]}") for f in sampled(1)],
)
def test_a_candidate_of_each_algorithm_passes(spec: OpSpec, tile: Tile, case: Case) -> None:
    result = gate(spec, tile, [case])
    assert result.passed, result


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_candidates_of_every_kind_pass() -> None:
    """Some sixty combinations of field values, two threads among them."""
    for spec, tile, case in sampled(12):
        result = gate(spec, tile, [case])
        assert result.passed, result


def test_two_threads_pass_in_threads_of_their_own() -> None:
    """OpenMP teams are started from the gate's threads; torch's setting reaches them."""
    spec = SPECS["mmq"]
    case = Case("mmq", "Q4_1", "float32", 17, 97, 576)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        result = gate(spec, Tile.of("dot", unroll=4, threads=0), [case])
    finally:
        torch.set_num_threads(before)
    assert result.passed, result
