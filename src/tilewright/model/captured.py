"""A token of a hybrid model in one CUDA graph: transformers' own forward over a cache of fixed
places.

Launching the hundreds of small operations of a hybrid's step takes longer than running them. They
are captured once, and replayed for every token: what changes from one to the next, its id and its
position, is read on the device. Prompts run as in `TransformersDecoder`, on a cache that grows;
what they leave is copied into transformers' static cache, where a step finds keys, values and
states at the same addresses every time, and back again before a further prompt.

Attention over fixed places sums in another order than over a cache that just fits, so a captured
step rounds differently. The first one after each capture is held to a step of the forward as it is,
over the cache that the prompt left: if they differ by more than roundings, no step is captured.

Fixed places are attended to under a mask, keys and values repeated for every head, for which torch
takes cuDNN's kernel where there is one. Its sums of a single query were not the same bits twice (on
an H200 with cuDNN 9.19: from one state, the first value that differed was its result, and with it
turned off all replays agreed), so a step takes torch's other kernels.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.device import launching_on
from tilewright.model.cuda_step import on_host, record, step_memory
from tilewright.model.generate import TransformersDecoder
from tilewright.model.placement import device_of
from tilewright.model.ssm import SSMMixer

__all__ = ["CapturedDecoder", "has_scans", "why_not_captured"]

log = logging.getLogger("tilewright")

_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Of torch's kernels those that sum in the same order every time."""

_PLACES = 1024  # capacities are multiples of it
_MOST_APART = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.15}
"""Of the logits, relative, in the Euclidean norm: a forgotten token or state gives about 1."""


def why_not_captured(model: Any) -> str | None:
    """Why `CapturedDecoder` does not serve `model`, in a phrase; None if it does."""
    if device_of(model).type != "cuda":
        return f"the model is on {device_of(model)}"
    return _why_not_static(model)


def has_scans(model: Any) -> bool:
    """Whether Tilewright's scans are among the model's modules: a hybrid, or a Mamba-2."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(isinstance(module, SSMMixer) for module in modules)


def _why_not_static(model: Any) -> str | None:
    if not has_scans(model):
        return f"{type(model).__name__} has no scans"
    try:
        layers = _static(model, _PLACES).layers
    except Exception as error:  # a version of transformers, or a kind of layer, without one
        return f"transformers makes no static cache for it ({type(error).__name__}: {error})"
    if any(getattr(layer, "is_sliding", False) for layer in layers):
        return "its attention has a window"
    kind = getattr(model.config, "_attn_implementation", None) or "sdpa"
    if kind not in ("sdpa", "eager"):  # flash attention has no mask: it sees the empty places
        return f"its attention is {kind!r}, not 'sdpa'"
    if model.dtype not in _MOST_APART:
        return f"its dtype is {model.dtype}"
    return None


class CapturedDecoder(TransformersDecoder):
    """Steps a hybrid model; the `Decoder` protocol of `tilewright.model.generate`.

    Args:
        model: a model that `why_not_captured` has nothing against; in tests also one on the CPU.
        capture: capture the step; without, the forward runs over fixed places for every token.

    Attributes:
        why_eager: why steps are not captured, in a phrase; None while nothing is against it.
    """

    def __init__(self, model: Any, *, capture: bool = True) -> None:
        super().__init__(model)
        self._device = device_of(model)
        self._graphed = capture and self._device.type == "cuda"
        self.why_eager: str | None = None
        self._fixed: Any = None
        self._capacity = 0
        self._stepping = False  # the static cache is the one that holds what was fed
        self._graph: Any = None
        self._captured = torch.zeros(0)
        self._host, self._state = step_memory(self._device)

    @property
    def captured(self) -> bool:
        """Whether steps are replays of a graph."""
        return self._graph is not None

    def reset(self) -> None:
        """Forget everything fed so far; the places and the graph stay for the next prompt."""
        super().reset()
        self._stepping = False

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 1 and self._fed:
            return self.step(int(ids[0, 0]))
        if self._stepping:
            self._leave()
        with launching_on(self._device):
            return super().prefill(ids)

    @torch.inference_mode()
    def step(self, token_id: int) -> torch.Tensor:
        size = self._model.config.get_text_config().vocab_size
        if not 0 <= token_id < size:
            raise ValueError(f"token_id is {token_id}; the vocabulary is 0..{size - 1}")
        with launching_on(self._device):
            if self.why_eager is not None or not self._fed or not self._entered():
                return super().prefill(torch.tensor([[token_id]]))
            # Every step waits for the device at its end, so this memory is free again.
            self._host[0], self._host[1] = token_id, self._fed
            self._state.copy_(self._host, non_blocking=True)
            if self._graphed and self._graph is None:
                return self._first(token_id)
            if self._graph is None:
                logits = self._token()
            else:
                self._graph.replay()
                logits = self._captured
            self._fed += 1
            return on_host(logits)

    def _token(self) -> torch.Tensor:
        """A step over the static cache: logits [V] float32 after the token of the state."""
        options: dict[str, Any] = {self._cache_argument: self._fixed}
        if self._places:
            options["position_ids"] = self._state[1:][None]
        with sdpa_kernel(_ATTENTION):
            output = self._model(
                input_ids=self._state[:1][None], use_cache=True, logits_to_keep=1, **options
            )
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def _first(self, token_id: int) -> torch.Tensor:
        """Capture the step and run it, held to the forward as it is, which says why not to."""
        before = self._cache
        if before is None:  # of a smaller static cache, whose first step was held to the forward
            before = self._growing()
            _copy(self._fixed, before, self._fed)
        self._cache, self._stepping = before, False
        logits: torch.Tensor | None = None
        try:
            self._capture(before)
            self._graph.replay()
            logits = on_host(self._captured)
        except Exception as error:  # of transformers' code, or of what cannot be captured
            first = (str(error).splitlines() or [""])[0]
            self.why_eager = f"its step cannot be captured ({type(error).__name__}: {first})"
        right = super().prefill(torch.tensor([[token_id]]))
        if logits is not None:
            apart = float((logits - right).norm() / right.norm())
            if apart <= _MOST_APART[self._model.dtype]:
                self._cache, self._stepping = None, True
                return logits
            self.why_eager = f"its captured step gives other logits, off by {apart:.2g}"
        self._drop()
        return right

    def _drop(self) -> None:
        """Go on uncaptured, and say why."""
        self._graph = self._fixed = None
        self._capacity = 0
        log.warning(f"a token is launched operation by operation: {self.why_eager}")

    def _capture(self, before: Any) -> None:
        """Record a step. Its warm-ups move the static cache, which `before` sets back."""
        self._graph, self._captured = record(
            self._token, self._device, lambda: _copy(before, self._fixed, self._fed)
        )

    def _entered(self) -> bool:
        """Have what was fed in the static cache, with room for a token more; False, and what was
        fed in a cache that grows, where memory does not suffice for that."""
        try:
            self._enter()
            return True
        except torch.OutOfMemoryError:
            self.why_eager = "a cache of fixed places does not fit the GPU's memory"
        # Here nothing that the exception held takes memory any more.
        if self._stepping:
            self._leave()
        self._drop()
        return False

    def _enter(self) -> None:
        if self._fed + 1 <= self._capacity:
            if not self._stepping:
                _copy(self._cache, self._fixed, self._fed)
        else:
            tokens = self._fed + 1 + self._fed // 4
            capacity = -(-tokens // _PLACES) * _PLACES
            self._graph = None  # it reads and writes the old places
            held = self._fixed if self._stepping else self._cache
            if not self._stepping:
                self._fixed, self._capacity = None, 0
            fixed = _static(self._model, capacity)
            _copy(held, fixed, self._fed)
            self._fixed, self._capacity = fixed, capacity
        self._stepping = True
        if self._graph is not None or not self._graphed:
            self._cache = None  # else the first step is held to what it gives

    def _leave(self) -> None:
        """Have what was fed in a cache that grows."""
        self._cache = self._growing()
        _copy(self._fixed, self._cache, self._fed)
        self._stepping = False

    def _growing(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)


def _static(model: Any, places: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=places)


def _copy(held: Any, cache: Any, tokens: int) -> None:
    """Put what `held` has of its first `tokens` tokens into another cache, whatever that held."""
    for old, new in zip(held.layers, cache.layers, strict=True):
        keys = getattr(old, "keys", None)
        if isinstance(keys, torch.Tensor) and keys.dim() == 4:
            length = getattr(new, "cumulative_length", None)
            if isinstance(length, torch.Tensor):
                length.zero_()
            new.update(keys[:, :, :tokens], old.values[:, :, :tokens])
        for index, there in getattr(old, "is_conv_states_initialized", {}).items():
            if there:
                new.has_previous_state[index] = False  # so that the states are set, not appended
                new.update_conv_state(old.conv_states[index], state_idx=index)
        for index, there in getattr(old, "is_recurrent_states_initialized", {}).items():
            if there:
                new.update_recurrent_state(old.recurrent_states[index], state_idx=index)
