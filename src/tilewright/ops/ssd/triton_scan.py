"""The plans of the SSD on GPUs: which kernels run, over which scratch memory.

::

    "five"        prepare, products, states of each chunk, pass, output
    "fused"       prepare, states of each sequence, output with products of its own
    "persistent"  prepare, [states of each segment, pass,] walk
    "hopper"      prepare, [states of each segment, pass,] walk with TMA and wgmma

"hopper" reads x, B and C through TMA. Where they do not lie as it needs them
(`hopper_walk.serves`), the walk of "persistent" takes its place, in the same chunks and segments.

The plan is the tile's `algorithm`. Scratch memory, float32 and reused by every launch of a stream,
is cut into the arrays that the plan needs; nothing is read before it was written.
"""

from __future__ import annotations

import torch
import triton

from tilewright.errors import UnsupportedError
from tilewright.ops.ssd.args import ScanArgs
from tilewright.ops.ssd.triton_output import launch_output, launch_products
from tilewright.ops.ssd.triton_prepare import INTERPRETED, launch_prepare
from tilewright.ops.ssd.triton_states import launch_pass, launch_states
from tilewright.ops.ssd.triton_walk import launch_walk
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile

__all__ = ["INTERPRETED", "launch_scan", "slots_of", "workspace_scan"]

_ALIGNED = 64  # floats: every array begins at a multiple of 256 bytes


def slots_of(args: ScanArgs, chunk: int) -> int:
    """Slots that chunks are kept in; see `triton_parts`."""
    if args.cu_seqlens is not None:
        return args.length // chunk + args.sequences
    return args.batch * (-(-args.length // chunk))


def _arrays(args: ScanArgs, tile: Tile) -> dict[str, int]:
    """Floats of each array of a plan."""
    slots = slots_of(args, tile.chunk)
    state = args.heads * args.head_dim * args.d_state
    words = args.x.element_size()
    products = slots * args.groups * tile.chunk**2 * words // 4
    floats = {
        "steps": slots * args.heads * tile.chunk,
        "sums": slots * args.heads * tile.chunk,
    }
    if tile.algorithm in ("five", "fused"):
        floats["enter"] = slots * state * words // 4
    if tile.algorithm == "five":
        floats["added"] = slots * state
        floats["logs"] = slots * args.heads
        floats["products"] = products
        return floats
    if tile.algorithm == "hopper":
        if args.x.dtype == torch.float16:
            floats["units"] = slots * args.heads
    if tile.algorithm in ("persistent", "hopper") and tile.segments > 1:
        floats["added"] = args.sequences * tile.segments * state
        floats["logs"] = args.sequences * tile.segments * args.heads
    return floats


def workspace_scan(args: ScanArgs, tile: Tile) -> tuple[int, int]:
    """Floats and counters that a launch needs."""
    return sum(-(-n // _ALIGNED) * _ALIGNED for n in _arrays(args, tile).values()), 0


def launch_scan(args: ScanArgs, tile: Tile, workspace: Workspace) -> None:
    """Write `args.y` and `args.final_states`. Neither chooses, allocates nor checks a rule.

    Args:
        args: on one device; see there.
        tile: of `triton_space.TRITON_SPACE`, or a planted one.
        workspace: as `workspace_scan` asks for.

    Raises:
        UnsupportedError: operands are on the CPU and kernels were not imported for the interpreter.
    """
    if args.x.device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            "ssd: x is on the CPU, where Triton only interprets; set TRITON_INTERPRET=1 before "
            "the first import of the kernels, or move the operands to a GPU"
        )
    if args.length == 0:
        if args.initial_states is None:
            args.final_states.zero_()
        else:
            args.final_states.copy_(args.initial_states)
        return
    fields = tile.as_dict()
    fault = fields.get("planted", "")
    chunk, slots = tile.chunk, slots_of(args, tile.chunk)
    part = _cut(args, tile, workspace)
    steps, sums = part["steps"], part["sums"]
    options = {
        "num_warps": fields.get("num_warps", 4), "num_stages": tile.num_stages, "fault": fault,
    }  # fmt: skip
    launch_prepare(args, chunk, slots, steps, sums, part.get("units"))
    if tile.algorithm in ("persistent", "hopper"):
        enter, block_p = None, min(64, max(16, triton.next_power_of_2(args.head_dim)))
        if tile.segments > 1:
            enter = part["added"]
            launch_states(
                args, "segment", args.sequences * tile.segments, steps, sums, enter, part["logs"],
                chunk=chunk, block_t=chunk, block_p=block_p, block_n=128,
                segments=tile.segments, num_stages=tile.num_stages, fault=fault,
            )  # fmt: skip
            launch_pass(
                args, enter, part["logs"], enter, chunk=chunk, segments=tile.segments, fault=fault
            )
        if tile.algorithm == "hopper" and _has_tma(args):
            from tilewright.ops.ssd.hopper_walk import launch_walk_hopper

            launch_walk_hopper(
                args, slots, steps, sums, part.get("units"), enter, segments=tile.segments,
                num_stages=tile.num_stages,
            )  # fmt: skip
        else:
            launch_walk(
                args, steps, sums, enter, chunk=chunk, block_p=fields.get("block_p", block_p),
                segments=tile.segments, **options,
            )  # fmt: skip
        return
    enter = part["enter"].view(args.x.dtype)
    states = {
        "chunk": chunk, "block_t": tile.block, "block_p": tile.block_p,
        "block_n": tile.block_n, "num_stages": tile.num_stages, "fault": fault,
    }  # fmt: skip
    products: torch.Tensor | None = None
    if tile.algorithm == "five":
        products = part["products"].view(args.x.dtype)
        launch_products(args, slots, products, chunk=chunk, block=tile.block)
        launch_states(args, "chunk", slots, steps, sums, part["added"], part["logs"], **states)
        launch_pass(args, part["added"], part["logs"], enter, chunk=chunk, segments=0, fault=fault)
    else:
        launch_states(args, "walk", args.sequences, steps, sums, enter, None, **states)
    launch_output(
        args, slots, steps, sums, enter, products, chunk=chunk, block=tile.block,
        block_p=tile.block_p, heads=tile.heads, **options,
    )  # fmt: skip


def _has_tma(args: ScanArgs) -> bool:
    from tilewright.ops.ssd.hopper_walk import serves

    return serves(args)


def _cut(args: ScanArgs, tile: Tile, workspace: Workspace) -> dict[str, torch.Tensor]:
    """The arrays of a plan, one behind the other in the workspace."""
    assert workspace.partials is not None
    parts, at = {}, 0
    for name, floats in _arrays(args, tile).items():
        parts[name] = workspace.partials[at : at + floats]
        at += triton.cdiv(floats, _ALIGNED) * _ALIGNED
    return parts
