"""What a gatekeeper runs a tile on: a problem's case, and operands drawn once for all tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewright.ops.catalog import SPECS
from tilewright.ops.contract import Case, Inputs
from tilewright.tiles.tile import Problem
from tilewright.tune.outcome import DirectGate, problem_case
from tune.toy_op import FLAT, Machine, loop, make_inputs, problem, right

ANY = "sm_90"


@pytest.mark.parametrize(
    "wanted",
    [
        Problem("w4a16", ANY, "float16", "uint4", "float", 64, 4096, 4096, 128),
        Problem("w4a16", ANY, "float16", "uint4", "float", 64, 4096, 4096, -1),
        Problem("mmq", ANY, "bfloat16", "Q4_K", "int8", 8192, 28672, 4096, 0),
        Problem("moe", ANY, "float16", "Q4_K", "float", 1, 1536, 2048, 0),
        Problem("moe", ANY, "float16", "uint4", "float", 4096, 2048, 768, 128),
        Problem("ssd", ANY, "bfloat16", "p80", "float", 2048, 10240, 128, 16),
        Problem("ssd", ANY, "float16", "p64", "float", 1, 5120, 128, 80),
        Problem("conv1d", ANY, "float16", "w4", "float", 512, 10240, 4, 0),
    ],
    ids=lambda p: f"{p.op}-{p.M}",
)
def test_the_case_of_a_problem_is_that_problem(wanted: Problem) -> None:
    assert problem_case(wanted, SPECS[wanted.op]).problem(ANY) == wanted


def test_experts_of_a_problem_are_those_of_a_model() -> None:
    case = problem_case(
        Problem("moe", ANY, "float16", "Q4_K", "float", 64, 48, 256, 0), SPECS["moe"]
    )
    assert (case.M, case.experts, case.top_k) == (8, 128, 8)
    kept = Case("moe", "Q4_K", "float16", 5, 48, 256, experts=4, top_k=2)
    assert SPECS["moe"].fit(kept) == kept
    made = SPECS["moe"].make_inputs(case, 0)
    assert made.weight.ids.shape == (8, 8)


def test_operands_are_drawn_once_for_the_tiles_of_a_problem() -> None:
    drawn: list[Case] = []

    def counted(case: Case, seed: int) -> Inputs:
        drawn.append(case)
        return make_inputs(case, seed)

    machine = Machine()
    keeper = DirectGate({"toy": replace(machine.spec(), make_inputs=counted)})
    small, other = problem(M=7, N=6), problem(M=8, N=6)
    keeper.prepare(small)
    before = drawn.count(problem_case(small, machine.spec()))
    for tile in (FLAT, loop(16, 1), loop(16, 4)):
        assert keeper.check(small, tile).passed
    assert drawn.count(problem_case(small, machine.spec())) == before
    assert keeper.check(other, FLAT).passed
    assert keeper.check(small, FLAT).passed
    assert drawn.count(problem_case(small, machine.spec())) == before + 1


@pytest.mark.parametrize("raises", [False, True])
def test_what_a_tile_did_to_the_operands_does_not_reach_the_next(raises: bool) -> None:
    bad, seen = loop(16, 4), []

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        if tile == bad:
            inputs.x.zero_()
            if raises:
                raise RuntimeError("after it wrote")
        elif tile == FLAT:
            seen.append(inputs.x.clone())
        return right(inputs)

    spec = Machine().spec().with_run(run)
    keeper, small = DirectGate({"toy": spec}), problem(M=3, N=5)
    assert not keeper.check(small, bad).passed
    assert keeper.check(small, FLAT).passed
    assert torch.equal(seen[0], make_inputs(problem_case(small, spec), 0).x)
