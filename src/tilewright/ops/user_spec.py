"""Ops that are not in the catalog: from a file, an importable module, or an installed package.

::

    path/to/kernel.py:SPEC     the OpSpec named SPEC in a file
    package.module:SPEC        in a module that can be imported
    softmax                    the entry point `softmax` of the group `tilewright.ops`

A package offers its ops in its pyproject.toml::

    [project.entry-points."tilewright.ops"]
    softmax = "my_kernels.softmax:SPEC"

Loading runs the code: load what you trust as you would any Python. A spec is audited before
anything else may use it (`tilewright.ops.user_spec_audit`), so that one that cannot tell right from
wrong never gives a verdict.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewright.errors import UnsupportedError
from tilewright.ops.contract import OpSpec
from tilewright.ops.user_spec_audit import audit
from tilewright.tiles.tile import Problem, Tile

__all__ = ["GROUP", "load_user_spec", "offered_specs", "tuned_tile"]

GROUP = "tilewright.ops"
"""The entry-point group in which packages offer their ops."""

_AUDITED: dict[int, OpSpec] = {}
_MODULES: dict[tuple[Path, str], ModuleType] = {}


def load_user_spec(text: str, *, audited: bool = True) -> OpSpec:
    """The op that `text` names, audited once a process.

    A file is run again only when its text has changed. Its folder joins the end of `sys.path`, so
    that it may import its neighbours.

    Args:
        text: as in the module docstring.
        audited: False skips the audit, for a process whose parent has made it.

    Raises:
        UnsupportedError: there is no such file, module, name or entry point; the code raises; the
            name is no OpSpec; or the spec is incomplete.
        GateError: the spec lies: the message says how.
    """
    spec = _find(text)
    if not isinstance(spec, OpSpec):
        raise UnsupportedError(
            f"{text}: it is a {type(spec).__name__}; name a tilewright.ops.contract.OpSpec"
        )
    if audited and id(spec) not in _AUDITED:
        audit(spec, text)
        _AUDITED[id(spec)] = spec
    return spec


def offered_specs() -> dict[str, str]:
    """The ops that installed packages offer: name -> "module:NAME". Nothing is imported."""
    return {entry.name: entry.value for entry in metadata.entry_points(group=GROUP)}


def tuned_tile(spec: OpSpec, problem: Problem) -> Tile:
    """The tile of a user's op: its table's if that is in force, else the default of its space.

    Args:
        spec: an op with a tile space.
        problem: as `Case.problem` gives it.

    Raises:
        UnsupportedError: the op has no tile space.
        TileError: the table is damaged or one of its rows breaks a rule of the space.
    """
    from tilewright.ops.choose import running_of
    from tilewright.tiles.table import lookup

    if spec.space is None:
        raise UnsupportedError(f"op {spec.name!r} has no tile space; give its spec one")
    return lookup(problem, spec.space(), running=functools.partial(running_of, spec)).tile


def _find(text: str) -> Any:
    where, colon, name = text.rpartition(":")
    if not colon:
        if text.endswith(".py"):
            raise UnsupportedError(f"{text}: name the OpSpec in that file: {text}:SPEC")
        return _offered(text)
    if where.endswith(".py") or "/" in where or "\\" in where:
        module = _run_file(Path(where), text)
    else:
        module = _import(where, text)
    return _attribute(module, name, text)


def _offered(name: str) -> Any:
    entries = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    if name not in entries:
        from tilewright.ops.catalog import SPECS

        known = ", ".join(sorted(entries)) or "none"
        raise UnsupportedError(
            f"op is {name!r}; the catalog has {', '.join(SPECS)}, installed packages offer "
            f"{known}. An op of your own is path/to/file.py:NAME or package.module:NAME"
        )
    try:
        return entries[name].load()
    except Exception as error:
        raise _broken(f"{name} ({entries[name].value})", error) from error


def _run_file(path: Path, text: str) -> ModuleType:
    path = path.expanduser()
    if not path.is_file():
        raise UnsupportedError(f"{text}: there is no file {path}")
    path = path.resolve()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if (path, digest) in _MODULES:
        return _MODULES[path, digest]
    # A name of its own, so that a file called numpy.py stands in nobody's way; in sys.modules,
    # where inspect, pickle and compilers look for the source.
    name = f"tilewright_spec_{path.stem}_{digest[:12]}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise UnsupportedError(f"{text}: {path.name} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _broken(text, error) from error
    _MODULES[path, digest] = module
    return module


def _import(name: str, text: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _broken(text, error) from error


def _broken(text: str, error: Exception) -> UnsupportedError:
    return UnsupportedError(f"{text}: reading it raised {type(error).__name__}: {error}")


def _attribute(module: ModuleType, name: str, text: str) -> Any:
    if not hasattr(module, name):
        specs = sorted(key for key, value in vars(module).items() if isinstance(value, OpSpec))
        raise UnsupportedError(
            f"{text}: there is no {name!r} in it; its OpSpecs are {', '.join(specs) or 'none'}"
        )
    return getattr(module, name)
