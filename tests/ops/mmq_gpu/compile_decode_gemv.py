"""Compiles mmq's kernel for one row of x for sm_90 with no GPU: jobs on stdin, results on stdout,
JSON.

Run by test_decode_gemv_compile.py in a process of its own: Triton either compiles or interprets.
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
from tilewright.ops.cross import cross_compile
from tilewright.ops.mmq.decode_gemv import launch_decode, workspace_decode
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile


def result(job: dict[str, Any]) -> dict[str, Any]:
    tile, n, k = Tile.from_mapping(job["tile"]), 64, job["k"]
    raw = torch.zeros(n, BLOCK_TYPES[job["type"]].row_bytes(k), dtype=torch.uint8)
    packed = pack_blocks_for(raw, job["type"], arch="sm_90")
    assert isinstance(packed, GpuBlocks)
    packed = packed.to("meta")
    real = {"dtype": getattr(torch, job["dtype"]), "device": "meta"}
    x, y, bias = torch.empty(1, k, **real), torch.empty(1, n, **real), torch.empty(n, **real)
    zeros = torch.empty(workspace_decode(tile, 1, n, k, 132)[1], dtype=torch.int32, device="meta")
    space = Workspace(None, zeros)
    try:
        (kernel,) = cross_compile(lambda: launch_decode(x, packed, bias, y, tile, space), "sm_90")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    ptx = kernel.text("ptx")
    return {
        "error": "",
        "products": len(re.findall(r"mma\.sync\.aligned\.m16n8k16", ptx)),
        "dependent": kernel.metadata["launch_pdl"],
        "loads_before_waiting": ptx[: ptx.index("griddepcontrol.wait")].count("ld.global"),
        "registers": int(re.findall(r"Used (\d+) registers", kernel.log)[0]),
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", ptx)),
        "barriers": len(re.findall(r"bar\.sync", ptx)),
        "shared_bytes": kernel.metadata["shared"],
        "spilled": [int(n) for n in re.findall(r"(\d+) bytes spill stores", kernel.log)],
        "overwritten": [
            str(found) for found in (*overwritten_operands(kernel), *wrong_descriptors_of(kernel))
        ],
    }


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
