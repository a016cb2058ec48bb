"""`tilewright tune`: find faster tiles, each verified before it was timed."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.common import (
    ModelPath,
    activations_option,
    device_option,
    epilog,
    load_model,
    model_name,
    on_device,
    set_threads,
    show,
    threads_option,
)
from tilewright.cli.params import BatchesParam, ReportPath, SeedParam, ShapeParam

if TYPE_CHECKING:
    from tilewright.ops.contract import OpSpec
    from tilewright.tiles.tile import Tile
    from tilewright.tune.tuner import Progress, Settings, Target

_MODEL_BATCHES = (1, 512)
_OP_BATCHES = (1, 16, 512)
_FEW_ROWS = 16  # up to here a product waits for its weight, beyond for arithmetic


@click.command(
    "tune",
    epilog=epilog(
        "tilewright tune smollm2",
        "tilewright tune model.gguf --m 1,16,512 --budget 600 --html tuned.html",
        "tilewright tune --op mmq --type Q4_1 --shape 1536,576 --m 1,16,512",
        "tilewright tune --op w4a16 --device cuda --shape 24576,4096 --m 1,16,1024",
        "tilewright tune --spec my_kernel.py:SPEC --budget 30",
        "tilewright tune smollm2 --resume",
        "tilewright tune smollm2 --ray head-node:6379 --budget 600",
    ),
)
@click.argument("model", type=ModelPath(hub=True), metavar="[MODEL]", required=False)
@click.option("--op", help="Tune products of this op instead of a model's.")
@click.option("--spec", help="Tune your own op: file.py:NAME.")
@click.option("--type", "weight_type", help="Weight type of the products, such as Q4_1 or uint4.")
@click.option(
    "--shape", "shapes", type=ShapeParam(), multiple=True, help="N,K of a product's weight."
)
@click.option(
    "--m",
    "batches",
    type=BatchesParam(),
    help="Rows of x.  [default: 1,512 of a model (decode and prefill), else 1,16,512]",
)
@click.option("--group", type=int, help="Values that share a scale (w4a16), heads that share B and "
              "C (ssd).  [default: 128; all heads]")  # fmt: skip
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Dtype of x in products that are no model's.  [default: float32 on the CPU, float16 on "
    "a GPU]",
)
@activations_option
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds, all products together.",
)
@click.option(
    "--strategy",
    type=click.Choice(["local", "random", "exhaustive"]),
    default="local",
    show_default=True,
    help="How candidates are chosen.",
)
@click.option(
    "--cache",
    type=click.Choice(["auto", "hot", "cold"]),
    default="auto",
    show_default=True,
    help="State of the caches before each launch; auto is cold for few rows, as in decode.",
)
@click.option("--blocks", type=click.IntRange(min=6), default=20, show_default=True,
              help="Paired blocks of the finals.")  # fmt: skip
@click.option(
    "--seed", type=SeedParam(), default=0, show_default=True, help="Of operands and search."
)
@click.option("--resume", is_flag=True, help="Continue the last run that was made like this one.")
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path),
              help="Log of everything tried.  [default: beside the table]")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path),
              help="Table to write.  [default: where the ops look for it]")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be tuned; run and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
@click.option("--html", type=ReportPath(),
              help="Also write a page to this file.")  # fmt: skip
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Tune on the devices of a Ray cluster: HOST:PORT, or auto for the one on this machine. "
    "--out may then be a folder.",
)
@device_option
@threads_option
def tune_command(
    model: Path | str | None,
    out: Path | None,
    log: Path | None,
    as_json: bool,
    html: Path | None,
    **options: Any,
) -> None:
    """Tune the tiles of a MODEL's own products, of products you name, or of your own op.

    Every candidate is compiled and verified in a process of its own before it is timed, and the
    best are measured again beside the tile in use. A table changes only where one is faster for
    certain. Products that take the most of a model's time come first. Ctrl-C keeps what was found.

    Exit codes: 0 the table holds, 3 a tile in use was wrong or none is right, 5 no comparison was
    resolved, 6 all were void.
    """
    _check_request(model, options)
    if out is not None and out.is_dir() and options["ray"] is None:
        raise click.UsageError(f"--out {out} is a folder; name the table, such as {out}/tuned.json")
    fleet = None
    if options["ray"] is not None:
        from tilewright.cli.tune_fleet import Fleet

        fleet = Fleet(options)  # whether it answers is known before a model is loaded
    used = set_threads(options["threads"])
    from tilewright.report.provenance import provenance
    from tilewright.report.tune import plan_table, tune_table
    from tilewright.tune.tuner import tune

    spec, targets, settings = _request(model, options)
    record = provenance(["tilewright", *sys.argv[1:]], threads=used)
    specs = None if spec is None else {spec.name: spec}
    if fleet is not None:
        with _progress(options["budget"]) as on_event:
            tuned = fleet.tune(targets, specs, settings, out, log, record, on_event)
        fleet.show(tuned, _subject(model, spec, options), as_json, html)
        return
    if options["dry_run"]:
        from tilewright.tune.tuner import plan

        planned = plan(targets, specs=specs, out=out, log=log, settings=settings)
        if as_json:
            click.echo(json.dumps({**planned.to_dict(), "provenance": record}, allow_nan=False))
        else:
            show(plan_table(planned))
        return
    with _gate(spec, options, used) as gate, _progress(options["budget"]) as on_event:
        report = tune(
            targets,
            specs=specs,
            out=out,
            log=log,
            budget_s=options["budget"],
            strategy=options["strategy"],
            seed=options["seed"],
            resume=options["resume"],
            on_event=on_event,
            settings=settings,
            gate=gate,
            provenance=record,
        )
    report.settings["subject"] = _subject(model, spec, options)
    if as_json:
        click.echo(json.dumps(report.to_dict(), allow_nan=False))
    else:
        show(tune_table(report))
    if html is not None:
        from tilewright.report.page import write_page

        write_page("tune", report.to_dict(), html)
    if report.exit_code:
        sys.exit(report.exit_code)


def _check_request(model: Path | str | None, options: dict[str, Any]) -> None:
    asked = {"MODEL": model, "--op": options["op"], "--spec": options["spec"]}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) != 1:
        raise click.UsageError(
            f"give one of MODEL, --op and --spec; got {', '.join(given) or 'none'}"
        )
    if model is not None and (options["shapes"] or options["weight_type"] or options["group"]):
        raise click.UsageError("--shape, --type and --group do not go with a MODEL: it has its own")
    if options["op"] is not None and not options["shapes"]:
        raise click.UsageError("--op needs --shape N,K, such as --shape 1536,576")


def _request(
    model: Path | str | None, options: dict[str, Any]
) -> tuple[OpSpec | None, list[Target], Settings]:
    """A user's op or None, what to tune, and how."""
    from tilewright.tune.rounds import Timing
    from tilewright.tune.tuner import Settings, leaves_threads

    timing = Timing(blocks=options["blocks"], cache=options["cache"])
    if model is not None:
        targets, allow = _of_model(model, options)
        return None, targets, Settings(timing=timing, allow=allow)
    if options["op"] is not None:
        return None, _of_products(options), Settings(timing=timing, allow=leaves_threads)
    from tilewright.ops.catalog import load_spec

    spec = load_spec(options["spec"])
    return spec, _of_spec(spec, options), Settings(timing=timing, allow=leaves_threads)


def _of_model(
    model: Path | str, options: dict[str, Any]
) -> tuple[list[Target], Callable[[Tile], bool]]:
    """A model's distinct products at each number of rows, and the tiles that it can run."""
    from tilewright.device import arch_of
    from tilewright.errors import UnsupportedError
    from tilewright.model.fuse import CAPTURED, why_not_fused
    from tilewright.model.layers import model_problems
    from tilewright.model.placement import device_of
    from tilewright.tiles.tile import Problem
    from tilewright.tune.tuner import Target, leaves_threads

    loaded, _ = load_model(
        model, activations=options["activations"], needs_tokenizer=False, device=options["device"]
    )
    products = model_problems(loaded)
    if not products:
        raise UnsupportedError(f"{model_name(model)} has no packed product; nothing can be tuned")
    dtype = str(loaded.dtype).removeprefix("torch.")
    captured = why_not_fused(loaded) is None
    arch = arch_of(device_of(loaded))
    del loaded
    gc.collect()

    targets = []
    batches = options["batches"] or _MODEL_BATCHES
    for m in batches:
        # A prompt needs the logits of its last token only, so the output matrix sees one row.
        passed = [p for p in products if m == 1 or not p.name.endswith("lm_head")]
        problems = [
            Problem(p.op, arch, dtype, p.type, options["activations"], m, p.N, p.K,
                    p.group) for p in passed
        ]  # fmt: skip
        work = [p.count * _work(q) for p, q in zip(passed, problems, strict=True)]
        targets += [
            Target(problem, part / sum(work) / len(batches), product.name)
            for product, problem, part in zip(passed, problems, work, strict=True)
        ]

    def allow(tile: Tile) -> bool:
        return leaves_threads(tile) and (not captured or tile.algorithm in CAPTURED)

    return targets, allow


def _work(problem: Any) -> float:
    """What the time of a product grows with: bytes for few rows, else operations."""
    from tilewright.ops.catalog import find_spec

    spec = find_spec(problem.op)
    return spec.bytes(problem) if problem.M <= _FEW_ROWS else spec.flops(problem)


def _of_products(options: dict[str, Any]) -> list[Target]:
    from tilewright.errors import UnsupportedError
    from tilewright.ops.catalog import load_spec

    spec = load_spec(on_device(options["op"], options["device"]))
    if spec.space is None:
        raise UnsupportedError(
            f"--op is {spec.name}, which chooses no tiles on --device {options['device']}: there "
            "is nothing to tune"
        )
    return _products(spec, options["shapes"], options["batches"] or _OP_BATCHES, options)


def _of_spec(spec: OpSpec, options: dict[str, Any]) -> list[Target]:
    """The products that were named, else the largest of the spec's own cases of each type."""
    if options["shapes"]:
        return _products(spec, options["shapes"], options["batches"] or _OP_BATCHES, options)
    from tilewright.ops.contract import spec_arch
    from tilewright.tune.tuner import Target

    plain = [case for case in spec.cases if case.M and not case.flags]
    largest: dict[tuple[Any, ...], Any] = {}
    for case in plain or [case for case in spec.cases if case.M]:
        key = (case.weight_type, case.act_dtype, case.activations, case.group)
        if key not in largest or _size(case) > _size(largest[key]):
            largest[key] = case
    return [Target(case.problem(spec_arch(spec))) for case in largest.values()]


def _size(case: Any) -> int:
    return int(case.M * case.N * case.K)


def _products(
    spec: OpSpec,
    shapes: Sequence[tuple[int, int]],
    batches: Sequence[int],
    options: dict[str, Any],
) -> list[Target]:
    from tilewright.device import kind_of
    from tilewright.formats.blocks import BLOCK_TYPES
    from tilewright.ops.catalog import SPECS
    from tilewright.ops.contract import Case, spec_arch
    from tilewright.tiles.tile import m_bucket
    from tilewright.tune.tuner import Target

    weight_type = options["weight_type"] or spec.weight_types[0]
    if weight_type not in spec.weight_types:
        raise click.UsageError(
            f"--type is {weight_type!r}; {spec.name} has {', '.join(spec.weight_types)}"
        )
    group = options["group"]
    if group is None:
        group = 128 if spec.name == "w4a16" else 0
    arch = spec_arch(spec)
    dtype = options["dtype"] or ("float32" if kind_of(arch) == "cpu" else "float16")
    targets = []
    for n, k in shapes:
        if spec.name == "w4a16" and group > 0 and k % group:
            raise click.UsageError(f"--shape {n},{k}: K must be a multiple of --group {group}")
        if spec.name in SPECS and weight_type in BLOCK_TYPES:
            block = BLOCK_TYPES[weight_type].block_size
            if k % block:
                raise click.UsageError(
                    f"--shape {n},{k}: K must be a multiple of {block}, the values of a "
                    f"{weight_type} block"
                )
        for m in batches:
            case = spec.fit(Case(spec.name, weight_type, dtype, m_bucket(m), n, k, group,
                                 options["activations"]))  # fmt: skip
            if (case.N, case.K) != (n, k):
                raise click.UsageError(
                    f"--shape {n},{k}: {spec.name} {weight_type} has no such shape; the nearest is "
                    f"{case.N},{case.K}"
                )
            problem = case.problem(arch)
            few = problem.M <= _FEW_ROWS
            targets.append(Target(problem, spec.bytes(problem) if few else spec.flops(problem)))
    return _equal_batches(targets)


def _equal_batches(targets: list[Target]) -> list[Target]:
    """Shares within each number of rows, so that prefill does not crowd out decode."""
    from dataclasses import replace

    total: dict[int, float] = {}
    for target in targets:
        total[target.problem.M] = total.get(target.problem.M, 0.0) + target.share
    return [replace(t, share=t.share / total[t.problem.M]) for t in targets]


def _subject(model: Path | str | None, spec: OpSpec | None, options: dict[str, Any]) -> str:
    if model is not None:
        return model_name(model)
    if spec is not None:
        return spec.name
    return f"{options['op']} {options['weight_type'] or ''}".strip()


@contextmanager
def _gate(spec: OpSpec | None, options: dict[str, Any], threads: int) -> Iterator[Any]:
    """The gatekeeper of a user's op; None lets the tuner start its own."""
    if spec is None:
        yield None
        return
    from tilewright.tune.isolate import IsolatedGate, sources

    own = sources({spec.name: options["spec"]})
    with IsolatedGate(own, seed=options["seed"], threads=threads) as gate:
        yield gate


@contextmanager
def _progress(budget_s: float) -> Iterator[Callable[[Progress], Any] | None]:
    """A bar over the budget on stderr; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("{task.fields[place]}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[counts]}"),
        TextColumn("{task.fields[best]}", markup=False),
        TextColumn("{task.fields[text]}", style="dim", markup=False),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=budget_s, place="tune", left="", counts="", best="", text="")

        def on_event(now: Progress) -> None:
            best = ""
            if now.best is not None:
                best = f"best so far {now.best:.3f}x {now.best_tile}"
            bar.update(
                task,
                completed=budget_s - now.seconds_left,
                place=f"{now.index}/{now.problems}" if now.index else "tune",
                left=f"{now.seconds_left:.0f} s left",
                counts=f"{now.tried} tried, {now.rejected} rejected",
                best=best,
                text=now.text,
            )

        yield on_event
