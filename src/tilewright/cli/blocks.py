"""The progress of paired blocks, shared by the verbs that measure in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tilewright.cli.common import progress_bar

__all__ = ["BlocksBar", "blocks_bar"]


class BlocksBar:
    """Counts blocks, and says what is being done between them.

    Args:
        move: (done, total, text) as `progress_bar` yields it.
        total: blocks in all.
    """

    def __init__(self, move: Callable[[int, int, str], None], total: int) -> None:
        self._move, self._total, self._done = move, total, 0

    def on_block(self, label: str, _number: int, _block: Any) -> None:
        """One more block is finished."""
        self._done += 1
        self._move(self._done, max(self._total, self._done), label)

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show `text` beside the bar while the block runs."""
        self._move(self._done, self._total, text)
        yield


@contextmanager
def blocks_bar(what: str, total: int) -> Iterator[BlocksBar]:
    """A bar over `total` blocks on stderr; nothing where stderr is no terminal."""
    with progress_bar(what, total) as move:
        yield BlocksBar(move, total)
