"""Progress on stderr: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from miofind.cli.output import print_note, seconds_text, stderr

_EVERY_S = 5.0


@contextmanager
def counted(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call whenever another one of `total` is done."""
    if not stderr().is_terminal:
        yield _LineProgress(label, total)
        return
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn(label), *columns, console=stderr(), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


class _LineProgress:
    """Prints how far it is, but neither what is over at once nor that all is done."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._began = self._told = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        self._done += 1
        if now - self._told < _EVERY_S or self._done >= self._total:
            return
        self._told, elapsed = now, now - self._began
        left = elapsed / self._done * (self._total - self._done)
        print_note(
            f"{self._label}: {self._done}/{self._total} in {seconds_text(elapsed)}, about {seconds_text(left)} left"
        )
