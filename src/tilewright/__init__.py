"""Tilewright: quantized-inference kernels whose every tile passed a check before it was timed.

Importing this package loads neither torch, triton, numba nor transformers: a name is
imported from its room when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilewright.errors import (
    FormatError,
    GateError,
    LayoutError,
    MeasureError,
    TileError,
    TilewrightError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from tilewright.formats.checkpoint import read_checkpoint
    from tilewright.formats.gguf import read_gguf
    from tilewright.layout.cpu import PackedBlocks, PackedW4, pack_blocks, pack_w4
    from tilewright.layout.pack import pack_w4_for
    from tilewright.model.generate import generate
    from tilewright.model.load import load
    from tilewright.ops.conv1d.op import causal_conv1d, causal_conv1d_step
    from tilewright.ops.mmq.op import mmq_gemm
    from tilewright.ops.moe.experts import PackedExperts, pack_expert_blocks, pack_expert_w4
    from tilewright.ops.moe.mlp import moe_mlp
    from tilewright.ops.moe.op import moe_gemm
    from tilewright.ops.ssd.norm import gated_rms_norm
    from tilewright.ops.ssd.op import ssd_scan, ssd_step
    from tilewright.ops.w4a16.op import w4a16_gemm
    from tilewright.tiles.tile import Problem, Tile

__version__ = "0.1.0"

__all__ = [
    "FormatError",
    "GateError",
    "LayoutError",
    "MeasureError",
    "PackedBlocks",
    "PackedExperts",
    "PackedW4",
    "Problem",
    "Tile",
    "TileError",
    "TilewrightError",
    "UnsupportedError",
    "__version__",
    "causal_conv1d",
    "causal_conv1d_step",
    "gated_rms_norm",
    "generate",
    "load",
    "mmq_gemm",
    "moe_gemm",
    "moe_mlp",
    "pack_blocks",
    "pack_expert_blocks",
    "pack_expert_w4",
    "pack_w4",
    "pack_w4_for",
    "read_checkpoint",
    "read_gguf",
    "ssd_scan",
    "ssd_step",
    "w4a16_gemm",
]

_HOMES = {
    "PackedBlocks": "tilewright.layout.cpu",
    "PackedExperts": "tilewright.ops.moe.experts",
    "PackedW4": "tilewright.layout.cpu",
    "Problem": "tilewright.tiles.tile",
    "Tile": "tilewright.tiles.tile",
    "causal_conv1d": "tilewright.ops.conv1d.op",
    "causal_conv1d_step": "tilewright.ops.conv1d.op",
    "gated_rms_norm": "tilewright.ops.ssd.norm",
    "generate": "tilewright.model.generate",
    "load": "tilewright.model.load",
    "mmq_gemm": "tilewright.ops.mmq.op",
    "moe_gemm": "tilewright.ops.moe.op",
    "moe_mlp": "tilewright.ops.moe.mlp",
    "pack_blocks": "tilewright.layout.cpu",
    "pack_expert_blocks": "tilewright.ops.moe.experts",
    "pack_expert_w4": "tilewright.ops.moe.experts",
    "pack_w4": "tilewright.layout.cpu",
    "pack_w4_for": "tilewright.layout.pack",
    "read_checkpoint": "tilewright.formats.checkpoint",
    "read_gguf": "tilewright.formats.gguf",
    "ssd_scan": "tilewright.ops.ssd.op",
    "ssd_step": "tilewright.ops.ssd.op",
    "w4a16_gemm": "tilewright.ops.w4a16.op",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
