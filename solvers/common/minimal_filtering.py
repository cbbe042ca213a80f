"""Winograd's minimal filtering: its matrices from their points, exact, and how much wider its error is than a sum's.

F(m, r) computes m neighbouring outputs y_i = sum_k d_(i+k) g_k of a filter of r taps with m + r - 1 products:
y = A ((G g) * (B d)). One axis each; several axes nest.

Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016; the construction from points is
Cook and Toom's as in Blahut, Fast Algorithms for Signal Processing, 2010, chapter 5.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

# The first points of each number of them that have small errors: 0, 1, -1, 1/2 and -2 leave a third less error in
# F(4, 3) than 0, 1, -1, 2 and -2.
_POINTS = (Fraction(0), Fraction(1), Fraction(-1), Fraction(1, 2), Fraction(-2), Fraction(2), Fraction(-1, 2))

_KEPT = 2.0 + 1e-9  # errors of F(3x3, 2x2) are twice those of direct sums, but for rounding

MOST_POINTS = len(_POINTS)
"""Points of the largest algorithm; a product more is taken at infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtering:
    """F(outputs, taps) along one axis.

    Attributes:
        outputs, taps: m and r; the tile of inputs has m + r - 1.
        output: A, outputs x products.
        filter: G, products x taps.
        input: B, products x inputs of a tile.
        is_local: whether an output is computed from the inputs alone that its taps meet. So it is in F(2, r); in larger
            tiles the inputs beside them cancel, but for rounding.
    """

    outputs: int
    taps: int
    output: NDArray[np.float64]
    filter: NDArray[np.float64]
    input: NDArray[np.float64]
    is_local: bool

    @staticmethod
    def of(outputs: int, taps: int) -> Filtering:
        """The algorithm for that many outputs and taps, outputs + taps - 2 <= `MOST_POINTS`."""
        return _filtering(outputs, taps)

    @property
    def products(self) -> int:
        """Products, and inputs of a tile."""
        return self.outputs + self.taps - 1

    @property
    def error_growth(self) -> float:
        """Root mean square error over that of the direct sum, for independent rounding errors of normal data.

        Each product's error is proportional to the norms of its rows of G and B, and A adds their squares.
        """
        return _error_growth(self.outputs, self.taps)


@functools.cache  # every look-up asks it of every row of a transform
def _error_growth(outputs: int, taps: int) -> float:
    made = _filtering(outputs, taps)
    norms = np.linalg.norm(made.filter, axis=1) * np.linalg.norm(made.input, axis=1)
    return float(np.max(np.linalg.norm(made.output * norms, axis=1)) / math.sqrt(taps))


def bound_growth(axes: Iterable[Filtering]) -> float:
    """How much wider the error bound of nested algorithms is than direct summation's.

    The worst errors of direct float32 sums take less than half of their bound (miofind/verify/accuracy.py: 3.1 of 8),
    so an algorithm with errors up to twice as large, such as F(2x2, 3x3), keeps that bound.
    Larger tiles have the whole of their growth: next to padding an element sums fewer products than its tile does.
    """
    growth = math.prod(axis.error_growth for axis in axes)
    return growth if growth > _KEPT else 1.0


def is_local(axes: Iterable[Filtering]) -> bool:
    """Whether nested algorithms compute an output from the inputs alone that its taps meet."""
    return all(axis.is_local for axis in axes)


def matrices(outputs: int, taps: int) -> tuple[list[list[Fraction]], list[list[Fraction]], list[list[Fraction]]]:
    """A, G and B of F(outputs, taps), exact.

    Raises:
        ValueError: there are no points for so many outputs and taps.
    """
    count = outputs + taps - 2
    if not (outputs >= 1 and taps >= 1 and count <= MOST_POINTS):
        raise ValueError(f"F({outputs}, {taps}) needs 0 to {MOST_POINTS} points, not {count}")
    points = _POINTS[:count]
    inverses = [1 / math.prod((a - b for b in points if b != a), start=Fraction(1)) for a in points]
    output = [[a**i for a in points] + [Fraction(int(i == outputs - 1))] for i in range(outputs)]
    filter_ = [[a**k * inverse for k in range(taps)] for a, inverse in zip(points, inverses, strict=True)]
    filter_.append([Fraction(int(k == taps - 1)) for k in range(taps)])
    input_ = [[*_polynomial([b for b in points if b != a]), Fraction(0)] for a in points]
    input_.append(_polynomial(points))
    return output, filter_, input_


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of the product of (x - root), the constant one first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted, scaled = [Fraction(0), *coefficients], [-root * c for c in coefficients] + [Fraction(0)]
        coefficients = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return coefficients


@functools.cache
def _filtering(outputs: int, taps: int) -> Filtering:
    output, filter_, input_ = (np.array(matrix, dtype=np.float64) for matrix in matrices(outputs, taps))
    reads = (np.flatnonzero(input_[row != 0].any(axis=0)) for row in output)
    is_local = all(i <= read[0] and read[-1] < i + taps for i, read in enumerate(reads))
    return Filtering(outputs=outputs, taps=taps, output=output, filter=filter_, input=input_, is_local=bool(is_local))
