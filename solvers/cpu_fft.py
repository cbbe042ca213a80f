"""ConvCpuFft: convolution as products of Fourier transforms, whole images at once; the readable statement of it.

Transforms are NumPy's, in double precision. Strides are outputs left out, or zeros between those of y. Knows nothing of
GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.device import Device, Library, Place
from miofind.problem import DataType, Direction, Layout, ProblemDescription
from miofind.solution import Config, ConvSolution, HostStep, Region, WorkspacePlan
from miofind.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.tiling.chunks import chunks
from miofind.tiling.overlap import has_empty_sums

# Of the BLAS ceiling in float64, for products of complex numbers; transforms of so many points a nanosecond. Two-core
# Xeon with OpenBLAS.
_EFFICIENCY = 0.3
_POINTS_PER_S = 2.0e8
_CHUNK_BYTES = 64 << 20
_MAX_FILTER_BYTES = 256 << 20
_FACTORS = (2, 3, 5)
# Largest error of a transform there and back, in units of roundoff, of the logarithm of its length and of the root
# mean square of its result; two transforms meet in one, and the reference is no more exact.
_TRANSFORM = 4.0

_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Transforms of one problem.

    Attributes:
        sizes: of a transform along each spatial dimension.
        images: that are transformed at once.
    """

    sizes: tuple[int, ...]
    images: int

    @staticmethod
    def of(problem: ProblemDescription) -> _Plan:
        spans = zip(problem.spatial, problem.conv.pad_before, problem.conv.pad_after, strict=True)
        sizes = tuple(_smooth(size + before + after) for size, before, after in spans)
        of_image = 16 * math.prod(_spectrum(sizes)) * (problem.c + problem.k)
        return _Plan(sizes, max(1, min(problem.n, _CHUNK_BYTES // of_image)))

    @property
    def frequencies(self) -> int:
        """Of a real transform."""
        return math.prod(_spectrum(self.sizes))

    def laid_out(self, region: _Array, groups: int, rows: int, columns: int) -> _Array:
        """The beginning of a region as (frequencies, groups, rows, columns)."""
        shape = (self.frequencies, groups, rows, columns)
        return region.view(np.complex128)[: math.prod(shape)].reshape(shape)


def _filter_bytes(problem: ProblemDescription, plan: _Plan) -> int:
    """Of the transforms of all filters."""
    return 16 * plan.frequencies * problem.c * problem.k // problem.groups


def _smooth(size: int) -> int:
    """The least number from `size` on that transforms are fast for."""
    while True:
        rest = size
        for factor in _FACTORS:
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return size
        size += 1


def _spectrum(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Frequencies of a real transform of those sizes."""
    return (*sizes[:-1], sizes[-1] // 2 + 1)


def convolve(problem: ProblemDescription, config: Config, buffers: Mapping[str, _Array]) -> None:
    """Write the output of the problem; arrays have logical shapes, whatever their memory order."""
    _COMPUTE[problem.direction](problem, _Plan.of(problem), buffers)


def _forward(problem: ProblemDescription, plan: _Plan, buffers: Mapping[str, _Array]) -> None:
    filters = _filters(problem, plan, buffers)  # (f, g, k, c)
    np.conjugate(filters, out=filters)
    for chunk in chunks(problem.n, plan.images):
        padded = _padded(problem, plan, buffers["x"][chunk])
        buffers["y"][chunk] = _multiplied(problem, plan, buffers, filters, padded)[_outputs(problem)]


def _backward_data(problem: ProblemDescription, plan: _Plan, buffers: Mapping[str, _Array]) -> None:
    filters = _filters(problem, plan, buffers).swapaxes(2, 3)  # (f, g, c, k)
    for chunk in chunks(problem.n, plan.images):
        spread = _spread(problem, plan, buffers["y"][chunk])
        buffers["x"][chunk] = _multiplied(problem, plan, buffers, filters, spread)[_inputs(problem)]


def _multiplied(
    problem: ProblemDescription, plan: _Plan, buffers: Mapping[str, _Array], filters: _Array, tensor: _Array
) -> _Array:
    """Transforms of a chunk (n, channels, *sizes) times those of the filters, transformed back."""
    groups, images = problem.groups, len(tensor)
    rows, columns = filters.shape[2:]
    source, target = ("results", "inputs") if problem.direction is Direction.BACKWARD_DATA else ("inputs", "results")
    operands = plan.laid_out(buffers[source], groups, columns, images)
    _transform(plan, tensor, groups, operands)
    products = plan.laid_out(buffers[target], groups, rows, images)
    np.matmul(filters, operands, out=products)
    return _back(plan, products)


def _backward_weights(problem: ProblemDescription, plan: _Plan, buffers: Mapping[str, _Array]) -> None:
    groups, c, k = problem.groups, problem.c // problem.groups, problem.k // problem.groups
    total = plan.laid_out(buffers["filters"], groups, c, k)
    total[...] = 0
    for chunk in chunks(problem.n, plan.images):
        images = len(buffers["x"][chunk])
        inputs = plan.laid_out(buffers["inputs"], groups, c, images)
        _transform(plan, _padded(problem, plan, buffers["x"][chunk]), groups, inputs)
        results = plan.laid_out(buffers["results"], groups, k, images)
        _transform(plan, _spread(problem, plan, buffers["y"][chunk]), groups, results)
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
        for row, one in enumerate(of_group):  # few at a time: their transforms are as large as images
            spectra = np.fft.rfftn(one.astype(np.float64, copy=False), s=plan.sizes, axes=axes)
            filters[:, group, row] = spectra.reshape(c, -1).T
    return filters


def _inputs(problem: ProblemDescription) -> Any:
    """Where the inputs are among those with padding."""
    spans = zip(problem.conv.pad_before, problem.spatial, strict=True)
    return (..., *(slice(before, before + size) for before, size in spans))


def _padded(problem: ProblemDescription, plan: _Plan, x: _Array) -> _Array:
    """x (n, c, *spatial) with its padding, zeros up to the size of a transform."""
    padded = np.zeros((*x.shape[:2], *plan.sizes))
    padded[_inputs(problem)] = x
    return padded


def _outputs(problem: ProblemDescription) -> Any:
    """Where the outputs are among those of stride 1, which begin with the padding."""
    spans = zip(problem.out_spatial, problem.conv.stride, strict=True)
    return (..., *(slice(0, (count - 1) * stride + 1, stride) for count, stride in spans))


def _spread(problem: ProblemDescription, plan: _Plan, y: _Array) -> _Array:
    """y (n, k, *out_spatial) where its outputs are among those of stride 1, zeros between them and beyond."""
    spread = np.zeros((*y.shape[:2], *plan.sizes))
    spread[_outputs(problem)] = y
    return spread


def _transform(plan: _Plan, tensor: _Array, groups: int, out: _Array) -> None:
    """Transforms (n, channels, *sizes) into (frequencies, groups, channels of a group, n)."""
    axes = tuple(range(2, 2 + len(plan.sizes)))
    spectra = np.fft.rfftn(tensor, axes=axes)
    out[...] = spectra.reshape(len(tensor), groups, -1, plan.frequencies).transpose(3, 1, 2, 0)


def _back(plan: _Plan, spectra: _Array) -> _Array:
    """(frequencies, groups, channels of a group, n) back to (n, channels, *sizes)."""
    images = spectra.shape[3]
    ordered = spectra.transpose(3, 1, 2, 0).reshape(images, -1, *_spectrum(plan.sizes))
    return np.fft.irfftn(ordered, s=plan.sizes, axes=tuple(range(2, 2 + len(plan.sizes))))


class ConvCpuFft(Solver):
    """Products of Fourier transforms of whole images, padding included, and of filters as large.

    Arithmetic is in double precision whatever the dtype. Its error does not follow the sum of one output but the image:
    for float64 the bound is wider than direct summation's by the root of the transform's points over a filter's, times
    their logarithm.

    Source: Mathieu, Henaff and LeCun, Fast Training of Convolutional Networks through FFTs, ICLR 2014; Higham, Accuracy
    and Stability of Numerical Algorithms, 2002, section 24.1, for the error.
    """

    id = "ConvCpuFft"
    algorithm = Algorithm.FFT
    keys = (KernelKey(place=Place.CPU, library=Library.PLAIN, dtypes=frozenset(DataType), layouts=frozenset(Layout)),)
    is_dynamic = True

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
        if (needed := _filter_bytes(problem, _Plan.of(problem))) > _MAX_FILTER_BYTES:
            return Applicability(
                f"transforms of its filters take {needed >> 20} MiB, more than {_MAX_FILTER_BYTES >> 20}"
            )
        if has_empty_sums(problem):
            return Applicability("rounds sums of nothing but padding as it does their neighbours, not to 0")
        return APPLICABLE

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return (Config(),)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        plan = _Plan.of(problem)
        points, groups = math.prod(plan.sizes), problem.groups
        transforms = problem.n * (problem.c + problem.k) + problem.c * problem.k // groups
        flops = 8.0 * plan.frequencies * problem.n * problem.c * problem.k / groups
        ceiling = device.peak_flops_per_s(DataType.FLOAT64, tensor_cores=False)
        return 0.1 + 1e3 * (transforms * points / _POINTS_PER_S + flops / (_EFFICIENCY * ceiling))

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        if DataType.FLOAT64 not in {tensor.dtype for tensor in (problem.x, problem.w, problem.y)}:
            return 1.0  # far below what float32 sums are allowed
        points = math.prod(_Plan.of(problem).sizes)
        return _TRANSFORM * math.log2(max(2, points)) * math.sqrt(points / math.prod(problem.filter))

    def is_exact(self, config: Config) -> bool:
        return False

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        plan = _Plan.of(problem)
        step = HostStep(module="miofind.solvers.cpu_fft", function="convolve")
        of_channel = 16 * plan.frequencies * plan.images
        regions = (
            Region(name="inputs", bytes=of_channel * problem.c),
            Region(name="results", bytes=of_channel * problem.k),
            Region(name="filters", bytes=_filter_bytes(problem, plan)),
        )
        return ConvSolution(steps=(step,), workspace=WorkspacePlan(regions))


SOLVERS = (ConvCpuFft(),)
