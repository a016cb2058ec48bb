"""A transformers model's layers written down as kernel launches.

Eager model code costs tens of Python calls a layer, at decode more time than the layer's kernels
need. `Capture` walks a loaded model once and lists every launch of a forward pass over up to `rows`
tokens: norms, packed products, rotary embedding, attention over our cache, gate. The list becomes
one `Program`. The weights are the model's own modules' and nothing of them is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from tilewright.device import cpu_device
from tilewright.layout.cpu import PART, PackedW4
from tilewright.model.layers import QuantEmbedding, QuantLinear
from tilewright.model.placement import device_of
from tilewright.model.rope import follows_length
from tilewright.ops.choose import choose_tile
from tilewright.ops.cpu.args import ARGS, arguments
from tilewright.ops.cpu.decoder_kernels import (
    ATTEND_ROWS,
    SLOTS,
    decoder_arguments,
    decoder_kernel,
    float_bits,
)
from tilewright.ops.cpu.gemm import int8_kernel, panel_kernel, scratch_bytes
from tilewright.ops.cpu.launch import CpuWeight, cpu_weight
from tilewright.ops.cpu.rows import dot_kernel, quantize_kernel, rows_kernel, sums_kernel
from tilewright.ops.cpu.runtime import Kernel
from tilewright.tiles.tile import Problem, Tile

__all__ = ["ATTEND_ROWS", "CAPTURED", "Capture", "CapturedLayer", "capture_tile", "why_not_fused"]

CAPTURED = ("dot", "panel", "int8")
"""Algorithms of packed products that a program can hold."""

_M = ARGS.index("m")

_FAMILIES = {
    "LlamaForCausalLM": False,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": False,
    "Gemma3ForCausalLM": True,
}
"""Model classes with a fused step, and whether their norms multiply by 1 + weight."""

_ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}
_PAD = 24  # rows that a register tile may read past the last one


def why_not_fused(model: Any) -> str | None:
    """Why `model` has no fused step, in a phrase; None if it has one."""
    name = type(model).__name__
    if device_of(model).type != "cpu":
        return f"the model is on {device_of(model)}"
    if name not in _FAMILIES:
        return f"{name} has no fused decode step"
    config = model.config
    activation = _activation(config)
    if activation not in _ACTIVATIONS:
        return f"activation {activation!r} has no fused kernel"
    head_dim = model.model.layers[0].self_attn.head_dim
    widths = (config.hidden_size, config.intermediate_size, head_dim)
    if any(width % PART for width in widths):
        return f"widths {widths} are no multiples of {PART}"
    if not isinstance(model.model.embed_tokens, (QuantEmbedding, nn.Embedding)):
        return f"embedding {type(model.model.embed_tokens).__name__} has no fused kernel"
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.dtype != torch.float32:
            return f"{path} is a dense {module.weight.dtype} matrix"
    if model.dtype != torch.float32:
        return f"the model computes in {model.dtype}"
    for layer in model.model.layers:
        if getattr(layer.self_attn, "attn_logit_softcapping", None):
            return "attention softcap"
    if getattr(config, "final_logit_softcapping", None):
        return "final softcap"
    if follows_length(model) is not None:
        return f"{follows_length(model)} rope, whose frequencies follow the sequence's length"
    return None


@dataclass
class CapturedLayer:
    """What a layer's launches need to be pointed at a cache.

    Attributes:
        rope, attend: argument arrays of its two cache kernels.
        attend_kernel: "attend" or "attend_rows".
        rotary: the layer type that the model's rotary module wants, or None.
    """

    rope: np.ndarray
    attend: np.ndarray
    attend_kernel: str
    rotary: str | None

    def point(self, keys: torch.Tensor, values: torch.Tensor, cos: torch.Tensor,
              sin: torch.Tensor, scores: torch.Tensor) -> None:  # fmt: skip
        """Use this cache: keys [kv heads, head_dim, capacity], values [kv heads, capacity, ...]."""
        capacity = keys.shape[-1]
        both = {"k_cache": keys, "v_cache": values}
        for args, kernel, tensors in (
            (self.rope, "rope", {**both, "cos": cos, "sin": sin}),
            (self.attend, self.attend_kernel, {**both, "scores": scores}),
        ):
            order = SLOTS[kernel]
            for slot, tensor in tensors.items():
                args[order.index(slot)] = tensor.data_ptr()
            args[order.index("capacity")] = capacity


class Capture:
    """The launches of one forward pass over up to `rows` tokens.

    Args:
        model: a model that `why_not_fused` has nothing against.
        state: int64 [1]; the position of the first token, read at run time.
        rows: most tokens a pass can take; 1 captures a decode step.
        threads: threads that will run it.

    Attributes:
        launches: (kernel, arguments) in order.
        layers: per layer, what depends on the cache.
        ids: int64 [rows]; the tokens, to be filled in before a run.
        hidden: float32 [rows, width] after the final norm.
        logits: float32 [vocabulary], written by one-row captures only.
    """

    def __init__(self, model: Any, state: np.ndarray, rows: int, threads: int) -> None:
        self.launches: list[tuple[Kernel, np.ndarray]] = []
        self.layers: list[CapturedLayer] = []
        self.rows = rows
        self.ids = torch.zeros(rows, dtype=torch.int64)
        self._threads = threads
        self._state = state
        self._keep: list[Any] = [state, self.ids]
        self._counts: list[tuple[np.ndarray, int]] = []
        self._gathered: dict[int, torch.Tensor] = {}
        self._forms: dict[tuple[int, str], dict[str, int]] = {}
        self._current: set[tuple[int, str]] = set()
        self._scratch = 0
        self._scratch_users: list[np.ndarray] = []
        self._one_plus = _FAMILIES[type(model).__name__]
        self._config = config = model.config
        self._work = self._workspace(model.model.layers[0])
        hidden, normed = self._buffer(config.hidden_size), self._buffer(config.hidden_size)
        self._embed(model.model.embed_tokens, hidden)
        for layer in model.model.layers:
            self._layer(layer, hidden, normed)
        self._norm(model.model.norm, hidden, normed)
        self.hidden = normed[:rows]
        self.logits = torch.zeros(0)
        if rows == 1:
            logits = self._buffer(config.vocab_size)
            self._linear(model.lm_head, normed, logits)
            self.logits = logits[0]
        self._allot_scratch()

    def set_rows(self, m: int) -> None:
        """Make the next run take `m` tokens, 1 <= m <= rows."""
        for args, index in self._counts:
            args[index] = m

    def _buffer(self, width: int) -> torch.Tensor:
        tensor = torch.zeros(self.rows + (_PAD if self.rows > 1 else 0), width)
        self._keep.append(tensor)
        return tensor

    def _workspace(self, layer: Any) -> dict[str, torch.Tensor]:
        """Buffers that every layer reuses."""
        dim = layer.self_attn.head_dim
        queries = self._config.num_attention_heads * dim
        keys = self._config.num_key_value_heads * dim
        widths = {
            "q": queries, "mixed": queries, "k": keys, "v": keys,
            "gate": self._config.intermediate_size, "up": self._config.intermediate_size,
            "out": self._config.hidden_size,
        }  # fmt: skip
        return {name: self._buffer(width) for name, width in widths.items()}

    def _launch(self, kernel: Kernel, args: np.ndarray, count: int) -> None:
        """Append a launch whose number of rows stands at args[count]."""
        args[count] = self.rows
        self._counts.append((args, count))
        self.launches.append((kernel, args))

    def _add(self, name: str, **slots: Any) -> np.ndarray:
        """Append a launch of a decoder kernel; tensors among the slots become addresses."""
        values = {}
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                self._keep.append(value)
                value = value.data_ptr()
            values[slot] = int(value)
        args = decoder_arguments(name, **values)
        if "m" in SLOTS[name]:
            self._launch(decoder_kernel(name), args, SLOTS[name].index("m"))
        else:
            self.launches.append((decoder_kernel(name), args))
        return args

    def _written(self, buffer: torch.Tensor) -> None:
        """A launch overwrites `buffer`: what was derived from it no longer holds."""
        self._current = {key for key in self._current if key[0] != buffer.data_ptr()}

    def _norm_weight(self, module: Any) -> torch.Tensor:
        weight: torch.Tensor = module.weight.detach().float()
        return (1.0 + weight if self._one_plus else weight).contiguous()

    def _norm(self, module: Any, x: torch.Tensor, y: torch.Tensor, add: bool = False) -> None:
        self._add(
            "norm", x=x, w=self._norm_weight(module), y=y, width=x.shape[1],
            eps=float_bits(_eps(module)), add=add,
        )  # fmt: skip
        self._written(y)

    def _embed(self, module: Any, hidden: torch.Tensor) -> None:
        width = hidden.shape[1]
        if isinstance(module, QuantEmbedding):
            weight = cpu_weight(module.packed)
            self._keep.append(module.packed)
            args = arguments(
                **weight.slots, x=self.ids.data_ptr(), y=hidden.data_ptr(), y_stride=4 * width
            )
            self._launch(rows_kernel(weight.kind.name), args, ARGS.index("n"))
            factor = module.scale
        else:
            self._add("embed", ids=self.ids, w=module.weight.detach(), y=hidden, width=width)
            scale = getattr(module, "embed_scale", None)
            factor = None if scale is None else float(scale)
        if factor is not None:
            self._add("scale", x=hidden, width=width, factor=float_bits(factor))

    def _linear(
        self, module: Any, x: torch.Tensor, y: torch.Tensor, accumulate: bool = False
    ) -> None:
        """y = module(x), or y += module(x)."""
        if isinstance(module, QuantLinear):
            self._packed(module, x, y, accumulate)
        else:
            bias = 0 if module.bias is None else module.bias.detach()
            self._add(
                "dense", x=x, w=module.weight.detach(), y=y, n=module.out_features,
                k=module.in_features, bias=bias, accumulate=accumulate,
            )  # fmt: skip
        self._written(y)

    def _packed(
        self, module: QuantLinear, x: torch.Tensor, y: torch.Tensor, accumulate: bool
    ) -> None:
        weight = cpu_weight(cast(Any, module.packed))
        self._keep.append(module.packed)
        if isinstance(module.packed, PackedW4) and module.packed.perm is not None:
            if weight.K not in self._gathered:
                self._gathered[weight.K] = self._buffer(weight.parts * PART)
            gathered = self._gathered[weight.K]
            self._add("gather", x=x, ids=module.packed.perm, y=gathered, width=weight.K)
            self._written(gathered)
            x = gathered
        bias = 0
        if module.bias is not None:
            held = module.bias.detach().float().contiguous()
            self._keep.append(held)
            bias = held.data_ptr()
        op = "w4a16" if isinstance(module.packed, PackedW4) else "mmq"
        problem = Problem(
            op, cpu_device().arch, "float32", module.weight_type, module.activations, self.rows,
            weight.N, weight.K, module.group,
        )  # fmt: skip
        tile = capture_tile(problem, self._threads)
        slots = {
            **weight.slots, "x": x.data_ptr(), "x_stride": 4 * x.stride(0), "y": y.data_ptr(),
            "y_stride": 4 * y.stride(0), "bias": bias, "accumulate": int(accumulate),
        }  # fmt: skip
        if tile.algorithm == "dot":
            if weight.kind.has_min:
                slots |= self._form("sums", x, weight)
            self._launch(dot_kernel(weight.kind.name, tile.unroll), arguments(**slots), _M)
            return
        block = min(tile.block_parts, weight.parts)
        need = scratch_bytes(tile.algorithm, tile.mr, tile.nv, block)
        self._scratch = max(self._scratch, need)
        slots["block_parts"] = block
        if tile.algorithm == "int8":
            slots |= self._form("quantize", x, weight)
            kernel = int8_kernel(weight.kind.name, tile.mr, tile.nv)
        else:
            kernel = panel_kernel(weight.kind.name, tile.mr, tile.nv)
        args = arguments(**slots)
        self._scratch_users.append(args)
        self._launch(kernel, args, _M)

    def _form(self, algorithm: str, x: torch.Tensor, weight: CpuWeight) -> dict[str, int]:
        """Slots of x's part sums ("sums") or 8-bit form ("quantize"), derived once per content."""
        split, parts = weight.kind.split, weight.parts
        key = (x.data_ptr(), f"{algorithm}-{split}")
        form = self._forms.get(key)
        if form is None:
            halves = 2 if split else 1
            sums = self._buffer(parts * halves)
            form = {"x_sum": sums.data_ptr(), "x_sum_stride": 4 * parts * halves}
            if algorithm == "quantize":
                codes = torch.zeros(len(sums), parts * PART, dtype=torch.uint8)
                scales = self._buffer(parts)
                self._keep.append(codes)
                form |= {
                    "x": codes.data_ptr(), "x_stride": parts * PART,
                    "x_scale": scales.data_ptr(), "x_scale_stride": 4 * parts,
                }  # fmt: skip
            self._forms[key] = form
        if key not in self._current:
            kernel = (sums_kernel if algorithm == "sums" else quantize_kernel)(split)
            slots = {**form, "x": x.data_ptr(), "x_stride": 4 * x.stride(0), "parts": parts}
            if algorithm == "quantize":
                slots |= {"y": form["x"], "y_stride": form["x_stride"]}
            self._launch(kernel, arguments(**slots), _M)
            self._current.add(key)
        return form

    def _allot_scratch(self) -> None:
        """Give the panel kernels one scratch area, as large as the largest of them needs."""
        area = torch.zeros(self._scratch * self._threads + 4096, dtype=torch.uint8)
        self._keep.append(area)
        start = -(-area.data_ptr() // 4096) * 4096
        for args in self._scratch_users:
            args[ARGS.index("scratch")] = start
            args[ARGS.index("scratch_stride")] = self._scratch

    def _layer(self, layer: Any, hidden: torch.Tensor, normed: torch.Tensor) -> None:
        attention, mlp, work = layer.self_attn, layer.mlp, self._work
        after_attention = after_mlp = None
        before_mlp = layer.post_attention_layernorm
        if self._one_plus:
            after_attention, before_mlp = before_mlp, layer.pre_feedforward_layernorm
            after_mlp = layer.post_feedforward_layernorm
        self._norm(layer.input_layernorm, hidden, normed)
        for module, name in (
            (attention.q_proj, "q"), (attention.k_proj, "k"), (attention.v_proj, "v")
        ):  # fmt: skip
            self._linear(module, normed, work[name])
        self._attention(attention)
        self._residual(attention.o_proj, work["mixed"], hidden, after_attention)
        self._norm(before_mlp, hidden, normed)
        gate, up = work["gate"], work["up"]
        self._linear(mlp.gate_proj, normed, gate)
        self._linear(mlp.up_proj, normed, up)
        gelu = _ACTIVATIONS[_activation(self._config)]
        self._add("gate", gate=gate, up=up, y=gate, width=gate.shape[1], gelu=gelu)
        self._written(gate)
        self._residual(mlp.down_proj, gate, hidden, after_mlp)

    def _attention(self, attention: Any) -> None:
        work, state = self._work, self._state.ctypes.data
        heads = {
            "q_heads": self._config.num_attention_heads,
            "kv_heads": self._config.num_key_value_heads,
            "head_dim": attention.head_dim,
        }
        norms: dict[str, Any] = {}
        q_norm = getattr(attention, "q_norm", None)
        if q_norm is not None:
            norms = {
                "q_norm": self._norm_weight(q_norm),
                "k_norm": self._norm_weight(attention.k_norm),
                "eps": float_bits(_eps(q_norm)),
            }
        rope = self._add(
            "rope", state=state, q=work["q"], k=work["k"], v=work["v"], **norms, **heads
        )
        name = "attend" if self.rows == 1 else "attend_rows"
        attend = self._add(
            name, state=state, q=work["q"], y=work["mixed"], **heads,
            window=getattr(attention, "sliding_window", None) or 0,
            scale=float_bits(attention.scaling), softcap=float_bits(0.0),
        )  # fmt: skip
        self._written(work["mixed"])
        rotary = attention.layer_type if self._one_plus else None
        self.layers.append(CapturedLayer(rope, attend, name, rotary))

    def _residual(self, module: Any, x: torch.Tensor, hidden: torch.Tensor, after: Any) -> None:
        """hidden += module(x), or += norm(module(x)) where the family norms what it adds."""
        if after is None:
            self._linear(module, x, hidden, accumulate=True)
        else:
            self._linear(module, x, self._work["out"])
            self._norm(after, self._work["out"], hidden, add=True)


def capture_tile(problem: Problem, threads: int | None = None) -> Tile:
    """The op's tile for `problem` on `threads` threads; the space's default where the table's is a
    library's, since captured launches are our own kernels.
    """
    from tilewright.ops.cpu.space import cpu_space

    space = cpu_space(problem.op)
    tile = choose_tile(problem, space, units=threads).tile
    return tile if tile.algorithm in CAPTURED else space.default(problem)


def _eps(module: Any) -> float:
    value = getattr(module, "variance_epsilon", None)
    return float(module.eps if value is None else value)


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_act", None) or config.hidden_activation)
