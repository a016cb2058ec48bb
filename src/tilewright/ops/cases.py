"""The cases of a matrix product: a grid over shapes and batches, and one of each special kind.

Batches lie on both sides of every threshold that kernels switch at: 1 and 2 (matrix-vector),
5 and 6 (the largest decode batch), 16 and 17 (a row tile), 63 (a tile and its tail), 512 (many
tiles). Ops give the shapes: ragged and whole N, K of one block and of many, K tails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tilewright.ops.contract import DTYPES, Case

__all__ = [
    "BATCHES",
    "Shape",
    "edge_scales",
    "grid_cases",
    "ordered",
    "sequence_lengths",
    "special_cases",
]

BATCHES = (1, 2, 5, 6, 16, 17, 63)

Shape = tuple[int, int, int]
"""N, K and the group size (0 when the weight type fixes it)."""

_DTYPES = tuple(DTYPES)
_PACKED = 4


def grid_cases(
    op: str, weight_type: str, shapes: Sequence[Shape], *, activations: str, dtypes: int = 1
) -> list[Case]:
    """Every shape at every batch, each with `dtypes` of the three dtypes in turn."""
    cases = []
    for i, (n, k, group) in enumerate(shapes):
        for j, m in enumerate(BATCHES):
            for step in range(dtypes):
                dtype = _DTYPES[(i + j + step) % len(_DTYPES)]
                cases.append(Case(op, weight_type, dtype, m, n, k, group, activations))
    return cases


def special_cases(
    op: str, weight_type: str, ragged: Shape, whole: Shape, *, activations: str
) -> list[Case]:
    """No rows, many rows, outliers, views, three dimensions, bias, and all of these at once.

    Args:
        ragged: a shape whose N fits no tile.
        whole: a shape whose N fits every tile.
    """
    fp32, fp16, bf16 = _DTYPES

    def case(dtype: str, m: int, shape: Shape, *flags: str) -> Case:
        return Case(op, weight_type, dtype, m, *shape, activations, flags)

    return [
        *(case(dtype, 0, ragged) for dtype in _DTYPES),
        case(fp16, 512, ragged),
        case(fp32, 512, whole),
        *(case(dtype, m, ragged, "outliers") for m in (1, 17) for dtype in _DTYPES),
        case(fp32, 63, whole, "outliers"),
        case(fp16, 5, whole, "strided"),
        case(fp32, 17, ragged, "strided"),
        case(bf16, 6, ragged, "transposed"),
        case(fp32, 16, whole, "transposed"),
        case(fp16, 6, ragged, "ndim3"),
        case(bf16, 17, whole, "ndim3"),
        case(fp32, 1, ragged, "bias"),
        case(bf16, 5, whole, "bias"),
        case(fp16, 16, whole, "bias"),
        case(fp32, 63, ragged, "bias"),
        *(case(dtype, m, ragged, "edge") for m in (1, 17) for dtype in _DTYPES),
        case(fp16, 16, ragged, "bias", "ndim3", "outliers", "strided"),
        case(fp32, 5, ragged, "bias", "edge", "transposed"),
    ]


def ordered(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Without repeats, cases of one weight type together and those of one weight in a row."""
    unique = {case.id: case for case in cases}
    types = list(dict.fromkeys(case.weight_type for case in unique.values()))
    return tuple(
        sorted(
            unique.values(),
            key=lambda c: (types.index(c.weight_type), str(c.weight_key), c.activations, c.M),
        )
    )


def sequence_lengths(case: Case) -> list[int]:
    """Tokens of each sequence of a case; they are M in all.

    Of equal length; with "packed" (four of them, if the case does not say) the second is empty, the
    third has one token, and the others grow by a sixth each.

    Raises:
        ValueError: sequences of equal length do not divide M.
    """
    if "packed" not in case.flags:
        count = max(case.sequences, 1)
        if case.M % count:
            raise ValueError(f"M is {case.M}; it must be a multiple of the sequences, {count}")
        return [case.M // count] * count
    count = case.sequences or _PACKED
    lengths = [0] * count
    if count > 2 and case.M:
        lengths[2] = 1
    others = [i for i in range(count) if i not in (1, 2)] or [0]
    weights = np.array([6.0 + i for i in range(len(others))])
    ends = np.floor((case.M - sum(lengths)) * np.cumsum(weights) / weights.sum() + 1e-6)
    for i, tokens in zip(others, np.diff(ends, prepend=0.0), strict=True):
        lengths[i] = int(tokens)
    return lengths


def edge_scales(scales: npt.NDArray[np.float64], act_dtype: str) -> None:
    """Give rows 1 to 5 of every 8 one extreme each, for cases with the flag "edge".

    All zero; one zero; negative; huge; the smallest that float16 holds. Huge is the largest that
    float16 holds, unless the output is float16 and would overflow: then eight times the rest.

    Args:
        scales: [N, groups], changed in place.
    """
    scales[1::8] = 0.0
    scales[2::8, 0] = 0.0
    scales[3::8] *= -1.0
    scales[4::8] *= 8.0 if act_dtype == "float16" else 6.5e4 / np.abs(scales[4::8]).max()
    scales[5::8] = np.sign(scales[5::8]) * 2.0**-24
