"""`tilewright perplexity`: how well a model predicts a text."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewright.cli.common import (
    activations_option,
    device_option,
    epilog,
    load_model,
    model_argument,
    model_name,
    note,
    progress_bar,
    set_threads,
    threads_option,
)

if TYPE_CHECKING:
    from tilewright.model.evaluate import Perplexity


@click.command(
    "perplexity",
    epilog=epilog(
        "tilewright perplexity smollm2 --text wikitext2-test.txt",
        "tilewright perplexity model.gguf --text book.txt -c 2048 --chunks 4 --json",
    ),
)
@model_argument
@click.option(
    "--text",
    "text_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="A UTF-8 text file.",
)
@click.option(
    "-c",
    "--context",
    type=click.IntRange(min=4),
    default=512,
    show_default=True,
    help="Tokens a chunk; the second half of each is scored.",
)
@click.option(
    "--chunks",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Most chunks to score.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@activations_option
@device_option
@threads_option
def perplexity_command(
    model: Path | str,
    text_path: Path,
    context: int,
    chunks: int,
    as_json: bool,
    activations: str,
    device: str,
    threads: int | None,
) -> None:
    """Perplexity of a model on a text, with its standard error.

    Counted as llama-perplexity counts it, so the figures can be compared: chunks of --context
    tokens, the second half of each scored, one final newline of the file dropped. Ctrl-C prints
    the value of the chunks that are done.
    """
    text = _read(text_path)
    used = set_threads(threads)
    from tilewright.model.evaluate import perplexity_chunks

    loaded, tokenizer = load_model(model, activations=activations, device=device)
    result: Perplexity | None = None
    with progress_bar("perplexity", chunks) as move:
        try:
            for result in perplexity_chunks(
                loaded, tokenizer, text, context=context, chunks=chunks
            ):
                move(result.chunks, result.chunks_wanted, f"{result.value:.4f}")
        except KeyboardInterrupt:
            if result is None:
                raise
    assert result is not None  # a text too short for one chunk has raised
    if not result.complete:
        note(f"interrupted after {result.chunks} of {result.chunks_wanted} chunks")
    if as_json:
        import json

        from tilewright.report.provenance import provenance

        record = provenance(["tilewright", *sys.argv[1:]], threads=used)
        row = {"model": model_name(model), "text": text_path.name, "activations": activations}
        row |= asdict(result) | {"complete": result.complete}
        click.echo(json.dumps({"provenance": record, "perplexity": row}, indent=2))
        return
    click.echo(
        f"perplexity {result} ({result.chunks} chunks of {result.context}, "
        f"{result.tokens_scored} tokens scored, {result.seconds:.1f} s)"
    )


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.BadParameter(
            f"{path} is not UTF-8 at byte {error.start}; convert it first", param_hint="--text"
        ) from error
    return text.removesuffix("\n")
