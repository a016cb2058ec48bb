"""Write 4-bit checkpoints of every format, plainly: one nibble at a time, from the definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from formats.byte_files import safetensors_file

U8 = npt.NDArray[np.uint8]
Tensors = dict[str, npt.NDArray[Any]]


def pack_words(values: npt.NDArray[Any], nibble: tuple[int, ...] = tuple(range(8))) -> Any:
    """[R, C] of 0..15 -> int32 [R, ceil(C/8)]; column j of eight goes to nibble[j]."""
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // 8)), dtype=np.uint32)
    for c in range(columns):
        words[:, c // 8] |= values[:, c].astype(np.uint32) << np.uint32(4 * nibble[c % 8])
    return words.view(np.int32)


def random_weight(
    n: int, k: int, g: int, symmetric: bool, seed: int = 0
) -> tuple[U8, npt.NDArray[np.float16], U8 | None]:
    """codes [N, K], scales [N, K/G], zeros [N, K/G] or None; zeros leave out 0 (see GPTQ v1)."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scales = (0.1 * rng.standard_normal((n, k // g))).astype(np.float16)
    zeros = None if symmetric else rng.integers(1, 16, (n, k // g), dtype=np.uint8)
    return codes, scales, zeros


def compressed_tensors(codes: U8, scales: Any, zeros: U8 | None) -> Tensors:
    tensors = {
        "weight_packed": pack_words(codes),
        "weight_scale": scales,
        "weight_shape": np.array(codes.shape, dtype=np.int64),
    }
    if zeros is not None:
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_words(zeros.T).T)
    return tensors


def gptq(codes: U8, scales: Any, zeros: U8 | None, *, version: int = 1) -> Tensors:
    stored = np.full(scales.shape, 8) if zeros is None else zeros
    return {
        "qweight": np.ascontiguousarray(pack_words(codes).T),
        "scales": np.ascontiguousarray(scales.T),
        "qzeros": pack_words(stored.T - (1 if version == 1 else 0)),
    }


def awq(codes: U8, scales: Any, zeros: U8 | None) -> Tensors:
    nibble = (0, 4, 1, 5, 2, 6, 3, 7)
    stored = np.full(scales.shape, 8) if zeros is None else zeros
    return {
        "qweight": pack_words(codes.T, nibble),
        "scales": np.ascontiguousarray(scales.T),
        "qzeros": pack_words(stored.T, nibble),
    }


def gptq_config(g: int = 32, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": g, "sym": symmetric, **more}


def awq_config(g: int = 32, symmetric: bool = False, **more: Any) -> dict[str, Any]:
    config = {"quant_method": "awq", "bits": 4, "group_size": g, "zero_point": not symmetric}
    return {**config, "version": "gemm", **more}


def compressed_config(
    g: int | None = 32, symmetric: bool = True, top: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    """`weights` replaces fields of the weights' scheme, `top` those of the config."""
    scheme = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if g is None else "group",
        "group_size": g,
        "actorder": None,
        **weights,
    }
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **(top or {}),
    }


def write_checkpoint(
    folder: Path,
    quantization: dict[str, Any] | None,
    tensors: Tensors,
    *,
    prefix: str = "m.q_proj.",
    dense: Tensors | None = None,
) -> Path:
    """config.json and model.safetensors; names in `tensors` get the prefix."""
    folder.mkdir(exist_ok=True)
    config: dict[str, Any] = {"model_type": "llama"}
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    named = {prefix + name: values for name, values in tensors.items()}
    (folder / "model.safetensors").write_bytes(safetensors_file({**named, **(dense or {})}))
    return folder
