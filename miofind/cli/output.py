"""Output of commands: tables for people, JSON for programs, and one form of each kind of number.

Results go to stdout, progress, logs and errors to stderr.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, cast

import click
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from miofind.errors import MiofindError
from miofind.printable import LINE_CHARS, NAME_CHARS, printable, printable_lines, printable_path

_PIPE_WIDTH = 1000
"""Columns where stdout is no terminal: nothing is wrapped or cut there."""

_GAP = 2
"""Columns between two cells of a table."""

_MARGIN = "  "
"""Before a row with a line of its own above it."""

_INDENT = "    "
"""Before what is folded below a row."""


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
    """Let what stdout still holds, and what is written from now on, go nowhere: Python would complain of it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """For what writes to stdout: who reads it, such as `head`, may have enough, and the command ends as it would."""
    try:
        yield
    except BrokenPipeError:
        discard_output()


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


class _Stdout(Console):
    """As `reader_may_leave`, where rich itself would end the command with 1."""

    def on_broken_pipe(self) -> None:
        discard_output()


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
    return _Stdout(width=_width(sys.stdout), highlight=False, markup=False, emoji=False)


@functools.cache
def stderr() -> Console:
    """The one console for progress, logs and errors."""
    return Console(file=cast(IO[str], _Stderr()), width=_width(sys.stderr), highlight=False, markup=False, emoji=False)


def print_json(value: object) -> None:
    """Print a value as JSON; infinite numbers become null."""
    text = json.dumps(_finite(value), indent=2, allow_nan=False)
    with reader_may_leave():
        click.echo(text)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def print_text(*lines: str) -> None:
    """Print lines for people, unwrapped."""
    for line in lines:
        stdout().print(printable(line), soft_wrap=True)


def print_path(path: str, about: str = "") -> None:
    """Print a line that begins with a path, which is cut only where it is too long for any file."""
    stdout().print(f"{printable_path(path)}{about}", soft_wrap=True)


def print_note(*lines: str) -> None:
    """Print lines to stderr, unwrapped."""
    for line in lines:
        stderr().print(printable(line), soft_wrap=True)


def print_error(error: BaseException, about: str = "") -> None:
    """Print an error to stderr, after `about`."""
    has_lines = isinstance(error, MiofindError) and error.has_lines
    text = f"error: {about}{error}"
    print_note(*(text.split("\n") if has_lines else [text]))


class Sheet:
    """A table for any width: where not all columns fit, it folds some to lines of their own and gives up others.

    Args:
        title: the lines above it; "" for none.
        columns: headers.
        right: those of columns aligned to the right.
        fold: those that go to a line of their own where needed, in that order: above the row where they stand first
            in it, else below with their name.
        spare: those that may be given up, in that order.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[str],
        *,
        right: Sequence[str] = (),
        fold: Sequence[str] = (),
        spare: Sequence[str] = (),
    ) -> None:
        self._title = title
        self._columns = columns
        self._right = right
        self._fold = fold
        self._spare = spare
        self._limits = [LINE_CHARS if name in fold else NAME_CHARS for name in columns]
        self._rows: list[tuple[tuple[str, ...], str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, *cells: str | Sequence[str], style: str = "") -> None:
        """Add a row, one cell a column: a text, or several that stand below each other."""
        shown = []
        for cell, limit in zip(cells, self._limits, strict=True):
            lines = (cell,) if isinstance(cell, str) else cell
            shown.append("\n".join(printable(line, limit) for line in lines))
        self._rows.append((tuple(shown), style))

    def print(self) -> None:
        """Print it to stdout."""
        console = stdout()
        shown, folded = self._fitting(console.width)
        above = [number for number in folded if number < shown[0]]
        below = [number for number in folded if number > shown[0]]
        margin = _MARGIN if above else ""
        widths = self._shrunk(shown, console.width - len(margin))
        rule = "-" if console.options.ascii_only else "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
        text = Text()
        text.append("".join(f"{margin}{line}\n" for line in self._lines(self._columns, shown, widths)), "bold")
        text.append(f"{rule * (len(margin) + sum(widths) + _GAP * (len(widths) - 1))}\n")
        for cells, style in self._rows:
            lines = [cells[number] for number in above]
            lines += [margin + line for line in self._lines(cells, shown, widths)]
            named = [f"{self._columns[number]}: {cells[number]}" for number in below if cells[number]]
            lines += [_INDENT + line for cell in named for line in _wrapped(cell, console.width - len(_INDENT))]
            text.append("".join(f"{line}\n" for line in lines), style)
        if self._title:
            console.print(printable_lines(self._title), style="bold", soft_wrap=True)
        console.print(text, soft_wrap=True, end="")

    def _fitting(self, width: int) -> tuple[list[int], list[int]]:
        """Positions of the columns of the table, and of those that are folded out of it."""
        shown, folded = list(range(len(self._columns))), []
        for name in (*self._fold, *self._spare):
            if sum(map(self._width, shown)) + _GAP * (len(shown) - 1) <= width:
                break
            number = self._columns.index(name)
            shown.remove(number)
            if name in self._fold:
                folded.append(number)
        return shown, sorted(folded)

    def _shrunk(self, shown: Sequence[int], width: int) -> list[int]:
        """Widths of the columns: where they do not fit all the same, the widest gives."""
        widths = [self._width(number) for number in shown]
        while sum(widths) + _GAP * (len(widths) - 1) > width and max(widths) > 1:
            widths[widths.index(max(widths))] -= 1
        return widths

    def _width(self, number: int) -> int:
        cells = [self._columns[number], *(cells[number] for cells, _ in self._rows)]
        return max(cell_len(line) for cell in cells for line in (cell.splitlines() or [""]))

    def _lines(self, cells: Sequence[str], shown: Sequence[int], widths: Sequence[int]) -> list[str]:
        """One row as lines."""
        columns = [_wrapped(cells[number], width) for number, width in zip(shown, widths, strict=True)]
        lines = []
        for parts in itertools.zip_longest(*columns, fillvalue=""):
            padded = []
            for number, width, part in zip(shown, widths, parts, strict=True):
                space = " " * (width - cell_len(part))
                padded.append(space + part if self._columns[number] in self._right else part + space)
            lines.append((" " * _GAP).join(padded).rstrip())
        return lines


def _wrapped(cell: str, width: int) -> list[str]:
    """A cell's lines, broken where they are too wide."""
    if cell_len(cell) <= width and "\n" not in cell:
        return [cell]
    return [line.plain.rstrip() for line in Text(cell).wrap(stdout(), max(1, width), overflow="fold")]


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
