"""A convolution as a matrix product that kernels_src/implicit_gemm_wgmma.cu computes, and how it is cut into tiles.

Knows nothing of time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from miofind.problem import Direction, ProblemDescription
from miofind.solution import Config
from miofind.tiling.correlation import ceil_div

SPANS_BYTES = (128, 64, 32)
"""What swizzles cover."""

ROW_BLOCK = 64
"""Rows of one product of a warpgroup."""

_REGISTERS = 512  # that 128 threads could have each, if they were all of a multiprocessor
_OTHER_REGISTERS = 40  # of a thread, besides its sums
_ALIGNMENT_BYTES = 1024
_STATIC_BYTES = 256
_MAX_INT = 2**31 - 1
_MAX_BOX = 256
_MAX_PARTS_BYTES = 1 << 30


class Planes(Enum):
    """Which tensors of pixels have their channels first, so that the pixels of one channel lie side by side.

    Rows are y for backward weights.
    """

    NOWHERE = "NOWHERE"
    IN_RESULT = "IN_RESULT"
    IN_ROWS = "IN_ROWS"
    EVERYWHERE = "EVERYWHERE"

    @staticmethod
    def of(problem: ProblemDescription) -> Planes | None:
        """Those of a problem's layouts; None for other mixtures, which are not served."""
        if not problem.w.layout.channels_last and math.prod(problem.filter) > 1:
            return None
        pixels, other = ("y", "x") if problem.direction is Direction.BACKWARD_DATA else ("x", "y")
        last = {name: problem.tensor(name).layout.channels_last for name in (pixels, other)}
        if last[pixels] == last[other]:
            return Planes.NOWHERE if last[pixels] else Planes.EVERYWHERE
        if last[other]:
            return None
        return Planes.IN_ROWS if problem.direction is Direction.BACKWARD_WEIGHTS else Planes.IN_RESULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Residue:
    """What pixels of one axis of dx meet whose places are equal modulo the stride; of other products, all pixels.

    Attributes:
        at: of the first of these pixels.
        first: the first tap of the filter that they meet; `WgmmaProduct.tap_steps` lie between two.
        taps: how many they meet.
        offset: pixels of dy, or x, from the first that copies walk to where the first tap meets it. Further taps meet
            pixels `WgmmaProduct.dilation` further, for backward data back.
    """

    at: int
    first: int
    taps: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Pixels of dx that meet the same taps; of other products, all that is computed.

    Attributes:
        row, column: of `WgmmaProduct.residues`, by number.
        taps: how many a tile's depth has: 1 for backward weights.
    """

    row: int
    column: int
    taps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaProduct:
    """A problem as a matrix product, the same for all configurations.

    Attributes:
        problem: lifted to two spatial dimensions.
        rows, columns: of the result of one group; for backward weights the columns are of one tap, for strided backward
            data the rows are of one phase: all phases walk as many pixels, some beyond the tensor.
        depth: channels or filters that each tap sums over, or output pixels.
        taps: of the filter.
        pixels: name of the tensor that is met pixel by pixel.
        walked: rows and columns of the pixels that copies walk, in one image.
        low, high: their corners, rows first.
        planes: which tensors have their channels first; if any but for backward weights, pixels are the columns.
        residues: of both axes.
        phases: one for each pair of residues, those that meet most taps first.
        tap_steps: between the taps of a residue.
        dilation: between pixels that neighbouring taps of a residue meet.
    """

    problem: ProblemDescription
    rows: int
    columns: int
    depth: int
    taps: tuple[int, int]
    pixels: str
    walked: tuple[int, int]
    low: tuple[int, int]
    high: tuple[int, int]
    planes: Planes
    residues: tuple[tuple[Residue, ...], tuple[Residue, ...]]
    phases: tuple[Phase, ...]
    tap_steps: tuple[int, int]
    dilation: tuple[int, int]

    @staticmethod
    def of(problem: ProblemDescription) -> WgmmaProduct:
        """The product of a problem of one or two spatial dimensions; the last one asked for is kept."""
        return _product(problem)

    @property
    def is_weights(self) -> bool:
        """Whether filters are computed."""
        return self.problem.direction is Direction.BACKWARD_WEIGHTS

    @property
    def is_pointwise(self) -> bool:
        """Whether outputs meet one pixel each, in order."""
        conv = self.problem.conv
        return math.prod(self.taps) == max(conv.stride) == 1 and not any((*conv.pad_before, *conv.pad_after))

    @property
    def is_strided(self) -> bool:
        """Whether pixels of the result differ in the taps that they meet."""
        return len(self.phases) > 1

    @property
    def phase_taps(self) -> tuple[int, ...]:
        """Taps of each phase that has any; the others' pixels are zeros."""
        return tuple(phase.taps for phase in self.phases if phase.taps)

    @property
    def keeps_to_groups(self) -> bool:
        """Whether copies of a depth that a group has no more of meet nothing of the next group, but zeros.

        Boxes end with the group, where they run along the depth; pixels in im2col mode go on into the next, and so do
        planes.
        """
        if self.problem.groups == 1:
            return True
        return self.is_pointwise and self.has_deep_filters and self.planes is not Planes.EVERYWHERE

    @property
    def has_planes_of_pixels(self) -> bool:
        """Whether columns are pixels that lie side by side in planes."""
        return self.planes is Planes.EVERYWHERE and not self.is_weights

    @property
    def has_planes_of_depth(self) -> bool:
        """Whether the depth is of pixels that lie side by side in planes."""
        return self.planes is Planes.EVERYWHERE and self.is_weights

    @property
    def image(self) -> int:
        """Pixels of an image of y, or of x for backward data."""
        problem = self.problem
        of = problem.spatial if problem.direction is Direction.BACKWARD_DATA else problem.out_spatial
        return math.prod(of)

    @property
    def element_bytes(self) -> int:
        """Of x, w and y alike."""
        return self.problem.x.dtype.itemsize

    @property
    def transposes_filters(self) -> bool:
        """Whether the filter is laid out anew: TF32 products take operands with their depth side by side alone."""
        return self.problem.direction is Direction.BACKWARD_DATA and self.element_bytes == 4

    @property
    def has_deep_filters(self) -> bool:
        """Whether the depth lies side by side in the filter as the kernel takes it."""
        return self.problem.direction is Direction.FORWARD or self.transposes_filters

    @property
    def channels(self) -> int:
        """Channels, or for backward data filters, of one group: what a tap sums over without backward weights."""
        of = self.problem.k if self.problem.direction is Direction.BACKWARD_DATA else self.problem.c
        return of // self.problem.groups


@functools.lru_cache(maxsize=1)
def _product(problem: ProblemDescription) -> WgmmaProduct:
    planar = problem.lifted(2)
    conv = planar.conv
    c, k = planar.c // planar.groups, planar.k // planar.groups
    taps = (planar.filter[0], planar.filter[1])
    reach = [(taps[i] - 1) * conv.dilation[i] for i in range(2)]
    outputs = math.prod(planar.out_spatial) * planar.n
    planes = Planes.of(planar) or Planes.NOWHERE
    tap_steps, dilation = [1, 1], list(conv.dilation)
    residues = [[Residue(at=0, first=0, taps=count, offset=0)] for count in taps]
    if planar.direction is Direction.BACKWARD_DATA:
        steps = [math.gcd(conv.stride[i], conv.dilation[i]) for i in range(2)]
        tap_steps = [conv.stride[i] // steps[i] for i in range(2)]
        dilation = [conv.dilation[i] // steps[i] for i in range(2)]
        found = [_residues(planar, axis) for axis in range(2)]
        low = [min(one.offset - (one.taps - 1) * dilation[i] for one in found[i] if one.taps) for i in range(2)]
        residues = [[replace(one, offset=one.offset - low[i] if one.taps else 0) for one in found[i]] for i in range(2)]
        walked = tuple(ceil_div(planar.spatial[i], conv.stride[i]) for i in range(2))
        high = [low[i] + walked[i] - planar.out_spatial[i] for i in range(2)]
        rows, columns, depth, pixels = math.prod(walked) * planar.n, c, k, "y"
    else:
        low = [-conv.pad_before[i] for i in range(2)]
        high = [conv.pad_after[i] - reach[i] for i in range(2)]
        pixels, walked = "x", planar.out_spatial
        forward = planar.direction is Direction.FORWARD
        rows, columns, depth = (outputs, k, c) if forward else (k, c, outputs)
    if planes is not Planes.NOWHERE and planar.direction is not Direction.BACKWARD_WEIGHTS:
        rows, columns = columns, rows
    return WgmmaProduct(
        problem=planar,
        rows=rows,
        columns=columns,
        depth=depth,
        taps=taps,
        pixels=pixels,
        walked=(walked[0], walked[1]),
        low=(low[0], low[1]),
        high=(high[0], high[1]),
        planes=planes,
        residues=(tuple(residues[0]), tuple(residues[1])),
        phases=_phases(planar, residues),
        tap_steps=(tap_steps[0], tap_steps[1]),
        dilation=(dilation[0], dilation[1]),
    )


def _residues(problem: ProblemDescription, axis: int) -> list[Residue]:
    """Of backward data, with offsets from dy's first pixel.

    A pixel i of dx meets tap r where i + pad - r * dilation is a multiple of the stride, and there that pixel of dy.
    """
    conv, count = problem.conv, problem.filter[axis]
    stride, pad, dilation = conv.stride[axis], conv.pad_before[axis], conv.dilation[axis]
    period = stride // math.gcd(stride, dilation)
    found = []
    for at in range(stride):
        first = next((tap for tap in range(period) if (at + pad - tap * dilation) % stride == 0), count)
        taps = len(range(first, count, period))
        offset = (at + pad - first * dilation) // stride if taps else 0
        found.append(Residue(at=at, first=first if taps else 0, taps=taps, offset=offset))
    return found


def _phases(problem: ProblemDescription, residues: Sequence[Sequence[Residue]]) -> tuple[Phase, ...]:
    if problem.direction is Direction.BACKWARD_WEIGHTS:
        return (Phase(row=0, column=0, taps=1),)
    found = [
        Phase(row=i, column=j, taps=row.taps * column.taps)
        for i, row in enumerate(residues[0])
        for j, column in enumerate(residues[1])
    ]
    return tuple(sorted(found, key=lambda phase: -phase.taps))


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaTiling:
    """A product cut into tiles as a configuration says.

    Attributes:
        product: what is cut.
        consumers: warpgroups that multiply.
        row_blocks: blocks of 64 rows of each.
        tile_m, tile_n, tile_k: rows, columns and depth of a step of a block's tile.
        stages: steps that are copied ahead.
        splits: parts of the depth that a second pass adds.
        blocks: of a multiprocessor.
        cluster: blocks of a cluster along rows, columns and depth.
        swapped: rows are filters or channels and columns pixels, not the other way round.
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
            tile_m=ROW_BLOCK * consumers * row_blocks,
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
        return Config(
            {
                "consumers": self.consumers,
                "rows": self.row_blocks,
                "tile_n": self.tile_n,
                "depth_bytes": self.tile_k * self.product.element_bytes,
                "stages": self.stages,
                "splits": self.splits,
                "blocks": self.blocks,
                "cluster": "x".join(map(str, self.cluster)),
                "swapped": int(self.swapped),
            }
        )

    @property
    def rows(self) -> int:
        """Rows of one group."""
        return self.product.columns if self.swapped else self.product.rows

    @property
    def columns(self) -> int:
        """Columns of one group; for backward weights of one tap. Blocks of them meet one image each in planes."""
        if self.product.has_planes_of_pixels:
            return self.product.problem.n * self.walked[1] * self.width
        return self.product.rows if self.swapped else self.product.columns

    @property
    def width(self) -> int:
        """Columns of a block, which are swizzled together where they lie side by side; for weights of one tap."""
        spans = [span // self.product.element_bytes for span in SPANS_BYTES]
        wide = [span for span in spans if self.tile_n % span == 0]
        fitting = [span for span in wide if span >= self.product.columns] if self.product.is_weights else []
        return min(fitting, default=max(wide))

    @property
    def has_pixel_columns(self) -> bool:
        """Whether the columns are pixels."""
        return not self.product.is_weights and (self.swapped or self.product.planes is not Planes.NOWHERE)

    @property
    def walked(self) -> tuple[int, int]:
        """Rows and columns of what copies walk in one image: its pixels, or in planes its blocks or steps of them."""
        product = self.product
        if product.has_planes_of_pixels:
            return 1, ceil_div(product.image, self.width)
        return (1, ceil_div(product.image, self.tile_k)) if product.has_planes_of_depth else product.walked

    @property
    def run(self) -> int:
        """Pixels of a plane of the result that are stored at once: 16 bytes, or a part of that."""
        widest = 16 // self.product.element_bytes
        return widest if self.product.planes is not Planes.IN_RESULT else math.gcd(widest, self.product.image)

    @property
    def all_columns(self) -> int:
        """Columns of one group in whole blocks, all taps together."""
        width = self.width
        return ceil_div(self.columns, width) * width * (math.prod(self.product.taps) if self.product.is_weights else 1)

    @property
    def chunks(self) -> int:
        """Steps of a tap; for backward weights its blocks of columns."""
        if self.product.is_weights:
            return ceil_div(self.columns, self.width)
        return ceil_div(self.product.channels, self.tile_k)

    @property
    def steps(self) -> int:
        """Steps of a tile's depth, of the phase that has most."""
        return max(self.phase_steps)

    @property
    def phase_steps(self) -> tuple[int, ...]:
        """Steps of a tile's depth of each phase, in the order in which their tiles are computed."""
        if self.product.has_planes_of_depth:
            return (self.product.problem.n * self.walked[1],)
        return tuple(ceil_div(self.product.depth, self.tile_k) * taps for taps in self.product.phase_taps)

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of one group along rows and columns, those of a cluster counted as one."""
        along_m, along_n, _ = self.cluster
        return ceil_div(self.rows, self.tile_m * along_m), ceil_div(self.all_columns, self.tile_n * along_n)

    @property
    def phase_shares(self) -> tuple[int, ...]:
        """Blocks that share a tile of each phase: a power of 2, so that none has more steps than of the first phase.

        A cluster takes so many tiles that its blocks all have one.
        """
        most, *_ = taps = self.product.phase_taps
        return tuple(1 << (ceil_div(self.cluster[2] * count, most) - 1).bit_length() for count in taps)

    @property
    def phase_items(self) -> tuple[int, ...]:
        """Parts of tiles of each phase that clusters compute, one after another."""
        tiles = math.prod(self.tiles) * self.product.problem.groups * self.splits
        return tuple(ceil_div(tiles, self.cluster[2] // shares) for shares in self.phase_shares)

    @property
    def items(self) -> int:
        """Parts of tiles that clusters compute."""
        return sum(self.phase_items)

    @property
    def threads(self) -> int:
        """Of a block: those that multiply, and two warps that copy."""
        return 128 * self.consumers + 64

    @property
    def stage_bytes(self) -> int:
        """Of both operands of a step."""
        return self.product.element_bytes * (self.tile_m + self.tile_n) * self.tile_k

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring of stages, and two blocks of each consumer on their way out."""
        ring = self.stages * self.stage_bytes
        if self.cluster[2] > 1:  # sums take the place of the ring
            return _ALIGNMENT_BYTES + max(ring, 4 * self.tile_m * (self.tile_n + 8))
        columns = ROW_BLOCK if self.swapped else self.width
        return _ALIGNMENT_BYTES + ring + 2 * self.consumers * self.product.element_bytes * ROW_BLOCK * columns

    def is_valid(self, shared_bytes: int) -> bool:
        """Whether the kernel serves it on a multiprocessor with that much shared memory for a block."""
        return (
            self.may_be_valid
            and self._has_cluster()
            and self._is_divisible()
            and self.blocks * (self.shared_bytes + _ALIGNMENT_BYTES + _STATIC_BYTES) <= shared_bytes + _ALIGNMENT_BYTES
            and max(self.items * math.prod(self.cluster), self.steps * self.splits * self.cluster[2]) <= _MAX_INT
            and self.tiles[1] * self.tile_n * self.cluster[1] <= _MAX_INT + 1  # the columns beyond the last, too
        )

    @property
    def may_be_valid(self) -> bool:
        """Whether its tile is, however many stages and parts it has."""
        return (
            self._has_sums() and self._has_width() and self._has_depth() and self._is_swappable() and self._is_filled()
        )

    def _has_sums(self) -> bool:
        """Whether registers hold the sums, and boxes a tile's rows."""
        if self.row_blocks > self.consumers or self.tile_m > _MAX_BOX:
            return False
        registers = min(255, _REGISTERS // ceil_div(self.threads * self.blocks, 128) // 8 * 8)
        return self.row_blocks * self.tile_n // 2 <= min(128, registers - _OTHER_REGISTERS)

    def _has_width(self) -> bool:
        """Whether columns come in wide blocks, or lie apart in both operands, and swizzles begin where they must."""
        product = self.product
        if self.tile_n * product.element_bytes * self.tile_k % _ALIGNMENT_BYTES:
            return False
        is_deep = product.has_deep_filters and product.planes is Planes.NOWHERE and not self.swapped
        return is_deep or self.tile_n % (ROW_BLOCK // 2) == 0

    def _has_depth(self) -> bool:
        """Whether a step's depth is one that swizzles cover, and mostly within a group."""
        product = self.product
        depth_bytes = product.element_bytes * self.tile_k
        if product.is_weights:
            return depth_bytes == max(SPANS_BYTES)
        if depth_bytes > min(SPANS_BYTES) and self.tile_k >= 2 * product.depth:
            return False
        return product.keeps_to_groups or product.depth % self.tile_k == 0

    def _is_swappable(self) -> bool:
        """Whether rows and columns are as the problem has them, or may be exchanged."""
        if not self.swapped:
            return True
        alone = self.row_blocks == self.splits == math.prod(self.cluster) == 1
        if self.product.planes is not Planes.NOWHERE or self.product.is_strided:
            return False
        return alone and not self.product.is_weights and self.product.element_bytes == 2 and self.tile_n % 64 == 0

    def _has_cluster(self) -> bool:
        """Whether blocks can share what a cluster has in common, in whole repetitions of a swizzle."""
        along_m, along_n, shares = self.cluster
        if math.prod(self.cluster) == 1:
            return True
        if shares > 1:
            return self.splits == 1 and self.steps >= 2 * shares
        if self.product.planes is not Planes.NOWHERE or self.product.is_strided:
            return False
        if along_m > 1 and self.rows <= self.tile_m * (along_m - 1):
            return False
        if along_n > 1 and self.all_columns <= self.tile_n * (along_n - 1):
            return False
        length = (self.tile_n if self.product.has_deep_filters else self.tile_k) // along_m
        return length % 8 == 0 and (not self.product.is_weights or self.tile_k // along_n % 8 == 0)

    def _is_divisible(self) -> bool:
        """Whether the depth has that many parts, and each can be kept."""
        problem = self.product.problem
        if self.splits == 1:
            # Stores are cut off at the tensor's end, not at a group's.
            has_rows_of_groups = self.product.is_weights or self.product.has_planes_of_pixels
            across = problem.groups > 1 and has_rows_of_groups and self.rows % ROW_BLOCK
            return not across or self.cluster[2] > 1
        size = problem.output.size
        if min(self.phase_steps) < self.splits:
            return False
        return self.steps >= 2 * self.splits and 4 * self.splits * size <= _MAX_PARTS_BYTES and size % 4 == 0

    def _is_filled(self) -> bool:
        """Whether a tile is not mostly empty."""
        return self.tile_n < 2 * max(32, self.all_columns) and self.tile_m < 2 * max(ROW_BLOCK, self.rows)
