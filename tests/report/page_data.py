"""Results as verbs write them, made by their own classes, with times from a replayed clock.

Every text that a user or a kernel can choose is hostile somewhere in here: it must never become
markup.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.measure import (
    Comparison,
    GpuState,
    MachineState,
    ReplayClock,
    SamplePlan,
    compare,
)
from tilewright.tiles.table import TableHeader, TableRow
from tilewright.tiles.tile import Problem, Tile
from tilewright.tune.ladder_file import ChangeSet
from tilewright.tune.ladder_result import LadderResult, LeftOut, RungResult, RungTest
from tilewright.tune.outcome import Outcome
from tilewright.tune.result import CandidateReport, PlantedReport, ProblemReport, TuneReport

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<b>%{x}</b> & <a href=\"javascript:document.title='owned'\">click</a>",
    "']});document.title='owned';//",
)
ARCH = "cpu-avx512_vnni"
PROVENANCE = {
    "command": "tilewright tune smollm2 --budget 60 --html report.html",
    "date": "2026-11-29T21:00:00+00:00",
    "tilewright": "0.2.0",
    "python": "3.11.9",
    "versions": {"torch": "2.13.0", "numba": "0.68.1"},
    "device": "A CPU with 2 cores",
    "arch": ARCH,
    "units": 2,
    "threads": 2,
    "load_average": [0.4, 0.3, 0.2],
}


def comparison(
    gain: float = 0.02,
    *,
    a: str = "A",
    b: str = "B",
    us: float = 800.0,
    seed: int = 0,
    noise: float = 0.002,
    watched: bool = True,
    post_check: Any = None,
) -> Comparison:
    """B is `gain` faster than A; both wander by `noise`."""
    rng = np.random.default_rng(seed)
    clock = ReplayClock()
    arms = [
        clock.replay((us / (1 + g) * np.exp(rng.normal(0, noise, 400))).tolist())
        for g in (0.0, gain)
    ]
    found = compare(
        *arms, a_name=a, b_name=b, clock=clock, plan=SamplePlan(1, 1), seed=seed,
        warm_up_us=1.0, resamples=400, post_check=post_check,
    )  # fmt: skip
    return watch(found, seed) if watched else found


def watch(found: Comparison, seed: int = 0, gpu: str = "") -> Comparison:
    """The comparison with a state of the machine in every block."""
    rng = np.random.default_rng(seed)

    def state() -> MachineState:
        return MachineState(
            load_1m=float(rng.uniform(0.4, 0.9)),
            frequency_mhz=float(rng.uniform(2990, 3010)),
            others=float(rng.uniform(0.0, 0.08)),
            steal=0.001,
            switches=int(rng.integers(0, 9)),
            gpu=GpuState(gpu, 1980.0, 2619.0, 512.5, False, 61.0) if gpu else None,
        )

    return replace(found, blocks=tuple(replace(block, state=state()) for block in found.blocks))


def problem(m: int = 512, n: int = 576, k: int = 1536, weight_type: str = "Q4_1") -> Problem:
    return Problem("mmq", ARCH, "float32", weight_type, "float", m, n, k, 0)


HEADER = TableHeader(
    arch=ARCH,
    valid_for=(ARCH, "cpu-avx512"),
    units=2,
    device="A CPU with 2 cores",
    compiler="numba 0.68.1, llvmlite 0.50.0, torch 2.13.0",
    kernel_hash="6ac5b3f8d5a4d1c0c7d27b4b3e9d6a0f5a2c96b5c2f7cbb9e1c6f0d34b1a9e77",
    op_versions={"mmq": 1, "w4a16": 1},
    date="2026-11-29T21:00:00+00:00",
    source="tilewright tune",
)


def candidates(seed: int, incumbent: Tile) -> list[CandidateReport]:
    """The panel tiles of a product, some of each kind of rejection among them, and two others."""
    rng = np.random.default_rng(seed)
    found = []
    for mr, nv, parts in itertools.product((1, 2, 4, 6, 8, 12), (1, 2, 3, 4), (16, 32)):
        tile = Tile.of("panel", mr=mr, nv=nv, block_parts=parts, threads=0)
        outcome = Outcome(True, oracle_error=float(rng.uniform(0.2, 0.6)), seconds=0.2)
        if mr == 12 and nv >= 3:
            outcome = Outcome(
                False, "oracle", f"worst element is 57x its limit {HOSTILE[nv % 4]}", "Q4_1-M17"
            )
        elif mr == 12 and parts == 32:
            outcome = Outcome(False, "guard-bands", "wrote 12 values past the end", "Q4_1-M5-N97")
        elif mr == 8 and nv == 4:
            outcome = Outcome(False, "timeout", "it did not finish in 20 s", "Q4_1-M512")
        candidate = CandidateReport(tile, outcome)
        if outcome.passed and tile != incumbent:  # which the others are measured against
            cost = 1.0 + 0.5 * abs(np.log2(mr / 8)) + 0.2 * abs(nv - 3) + 0.01 * (parts == 16)
            candidate.us = (800 * cost * np.exp(rng.normal(0, 0.01, 3))).tolist()
            candidate.incumbent_us = (840 * np.exp(rng.normal(0, 0.01, 3))).tolist()
        found.append(candidate)
    blas = CandidateReport(Tile.of("blas", panel_rows=256, threads=0), Outcome(True))
    blas.us, blas.incumbent_us = [1200.0, 1210.0, 1190.0], [840.0, 841.0, 839.0]
    crash = CandidateReport(
        Tile.of("blas", panel_rows=64, threads=0), Outcome(False, "crash", "signal 11", "Q4_1-M5")
    )
    return [*found, blas, crash]


def tune_report() -> TuneReport:
    """Two products, one improved and one kept; one more that the budget did not reach."""
    incumbent = Tile.of("panel", mr=8, nv=3, block_parts=16, threads=0)
    winner = incumbent.replace(block_parts=32)
    report = TuneReport(HEADER, {"budget_s": 60.0, "strategy": "local", "seed": 0}, seconds=58.4)
    report.provenance = PROVENANCE
    report.machine = {
        "before": MachineState(load_1m=0.4, others=0.01).to_dict(),
        "after": MachineState(load_1m=0.9, others=0.02).to_dict(),
    }
    better = ProblemReport(problem(), name="mlp.down_proj", share=0.41, status="improved")
    better.incumbent, better.how, better.space_size = incumbent, "default", 430
    better.candidates = candidates(1, incumbent)
    finals = comparison(0.021, a=str(incumbent), b=str(winner))
    better.comparisons = [finals.to_dict()]
    better.winner, better.verdict, better.ratio = winner, str(finals.verdict), finals.ratio
    better.row = TableRow(
        better.problem, winner, 799.6, 3.2, 20, 0.41, better.tried, better.rejected
    )
    kept = ProblemReport(problem(1, 49152, 576, "Q8_0"), share=0.2, status="kept", cache="cold")
    kept.incumbent = kept.winner = Tile.of("dot", unroll=4, threads=0)
    kept.candidates = [
        CandidateReport(
            Tile.of("dot", unroll=unroll, threads=0), Outcome(True, oracle_error=0.3),
            [] if unroll == 4 else [7000.0 + 90 * unroll] * 3, [] if unroll == 4 else [7360.0] * 3,
        )
        for unroll in (1, 2, 4, 8)
    ]  # fmt: skip
    same = comparison(0.0, a=str(kept.incumbent), b="dot(threads=0, unroll=2)", us=7300, seed=3)
    kept.comparisons, kept.verdict = [same.to_dict()], str(same.verdict)
    kept.reason = "no finalist was faster for certain"
    skipped = ProblemReport(problem(64), share=0.05, reason="the budget ended before it")
    report.problems = [better, kept, skipped]
    faults = {"k-tail": "oracle", "past-the-end": "guard-bands", "stale-buffer": "stale-buffer"}
    for fault, check in faults.items():
        tile = Tile.of("panel", mr=8, nv=3, block_parts=64, threads=0, planted=fault)
        report.planted.append(
            PlantedReport("mmq", tile, f"drops {fault}", Outcome(False, check, HOSTILE[1]))
        )
    report.dropped = [(problem(16), incumbent, "its kernels have changed and it is wrong now")]
    return report


AGREEMENT: dict[str, Any] = {
    "prompts": 4,
    "identical": 3,
    "tokens": 32,
    "divergences": [{"prompt": 2, "position": 17, "a": 12, "b": 99, "gap": 0.004}],
    "positions": 210,
    "mean_kl": 2.1e-9,
    "worst_kl": 4.4e-8,
    "top1": 0.9952,
    "same_function": True,
    "faults": [],
}


def compare_result() -> dict[str, Any]:
    """`CompareResult.to_dict()` of four contests: faster, slower, void, not timed."""
    rows = []
    for label, cache, gain, check in (
        ("pp512", "hot", 0.05, None),
        ("Q4_1-M1-N576-K1536-fp32", "cold", -0.01, None),
        ("Q4_1-M16-N576-K1536-fp32", "hot", 0.02, lambda: f"wrong {HOSTILE[0]}"),
    ):
        found = comparison(gain, us=1700.0, seed=len(rows), post_check=check)
        rows.append(
            {
                "label": label,
                "cache": cache,
                "verdict": str(found.verdict),
                "tokens": 512 if label == "pp512" else 0,
                "note": "",
                "comparison": found.to_dict(),
            }
        )
    rows.append(
        {"label": HOSTILE[2], "cache": "hot", "verdict": "SAME", "tokens": 0,
         "note": "both run panel(mr=8); not timed.", "comparison": None}
    )  # fmt: skip
    return {
        "kind": "table",
        "subject": "smollm2",
        "exit_code": 4,
        "arms": {
            "a": {"name": "A", "title": "default", "verified": "passed the gate", "details": {}},
            "b": {"name": "B", "title": HOSTILE[3], "verified": "passed the gate", "details": {}},
        },
        "rows": rows,
        "agreement": AGREEMENT,
        "notes": [HOSTILE[1]],
        "faults": [],
        "interrupted": False,
    }


def ladder_result() -> LadderResult:
    """Four rungs: two gains, one that is WRONG, one that resolves nothing; a control test."""
    rungs = []
    below, total = "blas", 1.0
    for name, gain, faults in (
        ("panel kernel", 0.12, ()),
        (f"drop the tail {HOSTILE[0]}", 0.4, (f"product 3 is wrong: {HOSTILE[1]}",)),
        ("8-bit activations", 0.08, ()),
        ("prefetch", 0.001, ()),
    ):
        tests = []
        for test, tokens, control in (("pp512", 512, False), ("pp2048", 2048, False),
                                      ("tg32", 32, True)):  # fmt: skip
            own = 0.0 if control else gain
            seed = len(rungs) * 3 + len(tests)
            whole = total * (1 + own) - 1 if not control else 0.0
            tests.append(
                RungTest(
                    test, tokens, control,
                    comparison(own, a=below, b=name, seed=seed, us=1.6e6),
                    comparison(whole, a="blas", b=name, seed=seed + 50, us=1.7e6),
                )
            )  # fmt: skip
        verified = "" if faults else "210/210 products agree with the oracle"
        rungs.append(RungResult(ChangeSet(name), below, verified, faults, AGREEMENT, tuple(tests)))
        if not faults:
            below, total = name, total * (1 + gain)
    left = LeftOut("panel kernel", {"pp512": comparison(0.1, a="without", b="whole", seed=90)})
    return LadderResult(
        "SmolLM2 on the CPU", "smollm2", ChangeSet("blas"), tuple(rungs),
        (left, LeftOut("prefetch", {}, "its stack is the one below")),
        "210/210 products agree with the oracle", ("A note on the ladder.",),
    )  # fmt: skip


VERIFICATION: dict[str, Any] = {
    "passed": False,
    "complete": True,
    "planned": 12,
    "seed": 0,
    "groups": [
        {"label": "MMQ Q4_1", "passed": 7, "total": 8},
        {"label": "W4A16 uint4", "passed": 4, "total": 4},
    ],
    "rows": [
        {"title": "MMQ", "case": "Q4_1-M5-N97", "tile": None, "passed": False,
         "reason": f"57x the limit {HOSTILE[0]}"},
        {"title": "MMQ", "case": "Q4_1-M1-N97", "tile": None, "passed": True, "reason": ""},
    ],
    "controls": [
        {"name": "bit", "label": "MMQ Q4_1", "case": "x", "visible": True, "effect": 9.0,
         "caught": True, "reason": ""},
        {"name": "scale", "label": "MMQ Q4_1", "case": "x", "visible": False, "effect": 0.1,
         "caught": False, "reason": ""},
    ],
}  # fmt: skip


def table() -> dict[str, Any]:
    """A tile table as its file holds it."""
    from dataclasses import asdict

    rows = [
        TableRow(problem(m), Tile.of("dot", unroll=4, threads=0), 120.0 + m, 1.5, 20, 0.3, 32,
                 {"oracle": 2, "timeout": 1}, "tuned" if m < 100 else "published")
        for m in (1, 16, 512)
    ]  # fmt: skip
    return {"header": asdict(HEADER), "rows": [row.as_dict() for row in rows]}
