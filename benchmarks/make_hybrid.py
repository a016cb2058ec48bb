"""Small seeded models of the families with Mamba-2 mixers, as files with the real tensor names.

    python benchmarks/make_hybrid.py nemotron_h /tmp/nemotron.gguf --type Q8_0
    python benchmarks/make_hybrid.py falcon_h1 /tmp/falcon --type w4a16

A path that ends in .gguf becomes a GGUF file, named and shaped as llama.cpp's conversion does it;
any other a folder with config.json and safetensors, named as on the hub, its linears plain ("F32",
"F16") or 4-bit in compressed-tensors' packing ("w4a16", groups of 32). Every function here returns
the plain transformers model of the values that lie in the file: what its logits must be.

Sources: llama.cpp's conversion/{mamba,nemotron,granite,falcon_h1}.py for names, shapes, factors.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import save_file

__all__ = ["FAMILIES", "GGUF_NAMES", "plain_model", "write_folder", "write_gguf"]

FAMILIES = ("mamba2", "nemotron_h", "bamba", "granitemoehybrid", "falcon_h1")
GGUF_NAMES = {
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
}
"""The families that llama.cpp has an architecture for that transformers' class computes."""

GROUP = 32
_CLASSES = {
    "mamba2": "Mamba2",
    "nemotron_h": "NemotronH",
    "bamba": "Bamba",
    "granitemoehybrid": "GraniteMoeHybrid",
    "falcon_h1": "FalconH1",
}
Quantize = Callable[[Any, str], Any]


def plain_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A seeded float32 model of transformers whose logits depend on every tensor.

    Args:
        family: one of `FAMILIES`.
        changes: of the configuration.
    """
    import transformers

    kind = _CLASSES[family]
    config = getattr(transformers, f"{kind}Config")(**(_options(family) | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        draw = torch.randn_like(parameter)
        if name.endswith("A_log"):
            # States that forget within a token, and states that last for hundreds.
            parameter.copy_(torch.empty_like(parameter).uniform_(-4, 1.5))
        elif name.endswith("dt_bias"):
            parameter.copy_(draw - 1.5)
        elif "embed" in name:
            parameter.copy_(draw)
        elif name.endswith(".bias"):
            parameter.copy_(0.3 * draw)
        elif parameter.dim() == 1:
            parameter.copy_(1 + 0.3 * draw)
        else:
            parameter.copy_(1.5 / parameter.shape[-1] ** 0.5 * draw)
    return model


def _options(family: str) -> dict[str, Any]:
    common = {"vocab_size": 320, "hidden_size": 256, "bos_token_id": 1, "eos_token_id": 2,
              "pad_token_id": 0, "tie_word_embeddings": False}  # fmt: skip
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512,
                 "max_position_embeddings": 512}  # fmt: skip
    mamba = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 2,
             "num_hidden_layers": 2, "mamba_chunk_size": 16}  # fmt: skip
    if family == "mamba2":
        return common | {"num_heads": 16, "head_dim": 32, "state_size": 32, "n_groups": 2,
                         "num_hidden_layers": 2, "chunk_size": 16}  # fmt: skip
    if family == "nemotron_h":
        kinds = ["linear_attention", "full_attention", "mlp", "linear_attention"]
        return common | attention | {
            "layers_block_type": kinds, "head_dim": 64, "mamba_num_heads": 16,
            "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2, "chunk_size": 16,
        }  # fmt: skip
    if family == "bamba":
        return common | attention | mamba | {"attn_layer_indices": [1]}
    if family == "granitemoehybrid":
        return common | attention | mamba | {
            "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0,
            "shared_intermediate_size": 512, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
            "residual_multiplier": 0.5, "attention_multiplier": 0.1,
            "position_embedding_type": "rope",
        }  # fmt: skip
    return common | attention | mamba | {
        "head_dim": 64, "mamba_d_ssm": 512, "mamba_rms_norm": True,
        "mamba_norm_before_gate": False, "embedding_multiplier": 1.3, "lm_head_multiplier": 0.7,
        "key_multiplier": 0.8, "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1,
        "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6, "mlp_multipliers": [1.5, 0.7],
        "ssm_multipliers": [0.9, 0.8, 0.5, 0.6, 1.4],
    }  # fmt: skip


def write_folder(folder: Path, model: Any, kind: str = "w4a16") -> Any:
    """Write a folder under the hub's names; returns the plain model of it.

    Args:
        kind: "F32", "F16", or "w4a16": linears but the head in 4 bits, the rest in float16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(model)
    family = model.config.model_type
    linears = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        hub = name.replace("model.", "backbone.", 1) if family == "nemotron_h" else name
        for ours, theirs in _HUB_EXPERTS.items():
            hub = hub.replace(ours, theirs)
        if kind == "w4a16" and name in linears:
            packed, values = _w4(parameter)
            tensors |= {f"{hub.removesuffix('weight')}{part}": v for part, v in packed.items()}
            parameter.copy_(values)
        else:
            stored = parameter if kind == "F32" else parameter.to(torch.float16)
            tensors[hub] = stored.contiguous().clone()
            parameter.copy_(stored.float())
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    if kind == "w4a16":
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP,
                   "strategy": "group", "dynamic": False, "actorder": None}  # fmt: skip
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None,
                  "output_activations": None}  # fmt: skip
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "quantization_status": "compressed", "config_groups": {"group_0": scheme},
            "ignore": ["lm_head"],
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return model


_HUB_EXPERTS = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}


def _w4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """compressed-tensors' packing, eight codes an int32, and the values that it stands for."""
    n, k = weight.shape
    groups = weight.reshape(n, k // GROUP, GROUP)
    scale = (groups.abs().amax(dim=2) / 7).to(torch.float16)
    codes = torch.round(groups / scale.float()[:, :, None]).clamp(-8, 7)
    values = (codes * scale.float()[:, :, None]).reshape(n, k)
    nibbles = (codes.reshape(n, k // 8, 8).to(torch.int64) + 8) << torch.arange(0, 32, 4)
    words = nibbles.sum(dim=2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    shape = torch.tensor([n, k], dtype=torch.int64)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": shape}, values


def _quantize(rows: Any, kind: str) -> Any:
    return rows if kind == "F32" else gguf.quants.quantize(rows, Q[kind])


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "Q8_0",
    *,
    quantize: Quantize = _quantize,
    metadata: Mapping[str, Any] | None = None,
    finish: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Any:
    """Write a GGUF file as llama.cpp converts the model; returns the plain model of it.

    Args:
        model: of a family in `GGUF_NAMES`.
        kind: type of the matrices; convolutions, norms and vectors are F32.
        quantize: rows [N, K] and a type to blocks [N, row_bytes]; the gguf package's has no
            K-quants.
        metadata: keys, without the architecture's prefix, in place of the model's own; None leaves
            one out.
        finish: called before the file is written, to add a tokenizer.
    """
    family = model.config.model_type
    architecture = GGUF_NAMES[family]
    model = _as_converted(model)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(model, family) | dict(metadata or {})).items():
        _add(writer, f"{architecture}.{key}", value)
    if finish is None:
        writer.add_tokenizer_model("none")
    else:
        finish(writer)
    for name, parameter in model.named_parameters():
        for theirs, rows, put_back in _tensors(model, family, name, parameter):
            matrix = theirs.endswith(".weight") and rows.ndim >= 2
            plain = not matrix or any(p in theirs for p in ("ssm_conv1d", "norm", "gate_inp"))
            raw = rows
            if not plain:
                raw = quantize(np.ascontiguousarray(rows.reshape(-1, rows.shape[-1])), kind)
                raw = raw.reshape(*rows.shape[:-1], -1)
            typed = plain or kind == "F32"
            writer.add_tensor(theirs, raw, raw_dtype=None if typed else Q[kind])
            back = raw if typed else gguf.quants.dequantize(raw, Q[kind])
            put_back(torch.from_numpy(np.array(back, dtype=np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _as_converted(model: Any) -> Any:
    """A copy without what GGUF has no words for: FalconH1's factors go into its weights, and
    llama.cpp limits no dt."""
    model = copy.deepcopy(model)
    config = model.config
    if config.model_type == "nemotron_h":
        config.time_step_min = 1e-30  # transformers takes its logarithm
    if config.model_type == "falcon_h1":
        wide, shared = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        widths = torch.tensor([wide, wide, shared, shared, config.mamba_n_heads])
        mup = torch.tensor(config.ssm_multipliers).repeat_interleave(widths)[:, None]
        entering = config.attention_in_multiplier
        factors = {
            "gate_proj": config.mlp_multipliers[0], "down_proj": config.mlp_multipliers[1],
            "k_proj": config.key_multiplier * entering, "q_proj": entering, "v_proj": entering,
            "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
            "in_proj": config.ssm_in_multiplier * mup, "lm_head": config.lm_head_multiplier,
            "embed_tokens": config.embedding_multiplier,
        }  # fmt: skip
        for name, parameter in model.named_parameters():
            factor = factors.get(name.split(".")[-2])
            if factor is not None:
                parameter.mul_(factor)
        for key in ("attention_in", "attention_out", "key", "ssm_in", "ssm_out", "lm_head",
                    "embedding"):  # fmt: skip
            setattr(config, f"{key}_multiplier", 1.0)
        config.mlp_multipliers, config.ssm_multipliers = [1.0, 1.0], [1.0] * 5
    fresh = type(model)(config).eval().requires_grad_(False)
    fresh.load_state_dict(model.state_dict())
    return fresh


_MIXER = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_PARTS = {
    "norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    **_ATTENTION,
}


def _tensors(
    model: Any, family: str, name: str, parameter: torch.Tensor
) -> list[tuple[str, Any, Callable[[torch.Tensor], Any]]]:
    """(GGUF name, values as they lie there, what puts back values that were read) of a tensor."""
    config = model.config

    def put(values: torch.Tensor) -> None:
        parameter.copy_(values.reshape(parameter.shape))

    parts = name.split(".")
    if "layers" not in parts:
        top = "output" if name == "lm_head.weight" else (
            "token_embd" if "embed" in name else "output_norm"
        )  # fmt: skip
        return [(f"{top}.weight", parameter.numpy(), put)]
    at = parts.index("layers") + 1
    block, inside, leaf = f"blk.{parts[at]}", parts[at + 1 : -1], parts[-1]
    mixer = bool(inside) and inside[0] in ("mixer", "mamba")
    groups = getattr(config, "n_groups", None) or getattr(config, "mamba_n_groups", 1)
    if leaf == "A_log":
        values = -torch.exp(parameter)
        return [(f"{block}.ssm_a", values.numpy()[:, None], lambda v: put(torch.log(-v)))]
    if leaf == "D":
        return [(f"{block}.ssm_d", parameter.numpy()[:, None], put)]
    if leaf == "dt_bias":
        return [(f"{block}.ssm_dt.bias", parameter.numpy(), put)]
    stem = inside[-1]
    if stem == "experts":  # [E, ...], gate and up of them two tensors in GGUF
        if leaf == "down_proj":
            return [(f"{block}.ffn_down_exps.weight", parameter.numpy(), put)]
        return [
            (f"{block}.{theirs}.weight", half.numpy(), half.copy_)
            for theirs, half in zip(
                ("ffn_gate_exps", "ffn_up_exps"), parameter.chunk(2, dim=1), strict=True
            )
        ]
    if stem == "router":
        return [(f"{block}.ffn_gate_inp.weight", parameter.numpy(), put)]
    shared = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if mixer and stem in _MIXER:
        values = parameter.squeeze(1) if stem == "conv1d" and leaf == "weight" else parameter
        if stem == "norm":
            values = parameter.reshape(groups, -1)
        return [(f"{block}.{_MIXER[stem]}.{leaf}", values.numpy(), put)]
    if stem == "input_linear":  # gate and up, two tensors in GGUF
        half = parameter.shape[0] // 2
        return [
            (f"{block}.{theirs}.{leaf}", rows.numpy(), rows.copy_)
            for theirs, rows in (
                (f"ffn_gate{shared}", parameter[:half]), (f"ffn_up{shared}", parameter[half:]),
            )
        ]  # fmt: skip
    if stem == "output_linear":
        return [(f"{block}.ffn_down{shared}.{leaf}", parameter.numpy(), put)]
    if family == "falcon_h1" and stem == "pre_ff_layernorm":
        return [(f"{block}.ffn_norm", parameter.numpy(), put)]
    if family == "granitemoehybrid" and stem in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if stem == "q_proj" else config.num_key_value_heads
        # The rows of a head interleave its two halves, for a rope that turns neighbours.
        went = torch.arange(parameter.shape[0]).reshape(heads, 2, -1).transpose(1, 2).reshape(-1)

        def undo(values: torch.Tensor) -> None:
            original = torch.empty_like(values)
            original[went] = values
            parameter.copy_(original)

        return [(f"{block}.{_PARTS[stem]}.{leaf}", parameter[went].numpy(), undo)]
    return [(f"{block}.{_PARTS[stem]}.{leaf}", parameter.numpy(), put)]


def _metadata(model: Any, family: str) -> dict[str, Any]:
    c = model.config
    fields: dict[str, Any] = {
        "context_length": 512, "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
    }  # fmt: skip
    if family == "mamba2":
        sizes = (c.num_heads, c.head_dim, c.state_size, c.n_groups, c.conv_kernel)
        fields |= {"feed_forward_length": 0, "attention.head_count": 0}
        eps = c.layer_norm_epsilon
    elif family == "nemotron_h":
        sizes = (c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, c.n_groups, c.conv_kernel)
        kinds = c.layers_block_type
        fields |= {
            "feed_forward_length": [c.intermediate_size if k == "mlp" else 0 for k in kinds],
            "attention.head_count": c.num_attention_heads,
            "attention.head_count_kv": [
                c.num_key_value_heads if k == "full_attention" else 0 for k in kinds
            ],
            "attention.key_length": c.head_dim, "attention.value_length": c.head_dim,
        }  # fmt: skip
        eps = c.layer_norm_epsilon
    else:
        sizes = (c.mamba_n_heads, c.mamba_d_head, c.mamba_d_state, c.mamba_n_groups,
                 c.mamba_d_conv)  # fmt: skip
        fields |= {
            "feed_forward_length": c.intermediate_size, "rope.freq_base": 10_000.0,
            "attention.head_count": c.num_attention_heads,
            "attention.head_count_kv": c.num_key_value_heads,
        }  # fmt: skip
        eps = c.rms_norm_eps
    if family == "granitemoehybrid":
        fields |= {
            "feed_forward_length": c.shared_intermediate_size,
            "attention.head_count_kv": [
                c.num_key_value_heads if k == "full_attention" else 0 for k in c.layer_types
            ],
            "attention.scale": float(c.attention_multiplier),
            "embedding_scale": float(c.embedding_multiplier),
            "residual_scale": float(c.residual_multiplier),
            "logit_scale": float(c.logits_scaling),
            "rope.scaling.finetuned": c.position_embedding_type == "rope",
        }  # fmt: skip
        if c.num_local_experts:
            fields |= {
                "feed_forward_length": c.intermediate_size,
                "expert_count": c.num_local_experts, "expert_used_count": c.num_experts_per_tok,
                "expert_shared_feed_forward_length": c.shared_intermediate_size,
            }  # fmt: skip
    if family == "falcon_h1":
        fields |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    heads, head_dim, state, groups, taps = sizes
    return fields | {
        "attention.layer_norm_rms_epsilon": eps, "ssm.conv_kernel": taps,
        "ssm.inner_size": heads * head_dim, "ssm.state_size": state,
        "ssm.time_step_rank": heads, "ssm.group_count": groups,
    }  # fmt: skip


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_array(key, value)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("path", type=Path, help="FILE.gguf, or a folder for safetensors")
    parser.add_argument("--type", help="Q8_0, Q4_0, ... for GGUF; F32, F16 or w4a16 for a folder")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    model = plain_model(given.family, seed=given.seed)
    if given.path.suffix != ".gguf":
        write_folder(given.path, model, given.type or "w4a16")
    elif given.family in GGUF_NAMES:
        write_gguf(given.path, model, given.type or "Q8_0")
    else:
        parser.error(f"llama.cpp has no {given.family}; give a folder")
    size = sum(p.numel() for p in model.parameters())
    print(f"{given.path}: {given.family}, {size:,} parameters, seed {given.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
