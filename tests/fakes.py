"""Small stand-ins whose right answers are known by construction."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

BOS, EOS = 256, 257
VOCAB = 258


class ByteTokenizer:
    """Token i is byte i; 256 begins a text, 257 ends it."""

    bos_token_id = BOS
    eos_token_id = EOS

    def __init__(self, *, adds_bos: bool = True, chat_template: str | None = None) -> None:
        self.adds_bos = adds_bos
        self.chat_template = chat_template

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, **_: Any
    ) -> dict[str, list[int]]:
        begin = [BOS] if self.adds_bos and add_special_tokens else []
        return {"input_ids": begin + list(text.encode())}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def get_vocab(self) -> dict[str, int]:
        return {"<|im_end|>": EOS}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[reply]"


class ScriptedDecoder:
    """Says a fixed text whatever it is fed; every call is recorded and advances a clock."""

    def __init__(self, reply: Sequence[int], model: ScriptedModel) -> None:
        self._reply = list(reply)
        self._model = model
        self._next = 0

    def _logits(self) -> torch.Tensor:
        token = self._reply[self._next] if self._next < len(self._reply) else EOS
        self._next += 1
        logits = torch.zeros(VOCAB)
        logits[token] = 10.0
        return logits

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.int64
        assert ids.shape[0] == 1
        self._model.calls.append(("prefill", ids[0].tolist()))
        self._model.now += self._model.token_s / 10 * ids.shape[1]
        return self._logits()

    def step(self, token_id: int) -> torch.Tensor:
        self._model.calls.append(("step", token_id))
        self._model.now += self._model.token_s
        return self._logits()

    def reset(self) -> None:
        self._model.calls.append(("reset",))
        self._next = 0


class ScriptedModel:
    """A model that brings its own decoder, and a clock its work advances.

    One single-token step takes `token_s` seconds, a prefilled token a tenth of that.
    """

    def __init__(self, reply: bytes | Sequence[int] = b"", context: int = 4096) -> None:
        self.reply = list(reply)
        self.calls: list[tuple[Any, ...]] = []
        self.now = 0.0
        self.token_s = 0.01
        self.config = SimpleNamespace(
            max_position_embeddings=context, vocab_size=VOCAB, eos_token_id=None
        )
        self.config.get_text_config = lambda: self.config
        self.dtype = torch.float32
        self.tilewright_info = SimpleNamespace(file_bytes=2048)

    def tilewright_decoder(self) -> ScriptedDecoder:
        return ScriptedDecoder(self.reply, self)

    def clock(self) -> float:
        return self.now
