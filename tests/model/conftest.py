"""Where the real model files are found; tests that need one skip without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def _find(name: str, variable: str) -> Path:
    given = os.environ.get(variable)
    if given:
        path = Path(given)
        if not path.is_file():
            pytest.fail(f"{variable} is {given}, which is no file")
        return path
    try:
        from tilewright.model.demo import demo_model_path
    except ImportError:
        pytest.skip(f"set {variable} to the path of the model")
    found = demo_model_path(name)
    if found is None:
        pytest.skip(f"fetch the model with `tilewright demo-model {name}`, or set {variable}")
    return found


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 and Q8_0."""
    return _find("smollm2", "TILEWRIGHT_DEMO_MODEL")


@pytest.fixture(scope="session")
def gemma_file() -> Path:
    """Gemma 3 270M, Q4_K_M: Q4_K, Q5_0, Q6_K and Q8_0."""
    return _find("gemma", "TILEWRIGHT_GEMMA_MODEL")
