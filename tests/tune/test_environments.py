"""Environments for revisions that this interpreter cannot run, made without a network."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tilewright.errors import UnsupportedError
from tilewright.tune import environments
from tilewright.tune.environments import environment_folder, interpreter_with
from tilewright.tune.revisions import checkout

NAME = "tilewright-part-of-a-test"
MODULE = "tilewright_part_of_a_test"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that finds nothing but one wheel of ours."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel(tmp_path / "wheels").parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "cache"


def wheel(folder: Path) -> Path:
    folder.mkdir()
    info = f"{MODULE}-2.0.dist-info"
    files = {
        f"{MODULE}.py": "ANSWER = 42\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 2.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"{MODULE}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    path = folder / f"{MODULE}-2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def answer(python: str) -> str:
    code = f"import {MODULE}; print({MODULE}.ANSWER)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


def revision_that_needs(requirement: str, folder: Path) -> Path:
    """A repository of one commit."""
    (folder / "src" / "tilewright").mkdir(parents=True)
    (folder / "src" / "tilewright" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "tilewright"\ndependencies = ["{requirement}"]\n'
    )
    name = ["-c", "user.name=t", "-c", "user.email=t@t.example"]
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder


def test_a_revision_gets_an_environment_with_what_it_needs_and_it_is_kept(
    tmp_path: Path, cache: Path
) -> None:
    repository = revision_that_needs(f"{NAME}>=1", tmp_path / "repo")
    lines: list[str] = []
    with checkout(repository, ["HEAD"], on_line=lines.append) as (revision,):
        assert Path(revision.python).is_relative_to(cache / "venvs")
        assert answer(revision.python) == "42\n"
    assert f"needs {NAME}>=1, which this interpreter does not satisfy; making" in lines[0]
    assert str(environment_folder([f"{NAME}>=1"])) in lines[0]
    assert any("Successfully installed" in line for line in lines)
    lines.clear()
    with checkout(repository, ["HEAD", "."], on_line=lines.append) as again:
        assert [r.python for r in again] == [revision.python] * 2
    assert lines == []
    assert [p.name for p in (cache / "venvs").iterdir()] == [Path(revision.python).parents[1].name]


def test_what_pip_says_is_in_the_error_and_nothing_is_left(tmp_path: Path, cache: Path) -> None:
    repository = revision_that_needs(f"{NAME}>=3", tmp_path / "repo")
    with pytest.raises(UnsupportedError) as raised, checkout(repository, ["HEAD"]):
        pass
    text = str(raised.value)
    assert f"revision HEAD needs {NAME}>=3, which this interpreter does not satisfy" in text
    assert "pip ended with code 1" in text
    assert f"No matching distribution found for {NAME}>=3" in text
    assert "give its interpreter with --python" in text
    assert list((cache / "venvs").iterdir()) == []


def test_a_requirement_is_never_an_option_of_pip(tmp_path: Path, cache: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(UnsupportedError, match=r"pip ended with code 1:(?s:.*)Invalid requirement"):
        interpreter_with([f"--target={target}"])
    assert not target.exists()


def test_an_interpreter_that_is_named_is_used_and_none_is_made(tmp_path: Path, cache: Path) -> None:
    repository = revision_that_needs(f"{NAME}>=1", tmp_path / "repo")
    with checkout(repository, ["HEAD"], ["/opt/a/python"]) as (revision,):
        assert revision.python == "/opt/a/python"
    assert not cache.exists()


def test_an_environment_is_named_after_its_packages_and_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = environment_folder(["a>=1", "b"])
    assert environment_folder(["b", "a>=1"]) == one
    assert environment_folder(["a>=2", "b"]) != one
    monkeypatch.setattr(sys, "base_prefix", "/opt/other")
    assert environment_folder(["a>=1", "b"]) != one


def test_an_interrupted_making_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        environments, "_make", lambda folder, *_: (folder.mkdir(), interrupt("")) and None
    )
    with pytest.raises(KeyboardInterrupt):
        interpreter_with([NAME])
    assert list((cache / "venvs").iterdir()) == []


def test_another_process_that_was_faster_is_not_disturbed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = environment_folder([NAME])

    def make(aside: Path, *_: object) -> None:
        for made in (aside, folder):
            made.mkdir(parents=True)
        (folder / "theirs").touch()

    monkeypatch.setattr(environments, "_make", make)
    assert Path(interpreter_with([NAME])).is_relative_to(folder)
    assert (folder / "theirs").exists()
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
