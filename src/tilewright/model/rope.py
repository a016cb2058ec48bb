"""Rope scaling that a GGUF file stores as a tensor instead of as parameters, and scaling that no
table of positions can hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tilewright.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["follows_length", "llama3_parameters", "rope_from_factors"]

_FOLLOWING = ("dynamic", "longrope")
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # what Llama 3.1, 3.2 and 3.3 publish


def rope_from_factors(
    config: PreTrainedConfig, factors: npt.NDArray[np.float32], file: object
) -> torch.Tensor | None:
    """Take over the tensor `rope_freqs.weight`: divisors of the rope's frequencies.

    Llama 3.1 and later stretch low frequencies. When the divisors are those of the published
    scaling, `config.rope_parameters` gets it in transformers' words and None is returned;
    otherwise the result is the frequencies themselves, float32 [head_dim / 2].

    Args:
        config: a configuration with plain rope; changed in place.
        factors: float32 [head_dim / 2].
        file: path of the file, for messages.

    Raises:
        FormatError: the wrong number of divisors, or divisors that are not positive.
        UnsupportedError: an architecture whose layers differ in rope, or a second scaling.
    """
    parameters = config.rope_parameters
    if "rope_theta" not in parameters or parameters["rope_type"] != "default":
        raise UnsupportedError(
            f"{file}: rope_freqs.weight comes on top of another rope scaling ({parameters})"
        )
    if factors.shape != (config.head_dim // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise FormatError(
            f"it holds {factors.size} numbers; {config.head_dim // 2} positive ones are needed, "
            "one for each pair of numbers in a head",
            file=file,
            tensor="rope_freqs.weight",
        )
    theta = float(parameters["rope_theta"])
    if np.all(factors == 1.0):
        return None
    scaling = llama3_parameters(factors, theta=theta, head_dim=config.head_dim)
    if scaling is not None:
        config.rope_parameters = scaling
        return None
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / (theta**exponents * torch.from_numpy(factors))


def llama3_parameters(
    factors: npt.NDArray[np.float32], *, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """The llama3 rope scaling with the published parameters that gives these divisors, or None.

    Wavelengths below 8192 / 4 tokens stay, those above 8192 are stretched by the largest
    divisor, those between by a blend of the two.
    """
    factor = float(np.max(factors))
    waves = 2.0 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = np.clip((_ORIGINAL / waves - _LOW) / (_HIGH - _LOW), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(expected, factors, rtol=2e-5, atol=0.0):
        return None
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def follows_length(model: Any) -> str | None:
    """The kind of a model's rope whose frequencies change with the length of the sequence, so that
    what a position is turned by cannot be computed ahead; None for one whose do not."""
    found: Any = getattr(getattr(model.model, "rotary_emb", None), "rope_type", None)
    kinds = found.values() if isinstance(found, dict) else [found]
    return next((str(k) for k in kinds if k and any(word in k for word in _FOLLOWING)), None)
