"""Mamba2 and the hybrids, from GGUF and safetensors, against transformers' own torch code."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from model.checkpoint_models import FORMATS, write_checkpoint
from model.gguf_models import add_byte_tokenizer, quantize, relative_error
from model.ssm_models import (
    all_logits,
    fast_greedy,
    random_ids,
    require_reference,
    script,
    slow_greedy,
)
from tilewright.errors import FormatError, UnsupportedError
from tilewright.model.check import model_cases, verify_cases
from tilewright.model.generate import TransformersDecoder, decoder_for, generate
from tilewright.model.layers import QuantEmbedding, QuantLinear
from tilewright.model.load import load
from tilewright.model.moe import QuantExperts
from tilewright.model.ssm import QuantHead, SSMMixer, inject_ssm, is_mixer

FAMILIES = ("mamba2", "nemotron_h", "bamba", "granitemoehybrid", "falcon_h1")
PLACES = {"mamba2": "backbone.layers.0.mixer", "nemotron_h": "model.layers.0.mixer"}
LIMIT = 1e-5  # of float32: sums in another order, through four layers


@pytest.fixture(scope="module")
def hybrid() -> Any:
    require_reference()
    return script("make_hybrid")


def mixer_of(model: Any, family: str) -> Any:
    return model.get_submodule(PLACES.get(family, "model.layers.0.mamba"))


@pytest.mark.parametrize("family", FAMILIES)
def test_four_bit_folders_continue_as_the_recurrence_does(
    family: str, hybrid: Any, tmp_path: Path
) -> None:
    plain = hybrid.write_folder(tmp_path, hybrid.plain_model(family))
    model, tokenizer = load(tmp_path)
    assert tokenizer is None
    ids = random_ids(37)
    right = all_logits(plain, ids)
    assert right.abs().max() > 0.5
    assert relative_error(all_logits(model, ids), right) < LIMIT
    mixer = mixer_of(model, family)
    assert type(mixer) is SSMMixer
    assert type(mixer.in_proj) is type(mixer.out_proj) is QuantLinear
    assert mixer.in_proj.weight_type == "uint4b8"
    assert not any(is_mixer(module) for module in model.modules())
    tokens, logits = slow_greedy(plain, ids[:, :25], 5)
    decoder = decoder_for(model)
    for pieces in ([25], [1, 2, 16, 1, 5]):
        got, seen = fast_greedy(decoder, ids[:, :25], 5, pieces)
        assert relative_error(seen, logits) < LIMIT, pieces
        assert got == tokens, pieces


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("mamba2", "Q8_0"),
        ("mamba2", "Q4_K"),
        ("nemotron_h", "Q4_0"),
        ("granitemoehybrid", "Q5_K"),
        ("falcon_h1", "Q6_K"),
        ("falcon_h1", "F32"),
    ],
)
def test_gguf_files_continue_as_the_recurrence_does(
    family: str, kind: str, hybrid: Any, tmp_path: Path
) -> None:
    plain = hybrid.write_gguf(
        tmp_path / "m.gguf", hybrid.plain_model(family), kind, quantize=quantize,
        finish=add_byte_tokenizer,
    )  # fmt: skip
    model, tokenizer = load(tmp_path / "m.gguf")
    assert tokenizer is not None
    ids = random_ids(35)
    assert relative_error(all_logits(model, ids), all_logits(plain, ids)) < LIMIT
    tokens, logits = slow_greedy(plain, ids, 4)
    got, seen = fast_greedy(decoder_for(model), ids, 4, [30, 5])
    assert relative_error(seen, logits) < LIMIT
    assert got == tokens
    text = generate(model, tokenizer, ids, max_tokens=4, stop_ids=())
    assert list(text.ids) == tokens
    packed = model.tilewright_info.packed
    assert set(packed) == (set() if kind == "F32" else {kind})


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("none", "awq-asym") else pytest.mark.slow)
        for kind in FORMATS
    ],
)
def test_every_four_bit_format(kind: str, hybrid: Any, tmp_path: Path) -> None:
    plain = hybrid.plain_model("mamba2", num_hidden_layers=1)
    write_checkpoint(tmp_path, plain, kind)
    model, _ = load(tmp_path)
    ids = random_ids(20)
    assert relative_error(all_logits(model, ids), all_logits(plain, ids)) < LIMIT


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_variants_of_a_mixer(family: str, hybrid: Any, tmp_path: Path) -> None:
    """Biases on the projections, one group, no norm or a norm before the gate, limits of dt."""
    if family == "mamba2":
        changes: dict[str, Any] = {"use_bias": True, "use_conv_bias": False, "n_groups": 1,
                   "time_step_limit": (0.05, 0.4), "tie_word_embeddings": True}  # fmt: skip
    else:
        changes = {"mamba_rms_norm": False, "mamba_proj_bias": True, "projectors_bias": True,
                   "mamba_n_groups": 4}  # fmt: skip
    plain = hybrid.write_folder(tmp_path / "a", hybrid.plain_model(family, **changes), "F32")
    model, _ = load(tmp_path / "a")
    ids = random_ids(40)
    right = all_logits(plain, ids)
    assert relative_error(all_logits(model, ids), right) < LIMIT
    got = torch.stack(
        [fast_greedy(decoder_for(model), ids[:, :n], 1, [n])[1][0] for n in (1, 2, 40)]
    )
    assert relative_error(got, right[0, [0, 1, 39]]) < LIMIT
    _, stepped = fast_greedy(decoder_for(model), ids[:, :40], 1, [39, 1])
    assert relative_error(stepped[0], right[0, 39]) < LIMIT
    if family == "falcon_h1":
        changes |= {"mamba_rms_norm": True, "mamba_norm_before_gate": True}
        plain = hybrid.write_folder(tmp_path / "b", hybrid.plain_model(family, **changes), "F32")
        model, _ = load(tmp_path / "b")
        assert mixer_of(model, family).norm_before_gate
        assert relative_error(all_logits(model, ids), all_logits(plain, ids)) < LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_equal_rows_alone(family: str, hybrid: Any) -> None:
    model = hybrid.plain_model(family)
    ids = random_ids(24, rows=2)
    alone = all_logits(model, ids[:1, 7:])
    assert inject_ssm(model) == (2 if family in ("mamba2", "nemotron_h", "falcon_h1") else 1)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    options = {} if family == "mamba2" else {"position_ids": places}
    got = all_logits(model, ids, attention_mask=mask, **options)[:1, 7:]
    assert relative_error(got, alone) < LIMIT


def test_packed_sequences_do_not_see_each_other(hybrid: Any) -> None:
    model = hybrid.plain_model("bamba", attn_layer_indices=[])
    ids = random_ids(30)
    alone = torch.cat([all_logits(model, part) for part in ids.split([11, 1, 18], dim=1)], dim=1)
    inject_ssm(model)
    numbers = torch.tensor([[0] * 11 + [1] + [2] * 18], dtype=torch.int32)
    places = torch.cat([torch.arange(n) for n in (11, 1, 18)])[None]
    got = all_logits(model, ids, seq_idx=numbers, position_ids=places)
    assert relative_error(got, alone) < LIMIT
    assert relative_error(all_logits(model, ids), alone) > 1e-3
    mixer = mixer_of(model, "bamba")
    with pytest.raises(UnsupportedError, match="seq_idx with 2 rows; packed sequences lie in one"):
        mixer(torch.zeros(2, 30, 256), seq_idx=numbers.expand(2, -1))


def test_the_groups_matter(hybrid: Any) -> None:
    """Heads that read another group give other logits: the comparisons above would see it."""
    plain = hybrid.plain_model("mamba2")
    ids = random_ids(20)
    right = all_logits(plain, ids)
    for layer in plain.backbone.layers:
        weight = layer.mixer.in_proj.weight
        shared = weight[1024 : 1024 + 64].clone()
        weight[1024 : 1024 + 64] = shared.roll(32, dims=0)  # B of the two groups
    assert relative_error(all_logits(plain, ids), right) > 0.01


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float16, 0.02), (torch.bfloat16, 0.15)], ids=["float16", "bfloat16"]
)
def test_half_precision_keeps_decays_exact(
    dtype: torch.dtype, limit: float, hybrid: Any, tmp_path: Path
) -> None:
    plain = hybrid.write_folder(tmp_path, hybrid.plain_model("nemotron_h"), "F32")
    model, _ = load(tmp_path, dtype=dtype)
    mixer = mixer_of(model, "nemotron_h")
    assert model.dtype == mixer.conv1d.weight.dtype == dtype
    assert mixer.A_log.dtype == mixer.D.dtype == mixer.dt_bias.dtype == torch.float32
    assert torch.equal(mixer.A, -torch.exp(mixer_of(plain, "nemotron_h").A_log))
    ids = random_ids(40)
    right = all_logits(plain, ids)
    assert relative_error(all_logits(model, ids), right) < limit
    _, stepped = fast_greedy(decoder_for(model), ids, 1, [20, 19, 1])
    assert relative_error(stepped[0], right[0, -1]) < limit


def test_integer_activations(hybrid: Any, tmp_path: Path) -> None:
    plain = hybrid.write_gguf(tmp_path / "m.gguf", hybrid.plain_model("mamba2"), "Q8_0")
    model, _ = load(tmp_path / "m.gguf", activations="int8")
    assert type(model.lm_head) is QuantHead
    assert type(model.backbone.embeddings) is QuantEmbedding
    ids = random_ids(40)
    error = relative_error(all_logits(model, ids), all_logits(plain, ids))
    assert 1e-5 < error < 0.05


def test_transformers_generate_runs_the_injected_model(hybrid: Any) -> None:
    """The public way in for a model that transformers loaded, and for its own generation."""
    model = hybrid.plain_model("granitemoehybrid")
    ids = random_ids(17)
    tokens, _ = slow_greedy(model, ids, 5)
    injected = copy.deepcopy(model)
    inject_ssm(injected)
    assert injected.state_dict().keys() == model.state_dict().keys()
    out = injected.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert out[0, 17:].tolist() == tokens


def test_bamba_is_told_its_positions(hybrid: Any) -> None:
    """Its code takes every call for the first; the decoder says where a piece stands."""
    model = hybrid.plain_model("bamba")
    ids = random_ids(30)
    right = all_logits(model, ids)[0, -1]
    decoder = TransformersDecoder(model)
    decoder.prefill(ids[:, :20])
    assert relative_error(decoder.prefill(ids[:, 20:]), right) < LIMIT


def test_a_config_may_have_no_limit(hybrid: Any) -> None:
    model = hybrid.plain_model("bamba", time_step_limit=None)
    assert inject_ssm(model) > 0
    limits = {m.time_step_limit for m in model.modules() if isinstance(m, SSMMixer)}
    assert limits == {(0.0, float("inf"))}


def test_mixers_that_no_kernel_serves_are_refused(hybrid: Any) -> None:
    model = hybrid.plain_model("mamba2", num_heads=128, head_dim=4)
    with pytest.raises(UnsupportedError, match="the head dimension of Mamba2Mixer is 4; it must"):
        inject_ssm(model)
    model = hybrid.plain_model("mamba2", state_size=20)
    with pytest.raises(UnsupportedError, match="the state dimension of Mamba2Mixer is 20"):
        inject_ssm(model)
    model = hybrid.plain_model("mamba2", hidden_act="gelu")
    with pytest.raises(UnsupportedError, match="activation of Mamba2Mixer is 'gelu'; allowed are"):
        inject_ssm(model)


@pytest.mark.parametrize("version", ["5.0.0", "5.13.1"])
def test_an_older_transformers_is_refused(
    version: str, hybrid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caches do not say whether they may have to go back, which a mixer asks."""
    model = hybrid.plain_model("mamba2")
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(UnsupportedError, match=rf"transformers 5\.14 or later, and {version} is"):
        inject_ssm(model)
    for newer in ("5.14.0", "5.24.0.dev0", "6.0"):
        monkeypatch.setattr("transformers.__version__", newer)
        assert inject_ssm(hybrid.plain_model("mamba2")) == 2


@pytest.mark.parametrize(
    ("family", "metadata", "error", "message"),
    [
        ("mamba2", {"ssm.group_count": 3}, FormatError, "do not divide each other"),
        ("mamba2", {"ssm.inner_size": None}, FormatError, "ssm.inner_size is None"),
        ("mamba2", {"embedding_length": 384}, UnsupportedError, "it is a whole multiple"),
        ("nemotron_h", {"expert_count": 8}, UnsupportedError, "of nemotron_h, dense models load"),
        ("nemotron_h", {"attention.scale": 0.5}, UnsupportedError, "no such scaling"),
        ("nemotron_h", {"attention.head_count_kv": [0, 2]}, FormatError, "each of 4 layers"),
        ("nemotron_h", {"feed_forward_length": [0, 0, 8, 9]}, UnsupportedError, "layer to layer"),
        ("nemotron_h", {"attention.value_length": 32}, UnsupportedError, "they must agree"),
        ("granitemoehybrid", {"rope.dimension_count": 32}, UnsupportedError, "turns 32 of 64"),
        ("falcon_h1", {"rope.dimension_count": 32}, UnsupportedError, "falcon-h1 models in"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_metadata(
    family: str, metadata: Any, error: Any, message: str, hybrid: Any, tmp_path: Path
) -> None:
    hybrid.write_gguf(tmp_path / "m.gguf", hybrid.plain_model(family), "F32", metadata=metadata)
    with pytest.raises(error, match=message):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("family", "edit", "message"),
    [
        ("mamba2", {"blk.1.ssm_a": -1.0}, r"ssm_a.*every value must be negative"),
        ("mamba2", {"blk.1.ssm_out.weight": None}, r"lacks backbone\.layers\.1\.mixer\.out_proj"),
        ("mamba2", {"blk.0.attn_q.weight": 1.0}, r"no tensors blk\.0\.attn_q\.weight"),
        ("granitemoehybrid", {"blk.0.ffn_up.weight": None}, r"that of ffn_up None; both"),
    ],
    ids=["growing-state", "missing", "stranger", "half"],
)
def test_bad_tensors(
    family: str, edit: dict[str, Any], message: str, hybrid: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tensors = hybrid._tensors

    def edited(model: Any, family: str, name: str, parameter: Any) -> Any:
        found = tensors(model, family, name, parameter)
        for theirs, factor in edit.items():
            if factor is None:
                found = [entry for entry in found if entry[0] != theirs]
            elif name.endswith("norm_f.weight") and "attn" in theirs:
                found.append((theirs, np.zeros((8, 256), dtype=np.float32), lambda _: None))
            else:
                found = [(n, v * np.float32(factor) if n == theirs else v, put)
                         for n, v, put in found]  # fmt: skip
        return found

    monkeypatch.setattr(hybrid, "_tensors", edited)
    hybrid.write_gguf(tmp_path / "m.gguf", hybrid.plain_model(family), "F32")
    with pytest.raises(FormatError, match=message):
        load(tmp_path / "m.gguf")


def test_factors_and_mixed_halves_of_a_gguf_file(
    hybrid: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product's factor scales it before the bias; gate and up of two types become values."""
    tensors = hybrid._tensors

    def edited(model: Any, family: str, name: str, parameter: Any) -> Any:
        found = tensors(model, family, name, parameter)
        if name.endswith("layers.0.mamba.in_proj.weight"):
            found.append(("blk.0.ssm_in.scale", np.float32([0.5]), lambda _: None))
            found.append(("blk.0.ssm_in.input_scale", np.float32([7.0]), lambda _: None))
        if name.endswith("layers.0.shared_mlp.input_linear.weight"):
            found.append(("blk.0.ffn_up.scale", np.float32([0.25]), lambda _: None))
        return found

    def by_name(rows: Any, kind: str) -> Any:
        return quantize(rows, kind)

    monkeypatch.setattr(hybrid, "_tensors", edited)
    plain = hybrid.write_gguf(
        tmp_path / "m.gguf", hybrid.plain_model("granitemoehybrid"), "Q8_0", quantize=by_name
    )
    layer = plain.model.layers[0]
    layer.mamba.in_proj.weight.mul_(0.5)
    layer.shared_mlp.input_linear.weight[512:].mul_(0.25)
    model, _ = load(tmp_path / "m.gguf")
    ids = random_ids(20)
    assert relative_error(all_logits(model, ids), all_logits(plain, ids)) < LIMIT
    assert model.tilewright_info.dequantized["Q8_0"].tensors == 1


@pytest.mark.parametrize("stem", ["attn_norm", "ffn_down_exps"])
def test_a_factor_of_what_is_no_matrix_is_refused(
    stem: str, hybrid: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = hybrid._tensors

    def edited(model: Any, family: str, name: str, parameter: Any) -> Any:
        found = tensors(model, family, name, parameter)
        if any(theirs == f"blk.0.{stem}.weight" for theirs, _, _ in found):
            found.append((f"blk.0.{stem}.scale", np.float32([0.5]), lambda _: None))
        return found

    monkeypatch.setattr(hybrid, "_tensors", edited)
    tiny = hybrid.plain_model(
        "granitemoehybrid", num_local_experts=6, num_experts_per_tok=3, intermediate_size=128
    )
    hybrid.write_gguf(tmp_path / "m.gguf", tiny, "F32")
    with pytest.raises(FormatError, match=rf"{stem}.*a factor of 0\.5 stands beside it"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("form", ["F16", "w4a16", "Q8_0"])
def test_granites_mixture(form: str, hybrid: Any, tmp_path: Path) -> None:
    """Experts beside the shared part: stacked in one tensor on the hub, in two in GGUF."""
    tiny = hybrid.plain_model(
        "granitemoehybrid", num_local_experts=6, num_experts_per_tok=3, intermediate_size=128
    )
    if form == "Q8_0":
        path = tmp_path / "m.gguf"
        plain = hybrid.write_gguf(path, tiny, form)
    else:
        path, plain = tmp_path, hybrid.write_folder(tmp_path, tiny, form)
    model, _ = load(path)
    experts = model.model.layers[0].block_sparse_moe.experts
    assert type(experts) is QuantExperts
    assert experts.weight_types == ((form,) if form == "Q8_0" else ("float32",))
    ids = random_ids(30)
    right = all_logits(plain, ids)
    assert relative_error(all_logits(model, ids), right) < LIMIT
    _, stepped = fast_greedy(decoder_for(model), ids, 1, [20, 9, 1])
    assert relative_error(stepped[0], right[0, -1]) < LIMIT
    rolled = copy.deepcopy(plain)
    weight = rolled.model.layers[0].block_sparse_moe.experts.down_proj
    weight.copy_(weight.roll(1, dims=0))
    assert relative_error(all_logits(rolled, ids), right) > 1e-3


def test_verify_runs_the_models_own_scan(hybrid: Any, tmp_path: Path) -> None:
    hybrid.write_gguf(tmp_path / "m.gguf", hybrid.plain_model("nemotron_h"), "Q8_0")
    model, _ = load(tmp_path / "m.gguf")
    cases = model_cases(model, paths=["float"], batches=(1, 17, 4096))
    assert {(c.weight_type, c.N, c.K, c.group, c.M) for c in cases["ssd"]} == {
        ("p32", 512, 32, 8, m) for m in (1, 17, 530)
    }
    short = {"ssd": [case for case in cases["ssd"] if case.M < 100]}
    report = verify_cases(short)
    assert report.passed
    assert {group.label.split()[0] for group in report.groups()} == {"SSM_SCAN"}


def test_scans_are_verified_where_no_product_is_packed(hybrid: Any, tmp_path: Path) -> None:
    hybrid.write_folder(tmp_path, hybrid.plain_model("mamba2"), "F32")
    model, _ = load(tmp_path)
    cases = model_cases(model, batches=(3,))
    assert set(cases) == {"ssd"}
    assert verify_cases(cases).passed


def test_names_of_older_checkpoints(hybrid: Any, tmp_path: Path) -> None:
    """`backbone.embedding` and Codestral's `model.` in front are understood."""
    from safetensors.torch import load_file, save_file

    plain = hybrid.write_folder(tmp_path, hybrid.plain_model("mamba2"), "F32")
    tensors = load_file(tmp_path / "model.safetensors")
    old = {f"model.{n}".replace(".embeddings.", ".embedding."): t for n, t in tensors.items()}
    save_file(old, tmp_path / "model.safetensors")
    model, _ = load(tmp_path)
    ids = random_ids(12)
    assert relative_error(all_logits(model, ids), all_logits(plain, ids)) < LIMIT


def test_infinities_of_a_config(hybrid: Any, tmp_path: Path) -> None:
    hybrid.write_folder(tmp_path, hybrid.plain_model("mamba2", num_hidden_layers=1), "F16")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for spelled in ({"__float__": "Infinity"}, float("inf")):
        path.write_text(json.dumps(config | {"time_step_limit": [0.0, spelled]}))
        model, _ = load(tmp_path)
        assert mixer_of(model, "mamba2").time_step_limit == (0.0, float("inf"))
