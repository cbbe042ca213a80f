"""Forward and backward data as correlations: out[k, i] = sum over (c, t) of in[c, i*s - pad + t*d] * w[k, c, t].

Backward data correlates dy with the flipped filter, once for each residue of the input coordinates modulo the stride.
Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

from miofind.core.problem import Direction, ProblemDescription


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The least multiple of b that is at least a."""
    return ceil_div(a, b) * b


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One spatial dimension of a correlation: output i reads inputs i*stride - pad + t*dilation.

    Attributes:
        size, outputs, taps: input size, outputs computed, filter taps; no taps means that the outputs are zero.
        pad: may be negative.
        first_tap, tap_step: tap t is tap first_tap + t * tap_step of the problem's filter.
        first_output, output_step: output i is number first_output + i * output_step of the output tensor.
    """

    size: int
    outputs: int
    taps: int
    pad: int
    stride: int
    dilation: int
    first_tap: int = 0
    tap_step: int = 1
    first_output: int = 0
    output_step: int = 1


def forward_axis(problem: ProblemDescription, dim: int) -> Axis:
    """One spatial dimension of the forward correlation."""
    conv = problem.conv
    return Axis(
        size=problem.spatial[dim],
        outputs=problem.out_spatial[dim],
        taps=problem.filter[dim],
        pad=conv.pad_before[dim],
        stride=conv.stride[dim],
        dilation=conv.dilation[dim],
    )


def backward_axes(problem: ProblemDescription, dim: int) -> tuple[Axis, ...]:
    """One axis for each residue of (input coordinate + pad) modulo the stride that has inputs."""
    axes = (_residue_axis(problem, dim, residue) for residue in range(problem.conv.stride[dim]))
    return tuple(axis for axis in axes if axis.outputs > 0)


def _residue_axis(problem: ProblemDescription, dim: int, residue: int) -> Axis:
    """The correlation over dy that gives dx at coordinates u - pad, u = residue modulo stride.

    Tap t joins u and output o where u = o * stride + t * dilation. Those t recur every stride / gcd(stride, dilation);
    from one to the next o falls by dilation / gcd. Counted backwards they make a filter of stride 1.
    """
    conv, size, filter_size = problem.conv, problem.spatial[dim], problem.filter[dim]
    stride, dilation, pad = conv.stride[dim], conv.dilation[dim], conv.pad_before[dim]
    gcd = math.gcd(stride, dilation)
    first = (residue - pad) % stride
    step = stride // gcd
    tap = next((t for t in range(min(step, filter_size)) if (residue - t * dilation) % stride == 0), None)
    count = 0 if tap is None else ceil_div(filter_size - tap, step)
    start = (first + pad - (tap or 0) * dilation) // stride
    return Axis(
        size=problem.out_spatial[dim],
        outputs=ceil_div(size - first, stride),
        taps=count,
        pad=(count - 1) * (dilation // gcd) - start,
        stride=1,
        dilation=dilation // gcd,
        first_tap=(tap or 0) + step * (count - 1),
        tap_step=-step,
        first_output=first,
        output_step=stride,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """What one launch computes: `source` correlated with w into `target`, each group for itself.

    Attributes:
        in_channels, out_channels: of one group.
        flipped: whether the source is dy, so that the filter's first dimension is summed over.
    """

    problem: ProblemDescription
    in_channels: int
    out_channels: int
    axes: tuple[Axis, Axis]
    flipped: bool

    @property
    def is_empty(self) -> bool:
        """Whether no tap reaches the outputs, which are then zero."""
        return not all(axis.taps for axis in self.axes)

    @property
    def channels_last(self) -> bool:
        return self.problem.x.layout.channels_last


@functools.lru_cache(maxsize=64)  # a ranking asks for each of hundreds of configurations
def forward_axes(problem: ProblemDescription) -> tuple[Axis, Axis]:
    """Rows and columns of the forward correlation of a 1-D or 2-D problem."""
    planar = problem.lifted(2)
    return _flattened(problem, (forward_axis(planar, 0), forward_axis(planar, 1)))


@functools.lru_cache(maxsize=64)  # a search asks for each of thousands of configurations
def correlations(problem: ProblemDescription) -> tuple[Correlation, ...]:
    """The launches that compute a problem, 1-D or 2-D, forward or backward data."""
    planar = problem.lifted(2)
    c, k = problem.c // problem.groups, problem.k // problem.groups
    if problem.direction is Direction.FORWARD:
        axes = forward_axes(problem)
        return (Correlation(problem=planar, in_channels=c, out_channels=k, axes=axes, flipped=False),)
    pairs = itertools.product(backward_axes(planar, 0), backward_axes(planar, 1))
    return tuple(
        Correlation(problem=planar, in_channels=k, out_channels=c, axes=_flattened(problem, pair), flipped=True)
        for pair in pairs
    )


def _flattened(problem: ProblemDescription, axes: tuple[Axis, Axis]) -> tuple[Axis, Axis]:
    """The axes of one long row where the filter is an unpadded 1x1 of stride 1: it tiles better."""
    if not problem.is_1x1 or any(stride > 1 for stride in problem.conv.stride):
        return axes
    height, width = axes
    row = replace(height, size=1, outputs=1)
    return row, replace(width, size=height.size * width.size, outputs=height.outputs * width.outputs)
