"""Compiles kernels for AMD chips and executes them in the emulator: jobs on stdin, results on
stdout, JSON.

Run by the tests in a process of its own, since Triton either compiles or interprets.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tilewright.isa.emulate_launch import emulate_launch, emulate_w4a16
from tilewright.ops.check import check_output
from tilewright.ops.contract import DTYPES, Case
from tilewright.ops.w4a16.gpu_spec import gpu_spec
from tilewright.tiles.tile import Tile


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask)
    y = tl.load(y_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x + y, mask=mask)


@triton.jit
def careless_add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Without a mask: it reads and writes past the end of what is no whole block."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs) + tl.load(y_ptr + offs))


@triton.jit
def softmax_kernel(x_ptr, out_ptr, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + offs, mask=offs < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = (e / tl.sum(e, 0)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride + offs, y, mask=offs < n)


@triton.jit
def dot_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_bk, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = (offs_m < M)[:, None]
    mask_n = (offs_n < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask_k = offs_k < K
        a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :]
        b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :]
        a = tl.load(a_ptrs, mask=mask_m & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_n & mask_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_m & mask_n)


def _random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def _nan(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    difference = found.double() - right
    return float(difference.norm() / right.norm())


def _add(job: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    n = 700
    kernel = careless_add_kernel if job["kernel"] == "careless add" else add_kernel
    x, y = (_random(n, dtype=dtype, seed=s) for s in range(2))
    out = _nan(n, dtype=dtype)
    (run,) = emulate_launch(
        lambda *t: kernel[(2,)](*t, n, BLOCK=512, num_warps=2), (x, y, out), job["arch"]
    )
    error = 0.0 if torch.equal(out, x + y) else 1.0  # rounded once: the same bits
    return {"error": error, "instructions": run.instructions, "waves": run.waves}


def _softmax(job: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    x, out = _random(2, 300, dtype=dtype, seed=0), _nan(2, 300, dtype=dtype)
    (run,) = emulate_launch(
        lambda a, b: softmax_kernel[(2,)](a, b, 300, a.stride(0), BLOCK=512, num_warps=4),
        (x, out),
        job["arch"],
    )
    right = x.double().softmax(1)
    return {"error": _error(out, right), "instructions": run.instructions, "waves": run.waves}


def _dot(job: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    m, n, k = 50, 40, 70
    a, b = _random(m, k, dtype=dtype, seed=0), _random(k, n, dtype=dtype, seed=1)
    c = _nan(m, n, dtype=dtype)
    blocks = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}

    def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        dot_kernel[(2, 2)](
            a, b, c, m, n, k, a.stride(0), b.stride(0), c.stride(0), **blocks, num_warps=4
        )

    (run,) = emulate_launch(launch, (a, b, c), job["arch"])
    right = a.double() @ b.double()
    return {"error": _error(c, right), "instructions": run.instructions, "waves": run.waves}


def _w4a16(job: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    m, n, k, group = job["shape"]
    case = Case(
        "w4a16", job.get("type", "uint4"), job["dtype"], m, n, k, group,
        flags=tuple(job.get("flags", ())),
    )  # fmt: skip
    spec = gpu_spec(job["arch"], "cpu")
    inputs = spec.make_inputs(case, 0)
    right = spec.reference(inputs)
    if corruption := job.get("corrupt"):
        corrupted = spec.corruptions[corruption](inputs)
        assert corrupted is not None, f"{case.id} has no place for {corruption!r}"
        inputs = corrupted
    y = emulate_w4a16(
        Tile.from_mapping(job["tile"]),
        case,
        job["arch"],
        inputs=inputs,
        last_wave_first=job.get("last_wave_first", False),
    )
    verdict = check_output(y.reshape(right.shape), right, spec.error_model(inputs, right))
    return {"ok": verdict.passed, "reason": verdict.reason}


KERNELS = {
    "add": _add,
    "careless add": _add,
    "softmax": _softmax,
    "dot": _dot,
    "w4a16": _w4a16,
}


def result(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return KERNELS[job["kernel"]](job, DTYPES[job["dtype"]])
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump({name: result(job) for name, job in jobs.items()}, sys.stdout)
