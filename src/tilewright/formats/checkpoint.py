"""Read a folder of safetensors: unquantized, or 4-bit as compressed-tensors, GPTQ or AWQ.

Everything that a header can tell is checked when the folder is opened; a linear's numbers are
read, checked and unpacked when it is asked for, one at a time. How the linears are quantized
comes from the config, never from shapes; shapes are then held against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import FormatError, UnsupportedError
from tilewright.formats.awq import AWQ
from tilewright.formats.compressed_tensors import CompressedTensors
from tilewright.formats.gptq import GPTQ
from tilewright.formats.tensor_store import TensorStore, read_json
from tilewright.formats.w4 import W4Codes
from tilewright.formats.w4_scheme import LinearReader, W4Scheme

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "W4Scheme", "read_checkpoint"]

_INDEX = "model.safetensors.index.json"
# Beside config.json, by the tools that do not write into it. The method is the file's own.
_SIDECARS = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": None,
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder of safetensors.

    Attributes:
        path: the folder.
        config: its config.json.
        quantization: how its linears are quantized; None when they are not.
        linears: prefixes of the quantized linears, such as "model.layers.0.self_attn.q_proj".
        dense: names of all tensors that are no part of a quantized linear's weight: norms,
            embeddings, biases, modules that were left unquantized.
    """

    path: Path
    config: dict[str, Any]
    quantization: W4Scheme | None
    linears: list[str]
    dense: list[str]
    _store: TensorStore
    _reader: LinearReader | None

    def linear(self, prefix: str) -> W4Codes:
        """Unpack one of `linears`; about N*K bytes.

        Raises:
            FormatError: no such linear; a scale is NaN or Inf; a group index is out of range.
            UnsupportedError: act-order groups of unequal size, or a zero point that is
                ambiguous in the format.
        """
        reader, scheme = self._reader, self.quantization
        if reader is None or scheme is None or f"{prefix}.{reader.main}" not in self._store:
            raise FormatError(
                f"no quantized linear {prefix!r}; it has {len(self.linears)}, see `linears`",
                file=self.path,
            )
        return reader.linear(self._store, prefix, scheme)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as stored, in the file's dtype. Raises FormatError if there is none."""
        return self._store.tensor(name)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder that holds config.json and safetensors files, sharded or not.

    Raises:
        FormatError: a file is missing, damaged, or not what the config says; file, tensor and
            offset are named where they are known.
        UnsupportedError: a quantization that is not read here.
    """
    path = Path(path)
    if not path.is_dir():
        what = "this is a file; its folder is needed" if path.exists() else "no such folder"
        raise FormatError(f"{what}; check the path", file=path)
    config = read_json(path / "config.json")
    reader, scheme = _quantization(path, config)
    store = TensorStore(_files(path))
    _hold_index(path, store)
    if reader is None or scheme is None:
        return Checkpoint(path, config, None, [], list(store), store, None)
    linears = _linears(path, store, reader, scheme)
    parts = {f"{prefix}.{p}" for prefix in linears for p in (reader.main, *reader.others)}
    dense = [name for name in store if name not in parts]
    return Checkpoint(path, config, scheme, linears, dense, store, reader)


def _files(path: Path) -> list[Path]:
    """The safetensors files of a folder."""
    if (path / _INDEX).exists():
        return [path / name for name in sorted(set(_weight_map(path / _INDEX).values()))]
    found = sorted(path.glob("*.safetensors"))
    if path / "model.safetensors" in found:
        return [path / "model.safetensors"]
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(f.name for f in found[:4])
        raise FormatError(
            f"{len(found)} safetensors files ({names}) and no {_INDEX} to say how they belong "
            "together; fetch the index too",
            file=path,
        )
    pickles = [f.name for pattern in _PICKLES for f in sorted(path.glob(pattern))]
    if pickles:
        raise FormatError(
            f"only pickles here ({', '.join(pickles[:3])}), which can run code and are not read; "
            "convert the model to safetensors",
            file=path,
        )
    raise FormatError("no safetensors file here; check that the model is complete", file=path)


def _weight_map(index: Path) -> Mapping[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"its weight_map is {type(weight_map).__name__}, or empty", file=index)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or file != Path(file).name:
            raise FormatError(
                f"{file!r} is no plain file name in this folder", file=index, tensor=name
            )
    return weight_map


def _hold_index(path: Path, store: TensorStore) -> None:
    """Every tensor that an index lists must be in the file that it says."""
    if not (path / _INDEX).exists():
        return
    for name, file in _weight_map(path / _INDEX).items():
        if name not in store or store[name].file.name != file:
            raise FormatError(f"{file} does not hold it", file=path / _INDEX, tensor=name)


def _quantization(
    path: Path, config: Mapping[str, Any]
) -> tuple[LinearReader | None, W4Scheme | None]:
    """Reader and scheme that the config names, or None and None."""
    file, method = path / "config.json", None
    found: Any = config.get("quantization_config") or config.get("compression_config")
    if not found:
        for name, own_method in _SIDECARS.items():
            if (path / name).exists():
                file, method = path / name, own_method
                found = read_json(file)
                break
        else:
            return None, None
    if not isinstance(found, dict):
        raise FormatError(
            f"the quantization config is a {type(found).__name__}; it must be an object", file=file
        )
    said = found.get("quant_method", method)
    reader = _reader(said, found)
    if reader is None:
        raise UnsupportedError(
            f"{file}: quant_method is {said!r}"
            f"{_packing(found)}; compressed-tensors, gptq, awq and auto-round exports of "
            "the latter two are read"
        )
    return reader, reader.scheme(found, file)


def _packing(found: Mapping[str, Any]) -> str:
    return f" with packing {found['packing_format']!r}" if "packing_format" in found else ""


def _reader(method: object, found: Mapping[str, Any]) -> LinearReader | None:
    if method in ("auto-round", "auto_round", "intel/auto-round"):
        packing = found.get("packing_format")
        if packing == "auto_round:auto_gptq":
            return GPTQ()
        return AWQ() if packing == "auto_round:auto_awq" else None
    if method == "gptq":
        return GPTQ()
    if method == "awq":
        return AWQ()
    return CompressedTensors() if method == "compressed-tensors" else None


def _linears(path: Path, store: TensorStore, reader: LinearReader, scheme: W4Scheme) -> list[str]:
    """Prefixes of the quantized linears, each checked against the scheme."""
    ending = f".{reader.main}"
    linears = [name.removesuffix(ending) for name in store if name.endswith(ending)]
    if not linears:
        raise FormatError(
            f"the config says {scheme.format} and no tensor ends in {ending}; "
            "config and weights do not belong together",
            file=path,
        )
    known = set(linears)
    for name in store:
        prefix, _, part = name.rpartition(".")
        if part in reader.others and prefix not in known:
            raise FormatError(
                f"{prefix}{ending} is missing, to which this tensor belongs",
                file=store[name].file,
                tensor=name,
            )
    for prefix in linears:
        if f"{prefix}.weight" in store:
            raise FormatError(
                f"{prefix}{ending} is here too; a linear has one weight",
                file=store[f"{prefix}.weight"].file,
                tensor=f"{prefix}.weight",
            )
        reader.check(store, prefix, scheme)
    return linears
