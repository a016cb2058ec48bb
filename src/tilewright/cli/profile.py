"""`tilewright profile`: which kernels a model's time goes to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.common import (
    activations_option,
    device_option,
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
from tilewright.cli.params import SeedParam

if TYPE_CHECKING:
    from tilewright.model.kernel_time import KernelReport


@click.command(
    "profile",
    epilog=epilog(
        "tilewright profile smollm2",
        "tilewright profile model.gguf -p 2048 -n 0 --activations int8 -o md",
        "tilewright profile model.gguf -p 0 -n 32 -d 4096 --ceiling",
        "tilewright profile model.gguf -p 4096 --device cuda",
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
              help="Passes of the prompt on the CPU; on a GPU there is one.")  # fmt: skip
@click.option("--ceiling", is_flag=True,
              help="Measure what this machine can do, and state rates against it.")  # fmt: skip
@click.option("--no-verify", is_flag=True,
              help="Leave out the check of the model's products beforehand.")  # fmt: skip
@click.option(
    "--seed", type=SeedParam(), default=0, show_default=True, help="Seed of the token ids."
)
@click.option("-o", "--output", type=click.Choice(["terminal", "md", "json"]),
              default="terminal", show_default=True, help="Form of the result.")  # fmt: skip
@activations_option
@device_option
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
    device: str,
    threads: int | None,
) -> None:
    """Time by role, op and weight type: which kernels are hot, for a prompt and for a token.

    Each launch of a captured model is timed on the model's own buffers, in order; other models are
    timed by hooks around their modules. The report states what timing adds, and how far the parts
    add up to a pass without instruments. On a GPU, torch's profiler times every kernel; they are
    listed by op, beside what a pass takes without the profiler.
    """
    if not n_prompt and not n_gen:
        raise click.UsageError("nothing to time: give -p or -n a value above 0")
    if ceiling and device != "cpu":
        raise click.UsageError("--ceiling measures the CPU; leave it out with --device cuda")
    used = set_threads(threads)
    from tilewright.report.provenance import provenance

    loaded, _ = load_model(model, activations=activations, needs_tokenizer=False, device=device)
    notes = ["Not verified (--no-verify)."]
    if not no_verify:
        notes = [_checked(loaded, activations, n_prompt, seed, device)]
    width, color = terminal_look()
    if device != "cpu":
        from tilewright.report.bench import kernels_report

        record = provenance(["tilewright", *sys.argv[1:]], threads=used)
        reports, stepped = _kernel_times(loaded, n_prompt, n_gen, n_depth, seed)
        if stepped is not None:
            notes.append(f"{stepped[0].upper()}{stepped[1:]}.")
        text = kernels_report(
            reports, output, subject=model_name(model), provenance=record, notes=notes,
            width=width, color=color,
        )  # fmt: skip
        click.echo(text, nl=False)
        return
    from tilewright.model.profile import profile
    from tilewright.report.profile import profile_report

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


def _checked(model: Any, activations: str, n_prompt: int, seed: int, device: str) -> str:
    """Verify the model's products at the sizes to be timed; what the check said.

    Raises:
        GateError: one of them is wrong, so nothing is timed.
    """
    from tilewright.cli.checked import checked
    from tilewright.errors import UnsupportedError
    from tilewright.model.check import model_cases

    try:
        model_cases(model, paths=[activations], batches=[1])
    except UnsupportedError:
        return "The model has no packed product, so there was nothing to verify."
    said = checked(model, activations, [n_prompt], seed, device)
    return f"{said[0].upper()}{said[1:]}."


def _kernel_times(
    model: Any, n_prompt: int, n_gen: int, n_depth: int, seed: int
) -> tuple[list[KernelReport], str | None]:
    """Kernels of a prompt, then those of single tokens behind it, as far as they are wanted; and
    how a token is launched.
    """
    from tilewright.model.generate import decoder_for, how_stepped
    from tilewright.model.kernel_time import prefill_kernel_time, step_kernel_time

    decoder = decoder_for(model)
    found = []
    if n_prompt:
        found.append(prefill_kernel_time(model, decoder, n_prompt, depth=n_depth, seed=seed))
    if n_gen:
        depth = n_depth + n_prompt
        found.append(step_kernel_time(model, decoder, n_gen, depth=depth, seed=seed))
    return found, how_stepped(model, decoder) if n_gen else None
