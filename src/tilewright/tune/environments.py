"""Virtual environments for revisions that this interpreter cannot run.

One environment serves all revisions that ask for the same packages: its folder in the user's cache
is named after them and after this interpreter. It holds the packages only, not the revision, whose
worktree comes first on its process's path. A half-made environment never gets that name.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilewright.errors import UnsupportedError

__all__ = ["environment_folder", "interpreter_with"]

_TAIL = 8  # lines of pip's that an error repeats


def environment_folder(requirements: Sequence[str]) -> Path:
    """The folder of the environment that holds these packages; it need not exist.

    It lies in `$TILEWRIGHT_CACHE_DIR`, or else in the user's cache folder.
    """
    root = os.environ.get("TILEWRIGHT_CACHE_DIR")
    if not root:
        from platformdirs import user_cache_dir

        root = user_cache_dir("tilewright")
    # The interpreter's own place counts: an environment ends when what it stands on does.
    base = (sys.base_prefix, platform.python_version(), platform.machine())
    key = hashlib.sha256("\n".join([*base, *sorted(requirements)]).encode()).hexdigest()[:24]
    return Path(root) / "venvs" / key


def interpreter_with(
    requirements: Sequence[str], *, on_line: Callable[[str], Any] | None = None
) -> str:
    """An interpreter that has these packages; its environment is made if there is none yet.

    Args:
        requirements: as pip takes them. pip's own configuration decides where they come from.
        on_line: called with each line that pip prints.

    Returns:
        Path of the interpreter.

    Raises:
        UnsupportedError: the environment cannot be made: the message ends in pip's last lines.
        OSError: the cache folder cannot be written.
    """
    folder = environment_folder(requirements)
    if not folder.is_dir():
        aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
        aside.parent.mkdir(parents=True, exist_ok=True)
        try:
            _make(aside, requirements, on_line)
            _move(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return str(_python(folder))


def _make(folder: Path, requirements: Sequence[str], on_line: Callable[[str], Any] | None) -> None:
    _run("venv", [sys.executable, "-m", "venv", str(folder)], on_line)
    pip = [str(_python(folder)), "-m", "pip", "--disable-pip-version-check", "install"]
    # "--" so that a requirement of an unknown revision is never taken for an option of pip.
    _run("pip", [*pip, "--no-input", "--progress-bar", "off", "--", *requirements], on_line)


def _run(what: str, words: Sequence[str], on_line: Callable[[str], Any] | None) -> None:
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    last: deque[str] = deque(maxlen=_TAIL)
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env=variables,
        )  # fmt: skip
    except OSError as error:
        raise UnsupportedError(f"{what} does not start: {error}") from error
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last.append(line.rstrip())
                if on_line is not None:
                    on_line(line.rstrip())
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise UnsupportedError(
            f"{what} ended with code {process.returncode}:\n" + "\n".join(f"  {n}" for n in last)
        )


def _move(aside: Path, folder: Path) -> None:
    """Give a finished environment its name; another process may have been faster."""
    try:
        os.rename(aside, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
