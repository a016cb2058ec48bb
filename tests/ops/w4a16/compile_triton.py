"""Compiles the portable kernels of w4a16 for chips that are not here: jobs on stdin, results on
stdout, JSON.

Run by test_triton_compile.py in a process of its own, since Triton either compiles or
interprets.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np
import torch

from tilewright.formats.w4 import W4Codes
from tilewright.isa.hazards import overwritten_operands
from tilewright.layout.triton import WordsW4, pack_w4_words
from tilewright.ops.cross import Compiled, cross_compile
from tilewright.ops.w4a16 import triton_gemm
from tilewright.ops.w4a16.triton_gemm import launch_w4a16
from tilewright.ops.w4a16.triton_skinny import launch_w4a16_skinny, workspace_skinny
from tilewright.ops.workspace import Workspace
from tilewright.tiles.tile import Tile

N, K = 512, 1024


def weight(job: dict[str, Any]) -> WordsW4:
    group = job.get("group", 128) or K
    shape = (N, K // group)
    zeros = job.get("zeros", "packed")
    codes = W4Codes(
        np.zeros((N, K), np.uint8),
        np.ones(shape, np.float32),
        None if zeros == "none" else np.zeros(shape, np.uint8),
        group,
        None,
        getattr(torch, job.get("dtype", "float16")),
    )
    return pack_w4_words(codes, pack_zeros=zeros == "packed", order=job.get("words", "k8"))


def compile_job(job: dict[str, Any]) -> tuple[Compiled, ...]:
    tile = Tile.from_mapping(job["tile"])
    m = job.get("m", 512)
    packed = weight(job).to("meta")
    real = {"dtype": getattr(torch, job.get("dtype", "float16")), "device": "meta"}
    x, y, bias = torch.empty(m, K, **real), torch.empty(m, N, **real), torch.empty(N, **real)
    floats = workspace_skinny(tile, m, N, K, 1)[0] if tile.algorithm == "skinny" else 0
    space = Workspace(torch.empty(floats, device="meta"), None)

    def launch() -> None:
        by = launch_w4a16_skinny if tile.algorithm == "skinny" else launch_w4a16
        by(x, packed, bias, y, tile, space)

    if job.get("wide"):
        triton_gemm.spans_wide = lambda tensor: True
    if job.get("unawaited"):
        triton_gemm.has_wgmma = lambda arch: False
    return cross_compile(launch, job["arch"])


def result(job: dict[str, Any]) -> dict[str, Any]:
    spans_wide, has_wgmma = triton_gemm.spans_wide, triton_gemm.has_wgmma
    try:
        kernel, *others = compile_job(job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        triton_gemm.spans_wide, triton_gemm.has_wgmma = spans_wide, has_wgmma
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
        "serialized": re.findall(r"C7\d\d\d", kernel.log),
        "and_or": len(re.findall(r"v_and_or_b32|lop3\.b32 \S+ \S+ 0x000F000F, 0x[46]", text)),
        "packed": len(re.findall(r"v_pk_mul_f16|mul\.rn\.b?f16x2", text)),
        "asm": kernel.text("ttir").count("elementwise_inline_asm"),
        "wide_multiplies": len(re.findall(r"muli.*xi64>", kernel.text("ttir"))),
        "overwritten": len(overwritten_operands(kernel)),
        "mentions_fault": "FAULT" in kernel.text("ttir"),
    }


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
