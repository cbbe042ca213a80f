"""Space-to-depth (s2d) blocks of dx, which all meet outputs alike: backward data as one product for any stride.

Pure arithmetic on shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.solvers.common.correlation import ceil_div


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
