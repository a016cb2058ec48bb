"""The parts that a model's pass is timed in: launches of a captured model, modules of any other."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from tilewright.device import cpu_device
from tilewright.model.generate import Decoder, decoder_for
from tilewright.model.layers import QuantEmbedding, QuantLinear
from tilewright.model.moe import QuantExperts
from tilewright.ops.catalog import find_spec
from tilewright.tiles.tile import Problem

__all__ = ["Instruments", "Part", "instruments_for", "role_of"]

Seen = list[tuple["Part", float]]

_EMPTY_RUNS = 200
_ROLES = (
    (r"\b[qkv]_proj$|\bqkv_proj$", "q/k/v"),
    (r"\bo_proj$|\bout_proj$", "o"),
    (r"\b(gate|up|gate_up)_proj$", "gate/up"),
    (r"\bdown_proj$", "down"),
    (r"\blm_head$", "head"),
)
_KERNEL_ROLES = {
    "norm": "norm",
    "rope": "rope",
    "attend": "attention",
    "attend_rows": "attention",
    "gate": "activation",
    "embed": "embed",
    "rows": "embed",
    "scale": "embed",
    "quantize": "quantize",
    "sums": "quantize",
}


@dataclass(frozen=True)
class Part:
    """One launch, or one call of a module.

    Attributes:
        role: what it does in the model; see `role_of`.
        op: "mmq", "w4a16" or "dense" for products, else "".
        weight_type: of a packed product, a dtype for a dense one, else "".
        kernel: name of the kernel, or of the module's class.
        flops, bytes: of one call; 0 where no count is known.
    """

    role: str
    op: str
    weight_type: str
    kernel: str
    flops: float = 0.0
    bytes: float = 0.0


class Instruments:
    """One model's decoder, and the same one in parts.

    Attributes:
        method: "launches" or "modules".
        plain: the decoder without instruments.
        timed: reports every part to `seen`, in microseconds, `overhead_us` taken off.
        seen: parts in the order they ran, to be cleared by the caller.
        overhead_us: what timing one part adds.
    """

    def __init__(self, method: str, plain: Decoder, timed: Decoder, seen: Seen) -> None:
        self.method, self.plain, self.timed, self.seen = method, plain, timed, seen
        self.overhead_us = 0.0


def instruments_for(model: Any) -> Instruments:
    """The finest instruments that `model` can be timed with."""
    from tilewright.model.decode import FusedDecoder

    seen: Seen = []
    plain = decoder_for(model)
    if isinstance(plain, FusedDecoder):
        timed, overhead_us = _launch_decoder(model, seen)
        found = Instruments("launches", plain, timed, seen)
    else:
        hooked = _HookedDecoder(model, decoder_for(model), seen)
        found, overhead_us = Instruments("modules", plain, hooked, seen), hooked.overhead_us
    found.overhead_us = overhead_us
    return found


def role_of(path: str) -> str:
    """The role of a product by its module's path: "q/k/v", "o", "gate/up", "down", "head"; the
    last part of the path where it is none of these."""
    for pattern, role in _ROLES:
        if re.search(pattern, path):
            return role
    return path.rpartition(".")[2] or "other"


def _launch_decoder(model: Any, seen: Seen) -> tuple[Decoder, float]:
    """A captured decoder that runs every launch as a program of its own."""
    from tilewright.model.decode import PREFILL_ROWS, FusedDecoder
    from tilewright.ops.cpu.runtime import Program, default_threads

    overhead_us = _median_us(lambda: Program([]).run, default_threads())

    class LaunchDecoder(FusedDecoder):
        def _run(self, piece: torch.Tensor) -> Any:
            capture, _ = self._capture(1 if len(piece) == 1 else PREFILL_ROWS)
            capture.ids[: len(piece)] = piece
            capture.set_rows(len(piece))
            parts = _launch_parts(model, capture, len(piece), self.position)
            programs = own.setdefault(capture.rows, [Program([one]) for one in capture.launches])
            for part, program in zip(parts, programs, strict=True):
                start = time.perf_counter_ns()
                program.run(self._threads)
                us = (time.perf_counter_ns() - start) / 1e3
                seen.append((part, max(us - overhead_us, 0.0)))
            self._state[0] += len(piece)
            return capture

        @torch.inference_mode()
        def prefill(self, ids: torch.Tensor) -> torch.Tensor:
            ids = self._checked(ids)
            for piece in ids.split(PREFILL_ROWS):
                capture = self._run(piece)
            if capture.rows == 1:
                return capture.logits.clone()
            head = model.lm_head
            start = time.perf_counter_ns()
            logits: torch.Tensor = head(capture.hidden[len(piece) - 1])
            seen.append((_product("lm_head", head, 1), (time.perf_counter_ns() - start) / 1e3))
            return logits

    own: dict[int, list[Any]] = {}
    return LaunchDecoder(model), overhead_us


def _median_us(make: Callable[[], Callable[[int], Any]], threads: int) -> float:
    """Median time of a call that does nothing, microseconds."""
    run = make()
    times = []
    for _ in range(_EMPTY_RUNS):
        start = time.perf_counter_ns()
        run(threads)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return sorted(times)[_EMPTY_RUNS // 2]


def _launch_parts(model: Any, capture: Any, rows: int, position: int) -> list[Part]:
    """What each launch of a capture is, for `rows` tokens from `position` on."""
    from tilewright.ops.cpu.args import ARGS
    from tilewright.ops.cpu.decoder_kernels import SLOTS

    weights = _weights(model)
    parts = []
    for kernel, args in capture.launches:
        algorithm = kernel.name.removeprefix("decoder-").split("-")[0]
        slots = SLOTS.get(algorithm, ARGS)
        values = dict(zip(slots, args.tolist(), strict=False))
        if algorithm in ("dot", "panel", "int8", "dense"):
            path, module = weights[values["w"]]
            part = _product(path, module, rows, kernel.name)
        elif algorithm in ("attend", "attend_rows"):
            part = _attention(kernel.name, values, rows, position)
        else:
            kind = weights[values["w"]][1] if algorithm == "rows" else None
            part = Part(
                _KERNEL_ROLES.get(algorithm, "other"), "",
                kind.packed.type_name if kind is not None else "", kernel.name,
            )  # fmt: skip
        parts.append(part)
    return parts


def _weights(model: Any) -> dict[int, tuple[str, Any]]:
    """Path and module by the address of the weight; a tied embedding has its head's entry."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantLinear | QuantEmbedding):
            from tilewright.ops.cpu.launch import cpu_weight

            address = cpu_weight(cast(Any, module.packed)).slots["w"]
        elif isinstance(module, nn.Linear):
            address = module.weight.data_ptr()
        else:
            continue
        if isinstance(module, QuantEmbedding):
            found.setdefault(address, (path, module))
        else:
            found[address] = (path, module)
    return found


def _product(path: str, module: Any, rows: int, kernel: str = "") -> Part:
    """A product of `rows` rows with a module's weight."""
    role = role_of(path)
    kernel = kernel or type(module).__name__
    if isinstance(module, QuantLinear):
        op = "w4a16" if module.weight_type.startswith("uint4") else "mmq"
        problem = Problem(
            op, cpu_device().arch, "float32", module.weight_type, module.activations, rows,
            module.out_features, module.in_features, module.group,
        )  # fmt: skip
        spec = find_spec(op)
        return Part(role, op, module.weight_type, kernel, spec.flops(problem), spec.bytes(problem))
    n, k = module.out_features, module.in_features
    dtype = str(module.weight.dtype).removeprefix("torch.")
    moved = module.weight.element_size() * n * k + 4.0 * rows * (n + k)
    return Part(role, "dense", dtype, kernel, 2.0 * rows * n * k, moved)


def _experts(module: QuantExperts, ids: torch.Tensor) -> Part:
    """Gate, up and down of the experts that `ids` [T, top_k] names: only those are read."""
    chosen = len(set(ids.reshape(-1).tolist()))
    values = 3 * module.hidden_dim * module.intermediate_dim
    return Part(
        "experts", "moe", "+".join(module.weight_types), type(module).__name__,
        2.0 * ids.numel() * values, module.nbytes / module.num_experts * chosen,
    )  # fmt: skip


def _attention(kernel: str, values: dict[str, int], rows: int, position: int) -> Part:
    """Both products of attention: every row sees the positions up to its own, or its window."""
    window = values["window"] or position + rows
    seen = sum(min(position + i, window) for i in range(1, rows + 1))
    widest = min(position + rows, window + rows - 1)
    flops = 4.0 * seen * values["q_heads"] * values["head_dim"]
    moved = 8.0 * widest * values["kv_heads"] * values["head_dim"]
    return Part("attention", "", "", kernel, flops, moved)


class _HookedDecoder:
    """A decoder whose model is timed by hooks: a module's time is its own, less its children's.

    Args:
        model: any model of modules.
        inner: the decoder to be timed.
        seen: where parts are reported.

    Attributes:
        overhead_us: what a pair of hooks costs; it is taken off the module around the hooked one.
    """

    def __init__(self, model: Any, inner: Decoder, seen: Seen) -> None:
        self._model, self._inner, self._seen = model, inner, seen
        self._stack: list[list[float]] = []  # of each open module: start, time of its children
        self.overhead_us = 0.0
        self.overhead_us = self._pair_us()

    def reset(self) -> None:
        self._inner.reset()

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        with self._hooks(self._model):
            return self._inner.prefill(ids)

    def step(self, token_id: int) -> torch.Tensor:
        with self._hooks(self._model):
            return self._inner.step(token_id)

    def _hooks(self, model: Any) -> _Hooks:
        handles = []
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave(path)))
        return _Hooks(handles)

    def _enter(self, _module: Any, _inputs: Any) -> None:
        self._stack.append([time.perf_counter_ns() / 1e3, 0.0])

    def _leave(self, path: str) -> Callable[..., None]:
        def leave(module: Any, inputs: Any, _output: Any) -> None:
            now = time.perf_counter_ns() / 1e3
            start, children = self._stack.pop()
            if self._stack:
                self._stack[-1][1] += now - start + self.overhead_us
            self._seen.append((_module_part(path, module, inputs), max(now - start - children, 0)))

        return leave

    def _pair_us(self) -> float:
        """What a pair of hooks adds to a module that does nothing."""
        module, x = nn.Identity(), torch.zeros(1)
        plain = _median_us(lambda: lambda _: module(x), 0)
        with self._hooks(module):
            hooked = _median_us(lambda: lambda _: module(x), 0)
        self._seen.clear()
        return max(hooked - plain, 0.0)


class _Hooks:
    """Hooks that are removed when the block ends."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()


def _module_part(path: str, module: Any, inputs: Any) -> Part:
    name = type(module).__name__
    if isinstance(module, QuantLinear | nn.Linear):
        x = inputs[0]
        return _product(path, module, x.numel() // x.shape[-1])
    if isinstance(module, QuantExperts):
        return _experts(module, inputs[1])
    if isinstance(module, QuantEmbedding | nn.Embedding):
        kind = module.packed.type_name if isinstance(module, QuantEmbedding) else ""
        return Part("embed", "", kind, name)
    lower = name.lower()
    for word, role in (
        ("norm", "norm"), ("rotary", "rope"), ("attention", "attention"), ("mlp", "activation"),
        ("silu", "activation"), ("gelu", "activation"), ("router", "router"),
    ):  # fmt: skip
        if word in lower:
            return Part(role, "", "", name)
    return Part("other", "", "", name)
