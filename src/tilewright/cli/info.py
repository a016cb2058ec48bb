"""`tilewright info`: what is in a checkpoint, and what of it runs packed."""

from __future__ import annotations

from pathlib import Path

import click

from tilewright.cli.common import epilog, file_argument, show


@click.command(
    epilog=epilog(
        "tilewright info model.gguf",
        "tilewright info folder-with-safetensors/",
        "tilewright info model.gguf --json",
    )
)
@file_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(model: Path, as_json: bool) -> None:
    """Architecture, tensor types with counts and bytes, and matrix shapes.

    Reads headers only. "packed" tensors are multiplied as they are stored; "dequantized" ones
    become ordinary matrices while loading; "dense" ones were never quantized.
    """
    import json

    from tilewright.report.info import describe, info_json, info_tables

    found = describe(model)
    if as_json:
        click.echo(json.dumps(info_json(found), indent=2))
        return
    for table in info_tables(found):
        show(table)
        click.echo()
