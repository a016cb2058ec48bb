"""Tiny GGUF models with seeded weights, and the plain transformers models they must equal.

The file is written with the gguf package's writer, its tensors quantized by ggml (libggml-python)
or by the gguf package. The reference is built from what lies in the file, dequantized by the gguf
package and put back into transformers' order by inverting llama.cpp's conversion element by
element: none of Tilewright's code takes part.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Q

F32 = npt.NDArray[np.float32]

HIDDEN, FEED_FORWARD, VOCABULARY = 256, 512, 320
_EXPORTED = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"}


@dataclass
class Tiny:
    """One tiny model to write.

    Attributes:
        architecture: GGUF's name of it.
        types: first matching stem of a tensor's name -> its type; "" matches all.
        layers, heads, kv_heads, head_dim: sizes.
        tied: the output matrix is the embedding.
        biases: stems of the block tensors that get a bias.
        metadata: further keys, without the architecture's prefix.
        config: changes to the reference's configuration.
        rope_factors: numbers for the tensor rope_freqs.weight.
    """

    architecture: str
    types: Mapping[str, str]
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    tied: bool = True
    biases: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    rope_factors: F32 | None = None
    theta: float = 10_000.0
    eps: float = 1e-5

    def type_of(self, name: str) -> str:
        return next(kind for stem, kind in self.types.items() if stem in name)


def write(path: Path, tiny: Tiny, *, seed: int = 0, tokens: bool = True) -> dict[str, F32]:
    """Write the file; returns its tensors dequantized, under their GGUF names."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, tiny.architecture)
    prefix = tiny.architecture
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(tiny.layers)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_layer_norm_rms_eps(tiny.eps)
    writer.add_rope_freq_base(tiny.theta)
    if tiny.head_dim * tiny.heads != HIDDEN or prefix == "gemma3":
        writer.add_key_length(tiny.head_dim)
        writer.add_value_length(tiny.head_dim)
    for key, value in tiny.metadata.items():
        _add(writer, f"{prefix}.{key}", value)
    if tokens:
        add_byte_tokenizer(writer)
    values = {}
    for name, shape in _shapes(tiny).items():
        if name.endswith("norm.weight"):
            weight = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            kind = "F32"
        elif name.endswith(".bias"):
            weight = rng.normal(0, 0.5, shape).astype(np.float32)
            kind = "F32"
        else:
            scale = 1.0 if "embd" in name else 1.5 / np.sqrt(shape[1])
            weight = rng.normal(0, scale, shape).astype(np.float32)
            kind = tiny.type_of(name)
        raw = quantize(weight, kind)
        writer.add_tensor(name, raw, raw_dtype=None if kind == "F32" else Q[kind])
        values[name] = weight if kind == "F32" else gguf.quants.dequantize(raw, Q[kind])
    if tiny.rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", tiny.rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def reference(tiny: Tiny, values: Mapping[str, F32]) -> torch.nn.Module:
    """The plain float32 transformers model of a written file."""
    import transformers

    names = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    }[tiny.architecture]
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": tiny.eps,
        "tie_word_embeddings": tiny.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": tiny.theta},
        **tiny.config,
    }
    config = getattr(transformers, names[0])(**options)
    model = getattr(transformers, names[1])(config).eval()
    state = {}
    for name, stored in values.items():
        value = torch.from_numpy(stored.copy())
        if tiny.architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            heads = tiny.heads if "attn_q." in name else tiny.kv_heads
            value = torch.from_numpy(_unpermute(stored, heads))
        if tiny.architecture == "gemma3" and name.endswith("norm.weight"):
            value = value - 1.0
        state[HF_NAMES[tiny.architecture](name)] = value
    if tiny.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    if tiny.architecture == "llama" and tiny.biases:
        for name in model.state_dict():
            if name.endswith(".bias") and name not in state:
                state[name] = torch.zeros_like(model.state_dict()[name])
    model.load_state_dict(state)
    return model


def _unpermute(stored: F32, heads: int) -> F32:
    """Invert the row order that llama.cpp's conversion gives q and k, by where rows went."""
    rows = np.arange(len(stored))
    went = rows.reshape(heads, 2, len(stored) // heads // 2).swapaxes(1, 2).reshape(-1)
    original = np.empty_like(stored)
    original[went] = stored
    return original


def _hf_names(ffn_norm: str, more: Mapping[str, str]) -> Callable[[str], str]:
    block = {
        "attn_norm": "input_layernorm",
        "ffn_norm": ffn_norm,
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        **more,
    }
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }

    def rename(name: str) -> str:
        if name in top:
            return top[name]
        _, layer, stem, leaf = name.split(".")
        return f"model.layers.{layer}.{block[stem]}.{leaf}"

    return rename


_PLAIN = _hf_names("post_attention_layernorm", {})
HF_NAMES = {
    "llama": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "gemma3": _hf_names(
        "pre_feedforward_layernorm",
        {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
}


def _shapes(tiny: Tiny) -> dict[str, tuple[int, ...]]:
    q, kv = tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN)}
    for layer in range(tiny.layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            "ffn_up.weight": (FEED_FORWARD, HIDDEN),
            "ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
        if tiny.architecture in ("qwen3", "gemma3"):
            block |= {
                "attn_q_norm.weight": (tiny.head_dim,),
                "attn_k_norm.weight": (tiny.head_dim,),
            }
        if tiny.architecture == "gemma3":
            block |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        block |= {f"{stem}.bias": block[f"{stem}.weight"][:1] for stem in tiny.biases}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (HIDDEN,)
    if not tiny.tied:
        shapes["output.weight"] = (VOCABULARY, HIDDEN)
    return shapes


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)
    ]


MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġ Ġ", "1 2")
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokens() -> tuple[list[str], list[int]]:
    """Tokens and token types of the tiny vocabulary: controls, bytes, merges, unused."""
    tokens = [*CONTROLS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    types = [3] * len(CONTROLS) + [1] * (len(tokens) - len(CONTROLS))
    while len(tokens) < VOCABULARY:
        tokens.append(f"<unused{len(tokens)}>")
        types.append(5)
    return tokens, types


def add_byte_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    tokens, types = byte_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def quantize(weight: F32, kind: str) -> npt.NDArray[Any]:
    """Rows of float32 in a GGUF type, as the writer takes them."""
    if kind == "F32":
        return weight
    if kind not in _EXPORTED:
        return np.asarray(gguf.quants.quantize(weight, Q[kind]))
    block, nbytes = gguf.GGML_QUANT_SIZES[Q[kind]]
    rows, columns = weight.shape
    out = np.empty((rows, columns // block * nbytes), dtype=np.uint8)
    source = np.ascontiguousarray(weight, dtype=np.float32)
    written = _ggml().ggml_quantize_chunk(
        int(Q[kind]),
        source.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        out.ctypes.data_as(ctypes.c_void_p),
        0,
        rows,
        columns,
        None,
    )
    assert written == out.nbytes
    return out


@functools.cache
def _ggml() -> ctypes.CDLL:
    import libggml

    folder = Path(libggml.__file__).parent / "lib64"
    library = ctypes.CDLL(str(folder / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_float),
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return library


def logits(model: torch.nn.Module, length: int = 40, seed: int = 1) -> torch.Tensor:
    """Logits [length, vocabulary] of a fixed random sequence."""
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, VOCABULARY, (1, length)))
    with torch.inference_mode():
        return model(input_ids=ids).logits[0].float()


def relative_error(got: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference over the largest right value."""
    return float((got - right).abs().max() / right.abs().max())
