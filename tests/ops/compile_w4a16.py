"""Compiles the Triton GEMM for chips that are not here: jobs on stdin, results on stdout, JSON.

Run by test_triton_w4a16_compile.py in a process of its own, since Triton either compiles or
interprets.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewright.ops.w4a16.triton_gemm import _w4a16_kernel
from tilewright.ops.w4a16.triton_space import warp_size

TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def target(arch: str) -> GPUTarget:
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", arch, warp_size(arch))


def compile_job(job: dict[str, Any]) -> Any:
    tile, zeros = job["tile"], job.get("zeros", "packed")
    real = f"*{TYPES[job.get('dtype', 'float16')]}"
    pointers = {
        "x_ptr": real, "q_ptr": "*i32", "s_ptr": real, "b_ptr": real, "y_ptr": real,
        "z_ptr": "*u8" if zeros == "bytes" else "*i32",
    }  # fmt: skip
    constants = {
        "GROUP": job.get("group", 128), "ZEROS": zeros, "HAS_BIAS": True,
        "DEQUANT": tile["dequant"], "BLOCK_M": tile["block_m"], "BLOCK_N": tile["block_n"],
        "BLOCK_K": tile["block_k"], "WIDE": job.get("wide", False), "INTERPRET": False,
        "FAULT": "", "stride_xk": 1, "stride_qk": 1, "stride_sg": 1, "stride_yn": 1,
    }  # fmt: skip
    names = _w4a16_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names
    }
    aligned = [i for i, name in enumerate(names) if signature[name] != "constexpr"]
    source = ASTSource(
        fn=_w4a16_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": tile["num_warps"], "num_stages": tile["num_stages"]}
    return triton.compile(source, target=target(job["arch"]), options=options)


def result(job: dict[str, Any]) -> dict[str, Any]:
    try:
        kernel = compile_job(job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    text = kernel.asm.get("amdgcn") or kernel.asm["ptx"]
    matrix = re.search(r"v_wmma_\w+|v_mfma_\w+|wgmma\.mma\w+|mma\.sync", text)
    spilled = re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)
    return {
        "error": "",
        "binary_bytes": len(kernel.asm.get("hsaco") or kernel.asm["cubin"]),
        "matrix": matrix.group() if matrix else "",
        "shared_bytes": kernel.metadata.shared,
        "spilled": int(spilled[-1]) if spilled else 0,
        "wide_multiplies": len(re.findall(r"muli.*xi64>", kernel.asm["ttir"])),
        "mentions_fault": "FAULT" in kernel.asm["ttir"],
    }


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
