"""Circular convolution of tiles: lengths of transforms, and where a tensor's elements lie in a tile (overlap-save).

An axis is cut into tiles that overlap by all taps but one; of a tile's circular correlation the outputs are kept that
no wrapping around reaches. One tile may hold a whole image: what wraps around in it meets zeros. Pure arithmetic on
shapes.

Source: Oppenheim and Schafer, Discrete-Time Signal Processing, section 8.7.3 (overlap-save).
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from miofind.core.problem import Direction, ProblemDescription
from miofind.solvers.common.correlation import ceil_div

_FACTORS = (2, 3, 5, 7)
_LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the elements of a tensor lie along an axis: element i at i * spread + shift - t * step of tile t.

    Attributes:
        spread: positions from an element to the next; zeros between them.
        shift: position of the first element in the first tile.
        low, high: positions from `low` to before `high` hold elements, the others zeros.
    """

    spread: int
    shift: int
    low: int
    high: int

    def elements(self, start: int, size: int) -> tuple[slice, slice]:
        """Which of `size` elements a tile holds that starts at coordinate `start`, and its positions that hold them."""
        first = max(0, ceil_div(self.low - self.shift + start, self.spread))
        last = max(first, min(size, ceil_div(self.high - self.shift + start, self.spread)))
        at = first * self.spread + self.shift - start
        return slice(first, last), slice(at, at + (last - first) * self.spread, self.spread)


@dataclass(frozen=True, slots=True)
class FftAxis:
    """Tiles along one axis, in coordinates of stride 1 that begin with the padding.

    Attributes:
        length: of a tile's transform.
        step: coordinates from a tile to the next: outputs of stride 1 that a tile is kept of.
        tiles: how many cover the axis.
        lead: position in a tile of its first result, for backward data.
    """

    length: int
    step: int
    tiles: int
    lead: int

    @staticmethod
    def whole(problem: ProblemDescription, axis: int, length: int) -> FftAxis:
        """One tile of a transform of `whole_length` or more, for problems without empty sums."""
        return FftAxis(length=length, step=_outputs(problem, axis), tiles=1, lead=problem.conv.pad_before[axis])

    @staticmethod
    def tiled(problem: ProblemDescription, axis: int, length: int) -> FftAxis:
        """Tiles of transforms of a length, which is at least the filter's."""
        taps = problem.filter[axis]
        step = length - taps + 1
        return FftAxis(length=length, step=step, tiles=ceil_div(_outputs(problem, axis), step), lead=taps - 1)

    def placement(self, problem: ProblemDescription, axis: int, name: str) -> Placement:
        """Where the tensor "x", "w" or "y" lies in tiles of this axis."""
        stride, before = problem.conv.stride[axis], problem.conv.pad_before[axis]
        if name == "w":
            return Placement(1, 0, 0, problem.filter[axis])
        if problem.direction is Direction.BACKWARD_DATA:
            if name == "y":
                return Placement(stride, self.lead - before, 0, self.length)
            return Placement(1, self.lead, self.lead, self.lead + self.step)
        return (
            Placement(1, before, 0, self.length)
            if name == "x"
            else Placement(stride, 0, 0, min(self.step, self.length))
        )


def whole_length(problem: ProblemDescription, axis: int) -> int:
    """Least length of a transform of the whole axis: what wraps around meets the longer side's padding."""
    pads = problem.conv.pad_before[axis], problem.conv.pad_after[axis]
    return max(problem.spatial[axis] + max(pads), problem.filter[axis])


def smooth(size: int) -> int:
    """The least even number from `size` on that transforms are fast for: its prime factors are at most 7; 1 for 1."""
    if size == 1:
        return 1
    known = _smooth_numbers()
    return known[bisect_left(known, size)] if size <= known[-1] else 1 << (size - 1).bit_length()


def spectrum(lengths: Sequence[int]) -> tuple[int, ...]:
    """Frequencies of a real transform of those lengths: half of them and one along the last."""
    return (*lengths[:-1], lengths[-1] // 2 + 1)


def _outputs(problem: ProblemDescription, axis: int) -> int:
    """Results of stride 1 along an axis, or for backward weights the outputs that are summed over."""
    if problem.direction is Direction.BACKWARD_DATA:
        return problem.spatial[axis]
    return (problem.out_spatial[axis] - 1) * problem.conv.stride[axis] + 1


@functools.cache
def _smooth_numbers() -> tuple[int, ...]:
    """Even numbers up to 2^20 whose prime factors are at most 7, in order."""
    found = {2}
    for factor in _FACTORS:
        for known in sorted(found):
            while (known := known * factor) <= _LARGEST:
                found.add(known)
    return tuple(sorted(found))
