"""`tilewright compare`: is B faster than A, and is it still right?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.blocks import blocks_bar
from tilewright.cli.common import (
    ModelPath,
    TablePath,
    epilog,
    model_name,
    note,
    set_threads,
    status,
    terminal_look,
    threads_option,
)
from tilewright.cli.params import BatchesParam, ShapeParam

if TYPE_CHECKING:
    from tilewright.measure import Ceiling
    from tilewright.ops.contract import Case, OpSpec
    from tilewright.tune.arms import CompareResult, Settings

_KINDS = {"tile": "--tile", "table": "--table", "rev": "--rev", "command": "--cmd"}


@click.command(
    "compare",
    epilog=epilog(
        "tilewright compare --op mmq --type Q4_1 --shape 1536,576 --m 512 \\",
        "    --tile 'panel(mr=8, nv=3, block_parts=16)' --tile 'panel(mr=4, nv=4, block_parts=16)'",
        "tilewright compare smollm2 --table before.json --table after.json",
        "tilewright compare smollm2 --table none --table tuned.json --html report.html",
        "tilewright compare smollm2 --rev main --rev . --test pp512 -o md",
        "tilewright compare smollm2 --activations float --activations int8",
        "tilewright compare --cmd 'python old.py' --cmd 'python new.py' --same-output",
    ),
)
@click.argument("model", type=ModelPath(hub=True), metavar="[MODEL]", required=False)
@click.option("--tile", "tile", multiple=True, help="Two tiles, A and then B, for a product.")
@click.option(
    "--table",
    multiple=True,
    type=TablePath(),
    help="Two tile tables, for MODEL or for products; none is a table without rows.",
)
@click.option(
    "--rev", multiple=True, help="Two git revisions of this package; . is the working tree."
)
@click.option("--cmd", "command", multiple=True, help="Two commands, timed from start to end.")
@click.option(
    "--activations",
    multiple=True,
    type=click.Choice(["float", "int8"]),
    help="Given twice, the two arms of MODEL; given once, the path of both.  [default: float]",
)
@click.option("--op", help="Op of the products; w4a16@cuda is that of the GPU.  [default: the one "
                           "that has --type]")  # fmt: skip
@click.option("--spec", help="Your own op instead of --op: file.py:NAME.")
@click.option("--type", "weight_type", help="Weight type of the products, such as Q4_1 or uint4.")
@click.option(
    "--shape", "shapes", type=ShapeParam(), multiple=True, help="N,K of a product's weight."
)
@click.option("--m", "batches", type=BatchesParam(), default="512", show_default=True, help="Rows.")
@click.option("--group", type=int, help="Values that share a scale (w4a16).  [default: 128]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Dtype of x in the products.",
)
@click.option(
    "--cache",
    type=click.Choice(["hot", "cold", "both"]),
    default="both",
    show_default=True,
    help="State of the caches before each launch of a product; two results, not one.",
)
@click.option(
    "--test",
    "tests",
    multiple=True,
    default=["pp512", "tg32"],
    help="Tests of MODEL: pp<n>, tg<n>, with ' @ d<n>' at depth.  [default: pp512, tg32]",
)
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="File of prompts, one a line, for the greedy ids.")  # fmt: skip
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="File whose first 256 tokens give the logits to compare.")  # fmt: skip
@click.option("--new-tokens", type=click.IntRange(min=1), default=32, show_default=True,
              help="Greedy ids a prompt.")  # fmt: skip
@click.option("--same-output", is_flag=True, help="Demand that both commands print the same.")
@click.option("--repo", type=click.Path(exists=True, file_okay=False, path_type=Path),
              default=".", help="Repository of --rev.  [default: here]")  # fmt: skip
@click.option("--python", multiple=True,
              help="Interpreter of each --rev, A's and then B's.  [default: this one, or a virtual "
                   "environment made for what the revision needs]")  # fmt: skip
@click.option("--ceiling", is_flag=True,
              help="Measure what this CPU can do at most; a product that beats it is an error, "
                   "since it skipped work.")  # fmt: skip
@click.option("--time-limit", type=float, help="Longest run of a command, in seconds.")
@click.option("--blocks", type=int, default=20, show_default=True, help="Paired blocks, >= 6.")
@click.option("--alpha", type=float, default=0.05, show_default=True, help="Significance.")
@click.option("--delta", type=float, default=0.005, show_default=True,
              help="Relative difference below which arms count as the same.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of operands and order.")
@click.option("-o", "--output", type=click.Choice(["terminal", "md", "json"]),
              default="terminal", show_default=True, help="Form of the result.")  # fmt: skip
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path),
              help="Also write a page to this file.")  # fmt: skip
@threads_option
def compare_command(
    model: Path | str | None, output: str, html: Path | None, **options: Any
) -> None:
    """Compare B with A in paired blocks: two tiles, tables, revisions, commands or paths.

    Both arms are verified before they are timed and again after, blocks of A, B and A again run
    in random order, and the verdict holds with the stated error rate. Arms of a MODEL also report
    whether their greedy ids agree, and the divergence of their logits.

    Exit codes: 0 holds, 3 verification failed, 4 SLOWER, 5 UNRESOLVED, 6 VOID.
    """
    kind = _kind(model, options)
    used = set_threads(options["threads"])
    from tilewright.report.compare import compare_report
    from tilewright.report.provenance import provenance
    from tilewright.tune.arms import Settings

    settings = Settings(options["blocks"], options["seed"], options["alpha"], options["delta"])
    record = provenance(["tilewright", *sys.argv[1:]], threads=used)
    if kind == "command":
        result = _commands(settings, **options)
    elif model is not None:
        result = _models(kind, model, settings, options, used)
    elif kind == "rev":
        result = _product_revisions(settings, options, used)
    else:
        result = _products(kind, settings, options)
    width, color = terminal_look()
    text = compare_report(result, output, provenance=record, width=width, color=color)
    click.echo(text, nl=False)
    if html is not None:
        from tilewright.report.page import write_page

        write_page("compare", result.to_dict(), html, provenance=record)
    if result.exit_code:
        sys.exit(result.exit_code)
    if result.interrupted:
        sys.exit(130)


def _kind(model: Path | str | None, options: dict[str, Any]) -> str:
    """Which pair of arms was given; a usage error if it is none, or more than one."""
    given = [kind for kind in _KINDS if options[kind]]
    activations = options["activations"]
    if not given and len(activations) == 2:
        given = ["activations"]
    names = ", ".join([*_KINDS.values(), "--activations"])
    if len(given) != 1:
        raise click.UsageError(f"give one of {names} twice: the arms A and B")
    (kind,) = given
    if len(options[kind]) != 2:
        raise click.UsageError(
            f"{_KINDS.get(kind, '--activations')} is given {len(options[kind])} times; give it "
            "twice: A, then B"
        )
    if kind != "activations" and len(activations) > 1:
        raise click.UsageError(f"--activations is given twice beside {_KINDS[kind]}; give it once")
    if kind == "activations" and model is None:
        raise click.UsageError("--activations as arms needs a MODEL")
    if kind in ("tile", "command") and model is not None:
        raise click.UsageError(f"{_KINDS[kind]} takes no MODEL")
    if kind in ("tile", "table", "rev") and model is None and not options["shapes"]:
        raise click.UsageError(
            f"{_KINDS[kind]} needs products: --op or --type, --shape N,K and --m"
            + ("" if kind == "tile" else "; or a MODEL")
        )
    if options["ceiling"] and (model is not None or kind not in ("tile", "table")):
        raise click.UsageError("--ceiling belongs to products: --tile or --table, and no MODEL")
    if options["ceiling"] and activations == ("int8",):
        raise click.UsageError("--ceiling is that of float32, and --activations int8 has another")
    if options["python"] and (kind != "rev" or len(options["python"]) != 2):
        raise click.UsageError("--python belongs to --rev and is given twice, A's and then B's")
    return kind


def _find_spec(options: dict[str, Any]) -> OpSpec:
    from tilewright.errors import UnsupportedError
    from tilewright.ops import catalog

    if options["spec"] is not None:
        spec: OpSpec = catalog.load_spec(options["spec"])
        return spec
    if options["op"] is not None:
        known = options["op"].partition("@")[0] in catalog.SPECS
        return (catalog.load_spec if known else catalog.find_spec)(options["op"])
    for spec in catalog.SPECS.values():
        if options["weight_type"] in spec.weight_types:
            return spec
    raise UnsupportedError(
        f"--type is {options['weight_type']!r}; no op of the catalog multiplies it, name one by "
        f"--op or --spec. They have: "
        + "; ".join(f"{s.name}: {', '.join(s.weight_types)}" for s in catalog.SPECS.values())
    )


def _cases(spec: OpSpec, options: dict[str, Any]) -> list[Case]:
    """The products, one a shape and batch."""
    from tilewright.errors import UnsupportedError
    from tilewright.ops.contract import Case

    weight_type = options["weight_type"] or spec.weight_types[0]
    if weight_type not in spec.weight_types:
        raise UnsupportedError(
            f"--type is {weight_type!r}; {spec.name} has {', '.join(spec.weight_types)}"
        )
    group = options["group"]
    if group is None:
        group = 128 if spec.name == "w4a16" else 0
    path = (options["activations"] or ("float",))[0]
    cases = [
        Case(spec.name, weight_type, options["dtype"], m, n, k, group, path)
        for n, k in options["shapes"]
        for m in options["batches"]
    ]
    return list({case.id: case for case in cases}.values())


def _caches(options: dict[str, Any]) -> tuple[str, ...]:
    return ("hot", "cold") if options["cache"] == "both" else (options["cache"],)


def _products(kind: str, settings: Settings, options: dict[str, Any]) -> CompareResult:
    """Two tiles, or the tiles of two tables, on products in this process."""
    from tilewright.ops.contract import spec_arch
    from tilewright.tune.arms import ArmInfo, CompareResult, run_contests
    from tilewright.tune.tile_arms import given_tiles, table_tiles, tile_contests

    spec = _find_spec(options)
    cases, caches = _cases(spec, options), _caches(options)
    arch = spec_arch(spec)
    values = options[kind]
    if kind == "tile":
        choose, titles = given_tiles(spec, *values), list(values)
    else:
        choose = table_tiles(spec, [case.problem(arch) for case in cases], *values)
        titles = [path.name for path in values]
    with blocks_bar("compare", len(cases) * len(caches) * settings.blocks) as bar:
        rows, interrupted = run_contests(
            tile_contests(
                spec,
                cases,
                choose,
                arch=arch,
                caches=caches,
                seed=options["seed"],
                threads=options["threads"],
            ),
            settings,
            on_block=bar.on_block,
            ceiling=_ceiling(arch) if options["ceiling"] else None,
        )
    a, b = (ArmInfo(n, t, "passed the gate") for n, t in zip("AB", titles, strict=True))
    return CompareResult(kind, spec.name, a, b, rows, interrupted=interrupted)


def _ceiling(arch: str) -> Ceiling:
    from tilewright.device import cpu_device
    from tilewright.errors import UnsupportedError
    from tilewright.model.peak import measure_ceiling

    if arch != cpu_device().arch:
        raise UnsupportedError(f"--ceiling is measured on this CPU; the products run on {arch}")
    with status("measuring the ceiling"):
        return measure_ceiling()


def _commands(
    settings: Settings,
    *,
    command: Sequence[str],
    same_output: bool,
    time_limit: float | None,
    **_: Any,
) -> CompareResult:
    from tilewright.errors import GateError
    from tilewright.tune.arms import ArmInfo, CompareResult, run_contests
    from tilewright.tune.commands import CommandArm, command_contest

    a, b = (CommandArm(n, c, time_limit) for n, c in zip("AB", command, strict=True))
    a(), b()
    if same_output and a.outputs.keys() != b.outputs.keys():
        raise GateError("the commands print different output, so nothing is timed (--same-output)")
    with blocks_bar("compare", 1 * settings.blocks) as bar:
        rows, interrupted = run_contests(
            [command_contest(a, b, same_output=same_output)], settings, on_block=bar.on_block
        )
    if len(a.outputs) > 1 or len(b.outputs) > 1:
        note = "What the commands print changes from run to run."
    elif a.outputs.keys() == b.outputs.keys():
        note = "Both commands print the same in every run; nothing else about them was verified."
    else:
        note = "The commands print different output; nothing about them was verified."
    infos = [ArmInfo(arm.name, f"`{arm.command}`") for arm in (a, b)]
    return CompareResult(
        "command", "wall time", infos[0], infos[1], rows, notes=(note,), interrupted=interrupted
    )


def _revisions(stack: ExitStack, options: dict[str, Any]) -> list[Any]:
    from tilewright.tune.revisions import checkout, repository_of

    repository = repository_of(options["repo"])
    return stack.enter_context(
        checkout(repository, options["rev"], options["python"], on_line=note)
    )


def _product_revisions(settings: Settings, options: dict[str, Any], threads: int) -> CompareResult:
    """Two revisions on products, each in its own process."""
    from tilewright.tune.arms import ArmInfo, CompareResult, run_contests
    from tilewright.tune.worker_contests import verify_workers, worker_contests
    from tilewright.tune.workers import Place, Pool

    spec = _find_spec(options)
    cases, caches = _cases(spec, options), _caches(options)
    opening = {
        "spec": _absolute(options["spec"]) or options["op"] or spec.name,
        "cases": [asdict(case, dict_factory=_public) for case in cases],
        "seed": options["seed"],
    }
    with ExitStack() as stack:
        revisions = _revisions(stack, options)
        places = [Place(r.source, r.python, threads) for r in revisions]
        pool = Pool(places)
        named = [("A", places[0]), ("B", places[1]), ("A'", places[0])]
        workers = []
        for name, place in named[: 2 if pool.shared else 3]:
            with status(f"starting {name}"):
                workers.append(stack.enter_context(pool.open(name, opening, place)))
        a, b = workers[:2]
        control = None if pool.shared else workers[2]
        with status("verifying"):
            said = verify_workers([a, b], options["seed"])
        with blocks_bar("compare", len(cases) * len(caches) * settings.blocks) as bar:
            rows, interrupted = run_contests(
                worker_contests(a, b, control, {c.id: 0 for c in cases}, caches=caches),
                settings,
                on_block=bar.on_block,
            )
        infos = [
            ArmInfo(w.name, r.title, said[w.name]) for w, r in zip((a, b), revisions, strict=True)
        ]
    return CompareResult("rev", spec.name, infos[0], infos[1], rows, interrupted=interrupted)


def _public(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if not name.startswith("_")}


def _absolute(spec: str | None) -> str | None:
    if spec is None:
        return None
    path, _, name = spec.rpartition(":")
    return f"{Path(path).resolve()}:{name}" if Path(path).is_file() else spec


def _models(
    kind: str, model: Path | str, settings: Settings, options: dict[str, Any], threads: int
) -> CompareResult:
    """Two arms of one model, each in its own process, and A once more in a third."""
    from tilewright.model.compare import ModelArm, compare_models, test_tokens
    from tilewright.tune.workers import Place

    try:
        tests = list(test_tokens(options["tests"]))
    except ValueError as error:
        raise click.UsageError(f"--test: {error}") from error
    common = {
        "model": str(model.resolve()) if isinstance(model, Path) else model,
        "activations": (options["activations"] or ("float",))[0],
        "tests": tests,
    }
    place, same_function = Place(threads=threads), True
    with ExitStack() as stack:
        if kind == "table":
            arms = [
                ModelArm(path.name, {**common, "table": str(path.resolve())}, place)
                for path in options["table"]
            ]
        elif kind == "activations":
            values = options["activations"]
            same_function = values[0] == values[1]
            arms = [
                ModelArm(f"activations {v}", {**common, "activations": v}, place) for v in values
            ]
        else:
            arms = [
                ModelArm(r.title, common, Place(r.source, r.python, threads))
                for r in _revisions(stack, options)
            ]
        speech = _speech(options)
        with blocks_bar("compare", len(tests) * settings.blocks) as bar:
            return compare_models(
                kind,
                model_name(model),
                arms,
                tests,
                settings,
                speech=speech,
                same_function=same_function,
                status=bar.status,
                on_block=bar.on_block,
            )


def _speech(options: dict[str, Any]) -> Any:
    from tilewright.model.compare import Speech

    def read(path: Path, option: str) -> str:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise click.BadParameter(
                f"{path} is not UTF-8; convert it first", param_hint=option
            ) from error
        if not text.strip():
            raise click.BadParameter(f"{path} is empty", param_hint=option)
        return text

    prompts = text = None
    if options["prompts"] is not None:
        prompts = [s for s in read(options["prompts"], "--prompts").splitlines() if s.strip()]
    if options["text"] is not None:
        text = read(options["text"], "--text")
    return Speech(prompts, text, options["new_tokens"])
