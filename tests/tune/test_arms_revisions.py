"""Revisions as arms: worktrees that come and go, and interpreters that can run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.errors import UnsupportedError
from tilewright.tune.revisions import checkout, repository_of, unmet

PROJECT = '[project]\nname = "tilewright"\ndependencies = ["numpy>=1.0"]\n'


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t.example", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits: version 1, then version 2, then a change that is not committed."""
    top = tmp_path / "repo"
    package = top / "src" / "tilewright"
    package.mkdir(parents=True)
    git(top, "init", "-q", "-b", "main")
    (top / "pyproject.toml").write_text(PROJECT)
    for version in (1, 2):
        (package / "__init__.py").write_text(f"VERSION = {version}\n")
        git(top, "add", ".")
        git(top, "commit", "-q", "-m", f"version {version}")
        git(top, "tag", f"v{version}")
    (package / "__init__.py").write_text("VERSION = 3\n")
    return top


def version(source: Path) -> str:
    return (source / "tilewright" / "__init__.py").read_text()


def test_each_revision_has_a_worktree_while_it_is_needed(repository: Path) -> None:
    with checkout(repository, ["v1", "main", "."]) as revisions:
        assert [version(r.source) for r in revisions] == [
            "VERSION = 1\n", "VERSION = 2\n", "VERSION = 3\n"
        ]  # fmt: skip
        first, second, working = revisions
        assert first.commit == git(repository, "rev-parse", "v1")
        assert first.title == f"v1 ({first.commit[:10]})"
        assert working.title == ". (working tree)"
        assert working.source == repository / "src"
        assert {r.python for r in revisions} == {sys.executable}
        assert len(git(repository, "worktree", "list").splitlines()) == 3
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not first.source.exists()
    assert version(repository / "src") == "VERSION = 3\n"


def test_a_hash_is_its_own_title(repository: Path) -> None:
    commit = git(repository, "rev-parse", "v1")
    with checkout(repository, [commit[:8]]) as (revision,):
        assert revision.title == commit[:10]


def test_worktrees_go_when_the_work_fails(repository: Path) -> None:
    with pytest.raises(RuntimeError), checkout(repository, ["v1"]):
        raise RuntimeError
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_an_unknown_revision_is_an_error_and_leaves_no_worktree(repository: Path) -> None:
    with (
        pytest.raises(UnsupportedError, match="revision is 'v9'; git finds no such commit"),
        checkout(repository, ["v1", "v9"]),
    ):
        pass
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_revision_without_the_package_is_an_error(repository: Path) -> None:
    git(repository, "rm", "-rq", "--cached", "src")
    git(repository, "commit", "-q", "-m", "no package")
    with (
        pytest.raises(UnsupportedError, match="revision HEAD holds no src/tilewright"),
        checkout(repository, ["HEAD"]),
    ):
        pass


@pytest.mark.parametrize(
    ("requirement", "met"),
    [
        ("numpy", True),
        ("numpy>=1.0", True),
        ("NumPy>=1.0,<99", True),
        ("numpy>=99", False),
        ("numpy<1", False),
        ("numpy!=0.1", True),
        ("numpy[extra]>=1; python_version >= '3'", True),
        ("numpy~=1.0", False),  # a form this package does not use, so it is not understood
        ("no-such-thing", False),
        ("numpy @ https://example.org/numpy.whl", False),
    ],
)
def test_requirements(tmp_path: Path, requirement: str, met: bool) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(f'[project]\nname = "x"\ndependencies = ["{requirement}"]\n')
    assert unmet(path) == ([] if met else [requirement])


def test_the_models_extra_counts(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(
        '[project]\nname = "x"\n[project.optional-dependencies]\n'
        'models = ["no-such-thing"]\ndev = ["other-thing"]\n'
    )
    assert unmet(path) == ["no-such-thing"]


def test_a_project_without_its_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="pyproject.toml"):
        unmet(tmp_path / "pyproject.toml")


def test_the_repository_is_found_from_within(repository: Path) -> None:
    assert repository_of(repository / "src" / "tilewright") == repository


def test_no_repository_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="is in no git repository; use --repo"):
        repository_of(tmp_path)


def test_another_repository_is_an_error(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    with pytest.raises(UnsupportedError, match="holds no src/tilewright"):
        repository_of(tmp_path)
