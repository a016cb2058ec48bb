"""moe_gemm and its spec: sorting, edges, errors, and what the check notices."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf.quants
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from tilewright.errors import LayoutError, TileError, UnsupportedError
from tilewright.formats.gguf import read_gguf
from tilewright.layout.cpu import pack_blocks, pack_w4
from tilewright.ops.catalog import SPECS
from tilewright.ops.contract import Case
from tilewright.ops.moe.experts import (
    PackedExperts,
    pack_expert_blocks,
    pack_expert_w4,
    route,
)
from tilewright.ops.moe.op import moe_gemm
from tilewright.tiles.tile import Tile
from tilewright.tune.verify import control_cases, negative_controls, verify_op

SPEC = SPECS["moe"]
TYPES = SPEC.weight_types


def case_of(weight_type: str = "Q4_0", m: int = 7, **more: Any) -> Case:
    fields = {"N": 24, "K": 256, "experts": 6, "top_k": 3, "act_dtype": "float32", **more}
    if weight_type.startswith("uint4"):
        fields.setdefault("group", 32)
    return Case(op="moe", weight_type=weight_type, M=m, **fields)


def stacked(seed: int = 0, experts: int = 4, n: int = 24, k: int = 64) -> tuple[Any, Any]:
    """Q8_0 experts as one tensor [E, N, row_bytes], and their values by the gguf package."""
    values = np.random.default_rng(seed).normal(size=(experts, n, k)).astype(np.float32)
    kind = GGMLQuantizationType.Q8_0
    raw = np.stack([gguf.quants.quantize(expert, kind) for expert in values])
    return raw, np.stack([gguf.quants.dequantize(expert, kind) for expert in raw])


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("path", ["float", "int8"])
def test_every_case_passes(weight_type: str, path: str) -> None:
    cases = [c for c in SPEC.cases if (c.weight_type, c.activations) == (weight_type, path)]
    assert {c.M for c in cases} == {0, 1, 2, 5, 17, 33}
    assert {c.routing for c in cases} == {"even", "hot", "few", "repeat"}
    assert {"outliers", "strided", "transposed", "edge"} <= {f for c in cases for f in c.flags}
    assert {1, 2, 8} <= {c.top_k for c in cases}
    report = verify_op(SPEC, seed=3, cases=cases)
    assert report.passed, report.failures[0].reason


def test_as_many_experts_as_models_have() -> None:
    assert sum(c.experts == 512 for c in SPEC.cases) >= 3


@pytest.mark.parametrize("weight_type", TYPES)
def test_negative_controls_are_caught(weight_type: str) -> None:
    cases = [c for c in control_cases(SPEC) if c.weight_type == weight_type]
    assert {c.activations for c in cases} == {"float", "int8"}
    controls = negative_controls(SPEC, cases=cases)
    assert all(control.passed for control in controls)
    caught = {c.name for c in controls if c.visible and c.caught}
    assert {"wrong expert", "wrong scale", "zeroed outputs"} <= caught
    assert caught & {"flipped code bit", "flipped nibble"}


@pytest.mark.parametrize("weight_type", ["Q4_K", "IQ4_NL"])
def test_oracle_is_the_product_with_ggufs_own_dequantizer(weight_type: str) -> None:
    inputs = SPEC.make_inputs(case_of(weight_type), 0)
    kind = GGMLQuantizationType[weight_type]
    weights = [gguf.quants.dequantize(e.raw, kind) for e in inputs.source.experts]
    got, x = SPEC.reference(inputs), inputs.x64()
    assert got.shape == (7, 3, 24)
    for t in range(7):
        for j in range(3):
            weight = weights[inputs.source.ids[t, j]].astype(np.float64)
            np.testing.assert_allclose(got[t, j], weight @ x[t], atol=2e-5)


def test_a_stacked_tensor_is_sliced_without_a_copy() -> None:
    raw, values = stacked()
    experts = pack_expert_blocks(raw, "Q8_0")
    assert (experts.E, experts.N, experts.K, experts.group) == (4, 24, 64, 0)
    assert experts.nbytes == raw.nbytes
    assert experts.each[2].data.data_ptr() == raw[2].ctypes.data
    x = torch.randn(5, 64)
    ids = torch.tensor([[0, 3], [3, 0], [1, 2], [2, 2], [3, 1]])
    right = np.einsum("tk,tjnk->tjn", x.double().numpy(), values.astype(np.float64)[ids.numpy()])
    np.testing.assert_allclose(moe_gemm(x, experts, ids).numpy(), right, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_down_exps", "blk.1.ffn_down_exps", "blk.0.ffn_up_exps"]
)
def test_experts_as_llama_cpp_writes_them(name: str) -> None:
    """Q5_0, Q8_0 and Q4_K, stacked and quantized by llama.cpp's own tools."""
    file = read_gguf(Path(__file__).parents[2] / "data/gguf/qwen3moe-moe-q4km.gguf")
    tensor = file.tensors[f"{name}.weight"]
    kind = GGMLQuantizationType[tensor.type_name]
    exact = [gguf.quants.dequantize(np.asarray(one), kind).astype(np.float64) for one in tensor.raw]
    experts = pack_expert_blocks(np.asarray(tensor.raw), tensor.type_name)
    x, ids = torch.randn(9, experts.K), torch.arange(18).reshape(9, 2) % 3 % 2
    got = moe_gemm(x, experts, ids).double().numpy()
    right = np.stack(
        [[exact[e] @ row for e in some] for row, some in zip(x.numpy(), ids.tolist(), strict=True)]
    )
    assert np.linalg.norm(got - right) < 1e-6 * np.linalg.norm(right)


def test_route_sorts_stably_and_leaves_out_empty_experts() -> None:
    routing = route(torch.tensor([[5, 1], [1, 5], [5, 5]], dtype=torch.int32), 8)
    assert routing.slots.tolist() == [1, 2, 0, 3, 4, 5]
    assert routing.tokens.tolist() == [0, 1, 0, 1, 2, 2]
    assert routing.spans == ((1, 0, 2), (5, 2, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_tokens_and_no_choices(dtype: torch.dtype) -> None:
    experts = pack_expert_blocks(stacked()[0], "Q8_0")
    none = moe_gemm(torch.empty(0, 64, dtype=dtype), experts, torch.zeros(0, 2, dtype=torch.int64))
    assert (none.shape, none.dtype) == ((0, 2, 24), dtype)
    empty = moe_gemm(torch.zeros(3, 64, dtype=dtype), experts, torch.zeros(3, 0, dtype=torch.int64))
    assert (empty.shape, empty.dtype) == ((3, 0, 24), dtype)


@pytest.mark.parametrize("weight_type", ["Q5_K", "uint4"])
def test_two_runs_agree_bit_for_bit_and_a_repeated_choice_repeats(weight_type: str) -> None:
    inputs = SPEC.make_inputs(case_of(weight_type, 33, routing="hot"), 0)
    assert torch.equal(SPEC.run(inputs), SPEC.run(inputs))
    ids = torch.tensor([[2, 2, 4]] * 33)
    y = moe_gemm(inputs.x, inputs.weight.experts, ids)
    alone = moe_gemm(inputs.x, inputs.weight.experts, ids[:, :1])
    torch.testing.assert_close(y[:, 0], y[:, 1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y[:, 0], alone[:, 0], rtol=1e-5, atol=1e-5)
    assert float((y[:, 0] - y[:, 2]).abs().max()) > 0.1


def test_tiles_are_the_underlying_ops_by_the_rows_of_an_expert(monkeypatch: Any) -> None:
    asked = []

    def remember(problem: Any, space: Any, units: Any = None) -> Any:
        from tilewright.ops.choose import choose_tile

        asked.append((problem.op, problem.M, problem.N, problem.K, space.name))
        return choose_tile(problem, space, units=units)

    monkeypatch.setattr("tilewright.ops.moe.op.choose_tile", remember)
    experts = pack_expert_blocks(stacked()[0], "Q8_0")
    moe_gemm(torch.randn(6, 64), experts, torch.tensor([[1]] * 4 + [[0]] + [[3]]))
    assert asked == [("mmq", 1, 24, 64, "mmq/cpu"), ("mmq", 4, 24, 64, "mmq/cpu")]


@pytest.mark.parametrize(
    "tile", ["dot(threads=0, unroll=2)", "panel(block_parts=16, mr=4, nv=1, threads=0)"]
)
def test_a_given_tile_serves_every_expert(tile: str) -> None:
    given = {
        "dot": Tile.of("dot", unroll=2, threads=0),
        "panel": Tile.of("panel", mr=4, nv=1, block_parts=16, threads=0),
    }[tile.split("(")[0]]
    cases = [c for c in SPEC.cases if c.weight_type == "Q6_K" and c.M in (2, 17)]
    report = verify_op(SPEC, cases=cases, tiles=[given], threads=1)
    assert report.passed, report.failures[0].reason
    assert {row.tile for row in report.rows} == {tile}


def _experts() -> PackedExperts:
    return pack_expert_blocks(stacked()[0], "Q8_0")


X, IDS = torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x is list; pass a torch.Tensor"),
        ({"x": X.double()}, UnsupportedError, "x has dtype torch.float64; it must be float32"),
        ({"x": X.to("meta")}, UnsupportedError, "x is on meta, the experts are packed for the CPU"),
        ({"x": X[:, :32]}, ValueError, r"x has shape \[3, 32\]; it must be \[T, K=64\]"),
        ({"x": X[None]}, ValueError, r"x has shape \[1, 3, 64\]; it must be \[T, K=64\]"),
        ({"experts": torch.zeros(4, 2, 64)}, TypeError, "experts is Tensor; pass PackedExperts"),
        ({"ids": [[0, 1]] * 3}, TypeError, "ids is list; pass an integer tensor"),
        ({"ids": IDS.float()}, TypeError, "ids has dtype torch.float32; it must be int64 or int32"),
        ({"ids": IDS[:2]}, ValueError, r"ids has shape \[2, 2\]; it must be \[T=3, top_k\]"),
        ({"ids": IDS[:, 0]}, ValueError, r"ids has shape \[3\]; it must be"),
        ({"ids": IDS + 4}, ValueError, r"ids reach from 4 to 4; the experts are 0\.\.3"),
        ({"ids": IDS - 1}, ValueError, r"ids reach from -1 to -1; the experts are 0\.\.3"),
        ({"activations": "int4"}, ValueError, "activations='int4'; use one of"),
        ({"threads": 0}, ValueError, "threads=0; it must be at least 1"),
        ({"tile": Tile.of("dot", unroll=3, threads=0)}, TileError, "unroll=3 is none of"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_calls(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"x": X, "experts": _experts(), "ids": IDS, **change}
    with pytest.raises(error, match=message):
        moe_gemm(**arguments)


def test_experts_that_do_not_belong_together_are_refused() -> None:
    raw, _ = stacked()
    one, other = pack_blocks(raw[0], "Q8_0"), pack_blocks(raw[0, :8], "Q8_0")
    with pytest.raises(LayoutError, match="expert 1 is .'Q8_0', 8, 64, 0. .*expert 0 is"):
        PackedExperts((one, other))
    with pytest.raises(LayoutError, match="experts are empty"):
        PackedExperts(())
    with pytest.raises(LayoutError, match=r"raw has shape \[24, 68\]; pass uint8 \[E, N"):
        pack_expert_blocks(raw[0], "Q8_0")


def test_four_bit_experts_keep_their_own_column_orders() -> None:
    inputs = SPEC.make_inputs(case_of("uint4", flags=("act_order",)), 0)
    perms = [codes.perm.tolist() for codes in inputs.source.experts]
    assert len({tuple(perm) for perm in perms}) == 6
    packed = pack_expert_w4(inputs.source.experts)
    assert (packed.op, packed.type_name, packed.group, packed.N) == ("w4a16", "uint4", 32, 24)
    assert torch.equal(packed.each[3].codes, pack_w4(inputs.source.experts[3]).codes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_type": "Q9_0"}, "weight_type is 'Q9_0'; moe has"),
        ({"experts": 0, "top_k": 0}, "experts is 0; a case of moe has experts and top_k"),
        ({"top_k": 7}, "top_k is 7 of 6 experts with routing 'even'; at most 6"),
        ({"top_k": 3, "routing": "few"}, "top_k is 3 of 6 experts with routing 'few'; at most 2"),
    ],
)
def test_impossible_cases_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SPEC.make_inputs(case_of(**fields), 0)


def test_routings_are_what_they_say() -> None:
    def ids(**more: Any) -> Any:
        return SPEC.make_inputs(case_of(m=40, **more), 0).source.ids

    assert all(len(set(row)) == 3 for row in ids())
    assert set(ids().flat) == set(range(6))
    assert set(ids(routing="hot")[:, 0]) == {3}
    assert all(len(set(row)) == 3 for row in ids(routing="hot"))
    assert set(ids(routing="few", top_k=2).flat) == {1, 3}
    assert any(len(set(row)) < 3 for row in ids(routing="repeat"))


def test_a_slice_that_ends_late_reads_garbage() -> None:
    """Between the experts of a case lie 0xFF bytes, NaN as a scale."""
    inputs = SPEC.make_inputs(case_of("Q4_0"), 0)
    for expert in inputs.weight.experts.each:
        first, end = expert.data.data_ptr(), expert.data.data_ptr() + expert.data.numel()
        for guard in (first - 64, end):
            assert bytes((ctypes.c_uint8 * 64).from_address(guard)) == b"\xff" * 64
