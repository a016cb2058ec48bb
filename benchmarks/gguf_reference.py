"""The plain transformers model of a GGUF file: every weight dequantized by the gguf package.

It begins at the file's bytes and takes nothing of Tilewright: neither its reader nor its
dequantizers nor its names. What a converted file differs in from transformers' tensors is undone
here: llama files hold the rows of q and k for a rope that turns neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

__all__ = ["plain_model"]

F32 = npt.NDArray[np.float32]

_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROWS = 1 << 13  # dequantized at a time


def plain_model(
    path: Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """A llama or qwen3moe file as transformers' model with dense weights, in eval mode."""
    import transformers

    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    arch = str(fields["general.architecture"])
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def get(key: str) -> Any:
        return fields[f"{arch}.{key}"]

    common: dict[str, Any] = {
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": get("rope.freq_base")},
    }
    if arch == "llama":
        config: Any = transformers.LlamaConfig(**common)
        kind: Any = transformers.LlamaForCausalLM
    else:
        config = transformers.Qwen3MoeConfig(
            **common, num_experts=get("expert_count"), norm_topk_prob=True,
            num_experts_per_tok=get("expert_used_count"), mlp_only_layers=[],
            moe_intermediate_size=get("expert_feed_forward_length"), decoder_sparse_step=1,
        )  # fmt: skip
        kind = transformers.Qwen3MoeForCausalLM
    with torch.device("meta"):
        model = kind(config)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    if arch != "llama":
        model.set_experts_implementation("eager")  # the others take no float64
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)
    state = dict(model.named_parameters())
    with ThreadPoolExecutor() as pool:
        for name, tensor in tensors.items():
            target, rows = _place(
                name, state, config.moe_intermediate_size if arch != "llama" else 0
            )
            heads = 0
            if arch == "llama" and "attn_q." in name:
                heads = config.num_attention_heads
            elif arch == "llama" and "attn_k." in name:
                heads = config.num_key_value_heads
            _copy(tensor, target[:, rows] if rows is not None else target, heads, pool)
    return model


def _place(
    name: str, state: dict[str, torch.Tensor], inner: int
) -> tuple[torch.Tensor, slice | None]:
    """The parameter that a tensor belongs to, and which rows of each expert."""
    stem, _, leaf = name.rpartition(".")
    if stem in _TOP:
        return state[f"{_TOP[stem]}.{leaf}"], None
    _, layer, stem = stem.split(".")
    prefix = f"model.layers.{layer}."
    if stem == "ffn_gate_exps":
        return state[f"{prefix}mlp.experts.gate_up_proj"], slice(0, inner)
    if stem == "ffn_up_exps":
        return state[f"{prefix}mlp.experts.gate_up_proj"], slice(inner, 2 * inner)
    if stem == "ffn_down_exps":
        return state[f"{prefix}mlp.experts.down_proj"], None
    return state[f"{prefix}{_BLOCK[stem]}.{leaf}"], None


def _copy(tensor: Any, target: torch.Tensor, heads: int, pool: ThreadPoolExecutor) -> None:
    flat = tensor.data.reshape(-1, tensor.data.shape[-1])

    def piece(at: int) -> F32:
        values: F32 = gguf.quants.dequantize(flat[at : at + _ROWS], tensor.tensor_type)
        return values

    values = torch.from_numpy(np.concatenate(list(pool.map(piece, _starts(len(flat))))))
    if heads:
        # Row r of a head lies at 2 r, or at 2 (r - d/2) + 1 for the second half.
        pairs = values.view(heads, -1, 2, values.shape[1])
        values = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], dim=1).flatten(0, 1)
    target.copy_(values.view(target.shape))


def _starts(rows: int) -> Iterator[int]:
    return iter(range(0, rows, _ROWS))
