"""Every op launches on the GPU of its operands, whichever is torch's current one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

import triton_interpreter  # noqa: F401 - before anything else imports triton
from tilewright.device import check_triton, launching_on
from tilewright.errors import UnsupportedError
from tilewright.formats.w4 import W4Codes
from tilewright.layout.pack import pack_w4_for
from tilewright.ops.conv1d import gpu as conv1d
from tilewright.ops.conv1d.op import conv_args
from tilewright.ops.ssd import gpu as ssd
from tilewright.ops.ssd.op import scan_args
from tilewright.ops.w4a16 import gpu as w4a16


def test_without_triton_an_op_says_what_to_install(monkeypatch):
    monkeypatch.setattr("tilewright.device.has_triton", lambda: False)
    said = r"^w4a16_gemm: triton is not installed; pip install 'tilewright\[triton\]'$"
    with pytest.raises(UnsupportedError, match=said):
        check_triton("w4a16_gemm")
    with pytest.raises(UnsupportedError, match="^causal_conv1d: triton is not installed"):
        conv1d.gpu_conv(conv_args(torch.zeros(1, 3, 16), torch.zeros(16, 4)))


def test_only_another_gpu_is_made_current(monkeypatch):
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", made.append)
    for name in ("cpu", "cuda", "cuda:0", "meta"):
        with launching_on(torch.device(name)):
            pass
    assert not made
    launching_on(torch.device("cuda:1"))
    assert made == [torch.device("cuda:1")]


def product() -> None:
    ones = np.ones((8, 1), np.float32)
    codes = W4Codes(np.zeros((8, 32), np.uint8), ones, None, 32, None, torch.float16)
    x = torch.zeros(2, 32, dtype=torch.float16)
    w4a16.gpu_gemm(x, pack_w4_for(codes, arch="gfx1151"))


def scan() -> None:
    x, b = torch.zeros(1, 3, 2, 16), torch.zeros(1, 3, 1, 16)
    ssd.gpu_scan(scan_args(x, torch.zeros(1, 3, 2), -torch.ones(2), b, b))


def convolution() -> None:
    conv1d.gpu_conv(conv_args(torch.zeros(1, 3, 16), torch.zeros(16, 4)))


def convolution_step() -> None:
    x, state = torch.zeros(1, 16), torch.zeros(1, 16, 3)
    conv1d.gpu_conv_step(state, x, torch.zeros(16, 4), None, False, torch.empty_like(x))


CALLS: dict[str, tuple[Any, str, str, Callable[[], None]]] = {
    "w4a16": (w4a16, "w4a16.triton_skinny", "launch_w4a16_skinny", product),
    "ssd": (ssd, "ssd.triton_scan", "launch_scan", scan),
    "conv1d": (conv1d, "conv1d.triton_conv", "launch_conv", convolution),
    "conv1d-step": (conv1d, "conv1d.triton_conv", "launch_conv_step", convolution_step),
}


@pytest.mark.parametrize("name", CALLS)
def test_launches_while_the_device_of_the_operands_is_current(name, monkeypatch):
    front, module, launcher, call = CALLS[name]
    seen: list[Any] = []

    @contextmanager
    def on(device):
        seen.append(device)
        yield
        seen.append("left")

    monkeypatch.setattr(front, "launching_on", on)
    at = import_module(f"tilewright.ops.{module}")
    monkeypatch.setattr(at, launcher, lambda *given, **more: seen.append("launched"))
    if front is w4a16:
        w4a16.kernel_of.cache_clear()
    try:
        call()
    finally:
        w4a16.kernel_of.cache_clear()
    assert seen == [torch.device("cpu"), "launched", "left"]
