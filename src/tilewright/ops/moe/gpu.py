"""moe on GPUs: validate, choose tiles, allocate, launch; nothing waits for the device.

::

    ids --route--> slots by expert, tiles                       "triton" reads rows of x in place
    ids, x --scatter, or route and gather--> and rows of x by expert                     "hopper"
                                                      "slots" and "gemv" read the ids as they are

     x --product with gate and up, act(gate) * up--> h [slots, I]     one launch for all experts
     h --product with down--> y [slots, H] float32                    one launch for all experts
                                 '--combine: weights[t, j] * y, j in order--> out [T, H]

"hopper" writes gate and up to memory, float32, and a launch of its own makes h of them. Where they
are two tensors each is a product, and torch makes h.

Grids and allocations depend on shapes alone, so calls can be captured in a CUDA graph and replayed
with other ids. Ids are not looked at on the host: one outside 0..E-1 makes its row NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.device import INTERPRETER, arch_of, check_triton, launching_on
from tilewright.errors import TileError, UnsupportedError
from tilewright.layout.experts import GpuExperts
from tilewright.ops.choose import choose_tile
from tilewright.ops.moe.gpu_space import MOE_SPACE, default_tile
from tilewright.tiles.tile import Problem, Tile, m_bucket

__all__ = [
    "GpuWeights",
    "Routes",
    "allocate_and_launch",
    "check_operands",
    "gpu_moe_gemm",
    "gpu_moe_mlp",
    "launch_products",
    "tile_for",
]

OP = "moe"
GpuWeights = GpuExperts | torch.Tensor
"""Packed experts, or a dense tensor [E, N, K] where a type has no packed kernel."""

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _shape(experts: GpuWeights) -> tuple[int, int, int]:
    if isinstance(experts, torch.Tensor):
        return (experts.shape[0], experts.shape[1], experts.shape[2])
    return (experts.E, experts.N, experts.K)


def check_operands(op: str, x: Any, ids: Any, experts: GpuWeights, activations: str) -> None:
    """Raise unless x is [T, K] and ids [T, top_k], on the device of the experts."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: x is {type(x).__name__}; pass a torch.Tensor [T, K]")
    if activations != "float":
        raise UnsupportedError(
            f"{op}: activations={activations!r}; on a GPU activations stay as they are: 'float'"
        )
    if x.dtype not in _NAMES:
        raise UnsupportedError(
            f"{op}: x has dtype {x.dtype}; it must be float32, float16 or bfloat16 - cast it"
        )
    columns = _shape(experts)[2]
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"{op}: x has shape {list(x.shape)}; it must be [T, K={columns}]")
    if x.device != experts.device:
        raise ValueError(f"{op}: x is on {x.device}, the experts on {experts.device}; move one")
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{op}: ids is {type(ids).__name__}; pass an integer tensor [T, top_k]")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: ids has dtype {ids.dtype}; it must be int64 or int32")
    if ids.device != x.device:
        raise ValueError(f"{op}: x is on {x.device}, ids on {ids.device}; move one of them")
    if ids.dim() != 2 or len(ids) != len(x):
        raise ValueError(f"{op}: ids has shape {list(ids.shape)}; it must be [T={len(x)}, top_k]")
    check_triton(op)


def tile_for(x: torch.Tensor, experts: GpuWeights, slots: int, tile: Tile | None) -> Tile:
    """The tile of a product of `slots` rows: the one given, if it obeys the rules; else the
    table's, if it obeys them for these experts and so many slots (a table's last row stands for any
    number of them); else the default for this number of experts. A tile that was tuned with as many
    experts as `moe.spec` draws does not serve others whose default is another one: as in `lookup`,
    it was measured against that.

    Raises:
        TileError: the tile breaks a rule of the space.
    """
    arch = INTERPRETER if x.device.type == "cpu" else arch_of(x.device)
    count, n, k = _shape(experts)
    kind, group = ("dense", 0) if isinstance(experts, torch.Tensor) else (
        experts.type_name, experts.group)  # fmt: skip
    problem = Problem(OP, arch, _NAMES[x.dtype], kind, "float", slots, n, k, group)
    stacked = isinstance(experts, GpuExperts) and experts.is_stacked
    if tile is not None:
        MOE_SPACE.check(tile, problem)
        if tile.algorithm == "hopper" and not stacked:
            raise TileError(
                f"tile {tile}: the words of these experts do not lie below each other without a "
                "gap, as TMA reads them; use another algorithm"
            )
        return tile
    if not isinstance(experts, GpuExperts):  # no table has rows of weights that are not packed
        return default_tile(problem, count, stacked)
    found = choose_tile(problem, MOE_SPACE)
    serves = found.tile.algorithm != "hopper" or stacked
    if found.row is not None and found.row.source == "tuned":
        at = problem.bucketed()
        serves = serves and default_tile(at, count, stacked) == MOE_SPACE.default(at)
    if slots > m_bucket(slots):
        serves = serves and MOE_SPACE.broken_rule(found.tile, problem) is None
    if found.how == "default" or not serves:
        return default_tile(problem, count, stacked)
    return found.tile


class Routes:
    """Slots by expert, and tiles of each height that is asked for."""

    def __init__(self, ids: torch.Tensor, experts: int) -> None:
        self.ids = ids
        self.experts = experts
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def of(self, block_m: int, fault: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots, bounds and tiles, as `triton_route` draws them."""
        from tilewright.ops.moe.triton_route import launch_route, tiles_of

        if block_m not in self.made:
            slots, device = self.ids.numel(), self.ids.device
            order = torch.empty(slots, dtype=torch.int32, device=device)
            count = tiles_of(slots, self.experts, block_m)
            tiles = torch.empty(count, 3, dtype=torch.int32, device=device)
            bounds = torch.empty(self.experts + 1, 2, dtype=torch.int32, device=device)
            launch_route(self.ids, self.experts, order, bounds, tiles, block_m, fault)
            self.made[block_m] = (order, bounds, tiles)
        return self.made[block_m]


def launch_products(
    x: torch.Tensor,
    experts: GpuWeights,
    routes: Routes,
    y: torch.Tensor,
    tile: Tile,
    *,
    share: int,
    act: str = "",
) -> None:
    """Route if the tile's algorithm needs it, and launch it; arguments as of the launchers."""
    if isinstance(experts, torch.Tensor) and experts.stride(2) != 1:
        experts = experts.contiguous()
    fault = tile.as_dict().get("planted", "")
    if tile.algorithm == "gemv":
        from tilewright.ops.moe.triton_gemv import launch_moe_gemv

        launch_moe_gemv(x, experts, routes.ids, y, tile, share=share, act=act)
        return
    if tile.algorithm == "slots":
        from tilewright.ops.moe.triton_slots import launch_moe_slots

        assert isinstance(experts, GpuExperts)
        launch_moe_slots(x, experts, routes.ids, y, tile, share=share, act=act)
        return
    if tile.algorithm == "hopper":
        assert isinstance(experts, GpuExperts)
        _launch_hopper(x, experts, routes, y, tile, share, act)
        return
    slots, _, tiles = routes.of(tile.block_m, fault)
    from tilewright.ops.moe.triton_gemm import launch_moe

    launch_moe(x, experts, slots, tiles, y, tile, share=share, act=act)


def _launch_hopper(
    x: torch.Tensor,
    experts: GpuExperts,
    routes: Routes,
    y: torch.Tensor,
    tile: Tile,
    share: int,
    act: str,
) -> None:
    """Rows of x by expert, in one launch or in two, and their products."""
    from tilewright.ops.moe.hopper_gemm import launch_moe_hopper
    from tilewright.ops.moe.triton_combine import launch_activate
    from tilewright.ops.moe.triton_gather import launch_gather, row_columns
    from tilewright.ops.moe.triton_route import tiles_of
    from tilewright.ops.moe.triton_scatter import MOST_SLOTS, launch_scatter

    count, k = routes.ids.numel(), x.shape[1]
    whole = y
    if act:  # gate and up lie in different warps: they meet in memory
        whole = torch.empty(count, experts.N, device=x.device)
    rows = torch.empty(count, row_columns(k), dtype=x.dtype, device=x.device)
    tiles = tiles_of(count, experts.E, tile.block_m)
    plan = torch.empty(1 + 3 * tiles, dtype=torch.int32, device=x.device)
    if count <= MOST_SLOTS:
        slots = torch.empty(count, dtype=torch.int32, device=x.device)
        launch_scatter(x, routes.ids, experts.E, slots, rows, plan, tile.block_m, share=share)
    else:
        slots, bounds, _ = routes.of(tile.block_m, "")
        launch_gather(x, slots, bounds, rows, plan, tile.block_m, share=share)
    launch_moe_hopper(rows, experts, slots, plan, whole, tile)
    if act:
        launch_activate(whole, y, act)


def gpu_moe_gemm(
    x: torch.Tensor,
    experts: GpuExperts,
    ids: torch.Tensor,
    *,
    activations: str = "float",
    tile: Tile | None = None,
) -> torch.Tensor:
    """y[t, j] = W[ids[t, j]] @ x[t] on a GPU, or in Triton's interpreter on the CPU; see
    `tilewright.ops.moe.op.moe_gemm` for arguments and errors. An id that names no expert makes its
    row NaN: nobody waits for the device to look at it."""
    check_operands(OP, x, ids, experts, activations)
    if ids.numel() == 0 or experts.N == 0:
        return x.new_empty(*ids.shape, experts.N)
    return allocate_and_launch(x, experts, ids, tile_for(x, experts, ids.numel(), tile))


def allocate_and_launch(
    x: torch.Tensor, experts: GpuExperts, ids: torch.Tensor, tile: Tile
) -> torch.Tensor:
    """The last two steps, of valid operands with at least one slot and column."""
    y = torch.empty(*ids.shape, experts.N, dtype=x.dtype, device=x.device)
    with launching_on(x.device):
        routes = Routes(ids.reshape(-1).contiguous(), experts.E)
        launch_products(x.detach(), experts, routes, y.view(-1, experts.N), tile,
                        share=ids.shape[1])  # fmt: skip
    return y


def gpu_moe_mlp(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    parts: tuple[GpuWeights, ...],
    down: GpuWeights,
    *,
    activation: str,
    tiles: tuple[Tile | None, Tile | None] = (None, None),
    fault: str = "",
) -> torch.Tensor:
    """Gate, up, activation and down on a GPU, or in Triton's interpreter on the CPU, of operands
    that `tilewright.ops.moe.mlp` has checked.

    Args:
        x: [T, H].
        weights, ids: [T, top_k].
        parts: (gate_up,) [E, 2 I, H], in one launch; or (gate, up), each [E, I, H], in two.
        down: [E, H, I].
        activation: a key of `triton_parts.ACTIVATIONS`.
        tiles: of the product with gate and up, and of that with down; None for the table's.
        fault: of `triton_combine`, for a test to find.

    Returns:
        [T, H] of x's dtype. act(gate) * up is rounded to it as well; sums, and what the choices of
        a token give, are float32.
    """
    from tilewright.ops.moe.triton_combine import launch_combine
    from tilewright.ops.moe.triton_parts import ACTIVATIONS

    op = "moe_mlp"
    for name, other in (("weights", weights), ("down", down), ("up", parts[-1])):
        if other.device != x.device:
            raise ValueError(f"{op}: x is on {x.device}, {name} on {other.device}; move one")
    tokens, choices = ids.shape
    slots, (count, hidden, inner) = ids.numel(), _shape(down)
    if slots == 0 or hidden == 0:
        return x.new_zeros(tokens, hidden)
    with launching_on(x.device):
        x = x.detach()
        act = ACTIVATIONS[activation]
        routes = Routes(ids.reshape(-1).contiguous(), count)
        first = [tile_for(x, part, slots, tiles[0]) for part in parts]
        if len(parts) == 1:
            h = torch.empty(slots, inner, dtype=x.dtype, device=x.device)
            launch_products(x, parts[0], routes, h, first[0], share=choices, act=act)
        else:
            gate = torch.empty(slots, inner, device=x.device)
            up = torch.empty(slots, inner, device=x.device)
            for part, half, tile in zip(parts, (gate, up), first, strict=True):
                launch_products(x, part, routes, half, tile, share=choices)
            h = _activated(gate, up, act).to(x.dtype)
        y = torch.empty(slots, hidden, device=x.device)
        launch_products(h, down, routes, y, tile_for(h, down, slots, tiles[1]), share=1)
        out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
        launch_combine(y, weights.detach(), out, fault)
        return out


def _activated(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    if act == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if act != "gelu" else "none") * up
