"""ConvCpuWinograd: Winograd's minimal filtering in NumPy, tile by tile; the readable statement of the algorithm.

Both operands are transformed, multiplied position by position by BLAS, and the products transformed back. What is
transformed lies in the workspace, a bounded number of images at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Reach, Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, HostStep, Packing, Region, WorkspacePlan
from miofind.solvers.common.chunks import chunks
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.minimal_filtering import MOST_POINTS, Filtering, bound_growth, is_local
from miofind.solvers.common.overlap import least_products

# Of the BLAS ceiling, and passes over what is transformed. Two-core Xeon with OpenBLAS.
_EFFICIENCY = 0.4
_PASSES = 8
_CHUNK_BYTES = 64 << 20
_EXACT_TILE = 2
_EXACT_POINTS = 3  # 0, 1 and -1: what small integers become is exact
_MOST_TAPS = 5
# An element's error comes from all of its tile, its bound from what is summed for itself: both are alike for so many.
_LEAST_CHANNELS, _LEAST_PIXELS = 16, 64

_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Plan:
    """One problem cut into tiles: of its results, or for backward weights of y.

    Attributes:
        axes: the algorithm of each spatial dimension.
        steps: from one tile to the next along each.
        tiles: of one image along each.
        before: zeros before the first tile of inputs; negative where it begins within.
        images: that are transformed at once.
        wide: type of all arithmetic.
    """

    axes: tuple[Filtering, ...]
    steps: tuple[int, ...]
    tiles: tuple[int, ...]
    before: tuple[int, ...]
    images: int
    wide: np.dtype[Any]

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> _Plan:
        tiles = [1 if taps == 1 else int(config["tile"]) for taps in problem.filter]
        sizes = list(zip(tiles, problem.filter, strict=True))
        before, covered = problem.conv.pad_before, problem.out_spatial
        if problem.direction is Direction.BACKWARD_WEIGHTS:
            axes = tuple(Filtering.of(taps, tile) for tile, taps in sizes)
        else:
            axes = tuple(Filtering.of(tile, taps) for tile, taps in sizes)
        if problem.direction is Direction.BACKWARD_DATA:
            before = tuple(taps - 1 - pad for taps, pad in zip(problem.filter, before, strict=True))
            covered = problem.spatial
        counts = tuple(ceil_div(size, tile) for size, tile in zip(covered, tiles, strict=True))
        dtypes = {tensor.dtype for tensor in (problem.x, problem.w, problem.y)}
        wide = np.dtype(np.float64 if DataType.FLOAT64 in dtypes else np.float32)
        of_image = math.prod(axis.products for axis in axes) * math.prod(counts) * wide.itemsize
        images = max(1, min(problem.n, _CHUNK_BYTES // (of_image * (problem.c + problem.k))))
        return _Plan(axes, tuple(tiles), counts, before, images, wide)

    @property
    def products(self) -> int:
        """Of one tile."""
        return math.prod(axis.products for axis in self.axes)

    def bytes(self, channels: int) -> int:
        """Of that many transformed channels of one chunk."""
        return self.products * math.prod(self.tiles) * self.images * channels * self.wide.itemsize

    def laid_out(self, region: _Array, groups: int, channels: int, images: int) -> _Array:
        """The beginning of a region as (products, groups, channels of a group, images, tiles)."""
        shape = (self.products, groups, channels // groups, images, math.prod(self.tiles))
        return region.view(self.wide)[: math.prod(shape)].reshape(shape)


def convolve(problem: ProblemDescription, config: Config, buffers: Mapping[str, _Array]) -> None:
    """Write the output of the problem; arrays have logical shapes, whatever their memory order."""
    plan, groups = _Plan.of(problem, config), problem.groups
    if problem.direction is Direction.BACKWARD_WEIGHTS:
        _weights(plan, groups, buffers)
    else:
        _correlate(problem, plan, _filters(problem, plan, buffers["w"]), buffers)


def pack(problem: ProblemDescription, config: Config, buffers: Mapping[str, _Array]) -> None:
    """Write transformed filters for `convolve_packed` to "y"."""
    plan = _Plan.of(problem, config)
    _packed(problem, plan, buffers["y"])[...] = _filters(problem, plan, buffers["w"])


def convolve_packed(problem: ProblemDescription, config: Config, buffers: Mapping[str, _Array]) -> None:
    """Write the output of the problem, with filters that `pack` transformed in "w"."""
    plan = _Plan.of(problem, config)
    _correlate(problem, plan, _packed(problem, plan, buffers["w"]), buffers)


def _packed(problem: ProblemDescription, plan: _Plan, memory: _Array) -> _Array:
    """Bytes as transformed filters."""
    k, c = problem.k // problem.groups, problem.c // problem.groups
    results, summed = (c, k) if problem.direction is Direction.BACKWARD_DATA else (k, c)
    return memory.view(plan.wide).reshape(plan.products, problem.groups, results, summed)


def _filters(problem: ProblemDescription, plan: _Plan, w: _Array) -> _Array:
    """Transformed filters (products, groups, channels of results, channels summed), all of a group."""
    w = w.astype(plan.wide, copy=False).reshape(problem.groups, -1, *w.shape[1:])
    if problem.direction is Direction.BACKWARD_DATA:
        w = np.flip(w.swapaxes(1, 2), axis=tuple(range(3, w.ndim)))
    filters = _transformed([axis.filter for axis in plan.axes], w)
    return np.ascontiguousarray(filters.reshape(*w.shape[:3], -1).transpose(3, 0, 1, 2))


def _correlate(problem: ProblemDescription, plan: _Plan, filters: _Array, buffers: Mapping[str, _Array]) -> None:
    """target[n, (g, k), o] = sum of source[n, (g, c), o + tap - before] * w[g, k, c, tap], of transformed filters."""
    source, target = buffers["x"], buffers["y"]
    if problem.direction is Direction.BACKWARD_DATA:
        source, target = target, source
    _, groups, k, c = filters.shape
    lengths = [axis.products for axis in plan.axes]
    for chunk in chunks(len(source), plan.images):
        images = len(source[chunk])
        inputs = plan.laid_out(buffers["inputs"], groups, groups * c, images)
        results = plan.laid_out(buffers["results"], groups, groups * k, images)
        _transform(
            plan, [axis.input for axis in plan.axes], _windows(plan, source[chunk], lengths, plan.before), inputs
        )
        flat = (plan.products, groups, -1, images * math.prod(plan.tiles))
        np.matmul(filters, inputs.reshape(flat), out=results.reshape(plan.products, groups, k, flat[-1]))
        products = results.transpose(3, 1, 2, 4, 0).reshape(images, groups * k, *plan.tiles, *lengths)
        tiles = _transformed([axis.output for axis in plan.axes], products)
        rank = len(plan.axes)
        order = [2 + part * rank + axis for axis in range(rank) for part in range(2)]  # each tile beside its outputs
        covered = [count * step for count, step in zip(plan.tiles, plan.steps, strict=True)]
        whole = tiles.transpose(0, 1, *order).reshape(images, groups * k, *covered)
        inside: Any = (..., *(slice(size) for size in target.shape[2:]))
        target[chunk] = whole[inside]


def _weights(plan: _Plan, groups: int, buffers: Mapping[str, _Array]) -> None:
    """dw[g, k, c, tap] = sum of x[n, (g, c), o + tap - before] * dy[n, (g, k), o]: the tiles of dy are the filters."""
    x, dy, dw = buffers["x"], buffers["y"], buffers["w"]
    lengths = [axis.products for axis in plan.axes]
    total = np.zeros((plan.products, groups, dy.shape[1] // groups, x.shape[1] // groups), plan.wide)
    for chunk in chunks(len(x), plan.images):
        images = len(x[chunk])
        inputs = plan.laid_out(buffers["inputs"], groups, x.shape[1], images)
        results = plan.laid_out(buffers["results"], groups, dy.shape[1], images)
        _transform(plan, [axis.input for axis in plan.axes], _windows(plan, x[chunk], lengths, plan.before), inputs)
        nowhere = (0,) * len(plan.axes)
        _transform(plan, [axis.filter for axis in plan.axes], _windows(plan, dy[chunk], plan.steps, nowhere), results)
        flat = (plan.products, groups, -1, images * math.prod(plan.tiles))
        total += results.reshape(flat) @ inputs.reshape(flat).swapaxes(2, 3)
    products = np.moveaxis(total, 0, -1).reshape(*total.shape[1:], *lengths)
    dw[...] = _transformed([axis.output for axis in plan.axes], products).reshape(dw.shape)


def _windows(plan: _Plan, tensor: _Array, lengths: Sequence[int], before: Sequence[int]) -> _Array:
    """The tiles of (n, channels, *spatial) as (n, channels, *tiles, *lengths); zeros beyond the tensor."""
    padded_sizes = [
        (count - 1) * step + length for count, step, length in zip(plan.tiles, plan.steps, lengths, strict=True)
    ]
    padded = np.zeros((*tensor.shape[:2], *padded_sizes), plan.wide)
    there: list[Any] = [...]
    here: list[Any] = [...]
    for size, first, length in zip(tensor.shape[2:], before, padded_sizes, strict=True):
        begin = max(0, -first)
        end = max(begin, min(size, length - first))
        here.append(slice(begin, end))
        there.append(slice(begin + first, end + first))
    padded[tuple(there)] = tensor[tuple(here)]
    strides = padded.strides[2:]
    shape = (*padded.shape[:2], *plan.tiles, *lengths)
    tile_strides = [stride * step for stride, step in zip(strides, plan.steps, strict=True)]
    return as_strided(padded, shape, (*padded.strides[:2], *tile_strides, *strides), writeable=False)


def _transform(plan: _Plan, matrices: Sequence[_Array], windows: _Array, out: _Array) -> None:
    """Transforms (n, channels, *tiles, *lengths) into (products, groups, channels of a group, n, tiles)."""
    _, groups, channels, images, tiles = out.shape
    transformed = _transformed(matrices, windows).reshape(images, groups, channels, tiles, plan.products)
    out[...] = transformed.transpose(4, 1, 2, 0, 3)


def _transformed(matrices: Sequence[_Array], array: _Array) -> _Array:
    """The last axes of an array multiplied by one matrix each."""
    for i, matrix in enumerate(matrices):
        axis = array.ndim - len(matrices) + i
        array = np.moveaxis(np.tensordot(array, matrix.astype(array.dtype, copy=False), axes=(axis, 1)), -1, axis)
    return array


def _summed(problem: ProblemDescription) -> tuple[int, int]:
    """Terms that are summed at each place of a tile, and how many there must be."""
    if problem.direction is Direction.BACKWARD_WEIGHTS:
        return least_products(problem), _LEAST_PIXELS
    channels = problem.c if problem.direction is Direction.FORWARD else problem.k
    return channels // problem.groups, _LEAST_CHANNELS


class ConvCpuWinograd(Solver):
    """Winograd's minimal filtering F(tile, taps) along every axis of more than one tap, stride 1.

    Configuration: `tile`, the outputs of a tile along an axis, for backward weights its pixels of y. Arithmetic is in
    float32, or float64 for float64. The error bound is direct summation's for F(2x2, 3x3), 10 times as wide for
    F(4x4, 3x3) and 46 times for F(6x6, 3x3): `bound_growth` tells why.

    Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.
    """

    id = "ConvCpuWinograd"
    algorithm = Algorithm.WINOGRAD
    keys = (KernelKey(place=Place.CPU, library=Library.PLAIN, dtypes=frozenset(DataType), layouts=frozenset(Layout)),)
    is_dynamic = True
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {"tile": (_EXACT_TILE, 4, 6)}

    def examples(self) -> tuple[ProblemDescription, ...]:
        return (
            *(
                ProblemDescription.convolution(
                    x=(3, 32, 9, 8), w=(38, 16, 3, 2), padding=((1, 0), (0, 1)), groups=2, direction=direction
                )
                for direction in Direction
            ),
            ProblemDescription.convolution(x=(2, 17, 9, 8), w=(4, 17, 5, 1), padding=(2, 0), layout=Layout.NHWC),
            ProblemDescription.convolution(x=(1, 16, 20), w=(5, 16, 3), dtype=DataType.FLOAT64),
            ProblemDescription.convolution(x=(1, 16, 4, 5, 6), w=(2, 16, 3, 3, 3), padding=1, dtype=DataType.FLOAT16),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        conv = problem.conv
        if max((*conv.stride, *conv.dilation)) > 1:
            return Applicability("computes neighbouring outputs from neighbouring inputs: stride and dilation 1")
        if max(problem.filter) == 1:
            return Applicability("saves nothing with filters of one tap")
        if max(problem.filter) > _MOST_TAPS:
            return Applicability(f"loses too many digits with more than {_MOST_TAPS} taps along an axis")
        if problem.output.size == 0 or problem.flops == 0:
            return Applicability("has no empty products")
        if least_products(problem) == 0:
            return Applicability("rounds sums of nothing but padding as it does their neighbours, not to 0")
        summed, least = _summed(problem)
        if summed < least:
            return Applicability(f"bounds errors by the element's own sum: {summed} terms say too little of its tile's")
        return APPLICABLE

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        tile = int(config["tile"])
        return tile + max(problem.filter) - 2 <= (_EXACT_POINTS if tile == _EXACT_TILE else MOST_POINTS)

    def error_reach(self, problem: ProblemDescription, config: Config) -> Reach:
        if problem.direction is Direction.BACKWARD_WEIGHTS:  # tiles at borders have pixels that some taps do not meet
            return Reach.TILE
        return Reach.INPUTS if is_local(_Plan.of(problem, config).axes) else Reach.TILE

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(self.configs(problem, device))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        plan = _Plan.of(problem, config)
        of_channels = plan.products * math.prod(plan.tiles) * problem.n
        flops = 2.0 * of_channels * problem.c * problem.k / problem.groups
        moved_bytes = problem.bytes + _PASSES * of_channels * (problem.c + problem.k) * plan.wide.itemsize
        ceiling = device.peak_flops_per_s(problem.x.dtype, tensor_cores=False)
        return 0.1 + 1e3 * (flops / (_EFFICIENCY * ceiling) + moved_bytes / device.bandwidth_bytes_per_s)

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return bound_growth(_Plan.of(problem, config).axes)

    def is_exact(self, config: Config) -> bool:
        return int(config["tile"]) == _EXACT_TILE

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return _solution(problem, config, "convolve")

    def packing(self, problem: ProblemDescription, device: Device, config: Config) -> Packing | None:
        if problem.direction is Direction.BACKWARD_WEIGHTS:
            return None
        plan = _Plan.of(problem, config)
        return Packing(
            pack=ConvSolution(steps=(_step("pack"),)),
            run=_solution(problem, config, "convolve_packed"),
            bytes=plan.products * problem.w.size // math.prod(problem.filter) * plan.wide.itemsize,
            form=f"numpy winograd {config['tile']} {problem.direction} {plan.wide} {problem.groups}",
        )


def _step(function: str) -> HostStep:
    return HostStep(module="miofind.solvers.cpu.winograd", function=function)


def _solution(problem: ProblemDescription, config: Config, function: str) -> ConvSolution:
    plan = _Plan.of(problem, config)
    data = problem.direction is Direction.BACKWARD_DATA
    regions = (
        Region(name="inputs", bytes=plan.bytes(problem.k if data else problem.c)),
        Region(name="results", bytes=plan.bytes(problem.c if data else problem.k)),
    )
    return ConvSolution(steps=(_step(function),), workspace=WorkspacePlan(regions))


SOLVERS = (ConvCpuWinograd(),)
