"""Winograd's minimal filtering around products of matrices: the steps of one solution, chunk by chunk of tiles.

Both operands are transformed by kernels_src/winograd/batched.cu into the workspace and multiplied place by place of a
tile, and the products are transformed back. Knows not who multiplies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from miofind.core.cached import cached_property
from miofind.core.problem import DataType, Direction, ProblemDescription, TensorDescriptor
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.solver import APPLICABLE, Applicability
from miofind.solver.steps import (
    Argument,
    ConvSolution,
    KernelStep,
    Packing,
    Pointer,
    Region,
    Step,
    WorkspacePlan,
    int32s,
    on_buffers,
)
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.chunks import chunks
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.divisor import DIVISOR, divide_by
from miofind.solvers.common.minimal_filtering import Filtering, bound_growth, is_local

SOURCE = "winograd/batched.cu"
INPUTS = "inputs"
OTHERS = "others"
PRODUCTS = "products"

_THREADS = 128
_TILES = StructType(
    "Tiles",
    first="int32",
    count="int32",
    **dict.fromkeys(("tile_rows", "tile_columns", "slice_tiles"), DIVISOR),
    slices="int32",
)
_OPERAND = StructType(
    "Operand",
    **dict.fromkeys(("channels", "height", "width", "pad_top", "pad_left"), "int32"),
    group_channels=DIVISOR,
    items=DIVISOR,
)
FEW_FLOATS = 36  # of a thread's tiles: F(4x4, 3x3) of one channel
_BLOCKS = {True: 8, False: 4}  # of a multiprocessor, for few floats and for many: so many have registers for them


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledTransform:
    """What all plans of a problem with tiles of one size have in common.

    Attributes:
        steps_of_tiles: rows and columns from one tile to the next.
        axes: the algorithm down and across.
        places: products of one tile for each pair of channels.
        all_tiles: of the whole batch.
        tiles_of_image: down and across what the tiles cover: the result, or y for backward weights.
    """

    steps_of_tiles: tuple[int, int]
    axes: tuple[Filtering, Filtering]
    places: int
    tiles_of_image: tuple[int, int]
    all_tiles: int

    @staticmethod
    @functools.lru_cache(maxsize=64)  # dozens of plans ask
    def of(problem: ProblemDescription, tile: int) -> TiledTransform:
        """That of a problem lifted to three spatial dimensions."""
        is_weights, (_, *filter_taps) = problem.direction is Direction.BACKWARD_WEIGHTS, problem.filter
        steps = [1 if taps == 1 else tile for taps in filter_taps]
        down, across = (
            Filtering.of(taps, step) if is_weights else Filtering.of(step, taps)
            for step, taps in zip(steps, filter_taps, strict=True)
        )
        covered = problem.spatial if problem.direction is Direction.BACKWARD_DATA else problem.out_spatial
        rows, columns = (ceil_div(size, step) for size, step in zip(covered[1:], steps, strict=True))
        return TiledTransform(
            steps_of_tiles=(steps[0], steps[1]),
            axes=(down, across),
            places=down.products * across.products,
            tiles_of_image=(rows, columns),
            all_tiles=problem.n * rows * columns,
        )


@dataclass(frozen=True, kw_only=True)
class WinogradPlan:
    """One way to compute a problem by minimal filtering.

    What a choice among plans asks for often is kept.

    Attributes:
        problem: lifted to three spatial dimensions, the first of size 1.
        tile: outputs of a tile along axes of several taps; for backward weights pixels of y.
        tiles: that are transformed at once.
        slices: parts of a chunk's tiles whose products are summed apart, for backward weights.
        vector: elements of neighbouring channels that a thread transforms at most, where channels are last.
        places_within: transformed tiles are (tiles, places, groups, channels) where channels are last, not
            (places, groups, slices, tiles, channels), as the library takes them; with one slice.
    """

    problem: ProblemDescription
    tile: int
    tiles: int
    slices: int = 1
    vector: int = 1
    places_within: bool = False

    @cached_property
    def is_weights(self) -> bool:
        """Whether filters are the result."""
        return self.problem.direction is Direction.BACKWARD_WEIGHTS

    @cached_property
    def taps(self) -> tuple[int, int]:
        """Of a filter, down and across."""
        _, down, across = self.problem.filter
        return down, across

    @cached_property
    def transform(self) -> TiledTransform:
        """What it has in common with all plans of such tiles."""
        return TiledTransform.of(self.problem, self.tile)

    @property
    def steps_of_tiles(self) -> tuple[int, int]:
        """Rows and columns from one tile to the next."""
        return self.transform.steps_of_tiles

    @property
    def axes(self) -> tuple[Filtering, Filtering]:
        """The algorithm down and across."""
        return self.transform.axes

    @property
    def error_growth(self) -> float:
        """Of the root mean square error over direct summation's, in arithmetic of one precision."""
        return math.prod(axis.error_growth for axis in self.axes)

    @property
    def bound_growth(self) -> float:
        """Of the error bound over direct summation's, in arithmetic of one precision."""
        return bound_growth(self.axes)

    @property
    def is_local(self) -> bool:
        """Whether a result is computed from the inputs alone that it meets.

        A filter's gradient is not: the tiles at the borders of dy have pixels of x that only some of its taps meet.
        """
        return not self.is_weights and is_local(self.axes)

    @property
    def places(self) -> int:
        """Products of one tile for each pair of channels."""
        return self.transform.places

    @property
    def source(self) -> str:
        """The images that filters slide over: "x", or "y" for backward data."""
        return "y" if self.problem.direction is Direction.BACKWARD_DATA else "x"

    @property
    def tiles_of_image(self) -> tuple[int, int]:
        """Down and across what the tiles cover: the result, or y for backward weights."""
        return self.transform.tiles_of_image

    @property
    def all_tiles(self) -> int:
        """Tiles of the whole batch."""
        return self.transform.all_tiles

    @cached_property
    def slice_tiles(self) -> int:
        """Tiles of a slice, with zeros behind the last so that matrices begin at whole vectors."""
        tiles = ceil_div(self.tiles, self.slices)
        return round_up(tiles, 32 if tiles >= 256 else 8)

    @cached_property
    def chunk_count(self) -> int:
        """Chunks of all tiles."""
        return ceil_div(self.all_tiles, self.tiles)

    @cached_property
    def lanes(self) -> int:
        """Channels of the widest vector that a thread transforms."""
        return max(self._lanes(self.problem.x), self._lanes(self.problem.y))

    @property
    def floats(self) -> int:
        """Of a thread's tiles."""
        return self.lanes * self.places

    @property
    def transformed_bytes(self) -> int:
        """Of the tiles of a chunk, both operands or operand and products."""
        filters = PRODUCTS if self.is_weights else OTHERS
        return sum(region.bytes for region in self.regions() if region.name != filters)

    def regions(self) -> tuple[Region, ...]:
        """Workspace for transformed operands and products."""
        return self._regions

    @cached_property
    def _regions(self) -> tuple[Region, ...]:
        p = self.problem
        tiles, pairs = self.places * self.slices * self.slice_tiles, self.places * p.w.size // math.prod(p.filter)
        channels, results = (p.k, p.c) if p.direction is Direction.BACKWARD_DATA else (p.c, p.k)
        size, wide = p.x.dtype.itemsize, DataType.FLOAT32.itemsize
        others, products = (tiles * results, pairs * self.slices) if self.is_weights else (pairs, tiles * results)
        return (
            Region(name=INPUTS, bytes=tiles * channels * size),
            Region(name=OTHERS, bytes=others * size),
            Region(name=PRODUCTS, bytes=products * wide),
        )

    def packing(self, whole: ConvSolution) -> Packing | None:
        """A solution of this plan's steps in two parts: the filters' transform, and the rest."""
        if self.is_weights:
            return None
        first = next(iter(chunks(self.all_tiles, self.tiles)))
        both, images = (self._operands_step(first.start, first.stop - first.start, others=o) for o in (True, False))
        filters = replace(both, grid=(both.grid[0] - images.grid[0], 1, 1))  # which the first blocks transform
        regions = {region.name: region for region in whole.workspace.regions}
        transformed = regions.pop(OTHERS)
        return Packing(
            pack=ConvSolution(steps=(filters.on_buffers({self.source: "w", INPUTS: "y", OTHERS: "y"}),)),
            run=replace(
                whole,
                steps=tuple(on_buffers((images, *whole.steps[1:]), {OTHERS: "w"})),
                workspace=WorkspacePlan(tuple(regions.values())),
            ),
            bytes=transformed.bytes,
            form=self._filters_form,
        )

    @property
    def _filters_form(self) -> str:
        """How transformed filters lie: (places, groups, k, c), taps of backward data in reverse order."""
        p = self.problem
        places = "x".join(str(axis.products) for axis in self.axes)
        return f"winograd {places} {p.direction} {p.x.dtype} {p.groups}"

    def steps(self, multiply: Callable[[int, bool], Iterable[Step]]) -> Iterator[Step]:
        """The steps in order.

        Args:
            multiply: steps of the products of a chunk of so many tiles, and whether they are added to earlier ones.
        """
        for chunk in chunks(self.all_tiles, self.tiles):
            is_first = chunk.start == 0
            yield self._operands_step(chunk.start, chunk.stop - chunk.start, others=self.is_weights or is_first)
            yield from multiply(chunk.stop - chunk.start, self.is_weights and not is_first)
            if not self.is_weights:
                yield self._results_step(chunk.start, chunk.stop - chunk.start)
        if self.is_weights:
            yield self._weights_step()

    def refuse_sizes(self) -> Applicability:
        """Why sizes overflow the kernels' counts; APPLICABLE if they do not."""
        most = 4 * 2**29
        for region in self.regions():
            if region.bytes > most:
                return Applicability(
                    f"{region.name} of {self.tiles} tiles take {region.bytes} bytes, at most {most} are served"
                )
        if self.all_tiles > 2**30:
            return Applicability(f"takes {self.all_tiles} tiles, at most {2**30} are served")
        return APPLICABLE

    def _lanes(self, tensor: TensorDescriptor) -> int:
        """Channels that a thread transforms."""
        return math.gcd(self.vector, tensor.shape[1] // self.problem.groups) if tensor.layout.channels_last else 1

    def _columns(self, tensor: TensorDescriptor) -> int:
        """Columns of a row that a thread loads or stores at once."""
        most = 16 // tensor.dtype.itemsize
        return 1 if tensor.layout.channels_last else math.gcd(most, self.steps_of_tiles[1], tensor.shape[-1])

    @property
    def _before(self) -> tuple[int, int]:
        """Rows and columns before the image that the first tile begins."""
        _, *pads = self.problem.conv.pad_before
        if self.problem.direction is Direction.BACKWARD_DATA:
            pads = [taps - 1 - pad for taps, pad in zip(self.taps, pads, strict=True)]
        down, across = pads
        return down, across

    def _defines(self) -> tuple[tuple[str, str | int], ...]:
        p = self.problem
        x, result = p.tensor(self.source), p.output
        other = p.y if self.is_weights else p.w
        filters = [axis.filter for axis in self.axes]
        if p.direction is Direction.BACKWARD_DATA:
            filters = [matrix[:, ::-1] for matrix in filters]
        matrices = (
            ("INPUT", [axis.input for axis in self.axes]),
            ("OTHER", filters),
            ("OUTPUT", [axis.output for axis in self.axes]),
        )
        sizes = (
            ("TILE", self.steps_of_tiles),
            ("TAPS", self.taps),
            ("PRODUCTS", [axis.products for axis in self.axes]),
        )
        vectors = (1, 1) if self.is_weights else (self._lanes(result), self._columns(result))
        others = (self._lanes(other), self._columns(other)) if self.is_weights else (1, 1)
        tensors = (
            ("INPUT", x, (self._lanes(x), self._columns(x))),
            ("OTHER", other, others),
            ("OUTPUT", result, vectors),
        )
        return (
            ("ELEMENT", p.x.dtype.value),
            ("OPERAND", p.x.dtype.value),
            ("WEIGHTS", int(self.is_weights)),
            *((f"{name}_{axis}", size) for name, pair in sizes for axis, size in zip("HW", pair, strict=True)),
            *((f"{name}_{axis}", _list(one)) for name, pair in matrices for axis, one in zip("HW", pair, strict=True)),
            *((f"{name}_LAST", int(tensor.layout.channels_last)) for name, tensor, _ in tensors),
            *((f"{name}_LANES", lanes) for name, _, (lanes, _) in tensors),
            *((f"{name}_VECTOR", columns) for name, _, (_, columns) in tensors),
            ("MIN_BLOCKS", _BLOCKS[self.floats <= FEW_FLOATS]),
            ("PLACES_WITHIN", int(self.places_within)),
            ("INPUT_LEAD", self._before[1] % self._columns(x)),
            _TILES.define,
            _OPERAND.define,
            *epilogue_defines(p),
        )

    def _operands_step(self, first: int, count: int, *, others: bool) -> KernelStep:
        """Both operands of a chunk, or its tiles of the images alone."""
        p = self.problem
        x = p.tensor(self.source)
        pairs = p.k * p.w.shape[1]
        padded = self.slices * self.slice_tiles
        other_items = self._items(p.y, padded) if self.is_weights else pairs
        other_blocks = ceil_div(other_items, _THREADS) if others else 0
        second: tuple[Argument, ...] = (
            (self._operand(p.y, (0, 0), padded),) if self.is_weights else (*int32s(pairs), divide_by(p.w.shape[1]))
        )
        return self._kernel(
            "operands",
            other_blocks + ceil_div(self._items(x, padded), _THREADS),
            *(Pointer(buffer=name) for name in (self.source, INPUTS, "y" if self.is_weights else "w", OTHERS)),
            *int32s(other_blocks),
            self._tiles(first, count),
            self._operand(x, self._before, padded),
            *second,
        )

    def _results_step(self, first: int, count: int) -> KernelStep:
        result = self.problem.output
        return self._kernel(
            "results",
            ceil_div(self._items(result, count), _THREADS),
            Pointer(buffer=PRODUCTS),
            Pointer(buffer=self.problem.direction.output),
            self._tiles(first, count),
            self._operand(result, (0, 0), count),
            *epilogue_arguments(self.problem),
        )

    def _weights_step(self) -> KernelStep:
        p = self.problem
        pairs, c = p.k * p.w.shape[1], p.w.shape[1]
        return self._kernel(
            "weights",
            ceil_div(pairs, _THREADS),
            Pointer(buffer=PRODUCTS),
            Pointer(buffer="w"),
            *int32s(pairs, self.slices),
            divide_by(c),
            divide_by(pairs // p.groups),
        )

    def _kernel(self, name: str, blocks: int, *args: Argument) -> KernelStep:
        return KernelStep(
            source=SOURCE,
            entry=f"winograd_{name}",
            defines=_defines(self),
            grid=(blocks, 1, 1),
            block=(_THREADS, 1, 1),
            args=args,
        )

    def _items(self, tensor: TensorDescriptor, tiles: int) -> int:
        """Threads that transform so many tiles of all channels."""
        return tiles * tensor.shape[1] // self._lanes(tensor)

    def _tiles(self, first: int, count: int) -> Struct:
        tile_rows, tile_columns = self.tiles_of_image
        return _TILES(
            first=first,
            count=count,
            tile_rows=divide_by(tile_rows),
            tile_columns=divide_by(tile_columns),
            slice_tiles=divide_by(self.slice_tiles),
            slices=self.slices,
        )

    def _operand(self, tensor: TensorDescriptor, pads: tuple[int, int], tiles: int) -> Struct:
        _, channels, _, height, width = tensor.shape
        return _OPERAND(
            channels=channels,
            height=height,
            width=width,
            pad_top=pads[0],
            pad_left=pads[1],
            group_channels=divide_by(channels // self.problem.groups),
            items=divide_by(channels // self._lanes(tensor) if tensor.layout.channels_last else tiles),
        )


@functools.lru_cache(maxsize=64)  # every chunk's steps ask
def _defines(plan: WinogradPlan) -> tuple[tuple[str, str | int], ...]:
    return plan._defines()


def _list(matrix: NDArray[np.float64]) -> str:
    """A matrix by rows, each number the float32 nearest to it."""
    return ",".join(f"{float(np.float32(value))!r}f" for value in matrix.ravel())
