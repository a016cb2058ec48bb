"""Models as they are packed for a GPU, run by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import triton_interpreter  # noqa: F401

pytest.importorskip("transformers")

from model.gguf_models import Tiny, logits, quantize, reference, relative_error, write
from tilewright.device import INTERPRETER
from tilewright.errors import FormatError, UnsupportedError
from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import BLOCK_FORMS, GpuBlocks, pack_blocks_for
from tilewright.layout.hopper import HopperW4, unpack_w4_hopper
from tilewright.layout.triton import WordsW4
from tilewright.model import load as loading
from tilewright.model.fuse import why_not_fused
from tilewright.model.layers import QuantLinear, model_problems
from tilewright.model.placement import Placement, all_finite, place

CPU = torch.device("cpu")


def test_matrices_stay_packed_and_the_embedding_is_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Tiny("llama", {"embd": "Q8_0", "attn_v": "Q4_K", "": "Q4_0"}, layers=1)
    stored = write(tmp_path / "model.gguf", tiny)
    monkeypatch.setattr(
        loading, "place", lambda device, dtype: Placement(CPU, INTERPRETER, torch.float32)
    )

    model, _ = loading.load(tmp_path / "model.gguf", device="cuda")

    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj.packed, WordsW4)  # rows in transformers' order
    assert isinstance(layer.self_attn.v_proj.packed, GpuBlocks)
    assert isinstance(model.model.embed_tokens, torch.nn.Embedding)
    found = {(problem.op, problem.type, problem.group) for problem in model_problems(model)}
    assert found == {("w4a16", "uint4b8", 32), ("mmq", "Q4_K", 0)}
    assert model.tilewright_info.dequantized_line() is None
    assert set(model.tilewright_info.packed) == {"Q4_0", "Q4_K"}
    right = logits(reference(tiny, stored), length=12)
    assert relative_error(logits(model, length=12), right) < 1e-5


_TENSORS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(
            ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q8_0"),
            id="blocks of 256",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "Q8_0", "Q6_K"), id="blocks of 32"
        ),
    ],
)
def test_every_type_is_multiplied_packed(
    kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = {**dict(zip(_TENSORS, kinds, strict=True)), "embd": "Q6_K", "output": "Q5_1"}
    tiny = Tiny("llama", types, layers=1, tied=False)
    stored = write(tmp_path / "model.gguf", tiny)
    monkeypatch.setattr(
        loading, "place", lambda device, dtype: Placement(CPU, INTERPRETER, torch.float32)
    )

    model, _ = loading.load(tmp_path / "model.gguf", device="cuda")

    linears = [m for m in model.modules() if isinstance(m, QuantLinear)]
    assert len(linears) == 8  # seven of the layer, and the output matrix
    assert all(isinstance(linear.packed, GpuBlocks) for linear in linears)
    assert {linear.weight_type for linear in linears} == {*kinds, "Q5_1"}
    right = logits(reference(tiny, stored), length=5)
    assert relative_error(logits(model, length=5), right) < 1e-5


@pytest.mark.parametrize(
    ("family", "asked", "given"),
    [
        ("gemma3", None, torch.bfloat16),
        ("gemma3", torch.float16, torch.float16),
        ("llama", None, torch.float16),
    ],
    ids=["gemma3", "gemma3, float16 asked for", "llama"],
)
def test_a_family_whose_sums_outgrow_float16_gets_bfloat16(
    family: str, asked: torch.dtype | None, given: torch.dtype, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write(tmp_path / "model.gguf", Tiny(family, {"": "Q8_0"}, layers=1))
    monkeypatch.setattr(
        loading, "place", lambda device, dtype: Placement(CPU, INTERPRETER, dtype or torch.float16)
    )

    model, _ = loading.load(tmp_path / "model.gguf", device="cuda", dtype=asked)

    assert model.dtype == model.model.embed_tokens.weight.dtype == given
    warned = "may pass 65504" in caplog.text
    assert warned == (family == "gemma3" and asked is torch.float16)


def test_a_model_on_a_gpu_has_no_fused_step() -> None:
    class Model(torch.nn.Module):
        device = torch.device("cuda", 0)

    assert why_not_fused(Model()) == "the model is on cuda:0"


def test_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would launch on the current one, on pointers of the other."""
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr("tilewright.model.placement.arch_of", lambda device: "sm_90")
    assert place("cuda", None).device == place("cuda:1", None).device == torch.device("cuda", 1)
    with pytest.raises(UnsupportedError, match=r"current one is 'cuda:1'.*set_device\(0\) first"):
        place("cuda:0", None)


def test_q4_0_blocks_are_exact_codes_in_hoppers_layout() -> None:
    values = np.random.default_rng(0).standard_normal((70, 160), dtype=np.float32)
    raw = np.frombuffer(quantize(values, "Q4_0").tobytes(), np.uint8).reshape(70, -1)
    block = BLOCK_TYPES["Q4_0"]

    packed = Placement(CPU, "sm_90", torch.float16).pack_blocks(raw, block)

    assert isinstance(packed, HopperW4)
    codes, scales, zeros = unpack_w4_hopper(packed)
    grouped = codes.view(70, -1, 32).float() - zeros[:, :, None].float()
    again = (grouped * scales[:, :, None].float()).view(70, 160)
    assert torch.equal(again, torch.from_numpy(block.dequantize(raw)))


@pytest.mark.parametrize("arch", ["sm_90", "gfx1151", INTERPRETER])
def test_other_blocks_are_blocks_on_every_gpu(arch: str) -> None:
    values = np.random.default_rng(0).standard_normal((70, 256), dtype=np.float32)
    raw = np.frombuffer(quantize(values, "Q4_K").tobytes(), np.uint8).reshape(70, -1)
    block = BLOCK_TYPES["Q4_K"]
    packed = Placement(CPU, arch, torch.float16).pack_blocks(raw, block)
    assert isinstance(packed, GpuBlocks)
    assert packed.nbytes == raw.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", list(BLOCK_FORMS))
def test_an_embedding_is_dequantized_as_gguf_does(kind: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    raw = np.asarray(quantize(rng.normal(0, 1, (9, 512)).astype(np.float32), kind))
    values, _ = Placement(CPU, INTERPRETER, dtype).dequantize(raw, kind)
    right = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    torch.testing.assert_close(values, torch.from_numpy(right).to(dtype), rtol=0, atol=0)


def test_an_embedding_is_dequantized_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.model.placement._VALUES_AT_A_TIME", 1000)
    raw = np.asarray(quantize(np.random.default_rng(1).normal(0, 1, (7, 256)).astype(np.float32),
                              "Q4_K"))  # fmt: skip
    values, finite = Placement(CPU, INTERPRETER, torch.float32).dequantize(raw, "Q4_K")
    right = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_K)
    assert finite
    torch.testing.assert_close(values, torch.from_numpy(right), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "at"), [("Q8_0", 0), ("Q4_1", 2), ("Q6_K", 208), ("Q4_K", 2)])
def test_a_scale_that_is_no_number_is_seen_on_the_device(kind: str, at: int) -> None:
    raw = np.asarray(quantize(np.ones((4, 256), np.float32), kind)).copy()
    packed = pack_blocks_for(raw, kind, "cpu", arch=INTERPRETER)
    assert all_finite(packed)
    raw[2, at : at + 2] = (0, 0x7C)  # Inf
    assert not all_finite(pack_blocks_for(raw, kind, "cpu", arch=INTERPRETER))
    assert not Placement(CPU, INTERPRETER, torch.float32).dequantize(raw, kind)[1]


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_k.weight"])
def test_a_damaged_scale_is_named_on_gpus_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write(path, Tiny("llama", {"": "Q8_0"}, layers=1))
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == name)
    data = bytearray(path.read_bytes())
    data[tensor.data_offset + 34 : tensor.data_offset + 36] = b"\x00\xfc"  # -Inf
    path.write_bytes(data)
    monkeypatch.setattr(
        loading, "place", lambda device, dtype: Placement(CPU, INTERPRETER, torch.float32)
    )
    with pytest.raises(FormatError, match="Q8_0 block scale is NaN or Inf") as raised:
        loading.load(path, device="cuda")
    assert name in str(raised.value)
    assert str(tensor.data_offset + 34) in str(raised.value)
