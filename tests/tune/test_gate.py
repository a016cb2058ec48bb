"""The gate on ops written in a few lines: what it says, what it demands, what it cannot be told.

The ops at the end are failures that users of tuners have reported, one each.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stand_ins import PRODUCTS, stand_in
from tilewright.errors import GateError
from tilewright.ops.catalog import SPECS
from tilewright.ops.check import ErrorModel
from tilewright.ops.contract import Case, Inputs, OpSpec
from tilewright.tiles.tile import Tile
from tilewright.tune.gate import CHECKS, GateResult, gate, planted, recheck, watch

CASE = Case("mmq", "Q4_1", "float32", 16, 48, 256)
TILE = Tile.of("panel", mr=8, nv=3, block_parts=16, threads=0)
RIGHT = stand_in(PRODUCTS["blocked"])

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> None:
    """Not here: the gate's own fill is what is tested."""


def spec_of(run: Run, **changed: Any) -> OpSpec:
    return replace(SPECS["mmq"], run=run, **changed)


def held(run: Run, case: Case = CASE, seed: int = 0, **changed: Any) -> GateResult:
    return gate(spec_of(run, **changed), TILE, [case], seed=seed)


def like(change: Callable[[torch.Tensor, Inputs], Any]) -> Run:
    """An op that returns something made of the right result."""

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Any:
        return change(RIGHT(inputs), inputs)

    return run


def spoiled(action: Callable[[torch.Tensor, Inputs], Any]) -> Run:
    """The right op, with something done to its result or to its operands in place."""

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> Any:
        y = RIGHT(inputs)
        action(y, inputs)
        return y

    return run


def test_a_right_op_passes() -> None:
    result = held(RIGHT)
    assert result.passed
    assert result.check is None
    assert result.reason == ""
    assert result.case is None
    assert 0 < result.worst < 1
    assert 0 < result.oracle_error < 1e-11
    assert result.cases >= 7
    assert str(result) == f"{TILE} passed on {result.cases} products"
    result.raise_if_failed()


def test_a_failure_says_what_where_and_how_to_repeat_it() -> None:
    result = held(spoiled(lambda y, _: y[3, 7].add_(1.0)), seed=5)
    assert not result.passed
    assert result.check == "oracle"
    assert result.case == CASE.id
    assert result.seed == 5
    assert result.worst > 100
    assert result.oracle_error > 1e-5
    assert "element [3, 7]" in result.reason
    with pytest.raises(GateError) as caught:
        result.raise_if_failed()
    assert caught.value.exit_code == 3
    assert str(caught.value) == (
        f"{TILE} rejected by 'oracle' on {CASE.id}, seed 5: {result.reason}"
    )


def test_the_figure_of_a_table_is_that_of_the_tuned_products() -> None:
    """Outliers among ragged products must not stand in a row that is about another product."""
    spec = spec_of(stand_in(PRODUCTS["blas"]))
    case = replace(CASE, activations="int8")
    run = stand_in(PRODUCTS["blocked"])
    result = gate(spec.with_run(run), TILE, [case])
    inputs = spec.make_inputs(case, 0)
    ref = spec.reference(inputs)
    nmse = ((run(inputs).double().numpy() - ref) ** 2).sum() / (ref**2).sum()
    assert result.passed
    assert result.oracle_error == pytest.approx(nmse, rel=0.3)  # of three draws, the largest


def test_no_flag_turns_it_off() -> None:
    """What is public can only choose op, tile, products, operands and threads."""
    public = [p for p in inspect.signature(gate).parameters if not p.startswith("_")]
    assert public == ["spec", "tile", "cases", "seed", "threads"]
    public = [p for p in inspect.signature(recheck).parameters if not p.startswith("_")]
    assert public == ["spec", "inputs", "outputs", "tile", "threads"]
    default = inspect.signature(gate).parameters["_checks"].default
    assert set(default) == set(CHECKS)
    with pytest.raises(TypeError):
        CHECKS["oracle"] = ""  # type: ignore[index]


@pytest.mark.parametrize("cases", [[], [replace(CASE, M=0)]], ids=["none", "without rows"])
def test_nothing_run_is_nothing_passed(cases: list[Case]) -> None:
    with pytest.raises(ValueError, match="a tile that ran on nothing has passed nothing"):
        gate(spec_of(RIGHT), TILE, cases)


def test_no_rows_may_stand_among_other_cases() -> None:
    assert gate(SPECS["mmq"], None, [replace(CASE, M=0), CASE]).passed


def test_without_a_tile_the_op_s_own_choice_is_gated() -> None:
    result = gate(SPECS["mmq"], None, [CASE])
    assert result.passed
    assert result.cases > 5
    assert str(result).startswith("the op's own tile passed")


def test_every_case_counts() -> None:
    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        return RIGHT(inputs) * (2 if inputs.case.M == 5 else 1)

    five = replace(CASE, M=5)
    result = gate(spec_of(run), TILE, [CASE, five])
    assert result.check == "oracle"
    assert result.case == five.id


def raising(error: Exception) -> Run:
    def run(*_: Any, **__: Any) -> Any:
        raise error

    return run


WRONG_RESULTS: dict[str, tuple[Run, str, str]] = {
    "raises": (raising(RuntimeError("out of registers")), "launch", "RuntimeError: out of reg"),
    "returns a list": (like(lambda y, _: [y]), "launch", "the op returned a list"),
    "wrong shape": (like(lambda y, _: y.T), "oracle", "shape is [48, 16], it must be [16, 48]"),
    "wrong dtype": (like(lambda y, _: y.half()), "oracle", "dtype is torch.float16"),
    "NaN": (spoiled(lambda y, _: y[0, 0].fill_(float("nan"))), "oracle", "1 of 768 outputs"),
    "Inf": (spoiled(lambda y, _: y[2, 1].fill_(float("inf"))), "oracle", "NaN or Inf"),
    "zeros": (like(lambda y, _: y * 0), "oracle", "element"),
    "changes bias": (spoiled(lambda y, i: i.bias.add_(1)), "inputs", "the op changed bias"),
    "changes W": (
        spoiled(lambda y, i: i.weight.data[0, 0].add_(1)), "inputs", "changed weight.data",
    ),
    "changes what lies around x": (
        spoiled(lambda y, i: i.x.as_strided((1,), (1,), 0).fill_(0)), "inputs", "changed x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_wrong_results(name: str) -> None:
    run, check, text = WRONG_RESULTS[name]
    case = replace(CASE, flags=("bias",)) if name == "changes bias" else CASE
    result = held(run, case)
    assert (result.check, result.case) == (check, case.id)
    assert text in result.reason


def test_a_corrupted_weight_harms_no_tile_after_it() -> None:
    """Operands that the spec keeps are put back, whatever a tile has done to them."""

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        inputs.weight.data.fill_(0)
        raise RuntimeError("halfway")

    assert held(run).check == "launch"
    assert held(spoiled(lambda y, i: i.weight.data.fill_(0))).check == "inputs"
    assert gate(SPECS["mmq"], TILE, [CASE]).passed
    assert held(RIGHT).passed


def test_operands_are_put_back_where_another_check_comes_first() -> None:
    """On the fifth launch, of the second operands, which are kept for the next tiles as well."""
    count = itertools.count(1)

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        out = torch.empty(inputs.case.M, inputs.case.N)
        out.copy_(RIGHT(inputs))
        if next(count) == 5:
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0)
            inputs.weight.data.fill_(0)
        return out

    assert held(run).check == "guard-bands"
    assert gate(SPECS["mmq"], TILE, [CASE]).passed


def test_ctrl_c_is_no_verdict() -> None:
    with pytest.raises(KeyboardInterrupt):
        held(raising(KeyboardInterrupt()))  # type: ignore[arg-type]


def test_an_op_that_says_so_may_vary_within_the_error_model() -> None:
    counter = itertools.count()

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        return stand_in(PRODUCTS["loop" if next(counter) % 2 else "blas"])(inputs)

    assert held(run).check == "repeat"
    assert held(run, deterministic=False).passed
    second = itertools.count()
    wrong = like(lambda y, _: y * (1 + 1e-3 * (next(second) % 2)))
    assert held(wrong, deterministic=False).check == "repeat"


def test_a_spec_whose_oracle_fails_lets_nothing_pass() -> None:
    def broken(inputs: Inputs) -> Any:
        raise ZeroDivisionError("oops")

    result = held(RIGHT, reference=broken)
    assert result.check == "oracle"
    assert "its operands or its oracle failed: ZeroDivisionError: oops" in result.reason


def test_an_oracle_of_nan_lets_nothing_pass() -> None:
    """NaN is no wildcard, on either side of the comparison."""

    def reference(inputs: Inputs) -> Any:
        return np.full((inputs.case.M, inputs.case.N), np.nan)

    def model(inputs: Inputs, ref: Any) -> ErrorModel:
        return ErrorModel(np.ones_like(ref), torch.float32)

    for run in (RIGHT, like(lambda y, _: y * float("nan"))):
        result = held(run, reference=reference, error_model=model)
        assert result.check == "oracle"
        assert "its oracle failed" in result.reason


def test_planted_tiles_come_from_the_space() -> None:
    spec = SPECS["mmq"]
    assert spec.space is not None
    assert tuple(planted(spec)) == spec.space().planted
    assert planted(replace(spec, space=None)) == []


# After timing.


def timed(run: Run, launches: int = 20) -> tuple[OpSpec, Inputs, torch.Tensor]:
    spec = spec_of(run)
    inputs = watch(spec.make_inputs(CASE, 0))
    for _ in range(launches):
        y = run(inputs)
    return spec, inputs, y


def test_recheck_passes_what_is_right() -> None:
    spec, inputs, y = timed(RIGHT)
    for outputs in (y, [y, y]):
        result = recheck(spec, inputs, outputs, tile=TILE)
        assert result.passed, result
        assert result.cases == 1
    assert torch.equal(inputs.x, spec.make_inputs(CASE, 0).x)


def test_recheck_sees_a_result_that_went_wrong_on_the_way() -> None:
    counter = itertools.count()
    spec, inputs, y = timed(spoiled(lambda y, _: y.mul_(1 + (next(counter) > 15))))
    result = recheck(spec, inputs, y)
    assert result.check == "after-timing"
    assert result.case == CASE.id
    assert "after the last launch: element" in result.reason
    right = spec_of(RIGHT).run(inputs)
    assert recheck(spec, inputs, [right, y]).check == "after-timing"


def test_recheck_sees_operands_that_changed() -> None:
    """An op that ruins its input and then computes from it agrees with itself."""
    spec, inputs, y = timed(spoiled(lambda y, i: i.x.mul_(0.5)))
    result = recheck(spec, inputs, RIGHT(inputs))
    assert result.check == "inputs"
    assert "launches changed x" in result.reason
    assert torch.equal(inputs.x, spec.make_inputs(CASE, 0).x)  # put back


def test_recheck_needs_operands_that_were_watched() -> None:
    spec = spec_of(RIGHT)
    inputs = spec.make_inputs(CASE, 0)
    with pytest.raises(ValueError, match=r"were not watched.*call tune\.gate\.watch\(inputs\)"):
        recheck(spec, inputs, RIGHT(inputs))
    with pytest.raises(ValueError, match="outputs of .* are empty; keep the last result timed"):
        recheck(spec, watch(inputs), [])


# Failures that users of tuners have reported.


def test_k_tail_of_384_dropped_by_a_block_of_256() -> None:
    """57 % error, and it won: the error allowed was 0.5."""

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        k = inputs.case.K // 256 * 256
        x = inputs.x.clone()
        x[..., k:] = 0
        return RIGHT(replace(inputs, x=x))

    assert held(run, replace(CASE, K=384)).check == "oracle"
    tile = Tile.of("dot", unroll=8, threads=0)
    result = gate(spec_of(run), tile, [replace(CASE, K=512)])
    assert result.check == "ragged-shapes"
    assert "right on the tuned shapes, but oracle: " in result.reason


def test_candidates_that_share_an_output_buffer() -> None:
    """The first is right and fills it; the second writes half, and finds the rest in place."""
    shared: dict[Any, torch.Tensor] = {}

    def whole(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        key = (inputs.case.M, inputs.case.N)
        return shared.setdefault(key, torch.zeros(key)).copy_(RIGHT(inputs))

    def half(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        key = (inputs.case.M, inputs.case.N)
        out = shared.setdefault(key, torch.zeros(key))
        rows = inputs.case.M // 2
        out[:rows] = RIGHT(inputs)[:rows]
        return out

    spec = spec_of(half)
    inputs = spec.make_inputs(CASE, 0)
    whole(inputs)
    found = spec.reference(inputs)
    assert np.allclose(half(inputs), found, atol=1e-4)  # what a tuner with one buffer sees
    result = held(half)
    assert result.check == "stale-buffer"
    assert "with another x in the same memory" in result.reason


def test_the_first_candidate_is_no_reference() -> None:
    """Two tiles that agree are both wrong: the right value comes from the oracle alone."""
    wrong = like(lambda y, _: y * 1.001)
    assert held(wrong).check == "oracle"
    assert held(wrong).check == "oracle"


def test_an_op_that_needs_a_hook_before_each_launch() -> None:
    """The tuner zeroed its output; the launch after it did not."""

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        out = torch.empty(inputs.case.M, inputs.case.N)
        return out.add_(RIGHT(inputs))

    result = held(run)
    assert result.check == "nan-fill"
    assert "never written, or added to before they were" in result.reason


def test_right_uncached_wrong_from_the_cache() -> None:
    """The key left out an argument: the weight."""
    cache: dict[Any, torch.Tensor] = {}

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        key = (inputs.case.weight_type, inputs.case.N, inputs.case.K)
        if key not in cache:
            eye = torch.eye(inputs.case.K)
            one = replace(inputs, case=replace(inputs.case, M=inputs.case.K, flags=()), x=eye)
            cache[key] = RIGHT(replace(one, bias=None))
        y = inputs.x.reshape(inputs.case.M, -1).float() @ cache[key]
        return y if inputs.bias is None else y + inputs.bias

    assert held(run).check == "fresh-operands"


def test_an_in_place_op_that_corrupts_its_input_from_run_to_run() -> None:
    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        y = RIGHT(inputs)
        inputs.x.clamp_(-2, 2)  # harmless the second time
        return y

    assert held(run).check == "inputs"


def test_partial_output_over_memory_that_was_just_freed() -> None:
    """The allocator hands the last, right result to a tile that does not write its last row."""

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        out = torch.empty(inputs.case.M, inputs.case.N)
        out[:-1] = RIGHT(inputs)[:-1]
        return out

    assert held(run).check == "nan-fill"


def test_writes_before_the_output_are_seen_as_well_as_behind() -> None:
    for offset, side in ((-4, "before"), (16 * 48 + 2, "behind")):

        def run(
            inputs: Inputs, tile: Any = None, threads: int | None = None, offset: int = offset
        ) -> torch.Tensor:
            out = torch.empty(inputs.case.M, inputs.case.N)
            out.copy_(RIGHT(inputs))
            if out.shape == (16, 48):
                out.as_strided((1,), (1,), out.storage_offset() + offset).fill_(0)
            return out

        result = held(run)
        assert result.check == "guard-bands"
        assert f"{side} the float32 [16, 48] buffer" in result.reason


def test_a_workspace_overrun_is_seen_though_the_result_is_right() -> None:
    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        work = torch.empty(256, dtype=torch.uint8)
        work.as_strided((257,), (1,), work.storage_offset()).fill_(3)
        return RIGHT(inputs)

    result = held(run)
    assert result.check == "guard-bands"
    assert "1 bytes behind the uint8 [256] buffer" in result.reason


def test_nan_past_the_edge_of_x_is_named() -> None:
    """Zero times what lies behind x: right between zeros, NaN between NaN."""

    def run(inputs: Inputs, tile: Any = None, threads: int | None = None) -> torch.Tensor:
        x = inputs.x
        behind = x.as_strided((1,), (1,), x.storage_offset() + x.numel())
        return RIGHT(inputs) + 0 * behind

    result = held(run)
    assert result.check == "edge-reads"
    assert "past the edges of x" in result.reason


def test_a_ragged_product_that_passed_is_not_run_again_for_the_same_tile() -> None:
    seen: set[tuple[Tile, str]] = set()
    first = gate(spec_of(RIGHT), TILE, [CASE], _passed=seen)
    again = gate(spec_of(RIGHT), TILE, [CASE], _passed=seen)
    other = gate(spec_of(RIGHT), TILE.replace(mr=4), [CASE], _passed=seen)

    assert first.passed
    assert again.passed
    assert again.cases == 1  # the tuned product always runs
    assert other.cases == len(other_ragged(seen, TILE.replace(mr=4))) + 1 > 1

    wrong = spoiled(lambda y, inputs: y[-1].add_(1.0))
    assert not gate(spec_of(wrong), TILE, [CASE], _passed=seen).passed
    fresh: set[tuple[Tile, str]] = set()
    assert not gate(spec_of(wrong), TILE, [CASE], _passed=fresh).passed
    assert not fresh


def other_ragged(seen: set[tuple[Tile, str]], tile: Tile) -> list[str]:
    return [case for of, case in seen if of == tile]
