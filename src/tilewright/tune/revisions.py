"""Git revisions of the package as arms: a worktree each, and an interpreter that can run it.

A revision is measured from a worktree of its own, by a process whose PYTHONPATH begins there. It
runs under this interpreter if what it depends on is installed here; otherwise in a virtual
environment that is made for what it depends on, once (`tilewright.tune.environments`).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tilewright.errors import MeasureError, UnsupportedError
from tilewright.tune.environments import environment_folder, interpreter_with

__all__ = ["Revision", "checkout", "repository_of", "requirements", "unmet"]

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;.*)?")
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*([\w.]+)")


@dataclass(frozen=True)
class Revision:
    """A revision that is ready to run.

    Attributes:
        text: as it was asked for, "main" or ".".
        commit: its hash; "" for the working tree.
        source: folder that holds its `tilewright` package.
        python: the interpreter that runs it.
    """

    text: str
    commit: str
    source: Path
    python: str

    @property
    def title(self) -> str:
        short = self.commit[:10]
        if not short:
            return f"{self.text} (working tree)"
        return short if self.commit.startswith(self.text) else f"{self.text} ({short})"


def repository_of(folder: Path) -> Path:
    """The top of the git repository around `folder`, which must hold src/tilewright.

    Raises:
        UnsupportedError: it is in no such repository.
    """
    try:
        top = Path(_git(folder, "rev-parse", "--show-toplevel"))
    except MeasureError as error:
        raise UnsupportedError(f"{folder} is in no git repository; use --repo ({error})") from error
    if not (top / "src" / "tilewright").is_dir():
        raise UnsupportedError(
            f"{top} holds no src/tilewright; name the package's repository with --repo"
        )
    return top


@contextmanager
def checkout(
    repository: Path,
    revisions: Sequence[str],
    pythons: Sequence[str] = (),
    *,
    on_line: Callable[[str], Any] | None = None,
) -> Iterator[list[Revision]]:
    """Worktrees of `revisions` for as long as the block runs.

    Args:
        repository: top of the repository.
        revisions: anything git resolves to a commit; "." is the working tree as it stands.
        pythons: an interpreter each; none takes this one where its packages satisfy the revision,
            and otherwise makes an environment.
        on_line: called with what is said while an environment is made, pip's lines among it.

    Raises:
        UnsupportedError: no such revision; it lacks src/tilewright; this interpreter cannot run it,
            and no environment that can could be made.
    """
    with tempfile.TemporaryDirectory(prefix="tilewright-rev-") as folder:
        made: list[Path] = []
        try:
            found = []
            for index, text in enumerate(revisions):
                python = pythons[index] if pythons else None
                if text == ".":
                    top, commit = repository, ""
                else:
                    commit = _resolve(repository, text)
                    top = Path(folder) / f"{index}-{commit[:12]}"
                    _git(repository, "worktree", "add", "--detach", str(top), commit)
                    made.append(top)
                found.append(_ready(text, commit, top, python, on_line))
            yield found
        finally:
            for top in made:
                _git(repository, "worktree", "remove", "--force", str(top))


def _ready(
    text: str, commit: str, top: Path, python: str | None, on_line: Callable[[str], Any] | None
) -> Revision:
    if not (top / "src" / "tilewright").is_dir():
        raise UnsupportedError(f"revision {text} holds no src/tilewright")
    if python is None:
        missing = unmet(top / "pyproject.toml")
        python = _environment(text, top, missing, on_line) if missing else sys.executable
    return Revision(text, commit, top / "src", python)


def _environment(
    text: str, top: Path, missing: Sequence[str], on_line: Callable[[str], Any] | None
) -> str:
    wanted = requirements(top / "pyproject.toml")
    lacks = f"revision {text} needs {', '.join(missing)}, which this interpreter does not satisfy"
    folder = environment_folder(wanted)
    if on_line is not None and not folder.is_dir():
        on_line(f"{lacks}; making a virtual environment for it in {folder}")
    try:
        return interpreter_with(wanted, on_line=on_line)
    except (UnsupportedError, OSError) as error:
        raise UnsupportedError(
            f"{lacks}, and no virtual environment could be made for it: {error}\n"
            "install what it needs into one of your own and give its interpreter with --python, "
            "once for each revision"
        ) from error


def _resolve(repository: Path, text: str) -> str:
    try:
        return _git(repository, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}")
    except MeasureError as error:
        raise UnsupportedError(
            f"revision is {text!r}; git finds no such commit in {repository.name}"
        ) from error


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
    except OSError as error:
        raise MeasureError(f"git does not start: {error}") from error
    if done.returncode != 0:
        raise MeasureError(f"git {' '.join(words[:2])} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def requirements(pyproject: Path) -> list[str]:
    """What a project depends on to run a model: its dependencies and those of the extra `models`.

    Raises:
        UnsupportedError: the file is missing or damaged.
    """
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        wanted = [*project.get("dependencies", ())]
        wanted += project.get("optional-dependencies", {}).get("models", ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedError(f"{pyproject.parent.name}/pyproject.toml: {error}") from error
    if not all(isinstance(text, str) for text in wanted):
        raise UnsupportedError(f"{pyproject.parent.name}/pyproject.toml: a dependency is no text")
    return wanted


def unmet(pyproject: Path) -> list[str]:
    """The requirements of a project that the packages of this interpreter do not satisfy.

    Args:
        pyproject: its pyproject.toml; see `requirements`.

    Raises:
        UnsupportedError: the file is missing or damaged.
    """
    return [text for text in requirements(pyproject) if not _satisfied(text)]


def _satisfied(text: str) -> bool:
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        return False
    try:
        have = _release(metadata.version(match.group(1)))
    except metadata.PackageNotFoundError:
        return False
    clauses = [_CLAUSE.fullmatch(part.strip()) for part in match.group(2).split(",") if part]
    return all(c is not None and _holds(have, c.group(1), _release(c.group(2))) for c in clauses)


def _holds(have: tuple[int, ...], sign: str, want: tuple[int, ...]) -> bool:
    size = max(len(have), len(want))
    a, b = (part + (0,) * (size - len(part)) for part in (have, want))
    return {
        ">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, ">": a > b, "<": a < b,
    }[sign]  # fmt: skip


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version's release: "2.13.0+cpu" -> (2, 13, 0)."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(n) for n in numbers.group().split(".")) if numbers else (0,)
