"""A convolution as the matrix product that kernels_src/implicit_gemm/wgmma.cu computes, the same however it is cut.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from miofind.core.problem import Direction, ProblemDescription
from miofind.solvers.common.correlation import ceil_div


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
