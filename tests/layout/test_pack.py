"""The layout is chosen by arch and dtype, once, when weights are packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewright.errors import LayoutError, UnsupportedError
from tilewright.formats.w4 import W4Codes
from tilewright.layout.cpu import PackedW4
from tilewright.layout.hopper import HopperW4
from tilewright.layout.pack import FAMILIES, family_of, pack_w4_for
from tilewright.layout.triton import WordsW4


def codes(group: int = 32) -> W4Codes:
    rng = np.random.default_rng(0)
    return W4Codes(
        rng.integers(0, 16, (24, 96), dtype=np.uint8),
        rng.random((24, 96 // group), dtype=np.float32),
        None, group, None, torch.float16,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "dtype", "family"),
    [
        ("cpu-avx512_vnni", torch.float32, "cpu"),
        ("sm_90", torch.float16, "hopper"),
        ("sm_90", torch.bfloat16, "hopper"),
        ("sm_90", torch.float32, "words"),
        ("sm_80", torch.float16, "words"),
        ("gfx1151", torch.float16, "words"),
        ("interpreter", torch.float16, "words"),
    ],
)
def test_every_arch_has_its_family(arch: str, dtype: torch.dtype, family: str) -> None:
    assert family_of(arch, dtype) == family
    kinds = {"cpu": PackedW4, "words": WordsW4, "hopper": HopperW4}
    packed = pack_w4_for(codes(), act_dtype=dtype, arch=arch)
    assert type(packed) is kinds[family]
    assert set(kinds) == set(FAMILIES)


def test_the_order_of_words_is_that_of_the_makers_fragments() -> None:
    assert pack_w4_for(codes(), arch="sm_80").order == "k32"
    assert pack_w4_for(codes(), arch="gfx1151").order == "k8"


def test_the_cpu_is_what_one_gets_without_asking() -> None:
    assert isinstance(pack_w4_for(codes()), PackedW4)


def test_a_family_may_be_named() -> None:
    assert isinstance(pack_w4_for(codes(), arch="sm_90", family="words"), WordsW4)
    with pytest.raises(UnsupportedError, match="family is 'marlin'; use one of cpu, words, hopper"):
        pack_w4_for(codes(), family="marlin")
    with pytest.raises(LayoutError, match="act_dtype is torch.float32"):
        pack_w4_for(codes(), arch="sm_90", act_dtype=torch.float32, family="hopper")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error_of_ours() -> None:
    with pytest.raises(UnsupportedError, match="device is 'cuda:0', and torch sees 0 GPUs"):
        pack_w4_for(codes(), "cuda")
