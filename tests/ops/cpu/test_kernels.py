"""Every CPU algorithm for every weight type, against float64 products of independent values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ops.cpu.weights import GGUF_TYPES, blocks, error, four_bit
from tilewright.ops.cpu.launch import cpu_weight, dequantize_rows
from tilewright.ops.mmq.op import mmq_gemm
from tilewright.ops.w4a16.op import w4a16_gemm
from tilewright.tiles.tile import Tile

FLOAT_TILES = {
    "dot": Tile.of("dot", unroll=4, threads=0),
    "panel": Tile.of("panel", mr=4, nv=2, block_parts=8, threads=0),
    "blas": Tile.of("blas", panel_rows=64, threads=0),
}
INT8 = Tile.of("int8", mr=3, nv=2, block_parts=16, threads=0)


def draw(m: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((m, k), dtype=np.float32))


@pytest.mark.parametrize("m", [1, 3, 17])
@pytest.mark.parametrize("algorithm", list(FLOAT_TILES))
@pytest.mark.parametrize("name", GGUF_TYPES)
def test_weight_only_algorithms_match_float64(name: str, algorithm: str, m: int) -> None:
    packed, values = blocks(name, 97, 512)
    x, bias = draw(m, 512), draw(1, 97)[0]
    right = x.double().numpy() @ values.T + bias.double().numpy()
    y = mmq_gemm(x, packed, bias, tile=FLOAT_TILES[algorithm])
    assert error(y, right) < 1e-6


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_int8_is_exact_for_activations_that_eight_bits_hold(name: str) -> None:
    """Integers up to 127 with one 127 in every part quantize to themselves."""
    packed, values = blocks(name, 97, 512)
    rng = np.random.default_rng(2)
    whole = rng.integers(-127, 128, (19, 512)).astype(np.float32)
    whole[:, ::32] = 127
    y = mmq_gemm(torch.from_numpy(whole), packed, activations="int8", tile=INT8)
    assert error(y, whole.astype(np.float64) @ values.T) < 1e-6


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_int8_follows_the_rounding_rule(name: str) -> None:
    packed, values = blocks(name, 48, 512)
    x = draw(9, 512)
    parts = x.numpy().reshape(9, -1, 32)
    d = np.abs(parts).max(-1, keepdims=True) / np.float32(127)
    rounded = np.sign(parts) * np.floor(np.abs(parts / d.astype(np.float64)) + 0.5)
    right = (rounded * d).reshape(9, 512).astype(np.float64) @ values.T
    y = mmq_gemm(x, packed, activations="int8", tile=INT8)
    # One code that rounds the other way at a tie moves a result by d; there are few.
    assert error(y, right) < 1e-4


@pytest.mark.parametrize("zeros", [False, True], ids=["sym", "asym"])
@pytest.mark.parametrize(
    ("k", "group"), [(512, 32), (512, 64), (512, 128), (512, 256), (512, -1), (96, -1), (200, -1)]
)
@pytest.mark.parametrize("algorithm", list(FLOAT_TILES))
def test_w4a16_matches_float64(algorithm: str, k: int, group: int, zeros: bool) -> None:
    packed, values = four_bit(65, k, group, zeros=zeros)
    for m in (1, 6):
        x = draw(m, k)
        y = w4a16_gemm(x, packed, tile=FLOAT_TILES[algorithm])
        assert error(y, x.double().numpy() @ values.T) < 1e-6


def test_act_order_gathers_activations() -> None:
    packed, values = four_bit(33, 128, 32, zeros=True, perm=True)
    x = draw(5, 128)
    assert error(w4a16_gemm(x, packed), x.double().numpy() @ values.T) < 1e-6


@pytest.mark.parametrize("m", [1, 2, 4, 5, 8, 13, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_default_tiles_serve_every_m_and_dtype(m: int, dtype: torch.dtype) -> None:
    packed, values = blocks("Q5_1", 50, 96)
    x = draw(m, 96).to(dtype)
    y = mmq_gemm(x, packed)
    assert y.dtype == dtype
    limit = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}[dtype]
    assert error(y, x.double().numpy() @ values.T) < limit


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_views_give_what_their_copies_give(activations: str) -> None:
    packed, _ = blocks("Q4_0", 40, 64)
    base = draw(22, 80)
    for view in (base[::2, 8:72], base[:, :64][3:14], base[:64].T[:64].T[:11, :64]):
        y = mmq_gemm(view, packed, activations=activations)
        assert torch.equal(y, mmq_gemm(view.clone(), packed, activations=activations))
    deep = draw(12, 64).reshape(2, 3, 2, 64)
    y = mmq_gemm(deep, packed, activations=activations)
    assert y.shape == (2, 3, 2, 40)
    assert torch.equal(
        y.reshape(12, 40), mmq_gemm(deep.reshape(12, 64), packed, activations=activations)
    )


def test_no_rows_give_no_rows() -> None:
    packed, _ = blocks("Q4_K", 40, 256)
    assert mmq_gemm(torch.zeros(0, 256), packed).shape == (0, 40)
    assert mmq_gemm(torch.zeros(2, 0, 256), packed).shape == (2, 0, 40)


@pytest.mark.parametrize("tile", [*FLOAT_TILES.values(), INT8], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(tile: Tile) -> None:
    packed, _ = blocks("Q6_K", 200, 512)
    x = draw(21, 512)
    if tile.algorithm == "blas":
        pytest.skip("torch's GEMM makes no such promise")
    runs = [mmq_gemm(x, packed, activations="int8", tile=tile, threads=t) for t in (1, 2, 3, 2)]
    for other in runs[1:]:
        assert torch.equal(runs[0], other)


def test_an_all_zero_part_quantizes_to_zero() -> None:
    packed, values = blocks("Q4_1", 16, 64)
    x = draw(8, 64)
    x[:, :32] = 0
    y = mmq_gemm(x, packed, activations="int8", tile=INT8)
    assert torch.isfinite(y).all()
    assert error(y, x.double().numpy() @ values.T) < 2e-2
    assert torch.equal(
        mmq_gemm(torch.zeros(8, 64), packed, activations="int8", tile=INT8), torch.zeros(8, 16)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tile", [*FLOAT_TILES.values(), INT8], ids=str)
def test_nothing_finite_hides_a_bad_activation(tile: Tile, bad: float) -> None:
    packed, _ = blocks("Q5_0", 24, 64)
    x = draw(6, 64)
    x[2, 40] = bad
    y = mmq_gemm(x, packed, activations="int8", tile=tile)
    assert not torch.isfinite(y[2]).any()
    others = [0, 1, 3, 4, 5]
    assert torch.isfinite(y[others]).all()


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K"])
def test_large_activations_do_not_overflow(name: str) -> None:
    """Sums of activations above 6e4 overflow fp16; ours are float32."""
    packed, values = blocks(name, 32, 256)
    x = draw(5, 256) * 6.5e4
    for tile, limit in ((FLOAT_TILES["panel"], 1e-6), (FLOAT_TILES["dot"], 1e-6), (INT8, 2e-2)):
        y = mmq_gemm(x, packed, activations="int8", tile=tile)
        assert error(y, x.double().numpy() @ values.T) < limit


def test_rows_match_the_independent_dequantizer() -> None:
    for name in GGUF_TYPES:
        packed, values = blocks(name, 20, 512)
        ids = torch.tensor([3, 19, 0, 3])
        rows = dequantize_rows(cpu_weight(packed), ids)
        # one rounding of scale * code + minimum against the package's two
        assert np.allclose(rows.numpy(), values[ids.numpy()], rtol=2e-7, atol=1e-7)
    assert dequantize_rows(cpu_weight(packed), ids[:0]).shape == (0, 512)


ORT = pytest.importorskip("onnxruntime", reason="the onnxruntime algorithm needs its package")


@pytest.mark.parametrize("m", [1, 7])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_onnxruntime_matches_float64_on_blocks(name: str, m: int) -> None:
    packed, values = blocks(name, 48, 256)
    x = draw(m, 256)
    right = x.double().numpy() @ values.T
    exact = mmq_gemm(x, packed, tile=Tile.of("onnxruntime", level=0, threads=0))
    assert error(exact, right) < 2e-6
    eight = Tile.of("onnxruntime", level=4, threads=0)
    assert error(mmq_gemm(x, packed, activations="int8", tile=eight), right) < 2e-2


@pytest.mark.parametrize("zeros", [False, True], ids=["sym", "asym"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_onnxruntime_matches_float64_on_groups(group: int, zeros: bool) -> None:
    packed, values = four_bit(40, 384, group, zeros=zeros)
    x, bias = draw(3, 384), draw(1, 40)[0]
    y = w4a16_gemm(x, packed, bias, tile=Tile.of("onnxruntime", level=0, threads=0))
    assert error(y, x.double().numpy() @ values.T + bias.double().numpy()) < 2e-6
