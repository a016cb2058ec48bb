"""The sections of a page as what its template shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.errors import UnsupportedError
from tilewright.report.page.blocks import Block, text
from tilewright.report.page.compare import comparison_blocks, machine_blocks
from tilewright.report.page.ladder import ladder_blocks, rung_rows
from tilewright.report.page.sections import SECTIONS, tidy
from tilewright.report.page.tables import (
    agreement_blocks,
    provenance_facts,
    tile_table,
    verification_blocks,
)
from tilewright.report.page.tune import final_rows, tune_blocks
from tilewright.report.page.words import summary

__all__ = ["page_view"]


def page_view(sections: Mapping[str, Any]) -> dict[str, Any]:
    """What `templates/page.html` is given.

    Returns:
        title, subject, date, faults, summary; parts: id, title and blocks of each part of the page
        (see `tilewright.report.page.blocks`); data: what the page's script draws from, by the id
        of the chart.

    Raises:
        UnsupportedError: a section that no page has.
    """
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        raise UnsupportedError(
            f"sections has {', '.join(map(repr, unknown))}; a page has {', '.join(SECTIONS)}"
        )
    sections = tidy(sections)
    parts: list[dict[str, Any]] = []
    charts: dict[str, Any] = {}
    for name, title, blocks in _parts(sections):
        for block in blocks:
            if block["type"] == "chart":
                block["id"] = f"chart-{len(charts)}"
                charts[block["id"]] = block.pop("draws")
        if blocks:
            parts.append({"id": name, "title": title, "blocks": blocks})
    return {
        "title": str(sections.get("title") or "Report"),
        "subject": str(sections.get("subject") or ""),
        "date": str((sections.get("provenance") or {}).get("date") or ""),
        "faults": [str(fault) for fault in sections.get("faults") or ()],
        "summary": [{"lead": lead, "text": said} for lead, said in summary(sections)],
        "parts": parts,
        "data": charts,
    }


def _parts(sections: Mapping[str, Any]) -> list[tuple[str, str, list[Block]]]:
    def section(name: str) -> Any:
        return sections.get(name) or {}

    tune, ladder = section("tune"), section("ladder")
    rows = [*(sections.get("comparisons") or ()), *final_rows(tune), *rung_rows(ladder)]
    notes = [str(line) for line in sections.get("notes") or ()]
    return [
        ("tune", "The tile space", tune_blocks(tune)),
        ("ladder", "The ladder of changes", ladder_blocks(ladder)),
        ("comparisons", "Paired comparisons", comparison_blocks(rows, section("arms"))),
        ("agreement", "Do both arms say the same?", agreement_blocks(section("agreement"))),
        ("table", "The tile table", tile_table(section("table"), tune.get("problems") or ())),
        ("verification", "Verification", verification_blocks(section("verification"))),
        ("machine", "The machine, block by block", machine_blocks(rows, section("machine"))),
        ("notes", "Notes", [text(*notes)] if notes else []),
        ("provenance", "Where this comes from", provenance_facts(section("provenance"))),
    ]
