"""`tilewright ladder`: what each change of a stack is worth, and whether it is right."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.blocks import blocks_bar
from tilewright.cli.common import (
    ModelPath,
    device_option,
    epilog,
    model_name,
    note,
    on_device,
    set_threads,
    terminal_look,
    threads_option,
)
from tilewright.cli.params import ReportPath, SeedParam

if TYPE_CHECKING:
    from tilewright.tune.ladder_file import Ladder
    from tilewright.tune.revisions import Revision


@click.command(
    "ladder",
    epilog=epilog(
        "tilewright ladder benchmarks/ladders/cpu-smollm2.toml",
        "tilewright ladder my.toml model.gguf --blocks 30 -o md > ladder.md",
        "tilewright ladder my.toml --no-leave-one-out -o json > ladder.json",
        "tilewright ladder tiles.toml --spec my_kernel.py:SPEC",
    ),
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("model", type=ModelPath(hub=True), metavar="[MODEL]", required=False)
@click.option("--spec", help="Your own op, file.py:NAME, instead of the spec that FILE names for "
                              "its products.")  # fmt: skip
@click.option("--blocks", type=int, help="Paired blocks, >= 6.  [default: the file's, or 20]")
@click.option("--leave-one-out/--no-leave-one-out", default=True, show_default=True,
              help="Also take each change out of the finished stack.")  # fmt: skip
@click.option("--new-tokens", type=click.IntRange(min=1), default=32, show_default=True,
              help="Greedy ids a prompt.")  # fmt: skip
@click.option("--repo", type=click.Path(exists=True, file_okay=False, path_type=Path),
              default=".", help="Repository of the change sets' rev.  [default: here]")  # fmt: skip
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
def ladder_command(
    file: Path,
    model: Path | str | None,
    spec: str | None,
    blocks: int | None,
    leave_one_out: bool,
    new_tokens: int,
    repo: Path,
    alpha: float,
    delta: float,
    seed: int,
    output: str,
    html: Path | None,
    device: str,
    threads: int | None,
) -> None:
    """Put change sets on a base one by one, and verify and time every rung.

    FILE is TOML (or YAML): a base, and rungs that set tiles, a table, the activation path, a
    revision, threads or the environment. Each rung is held against the one below and against the
    base; a test named as control must not move. A rung that fails verification is shown as WRONG
    with its apparent gain and is left out of what follows.

    Exit codes: 0 holds, 3 a rung is WRONG, 4 a rung is SLOWER than the one below, 5 UNRESOLVED,
    6 VOID or a control that moved.
    """
    from tilewright.tune.ladder_file import read_ladder

    ladder = read_ladder(file)
    used = set_threads(threads)
    from tilewright.report.ladder import ladder_report
    from tilewright.report.provenance import provenance
    from tilewright.tune.arms import Settings
    from tilewright.tune.ladder import run_ladder

    settings = Settings(blocks or ladder.blocks or 20, seed, alpha, delta)
    record = provenance(["tilewright", *sys.argv[1:]], threads=used)
    with ExitStack() as arms:
        revisions = _revisions(arms, ladder, repo)
        bench, subject = _bench(
            ladder, file, model, spec, revisions, used, seed, new_tokens, device
        )
        sets = len(ladder.rungs)
        left = sets - 1 if leave_one_out else 0
        tests = len(bench.tests())
        total = settings.blocks * (sets * tests + left * (tests - len(ladder.control)))
        bar = arms.enter_context(blocks_bar("ladder", total))
        result = run_ladder(
            ladder,
            bench,
            settings,
            subject=subject,
            leave_one_out=leave_one_out,
            status=bar.status,
            on_block=bar.on_block,
        )
    width, color = terminal_look()
    text = ladder_report(result, output, provenance=record, width=width, color=color)
    click.echo(text, nl=False)
    if html is not None:
        from tilewright.report.page import write_page

        write_page("ladder", result.to_dict(), html, provenance=record)
    if result.exit_code:
        sys.exit(result.exit_code)
    if result.interrupted:
        sys.exit(130)


def _revisions(arms: ExitStack, ladder: Ladder, repo: Path) -> dict[str, Revision]:
    from tilewright.model.ladder import revisions_of

    wanted = revisions_of(ladder)
    if not wanted:
        return {}
    from tilewright.tune.revisions import checkout, repository_of

    ready = arms.enter_context(checkout(repository_of(repo), wanted, on_line=note))
    return dict(zip(wanted, ready, strict=True))


def _bench(
    ladder: Ladder,
    file: Path,
    model: Path | str | None,
    spec_text: str | None,
    revisions: dict[str, Revision],
    threads: int,
    seed: int,
    new_tokens: int,
    device: str,
) -> tuple[Any, str]:
    """What opens the arms, and what reports call their subject."""
    from tilewright.model.compare import Speech
    from tilewright.model.ladder import ModelBench, ProductBench, spec_text_of

    if ladder.products:
        if model is not None:
            raise click.UsageError(f"{file.name} is about products, and takes no MODEL")
        from tilewright.ops import catalog

        if spec_text is None:
            text = on_device(spec_text_of(ladder.spec or "mmq", file.parent), device)
        else:
            text = spec_text_of(spec_text, Path.cwd())
        spec = catalog.load_spec(text)
        bench = ProductBench(spec, text, ladder, revisions=revisions, threads=threads, seed=seed)
        return bench, spec.name
    if spec_text is not None:
        raise click.UsageError(f"--spec is about products, and {file.name} has none")
    if model is None:
        if ladder.model is None:
            raise click.UsageError(f"{file.name} names no model; give it as MODEL")
        beside = file.parent / ladder.model
        name = str(beside) if beside.exists() else ladder.model
        model = ModelPath(hub=True).convert(name, None, None)
    path = str(model.resolve()) if isinstance(model, Path) else model
    speech = Speech(new_tokens=new_tokens)
    model_bench = ModelBench(
        path,
        ladder,
        speech=speech,
        revisions=revisions,
        threads=threads,
        seed=seed,
        device=device,
    )
    return model_bench, model_name(model)
