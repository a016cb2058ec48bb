"""Compiles mmq's Hopper kernel for sm_90 with no GPU: jobs on stdin, results on stdout, JSON.

Run by test_mmq_hopper_compile.py in a process of its own: Triton either compiles or interprets.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch

from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.isa.descriptors import wrong_descriptors_of
from tilewright.isa.hazards import overwritten_operands
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for
from tilewright.ops.cross import Compiled, cross_compile
from tilewright.ops.mmq.hopper_gemm import launch_mmq_hopper, workspace_mmq_hopper
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile

K = 1024


def compile_job(job: dict[str, Any]) -> tuple[Compiled, ...]:
    tile, m, n = Tile.from_mapping(job["tile"]), job["m"], job["n"]
    raw = torch.zeros(n, BLOCK_TYPES[job["type"]].row_bytes(K), dtype=torch.uint8)
    packed = pack_blocks_for(raw, job["type"], arch="sm_90")
    assert isinstance(packed, GpuBlocks)
    packed = packed.to("meta")
    real = {"dtype": getattr(torch, job["dtype"]), "device": "meta"}
    x, y, bias = torch.empty(m, K, **real), torch.empty(m, n, **real), torch.empty(n, **real)
    floats, counters = workspace_mmq_hopper(tile, m, n, K, 132)
    space = Workspace(
        torch.empty(floats, device="meta"), torch.empty(counters, dtype=torch.int32, device="meta")
    )
    return cross_compile(lambda: launch_mmq_hopper(x, packed, bias, y, tile, space), "sm_90")


def result(job: dict[str, Any]) -> dict[str, Any]:
    try:
        kernel, *others = compile_job(job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\{|%)", kernel.text("ptx"))
    return {
        "error": "",
        "kernels": [kernel.name, *(other.name for other in others)],
        "grid": kernel.grid,
        "shared_bytes": kernel.metadata["shared"],
        "from_registers": products.count("{"),
        "from_shared": products.count("%"),
        "spilled": [int(n) for n in re.findall(r"(\d+) bytes spill stores", kernel.log)],
        "overwritten": [
            str(found) for found in (*overwritten_operands(kernel), *wrong_descriptors_of(kernel))
        ],
        "warnings": re.findall(r"C7\d\d\d", kernel.log),
    }


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
