"""Which source files an op's kernels are made of, so that a change of any of them is noticed.

Nothing is imported to find that out. The files begin with the one that defines the op's `run`:

- in a package (its folder has an `__init__.py`): every Python file of that folder, and of the
  packages within it;
- in a folder of loose files: that file, and of the modules that lie beside it those that it
  imports, at the top or inside a function, and what those import in turn. A package beside it
  counts whole.

What lies elsewhere is named by the op: `SOURCES` of the module that defines its `run` is a tuple of
modules ("my_project.kernels.parts") and packages, which count whole. A spec with `sources` names
all of them, and nothing else counts.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from tilewright.errors import UnsupportedError
from tilewright.ops.contract import OpSpec

__all__ = ["kernel_files", "named_sources"]


def kernel_files(spec: OpSpec) -> tuple[Path, ...]:
    """The source files of an op's kernels, sorted by path.

    Raises:
        UnsupportedError: `run` has no Python source (it was typed in, or is compiled), and the op
            names no sources either; or a named source is no module with Python files.
    """
    named = named_sources(spec)
    path = _file_of(spec.run)
    if path is None and not named:
        raise UnsupportedError(
            f"op {spec.name}: the source of its run is not in a file, so a change of its kernels "
            "would go unnoticed; define run in a file, or name the modules of its kernels in "
            "SOURCES of the module that defines it"
        )
    found = set() if path is None or spec.sources else _around(path)
    for name in named:
        found.update(_of_module(name, spec))
    return tuple(sorted(found))


def named_sources(spec: OpSpec) -> tuple[str, ...]:
    """The modules that the op names as sources of its kernels; usually none."""
    named: Iterable[str] = getattr(spec, "sources", ())
    if not named:
        module = sys.modules.get(getattr(_function(spec.run), "__module__", None) or "")
        named = getattr(module, "SOURCES", ())
    return tuple(named)


def _function(run: Callable[..., Any]) -> Any:
    """What a `run` is defined by, under partials and decorators; the class of a callable object."""
    while True:
        plain = run.func if isinstance(run, functools.partial) else inspect.unwrap(run)
        if plain is run:
            break
        run = plain
    return run if inspect.isroutine(run) or inspect.isclass(run) else type(run)


def _file_of(run: Callable[..., Any]) -> Path | None:
    try:
        path = inspect.getsourcefile(_function(run))
    except TypeError:  # compiled code
        return None
    return Path(path).resolve() if path is not None and Path(path).is_file() else None


def _around(path: Path) -> set[Path]:
    folder = path.parent
    if (folder / "__init__.py").is_file():
        return set(_package(folder))
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        for name in _imports(file):
            waiting += _beside(folder, name)
    return found


def _beside(folder: Path, name: str) -> Iterable[Path]:
    if not name:
        return []
    module, package = folder / f"{name}.py", folder / name
    if (package / "__init__.py").is_file():
        return _package(package)
    return [module] if module.is_file() else []


def _package(folder: Path) -> Iterator[Path]:
    yield from folder.glob("*.py")
    for inner in folder.iterdir():
        if (inner / "__init__.py").is_file():
            yield from _package(inner)


def _imports(path: Path) -> Iterator[str]:
    """First names of all modules that a file imports, those inside functions too."""
    try:
        # Read from the compiled code: Python 3.11's ast.parse fails when two threads call it.
        waiting = [compile(path.read_bytes(), str(path), "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return  # it cannot be imported either; its text counts
    while waiting:
        code = waiting.pop()
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]
        for step in dis.get_instructions(code):
            if step.opname == "IMPORT_NAME":
                yield str(step.argval).partition(".")[0]


def _of_module(name: str, spec: OpSpec) -> set[Path]:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise _no_source(name, spec) from error
    if found is None:
        raise _no_source(name, spec)
    if found.submodule_search_locations is not None:
        files = {p for at in found.submodule_search_locations for p in _package(Path(at))}
    else:
        files = {Path(found.origin or "")} if (found.origin or "").endswith(".py") else set()
    if not files:
        raise _no_source(name, spec)
    return {path.resolve() for path in files}


def _no_source(name: str, spec: OpSpec) -> UnsupportedError:
    return UnsupportedError(
        f"op {spec.name}: its sources name {name!r}, which is no module with Python files; "
        "correct the name, or install the module"
    )
