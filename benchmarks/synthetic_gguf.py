"""Seeded GGUF files with the shapes of real models: every block valid, every weight random.

    python benchmarks/synthetic_gguf.py llama-3-8b /tmp/llama-3-8b.gguf
    python benchmarks/synthetic_gguf.py qwen3-30b-a3b /tmp/moe.gguf --layers 4 --device cuda

Types are those that llama.cpp's Q4_K_M gives each tensor: Q6_K for the output matrix and, in half
of the layers, for attn_v and ffn_down; Q4_K for every other matrix; F32 for norms and routers. The
codes are uniform, the scales such that a row of K weights has a deviation of about 1 / sqrt(K):
activations keep their size through any number of layers. There is no tokenizer
(`tokenizer.ggml.model` is "none"), which llama-bench takes too.

Blocks are made a tensor at a time and written as they are made. A seed gives the same file on every
machine, another one on a GPU than on the CPU: their random numbers differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q

__all__ = ["SHAPES", "Shape", "draw_blocks", "tensors_of", "write_model"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Attributes:
        architecture: "llama" or "qwen3moe", GGUF's names.
        feed_forward: rows of gate; of a dense layer, or of one expert.
        experts, used: 0 for a dense model.
    """

    architecture: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    theta: float
    eps: float
    context: int
    experts: int = 0
    used: int = 0


SHAPES = {
    "llama-3-8b": Shape(
        "llama", 32, 4096, 14336, 32, 8, 128, 128256, theta=5e5, eps=1e-5, context=32768
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 48, 2048, 768, 32, 4, 128, 151936, theta=1e6, eps=1e-6, context=40960,
        experts=128, used=8,
    ),
}  # fmt: skip
"""By name. Llama-3-8B's context is longer here than Meta's 8192, so that long prompts fit."""


def tensors_of(shape: Shape) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape (numpy's order) of every tensor, in the order of the file."""
    wide, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    yield "token_embd.weight", "Q4_K", (shape.vocabulary, hidden)
    for layer in range(shape.layers):
        better = "Q6_K" if _more_bits(layer, shape.layers) else "Q4_K"
        block: list[tuple[str, str, tuple[int, ...]]] = [
            ("attn_norm", "F32", (hidden,)),
            ("attn_q", "Q4_K", (wide, hidden)),
            ("attn_k", "Q4_K", (kv, hidden)),
            ("attn_v", better, (kv, hidden)),
            ("attn_output", "Q4_K", (hidden, wide)),
            ("ffn_norm", "F32", (hidden,)),
        ]
        if shape.experts:
            e, inner = shape.experts, shape.feed_forward
            block += [
                ("attn_q_norm", "F32", (shape.head_dim,)),
                ("attn_k_norm", "F32", (shape.head_dim,)),
                ("ffn_gate_inp", "F32", (e, hidden)),
                ("ffn_gate_exps", "Q4_K", (e, inner, hidden)),
                ("ffn_up_exps", "Q4_K", (e, inner, hidden)),
                ("ffn_down_exps", better, (e, hidden, inner)),
            ]
        else:
            block += [
                ("ffn_gate", "Q4_K", (shape.feed_forward, hidden)),
                ("ffn_up", "Q4_K", (shape.feed_forward, hidden)),
                ("ffn_down", better, (hidden, shape.feed_forward)),
            ]
        for stem, kind, size in block:
            yield f"blk.{layer}.{stem}.weight", kind, size
    yield "output_norm.weight", "F32", (hidden,)
    yield "output.weight", "Q6_K", (shape.vocabulary, hidden)


def _more_bits(layer: int, layers: int) -> bool:
    """Whether llama.cpp's Q4_K_M gives attn_v and ffn_down of this layer 6 bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def draw_blocks(
    kind: str, rows: int, columns: int, generator: torch.Generator, deviation: float
) -> torch.Tensor:
    """Random valid blocks: uint8 [rows, row_bytes] on the generator's device.

    Args:
        kind: "Q4_K" or "Q6_K".
        columns: a multiple of 256.
        deviation: of the values, about.
    """
    block, nbytes = GGML_QUANT_SIZES[Q[kind]]
    if columns % block:
        raise ValueError(f"{columns} columns are no multiple of the {block} of a {kind} block")
    count, device = rows * columns // block, generator.device
    words = torch.empty(-(-count * nbytes // 8), dtype=torch.int64, device=device)
    words.random_(-(1 << 63), None, generator=generator)
    blocks = words.view(torch.uint8)[: count * nbytes].view(count, nbytes)
    # Scales of blocks differ by up to a quarter.
    spread = torch.empty(count, 1, device=device).uniform_(0.8, 1.25, generator=generator)
    if kind == "Q4_K":
        _scale_q4_k(blocks, spread * deviation, generator)
    elif kind == "Q6_K":
        _scale_q6_k(blocks, spread * deviation)
    else:
        raise ValueError(f"type {kind!r}; Q4_K and Q6_K can be drawn")
    return blocks.view(rows, -1)


def _scale_q4_k(blocks: torch.Tensor, deviation: torch.Tensor, generator: torch.Generator) -> None:
    """d, dmin and eight 6-bit scales and minimums, over codes 0..15 that are uniform.

    value = d * sc * q - dmin * m with dmin = 7.5 d and m near sc: the mean is near 0.
    """
    count, device = len(blocks), blocks.device
    scales = torch.empty(count, 8, dtype=torch.int32, device=device)
    scales.random_(32, 62, generator=generator)
    jitter = torch.empty_like(scales).random_(-2, 3, generator=generator)
    minimums = scales + jitter
    d = deviation / (47.0 * 4.61)  # mean of sc, and the deviation of 0..15
    blocks[:, 0:2] = d.half().view(torch.uint8)
    blocks[:, 2:4] = (7.5 * d).half().view(torch.uint8)
    first, second = scales[:, :4], scales[:, 4:]
    low, high = minimums[:, :4], minimums[:, 4:]
    blocks[:, 4:8] = (first | (second >> 4) << 6).to(torch.uint8)
    blocks[:, 8:12] = (low | (high >> 4) << 6).to(torch.uint8)
    blocks[:, 12:16] = ((second & 15) | (high & 15) << 4).to(torch.uint8)


def _scale_q6_k(blocks: torch.Tensor, deviation: torch.Tensor) -> None:
    """d and sixteen signed scales of 64..127, over codes -32..31 that are uniform."""
    scales = blocks[:, 192:208]  # random bytes: their top bit becomes the sign
    magnitude = (scales & 63) + 64
    blocks[:, 192:208] = torch.where(scales > 127, 256 - magnitude.int(), magnitude.int()).to(
        torch.uint8
    )
    d = deviation / (97.0 * 18.5)  # mean magnitude, and the deviation of -32..31
    blocks[:, 208:210] = d.half().view(torch.uint8)


def write_model(
    path: Path, shape: Shape, *, seed: int = 0, device: str | torch.device = "cpu"
) -> int:
    """Write the file; returns its bytes.

    Args:
        device: where random numbers are made: "cuda" makes the gigabytes of a large model faster.
    """
    generator = torch.Generator(device).manual_seed(seed)
    writer = gguf.GGUFWriter(path, shape.architecture)
    _describe(writer, shape)
    for name, kind, size in tensors_of(shape):
        if kind == "F32":
            writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * int(np.prod(size)))
            continue
        block, nbytes = GGML_QUANT_SIZES[Q[kind]]
        stored = (*size[:-1], size[-1] // block * nbytes)
        writer.add_tensor_info(
            name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=Q[kind]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, kind, size in tensors_of(shape):
        writer.write_tensor_data(_data(name, kind, size, generator))
    writer.close()
    return path.stat().st_size


def _data(
    name: str, kind: str, size: tuple[int, ...], generator: torch.Generator
) -> np.ndarray[Any, Any]:
    if kind != "F32":
        deviation = 1.0 if name.startswith("token_embd") else size[-1] ** -0.5
        rows = int(np.prod(size[:-1]))
        return draw_blocks(kind, rows, size[-1], generator, deviation).cpu().numpy()
    values = torch.empty(size, device=generator.device)
    if len(size) == 1:
        values.uniform_(0.8, 1.2, generator=generator)  # a norm
    else:
        values.normal_(0, size[-1] ** -0.5, generator=generator)  # a router
    return values.cpu().numpy()


def _describe(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"synthetic {shape.architecture}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(shape.eps)
    if shape.experts:
        # Qwen3's files state a dense width too, which no layer of this model has.
        writer.add_feed_forward_length(shape.feed_forward * shape.used)
        writer.add_expert_feed_forward_length(shape.feed_forward)
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
    else:
        writer.add_feed_forward_length(shape.feed_forward)
    writer.add_tokenizer_model("none")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--vocabulary", type=int, help="fewer tokens than the model has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where random numbers are made")
    args = parser.parse_args(words)
    shape = SHAPES[args.model]
    shape = replace(
        shape,
        layers=args.layers or shape.layers,
        vocabulary=args.vocabulary or shape.vocabulary,
    )
    started = time.monotonic()
    size = write_model(args.path, shape, seed=args.seed, device=args.device)
    print(f"{args.path}: {size} bytes ({size / 2**30:.2f} GiB), {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
