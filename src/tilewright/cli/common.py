"""What several verbs share: the MODEL argument, common options, loading, progress."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from tilewright.report.table import Table

__all__ = [
    "activations_option",
    "epilog",
    "load_model",
    "model_argument",
    "model_bytes",
    "note",
    "progress_bar",
    "set_threads",
    "show",
    "status",
    "threads_option",
]

F = TypeVar("F", bound=Callable[..., Any])


class ModelPath(click.ParamType):
    """A GGUF file, a folder with a safetensors checkpoint, or the name of a demo model."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if path.exists():
            return path
        from tilewright.model.demo import DEMO_MODELS, demo_model_path

        if str(value) in DEMO_MODELS:
            found = demo_model_path(str(value))
            if found is not None:
                return found
            option = "" if value == "smollm2" else f" --model {value}"
            self.fail(
                f"{value} is not fetched yet; run `tilewright demo-model{option}` first", param, ctx
            )
        self.fail(
            f"{str(value)!r} is no file or folder, and no demo model "
            f"({', '.join(DEMO_MODELS)}); give the path of a .gguf file or of a folder with "
            "config.json and .safetensors files",
            param,
            ctx,
        )


def model_argument(function: F) -> F:
    """The MODEL argument of a verb."""
    return click.argument("model", type=ModelPath(), metavar="MODEL")(function)


def activations_option(function: F) -> F:
    """--activations, handed to the verb as `activations`."""
    return click.option(
        "--activations",
        type=click.Choice(["float", "int8"]),
        default="float",
        show_default=True,
        help="float leaves activations as they are; int8 quantizes them to 8 bits, which is "
        "faster and less exact.",
    )(function)


def threads_option(function: F) -> F:
    """-t/--threads, handed to the verb as `threads`."""
    return click.option(
        "-t",
        "--threads",
        type=click.IntRange(min=1),
        help="CPU threads.  [default: all the process may use]",
    )(function)


def epilog(*examples: str) -> str:
    """The examples below a verb's help; each line stays a line."""
    return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)


def set_threads(threads: int | None) -> int:
    """Give this process its threads before the libraries that use them start; returns them.

    The command owns its process, so setting it for all of torch, OpenMP and Numba is its right.
    """
    if threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ[variable] = str(threads)
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def load_model(path: Path, *, activations: str) -> tuple[Any, Any]:
    """`tilewright.load` with a line on the terminal while it runs."""
    with status(f"loading {path.name}"):
        from tilewright.model.load import load

        return load(path, activations=activations)


def model_bytes(path: Path) -> int:
    """Bytes of a model file, or of the weight files of a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.glob("*.safetensors"))


def note(message: str) -> None:
    """One line beside the result, on stderr."""
    click.echo(message, err=True)


def show(table: Table, form: str = "terminal") -> None:
    """Write a table to stdout, in color and at the terminal's width where it is one."""
    from tilewright.report.render import render

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    color = terminal and "NO_COLOR" not in os.environ
    click.echo(render(table, form, width=width, color=color), nl=False)


@contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner on stderr while the block runs; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr; yields a function (done, total, text) that moves it.

    Nothing is drawn where stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda done, of, text: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task(what, total=total, text="")
        yield lambda done, of, text: progress.update(task, completed=done, total=of, text=text)
