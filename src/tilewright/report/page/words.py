"""A report in plain words: verdicts as sentences, and the summary at the top of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.tune.outcome import KINDS

__all__ = [
    "agreement_words",
    "comparison_of",
    "comparison_words",
    "count",
    "final_of",
    "interval_text",
    "percent",
    "problem_verdict",
    "ratio_of",
    "rejected_words",
    "shown",
    "summary",
    "tile_text",
    "unquoted",
    "verdict_of",
    "verification_words",
]

Row = Mapping[str, Any]


def comparison_of(row: Row) -> Row:
    """The `Comparison.to_dict()` in an entry of `comparisons`; {} where nothing was timed."""
    if "judgement" in row:
        return row
    found = row.get("comparison")
    return found if isinstance(found, Mapping) else {}


def verdict_of(row: Row) -> str:
    """The verdict of an entry of `comparisons` as the page shows it; "" if it has none."""
    judgement = comparison_of(row).get("judgement") or {}
    return shown(str(row.get("verdict") or judgement.get("verdict") or ""), ratio_of(row))


def final_of(problem: Row) -> Row:
    """The comparison that a tuned problem's verdict is from; {} if it had no finals.

    It is that of the best finalist, of which the last comparison counts.
    """
    last = {str(c.get("b")): c for c in problem.get("comparisons") or ()}
    return max(last.values(), key=lambda c: ratio_of(c) or 0.0, default={})


def problem_verdict(problem: Row) -> str:
    """The verdict on a tuned problem as the page shows it; "" if it has none."""
    return shown(str(problem.get("verdict") or ""), ratio_of(final_of(problem)))


def shown(verdict: str, ratio: float | None) -> str:
    """A verdict as the page shows it: DISJOINT says of itself not which arm is faster."""
    if verdict != "DISJOINT" or ratio is None:
        return verdict
    return f"DISJOINT {'faster' if ratio >= 1 else 'slower'}"


def ratio_of(row: Row) -> float | None:
    """The ratio of an entry of `comparisons`."""
    ratio = (comparison_of(row).get("judgement") or {}).get("ratio")
    return None if ratio is None else float(ratio)


def interval_text(ratio: float | None, low: float | None, high: float | None) -> str:
    """A ratio with its interval: "1.0213x [1.0150, 1.0274]"; "" if there is no ratio."""
    if ratio is None:
        return ""
    interval = "" if low is None or high is None else f" [{low:.4f}, {high:.4f}]"
    return f"{ratio:.4f}x{interval}"


def percent(share: float | None, digits: int = 1) -> str:
    """0.123 -> "12.3 %"; "" for None."""
    return "" if share is None else f"{100 * share:.{digits}f} %"


def count(number: int, noun: str, plural: str = "") -> str:
    """2, "tile" -> "2 tiles"."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def unquoted(text: str) -> str:
    """A text without Markdown's backticks."""
    return text.replace("`", "")


def tile_text(tile: Any) -> str:
    """A tile as people read it: "panel(block_parts=16, mr=8, nv=3)"; "" for None."""
    if not isinstance(tile, Mapping):
        return "" if tile is None else str(tile)
    fields = ", ".join(f"{k}={v}" for k, v in tile.items() if k != "algorithm")
    return f"{tile.get('algorithm', 'tile')}({fields})"


def comparison_words(row: Row) -> str:
    """What an entry of `comparisons` found, as a sentence about B and A."""
    comparison, verdict = comparison_of(row), verdict_of(row)
    if not comparison:
        note = str(row.get("note") or "")
        return f"Both arms are the same code, so nothing was timed. {note}".strip()
    judgement = comparison.get("judgement") or {}
    delta = (comparison.get("settings") or {}).get("delta", 0.005)
    figure = interval_text(*(judgement.get(name) for name in ("ratio", "low", "high")))
    reasons = "; ".join(str(reason) for reason in judgement.get("reasons") or ())
    blocks = count(len(comparison.get("blocks") or ()), "block")
    text = {
        "DISJOINT faster": f"B is faster than A: {figure}. Their times do not overlap in {blocks}.",
        "DISJOINT slower": f"B is slower than A: {figure}. Their times do not overlap in {blocks}.",
        "FASTER": f"B is faster than A: {figure} in {blocks}.",
        "SLOWER": f"B is slower than A: {figure} in {blocks}.",
        "SAME": f"No difference of more than {percent(delta)}: {figure} in {blocks}.",
        "UNRESOLVED": f"Not decided in {blocks}: {figure}; {reasons or 'more blocks are needed'}.",
        "VOID": f"Proves nothing: {reasons or 'the run was void'}.",
        "WRONG": "WRONG: its result is not right, so its time counts for nothing.",
    }
    return text.get(verdict, f"{verdict or 'No verdict'}: {figure or 'no figure'}.")


def rejected_words(rejected: Mapping[str, int]) -> str:
    """Counts by reason: "3 by the check oracle, 1 because it did not finish in time"."""
    return ", ".join(
        f"{number} because {KINDS[kind]}" if kind in KINDS else f"{number} by the check {kind}"
        for kind, number in sorted(rejected.items(), key=lambda item: (-item[1], item[0]))
    )


def summary(sections: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(lead, sentence) of everything that the page shows, what matters most first."""
    lines = [("", str(sentence)) for sentence in sections.get("summary") or ()]
    if sections.get("tune"):
        lines += _tune(sections["tune"])
    if sections.get("comparisons"):
        lines.append(("Verdict", _comparisons(sections["comparisons"], sections.get("arms") or {})))
    if sections.get("ladder"):
        lines.append(("Ladder", _ladder(sections["ladder"])))
    if sections.get("agreement"):
        lines.append(("Same answers", agreement_words(sections["agreement"])))
    if sections.get("verification"):
        lines.append(("Verified", verification_words(sections["verification"])))
    if sections.get("table") and not sections.get("tune"):
        rows = sections["table"].get("rows") or ()
        arch = (sections["table"].get("header") or {}).get("arch", "an arch not recorded")
        lines.append(("Table", f"{count(len(rows), 'row')} for {arch}."))
    return lines


def _tune(tune: Row) -> list[tuple[str, str]]:
    problems = tune.get("problems") or []
    header = tune.get("header") or {}
    settings = tune.get("settings") or {}
    statuses = Counter(str(problem.get("status")) for problem in problems)
    begun = len(problems) - statuses["skipped"]
    tried = sum(problem.get("tried") or 0 for problem in problems)
    where = f" on {header['arch']}" if header.get("arch") else ""
    units = f" ({count(header['units'], 'core or unit', 'cores or units')})" if header.get(
        "units") else ""  # fmt: skip
    seconds = f" in {tune['seconds']:.0f} s" if tune.get("seconds") else ""
    strategy = f" by {settings['strategy']} search" if settings.get("strategy") else ""
    text = f"{count(begun, 'product')}{where}{units}: {count(tried, 'tile')} tried"
    text += f"{seconds}{strategy}."
    if statuses["skipped"]:
        text += f" The budget ended before {count(statuses['skipped'], 'more product')}."
    if tune.get("interrupted"):
        text += " The run was interrupted; what was finished by then is shown."
    lines = [("Tuned", text), ("Won", _won(problems, statuses))]

    rejected: Counter[str] = Counter()
    for problem in problems:
        rejected.update(problem.get("rejected") or {})
    if rejected:
        said = f"{sum(rejected.values())} of {tried} tiles: {rejected_words(rejected)}."
        said += " None of them can win."
    else:
        said = f"None of the {tried} tiles tried."
    planted = tune.get("planted") or []
    if planted:
        caught = sum(p.get("status") == "rejected" for p in planted)
        said += f" Of {count(len(planted), 'tile')} that {_be(len(planted))} wrong on purpose, "
        said += f"{caught} {_be(caught)} rejected" + (
            "." if caught == len(planted) else ": THE GATE LET A WRONG TILE THROUGH."
        )
    return [*lines, ("Rejected", said)]


def _won(problems: Sequence[Row], statuses: Counter[str]) -> str:
    parts = []
    if statuses["improved"]:
        best = [p for p in problems if p.get("status") == "improved"]
        ratios = [p["ratio"] for p in best if p.get("ratio")]
        words = _verdicts(best)
        span = ""
        if ratios:
            low, high = f"{min(ratios):.3f}x", f"{max(ratios):.3f}x"
            span = f", {low}" if low == high else f", {low} to {high}"
        parts.append(
            f"a new tile on {count(len(best), 'product')} ({words}{span} against the tile in use)"
        )
    if statuses["kept"]:
        words = _verdicts([p for p in problems if p.get("status") == "kept"])
        parts.append(f"the tile in use stays on {count(statuses['kept'], 'product')} ({words})")
    if statuses["repaired"]:
        where = count(statuses["repaired"], "product")
        parts.append(f"a tile in use that was WRONG is replaced on {where}")
    if statuses["failed"]:
        parts.append(f"NO tile passed the gate on {count(statuses['failed'], 'product')}")
    text = "; ".join(parts) or "nothing was finished"
    return text[0].upper() + text[1:] + "."


def _verdicts(problems: Sequence[Row]) -> str:
    verdicts = Counter(problem_verdict(problem) or "no rival" for problem in problems)
    return ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())


def _comparisons(rows: Sequence[Row], arms: Mapping[str, Any]) -> str:
    titles = [unquoted(str((arms.get(name) or {}).get("title") or "")) for name in ("a", "b")]
    who = f"B ({titles[1]}) against A ({titles[0]}): " if all(titles) else ""
    if len(rows) == 1:
        return who + comparison_words(rows[0])
    verdicts = Counter(verdict_of(row) or "no verdict" for row in rows)
    words = ", ".join(f"{verdict} in {number}" for verdict, number in verdicts.most_common())
    return f"{who}{words} of {len(rows)} comparisons."


def _ladder(ladder: Row) -> str:
    rungs = ladder.get("rungs") or []
    wrong = [str(rung.get("name")) for rung in rungs if rung.get("status") == "WRONG"]
    right = [rung for rung in rungs if rung.get("status") != "WRONG"]
    tests = [t for rung in right for t in rung.get("tests") or () if not t.get("control")]
    verdicts = Counter(verdict_of({"comparison": test.get("below")}) for test in tests)
    said = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common() if verdict)
    text = count(len(rungs), "rung") + (f"; against the rung below: {said}" if said else "") + "."
    last = next((t for t in reversed(tests) if t.get("base")), None)
    if last is not None:
        base = {"comparison": last["base"]}
        figures = (last["base"].get("judgement") or {}).get
        text += (
            f" The top against the base on {last.get('test')}: {verdict_of(base)} "
            f"{interval_text(figures('ratio'), figures('low'), figures('high'))}."
        )
    if wrong:
        text += f" WRONG, whatever their time: {', '.join(wrong)}."
    return text


def agreement_words(agreement: Row) -> str:
    """Greedy ids, divergence and top-1 in a sentence."""
    kl, top1 = agreement.get("mean_kl"), agreement.get("top1")
    parts = []
    if agreement.get("prompts") is not None:
        parts.append(
            f"greedy ids are identical on {agreement.get('identical')} of {agreement['prompts']} "
            f"prompts ({agreement.get('tokens')} new ids each)"
        )
    parts.append(
        "the mean KL divergence is not finite" if kl is None
        else f"the mean KL divergence of the logits is {kl:.2g} nats"
    )  # fmt: skip
    if top1 is not None:
        parts.append(f"the top-1 choice agrees at {percent(top1)} of positions")
    text = ", ".join(parts)
    faults = "; ".join(str(fault) for fault in agreement.get("faults") or ())
    return text[0].upper() + text[1:] + (f". FAULT: {faults}." if faults else ".")


def verification_words(verification: Row) -> str:
    """How many cases passed, and what the negative controls showed."""
    passed, total = verification_counts(verification)
    text = f"{passed} of {count(total, 'case')} agree with the oracle"
    text += f", {total - passed} FAILED." if passed < total else "."
    if verification.get("complete") is False:
        text += " The run was interrupted: the rest did not run."
    visible = [c for c in verification.get("controls") or () if c.get("visible")]
    if visible:
        caught = sum(bool(c.get("caught")) for c in visible)
        text += f" Of the corruptions made on purpose, {caught} of {len(visible)} were noticed."
    return text


def verification_counts(verification: Row) -> tuple[int, int]:
    """(passed, total): of the groups, or as given."""
    groups = verification.get("groups") or []
    if groups:
        return sum(g.get("passed", 0) for g in groups), sum(g.get("total", 0) for g in groups)
    return int(verification.get("passed") or 0), int(verification.get("total") or 0)


def _be(number: int) -> str:
    return "is" if number == 1 else "are"
