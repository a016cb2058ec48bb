"""Compiles mmq's 8-bit kernels for chips that are not here: jobs on stdin, results on stdout, JSON.

Run by test_int8_compile.py in a process of its own, since Triton either compiles or interprets.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

import torch

from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.isa.count import inner_loop, parse, vendor_of
from tilewright.isa.descriptors import wrong_descriptors_of
from tilewright.isa.hazards import overwritten_operands
from tilewright.isa.sass import listing_text
from tilewright.layout.blocks import GpuBlocks, pack_blocks_for
from tilewright.ops.cross import Compiled, cross_compile
from tilewright.ops.mmq.triton_int8 import launch_int8, workspace_int8
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile

K, N = 1024, 512


def compile_job(job: dict[str, Any]) -> tuple[Compiled, ...]:
    tile, m = Tile.from_mapping(job["tile"]), job["m"]
    raw = torch.zeros(N, BLOCK_TYPES[job["type"]].row_bytes(K), dtype=torch.uint8)
    packed = pack_blocks_for(raw, job["type"], arch=job["arch"])
    assert isinstance(packed, GpuBlocks)
    packed = packed.to("meta")
    real = {"dtype": torch.float16, "device": "meta"}
    x, y = torch.empty(m, K, **real), torch.empty(m, N, **real)
    floats, _ = workspace_int8(tile, m, N, K, 304)
    space = Workspace(torch.empty(floats, device="meta"), None)
    return cross_compile(lambda: launch_int8(x, packed, None, y, tile, space), job["arch"])


def result(job: dict[str, Any]) -> dict[str, Any]:
    try:
        found = compile_job(job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    kernel, vendor = found[1], vendor_of(job["arch"])
    text = listing_text(kernel)
    loop = inner_loop(parse(text, vendor), vendor)
    names = Counter() if loop is None else Counter(i.mnemonic for i in loop.body)
    matrix = r"v_wmma_\w+|v_mfma_\w+|I?GMMA\S*|[IH]MMA\S*"
    spilled = re.findall(r"\.vgpr_spill_count:\s+(\d+)|(\d+) bytes spill stores", text + kernel.log)
    return {
        "error": "",
        "kernels": [made.name for made in found],
        "matrix": {name: n for name, n in names.items() if re.fullmatch(matrix, name)},
        "shared_bytes": kernel.metadata["shared"],
        "spilled": max((int(a or b) for a, b in spilled), default=0),
        "serialized": re.findall(r"C7\d\d\d", kernel.log),
        "overwritten": [
            str(found) for found in (*overwritten_operands(kernel), *wrong_descriptors_of(kernel))
        ],
        "mentions_fault": "FAULT" in kernel.text("ttir"),
    }


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
