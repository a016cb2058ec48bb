"""Prefill and decode of a transformers model as captured programs.

For the families whose layer has the Llama shape, `FusedDecoder` runs `Capture`d programs instead of
eager model code: one for a single token, one for a prompt in pieces of up to `PREFILL_ROWS` tokens.
Both use one cache of keys and values. The function is the model's own, and
`tests/model/test_decode.py` holds every path to transformers' forward.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tilewright.errors import UnsupportedError
from tilewright.model.fuse import ATTEND_ROWS, Capture, why_not_fused
from tilewright.ops.cpu.runtime import Program, default_threads

__all__ = ["PREFILL_ROWS", "FusedDecoder"]

PREFILL_ROWS = 512
_FIRST_CAPACITY = 512


class FusedDecoder:
    """Steps a supported model; the `Decoder` protocol of `tilewright.model.generate`.

    Args:
        model: a model from `tilewright.load`, float32, on the CPU.
        threads: threads of a pass; None for torch's setting.

    Raises:
        UnsupportedError: the model has no fused step; the message says why.
    """

    def __init__(self, model: Any, threads: int | None = None) -> None:
        reason = why_not_fused(model)
        if reason is not None:
            raise UnsupportedError(f"no fused decode step: {reason}; use the model's own forward")
        self._model = model
        self._threads = threads or default_threads()
        self._state = np.zeros(1, dtype=np.int64)  # position of the next token
        self._capacity = 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self._captures: dict[int, tuple[Capture, Program]] = {}
        self._reserve(_FIRST_CAPACITY)

    @property
    def position(self) -> int:
        """Tokens fed so far."""
        return int(self._state[0])

    def reset(self) -> None:
        """Forget everything fed so far; memory stays for the next prompt."""
        self._state[0] = 0

    def step(self, token_id: int) -> torch.Tensor:
        """Feed one token; returns the logits [V] float32 after it."""
        return self.prefill(torch.tensor([[token_id]], dtype=torch.int64))

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed ids [1, T] int64 at the current position; returns the last logits [V] float32."""
        ids = self._checked(ids)
        for piece in ids.split(PREFILL_ROWS):
            capture = self._run(piece)
        if capture.rows == 1:
            return capture.logits.clone()
        logits: torch.Tensor = self._model.lm_head(capture.hidden[len(piece) - 1])
        return logits

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed ids [1, T] int64 at the current position; returns all logits [T, V] float32."""
        out = []
        for piece in self._checked(ids).split(PREFILL_ROWS):
            capture = self._run(piece)
            if capture.rows == 1:
                out.append(capture.logits[None].clone())
            else:
                out.append(self._model.lm_head(capture.hidden[: len(piece)]))
        return torch.cat(out)

    def _checked(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 1:
            raise ValueError(f"ids has shape {list(ids.shape)}; pass [1, T] with T >= 1")
        vocabulary = self._model.config.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise ValueError(
                f"ids reach from {int(ids.min())} to {int(ids.max())}; "
                f"the vocabulary is 0..{vocabulary - 1}"
            )
        self._reserve(self.position + ids.shape[1])
        return ids[0]

    def _run(self, piece: torch.Tensor) -> Capture:
        """One pass over at most PREFILL_ROWS tokens."""
        capture, program = self._capture(1 if len(piece) == 1 else PREFILL_ROWS)
        capture.ids[: len(piece)] = piece
        capture.set_rows(len(piece))
        program.run(self._threads)
        self._state[0] += len(piece)
        return capture

    def _capture(self, rows: int) -> tuple[Capture, Program]:
        found = self._captures.get(rows)
        if found is None:
            capture = Capture(self._model, self._state, rows, self._threads)
            self._point(capture)
            found = self._captures[rows] = (capture, Program(capture.launches))
        return found

    def _reserve(self, tokens: int) -> None:
        """Make room for `tokens` positions, keeping what the cache holds."""
        if tokens <= self._capacity:
            return
        capacity = max(_FIRST_CAPACITY, self._capacity)
        while capacity < tokens:
            capacity *= 2
        config, layers = self._model.config, self._model.model.layers
        heads, dim, used = config.num_key_value_heads, layers[0].self_attn.head_dim, self.position
        keys = [torch.zeros(heads, dim, capacity) for _ in layers]
        values = [torch.zeros(heads, capacity, dim) for _ in layers]
        for old, new in zip(self._keys, keys, strict=False):
            new[:, :, :used] = old[:, :, :used]
        for old, new in zip(self._values, values, strict=False):
            new[:, :used] = old[:, :used]
        self._keys, self._values = keys, values
        self._scores = torch.zeros(self._threads, ATTEND_ROWS, capacity)
        self._capacity = capacity
        for capture, _ in self._captures.values():
            self._point(capture)

    def _point(self, capture: Capture) -> None:
        """Point a capture's launches at the current cache."""
        for layer, keys, values in zip(capture.layers, self._keys, self._values, strict=True):
            cos, sin = self._rotary(layer.rotary)
            layer.point(keys, values, cos, sin, self._scores)

    def _rotary(self, kind: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [capacity, head_dim] from the model's own rotary module."""
        found = self._tables.get(kind)
        if found is None or found[0].shape[0] < self._capacity:
            positions = torch.arange(self._capacity)[None]
            extra = () if kind is None else (kind,)
            with torch.inference_mode():
                cos, sin = self._model.model.rotary_emb(torch.zeros(1, 1, 1), positions, *extra)
            found = (cos[0].float().contiguous(), sin[0].float().contiguous())
            self._tables[kind] = found
        return found
