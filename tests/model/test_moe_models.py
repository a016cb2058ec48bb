"""Qwen3-MoE, from GGUF and from safetensors, against the plain model of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from click.testing import CliRunner

from model.checkpoint_models import FORMATS
from model.gguf_models import logits, relative_error
from model.moe_models import HIDDEN, INNER, TinyMoe, plain_model, write_folder, write_gguf
from tilewright.cli.main import cli
from tilewright.errors import FormatError, UnsupportedError
from tilewright.layout.cpu import PackedW4
from tilewright.model.check import model_cases, verify_cases
from tilewright.model.fuse import why_not_fused
from tilewright.model.generate import generate
from tilewright.model.layers import QuantLinear, model_problems
from tilewright.model.load import load
from tilewright.model.moe import QuantExperts, is_experts
from tilewright.model.profile_parts import _module_part
from tilewright.ops.moe.experts import PackedExperts

K_QUANTS = {"attn_v": "Q6_K", "ffn_down_exps": "Q6_K", "output.w": "Q6_K", "": "Q4_K"}


@pytest.mark.parametrize(
    "tiny",
    [
        pytest.param(TinyMoe(types=K_QUANTS), id="k-quants"),
        pytest.param(TinyMoe(types={"": "Q8_0"}, experts=16, top_k=8), id="top-8-of-16"),
        pytest.param(TinyMoe(types={"": "Q5_1"}, experts=2, top_k=1), id="top-1-of-2"),
        pytest.param(TinyMoe(types={"exps": "MXFP4", "": "Q4_0"}, top_k=8), id="every-expert"),
        pytest.param(TinyMoe(types={"gate_exps": "F16", "": "Q4_1"}), id="one-part-dense"),
        pytest.param(TinyMoe(types={"": "IQ4_NL"}, inner=96), id="narrow-experts"),
    ],
)
def test_gguf_logits_equal_the_dequantized_model(tiny: TinyMoe, tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "m.gguf", tiny)
    model, tokenizer = load(tmp_path / "m.gguf")
    assert tokenizer is not None
    right = logits(plain)
    assert right.abs().max() > 0.5
    assert relative_error(logits(model), right) < 1e-5
    assert relative_error(logits(model, length=1), logits(plain, length=1)) < 1e-5
    config = model.config
    assert (config.num_experts, config.num_experts_per_tok) == (tiny.experts, tiny.top_k)
    assert config.norm_topk_prob


@pytest.mark.parametrize("kind", FORMATS)
def test_folder_logits_equal_the_dequantized_model(kind: str, tmp_path: Path) -> None:
    plain = write_folder(tmp_path, kind, TinyMoe(top_k=3))
    model, _ = load(tmp_path)
    assert relative_error(logits(model), logits(plain)) < 1e-5
    gate = model.model.layers[1].mlp.experts.gate_proj
    if kind == "none":
        assert isinstance(gate, torch.Tensor)
        return
    assert isinstance(gate, PackedExperts)
    assert (gate.E, gate.N, gate.K, gate.group) == (8, INNER, HIDDEN, 32)
    assert all(isinstance(one, PackedW4) for one in gate.each)


@pytest.mark.parametrize("norm", [True, False])
def test_weights_of_the_chosen_experts_are_what_the_config_says(norm: bool, tmp_path: Path) -> None:
    plain = write_folder(tmp_path, "gptq-sym", TinyMoe(), norm_topk_prob=norm)
    model, _ = load(tmp_path)
    assert model.config.norm_topk_prob is norm
    right = logits(plain)
    assert relative_error(logits(model), right) < 1e-5
    other = plain_model(TinyMoe(), norm_topk_prob=not norm)
    other.load_state_dict(plain.state_dict())
    assert relative_error(logits(other), right) > 1e-3


def test_quantized_router_is_dequantized(tmp_path: Path) -> None:
    plain = write_folder(tmp_path, "compressed-sym", TinyMoe(), quantized_router=True)
    model, _ = load(tmp_path)
    assert relative_error(logits(model), logits(plain)) < 1e-5
    assert model.tilewright_info.dequantized["uint4b8"].tensors == 2


def test_the_routing_matters(tmp_path: Path) -> None:
    """Experts in another order give other logits: the comparison above would see a mix-up."""
    plain = write_gguf(tmp_path / "m.gguf", TinyMoe())
    right = logits(plain)
    for layer in plain.model.layers:
        layer.mlp.experts.down_proj.copy_(layer.mlp.experts.down_proj.roll(1, dims=0))
    assert relative_error(logits(plain), right) > 0.05


def test_modules_and_problems(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TinyMoe(types=K_QUANTS, inner=512, top_k=3))
    model, _ = load(tmp_path / "m.gguf", activations="int8")
    mlp = model.model.layers[0].mlp
    assert type(mlp.experts) is QuantExperts
    assert type(mlp.gate).__name__ == "Qwen3MoeTopKRouter"
    assert type(model.model.layers[0].self_attn.q_proj) is QuantLinear
    assert not any(is_experts(module) for module in model.modules())
    assert repr(mlp.experts) == (
        "QuantExperts(8 experts, 3 a token, 256 -> 512 -> 256, Q4_K, Q4_K, Q6_K, "
        "activations='int8')"
    )
    found = {(p.name, p.type, p.N, p.K): (p.count, p.op) for p in model_problems(model)}
    assert found["model.layers.*.mlp.experts.gate_proj", "Q4_K", 512, 256] == (2 * 2 * 3, "mmq")
    assert found["model.layers.*.mlp.experts.down_proj", "Q6_K", 256, 512] == (2 * 3, "mmq")
    assert (
        model.tilewright_info.packed["Q6_K"].tensors == 7
    )  # v, o and down of two layers; the head
    assert "Qwen3MoeForCausalLM has no fused decode step" in str(why_not_fused(model))
    with pytest.raises(UnsupportedError, match="holds a packed weight"):
        mlp.experts.state_dict()


def test_experts_of_a_file_are_views_of_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TinyMoe())
    model, _ = load(tmp_path / "m.gguf")
    each = model.model.layers[0].mlp.experts.up_proj.each
    starts = [one.data.data_ptr() for one in each]
    assert {b - a for a, b in zip(starts, starts[1:], strict=False)} == {each[0].nbytes}


def test_verify_runs_the_models_own_experts(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TinyMoe(types=K_QUANTS, experts=24, top_k=4))
    model, _ = load(tmp_path / "m.gguf")
    cases = model_cases(model, batches=(1, 5))
    assert {(c.weight_type, c.N, c.K, c.experts, c.top_k, c.M) for c in cases["moe"]} == {
        (kind, 256, 256, 16, 4, m) for kind in ("Q4_K", "Q6_K") for m in (1, 5)
    }
    assert {c.activations for c in cases["moe"]} == {"float", "int8"}
    report = verify_cases(cases)
    assert report.passed
    assert "MoE Q6_K int8" in {group.label for group in report.groups()}


def test_four_bit_experts_are_verified_with_their_group(tmp_path: Path) -> None:
    write_folder(tmp_path, "awq-asym", TinyMoe())
    model, _ = load(tmp_path)
    cases = model_cases(model, paths=("float",), batches=(5,))
    assert {(c.weight_type, c.group, c.experts) for c in cases["moe"]} == {("uint4", 32, 8)}
    assert verify_cases({"moe": cases["moe"]}).passed


def test_int8_activations_stay_close(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "m.gguf", TinyMoe(top_k=8))
    model, _ = load(tmp_path / "m.gguf", activations="int8")
    assert 1e-5 < relative_error(logits(model), logits(plain)) < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "m.gguf", TinyMoe(top_k=8))
    model, _ = load(tmp_path / "m.gguf", dtype=dtype)
    assert relative_error(logits(model), logits(plain)) < 0.1


def test_greedy_text_is_the_plain_models(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "m.gguf", TinyMoe())
    model, tokenizer = load(tmp_path / "m.gguf")
    ids = torch.tensor([[5, 9, 30, 41]])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with torch.inference_mode():
        right = plain.generate(ids, attention_mask=torch.ones_like(ids), **options)
        got = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert got.tolist() == right.tolist()
    made = generate(model, tokenizer, "hello", max_tokens=4)
    assert (made.prompt_tokens, made.decode_steps) == (1, 3) or made.stop_reason == "stop"


def test_profile_counts_the_experts_that_were_chosen(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TinyMoe(types=K_QUANTS, top_k=2))
    experts = load(tmp_path / "m.gguf")[0].model.layers[0].mlp.experts
    part = _module_part("model.layers.0.mlp.experts", experts, (None, torch.tensor([[1, 3]] * 5)))
    assert (part.role, part.op, part.weight_type) == ("experts", "moe", "Q4_K+Q6_K")
    assert part.flops == 2 * 5 * 2 * 3 * 256 * 256
    blocks = 256 * 256 // 256
    assert part.bytes == 2 * blocks * (144 + 144 + 210)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "{}", "hello", "-n", "4"], ""),
        (["bench", "{}", "-p", "16", "-n", "4", "-r", "1"], "pp16"),
        (["info", "{}"], "qwen3moe"),
        (["verify", "--model", "{}"], "MoE Q4_K"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_verbs(arguments: list[str], expected: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", TinyMoe(types=K_QUANTS, layers=1, experts=4))
    command = [part.format(tmp_path / "m.gguf") for part in arguments]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert expected in done.output


def test_info_names_a_supported_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, "gptq-sym", TinyMoe(layers=1))
    done = CliRunner().invoke(cli, ["info", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["architecture"], found["supported"]) == ("qwen3_moe", True)


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"expert_used_count": 9}, FormatError, "9 experts are used of 8"),
        ({"expert_used_count": None}, FormatError, "expert_used_count is None"),
        ({"expert_count": None}, FormatError, "expert_count is None; a number is needed"),
        ({"expert_count": 7}, FormatError, r"its shape is \[8, 256, 256\].* \[7, 256, 256\]"),
        ({"expert_feed_forward_length": 128}, FormatError, r"makes it \[8, 128, 256\]"),
        ({"expert_weights_scale": 2.5}, UnsupportedError, "expert_weights_scale is 2.5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_impossible_files(
    metadata: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", TinyMoe(metadata=metadata, layers=1))
    with pytest.raises(error, match=message):
        load(tmp_path / "m.gguf")


def test_width_of_an_expert_may_be_left_out(tmp_path: Path) -> None:
    """Then an expert has its share of feed_forward_length."""
    tiny = TinyMoe(metadata={"expert_feed_forward_length": None}, top_k=2)
    plain = write_gguf(tmp_path / "m.gguf", tiny)
    model, _ = load(tmp_path / "m.gguf")
    assert model.config.moe_intermediate_size == INNER
    assert relative_error(logits(model), logits(plain)) < 1e-5


def _drop(folder: Path, *endings: str) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(path).items() if not any(e in k for e in endings)}
    save_file(kept, path)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (("layers.0.mlp.experts.3.up_proj.",), r"has experts up to 7 and lacks \[3\]"),
        (("layers.0.mlp.experts.7.down_proj.",), r"its shape is \[7, 256, 256\]"),
        (("layers.1.mlp.gate.weight",), "it lacks model.layers.1.mlp.gate.weight"),
        (tuple(f"layers.0.mlp.experts.{e}.up_proj" for e in range(8)), "experts.up_proj.weight"),
    ],
    ids=["one-in-the-middle", "the-last", "router", "all"],
)
def test_incomplete_folders(ending: tuple[str, ...], message: str, tmp_path: Path) -> None:
    write_folder(tmp_path, "gptq-sym", TinyMoe())
    _drop(tmp_path, *ending)
    with pytest.raises(FormatError, match=message):
        load(tmp_path)


def test_partly_quantized_experts_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_folder(tmp_path, "compressed-sym", TinyMoe())
    _drop(tmp_path, "layers.0.mlp.experts.3.up_proj.")
    path = tmp_path / "model.safetensors"
    whole = {"model.layers.0.mlp.experts.3.up_proj.weight": torch.zeros(INNER, HIDDEN)}
    save_file({**load_file(path), **whole}, path)
    with pytest.raises(FormatError, match="of its 8 experts 7 are quantized"):
        load(tmp_path)


def test_an_activation_without_a_kernel_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "none", TinyMoe(layers=1))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(UnsupportedError, match="the experts' activation is 'relu'; allowed are"):
        load(tmp_path)
