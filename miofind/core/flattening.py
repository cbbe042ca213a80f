"""Volumes that are images: problems of three spatial dimensions that need two.

Networks of video are full of them: factorized filters (1x3x3 and 3x1x1 of R(2+1)D and S3D, 1x1x1 of bottlenecks), and
volumes of one slice. As images they have all solvers of images, and share what was measured of these.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from miofind.core.problem import ProblemDescription
from miofind.core.tensor import MAX_DIMENSION, Layout, TensorDescriptor


@functools.lru_cache(maxsize=256)
def flattened(problem: ProblemDescription) -> ProblemDescription:
    """A volume's problem as one of images: see `ProblemDescription.flattened`."""
    conv = problem.conv
    axes = [
        _Axis(*numbers)
        for numbers in zip(
            problem.spatial, problem.filter, conv.stride, conv.dilation, conv.pad_before, conv.pad_after, strict=True
        )
    ]
    depth, height, width = axes
    if (first := depth.merged(height)) is not None:
        return _of_images(problem, (first, width), 1)
    if (second := height.merged(width)) is not None:
        return _of_images(problem, (depth, second), 1)
    if depth.is_untouched and _has_slices(problem) and problem.n * depth.size <= MAX_DIMENSION:
        return _of_images(problem, (height, width), depth.size)
    return problem


def _has_slices(problem: ProblemDescription) -> bool:
    """Whether slices of volumes lie in memory as images do, and no row of a channel bias is of a whole volume."""
    return problem.x.layout.channels_last and problem.y.layout.channels_last and not problem.epilogue.channel_bias


class _Axis(NamedTuple):
    """What of a convolution is along one spatial axis."""

    size: int
    taps: int
    stride: int
    dilation: int
    pad_before: int
    pad_after: int

    @property
    def is_pointwise(self) -> bool:
        """Whether each output is of one input, and none of padding."""
        return self.taps == 1 and self.pad_before == self.pad_after == 0

    @property
    def is_untouched(self) -> bool:
        """Whether outputs are where inputs are."""
        return self.is_pointwise and self.stride == 1

    def merged(self, following: _Axis) -> _Axis | None:
        """This axis and the following one as one; None where they are not."""
        for one, other in ((self, following), (following, self)):
            if one.size == 1 and one.is_pointwise:
                return other
        size = self.size * following.size
        if self.is_untouched and following.is_untouched and size <= MAX_DIMENSION:
            return self._replace(size=size)
        return None


def _of_images(problem: ProblemDescription, axes: Sequence[_Axis], slices: int) -> ProblemDescription:
    """A volume's problem with two spatial axes, and as many images of each volume."""

    def layout(tensor: TensorDescriptor) -> Layout:
        return Layout.of(len(axes), channels_last=tensor.layout.channels_last)

    tensors = {"x": problem.x, "w": problem.w, "y": problem.y}
    return ProblemDescription.convolution(
        x=(problem.n * slices, problem.c, *(axis.size for axis in axes)),
        w=(*problem.w.shape[:2], *(axis.taps for axis in axes)),
        padding=tuple((axis.pad_before, axis.pad_after) for axis in axes),
        stride=tuple(axis.stride for axis in axes),
        dilation=tuple(axis.dilation for axis in axes),
        groups=problem.groups,
        direction=problem.direction,
        dtype={name: tensor.dtype for name, tensor in tensors.items()},
        layout={name: layout(tensor) for name, tensor in tensors.items()},
        math=problem.math,
        epilogue=problem.epilogue,
    )
