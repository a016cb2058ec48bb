"""What several verbs share: the MODEL argument, common options, loading, progress."""

from __future__ import annotations

import os
import re
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
    "device_option",
    "epilog",
    "file_argument",
    "load_model",
    "model_argument",
    "model_name",
    "note",
    "on_device",
    "progress_bar",
    "set_threads",
    "show",
    "status",
    "terminal_look",
    "threads_option",
]

F = TypeVar("F", bound=Callable[..., Any])


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class TablePath(click.Path):
    """A tile table, or "none": a table without rows, which leaves every op its own default."""

    name = "table"

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value != "none" or ctx is None:
            return super().convert(value, param, ctx)
        import tempfile

        from tilewright.device import cpu_device
        from tilewright.ops.catalog import SPECS
        from tilewright.tiles.table import TileTable, save_table
        from tilewright.tune.refresh import new_header

        folder = ctx.with_resource(tempfile.TemporaryDirectory(prefix="tilewright-tiles-"))
        path = Path(folder) / "no-table"
        specs = [SPECS[name] for name in ("mmq", "w4a16")]
        save_table(path, TileTable(new_header(specs, cpu_device().arch)))
        return path


class ModelPath(click.ParamType):
    """A GGUF file, a folder with a checkpoint, the name of a demo model, or a hub repository.

    Args:
        hub: accept the id of a repository on the Hugging Face hub, which is then a str.
    """

    name = "model"

    def __init__(self, *, hub: bool) -> None:
        self._hub = hub

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | str:
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
        if self._hub and _HUB_ID.fullmatch(str(value)) and not str(value).endswith(".gguf"):
            return str(value)
        hub = ", the id of a repository on the Hugging Face hub (owner/name)" if self._hub else ""
        self.fail(
            f"{str(value)!r} does not exist; give a .gguf file, a folder with config.json and "
            f".safetensors files{hub}, or a demo model ({', '.join(DEMO_MODELS)})",
            param,
            ctx,
        )


def model_argument(function: F) -> F:
    """The MODEL argument of a verb that loads it."""
    return click.argument("model", type=ModelPath(hub=True), metavar="MODEL")(function)


def file_argument(function: F) -> F:
    """The MODEL argument of a verb that reads only what is on this machine."""
    return click.argument("model", type=ModelPath(hub=False), metavar="MODEL")(function)


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


def device_option(function: F) -> F:
    """--device, handed to the verb as `device`."""
    return click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        default="cpu",
        show_default=True,
        help="Where kernels run; cuda is any GPU that torch sees, AMD's too.",
    )(function)


def on_device(op: str, device: str) -> str:
    """An op of the catalog by the name that `load_spec` takes for a device; another as it is."""
    from tilewright.ops.catalog import SPECS

    return f"{op}@{device}" if op in SPECS and device != "cpu" else op


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
    """Give torch, and the kernels that follow its setting, this many threads; returns them."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def load_model(
    model: Path | str, *, activations: str, needs_tokenizer: bool = True, device: str = "cpu"
) -> tuple[Any, Any]:
    """`tilewright.load` with a line on the terminal while it runs.

    Raises:
        UnsupportedError: the checkpoint has no tokenizer and the verb needs one.
    """
    from tilewright.errors import UnsupportedError

    with status(f"loading {model_name(model)}"):
        from tilewright.model.load import load

        loaded, tokenizer = load(model, activations=activations, device=device)
    if tokenizer is None and needs_tokenizer:
        raise UnsupportedError(
            f"{model}: the checkpoint has no tokenizer; add its tokenizer files and run it again"
        )
    return loaded, tokenizer


def model_name(model: Path | str) -> str:
    """The last part of a path, or a hub id: what reports call the model."""
    return model if isinstance(model, str) else model.resolve().name


def note(message: str) -> None:
    """One line beside the result, on stderr."""
    click.echo(message, err=True)


def show(table: Table, form: str = "terminal") -> None:
    """Write a table to stdout, in color and at the terminal's width where it is one."""
    from tilewright.report.render import render

    width, color = terminal_look()
    click.echo(render(table, form, width=width, color=color), nl=False)


def terminal_look() -> tuple[int | None, bool]:
    """(width, whether to use color) of stdout; (None, False) where it is no terminal."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    return width, terminal and "NO_COLOR" not in os.environ


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
