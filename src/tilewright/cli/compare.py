"""`tilewright compare`: is B faster than A, and is it still right?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tilewright.cli.common import (
    ModelPath,
    TablePath,
    device_option,
    epilog,
    set_threads,
    terminal_look,
    threads_option,
)
from tilewright.cli.params import BatchesParam, ReportPath, SeedParam, ShapeParam

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
@click.option("--group", type=int, help="Values that share a scale (w4a16), heads that share B and "
              "C (ssd).  [default: 128; all heads]")  # fmt: skip
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Dtype of x in the products.  [default: float32 on the CPU, float16 on a GPU]",
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
@click.option(
    "--seed", type=SeedParam(), default=0, show_default=True, help="Of operands and order."
)
@click.option("-o", "--output", type=click.Choice(["terminal", "md", "json"]),
              default="terminal", show_default=True, help="Form of the result.")  # fmt: skip
@click.option("--html", type=ReportPath(),
              help="Also write a page to this file.")  # fmt: skip
@device_option
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
    if options["dtype"] is None:
        options["dtype"] = "float32" if options["device"] == "cpu" else "float16"
    used = set_threads(options["threads"])
    from tilewright.cli.compare_arms import commands, models, product_revisions, products
    from tilewright.report.compare import compare_report
    from tilewright.report.provenance import provenance
    from tilewright.tune.arms import Settings

    settings = Settings(options["blocks"], options["seed"], options["alpha"], options["delta"])
    record = provenance(["tilewright", *sys.argv[1:]], threads=used)
    if kind == "command":
        result = commands(settings, **options)
    elif model is not None:
        result = models(kind, model, settings, options, used)
    elif kind == "rev":
        result = product_revisions(settings, options, used)
    else:
        result = products(kind, settings, options)
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
