"""Images in shared memory: the arithmetic of kernels_src/depthwise/staged_images.cuh, and what its solvers share.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miofind.core.problem import DataType, Layout, ProblemDescription, TensorDescriptor
from miofind.device.device import Library, Place
from miofind.solver.occupancy import SmLimits, resident_blocks
from miofind.solver.solver import Applicability, KernelKey
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.correlation import Axis
from miofind.solvers.common.limits import refuse_tensors

KEYS = (
    KernelKey(
        place=Place.CUDA,
        library=Library.PLAIN,
        dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16}),
        layouts=frozenset({Layout.NCW, Layout.NWC, Layout.NCHW, Layout.NHWC}),
        min_sm=80,
    ),
)
"""What the kernels are made for, in all directions."""

_MOST = 8  # elements of 16 bytes
_LEAST_FILTER = 5
_LIMITS = SmLimits(threads=1024, blocks=16, shared_bytes=160 << 10)  # what the kernels are compiled for

SHAPE = StructType(
    "Shape",
    **dict.fromkeys(
        ("batch", "channels", "in_height", "in_width", "out_height", "out_width", "pad_top", "first_column"), "int32"
    ),
)
"""What the kernels of depthwise/toeplitz_large.cuh take by value."""


def shape_of(problem: ProblemDescription, axes: tuple[Axis, Axis], first_column: int) -> Struct:
    """The sizes of a correlation with these axes; `first_column` is `StagedColumns.first`."""
    height, width = axes
    return SHAPE(
        batch=problem.n,
        channels=problem.c,
        in_height=height.size,
        in_width=width.size,
        out_height=height.outputs,
        out_width=width.outputs,
        pad_top=height.pad,
        first_column=first_column,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedColumns:
    """Input columns of an unstrided axis that a tile of outputs is computed from, in whole vectors of 8 from the left.

    Attributes:
        first: the first of them, less the tile's first output.
        count: how many; those beyond the input read as zero.
        left: the tap that joins the first of them and the tile's first output; negative or past the filter if none.
    """

    first: int
    count: int
    left: int

    @staticmethod
    def of(axis: Axis, tile: int) -> StagedColumns:
        """Those of every tile of `tile` outputs; of a tile that covers all outputs, no more than exist."""
        first, end = -axis.pad // 8 * 8, tile - axis.pad + axis.taps - 1
        if tile >= axis.outputs:
            first, end = max(0, first), min(axis.size, end)
        return StagedColumns(first=first, count=end - first, left=axis.pad + first)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVector:
    """How the elements of a tensor of 16-bit images move.

    Attributes:
        length: elements moved at once.
        flat: whether they run on from row to row and from channel to channel.
    """

    length: int
    flat: bool = False

    @property
    def columns(self) -> int:
        """What a staged number of columns is a multiple of."""
        return 1 if self.flat else self.length

    @staticmethod
    def of(tensor: TensorDescriptor, channels: int, *, whole: bool) -> StagedVector:
        """Those of blocks of `channels` channels; `whole` where a block holds whole images of the tensor.

        Running on takes more arithmetic an element than moving rows: it pays where rows are of odd length.
        """
        if tensor.layout.channels_last:
            return StagedVector(length=math.gcd(_MOST, channels, tensor.shape[1]))
        row, area = math.gcd(_MOST, tensor.shape[-1]), math.prod(tensor.shape[2:])
        segment = math.gcd(_MOST, channels * area, tensor.shape[1] * area)
        return (
            StagedVector(length=segment, flat=True) if whole and row == 1 and segment >= 4 else StagedVector(length=row)
        )


def gap_slots(images: int) -> int:
    """Slots of zeros around a channel's: as many as a block of 16 slots can reach beyond them."""
    return 16 - math.gcd(_MOST, images)


def min_blocks(registers: int, threads: int, shared_bytes: int) -> int:
    """Blocks that the kernels are compiled for a multiprocessor to hold at once, whatever the device; at least 1."""
    return max(1, resident_blocks(registers, threads, shared_bytes, _LIMITS))


def refuse_large(problem: ProblemDescription) -> Applicability:
    """Why the kernels on staged images cannot compute a problem, whatever its direction; APPLICABLE if they can."""
    if not problem.groups == problem.c == problem.k:
        return Applicability(f"needs one filter a channel: groups={problem.groups} c={problem.c} k={problem.k}")
    if any(size != 1 for size in (*problem.conv.stride, *problem.conv.dilation)):
        stride, dilation = problem.conv.stride, problem.conv.dilation
        return Applicability(f"needs stride 1 and dilation 1, not {stride} and {dilation}")
    if max(problem.filter) < _LEAST_FILTER:
        return Applicability(f"serves filters from {_LEAST_FILTER} on, not {problem.filter}")
    return refuse_tensors(problem)
