"""A matrix whose rows have their entries side by side, as a window that each row reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from miofind.torch.inductor.scatters import Entries

_LONGEST = 64
"""Elements of a window: of a factor of 20 with aligned corners."""
_LEAST_FILLED = 0.6
"""Of the weights of windows those that are not 0: two in three of large bilinear ones, half of replicated borders."""


@dataclass(frozen=True, slots=True)
class Line:
    """Where windows begin: row i reads from (begin + i * step) // divisor on.

    Attributes:
        rows, columns: of the matrix.
        size: of each window.
    """

    rows: int
    columns: int
    begin: int
    step: int
    divisor: int
    size: int = 1

    @property
    def is_strided(self) -> bool:
        """Whether they begin at equal distances; those at the ends may reach beyond the columns then."""
        return self.divisor == 1

    @property
    def starts(self) -> torch.Tensor:
        found = self.begin + torch.arange(self.rows) * self.step
        return found if self.is_strided else (found.clamp(min=0) // self.divisor).clamp(max=self.columns - self.size)

    @property
    def beyond(self) -> tuple[int, int]:
        """How far they reach beyond the columns, before the first and behind the last."""
        return max(0, -self.begin), max(0, self.begin + (self.rows - 1) * self.step + self.size - self.columns)


@dataclass(frozen=True, slots=True)
class Window:
    """Along a dimension, what each element of a gradient is the weighed sum of.

    Attributes:
        dimension: of the tensors.
        weights: (elements of a window, elements that are computed), float64.
    """

    dimension: int
    line: Line
    weights: torch.Tensor

    @property
    def is_whole(self) -> bool:
        """Whether an only element reads all."""
        return self.line.rows == 1

    @property
    def is_identity(self) -> bool:
        is_square = self.line == Line(rows=self.line.rows, columns=self.line.rows, begin=0, step=1, divisor=1)
        return is_square and bool((self.weights == 1).all())

    @property
    def is_worthwhile(self) -> bool:
        """Whether reading is cheaper than scattering: few weights are 0, as most are where a tensor grew smaller."""
        filled = self.weights.count_nonzero().item() / self.weights.numel()
        return self.is_whole or (self.line.columns >= self.line.rows and filled >= _LEAST_FILLED)

    def skips(self, place: int) -> bool:
        """Whether a weight at a place of windows is 0, within the columns."""
        columns = self.line.starts + place
        is_inside = (columns >= 0) & (columns < self.line.columns)
        return bool(((self.weights[place] == 0) & is_inside).any())


def window_of(dimension: int, rows: int, entries: Sequence[Entries]) -> Window | None:
    """That of a matrix of some rows; None where it is too long."""
    columns = len(entries[0].rows)
    row = torch.cat([each.rows for each in entries])
    weight = torch.cat([each.weights for each in entries])
    column = torch.arange(columns).repeat(len(entries))
    row, weight, column = (each[weight != 0] for each in (row, weight, column))
    first = torch.full([rows], columns - 1 if rows > 1 else 0).scatter_reduce(0, row, column, "amin")
    last = torch.full([rows], 0 if rows > 1 else columns - 1).scatter_reduce(0, row, column, "amax")
    line = _line(columns, first, last)
    if line.size > _LONGEST and rows > 1:
        return None
    weights = torch.zeros(line.size, rows, dtype=torch.float64)
    weights.index_put_((column - line.starts[row], row), weight, accumulate=True)
    return Window(dimension, line, weights)


def _line(columns: int, first: torch.Tensor, last: torch.Tensor) -> Line:
    """The line of the smallest windows; of equal distances where a tensor grew by a whole factor.

    Between aligned corners windows are a little farther apart than that, and those of equal distances are larger.

    Args:
        first, last: the columns between which each row has entries.
    """
    rows = len(first)
    slopes = ((columns, rows), (columns - 1, max(rows - 1, 1)))  # edges of images are aligned, or centres of corners
    best = min((_along(columns, first, last, *slope) for slope in slopes), key=lambda line: line.size)
    return best if columns % rows else _along(columns, first, last, columns // rows, 1)


def _along(columns: int, first: torch.Tensor, last: torch.Tensor, step: int, divisor: int) -> Line:
    """The line of a slope."""
    common = math.gcd(step, divisor)
    step, divisor = step // common, divisor // common
    begin = int((first * divisor + divisor - 1 - torch.arange(len(first)) * step).min())
    line = Line(rows=len(first), columns=columns, begin=begin, step=step, divisor=divisor)
    return replace(line, size=max(1, int((last - line.starts).max()) + 1))
