"""Which shapes are measured, at how many rows, with which contenders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PARTS", "SHAPES", "Case", "arm_name", "cases_of", "weight_key"]

SHAPES = ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096))
"""N x K: Qwen3-8B's gate_up and down, Llama-3-8B's qkv and o."""

_BOTH = ("float16", "bfloat16")
_PREFILL = (1024, 2048, 4096, 8192)
_SMALL = (16, 32, 64, 128, 256, 512)
_DECODE = (1, 2, 4, 8)
_TINYGEMM_ROWS = 64  # it is made for few rows: at 4096 of them one launch takes 28 ms
_GEMLITE_ROWS = (1, 16, 1024)
_GEMLITE_SHAPES = ((6144, 4096), (4096, 4096))
"""Of its table for the H100; elsewhere it tunes for 10 s at each M, and runs at M = 1 only."""

_ERROR_ROWS = (
    0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 255, 257, 511, 513, 1000,
    2048, 4100, 8192,
)  # fmt: skip
_ERROR_WEIGHTS = (
    (4096, 4096, 128, False), (4096, 4096, 128, True), (4096, 4096, 32, False),
    (1536, 2048, 64, False), (1536, 2048, 256, True), (1536, 2048, -1, False),
    (333, 1440, 32, False), (1001, 1408, 128, False), (1001, 1408, 64, True),
    (72, 1000, -1, False), (72, 1000, -1, True), (520, 1088, 32, True),
)  # fmt: skip
"""(N, K, group, symmetric): every group size, tails of N and K, both kinds of zero point."""

PARTS = ("prefill", "small", "decode", "error")


@dataclass(frozen=True)
class Case:
    """One product, and what is done with it.

    Attributes:
        part: of `PARTS`.
        N, K, M: y[M, N] = x[M, K] @ W[N, K].T
        group: columns a scale; -1 for one scale a row.
        symmetric: no stored zero points.
        arms: (contender, dtype) pairs, the baseline first.
        caches: "cold", "rotating"; empty checks the result only.
        bias: also add one.
        tiles: tiles of ours by contender, as text, for contenders that are such tiles.
    """

    part: str
    N: int
    K: int
    M: int
    arms: tuple[tuple[str, str], ...]
    caches: tuple[str, ...] = ("cold",)
    group: int = 128
    symmetric: bool = False
    bias: bool = False
    tiles: tuple[tuple[str, str], ...] = ()

    @property
    def id(self) -> str:
        kind = f"g{self.group}-{'sym' if self.symmetric else 'asym'}"
        bias = "-bias" if self.bias else ""
        return f"{self.part}-{self.N}x{self.K}-{kind}-M{self.M}{bias}"


def arm_name(contender: str, dtype: str) -> str:
    return f"{contender}/{dtype}"


def weight_key(case: Case) -> tuple[int, int, int, bool]:
    """Cases of one key share their packed weights."""
    return case.N, case.K, case.group, case.symmetric


def cases_of(
    part: str,
    *,
    contenders: Sequence[str],
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rows: Sequence[int] | None = None,
) -> list[Case]:
    """The cases of a part, those of one weight together.

    Args:
        part: of `PARTS`.
        contenders: names; those a case has no use for are left out of it.
        shapes: N x K; the part "error" has its own, and "decode" takes the first two.
        rows: M instead of the part's own.
    """
    if part == "error":
        ours = tuple((c, d) for c in contenders if not _is_peer(c) for d in _BOTH)
        return [
            Case(part, n, k, m, ours, (), group, symmetric, bias=bool(i % 2))
            for i, (n, k, group, symmetric) in enumerate(_ERROR_WEIGHTS)
            for m in rows or _ERROR_ROWS
        ]
    if part == "prefill":
        return [
            Case(part, n, k, m, _arms(contenders, (n, k), m, both=("cublas", "tilewright")))
            for n, k in shapes
            for m in rows or _PREFILL
        ]
    if part == "small":
        return [
            Case(part, n, k, m, _arms(contenders, (n, k), m, both=("tilewright",)))
            for n, k in shapes
            for m in rows or _SMALL
        ]
    return [
        Case(
            part, n, k, m, _arms(contenders, (n, k), m, both=("tilewright",)), ("rotating", "cold")
        )
        for n, k in shapes[:2]
        for m in rows or _DECODE
    ]


def _is_peer(contender: str) -> bool:
    return contender in ("cublas", "tinygemm", "humming", "gemlite")


def _arms(
    contenders: Sequence[str], shape: tuple[int, int], m: int, both: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    found = []
    for name in contenders:
        if name == "tinygemm":
            if m <= _TINYGEMM_ROWS:
                found.append((name, "bfloat16"))
            continue
        if name == "gemlite" and not (m in _GEMLITE_ROWS if shape in _GEMLITE_SHAPES else m == 1):
            continue
        found.append((name, "float16"))
        if name in both:
            found.append((name, "bfloat16"))
    return tuple(found)
