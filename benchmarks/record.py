"""Result files: what every one of them says about its origin, and how it is named."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from tilewright.report.provenance import provenance

__all__ = ["RESULTS", "model_record", "origin", "slug", "write"]

RESULTS = Path(__file__).parent / "results"
_FLAGS = re.compile(r"^(sse4|avx|fma|f16c|amx|neon|asimd|sve|i8mm)")


def origin(threads: int) -> dict[str, Any]:
    """Command, versions, device with its vector extensions, date, load."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {**provenance(words, threads=threads), "cpu_flags": _cpu_flags()}


def _cpu_flags() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    words = next((ln.split(":", 1)[1] for ln in lines if ln.startswith(("flags", "Features"))), "")
    return sorted(word for word in words.split() if _FLAGS.match(word))


def model_record(path: Path) -> dict[str, Any]:
    """Name, size and SHA-256 of a model file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}


def slug(path: Path) -> str:
    """The model's name for a file name: "SmolLM2-135M-Instruct.Q4_1.gguf" ->
    "smollm2-135m-instruct-q4_1"."""
    return re.sub(r"[^a-z0-9_]+", "-", path.stem.lower()).strip("-")


def write(result: dict[str, Any], name: str, folder: Path) -> Path:
    """Write `<date>-<name>.json`; the date is that of the result's origin."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['origin']['date'][:10]}-{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
