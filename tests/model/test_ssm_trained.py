"""Greedy identity on a Mamba-2 that has learned: see `tests/data/README.md`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers")

from model.gguf_models import relative_error
from model.ssm_models import all_logits, fast_greedy, require_reference, script, slow_greedy
from tilewright.model.generate import decoder_for
from tilewright.model.load import load

FOLDER = Path(__file__).parents[1] / "data/tiny-mamba2"
PROMPTS = (
    b" = = History = = \n \n In 1914 , the",
    b" The album was released on",
    b" = = Production = = \n \n",
)
UNSEEN = (
    b" The bridge was built in the early years of the war , and it was used by the army until "
    b"the city was taken . After the war the old road was closed and a new line was opened to "
    b"the north of the river . It was the first of its kind in the country ."
)


def _ids(text: bytes) -> torch.Tensor:
    return torch.tensor([list(text)])


@pytest.fixture(scope="module")
def plain() -> Any:
    import transformers

    require_reference()
    model = transformers.Mamba2ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def test_it_has_learned(plain: Any) -> None:
    """Bits a byte of English that it has not seen, far below those of byte frequencies."""
    ids = _ids(UNSEEN)
    logits = all_logits(plain, ids)[0, :-1]
    bits = functional.cross_entropy(logits, ids[0, 1:]).item() / math.log(2)
    report = json.loads((FOLDER / "training.json").read_text())["bits_per_byte"]
    assert report["held_out"] < 2.2
    assert bits < report["byte_frequencies"] - 1.5


@pytest.mark.parametrize(
    "form", ["as-trained", "w4a16", "Q4_0", pytest.param("Q8_0", marks=pytest.mark.slow)]
)
def test_greedy_text_is_the_recurrences(form: str, plain: Any, tmp_path: Path) -> None:
    hybrid = script("make_hybrid")
    if form == "as-trained":
        path, right = FOLDER, plain
    elif form == "w4a16":
        path = tmp_path
        right = hybrid.write_folder(tmp_path, plain)
    else:
        path = tmp_path / "m.gguf"
        right = hybrid.write_gguf(path, plain, form)
    model, _ = load(path)
    decoder = decoder_for(model)
    texts = set()
    for prompt in PROMPTS:
        ids = _ids(prompt)
        tokens, logits = slow_greedy(right, ids, 24)
        got, seen = fast_greedy(decoder, ids, 24, [len(prompt) - 17, 1, 16])
        assert relative_error(seen, logits) < 1e-5
        assert got == tokens
        texts.add(bytes(tokens))
    assert len(texts) > 1
    assert all(len(set(text)) > 4 for text in texts)


def test_a_state_that_is_lost_changes_the_text(plain: Any) -> None:
    """Chunked prefill that drops the state between pieces would be seen."""
    model, _ = load(FOLDER)
    ids = _ids(PROMPTS[0])
    tokens, _ = slow_greedy(plain, ids, 20)
    forgotten, _ = slow_greedy(plain, ids[:, -16:], 20)
    assert forgotten != tokens
    got, _ = fast_greedy(decoder_for(model), ids, 20, [ids.shape[1] - 16, 16])
    assert got == tokens


def test_training_is_seeded_and_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    script("make_hybrid")
    trainer = script("train_mamba2")
    monkeypatch.setattr(trainer, "WINDOW", 24)
    text = trainer.encode("Zwölf Boxkämpfer jagen Viktor quer. ".encode() * 300)
    assert text.max() < 128
    losses: dict[int, float] = {}
    runs = [trainer.train(text, steps=12, log=losses.__setitem__) for _ in range(2)]
    (first, report), (second, _) = runs
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert losses[11] < losses[0] - 1
    assert report["bits_per_byte"]["held_out"] < 6.5
