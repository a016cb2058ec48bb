"""Fused softmax of rows, y = exp(x - max) / sum: Numba on the CPU, Triton on a GPU.

TRITON_INTERPRET=1 runs the Triton kernel on the CPU. docs/bring-your-own-kernel.md explains it all.
"""

import os

import numpy as np
import torch

from tilewright.device import INTERPRETER, arch_of
from tilewright.ops.check import ErrorModel
from tilewright.ops.contract import Case, Inputs, OpSpec, draw_activations
from tilewright.ops.space import Planted, Rule, TileSpace
from tilewright.ops.user_spec import tuned_tile
from tilewright.tiles.tile import Tile

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRET else "cpu")
TRITON = INTERPRET or DEVICE.type == "cuda"
ARCH = INTERPRETER if INTERPRET else arch_of(DEVICE)
WARPS = {"num_warps": (1, 2, 4, 8)} if TRITON else {}
if TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def softmax_kernel(x_ptr, y_ptr, K, end, stride_xm, stride_ym, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        top, total = -float("inf"), 0.0
        for at in range(0, end, BLOCK):  # the sum so far is rescaled when the maximum rises
            k = at + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * stride_xm + k, k < end, -float("inf")).to(tl.float32)
            new = tl.maximum(top, tl.max(x, 0))
            total, top = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0), new
        for at in range(0, K, BLOCK):
            k = at + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * stride_xm + k, k < K, 0.0).to(tl.float32)
            tl.store(y_ptr + row * stride_ym + k, tl.exp(x - top) / total, k < K)
else:
    import numba

    @numba.njit
    def softmax_kernel(x, y, end, block):
        for m in range(x.shape[0]):
            top, total = np.float32(-np.inf), np.float32(0)
            for at in range(0, end, block):
                part = x[m, at : min(at + block, end)]
                new = max(top, part.max())
                total, top = total * np.exp(top - new) + np.exp(part - new).sum(), new
            y[m] = np.exp(x[m] - top) / total


def run(inputs, tile=None, threads=None):
    x, problem, end = inputs.x, inputs.case.problem(ARCH), inputs.case.K
    tile = tile or tuned_tile(SPEC, problem)
    if "planted" in dict(tile):
        end = end // tile.block * tile.block
    else:
        SPACE.check(tile, problem)
    y = torch.empty(x.shape, device=DEVICE)
    if TRITON:
        args = (x, y, x.shape[1], end, x.stride(0), y.stride(0))
        softmax_kernel[(len(x),)](*args, BLOCK=tile.block, num_warps=tile.num_warps)
    else:
        softmax_kernel(x.numpy(), y.numpy(), end, tile.block)
    return y


def reference(inputs):
    e = np.exp(inputs.x64() - inputs.x64().max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def error_model(inputs, ref):  # roundings: of the argument of exp, of K additions, of the rest
    depth = inputs.x64().max(axis=1, keepdims=True) - inputs.x64()
    return ErrorModel(2.0**-24 * ref * (depth + inputs.case.K**0.5 + 4), inputs.case.dtype)


SIZES = [(m, k) for m in (1, 5, 17, 63) for k in (33, 64, 576, 1000)]
SPACE = TileSpace(
    "softmax",
    {"softmax": {"block": (16, 64, 256, 1024), **WARPS}},
    (Rule("row", "more than half of a block must hold columns", lambda t, p: t.block < 2 * p.K),),
    lambda problem: Tile.of("softmax", block=16, **dict.fromkeys(WARPS, 4)),
    planted=(Planted(
        Tile.of("softmax", block=256, planted="k-tail", **dict.fromkeys(WARPS, 4)),
        "The sum stops at the last whole block.", "One step less a row.", "ragged-shapes",
        run, (Case("softmax", "rows", "float32", 17, 512, 512),),
    ),),
)  # fmt: skip
SPEC = OpSpec(
    "softmax", "Softmax", version=1, weight_types=("rows",),
    cases=tuple(Case("softmax", "rows", "float32", m, k, k) for m, k in SIZES),
    make_inputs=lambda case, seed: Inputs(case, draw_activations(case, seed).to(DEVICE)),
    reference=reference, error_model=error_model, run=run, space=lambda: SPACE,
    flops=lambda p: 5.0 * p.M * p.K, bytes=lambda p: 8.0 * p.M * p.K,
)  # fmt: skip
