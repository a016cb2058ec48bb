"""Compiles mmq's Triton kernels for chips that are not here: jobs on stdin, results on stdout,
JSON.

Run by test_mmq_compile.py in a process of its own, since Triton either compiles or interprets.
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
from tilewright.ops.mmq import triton_gemm
from tilewright.ops.mmq.triton_gemm import launch_mmq, workspace_mmq
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile

K = 1024


def compile_job(job: dict[str, Any]) -> tuple[Compiled, ...]:
    tile, m, n = Tile.from_mapping(job["tile"]), job.get("m", 512), job.get("n", 512)
    raw = torch.zeros(n, BLOCK_TYPES[job["type"]].row_bytes(K), dtype=torch.uint8)
    packed = pack_blocks_for(raw, job["type"], arch=job["arch"])
    assert isinstance(packed, GpuBlocks)
    packed = packed.to("meta")
    real = {"dtype": getattr(torch, job.get("dtype", "float16")), "device": "meta"}
    x, y, bias = torch.empty(m, K, **real), torch.empty(m, n, **real), torch.empty(n, **real)
    space = Workspace(torch.empty(workspace_mmq(tile, m, n, K, 1)[0], device="meta"), None)
    if job.get("wide"):
        triton_gemm.spans_wide = lambda tensor: True
    return cross_compile(lambda: launch_mmq(x, packed, bias, y, tile, space), job["arch"])


def result(job: dict[str, Any]) -> dict[str, Any]:
    spans_wide = triton_gemm.spans_wide
    try:
        kernel, *others = compile_job(job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        triton_gemm.spans_wide = spans_wide
    text = kernel.text("amdgcn") or kernel.text("ptx")
    matrix = re.search(r"v_wmma_\w+|v_mfma_\w+|wgmma\.mma\w+|mma\.sync", text)
    spilled = re.findall(r"\.vgpr_spill_count:\s+(\d+)|(\d+) bytes spill stores", text + kernel.log)
    return {
        "error": "",
        "kernels": [kernel.name, *(other.name for other in others)],
        "binary_bytes": len(kernel.asm.get("hsaco") or kernel.asm["cubin"]),
        "matrix": matrix.group() if matrix else "",
        "shared_bytes": kernel.metadata["shared"],
        "spilled": max((int(a or b) for a, b in spilled), default=0),
        "overwritten": [
            str(found) for found in (*overwritten_operands(kernel), *wrong_descriptors_of(kernel))
        ],
        "serialized": re.findall(r"C7\d\d\d", kernel.log),
        "wide_multiplies": len(re.findall(r"muli.*xi64>", kernel.text("ttir"))),
        "mentions_fault": "FAULT" in kernel.text("ttir"),
    }


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
