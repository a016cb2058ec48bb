"""Tables of a page that need no chart: tile tables, blocks, machine, agreement, verification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.report.compare import time_text
from tilewright.report.page.blocks import Block, col, facts, table, text
from tilewright.report.page.words import (
    agreement_words,
    percent,
    problem_verdict,
    rejected_words,
    tile_text,
    verification_words,
)

__all__ = [
    "agreement_blocks",
    "agreement_cells",
    "block_table",
    "machine_table",
    "provenance_facts",
    "tile_table",
    "verification_blocks",
]

Row = Mapping[str, Any]


def tile_table(tiles: Row, problems: Sequence[Row]) -> list[Block]:
    """A tile table with its provenance.

    Args:
        tiles: {"header", "rows"} as the file holds them.
        problems: those of the tuning that wrote it: they say the verdict that goes with a time.
    """
    rows = tiles.get("rows") or []
    if not rows:
        return []
    header = tiles.get("header") or {}
    verdicts = {_key(p["row"]): _verdict(p) for p in problems if p.get("row")}
    known = [
        ("architecture", header.get("arch")),
        ("valid for", header.get("valid_for")),
        ("cores or units", header.get("units")),
        ("device", header.get("device")),
        ("compiler", header.get("compiler")),
        ("kernel hash", header.get("kernel_hash")),
        ("op versions", header.get("op_versions")),
        ("written", header.get("date")),
        ("source", header.get("source")),
        ("notes", header.get("notes")),
    ]
    return [
        facts([(name, value) for name, value in known if value]),
        table(
            "Rows of the table. Median and spread (interquartile range) of a launch; the verdict "
            "is on the best new tile against the one that was in use; the oracle error is the "
            "largest test statistic over its limit, so a verified tile is below 1.",
            [
                col("product", "label"),
                col("tile", "code"),
                col("median", "number"),
                col("spread", "number"),
                col("samples", "number"),
                col("verdict", "verdict"),
                col("oracle error", "number"),
                col("tried", "number"),
                col("rejected", "wide"),
                col("source"),
            ],
            [
                [
                    row_text(row),
                    tile_text(row.get("tile")),
                    _time(row.get("median_us")),
                    _time(row.get("spread_us")),
                    row.get("samples"),
                    verdicts.get(_key(row), "no comparison here"),
                    _figure(row.get("oracle_error")),
                    row.get("tried"),
                    rejected_words(row.get("rejected") or {}) or "none",
                    row.get("source"),
                ]
                for row in rows
            ],
        ),
    ]


def row_text(row: Row) -> str:
    """The product of a table's row: "mmq Q4_1 float32 M=512 N=576 K=1536"."""
    parts = [row.get("op"), row.get("weight_type"), row.get("act_dtype")]
    if row.get("group") not in (None, 0):
        parts.append("g=K" if row["group"] == -1 else f"g={row['group']}")
    if row.get("activations") not in (None, "float"):
        parts.append(row["activations"])
    parts += [f"{name}={row[name]}" for name in "MNK" if row.get(name) is not None]
    return " ".join(str(part) for part in parts if part)


def block_table(label: str, comparison: Row) -> Block:
    """Times and ratios of a comparison, a row a block."""
    a, b = str(comparison.get("a", "A")), str(comparison.get("b", "B"))
    short = {a: "A", b: "B", "control": "A'"}
    rows = []
    for number, block in enumerate(comparison.get("blocks") or (), 1):
        us = block.get("us") or {}
        order = ", ".join(short.get(name, str(name)) for name in block.get("order") or ())
        ratios = [_ratio(us.get(a), us.get(other)) for other in (b, "control")]
        rows.append([number, order, *(_time(us.get(n)) for n in (a, "control", b)), *ratios])
    columns = [col("block", "number"), col("order")]
    columns += [col(n, "number") for n in ("A", "A'", "B", "A / B", "A / A'")]
    return table(f"Every block of {label}", columns, rows, fold=True)


def machine_table(label: str, blocks: Sequence[Row]) -> Block | None:
    """The machine's state, a row a block; None where nobody watched it."""
    states = [(i, block["state"]) for i, block in enumerate(blocks, 1) if block.get("state")]
    if not states:
        return None
    columns = [
        col("block", "number"),
        col("load", "number"),
        col("CPU MHz", "number"),
        col("others", "number"),
        col("stolen", "number"),
        col("switches", "number"),
        col("throttled"),
        col("GPU"),
        col("GPU MHz", "number"),
        col("memory MHz", "number"),
        col("power W", "number"),
        col("at power cap"),
        col("GPU C", "number"),
    ]
    rows = []
    for number, state in states:
        gpu = state.get("gpu") or {}
        rows.append(
            [
                number,
                _short(state.get("load_1m")),
                _short(state.get("frequency_mhz")),
                percent(state.get("others")),
                percent(state.get("steal"), 2),
                state.get("switches"),
                ", ".join(map(str, state.get("throttle") or ())) or "no",
                gpu.get("name"),
                _short(gpu.get("sm_mhz")),
                _short(gpu.get("memory_mhz")),
                _short(gpu.get("power_w")),
                gpu.get("power_capped"),
                _short(gpu.get("temperature_c")),
            ]
        )
    return table(f"The machine during {label}", columns, rows, fold=True)


def agreement_blocks(agreement: Row) -> list[Block]:
    """Greedy ids and logits of B against those of A."""
    if not agreement:
        return []
    kl, worst = agreement.get("mean_kl"), agreement.get("worst_kl")
    rows = [
        ("prompts with identical ids", f"{agreement.get('identical')} of {agreement['prompts']}")
        if agreement.get("prompts") is not None
        else ("", ""),
        ("new ids a prompt", agreement.get("tokens")),
        ("positions compared", agreement.get("positions")),
        ("mean KL divergence", "not finite" if kl is None else f"{kl:.3g} nats"),
        ("worst KL divergence", "not finite" if worst is None else f"{worst:.3g} nats"),
        ("top-1 agreement", percent(agreement.get("top1"), 2)),
    ]
    blocks = [
        text(agreement_words(agreement)),
        facts([(name, value) for name, value in rows if name and value not in (None, "")]),
    ]
    divergences = agreement.get("divergences") or []
    if divergences:
        columns = [col("prompt", "number"), col("same ids before", "number"), col("A", "number")]
        columns += [col("B", "number"), col("gap in deviations", "number")]
        keys = ("prompt", "position", "a", "b")
        rows_of = [[*(d.get(k) for k in keys), _figure(d.get("gap"))] for d in divergences]
        blocks.append(table("Where greedy texts part", columns, rows_of))
    return blocks


def agreement_cells(agreement: Row) -> str:
    """The same in a few words, for a table's cell."""
    if not agreement:
        return ""
    kl = agreement.get("mean_kl")
    return (
        f"ids {agreement.get('identical')}/{agreement.get('prompts')}, "
        f"KL {'not finite' if kl is None else f'{kl:.2g}'}, "
        f"top-1 {percent(agreement.get('top1'))}"
    )


def verification_blocks(verification: Row) -> list[Block]:
    """Counts of a verification, and what failed."""
    if not verification:
        return []
    blocks = [text(verification_words(verification), *map(str, verification.get("lines") or ()))]
    groups = verification.get("groups") or []
    if groups:
        columns = [col("op and type"), col("passed", "number"), col("cases", "number")]
        rows = [[g.get("label"), g.get("passed"), g.get("total")] for g in groups]
        blocks.append(table("Cases by op and type", columns, rows))
    failed = [row for row in verification.get("rows") or () if not row.get("passed")]
    if failed:
        columns = [col("op"), col("case"), col("tile", "code"), col("reason", "wide")]
        keys = ("title", "case", "tile", "reason")
        blocks.append(table("FAILED", columns, [[row.get(k) for k in keys] for row in failed]))
    return blocks


def provenance_facts(provenance: Row) -> list[Block]:
    """Everything that a provenance record says."""
    rows = [(str(name).replace("_", " "), value) for name, value in provenance.items() if value]
    return [facts(rows)] if rows else []


def _verdict(problem: Row) -> str:
    if problem.get("verdict"):
        return problem_verdict(problem)
    return "tile in use, no rival" if problem.get("status") in ("kept", "repaired") else ""


def _key(row: Row) -> tuple[Any, ...]:
    names = ("op", "weight_type", "activations", "act_dtype", "M", "N", "K", "group")
    return tuple(row.get(name) for name in names)


def _time(us: float | None) -> str:
    return "" if us is None else time_text(us)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _ratio(one: float | None, two: float | None) -> str:
    return f"{one / two:.4f}" if one and two else ""
