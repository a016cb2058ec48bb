"""Modules that stand beside the tests, or in folders that are no packages, by their files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["module_at", "module_once"]


def module_at(name: str, path: Path) -> ModuleType:
    """The file as a module of this name, run anew; imports of the name find it from now on."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def module_once(name: str, path: Path) -> ModuleType:
    """The module of this name if there is one, else `module_at`."""
    return sys.modules[name] if name in sys.modules else module_at(name, path)
