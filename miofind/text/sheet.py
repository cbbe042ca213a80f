"""Tables as text for any width: what does not fit is folded to lines of its own, given up, or broken between words."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from miofind.text.printable import LINE_CHARS, NAME_CHARS, printable, printable_lines

_GAP = 2
"""Columns between two cells of a table."""

_MARGIN = "  "
"""Before a row with a line of its own above it."""

_INDENT = "    "
"""Before what is folded below a row."""


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

    @property
    def title(self) -> str:
        """The lines above it, fit for a terminal."""
        return printable_lines(self._title)

    def body(self, width: int, *, ascii_only: bool = False) -> Text:
        """Headers and rows, each line of `width` columns at most."""
        shown, folded = self._fitting(width)
        above = [number for number in folded if number < shown[0]]
        below = [number for number in folded if number > shown[0]]
        margin = _MARGIN if above else ""
        widths = self._shrunk(shown, width - len(margin))
        rule = "-" if ascii_only else "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
        text = Text()
        text.append("".join(f"{margin}{line}\n" for line in self._lines(self._columns, shown, widths)), "bold")
        text.append(f"{rule * (len(margin) + sum(widths) + _GAP * (len(widths) - 1))}\n")
        for cells, style in self._rows:
            lines = [cells[number] for number in above]
            lines += [margin + line for line in self._lines(cells, shown, widths)]
            named = [f"{self._columns[number]}: {cells[number]}" for number in below if cells[number]]
            lines += [_INDENT + line for cell in named for line in _wrapped(cell, width - len(_INDENT))]
            text.append("".join(f"{line}\n" for line in lines), style)
        return text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._title:
            yield Text(self.title, style="bold")
        body = self.body(options.max_width, ascii_only=options.ascii_only)
        body.rstrip()
        yield body

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
        """Widths of the columns: where they do not fit all the same, the widest gives that still has whole words."""
        widths = [self._width(number) for number in shown]
        words = [self._longest_word(number) for number in shown]
        while sum(widths) + _GAP * (len(widths) - 1) > width and max(widths) > 1:
            with_whole_words = [at for at, word in enumerate(words) if widths[at] > word]
            widest = max(with_whole_words or range(len(widths)), key=widths.__getitem__)
            widths[widest] -= 1
        return widths

    def _width(self, number: int) -> int:
        return max(cell_len(line) for cell in self._cells(number) for line in (cell.splitlines() or [""]))

    def _longest_word(self, number: int) -> int:
        return max(cell_len(word) for cell in self._cells(number) for word in (cell.split() or [""]))

    def _cells(self, number: int) -> list[str]:
        """A column with its header."""
        return [self._columns[number], *(cells[number] for cells, _ in self._rows)]

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
    return [line.plain.rstrip() for line in Text(cell).wrap(_any_console(), max(1, width), overflow="fold")]


@functools.cache
def _any_console() -> Console:
    """What rich asks for to break lines, and does not write to."""
    return Console(file=io.StringIO())
