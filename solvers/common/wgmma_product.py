"""A convolution as the matrix product that kernels_src/implicit_gemm/wgmma.cu computes, the same however it is cut.

Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from miofind.core.cached import cached_property
from miofind.core.problem import Direction, ProblemDescription
from miofind.solvers.common.correlation import ceil_div

SWIZZLES_BYTES = (128, 64, 32)
"""Widths of swizzles."""


class NchwTensors(Enum):
    """Which tensors of pixels are NCHW: none, the output, A alone (y of backward weights), or all.

    The values are those that the kernel's define NCHW takes.
    """

    NONE = "NCHW_NONE"
    OUTPUT = "NCHW_OUTPUT"
    A = "NCHW_A"
    ALL = "NCHW_ALL"

    @staticmethod
    def of(problem: ProblemDescription) -> NchwTensors | None:
        """Those of a problem's layouts; None for other mixtures, which are not served."""
        if not problem.w.layout.channels_last and math.prod(problem.filter) > 1:
            return None
        pixels, other = ("y", "x") if problem.direction is Direction.BACKWARD_DATA else ("x", "y")
        last = {name: problem.tensor(name).layout.channels_last for name in (pixels, other)}
        if last[pixels] == last[other]:
            return NchwTensors.NONE if last[pixels] else NchwTensors.ALL
        if last[other]:
            return None
        return NchwTensors.A if problem.direction is Direction.BACKWARD_WEIGHTS else NchwTensors.OUTPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseAxis:
    """The sub-filter of one residue class along one axis: pixels of dx that are equal modulo the stride meet it.

    Directions other than strided backward data have one class with the whole filter.

    Attributes:
        at: the residue: the first pixel of the class.
        first: first tap of the sub-filter. Its taps are `WgmmaProduct.tap_strides` apart in the filter.
        taps: number of its taps.
        offset: from the first pixel of dy, or x, that the walk visits to the one that the first tap meets. Each further
            tap meets a pixel `WgmmaProduct.dilation` further on; for backward data, further back.
    """

    at: int
    first: int
    taps: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A residue class along all axes: pixels of dx that meet the same sub-filter. Other products have one phase.

    Attributes:
        row, column: indices into `WgmmaProduct.phase_axes`.
        plane: index into `WgmmaProduct.depth_axes`.
        taps: taps of the sub-filter, along K; 1 for backward weights.
    """

    row: int
    column: int
    taps: int
    plane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKind:
    """All of a product that a tile depends on, however many of them the product has; few for all products.

    Attributes:
        element_bytes, nchw, is_weights, is_strided, has_k_major_filters: as of a `WgmmaProduct`.
        widest_n: columns of a block of N at most: a swizzle's, for backward weights the narrowest's that holds N.
    """

    element_bytes: int
    nchw: NchwTensors
    is_weights: bool
    is_strided: bool
    has_k_major_filters: bool
    widest_n: int


@dataclass(frozen=True, kw_only=True)
class WgmmaProduct:
    """A problem as a matrix product, the same for all configurations, each of which asks for what follows from it.

    Attributes:
        problem: lifted to two spatial dimensions; or of three, a volume.
        size_m, size_n: M and N of one group. For backward weights N is of one tap. For strided backward data M is of
            one phase: all phases walk as many pixels, some beyond the tensor.
        size_k: K: channels or filters of one tap, or output pixels.
        taps: of the filter: rows of taps, of a volume those of all planes, and taps of a row.
        pixels: name of the tensor that TMA loads pixel by pixel (im2col).
        walked: height and width of the pixels that the walk visits in one image, of a volume in one plane.
        low, high: their corners, by spatial dimension.
        nchw: which tensors are NCHW; if any is, pixels are N, but for backward weights.
        phase_axes: the sub-filters along both axes, of a volume in a plane.
        depth_axes: those along the depth; images have one of one tap.
        phases: one for each combination of them, most taps first.
        tap_strides: between the taps of a sub-filter, by spatial dimension.
        dilation: between the pixels that neighbouring taps of a sub-filter meet, by spatial dimension.
    """

    problem: ProblemDescription
    size_m: int
    size_n: int
    size_k: int
    taps: tuple[int, int]
    pixels: str
    walked: tuple[int, int]
    low: tuple[int, ...]
    high: tuple[int, ...]
    nchw: NchwTensors
    phase_axes: tuple[tuple[PhaseAxis, ...], tuple[PhaseAxis, ...]]
    depth_axes: tuple[PhaseAxis, ...]
    phases: tuple[Phase, ...]
    tap_strides: tuple[int, ...]
    dilation: tuple[int, ...]

    @staticmethod
    def of(problem: ProblemDescription) -> WgmmaProduct:
        """The product of a problem; the last one asked for is kept."""
        return _product(problem)

    @cached_property
    def kind(self) -> ProductKind:
        """What tiles depend on."""
        widths = [swizzle // self.element_bytes for swizzle in SWIZZLES_BYTES]
        fitting = [width for width in widths if self.is_weights and width >= self.size_n]
        return ProductKind(
            element_bytes=self.element_bytes,
            nchw=self.nchw,
            is_weights=self.is_weights,
            is_strided=self.is_strided,
            has_k_major_filters=self.has_k_major_filters,
            widest_n=min(fitting, default=max(widths)),
        )

    @cached_property
    def is_weights(self) -> bool:
        """Whether the problem is backward weights."""
        return self.problem.direction is Direction.BACKWARD_WEIGHTS

    @cached_property
    def is_volume(self) -> bool:
        """Whether the problem has three spatial dimensions."""
        return self.problem.spatial_dims == 3

    @cached_property
    def is_pointwise(self) -> bool:
        """Whether each output meets one pixel, in order: one tap, stride 1, no padding."""
        conv = self.problem.conv
        return math.prod(self.taps) == max(conv.stride) == 1 and not any((*conv.pad_before, *conv.pad_after))

    @cached_property
    def is_strided(self) -> bool:
        """Whether it is strided backward data, cut into phases."""
        return len(self.phases) > 1

    @cached_property
    def phase_taps(self) -> tuple[int, ...]:
        """Taps of each phase that has any; the others' pixels are zeros."""
        return tuple(phase.taps for phase in self.phases if phase.taps)

    @cached_property
    def keeps_to_groups(self) -> bool:
        """Whether loads beyond the end of a group's K give zeros instead of the next group's elements.

        Boxes along K end with the group. Pixels in im2col mode, and NCHW tensors, run on into the next group.
        """
        if self.problem.groups == 1:
            return True
        return self.is_pointwise and self.has_k_major_filters and self.nchw is not NchwTensors.ALL

    @cached_property
    def has_nchw_n(self) -> bool:
        """Whether N is pixels of an NCHW tensor."""
        return self.nchw is NchwTensors.ALL and not self.is_weights

    @cached_property
    def has_nchw_k(self) -> bool:
        """Whether K is pixels of NCHW tensors."""
        return self.nchw is NchwTensors.ALL and self.is_weights

    @cached_property
    def image(self) -> int:
        """Pixels of an image of y, or of x for backward data."""
        problem = self.problem
        of = problem.spatial if problem.direction is Direction.BACKWARD_DATA else problem.out_spatial
        return math.prod(of)

    @cached_property
    def element_bytes(self) -> int:
        """Of x, w and y alike."""
        return self.problem.x.dtype.itemsize

    @cached_property
    def transposes_filters(self) -> bool:
        """Whether the filter is transposed first: wgmma takes TF32 operands K-major only."""
        return self.problem.direction is Direction.BACKWARD_DATA and self.element_bytes == 4

    @cached_property
    def has_k_major_filters(self) -> bool:
        """Whether the filter is K-major as the kernel takes it."""
        return self.problem.direction is Direction.FORWARD or self.transposes_filters

    @cached_property
    def channels(self) -> int:
        """K of one tap, but for backward weights: channels of one group, for backward data filters."""
        of = self.problem.k if self.problem.direction is Direction.BACKWARD_DATA else self.problem.c
        return of // self.problem.groups


@functools.lru_cache(maxsize=1)
def _product(problem: ProblemDescription) -> WgmmaProduct:
    lifted = problem.lifted(max(2, problem.spatial_dims))
    conv, axes = lifted.conv, range(lifted.spatial_dims)
    c, k = lifted.c // lifted.groups, lifted.k // lifted.groups
    taps = (math.prod(lifted.filter[:-1]), lifted.filter[-1])
    outputs = math.prod(lifted.out_spatial) * lifted.n
    nchw = NchwTensors.of(lifted) or NchwTensors.NONE
    tap_strides, dilation = (1,) * lifted.spatial_dims, conv.dilation
    phase_axes = [[PhaseAxis(at=0, first=0, taps=count, offset=0)] for count in lifted.filter]
    if lifted.direction is Direction.BACKWARD_DATA:
        steps = [math.gcd(conv.stride[i], conv.dilation[i]) for i in axes]
        tap_strides = tuple(conv.stride[i] // steps[i] for i in axes)
        dilation = tuple(conv.dilation[i] // steps[i] for i in axes)
        found = [_phase_axes(lifted, axis) for axis in axes]
        low = tuple(min(one.offset - (one.taps - 1) * dilation[i] for one in found[i] if one.taps) for i in axes)
        phase_axes = [[replace(one, offset=one.offset - low[i] if one.taps else 0) for one in found[i]] for i in axes]
        visited = tuple(ceil_div(lifted.spatial[i], conv.stride[i]) for i in axes)
        high = tuple(low[i] + visited[i] - lifted.out_spatial[i] for i in axes)
        size_m, size_n, size_k, pixels = math.prod(visited) * lifted.n, c, k, "y"
    else:
        low = tuple(-conv.pad_before[i] for i in axes)
        high = tuple(conv.pad_after[i] - (lifted.filter[i] - 1) * conv.dilation[i] for i in axes)
        pixels, visited = "x", lifted.out_spatial
        forward = lifted.direction is Direction.FORWARD
        size_m, size_n, size_k = (outputs, k, c) if forward else (k, c, outputs)
    if nchw is not NchwTensors.NONE and lifted.direction is not Direction.BACKWARD_WEIGHTS:
        size_m, size_n = size_n, size_m
    *depths, heights, widths = map(tuple, phase_axes)
    depth_axes = depths[0] if depths else (PhaseAxis(at=0, first=0, taps=1, offset=0),)
    return WgmmaProduct(
        problem=lifted,
        size_m=size_m,
        size_n=size_n,
        size_k=size_k,
        taps=taps,
        pixels=pixels,
        walked=(visited[-2], visited[-1]),
        low=low,
        high=high,
        nchw=nchw,
        phase_axes=(heights, widths),
        depth_axes=depth_axes,
        phases=_phases(lifted, depth_axes, heights, widths),
        tap_strides=tap_strides,
        dilation=dilation,
    )


def _phase_axes(problem: ProblemDescription, axis: int) -> list[PhaseAxis]:
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
        found.append(PhaseAxis(at=at, first=first if taps else 0, taps=taps, offset=offset))
    return found


def _phases(
    problem: ProblemDescription, depths: Sequence[PhaseAxis], heights: Sequence[PhaseAxis], widths: Sequence[PhaseAxis]
) -> tuple[Phase, ...]:
    if problem.direction is Direction.BACKWARD_WEIGHTS:
        return (Phase(row=0, column=0, taps=1),)
    found = [
        Phase(plane=h, row=i, column=j, taps=depth.taps * row.taps * column.taps)
        for h, depth in enumerate(depths)
        for i, row in enumerate(heights)
        for j, column in enumerate(widths)
    ]
    return tuple(sorted(found, key=lambda phase: -phase.taps))
