"""What a kernel is launched with (`Tile`) and what it is launched for (`Problem`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.errors import TileError

__all__ = ["Problem", "Tile", "m_bucket"]

_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def m_bucket(m: int) -> int:
    """The table's bucket for a batch of `m` rows: the smallest power of two >= m, at most 8192.

    The tuner and the lookup both call this function, and nothing else rounds M.
    """
    if m < 1:
        return 1
    for bucket in _BUCKETS:
        if m <= bucket:
            return bucket
    return _BUCKETS[-1]


@dataclass(frozen=True)
class Problem:
    """One matrix product as a tile table sees it: y[M, N] = x[M, K] @ W[N, K].T

    Attributes:
        op: name of the op in the catalog, "w4a16" or "mmq".
        arch: architecture of the device, such as "cpu-avx512_vnni", "sm_90", "gfx1151".
        act_dtype: "float32", "float16" or "bfloat16".
        weight_type: "uint4" (zero points), "uint4b8" (symmetric) or a GGUF type name.
        activations: "float" keeps activations as they are; "int8" quantizes them to 8 bits.
        M, N, K: rows of x, rows of W, columns of both.
        group: values that share one scale; -1 means all of K.
    """

    op: str
    arch: str
    act_dtype: str
    weight_type: str
    activations: str
    M: int
    N: int
    K: int
    group: int

    def bucketed(self) -> Problem:
        """The same problem with M replaced by its bucket: the key of a table row."""
        return Problem(**{**self.__dict__, "M": m_bucket(self.M)})


@dataclass(frozen=True)
class Tile:
    """A frozen set of named launch choices; `algorithm` is always among them.

    Fields are read as attributes: ``tile.block_n``. A field the tile lacks raises TileError.
    """

    fields: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, algorithm: str, **fields: Any) -> Tile:
        return cls((("algorithm", algorithm), *sorted(fields.items())))

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any]) -> Tile:
        rest = {k: v for k, v in row.items() if k != "algorithm"}
        if "algorithm" not in row:
            raise TileError(f"tile {dict(row)!r} names no 'algorithm'; add that field")
        return cls.of(row["algorithm"], **rest)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for key, value in object.__getattribute__(self, "fields"):
                if key == name:
                    return value
        raise AttributeError(f"tile has no field {name!r}; it has {[k for k, _ in self.fields]}")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.fields)

    def replace(self, **fields: Any) -> Tile:
        """The same tile with some fields changed; TileError if it has no such field."""
        values = self.as_dict()
        unknown = sorted(set(fields) - set(values))
        if unknown:
            raise TileError(f"tile {self} has no field {unknown}; it has {sorted(values)}")
        return Tile.from_mapping({**values, **fields})

    def as_dict(self) -> dict[str, Any]:
        return dict(self.fields)

    def __str__(self) -> str:
        head, *rest = self.fields
        return f"{head[1]}({', '.join(f'{k}={v}' for k, v in rest)})"
