"""Compiles the Hopper GEMM for sm_90 with no GPU: jobs on stdin, results on stdout, JSON.

Run by test_hopper_gemm.py in a process of its own, since Triton either compiles or interprets.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from tilewright.ops.gluon_compat import GluonASTSource
from tilewright.ops.w4a16 import hopper_gemm
from tilewright.ops.w4a16.hopper_parts import tile_layouts
from tilewright.tiles.tile import Tile

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def descriptor(dtype: str, block: list[int], layout: Any) -> str:
    return f"tensordesc<{dtype}{block},{layout!r}>"


def compile_job(job: dict[str, Any]) -> Any:
    bn, bm = job["block_n"], job["block_m"]
    groups, asym = job.get("groups", 1), job.get("asym", True)
    dtype, tma_y = job.get("dtype", "fp16"), job.get("tma_y", True)
    blocks = job["block_k"] // 64
    layouts = tile_layouts(bn, bm, hopper_gemm.num_warps(bn), blocks, groups)
    rows = [bn // 64, groups, 32]
    scales = descriptor("i32", rows, layouts.words_shared)
    types = {
        "x_desc": descriptor(dtype, [bm, 64], layouts.x_shared),
        "w_desc": descriptor("i32", [bn // 64, 4 * blocks, 128], layouts.words_shared),
        "s_desc": scales,
        "z_desc": descriptor("u8", rows, layouts.zeros_shared) if asym else scales,
        "y": descriptor(dtype, [bm, bn], layouts.x_shared) if tma_y else f"*{dtype}",
        "bias_ptr": f"*{dtype}", "part_ptr": "*" + job.get("partials", "fp32"), "count_ptr": "*i32",
    }  # fmt: skip
    constants = {
        "BN": bn, "BM": bm, "KB": blocks, "GROUPS": groups, "ASYM": asym, "TMA_Y": tma_y,
        "GROUP_STEPS": job.get("group_steps", 1), "HAS_BIAS": job.get("bias", True),
        "CUT": job.get("cut", True), "STAGES": job["num_stages"], "GROUP_M": 4,
        "WARPS": hopper_gemm.num_warps(bn),
        "PRODUCER_REGISTERS": hopper_gemm.PRODUCER_REGISTERS,
    }  # fmt: skip
    kernel = hopper_gemm._w4a16_hopper_kernel
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = GluonASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"},
    )
    tile = Tile.of("hopper", block_n=bn, ctas=job["ctas"])
    options = {"num_warps": hopper_gemm.num_warps(bn), "maxnreg": hopper_gemm.registers(tile)}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def assemble(ptx: str) -> tuple[str, str]:
    """What ptxas says of a kernel, and its machine code as text.

    Triton brings two of them, and the newer one alone knows the PTX of its newest versions.
    """
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        text.write_text(ptx)
        for name in ("ptxas", "ptxas-blackwell"):
            said = subprocess.run(
                [TOOLS / name, "-v", "-arch=sm_90a", text, "-o", binary],
                capture_output=True, text=True,
            )  # fmt: skip
            if "Unsupported .version" not in said.stderr:
                break
        if said.returncode:
            raise RuntimeError(said.stderr[:500])
        code = subprocess.run(
            [TOOLS / "nvdisasm", "-c", binary], capture_output=True, text=True, check=True
        )
    return said.stdout + said.stderr, code.stdout


def result(job: dict[str, Any]) -> dict[str, Any]:
    try:
        kernel = compile_job(job)
        said, code = assemble(kernel.asm["ptx"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    products = re.findall(r"HGMMA\.\S+ R\d+, (\w+)", code)
    return {
        "error": "",
        "warnings": sorted(set(re.findall(r"C75\d\d", said))),
        "spilled": [int(n) for n in re.findall(r"(\d+) bytes spill stores", said)],
        "registers_a": sum(p.startswith("R") for p in products),
        "shared_a": sum(not p.startswith("R") for p in products),
        "stores_to_shared": kernel.asm["ttgir"].count("ttg.local_store"),
        "shared_bytes": kernel.metadata.shared,
    }


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
