"""The portable kernels' machine code for AMD chips, executed on the CPU and held to the oracle."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from ops.w4a16.amd_jobs import ARCHS, run_amd

# Looked for, not imported: this process is the interpreter's.
if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

_GEMM: dict[str, Any] = {
    "algorithm": "triton", "block_m": 32, "block_n": 32, "block_k": 32, "num_warps": 2,
    "num_stages": 2, "group_m": 8, "dequant": "asm", "order": "xw",
}  # fmt: skip
_SKINNY: dict[str, Any] = {
    "algorithm": "skinny", "block_m": 2, "block_n": 32, "block_k": 32, "split_k": 4,
    "num_warps": 2, "num_stages": 2,
}  # fmt: skip


def case(m: int, dtype: str, *flags: str) -> list[Any]:
    return ["w4a16", "uint4", dtype, m, 33, 160, 32, "float", flags]


RUNS: dict[str, dict[str, Any]] = {
    "asm": {"tile": _GEMM, "case": case(17, "float16", "bias")},
    "asm, weights left": {
        "tile": {**_GEMM, "order": "wx", "num_stages": 1},
        "case": case(17, "float16"),
    },
    "bfloat16": {"tile": {**_GEMM, "dequant": "packed"}, "case": case(17, "bfloat16", "bias")},
    "scalar": {"tile": {**_GEMM, "dequant": "scalar"}, "case": case(17, "float16")},
    "few rows": {"tile": _SKINNY, "case": case(2, "float16", "bias", "strided")},
    "few rows, bfloat16": {"tile": _SKINNY, "case": case(2, "bfloat16")},
    "shares": {"tile": {**_SKINNY, "block_m": 16}, "case": case(5, "float16", "bias")},
    "shares, bfloat16": {"tile": {**_SKINNY, "block_m": 16}, "case": case(5, "bfloat16")},
}
QUICK = ("gfx1151", "gfx90a")


def run(archs: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return run_amd(
        {
            f"{arch} {name}": {"kind": "executed", "arch": arch, **job}
            for arch in archs
            for name, job in RUNS.items()
        }
    )


@pytest.fixture(scope="module")
def executed() -> dict[str, dict[str, Any]]:
    return run(QUICK)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("arch", QUICK)
def test_what_the_chip_would_compute_is_right(executed, arch, name):
    found = executed[f"{arch} {name}"]
    assert found["passed"], found


@pytest.mark.slow
def test_so_it_is_on_every_family():
    others = tuple(arch for arch in ARCHS if arch not in QUICK)
    found = run(others)
    assert {name: f for name, f in found.items() if not f.get("passed")} == {}
