"""Compile a model's kernels in many processes before the model runs.

Triton compiles a kernel for each type and size class, seconds each, one after another in a process;
what one process has compiled the others find in Triton's cache. Each job here runs one of the
model's products, or what lies between them, on random operands of the model's own shapes: the
tile that a table or a default gives is the one that the model will run.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from synthetic_gguf import Shape, draw_blocks

__all__ = ["Warming", "mixtures", "parts", "products", "warm_file"]

_MOST_PROCESSES = 14
_MANY_ROWS = 1024  # transformers' forward is only held to short prompts


def products(shape: Shape) -> list[tuple[str, int, int]]:
    """Type, N and K of the products of a dense synthetic model as a GPU runs them: joined."""
    wide, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    found = [
        ("Q4_K", wide + 2 * kv, hidden),
        ("Q4_K", wide + kv, hidden),
        ("Q6_K", kv, hidden),
        ("Q4_K", hidden, wide),
    ]
    if not shape.experts:
        found += [
            ("Q4_K", 2 * shape.feed_forward, hidden),
            ("Q4_K", hidden, shape.feed_forward),
            ("Q6_K", hidden, shape.feed_forward),
        ]
    return [*found, ("Q6_K", shape.vocabulary, hidden)]


def parts(shape: Shape) -> list[tuple[str, int, int]]:
    """Those that transformers' own forward runs instead of joined ones."""
    wide, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    found = [("Q4_K", wide, hidden), ("Q4_K", kv, hidden)]
    return found if shape.experts else [*found, ("Q4_K", shape.feed_forward, hidden)]


def mixtures(shape: Shape) -> list[tuple[str, str]]:
    """Types of gate and up, and of down, of the experts of a synthetic model."""
    return [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")] if shape.experts else []


def _jobs(shape: Shape, rows: Sequence[int], dtype: str, activations: str) -> Iterator[Any]:
    yield ("between", shape, dtype)
    for kinds in mixtures(shape):
        for m in rows:
            yield ("mixture", shape, kinds, m, dtype)
    for kind, n, k in products(shape):
        for m in rows:
            if n != shape.vocabulary or m == 1:  # the output matrix meets one row
                yield (kind, n, k, m, dtype, activations)
    for kind, n, k in parts(shape):
        for m in (m for m in rows if m < _MANY_ROWS):
            yield (kind, n, k, m, dtype, activations)


class Warming:
    """Runs the jobs in the background; `wait` before the model runs.

    Args:
        shape: of the model.
        rows: rows of x that the products meet.
    """

    def __init__(self, shape: Shape, rows: Sequence[int], dtype: str, activations: str) -> None:
        jobs = list(_jobs(shape, rows, dtype, activations))
        count = min(_MOST_PROCESSES, len(jobs), os.cpu_count() or 1)
        self._pool = multiprocessing.get_context("spawn").Pool(count)
        self._left = self._pool.map_async(_run, jobs, chunksize=1)

    def wait(self) -> None:
        """Until all is compiled; says what failed, which the model will then fail at too."""
        if self._pool is None:
            return
        for failure in filter(None, self._left.get()):
            print(f"warming up: {failure}", file=sys.stderr)
        self._pool.terminate()
        self._pool = None


def _run(job: Any) -> str | None:
    import torch

    try:
        with torch.inference_mode():
            if job[0] == "between":
                _between(job[1], getattr(torch, job[2]))
            elif job[0] == "mixture":
                _mixture(*job[1:])
            elif job[0] == "file":
                _share_of_file(*job[1:])
            else:
                _product(*job)
        torch.cuda.synchronize()
    except Exception as error:  # the model's own run will raise it where it can be read
        what = " ".join(str(part) for part in job[:4] if not isinstance(part, Shape))
        return f"{what}: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return None


def _product(kind: str, n: int, k: int, m: int, dtype: str, activations: str) -> None:
    import torch

    from tilewright.layout.blocks import pack_blocks_for
    from tilewright.ops.mmq.op import mmq_gemm

    raw = draw_blocks(kind, n, k, torch.Generator("cuda").manual_seed(0), k**-0.5)
    weight = pack_blocks_for(raw, kind, "cuda")
    x = torch.randn(m, k, device="cuda", dtype=getattr(torch, dtype))
    mmq_gemm(x, weight, activations=activations)


def _mixture(shape: Shape, kinds: tuple[str, str], m: int, dtype: str) -> None:
    import torch

    from tilewright.layout.experts import pack_gpu_experts
    from tilewright.ops.moe.mlp import moe_mlp

    generator = torch.Generator("cuda").manual_seed(0)

    def experts(kind: str, n: int, k: int) -> Any:
        raw = draw_blocks(kind, shape.experts * n, k, generator, k**-0.5)
        return pack_gpu_experts(raw.view(shape.experts, n, -1), kind, "cuda")

    x = torch.randn(m, shape.hidden, device="cuda", dtype=getattr(torch, dtype))
    scores = torch.rand(m, shape.experts, device="cuda", generator=generator)
    weights, ids = scores.topk(shape.used)
    first = experts(kinds[0], 2 * shape.feed_forward, shape.hidden)
    last = experts(kinds[1], shape.hidden, shape.feed_forward)
    # The router's weights come in its dtype, float32 or the model's.
    for counts in (weights, weights.to(x.dtype)):
        moe_mlp(x, counts, ids, first, last)


def warm_file(
    path: Path, dtypes: Sequence[str], rows: Sequence[int], head_rows: Sequence[int] = (1,)
) -> None:
    """Compile what the model of a file needs on this GPU for prompts of so many tokens and a step.

    Every process loads the file and runs its share of the distinct products.

    Args:
        rows: tokens of the prompts.
        head_rows: rows that the output matrix meets; of a prompt's, the decoders need one.
    """
    count = min(_MOST_PROCESSES, os.cpu_count() or 1)
    shares = max(1, count // len(dtypes))
    jobs = [
        ("file", path, dtype, at, shares, tuple(rows), tuple(head_rows))
        for dtype in dtypes
        for at in range(shares)
    ]
    with multiprocessing.get_context("spawn").Pool(min(count, len(jobs))) as pool:
        for failure in filter(None, pool.map(_run, jobs, chunksize=1)):
            print(f"warming up: {failure}", file=sys.stderr)


def _share_of_file(
    path: Path, dtype: str, share: int, shares: int, rows: Sequence[int], head_rows: Sequence[int]
) -> None:
    import torch

    import tilewright
    from tilewright.model.generate import decoder_for
    from tilewright.model.layers import QuantLinear

    model, _ = tilewright.load(path, device="cuda", dtype=getattr(torch, dtype))
    distinct: dict[Any, tuple[QuantLinear, Sequence[int]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            key = (module.weight_type, module.out_features, module.in_features)
            distinct.setdefault(key, (module, head_rows if name == "lm_head" else (1, *rows)))
    work = [(module, m) for module, some in distinct.values() for m in dict.fromkeys(some)]
    for module, m in work[share::shares]:
        module(torch.randn(m, module.in_features, device=model.device, dtype=model.dtype))
    if share == 0:
        # What lies between the products does not mind what they are.
        def zeros(self: QuantLinear, x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(*x.shape[:-1], self.out_features)

        # For now only: a worker may take a share of another dtype after this one.
        with patch.object(QuantLinear, "forward", zeros):
            decoder = decoder_for(model)
            for m in rows:
                decoder.reset()
                decoder.prefill(torch.zeros(1, m, dtype=torch.int64))
                decoder.step(0)


def _between(shape: Shape, dtype: Any) -> None:
    import torch

    from tilewright.ops.decoder.triton_kernels import add_norm, attend, gate, rope

    def some(*size: int) -> Any:
        return torch.zeros(size, device="cuda", dtype=dtype)

    kv, wide = shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    keys, values = (
        some(shape.kv_heads, 64, shape.head_dim),
        some(shape.kv_heads, 64, shape.head_dim),
    )
    cos, sin = some(64, shape.head_dim // 2), some(64, shape.head_dim // 2)
    position = torch.zeros(2, dtype=torch.int64, device="cuda")[1:]
    norm = some(shape.head_dim) if shape.experts else None  # qwen3's heads have norms
    for rows in (1, 16):
        x, weight = some(rows, shape.hidden), some(shape.hidden)
        add_norm(x, None, weight, shape.eps)
        add_norm(x, x.clone(), weight, shape.eps)
        for parts in ([wide, kv, kv], [wide, kv]):
            q, k, v = (*some(rows, sum(parts)).split(parts, dim=1), some(rows, kv))[:3]
            rope(q, k, v, keys, values, cos, sin, position, q_norm=norm, k_norm=norm, eps=shape.eps)
            if rows == 1:
                attend(q, keys, values, position, scale=0.1)
        both = some(rows, 2 * shape.feed_forward)
        gate(*both.split(shape.feed_forward, dim=1), "silu")
