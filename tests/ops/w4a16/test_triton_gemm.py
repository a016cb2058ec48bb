"""The Triton GEMM in the interpreter, held to the oracle of the codes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quick import latin, one_in
from tilewright.errors import TileError, UnsupportedError
from tilewright.formats.w4 import W4Codes
from tilewright.layout.cpu import pack_w4
from tilewright.layout.triton import WordsW4, pack_w4_words
from tilewright.ops.check import check_output
from tilewright.ops.contract import Case
from tilewright.tiles.tile import Tile
from tilewright.tune.verify import negative_controls, verify_op

pytest.importorskip(
    "triton_interpreter", reason="triton is not installed: pip install 'tilewright[triton]'"
)

from tilewright.ops.w4a16 import triton_gemm, triton_skinny
from tilewright.ops.w4a16.triton_op import OP, w4a16_triton
from tilewright.ops.w4a16.triton_space import TRITON_SPACE
from tilewright.ops.w4a16.triton_spec import SPEC, on_device

TILES = {
    "16x32x32": {"block_m": 16, "block_n": 32, "block_k": 32},
    "64x16x64": {"block_m": 64, "block_n": 16, "block_k": 64},
    "32x128x128": {"block_m": 32, "block_n": 128, "block_k": 128},
}


def tile(blocks: str = "16x32x32", dequant: str = "packed") -> Tile:
    return Tile.of(
        "triton", **TILES[blocks], num_warps=4, num_stages=2, group_m=8, dequant=dequant, order="xw"
    )


def skinny(block_m: int = 4, split_k: int = 4) -> Tile:
    return Tile.of(
        "skinny",
        block_m=block_m,
        block_n=16,
        block_k=32,
        split_k=split_k,
        num_warps=4,
        num_stages=2,
    )


def case_of(
    m=17, n=33, k=192, group=64, dtype="float16", weight_type="uint4", flags: tuple[str, ...] = ()
) -> Case:
    return Case(OP, weight_type, dtype, m, n, k, group, "float", flags)


def held(case: Case, some: Tile | None, weight: WordsW4 | None = None, words: str = "k8"):
    inputs = SPEC.make_inputs(case, 0)
    if words != "k8":
        weight = pack_w4_words(inputs.source, order=words)
    if weight is not None:
        inputs = replace(inputs, weight=weight)
    ref = SPEC.reference(inputs)
    y = SPEC.run(inputs, tile=some)
    return check_output(y, ref, SPEC.error_model(inputs, ref))


def test_the_kernel_was_imported_for_the_interpreter():
    assert triton_gemm.INTERPRETED


@pytest.mark.parametrize(
    "case", one_in(2, SPEC.cases, key=lambda case: case.weight_type), ids=lambda case: case.id
)
def test_its_own_cases(case):
    (row,) = verify_op(SPEC, cases=[case]).rows
    assert row.passed, row.reason


@pytest.mark.parametrize(
    ("blocks", "dequant", "group", "dtype", "weight_type"),
    latin(
        2, tuple(TILES), ("scalar", "packed"), (32, 64, 128, -1), ("float16", "bfloat16"),
        ("uint4", "uint4b8"),
    ),
)  # fmt: skip
def test_every_group_dtype_and_form(blocks, dequant, group, dtype, weight_type):
    block_k = TILES[blocks]["block_k"]
    case = case_of(17, 33, 256, group, dtype, weight_type)
    if group != -1 and block_k > group:
        with pytest.raises(TileError, match="breaks rule 'one scale a step'"):
            held(case, tile(blocks, dequant))
        return
    result = held(case, tile(blocks, dequant))
    assert result.passed, result.reason


@pytest.mark.parametrize("m", [1, 15, 16, 17, 31, 33])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (31, 64), (32, 96), (33, 160), (65, 40)])
def test_ragged_edges(m, n, k):
    group = 32 if k % 32 == 0 else -1
    result = held(case_of(m, n, k, group), tile())
    assert result.passed, result.reason


@pytest.mark.parametrize("k", [8, 20, 31, 33, 132, 257])
def test_k_that_ends_within_a_word_or_a_step(k):
    result = held(case_of(k=k, group=-1), tile("64x16x64"))
    assert result.passed, result.reason


@pytest.mark.parametrize("n", [7, 8, 9, 33])
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "packed"])
def test_zero_points_in_bytes_and_packed(packed, n):
    case = case_of(n=n)
    weight = pack_w4_words(SPEC.make_inputs(case, 0).source, pack_zeros=packed)
    assert weight.zeros is not None
    assert weight.zeros.dtype == (torch.int32 if packed else torch.uint8)
    result = held(case, tile(), weight)
    assert result.passed, result.reason


@pytest.mark.parametrize("name", ["words", "scales", "zeros"])
@pytest.mark.parametrize("how", ["padded rows", "transposed"])
def test_operands_with_strides_of_their_own(name, how):
    case = case_of()
    weight = SPEC.make_inputs(case, 0).weight
    stored = getattr(weight, name)
    if how == "transposed":
        moved = stored.T.contiguous().T
    else:
        wide = torch.full((stored.shape[0], stored.shape[1] + 5), 7, dtype=stored.dtype)
        wide[:, : stored.shape[1]] = stored
        moved = wide[:, : stored.shape[1]]
    assert torch.equal(moved, stored)
    result = held(case, tile(), replace(weight, **{name: moved}))
    assert result.passed, result.reason


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scales_of_another_dtype_than_x(dtype, scale_dtype):
    """Scales are multiplied as they are stored: a bfloat16 scale is not cast to float16 first."""
    case = case_of(dtype=dtype)
    inputs = SPEC.make_inputs(case, 0)
    stored = torch.from_numpy(inputs.source.scales * 1.001).to(scale_dtype)
    codes = replace(inputs.source, scales=stored.float().numpy(), scale_dtype=scale_dtype)
    inputs = replace(inputs, source=codes, weight=pack_w4_words(codes))
    assert inputs.weight.scales.dtype == scale_dtype
    ref = SPEC.reference(inputs)
    some = tile(dequant="scalar" if dtype == "float32" else "packed")
    result = check_output(SPEC.run(inputs, tile=some), ref, SPEC.error_model(inputs, ref))
    assert result.passed, result.reason


def test_wide_offsets_give_the_same(monkeypatch):
    case = case_of(flags=("bias", "strided"))
    inputs = SPEC.make_inputs(case, 0)
    narrow = SPEC.run(inputs, tile=tile())
    asked = []
    monkeypatch.setattr(triton_gemm, "spans_wide", lambda tensor: asked.append(tensor) or True)
    assert torch.equal(SPEC.run(inputs, tile=tile()), narrow)
    assert asked


@pytest.mark.parametrize(
    ("shape", "stride", "wide"),
    [
        ((4096, 4096), (4096, 1), False),
        ((2**16, 2**15), (2**15, 1), True),
        ((3, 64), (2**30, 1), True),
        ((3, 64), (1, 2**27), True),
        ((2**20 - 600, 1500), (2000, 1), False),
        ((2**20, 2047), (2047, 1), True),
    ],
)
def test_what_needs_64_bits(shape, stride, wide):
    tensor = torch.empty(1, device="meta").as_strided(shape, stride)
    assert triton_gemm.spans_wide(tensor) is wide


@pytest.mark.parametrize("words", ["k8", "k32"])
@pytest.mark.parametrize("dequant", ["scalar", "packed", "asm"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_as_the_left_operand(dtype, dequant, words):
    some = tile(dequant=dequant).replace(order="wx")
    result = held(case_of(17, 33, 160, 32, dtype, flags=("bias", "strided")), some, words=words)
    assert result.passed, result.reason


def test_words_of_32_columns_and_any_k():
    for k in (20, 33, 132):
        result = held(case_of(k=k, group=-1), tile(dequant="asm"), words="k32")
        assert result.passed, result.reason


@pytest.mark.parametrize("words", ["k8", "k32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_form_and_order_gives_the_same_bits(dtype, words):
    """(q - z) is exact and the product with the scale rounds once, whoever multiplies."""
    inputs = SPEC.make_inputs(case_of(17, 33, 128, 64, dtype), 0)
    weight = pack_w4_words(inputs.source, order=words)
    packed = SPEC.run(replace(inputs, weight=weight), tile=tile())
    for dequant in ("scalar", "asm"):
        y = SPEC.run(replace(inputs, weight=weight), tile=tile(dequant=dequant))
        assert torch.equal(y, packed), dequant


@pytest.mark.parametrize(
    ("dtype", "words", "block_m", "split_k"),
    latin(2, ("float32", "float16", "bfloat16"), ("k8", "k32"), (4, 16), (1, 4)),
)
def test_skinny_tiles(dtype, words, block_m, split_k):
    for m, k, group in ((3, 160, 32), (1, 132, -1)):
        case = case_of(m, 33, k, group, dtype, flags=("bias", "strided"))
        result = held(case, skinny(block_m, split_k), words=words)
        assert result.passed, result.reason


@pytest.mark.parametrize("weight_type", ["uint4", "uint4b8"])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_skinny_tiles_with_every_group(group, weight_type):
    result = held(case_of(2, 33, 256, group, weight_type=weight_type), skinny(2, 2))
    assert result.passed, result.reason


@pytest.mark.parametrize("flag", ["transposed", "act_order", "outliers"])
def test_skinny_tiles_with_x_as_it_comes(flag):
    result = held(case_of(3, 33, 256, 32, flags=(flag,)), skinny())
    assert result.passed, result.reason


def test_a_skinny_tile_of_more_shares_than_steps():
    result = held(case_of(3, 33, 64, 32), skinny(4, 16))
    assert result.passed, result.reason


@pytest.mark.parametrize("block_m", [4, 16])
def test_wide_offsets_of_skinny_tiles_give_the_same(monkeypatch, block_m):
    inputs = SPEC.make_inputs(case_of(3, k=160, group=32, flags=("bias", "strided")), 0)
    narrow = SPEC.run(inputs, tile=skinny(block_m))
    for module in (triton_gemm, triton_skinny):
        monkeypatch.setattr(module, "spans_wide", lambda tensor: True)
    assert torch.equal(SPEC.run(inputs, tile=skinny(block_m)), narrow)


@pytest.mark.parametrize("m", [15, 17, 40])
def test_skinny_tiles_of_matrix_units_take_any_m(m):
    result = held(case_of(m, 33, 128, 32), skinny(16, 2))
    assert result.passed, result.reason


def test_more_rows_than_a_skinny_tile_holds_are_refused():
    with pytest.raises(TileError, match="breaks rule 'few rows'"):
        held(case_of(5), skinny(4))


@pytest.mark.parametrize(("split_k", "floats"), [(1, 0), (4, 4 * 3 * 100), (16, 16 * 3 * 100)])
def test_what_workspace_a_skinny_tile_needs(split_k, floats):
    assert triton_skinny.workspace_skinny(skinny(4, split_k), 3, 100, 4096, 132) == (floats, 0)


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        ({}, True),
        ({"stride": (33, 1)}, False),
        ({"stride": (1, 8)}, False),
        ({"offset": 1}, False),
        ({"shape": (3, 31)}, False),
        ({"dtype": torch.float32}, False),
    ],
)
def test_when_two_columns_of_x_are_one_number(changes, pairs):
    whole = torch.zeros(400, dtype=changes.get("dtype", torch.float16))
    x = whole.as_strided(
        changes.get("shape", (3, 32)), changes.get("stride", (32, 1)), changes.get("offset", 0)
    )
    assert triton_skinny._in_pairs(x) is pairs


@pytest.mark.parametrize(
    ("arch", "dtype", "asm"),
    [
        ("gfx1151", torch.float16, "amd"),
        ("gfx90a", torch.float16, "cdna"),
        ("gfx90a", torch.bfloat16, "none"),
        ("sm_80", torch.float16, "nv"),
        ("sm_80", torch.bfloat16, "none"),
        ("sm_90", torch.bfloat16, "nv"),
        ("sm_75", torch.float16, "none"),
        ("sm_90", torch.float32, "none"),
        ("interpreter", torch.float16, "none"),
    ],
)
def test_whose_instructions(arch, dtype, asm):
    assert triton_gemm.asm_of(arch, dtype) == asm


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        ({}, "two"),
        ({"order": "k8"}, "one"),
        ({"n": 33}, "one"),
        ({"dequant": "packed"}, "one"),
        ({"dtype": torch.bfloat16}, "one"),
    ],
)
def test_when_a_load_takes_the_scales_of_two_rows(changes, scales):
    inputs = SPEC.make_inputs(case_of(n=changes.get("n", 34)), 0)
    weight = pack_w4_words(inputs.source, order=changes.get("order", "k32"))
    found = triton_gemm.weight_arguments(
        weight, changes.get("dtype", torch.float16), changes.get("dequant", "asm"), "sm_90"
    )
    assert found["SCALES"] == scales


def test_negative_controls_are_seen():
    controls = negative_controls(SPEC)
    assert all(control.passed for control in controls)
    assert {c.name for c in controls if c.visible} == {
        "flipped nibble", "wrong scale", "swapped zero point", "zeroed outputs",
    }  # fmt: skip


def test_two_runs_agree_bit_for_bit():
    inputs = SPEC.make_inputs(case_of(), 0)
    assert torch.equal(SPEC.run(inputs), SPEC.run(inputs))


def test_no_rows_launch_nothing(monkeypatch):
    monkeypatch.setattr(triton_gemm, "launch_w4a16", None)
    inputs = SPEC.make_inputs(case_of(m=0), 0)
    y = w4a16_triton(inputs.x, inputs.weight)
    assert y.shape == (0, 33)
    assert y.dtype == torch.float16


def test_the_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton_gemm, "INTERPRETED", False)
    inputs = SPEC.make_inputs(case_of(), 0)
    with pytest.raises(UnsupportedError, match="x is on the CPU.*set TRITON_INTERPRET=1"):
        w4a16_triton(inputs.x, inputs.weight)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x is list; pass a torch.Tensor"),
        (
            {"x": torch.zeros(2, 192, dtype=torch.int32)},
            UnsupportedError,
            "x has dtype torch.int32",
        ),
        ({"x": torch.zeros(2, 191)}, ValueError, "its last dimension must be K=192"),
        ({"x": torch.tensor(1.0)}, ValueError, "its last dimension must be K=192"),
        ({"x": torch.zeros(2, 192, device="meta")}, ValueError, "x is on meta, the weight on cpu"),
        ({"weight": torch.zeros(3)}, TypeError, "pack it with tilewright.layout.triton"),
        ({"bias": torch.zeros(32)}, ValueError, r"it must be floating point \[N=33\]"),
        ({"bias": torch.zeros(33, dtype=torch.int8)}, ValueError, "it must be floating point"),
        ({"bias": torch.zeros(33, device="meta")}, ValueError, "x is on cpu, the bias on meta"),
        ({"tile": Tile.of("dot", unroll=8)}, TileError, "algorithm 'dot' is not in w4a16/triton"),
        ({"tile": Tile.of("triton", block_m=16)}, TileError, "triton has the fields"),
        ({"tile": tile().replace(block_n=48)}, TileError, "block_n=48 is none of"),
        ({"tile": tile("32x128x128")}, TileError, "breaks rule 'one scale a step'"),
    ],
)
def test_bad_calls(changes, error, message):
    inputs = SPEC.make_inputs(case_of(), 0)
    arguments = {"x": inputs.x, "weight": inputs.weight, "bias": None, "tile": None, **changes}
    with pytest.raises(error, match=message):
        w4a16_triton(arguments["x"], arguments["weight"], arguments["bias"], tile=arguments["tile"])


def test_a_weight_of_another_layout_is_refused():
    inputs = SPEC.make_inputs(case_of(), 0)
    with pytest.raises(TypeError, match="weight is PackedW4"):
        w4a16_triton(inputs.x, pack_w4(inputs.source))


def test_a_view_keeps_its_strides_and_its_surroundings_on_another_device():
    x = torch.arange(100.0).as_strided((3, 4), (20, 2), 5)
    moved = on_device(x, "cpu")
    assert torch.equal(moved, x)
    assert moved.stride() == x.stride()
    assert moved.storage_offset() == 5
    assert moved.untyped_storage().nbytes() == 400


@pytest.mark.parametrize("row", ["sym", "asym"])
def test_a_product_by_hand(row):
    """Two groups of 8 codes: y = 2 (1 - 8) + 0.5 (15 - 8) on the first and last column."""
    codes = np.full((1, 16), 8, np.uint8)
    codes[0, 0], codes[0, 15] = 1, 15
    zeros = None if row == "sym" else np.array([[8, 3]], np.uint8)
    weight = W4Codes(codes, np.array([[2.0, 0.5]], np.float32), zeros, 8, None, torch.float16)
    x = torch.zeros(1, 16, dtype=torch.float16)
    x[0, 0], x[0, 15] = 1, 1
    some = Tile.of(
        "triton",
        block_m=16,
        block_n=16,
        block_k=8,
        num_warps=1,
        num_stages=1,
        group_m=8,
        dequant="packed",
        order="xw",
    )
    y = torch.empty(1, 1, dtype=torch.float16)
    # A step of 8 is too short for a GPU's dot, and right all the same.
    triton_gemm.launch_w4a16(x, pack_w4_words(weight), None, y, some)
    assert y.item() == 2 * (1 - 8) + 0.5 * (15 - (8 if row == "sym" else 3))


def test_the_space_takes_every_case_of_the_spec():
    for case in SPEC.cases:
        problem = case.problem("interpreter")
        TRITON_SPACE.check(TRITON_SPACE.default(problem), problem)
