"""The SSD scan on the CPU: the chunked form in torch, float32.

A sequence is cut into chunks of `chunk` tokens. In a chunk, with c_t the sum of A dt up to t
(from the chunk's first token on) and S the state that enters it::

    y_t   = sum_{s <= t} exp(c_t - c_s) (C_t . B_s) dt_s x_s  +  exp(c_t) S C_t
    S_out = exp(c_last) S + sum_s exp(c_last - c_s) dt_s x_s B_s^T

Differences are at most 0 where they are used; they are clamped before exp, so that no infinity
arises where they are not. What stands before x is cleared for s > t last of all, so that an Inf or
NaN in dt or B reaches no earlier token; one in x does, since the product multiplies it by zero.
Heads of a group share one product C B^T and one product with B.

Shapes: q tokens, b sequences, G groups of H/G heads, P the head's dimension, N the state's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilewright.device import cpu_device
from tilewright.ops.choose import choose_tile
from tilewright.ops.ssd.args import ScanArgs
from tilewright.ops.ssd.cpu_space import CPU_SPACE
from tilewright.ops.ssd.step import discretized, finished
from tilewright.tiles.tile import Problem, Tile

__all__ = ["cpu_scan", "launch_scan_cpu", "scan_problem"]

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def scan_problem(args: ScanArgs, arch: str) -> Problem:
    """The scan as a tile table of `arch` sees it: M tokens in all, N = H P, K the state's
    dimension, group the heads that share B and C."""
    return Problem(
        "ssd", arch, _NAMES[args.x.dtype], f"p{args.head_dim}", "float", args.batch * args.length,
        args.heads * args.head_dim, args.d_state, args.heads // args.groups,
    )  # fmt: skip


def cpu_scan(args: ScanArgs, chunk: int | None = None, tile: Tile | None = None) -> None:
    """Choose the tile, and launch.

    Args:
        chunk: in place of the tile's own.
        tile: None for the table's.

    Raises:
        TileError: the tile, or its chunk, is none of the space's.
    """
    problem = scan_problem(args, cpu_device().arch)
    chosen = choose_tile(problem, CPU_SPACE).tile if tile is None else tile
    if chunk is not None:
        chosen = chosen.replace(chunk=chunk)
    CPU_SPACE.check(chosen, problem)
    launch_scan_cpu(args, chosen)


def launch_scan_cpu(args: ScanArgs, tile: Tile) -> None:
    """Write `args.y` and `args.final_states`. A tile with the field `planted` has that fault."""
    fault = tile.as_dict().get("planted", "")
    state: torch.Tensor | None = None
    for rows, tokens, states in _sequences(args):
        if state is None or fault != "no-reset":
            state = _entering(args, states)
        state = _scan(args, rows, tokens, state, tile.chunk, fault)
        args.final_states[states] = state


def _sequences(args: ScanArgs) -> Iterator[tuple[slice, slice, slice]]:
    """Sequences that are scanned together: rows of x, tokens of these, and states."""
    if args.cu_seqlens is None:
        yield slice(0, args.batch), slice(0, args.length), slice(0, args.batch)
        return
    at = args.cu_seqlens.tolist()
    for number, (first, last) in enumerate(zip(at[:-1], at[1:], strict=True)):
        yield slice(0, 1), slice(first, last), slice(number, number + 1)


def _entering(args: ScanArgs, states: slice) -> torch.Tensor:
    if args.initial_states is None:
        return torch.zeros_like(args.final_states[states])
    return args.initial_states[states]


def _scan(
    args: ScanArgs, rows: slice, tokens: slice, state: torch.Tensor, chunk: int, fault: str
) -> torch.Tensor:
    """Scan the tokens of some rows; the state [b, H, P, N] that leaves."""
    last = tokens.stop
    if fault == "partial-chunk":
        last -= (last - tokens.start) % chunk
    for first in range(tokens.start, last, chunk):
        part = slice(first, min(first + chunk, last))
        y, state = _chunk(args, rows, part, state, fault)
        z = None if args.z is None else args.z[rows, part]
        args.y[rows, part] = finished(y, args.x[rows, part], args.D, z).to(args.y.dtype)
    return state


def _chunk(
    args: ScanArgs, rows: slice, part: slice, state: torch.Tensor, fault: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk: y [b, q, H, P] without skip and gate, and the state [b, H, P, N] that leaves."""
    groups = args.groups

    def split(heads_first: torch.Tensor) -> torch.Tensor:
        """[b, H, ...] as [b, G, H/G, ...]."""
        if fault == "wrong-groups":  # head h reads group h % G
            return heads_first.unflatten(1, (-1, groups)).transpose(1, 2)
        return heads_first.unflatten(1, (groups, -1))

    steps = discretized(args.dt[rows, part], args.dt_bias, args.dt_softplus, args.dt_limit)
    sums = split(torch.cumsum(steps * args.A, dim=1).transpose(1, 2))  # [b, G, H/G, q]
    x = split(args.x[rows, part].to(torch.float32).transpose(1, 2))
    steps = split(steps.transpose(1, 2))
    B, C = (m[rows, part].to(torch.float32).transpose(1, 2) for m in (args.B, args.C))
    state = split(state)  # [b, G, H/G, P, N]
    b, _, per_group, p, n = state.shape
    q = sums.shape[-1]

    shared = torch.matmul(C, B.transpose(-1, -2))[:, :, None]  # [b, G, 1, q, q]
    weights = _decays(sums, fault).mul_(shared).mul_(steps[..., None, :])
    if fault != "no-clamp":
        weights.tril_()
    y = torch.matmul(weights, x)  # [b, G, H/G, q, P]

    flat = state.reshape(b, groups, per_group * p, n)
    carried = torch.matmul(C, flat.transpose(-1, -2)).unflatten(-1, (per_group, p))
    y.addcmul_(torch.exp(sums)[..., None], carried.transpose(2, 3))

    to_end = torch.exp((sums[..., -1:] - sums).clamp_(max=0.0))
    late = (
        (x * to_end.mul_(steps)[..., None]).transpose(-1, -2).reshape(b, groups, per_group * p, q)
    )
    added = torch.matmul(late, B).view(b, groups, per_group, p, n)
    leaving = torch.addcmul(added, torch.exp(sums[..., -1])[..., None, None], state)

    def join(split_heads: torch.Tensor) -> torch.Tensor:
        if fault == "wrong-groups":
            split_heads = split_heads.transpose(1, 2)
        return split_heads.flatten(1, 2)

    return join(y).transpose(1, 2), join(leaving)


def _decays(sums: torch.Tensor, fault: str) -> torch.Tensor:
    """exp(c_t - c_s) for s <= t, else at most 1: [..., q, q] of [..., q]."""
    differences = sums[..., :, None] - sums[..., None, :]
    if fault == "no-clamp":
        q = sums.shape[-1]
        return differences.exp_().mul_(torch.ones(q, q).tril_())
    return differences.clamp_(max=0.0).exp_()
