"""The modules that stand in for Mamba-2 mixers: transformers' parameters, Tilewright's ssd.

A mixer of Mamba2, NemotronH, Bamba, GraniteMoeHybrid or FalconH1 projects its input, convolves a
part of it, scans that, gates and norms, and projects back. `SSMMixer` takes over the modules that
do the projections (packed or not) and the convolution's and norm's weights under the names they
have, and runs `causal_conv1d`, `ssd_scan`, `ssd_step` and `gated_rms_norm` between them::

    in_proj(x) = [z | x B C | dt]            widths d, d + 2 G N, H;   d = H P
    x B C = silu(conv(x B C))
    y = ssd(x, dt, A, B, C) + D x            A = -exp(A_log)
    out_proj(norm(y, z))

States lie in transformers' own cache: the last W inputs of the convolution, and S [H, P, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tilewright.errors import UnsupportedError
from tilewright.model.layers import QuantLinear
from tilewright.ops.contract import Case

__all__ = ["QuantHead", "SSMMixer", "inject_ssm", "is_mixer", "scan_cases"]

_MIXERS = frozenset(
    {
        "BambaMixer",
        "FalconH1Mixer",
        "GraniteMoeHybridMambaLayer",
        "Mamba2Mixer",
        "NemotronHMamba2Mixer",
    }
)
_ACTIVATIONS = ("silu", "swish")
_TRANSFORMERS = (5, 14)  # its caches number a layer's states, and say whether they may go back
_STEP, _MOST = 8, 256
_LONGEST = 530  # tokens of a case: the oracle goes through them one by one, in float64


class QuantHead(QuantLinear):
    """A packed output matrix of a model whose code asks `lm_head.weight` for its dtype.

    Attributes:
        weight: an empty tensor of the dtype that the model computes in.
    """

    def __init__(self, *args: Any, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("weight", torch.empty(0, dtype=dtype), persistent=False)


class SSMMixer(nn.Module):
    """A Mamba-2 mixer over Tilewright's ops.

    Args:
        mixer: transformers' module; its children and parameters are taken over, not copied.
        config: the model's configuration.

    Forward takes what the module it replaces takes: hidden states [b, L, width], a cache of
    transformers or None, a mask [b, L] of tokens that are no padding or None, and `seq_idx` [1, L],
    the number of the packed sequence of each token. It gives [b, L, width].

    The limits of dt hold for prefill and for single tokens alike, so that both are one recurrence.

    Raises:
        UnsupportedError: an activation, head or state dimension that no kernel serves.
    """

    A: torch.Tensor
    mup_vector: torch.Tensor | None

    def __init__(self, mixer: Any, config: Any) -> None:
        super().__init__()
        kind = type(mixer).__name__
        if mixer.activation not in _ACTIVATIONS:
            raise UnsupportedError(
                f"the activation of {kind} is {mixer.activation!r}; allowed are "
                f"{', '.join(_ACTIVATIONS)}"
            )
        for name, size in (("head", mixer.head_dim), ("state", mixer.ssm_state_size)):
            if size % _STEP or not _STEP <= size <= _MOST:
                raise UnsupportedError(
                    f"the {name} dimension of {kind} is {size}; it must be a multiple of {_STEP} "
                    f"up to {_MOST}"
                )
        self.layer_idx = int(mixer.layer_idx)
        self.num_heads = int(mixer.num_heads)
        self.head_dim = int(mixer.head_dim)
        self.n_groups = int(mixer.n_groups)
        self.ssm_state_size = int(mixer.ssm_state_size)
        self.intermediate_size = int(mixer.intermediate_size)
        self.conv_kernel_size = int(mixer.conv_kernel_size)
        low, high = mixer.time_step_limit or (0.0, float("inf"))
        self.time_step_limit = (float(low), float(high))
        self.in_proj, self.conv1d, self.out_proj = mixer.in_proj, mixer.conv1d, mixer.out_proj
        self.norm = mixer.norm
        # FalconH1 gates in the scan where it has no norm.
        self.normed = hasattr(mixer.norm, "weight")
        self.norm_before_gate = bool(getattr(mixer.norm, "norm_before_gate", False))
        self.dt_bias, self.A_log, self.D = mixer.dt_bias, mixer.A_log, mixer.D
        with torch.no_grad():
            self.register_buffer("A", -torch.exp(self.A_log.float()), persistent=False)
        self.ssm_in_multiplier = float(getattr(mixer, "ssm_in_multiplier", 1.0))
        vector = _mup_vector(config, self) if hasattr(mixer, "mup_vector") else None
        self.register_buffer("mup_vector", vector, persistent=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        *,
        cache_params: Any = None,  # the name of `cache` in older versions of transformers
        seq_idx: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        cache = cache_params if cache is None else cache
        heads = (self.num_heads, self.head_dim)
        gate, mixed, dt = self._projected(hidden_states, attention_mask)
        before = _states(cache, self.layer_idx)
        if (
            before is not None
            and mixed.shape[1] == 1
            and not cache.layers[self.layer_idx].record_past
        ):
            y = self._step(mixed, dt, gate, attention_mask, before, cache)
        else:
            y = self._scan(mixed, dt, gate, attention_mask, before, cache, seq_idx)
        assert y.shape[2:] == heads
        y = y.flatten(2)
        if self.normed:
            from tilewright.ops.ssd.norm import gated_rms_norm

            norm: Any = self.norm
            y = gated_rms_norm(
                y, gate, norm.weight, norm.variance_epsilon, groups=self.n_groups,
                norm_before_gate=self.norm_before_gate,
            )  # fmt: skip
        result: torch.Tensor = self.out_proj(y)
        return result

    def _projected(
        self, x: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """z [b, L, d], x B C [b, L, d + 2 G N] and dt [b, L, H]: views of one product."""
        x = _masked(x, mask)
        if self.ssm_in_multiplier != 1.0:
            x = x * self.ssm_in_multiplier
        product = self.in_proj(x)
        if self.mup_vector is not None:
            product = product * self.mup_vector
        wide = self.intermediate_size
        mixed = wide + 2 * self.n_groups * self.ssm_state_size
        gate, mixed, dt = product.split([wide, mixed, self.num_heads], dim=-1)
        return gate, mixed, dt

    def _scan(
        self, mixed: torch.Tensor, dt: torch.Tensor, gate: torch.Tensor,
        mask: torch.Tensor | None, before: tuple[torch.Tensor, torch.Tensor] | None, cache: Any,
        seq_idx: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """y [b, L, H, P] of whole sequences, or of the next piece of them."""
        from tilewright.ops.conv1d.op import causal_conv1d
        from tilewright.ops.ssd.op import ssd_scan

        behind = self.conv_kernel_size - 1
        packed = _boundaries(seq_idx, mixed, cache)
        entering = None if before is None else before[0][..., before[0].shape[-1] - behind :]
        bias = self.conv1d.bias
        convolved, _ = causal_conv1d(
            mixed, self.conv1d.weight.squeeze(1), bias, activation="silu",
            initial_states=entering, cu_seqlens=packed,
        )  # fmt: skip
        x, B, C = self._split(_masked(convolved, mask))
        y, leaving = ssd_scan(
            x, dt, self.A, B, C, D=self.D, z=self._gate(gate), dt_bias=self.dt_bias,
            dt_softplus=True, dt_limit=self.time_step_limit,
            initial_states=None if before is None else before[1], cu_seqlens=packed,
        )  # fmt: skip
        if cache is not None:
            # Only the last tokens are kept, unless the cache wants to go back later.
            all_of_it = cache.layers[self.layer_idx].record_past
            kept = mixed if all_of_it else mixed[:, -self.conv_kernel_size :]
            cache.update_conv_state(
                kept.transpose(1, 2), self.layer_idx, conv_kernel_size=self.conv_kernel_size
            )
            cache.update_recurrent_state(leaving, layer_idx=self.layer_idx)
        return y

    def _step(
        self, mixed: torch.Tensor, dt: torch.Tensor, gate: torch.Tensor,
        mask: torch.Tensor | None, before: tuple[torch.Tensor, torch.Tensor], cache: Any,
    ) -> torch.Tensor:  # fmt: skip
        """y [b, 1, H, P] of one token of each sequence; the cache's states move on in place."""
        from tilewright.ops.conv1d.op import causal_conv1d_step
        from tilewright.ops.ssd.op import ssd_step

        conv, state = before
        # The cache keeps W tokens and the convolution needs W - 1; the oldest moves on too.
        conv[..., : conv.shape[-1] - self.conv_kernel_size + 1] = conv[
            ..., 1 : conv.shape[-1] - self.conv_kernel_size + 2
        ].clone()
        tail = conv[..., conv.shape[-1] - self.conv_kernel_size + 1 :]
        convolved = causal_conv1d_step(
            tail, mixed[:, 0], self.conv1d.weight.squeeze(1), self.conv1d.bias, "silu"
        )
        x, B, C = self._split(_masked(convolved[:, None], mask))
        z = self._gate(gate)
        wide = state if state.dtype == torch.float32 else state.to(torch.float32)
        y = ssd_step(
            wide, x[:, 0], dt[:, 0], self.A, B[:, 0], C[:, 0], D=self.D,
            z=None if z is None else z[:, 0], dt_bias=self.dt_bias, dt_softplus=True,
            dt_limit=self.time_step_limit,
        )  # fmt: skip
        if wide is not state:
            cache.update_recurrent_state(wide, layer_idx=self.layer_idx)
        return y[:, None]

    def _split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [b, L, H, P], B and C [b, L, G, N] as views of what left the convolution."""
        shared = self.n_groups * self.ssm_state_size
        x, B, C = mixed.split([self.intermediate_size, shared, shared], dim=-1)
        return (
            x.unflatten(-1, (self.num_heads, self.head_dim)),
            B.unflatten(-1, (self.n_groups, self.ssm_state_size)),
            C.unflatten(-1, (self.n_groups, self.ssm_state_size)),
        )

    def _gate(self, gate: torch.Tensor) -> torch.Tensor | None:
        """z of the scan, [b, L, H, P]; None where the norm gates."""
        return None if self.normed else gate.unflatten(-1, (self.num_heads, self.head_dim))

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads} heads of {self.head_dim}, state {self.ssm_state_size}, "
            f"{self.n_groups} groups"
        )


def is_mixer(module: nn.Module) -> bool:
    """True for a module of transformers that `SSMMixer` replaces."""
    return type(module).__name__ in _MIXERS


def inject_ssm(model: nn.Module) -> int:
    """Replace every Mamba-2 mixer of a transformers model; returns how many there were.

    The model keeps its parameters, and their names, and is changed in place. Its weights must be
    there: A is computed from them once.

    Raises:
        UnsupportedError: as `SSMMixer`; transformers is older than 5.14.
    """
    found = [(path, module) for path, module in model.named_modules() if is_mixer(module)]
    if found:
        _check_transformers()
    for path, module in found:
        model.set_submodule(path, SSMMixer(module, model.config))
    return len(found)


def _check_transformers() -> None:
    import transformers

    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _TRANSFORMERS:
        raise UnsupportedError(
            f"a model with Mamba-2 layers needs transformers {'.'.join(map(str, _TRANSFORMERS))} "
            f"or later, and {version} is installed: pip install -U transformers"
        )


def scan_cases(model: nn.Module, act_dtype: str, batches: Sequence[int]) -> tuple[Case, ...]:
    """Cases of op "ssd" for the distinct scans of a loaded model.

    Args:
        model: from `tilewright.load`, or what stands in for one.
        act_dtype: the dtype it computes in, as cases name it.
        batches: numbers of tokens; of larger ones 530 are verified.

    Returns:
        One case a scan and number of tokens, its operands views of one projection.
    """
    found: dict[str, Case] = {}
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, SSMMixer):
            for m in sorted({min(m, _LONGEST) for m in batches}):
                case = Case(
                    "ssd", f"p{module.head_dim}", act_dtype, m, module.intermediate_size,
                    module.ssm_state_size, module.num_heads // module.n_groups,
                    flags=("initial", "strided"),
                )  # fmt: skip
                found[case.id] = case
    return tuple(found.values())


def _masked(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """x [b, L, ...] with zeros where a mask [b, L] says padding."""
    return x if mask is None else (x * mask[:, :, None]).to(x.dtype)


def _states(cache: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The states of a layer in transformers' cache, or None before the first token."""
    if cache is None or not cache.has_previous_state(layer):
        return None
    held = cache.layers[layer]
    return held.conv_states[0], held.recurrent_states[0]


def _boundaries(seq_idx: torch.Tensor | None, x: torch.Tensor, cache: Any) -> torch.Tensor | None:
    """Where packed sequences begin, int32 [S + 1], from the number of each token's sequence."""
    if seq_idx is None:
        return None
    if x.shape[0] != 1 or cache is not None:
        raise UnsupportedError(
            f"seq_idx with {x.shape[0]} rows{' and a cache' if cache is not None else ''}; packed "
            "sequences lie in one row, and run without a cache"
        )
    changes = torch.nonzero(seq_idx[0, 1:] != seq_idx[0, :-1])[:, 0] + 1
    ends = changes.new_tensor([x.shape[1]])
    return torch.cat([ends.new_zeros(1), changes, ends]).to(torch.int32)


def _mup_vector(config: Any, mixer: SSMMixer) -> torch.Tensor | None:
    """FalconH1's factors of z, x, B, C and dt: [1, 1, width of in_proj], None if all are 1."""
    factors = [float(factor) for factor in config.ssm_multipliers]
    if all(factor == 1.0 for factor in factors):
        return None
    wide, shared = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    widths = torch.tensor([wide, wide, shared, shared, mixer.num_heads])
    device, dtype = mixer.conv1d.weight.device, mixer.conv1d.weight.dtype
    spread = torch.tensor(factors).repeat_interleave(widths)
    return spread[None, None].to(device, dtype)
