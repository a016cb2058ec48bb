"""The rooms stand in one order, and a room imports only rooms above it (see CONTRIBUTING)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ORDER = [
    "errors",
    "device",
    "formats",
    "layout",
    "tiles",
    "ops",
    "measure",
    "tune",
    "isa",
    "model",
    "plugins",
    "report",
    "cli",
]
PACKAGE = Path(__file__).parents[1] / "src" / "tilewright"
FRONT = {"__init__", "__main__"}  # the package's own face may import every room
FACTS = {"__version__"}  # what a room may take from the face


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything a module of `package` imports, lazy imports included.

    A name of `import_module("...")` with a constant argument counts as well.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            stem = ".".join([*base, node.module] if node.module else base)
            if node.level == 0:
                stem = node.module or ""
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            first = node.args[0]
            if name == "import_module" and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def violations(relative: Path, source: str) -> list[str]:
    """What the file at `relative` (to the package) imports from a room below its own."""
    room = relative.parts[0].removesuffix(".py")
    if room in FRONT:
        return []
    if room not in ORDER:
        return [f"{relative}: {room!r} is no room; add it to ORDER at its place"]
    package = ".".join(["tilewright", *relative.parts[:-1]])
    found = []
    for line, name in imports(source, package):
        parts = name.split(".")
        if parts[0] != "tilewright":
            continue
        target = parts[1] if len(parts) > 1 else ""
        if target in FACTS:
            continue
        if target not in ORDER:
            found.append(f"{relative}:{line}: imports {name}; import from the name's own room")
        elif ORDER.index(target) > ORDER.index(room):
            found.append(f"{relative}:{line}: {room} imports {target}, which is below it")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_above_it(path: Path) -> None:
    assert violations(path.relative_to(PACKAGE), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("formats/x.py", "import tilewright.ops.check", "formats imports ops"),
        ("formats/x.py", "from tilewright.ops import check", "formats imports ops"),
        ("formats/x.py", "from tilewright import ops", "formats imports ops"),
        ("formats/x.py", "def f():\n    from tilewright.model.load import load", "imports model"),
        ("formats/x.py", "from ..ops import check", "formats imports ops"),
        ("ops/mmq/x.py", "from ...tune.gate import gate", "ops imports tune"),
        ("ops/x.py", "import_module('tilewright.cli.run')", "ops imports cli"),
        ("ops/x.py", "from tilewright import load", "own room"),
        ("ops/x.py", "import tilewright", "own room"),
        ("extras/x.py", "", "'extras' is no room"),
        ("errors.py", "import tilewright.device", "errors imports device"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str, message: str) -> None:
    (found,) = violations(Path(file), source)
    assert message in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cli/x.py", "from tilewright.errors import TilewrightError"),
        ("cli/x.py", "from tilewright import __version__"),
        ("ops/mmq/x.py", "from ..check import check_output"),
        ("ops/mmq/x.py", "from .reference import mmq_reference"),
        ("ops/x.py", "import torch"),
        ("__init__.py", "from tilewright.cli.main import main"),
    ],
)
def test_a_right_import_passes(file: str, source: str) -> None:
    assert violations(Path(file), source) == []
