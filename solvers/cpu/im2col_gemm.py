"""ConvCpuIm2colGemm: unfold a few images into a matrix, multiply by BLAS; the general solver of the CPU place.

Columns live in the workspace, a bounded number of images at a time. float16 and bfloat16 are computed in float32.
Serves every problem in all directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, HostStep, Region, WorkspacePlan
from miofind.solvers.common.chunks import chunks

# Of the BLAS ceiling, on a two-core Xeon with OpenBLAS.
_EFFICIENCY = 0.5

_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Tap:
    """One filter position: where its columns lie, and the inputs they hold. What padding fills is in neither.

    Attributes:
        columns: index into (images, groups, c, taps, *out_spatial).
        inputs: index into (images, groups, c, *spatial).
    """

    columns: tuple[Any, ...]
    inputs: tuple[Any, ...]


def _taps(problem: ProblemDescription) -> Iterator[_Tap]:
    everything = slice(None)
    for rank, at in enumerate(product(*(range(size) for size in problem.filter))):
        spans = [_span(problem, dimension, tap) for dimension, tap in enumerate(at)]
        if all(outputs.start < outputs.stop for outputs, _ in spans):
            columns = (everything, everything, everything, rank, *(outputs for outputs, _ in spans))
            yield _Tap(columns, (..., *(inputs for _, inputs in spans)))


def _span(problem: ProblemDescription, dimension: int, tap: int) -> tuple[slice, slice]:
    """Outputs [first, end) along one dimension with 0 <= o*stride + shift < size, and their inputs."""
    stride = problem.conv.stride[dimension]
    shift = tap * problem.conv.dilation[dimension] - problem.conv.pad_before[dimension]
    first = max(0, -(shift // stride))
    end = min(problem.out_spatial[dimension], -((shift - problem.spatial[dimension]) // stride))
    return slice(first, end), slice(first * stride + shift, (end - 1) * stride + shift + 1, stride)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of the products: per group `k` x `c * taps` by `pixels` of `images` images at a time."""

    groups: int
    k: int
    c: int
    taps: int
    pixels: int
    images: int
    wide: np.dtype[Any]

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> _Shape:
        wide = np.dtype(np.float64 if problem.x.dtype is DataType.FLOAT64 else np.float32)
        taps, pixels = math.prod(problem.filter), math.prod(problem.out_spatial)
        image_bytes = problem.c * taps * pixels * wide.itemsize
        images = max(1, min(problem.n, (config["chunk_mib"] << 20) // image_bytes))
        c, k = problem.c // problem.groups, problem.k // problem.groups
        return _Shape(problem.groups, k, c, taps, pixels, images, wide)

    @property
    def column_bytes(self) -> int:
        """Bytes of the unfolded images of one chunk."""
        return self.groups * self.c * self.taps * self.pixels * self.images * self.wide.itemsize


def convolve(problem: ProblemDescription, config: Config, buffers: Mapping[str, _Array]) -> None:
    """Write the output of the problem; arrays have logical shapes, whatever their memory order."""
    compute = {
        Direction.FORWARD: _forward,
        Direction.BACKWARD_DATA: _backward_data,
        Direction.BACKWARD_WEIGHTS: _backward_weights,
    }[problem.direction]
    compute(problem, _Columns(problem, config, buffers["columns"]), buffers)


class _Columns:
    """The matrix of a chunk of images, pixels by channels and taps, in either memory order.

    Attributes:
        matrix: (groups, pixels of the chunk, c * taps) or, with `pixels_inner`, its transpose.
    """

    def __init__(self, problem: ProblemDescription, config: Config, region: _Array) -> None:
        self.problem = problem
        self.shape = _Shape.of(problem, config)
        self.pixels_inner: bool = config["pixels_inner"]
        self._storage = region.view(self.shape.wide)

    def chunks(self) -> Iterator[slice]:
        """The images of each chunk."""
        return chunks(self.problem.n, self.shape.images)

    def matrix(self, images: int) -> _Array:
        """The columns of `images` images as (groups, images * pixels, c * taps)."""
        s = self.shape
        flat = self._storage[: s.groups * s.c * s.taps * s.pixels * images]
        if self.pixels_inner:
            return flat.reshape(s.groups, s.c * s.taps, images * s.pixels).swapaxes(1, 2)
        return flat.reshape(s.groups, images * s.pixels, s.taps * s.c)

    def _windows(self, images: int) -> _Array:
        """The columns as (images, groups, c, taps, *out_spatial)."""
        s, out = self.shape, self.problem.out_spatial
        rank = len(out)
        if self.pixels_inner:
            split = self.matrix(images).swapaxes(1, 2).reshape(s.groups, s.c, s.taps, images, *out)
            return np.moveaxis(split, 3, 0)
        split = self.matrix(images).reshape(s.groups, images, *out, s.taps, s.c)
        return split.transpose(1, 0, rank + 3, rank + 2, *range(2, rank + 2))

    def unfold(self, x: _Array) -> _Array:
        """Fill the columns from x (images, c, *spatial) and return their matrix."""
        s, images = self.shape, x.shape[0]
        source = x.reshape(images, s.groups, s.c, *self.problem.spatial)
        windows = self._windows(images)
        if any(self.problem.conv.pad_before) or any(self.problem.conv.pad_after):
            self.matrix(images)[...] = 0
        for tap in _taps(self.problem):
            windows[tap.columns] = source[tap.inputs]
        return self.matrix(images)

    def fold(self, images: int) -> _Array:
        """Sum the columns back into (images, c, *spatial)."""
        s = self.shape
        windows = self._windows(images)
        target = np.zeros((images, s.groups, s.c, *self.problem.spatial), s.wide)
        for tap in _taps(self.problem):
            target[tap.inputs] += windows[tap.columns]
        return target.reshape(images, self.problem.c, *self.problem.spatial)

    def filter(self, w: _Array) -> _Array:
        """w as (groups, k, c * taps) in the order of the columns."""
        s = self.shape
        split = w.astype(s.wide, copy=False).reshape(s.groups, s.k, s.c, s.taps)
        return (split if self.pixels_inner else split.swapaxes(2, 3)).reshape(s.groups, s.k, -1)

    def unfilter(self, matrix: _Array) -> _Array:
        """The inverse of `filter`: of the shape of w."""
        s = self.shape
        if self.pixels_inner:
            return matrix.reshape(self.problem.w.shape)
        return matrix.reshape(s.groups, s.k, s.taps, s.c).swapaxes(2, 3).reshape(self.problem.w.shape)

    def pixel_rows(self, y: _Array) -> _Array:
        """y (images, k, *out_spatial) as (groups, images * pixels, k), a view where memory allows."""
        s = self.shape
        split = y.astype(s.wide, copy=False).reshape(y.shape[0], s.groups, s.k, s.pixels)
        return split.transpose(1, 0, 3, 2).reshape(s.groups, -1, s.k)


def _forward(problem: ProblemDescription, columns: _Columns, buffers: Mapping[str, _Array]) -> None:
    x, y, s = buffers["x"], buffers["y"], columns.shape
    w = columns.filter(buffers["w"])
    for chunk in columns.chunks():
        matrix = columns.unfold(x[chunk])
        images = matrix.shape[1] // s.pixels
        if columns.pixels_inner:
            rows = (w @ matrix.swapaxes(1, 2)).reshape(s.groups, s.k, images, s.pixels).transpose(2, 0, 1, 3)
        else:
            rows = (matrix @ w.swapaxes(1, 2)).reshape(s.groups, images, s.pixels, s.k).transpose(1, 0, 3, 2)
        y[chunk] = rows.reshape(images, problem.k, *problem.out_spatial)


def _backward_data(problem: ProblemDescription, columns: _Columns, buffers: Mapping[str, _Array]) -> None:
    dy, dx = buffers["y"], buffers["x"]
    w = columns.filter(buffers["w"])
    for chunk in columns.chunks():
        rows = columns.pixel_rows(dy[chunk])
        matrix = columns.matrix(dy[chunk].shape[0])
        if columns.pixels_inner:
            np.matmul(w.swapaxes(1, 2), rows.swapaxes(1, 2), out=matrix.swapaxes(1, 2))
        else:
            np.matmul(rows, w, out=matrix)
        dx[chunk] = columns.fold(dy[chunk].shape[0])


def _backward_weights(problem: ProblemDescription, columns: _Columns, buffers: Mapping[str, _Array]) -> None:
    x, dy, s = buffers["x"], buffers["y"], columns.shape
    total = np.zeros((s.groups, s.k, s.c * s.taps), s.wide)
    for chunk in columns.chunks():
        total += columns.pixel_rows(dy[chunk]).swapaxes(1, 2) @ columns.unfold(x[chunk])
    buffers["w"][...] = columns.unfilter(total)


class ConvCpuIm2colGemm(Solver):
    """im2col and a BLAS product, a bounded chunk of images at a time.

    Configuration: `chunk_mib` bounds the unfolded images (one image at least); `pixels_inner` chooses the memory order
    of the columns: pixels innermost suits channels first, channels innermost suits channels last.
    """

    id = "ConvCpuIm2colGemm"
    algorithm = Algorithm.IM2COL_GEMM
    keys = (KernelKey(place=Place.CPU, library=Library.PLAIN, dtypes=frozenset(DataType), layouts=frozenset(Layout)),)
    is_dynamic = True
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "chunk_mib": (2, 16, 128),
        "pixels_inner": (True, False),
    }

    def examples(self) -> tuple[ProblemDescription, ...]:
        return (
            *(
                ProblemDescription.convolution(
                    x=(3, 4, 7, 6), w=(6, 2, 3, 2), padding=((1, 0), (0, 2)), stride=2, groups=2, direction=direction
                )
                for direction in Direction
            ),
            ProblemDescription.convolution(x=(2, 6, 9, 8), w=(4, 6, 3, 3), padding=1, layout=Layout.NHWC),
            ProblemDescription.convolution(x=(1, 3, 20), w=(5, 3, 7), dilation=2, dtype=DataType.FLOAT64),
            ProblemDescription.convolution(x=(1, 2, 4, 5, 6), w=(2, 2, 3, 3, 3), padding=4, dtype=DataType.FLOAT16),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        return APPLICABLE

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        pixels_inner = not problem.x.layout.channels_last
        return tuple(Config.of(chunk_mib=size, pixels_inner=pixels_inner) for size in (16, 2))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        shape = _Shape.of(problem, config)
        ceiling = device.peak_flops_per_s(problem.x.dtype, tensor_cores=False)
        columns = shape.column_bytes * -(-problem.n // shape.images)
        misfit = 1.0 if config["pixels_inner"] != problem.x.layout.channels_last else 1.5
        moved = problem.bytes + 3 * misfit * columns
        return 0.05 + 1e3 * (problem.flops / (_EFFICIENCY * ceiling) + moved / device.bandwidth_bytes_per_s)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        step = HostStep(module="miofind.solvers.cpu.im2col_gemm", function="convolve")
        region = Region(name="columns", bytes=_Shape.of(problem, config).column_bytes)
        return ConvSolution(steps=(step,), workspace=WorkspacePlan((region,)))


SOLVERS = (ConvCpuIm2colGemm(),)
