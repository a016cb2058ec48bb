"""Every shim of the installed Triton, compiled for chips that are not here.

`PYTHONPATH=<another triton> python tests/ops/compile_gluon_compat.py` tries another release.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "triton is not installed: pip install 'tilewright[triton]'", allow_module_level=True
    )

SCRIPT = Path(__file__).with_name("compile_gluon_compat.py")
FOUND = {
    "gfx1151": ["v_wmma_f32_16x16x16_f16"],
    "gfx1201": ["v_wmma_f32_16x16x16_f16"],
    "padded": [f"{4 * 64 * 64 + 4 * 4 * 63} bytes"],  # 63 gaps of four floats lie between the rows
    "tma": ["cp.async.bulk.tensor.2d.global", "cp.async.bulk.tensor.2d.shared"],
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", FOUND)
def test_a_shim_compiles_to_what_it_stands_for(compiled, name):
    assert compiled[name] == FOUND[name]
