"""A hybrid's step over fixed places, on the CPU; what a GPU captures is the same forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from model.gguf_models import relative_error
from model.ssm_models import all_logits, random_ids, script
from tilewright.model import captured
from tilewright.model.captured import CapturedDecoder, why_not_captured
from tilewright.model.generate import TransformersDecoder, decoder_for, how_stepped
from tilewright.model.ssm import inject_ssm

FAMILIES = ("mamba2", "nemotron_h", "bamba", "granitemoehybrid", "falcon_h1")
EVERY = [
    # One whose layers are either, and one whose layers are both.
    family
    if family in ("nemotron_h", "falcon_h1")
    else pytest.param(family, marks=pytest.mark.slow)
    for family in FAMILIES
]
LIMIT = 1e-5  # of float32: attention over fixed places sums in another order


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    hybrid = script("make_hybrid")
    found = {}
    for family in FAMILIES:
        model = hybrid.plain_model(family)
        inject_ssm(model)
        found[family] = model
    return found


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen at first, so that these short texts outgrow them."""
    monkeypatch.setattr(captured, "_PLACES", 16)


@pytest.mark.parametrize("family", EVERY)
def test_steps_follow_the_forward(family: str, models: dict[str, Any]) -> None:
    """Prompts, single tokens and further prompts, through three sizes; then from the beginning."""
    model = models[family]
    decoder = CapturedDecoder(model)
    for seed, pieces in ((1, [9, 1, 1, 1, 6, 1, 1, 12, *[1] * 14]), (2, [5, *[1] * 20])):
        ids = random_ids(sum(pieces), seed=seed)
        right = all_logits(model, ids)[0]
        decoder.reset()
        end = 0
        for piece in ids.split(pieces, dim=1):
            logits = decoder.prefill(piece)
            end += piece.shape[1]
            assert relative_error(logits, right[end - 1]) < LIMIT, end
    assert decoder._capacity >= 46
    assert decoder._stepping


def test_a_first_token_alone_is_no_step(models: dict[str, Any]) -> None:
    model = models["nemotron_h"]
    decoder = CapturedDecoder(model)
    ids = random_ids(4)
    right = all_logits(model, ids)[0]
    for at, token in enumerate(ids[0].tolist()):
        assert relative_error(decoder.step(token), right[at]) < LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_reads_no_value_on_the_host(family: str, models: dict[str, Any]) -> None:
    """Which no capture could record: ids, positions and lengths stay on the device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    asked: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.overloadpacket in (
                torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal,
                torch.ops.aten.is_nonzero,
            ):  # fmt: skip
                asked.append(str(func))
            return func(*args, **(kwargs or {}))

    decoder = CapturedDecoder(models[family])
    decoder.prefill(random_ids(9))
    decoder.step(3)
    with torch.inference_mode(), Watch():
        decoder._token()
    assert asked == []


class Replay:
    """Stands for a CUDA graph: runs the step again, into the tensor that was captured."""

    def __init__(self, decoder: CapturedDecoder, spoil: float = 0.0) -> None:
        self._decoder, self._spoil = decoder, spoil

    def replay(self) -> None:
        logits = self._decoder._token()
        self._decoder._captured.copy_(logits + self._spoil * logits.abs().max())


def graphed(model: Any, spoil: float = 0.0, fault: str = "") -> CapturedDecoder:
    """A decoder that takes itself to be on a GPU, as far as capturing goes."""
    decoder = CapturedDecoder(model)
    decoder._graphed = True

    def capture(before: Any) -> None:
        decoder._token()  # a warm-up, which moves the states
        captured._copy(before, decoder._fixed, decoder._fed)
        if fault:
            raise RuntimeError(fault)
        decoder._captured = torch.zeros(model.config.vocab_size)
        decoder._graph = Replay(decoder, spoil)

    decoder._capture = capture  # type: ignore[method-assign]
    return decoder


@pytest.mark.parametrize("family", EVERY)
def test_replays_go_on_where_the_capture_began(family: str, models: dict[str, Any]) -> None:
    model = models[family]
    decoder = graphed(model)
    ids = random_ids(30)
    right = all_logits(model, ids)[0]
    decoder.prefill(ids[:, :10])
    graphs = set()
    for at in range(10, 30):
        assert relative_error(decoder.step(int(ids[0, at])), right[at]) < LIMIT, at
        graphs.add(id(decoder._graph))
    assert decoder.captured
    assert decoder.why_eager is None
    assert len(graphs) == 2  # a larger cache has other addresses


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"spoil": 0.5}, "its captured step gives other logits, off by "),
        (
            {"fault": "operation not permitted when stream is capturing\nmore"},
            "its step cannot be captured (RuntimeError: operation not permitted when stream is "
            "capturing)",
        ),
    ],
    ids=["other logits", "refused"],
)
def test_what_cannot_be_captured_goes_on_uncaptured(
    broken: dict[str, Any], reason: str, models: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = models["granitemoehybrid"]
    decoder = graphed(model, **broken)
    ids = random_ids(14)
    right = all_logits(model, ids)[0]
    decoder.prefill(ids[:, :10])
    for at in range(10, 14):
        assert relative_error(decoder.step(int(ids[0, at])), right[at]) < LIMIT, at
    assert not decoder.captured
    assert decoder.why_eager is not None
    assert decoder.why_eager.startswith(reason)
    assert caplog.text.count("a token is launched operation by operation: ") == 1


@pytest.mark.parametrize("family", EVERY)
def test_states_that_are_lost_on_the_way_to_fixed_places_are_noticed(
    family: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a version of transformers would lose them that keeps them elsewhere."""
    model = models[family]
    copy = captured._copy

    def forgetful(held: Any, cache: Any, tokens: int) -> None:
        copy(held, cache, tokens)
        for layer in cache.layers:
            for states in getattr(layer, "recurrent_states", {}).values():
                states.zero_()

    monkeypatch.setattr(captured, "_copy", forgetful)
    decoder = graphed(model)
    ids = random_ids(14)
    right = all_logits(model, ids)[0]
    decoder.prefill(ids[:, :10])
    for at in range(10, 14):
        assert relative_error(decoder.step(int(ids[0, at])), right[at]) < LIMIT, at
    assert decoder.why_eager is not None
    assert decoder.why_eager.startswith("its captured step gives other logits, off by ")


def test_a_capture_that_is_interrupted_loses_nothing(models: dict[str, Any]) -> None:
    """Its warm-ups have moved the states in the fixed places, and nothing has set them back."""
    model = models["nemotron_h"]
    decoder = graphed(model)
    ids = random_ids(13)
    right = all_logits(model, ids)[0]
    decoder.prefill(ids[:, :10])
    capture = decoder._capture

    def interrupted(before: Any) -> None:
        decoder._token()
        raise KeyboardInterrupt

    decoder._capture = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        decoder.step(int(ids[0, 10]))
    decoder._capture = capture  # type: ignore[method-assign]
    for at in range(10, 13):
        assert relative_error(decoder.step(int(ids[0, at])), right[at]) < LIMIT, at
    assert decoder.captured


@pytest.mark.parametrize("steps", [0, 6], ids=["first", "growing"])
def test_without_memory_for_fixed_places_it_goes_on_uncaptured(
    steps: int,
    models: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the middle of copying into them, so that some layers have been filled."""
    model = models["nemotron_h"]
    decoder = graphed(model)
    ids = random_ids(20)
    right = all_logits(model, ids)[0]
    decoder.prefill(ids[:, :10])
    for at in range(10, 10 + steps):  # which fill the sixteen places
        decoder.step(int(ids[0, at]))
    assert decoder.captured is bool(steps)
    copy = captured._copy

    def short(held: Any, cache: Any, tokens: int) -> None:
        copy(held, cache, tokens)
        if type(cache).__name__ == "StaticCache":
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(captured, "_copy", short)
    for at in range(10 + steps, 20):
        assert relative_error(decoder.step(int(ids[0, at])), right[at]) < LIMIT, at
    assert not decoder.captured
    assert decoder.why_eager == "a cache of fixed places does not fit the GPU's memory"
    assert decoder._fixed is None
    assert caplog.text.count("a token is launched operation by operation: ") == 1


@pytest.mark.parametrize("token", [-1, 320])
def test_ids_outside_the_vocabulary_are_refused(token: int, models: dict[str, Any]) -> None:
    decoder = CapturedDecoder(models["bamba"])
    decoder.prefill(random_ids(3))
    with pytest.raises(ValueError, match=rf"token_id is {token}; the vocabulary is 0\.\.319"):
        decoder.step(token)


def test_hybrids_on_a_gpu_are_stepped_by_it(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("generate", "captured"):
        monkeypatch.setattr(
            f"tilewright.model.{module}.device_of", lambda model: torch.device("cuda", 0)
        )
    monkeypatch.setattr(captured, "step_memory", lambda device: (torch.zeros(2), torch.zeros(2)))
    assert type(decoder_for(models["bamba"])) is CapturedDecoder
    plain = script("make_hybrid").plain_model("bamba")  # whose scans are transformers' own
    assert type(decoder_for(plain)) is TransformersDecoder


def test_a_step_takes_attention_that_repeats_itself(models: dict[str, Any]) -> None:
    """cuDNN's sums of a single query under a mask are not the same bits twice."""
    model = models["falcon_h1"]
    decoder = CapturedDecoder(model)
    allowed = []
    hook = model.register_forward_hook(
        lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    decoder.prefill(random_ids(5))
    decoder.step(1)
    decoder.step(2)
    hook.remove()
    assert allowed == [True, False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_which_models_are_served(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = models["bamba"]
    assert why_not_captured(hybrid) == "the model is on cpu"
    monkeypatch.setattr(captured, "device_of", lambda model: torch.device("cuda", 0))
    assert why_not_captured(hybrid) is None
    assert why_not_captured(object()) == "object has no scans"
    plain = script("make_hybrid").plain_model("bamba")
    assert why_not_captured(plain) == "BambaForCausalLM has no scans"
    with monkeypatch.context() as patch:  # which would attend to the places that are empty
        patch.setattr(hybrid.config, "_attn_implementation_internal", "flash_attention_2")
        assert why_not_captured(hybrid) == "its attention is 'flash_attention_2', not 'sdpa'"
        patch.setattr(hybrid.config, "_attn_implementation_internal", "eager")
        assert why_not_captured(hybrid) is None
    with monkeypatch.context() as patch:
        patch.setattr(type(hybrid), "dtype", torch.float64)
        assert why_not_captured(hybrid) == "its dtype is torch.float64"

    def refuse(model: Any, places: int) -> Any:
        raise KeyError("linear_attention")

    monkeypatch.setattr(captured, "_static", refuse)
    assert why_not_captured(hybrid) == (
        "transformers makes no static cache for it (KeyError: 'linear_attention')"
    )


def test_a_hybrid_on_a_gpu_says_how_it_is_stepped(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["falcon_h1"]
    decoder, forward = graphed(model), TransformersDecoder(model)

    def said(by: Any) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(
                "tilewright.model.generate.device_of", lambda model: torch.device("cuda", 0)
            )
            return str(how_stepped(model, by))

    assert said(decoder) == "a token is launched operation by operation: no token was fed"
    decoder.prefill(random_ids(5))
    decoder.step(1)
    assert said(decoder) == "a token is one CUDA graph"
    monkeypatch.setattr(captured, "device_of", lambda model: torch.device("cuda", 0))
    by_operation = "a token is launched operation by operation: "
    assert said(forward) == by_operation + "transformers' own loop was asked for"
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    assert said(forward) == by_operation + "its attention is 'flash_attention_2', not 'sdpa'"
