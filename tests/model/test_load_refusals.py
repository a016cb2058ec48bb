"""What `load` refuses, and how it says so; ids of hub repositories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from model import gguf_models
from model.gguf_models import Tiny, write
from tilewright.errors import FormatError, UnsupportedError
from tilewright.model.load import load


def _with(**changes: Any) -> Tiny:
    base: dict[str, Any] = {"architecture": "llama", "types": {"": "Q8_0"}, "layers": 1}
    return Tiny(**{**base, **changes})


BAD_METADATA = {
    "experts": (_with(metadata={"expert_count": 8}), "mixture of 8 experts"),
    "softcap": (
        _with(architecture="gemma3", metadata={"attn_logit_softcapping": 50.0}),
        "attn_logit_softcapping is 50.0",
    ),
    "logit-scale": (_with(metadata={"logit_scale": 8.0}), "logit_scale is 8.0"),
    "partial-rope": (_with(metadata={"rope.dimension_count": 32}), "rope turns 32 of 64"),
    "longrope": (
        _with(metadata={"rope.scaling.type": "longrope"}),
        "'longrope'; supported are none, linear and yarn",
    ),
    "value-length": (
        _with(metadata={"attention.value_length": 32}),
        "keys of 64 and values of 32",
    ),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_variants_are_refused(case: str, tmp_path: Path) -> None:
    tiny, message = BAD_METADATA[case]
    write(tmp_path / "model.gguf", tiny)
    with pytest.raises(UnsupportedError, match=message):
        load(tmp_path / "model.gguf")


def test_unknown_architecture_lists_what_loads(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedError, match="'rwkv7'; supported are llama, qwen2, qwen3, qwen3moe, gemma3"
    ):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        (("blk.0.ffn_up.weight",), {}, r"lacks model\.layers\.0\.mlp\.up_proj\.weight"),
        (("output_norm.weight",), {}, r"lacks model\.norm\.weight"),
        ((), {"blk.7.ffn_up.weight": (512, 256)}, r"has model\.layers\.7\.mlp\.up_proj\.weight"),
        ((), {"blk.0.ssm_in.weight": (512, 256)}, r"no tensors blk\.0\.ssm_in\.weight"),
        (
            ("blk.0.attn_v.weight",),
            {"blk.0.attn_v.weight": (64, 256)},
            r"\[64, 256\].*\[128, 256\]",
        ),
    ],
    ids=["missing-linear", "missing-norm", "layer-too-many", "stranger", "wrong-shape"],
)
def test_tensors_that_do_not_fit(
    drop: tuple[str, ...],
    add: dict[str, tuple[int, ...]],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = gguf_models._shapes

    def changed(tiny: Tiny) -> dict[str, tuple[int, ...]]:
        return {k: v for k, v in shapes(tiny).items() if k not in drop} | add

    monkeypatch.setattr(gguf_models, "_shapes", changed)
    write(tmp_path / "model.gguf", _with())
    with pytest.raises(FormatError, match=message):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'; allowed are cpu, cuda"),
        ({"device": "meta"}, "device is 'meta'; allowed are cpu, cuda"),
        ({"device": "cuda:99"}, "device is 'cuda:99', and torch sees"),
        ({"activations": "int4"}, "activations is 'int4'; allowed are float, int8"),
        ({"dtype": torch.int8}, "dtype is torch.int8; allowed are float32, float16, bfloat16"),
    ],
    ids=["device", "other-device", "no-such-gpu", "activations", "dtype"],
)
def test_bad_arguments(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load(tmp_path / "model.gguf", **options)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file or folder; check the path"):
        load(tmp_path / "missing.gguf")
    with pytest.raises(FormatError, match="neither safetensors nor a GGUF file"):
        load(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UnsupportedError, match=r"holds 2 GGUF files.*a\.gguf, b\.gguf"):
        load(tmp_path)


def test_damaged_scale_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, _with())
    from tilewright.formats.gguf import read_gguf

    tensor = read_gguf(path).tensors["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.offset : tensor.offset + 2] = b"\xff\x7f"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_up\.weight"):
        load(path)


def test_hub_ids_go_through_snapshot_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    write(tmp_path / "model.gguf", _with())
    asked = []

    def snapshot(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    model, _ = load("someone/some-model")
    assert model.tilewright_info.format == "gguf"
    assert asked[0][0] == "someone/some-model"
    assert "*.safetensors" in asked[0][1]["allow_patterns"]


def test_a_hub_repository_without_safetensors_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a repository with GGUF files, many and large, no file is fetched."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **o: str(tmp_path))
    with pytest.raises(FormatError, match="has no safetensors; of one with GGUF files download"):
        load("someone/some-model-GGUF")


def test_hub_offline_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def offline(repo_id: str, **options: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(FormatError, match="hub failed.*cannot reach the hub.*give its path"):
        load("someone/some-model")
