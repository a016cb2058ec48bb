"""moe: each token times the experts it chose (ggml's MUL_MAT_ID), weights packed.

    slots (token, choice) --sort by expert--> rows of expert 0 | rows of expert 1 | ...
                                                    |  one product an expert with rows
                                                    v
                          y[token, choice] <--scatter-- sorted results

An expert's product is the underlying op's (`mmq` for GGUF blocks, `w4a16` for 4-bit codes): same
kernels, same tile table, looked up by the rows of that expert and not by the number of tokens.
Experts without rows cost nothing. Sorting is stable and each result is written once, so two runs
agree bit for bit. This is the CPU's side; `tilewright.ops.moe.gpu` is that of GPUs, which multiply
for all experts at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.device import cpu_device
from tilewright.errors import UnsupportedError
from tilewright.layout.experts import GpuExperts
from tilewright.ops.choose import choose_tile
from tilewright.ops.moe.experts import PackedExperts, Routing, route
from tilewright.ops.space import TileSpace
from tilewright.tiles.tile import Problem, Tile

__all__ = ["Experts", "check_routing", "check_settings", "moe_gemm", "multiplier"]

Experts = PackedExperts | GpuExperts | torch.Tensor
"""Packed experts, or a dense tensor [E, N, K] where a type has no packed kernel."""

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_ACTIVATIONS = ("float", "int8")


def moe_gemm(
    x: torch.Tensor,
    experts: PackedExperts | GpuExperts,
    ids: torch.Tensor,
    *,
    activations: str = "float",
    tile: Tile | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """y[t, j] = W[ids[t, j]] @ x[t], for every token t and each of its choices j.

    Args:
        x: [T, K] float32, float16 or bfloat16, any strides.
        experts: packed W [E, N, K], from `pack_expert_blocks` or `pack_expert_w4`; for a GPU from
            `tilewright.layout.experts`.
        ids: integers [T, top_k], each in 0..E-1; a token may name an expert more than once.
        activations: "float" multiplies x as it is (weight-only). "int8", on the CPU, rounds x to 8
            bits per 32 values where an expert has more than one row: faster, and less exact.
        tile: on the CPU a tile of the underlying op's space, for every expert, and None takes the
            table's for the rows of each expert; on a GPU one of `gpu_space.MOE_SPACE`, and None
            takes the table's for the rows of all experts.
        threads: on the CPU, None for torch's setting; nothing else has any.

    Returns:
        [T, top_k, N] of x's dtype; sums are float32. On a GPU weights are rounded to that dtype
        before they are multiplied by matrix units.

    Raises:
        ValueError, TypeError: a wrong shape or argument; on the CPU, an id out of range. On a GPU,
            where nobody waits to see the ids, such an id makes its row NaN.
        UnsupportedError: a dtype or device no kernel serves.
        TileError: the tile breaks a rule of the space.

    Method: rows sorted by expert, as ggml's MUL_MAT_ID.
    """
    if isinstance(experts, GpuExperts):
        from tilewright.ops.moe.gpu import gpu_moe_gemm

        return gpu_moe_gemm(x, experts, ids, activations=activations, tile=tile)
    if not isinstance(experts, PackedExperts):
        raise TypeError(
            f"moe: experts is {type(experts).__name__}; pass PackedExperts, from "
            "pack_expert_blocks or pack_expert_w4"
        )
    check_routing("moe", x, ids, experts.E, experts.K)
    check_settings("moe", activations, threads)
    shape = (*ids.shape, experts.N)
    if ids.numel() == 0:
        return x.new_empty(shape)
    routing = route(ids, experts.E)
    multiply = multiplier(experts, _DTYPES[x.dtype], activations, tile, threads)
    rows = x.detach().index_select(0, routing.tokens)
    y = torch.empty(ids.numel(), experts.N, dtype=torch.float32)
    for expert, first, last in routing.spans:
        multiply(expert, rows[first:last], y[first:last])
    return _unsorted(y, routing, x.dtype).view(shape)


def _unsorted(y: torch.Tensor, routing: Routing, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(y.shape, dtype=dtype)
    out[routing.slots] = y.to(dtype)
    return out


def multiplier(
    experts: PackedExperts | torch.Tensor,
    act_dtype: str,
    activations: str,
    tile: Tile | None = None,
    threads: int | None = None,
) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
    """A function (expert, rows [M, K], y [M, N] float32 contiguous) that writes y = rows @ W.T.

    Args:
        experts: the weights.
        act_dtype: dtype of x as tables name it.
        activations, tile, threads: as for `moe_gemm`.
    """
    if isinstance(experts, torch.Tensor):
        dense = experts

        def multiply_dense(expert: int, rows: torch.Tensor, y: torch.Tensor) -> None:
            torch.mm(rows.to(torch.float32), dense[expert].to(torch.float32).T, out=y)

        return multiply_dense

    from tilewright.ops.cpu.launch import cpu_weight, launch_gemm

    packed, space = experts, _space(experts.op)
    chosen: dict[int, Tile] = {}

    def multiply(expert: int, rows: torch.Tensor, y: torch.Tensor) -> None:
        m = len(rows)
        if m not in chosen:
            chosen[m] = _tile(packed, act_dtype, activations, m, space, tile, threads)
        weight = packed.each[expert]
        perm = getattr(weight, "perm", None)
        if perm is not None:
            rows = rows.index_select(1, perm)
        launch_gemm(rows, cpu_weight(weight), None, y, chosen[m])

    return multiply


def _space(op: str) -> TileSpace:
    if op == "mmq":
        from tilewright.ops.mmq.space import CPU_SPACE as mmq_space

        return mmq_space
    from tilewright.ops.w4a16.space import CPU_SPACE as w4a16_space

    return w4a16_space


def _tile(
    experts: PackedExperts, act_dtype: str, activations: str, m: int, space: TileSpace,
    tile: Tile | None, threads: int | None,
) -> Tile:  # fmt: skip
    problem = Problem(
        experts.op, cpu_device().arch, act_dtype, experts.type_name, activations, m, experts.N,
        experts.K, experts.group,
    )  # fmt: skip
    if tile is None:
        tile = choose_tile(problem, space, units=threads).tile
    else:
        space.check(tile, problem)
    return tile if threads is None else tile.replace(threads=threads)


def check_routing(op: str, x: Any, ids: Any, experts: int, columns: int) -> None:
    """Raise unless x is [T, K] on the CPU and ids [T, top_k] with every id below `experts`."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: x is {type(x).__name__}; pass a torch.Tensor [T, K]")
    if x.dtype not in _DTYPES:
        raise UnsupportedError(
            f"{op}: x has dtype {x.dtype}; it must be float32, float16 or bfloat16 - cast it"
        )
    if x.device.type != "cpu":
        raise UnsupportedError(
            f"{op}: x is on {x.device}, the experts are packed for the CPU; call x.cpu(), or pack "
            "them for the GPU with tilewright.layout.experts"
        )
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"{op}: x has shape {list(x.shape)}; it must be [T, K={columns}]")
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{op}: ids is {type(ids).__name__}; pass an integer tensor [T, top_k]")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: ids has dtype {ids.dtype}; it must be int64 or int32")
    if ids.device.type != "cpu":
        raise UnsupportedError(f"{op}: ids is on {ids.device}; call ids.cpu()")
    if ids.dim() != 2 or len(ids) != len(x):
        raise ValueError(f"{op}: ids has shape {list(ids.shape)}; it must be [T={len(x)}, top_k]")
    if ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= experts:
            raise ValueError(
                f"{op}: ids reach from {low} to {high}; the experts are 0..{experts - 1}"
            )


def check_settings(op: str, activations: str, threads: int | None) -> None:
    """Raise ValueError for an unknown activation path or number of threads."""
    if activations not in _ACTIVATIONS:
        raise ValueError(f"{op}: activations={activations!r}; use one of {_ACTIVATIONS}")
    if threads is not None and threads < 1:
        raise ValueError(f"{op}: threads={threads}; it must be at least 1, or None")
