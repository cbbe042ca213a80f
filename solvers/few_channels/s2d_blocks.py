"""Space-to-depth (s2d) blocks of dx, which all meet outputs alike: backward data as one product for any stride.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.solver.columns import chosen, larger, smaller
from miofind.solvers.common.correlation import ceil_div

_BEGIN_ROWS = 3  # what the beginning of a strip costs, in rows


@dataclass(frozen=True, slots=True, kw_only=True)
class S2dBlocks:
    """S2d blocks along one axis of the input: `size` pixels each, of which the first begins `origin` pixels before it.

    Attributes:
        size: pixels of a s2d block, a multiple of the stride.
        origin: pixels of the first s2d block before the input.
        count: s2d blocks that cover the input.
        first: the first output that a s2d block meets, less its number times size / stride.
        taps: outputs that it meets from there on.
        last_tap: the tap, which may be none of the filter's, through which that output meets a s2d block's first pixel.
    """

    size: int
    origin: int
    count: int
    first: int
    taps: int
    last_tap: int

    @staticmethod
    @functools.lru_cache(maxsize=256)  # configurations have few of these
    def of(problem: ProblemDescription, axis: int, size: int) -> S2dBlocks:
        """Those that meet fewest outputs, and of these, that begin nearest before the input."""
        stride, pad, filter_size = problem.conv.stride[axis], problem.conv.pad_before[axis], problem.filter[axis]

        def meeting(origin: int) -> tuple[int, int]:
            start = pad - origin  # pixel e of s2d block 0 meets output i through tap start + e - i * stride
            return -((filter_size - 1 - start) // stride), (start + size - 1) // stride

        origin = min(range(size), key=lambda origin: (meeting(origin)[1] - meeting(origin)[0], origin))
        first, last = meeting(origin)
        return S2dBlocks(
            size=size,
            origin=origin,
            count=ceil_div(problem.spatial[axis] + origin, size),
            first=first,
            taps=max(1, last - first + 1),
            last_tap=pad - origin - first * stride,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class S2dRows:
    """Runs of `stride` pixels along an axis of dx: pixel p of s2d block I is I * stride + p - pad.

    It meets outputs I, I - 1, ... through taps p, p + stride, ...

    Attributes:
        first, end: of the s2d blocks that have pixels.
        met: outputs that an s2d block meets at most.
    """

    first: int
    end: int
    met: int

    @staticmethod
    @functools.lru_cache(maxsize=256)  # configurations have few of these
    def of(problem: ProblemDescription, axis: int) -> S2dRows:
        """Those along `axis` of a problem of two dimensions."""
        stride, pad = problem.conv.stride[axis], problem.conv.pad_before[axis]
        return S2dRows(
            first=pad // stride,
            end=(problem.spatial[axis] - 1 + pad) // stride + 1,
            met=ceil_div(problem.filter[axis], stride),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Strips:
    """Strips of rows of s2d blocks that thread blocks, or teams, go down, each of a tile of columns of an image.

    Attributes:
        rows: of s2d blocks, of a strip.
        steps: rows of dy that a strip meets.
        row_strips: strips of a tile of columns.
        image_strips: of an image.
        count: of all images.
    """

    rows: int
    steps: int
    row_strips: int
    image_strips: int
    count: int

    @staticmethod
    def of(height: S2dRows, images: int, tiles: int, slots: int) -> Strips:
        """Those of `tiles` tiles of columns of each image that finish soonest, `slots` at a time."""
        every = height.end - height.first

        def cost(rows: int) -> int:
            turns = ceil_div(images * tiles * ceil_div(every, rows), slots)
            return turns * (rows + height.met - 1 + _BEGIN_ROWS)

        def choice(turns: int) -> int:
            return ceil_div(every, larger(1, smaller(every, turns * slots // (images * tiles))))

        rows = choice(1)
        for other in map(choice, range(2, 5)):
            rows = chosen(cost(other) < cost(rows), other, rows)
        row_strips = ceil_div(every, rows)
        return Strips(
            rows=rows,
            steps=rows + height.met - 1,
            row_strips=row_strips,
            image_strips=row_strips * tiles,
            count=images * tiles * row_strips,
        )
