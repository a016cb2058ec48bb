"""The feed-forward layer of a mixture of experts, experts packed.

    out[t] = sum_j weights[t, j] * down[e](act(gate[e](x[t])) * up[e](x[t])),   e = ids[t, j]

On the CPU expert by expert, in ascending order: its rows are gathered once and pass gate, up and
down while they are in the cache; results are added to `out` in float32 as they come. So a token's
sum has one order, whatever other tokens are in the batch, and memory holds the rows of one expert
at a time.
On a GPU (`tilewright.ops.moe.gpu`) all experts' products are one launch, those of gate and up with
the activation among them, and a last one adds up what the choices of a token gave, in their order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from tilewright.errors import UnsupportedError
from tilewright.layout.experts import GpuExperts
from tilewright.ops.moe.experts import PackedExperts, route
from tilewright.ops.moe.op import Experts, check_routing, check_settings, multiplier

__all__ = ["MLP_ACTIVATIONS", "moe_mlp"]

MLP_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
"""What may stand between gate and up, by transformers' names."""


def moe_mlp(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Experts | tuple[Experts, Experts],
    down: Experts,
    *,
    activation: str = "silu",
    activations: str = "float",
    threads: int | None = None,
) -> torch.Tensor:
    """Gate, up, activation and down of the experts that each token chose, weighted and summed.

    Args:
        x: [T, H] float32, float16 or bfloat16, any strides.
        weights: [T, top_k] floating point: what each choice counts, as the router gives it.
        ids: integers [T, top_k], each in 0..E-1; a token may name an expert more than once.
        gate_up: [E, 2 I, H], the I rows of gate before those of up; or (gate, up), each
            [E, I, H]. Packed, or a dense tensor. On a GPU the first form takes one launch, and the
            second two and a pass more: `tilewright.layout.experts.join_experts` makes one of two.
        down: [E, H, I], packed or dense.
        activation: a key of MLP_ACTIVATIONS.
        activations: "float" or "int8", as for `moe_gemm`.
        threads: on the CPU, None for torch's setting; nothing else has any.

    Returns:
        [T, H] of x's dtype. On the CPU everything between is float32; on a GPU act(gate) * up is
        rounded to x's dtype, and all else is float32.

    Raises:
        ValueError, TypeError: a wrong shape or argument; on the CPU, an id out of range. On a GPU
            such an id makes its token NaN.
        UnsupportedError: an activation, dtype or device that is not served.
    """
    if activation not in MLP_ACTIVATIONS:
        raise UnsupportedError(
            f"moe_mlp: activation is {activation!r}; allowed are {', '.join(MLP_ACTIVATIONS)}"
        )
    act = MLP_ACTIVATIONS[activation]
    check_settings("moe_mlp", activations, threads)
    parts = gate_up if isinstance(gate_up, tuple) else (gate_up,)
    inner = _inner(parts, down)
    count, _, hidden = _shape(parts[0])
    on_gpu = any(isinstance(p, GpuExperts) or p.device.type == "cuda" for p in _placed(parts, down))
    if on_gpu:
        from tilewright.ops.moe.gpu import check_operands, gpu_moe_mlp

        check_operands("moe_mlp", x, ids, _of_gpu(parts)[0], activations)
    else:
        check_routing("moe_mlp", x, ids, count, hidden)
    if not isinstance(weights, torch.Tensor):
        raise TypeError(f"moe_mlp: weights is {type(weights).__name__}; pass a tensor, as ids")
    if weights.shape != ids.shape or not weights.is_floating_point():
        raise ValueError(
            f"moe_mlp: weights has shape {list(weights.shape)} and dtype {weights.dtype}; it must "
            f"be floating point {list(ids.shape)}, as ids"
        )
    if on_gpu:
        return gpu_moe_mlp(
            x, weights, ids, _of_gpu(parts), _of_gpu((down,))[0], activation=activation
        )  # fmt: skip
    out = torch.zeros(x.shape, dtype=torch.float32)
    routing = route(ids, count)
    dtype = str(x.dtype).removeprefix("torch.")
    first_half = [multiplier(part, dtype, activations, None, threads) for part in _of_cpu(parts)]
    second_half = multiplier(_of_cpu((down,))[0], "float32", activations, None, threads)
    scale = weights.detach().reshape(-1).to(torch.float32)[routing.slots]
    for expert, first, last in routing.spans:
        tokens = routing.tokens[first:last]
        rows = x.detach().index_select(0, tokens)
        halves = []
        for part, multiply in zip(parts, first_half, strict=True):
            half = torch.empty(last - first, _shape(part)[1], dtype=torch.float32)
            multiply(expert, rows, half)
            halves.append(half)
        gate, up = halves if len(halves) == 2 else halves[0].split(inner, dim=1)
        y = torch.empty(last - first, hidden, dtype=torch.float32)
        second_half(expert, act(gate) * up, y)
        # One row after the other, in the order of `tokens`: a repeated token has a fixed order too.
        out.index_add_(0, tokens, y * scale[first:last, None])
    return out.to(x.dtype)


def _placed(parts: tuple[Experts, ...], down: Experts) -> list[GpuExperts | torch.Tensor]:
    """Those that say where they lie; experts packed for the CPU lie there."""
    return [part for part in (*parts, down) if not isinstance(part, PackedExperts)]


def _of_gpu(parts: tuple[Experts, ...]) -> tuple[GpuExperts | torch.Tensor, ...]:
    for part in parts:
        if isinstance(part, PackedExperts):
            raise ValueError(
                "moe_mlp: some experts are packed for the CPU, others lie on a GPU; pack all "
                "for one of them"
            )
    return tuple(part for part in parts if not isinstance(part, PackedExperts))


def _of_cpu(parts: tuple[Experts, ...]) -> tuple[PackedExperts | torch.Tensor, ...]:
    return tuple(part for part in parts if not isinstance(part, GpuExperts))


def _shape(experts: Experts) -> tuple[int, int, int]:
    if isinstance(experts, torch.Tensor):
        if experts.dim() != 3:
            raise ValueError(
                f"moe_mlp: dense experts have shape {list(experts.shape)}; pass [E, N, K]"
            )
        return (experts.shape[0], experts.shape[1], experts.shape[2])
    if not isinstance(experts, PackedExperts | GpuExperts):
        raise TypeError(
            f"moe_mlp: experts are {type(experts).__name__}; pass PackedExperts, GpuExperts or a "
            "dense tensor [E, N, K], and for gate_up one of them or a tuple of two"
        )
    return (experts.E, experts.N, experts.K)


def _inner(parts: tuple[Experts, ...], down: Experts) -> int:
    """The width between the halves; ValueError unless all shapes fit together."""
    shapes = [_shape(part) for part in parts]
    count, inner, hidden = _shape(down)[0], _shape(down)[2], _shape(down)[1]
    rows = inner if len(parts) == 2 else 2 * inner
    if len(parts) > 2 or any(shape != (count, rows, hidden) for shape in shapes):
        raise ValueError(
            f"moe_mlp: gate_up has the shapes {[list(s) for s in shapes]}, down is "
            f"{list(_shape(down))}; they must be [E, 2 I, H] (or two of [E, I, H]) and [E, H, I]"
        )
    return inner
