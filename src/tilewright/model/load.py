"""Load a quantized checkpoint as a transformers model whose weights stay packed.

The model is created without any weights and filled tensor by tensor, so at no time are all
weights dequantized, and the packed ones of a GGUF file are views of the mapped file.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tilewright.errors import FormatError, UnsupportedError
from tilewright.model.hybrid_config import HYBRIDS
from tilewright.model.info import LoadInfo
from tilewright.model.join import join_products
from tilewright.model.norms import fuse_norms
from tilewright.model.placement import Placement, place, suited

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load"]

log = logging.getLogger("tilewright")

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load(
    path_or_repo_dir: str | Path,
    *,
    device: str | torch.device = "cpu",
    activations: str = "float",
    dtype: torch.dtype | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a GGUF file or a safetensors folder.

    Architectures: llama, qwen2, qwen3, gemma3 (text), qwen3_moe, mamba2, nemotron_h, bamba,
    granitemoehybrid and falcon_h1; of mixtures, qwen3_moe and granitemoehybrid. GGUF block types
    that have kernels stay packed, as do 4-bit linears in compressed-tensors, GPTQ and AWQ folders;
    other quantized types become ordinary matrices, named in one log line. `model.tilewright_info`
    is a `LoadInfo` that says what became of every tensor.

    Args:
        path_or_repo_dir: a .gguf file, a folder with config.json and safetensors (or with one
            .gguf file), or the id of a repository with safetensors on the Hugging Face hub.
        device: "cpu", or "cuda" for a GPU. There 4-bit safetensors and all GGUF types with kernels
            stay packed but for the embedding, which becomes a matrix of `dtype`.
        activations: "float" (weight-only), or "int8" for the faster path that rounds
            activations to 8 bits per block of 32.
        dtype: float32, float16 or bfloat16: of activations, norms, and matrices that are not
            packed. None for float32 on the CPU; on a GPU for float16, or for bfloat16 where the
            family's hidden states outgrow float16 (gemma3).

    Returns:
        (model, tokenizer): a `PreTrainedModel` in eval mode with its packed linears, and a
        tokenizer, None when the checkpoint has none.

    Raises:
        FormatError: damaged files; missing or unexpected tensors.
        UnsupportedError: an architecture, variant, tokenizer, device or dtype that is not
            supported; the message lists what is.
    """
    where = place(device, dtype)
    if activations not in ("float", "int8"):
        raise UnsupportedError(f"activations is {activations!r}; allowed are float, int8")
    if activations != "float" and not where.on_cpu:
        raise UnsupportedError(
            f"activations is {activations!r}; on a GPU activations stay as they are: 'float'"
        )
    _require_transformers()
    path = _find(path_or_repo_dir)
    if path.is_file():
        model, tokenizer = _load_gguf(path, activations, where, dtype)
    else:
        model, tokenizer = _load_folder(path, activations, where, dtype)
    if not where.on_cpu:
        fuse_norms(model)
    line = model.tilewright_info.dequantized_line()
    if line is not None:
        log.warning(line)
    return model, tokenizer


def _load_gguf(
    path: Path, activations: str, where: Placement, dtype: torch.dtype | None
) -> tuple[Any, Any]:
    from tilewright.formats.gguf import read_gguf
    from tilewright.model.config_map import config_from_gguf
    from tilewright.model.gguf_source import GGUFSource
    from tilewright.model.rope import rope_from_factors
    from tilewright.model.tokenizer import build_tokenizer, special_ids, stop_ids

    file = read_gguf(path)
    embedding = file.tensors.get("token_embd.weight")
    blocks = [name.split(".") for name in file.tensors if name.startswith("blk.")]
    biases = {parts[2] for parts in blocks if parts[-1] == "bias"}
    config = config_from_gguf(
        file.metadata,
        vocab_size=1 if embedding is None else embedding.shape[0],
        tied="output.weight" not in file.tensors,
        biases=frozenset(biases),
        file=path,
        stems=frozenset(parts[2] for parts in blocks if len(parts) > 2),
    )
    where = suited(where, config.model_type, dtype)
    info = LoadInfo(
        path=str(path),
        format="gguf",
        architecture=file.architecture,
        file_bytes=sum(part.stat().st_size for part in file.parts),
    )
    factors = file.tensors.get("rope_freqs.weight")
    rope = None
    # llama.cpp's falcon-h1 reads no factors of rope.
    if factors is not None and file.architecture != "falcon-h1":
        rope = rope_from_factors(config, factors.dequantize(), path)
    tokenizer = build_tokenizer(file.metadata, file=path)
    if tokenizer is None:
        info.notes.append("the file carries no tokenizer")
    elif len(tokenizer) > config.vocab_size:
        raise FormatError(
            f"{len(tokenizer)} tokens for {config.vocab_size} rows of the token embedding",
            file=path,
        )
    ids = special_ids(file.metadata, file=path)
    config.bos_token_id = ids.get("bos")
    config.eos_token_id = ids.get("eos")
    config.pad_token_id = ids.get("pad")
    model = _create(config, where.dtype)
    _fill(model, GGUFSource(file, config, where=where, info=info), where.dtype, activations)
    _rebuild_rotary(model, rope)
    model.to(where.device)
    # What walks a hybrid is transformers' code, which knows no joined products.
    if not where.on_cpu and file.architecture not in HYBRIDS:
        join_products(model)
    stops = stop_ids(file.metadata, file=path)
    _finish(model, info, bos=ids.get("bos"), stops=stops, pad=ids.get("pad"))
    return model, tokenizer


def _load_folder(
    path: Path, activations: str, where: Placement, dtype: torch.dtype | None
) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, GenerationConfig

    from tilewright.formats.checkpoint import read_checkpoint
    from tilewright.model.checkpoint_source import CheckpointSource
    from tilewright.model.config_map import config_from_checkpoint

    checkpoint = read_checkpoint(path)
    config = config_from_checkpoint(checkpoint.config, file=path)
    where = suited(where, config.model_type, dtype)
    info = LoadInfo(
        path=str(path),
        format=_format_name(checkpoint),
        architecture=str(checkpoint.config.get("model_type")),
        file_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
    )
    model = _create(config, where.dtype)
    source = CheckpointSource(checkpoint, where=where, info=info)
    _fill(model, source, where.dtype, activations)
    _rebuild_rotary(model, None)
    model.to(where.device)
    tokenizer = None
    if any((path / name).is_file() for name in _TOKENIZER_FILES):
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise FormatError(f"its tokenizer does not load: {error}", file=path) from error
    else:
        info.notes.append("the folder has no tokenizer")
    generation = None
    if (path / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(path)
    eos = config.eos_token_id
    stops = list(eos) if isinstance(eos, list | tuple) else [eos] if eos is not None else []
    _finish(
        model,
        info,
        bos=config.bos_token_id,
        stops=stops,
        pad=config.pad_token_id,
        generation=generation,
    )
    return model, tokenizer


def _create(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model with its modules and no storage."""
    from transformers import AutoModelForCausalLM

    attention = {} if config.model_type == "mamba2" else {"attn_implementation": "sdpa"}
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)
    return model


def _fill(model: nn.Module, source: Any, dtype: torch.dtype, activations: str) -> None:
    from tilewright.model.fill import fill

    fill(model, source, dtype=dtype, activations=activations)


def _rebuild_rotary(model: nn.Module, inv_freq: torch.Tensor | None) -> None:
    """Compute the rotary embedding's frequencies, which no checkpoint stores.

    Args:
        inv_freq: frequencies that the configuration has no words for, or None.
    """
    found = [path for path, _ in model.named_modules() if path.endswith("rotary_emb")]
    if not found:  # Mamba2 and NemotronH know positions by their states
        return
    rotary = type(model.get_submodule("model.rotary_emb"))(config=model.config)
    if inv_freq is not None:
        rotary.inv_freq = inv_freq
        rotary.original_inv_freq = inv_freq.clone()
    model.set_submodule("model.rotary_emb", rotary)


def _finish(
    model: Any,
    info: LoadInfo,
    *,
    bos: int | None,
    stops: list[int],
    pad: int | None,
    generation: Any = None,
) -> None:
    from transformers import GenerationConfig

    if pad is None and stops:
        pad = stops[0]
    if generation is None:
        generation = GenerationConfig(
            bos_token_id=bos, eos_token_id=stops or None, pad_token_id=pad
        )
    model.generation_config = generation
    model.eval()
    model.requires_grad_(False)
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not left, f"tensors without storage: {left}"
    model.tilewright_info = info


def _find(path_or_repo_dir: str | Path) -> Path:
    """A .gguf file or a folder with safetensors, fetched from the hub if it is not here."""
    path = Path(path_or_repo_dir).expanduser()
    if not path.exists():
        if isinstance(path_or_repo_dir, str) and _HUB_ID.match(path_or_repo_dir):
            path = _download(path_or_repo_dir)
            if not any((*path.glob("*.safetensors"), *path.glob("*.gguf"))):
                raise FormatError(
                    "this repository of the Hugging Face hub has no safetensors; of one with GGUF "
                    "files download the file that you want, and give its path",
                    file=path_or_repo_dir,
                )
        else:
            raise FormatError("there is no such file or folder; check the path", file=path)
    if path.is_file() or any(path.glob("*.safetensors")):
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise UnsupportedError(
            f"{path} holds {len(files)} GGUF files; name one of them: "
            f"{', '.join(f.name for f in files[:8])}"
        )
    raise FormatError("the folder holds neither safetensors nor a GGUF file", file=path)


def _download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # network, permission and not-found errors share no base class
        raise FormatError(
            f"there is no such file or folder here, and fetching it from the Hugging Face hub "
            f"failed ({type(error).__name__}: {str(error).splitlines()[0]}). Check the name, or "
            "download the model and give its path",
            file=repo_id,
        ) from error


def _format_name(checkpoint: Any) -> str:
    scheme = checkpoint.quantization
    return "safetensors" if scheme is None else str(scheme.format)


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "loading a model needs transformers, which is not installed: "
            "pip install 'tilewright[models]'"
        ) from error
