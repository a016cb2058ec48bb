"""Prefill and decode of a transformers model on a GPU: own kernels between the products, and a
token in one CUDA graph.

For the families whose layer has the Llama shape, `GraphDecoder` walks the model's own modules with
the kernels of `tilewright.ops.decoder` in place of the dozens of small operations that transformers
makes of norms, rotary embedding and gate. Keys and values lie in one cache of fixed places. A
prompt runs in pieces of up to `PREFILL_ROWS` tokens, its attention through torch's
`scaled_dot_product_attention`, and nothing in it waits for the device. A single token's launches
are captured once and replayed: what changes from token to token, its id and its position, is read
on the device. Replayed or not, a step is the same launches: its logits are equal, bit for bit.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tilewright.device import has_triton, launching_on
from tilewright.errors import UnsupportedError
from tilewright.model.cuda_step import on_host, record, step_memory
from tilewright.model.join import products_of
from tilewright.model.placement import device_of
from tilewright.model.rope import follows_length

__all__ = ["PREFILL_ROWS", "GraphDecoder", "why_not_graphed"]

log = logging.getLogger("tilewright")

PREFILL_ROWS = 16384
"""Tokens of a prompt that run at once: 2.2 GB of activations for a model of 8 billion weights."""

_CUDNN_ROWS = 1024  # from here on cuDNN's attention pays: its plan for a new length takes 20 ms
_MASKED_ROWS = 2048  # where attention needs a mask, which grows with their square
_FIRST_CAPACITY = 1024
_FEWEST_SPLITS, _MOST_SPLITS = 4, 64  # of the positions that a token attends to

_FAMILIES = {
    "LlamaForCausalLM": False,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": False,
    "Qwen3MoeForCausalLM": False,
    "Gemma3ForCausalLM": True,
}
"""Model classes, and whether their norms multiply by 1 + weight."""

_ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")


def why_not_graphed(model: Any) -> str | None:
    """Why `GraphDecoder` does not serve `model`, in a phrase; None if it does."""
    if device_of(model).type != "cuda":
        return f"the model is on {device_of(model)}"
    return _why_not_walked(model)


def _why_not_walked(model: Any) -> str | None:
    name = type(model).__name__
    if name not in _FAMILIES:
        return f"{name} has no decoder of its own"
    if not has_triton():
        return "triton is not installed"
    if _activation(model.config) not in _ACTIVATIONS:
        return f"activation {_activation(model.config)!r} has no kernel"
    if getattr(model.config, "final_logit_softcapping", None):
        return "final softcap"
    if follows_length(model) is not None:
        return f"{follows_length(model)} rope, whose frequencies follow the sequence's length"
    for layer in model.model.layers:
        if getattr(layer.self_attn, "attn_logit_softcapping", None):
            return "attention softcap"
        if layer.self_attn.head_dim % 2:
            return f"heads of {layer.self_attn.head_dim} numbers, which rope cannot halve"
    return None


@dataclass(frozen=True)
class _Layer:
    """The modules of a layer, and what its kernels need of their settings."""

    attention: Any
    mlp: Any
    qkv: list[tuple[Any, tuple[int, ...]]]
    gate_up: list[tuple[Any, tuple[int, ...]]]
    before: Any
    after_attention: torch.Tensor | None
    before_mlp: Any
    after_mlp: torch.Tensor | None
    dense: bool
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    head_dim: int
    window: int
    scale: float
    rotary: str | None


class GraphDecoder:
    """Steps a supported model; the `Decoder` protocol of `tilewright.model.generate`.

    Args:
        model: a model that `why_not_graphed` has nothing against; in tests also one on the CPU,
            whose kernels Triton's interpreter runs.
        capture: capture the step; without, its launches are made anew for every token.

    Attributes:
        why_eager: why the step is not captured, in a phrase; None while nothing is against it.

    Raises:
        UnsupportedError: the model has another shape; the message says why.
    """

    def __init__(self, model: Any, *, capture: bool = True) -> None:
        reason = _why_not_walked(model)
        if reason is not None:
            raise UnsupportedError(f"no decoder on GPUs: {reason}; use the model's own forward")
        self._model = model
        self._device = device_of(model)
        self._dtype: torch.dtype = model.dtype
        self._one_plus = _FAMILIES[type(model).__name__]
        self._activation = _activation(model.config)
        self._eps = _eps(model.model.norm)
        self._splits = _splits(self._device, model.config.num_key_value_heads)
        self._layers = [self._layer(layer) for layer in model.model.layers]
        self.why_eager: str | None = None
        if self._device.type != "cuda":
            self.why_eager = f"the model is on {self._device}"
        elif not capture:
            self.why_eager = "capture is turned off"
        self._host, self._state = step_memory(self._device)
        self._position = 0
        self._capacity = 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self._graph: Any = None
        self._captured = torch.zeros(0)
        self._reserve(_FIRST_CAPACITY)

    @property
    def position(self) -> int:
        """Tokens fed so far."""
        return self._position

    @property
    def captured(self) -> bool:
        """Whether steps are replays of a graph."""
        return self._graph is not None

    def reset(self) -> None:
        """Forget everything fed so far; memory stays for the next prompt."""
        self._position = 0

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed ids [1, T] int64; returns the logits [V] float32 after the last, on the CPU."""
        ids = self._checked(ids)
        if len(ids) == 1:
            return self.step(int(ids[0]))
        return on_host(self._prompt(ids, 1)[0])

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed ids [1, T] int64; returns all logits [T, V] float32, on the CPU."""
        ids = self._checked(ids)
        return on_host(self._prompt(ids, len(ids)))

    @torch.inference_mode()
    def step(self, token_id: int) -> torch.Tensor:
        """Feed one token; returns the logits [V] float32 after it, on the CPU."""
        if not 0 <= token_id < self._model.config.vocab_size:
            raise ValueError(
                f"token_id is {token_id}; the vocabulary is 0..{self._model.config.vocab_size - 1}"
            )
        self._reserve(self._position + 1)
        # Every step waits for the device at its end, so this memory is free again.
        self._host[0], self._host[1] = token_id, self._position
        self._state.copy_(self._host, non_blocking=True)
        with launching_on(self._device):
            if self._graph is None and self.why_eager is None:
                self._capture()
            if self._graph is None:
                logits = self._token()
            else:
                self._graph.replay()
                logits = self._captured
        self._position += 1
        return on_host(logits)

    def _token(self) -> torch.Tensor:
        """The launches of a step: logits [V] float32 after the token that the state names."""
        return self._pass(self._state[:1], 1)[0]

    def _capture(self) -> None:
        """Record a step. Its warm-ups write what the step writes, so they change nothing."""
        try:
            self._graph, self._captured = record(self._token, self._device)
        except RuntimeError as error:
            # An operation that waits for the device, such as experts routed by the host.
            self.why_eager = f"its step cannot be captured ({str(error).splitlines()[0]})"
            log.warning(f"a token is launched operation by operation: {self.why_eager}")

    def _prompt(self, ids: torch.Tensor, keep: int) -> torch.Tensor:
        """Feed ids [T] on the device in pieces; logits [keep, V] float32 of the last tokens."""
        self._reserve(self._position + len(ids))
        masked = any(
            layer.window and layer.window < self._position + len(ids) for layer in self._layers
        )
        rows = _MASKED_ROWS if masked else PREFILL_ROWS
        kept: list[torch.Tensor] = []
        left = len(ids)
        for piece in ids.split(rows):
            left -= len(piece)
            self._state[1].fill_(self._position)
            with launching_on(self._device), self._attention_backends(len(piece)):
                kept.append(self._pass(piece, max(0, min(keep - left, len(piece)))))
            self._position += len(piece)
        return torch.cat(kept)

    def _pass(self, ids: torch.Tensor, keep: int) -> torch.Tensor:
        """One walk over the layers: logits [keep, V] float32 of the last `keep` of ids [T]."""
        from tilewright.ops.decoder.triton_kernels import add_norm, gate

        model, one_plus = self._model, self._one_plus
        x = model.model.embed_tokens(ids[None])[0]
        delta: torch.Tensor | None = None
        post: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            y = add_norm(x, delta, layer.before.weight, self._eps, post=post, one_plus=one_plus)
            delta = layer.attention.o_proj(self._mixed(index, layer, y))
            y = add_norm(
                x, delta, layer.before_mlp.weight, self._eps,
                post=layer.after_attention, one_plus=one_plus,
            )  # fmt: skip
            if layer.dense:
                gates, up = _products(layer.gate_up, y)
                delta = layer.mlp.down_proj(gate(gates, up, self._activation))
            else:
                delta = layer.mlp(y[None])[0]
            post = layer.after_mlp
        if not keep:
            return torch.empty(0, model.config.vocab_size, device=self._device)
        assert delta is not None
        y = add_norm(
            x[-keep:], delta[-keep:], model.model.norm.weight, self._eps,
            post=post, one_plus=one_plus,
        )  # fmt: skip
        logits: torch.Tensor = model.lm_head(y)
        return logits.float()

    def _mixed(self, index: int, layer: _Layer, y: torch.Tensor) -> torch.Tensor:
        """Attention of a layer before its output product: [T, heads * D]."""
        from tilewright.ops.decoder.triton_kernels import attend, rope

        keys, values = self._keys[index], self._values[index]
        q, k, v = _products(layer.qkv, y)
        position = self._state[1:]
        rope(
            q, k, v, keys, values, *self._tables[layer.rotary], position,
            q_norm=layer.q_norm, k_norm=layer.k_norm, eps=layer.eps, one_plus=self._one_plus,
        )  # fmt: skip
        if len(y) == 1:
            return attend(
                q, keys, values, position, scale=layer.scale, window=layer.window,
                splits=self._splits,
            )  # fmt: skip
        return self._prompt_attention(layer, q, keys, values)

    def _prompt_attention(
        self, layer: _Layer, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of the tokens of q [T, heads * D] over the cache up to the last."""
        rows, before = len(q), self._position
        seen = before + rows
        heads = q.unflatten(1, (-1, layer.head_dim)).transpose(0, 1)[None]  # [1, heads, T, D]
        mask: torch.Tensor | None = None
        if layer.window and layer.window < seen:
            mask = self._mask(before, rows, layer.window)
        elif before and self._device.type == "cuda":
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(rows, seen)
        elif before:
            mask = self._mask(before, rows, 0)
        out = functional.scaled_dot_product_attention(
            heads, keys[None, :, :seen], values[None, :, :seen], attn_mask=mask,
            is_causal=mask is None, scale=layer.scale, enable_gqa=heads.shape[1] != len(keys),
        )  # fmt: skip
        return out[0].transpose(0, 1).flatten(1)

    def _attention_backends(self, rows: int) -> AbstractContextManager[Any]:
        """The order in which torch tries its attention kernels on a prompt: on Hopper cuDNN's are
        twice as fast as the flash kernels, which torch would take."""
        if self._device.type != "cuda" or torch.version.hip is not None or rows < _CUDNN_ROWS:
            return nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        order = [
            SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
        ]  # fmt: skip
        context: AbstractContextManager[Any] = sdpa_kernel(order, set_priority=True)
        return context

    def _mask(self, before: int, rows: int, window: int) -> torch.Tensor:
        """bool [T, positions]: which a token sees."""
        own = torch.arange(before, before + rows, device=self._device)[:, None]
        other = torch.arange(before + rows, device=self._device)[None]
        seen = other <= own
        return seen & (other > own - window) if window else seen

    def _checked(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 1:
            raise ValueError(f"ids has shape {list(ids.shape)}; pass [1, T] with T >= 1")
        vocabulary = self._model.config.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise ValueError(
                f"ids reach from {int(ids.min())} to {int(ids.max())}; "
                f"the vocabulary is 0..{vocabulary - 1}"
            )
        return ids[0].to(self._device)

    def _reserve(self, tokens: int) -> None:
        """Make room for `tokens` positions, keeping what the cache holds."""
        if tokens <= self._capacity:
            return
        capacity = max(_FIRST_CAPACITY, self._capacity)
        while capacity < tokens:
            capacity *= 2
        used = self._position
        self._graph = None  # it reads and writes the old places, some of which may go at once
        for index, layer in enumerate(self._layers):
            heads = self._model.config.num_key_value_heads
            for held in (self._keys, self._values):
                new = torch.zeros(
                    heads, capacity, layer.head_dim, dtype=self._dtype, device=self._device
                )
                if self._capacity:
                    new[:, :used] = held[index][:, :used]
                    held[index] = new
                else:
                    held.append(new)
        kinds = {layer.rotary for layer in self._layers}
        self._tables = {kind: self._rotary(kind, capacity) for kind in kinds}
        self._capacity = capacity  # last: memory may run out before

    def _rotary(self, kind: str | None, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [capacity, D / 2] in the model's dtype, from its own rotary module."""
        positions = torch.arange(capacity, device=self._device)[None]
        like = torch.zeros(1, 1, 1, dtype=self._dtype, device=self._device)
        extra = () if kind is None else (kind,)
        with torch.inference_mode():
            cos, sin = self._model.model.rotary_emb(like, positions, *extra)
        half = cos.shape[-1] // 2  # the other half is the same again
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def _layer(self, layer: Any) -> _Layer:
        attention = layer.self_attn
        after_attention = after_mlp = None
        before_mlp = layer.post_attention_layernorm
        if self._one_plus:
            after_attention, before_mlp = before_mlp.weight, layer.pre_feedforward_layernorm
            after_mlp = layer.post_feedforward_layernorm.weight
        q_norm = getattr(attention, "q_norm", None)
        dense = hasattr(layer.mlp, "gate_proj")
        return _Layer(
            attention=attention,
            mlp=layer.mlp,
            qkv=products_of(attention, ("q_proj", "k_proj", "v_proj")),
            gate_up=products_of(layer.mlp, ("gate_proj", "up_proj")) if dense else [],
            before=layer.input_layernorm,
            after_attention=after_attention,
            before_mlp=before_mlp,
            after_mlp=after_mlp,
            dense=dense,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if q_norm is None else attention.k_norm.weight,
            eps=0.0 if q_norm is None else _eps(q_norm),
            head_dim=attention.head_dim,
            window=getattr(attention, "sliding_window", None) or 0,
            scale=attention.scaling,
            rotary=attention.layer_type if self._one_plus else None,
        )


def _products(modules: list[tuple[Any, tuple[int, ...]]], y: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of products of y, each [T, its width]; rows are contiguous."""
    found: list[torch.Tensor] = []
    for module, widths in modules:
        found += module(y).split(widths, dim=1)
    return found


def _splits(device: torch.device, kv_heads: int) -> int:
    """Shares of the positions, a power of two, that give two programs to each multiprocessor."""
    units = 1
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = max(2 * units // kv_heads, 1)
    return min(max(1 << (wanted.bit_length() - 1), _FEWEST_SPLITS), _MOST_SPLITS)


def _eps(module: Any) -> float:
    value = getattr(module, "variance_epsilon", None)
    return float(module.eps if value is None else value)


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_act", None) or config.hidden_activation)
