"""Compiled kernels side by side: one column a tile or a revision, one line a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.isa.figures import LABEL
from tilewright.isa.survey import Entry
from tilewright.report.table import Column, Table

__all__ = ["isa_json", "isa_tables"]

_COUNTS = (
    ("total", "instructions"),
    ("valu", "VALU"),
    ("packed", "  packed maths"),
    ("and_or", "  and_or, LOP3"),
    ("shift", "  shifts"),
    ("permute", "  permutes"),
    ("convert", "  conversions"),
    ("scalar", "scalar, uniform"),
    ("matrix", "matrix"),
    ("lds_read", "LDS reads"),
    ("lds_write", "LDS writes"),
    ("shuffle", "shuffles"),
    ("global_load", "global loads"),
    ("global_store", "global stores"),
    ("barrier", "barriers"),
    ("wait", "waits"),
    ("control", "branches, hints"),
)
_DERIVED = (
    ("k_step", "columns of K an iteration"),
    ("valu_per_pair", "VALU a weight pair"),
    ("issued_per_pair", "instructions a weight pair"),
)
_RESOURCES = (
    ("vgprs", "VGPRs"),
    ("agprs", "AGPRs"),
    ("sgprs", "SGPRs"),
    ("spills", "spills"),
    ("scratch_bytes", "scratch bytes a lane"),
    ("lds_bytes", "LDS bytes a program"),
    ("programs", "programs a CU or SM"),
    ("waves", "waves a SIMD"),
)
_IF_ANY = ("shuffle", "global_store", "agprs")
"""Lines that are left out where no kernel has any."""


def isa_tables(title: str, entries: Sequence[Entry]) -> list[Table]:
    """One table of every arch where an arch has one entry; else one table an arch.

    Args:
        title: the product; what every table is about.
    """
    archs = list(dict.fromkeys(entry.arch for entry in entries))
    if len(archs) == len(entries):
        return [_table(f"{title}: {LABEL}", entries, [e.arch for e in entries])]
    tables = []
    for arch in archs:
        here = [entry for entry in entries if entry.arch == arch]
        names = [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(here))]
        tables.append(_table(f"{title}, {arch}: {LABEL}", here, names))
    return tables


def isa_json(title: str, entries: Sequence[Entry], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance, the label, and every entry with all its figures."""
    return {
        "provenance": dict(provenance),
        "label": LABEL,
        "product": title,
        "results": [entry.as_dict() for entry in entries],
    }


def _table(title: str, entries: Sequence[Entry], names: Sequence[str]) -> Table:
    columns = [Column("figure", "inner loop, an iteration a wave")]
    found: dict[str, Mapping[str, Any]] = {}
    for name, entry in zip(names, entries, strict=True):
        for kernel in entry.kernels:
            short = kernel["kernel"].strip("_").removesuffix("_kernel")
            header = name if len(entry.kernels) == 1 else f"{name} {short}"
            key = f"{name} {len(found)}"
            columns.append(Column(key, header, right=True))
            found[key] = kernel
    rows = []
    for part, lines in (("counts", _COUNTS), ("", _DERIVED), ("resources", _RESOURCES)):
        for figure, label in lines:
            values = {
                key: (kernel[part] if part else kernel)[figure] for key, kernel in found.items()
            }
            wanted = any(values.values()) if figure in _IF_ANY else any(
                value is not None for value in values.values()
            )  # fmt: skip
            if wanted:
                rows.append({"figure": label, **{k: _text(v) for k, v in values.items()}})
    return Table(title, columns, rows if found else [], notes=_notes(entries, names))


def _text(value: int | float | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _notes(entries: Sequence[Entry], names: Sequence[str]) -> list[str]:
    notes = []
    for name, entry in zip(names, entries, strict=True):
        revision = f"revision {entry.revision}, " if entry.revision else ""
        notes.append(f"{name}: {revision}{entry.tile}")
        if entry.error:
            notes.append(f"  FAILED {entry.error}")
        for kernel in entry.kernels:
            where = f"loop {kernel['loop']}" if kernel["loop"] else "no loop: the whole kernel"
            matrix = f", {kernel['matrix']}" if kernel["matrix"] else ""
            notes.append(f"  {kernel['kernel']}: {where}{matrix}, {kernel['compiler']}")
            found = kernel["resources"]
            others = [line for line in found["warnings"] if line not in found["failures"]]
            notes += [f"  warning: {line}" for line in others]
        notes += [f"  FAILED {line}" for line in entry.failures]
    return notes
