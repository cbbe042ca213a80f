"""ConvCpuFft: convolution as products of Fourier transforms, of whole images or of tiles; the readable statement of it.

Transforms are NumPy's, in double precision. Strides are outputs left out, or zeros between those of y.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Reach, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, HostStep, Region, WorkspacePlan
from miofind.solvers.common.chunks import chunks
from miofind.solvers.common.fourier import FftAxis, smooth, spectrum, whole_length
from miofind.solvers.common.overlap import least_products

# Of the BLAS ceiling in float64, for products of complex numbers; transforms of so many points a nanosecond. Two-core
# Xeon with OpenBLAS.
_EFFICIENCY = 0.3
_POINTS_PER_S = 2.0e8
_MAX_FILTER_BYTES = 256 << 20
_DEFAULTS = 3
_LEAST_PRODUCTS = 16
_MOST_PADDED = 4  # times the longest of input, output and filter along an axis
# Largest error of a transform there and back, in units of roundoff, of the logarithm of its length and of the root
# mean square of its result; two transforms meet in one, and the reference is no more exact.
_TRANSFORM = 4.0

_Array = NDArray[Any]
_REGIONS = {"x": "inputs", "y": "results"}


@dataclass(frozen=True, slots=True)
class _Plan:
    """Transforms of one problem.

    Attributes:
        axes: tiles along each spatial dimension.
        at_once: tiles, of whichever images, that are transformed at once.
    """

    axes: tuple[FftAxis, ...]
    at_once: int

    @staticmethod
    def of(problem: ProblemDescription, config: Mapping[str, Any]) -> _Plan:
        """The plan of a configuration; an axis shorter than a tile is transformed whole."""
        axes = tuple(_axis(problem, axis, config["tile"]) for axis in range(problem.spatial_dims))
        frequencies = math.prod(spectrum([axis.length for axis in axes]))
        tiles = problem.n * math.prod(axis.tiles for axis in axes)
        of_tile = 16 * frequencies * (problem.c + problem.k)
        return _Plan(axes, max(1, min(tiles, (config["chunk_mib"] << 20) // of_tile)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of a transform."""
        return tuple(axis.length for axis in self.axes)

    @property
    def grid(self) -> tuple[int, ...]:
        """Tiles of an image along each dimension."""
        return tuple(axis.tiles for axis in self.axes)

    @property
    def frequencies(self) -> int:
        """Of a real transform."""
        return math.prod(spectrum(self.sizes))

    def chunks(self, problem: ProblemDescription) -> Iterator[slice]:
        """All tiles of all images, image by image, in parts."""
        return chunks(problem.n * math.prod(self.grid), self.at_once)

    def laid_out(self, region: _Array, groups: int, rows: int, columns: int) -> _Array:
        """The beginning of a region as (frequencies, groups, rows, columns)."""
        shape = (self.frequencies, groups, rows, columns)
        return region.view(np.complex128)[: math.prod(shape)].reshape(shape)


def _axis(problem: ProblemDescription, axis: int, tile: int) -> FftAxis:
    whole = whole_length(problem, axis)
    if tile and tile < whole:
        return FftAxis.tiled(problem, axis, tile)
    return FftAxis.whole(problem, axis, smooth(whole))


def _filter_bytes(problem: ProblemDescription, plan: _Plan) -> int:
    """Of the transforms of all filters."""
    return 16 * plan.frequencies * problem.c * problem.k // problem.groups


def convolve(problem: ProblemDescription, config: Config, buffers: Mapping[str, _Array]) -> None:
    """Write the output of the problem; arrays have logical shapes, whatever their memory order."""
    _COMPUTE[problem.direction](problem, _Plan.of(problem, config), buffers)


def _forward(problem: ProblemDescription, plan: _Plan, buffers: Mapping[str, _Array]) -> None:
    filters = _filters(problem, plan, buffers)  # (f, g, k, c)
    np.conjugate(filters, out=filters)
    _multiply(problem, plan, buffers, filters)


def _backward_data(problem: ProblemDescription, plan: _Plan, buffers: Mapping[str, _Array]) -> None:
    _multiply(problem, plan, buffers, _filters(problem, plan, buffers).swapaxes(2, 3))  # (f, g, c, k)


def _multiply(problem: ProblemDescription, plan: _Plan, buffers: Mapping[str, _Array], filters: _Array) -> None:
    """Tiles of the input's transforms times those of the filters, transformed back, into the output."""
    groups = problem.groups
    rows, columns = filters.shape[2:]
    source, target = ("y", "x") if problem.direction is Direction.BACKWARD_DATA else ("x", "y")
    for chunk in plan.chunks(problem):
        count = chunk.stop - chunk.start
        operands = plan.laid_out(buffers[_REGIONS[source]], groups, columns, count)
        _transform(plan, _tiles(problem, plan, source, buffers[source], chunk), groups, operands)
        products = plan.laid_out(buffers[_REGIONS[target]], groups, rows, count)
        np.matmul(filters, operands, out=products)
        results = _back(plan, products)
        for tile, (image, elements, positions) in enumerate(_places(problem, plan, target, chunk)):
            buffers[target][image, :, *elements] = results[tile, :, *positions]


def _backward_weights(problem: ProblemDescription, plan: _Plan, buffers: Mapping[str, _Array]) -> None:
    groups, c, k = problem.groups, problem.c // problem.groups, problem.k // problem.groups
    total = plan.laid_out(buffers["filters"], groups, c, k)
    total[...] = 0
    for chunk in plan.chunks(problem):
        count = chunk.stop - chunk.start
        inputs = plan.laid_out(buffers["inputs"], groups, c, count)
        _transform(plan, _tiles(problem, plan, "x", buffers["x"], chunk), groups, inputs)
        results = plan.laid_out(buffers["results"], groups, k, count)
        _transform(plan, _tiles(problem, plan, "y", buffers["y"], chunk), groups, results)
        total += inputs @ results.conj().swapaxes(2, 3)
    first: Any = (..., *(slice(size) for size in problem.filter))
    taps = _back(plan, total)[first]  # (k, g c, *filter)
    split = taps.reshape(k, groups, c, *problem.filter).swapaxes(0, 1)
    buffers["w"][...] = split.reshape(problem.w.shape)


_COMPUTE = {
    Direction.FORWARD: _forward,
    Direction.BACKWARD_DATA: _backward_data,
    Direction.BACKWARD_WEIGHTS: _backward_weights,
}


def _filters(problem: ProblemDescription, plan: _Plan, buffers: Mapping[str, _Array]) -> _Array:
    """Transforms of the filters, as (frequencies, groups, k, c)."""
    groups, axes = problem.groups, tuple(range(1, 1 + len(plan.sizes)))
    k, c = problem.k // groups, problem.c // groups
    filters = plan.laid_out(buffers["filters"], groups, k, c)
    for group, of_group in enumerate(buffers["w"].reshape(groups, k, c, *problem.filter)):
        for row, one in enumerate(of_group):  # few at a time: their transforms are as large as tiles
            spectra = np.fft.rfftn(one.astype(np.float64, copy=False), s=plan.sizes, axes=axes)
            filters[:, group, row] = spectra.reshape(c, -1).T
    return filters


def _places(problem: ProblemDescription, plan: _Plan, name: str, chunk: slice) -> Iterator[tuple[int, Any, Any]]:
    """Of each tile of a chunk its image, and slices: which elements of the tensor it holds, and at what positions."""
    sizes = problem.tensor(name).shape[2:]
    placements = [axis.placement(problem, i, name) for i, axis in enumerate(plan.axes)]
    for at in range(chunk.start, chunk.stop):
        image, *tile = np.unravel_index(at, (problem.n, *plan.grid))
        spans = [
            placement.elements(int(index) * axis.step, size)
            for placement, index, axis, size in zip(placements, tile, plan.axes, sizes, strict=True)
        ]
        elements, positions = zip(*spans, strict=True)
        yield int(image), elements, positions


def _tiles(problem: ProblemDescription, plan: _Plan, name: str, tensor: _Array, chunk: slice) -> _Array:
    """Tiles of x or y as (tiles, channels, *sizes), zeros where they hold no element."""
    tiles = np.zeros((chunk.stop - chunk.start, tensor.shape[1], *plan.sizes))
    for tile, (image, elements, positions) in enumerate(_places(problem, plan, name, chunk)):
        tiles[tile, :, *positions] = tensor[image, :, *elements]
    return tiles


def _transform(plan: _Plan, tensor: _Array, groups: int, out: _Array) -> None:
    """Transforms (tiles, channels, *sizes) into (frequencies, groups, channels of a group, tiles)."""
    axes = tuple(range(2, 2 + len(plan.sizes)))
    spectra = np.fft.rfftn(tensor, axes=axes)
    out[...] = spectra.reshape(len(tensor), groups, -1, plan.frequencies).transpose(3, 1, 2, 0)


def _back(plan: _Plan, spectra: _Array) -> _Array:
    """(frequencies, groups, channels of a group, tiles) back to (tiles, channels, *sizes)."""
    tiles = spectra.shape[3]
    ordered = spectra.transpose(3, 1, 2, 0).reshape(tiles, -1, *spectrum(plan.sizes))
    return np.fft.irfftn(ordered, s=plan.sizes, axes=tuple(range(2, 2 + len(plan.sizes))))


def _is_mostly_padding(problem: ProblemDescription, axis: int) -> bool:
    """Whether an axis has few elements and vast padding, which transforms take for elements."""
    padded = problem.conv.pad_before[axis] + problem.spatial[axis] + problem.conv.pad_after[axis]
    return padded > _MOST_PADDED * max(problem.spatial[axis], problem.out_spatial[axis], problem.filter[axis])


def _is_wide(problem: ProblemDescription) -> bool:
    """Whether the bound is float64's, in which the transforms are computed."""
    return DataType.FLOAT64 in {tensor.dtype for tensor in (problem.x, problem.w, problem.y)}


class ConvCpuFft(Solver):
    """Products of Fourier transforms of filters and of images, or of tiles that overlap by the filter (overlap-save).

    Configuration: `tile`, the length of a transform along each axis that is longer, 0 for whole images; `chunk_mib`
    bounds the transforms of images that are held at once (one tile's at least). Arithmetic is in double precision
    whatever the dtype. Its error does not follow the sum of one output but the tile: for float64 the bound is wider
    than direct summation's by the root of the transform's points over a filter's, times their logarithm. A large value
    spoils its whole tile: finds take it with `max_error` alone.

    Source: Mathieu, Henaff and LeCun, Fast Training of Convolutional Networks through FFTs, ICLR 2014; Higham, Accuracy
    and Stability of Numerical Algorithms, 2002, section 24.1, for the error.
    """

    id = "ConvCpuFft"
    version = 2
    algorithm = Algorithm.FFT
    keys = (KernelKey(place=Place.CPU, library=Library.PLAIN, dtypes=frozenset(DataType), layouts=frozenset(Layout)),)
    is_dynamic = True
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "tile": (0, 32, 64, 256, 1024, 4096, 16384),
        "chunk_mib": (64, 4),
    }

    def examples(self) -> tuple[ProblemDescription, ...]:
        return (
            *(
                ProblemDescription.convolution(
                    x=(3, 4, 16, 15), w=(6, 2, 9, 7), padding=((1, 0), (0, 2)), stride=2, groups=2, direction=direction
                )
                for direction in Direction
            ),
            ProblemDescription.convolution(x=(2, 6, 19, 18), w=(4, 6, 11, 11), padding=5, layout=Layout.NHWC),
            ProblemDescription.convolution(x=(1, 3, 400), w=(5, 3, 256), dtype=DataType.FLOAT64),
            ProblemDescription.convolution(x=(1, 2, 4, 5, 6), w=(2, 2, 3, 3, 3), padding=1, dtype=DataType.FLOAT16),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if max(problem.conv.dilation) > 1:
            return Applicability("transforms filters without gaps: dilation 1")
        if problem.output.size == 0 or problem.flops == 0:
            return Applicability("has no empty products")
        if any(_is_mostly_padding(problem, axis) for axis in range(problem.spatial_dims)):
            return Applicability(f"transforms padding, too: at most {_MOST_PADDED} times the tensors' length")
        least = least_products(problem)
        if least == 0:
            return Applicability("rounds sums of nothing but padding as it does their neighbours, not to 0")
        if _is_wide(problem) and least < _LEAST_PRODUCTS:
            return Applicability(f"bounds float64's errors in sums of {_LEAST_PRODUCTS} products or more")
        if next(self.configs(problem, device), None) is None:
            return Applicability(f"transforms of its filters take more than {_MAX_FILTER_BYTES >> 20} MiB")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        """Whether tiles are shorter than an axis and half of each at least is kept, and filters' transforms fit."""
        tile = config["tile"]
        cut = [axis for axis in range(problem.spatial_dims) if tile < whole_length(problem, axis)]
        if tile and (not cut or any(tile < 2 * problem.filter[axis] for axis in cut)):
            return False
        return _filter_bytes(problem, _Plan.of(problem, config)) <= _MAX_FILTER_BYTES

    def error_reach(self, problem: ProblemDescription, config: Config) -> Reach:
        return Reach.TILE

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        """The likely fastest, and the one of the smallest workspace."""
        ranked = sorted(self.configs(problem, device), key=lambda config: self.estimate_ms(problem, device, config))
        least = min(ranked, key=lambda config: self.workspace_bytes(problem, device, config))
        return tuple(dict.fromkeys([*ranked[: _DEFAULTS - 1], least]))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        plan = _Plan.of(problem, config)
        points, groups, tiles = math.prod(plan.sizes), problem.groups, problem.n * math.prod(plan.grid)
        transforms = tiles * (problem.c + problem.k) + problem.c * problem.k // groups
        flops = 8.0 * plan.frequencies * tiles * problem.c * problem.k / groups
        ceiling = device.peak_flops_per_s(DataType.FLOAT64, tensor_cores=False)
        return 0.1 + 0.02 * tiles + 1e3 * (transforms * points / _POINTS_PER_S + flops / (_EFFICIENCY * ceiling))

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        if not _is_wide(problem):
            return 1.0  # far below what float32 sums are allowed
        points = math.prod(_Plan.of(problem, config).sizes)
        return _TRANSFORM * math.log2(max(2, points)) * math.sqrt(points / math.prod(problem.filter))

    def is_exact(self, config: Config) -> bool:
        return False

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        plan = _Plan.of(problem, config)
        step = HostStep(module="miofind.solvers.cpu.fft", function="convolve")
        of_channel = 16 * plan.frequencies * plan.at_once
        regions = (
            Region(name="inputs", bytes=of_channel * problem.c),
            Region(name="results", bytes=of_channel * problem.k),
            Region(name="filters", bytes=_filter_bytes(problem, plan)),
        )
        return ConvSolution(steps=(step,), workspace=WorkspacePlan(regions))


SOLVERS = (ConvCpuFft(),)
