"""Output of commands: tables for people, JSON for programs, and one form of each kind of number.

Results go to stdout, progress, logs and errors to stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

import click
from rich.console import Console

from miofind.errors import MiofindError
from miofind.text import sheet
from miofind.text.printable import printable, printable_path

_PIPE_WIDTH = 1000
"""Columns where stdout is no terminal: nothing is wrapped or cut there."""


def prepare_streams() -> None:
    """Give a process that was started without stdout or stderr ones that keep nothing, and let stdout take any name.

    Names of files need not be UTF-8, nor stdout's encoding have their characters: those are printed as escapes.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, for the life of the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    atexit.register(_give_up_notes)


def discard_output() -> None:
    """Let what stdout still holds, and what is written from now on, go nowhere: Python would complain of it at exit."""
    _discard(sys.stdout)


def _give_up_notes() -> None:
    """Have notes that could not be written, as on a full disk, not become the exit code: Python would end with 120."""
    try:
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)
    except ValueError:  # it is closed
        return


def _discard(stream: IO[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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


class Sheet(sheet.Sheet):
    """A table for stdout."""

    def print(self) -> None:
        """Print it to stdout."""
        console = stdout()
        body = self.body(console.width, ascii_only=console.options.ascii_only)
        if self.title:
            console.print(self.title, style="bold", soft_wrap=True)
        console.print(body, soft_wrap=True, end="")


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


def count_text(count: int, noun: str) -> str:
    """A count with its noun, such as 1 problem or 2 problems."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def seconds_text(seconds: float) -> str:
    """A duration, such as 0.4 s, 12 s or 3 min 05 s."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
