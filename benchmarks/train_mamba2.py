"""Train a very small Mamba-2 on the bytes of a text, seeded, on the CPU.

    python benchmarks/train_mamba2.py wikitext2-test.txt tests/data/tiny-mamba2

The model is transformers' own, run by transformers' own torch code: none of Tilewright's takes
part. Tokens are bytes below 128, every other byte a "?". The last tenth of the text is held out;
its loss, and that of knowing only how often each byte occurs, are printed and written beside the
weights (float16) as training.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_hybrid import write_folder
from torch.nn import functional

__all__ = ["encode", "train"]

VOCABULARY, WINDOW, BATCH = 128, 96, 16


def encode(text: bytes) -> torch.Tensor:
    """Token ids, int64 [T], of a text."""
    raw = np.frombuffer(text, dtype=np.uint8)
    return torch.from_numpy(np.where(raw < VOCABULARY, raw, ord("?")).astype(np.int64))


def train(ids: torch.Tensor, *, steps: int, seed: int = 0, log: Any = None) -> tuple[Any, Any]:
    """A trained model in eval mode, and its losses in bits a byte.

    Args:
        ids: the whole text, 2,560 bytes or more; its last tenth is held out.
        steps: of AdamW, on BATCH windows of WINDOW bytes.
        log: called with (step, loss) now and then.
    """
    import transformers

    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16,
        state_size=16, n_groups=2, expand=2, chunk_size=32, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Mamba2ForCausalLM(config).train()
    generator = torch.Generator().manual_seed(seed)
    cut = len(ids) * 9 // 10
    seen, held_out = ids[:cut], ids[cut:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    for step in range(steps):
        warm, left = min(1.0, (step + 1) / 20), 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * warm * left
        at = torch.randint(0, cut - WINDOW - 1, (BATCH,), generator=generator)
        window = torch.stack([seen[i : i + WINDOW + 1] for i in at.tolist()])
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if log is not None and (step % 25 == 0 or step + 1 == steps):
            log(step, loss.item() / math.log(2))
    model.eval().requires_grad_(False)
    rows = min(32, len(held_out) // 256)
    sample = held_out[: rows * 256].reshape(rows, 256)
    with torch.inference_mode():
        logits = model(input_ids=sample[:, :-1], use_cache=False).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten()).item()
    often = torch.bincount(seen, minlength=VOCABULARY).float() + 1
    guess = -torch.log(often / often.sum())[sample[:, 1:]].mean().item()
    bits = {"held_out": loss / math.log(2), "byte_frequencies": guess / math.log(2)}
    return model, {"steps": steps, "seed": seed, "bits_per_byte": bits}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    begin = time.perf_counter()
    ids = encode(given.text.read_bytes())
    model, report = train(
        ids, steps=given.steps, seed=given.seed,
        log=lambda step, bits: print(f"step {step}: {bits:.3f} bits a byte", flush=True),
    )  # fmt: skip
    write_folder(given.folder, model, "F16")
    report["text"] = given.text.name
    (given.folder / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report), f"{time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
