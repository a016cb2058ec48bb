"""Models with Mamba-2 mixers for tests: files from `benchmarks/make_hybrid.py`, and a slow reader.

The right tokens come from transformers' own code over the values that lie in the file, run over
the whole sequence for every token: no cache, none of Tilewright's code.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from by_path import module_once

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> Any:
    """A script of benchmarks/ as a module; the test skips where there are none."""
    path = BENCHMARKS / f"{name}.py"
    if not path.exists():
        pytest.skip("benchmarks/ is not part of this copy")
    return module_once(name, path)


def require_reference() -> None:
    """Skip where transformers' own mixers are no right value: until they had groups, the gated
    norms of Mamba2, Bamba and GraniteMoeHybrid took the mean over all groups together."""
    import transformers
    from transformers.models.mamba2 import modeling_mamba2

    if "group_size" not in inspect.signature(modeling_mamba2.MambaRMSNormGated).parameters:
        pytest.skip(f"transformers {transformers.__version__} norms all groups of a mixer together")


def random_ids(length: int, *, rows: int = 1, vocabulary: int = 320, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (rows, length), generator=generator)


@torch.inference_mode()
def all_logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits [b, T, V] of one pass without a cache."""
    return model(input_ids=ids, use_cache=False, **options).logits.float()


def slow_greedy(model: Any, ids: torch.Tensor, count: int) -> tuple[list[int], torch.Tensor]:
    """`count` greedy tokens after ids [1, T], and the logits that each was taken from."""
    made, seen = [], []
    for _ in range(count):
        logits = all_logits(model, ids)[0, -1]
        made.append(int(logits.argmax()))
        seen.append(logits)
        ids = torch.cat([ids, torch.tensor([[made[-1]]])], dim=1)
    return made, torch.stack(seen)


def fast_greedy(
    decoder: Any, ids: torch.Tensor, count: int, pieces: list[int]
) -> tuple[list[int], torch.Tensor]:
    """The same through a `Decoder`: the prompt in pieces, then a token at a time."""
    assert sum(pieces) == ids.shape[1]
    decoder.reset()
    for piece in ids.split(pieces, dim=1):
        logits = decoder.prefill(piece)
    made, seen = [int(logits.argmax())], [logits]
    for _ in range(count - 1):
        logits = decoder.step(made[-1])
        made.append(int(logits.argmax()))
        seen.append(logits)
    return made, torch.stack(seen)
