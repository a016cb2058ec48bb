"""What every test runs under: few threads, and NaN wherever nothing was written."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "2")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads that wait would spin on the cores that the other process computes on.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Tables that a developer tuned on this machine must not decide what the tests run.
os.environ["TILEWRIGHT_TILES"] = tempfile.mkdtemp(prefix="tilewright-no-tiles-")

import pytest  # noqa: E402
import torch  # noqa: E402

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# torch keeps a set of its constructors, filled when a device context first needs it; it must hold
# torch.empty itself, not the function that replaces it below.
with torch.device("meta"):
    torch.empty(0)


def _nan_filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.dtype in _FLOATS and tensor.device.type != "meta":
            tensor.detach().fill_(float("nan"))
        return tensor

    return filled


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaves part of its output unwritten returns NaN there, not old numbers."""
    monkeypatch.setattr(torch, "empty", _nan_filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _nan_filled(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _nan_filled(torch.Tensor.new_empty))
