"""Tables of layers as text, for terminals and notebooks alike."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from miofind.core.problem import ProblemDescription
from miofind.suites.short_text import short_problem
from miofind.text.printable import printable
from miofind.text.sheet import Sheet

_WIDTH = 140
"""Columns where nobody says how many there are."""

_MOST_LINES = 12


def as_text(made: Sheet, lines: Iterable[str]) -> str:
    """The table and lines below it, for the width of the terminal."""
    body = made.body(shutil.get_terminal_size((_WIDTH, 0)).columns).plain
    return "\n".join([made.title, body.rstrip(), *map(printable, lines)])


def shortened(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - _MOST_LINES
    return lines[:_MOST_LINES] + ([f"and {more} more"] if more > 0 else [])


def described(problem: ProblemDescription) -> str:
    """A problem in a cell."""
    return f"n{problem.n} {short_problem(problem)} {problem.x.dtype} {problem.x.layout}"


def milliseconds(time_ms: float | None) -> str:
    """A time in a cell."""
    return "-" if time_ms is None else f"{time_ms:.4g}"
