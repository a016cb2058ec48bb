"""What a function is made of: its own source and that of all functions it uses, as one digest.

Names are followed as they are written, through imports of this package's ops, layouts and formats.
A name that two things share is followed to both: the digest may change without need, and does not
stay when something that is used has changed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

__all__ = ["digest_of"]

_FOLLOWED = ("tilewright.ops.", "tilewright.layout.", "tilewright.formats.")
_MOST = ""  # the whole of a module


def digest_of(functions: Iterable[str], without: str | None = None) -> str:
    """A SHA-256 over the sources of "module:function" and of all that they use.

    Args:
        without: modules whose own name begins so are not followed: kernels of other chips.

    Raises:
        ValueError: there is no such function.
    """
    waiting = [(module, name) for module, _, name in (one.partition(":") for one in functions)]
    for module, name in waiting:
        if name not in _definitions(module):
            raise ValueError(f"{module} defines no {name}")
    seen: dict[str, str] = {}
    while waiting:
        module, name = waiting.pop()
        if without is not None and module.rpartition(".")[2].startswith(without):
            continue
        key = f"{module}:{name}"
        if key in seen:
            continue
        sources, used = _definitions(module).get(name, ((), frozenset()))
        seen[key] = hashlib.sha256("\n".join(sources).encode()).hexdigest()
        waiting += [(module, other) for other in used if other in _definitions(module)]
        imports = _imports(module)
        for other in used:
            waiting += imports.get(other, ())
    return hashlib.sha256(json.dumps(sorted(seen.items())).encode()).hexdigest()


@functools.cache
def _tree(module: str) -> tuple[ast.Module, str]:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ValueError(f"{module} has no source file")
    text = Path(found.origin).read_text(encoding="utf-8")
    return ast.parse(text), text


@functools.cache
def _definitions(module: str) -> Mapping[str, tuple[tuple[str, ...], frozenset[str]]]:
    """By name, what a module defines at its top: sources, and the names in them. Under the empty
    name all of it together.
    """
    tree, text = _tree(module)
    found: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
        _MOST: ((text,), frozenset(_names(tree)))
    }
    for node in _statements(tree):
        source = ast.get_source_segment(text, node) or ""
        decorators = getattr(node, "decorator_list", [])
        source += "".join(ast.get_source_segment(text, one) or "" for one in decorators)
        for name in _defined(node):
            sources, used = found.get(name, ((), frozenset()))
            found[name] = ((*sources, source), used | frozenset(_names(node)))
    return found


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Those at the top, and those under an `if`, `try` or `with` there."""
    for node in tree.body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from (one for one in ast.walk(node) if isinstance(one, ast.stmt))
        else:
            yield node


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name))


def _names(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.Attribute):
            yield one.attr


@functools.cache
def _imports(module: str) -> Mapping[str, list[tuple[str, str]]]:
    """By local name, (module, name) that it is imported from, anywhere in a module; a module that
    is itself imported counts whole.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for node in ast.walk(_tree(module)[0]):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            local = alias.asname or alias.name
            if _is_module(inner):
                found.setdefault(local, []).append((inner, _MOST))
            elif node.module.startswith(_FOLLOWED):
                found.setdefault(local, []).append((node.module, alias.name))
    return found


def _is_module(name: str) -> bool:
    if not name.startswith(_FOLLOWED):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
