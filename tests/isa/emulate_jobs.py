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


@triton.jit
def reduce_kernel(x_ptr, sum_ptr, max_ptr, at_ptr, scan_ptr, M: tl.constexpr, N: tl.constexpr):
    offs_m = tl.arange(0, M)
    offs_n = tl.arange(0, N)
    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :])
    tl.store(sum_ptr + offs_m, tl.sum(x, 1))
    tl.store(max_ptr + offs_n, tl.max(x, 0))
    tl.store(at_ptr + offs_m, tl.argmax(x, 1))
    tl.store(scan_ptr + offs_n, tl.cumsum(tl.max(x, 0), 0))


@triton.jit
def functions_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    a = tl.abs(x) + 0.1
    y = tl.log(a) * tl.sqrt(a) / (1.0 + tl.exp(-x)) + tl.erf(x) + tl.floor(x) + x % 0.75
    tl.store(out_ptr + tl.arange(0, N), y)


@triton.jit
def integers_kernel(a_ptr, b_ptr, out_ptr, dot_ptr, counter_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    a = tl.load(a_ptr + offs)
    b = tl.load(b_ptr + offs)
    wide = a.to(tl.int64) * b.to(tl.int64) >> 7
    tl.store(out_ptr + offs, a // b * 3 + a % b + tl.maximum(a, b) + wide.to(tl.int32))
    square = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    left = tl.load(a_ptr + square).to(tl.int8)
    right = tl.load(b_ptr + square).to(tl.int8)
    tl.store(dot_ptr + square, tl.dot(left, right))
    tl.atomic_add(counter_ptr, tl.sum(a, 0))
    tl.atomic_max(counter_ptr + 1, -1)


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


def _wrong(**pairs: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """The names of the results that are not right; whole numbers must be equal."""
    wrong = []
    for name, (found, right) in pairs.items():
        if right.dtype.is_floating_point:
            good = bool(((found - right).abs() <= 1e-5 * right.abs().max()).all())
        else:
            good = torch.equal(found.long(), right.long())
        if not good:
            wrong.append(name)
    return {"wrong": wrong}


def _reduce(job: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    m, n = 32, 64
    x = _random(m, n, dtype=dtype, seed=0)
    sums, most, scan = (_nan(size, dtype=dtype) for size in (m, n, n))
    at = torch.full((m,), -1, dtype=torch.int32)
    emulate_launch(
        lambda *t: reduce_kernel[(1,)](*t, M=m, N=n), (x, sums, most, at, scan), job["arch"]
    )
    largest = x.max(0).values
    return _wrong(
        sum=(sums, x.double().sum(1)),
        max=(most, largest),
        argmax=(at, x.argmax(1)),
        cumsum=(scan, largest.double().cumsum(0)),
    )


def _functions(job: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    x, y = _random(512, dtype=dtype, seed=0), _nan(512, dtype=dtype)
    emulate_launch(lambda *t: functions_kernel[(1,)](*t, N=512), (x, y), job["arch"])
    wide = x.double()
    a = wide.abs() + 0.1
    right = a.log() * a.sqrt() / (1 + (-wide).exp()) + wide.erf() + wide.floor()
    return _wrong(functions=(y, right + torch.fmod(wide, torch.tensor(0.75, dtype=wide.dtype))))


def _integers(job: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    a = torch.from_numpy(rng.integers(-(2**31), 2**31, 1024).astype(np.int32))
    b = torch.from_numpy((rng.integers(1, 5000, 1024) * rng.choice((-1, 1), 1024)).astype(np.int32))
    out, dot = (torch.full((1024,), -1, dtype=torch.int32) for _ in range(2))
    counter = torch.tensor([5, -7], dtype=torch.int32)
    emulate_launch(
        lambda *t: integers_kernel[(1,)](*t, N=1024), (a, b, out, dot, counter), job["arch"]
    )
    x, y = a.long(), b.long()
    quotient = torch.div(x, y, rounding_mode="trunc")
    right = quotient * 3 + (x - quotient * y) + torch.maximum(x, y) + (x * y >> 7)
    left, over = (v.to(torch.int8).long().reshape(32, 32) for v in (a, b))
    return _wrong(
        arithmetic=(out, right.int()),
        dot=(dot.reshape(32, 32), left @ over),
        atomics=(counter, torch.stack([(x.sum() + 5).int(), torch.tensor(-1, dtype=torch.int32)])),
    )


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
    "reduce": _reduce,
    "functions": _functions,
    "integers": _integers,
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
