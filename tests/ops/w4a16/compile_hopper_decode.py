"""Compiles tiles of Hopper for sm_90 with no GPU: jobs on stdin, results on stdout, JSON.

Run by test_hopper_decode.py in a process of its own, since Triton either compiles or interprets.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch

from tilewright.layout.hopper import HopperW4
from tilewright.ops.cross import cross_compile
from tilewright.ops.w4a16.hopper_decode import (
    launch_w4a16_hopper_decode,
    workspace_hopper_decode,
)
from tilewright.ops.w4a16.hopper_gemm import launch_w4a16_hopper, workspace_hopper
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile

KERNELS = {
    "hopper": (launch_w4a16_hopper, workspace_hopper),
    "hopper_decode": (launch_w4a16_hopper_decode, workspace_hopper_decode),
}


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def result(job: dict[str, Any]) -> dict[str, Any]:
    tile = Tile.from_mapping(job["tile"])
    m, n, k, dtype = job["M"], job["N"], job["K"], getattr(torch, job["dtype"])
    group = k if job["group"] == -1 else job["group"]
    rows, groups = -(-n // 64), k // group
    weight = HopperW4(
        words=empty(rows, -(-k // 64), 4, 128, dtype=torch.int32),
        scales=empty(rows, groups, 64, dtype=dtype),
        zeros=empty(rows, groups, 32, dtype=torch.uint8) if job["asym"] else None,
        N=n, K=k, group_size=group, perm=None, dtype=dtype,
    )  # fmt: skip
    launch, needs = KERNELS[tile.algorithm]
    floats, counters = needs(tile, m, n, k, 132)
    space = Workspace(
        empty(floats, dtype=torch.float32) if floats else None,
        empty(counters, dtype=torch.int32) if counters else None,
    )
    x = empty(m, -(-k // 8) * 8, dtype=dtype)[:, :k]
    y, bias = empty(m, n, dtype=dtype), empty(n, dtype=dtype)
    try:
        (kernel,) = cross_compile(lambda: launch(x, weight, bias, y, tile, space), "sm_90")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    ptx = kernel.text("ptx")
    return {
        "error": "",
        "spilled": sum(int(b) for b in re.findall(r"(\d+) bytes spill stores", kernel.log)),
        "registers": int(re.findall(r"Used (\d+) registers", kernel.log)[-1]),
        "products": len(re.findall(r"\bmma\.sync\.", ptx)),
        "word_loads": len(re.findall(r"ld\.global\.L1::evict_first\S*\.v4\.b32", ptx)),
        "barriers": len(re.findall(r"\bbar(?:rier)?(?:\.cta)?\.sync", ptx)),
        "grid": kernel.grid,
    }


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
