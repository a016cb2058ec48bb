"""Compiles moe's Triton kernels for chips that are not here: jobs on stdin, results on stdout.

Run by test_moe_compile.py in a process of its own, since Triton either compiles or interprets.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np
import torch

from tilewright.formats.blocks import BLOCK_TYPES
from tilewright.formats.w4 import W4Codes
from tilewright.isa.descriptors import wrong_descriptors_of
from tilewright.isa.hazards import overwritten_operands
from tilewright.layout.experts import GpuExperts, pack_gpu_experts, pack_gpu_experts_w4
from tilewright.ops.cross import Compiled, cross_compile
from tilewright.ops.moe.gpu import Routes, launch_products
from tilewright.ops.moe.triton_combine import launch_combine
from tilewright.tiles.tile import Tile

E, N, K, TOKENS, TOP_K = 4, 512, 1024, 64, 8


def experts(name: str, arch: str, dtype: torch.dtype) -> GpuExperts | torch.Tensor:
    if name == "dense":
        return torch.empty(E, N, K, dtype=dtype)
    if name.startswith("uint4"):
        zeros = np.zeros((N, K // 128), np.uint8) if name == "uint4" else None
        scales = np.ones((N, K // 128), np.float32)
        one = W4Codes(np.zeros((N, K), np.uint8), scales, zeros, 128, None, torch.float16)
        return pack_gpu_experts_w4([one] * E)
    raw = torch.zeros(E, N, BLOCK_TYPES[name].row_bytes(K), dtype=torch.uint8)
    return pack_gpu_experts(raw, name, arch=arch)


def compile_job(job: dict[str, Any]) -> tuple[Compiled, ...]:
    tile, act = Tile.from_mapping(job["tile"]), job.get("act", "")
    dtype = getattr(torch, job.get("dtype", "float16"))
    packed = experts(job["type"], job["arch"], dtype).to("meta")
    real = {"dtype": dtype, "device": "meta"}
    slots = TOKENS * TOP_K
    x, y = torch.empty(TOKENS, K, **real), torch.empty(slots, N // 2 if act else N, **real)
    ids = torch.empty(slots, dtype=torch.int64, device="meta")

    def launch() -> None:
        launch_products(x, packed, Routes(ids, E), y, tile, share=TOP_K, act=act)
        sums = torch.empty(slots, K, device="meta")
        launch_combine(sums, torch.empty(TOKENS, TOP_K, device="meta"), torch.empty_like(x))

    return cross_compile(launch, job["arch"])


def result(job: dict[str, Any]) -> dict[str, Any]:
    try:
        kernels = compile_job(job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    (kernel,) = (k for k in kernels if k.name.startswith("_moe"))
    text = kernel.text("amdgcn") or kernel.text("ptx")
    matrix = re.search(r"v_wmma_\w+|v_mfma_\w+|wgmma\.mma\w+|mma\.sync", text)
    logs = "".join(k.text("amdgcn") + k.log for k in kernels)
    spilled = re.findall(r"\.vgpr_spill_count:\s+(\d+)|(\d+) bytes spill stores", logs)
    return {
        "error": "; ".join(
            str(found)
            for k in kernels
            for found in (*wrong_descriptors_of(k), *overwritten_operands(k))
        ),
        "kernels": [k.name for k in kernels],
        "matrix": matrix.group() if matrix else "",
        "shared_bytes": kernel.metadata["shared"],
        "spilled": max((int(a or b) for a, b in spilled), default=0),
        "serialized": re.findall(r"C7\d\d\d", kernel.log),
    }


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
