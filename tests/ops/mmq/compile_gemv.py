"""Compiles mmq's kernel for few rows for chips that are not here: jobs on stdin, results on stdout,
JSON.

Run by test_gemv_compile.py in a process of its own, since Triton either compiles or interprets.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch

from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for
from tilewright.ops.cross import cross_compile
from tilewright.ops.mmq.triton_gemv import launch_gemv, workspace_gemv
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile

N, K = 512, 8192


def result(job: dict[str, Any]) -> dict[str, Any]:
    tile, m = Tile.from_mapping(job["tile"]), job["m"]
    raw = torch.zeros(N, BLOCK_TYPES[job["type"]].row_bytes(K), dtype=torch.uint8)
    packed = pack_blocks_for(raw, job["type"], arch=job["arch"])
    assert isinstance(packed, GpuBlocks)
    packed = packed.to("meta")
    real = {"dtype": getattr(torch, job["dtype"]), "device": "meta"}
    x, y = torch.empty(m, K, **real), torch.empty(m, N, **real)
    space = Workspace(torch.empty(workspace_gemv(tile, m, N, K, 1)[0], device="meta"), None)
    try:
        kernel, *others = cross_compile(
            lambda: launch_gemv(x, packed, None, y, tile, space), job["arch"]
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    text = kernel.text("amdgcn") or kernel.text("ptx")
    spilled = re.findall(r"\.vgpr_spill_count:\s+(\d+)|(\d+) bytes spill stores", text + kernel.log)
    return {
        "error": "",
        "kernels": [kernel.name, *(other.name for other in others)],
        "matrix": len(re.findall(r"v_wmma_\w+|v_mfma_\w+|mma\.sync", text)),
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32|global_load_b128", text)),
        "barriers": len(re.findall(r"bar\.sync", text)),
        "shared_bytes": kernel.metadata["shared"],
        "spilled": max((int(a or b) for a, b in spilled), default=0),
        "mentions_fault": "gemv-" in kernel.text("ttir"),
    }


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
