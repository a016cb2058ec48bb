"""Mamba-2 and its hybrids against logits that llama.cpp computed, on files that it wrote.

The files are those of llama.cpp's own test of architectures: random weights, with every tensor
that an architecture may have. They lie in `shared/data/gguf` beside the checkout, or where
TILEWRIGHT_LLAMA_CPP_GGUF says; without them these tests skip.

Some of those tensors llama.cpp loads and does not use, or uses in an order of its own: `_as_read`
writes the file that its arithmetic amounts to.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from model.gguf_models import relative_error
from model.ssm_models import all_logits, fast_greedy
from tilewright.model.generate import decoder_for
from tilewright.model.load import load

NAMES = ("mamba2-dense", "nemotron_h-dense", "granitehybrid-dense", "falcon-h1-dense")


def _folder() -> Path:
    named = os.environ.get("TILEWRIGHT_LLAMA_CPP_GGUF")
    folder = Path(named) if named else Path(__file__).parents[3] / "shared/data/gguf"
    if not (folder / "llama_cpp_logits.npz").exists():
        pytest.skip(f"llama.cpp's files are not in {folder}")
    return folder


def _as_read(source: Path, path: Path) -> Any:
    """Copy a file; returns what llama.cpp divides rope's frequencies by, or None.

    Of a feed-forward part, nemotron_h multiplies product and bias by the product's factor, granite
    and falcon-h1 do not look at it; falcon-h1 adds no bias behind its attention, and has no use for
    factors of rope.
    """
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, architecture)
    for key, field in reader.fields.items():
        if key.startswith(("GGUF.", "tokenizer.")) or key == "general.architecture":
            continue
        value = field.contents()
        if isinstance(value, list) and not value:
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=sub)
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    factors = tensors.pop("rope_freqs.weight", None)
    for name, values in tensors.items():
        feed_forward = ".ffn_" in name and not name.endswith("ffn_norm.weight")
        if feed_forward and name.endswith("scale") and architecture != "nemotron_h":
            continue
        if architecture == "falcon-h1" and name.endswith("attn_output.bias"):
            continue
        if feed_forward and name.endswith(".bias") and architecture == "nemotron_h":
            values = values * tensors[name.removesuffix("bias") + "scale"]
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return factors if architecture == "granitehybrid" else None


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_llama_cpps(name: str, tmp_path: Path) -> None:
    folder = _folder()
    known = np.load(folder / "llama_cpp_logits.npz")
    factors = _as_read(folder / f"{name}.gguf", tmp_path / "m.gguf")
    model, _ = load(tmp_path / "m.gguf")
    if factors is not None:  # random ones, some negative: no checkpoint has such
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / torch.from_numpy(
            factors
        )
    right = torch.from_numpy(known[name])
    ids = torch.from_numpy(known["tokens"].astype(np.int64))[None]
    assert right.abs().max() > 0.1
    assert relative_error(all_logits(model, ids)[0], right) < 1e-4
    decoder = decoder_for(model)
    _, seen = fast_greedy(decoder, ids, 1, [33, 1, 45, 1])
    assert relative_error(seen[0], right[-1]) < 1e-4
