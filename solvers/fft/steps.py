"""Convolution as products of Fourier transforms: the steps of one solution, chunk by chunk of tiles.

Either kernels_src/fft/planes.cu lays tiles out as planes and writes the results, and cuFFT transforms the planes in
place; or kernels_src/fft/tiles.cu does all of it, and fft/lines.cu where tiles are long and one row high.
kernels_src/fft/product.cu multiplies the transforms frequency by frequency.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miofind.core.problem import Direction, ProblemDescription, TensorDescriptor
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.solver import APPLICABLE, Applicability
from miofind.solver.steps import (
    ConvSolution,
    FftStep,
    KernelStep,
    Packing,
    Pointer,
    Region,
    Scalar,
    Step,
    WorkspacePlan,
    int32s,
    on_buffers,
)
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.chunks import chunks
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.fourier import FftAxis, smooth, spectrum, whole_length
from miofind.solvers.fft.edges import edges_step, strides
from miofind.solvers.fft.error import product_error, summed_directly
from miofind.solvers.fft.own_blocks import OwnBlock, own_height, own_line, own_width
from miofind.solvers.fft.product import PRODUCT, PRODUCT_DEFINES, PRODUCTS, ProductTile, matrix

SOURCE = "fft/planes.cu"
PRODUCT_SOURCE = "fft/product.cu"
SCRATCH = "scratch"
REGIONS = {"x": "inputs", "w": "filters", "y": "outputs"}

_THREADS = 256
_LANES = 32
COMPLEX_BYTES = 8
_MOST_LENGTH = 1 << 17
_MOST_BLOCKS = 65535  # along the second and third axes of a grid
_MOST_CHUNKS = 64

_TILE_AXIS = StructType(
    "TileAxis", **dict.fromkeys(("size", "stride", "step", "shift", "low", "high"), "int32"), spread=DIVISOR
)
_TILE_GRID = StructType("TileGrid", first="int32", tiles_per_image=DIVISOR, tiles_across=DIVISOR)
_TILED_TENSOR = StructType(
    "TiledTensor",
    image_stride="int32",
    channel_stride="int32",
    channels=DIVISOR,
    grid=_TILE_GRID,
    rows=_TILE_AXIS,
    columns=_TILE_AXIS,
)
TILE_DEFINES = (_TILE_AXIS.define, _TILE_GRID.define, _TILED_TENSOR.define)
"""Of the structures of kernels_src/fft/fourier.cuh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FftPlan:
    """One way to compute a problem by transforms.

    Attributes:
        problem: lifted to two spatial dimensions.
        order: its spatial axes, the one transformed first (and half kept of) last.
        axes: tiles along them, in that order.
        at_once: tiles that are transformed at once.
        product: how a thread block multiplies.
        planes: that a thread block transforms, 0 for transforms by the library.
    """

    problem: ProblemDescription
    order: tuple[int, int]
    axes: tuple[FftAxis, FftAxis]
    at_once: int
    product: ProductTile
    planes: int = 0

    @staticmethod
    def of(problem: ProblemDescription, config: Mapping[str, Any]) -> FftPlan:
        """The plan that a configuration names; one with "planes" is of our own transforms."""
        planes = int(config.get("planes", 0))
        plan = _plan_of(problem, int(config["tile"]), int(config["chunk_mib"]), planes > 0)
        return replace(plan, product=PRODUCTS[config["product"]], planes=planes)

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
        return COMPLEX_BYTES * self.frequencies * (self.problem.c + self.problem.k)

    def regions(self) -> tuple[Region, ...]:
        """Workspace for transforms, and for the library."""
        p, plane = self.problem, COMPLEX_BYTES * self.frequencies
        planes = {"x": self.at_once * p.c, "w": self.filters, "y": self.at_once * p.k}
        regions = tuple(Region(name=REGIONS[name], bytes=plane * count) for name, count in planes.items())
        if self.planes:
            return regions
        return (*regions, Region(name=SCRATCH, bytes=plane * max(self._batch(count) for count in planes.values())))

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
            yield self._product(count, accumulate=self.is_weights and first > 0)
            if not self.is_weights:
                yield from self._results(result, first, count)
        if self.is_weights:
            yield from self._results(result, 0, self.problem.k)
        if limit := self.summed_directly:
            yield edges_step(self.problem, limit)

    @property
    def summed_directly(self) -> int:
        """Results of fewer products are summed directly, lest their bound were wider: 0 for none."""
        return summed_directly(self.problem, self.error)

    def packing(self) -> Packing | None:
        """The steps in two parts: the filters' transforms, and the rest; None where that reads the filters, too."""
        if self.is_weights or self.summed_directly:
            return None
        filters = tuple(self._transformed("w", 0, self.problem.k))
        rest = tuple(self.steps())[len(filters) :]
        regions = {region.name: region for region in self.regions()}
        transforms = regions.pop(REGIONS["w"])
        scratch = (regions[SCRATCH],) if SCRATCH in regions else ()
        return Packing(
            pack=ConvSolution(
                steps=tuple(on_buffers(filters, {transforms.name: "y"})), workspace=WorkspacePlan(scratch)
            ),
            run=ConvSolution(
                steps=tuple(on_buffers(rest, {transforms.name: "w"})), workspace=WorkspacePlan(tuple(regions.values()))
            ),
            bytes=transforms.bytes,
        )

    def _transformed(self, name: str, first: int, count: int) -> Iterator[Step]:
        """Tiles of a tensor, or filters of so many outputs, into transforms."""
        if self.planes:
            yield self._own(name, first, count, inverse=False)
            return
        yield self._pack(name, first, count)
        yield from self._transforms(name, count * self.problem.tensor(name).shape[1], inverse=False)

    def _results(self, name: str, first: int, count: int) -> Iterator[Step]:
        if self.planes:
            yield self._own(name, first, count, inverse=True)
            return
        yield from self._transforms(name, count * self.problem.tensor(name).shape[1], inverse=True)
        yield self._unpack(name, first, count)

    @property
    def own_block(self) -> OwnBlock:
        """The thread block of our own transforms."""
        return OwnBlock(self.lengths, self.planes)

    def _own(self, name: str, first: int, count: int, *, inverse: bool) -> KernelStep:
        """Elements to transforms, or back."""
        tensor, block = self.problem.tensor(name), self.own_block
        planes = count * tensor.shape[1]
        buffers = (REGIONS[name], name) if inverse else (name, REGIONS[name])
        return KernelStep(
            source=block.source,
            entry=block.entry(inverse=inverse),
            defines=(
                *_element(tensor),
                ("SPREAD", int(self._has_gaps(name))),
                *block.defines,
                *epilogue_defines(self.problem),
            ),
            grid=(ceil_div(planes, block.count), 1, 1),
            block=(block.threads, 1, 1),
            shared_bytes=block.shared_bytes,
            args=(
                *(Pointer(buffer=buffer) for buffer in buffers),
                *int32s(planes),
                *((self._scale,) if inverse else ()),
                self.tiled_tensor(name, first),
                *(epilogue_arguments(self.problem) if inverse else ()),
            ),
        )

    def _has_gaps(self, name: str) -> bool:
        """Whether a tile has gaps between a tensor's elements."""
        placed = (axis.placement(self.problem, index, name) for axis, index in zip(self.axes, self.order, strict=True))
        return any(placement.spread > 1 for placement in placed)

    @property
    def _scale(self) -> Scalar:
        """Of what is transformed back."""
        return Scalar(ctype="float32", value=1.0 / math.prod(self.lengths))

    def _batch(self, planes: int) -> int:
        """Planes that the library transforms at once, so that what it wants itself is bounded."""
        most = max(1, self.at_once * max(self.problem.c, self.problem.k))
        return ceil_div(planes, ceil_div(planes, most))

    def _transforms(self, name: str, planes: int, *, inverse: bool) -> Iterator[FftStep]:
        plane = COMPLEX_BYTES * self.frequencies
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
        c, k = p.c // p.groups, p.k // p.groups
        x, y, w = (p.c, 1, c), (p.k, 1, k), (c, 1, k * c)  # planes to the next row, term and group
        if p.direction is Direction.FORWARD:
            names, strides, conjugates = "xwy", (x, w, y), (0, 1)
        elif p.direction is Direction.BACKWARD_DATA:
            names, strides, conjugates = "ywx", (y, (1, c, k * c), x), (0, 0)
        else:
            transposed = ((1, p.k, k), (1, p.c, c), w)
            names, strides, conjugates = "yxw", transposed, (1, 0)
        return KernelStep(
            source=PRODUCT_SOURCE,
            entry="fft_product" if tile.stages else "fft_product_direct",
            defines=(
                *tile.defines,
                ("CONJUGATE_A", conjugates[0]),
                ("CONJUGATE_B", conjugates[1]),
                *PRODUCT_DEFINES,
            ),
            grid=(math.prod(self._blocks(tiles)) * p.groups, 1, 1),
            block=(tile.threads, 1, 1),
            shared_bytes=tile.shared_bytes,
            args=(
                *(Pointer(buffer=REGIONS[name]) for name in names),
                self._product_shape(tiles, [matrix(*planes) for planes in strides], accumulate),
            ),
        )

    def _product_shape(self, tiles: int, matrices: Sequence[Struct], accumulate: bool) -> Struct:
        rows, columns, terms = self.sizes(tiles)
        column_blocks, row_blocks, bin_blocks = map(divide_by, self._blocks(tiles))
        a, b, out = matrices
        return PRODUCT(
            rows=rows,
            columns=columns,
            terms=terms,
            bins=self.frequencies,
            accumulate=int(accumulate),
            a=a,
            b=b,
            out=out,
            column_blocks=column_blocks,
            row_blocks=row_blocks,
            bin_blocks=bin_blocks,
        )

    def _blocks(self, tiles: int) -> tuple[int, int, int]:
        """Thread blocks of a chunk's product across, down and along the frequencies of a group."""
        rows, columns, _ = self.sizes(tiles)
        tile = self.product
        return ceil_div(columns, tile.columns), ceil_div(rows, tile.rows), ceil_div(self.frequencies, tile.bins)

    def _pack(self, name: str, first: int, count: int) -> KernelStep:
        return self._copy("fft_pack", (name, REGIONS[name]), (name, first, count), self.frequencies)

    def _unpack(self, name: str, first: int, count: int) -> KernelStep:
        across, plane = self.kept(name)
        extra = (self._scale, divide_by(plane), divide_by(across))
        step = self._copy("fft_unpack", (REGIONS[name], name), (name, first, count), plane, extra)
        return replace(step, args=(*step.args, *epilogue_arguments(self.problem)))

    def kept(self, name: str) -> tuple[int, int]:
        """Most elements that a tile is kept of: of a row, and of all."""
        counts = []
        for axis, index in zip(self.axes, self.order, strict=True):
            placement = axis.placement(self.problem, index, name)
            counts.append(ceil_div(placement.high - placement.low, placement.spread))
        return counts[1], math.prod(counts)

    def _copy(
        self,
        entry: str,
        buffers: tuple[str, str],
        tiles: tuple[str, int, int],
        of_plane: int,
        extra: tuple[Scalar | Struct, ...] = (),
    ) -> KernelStep:
        """A kernel of fft/planes.cu on a tensor's tiles, from one on so many, each plane so many items."""
        name, first, count = tiles
        tensor = self.problem.tensor(name)
        items = count * tensor.shape[1] * of_plane
        grid = (ceil_div(items, _THREADS), 1, 1)
        if tensor.layout.channels_last:
            grid = (count, ceil_div(of_plane, _LANES), ceil_div(tensor.shape[1], _LANES))
        return KernelStep(
            source=SOURCE,
            entry=entry,
            defines=(*_element(tensor), *epilogue_defines(self.problem)),
            grid=grid,
            block=(_THREADS, 1, 1),
            args=(
                *(Pointer(buffer=buffer) for buffer in buffers),
                *int32s(items),
                *extra,
                divide_by(self.frequencies),
                divide_by(spectrum(self.lengths)[1]),
                self.tiled_tensor(name, first),
            ),
        )

    def tiled_tensor(self, name: str, first: int) -> Struct:
        """The kernels' `TiledTensor` from a tile on; filters are one tile each."""
        tensor = self.problem.tensor(name)
        image, channel, *_ = strides(tensor)
        down, across = (1, 1) if name == "w" else (axis.tiles for axis in self.axes)
        rows, columns = self._tile_axes(name)
        return _TILED_TENSOR(
            image_stride=image,
            channel_stride=channel,
            channels=divide_by(tensor.shape[1]),
            grid=_TILE_GRID(first=first, tiles_per_image=divide_by(down * across), tiles_across=divide_by(across)),
            rows=rows,
            columns=columns,
        )

    def _tile_axes(self, name: str) -> Iterator[Struct]:
        """The kernels' `TileAxis` twice."""
        tensor = self.problem.tensor(name)
        for axis, index in zip(self.axes, self.order, strict=True):
            place = axis.placement(self.problem, index, name)
            yield _TILE_AXIS(
                size=tensor.shape[2 + index],
                stride=strides(tensor)[2 + index],
                step=0 if name == "w" else axis.step,
                shift=place.shift,
                low=place.low,
                high=place.high,
                spread=divide_by(place.spread),
            )

    def refuse_sizes(self) -> Applicability:
        """Why the plan is out of bounds; APPLICABLE if it is not."""
        p = self.problem
        if max(self.lengths) > _MOST_LENGTH:
            return Applicability(f"transforms at most {_MOST_LENGTH} points along an axis")
        if ceil_div(self.all_tiles, self.at_once) > _MOST_CHUNKS:
            return Applicability(f"takes more than {_MOST_CHUNKS} chunks")
        planes = max(self.at_once * max(p.c, p.k), self.filters)
        if planes * max(self.frequencies, self.kept(p.direction.output)[1]) >= 2**30:
            return Applicability("needs more planes at once than 32-bit offsets reach")
        if math.prod(self._blocks(self.at_once)) * p.groups >= 2**31:
            return Applicability("needs more thread blocks than a launch has")
        if max(self.frequencies, *(self.kept(name)[1] for name in "xwy"), p.c, p.k) > _MOST_BLOCKS * _LANES:
            return Applicability("needs a larger grid than a launch has")
        return APPLICABLE

    @property
    def error(self) -> float:
        """Largest error in float32 roundoffs, over sqrt(x^2 * w^2) of an element that sums as many products as any."""
        return product_error(math.prod(self.lengths), self.reduced)

    @property
    def reduced(self) -> int:
        """Products of transforms that are summed at a frequency."""
        p = self.problem
        if self.is_weights:
            return self.all_tiles
        return (p.c if p.direction is Direction.FORWARD else p.k) // p.groups

    def sizes(self, tiles: int) -> tuple[int, int, int]:
        """Rows, columns and terms of a chunk's products."""
        p = self.problem
        c, k = p.c // p.groups, p.k // p.groups
        if p.direction is Direction.FORWARD:
            return tiles, k, c
        return (tiles, c, k) if p.direction is Direction.BACKWARD_DATA else (k, c, tiles)


def _element(tensor: TensorDescriptor) -> tuple[tuple[str, str | int], ...]:
    """The defines of kernels that read or write a tensor."""
    return (("ELEMENT", tensor.dtype.value), ("CHANNELS_LAST", int(tensor.layout.channels_last)), *TILE_DEFINES)


@functools.lru_cache(maxsize=256)  # a problem's configurations are asked about one by one
def _plan_of(problem: ProblemDescription, tile: int, chunk_mib: int, is_own: bool) -> FftPlan:
    lifted = problem.lifted(2)
    order = (1, 0) if lifted.filter[1] == 1 else (0, 1)
    width = own_line if lifted.filter[order[0]] == 1 else own_width
    fit = (own_height, width) if is_own else (smooth, smooth)
    outer, inner = (_axis(lifted, index, tile, length) for index, length in zip(order, fit, strict=True))
    plan = FftPlan(problem=lifted, order=order, axes=(outer, inner), at_once=1, product=PRODUCTS["32x32"])
    parts = ceil_div(plan.all_tiles, max(1, (chunk_mib << 20) // plan.tile_bytes))
    return replace(plan, at_once=ceil_div(plan.all_tiles, parts))


def _axis(lifted: ProblemDescription, axis: int, tile: int, fit: Callable[[int], int]) -> FftAxis:
    """Tiles along an axis: of one point where filters have one tap, one where the axis is no longer than a tile."""
    if lifted.filter[axis] == 1:
        return FftAxis.tiled(lifted, axis, 1)
    whole = whole_length(lifted, axis)
    return FftAxis.tiled(lifted, axis, tile) if tile and tile < whole else FftAxis.whole(lifted, axis, fit(whole))
