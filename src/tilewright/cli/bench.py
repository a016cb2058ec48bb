"""`tilewright bench`: prompt and generation speed, as llama-bench's users know them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    terminal_look,
    threads_option,
)
from tilewright.cli.params import SeedParam

_PROMPTS = {"cpu": (512,), "cuda": (4096, 16384)}


class _Counts(click.ParamType):
    """One count or several with commas between: 512 or 128,512."""

    name = "n[,n..]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"got {value!r}; give a number or numbers with commas between", param, ctx)
        if any(count < 0 for count in counts):
            self.fail(f"got {value!r}; give 0 or more", param, ctx)
        return counts


class _Pair(_Counts):
    """Two counts, prompt and generated: 512,128."""

    name = "pp,tg"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        pair = super().convert(value, param, ctx)
        if len(pair) != 2:
            self.fail(f"got {value!r}; give two counts, such as 512,128", param, ctx)
        return pair


@click.command(
    "bench",
    epilog=epilog(
        "tilewright bench smollm2",
        "tilewright bench model.gguf -p 128,512 -n 64 -d 0,2048 -o json > result.json",
        "tilewright bench model.gguf -p 0 -n 0 -pg 512,128 -r 10 -o md",
    ),
)
@model_argument
@click.option(
    "-p",
    "--n-prompt",
    type=_Counts(),
    multiple=True,
    help="Tokens of the prompt tests; 0 for none.  [default: 512; on a GPU 4096,16384 as far as "
    "the model's context goes]",
)
@click.option(
    "-n",
    "--n-gen",
    type=_Counts(),
    multiple=True,
    default=["128"],
    help="Tokens of the generation tests; 0 for none.  [default: 128]",
)
@click.option(
    "-pg", type=_Pair(), multiple=True, help="A prompt and then generation, timed as one test."
)
@click.option(
    "-d",
    "--n-depth",
    type=_Counts(),
    multiple=True,
    default=["0"],
    help="Tokens already in the context when a test begins.  [default: 0]",
)
@click.option(
    "-r",
    "--repetitions",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Samples of each test.",
)
@click.option(
    "--no-verify", is_flag=True, help="Leave out the check of the model's products beforehand."
)
@click.option("--no-warmup", is_flag=True, help="Time the first pass too.")
@click.option(
    "--no-kernel-time",
    is_flag=True,
    help="On a GPU: leave out the kernel time by op of the first prompt test.",
)
@click.option(
    "--seed", type=SeedParam(), default=0, show_default=True, help="Seed of ids and order."
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["terminal", "md", "json", "jsonl", "csv"]),
    default="terminal",
    show_default=True,
    help="Form of the result on standard output.",
)
@activations_option
@device_option
@threads_option
def bench_command(
    model: Path | str,
    n_prompt: Sequence[tuple[int, ...]],
    n_gen: Sequence[tuple[int, ...]],
    pg: Sequence[tuple[int, int]],
    n_depth: Sequence[tuple[int, ...]],
    repetitions: int,
    no_verify: bool,
    no_warmup: bool,
    no_kernel_time: bool,
    seed: int,
    output: str,
    activations: str,
    device: str,
    threads: int | None,
) -> None:
    """Time prompt processing (pp), token generation (tg) and both together.

    Before anything is timed, the model's own matrix products are verified at the sizes the tests
    use; a wrong one ends the run with exit code 3. Both phases are warmed up until they settle,
    repetitions of all tests are interleaved in random order, and every sample is in the JSON with
    what is needed to repeat the run. On a GPU a further table says how long the kernels of each op
    ran in the first prompt test.
    """
    prompts = _flat(n_prompt) or _PROMPTS[device]
    if not any((*prompts, *_flat(n_gen), *pg)):
        raise click.UsageError("no test: give -p, -n or -pg a value above 0")
    used = set_threads(threads)
    from tilewright.model.bench import BenchTest, bench
    from tilewright.model.generate import decoder_for, how_stepped
    from tilewright.report.bench import bench_report, bench_table
    from tilewright.report.provenance import provenance

    loaded, tokenizer = load_model(
        model, activations=activations, needs_tokenizer=False, device=device
    )
    if not n_prompt:
        prompts = _fitting(prompts, loaded)
    pairs = [(p, 0) for p in prompts if p] + [(0, n) for n in _flat(n_gen) if n] + list(pg)
    tests = [BenchTest(p, n, depth) for depth in _flat(n_depth) for p, n in pairs]
    verdict = "not verified (--no-verify)"
    if not no_verify:
        from tilewright.cli.checked import checked

        verdict = checked(loaded, activations, [p for p, _ in pairs], seed, device)
    record = {**provenance(["tilewright", *sys.argv[1:]], threads=used), "verdict": verdict}
    decoder = decoder_for(loaded)
    with progress_bar("bench") as move:
        results = bench(
            loaded,
            tokenizer,
            tests,
            repetitions=repetitions,
            warmup=not no_warmup,
            seed=seed,
            progress=lambda what, done, of: move(done, of, what),
            decoder=decoder,
        )
    kernels = None
    prompt = next((p for p, _ in pairs if p), 0)
    if device != "cpu" and prompt and not no_kernel_time:
        from tilewright.model.kernel_time import prefill_kernel_time

        kernels = prefill_kernel_time(loaded, decoder, prompt, seed=seed)
    stepped = how_stepped(loaded, decoder) if any(n for _, n in pairs) else None
    table = bench_table(
        results,
        model=model_name(model),
        model_bytes=loaded.tilewright_info.file_bytes,
        activations=activations,
        threads=used,
        provenance=record,
        notes=[verdict] if stepped is None else [verdict, stepped],
    )
    width, color = terminal_look()
    click.echo(bench_report(table, kernels, output, width=width, color=color), nl=False)


def _fitting(prompts: Sequence[int], model: Any) -> list[int]:
    """Those of the default prompts that fit the model's context; all of it if none does."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return list(prompts)
    return [count for count in prompts if count <= limit] or [limit]


def _flat(groups: Sequence[tuple[int, ...]]) -> list[int]:
    return [count for group in groups for count in group]
