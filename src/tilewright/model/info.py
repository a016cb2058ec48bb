"""What loading did: which tensors stayed packed, which did not, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LoadInfo", "TypeCount"]


@dataclass
class TypeCount:
    """Tensors of one type: how many, and their bytes in memory."""

    tensors: int = 0
    bytes: int = 0


@dataclass
class LoadInfo:
    """A loaded model's record, found at `model.tilewright_info`.

    Attributes:
        path: file or folder it came from.
        format: "gguf", "compressed-tensors", "gptq", "awq" or "safetensors".
        architecture: the checkpoint's own name of its architecture.
        file_bytes: size of the weights on disk.
        packed: matrices that are multiplied as they are stored, by type ("Q4_K", "uint4", ...).
        dequantized: quantized tensors that no kernel multiplies packed, by their stored type;
            they became ordinary matrices while loading.
        dense: tensors that were not quantized, by stored type, norms and biases included; on a GPU
            the embedding too, whose rows are looked up.
        notes: what a user should know, a sentence each.
    """

    path: str
    format: str
    architecture: str
    file_bytes: int
    packed: dict[str, TypeCount] = field(default_factory=dict)
    dequantized: dict[str, TypeCount] = field(default_factory=dict)
    dense: dict[str, TypeCount] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def count(self, fate: str, type_name: str, nbytes: int) -> None:
        """Add one tensor to `packed`, `dequantized` or `dense`."""
        kinds: dict[str, TypeCount] = getattr(self, fate)
        entry = kinds.setdefault(type_name, TypeCount())
        entry.tensors += 1
        entry.bytes += nbytes

    @property
    def packed_bytes(self) -> int:
        """Bytes of all packed matrices."""
        return sum(entry.bytes for entry in self.packed.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights in memory."""
        kinds = (self.packed, self.dequantized, self.dense)
        return sum(entry.bytes for kind in kinds for entry in kind.values())

    def dequantized_line(self) -> str | None:
        """One line naming what was dequantized, or None when everything quantized runs packed."""
        if not self.dequantized:
            return None
        kinds = ", ".join(f"{kind} x{entry.tensors}" for kind, entry in self.dequantized.items())
        return (
            f"{self.path}: dequantized while loading, as no kernel multiplies these types "
            f"packed: {kinds}"
        )
