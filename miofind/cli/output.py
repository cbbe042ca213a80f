"""What commands print: tables for people, JSON for programs, and numbers in one form everywhere.

stdout is for results; progress, logs and errors go to stderr. Knows how values look, not where they come from.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

import click
from rich import box
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 1000
"""Columns where stdout is no terminal: nothing is wrapped or cut there."""

_GAP = 3
"""Columns between two cells of a table."""


def prepare_streams() -> None:
    """Give a process that was started without stdout or stderr ones that keep nothing, and let stdout take any name.

    Names of files need not be UTF-8, nor stdout's encoding have their characters: those are printed as escapes.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, for the life of the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Let what stdout still holds go nowhere: its disk is full, and Python would complain of it once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Stderr:
    """sys.stderr as it is at each write, where a full disk or a closed pipe is no failure of the command."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def _width(stream: IO[str]) -> int | None:
    """Columns of a stream; None where rich finds them: with COLUMNS=0, which some terminals set, it prints none."""
    named = os.environ.get("COLUMNS")
    if named is not None and named.isdecimal() and int(named) > 0:
        return None
    if not stream.isatty():
        return _PIPE_WIDTH
    return None if named is None else shutil.get_terminal_size().columns


def stdout() -> Console:
    """The console for results."""
    return Console(width=_width(sys.stdout), highlight=False, markup=False, emoji=False)


@functools.cache
def stderr() -> Console:
    """The one console for progress, logs and errors."""
    return Console(file=cast(IO[str], _Stderr()), width=_width(sys.stderr), highlight=False, markup=False, emoji=False)


def print_json(value: object) -> None:
    """Print a value as JSON; infinite numbers become null."""
    click.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def print_text(text: str) -> None:
    """Print text for people, unwrapped."""
    stdout().print(printable(text), soft_wrap=True)


def print_note(text: str) -> None:
    """Print a line to stderr, unwrapped."""
    stderr().print(printable(text), soft_wrap=True)


def printable(text: str) -> str:
    """The text without the control characters that would steer a terminal: names come from files of other people."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}" for c in text)


class Sheet:
    """A table that gives up columns where the terminal is too narrow for all of them.

    Args:
        title: above it; "" for none.
        columns: headers.
        right: those of columns aligned to the right.
        spare: those that may be given up, in that order.
    """

    def __init__(
        self, title: str, columns: Sequence[str], *, right: Sequence[str] = (), spare: Sequence[str] = ()
    ) -> None:
        self._title = title
        self._columns = columns
        self._right = right
        self._spare = spare
        self._rows: list[tuple[tuple[str, ...], str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, *cells: str, style: str = "") -> None:
        """Add a row, one cell a column."""
        self._rows.append((tuple(map(printable, cells)), style))

    def print(self) -> None:
        """Print it to stdout."""
        console = stdout()
        shown = self._fitting(console.width)
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for number in shown:
            name = self._columns[number]
            made.add_column(name, justify="right" if name in self._right else "left", overflow="fold")
        for cells, style in self._rows:
            made.add_row(*(cells[number] for number in shown), style=style)
        if self._title:
            console.print(self._title, style="bold", soft_wrap=True)
        console.print(made)

    def _fitting(self, width: int) -> list[int]:
        """Positions of the columns that fit, or of those that cannot be spared."""
        shown = list(range(len(self._columns)))
        for name in self._spare:
            if sum(self._width(number) + _GAP for number in shown) - _GAP <= width:
                break
            shown.remove(self._columns.index(name))
        return shown

    def _width(self, number: int) -> int:
        cells = [self._columns[number], *(cells[number] for cells, _ in self._rows)]
        return max(len(line) for cell in cells for line in (cell.splitlines() or [""]))


def time_text(time_ms: float) -> str:
    """Milliseconds with four significant digits, such as 0.01234 or 12.34."""
    if not math.isfinite(time_ms):
        return "-"
    if time_ms == 0:
        return "0"
    return f"{time_ms:.{min(6, max(1, 3 - math.floor(math.log10(time_ms))))}f}"


def tflops(flops: int, time_ms: float) -> float:
    """10^12 operations a second of direct arithmetic."""
    return flops / time_ms / 1e9 if time_ms > 0 else math.inf


def tflops_text(flops: int, time_ms: float) -> str:
    """TFLOP/s with three significant digits."""
    value = tflops(flops, time_ms)
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def bytes_text(count: int) -> str:
    """Bytes in the unit that keeps the number short, such as 0, 512 B, 1.5 MiB."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    if count == 0:
        return "0"
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def ratio_text(ratio: float) -> str:
    """A ratio of times, such as 1.23x."""
    return f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"


def error_text(max_error: float | None) -> str:
    """A relative error, such as 3.1e-07."""
    return "-" if max_error is None else f"{max_error:.1e}"


def seconds_text(seconds: float) -> str:
    """A duration, such as 0.4 s, 12 s or 3 min 05 s."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def config_text(config: Mapping[str, object], limit: int | None = None) -> str:
    """A configuration as name=value pairs, cut to `limit` characters."""
    pairs = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            pairs.append(f"{name}={{{config_text(value)}}}")
        else:
            pairs.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
    text = " ".join(pairs)
    return text if limit is None or len(text) <= limit else f"{text[: limit - 3]}..."
