"""Make the tile tables of AMD chips from published ladders: nothing here is a measurement.

    python benchmarks/make_published_tables.py            all tables, into the package
    python benchmarks/make_published_tables.py gfx1151    one of them
    python benchmarks/make_published_tables.py --check    exit 4 if a table is not what this makes

A row is kept if its tile obeys the rules of the space, compiles for every arch of its table without
spills, within the chip's registers and LDS, and passes the gate in Triton's interpreter, on small
products around its own numbers. A row that is not is dropped, and the table's notes say why. No
kernel runs on a GPU, no time is taken: rows hold 0 samples, and their source is "published".

A ladder names blocks, warps and sometimes the loads ahead. What it leaves open is this package's:
the way of dequantizing is the space's default for the chip and dtype, the order "xw" and the bands
of 8 rows of tiles are as published, and loads ahead that no line names are Triton's default of 2,
or 1 where a tile with 2 would spill.

Run it again when the kernels change: their hash stands in every table, and a row whose kernels have
changed is not used.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE))

from published_ladders import SHAPES, TABLES, PublishedTable, Step  # noqa: E402

from tilewright.errors import TilewrightError  # noqa: E402
from tilewright.tiles.table import (  # noqa: E402
    Running,
    TableHeader,
    TableRow,
    TileTable,
    load_table,
    save_table,
    shipped_folder,
)
from tilewright.tiles.tile import Problem, Tile  # noqa: E402

OP = "w4a16"
SOURCE = "published, not measured here"
GROUPS = (32, 64, 128)
DTYPES = ("float16", "bfloat16")
TYPES = ("uint4", "uint4b8")
ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Buckets of M that the ladders are for; below, a kernel for few rows is the better choice."""

_STAGES, _BANDS = 2, 8
_SMALL = (1024, 1024)  # N, K that stand for all in a compilation: alignments are the same


@dataclass
class Made:
    """A table in the making: rows kept, and why others were dropped."""

    rows: list[TableRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def tiles_of(step: Step, problem: Problem) -> list[Tile]:
    """The published step as tiles of the portable kernel, the first that is legal to be taken.

    They differ in the loads ahead, where the step names none.
    """
    from tilewright.ops.w4a16.triton_space import TRITON_SPACE

    tile = Tile.of(
        "triton", block_m=step.block_m, block_n=step.block_n,
        block_k=min(step.block_k, problem.group), num_warps=step.warps, num_stages=_STAGES,
        group_m=_BANDS, order="xw", dequant=TRITON_SPACE.default(replace(problem, M=64)).dequant,
    )  # fmt: skip
    stages = (_STAGES, 1) if step.stages is None else (step.stages,)
    return [tile.replace(num_stages=ahead) for ahead in stages]


def wanted(table: PublishedTable) -> Iterator[tuple[Problem, list[Tile]]]:
    """Every problem that a table has a row for, with its published tile."""
    for n, k in SHAPES:
        for group in GROUPS:
            if k % group:
                continue
            for dtype in DTYPES:
                for kind in TYPES:
                    for m in ROWS:
                        problem = Problem(OP, table.archs[0], dtype, kind, "float", m, n, k, group)
                        yield problem, tiles_of(table.ladder(dtype, m, n, k, group), problem)


def rule_broken(problem: Problem, tile: Tile, archs: Sequence[str]) -> str:
    """Which rule of the space a tile breaks on one of the archs; empty if none."""
    from tilewright.ops.w4a16.triton_space import TRITON_SPACE

    for arch in archs:
        try:
            TRITON_SPACE.check(tile, replace(problem, arch=arch))
        except TilewrightError as error:
            return str(error)
    return ""


class Known:
    """What was found about these kernels before, in a file; empty for other kernels."""

    def __init__(self, path: Path | None, now: Running) -> None:
        self._path = path
        self._of = f"{now.kernel_hash}, {now.compiler}"
        self.found: dict[str, Any] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if kept["of"] == self._of:
                self.found = kept["found"]

    def keep(self, key: str, value: Any) -> None:
        self.found[key] = value
        if self._path is not None:
            self._path.write_text(json.dumps({"of": self._of, "found": self.found}))


class Compiler:
    """Compiles each kind of tile once, and says what forbids it."""

    def __init__(self, known: Known) -> None:
        self._known = known

    def forbids(self, problem: Problem, tile: Tile, archs: Sequence[str]) -> str:
        """Why the compiled tile may not ship: on which arch it spills, or is refused."""
        from tilewright.isa.compile import compile_tile
        from tilewright.isa.resources import resources

        for arch in archs:
            n, k = _SMALL
            small = replace(problem, arch=arch, M=max(16, min(problem.M, 256)), N=n, K=k)
            # A sister of the first: what takes the most registers stands for both kinds.
            if arch != archs[0]:
                small = replace(small, weight_type="uint4")
            key = f"{arch} {tile} {small.act_dtype} {small.weight_type} g{small.group}"
            if key not in self._known.found:
                try:
                    found = [resources(kernel) for kernel in compile_tile(OP, small, tile)]
                except TilewrightError as error:
                    self._known.keep(key, f"{arch}: {error}")
                else:
                    faults = [f"{arch}: {why}" for r in found if (why := _over(r))]
                    self._known.keep(key, "; ".join(faults))
            if self._known.found[key]:
                return str(self._known.found[key])
        return ""


def _over(found: Any) -> str:
    """What a kernel takes too much of, in words; empty if it fits its chip."""
    if found.spills or found.scratch_bytes:
        return f"spills ({found.spills} registers, {found.scratch_bytes} bytes of scratch a lane)"
    if found.programs is not None and found.programs < 1:
        return f"takes {found.lds_bytes} bytes of LDS and {found.vgprs} registers: none is resident"
    return "; ".join(found.failures)


def gate_cases(pairs: Sequence[tuple[Problem, Tile]]) -> dict[str, dict[str, Any]]:
    """What the gate has to look at: the interpreter knows no warps, stages or archs.

    Of the groups that a tile is published for it gets the smallest, the most scales a row, and
    zero points beside them.
    """
    cases: dict[str, dict[str, Any]] = {}
    for problem, tile in sorted(pairs, key=lambda pair: pair[0].group):
        order = {"tile": tile.as_dict(), "dtype": problem.act_dtype, "group": problem.group}
        cases.setdefault(gate_key(problem, tile), order)
    return cases


def gate_key(problem: Problem, tile: Tile) -> str:
    names = ("block_m", "block_n", "block_k", "dequant", "order")
    numbers = "-".join(str(tile.as_dict()[name]) for name in names)
    return f"gate {numbers}-{problem.act_dtype}"


class Gate:
    """The gate in a process of its own, in which Triton interprets; it runs from the start."""

    def __init__(self, cases: Mapping[str, dict[str, Any]], known: Known) -> None:
        self._known = known
        self._folder = tempfile.TemporaryDirectory()
        orders = Path(self._folder.name) / "orders.json"
        orders.write_text(json.dumps({k: v for k, v in cases.items() if k not in known.found}))
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--gate", str(orders)],
            env={**os.environ, "TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: list[tuple[str, Any]] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            key, found = json.loads(line)
            # Standard output is read for the compiler's messages meanwhile.
            print(f"{key}: {found['reason']}", file=sys.stderr, flush=True)
            self._lines.append((key, found))

    def results(self) -> Mapping[str, dict[str, Any]]:
        """What it found, by key; waits for it.

        Raises:
            SystemExit: it broke.
        """
        code = self._child.wait()
        self.stop()
        if code:
            raise SystemExit(f"error: the gate's process ended with code {code}")
        return self._known.found

    def stop(self) -> None:
        """End the process; what it has found is kept."""
        self._child.kill()
        self._child.wait()
        self._listener.join()
        if self._child.stdout is not None:
            self._child.stdout.close()
        for key, found in self._lines:
            self._known.keep(key, found)
        self._folder.cleanup()


def gate_child(orders: Path) -> None:
    """Run the gate on every case of `orders`; TRITON_INTERPRET is set."""
    from tilewright.device import INTERPRETER
    from tilewright.ops.catalog import spec_for
    from tilewright.ops.contract import Case
    from tilewright.tune.gate import gate

    spec = spec_for(OP, INTERPRETER)
    for key, order in json.loads(orders.read_text()).items():
        tile, group = Tile.from_mapping(order["tile"]), order["group"]
        case = Case(spec.name, "uint4", order["dtype"], 17, 40, 2 * group, group)
        result = gate(spec, tile, [case])
        found = {"passed": result.passed, "reason": str(result), "error": result.oracle_error}
        print(json.dumps([key, found]), flush=True)


def make(table: PublishedTable, compiler: Compiler) -> tuple[Made, list[tuple[Problem, Tile]]]:
    """Rule-checked and compiled candidates of a table, and what was dropped."""
    made, kept = Made(), []
    for problem, tiles in wanted(table):
        reasons = []
        for tile in tiles:
            why = rule_broken(problem, tile, table.archs)
            why = why or compiler.forbids(problem, tile, table.archs)
            if not why:
                kept.append((problem, tile))
                break
            reasons.append(f"{tile}: {why}")
        else:
            made.dropped[f"{problem.act_dtype} {'; '.join(reasons)}"] += 1
    return made, kept


def finish(
    table: PublishedTable,
    made: Made,
    kept: Sequence[tuple[Problem, Tile]],
    gated: Mapping[str, Mapping[str, Any]],
    now: Running,
) -> TileTable:
    """The table of what has passed everything, under the kernels that are running."""
    for problem, tile in kept:
        result = gated[gate_key(problem, tile)]
        if not result["passed"]:
            made.dropped[f"{problem.act_dtype} {tile}: {result['reason']}"] += 1
            continue
        made.rows.append(
            TableRow(problem, tile, 0.0, 0.0, 0, float(result["error"]), 1, {}, "published")
        )
    header = TableHeader(
        arch=table.archs[0],
        valid_for=table.archs,
        units=0,
        device=table.device,
        compiler=now.compiler,
        kernel_hash=now.kernel_hash,
        op_versions={OP: now.op_version},
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        source=SOURCE,
        notes=(
            f"tiles from {table.note}",
            "compiled for every arch of valid_for with no GPU: no spill, registers and LDS within "
            "the chip; passed the gate in Triton's interpreter, with zero points; never timed by "
            "this package",
            *(f"dropped {count} rows of {what}" for what, count in sorted(made.dropped.items())),
        ),
    )
    return TileTable(header, tuple(made.rows))


def _running(table: PublishedTable) -> Running:
    """What identifies the kernels as their files are now."""
    from tilewright.ops.catalog import spec_for
    from tilewright.ops.choose import running_of

    return running_of(spec_for(OP, table.archs[0]))


def same(path: Path, table: TileTable) -> bool:
    """Whether the file says what was made, whenever it was."""
    if not path.exists():
        return False
    old = load_table(path)
    return old.rows == _sorted(table).rows and old.header == replace(
        table.header, date=old.header.date
    )


def _sorted(table: TileTable) -> TileTable:
    from tilewright.tiles.table import row_key

    return replace(table, rows=tuple(sorted(table.rows, key=lambda row: row_key(row.problem))))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="tables, gfx1151 for instance; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 4 if stale")
    parser.add_argument("--out", type=Path, default=shipped_folder())
    parser.add_argument("--known", type=Path, help="keep what is found in this file, and go on")
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gate:
        gate_child(args.gate)
        return 0
    known = {Path(table.file).stem: table for table in TABLES}
    strange = sorted(set(args.names) - set(known))
    if strange:
        parser.error(f"there is no ladder for {', '.join(strange)}; known are {', '.join(known)}")
    tables = [known[name] for name in args.names] if args.names else list(TABLES)
    now = _running(tables[0])
    every = [(problem, tile) for table in tables for problem, tiles in wanted(table)
             for tile in tiles]  # fmt: skip
    known = Known(args.known, now)
    gate = Gate(gate_cases(every), known)
    try:
        compiler, begun = Compiler(known), []
        for table in tables:
            made, kept = make(table, compiler)
            begun.append((table, made, kept))
            dropped = sum(made.dropped.values())
            print(f"{table.file}: {len(kept)} rows compile, {dropped} do not", flush=True)
        gated = gate.results()
    finally:
        gate.stop()
    if _running(tables[0]) != now:
        print("error: the kernels changed while the tables were made; run this again",
              file=sys.stderr)  # fmt: skip
        return 1
    stale = []
    for table, made, kept in begun:
        path, whole = args.out / table.file, finish(table, made, kept, gated, now)
        if args.check:
            if not same(path, whole):
                stale.append(path.name)
            continue
        save_table(path, whole)
        print(f"{path.name}: {len(whole.rows)} rows")
        for note in whole.header.notes:
            print(f"  {note}")
    for name in stale:
        print(
            f"{name} is not what the ladders, kernels and compiler make; run this without --check"
        )
    return 4 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
