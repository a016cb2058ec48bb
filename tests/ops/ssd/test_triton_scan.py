"""The SSD's Triton kernels in the interpreter, held to the float64 recurrence."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import triton_interpreter  # noqa: F401
from tilewright.device import INTERPRETER
from tilewright.errors import TileError
from tilewright.ops.catalog import spec_for
from tilewright.ops.check import check_output
from tilewright.ops.contract import Case, joined
from tilewright.ops.ssd.gpu import gpu_scan
from tilewright.ops.ssd.op import scan_args
from tilewright.ops.ssd.spec import operands
from tilewright.ops.ssd.triton_prepare import launch_prepare
from tilewright.ops.ssd.triton_space import CHUNKS, TRITON_SPACE, with_chunk
from tilewright.tiles.tile import Tile

SPEC = spec_for("ssd", INTERPRETER)
_OUTPUT = {"heads": 1, "num_warps": 4, "num_stages": 2}
FIVE = Tile.of("five", chunk=32, block=16, block_p=16, block_n=16, **_OUTPUT)
FUSED = Tile.of("fused", chunk=32, block=32, block_p=32, block_n=16, **{**_OUTPUT, "heads": 2})
ANEW = Tile.of("fused", chunk=64, block=32, block_p=16, block_n=16, **_OUTPUT)
WALK = Tile.of("persistent", chunk=16, block_p=16, segments=1, num_warps=4, num_stages=2)
SEGMENTS = Tile.of("persistent", chunk=32, block_p=32, segments=3, num_warps=4, num_stages=2)
FORMS = {"five": FIVE, "fused": FUSED, "anew": ANEW, "persistent": WALK, "segments": SEGMENTS}
by_form = pytest.mark.parametrize("tile", FORMS.values(), ids=FORMS)


def slow(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.slow, id=case.id)


CASES = [
    case if i % 11 == 0 and case.M * case.N <= 4096 else slow(case)
    for i, case in enumerate(SPEC.cases)
]  # fmt: skip


def held(case: Case, tile: Tile | None = None) -> None:
    """Run a case and hold it to the oracle."""
    inputs = SPEC.make_inputs(case, 0)
    made = joined(SPEC.run(inputs, tile=tile))
    ref = SPEC.reference(inputs)
    result = check_output(made, ref, SPEC.error_model(inputs, ref))
    assert result.passed, result


def case_of(
    p: int, heads: int, groups: int, n: int, m: int, dtype: str, *flags: str, sequences: int = 0
) -> Case:
    return Case(
        "ssd", f"p{p}", dtype, m, heads * p, n, heads // groups, flags=flags, sequences=sequences
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases_of_the_spec(case):
    held(case)


@by_form
@pytest.mark.parametrize(
    "case",
    [
        case_of(24, 4, 2, 24, 40, "float16", "strided", "gate", sequences=2),
        case_of(16, 4, 2, 16, 60, "bfloat16", "packed", "initial", "wide-skip", sequences=5),
        slow(case_of(24, 4, 2, 40, 50, "bfloat16", "gate", "initial", "wide-skip")),
        slow(case_of(32, 4, 2, 16, 90, "float16", "packed", "initial", sequences=6)),
        slow(case_of(8, 2, 1, 96, 33, "float32", "transposed", "packed")),
        slow(case_of(16, 4, 1, 32, 1, "float16", "plain")),
        case_of(16, 2, 1, 16, 65, "float16", "strong"),
        slow(case_of(16, 4, 2, 32, 65, "bfloat16", "weak", "initial")),
        slow(case_of(16, 2, 1, 32, 40, "float32", "threshold", "limit")),
    ],
    ids=lambda case: case.id,
)
def test_every_form_agrees_with_the_recurrence(tile, case):
    held(case, tile.replace(block_p=16) if case.weight_type in ("p8", "p16") else tile)


@pytest.mark.parametrize(
    ("algorithm", "chunk"),
    [(("five", "fused")[i % 2], chunk) for i, chunk in enumerate(CHUNKS)],
)
def test_every_chunk_size_agrees_with_the_recurrence(algorithm, chunk):
    case = case_of(16, 2, 1, 16, chunk + 9, "float16", "packed", sequences=2)
    block = min(64, chunk & -chunk)
    held(case, Tile.of(algorithm, chunk=chunk, block=block, block_p=16, block_n=16, **_OUTPUT))


def test_the_smallest_numbers_of_float16_are_reckoned_with():
    """A head forgets so fast here that some weights of a chunk are subnormal: one number of a state
    was 1.6 times further off than the model allowed without these."""
    case = case_of(80, 4, 2, 128, 300, "float16")
    held(case, Tile.of("five", chunk=128, block=32, block_p=32, block_n=32, **_OUTPUT))


@pytest.mark.parametrize("p", [8, 40, pytest.param(192, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tile", [FUSED, WALK], ids=["fused", "persistent"])
def test_any_head_dimension_is_cut_in_slices(tile, p):
    held(case_of(p, 2, 1, 16, 20, "float16"), tile.replace(block_p=16))


@pytest.mark.parametrize("tile", [FUSED, SEGMENTS], ids=["fused", "persistent"])
def test_the_largest_state_fits(tile):
    held(case_of(16, 2, 1, 256, 40, "bfloat16", "initial"), tile.replace(block_p=16))


def test_a_prefill_in_two_parts_is_the_whole_one():
    inputs = SPEC.make_inputs(case_of(16, 4, 2, 32, 77, "float16"), 3)
    whole, o = operands(inputs), inputs.weight
    gpu_scan(whole, None, WALK)
    ys, states = [], None
    for part in (slice(0, 29), slice(29, 77)):
        args = scan_args(
            inputs.x[:, part], o.dt[:, part], o.A, o.B[:, part], o.C[:, part], D=o.D,
            dt_bias=o.dt_bias, dt_softplus=True, initial_states=states,
        )  # fmt: skip
        gpu_scan(args, None, FIVE)
        ys.append(args.y)
        states = args.final_states
    torch.testing.assert_close(torch.cat(ys, 1), whole.y, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(states, whole.final_states, rtol=1e-2, atol=1e-4)


def test_a_chunk_is_an_argument():
    inputs = SPEC.make_inputs(case_of(16, 4, 2, 32, 40, "float32"), 0)
    ref = SPEC.reference(inputs)
    for chunk in (16, 192):
        args = operands(inputs)
        gpu_scan(args, chunk)
        torch.testing.assert_close(
            args.y.reshape(40, 64), torch.from_numpy(ref[:40]).float(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which multiplies the NaN
def test_nan_of_one_sequence_stays_there():
    inputs = SPEC.make_inputs(case_of(16, 2, 1, 16, 60, "float16"), 0)
    o = inputs.weight
    cu = torch.tensor([0, 21, 40, 60], dtype=torch.int32)
    x, B = inputs.x.clone(), o.B.clone()
    x[:, 21:40], B[:, 21:40] = float("nan"), float("inf")
    for tile in FORMS.values():
        args = scan_args(x, o.dt, o.A, B, o.C, dt_softplus=True, cu_seqlens=cu)
        gpu_scan(args, None, tile.replace(block_p=16))
        assert torch.isfinite(args.y[:, :21]).all()
        assert torch.isfinite(args.y[:, 40:]).all()
        assert torch.isfinite(args.final_states[[0, 2]]).all()
        assert torch.isnan(args.y[:, 21]).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which multiplies the NaN
@by_form
def test_what_is_not_finite_goes_where_the_docstring_says(tile):
    """Token 41, behind the middle of its chunk in every form: B and dt reach no token before it, x
    one channel from its chunk's first token on."""
    inputs = SPEC.make_inputs(case_of(16, 2, 1, 16, 60, "float16"), 0)
    given = {"x": inputs.x, **{k: getattr(inputs.weight, k) for k in ("dt", "A", "B", "C")}}

    def scanned(name: str = "", at: Any = (), value: float = 0.0) -> torch.Tensor:
        changed = {k: v.clone() for k, v in given.items()}
        if name:
            changed[name][at] = value
        args = scan_args(**changed, dt_softplus=True)
        gpu_scan(args, None, tile.replace(block_p=16))
        return args.y

    clean = scanned()
    for name in ("dt", "B"):
        y = scanned(name, (slice(None), 41), float("nan"))
        assert torch.equal(y[:, :41], clean[:, :41])
        assert torch.isnan(y[:, 41:]).all()
    y = scanned("x", (0, 41, 1, 5), float("inf"))
    touched = torch.zeros_like(y, dtype=torch.bool)
    touched[0, 41 - 41 % tile.chunk :, 1, 5] = True
    assert torch.equal(y[~touched], clean[~touched])
    assert not torch.isfinite(y[0, 41:, 1, 5]).any()


@pytest.mark.parametrize("segments", [0, 3], ids=["chunks", "segments"])
def test_more_sequences_than_a_grid_is_deep_are_passed(monkeypatch, segments):
    """CUDA ends a grid at 65535 but in its first dimension."""
    from tilewright.ops.ssd import triton_states

    grids = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: grids.append(grid)

    many, heads, p, n = 70_000, 4, 16, 96
    empty = torch.empty(0, device="meta")
    args = SimpleNamespace(
        head_dim=p, d_state=n, heads=heads, sequences=many, length=2 * many, initial_states=None,
        cu_seqlens=empty, final_states=empty,
    )  # fmt: skip
    monkeypatch.setattr(triton_states, "_pass_kernel", Recorder())
    triton_states.launch_pass(args, empty, empty, empty, chunk=16, segments=segments)
    ((first, *others),) = grids
    assert max(others) <= 65_535
    assert first * max(1, *others) == many * heads * 2  # 1536 numbers a head, 1024 a program


@by_form
def test_two_launches_agree_bit_for_bit(tile):
    inputs = SPEC.make_inputs(case_of(32, 4, 2, 32, 50, "float16"), 1)
    first, second = joined(SPEC.run(inputs, tile=tile)), joined(SPEC.run(inputs, tile=tile))
    assert torch.equal(first, second)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("chunk", {"chunk": 100}, r"chunk is 100; it must be one of \(16, 32, 64"),
    ("no such chunk", {"tile": FUSED.replace(chunk=96)}, "chunk=96 is none of"),
    ("ragged block", {"tile": FUSED.replace(chunk=16)}, "breaks rule 'whole blocks'"),
    ("two groups", {"tile": FUSED.replace(heads=8)}, "breaks rule 'heads of one group'"),
    ("wide head", {"tile": WALK.replace(block_p=128)}, "breaks rule 'head dimension'"),
    ("wide state", {"tile": FIVE.replace(block_n=128)}, "breaks rule 'state dimension'"),
    ("long walk", {"tile": WALK.replace(chunk=256)}, "breaks rule 'a chunk at once'"),
    (
        "Hopper elsewhere",
        {"tile": Tile.of("hopper", chunk=64, segments=1, num_stages=3)},
        "breaks rule 'Hopper'",
    ),
]


@pytest.mark.parametrize(("call", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_tile_that_may_not_run_is_refused(call, message):
    args = operands(SPEC.make_inputs(case_of(32, 4, 2, 32, 20, "float16"), 0))
    with pytest.raises(TileError, match=message):
        gpu_scan(args, **call)


def test_every_default_obeys_the_rules():
    for case in SPEC.cases[::5]:
        for arch in (INTERPRETER, "sm_80", "sm_90", "gfx90a", "gfx942", "gfx1151"):
            problem = case.problem(arch)
            tile = TRITON_SPACE.default(problem)
            TRITON_SPACE.check(tile, problem)
            for chunk in CHUNKS:
                changed = with_chunk(tile, problem, chunk)
                TRITON_SPACE.check(changed, problem)
                assert changed.chunk == chunk


def test_gfx90a_takes_chunks_of_128():
    problem = case_of(64, 128, 8, 128, 4096, "bfloat16").problem("gfx90a")
    assert TRITON_SPACE.default(problem).chunk == 128


def test_negative_controls_turn_the_check_red():
    inputs = SPEC.make_inputs(case_of(16, 4, 2, 32, 40, "float16"), 0)
    ref = SPEC.reference(inputs)
    model = SPEC.error_model(inputs, ref)
    for name, corrupt in SPEC.corruptions.items():
        corrupted = corrupt(inputs)
        assert corrupted is not None
        made = joined(SPEC.run(replace(inputs, x=corrupted.x, weight=corrupted.weight)))
        assert not check_output(made, ref, model).passed, name


def test_the_message_of_a_missing_interpreter(monkeypatch):
    from tilewright.errors import UnsupportedError
    from tilewright.ops.ssd import triton_scan

    monkeypatch.setattr(triton_scan, "INTERPRETED", False)
    args = operands(SPEC.make_inputs(case_of(16, 2, 1, 16, 5, "float16"), 0))
    with pytest.raises(UnsupportedError, match=re.escape("set TRITON_INTERPRET=1")):
        gpu_scan(args, None, WALK)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [FIVE, ANEW, WALK], ids=["five", "anew", "persistent"])
def test_heads_may_lie_more_than_2_31_numbers_apart(tile):
    """As in a projection whose tokens are its fastest dimension. No page between is touched."""
    inputs = SPEC.make_inputs(case_of(16, 3, 3, 16, 20, "float16", "gate"), 0)
    want = joined(SPEC.run(inputs, tile=tile))
    apart, each = 1 << 30, 20 * 16
    buffer = torch.empty(2 * apart + 4 * each, dtype=torch.float16)

    def far(given: torch.Tensor, place: int) -> torch.Tensor:
        return buffer.as_strided(given.shape, (0, 16, apart, 1), place * each).copy_(given)

    operand = inputs.weight
    operand = replace(operand, z=far(operand.z, 1), B=far(operand.B, 2), C=far(operand.C, 3))
    inputs = replace(inputs, x=far(inputs.x, 0), weight=operand)
    assert torch.equal(joined(SPEC.run(inputs, tile=tile)), want)


@pytest.mark.parametrize("change", [{"num_warps": 8}, {"num_stages": 1}, {"block_p": 32}], ids=str)
def test_a_wide_state_is_not_read_ahead_by_too_few_threads(change):
    """Compiled for sm_90 by Triton 3.6, this tile spilled 24 bytes; with each change, none."""
    problem = case_of(64, 32, 2, 256, 4096, "bfloat16").problem("sm_90")
    tile = Tile.of(
        "fused", chunk=64, block=64, block_p=64, block_n=128, heads=8, num_warps=4, num_stages=2
    )
    with pytest.raises(TileError, match="breaks rule 'registers'"):
        TRITON_SPACE.check(tile, problem)
    TRITON_SPACE.check(tile.replace(**change), problem)


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("p", [16, 32, 64])
def test_one_head_a_program_is_not_for_wgmma(p, num_warps, chunk):
    """ptxas 12.8 made wgmma read from wrong addresses: seen on an H200, with eight warps where
    tokens were the fastest dimension."""
    problem = case_of(p, 6, 6, 96, 4096, "bfloat16").problem("sm_90")
    tile = TRITON_SPACE.default(problem)
    assert (tile.algorithm, tile.heads, tile.block) == ("fused", 1, 32)
    with pytest.raises(TileError, match="breaks rule 'one head'"):
        TRITON_SPACE.check(tile.replace(chunk=chunk, block=64, num_warps=num_warps), problem)


def test_sums_behind_the_last_token_are_its_own_where_they_are_added_in_a_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As GPUs add them: another order rounds otherwise, and the last token would decay. Found on an
    H200 in float32: final states of 127 tokens, chunks of 128, were off by a thousandth."""
    import numpy as np
    from triton.runtime import interpreter

    def tree(values: Any, axis: int) -> Any:
        sums, step = np.moveaxis(values.copy(), axis, 0), 1
        while step < len(sums):
            sums = np.concatenate([sums[:step], sums[step:] + sums[:-step]])
            step *= 2
        return np.moveaxis(sums, 0, axis)

    def cumsum(self: Any, input: Any) -> Any:
        return [self.to_tensor(tree(input.handle.data, self.axis), dtype=input.dtype)]

    monkeypatch.setattr(interpreter.ScanOps, "cumsum", cumsum)
    case = case_of(16, 8, 1, 16, 127, "float32")
    args = operands(SPEC.make_inputs(case, 0))
    args = replace(args, A=args.A * 0 - torch.arange(1, 9) * 40.0)
    for chunk in (128, 192):  # in one block and in blocks of 64
        steps, sums = torch.full((2, 1, 8, chunk), torch.nan)
        launch_prepare(args, chunk, 1, steps, sums)
        assert torch.equal(sums[..., 126:], sums[..., 126:127].expand(1, 8, chunk - 126))
        assert not steps[..., 127:].any()
        right = (steps.double() * args.A[:, None] * math.log2(math.e)).cumsum(-1)
        assert ((sums - right).abs() <= 1e-6 * right.abs()).all()
    logs = (steps * args.A[:, None]).numpy()[..., :128]
    bare = tree(logs, 2)
    assert (bare[..., 126] != bare[..., 127]).any()  # so the kernel's own scan would not do
