"""`tilewright profile`: which kernels a model's time goes to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tilewright.cli.common import (
    activations_option,
    epilog,
    load_model,
    model_argument,
    model_name,
    progress_bar,
    set_threads,
    status,
    terminal_look,
    threads_option,
)

_MOST_ROWS = 512  # a longer prompt runs the same kernels
_LARGE = 1 << 24  # values of an output matrix, which is only ever applied to one row


@click.command(
    "profile",
    epilog=epilog(
        "tilewright profile smollm2",
        "tilewright profile model.gguf -p 2048 -n 0 --activations int8 -o md",
        "tilewright profile model.gguf -p 0 -n 32 -d 4096 --ceiling",
    ),
)
@model_argument
@click.option("-p", "--n-prompt", type=click.IntRange(min=0), default=512, show_default=True,
              help="Tokens of the prompt; 0 for none.")  # fmt: skip
@click.option("-n", "--n-gen", type=click.IntRange(min=0), default=16, show_default=True,
              help="Single tokens after it; 0 for none.")  # fmt: skip
@click.option("-d", "--n-depth", type=click.IntRange(min=0), default=0, show_default=True,
              help="Tokens already in the context.")  # fmt: skip
@click.option("-r", "--repetitions", type=click.IntRange(min=1), default=5, show_default=True,
              help="Passes of the prompt.")  # fmt: skip
@click.option("--ceiling", is_flag=True,
              help="Measure what this machine can do, and state rates against it.")  # fmt: skip
@click.option("--no-verify", is_flag=True,
              help="Leave out the check of the model's products beforehand.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the token ids.")
@click.option("-o", "--output", type=click.Choice(["terminal", "md", "json"]),
              default="terminal", show_default=True, help="Form of the result.")  # fmt: skip
@activations_option
@threads_option
def profile_command(
    model: Path | str,
    n_prompt: int,
    n_gen: int,
    n_depth: int,
    repetitions: int,
    ceiling: bool,
    no_verify: bool,
    seed: int,
    output: str,
    activations: str,
    threads: int | None,
) -> None:
    """Time by role, op and weight type: which kernels are hot, for a prompt and for a token.

    Each launch of a captured model is timed on the model's own buffers, in order; other models are
    timed by hooks around their modules. The report states what timing adds, and how far the parts
    add up to a pass without instruments.
    """
    if not n_prompt and not n_gen:
        raise click.UsageError("nothing to time: give -p or -n a value above 0")
    used = set_threads(threads)
    from tilewright.model.profile import profile
    from tilewright.report.profile import profile_report
    from tilewright.report.provenance import provenance

    loaded, _ = load_model(model, activations=activations, needs_tokenizer=False)
    notes = ["Not verified (--no-verify)."]
    if not no_verify:
        notes = [_verified(loaded, activations, n_prompt, n_gen, seed)]
    peak = None
    if ceiling:
        from tilewright.model.peak import measure_ceiling

        with status("measuring the ceiling"):
            peak = measure_ceiling(used)
    record = provenance(["tilewright", *sys.argv[1:]], threads=used)
    with progress_bar("profile") as move:
        report = profile(
            loaded,
            prompt=n_prompt,
            steps=n_gen,
            depth=n_depth,
            repetitions=repetitions,
            seed=seed,
            ceiling=peak,
            progress=lambda what, done, of: move(done, of, what),
        )
    width, color = terminal_look()
    text = profile_report(
        report,
        output,
        subject=model_name(model),
        provenance=record,
        notes=notes,
        width=width,
        color=color,
    )
    click.echo(text, nl=False)


def _verified(model: Any, activations: str, n_prompt: int, n_gen: int, seed: int) -> str:
    """Verify the model's products at the sizes to be timed; what the check said.

    Raises:
        GateError: one of them is wrong, so nothing is timed.
    """
    from tilewright.errors import GateError, UnsupportedError
    from tilewright.model.check import model_cases, verify_cases
    from tilewright.report.verify import failure_line

    sizes = sorted({*([min(n_prompt, _MOST_ROWS)] if n_prompt else []), *([1] if n_gen else [])})
    try:
        found = model_cases(model, paths=[activations], batches=sizes)
    except UnsupportedError:
        return "The model has no packed product, so there was nothing to verify."
    cases = {op: [c for c in some if c.M == 1 or c.N * c.K <= _LARGE] for op, some in found.items()}
    with progress_bar("verify") as move:
        report = verify_cases(
            cases, seed=seed, on_case=lambda row, done, total: move(done, total, row.label)
        )
    if report.failures:
        lines = "\n".join(failure_line(row) for row in report.failures)
        raise GateError(f"the model's products are not right, so nothing is timed\n{lines}")
    if not report.complete:
        raise KeyboardInterrupt
    return f"Verified: {len(report.rows)}/{len(report.rows)} products of this model."
