"""Tiny safetensors folders in every 4-bit format, and the plain models they must equal.

A seeded transformers model is rounded to 4 bits by the definition (code = round(w / scale) +
zero), written under the model's own tensor names with `formats.w4_files`, and kept as a plain
float32 model of the weights that the codes stand for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from formats import w4_files

VOCABULARY, HIDDEN, FEED_FORWARD, LAYERS = 96, 128, 256, 2
GROUP = 32
FORMATS = (
    "none",
    "compressed-sym",
    "compressed-asym",
    "gptq-sym",
    "gptq-asym",
    "gptq-act-order",
    "awq-asym",
)


def plain_model(architecture: str, *, tied: bool = True, seed: int = 0) -> Any:
    """A seeded float32 transformers model whose logits depend on every layer."""
    import transformers

    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if architecture == "gemma3_text":
        options |= {
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    names = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    }[architecture]
    config = getattr(transformers, names[0])(**options)
    torch.manual_seed(seed)
    model = getattr(transformers, names[1])(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            centre = 0.0 if architecture == "gemma3_text" else 1.0
            parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
        elif "embed" in name:
            parameter.copy_(torch.randn_like(parameter))
        elif name.endswith(".bias"):
            parameter.copy_(0.5 * torch.randn_like(parameter))
        else:
            parameter.copy_(1.5 / parameter.shape[1] ** 0.5 * torch.randn_like(parameter))
    return model


def write_checkpoint(folder: Path, model: Any, kind: str, *, prefix: str = "") -> None:
    """Write `model` in a format of FORMATS and change its weights to what was written.

    Norms, biases, embeddings and an untied lm_head are stored in float16.
    """
    folder.mkdir(exist_ok=True)
    linears = {
        f"{name}.weight": name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, parameter in model.named_parameters():
        if kind != "none" and name in linears:
            packed, values = quantize_w4(parameter.numpy(), kind)
            tensors |= {f"{prefix}{linears[name]}.{part}": v for part, v in packed.items()}
            parameter.copy_(torch.from_numpy(values))
        else:
            half = parameter.to(torch.float16)
            tensors[prefix + name] = half.numpy()
            parameter.copy_(half.float())
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    quantization = quantization_config(kind)
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    raw = w4_files.safetensors_file(tensors)
    (folder / "model.safetensors").write_bytes(raw)


def quantization_config(kind: str) -> dict[str, Any] | None:
    symmetric = not kind.endswith("asym")
    if kind == "none":
        return None
    if kind.startswith("compressed"):
        return w4_files.compressed_config(GROUP, symmetric)
    if kind.startswith("gptq"):
        more = {"desc_act": True} if kind == "gptq-act-order" else {}
        return w4_files.gptq_config(GROUP, symmetric, **more)
    return w4_files.awq_config(GROUP, symmetric)


def quantize_w4(weight: Any, kind: str) -> tuple[dict[str, Any], Any]:
    """The format's tensors, and the float32 weight that they stand for."""
    n, k = weight.shape
    group_of = np.arange(k) // GROUP
    if kind == "gptq-act-order":
        group_of = np.random.default_rng(k).permutation(group_of)
    symmetric = not kind.endswith("asym")
    groups = k // GROUP
    scales = np.empty((n, groups), dtype=np.float16)
    zeros = np.full((n, groups), 8, dtype=np.uint8)
    for g in range(groups):
        part = weight[:, group_of == g]
        if symmetric:
            scales[:, g] = np.abs(part).max(axis=1) / 7
        else:
            low, high = part.min(axis=1), part.max(axis=1)
            scales[:, g] = (high - low) / 15
            zeros[:, g] = np.clip(np.rint(-low / scales[:, g].astype(np.float32)), 1, 15)
    scale = scales.astype(np.float32)[:, group_of]
    zero = zeros[:, group_of].astype(np.float32)
    codes = np.clip(np.rint(weight / scale) + zero, 0, 15).astype(np.uint8)
    values = scale * (codes.astype(np.float32) - zero)
    stored_zeros = None if symmetric else zeros
    if kind.startswith("compressed"):
        return w4_files.compressed_tensors(codes, scales, stored_zeros), values
    if kind.startswith("gptq"):
        tensors = w4_files.gptq(codes, scales, stored_zeros)
        if kind == "gptq-act-order":
            tensors["g_idx"] = group_of.astype(np.int32)
        return tensors, values
    return w4_files.awq(codes, scales, stored_zeros), values


def logits(model: Any, length: int = 40) -> torch.Tensor:
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, VOCABULARY, (1, length)))
    with torch.inference_mode():
        return model(input_ids=ids).logits[0].float()
