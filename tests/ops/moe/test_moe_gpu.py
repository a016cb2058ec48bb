"""moe's Triton kernels in the interpreter, held to the float64 oracle of the codes."""

from __future__ import annotations

import ast
import itertools
import re
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import triton_interpreter  # noqa: F401
from quick import latin, one_in
from tilewright.device import INTERPRETER
from tilewright.errors import LayoutError, TileError, UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import BLOCK_FORMS
from tilewright.layout.experts import (
    GpuExperts,
    join_experts,
    pack_gpu_experts,
    pack_gpu_experts_w4,
)
from tilewright.ops import moe
from tilewright.ops.catalog import SPECS, load_spec, spec_for
from tilewright.ops.check import check_output
from tilewright.ops.choose import running
from tilewright.ops.contract import Case, spec_arch
from tilewright.ops.moe import gpu
from tilewright.ops.moe.gpu import gpu_moe_mlp
from tilewright.ops.moe.gpu_space import MOE_SPACE
from tilewright.ops.moe.mlp import moe_mlp
from tilewright.ops.moe.op import moe_gemm
from tilewright.ops.moe.reference import expert_rows
from tilewright.ops.moe.triton_combine import launch_activate
from tilewright.ops.moe.triton_gather import launch_gather, row_columns
from tilewright.ops.moe.triton_route import launch_route, tiles_of
from tilewright.ops.moe.triton_scatter import launch_scatter
from tilewright.tiles.tile import Tile

SPEC = spec_for("moe", INTERPRETER)
TYPES = SPEC.weight_types
SORTED = Tile.of("triton", block_m=16, block_n=32, block_k=64, num_warps=4, num_stages=2, group_m=8)
GEMV = Tile.of("gemv", block_n=32, block_k=64, num_warps=4, num_stages=1)
SLOTS = Tile.of("slots", block_n=16, num_warps=2)
BOTH = pytest.mark.parametrize("tile", [SORTED, GEMV], ids=["triton", "gemv"])
KINDS = {  # quick too: of groups, flags and numbers of experts that no other quick case has
    "MXFP4-E3-top2-M17-N33-K96-fp32-edge", "uint4b8-g128-E4-top2-M17-N33-K384-bf16",
    "uint4-gK-E4-top2-M5-N33-K200-fp32", "Q4_K-E5-top4-M1-N40-K512-fp16",
}  # fmt: skip
CASES = [
    case
    if (i % 13 == 0 and case.experts < 512) or case.id in KINDS
    else pytest.param(case, marks=pytest.mark.slow, id=case.id)
    for i, case in enumerate(SPEC.cases)
]


def held(case: Case, tile: Tile | None = None) -> None:
    """Run a case and hold it to the oracle."""
    inputs = SPEC.make_inputs(case, 0)
    y = SPEC.run(inputs, tile=tile)
    assert isinstance(y, torch.Tensor)
    ref = SPEC.reference(inputs)
    result = check_output(y, ref, SPEC.error_model(inputs, ref))
    assert result.passed, result


def test_every_kind_of_case_is_quick_somewhere():
    def kinds(cases: Any) -> set[tuple[str, Any]]:
        return {
            kind
            for c in cases
            for kind in (("group", c.group), ("dtype", c.act_dtype), ("experts", c.experts),
                         ("type", c.weight_type), *(("flag", flag) for flag in c.flags))
        }  # fmt: skip

    quick = [case for case in CASES if isinstance(case, Case)]
    assert kinds(SPEC.cases) - kinds(quick) <= {("experts", 512)}  # which take seconds


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases_of_the_spec(case):
    held(case)


_QUICK = ("Q4_0", "Q5_1", "uint4")


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        pytest.param(
            name, tile, id=f"{name}-{tile.algorithm}",
            marks=() if tile is SORTED or name in _QUICK else pytest.mark.slow,
        )
        for name in TYPES
        for tile in (SORTED, GEMV)
    ],
)  # fmt: skip
def test_every_type_by_both_kernels(name, tile):
    dtype = ("float16", "bfloat16", "float32")[(TYPES.index(name) + (tile is GEMV)) % 3]
    unit = 256 if name.endswith("_K") or name == "IQ4_XS" else 32
    group = 32 if name.startswith("uint4") else 0
    held(Case("moe", name, dtype, 5, 40, 5 * unit if unit == 32 else unit, group, experts=3,
              top_k=2, routing="repeat"), tile)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in ("Q4_K", "Q5_0", "Q6_K", "Q3_K", "IQ4_NL", "Q8_0")
            else pytest.mark.slow,
        )
        for name in TYPES if name in BLOCK_FORMS
    ],
)  # fmt: skip
def test_every_block_type_a_sub_block_a_column(name):
    """K in whole steps of all warps and not, one step and several, rows past the end."""
    unit = BLOCK_TYPES[name].block_size
    for i, (n, k) in enumerate(((17, 5 * unit if unit == 32 else unit), (16, 1024), (16, 768))):
        dtype = ("float16", "bfloat16")[i % 2]
        tile = SLOTS.replace(num_warps=(2, 4, 1)[i])
        held(Case("moe", name, dtype, 1, n, k, experts=3, top_k=2, routing="repeat"), tile)


@pytest.mark.parametrize("flag", ["outliers", "strided", "transposed", "edge"])
def test_a_sub_block_a_column_of_any_operands(flag):
    held(Case("moe", "Q5_K", "float16", 2, 17, 256, 0, "float", (flag,), 3, 2, "even"), SLOTS)


@pytest.mark.parametrize(("corruption", "name"), latin(2, list(SPEC.corruptions), ("Q4_0", "Q4_1")))
def test_a_corrupted_weight_of_few_slots_is_noticed(name, corruption):
    case = Case("moe", name, "float16", 5, 33, 96, experts=3, top_k=2)
    inputs = SPEC.make_inputs(case, 0)
    corrupted = SPEC.corruptions[corruption](inputs)
    if corrupted is not None:
        ref = SPEC.reference(inputs)
        y = SPEC.run(corrupted, tile=SLOTS)
        assert not check_output(y, ref, SPEC.error_model(inputs, ref)).passed


def test_codes_at_their_offset_are_weights_of_zero():
    """Sums of what cancels would leave something: codes lose their offset before they are met."""
    raw = torch.zeros(2, 16, 4, 18, dtype=torch.uint8)
    raw[..., :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    raw[..., 2:] = 0x88
    experts = pack_gpu_experts(raw.flatten(2), "Q4_0", arch="sm_90")
    x = 3e4 * torch.randn(2, 128).clamp(-2, 2)
    y = moe_gemm(x.half(), experts, torch.tensor([[0], [1]]), tile=SLOTS)
    assert not y.any()


@pytest.mark.parametrize("block_k", [32, 64, 128])
def test_groups_shorter_and_longer_than_a_step(block_k):
    for group in (32, 64, -1):
        held(Case("moe", "uint4", "float16", 5, 24, 192, group, experts=2, top_k=2),
             SORTED.replace(block_k=block_k))  # fmt: skip


@pytest.mark.parametrize(
    ("slots", "experts", "block_m"),
    [(1, 1, 16), (5, 4, 16), (100, 7, 16), (64, 130, 16), (1500, 9, 64), (33, 3, 32)],
)
def test_slots_are_sorted_and_every_one_is_in_one_tile(slots, experts, block_m):
    ids = torch.from_numpy(np.random.default_rng(0).integers(-1, experts + 1, slots))
    if experts == 3:
        ids[:] = 1
    known = torch.where((ids < 0) | (ids >= experts), experts, ids)
    order = torch.full((slots,), -9, dtype=torch.int32)
    bounds = torch.full((experts + 1, 2), -9, dtype=torch.int32)
    tiles = torch.full((tiles_of(slots, experts, block_m), 3), -9, dtype=torch.int32)
    launch_route(ids, experts, order, bounds, tiles, block_m)
    assert torch.equal(order.long(), torch.argsort(known, stable=True))
    used = [tuple(t) for t in tiles.tolist() if t[0] >= 0]
    assert all(1 <= last - first <= block_m for _, first, last in used)
    rows = [(row, expert) for expert, first, last in used for row in range(first, last)]
    assert rows == [(row, int(known[s])) for row, s in enumerate(order.tolist())]
    assert all(t[0] == -1 or tuple(t) in used for t in tiles.tolist())
    counts = torch.bincount(known, minlength=experts + 1)
    assert bounds[:, 1].tolist() == counts.cumsum(0).tolist()
    assert (bounds[:, 1] - bounds[:, 0]).tolist() == counts.tolist()

    x = torch.randn(-(-slots // 2), 200, dtype=torch.float16)
    out = torch.full((slots, row_columns(200)), torch.nan, dtype=torch.float16)
    plan = torch.full((1 + tiles.numel(),), -9, dtype=torch.int32)
    launch_gather(x.T.contiguous().T, order, bounds, out, plan, block_m, share=2)
    # wgmma's k 16 s + 8 kh + 2 lk + i of every 128 is column 32 lk + 4 s + 2 kh + i.
    whole = torch.nn.functional.pad(x[order.long() // 2], (0, 56))
    s, kh, lk, i = np.indices((8, 2, 4, 2)).reshape(4, -1)
    columns = torch.from_numpy(32 * lk + 4 * s + 2 * kh + i)
    assert torch.equal(out, whole[:, torch.cat([columns, 128 + columns])])
    assert plan[0] == len(used)
    assert plan[1:].view(-1, 3)[: len(used)].tolist() == [list(t) for t in used]

    rows, again = torch.full_like(out, torch.nan), torch.full_like(order, -9)
    other = torch.full_like(plan, -9)
    launch_scatter(x.T.contiguous().T, ids, experts, again, rows, other, block_m, share=2)
    assert torch.equal(again, order)
    assert torch.equal(rows, out)
    assert torch.equal(other, plan)


@pytest.mark.parametrize("tile", [SORTED, GEMV, SLOTS], ids=lambda tile: tile.algorithm)
def test_an_id_that_names_no_expert_makes_its_row_nan_and_no_other(tile):
    inputs = SPEC.make_inputs(Case("moe", "Q8_0", "float16", 5, 40, 64, experts=4, top_k=2), 0)
    ids = inputs.weight.ids.to(torch.int32)
    right = moe_gemm(inputs.x, inputs.weight.experts, ids, tile=tile)
    ids[0, 1], ids[3, 0] = -1, 4
    y = moe_gemm(inputs.x, inputs.weight.experts, ids, tile=tile)
    bad = torch.zeros(5, 2, dtype=torch.bool)
    bad[0, 1] = bad[3, 0] = True
    assert torch.isnan(y[bad]).all()
    assert torch.equal(y[~bad], right[~bad])


@BOTH
@pytest.mark.parametrize("corruption", SPEC.corruptions)
@pytest.mark.parametrize("name", ["Q4_1", "uint4"])
def test_a_corrupted_weight_is_noticed(name, corruption, tile):
    group = 32 if name == "uint4" else 0
    case = Case("moe", name, "float16", 9, 33, 64, group, experts=3, top_k=2)
    inputs = SPEC.make_inputs(case, 0)
    corrupted = SPEC.corruptions[corruption](inputs)
    if corrupted is None:
        assert corruption in SPECS["mmq" if name == "uint4" else "w4a16"].corruptions
        return
    ref = SPEC.reference(inputs)
    y = SPEC.run(corrupted, tile=tile)
    assert not check_output(y, ref, SPEC.error_model(inputs, ref)).passed


E, TOP_K, HIDDEN, INNER = 4, 2, 64, 96


def drawn(name: str, n: int, k: int, seed: int) -> tuple[GpuExperts, Any]:
    """Experts [E, n, k] packed for a GPU, and their exact weights in float64."""
    group = 32 if name.startswith("uint4") else 0
    case = Case("moe", name, "float32", 1, n, k, group, experts=E, top_k=1)
    inputs = SPEC.make_inputs(case, seed)
    exact = [np.concatenate([r.value() for r in expert_rows(e)]) for e in inputs.source.experts]
    return inputs.weight.experts, np.stack(exact)


def layer(name: str) -> tuple[list[GpuExperts], list[Any]]:
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    made = [drawn(name, n, k, seed) for seed, (n, k) in enumerate(shapes)]
    return [p for p, _ in made], [w for _, w in made]


def routed(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(tokens)
    x = torch.from_numpy(rng.normal(size=(tokens, HIDDEN))).to(dtype)
    weights = torch.from_numpy(rng.uniform(0.1, 1, (tokens, TOP_K))).to(dtype)
    return x, weights, torch.from_numpy(rng.integers(0, E, (tokens, TOP_K)))


def right(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, exact: Any, act: Any) -> Any:
    gate, up, down = (torch.from_numpy(w) for w in exact)
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for t, j in itertools.product(range(len(x)), range(TOP_K)):
        e, row = int(ids[t, j]), x[t].double()
        out[t] += weights[t, j].double() * (down[e] @ (act(gate[e] @ row) * (up[e] @ row)))
    return out


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


_MOST = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize(
    ("name", "tokens", "dtype"),
    [
        pytest.param(
            name, tokens, dtype, id=f"{name}-T{tokens}-{dtype}",
            marks=() if (i + j + k) % 3 == 0 and tokens > 1 or name == "uint4" and k == 1
            else pytest.mark.slow,
        )
        for i, name in enumerate(("Q4_0", "Q5_1", "uint4"))
        for j, tokens in enumerate((1, 19))
        for k, dtype in enumerate(_MOST)
    ],
)  # fmt: skip
def test_the_layer_equals_float64(name, tokens, dtype):
    """In one launch of gate and up, and in two; the first rows of a token's ids repeat."""
    (gate, up, down), exact = layer(name)
    x, weights, ids = routed(tokens, dtype)
    ids[0, 1] = ids[0, 0]
    expected = right(x, weights, ids, exact, torch.nn.functional.silu)
    both = join_experts(gate, up)
    assert both is not None
    for parts in (both, (gate, up)):
        got = moe_mlp(x, weights, ids, parts, down)
        assert got.dtype == dtype
        assert off(got, expected) < _MOST[dtype]
    assert torch.equal(got, moe_mlp(x, weights, ids, (gate, up), down))


@pytest.mark.parametrize(("apart", "name"), latin(2, (False, True), ("gelu", "gelu_pytorch_tanh")))
def test_other_activations(name, apart):
    (gate, up, down), exact = layer("Q8_0")
    x, weights, ids = routed(3, torch.float32)
    tanh = "tanh" if name.endswith("tanh") else "none"
    expected = right(
        x, weights, ids, exact, lambda g: torch.nn.functional.gelu(g, approximate=tanh)
    )
    both = join_experts(gate, up)
    assert both is not None
    got = moe_mlp(x, weights, ids, (gate, up) if apart else both, down, activation=name)
    assert off(got, expected) < 2e-6


@pytest.mark.parametrize("block_n", one_in(2, (1, 2)))
def test_gate_and_up_by_the_narrowest_tiles(block_n):
    """A tile of one row, as a table may hold it for the plain product, serves the layer too."""
    (gate, up, down), exact = layer("Q8_0")
    x, weights, ids = routed(2, torch.float32)
    tile = Tile.of("gemv", block_n=block_n, block_k=256, num_warps=2, num_stages=1)
    both = join_experts(gate, up)
    assert both is not None
    got = gpu_moe_mlp(x, weights, ids, (both,), down, activation="silu", tiles=(tile, tile))
    assert off(got, right(x, weights, ids, exact, torch.nn.functional.silu)) < 2e-6


@pytest.mark.parametrize("name", ["Q4_1", pytest.param("Q8_0", marks=pytest.mark.slow)])
def test_gate_and_up_a_sub_block_a_column(name):
    (gate, up, down), exact = layer(name)
    x, weights, ids = routed(1, torch.float16)
    both = join_experts(gate, up)
    assert both is not None
    tile = SLOTS.replace(block_n=32)
    got = gpu_moe_mlp(x, weights, ids, (both,), down, activation="silu", tiles=(tile, tile))
    assert off(got, right(x, weights, ids, exact, torch.nn.functional.silu)) < 1e-3


def test_experts_that_are_not_packed_and_strided_operands():
    (gate, up, down), exact = layer("Q8_0")
    x, weights, ids = routed(9, torch.float16)
    expected = right(x, weights, ids, exact, torch.nn.functional.silu)
    dense = [torch.from_numpy(w).to(torch.bfloat16) for w in exact]
    rounded = [d.double().numpy() for d in dense]
    assert off(moe_mlp(x, weights, ids, (gate, up), dense[2]), expected) < 4e-3
    with_dense = right(x, weights, ids, [*rounded[:2], exact[2]], torch.nn.functional.silu)
    assert off(moe_mlp(x, weights, ids, tuple(dense[:2]), down), with_dense) < 1e-3
    assert off(moe_mlp(x, weights, ids, torch.cat(dense[:2], 1), down), with_dense) < 1e-3
    wide = torch.full((9, 2 * HIDDEN), float("nan"), dtype=torch.float16)
    wide[:, ::2] = x
    once = moe_mlp(x, weights, ids, (gate, up), down)
    again = moe_mlp(wide[:, ::2], weights.T.contiguous().T, ids.T.contiguous().T, (gate, up), down)
    assert torch.equal(once, again)


def test_a_dropped_router_weight_is_noticed():
    """The fault is planted in the kernel that adds the choices up."""
    (gate, up, down), exact = layer("Q4_0")
    x, weights, ids = routed(9, torch.float16)
    expected = right(x, weights, ids, exact, torch.nn.functional.silu)
    arguments = (x, weights, ids, (join_experts(gate, up),), down)
    assert off(gpu_moe_mlp(*arguments, activation="silu"), expected) < 1e-3  # type: ignore[arg-type]
    wrong = gpu_moe_mlp(*arguments, activation="silu", fault="no-router-weight")  # type: ignore[arg-type]
    assert off(wrong, expected) > 0.1


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_gate_and_up_may_meet_in_memory(act):
    y = torch.randn(5, 2 * 300)
    h = torch.empty(5, 300, dtype=torch.float16)
    launch_activate(y, h, act)
    gate, up = y.double().split(300, 1)
    tanh = "tanh" if act == "gelu_tanh" else "none"
    one = torch.nn.functional.gelu(gate, approximate=tanh)
    one = torch.nn.functional.silu(gate) if act == "silu" else one
    assert off(h, one * up) < 3e-4


def test_launches_go_to_the_device_of_the_operands(monkeypatch):
    """Triton's go to torch's current one, wherever their operands lie."""
    seen: list[Any] = []

    @contextmanager
    def on(device):
        seen.append(device)
        with monkeypatch.context() as patched:
            patched.setattr(gpu, "launch_products", lambda *given, **more: seen.append("launch"))
            yield

    def outside(*given: Any, **more: Any) -> None:
        raise AssertionError("launched before the device was current")

    monkeypatch.setattr(gpu, "launching_on", on)
    monkeypatch.setattr(gpu, "launch_products", outside)
    (gate, up, down), _ = layer("Q8_0")
    x, weights, ids = routed(2, torch.float32)
    moe_gemm(x, gate, ids)
    moe_mlp(x, weights, ids, (gate, up), down)
    assert seen == [x.device, "launch", x.device, "launch", "launch", "launch"]


def test_no_slots_are_no_launch():
    (gate, up, down), _ = layer("Q8_0")
    none = torch.empty(0, TOP_K, dtype=torch.int64)
    x = torch.empty(0, HIDDEN, dtype=torch.bfloat16)
    assert moe_gemm(x, gate, none).shape == (0, TOP_K, INNER)
    assert moe_mlp(x, torch.empty(0, TOP_K), none, (gate, up), down).shape == (0, HIDDEN)
    nobody = torch.empty(3, 0, dtype=torch.int64)
    out = moe_mlp(torch.ones(3, HIDDEN), torch.empty(3, 0), nobody, (gate, up), down)
    assert torch.equal(out, torch.zeros(3, HIDDEN))


def test_the_spec_is_the_gpus():
    assert spec_arch(SPEC) == INTERPRETER
    assert {case.weight_type for case in SPEC.cases} == set(SPECS["moe"].weight_types)
    assert {case.routing for case in SPEC.cases} == {"even", "hot", "few", "repeat"}
    assert max(case.experts for case in SPEC.cases) == 512
    assert spec_for("moe", "gfx942").space() is MOE_SPACE
    assert load_spec("moe@interpreter").space() is MOE_SPACE
    assert running("moe", "gfx942").kernel_hash == running("moe", "sm_90").kernel_hash
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="torch sees no GPU"):
            SPECS["moe"].on("cuda")


def test_every_kernel_file_is_a_source_of_the_spec():
    """What they import of ops and layouts too, but for what only compiles."""
    sources = set(SPEC.sources)
    kernels = {name for name in sources if ".ops." in name and not name.endswith("moe.gpu")}
    own = Path(moe.__path__[0]).glob("triton_*.py")
    assert {f"tilewright.ops.moe.{path.stem}" for path in own} <= kernels
    for name in kernels:
        spec = find_spec(name)
        assert spec is not None
        for node in ast.walk(ast.parse(Path(str(spec.origin)).read_text("utf-8"))):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if module.startswith(("tilewright.ops", "tilewright.layout")):
                assert module in {*sources, "tilewright.ops.cross"}, name


RAW = np.zeros((3, 40, 144), np.uint8)
EXPERTS = pack_gpu_experts(RAW, "Q4_K", arch=INTERPRETER)
X, IDS = torch.zeros(2, 256), torch.zeros(2, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "moe: x is list; pass a torch.Tensor [T, K]"),
        ({"x": X.double()}, UnsupportedError, "moe: x has dtype torch.float64; it must be"),
        ({"x": X[:, :255]}, ValueError, "x has shape [2, 255]; it must be [T, K=256]"),
        ({"x": X.to("meta")}, ValueError, "moe: x is on meta, the experts on cpu"),
        ({"ids": [[0, 1]]}, TypeError, "moe: ids is list; pass an integer tensor [T, top_k]"),
        ({"ids": IDS.float()}, TypeError, "ids has dtype torch.float32; it must be int64"),
        ({"ids": IDS.to("meta")}, ValueError, "moe: x is on cpu, ids on meta"),
        ({"ids": IDS[:1]}, ValueError, "ids has shape [1, 2]; it must be [T=2, top_k]"),
        ({"activations": "int8"}, UnsupportedError, "on a GPU activations stay as they are"),
        ({"tile": SORTED.replace(block_k=48)}, TileError, "block_k=48 is none of"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_it_refuses(change: dict[str, Any], error: type[Exception], message: str):
    arguments: dict[str, Any] = {"x": X, "experts": EXPERTS, "ids": IDS, **change}
    with pytest.raises(error, match=re.escape(message)):
        moe_gemm(**arguments)


def test_experts_of_two_devices_are_refused():
    (gate, up, down), _ = layer("Q8_0")
    x, weights, ids = routed(2, torch.float32)
    cpu = SPECS["moe"].make_inputs(Case("moe", "Q8_0", "float32", 1, HIDDEN, INNER, experts=E,
                                        top_k=1), 0).weight.experts  # fmt: skip
    with pytest.raises(ValueError, match="some experts are packed for the CPU"):
        moe_mlp(x, weights, ids, (gate, up), cpu)
    with pytest.raises(ValueError, match="down on meta; move one"):
        moe_mlp(x, weights, ids, (gate, up), down.to("meta"))


def test_packing_refuses_what_is_no_stack():
    with pytest.raises(LayoutError, match=r"pass uint8 \[E, N, row_bytes\]"):
        pack_gpu_experts(RAW[0], "Q4_K", arch=INTERPRETER)
    with pytest.raises(LayoutError, match="experts are empty"):
        pack_gpu_experts(RAW[:0], "Q4_K", arch=INTERPRETER)
    with pytest.raises(LayoutError, match="whose experts stay as they lie"):
        pack_gpu_experts(RAW, "Q4_K")
    inputs = [
        SPECS["w4a16"].make_inputs(Case("w4a16", "uint4", "float16", 1, n, 64, 32), 0)
        for n in (24, 32)
    ]
    with pytest.raises(LayoutError, match="expert 1 is .* the experts of one tensor must agree"):
        pack_gpu_experts_w4([i.source for i in inputs])


@pytest.mark.parametrize("name", TYPES)
def test_experts_are_those_of_one_matrix_and_take_the_files_bytes(name):
    experts, _ = drawn(name, 64, 256, 0)
    assert (experts.E, experts.N, experts.K, experts.type_name) == (E, 64, 256, name)
    held_bytes = sum(t.element_size() * t.stride(0) * E for t in tensors(experts))
    assert held_bytes == experts.nbytes
    for t in tensors(experts):
        assert t.stride(0) % 16 == 0
        assert t.data_ptr() % 16 == 0
    one = experts.one(2)
    assert (one.N, one.K) == (64, 256)
    assert torch.equal(tensors(experts)[0][2], tensors(one)[0])


def tensors(weight: Any) -> list[torch.Tensor]:
    planes = weight.planes if isinstance(weight, GpuExperts) else weight
    return [t for t in vars(planes).values() if isinstance(t, torch.Tensor)]


def test_experts_that_do_not_fit_are_not_joined():
    gate, _ = drawn("Q8_0", INNER, HIDDEN, 0)
    assert join_experts(gate, drawn("Q4_0", INNER, HIDDEN, 0)[0]) is None
    assert join_experts(gate, drawn("Q8_0", INNER, INNER, 0)[0]) is None
    odd = drawn("uint4", 36, HIDDEN, 0)[0]  # the zero points of eight rows share a word
    assert join_experts(odd, odd) is None
    even = drawn("uint4b8", 36, HIDDEN, 0)[0]
    assert join_experts(even, even) is not None
