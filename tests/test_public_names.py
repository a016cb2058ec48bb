"""What users may import, and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tilewright

NAMES = [
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


def test_the_public_names_are_these() -> None:
    assert sorted(tilewright.__all__) == NAMES
    assert set(NAMES) <= set(dir(tilewright))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(tilewright, name)
    assert value is getattr(tilewright, name)
    if name != "__version__":
        assert value.__module__.startswith("tilewright.")
        assert value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        tilewright.lod  # noqa: B018


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


def test_importing_the_package_loads_none_of_the_heavy_ones() -> None:
    loaded = run_python(
        "import tilewright, sys;"
        "print(*(m for m in ('torch', 'triton', 'transformers', 'numba', 'onnxruntime', 'numpy',"
        " 'rich') if m in sys.modules))"
    )
    assert loaded == ""


@pytest.mark.parametrize(
    "module",
    [
        "tilewright.formats.gguf",
        "tilewright.formats.checkpoint",
        "tilewright.layout.cpu",
        "tilewright.ops.mmq.op",
        "tilewright.ops.w4a16.op",
        "tilewright.ops.catalog",
        "tilewright.model.load",
        "tilewright.model.generate",
    ],
)
def test_no_module_starts_cuda_or_loads_transformers(module: str) -> None:
    loaded = run_python(
        f"import {module}, sys, torch;"
        "print(torch.cuda.is_initialized(),"
        " *(m for m in ('transformers', 'triton') if m in sys.modules))"
    )
    assert loaded == "False"
