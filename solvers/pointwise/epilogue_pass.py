"""The pass that applies a problem's epilogue to its written output, in place: kernels_src/pointwise/epilogue_pass.cu.

Sizes are arguments: few kernels serve all shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from miofind.core.cached import cached_property
from miofind.core.epilogue import EPILOGUE_TENSORS
from miofind.core.problem import ProblemDescription, TensorDescriptor
from miofind.device.device import Device, Place
from miofind.reference.convolution import round_once
from miofind.reference.epilogue import apply_epilogue
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.steps import RUN_PARAMETERS, Argument, Config, HostStep, KernelStep, Pointer, Scalar
from miofind.solvers.common.correlation import ceil_div

SOURCE = "pointwise/epilogue_pass.cu"
MODULE = __name__
"""Of the host function."""

VECTOR_BYTES = 16
"""What a thread moves at once, and the alignment that the operands need."""

_THREADS = 256
_MOST_THREADS = 512
_MANY_CHANNELS = 1 << 28  # of which rows of whole vectors have too many elements for 32 bits
_UNROLL = 4
_LAUNCH_MS = 2e-3
_BANDWIDTH_SHARE = 0.85
_HOST_BANDWIDTH_SHARE = 0.05
_HOST_BLOCK = 1 << 20  # elements that are widened to float64 at a time


class Walk(IntEnum):
    """What the kernel knows of channels; see the source."""

    FLAT = 0
    CHANNELS_LAST = 1
    CHANNELS_FIRST = 2


def pass_ms(problem: ProblemDescription, device: Device) -> float:
    """Expected time of the pass in milliseconds: a launch, and its operands through memory; 0 where none is due."""
    if not problem.epilogue.changes_results:
        return 0.0
    read = (operand for operand in problem.operands if operand.name in problem.epilogue.operands)
    moved = sum(operand.tensor.bytes for operand in read) + 2 * problem.output.bytes
    share = _BANDWIDTH_SHARE if device.place is Place.CUDA else _HOST_BANDWIDTH_SHARE
    return _LAUNCH_MS + 1e3 * moved / (share * device.bandwidth_bytes_per_s)


def pass_step(problem: ProblemDescription, device: Device) -> KernelStep | HostStep:
    """The step that applies the epilogue of a problem to its output."""
    if device.place is Place.CPU:
        return HostStep(module=MODULE, function="apply_in_place", fused=True)
    return _Pass(problem, device).step


@dataclass(frozen=True)
class _Pass:
    """One problem's launch."""

    problem: ProblemDescription
    device: Device

    @cached_property
    def walk(self) -> Walk:
        epilogue = self.problem.epilogue
        if not (epilogue.scale or epilogue.bias or epilogue.channel_bias):
            return Walk.FLAT
        is_last = self.problem.y.layout.channels_last or self.plane == 1
        return Walk.CHANNELS_LAST if is_last else Walk.CHANNELS_FIRST

    @cached_property
    def plane(self) -> int:
        """Elements of a channel of an image."""
        return math.prod(self.problem.out_spatial)

    @cached_property
    def images(self) -> int:
        """Parts of the output that are walked each by itself: where channels last have terms of each image, those."""
        goes_by_image = self.walk is Walk.CHANNELS_LAST and self.problem.epilogue.channel_bias
        return self.problem.n if goes_by_image else 1

    @cached_property
    def elements(self) -> int:
        """Of a part."""
        return self.problem.output.size // self.images

    @cached_property
    def vector(self) -> int:
        """Elements of a vector: parts of several begin at one, and a vector meets two planes at most."""
        widest = VECTOR_BYTES // self.problem.output.dtype.itemsize
        if self.images > 1 and self.elements % widest:
            return math.gcd(widest, self.problem.k)
        if self.walk is Walk.CHANNELS_FIRST and self.plane < widest:
            return math.gcd(widest, self.plane)
        if self.walk is Walk.CHANNELS_LAST and self.problem.k > _MANY_CHANNELS:
            return math.gcd(widest, self.problem.k)
        return widest

    @property
    def is_whole(self) -> bool:
        """Whether a vector has neighbouring channels of one pixel, or pixels of one plane."""
        run = {Walk.FLAT: 0, Walk.CHANNELS_LAST: self.problem.k, Walk.CHANNELS_FIRST: self.plane}[self.walk]
        return run % self.vector == 0

    @cached_property
    def unroll(self) -> int:
        """Vectors of a thread: fewer where that leaves multiprocessors idle."""
        threads = ceil_div(self.problem.output.size, self.vector)
        busy = 2 * self.device.sm_count * _THREADS
        return next((unroll for unroll in (_UNROLL, 2) if threads >= unroll * busy), 1)

    @property
    def step(self) -> KernelStep:
        """The launch."""
        blocks, threads, args = self._in_rows() if self.walk is Walk.CHANNELS_LAST else self._in_one_run()
        return KernelStep(
            source=SOURCE,
            entry="epilogue_pass",
            grid=(blocks, 1, 1),
            block=(threads, 1, 1),
            defines=(
                ("WALK", int(self.walk)),
                ("IS_WHOLE", int(self.is_whole)),
                ("VECTOR", self.vector),
                ("UNROLL", self.unroll),
                *epilogue_defines(self.problem),
            ),
            args=(Pointer(buffer=self.problem.direction.output), *args, *epilogue_arguments(self.problem)),
            pdl=True,
        )

    def _in_one_run(self) -> tuple[int, int, tuple[Argument, ...]]:
        """Blocks, threads of one and arguments of a walk over all elements as they lie."""
        blocks = ceil_div(self.elements, _THREADS * self.unroll * self.vector)
        if self.walk is Walk.FLAT:
            return blocks, _THREADS, (Scalar(ctype="int64", value=self.elements),)
        sizes = (Scalar(ctype="int64", value=self.elements // self.plane), Scalar(ctype="int64", value=self.plane))
        return blocks, _THREADS, (*sizes, Scalar(ctype="uint32", value=self.problem.k))

    def _in_rows(self) -> tuple[int, int, tuple[Argument, ...]]:
        """The same of a walk over rows of as many pixels as make whole vectors."""
        columns = self.problem.k // math.gcd(self.problem.k, self.vector)
        rows, parts, threads = 1, ceil_div(columns, _THREADS), _THREADS
        if columns <= _MOST_THREADS:
            rows, parts = _rows_of_block(columns), 1
            threads = rows * columns
        all_rows = ceil_div(ceil_div(self.elements, self.vector), columns)
        blocks = ceil_div(all_rows, rows * self.unroll) * parts
        counts = (self.problem.k, columns, rows, parts, blocks)
        sizes = (Scalar(ctype="uint32", value=count) for count in counts)
        return blocks * self.images, threads, (Scalar(ctype="int64", value=self.elements), *sizes)


def _rows_of_block(columns: int) -> int:
    """Rows that a block takes side by side: of those that make half a block or more what fills its warps best."""
    most = _MOST_THREADS // columns
    least = min(most, ceil_div(_THREADS // 2, columns))
    return max(range(least, most + 1), key=lambda rows: (rows * columns / (32 * ceil_div(rows * columns, 32)), -rows))


def apply_in_place(problem: ProblemDescription, config: Config, buffers: Mapping[str, Any]) -> None:
    """Apply the epilogue to the output on the host, some images at a time; arrays have logical shapes."""
    output, epilogue = buffers[problem.direction.output], problem.epilogue
    for part, images in _parts(problem):
        operands = {
            name: buffers[name][images] if name in ("channel_bias", *EPILOGUE_TENSORS) else buffers[name]
            for name in epilogue.operands
        }
        results = apply_epilogue(part, output[images].astype("float64"), operands, buffers[RUN_PARAMETERS])
        output[images] = round_once(results, problem.output.dtype)


def _parts(problem: ProblemDescription) -> Iterator[tuple[ProblemDescription, slice]]:
    """The problem of some images, and where they are."""
    each = max(1, _HOST_BLOCK // max(1, problem.output.size // problem.n))
    for first in range(0, problem.n, each):
        count = min(each, problem.n - first)
        x, y = (_of_images(tensor, count) for tensor in (problem.x, problem.y))
        yield replace(problem, x=x, y=y), slice(first, first + count)


def _of_images(tensor: TensorDescriptor, count: int) -> TensorDescriptor:
    return replace(tensor, shape=(count, *tensor.shape[1:]))
