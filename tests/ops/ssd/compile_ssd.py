"""Compiles ssd's kernels for chips that are not here: jobs on stdin, results on stdout, JSON.

Run by test_triton_compile.py in a process of its own, since Triton either compiles or interprets.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

import torch

from tilewright.isa.descriptors import wrong_descriptors_of
from tilewright.isa.hazards import overwritten_operands
from tilewright.ops.cross import Compiled, cross_compile
from tilewright.ops.ssd.args import ScanArgs, StepArgs
from tilewright.ops.ssd.triton_scan import launch_scan, workspace_scan
from tilewright.ops.ssd.triton_step import launch_step, step_tile
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile

HEADS, GROUPS = 32, 2


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def scan_args(job: dict[str, Any]) -> ScanArgs:
    p, n, length = job.get("p", 64), job.get("n", 128), 4096
    dtype = getattr(torch, job.get("dtype", "bfloat16"))
    widths = (HEADS * p, HEADS * p, GROUPS * n, GROUPS * n, HEADS)
    whole = empty(1, length, sum(widths), dtype=dtype)
    if job.get("transposed"):  # tokens are the fastest dimension
        whole = empty(1, sum(widths), length, dtype=dtype).transpose(1, 2)
    z, x, b, c, dt = whole.split(widths, 2)
    packed = job.get("packed", False)
    return ScanArgs(
        x=x.unflatten(2, (HEADS, p)), dt=dt, A=empty(HEADS), B=b.unflatten(2, (GROUPS, n)),
        C=c.unflatten(2, (GROUPS, n)), D=empty(HEADS, p) if job.get("wide") else empty(HEADS),
        z=z.unflatten(2, (HEADS, p)) if job.get("gate") else None, dt_bias=empty(HEADS),
        dt_softplus=True, dt_limit=(0.0, math.inf),
        initial_states=empty(1, HEADS, p, n) if job.get("initial") else None,
        cu_seqlens=empty(2, dtype=torch.int32) if packed else None,
        y=empty(1, length, HEADS, p, dtype=dtype), final_states=empty(1, HEADS, p, n),
    )  # fmt: skip


def compile_job(job: dict[str, Any]) -> tuple[Compiled, ...]:
    args = scan_args(job)
    if job["tile"] == "step":
        one = StepArgs(
            args.final_states, args.x[:, 0], args.dt[:, 0], args.A, args.B[:, 0], args.C[:, 0],
            args.D, None, args.dt_bias, True, (0.0, math.inf), None, args.y[:, 0],
        )  # fmt: skip
        tile = step_tile(args.head_dim, args.d_state)
        return cross_compile(lambda: launch_step(one, tile), job["arch"])
    tile = Tile.from_mapping(job["tile"])
    space = Workspace(empty(workspace_scan(args, tile)[0]), None)
    return cross_compile(lambda: launch_scan(args, tile, space), job["arch"])


def figures(kernel: Compiled) -> dict[str, Any]:
    text = kernel.text("amdgcn") or kernel.text("ptx")
    matrix = re.search(r"v_wmma_\w+|v_mfma_\w+|wgmma\.mma\w+|mma\.sync", text)
    spilled = re.findall(r"\.vgpr_spill_count:\s+(\d+)|(\d+) bytes spill stores", text + kernel.log)
    return {
        "kernel": kernel.name,
        "matrix": matrix.group() if matrix else "",
        "shared_bytes": kernel.metadata["shared"],
        "spilled": max((int(a or b) for a, b in spilled), default=0),
        "serialized": re.findall(r"C7\d\d\d", kernel.log),
        "overwritten": [
            str(found) for found in (*overwritten_operands(kernel), *wrong_descriptors_of(kernel))
        ],
        "mentions_fault": "FAULT" in kernel.text("ttir"),
        "stores_by_tma": "cp.async.bulk.tensor.2d.global.shared" in kernel.text("ptx"),
    }


def result(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"error": "", "kernels": [figures(kernel) for kernel in compile_job(job)]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500], "kernels": []}


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
