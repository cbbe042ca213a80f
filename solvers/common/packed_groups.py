"""How grouped convolutions with few channels a group are cut for tensor cores, and which of them the kernels serve.

Groups are taken together until their channels make whole 8 x 8 blocks. The same arithmetic as
kernels_src/grouped/nhwc.cu and common/shared_pixels.cuh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from miofind.core.problem import Direction, ProblemDescription, TensorDescriptor
from miofind.solver.columns import chosen, larger, smaller
from miofind.solver.solver import APPLICABLE, Applicability, first_refusal
from miofind.solver.steps import Config
from miofind.solvers.common.correlation import ceil_div, round_up
from miofind.solvers.common.limits import refuse_mixed, refuse_oversized

SOURCE = {Direction.FORWARD: "x", Direction.BACKWARD_DATA: "y"}
"""The tensor that is read beside the filter."""

_FEWEST, _MOST = 2, 64  # channels of a group
_MOST_TAPS, _MOST_STRIDE = 31, 8
_MAX_SIZE = 2**20
_BLOCK = 8


def refuse_groups(problem: ProblemDescription) -> Applicability:
    """Why the kernels cannot compute a problem, whatever its direction and sizes of tiles; APPLICABLE if they can."""
    if problem.groups == 1:
        return Applicability("serves several groups")
    c, k = problem.c // problem.groups, problem.k // problem.groups
    if not _FEWEST <= min(c, k) <= max(c, k) <= _MOST:
        return Applicability(f"serves {_FEWEST} to {_MOST} channels a group on both sides, not {c} and {k}")
    if (answer := first_refusal(refuse_mixed(problem), refuse_oversized(problem))).refused:
        return answer
    if problem.c % _BLOCK or problem.k % _BLOCK:
        return Applicability(f"moves {_BLOCK} channels at once: c={problem.c} or k={problem.k} is no multiple")
    conv = problem.conv
    if max(problem.filter) > _MOST_TAPS or max(conv.stride) > _MOST_STRIDE:
        return Applicability(f"serves filters up to {_MOST_TAPS} and strides up to {_MOST_STRIDE}")
    reach = (*conv.pad_before, *conv.pad_after, *conv.stride, *conv.dilation)
    if max(reach) * max(problem.filter) > _MAX_SIZE:
        return Applicability(f"reaches at most {_MAX_SIZE} pixels: padding, stride, dilation or filter is too large")
    return APPLICABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGroups:
    """How groups fill matrices.

    Attributes:
        groups: that are taken together for multiples of 8 channels on both sides.
        c, k: their channels.
    """

    groups: int
    c: int
    k: int

    @staticmethod
    @functools.lru_cache(maxsize=256)  # asked for each configuration of a problem
    def of(problem: ProblemDescription) -> PackedGroups:
        c, k = problem.c // problem.groups, problem.k // problem.groups
        groups = _BLOCK // math.gcd(_BLOCK, c, k)
        return PackedGroups(groups=groups, c=groups * c, k=groups * k)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAxis:
    """How outputs of one spatial dimension meet inputs: output step * i + phase meets input i * stride + offset.

    Forward there is one phase, and an offset a tap. Backward data has a phase for each residue of dx's coordinates
    modulo the convolution's stride, met by some of the taps, and the stride is 1.

    Attributes:
        outputs: of a phase, at most.
        phases: as many as the step.
        stride: of inputs.
        first, reach: least offset of all phases, and how much larger the largest is.
        taps: of the filter; each is met in one phase.
    """

    outputs: int
    phases: int
    stride: int
    first: int
    reach: int
    taps: int

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(problem: ProblemDescription, dim: int) -> GroupedAxis:
        """That of a problem of two dimensions, forward or backward data."""
        conv, taps = problem.conv, range(problem.filter[dim])
        stride, dilation, pad = conv.stride[dim], conv.dilation[dim], conv.pad_before[dim]
        if problem.direction is Direction.FORWARD:
            offsets = [tap * dilation - pad for tap in taps]
            outputs, phases = problem.out_spatial[dim], 1
        else:
            reached = [phase + pad - tap * dilation for tap in taps for phase in range(stride)]
            offsets = [at // stride for at in reached if at % stride == 0]
            outputs, phases, stride = ceil_div(problem.spatial[dim], stride), stride, 1
        return GroupedAxis(
            outputs=outputs,
            phases=phases,
            stride=stride,
            first=min(offsets),
            reach=max(offsets) - min(offsets),
            taps=len(taps),
        )


def odd_words(size: int) -> int:
    """Bytes rounded up to an odd number of 16-byte words, so that 8 neighbours meet all banks."""
    return 16 * (ceil_div(size, 16) | 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedTiling:
    """A configuration applied to a problem, forward or backward data: what the kernel's constants come to.

    Attributes:
        axes: rows and columns.
        in_blocks, out_blocks: 8 x 8 blocks across a unit's summed and resulting channels.
        is_dense: whether all blocks of a unit hold filters.
        rows, row_groups, images, units: as configured.
        filter_bytes: of staged filters.
        columns, span: outputs of a tile's rows, in runs of 8, and those that exist.
        fragments: pairs of runs of 8 outputs.
        patch: input rows and columns staged, of an image.
        shares: warps that share the results of a unit.
        is_whole: whether a block has whole images.
        stages: patches staged at once.
        threads: of a block.
        shared_bytes: of a block.
        tiles: across channels, rows, columns and images.
    """

    axes: tuple[GroupedAxis, GroupedAxis]
    in_blocks: int
    out_blocks: int
    is_dense: bool
    rows: int
    row_groups: int
    images: int
    units: int
    filter_bytes: int
    columns: int
    span: int
    fragments: int
    patch: tuple[int, int]
    shares: int
    is_whole: bool
    stages: int
    threads: int
    shared_bytes: int
    tiles: tuple[int, int, int, int]

    @property
    def blocks(self) -> int:
        """In the grid."""
        return math.prod(self.tiles)

    @property
    def spatial_tiles(self) -> int:
        """Of all rows, columns and images."""
        return math.prod(self.tiles[1:])

    @property
    def sums(self) -> int:
        """Registers of a thread that hold sums."""
        return 4 * self.axes[0].phases * self.rows * self.out_blocks // self.shares

    @staticmethod
    def of(problem: ProblemDescription, config: Config) -> GroupedTiling:
        planar = problem.lifted(2)
        height, width = axes = (GroupedAxis.of(planar, 0), GroupedAxis.of(planar, 1))
        packs, units, images = PackedGroups.of(problem), config["units"], config["images"]
        unit_in, unit_out = unit_channels(problem)
        columns = smaller(config["columns"], round_up(width.outputs, 8))
        span, tile_h = smaller(columns, width.outputs), config["rows"] * config["row_groups"]
        fragments = ceil_div(columns // 8 * config["row_groups"] * images, 2)
        patch_h = (tile_h - 1) * height.stride + height.reach + 1
        patch_w = (span - 1) * width.stride + width.reach + 1
        slots = ceil_div(patch_w, width.stride) * width.stride
        patch_bytes = images * patch_h * slots * odd_words(2 * units * unit_in)
        unit_k = unit_in if problem.direction is Direction.BACKWARD_DATA else unit_out
        filter_bytes = units * unit_k * odd_words(math.prod(planar.filter) * 2 * packs.c)
        stages, tile_rows = config["stages"], tile_h * height.phases
        staged = stages * patch_bytes + filter_bytes
        is_whole = (columns >= width.outputs) & (tile_h >= height.outputs)
        if planar.x.layout.channels_last:
            results = images * tile_rows * span * odd_words(2 * units * unit_out)
        else:
            results = 2 * images * units * unit_out * (round_up(tile_rows * span * width.phases - 8, 16) + 8)
            staged += raw_bytes(
                planar.tensor(SOURCE[problem.direction]), (patch_h, patch_w), width.first, whole=is_whole
            ) * (images * units * unit_in)
            staged += 2 * units * unit_k * math.prod(planar.w.shape[1:])
        return GroupedTiling(
            axes=axes,
            in_blocks=unit_in // 8,
            out_blocks=unit_out // 8,
            is_dense=is_dense(problem),
            rows=config["rows"],
            row_groups=config["row_groups"],
            images=images,
            units=units,
            filter_bytes=filter_bytes,
            columns=columns,
            span=span,
            fragments=fragments,
            patch=(patch_h, patch_w),
            shares=config["shares"],
            is_whole=is_whole,
            stages=stages,
            threads=32 * fragments * units * config["shares"],
            shared_bytes=chosen((width.phases == 1) & (stages == 1), larger(staged, results), staged + results),
            tiles=(
                ceil_div(units_of(problem), units),
                ceil_div(height.outputs, tile_h),
                ceil_div(width.outputs, columns),
                ceil_div(problem.n, images),
            ),
        )


def is_dense(problem: ProblemDescription) -> bool:
    """Whether all blocks of a unit hold filters."""
    return PackedGroups.of(problem).groups == 1 and packed_groups_of_unit(problem) == 1


def packed_groups_of_unit(problem: ProblemDescription) -> int:
    """PackedGroups that are taken together so that their summed channels are a multiple of 16."""
    packs = PackedGroups.of(problem)
    return 2 if (packs.k if problem.direction is Direction.BACKWARD_DATA else packs.c) % 16 else 1


def unit_channels(problem: ProblemDescription) -> tuple[int, int]:
    """Channels of a unit that are summed and that result."""
    packs, count = PackedGroups.of(problem), packed_groups_of_unit(problem)
    c, k = count * packs.c, count * packs.k
    return (k, c) if problem.direction is Direction.BACKWARD_DATA else (c, k)


def units_of(problem: ProblemDescription) -> int:
    """Units that a problem's groups make, the last perhaps not full."""
    return ceil_div(problem.groups, PackedGroups.of(problem).groups * packed_groups_of_unit(problem))


def packed_groups_of_aligned_unit(problem: ProblemDescription) -> int:
    """PackedGroups that are taken together so that their channels and their filters are multiples of 16."""
    packs = PackedGroups.of(problem)
    return 2 if packs.c % 16 or packs.k % 16 else 1


def aligned_units_of(problem: ProblemDescription) -> int:
    """Aligned units that a problem's groups make, the last perhaps not full."""
    return ceil_div(problem.groups, PackedGroups.of(problem).groups * packed_groups_of_aligned_unit(problem))


def raw_bytes(tensor: TensorDescriptor, patch: tuple[int, int], first_column: int, *, whole: bool) -> int:
    """Bytes of one channel of an image on its way to a patch of so many rows and columns, as `StagedNchw` has them."""
    of_patch = odd_words(2 * patch[0] * round_up(first_column % 8 + patch[1], 8))
    return chosen(whole, 2 * math.prod(tensor.shape[2:]), of_patch)


def least_ample(menu: Sequence[int], needed: int) -> float:
    """The smallest choice that does; infinite where none does."""
    return min((other for other in menu if needed <= other), default=math.inf)
