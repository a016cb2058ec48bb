"""What is in a checkpoint, read from its headers: nothing is dequantized or loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.report.table import Column, Table, binary_bytes

if TYPE_CHECKING:
    from tilewright.formats.gguf import GGUFFile

__all__ = ["CheckpointInfo", "ShapeCount", "TypeCount", "describe", "info_json", "info_tables"]

DENSE_TYPES = frozenset({"F64", "F32", "F16", "BF16"})

PACKED = "packed"  # multiplied as stored, by our kernels
DEQUANTIZED = "dequantized"  # becomes an ordinary matrix while loading
DENSE = "dense"  # was never quantized

_HYPERPARAMETERS = {
    "block_count": "layers",
    "embedding_length": "embedding",
    "feed_forward_length": "feed_forward",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "context_length": "context",
}
_CONFIG_KEYS = {
    "num_hidden_layers": "layers",
    "hidden_size": "embedding",
    "intermediate_size": "feed_forward",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "max_position_embeddings": "context",
}


@dataclass(frozen=True)
class TypeCount:
    """All tensors of one stored type."""

    type: str
    tensors: int
    elements: int
    bytes: int
    runs: str


@dataclass(frozen=True)
class ShapeCount:
    """All matrices of one shape [N, K] and type."""

    N: int
    K: int
    type: str
    tensors: int
    runs: str


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint at a glance.

    Attributes:
        file: last part of its path.
        format: "gguf", "compressed-tensors", "gptq", "awq", or "safetensors" for a folder that
            is not quantized.
        name: what the checkpoint calls itself, or "".
        architecture: its own name of its architecture.
        supported: True if `tilewright.load` knows that architecture.
        hyperparameters: layers, embedding, feed_forward, heads, kv_heads, context, as far as
            they are stated.
        types: by bytes, largest first.
        shapes: by bytes of the weight, largest first.
    """

    file: str
    format: str
    name: str
    architecture: str
    supported: bool
    hyperparameters: dict[str, Any]
    types: tuple[TypeCount, ...]
    shapes: tuple[ShapeCount, ...]

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.types)

    @property
    def elements(self) -> int:
        return sum(t.elements for t in self.types)


@dataclass(frozen=True)
class _Tensor:
    type: str
    shape: tuple[int, ...]
    nbytes: int
    runs: str


def describe(path: Path) -> CheckpointInfo:
    """Read a GGUF file's or a safetensors folder's headers.

    Raises:
        FormatError: the checkpoint is damaged, or not one of these formats.
        UnsupportedError: a version or quantization scheme that is not read here.
    """
    if path.is_dir():
        inside = list(path.glob("*.gguf"))
        if len(inside) != 1 or any(path.glob("*.safetensors")):
            return _describe_folder(path)
        path = inside[0]
    from tilewright.formats.gguf import read_gguf

    return _describe_gguf(read_gguf(path))


def _describe_gguf(file: GGUFFile) -> CheckpointInfo:
    from tilewright.model.config_map import ARCHITECTURES

    tensors = []
    for tensor in file.tensors.values():
        if tensor.packed and len(tensor.shape) >= 2:
            runs = PACKED
        else:
            runs = DENSE if tensor.type_name in DENSE_TYPES else DEQUANTIZED
        tensors.append(_Tensor(tensor.type_name, tensor.shape, tensor.nbytes, runs))
    prefix = f"{file.architecture}."
    known = {
        short: file.metadata[prefix + key]
        for key, short in _HYPERPARAMETERS.items()
        if isinstance(file.metadata.get(prefix + key), int)
    }
    return CheckpointInfo(
        file=file.path.name,
        format="gguf",
        name=str(file.metadata.get("general.name", "")),
        architecture=file.architecture,
        supported=file.architecture in ARCHITECTURES,
        hyperparameters=known,
        types=_types(tensors),
        shapes=_shapes(tensors),
    )


def _describe_folder(path: Path) -> CheckpointInfo:
    from tilewright.formats.checkpoint import read_checkpoint
    from tilewright.model.config_map import MODEL_TYPES

    checkpoint = read_checkpoint(path)
    stored = _stored(path)
    tensors = [_Tensor(*stored[name], DENSE) for name in checkpoint.dense]
    parts: dict[str, dict[str, tuple[str, tuple[int, ...], int]]] = {}
    for name in stored.keys() - set(checkpoint.dense):
        prefix, _, part = name.rpartition(".")
        parts.setdefault(prefix, {})[part] = stored[name]
    scheme = checkpoint.quantization
    known: dict[tuple[tuple[str, tuple[int, ...]], ...], tuple[int, ...]] = {}
    for prefix in checkpoint.linears:
        # Equal parts make an equal matrix, so one of each kind is enough to unpack.
        key = tuple(sorted((part, shape) for part, (_, shape, _) in parts[prefix].items()))
        if key not in known:
            known[key] = checkpoint.linear(prefix).codes.shape
        nbytes = sum(size for _, _, size in parts[prefix].values())
        assert scheme is not None  # a checkpoint without a scheme lists no quantized linear
        tensors.append(_Tensor(scheme.weight_type, known[key], nbytes, PACKED))
    kind = str(checkpoint.config.get("model_type", ""))
    config = checkpoint.config.get("text_config") or checkpoint.config
    return CheckpointInfo(
        file=path.resolve().name,
        format="safetensors" if scheme is None else scheme.format,
        name="",
        architecture=kind,
        supported=kind in MODEL_TYPES,
        hyperparameters={
            short: config[key] for key, short in _CONFIG_KEYS.items() if key in config
        },
        types=_types(tensors),
        shapes=_shapes(tensors),
    )


def _stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """(dtype, shape, bytes) of every tensor, from the headers of a folder's files."""
    from safetensors import safe_open

    rows = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                part = handle.get_slice(name)
                shape = tuple(part.get_shape())
                kind = str(part.get_dtype())
                bits = int("".join(c for c in kind.split("_")[0] if c.isdigit()) or 8)
                rows[name] = (kind, shape, math.prod(shape) * bits // 8)
    return rows


def _types(tensors: Iterable[_Tensor]) -> tuple[TypeCount, ...]:
    groups: dict[tuple[str, str], list[_Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.type, tensor.runs), []).append(tensor)
    rows = [
        TypeCount(
            type=kind,
            tensors=len(group),
            elements=sum(math.prod(t.shape) for t in group),
            bytes=sum(t.nbytes for t in group),
            runs=runs,
        )
        for (kind, runs), group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _shapes(tensors: Iterable[_Tensor]) -> tuple[ShapeCount, ...]:
    counts: Counter[tuple[int, int, str, str]] = Counter()
    sizes: Counter[tuple[int, int, str, str]] = Counter()
    for tensor in tensors:
        if len(tensor.shape) < 2:
            continue
        *stacked, n, k = tensor.shape
        key = (n, k, tensor.type, tensor.runs)
        counts[key] += math.prod(stacked)
        sizes[key] += tensor.nbytes
    return tuple(
        ShapeCount(n, k, kind, counts[n, k, kind, runs], runs)
        for (n, k, kind, runs), _ in sizes.most_common()
    )


_TYPE_COLUMNS = (
    Column("type", "type"),
    Column("tensors", "tensors", right=True),
    Column("elements", "values", right=True, show=lambda row: f"{row['elements']:,}"),
    Column("bytes", "size", right=True, show=lambda row: binary_bytes(row["bytes"])),
    Column("runs", "runs"),
)
_SHAPE_COLUMNS = (
    Column("N", "N", right=True),
    Column("K", "K", right=True),
    Column("type", "type"),
    Column("tensors", "matrices", right=True),
    Column("runs", "runs"),
)


def info_tables(info: CheckpointInfo) -> list[Table]:
    """Two tables: types with counts and bytes, and the shapes of the matrices."""
    facts = ", ".join(f"{key} {value}" for key, value in info.hyperparameters.items())
    head = f"{info.file}: {info.format}, {info.architecture}"
    if info.name:
        head += f", {info.name!r}"
    head += f"\n{info.elements:,} values in {binary_bytes(info.bytes)}"
    head += f"; {facts}" if facts else ""
    return [
        Table(head, _TYPE_COLUMNS, [asdict(row) for row in info.types], notes=_notes(info)),
        Table("matrices [N, K]", _SHAPE_COLUMNS, [asdict(row) for row in info.shapes]),
    ]


def _notes(info: CheckpointInfo) -> list[str]:
    notes = []
    lost = sorted({row.type for row in info.types if row.runs == DEQUANTIZED})
    if lost:
        kinds = ", ".join(lost)
        notes.append(f"dequantized while loading, as no kernel multiplies it packed: {kinds}")
    if not info.supported:
        notes.append(f"architecture {info.architecture!r} does not load in this version")
    return notes


def info_json(info: CheckpointInfo) -> Mapping[str, Any]:
    """The same as one JSON object."""
    return {**asdict(info), "bytes": info.bytes, "elements": info.elements}
