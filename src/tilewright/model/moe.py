"""The module that stands in for the experts of a mixture: their weights stay packed.

It replaces transformers' `Qwen3MoeExperts` and `GraniteMoeHybridExperts` (parameters `gate_up_proj`
[E, 2 I, H] and `down_proj` [E, H, I]) and takes the same arguments. The router stays transformers'
own: which experts a token gets, and what each counts, is its decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tilewright.errors import UnsupportedError
from tilewright.layout.experts import GpuExperts, join_experts
from tilewright.model.layers import PackedModule
from tilewright.ops.contract import Case
from tilewright.ops.moe.mlp import MLP_ACTIVATIONS, moe_mlp
from tilewright.ops.moe.op import Experts

__all__ = ["EXPERT_PARTS", "QuantExperts", "expert_cases", "expert_part_names", "is_experts"]

EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
"""The matrices of an expert, as checkpoints name them."""

_REPLACED = {
    "Qwen3MoeExperts": ("gate_up_proj", "down_proj"),
    "GraniteMoeHybridExperts": ("gate_up_proj", "down_proj"),
}
# Experts of one tensor share all code; more of them make a case slower and prove nothing more.
_MOST_EXPERTS = 16


class QuantExperts(PackedModule):
    """Gate, up and down of all experts of a layer, with `tilewright.ops.moe.mlp.moe_mlp`.

    Gate and up that are packed for a GPU, and alike, become one matrix `gate_up_proj` [E, 2 I, H]:
    one launch multiplies both.

    Args:
        gate, up: [E, I, H], packed or a dense tensor.
        down: [E, H, I], likewise.
        top_k: experts a token is given to.
        activation: what stands between, by transformers' name.
        activations: "float" or "int8", as for `QuantLinear`.

    Forward takes hidden states [T, H], expert numbers [T, top_k] and their weights [T, top_k], and
    gives [T, H] in the hidden states' dtype.

    Raises:
        UnsupportedError: an activation that no kernel has.
    """

    down_proj: Experts

    def __init__(
        self, gate: Experts, up: Experts, down: Experts, *, top_k: int, activation: str = "silu",
        activations: str = "float",
    ) -> None:  # fmt: skip
        super().__init__()
        if activation not in MLP_ACTIVATIONS:
            raise UnsupportedError(
                f"the experts' activation is {activation!r}; allowed are "
                f"{', '.join(MLP_ACTIVATIONS)}"
            )
        both: GpuExperts | None = None
        if isinstance(gate, GpuExperts) and isinstance(up, GpuExperts):
            both = join_experts(gate, up)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        if both is not None:
            parts = {"gate_up_proj": both, "down_proj": down}
        self.parts = tuple(parts)
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                part = nn.Parameter(part, requires_grad=False)
            setattr(self, name, part)
        self.top_k = top_k
        self.activation = activation
        self.activations = activations
        self.num_experts, self.hidden_dim, self.intermediate_dim = _sizes(down)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        first: list[Experts] = [getattr(self, name) for name in self.parts[:-1]]
        return moe_mlp(
            hidden_states, top_k_weights, top_k_index,
            first[0] if len(first) == 1 else (first[0], first[1]), self.down_proj,
            activation=self.activation, activations=self.activations,
        )  # fmt: skip

    @property
    def weight_types(self) -> tuple[str, ...]:
        """Types of gate, up and down, each once: as `QuantLinear.weight_type`, or a dtype."""
        return tuple(dict.fromkeys(_kind(getattr(self, name)) for name in self.parts))

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of all experts."""
        return sum(getattr(self, name).nbytes for name in self.parts)

    def products(self) -> Iterator[tuple[str, str, int, int, int, int]]:
        for name in self.parts:
            part = getattr(self, name)
            if not isinstance(part, torch.Tensor):
                yield (f".{name}", part.type_name, part.N, part.K, part.group, self.top_k)

    def extra_repr(self) -> str:
        kinds = ", ".join(_kind(getattr(self, name)) for name in self.parts)
        return (
            f"{self.num_experts} experts, {self.top_k} a token, {self.hidden_dim} -> "
            f"{self.intermediate_dim} -> {self.hidden_dim}, {kinds}, "
            f"activations={self.activations!r}"
        )


def _sizes(experts: Experts) -> tuple[int, int, int]:
    if isinstance(experts, torch.Tensor):
        return (experts.shape[0], experts.shape[1], experts.shape[2])
    return (experts.E, experts.N, experts.K)


def _kind(experts: Experts) -> str:
    if isinstance(experts, torch.Tensor):
        return str(experts.dtype).removeprefix("torch.")
    return experts.type_name


def is_experts(module: nn.Module) -> bool:
    """True for a module of transformers that `QuantExperts` replaces."""
    return type(module).__name__ in _REPLACED


def expert_part_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For every experts module of a model by transformers: the names of its parameters, as keys,
    and the checkpoint tensors that they are made of."""
    names: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        if is_experts(module):
            both, down = _REPLACED[type(module).__name__]
            names[f"{path}.{both}"] = tuple(f"{path}.{p}.weight" for p in EXPERT_PARTS[:2])
            names[f"{path}.{down}"] = (f"{path}.{EXPERT_PARTS[2]}.weight",)
    return names


def expert_cases(
    model: nn.Module, act_dtype: str, paths: Sequence[str], batches: Sequence[int]
) -> tuple[Case, ...]:
    """Cases of op "moe" for the distinct packed expert products of a loaded model.

    Args:
        model: from `tilewright.load`, or what stands in for one.
        act_dtype: the dtype it computes in, as cases name it.
        paths: activation paths.
        batches: numbers of tokens.

    Returns:
        One case a product and batch, with the model's N, K, type, group and top_k, and its experts
        up to 16.
    """
    found: dict[str, Case] = {}
    # A stand-in for a model, without modules, has no experts either.
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if not isinstance(module, QuantExperts):
            continue
        experts = min(module.num_experts, max(_MOST_EXPERTS, module.top_k))
        for path in paths:
            for _, weight_type, n, k, group, top_k in module.products():
                for m in batches:
                    case = Case(
                        "moe", weight_type, act_dtype, m, n, k, group, path,
                        experts=experts, top_k=top_k,
                    )  # fmt: skip
                    found[case.id] = case
    return tuple(sorted(found.values(), key=lambda c: (str(c.weight_key), c.activations, c.M)))
