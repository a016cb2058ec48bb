"""The scan's spec: every case, what the cases cover, what the check notices, planted tiles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tilewright.cli.main import cli
from tilewright.device import cpu_device
from tilewright.ops.cases import sequence_lengths
from tilewright.ops.catalog import SPECS
from tilewright.ops.check import ErrorModel, check_output, half_ulp
from tilewright.ops.contract import SCAN_FLAGS, Case
from tilewright.ops.ssd import spec as spec_module
from tilewright.ops.ssd.cpu_space import CHUNKS, CPU_SPACE
from tilewright.ops.ssd.spec import judged_heads
from tilewright.tiles.tile import Tile
from tilewright.tune.gate import CHECKS, gate
from tilewright.tune.outcome import DirectGate
from tilewright.tune.tuner import tune
from tilewright.tune.verify import control_cases, negative_controls, verify_op

SPEC = SPECS["ssd"]


def _every(step: int, of: str) -> list[Case]:
    return [c for c in SPEC.cases if ("chunk" in c.id) == (of == "chunk")][::step]


@pytest.mark.parametrize("of", ["tile", "chunk"])
def test_cases_pass(of: str) -> None:
    report = verify_op(SPEC, seed=1, cases=_every(2 if of == "tile" else 1, of))
    assert report.passed, report.failures[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, *CHUNKS])
def test_every_case_passes_at_every_chunk(chunk: int | None) -> None:
    tiles = None if chunk is None else [Tile.of("chunked", chunk=chunk)]
    report = verify_op(SPEC, tiles=tiles)
    assert report.passed, report.failures[0].reason


def test_cases_cover_what_models_have_and_more() -> None:
    cases = SPEC.cases
    assert {c.weight_type for c in cases} == {f"p{p}" for p in (*range(8, 129, 8), 192, 256)}
    assert {16, 32, 64, 96, 128, 256} <= {c.K for c in cases}
    flags = {flag for c in cases for flag in c.flags}
    assert flags == {*SCAN_FLAGS, "strided", "transposed"} - {"silu"}
    lengths = {n for c in cases for n in sequence_lengths(c)}
    assert {0, 1, 15, 31, 63, 127, 511, 513} <= lengths
    shapes = {(c.N // int(c.weight_type[1:]), c.weight_type, c.K, c.group) for c in cases}
    assert {
        (80, "p64", 128, 80), (128, "p64", 128, 16), (128, "p80", 128, 16), (64, "p64", 128, 8),
        (48, "p64", 128, 48), (8, "p64", 256, 4), (4, "p128", 128, 1), (80, "p64", 128, 10),
    } <= shapes  # fmt: skip
    for chunk in CHUNKS:
        assert sum(f"chunk{chunk}" in c.flags for c in cases) >= 4


def test_lengths_of_packed_sequences() -> None:
    case = Case("ssd", "p16", "float32", 100, 32, 16, 1, flags=("packed",))
    assert sequence_lengths(case) == [45, 0, 1, 54]
    assert sequence_lengths(replace(case, M=0)) == [0, 0, 0, 0]
    assert sequence_lengths(replace(case, M=1)) == [0, 0, 1, 0]
    assert sum(sequence_lengths(replace(case, M=77, sequences=7))) == 77
    assert sequence_lengths(replace(case, flags=(), sequences=4)) == [25] * 4
    with pytest.raises(ValueError, match="M is 100; it must be a multiple of the sequences, 3"):
        sequence_lengths(replace(case, flags=(), sequences=3))


@pytest.mark.parametrize(
    ("given", "fitted"),
    [
        ({"N": 33}, {"N": 64}),
        ({"N": 65, "group": 0}, {"N": 80, "group": 5}),
        ({"K": 33}, {"K": 40}),
        ({"K": 999}, {"K": 256}),
        ({"M": 9, "sequences": 6}, {"sequences": 3}),
        ({"M": 9, "sequences": 6, "flags": ("packed",)}, {}),
    ],
)
def test_a_shape_is_fitted(given: dict[str, int], fitted: dict[str, int]) -> None:
    fields = {"M": 6, "N": 32, "K": 16, "group": 2, **given}
    case = Case("ssd", "p16", "float32", **fields)
    assert SPEC.fit(case) == replace(case, **fitted)
    assert SPEC.fit(SPEC.fit(case)) == SPEC.fit(case)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_type": "p12"}, "weight_type is 'p12'; ssd has"),
        ({"N": 33}, "N, K, group are 33, 16, 2"),
        ({"group": 3}, "`group` divides their number"),
        ({"K": 264}, "multiple of 8 up to 256"),
    ],
)
def test_a_case_that_is_none(fields: dict[str, object], message: str) -> None:
    given = {"weight_type": "p16", "M": 6, "N": 32, "K": 16, "group": 2, **fields}
    with pytest.raises(ValueError, match=message):
        SPEC.make_inputs(Case(op="ssd", act_dtype="float32", **given), 0)


def test_judged_heads_tell_the_mappings_of_groups_apart() -> None:
    large = [c for c in SPEC.cases if len(judged_heads(c)) < c.N // int(c.weight_type[1:])]
    assert large
    for case in large:
        heads = case.N // int(case.weight_type[1:])
        groups = heads // case.group
        judged = judged_heads(case)
        assert len(judged) >= 2
        if groups > 1 and case.group > 1:
            assert any(h % groups != h // case.group for h in judged)


def test_operands_lie_between_nan() -> None:
    for flags in ((), ("strided",), ("transposed",)):
        case = Case("ssd", "p16", "float16", 34, 64, 16, 2, flags=(*flags, "gate"), sequences=2)
        inputs = SPEC.make_inputs(case, 0)
        o = inputs.weight
        for value in (inputs.x, o.dt, o.B, o.C, o.z):
            assert torch.isfinite(value).all()
            buffer = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
            assert torch.isnan(buffer[:8]).all()
            assert torch.isnan(buffer[-8:]).all()
        if flags:
            assert o.B.untyped_storage().data_ptr() == inputs.x.untyped_storage().data_ptr()
            assert not inputs.x.is_contiguous()


def test_error_model_is_close_to_what_float32_does() -> None:
    """The error of the chunked form, root mean square, is between 2 % and 100 % of the model's."""
    for case in [c for c in SPEC.cases if c.act_dtype == "float32" and c.M > 60][::13]:
        inputs = SPEC.make_inputs(case, 0)
        ref = SPEC.reference(inputs)
        sigma = SPEC.error_model(inputs, ref).sigma
        made = SPEC.run(inputs)
        got = made.join(*made.parts).double().numpy()  # type: ignore[union-attr]
        columns = SPEC.error_model(inputs, ref).columns
        got = got if columns is None else got[:, columns]
        ratio = float(np.sqrt(np.mean(((got - ref) / sigma) ** 2)))
        assert 0.02 < ratio < 1.0, case.id


@pytest.mark.parametrize("weight_type", ["p8", "p64", "p80", "p256"])
def test_every_control_is_caught(weight_type: str) -> None:
    cases = [c for c in control_cases(SPEC) if c.weight_type == weight_type]
    assert len(cases) == 1
    controls = negative_controls(SPEC, cases=cases)
    assert {c.name for c in controls} == {*SPEC.corruptions, "zeroed outputs"}
    assert all(c.visible and c.caught for c in controls)


@pytest.mark.parametrize("planted", CPU_SPACE.planted, ids=lambda p: p.name)
def test_the_gate_rejects_a_planted_tile_by_the_check_it_names(planted) -> None:  # type: ignore[no-untyped-def]
    spec, (case,) = SPEC.with_run(planted.run), planted.cases
    found = gate(spec, planted.tile, [case])
    assert not found.passed
    assert found.check == planted.caught_by
    without = [c for c in CHECKS if c != planted.caught_by]
    assert gate(spec, planted.tile, [case], _checks=without).passed
    CPU_SPACE.check(planted.honest, case.problem(cpu_device().arch))
    assert gate(SPEC, planted.honest, [case]).passed


def test_every_fault_that_is_known_is_planted() -> None:
    assert {p.name for p in CPU_SPACE.planted} == {
        "wrong-groups", "no-clamp", "no-reset", "partial-chunk",
    }  # fmt: skip


@pytest.mark.slow
def test_chunks_are_tuned(tmp_path) -> None:  # type: ignore[no-untyped-def]
    problem = Case("ssd", "p16", "float32", 64, 64, 16, 2).problem(cpu_device().arch)
    report = tune(
        [problem],
        budget_s=60.0,
        specs={"ssd": SPEC},
        gate=DirectGate({"ssd": SPEC}),
        out=tmp_path / "table.json",
    )
    (found,) = report.problems
    assert found.space_size == len(CHUNKS)
    assert found.tried >= 2
    assert not found.rejected


def test_the_rounding_of_y_is_allowed_and_nothing_more() -> None:
    """A result rounded to float16 fails as float32, passes with its rounding, and fails once one
    value is off by two units in the last place."""
    ref = np.random.default_rng(0).standard_normal((40, 24))
    y = torch.from_numpy(ref).half().float()
    model = ErrorModel(np.full_like(ref, 1e-9), torch.float32)
    assert not check_output(y, ref, model).passed
    rounded = replace(model, rounding=half_ulp(ref, torch.float16))
    assert check_output(y, ref, rounded).passed
    y[7, 3] *= 1 + 2**-9
    assert not check_output(y, ref, rounded).passed


def test_a_shape_that_the_scan_does_not_have_is_refused_by_tune() -> None:
    call = [
        "tune",
        "-t",
        "1",
        "--op",
        "ssd",
        "--type",
        "p64",
        "--shape",
        "100,64",
        "--m",
        "16",
        "--dry-run",
    ]
    found = CliRunner().invoke(cli, call)
    assert found.exit_code == 2
    assert "--shape 100,64: ssd p64 has no such shape; the nearest is 128,64" in found.output


def test_the_oracle_runs_in_one_thread_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads are woken for every token, which takes longer than its work on a few heads."""
    seen = []
    for name in ("ssd_reference", "scan_sigma"):
        real = getattr(spec_module, name)

        def watched(*args: object, real: Callable[..., object] = real, **options: object) -> object:
            seen.append(torch.get_num_threads())
            return real(*args, **options)

        monkeypatch.setattr(spec_module, name, watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inputs = SPEC.make_inputs(SPEC.cases[5], 0)
        SPEC.error_model(inputs, SPEC.reference(inputs))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]


def test_two_oracles_at_once_leave_new_threads_what_they_had() -> None:
    """The second one begins with the one thread of the first, and ends behind it."""
    within, leave = threading.Event(), threading.Event()

    def other() -> None:
        with spec_module._one_thread():
            within.set()
            assert leave.wait(60)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1) as pool:
            with spec_module._one_thread():
                second = pool.submit(other)
                assert within.wait(60)
            leave.set()
            second.result(60)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result(60) == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
