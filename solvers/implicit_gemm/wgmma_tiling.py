"""Tilings of kernels_src/implicit_gemm/wgmma.cu: how they cut the matrix product, and which are valid."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.split_k import summed_parts
from miofind.solvers.common.wgmma_product import NchwTensors, WgmmaProduct

SWIZZLES_BYTES = (128, 64, 32)
"""Widths of swizzles."""

WGMMA_M = 64
"""M of one wgmma instruction."""

_REGISTERS = 512  # that 128 threads could have each, if they were all of a multiprocessor
_OTHER_REGISTERS = 40  # of a thread, besides its accumulators
ALIGNMENT_BYTES = 1024  # of operands in shared memory; a block besides costs as much of it
STATIC_BYTES = 256  # at most, of the barriers
MAX_INT = 2**31 - 1
_MAX_BOX = 256  # elements of a copy along an axis
MAX_PARTIALS_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class WgmmaTiling:
    """A product cut into tiles as a configuration says.

    Attributes:
        product: what is cut.
        consumers: warpgroups that multiply.
        row_blocks: blocks of 64 rows of each.
        tile_m, tile_n, tile_k: M and N of a block's tile, and K of a k-tile.
        stages: of the pipeline.
        splits: of K, whose partials a second kernel adds.
        blocks: of a multiprocessor.
        cluster: blocks of a cluster along M, N (multicast) and K (cluster split-K).
        swapped: A and B are swapped: M is filters or channels, N is pixels.
    """

    product: WgmmaProduct
    consumers: int
    row_blocks: int
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    splits: int
    blocks: int
    cluster: tuple[int, int, int]
    swapped: bool

    @staticmethod
    def of(product: WgmmaProduct, config: Config) -> WgmmaTiling:
        """The tiling of a configuration of ConvImplicitGemmWgmma, valid or not."""
        m, n, k = map(int, str(config["cluster"]).split("x"))
        consumers, row_blocks = int(config["consumers"]), int(config["rows"])
        return WgmmaTiling(
            product=product,
            consumers=consumers,
            row_blocks=row_blocks,
            tile_m=WGMMA_M * consumers * row_blocks,
            tile_n=int(config["tile_n"]),
            tile_k=int(config["depth_bytes"]) // product.element_bytes,
            stages=int(config["stages"]),
            splits=int(config["splits"]),
            blocks=int(config["blocks"]),
            cluster=(m, n, k),
            swapped=bool(config["swapped"]),
        )

    @property
    def config(self) -> Config:
        """The configuration that it is of."""
        depth_bytes = self.tile_k * self.product.element_bytes
        numbers = (self.consumers, self.row_blocks, self.tile_n, depth_bytes, self.stages, self.splits, self.blocks)
        return config_of(*numbers, int(self.swapped), cluster=self.cluster)

    @functools.cached_property
    def size_m(self) -> int:
        """M of one group."""
        return self.product.size_n if self.swapped else self.product.size_m

    @functools.cached_property
    def size_n(self) -> int:
        """N of one group; for backward weights of one tap. In NCHW tensors whole blocks of one image each."""
        if self.product.has_nchw_n:
            return self.product.problem.n * self.walked[1] * self.block_n
        return self.product.size_m if self.swapped else self.product.size_n

    @functools.cached_property
    def block_n(self) -> int:
        """Columns of an N block: of one swizzle width where N is contiguous, and for backward weights of one tap."""
        widths = [swizzle // self.product.element_bytes for swizzle in SWIZZLES_BYTES]
        wide = [width for width in widths if self.tile_n % width == 0]
        fitting = [width for width in wide if width >= self.product.size_n] if self.product.is_weights else []
        return min(fitting, default=max(wide))

    @property
    def has_pixels_as_n(self) -> bool:
        """Whether N is pixels."""
        return not self.product.is_weights and (self.swapped or self.product.nchw is not NchwTensors.NONE)

    @functools.cached_property
    def walked(self) -> tuple[int, int]:
        """Height and width of the walk over one image: of pixels, or of N blocks or k-tiles of NCHW tensors."""
        product = self.product
        if product.has_nchw_n:
            return 1, ceil_div(product.image, self.block_n)
        return (1, ceil_div(product.image, self.tile_k)) if product.has_nchw_k else product.walked

    @property
    def segment(self) -> int:
        """Neighbouring pixels of an NCHW output that are stored at once: 16 bytes, or a part of that."""
        widest = 16 // self.product.element_bytes
        return widest if self.product.nchw is not NchwTensors.OUTPUT else math.gcd(widest, self.product.image)

    @property
    def summed_parts(self) -> int:
        """Parts of the pixels whose channels are summed up one by one, for statistics."""
        if self.splits > 1:
            return summed_parts(self.product.problem)
        return self.tiles[1] if self.has_pixels_as_n else ceil_div(self.size_m, WGMMA_M)

    @functools.cached_property
    def padded_n(self) -> int:
        """N of one group in whole blocks, all taps together."""
        width = self.block_n
        return ceil_div(self.size_n, width) * width * (math.prod(self.product.taps) if self.product.is_weights else 1)

    @property
    def tap_blocks(self) -> int:
        """k-tiles of a tap; for backward weights its N blocks."""
        if self.product.is_weights:
            return ceil_div(self.size_n, self.block_n)
        return ceil_div(self.product.channels, self.tile_k)

    @functools.cached_property
    def k_tiles(self) -> int:
        """k-tiles of a tile, of the phase that has most."""
        return max(self.phase_k_tiles)

    @functools.cached_property
    def phase_k_tiles(self) -> tuple[int, ...]:
        """k-tiles of a tile of each phase, in the order in which their tiles are computed."""
        if self.product.has_nchw_k:
            return (self.product.problem.n * self.walked[1],)
        return tuple(ceil_div(self.product.size_k, self.tile_k) * taps for taps in self.product.phase_taps)

    @functools.cached_property
    def tiles(self) -> tuple[int, int]:
        """Tiles of one group along M and N, those of a cluster counted as one."""
        along_m, along_n, _ = self.cluster
        return ceil_div(self.size_m, self.tile_m * along_m), ceil_div(self.padded_n, self.tile_n * along_n)

    @functools.cached_property
    def phase_cluster_k(self) -> tuple[int, ...]:
        """Blocks that split K of a tile of each phase; a cluster takes so many tiles that its blocks all have one."""
        return phase_cluster_k(self.product, self.cluster[2])

    @functools.cached_property
    def phase_work_tiles(self) -> tuple[int, ...]:
        """Work tiles of each phase, which clusters compute one after another."""
        tiles = math.prod(self.tiles) * self.product.problem.groups * self.splits
        return tuple(ceil_div(tiles, self.cluster[2] // cluster_k) for cluster_k in self.phase_cluster_k)

    @functools.cached_property
    def work_tiles(self) -> int:
        """Work tiles of all phases."""
        return sum(self.phase_work_tiles)

    @property
    def threads(self) -> int:
        """Of a block: consumers, and two producer warps."""
        return 128 * self.consumers + 64

    @property
    def stage_bytes(self) -> int:
        """Of a k-tile of A and B."""
        return self.product.element_bytes * (self.tile_m + self.tile_n) * self.tile_k

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the pipeline, and two output buffers of each consumer.

        As many more hold what is saved for a derivative where the residual is loaded to those.
        """
        pipeline = self.stages * self.stage_bytes
        if self.cluster[2] > 1:  # partials take the place of the pipeline
            return ALIGNMENT_BYTES + max(pipeline, 4 * self.tile_m * (self.tile_n + 8))
        return ALIGNMENT_BYTES + pipeline + output_buffers(self.product) * self.buffer_bytes

    @property
    def buffer_bytes(self) -> int:
        """Of an output buffer of each consumer."""
        columns = WGMMA_M if self.swapped else self.block_n
        return self.consumers * self.product.element_bytes * WGMMA_M * columns

    def is_valid(self, shared_bytes: int) -> bool:
        """Whether the kernel serves it on a multiprocessor with that much shared memory for a block."""
        return self.holds(shared_bytes) and self.is_valid_if_it_holds()

    def holds(self, shared_bytes: int) -> bool:
        """Whether a multiprocessor with that much shared memory for a block holds its blocks; stages decide no more."""
        return self.blocks * (self.shared_bytes + ALIGNMENT_BYTES + STATIC_BYTES) <= shared_bytes + ALIGNMENT_BYTES

    def is_valid_if_it_holds(self) -> bool:
        """Whether the kernel serves it on a multiprocessor that holds its blocks."""
        return (
            self.may_be_valid
            and not self.spills()
            and self._has_cluster()
            and self._is_divisible()
            and max(self.work_tiles * math.prod(self.cluster), self.k_tiles * self.splits * self.cluster[2]) <= MAX_INT
            and self.tiles[1] * self.tile_n * self.cluster[1] <= MAX_INT + 1  # the columns beyond the last, too
        )

    @property
    def may_be_valid(self) -> bool:
        """Whether the tile is valid, whatever stages and splits it has."""
        return self.has_registers() and self.is_swappable() and self._has_sizes

    @functools.cached_property
    def _has_sizes(self) -> bool:
        """Whether the sizes of the tile are valid."""
        return self.has_tile_n() and has_tile_k(self.product, self.tile_k) and self.is_filled()

    def has_registers(self) -> bool:
        """Whether registers hold the accumulators, and a box a tile's rows."""
        if self.row_blocks > self.consumers or self.tile_m > _MAX_BOX:
            return False
        registers = min(255, _REGISTERS // ceil_div(self.threads * self.blocks, 128) // 8 * 8)
        return self.row_blocks * self.tile_n // 2 <= min(128, registers - _OTHER_REGISTERS)

    def spills(self) -> bool:
        """Whether a thread with 128 accumulators spills, as compilers have shown: its epilogue needs more registers."""
        if self.row_blocks * self.tile_n < 2 * 128 or math.prod(self.cluster) > 1:
            return False
        return self.product.is_weights and self.row_blocks > 1

    def has_tile_n(self) -> bool:
        """Whether tile_n is whole N blocks, or B is K-major, and operands begin where swizzles repeat."""
        product = self.product
        if self.tile_n * product.element_bytes * self.tile_k % ALIGNMENT_BYTES:
            return False
        is_k_major = product.has_k_major_filters and product.nchw is NchwTensors.NONE and not self.swapped
        return is_k_major or self.tile_n % (WGMMA_M // 2) == 0

    def is_swappable(self) -> bool:
        """Whether A and B are not swapped, or may be."""
        if not self.swapped:
            return True
        alone = self.row_blocks == self.splits == math.prod(self.cluster) == 1
        if self.product.nchw is not NchwTensors.NONE or self.product.is_strided:
            return False
        return alone and not self.product.is_weights and self.product.element_bytes == 2 and self.tile_n % 64 == 0

    def _has_cluster(self) -> bool:
        """Whether a cluster can multicast, in whole repetitions of a swizzle, or split K."""
        along_m, along_n, along_k = self.cluster
        if math.prod(self.cluster) == 1:
            return True
        if along_k > 1:  # who adds a cluster's partials sums no channels up
            has_no_sums = not self.product.problem.epilogue.statistics
            return has_no_sums and self.splits == 1 and self.k_tiles >= 2 * along_k
        if self.product.nchw is not NchwTensors.NONE or self.product.is_strided:
            return False
        if along_m > 1 and self.size_m <= self.tile_m * (along_m - 1):
            return False
        if along_n > 1 and self.padded_n <= self.tile_n * (along_n - 1):
            return False
        length = (self.tile_n if self.product.has_k_major_filters else self.tile_k) // along_m
        return length % 8 == 0 and (not self.product.is_weights or self.tile_k // along_n % 8 == 0)

    def _is_divisible(self) -> bool:
        """Whether K has that many splits, and the workspace holds their partials."""
        problem = self.product.problem
        if self.splits == 1:
            # Stores are cut off at the tensor's end, not at a group's.
            has_rows_of_groups = self.product.is_weights or self.product.has_nchw_n
            across = problem.groups > 1 and has_rows_of_groups and self.size_m % WGMMA_M
            return not across or self.cluster[2] > 1
        size = problem.output.size
        if problem.epilogue.statistics and self.product.nchw is not NchwTensors.NONE:
            return False
        if min(self.phase_k_tiles) < self.splits:
            return False
        return self.k_tiles >= 2 * self.splits and 4 * self.splits * size <= MAX_PARTIALS_BYTES and size % 4 == 0

    def is_filled(self) -> bool:
        """Whether a tile is not mostly empty."""
        return self.tile_n < 2 * max(32, self.padded_n) and self.tile_m < 2 * max(WGMMA_M, self.size_m)


@functools.lru_cache(maxsize=1 << 12)  # few serve all problems, and to write one as JSON takes longest
def config_of(*numbers: int, cluster: tuple[int, int, int]) -> Config:
    """The configuration of ConvImplicitGemmWgmma with these parameters, `cluster` besides, in their order."""
    *first, swapped = numbers
    names = ("consumers", "rows", "tile_n", "depth_bytes", "stages", "splits", "blocks")
    return Config({**dict(zip(names, first, strict=True)), "cluster": "x".join(map(str, cluster)), "swapped": swapped})


def phase_cluster_k(product: WgmmaProduct, cluster_k: int) -> tuple[int, ...]:
    """Blocks of a cluster that split K of a tile of each phase: a power of 2, so that none has more k-tiles than in the
    first."""
    most, *_ = taps = product.phase_taps
    return tuple(1 << (ceil_div(cluster_k * count, most) - 1).bit_length() for count in taps)


def has_tile_k(product: WgmmaProduct, tile_k: int) -> bool:
    """Whether tile_k is a swizzle width, and mostly within a group."""
    k_tile_bytes = product.element_bytes * tile_k
    if product.is_weights:
        return k_tile_bytes == max(SWIZZLES_BYTES)
    if k_tile_bytes > min(SWIZZLES_BYTES) and tile_k >= 2 * product.size_k:
        return False
    return product.keeps_to_groups or product.size_k % tile_k == 0


def output_buffers(product: WgmmaProduct) -> int:
    """Of each consumer; more where what is saved for a derivative is loaded, too."""
    epilogue = product.problem.epilogue
    return 4 if epilogue.has_residual and "saved" in epilogue.operands else 2
