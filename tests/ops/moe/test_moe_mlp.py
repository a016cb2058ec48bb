"""moe_mlp against the same layer in float64 from the codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tilewright.errors import UnsupportedError
from tilewright.ops.catalog import SPECS
from tilewright.ops.contract import Case
from tilewright.ops.moe.experts import PackedExperts
from tilewright.ops.moe.mlp import moe_mlp
from tilewright.ops.moe.reference import MoeSource, expert_rows

SPEC = SPECS["moe"]
F64 = npt.NDArray[np.float64]
E, TOP_K, HIDDEN, INNER = 6, 3, 256, 512


def drawn(weight_type: str, n: int, k: int, seed: int) -> tuple[PackedExperts, F64]:
    """Packed experts [E, n, k] and their exact weights."""
    group = 32 if weight_type.startswith("uint4") else 0
    case = Case("moe", weight_type, "float32", 1, n, k, group, experts=E, top_k=1)
    inputs = SPEC.make_inputs(case, seed)
    source: MoeSource = inputs.source
    exact = [np.concatenate([r.value() for r in expert_rows(one)]) for one in source.experts]
    return inputs.weight.experts, np.stack(exact)


def layer(weight_type: str = "Q4_K", down_type: str | None = None) -> tuple[Any, Any]:
    parts = [drawn(weight_type, INNER, HIDDEN, seed) for seed in (0, 1)]
    parts.append(drawn(down_type or weight_type, HIDDEN, INNER, 2))
    return tuple(p for p, _ in parts), tuple(w for _, w in parts)


def routed(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(tokens, HIDDEN)).astype(np.float32))
    ids = torch.from_numpy(rng.integers(0, E, (tokens, TOP_K)))
    return x, torch.from_numpy(rng.uniform(0.1, 1, (tokens, TOP_K)).astype(np.float32)), ids


def right(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, exact: Any) -> F64:
    gate, up, down = exact
    out = np.zeros((len(x), HIDDEN))
    for t, row in enumerate(x.double().numpy()):
        for weight, e in zip(weights[t].double().numpy(), ids[t].numpy(), strict=True):
            g = gate[e] @ row
            out[t] += weight * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ row)))
    return out


def off(got: torch.Tensor, expected: F64) -> float:
    return float(np.linalg.norm(got.double().numpy() - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("tokens", [1, 2, 9, 33])
@pytest.mark.parametrize("weight_type", ["Q4_K", "Q8_0", "uint4", "uint4b8"])
def test_equals_the_layer_in_float64(weight_type: str, tokens: int) -> None:
    (gate, up, down), exact = layer(weight_type)
    x, weights, ids = routed(tokens)
    got = moe_mlp(x, weights, ids, (gate, up), down)
    assert (got.shape, got.dtype) == ((tokens, HIDDEN), torch.float32)
    assert off(got, right(x, weights, ids, exact)) < 2e-6
    eight = moe_mlp(x, weights, ids, (gate, up), down, activations="int8", threads=1)
    assert off(eight, right(x, weights, ids, exact)) < 2e-2


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 6e-4), (torch.bfloat16, 5e-3)])
def test_half_precision_is_rounded_once(dtype: torch.dtype, most: float) -> None:
    (gate, up, down), exact = layer("Q6_K", "Q4_K")
    x, weights, ids = routed(17)
    got = moe_mlp(x.to(dtype), weights, ids, (gate, up), down)
    assert got.dtype == dtype
    assert off(got, right(x.to(dtype), weights, ids, exact)) < most


def test_gate_and_up_in_one_tensor_and_dense_experts() -> None:
    (gate, up, down), exact = layer()
    x, weights, ids = routed(9)
    both = PackedExperts(
        tuple(
            type(g)(g.type_name, torch.cat([g.data, u.data]), g.N + u.N, g.K)  # type: ignore[call-arg, union-attr]
            for g, u in zip(gate.each, up.each, strict=True)
        )
    )
    expected = right(x, weights, ids, exact)
    assert off(moe_mlp(x, weights, ids, both, down), expected) < 2e-6
    dense = tuple(torch.from_numpy(w).float() for w in exact)
    assert off(moe_mlp(x, weights, ids, dense[:2], dense[2]), expected) < 2e-6
    assert off(moe_mlp(x, weights, ids, (gate, up), dense[2]), expected) < 2e-6
    stacked = torch.cat(dense[:2], dim=1)
    assert off(moe_mlp(x, weights, ids, stacked, down), expected) < 2e-6


def test_a_tokens_result_repeats_and_no_tokens_are_fine() -> None:
    (gate, up, down), _ = layer()
    x, weights, ids = routed(33)
    ids[:, 1] = ids[:, 0]  # every token names an expert twice
    once = moe_mlp(x, weights, ids, (gate, up), down)
    assert torch.equal(once, moe_mlp(x, weights, ids, (gate, up), down))
    assert moe_mlp(x[:0], weights[:0], ids[:0], (gate, up), down).shape == (0, HIDDEN)
    wide = torch.full((33, 2 * HIDDEN), float("nan"))
    wide[:, ::2] = x
    assert torch.equal(moe_mlp(wide[:, ::2], weights, ids, (gate, up), down), once)


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh"])
def test_other_activations(name: str) -> None:
    (gate, up, down), (g, u, d) = layer("Q8_0")
    x, _, _ = routed(2)
    ids, weights = torch.tensor([[1], [4]]), torch.ones(2, 1)
    got = moe_mlp(x, weights, ids, (gate, up), down, activation=name)
    approximate = "tanh" if name.endswith("tanh") else "none"
    for t, e in enumerate((1, 4)):
        h = torch.from_numpy(g[e]) @ x[t].double()
        h = torch.nn.functional.gelu(h, approximate=approximate) * (
            torch.from_numpy(u[e]) @ x[t].double()
        )
        assert off(got[t], (torch.from_numpy(d[e]) @ h).numpy()) < 2e-6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"activation": "relu"}, UnsupportedError, "activation is 'relu'; allowed are silu"),
        ({"activations": "int4"}, ValueError, "moe_mlp: activations='int4'"),
        ({"weights": torch.ones(9, 2)}, ValueError, r"weights has shape \[9, 2\] .* \[9, 3\], as"),
        ({"weights": torch.ones(9, 3, dtype=torch.int64)}, ValueError, "must be floating point"),
        ({"weights": [0.5]}, TypeError, "weights is list; pass a tensor"),
        ({"gate_up": [0.5]}, TypeError, "moe_mlp: experts are list; pass PackedExperts"),
        ({"down": 1.0}, TypeError, "moe_mlp: experts are float; pass PackedExperts"),
        ({"ids": torch.full((9, 3), E)}, ValueError, r"ids reach from 6 to 6; .* 0\.\.5"),
        ({"x": torch.zeros(9, INNER)}, ValueError, r"it must be \[T, K=256\]"),
        ({"down": torch.zeros(E, HIDDEN, 8)}, ValueError, "gate_up has the shapes .* down is"),
        ({"down": torch.zeros(HIDDEN, INNER)}, ValueError, r"dense experts have shape \[256, 512"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_calls(change: dict[str, Any], error: type[Exception], message: str) -> None:
    (gate, up, down), _ = layer("Q8_0")
    x, weights, ids = routed(9)
    arguments = {"x": x, "weights": weights, "ids": ids, "gate_up": (gate, up), "down": down}
    with pytest.raises(error, match=message):
        moe_mlp(**{**arguments, **change})
