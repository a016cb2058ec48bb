"""Make the tile tables of AMD chips from published ladders: nothing here is a measurement.

    python benchmarks/make_published_tables.py                    all tables, into the package
    python benchmarks/make_published_tables.py gfx1151            one of them
    python benchmarks/make_published_tables.py --op mmq --op moe  only the rows of these ops
    python benchmarks/make_published_tables.py --check            exit 4 if a table is stale

A row is kept if its tile obeys the rules of the space, compiles for every arch of its table without
spills, within the chip's registers and LDS, and passes the gate in Triton's interpreter, on small
products around its own numbers. A row that is not is dropped, and the table's notes say why. No
kernel runs on a GPU, no time is taken: rows hold 0 samples, and their source is "published".

`published_ladders` (4-bit codes) and `published_llama_cpp` (GGUF products, mixtures, the scan) hold
what is published; `published_plans` makes tiles of this package of it, and says what a publication
leaves open. For 4-bit codes that is the way of dequantizing, which is the space's default for the
chip and dtype, and loads ahead that no line names: Triton's default of 2, or 1 where a tile with 2
would spill; the order "xw" and the bands of 8 rows of tiles are as published.

Run it again when the kernels of an op change: the hash of each op's stands in every table, and a
row whose kernels have changed is not used. Rows of ops that are not asked for stay as they are.
`--known` keeps what was found about kernels in a file: those that are made of the same functions as
then are not compiled and gated again.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE))

from published_ladders import TABLES, PublishedTable  # noqa: E402
from published_plans import PLANS, Plan  # noqa: E402
from source_digest import digest_of  # noqa: E402

from tilewright.errors import TilewrightError  # noqa: E402
from tilewright.tiles.table import (  # noqa: E402
    Running,
    TableHeader,
    TableRow,
    TileTable,
    load_table,
    row_key,
    save_table,
    shipped_folder,
)
from tilewright.tiles.tile import Problem, Tile  # noqa: E402

SOURCE = "published, not measured here"

Pairs = list[tuple[Problem, Tile]]


@dataclass
class Made:
    """Rows of one op for one table in the making, and why others were dropped."""

    table: PublishedTable
    plan: Plan
    pairs: Pairs = field(default_factory=list)
    rows: list[TableRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def drop(self, problem: Problem, why: str) -> None:
        kind = "" if self.plan.op == "w4a16" else f"{problem.weight_type} "
        self.dropped[f"{kind}{problem.act_dtype} {why}"] += 1

    def notes(self) -> tuple[str, ...]:
        """What the table says of these rows, each line with the op in front."""
        where = self.plan.notes(self.table)
        lines = (
            *where,
            "compiled for every arch of valid_for with no GPU: no spill, registers and LDS within "
            "the chip; passed the gate in Triton's interpreter"
            + (", with zero points" if self.plan.op == "w4a16" else "")
            + "; never timed by this package",
            *(f"dropped {count} rows of {what}" for what, count in sorted(self.dropped.items())),
        )
        return tuple(f"{self.plan.op}: {line}" for line in lines) if where else ()


def rule_broken(problem: Problem, tile: Tile, archs: Sequence[str]) -> str:
    """Which rule of the space a tile breaks on one of the archs; empty if none."""
    from tilewright.isa.compile import space_for

    for arch in archs:
        space = space_for(problem.op, arch, tile)
        assert space is not None
        try:
            space.check(tile, replace(problem, arch=arch))
        except TilewrightError as error:
            return str(error)
    return ""


class Known:
    """What was found about an op's kernels before, in a file; empty for other kernels."""

    def __init__(self, path: Path | None, plan: Plan, compiler: str) -> None:
        self._path, self._op = path, plan.op
        self._of = f"{digest_of(plan.kernels, without='hopper_')}, {_triton(compiler)}"
        kept = self._read().get(plan.op, {})
        self.found: dict[str, Any] = kept["found"] if kept.get("of") == self._of else {}

    def _read(self) -> dict[str, Any]:
        if self._path is None or not self._path.exists():
            return {}
        whole: dict[str, Any] = json.loads(self._path.read_text())
        return whole

    def keep(self, key: str, value: Any) -> None:
        self.found[key] = value
        if self._path is not None:
            whole = self._read() | {self._op: {"of": self._of, "found": self.found}}
            aside = self._path.with_suffix(".tmp")
            aside.write_text(json.dumps(whole))
            aside.replace(self._path)


class Compiler:
    """Compiles each kind of tile once, and says what forbids it."""

    def __init__(self, plan: Plan, known: Known) -> None:
        self._plan, self._known = plan, known

    def forbids(self, problem: Problem, tile: Tile, archs: Sequence[str]) -> str:
        """Why the compiled tile may not ship: on which arch it spills, or is refused."""
        from tilewright.isa.compile import compile_tile
        from tilewright.isa.resources import resources

        for arch in archs:
            small = self._plan.small(replace(problem, arch=arch), arch == archs[0])
            key = f"{arch} {tile} {' '.join(str(value) for value in asdict(small).values())}"
            if key not in self._known.found:
                try:
                    kernels = compile_tile(small.op, small, tile)
                except TilewrightError as error:
                    self._known.keep(key, f"{arch}: {error}")
                else:
                    faults = [
                        f"{arch}: {kernel.name} {why}"
                        for kernel in kernels
                        if (why := _over(resources(kernel)))
                    ]
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


def gate_orders(plan: Plan, pairs: Pairs) -> dict[str, dict[str, Any]]:
    """What the gate has to look at, by name; the smallest group first."""
    orders: dict[str, dict[str, Any]] = {}
    for problem, tile in sorted(pairs, key=lambda pair: pair[0].group):
        name, case, launched = plan.gated(problem, tile)
        order = {"op": plan.op, "tile": launched.as_dict(), "case": asdict(case)}
        orders.setdefault(name, order)
    return orders


class Gate:
    """The gate in a process of its own, in which Triton interprets; it runs from the start."""

    def __init__(self, orders: Mapping[str, Mapping[str, Any]], known: Mapping[str, Known]) -> None:
        self._known, self._orders = known, orders
        self._folder = tempfile.TemporaryDirectory()
        left = {name: order for name, order in orders.items()
                if self._key(name) not in known[order["op"]].found}  # fmt: skip
        path = Path(self._folder.name) / "orders.json"
        path.write_text(json.dumps(left))
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--gate", str(path)],
            env={**os.environ, "TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._lines: list[tuple[str, Any]] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _key(self, name: str) -> str:
        return f"{name} {json.dumps(self._orders[name], sort_keys=True)}"

    def _listen(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            name, found = json.loads(line)
            # Standard output is read for the compiler's messages meanwhile.
            print(f"{name}: {found['reason']}", file=sys.stderr, flush=True)
            self._lines.append((name, found))

    def results(self) -> Mapping[str, dict[str, Any]]:
        """What it found, by name; waits for it.

        Raises:
            SystemExit: it broke.
        """
        code = self._child.wait()
        self.stop()
        if code:
            raise SystemExit(f"error: the gate's process ended with code {code}")
        return {name: self._known[order["op"]].found[self._key(name)]
                for name, order in self._orders.items()}  # fmt: skip

    def stop(self) -> None:
        """End the process; what it has found is kept."""
        self._child.kill()
        self._child.wait()
        self._listener.join()
        if self._child.stdout is not None:
            self._child.stdout.close()
        for name, found in self._lines:
            self._known[self._orders[name]["op"]].keep(self._key(name), found)
        self._lines.clear()
        self._folder.cleanup()


def gate_child(path: Path) -> None:
    """Run the gate on every order of a file; TRITON_INTERPRET is set."""
    from tilewright.device import INTERPRETER
    from tilewright.ops.catalog import spec_for
    from tilewright.ops.contract import Case
    from tilewright.tune.gate import gate

    for name, order in json.loads(path.read_text()).items():
        tile, case = Tile.from_mapping(order["tile"]), dict(order["case"])
        case["flags"] = tuple(case["flags"])
        result = gate(spec_for(order["op"], INTERPRETER), tile, [Case(**case)])
        found = {"passed": result.passed, "reason": str(result), "error": result.oracle_error}
        print(json.dumps([name, found]), flush=True)


def make(table: PublishedTable, plan: Plan, compiler: Compiler) -> Made:
    """Rule-checked and compiled candidates of a table, and what was dropped."""
    made = Made(table, plan)
    for problem, tiles in plan.wanted(table):
        reasons = []
        for tile in tiles:
            why = rule_broken(problem, tile, table.archs)
            why = why or compiler.forbids(problem, tile, table.archs)
            if not why:
                made.pairs.append((problem, tile))
                break
            reasons.append(f"{tile}: {why}")
        else:
            made.drop(problem, "; ".join(reasons))
    return made


def judge(made: Made, gated: Mapping[str, Mapping[str, Any]]) -> None:
    """Rows of what has passed the gate."""
    for problem, tile in made.pairs:
        result = gated[made.plan.gated(problem, tile)[0]]
        if result["passed"]:
            error = float(result["error"])
            made.rows.append(TableRow(problem, tile, 0.0, 0.0, 0, error, 1, {}, "published"))
        else:
            made.drop(problem, f"{tile}: {result['reason']}")


def whole_table(
    old: TileTable | None, parts: Sequence[Made], now: Mapping[str, Running]
) -> TileTable:
    """The rows that were made, beside those of other ops in the old table.

    Raises:
        SystemExit: those were verified under another Triton, and a table names one.
    """
    table, made_now = parts[0].table, {made.plan.op for made in parts}
    compiler = next(iter(now.values())).compiler
    rows = [row for made in parts for row in made.rows]
    notes = [(made.plan.op, note) for made in parts for note in made.notes()]
    hashes = {made.plan.op: now[made.plan.op].kernel_hash for made in parts if made.rows}
    versions = {op: now[op].op_version for op in hashes}
    if old is not None:
        kept = [row for row in old.rows if row.problem.op not in made_now]
        if kept and _triton(old.header.compiler) != _triton(compiler):
            raise SystemExit(
                f"error: {table.file} has rows of {_triton(old.header.compiler)}, here is "
                f"{_triton(compiler)}: make all ops anew, without --op"
            )
        rows += kept
        for op in {row.problem.op for row in kept}:
            hashes[op] = old.header.hash_of(op)
            versions[op] = old.header.op_versions[op]
        for note in old.header.notes:
            op = note.partition(": ")[0]
            if op not in {plan.op for plan in PLANS}:  # of a table that had one op only
                op, note = "w4a16", f"w4a16: {note}"
            if op not in made_now:
                notes.append((op, note))
    header = TableHeader(
        arch=table.archs[0],
        valid_for=table.archs,
        units=0,
        device=table.device,
        compiler=compiler,
        kernel_hash=", ".join(f"{op}={value}" for op, value in sorted(hashes.items())),
        op_versions=dict(sorted(versions.items())),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        source=SOURCE,
        notes=tuple(note for _, note in sorted(notes, key=lambda pair: pair[0])),
    )
    return TileTable(header, tuple(sorted(rows, key=lambda row: row_key(row.problem))))


def _triton(compiler: str) -> str:
    parts = (part.strip() for part in compiler.split(","))
    return next((part for part in parts if part.startswith("triton ")), "no triton")


def same(old: TileTable | None, new: TileTable) -> bool:
    """Whether the file says what was made, whenever it was."""
    if old is None:
        return False
    dated = replace(new.header, date=old.header.date, compiler=old.header.compiler)
    same_triton = _triton(old.header.compiler) == _triton(new.header.compiler)
    return same_triton and old.rows == new.rows and old.header == dated


def _running(plans: Sequence[Plan]) -> dict[str, Running]:
    """What identifies the kernels as their files are now, by op."""
    from tilewright.ops.catalog import spec_for
    from tilewright.ops.choose import running_of

    return {plan.op: running_of(spec_for(plan.op, TABLES[0].archs[0])) for plan in plans}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="tables, gfx1151 for instance; default: all")
    parser.add_argument("--op", action="append", choices=[plan.op for plan in PLANS],
                        help="make only its rows, and leave others as they are")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="write nothing; exit 4 if stale")
    parser.add_argument("--out", type=Path, default=shipped_folder())
    parser.add_argument("--known", type=Path, help="keep what is found in this file, and go on")
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    tables = {Path(table.file).stem: table for table in TABLES}
    strange = sorted(set(args.names) - set(tables))
    if strange:
        parser.error(f"there is no ladder for {', '.join(strange)}; known are {', '.join(tables)}")
    args.tables = [tables[name] for name in args.names] if args.names else list(TABLES)
    args.plans = [plan for plan in PLANS if args.op is None or plan.op in args.op]
    return args


def main() -> int:
    args = _options()
    if args.gate:
        gate_child(args.gate)
        return 0
    tables: Sequence[PublishedTable] = args.tables
    plans: Sequence[Plan] = args.plans
    now = _running(plans)
    known = {plan.op: Known(args.known, plan, now[plan.op].compiler) for plan in plans}
    orders: dict[str, dict[str, Any]] = {}
    for plan in plans:
        pairs = [(problem, tile) for table in tables for problem, tiles in plan.wanted(table)
                 for tile in tiles]  # fmt: skip
        orders |= gate_orders(plan, pairs)
    gate = Gate(orders, known)
    begun: dict[str, list[Made]] = {}
    try:
        for plan in plans:
            compiler = Compiler(plan, known[plan.op])
            for table in tables:
                made = make(table, plan, compiler)
                begun.setdefault(table.file, []).append(made)
                counts = f"{len(made.pairs)} rows compile, {made.dropped.total()} do not"
                print(f"{table.file} {plan.op}: {counts}", flush=True)
        gated = gate.results()
    finally:
        gate.stop()
    if _running(plans) != now:
        print("error: the kernels changed while the tables were made; run this again",
              file=sys.stderr)  # fmt: skip
        return 1
    stale = []
    for file, parts in begun.items():
        for made in parts:
            judge(made, gated)
        path = args.out / file
        old = load_table(path) if path.exists() else None
        whole = whole_table(old, parts, now)
        if not whole.rows:  # nothing is published of these ops for its chips, or all was dropped
            print(f"{path.name}: no rows, left as it is")
            continue
        if args.check:
            if not same(old, whole):
                stale.append(path.name)
            continue
        save_table(path, whole)
        counts = Counter(row.problem.op for row in whole.rows)
        print(f"{path.name}: {', '.join(f'{n} rows of {op}' for op, n in sorted(counts.items()))}")
        for note in whole.header.notes:
            print(f"  {note}")
    for name in stale:
        print(
            f"{name} is not what the ladders, kernels and compiler make; run this without --check"
        )
    return 4 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
