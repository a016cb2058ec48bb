"""A tiny seeded Qwen3-MoE as a GGUF file and as 4-bit safetensors folders, and the plain
transformers model of the same weights.

The GGUF side stacks experts as llama.cpp's conversion does ([E, N, K], `ffn_gate_exps`); folders
name every expert (`mlp.experts.3.gate_proj`). The reference puts them into transformers' own
`gate_up_proj` and `down_proj`, one expert at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Q

from formats import w4_files
from model.checkpoint_models import quantization_config, quantize_w4
from model.gguf_models import add_byte_tokenizer, quantize

F32 = npt.NDArray[np.float32]

HIDDEN, INNER, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 256, 256, 320, 4, 2, 64


@dataclass
class TinyMoe:
    """One model to write.

    Attributes:
        experts, top_k, layers: sizes.
        types: GGUF only: first matching part of a tensor's name -> its type; "" matches all.
        inner: width of an expert.
        metadata: GGUF only: further keys without the architecture's prefix; None leaves one out.
    """

    experts: int = 8
    top_k: int = 2
    layers: int = 2
    types: Mapping[str, str] = field(default_factory=lambda: {"": "Q8_0"})
    inner: int = INNER
    metadata: Mapping[str, Any] = field(default_factory=dict)


def plain_model(tiny: TinyMoe, *, norm_topk_prob: bool = True, seed: int = 0) -> Any:
    """A seeded float32 transformers model whose tokens are spread over the experts."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * tiny.inner,
        moe_intermediate_size=tiny.inner, num_hidden_layers=tiny.layers, num_experts=tiny.experts,
        num_experts_per_tok=tiny.top_k, norm_topk_prob=norm_topk_prob, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=512,
        rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        elif "embed" in name:
            parameter.copy_(torch.randn_like(parameter))
        else:
            parameter.copy_(1.5 / parameter.shape[-1] ** 0.5 * torch.randn_like(parameter))
    return model


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, tiny: TinyMoe, *, tokens: bool = True, seed: int = 0) -> Any:
    """Write the file; returns the plain model of the values that lie in it."""
    model = plain_model(tiny, seed=seed)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    numbers = {
        "context_length": 512, "embedding_length": HIDDEN, "block_count": tiny.layers,
        "feed_forward_length": 2 * tiny.inner, "expert_feed_forward_length": tiny.inner,
        "expert_count": tiny.experts, "expert_used_count": tiny.top_k,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM,
        "rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6, **tiny.metadata,
    }  # fmt: skip
    for key, value in numbers.items():
        if isinstance(value, int):
            writer.add_uint32(f"qwen3moe.{key}", value)
        elif value is not None:
            writer.add_float32(f"qwen3moe.{key}", value)
    if tokens:
        add_byte_tokenizer(writer)

    def put(name: str, weight: torch.Tensor) -> torch.Tensor:
        values = weight.numpy()
        plain = name.endswith(("norm.weight", "ffn_gate_inp.weight"))
        kind = "F32" if plain else next(t for part, t in tiny.types.items() if part in name)
        rows = np.ascontiguousarray(values.reshape(-1, values.shape[-1]))
        raw = quantize(rows, kind)
        back = rows if kind == "F32" else gguf.quants.dequantize(raw, Q[kind])
        if values.ndim == 1:
            raw = raw[0]
        shaped = raw.reshape(*values.shape[:-1], raw.shape[-1])
        writer.add_tensor(name, shaped, raw_dtype=None if kind == "F32" else Q[kind])
        return torch.from_numpy(np.array(back).reshape(values.shape))

    for name, parameter in model.named_parameters():
        if ".experts." in name:
            layer = name.split(".")[2]
            if name.endswith("down_proj"):
                parameter.copy_(put(f"blk.{layer}.ffn_down_exps.weight", parameter))
            else:
                gate, up = parameter.split(tiny.inner, dim=1)
                gate = put(f"blk.{layer}.ffn_gate_exps.weight", gate)
                parameter.copy_(
                    torch.cat([gate, put(f"blk.{layer}.ffn_up_exps.weight", up)], dim=1)
                )
            continue
        stem, _, leaf = name.rpartition(".")
        known = _TOP.get(stem)
        if known is None:
            _, _, layer, inside = stem.split(".", 3)
            known = f"blk.{layer}.{_GGUF_NAMES[inside]}"
        parameter.copy_(put(f"{known}.{leaf}", parameter))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_folder(
    folder: Path, kind: str, tiny: TinyMoe, *, quantized_router: bool = False, **options: Any
) -> Any:
    """Write a folder in a format of `checkpoint_models.FORMATS`; returns the plain model of it.

    Norms, embeddings, the head and (unless asked otherwise) the router are float16.
    """
    model = plain_model(tiny, **options)
    folder.mkdir(exist_ok=True)
    tensors: dict[str, npt.NDArray[Any]] = {}

    def put(name: str, weight: torch.Tensor, linear: bool) -> torch.Tensor:
        """Store one matrix or vector; what a reader finds."""
        if kind == "none" or not linear:
            half = weight.to(torch.float16)
            tensors[f"{name}.weight"] = half.numpy()
            return half.float()
        packed, values = quantize_w4(weight.numpy(), kind)
        tensors.update({f"{name}.{part}": value for part, value in packed.items()})
        return torch.from_numpy(values)

    for name, parameter in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        if leaf == "down_proj":
            for e, weight in enumerate(parameter):
                parameter[e] = put(f"{stem}.{e}.down_proj", weight, True)
        elif leaf == "gate_up_proj":
            for e, weight in enumerate(parameter):
                halves = zip(("gate_proj", "up_proj"), weight.split(tiny.inner), strict=True)
                parameter[e] = torch.cat([put(f"{stem}.{e}.{p}", w, True) for p, w in halves])
        else:
            linear = "self_attn" in stem and stem.endswith("_proj")
            linear = linear or (quantized_router and stem.endswith("mlp.gate"))
            parameter.copy_(put(stem, parameter, linear))
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = ["Qwen3MoeForCausalLM"]
    quantization = quantization_config(kind)
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(w4_files.safetensors_file(tensors))
    return model
