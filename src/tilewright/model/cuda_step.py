"""What decoders that replay a token as one CUDA graph share: recording it, what it reads, and its
logits on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["on_host", "record", "step_memory"]

_WARM_UPS = 2
_CAPTURING = threading.Lock()  # torch captures one graph of a process at a time


def step_memory(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The id of a step and the position of its token, int64 [2]: on the host, pinned for a GPU, and
    on the device."""
    host = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host, torch.zeros(2, dtype=torch.int64, device=device)


def record(
    step: Callable[[], torch.Tensor],
    device: torch.device,
    restore: Callable[[], None] = lambda: None,
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `step`, and what its replays write. One thread at a time records.

    Args:
        step: launches on the current stream; run twice before, on another one.
        device: the GPU.
        restore: undoes what the runs before have changed.

    Raises:
        RuntimeError: something in the step cannot be captured, such as one that waits for the GPU.
    """
    with _CAPTURING:
        return _record(step, device, restore)


def _record(
    step: Callable[[], torch.Tensor], device: torch.device, restore: Callable[[], None]
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    here = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            step()
    here.wait_stream(side)
    restore()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # torch leaves its own stream the current one where a capture cannot be ended.
    with torch.cuda.stream(here), torch.cuda.graph(graph):
        captured = step()
    return graph, captured


def on_host(logits: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; whoever has it knows that the step is done."""
    if logits.device.type != "cuda":
        return logits.clone()
    host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
    host.copy_(logits, non_blocking=True)
    torch.cuda.current_stream(logits.device).synchronize()
    return host
