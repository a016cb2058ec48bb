"""The reference arm: the same checkpoint, dequantized to float32, in plain transformers.

transformers reads the GGUF file with its own loader and runs torch's own matrix products; no
code of Tilewright takes part. Its GGUF loader needs the `accelerate` package.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Greedy", "greedy", "load_reference"]


def load_reference(path: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file in float32, by transformers alone."""
    import transformers

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    return model.eval(), tokenizer


@dataclass(frozen=True)
class Greedy:
    """Greedy continuation of a prompt.

    Attributes:
        ids: the chosen ids.
        gaps: distance of the two largest logits at every step.
    """

    ids: list[int]
    gaps: list[float]


@torch.inference_mode()
def greedy(model: Any, prompt_ids: Sequence[int], count: int) -> Greedy:
    """`count` greedy ids by transformers' own generate; no id ends the text."""
    from transformers import GenerationConfig

    # generate() fills what its configuration leaves open from the model's.
    model.generation_config.eos_token_id = None
    made = model.generate(
        torch.tensor([list(prompt_ids)]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        generation_config=GenerationConfig(
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        ),
    )
    top = torch.stack(made.logits)[:, 0].float().topk(2).values  # [count, 2]
    return Greedy(made.sequences[0, len(prompt_ids) :].tolist(), (top[:, 0] - top[:, 1]).tolist())
