"""ssd_scan as users call it: right values, packing, views, states, chunks, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tilewright.errors import TileError, UnsupportedError
from tilewright.ops.catalog import SPECS
from tilewright.ops.check import check_output
from tilewright.ops.contract import joined
from tilewright.ops.ssd.cpu_space import CHUNKS
from tilewright.ops.ssd.op import scan_args, ssd_scan
from tilewright.ops.ssd.reference import ssd_reference
from tilewright.ops.ssd.spec import SsdOperand, results
from tilewright.tiles.tile import Tile

SPEC = SPECS["ssd"]


def drawn(
    b: int = 2, length: int = 50, heads: int = 4, p: int = 16, groups: int = 2, n: int = 24,
    seed: int = 0, dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:  # fmt: skip
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make)

    return {
        "x": normal(b, length, heads, p).to(dtype),
        "dt": (normal(b, length, heads) - 2).to(dtype),
        "A": -torch.rand(heads, generator=make) * 4,
        "B": normal(b, length, groups, n).to(dtype),
        "C": normal(b, length, groups, n).to(dtype),
    }


def by_matrix(x: Any, dt: Any, A: Any, B: Any, C: Any) -> npt.NDArray[np.float64]:
    """y of one sequence as a product with a lower triangular matrix for each head: neither a
    recurrence nor chunks. dt as it is used."""
    x, dt, A, B, C = (np.asarray(t.double()) for t in (x[0], dt[0], A, B[0], C[0]))
    length, heads, _ = x.shape
    per_group = heads // B.shape[1]
    y = np.zeros_like(x)
    for h in range(heads):
        g = h // per_group
        for t in range(length):
            for s in range(t + 1):
                decay = np.exp(A[h] * dt[s + 1 : t + 1, h].sum())
                y[t, h] += decay * dt[s, h] * (C[t, g] @ B[s, g]) * x[s, h]
    return y


def test_oracle_is_the_product_with_a_semiseparable_matrix() -> None:
    given = drawn(b=1, length=19, heads=6, groups=3)
    given["dt"] = given["dt"].exp()
    y, _ = ssd_reference(**given)
    np.testing.assert_allclose(y[0].numpy(), by_matrix(**given), atol=1e-12)


def test_oracle_adds_a_geometric_series() -> None:
    """dt 1, A = -log 2, and B, C, x of ones: each state is half of the last, and one more."""
    ones = torch.ones(1, 6, 1, 8)
    y, states = ssd_reference(ones, ones[..., 0], torch.tensor([-np.log(2.0)]), ones, ones)
    series = 2 - 0.5 ** np.arange(6)
    np.testing.assert_allclose(y[0, :, 0, 0].numpy(), 8 * series, rtol=1e-7)
    np.testing.assert_allclose(states.numpy(), series[-1] * np.ones((1, 1, 8, 8)), rtol=1e-7)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_chunk_gives_the_matrix_product(chunk: int) -> None:
    given = drawn(b=1, length=70, heads=4, groups=2)
    given["dt"] = given["dt"].exp()
    y, _ = ssd_scan(**given, chunk=chunk)
    np.testing.assert_allclose(y[0].numpy(), by_matrix(**given), atol=5e-5)


def test_head_h_reads_group_h_over_heads_a_group() -> None:
    """Four heads of two groups read 0 0 1 1. Groups repeated as a whole, 0 1 0 1, is the fault."""
    given = drawn(heads=4, groups=2)
    y, _ = ssd_scan(**given, dt_softplus=True)
    for h in range(4):
        one = {k: v[..., h : h + 1] if k in ("dt", "A") else v for k, v in given.items()}
        one["x"] = given["x"][:, :, h : h + 1]
        one["B"], one["C"] = (given[k][:, :, h // 2 : h // 2 + 1] for k in ("B", "C"))
        alone, _ = ssd_scan(**one, dt_softplus=True)
        torch.testing.assert_close(y[:, :, h], alone[:, :, 0], atol=1e-5, rtol=1e-5)


def test_softplus_is_the_identity_above_20_and_limits_come_last() -> None:
    given = drawn(b=1, length=4, heads=1, groups=1)
    given["dt"] = torch.tensor([[[19.0], [20.0], [21.0], [300.0]]])
    A = torch.tensor([-1e-6])
    given["A"] = A
    steps = torch.tensor([19.0 + 5.6e-9, 20.0 + 2.1e-9, 21.0, 300.0])
    y, _ = ssd_scan(**given, dt_softplus=True)
    plain, _ = ssd_scan(**{**given, "dt": steps.view(1, 4, 1)})
    torch.testing.assert_close(y, plain, rtol=1e-6, atol=1e-5)
    limited, _ = ssd_scan(**given, dt_softplus=True, dt_limit=(0.0, 20.5))
    plain, _ = ssd_scan(**{**given, "dt": steps.clamp(max=20.5).view(1, 4, 1)})
    torch.testing.assert_close(limited, plain, rtol=1e-6, atol=1e-5)


def test_packed_sequences_are_those_alone() -> None:
    """Bit for bit, with an empty one, one of a token, and one that ends a chunk."""
    lengths = [5, 0, 1, 64, 30]
    given = drawn(b=1, length=sum(lengths))
    initial = torch.randn(len(lengths), 4, 16, 24)
    at = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    y, states = ssd_scan(**given, initial_states=initial, cu_seqlens=at, dt_softplus=True)
    for i, (first, last) in enumerate(zip(at[:-1].tolist(), at[1:].tolist(), strict=True)):
        one = {k: v if k == "A" else v[:, first:last] for k, v in given.items()}
        alone, state = ssd_scan(**one, initial_states=initial[i : i + 1], dt_softplus=True)
        assert torch.equal(y[:, first:last], alone)
        assert torch.equal(states[i], state[0])
    assert torch.equal(states[1], initial[1])


def test_views_of_one_projection_give_the_same() -> None:
    wide = torch.full((2, 50, 4 * 16 + 2 * 2 * 24 + 4 + 7), float("nan"))
    given = drawn()
    at, views = 3, {}
    for name in ("x", "B", "C", "dt"):
        size = given[name][0, 0].numel()
        views[name] = wide[:, :, at : at + size].unflatten(2, given[name].shape[2:])
        views[name].copy_(given[name])
        at += size + 1
    y, states = ssd_scan(**views, A=given["A"], dt_softplus=True)
    want, kept = ssd_scan(**given, dt_softplus=True)
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, kept, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def one_shot() -> tuple[Any, Any, Any]:
    """Operands, the oracle's result and its error model."""
    inputs = SPEC.make_inputs(SPEC.case("p64-g2-M150-N256-K64-fp32-initial"), 0)
    ref = SPEC.reference(inputs)
    return inputs, ref, SPEC.error_model(inputs, ref)


@pytest.mark.parametrize("cut", [1, 15, 16, 63, 64, 65, 149])
def test_prefill_in_two_parts_is_within_the_error_model_of_one(
    cut: int, one_shot: tuple[Any, Any, Any]
) -> None:
    inputs, ref, model = one_shot
    o: SsdOperand = inputs.weight
    states = o.initial_states
    parts = []
    for part in (slice(0, cut), slice(cut, None)):
        y, states = ssd_scan(
            inputs.x[:, part], o.dt[:, part], o.A, o.B[:, part], o.C[:, part], D=o.D,
            dt_bias=o.dt_bias, dt_softplus=True, initial_states=states, chunk=64,
        )  # fmt: skip
        parts.append(y)
    y = torch.cat(parts, dim=1)
    whole = joined(SPEC.run(inputs))
    both = torch.cat([y.reshape(150, -1), states.permute(0, 3, 1, 2).reshape(64, -1)])
    found = check_output(both, ref, model)
    assert found.passed, found.reason
    assert check_output(whole, ref, model).passed


@pytest.mark.parametrize("packed", [False, True])
def test_without_a_token_states_leave_as_they_entered(packed: bool) -> None:
    given = drawn(b=1 if packed else 2, length=0)
    at = torch.zeros(3, dtype=torch.int64) if packed else None
    initial = torch.randn(2, 4, 16, 24)
    y, states = ssd_scan(**given, initial_states=initial, cu_seqlens=at)
    assert y.shape == given["x"].shape
    assert torch.equal(states, initial)
    assert states is not initial
    assert torch.equal(ssd_scan(**given, cu_seqlens=at)[1], torch.zeros(2, 4, 16, 24))


def test_no_sequence_at_all() -> None:
    y, states = ssd_scan(**drawn(b=0))
    assert (y.shape, states.shape) == ((0, 50, 4, 16), (0, 4, 16, 24))
    y, states = ssd_scan(**drawn(b=1, length=0), cu_seqlens=torch.zeros(1, dtype=torch.int32))
    assert (y.shape, states.shape) == ((1, 0, 4, 16), (0, 4, 16, 24))


def test_out_is_written_and_returned() -> None:
    given = drawn(dtype=torch.bfloat16)
    out = torch.empty(2, 50, 4, 16, dtype=torch.bfloat16)
    y, _ = ssd_scan(**given, out=out)
    assert y is out
    assert torch.equal(out, ssd_scan(**given)[0])


def test_arguments_do_not_change_and_states_are_float32() -> None:
    given = drawn(dtype=torch.float16)
    more = {"D": torch.randn(4, 16), "z": torch.randn(2, 50, 4, 16), "dt_bias": torch.randn(4),
            "initial_states": torch.randn(2, 4, 16, 24)}  # fmt: skip
    before = {k: v.clone() for k, v in {**given, **more}.items()}
    y, states = ssd_scan(**given, **more, dt_softplus=True)
    assert (y.dtype, states.dtype) == (torch.float16, torch.float32)
    assert all(torch.equal(v, before[k]) for k, v in {**given, **more}.items())


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float16, 1e-3), pytest.param(torch.bfloat16, 6e-3, marks=pytest.mark.slow)],
)
def test_no_drift_over_16384_tokens(dtype: torch.dtype, most: float) -> None:
    """The error of the last quarter is that of the first, and both within what is promised."""
    given = drawn(b=1, length=16_384, heads=2, p=8, groups=1, n=16, dtype=dtype)
    given["A"] = torch.tensor([-0.01, -2.0])
    y, _ = ssd_scan(**given, dt_softplus=True)
    right, _ = ssd_reference(**given, dt_softplus=True)
    error, size = (y.double() - right).square(), right.square()
    quarters = [(error[:, q].sum() / size[:, q].sum()).sqrt().item()
                for q in (slice(0, 4096), slice(12_288, None))]  # fmt: skip
    assert quarters[1] <= 1.5 * quarters[0]
    assert max(quarters) <= most


@pytest.mark.parametrize("name", ["dt", "B", "C", "z"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_earlier_token_sees_what_is_not_finite(name: str, value: float) -> None:
    """Token 37 of chunks of 16: the fifth of its chunk."""
    given = {**drawn(), "z": drawn(seed=1)["x"]}
    clean, _ = ssd_scan(**given, chunk=16, dt_softplus=True)
    given[name] = given[name].clone()
    given[name][:, 37] = value
    y, _ = ssd_scan(**given, chunk=16, dt_softplus=True)
    assert torch.equal(y[:, :37], clean[:, :37])
    assert not torch.isfinite(y[:, 37]).all()


def test_what_is_not_finite_in_x_stays_in_its_channel_and_behind_its_chunks_first_token() -> None:
    given = drawn()
    clean, kept = ssd_scan(**given, chunk=16, dt_softplus=True)
    given["x"] = given["x"].clone()
    given["x"][0, 37, 2, 5] = float("inf")
    y, states = ssd_scan(**given, chunk=16, dt_softplus=True)
    touched = torch.zeros_like(y, dtype=torch.bool)
    touched[0, 32:, 2, 5] = True
    assert torch.equal(y[~touched], clean[~touched])
    assert not torch.isfinite(y[0, 37:, 2, 5]).any()
    row = torch.zeros_like(kept, dtype=torch.bool)
    row[0, 2, 5] = True
    assert torch.equal(states[~row], kept[~row])
    assert not torch.isfinite(states[row]).any()


def test_a_compiled_model_sees_one_operation() -> None:
    given = drawn()
    tile = Tile.of("chunked", chunk=16)
    scan = torch.compile(
        lambda **more: ssd_scan(**more, dt_softplus=True, chunk=32, tile=tile),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    y, states = scan(**given)
    want, kept = ssd_scan(**given, dt_softplus=True, chunk=32)
    assert torch.equal(y, want)
    assert torch.equal(states, kept)


@pytest.mark.parametrize("out", [torch.zeros(3, 2, 50, 4, 16), torch.zeros(2, 50, 4, 16).double()])
def test_compiled_it_writes_no_other_out(out: torch.Tensor) -> None:
    scan = torch.compile(lambda **more: ssd_scan(**more), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="out has shape"):
        scan(**drawn(), out=out)


def test_out_has_memory_of_its_own() -> None:
    given = drawn()
    whole = torch.zeros(2, 50, 4, 40)
    given["x"] = whole[..., :16].copy_(given["x"])
    given["z"] = torch.randn(2, 50, 4, 16)
    inside = whole.view(-1)[16 : 16 + 6400].view(2, 50, 4, 16)
    behind = torch.zeros(2 * 6400)
    given["z"] = behind[:6400].view(2, 50, 4, 16).copy_(given["z"])
    for name, out in (("x", inside), ("z", given["z"])):
        with pytest.raises(ValueError, match=f"out lies in the memory of {name}, which is read"):
            ssd_scan(**given, out=out)
    want, _ = ssd_scan(**given)
    made, _ = ssd_scan(**given, out=behind[6400:].view(2, 50, 4, 16))
    assert torch.equal(made, want)


def test_results_join_tokens_and_states() -> None:
    y, states = torch.randn(2, 3, 4, 8), torch.randn(2, 4, 8, 5)
    args: Any = type("Args", (), {"y": y, "final_states": states})
    matrix = joined(results(args))
    assert matrix.shape == (6 + 2 * 5, 32)
    assert torch.equal(matrix[4], y[1, 1].view(-1))
    assert torch.equal(matrix[6 + 5 + 2], states[1, :, :, 2].reshape(-1))


def _bad(**new: Any) -> dict[str, Any]:
    return {**drawn(), **new}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"x": 3}, TypeError, r"x is int; pass a torch.Tensor \[b, L, H, P\]"),
        ({"x": torch.zeros(2, 50, 64)}, ValueError, r"x has shape \[2, 50, 64\]; it must be"),
        ({"x": torch.zeros(2, 50, 4, 16).double()}, UnsupportedError, "dtype torch.float64"),
        ({"x": torch.zeros(2, 50, 4, 12)}, UnsupportedError, "P of x is 12; it must be a multiple"),
        ({"x": torch.zeros(2, 50, 4, 264)}, UnsupportedError, "P of x is 264"),
        ({"x": torch.zeros(2, 50, 3, 16)}, ValueError, "H=3 heads, B has G=2 groups"),
        ({"B": torch.zeros(2, 50, 2, 10)}, UnsupportedError, "N of B is 10"),
        ({"B": torch.zeros(2, 50, 24)}, ValueError, r"B is \[2, 50, 24\]; it must be"),
        ({"B": torch.zeros(2, 50, 2, 24).half()}, TypeError, "B has dtype torch.float16, x has"),
        ({"C": torch.zeros(2, 49, 2, 24)}, ValueError, r"C has shape \[2, 49, 2, 24\]; it must be"),
        ({"dt": torch.zeros(2, 50)}, ValueError, r"dt has shape \[2, 50\]; it must be \[b, L, H\]"),
        ({"dt": torch.zeros(2, 50, 4).int()}, TypeError, "dt is torch.int32; it must be a"),
        ({"A": torch.zeros(2)}, ValueError, r"A has shape \[2\]; it must be \[H\] = \[4\]"),
        ({"D": torch.zeros(3)}, ValueError, r"D has shape \[3\]; it must be \[H\] = \[4\] or"),
        ({"z": torch.zeros(2, 50, 64)}, ValueError, "z has shape"),
        ({"dt_bias": torch.zeros(1)}, ValueError, "dt_bias has shape"),
        ({"dt_limit": (1.0, 0.0)}, ValueError, r"dt_limit is \(1.0, 0.0\); it must be"),
        ({"dt_limit": 1.0}, ValueError, "dt_limit is 1.0"),
        ({"dt_limit": (-1.0, 1.0)}, ValueError, "lets steps be negative; a state must not grow"),
        ({"dt_limit": (-2.0, -1.0), "dt_softplus": True}, ValueError, "lets steps be negative"),
        ({"A": torch.tensor([-1.0, 0.0, 2.5, -1.0])}, ValueError, r"up to 2.5; it must not be pos"),
        ({"initial_states": torch.zeros(1, 4, 16, 24)}, ValueError, "initial_states has shape"),
        ({"initial_states": [0]}, TypeError, "initial_states is list"),
        ({"cu_seqlens": torch.tensor([0, 50])}, ValueError, "x has b=2 rows and cu_seqlens"),
        ({"cu_seqlens": [0, 50]}, TypeError, "cu_seqlens is list; it must be an int32"),
        ({"cu_seqlens": torch.zeros(2, 2).int()}, ValueError, "cu_seqlens has shape"),
        ({"out": torch.zeros(2, 50, 4, 16).half()}, ValueError, "out has shape"),
        ({"out": torch.zeros(2, 4, 50, 16).transpose(1, 2)}, ValueError, "must be contiguous"),
        ({"chunk": 48}, TileError, "chunk=48 is none of"),
        ({"tile": Tile.of("chunked", block=3)}, TileError, "has the fields"),
        ({"tile": Tile.of("five", chunk=64)}, TileError, "'five' is not in ssd/cpu"),
        ({"tile": Tile.of("chunked", chunk=32, planted="no-reset")}, TileError, "planted"),
        ({"x": torch.zeros(2, 50, 4, 16, device="meta")}, ValueError, "x is on meta, B on cpu"),
    ],
)  # fmt: skip
def test_bad_calls(call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ssd_scan(**_bad(**call))


@pytest.mark.parametrize("at", [[0, 51], [1, 50], [0, 30, 20, 50]])
def test_bad_packing(at: list[int]) -> None:
    with pytest.raises(ValueError, match="it must ascend from 0 to the number of tokens, 50"):
        ssd_scan(**drawn(b=1), cu_seqlens=torch.tensor(at))


def test_packing_into_no_sequence_is_refused_where_values_are_not_read() -> None:
    given = {name: value.to("meta") for name, value in drawn(b=1).items()}
    with pytest.raises(ValueError, match="one element, which is no sequence, and x has 50 tokens"):
        scan_args(**given, cu_seqlens=torch.zeros(1, dtype=torch.int32, device="meta"))


def test_a_limit_below_0_changes_nothing_behind_softplus() -> None:
    given = drawn()
    for made, want in zip(
        ssd_scan(**given, dt_softplus=True, dt_limit=(-1.0, 9.0)),
        ssd_scan(**given, dt_softplus=True, dt_limit=(0.0, 9.0)),
        strict=True,
    ):
        assert torch.equal(made, want)
