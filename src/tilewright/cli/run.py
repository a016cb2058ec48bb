"""`tilewright run`: one prompt, one streamed answer."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from tilewright.cli.common import (
    activations_option,
    device_option,
    epilog,
    load_model,
    model_argument,
    note,
    set_threads,
    threads_option,
)
from tilewright.cli.params import SeedParam

if TYPE_CHECKING:
    from tilewright.model.generate import Generation


@click.command(
    epilog=epilog(
        "tilewright run smollm2 'Why is the sky blue?'",
        "tilewright run model.gguf 'Write a haiku' --temp 0.8 --top-p 0.95 --seed 1",
        "tilewright run model.gguf 'Once upon a time' --no-chat-template -n 64",
        "cat question.txt | tilewright run model.gguf --system 'Answer briefly.'",
    )
)
@model_argument
@click.argument("prompt", required=False)
@click.option("--system", help="System message of the chat template.")
@click.option(
    "--temp",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Temperature of the sampling; 0 is greedy: the same answer every time.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="Sample from the most likely tokens that hold this much probability; 1 is no limit.",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Sample from this many most likely tokens; 0 is no limit.",
)
@click.option(
    "--seed", type=SeedParam(), help="Seed of the sampling.  [default: a new one, printed]"
)
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Most tokens to generate.",
)
@click.option(
    "--no-chat-template", is_flag=True, help="Feed the prompt as plain text to be continued."
)
@activations_option
@device_option
@threads_option
def run(
    model: Path | str,
    prompt: str | None,
    system: str | None,
    temp: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    max_tokens: int,
    no_chat_template: bool,
    activations: str,
    device: str,
    threads: int | None,
) -> None:
    """Answer one prompt, in the model's chat template where it has one.

    PROMPT is read from standard input when it is left out or "-". The answer is streamed to
    standard output; speeds go to standard error. Ctrl-C ends the answer and keeps what is there.
    """
    text = _prompt(prompt)
    for name, words in (("PROMPT", text), ("--system", system or "")):
        _check_utf8(name, words)
    set_threads(threads)
    from tilewright.model.generate import chat_ids, generate

    loaded, tokenizer = load_model(model, activations=activations, device=device)
    chat = not no_chat_template
    if chat and not getattr(tokenizer, "chat_template", None):
        note("no chat template in this model: the prompt is continued as plain text")
        chat = False
    if system and not chat:
        raise click.UsageError("--system needs a chat template; put the text into the prompt")
    if temp > 0 and seed is None:
        import secrets

        seed = secrets.randbelow(1 << 31)
    with _Interrupts() as interrupts:
        made = generate(
            loaded,
            tokenizer,
            chat_ids(tokenizer, text, system=system) if chat else text,
            max_tokens=max_tokens,
            temperature=temp,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            on_token=interrupts.on_token,
        )
    click.echo()
    note(_stats(made, seed if temp > 0 else None))


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("PROMPT is missing; give it as an argument or on standard input")
    try:
        text = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"PROMPT: standard input is not UTF-8 at byte {error.start}; convert it first"
        ) from error
    if not text:
        raise click.UsageError("PROMPT: standard input is empty; write the prompt there")
    return text


def _check_utf8(name: str, text: str) -> None:
    """Bytes that are no UTF-8 come from the command line, and often from stdin, as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.UsageError(
            f"{name} is not UTF-8 at character {error.start}; convert it first"
        ) from error


class _Interrupts:
    """Ctrl-C once the text has begun ends it and keeps it; before that, or twice, it aborts."""

    def __init__(self) -> None:
        self.begun = False
        self.asked = False

    def __enter__(self) -> _Interrupts:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self.asked or not self.begun:
            raise KeyboardInterrupt
        self.asked = True

    def on_token(self, piece: str) -> bool:
        """Write a piece of text; False once the user asked to end it."""
        self.begun = True
        click.echo(piece, nl=False)
        return not self.asked


def _stats(made: Generation, seed: int | None) -> str:
    ends = {
        "length": ["cut at --max-tokens"],
        "context": ["the context is full"],
        "callback": ["interrupted"],
    }
    parts = [
        f"prefill {made.prompt_tokens} tokens, {made.prefill_tok_s:.1f} tok/s",
        f"decode {len(made.ids)} tokens, {made.decode_tok_s:.1f} tok/s",
        f"first token after {made.ttft_s * 1000:.0f} ms",
    ]
    if seed is not None:
        parts.append(f"seed {seed}")
    return " | ".join(parts + ends.get(made.stop_reason, []))
