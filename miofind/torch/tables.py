"""Tables of layers as text, for terminals and notebooks alike."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from miofind.core.problem import ProblemDescription
from miofind.printable import printable
from miofind.suites.short_text import short_problem

_WIDTH = 140
_MOST_LINES = 12


def table(title: str, columns: Iterable[str], numbers: Iterable[str]) -> Table:
    """An empty table; the columns of numbers stand right."""
    made = Table(title=Text(printable(title)), title_justify="left")
    right = frozenset(numbers)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left")
    return made


def add_row(made: Table, *cells: str) -> None:
    """Add a row of texts, whatever names are in them."""
    made.add_row(*(Text(printable(cell)) for cell in cells))


def as_text(made: Table, lines: Iterable[str]) -> str:
    """The table and lines below it."""
    console = Console(file=io.StringIO(), width=_WIDTH)
    with console.capture() as captured:
        console.print(made)
        for line in lines:
            console.print(Text(printable(line)), soft_wrap=True)
    return captured.get().rstrip()


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
