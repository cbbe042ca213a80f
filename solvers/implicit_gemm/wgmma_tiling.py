"""Tilings of kernels_src/implicit_gemm/wgmma.cu: how they cut the matrix product, and which are valid.

A tiling may be a table of many: numbers are arrays then (`miofind.solver.columns`).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.solver.columns import Columns, Each, Integers, chosen, column, divisor, holds_all, larger, smaller
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.split_k import summed_parts
from miofind.solvers.common.wgmma_product import SWIZZLES_BYTES, NchwTensors, ProductKind, WgmmaProduct

WGMMA_M = 64
"""M of one wgmma instruction."""

_REGISTERS = 512  # that 128 threads could have each, if they were all of a multiprocessor
_OTHER_REGISTERS = 40  # of a thread, besides its accumulators
_ALIGNMENT_BYTES = 1024  # of operands in shared memory; a block besides costs as much of it
_STATIC_BYTES = 256  # at most, of the barriers
_MAX_INT = 2**31 - 1
_MAX_BOX = 256  # elements of a copy along an axis
_MAX_PARTIALS_BYTES = 1 << 30
# Bytes a cycle of a multiprocessor's shared memory: 32 banks of 4, by the hardware.
_SHARED_MEMORY_BYTES = 128
# M times N times bytes of K that wgmma multiplies in a cycle: 4 tensor cores of 512 multiply-adds of 2 bytes, by the
# hardware.
_OPERATIONS = 4096


@dataclass(frozen=True, eq=False, kw_only=True)
class WgmmaTile(Columns):
    """What a block computes, of products of a kind.

    Attributes:
        consumers: warpgroups that multiply.
        row_blocks: blocks of 64 rows of each.
        n, k: N of the tile, and K of a k-tile.
        swapped: A and B are swapped: M is filters or channels, N is pixels.
    """

    kind: ProductKind
    consumers: Each
    row_blocks: Each
    n: Each
    k: Each
    swapped: Each

    @column
    def m(self) -> Each:
        """M of the tile."""
        return WGMMA_M * self.consumers * self.row_blocks

    @column
    def block_n(self) -> Each:
        """Columns of an N block: of one swizzle width where N is contiguous, and for backward weights of one tap."""
        return divisor(self.n, self.kind.widest_n)

    @column
    def has_pixels_as_n(self) -> Each:
        """Whether N is pixels."""
        if self.kind.nchw is NchwTensors.NONE and not self.kind.is_weights:
            return self.swapped
        return not self.kind.is_weights

    @property
    def threads(self) -> Each:
        """Of a block: consumers, and two producer warps."""
        return 128 * self.consumers + 64

    @column
    def stage_bytes(self) -> Each:
        """Of a k-tile of A and B."""
        return self.kind.element_bytes * (self.m + self.n) * self.k

    @column
    def buffer_bytes(self) -> Each:
        """Of an output buffer of each consumer."""
        columns = chosen(self.swapped, WGMMA_M, self.block_n)
        return self.consumers * self.kind.element_bytes * WGMMA_M * columns

    @column
    def partials_bytes(self) -> Each:
        """Of what a block leaves in shared memory for those of its cluster that split K."""
        return 4 * self.m * (self.n + 8)

    @column
    def rows(self) -> tuple[Each, Each]:
        """Rows of swizzle width of a k-tile of A and of B."""
        a_is_k_major, b_is_k_major = self._are_k_major
        blocks_m, blocks_n = self._blocks
        return chosen(a_is_k_major, self.m, self.k * blocks_m), chosen(b_is_k_major, self.n, self.k * blocks_n)

    @column
    def copies(self) -> Each:
        """TMA loads of a k-tile of the busier producer warp; y alone channels first counts as it does channels last."""
        a_is_k_major, b_is_k_major = self._are_k_major
        blocks_m, blocks_n = self._blocks
        a_is_whole = a_is_k_major & (self.kind.nchw is not NchwTensors.A)
        return larger(chosen(a_is_whole, 1, blocks_m), chosen(b_is_k_major, 1, blocks_n))

    @property
    def _blocks(self) -> tuple[Each, Each]:
        """Blocks of 64 rows, and of columns."""
        return self.m // WGMMA_M, self.n // self.block_n

    @property
    def _are_k_major(self) -> tuple[Each, Each]:
        """Whether A and B are K-major, and copied row by row."""
        kind, has_pixels_as_n = self.kind, self.has_pixels_as_n
        if kind.is_weights:
            return kind.nchw is not NchwTensors.NONE, kind.nchw is NchwTensors.ALL
        of_pixels, of_filters = kind.nchw is not NchwTensors.ALL, kind.has_k_major_filters
        return chosen(has_pixels_as_n, of_filters, of_pixels), chosen(has_pixels_as_n, of_pixels, of_filters)

    @column
    def multiply_cycles(self) -> Each:
        """Of a k-tile: bound by the tensor cores, or by shared memory."""
        k_tile_bytes = self.kind.element_bytes * self.k
        read_bytes = self.m // WGMMA_M * (WGMMA_M + self.n) * k_tile_bytes
        moved_bytes = read_bytes + self.stage_bytes
        return larger(self.m * self.n * k_tile_bytes / _OPERATIONS, moved_bytes / _SHARED_MEMORY_BYTES)

    @column
    def most_blocks(self) -> Each:
        """Blocks of a multiprocessor whose accumulators registers hold, up to 2."""
        return chosen(self._has_registers(2), 2, chosen(self._has_registers(1), 1, 0))

    def _has_registers(self, blocks: Each) -> Each:
        registers = smaller(255, _REGISTERS // ceil_div(self.threads * blocks, 128) // 8 * 8)
        return self.row_blocks * self.n // 2 <= smaller(128, registers - _OTHER_REGISTERS)

    @property
    def fits_alone(self) -> Each:
        """Whether a thread of backward weights spills nothing where its block is in no cluster.

        With 128 accumulators compilers have shown that it may: its epilogue needs more registers.
        """
        return (self.row_blocks * self.n < 2 * 128) | (self.row_blocks == 1)

    @column
    def is_valid(self) -> Each:
        """Whether a block can compute it, for some product of the kind."""
        has_rows = (self.row_blocks <= self.consumers) & (self.m <= _MAX_BOX)
        return (self.most_blocks > 0) & has_rows & self._has_n & self._is_swappable

    @property
    def _has_n(self) -> Each:
        """Whether N is whole N blocks, or B is K-major, and operands begin where swizzles repeat."""
        is_k_major = self.kind.has_k_major_filters and self.kind.nchw is NchwTensors.NONE
        repeats = self.n * self.kind.element_bytes * self.k % _ALIGNMENT_BYTES == 0
        return repeats & (is_k_major | (self.n % (WGMMA_M // 2) == 0))

    @property
    def _is_swappable(self) -> Each:
        """Whether A and B are not swapped, or may be."""
        kind = self.kind
        may_swap = kind.nchw is NchwTensors.NONE and not kind.is_weights
        may_swap = may_swap and not kind.is_strided and kind.element_bytes == 2
        return chosen(self.swapped, may_swap & (self.row_blocks == 1) & (self.n % 64 == 0), True)


@dataclass(frozen=True, eq=False, kw_only=True)
class WgmmaGrid(Columns):
    """A product in tiles of a size, however their sums are spread."""

    product: WgmmaProduct
    tile: WgmmaTile

    @column
    def size_m(self) -> Each:
        """M of one group."""
        return chosen(self.tile.swapped, self.product.size_n, self.product.size_m)

    @column
    def size_n(self) -> Each:
        """N of one group; for backward weights of one tap. In NCHW tensors whole blocks of one image each."""
        if self.product.has_nchw_n:
            return self.product.problem.n * self.walked[1] * self.tile.block_n
        return chosen(self.tile.swapped, self.product.size_m, self.product.size_n)

    @property
    def walked(self) -> tuple[Each, Each]:
        """Height and width of the walk over one image: of pixels, or of N blocks or k-tiles of NCHW tensors."""
        product = self.product
        if product.has_nchw_n:
            return 1, ceil_div(product.image, self.tile.block_n)
        return (1, ceil_div(product.image, self.tile.k)) if product.has_nchw_k else product.walked

    @column
    def padded_n(self) -> Each:
        """N of one group in whole blocks, all taps together."""
        width, taps = self.tile.block_n, math.prod(self.product.taps) if self.product.is_weights else 1
        return ceil_div(self.size_n, width) * width * taps

    @property
    def tap_blocks(self) -> Each:
        """k-tiles of a tap; for backward weights its N blocks."""
        if self.product.is_weights:
            return ceil_div(self.size_n, self.tile.block_n)
        return ceil_div(self.product.channels, self.tile.k)

    @column
    def phase_k_tiles(self) -> tuple[Each, ...]:
        """k-tiles of a tile of each phase, in the order in which their tiles are computed: the most first."""
        if self.product.has_nchw_k:
            return (self.product.problem.n * self.walked[1],)
        of_tap = ceil_div(self.product.size_k, self.tile.k)
        return tuple(of_tap * taps for taps in self.product.phase_taps)

    @property
    def k_tiles(self) -> Each:
        """k-tiles of a tile, of the phase that has most."""
        return self.phase_k_tiles[0]

    @column
    def is_valid(self) -> Each:
        """Whether its tiles are valid, and not mostly empty."""
        tile = self.tile
        is_filled = (tile.n < 2 * larger(32, self.padded_n)) & (tile.m < 2 * larger(WGMMA_M, self.size_m))
        return tile.is_valid & is_filled & self._has_k

    @property
    def _has_k(self) -> Each:
        """Whether K of a k-tile is a swizzle width, and mostly within a group."""
        product, k_tile_bytes = self.product, self.product.element_bytes * self.tile.k
        if product.is_weights:
            return k_tile_bytes == max(SWIZZLES_BYTES)
        is_filled = (k_tile_bytes <= min(SWIZZLES_BYTES)) | (self.tile.k < 2 * product.size_k)
        return is_filled if product.keeps_to_groups else is_filled & (product.size_k % self.tile.k == 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class WgmmaTiling(Columns):
    """A product cut into tiles as a configuration says.

    Attributes:
        stages: of the pipeline.
        splits: of K, whose partials a second kernel adds.
        blocks: of a multiprocessor.
        cluster_m, cluster_n, cluster_k: blocks of a cluster along M, N (multicast) and K (cluster split-K).
    """

    grid: WgmmaGrid
    stages: Each
    splits: Each
    blocks: Each
    cluster_m: Each
    cluster_n: Each
    cluster_k: Each

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> WgmmaTiling:
        """The tiling of a configuration of ConvImplicitGemmWgmma, valid or not."""
        tile = (config[name] for name in ("consumers", "rows", "tile_n", "depth_bytes", "swapped"))
        m, n, k = _cluster(config["cluster"])
        return WgmmaTiling(
            grid=_grid(problem, *tile),
            stages=config["stages"],
            splits=config["splits"],
            blocks=config["blocks"],
            cluster_m=m,
            cluster_n=n,
            cluster_k=k,
        )

    def configs(self, places: Integers) -> list[Config]:
        """The configurations that some of a table are of."""
        tile, depth_bytes = self.tile, self.tile.k * self.product.element_bytes
        of_tile = (tile.consumers, tile.row_blocks, tile.n, depth_bytes, tile.swapped)
        others = (self.stages, self.splits, self.blocks, self.cluster_m, self.cluster_k)
        columns = (column[places].tolist() for column in (*of_tile, *others))
        return [config_of(*each) for each in zip(*columns, strict=True)]

    @property
    def product(self) -> WgmmaProduct:
        """What is cut."""
        return self.grid.product

    @property
    def tile(self) -> WgmmaTile:
        """What a block computes."""
        return self.grid.tile

    @property
    def segment(self) -> Each:
        """Neighbouring pixels of an NCHW output that are stored at once: 16 bytes, or a part of that."""
        widest = 16 // self.product.element_bytes
        return widest if self.product.nchw is not NchwTensors.OUTPUT else math.gcd(widest, self.product.image)

    @property
    def summed_parts(self) -> Each:
        """Parts of the pixels whose channels are summed up one by one, for statistics."""
        if self.splits > 1:
            return summed_parts(self.product.problem)
        return self.tiles[1] if self.tile.has_pixels_as_n else ceil_div(self.grid.size_m, WGMMA_M)

    @column
    def cluster_blocks(self) -> Each:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @column
    def tiles(self) -> tuple[Each, Each]:
        """Tiles of one group along M and N, those of a cluster counted as one."""
        grid, tile = self.grid, self.tile
        return ceil_div(grid.size_m, tile.m * self.cluster_m), ceil_div(grid.padded_n, tile.n * self.cluster_n)

    @column
    def phase_cluster_k(self) -> tuple[Each, ...]:
        """Blocks that split K of a tile of each phase: a power of 2, so that none has more k-tiles than in the first.

        A cluster takes so many tiles that its blocks all have one.
        """
        most, *others = self.product.phase_taps
        least = (ceil_div(self.cluster_k * taps, most) for taps in others)
        return (self.cluster_k, *(1 + (each > 1) + 2 * (each > 2) + 4 * (each > 4) for each in least))

    @column
    def phase_work_tiles(self) -> tuple[Each, ...]:
        """Work tiles of each phase, which clusters compute one after another."""
        along_m, along_n = self.tiles
        tiles = along_m * along_n * (self.product.problem.groups * self.splits)
        first, *others = self.phase_cluster_k
        return (tiles, *(ceil_div(tiles, first // each) for each in others))

    @column
    def work_tiles(self) -> Each:
        """Work tiles of all phases."""
        return functools.reduce(operator.add, self.phase_work_tiles)

    @property
    def shared_bytes(self) -> Each:
        """Dynamic shared memory: the pipeline, and two output buffers of each consumer.

        As many more hold what is saved for a derivative where the residual is loaded to those.
        """
        epilogue, tile = self.product.problem.epilogue, self.tile
        buffers = 4 if epilogue.has_residual and "saved" in epilogue.operands else 2
        pipeline = self.stages * tile.stage_bytes
        in_cluster = larger(pipeline, tile.partials_bytes)  # partials take the place of the pipeline
        return _ALIGNMENT_BYTES + chosen(self.cluster_k > 1, in_cluster, pipeline + buffers * tile.buffer_bytes)

    def holds(self, shared_bytes: int) -> Each:
        """Whether a multiprocessor with that much shared memory for a block holds its blocks; stages decide no more."""
        of_block = self.shared_bytes + (_ALIGNMENT_BYTES + _STATIC_BYTES)
        return self.blocks * of_block <= shared_bytes + _ALIGNMENT_BYTES

    def is_valid(self, shared_bytes: int) -> Each:
        """Whether the kernel serves it on a multiprocessor with that much shared memory for a block."""
        return holds_all(itertools.chain((self.holds(shared_bytes),), self._limits()))

    @property
    def is_valid_if_it_holds(self) -> Each:
        """Whether the kernel serves it on a multiprocessor that holds its blocks."""
        return holds_all(self._limits())

    def _limits(self) -> Iterator[Each]:
        """Whether each limit is kept."""
        tile, grid, blocks = self.tile, self.grid, self.cluster_blocks
        yield grid.is_valid
        yield self.blocks <= tile.most_blocks
        yield chosen(tile.swapped, (self.splits == 1) & (blocks == 1), True)
        if self.product.is_weights:
            yield tile.fits_alone | (blocks > 1)
        yield self._has_cluster
        yield self._is_divisible
        yield larger(self.work_tiles * blocks, grid.k_tiles * self.splits * self.cluster_k) <= _MAX_INT
        yield self.tiles[1] * tile.n * self.cluster_n <= _MAX_INT + 1  # the columns beyond the last, too

    @property
    def _has_cluster(self) -> Each:
        """Whether a cluster can multicast, or split K; who adds a cluster's partials sums no channels up."""
        may_split = (self.splits == 1) & (self.grid.k_tiles >= 2 * self.cluster_k)
        if self.product.problem.epilogue.statistics:
            may_split = False
        multicasts = chosen(self.cluster_m * self.cluster_n > 1, self._may_multicast, True)
        return chosen(self.cluster_k > 1, may_split, multicasts)

    @property
    def _may_multicast(self) -> Each:
        """Whether the blocks of a cluster all have a tile, and load whole repetitions of a swizzle."""
        product, grid, tile = self.product, self.grid, self.tile
        if product.nchw is not NchwTensors.NONE or product.is_strided:
            return False
        along_m, along_n = grid.size_m > tile.m * (self.cluster_m - 1), grid.padded_n > tile.n * (self.cluster_n - 1)
        length = (tile.n if product.has_k_major_filters else tile.k) // self.cluster_m
        may_multicast = along_m & along_n & (length % 8 == 0)
        return may_multicast & (tile.k // self.cluster_n % 8 == 0) if product.is_weights else may_multicast

    @property
    def _is_divisible(self) -> Each:
        """Whether K has that many splits, and the workspace holds their partials."""
        product, problem = self.product, self.product.problem
        is_whole = True
        if problem.groups > 1 and (product.is_weights or product.has_nchw_n):
            # Stores are cut off at the tensor's end, not at a group's.
            is_whole = (self.grid.size_m % WGMMA_M == 0) | (self.cluster_k > 1)
        size, has_sums = problem.output.size, problem.epilogue.statistics and product.nchw is not NchwTensors.NONE
        if has_sums or size % 4:
            return chosen(self.splits == 1, is_whole, False)
        most, least = self.grid.phase_k_tiles[0], self.grid.phase_k_tiles[-1]
        has_splits = (least >= self.splits) & (most >= 2 * self.splits)
        return chosen(self.splits == 1, is_whole, has_splits & (4 * self.splits * size <= _MAX_PARTIALS_BYTES))


@functools.lru_cache(maxsize=1 << 9)  # a space has hundreds of configurations of each
def _grid(
    problem: ProblemDescription, consumers: int, row_blocks: int, tile_n: int, depth_bytes: int, swapped: int
) -> WgmmaGrid:
    product = WgmmaProduct.of(problem)
    tile_k = depth_bytes // product.element_bytes
    tile = WgmmaTile(
        kind=product.kind, consumers=consumers, row_blocks=row_blocks, n=tile_n, k=tile_k, swapped=bool(swapped)
    )
    return WgmmaGrid(product=product, tile=tile)


@functools.cache
def _cluster(text: str) -> tuple[int, int, int]:
    """The three numbers of a cluster's text."""
    m, n, k = map(int, text.split("x"))
    return m, n, k


@functools.lru_cache(maxsize=1 << 12)  # few serve all problems, and to write one as JSON takes longest
def config_of(*numbers: int) -> Config:
    """The configuration of ConvImplicitGemmWgmma with these parameters."""
    consumers, rows, tile_n, depth_bytes, swapped, stages, splits, blocks, cluster_m, cluster_k = numbers
    return Config.of(
        consumers=consumers,
        rows=rows,
        tile_n=tile_n,
        depth_bytes=depth_bytes,
        stages=stages,
        splits=splits,
        blocks=blocks,
        cluster=f"{cluster_m}x1x{cluster_k}",
        swapped=int(swapped),
    )
