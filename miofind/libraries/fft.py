"""Convolution as products of Fourier transforms: the steps of one solution, chunk by chunk of tiles.

kernels_src/fft.cu lays tiles out as planes and writes the results, cuFFT transforms the planes in place, and
kernels_src/fft_product.cu multiplies the transforms frequency by frequency.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from miofind.device import Device
from miofind.libraries.fft_product import PRODUCTS, ProductTile
from miofind.problem import Direction, ProblemDescription, TensorDescriptor
from miofind.solution import FftStep, KernelStep, Pointer, Region, Scalar, Step
from miofind.tiling.chunks import chunks
from miofind.tiling.correlation import ceil_div
from miofind.tiling.divisor import divisor
from miofind.tiling.fourier import Axis, smooth, spectrum, whole_length

SOURCE = "fft.cu"
PRODUCT_SOURCE = "fft_product.cu"
SCRATCH = "scratch"
REGIONS = {"x": "inputs", "w": "filters", "y": "outputs"}

_THREADS = 256
_LANES = 32
_COMPLEX_BYTES = 8
_STEP_MS = 0.002  # from the end of a small step to the end of the next
_BANDWIDTH_SHARE = 0.7  # of the device's, that steps are taken to reach
_L2_SHARE = 0.5  # of the L2 cache, that what is written is read again from
_L2_GAIN = 0.4  # of the traffic, that is left then
_ONE_PASS_BITS = 13  # of the points that the library is taken to transform in one pass over memory
_MOST_LENGTH = 1 << 17
_MOST_CHUNKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FftPlan:
    """One way to compute a problem by transforms.

    Attributes:
        problem: lifted to two spatial dimensions.
        order: its spatial axes, the one transformed first (and half kept of) last.
        axes: tiles along them, in that order.
        at_once: tiles that are transformed at once.
        product: how a thread block multiplies.
    """

    problem: ProblemDescription
    order: tuple[int, int]
    axes: tuple[Axis, Axis]
    at_once: int
    product: ProductTile

    @staticmethod
    def of(problem: ProblemDescription, config: Mapping[str, Any]) -> FftPlan:
        """The plan that a configuration names."""
        plan = _plan_of(problem, int(config["tile"]), int(config["chunk_mib"]))
        return replace(plan, product=PRODUCTS[config["product"]])

    @property
    def is_weights(self) -> bool:
        """Whether filters are the result."""
        return self.problem.direction is Direction.BACKWARD_WEIGHTS

    @property
    def lengths(self) -> tuple[int, int]:
        """Of a transform."""
        outer, inner = self.axes
        return outer.length, inner.length

    @property
    def frequencies(self) -> int:
        """Of a real transform."""
        return math.prod(spectrum(self.lengths))

    @property
    def all_tiles(self) -> int:
        """Tiles of the whole batch."""
        return self.problem.n * math.prod(axis.tiles for axis in self.axes)

    @property
    def filters(self) -> int:
        """Planes of all filters."""
        return self.problem.k * self.problem.w.shape[1]

    @property
    def tile_bytes(self) -> int:
        """Of one tile's transforms, of the images and of the results."""
        return _COMPLEX_BYTES * self.frequencies * (self.problem.c + self.problem.k)

    def regions(self) -> tuple[Region, ...]:
        """Workspace for transforms, and for the library."""
        p, plane = self.problem, _COMPLEX_BYTES * self.frequencies
        planes = {"x": self.at_once * p.c, "w": self.filters, "y": self.at_once * p.k}
        scratch = plane * max(self._batch(count) for count in planes.values())
        regions = (Region(name=REGIONS[name], bytes=plane * count) for name, count in planes.items())
        return (*regions, Region(name=SCRATCH, bytes=scratch))

    def steps(self) -> Iterator[Step]:
        """The steps in order."""
        result = self.problem.direction.output
        if not self.is_weights:
            yield from self._transformed("w", 0, self.problem.k)
        for chunk in chunks(self.all_tiles, self.at_once):
            first, count = chunk.start, chunk.stop - chunk.start
            for name in self.problem.direction.inputs:
                if name != "w":
                    yield from self._transformed(name, first, count)
            yield self._product(count, accumulate=first > 0)
            if not self.is_weights:
                yield from self._results(result, first, count)
        if self.is_weights:
            yield from self._results(result, 0, self.problem.k)

    def _transformed(self, name: str, first: int, count: int) -> Iterator[Step]:
        """Tiles of a tensor, or filters of so many outputs, into transforms."""
        channels = self.problem.tensor(name).shape[1]
        yield self._pack(name, first, count)
        yield from self._transforms(name, count * channels, inverse=False)

    def _results(self, name: str, first: int, count: int) -> Iterator[Step]:
        yield from self._transforms(name, count * self.problem.tensor(name).shape[1], inverse=True)
        yield self._unpack(name, first, count)

    def _batch(self, planes: int) -> int:
        """Planes that the library transforms at once, so that what it wants itself is bounded."""
        most = max(1, self.at_once * max(self.problem.c, self.problem.k))
        return ceil_div(planes, ceil_div(planes, most))

    def _transforms(self, name: str, planes: int, *, inverse: bool) -> Iterator[FftStep]:
        plane = _COMPLEX_BYTES * self.frequencies
        lengths = self.lengths if self.lengths[0] > 1 else self.lengths[1:]
        batch = self._batch(planes)
        for chunk in chunks(planes, batch):
            yield FftStep(
                lengths=lengths,
                batch=chunk.stop - chunk.start,
                inverse=inverse,
                data=Pointer(buffer=REGIONS[name], offset_bytes=chunk.start * plane),
                workspace=SCRATCH,
                workspace_bytes=plane * (chunk.stop - chunk.start),
            )

    def _product(self, tiles: int, *, accumulate: bool) -> KernelStep:
        """Products of a chunk's transforms, summed over channels, or over tiles for backward weights."""
        p, tile = self.problem, self.product
        sizes = self.sizes(tiles)
        c, k = p.c // p.groups, p.k // p.groups
        x, y, w = (p.c, 1, c), (p.k, 1, k), (c, 1, k * c)  # planes to the next row, term and group
        if p.direction is Direction.FORWARD:
            names, strides, conjugates = "xwy", (x, w, y), (0, 1)
        elif p.direction is Direction.BACKWARD_DATA:
            names, strides, conjugates = "ywx", (y, (1, c, k * c), x), (0, 0)
        else:
            turned = ((1, p.k, k), (1, p.c, c), w)
            names, strides, conjugates = "yxw", turned, (1, 0)
        blocks = self._blocks(tiles)
        scalars = (*sizes, self.frequencies, int(accumulate), *(one for triple in strides for one in triple))
        return KernelStep(
            source=PRODUCT_SOURCE,
            entry="fft_product" if tile.stages else "fft_product_direct",
            defines=(*tile.defines, ("CONJUGATE_A", conjugates[0]), ("CONJUGATE_B", conjugates[1])),
            grid=(math.prod(blocks) * p.groups, 1, 1),
            block=(tile.threads, 1, 1),
            shared_bytes=tile.shared_bytes,
            args=(
                *(Pointer(buffer=REGIONS[name]) for name in names),
                *(Scalar(ctype="int32", value=value) for value in scalars),
                *(scalar for count in blocks for scalar in divisor(count)),
            ),
        )

    def _blocks(self, tiles: int) -> tuple[int, int, int]:
        """Thread blocks of a chunk's product across, down and along the frequencies of a group."""
        rows, columns, _ = self.sizes(tiles)
        tile = self.product
        return ceil_div(columns, tile.columns), ceil_div(rows, tile.rows), ceil_div(self.frequencies, tile.bins)

    def _pack(self, name: str, first: int, count: int) -> KernelStep:
        channels, pairs = self.problem.tensor(name).shape[1], self.frequencies
        items = count * channels * pairs
        return self._copy(name, "fft_pack", (count, pairs, channels, items), (), (first, (name, "planes")))

    def _unpack(self, name: str, first: int, count: int) -> KernelStep:
        """Results of a chunk; of a tile's elements at most `kept` of a row and of a column are kept."""
        channels = self.problem.tensor(name).shape[1]
        across, plane = self.kept(name)
        scale = Scalar(ctype="float32", value=1.0 / math.prod(self.lengths))
        items = count * channels * plane
        sizes = (count, plane, channels, items)
        return self._copy(
            name, "fft_unpack", sizes, (scale, *divisor(plane), *divisor(across)), (first, ("planes", name))
        )

    def kept(self, name: str) -> tuple[int, int]:
        """Most elements that a tile is kept of: of a row, and of all."""
        counts = []
        for axis, index in zip(self.axes, self.order, strict=True):
            placement = axis.placement(self.problem, index, name)
            counts.append(ceil_div(placement.high - placement.low, placement.spread))
        return counts[1], math.prod(counts)

    def _copy(
        self,
        name: str,
        entry: str,
        sizes: tuple[int, int, int, int],
        extra: tuple[Scalar, ...],
        where: tuple[int, tuple[str, str]],
    ) -> KernelStep:
        """A kernel of fft.cu: `sizes` are tiles, items of a plane, channels and all items."""
        tensor = self.problem.tensor(name)
        tiles, of_plane, channels, items = sizes
        first, buffers = where
        last = tensor.layout.channels_last
        grid = (
            (tiles, ceil_div(of_plane, _LANES), ceil_div(channels, _LANES))
            if last
            else (ceil_div(items, _THREADS), 1, 1)
        )
        of_image = 1 if name == "w" else math.prod(axis.tiles for axis in self.axes)
        across = 1 if name == "w" else self.axes[1].tiles
        strides = _strides(tensor)
        return KernelStep(
            source=SOURCE,
            entry=entry,
            defines=(("ELEMENT", tensor.dtype.value), ("CHANNELS_LAST", int(last))),
            grid=grid,
            block=(_THREADS, 1, 1),
            args=(
                *(Pointer(buffer=REGIONS[name] if buffer == "planes" else buffer) for buffer in buffers),
                Scalar(ctype="int32", value=items),
                *extra,
                *(Scalar(ctype="int32", value=value) for value in strides[:2]),
                *divisor(channels),
                Scalar(ctype="int32", value=first),
                *divisor(of_image),
                *divisor(across),
                *divisor(self.frequencies),
                *divisor(spectrum(self.lengths)[1]),
                *(scalar for place in (0, 1) for scalar in self._axis(name, place, strides)),
            ),
        )

    def _axis(self, name: str, place: int, strides: tuple[int, ...]) -> tuple[Scalar, ...]:
        """The kernels' `TileAxis`."""
        axis, index = self.axes[place], self.order[place]
        placement = axis.placement(self.problem, index, name)
        step = 0 if name == "w" else axis.step
        size = self.problem.tensor(name).shape[2 + index]
        values = (size, strides[2 + index], step, placement.shift, placement.low, placement.high)
        return (*(Scalar(ctype="int32", value=value) for value in values), *divisor(placement.spread))

    def refusal(self) -> str:
        """Why the plan is out of bounds, "" if it is not."""
        p = self.problem
        if max(self.lengths) > _MOST_LENGTH:
            return f"transforms at most {_MOST_LENGTH} points along an axis"
        if ceil_div(self.all_tiles, self.at_once) > _MOST_CHUNKS:
            return f"takes more than {_MOST_CHUNKS} chunks"
        planes = max(self.at_once * max(p.c, p.k), self.filters)
        if planes * max(self.frequencies, *(self.kept(p.direction.output)[1:])) >= 2**31:
            return "needs more planes at once than 32-bit offsets reach"
        if math.prod(self._blocks(self.at_once)) * p.groups >= 2**31:
            return "needs more thread blocks than a launch has"
        tiles = max(self.at_once, p.k)
        if tiles >= 2**31 or ceil_div(self.frequencies, _LANES) >= 2**16 or max(p.c, p.k) >= 2**20:
            return "needs a larger grid than a launch has"
        return ""

    def error(self) -> float:
        """Largest error in float32 roundoffs, over sqrt(x^2 * w^2) of an element that sums as many products as any."""
        terms = self.reduced
        points = max(2, math.prod(self.lengths))
        return _TRANSFORM_ERROR * math.log2(points) + _SUM_ERROR * math.sqrt(terms)

    @property
    def reduced(self) -> int:
        """Products of transforms that are summed at a frequency."""
        p = self.problem
        if self.is_weights:
            return self.all_tiles
        return (p.c if p.direction is Direction.FORWARD else p.k) // p.groups

    def estimate_ms(self, device: Device) -> float:
        """Time of all steps."""
        p = self.problem
        bandwidth = _BANDWIDTH_SHARE * device.bandwidth_bytes_per_s / 1e3
        plane = _COMPLEX_BYTES * self.frequencies
        passes = sum(2 * ceil_div((n - 1).bit_length(), _ONE_PASS_BITS) for n in self.lengths if n > 1)
        images, filters = self.all_tiles * (p.c + p.k) * plane, self.filters * plane
        in_cache = self.at_once * self.tile_bytes < _L2_SHARE * device.l2_bytes
        share = _L2_GAIN if in_cache else 1.0
        count = ceil_div(self.all_tiles, self.at_once)
        traffic = (passes + 2) * (share * images + filters) + p.x.bytes + p.w.bytes + p.y.bytes
        tiles = min(self.at_once, self.all_tiles)
        product = self.product.estimate_ms(device, self.sizes(tiles), self.frequencies, p.groups)
        return 5 * count * _STEP_MS + traffic / bandwidth + count * product

    def sizes(self, tiles: int) -> tuple[int, int, int]:
        """Rows, columns and terms of a chunk's products."""
        p = self.problem
        c, k = p.c // p.groups, p.k // p.groups
        if p.direction is Direction.FORWARD:
            return tiles, k, c
        return (tiles, c, k) if p.direction is Direction.BACKWARD_DATA else (k, c, tiles)


# Largest errors simulated with NumPy's float32 transforms, 150 problems, of 2 to 2048 points along an axis: 2.2 a
# doubling of points, and 3.1 times the root of the terms of sums (miofind/verify/accuracy.py).
_TRANSFORM_ERROR = 6.0
_SUM_ERROR = 8.0


def _strides(tensor: TensorDescriptor) -> tuple[int, ...]:
    """Elements from one to the next along n, c, h and w."""
    _, c, h, w = tensor.shape
    return (c * h * w, 1, w * c, c) if tensor.layout.channels_last else (c * h * w, h * w, w, 1)


@functools.lru_cache(maxsize=256)  # a problem's configurations are asked about one by one
def _plan_of(problem: ProblemDescription, tile: int, chunk_mib: int) -> FftPlan:
    lifted = problem.lifted(2)
    order = (1, 0) if lifted.filter[1] == 1 else (0, 1)
    outer, inner = (_axis(lifted, index, tile) for index in order)
    plan = FftPlan(problem=lifted, order=order, axes=(outer, inner), at_once=1, product=PRODUCTS["32x32"])
    parts = ceil_div(plan.all_tiles, max(1, (chunk_mib << 20) // plan.tile_bytes))
    return replace(plan, at_once=ceil_div(plan.all_tiles, parts))


def _axis(lifted: ProblemDescription, axis: int, tile: int) -> Axis:
    """Tiles along an axis: none where filters have one tap, one where the axis is no longer than a tile."""
    if lifted.filter[axis] == 1:
        return Axis.tiled(lifted, axis, 1)
    whole = whole_length(lifted, axis)
    return Axis.tiled(lifted, axis, tile) if tile and tile < whole else Axis.whole(lifted, axis, smooth(whole))
