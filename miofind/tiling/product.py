"""Convolutions as matrix products whose operands are gathered: out[m, n] = sum over k of a[m, k] * b[k, n].

An index is a number in mixed radix whose digits are coordinates of tensors, so that an element's offset is linear in
the digits of two indices: the host side of kernels_src/common/product.cuh. Pure arithmetic on shapes: knows nothing of
devices, kernels or solvers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from miofind.problem import Direction, ProblemDescription
from miofind.tiling.correlation import Axis, Correlation, correlations, forward_axes

Steps = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """One index of the product.

    Attributes:
        sizes: of the digits, the least first; with no digits there is one value, and a size of 0 means none.
    """

    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many values it has."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """How a tensor is reached from two indices: an offset is `first` + group * `group` + both indices' digits * steps.

    Attributes:
        buffer: "x", "w" or "y".
        outer: elements between neighbours along the index that is m or n.
        sum: the same along k; for the output, along n.
        first, group: in elements.
    """

    buffer: str
    outer: Steps
    sum: Steps
    first: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Coordinates of the image, width before height: elements outside are zero.

    Attributes:
        of_a: whether a is the image, else b.
        first, extent: coordinate of digits 0, and the image's size.
        outer, sum: steps along the digits of the outer index and of k.
        outer_axis, sum_axis: the digits that hold them, from there on.
    """

    of_a: bool
    first: Steps
    extent: Steps
    outer: Steps
    sum: Steps
    outer_axis: int
    sum_axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """What one launch computes, for each group.

    Attributes:
        m, n, k: the indices.
        a, b, out: the tensors; out's `outer` goes along m and its `sum` along n.
        a_sum_major, b_sum_major: whether neighbours in memory are neighbours along k.
        window: None where no element lies outside the image.
    """

    m: Index
    n: Index
    k: Index
    a: Operand
    b: Operand
    out: Operand
    a_sum_major: bool
    b_sum_major: bool
    window: Window | None


@functools.lru_cache(maxsize=64)  # a search asks for each of thousands of configurations
def products(problem: ProblemDescription) -> tuple[Product, ...]:
    """The launches that compute a 1-D or 2-D problem whose tensors have one layout."""
    if problem.direction is Direction.BACKWARD_WEIGHTS:
        return (_simplified(_weights(problem)),)
    return tuple(_simplified(_correlation(conv)) for conv in correlations(problem))


def _correlation(conv: Correlation) -> Product:
    """Pixels and output channels, summed over taps; pixels are m where channels are innermost, else n."""
    problem, (height, width) = conv.problem, conv.axes
    source, target = ("y", "x") if conv.flipped else ("x", "y")
    read, write, w = problem.tensor(source).strides, problem.tensor(target).strides, problem.w.strides
    w_in, w_out = (w[0], w[1]) if conv.flipped else (w[1], w[0])
    last = conv.channels_last
    pixels = Index(sizes=(width.outputs, height.outputs, problem.n))
    channels = Index(sizes=(conv.out_channels,))
    image = Operand(
        buffer=source,
        outer=(width.stride * read[3], height.stride * read[2], read[0]),
        sum=_tap_order((width.dilation * read[3], height.dilation * read[2]), read[1], last),
        first=-width.pad * read[3] - height.pad * read[2],
        group=conv.in_channels * read[1],
    )
    filters = Operand(
        buffer="w",
        outer=(w_out,),
        sum=_tap_order((width.tap_step * w[3], height.tap_step * w[2]), w_in, last),
        first=0 if conv.is_empty else width.first_tap * w[3] + height.first_tap * w[2],
        group=problem.w.shape[0] // problem.groups * w[0],
    )
    pixel_steps = (width.output_step * write[3], height.output_step * write[2], write[0])
    out_first = width.first_output * write[3] + height.first_output * write[2]
    # Of a flipped filter with several taps, taps are neighbours in memory if channels are outermost.
    filters_sum_major = not conv.flipped or (not last and height.taps * width.taps > 1)
    return Product(
        m=pixels if last else channels,
        n=channels if last else pixels,
        k=Index(sizes=_tap_order((width.taps, height.taps), conv.in_channels, last)),
        a=image if last else filters,
        b=filters if last else image,
        out=Operand(
            buffer=target,
            outer=pixel_steps if last else (write[1],),
            sum=(write[1],) if last else pixel_steps,
            first=out_first,
            group=conv.out_channels * write[1],
        ),
        a_sum_major=last or filters_sum_major,
        b_sum_major=filters_sum_major if last else False,
        window=_window((width, height), of_a=last, outer_is_pixel=True, channels_last=last),
    )


def _weights(problem: ProblemDescription) -> Product:
    """Output channels and taps, summed over pixels."""
    planar, (height, width) = problem.lifted(2), forward_axes(problem)
    x, w, y = planar.x.strides, planar.w.strides, planar.y.strides
    c, k, last = problem.c // problem.groups, problem.k // problem.groups, planar.x.layout.channels_last
    return Product(
        m=Index(sizes=(k,)),
        n=Index(sizes=_tap_order((width.taps, height.taps), c, last)),
        k=Index(sizes=(width.outputs, height.outputs, problem.n)),
        a=Operand(buffer="y", outer=(y[1],), sum=(y[3], y[2], y[0]), first=0, group=k * y[1]),
        b=Operand(
            buffer="x",
            outer=_tap_order((width.dilation * x[3], height.dilation * x[2]), x[1], last),
            sum=(width.stride * x[3], height.stride * x[2], x[0]),
            first=-width.pad * x[3] - height.pad * x[2],
            group=c * x[1],
        ),
        out=Operand(buffer="w", outer=(w[0],), sum=_tap_order((w[3], w[2]), w[1], last), first=0, group=k * w[0]),
        a_sum_major=not last,
        b_sum_major=not last,
        window=_window((width, height), of_a=False, outer_is_pixel=False, channels_last=last),
    )


def _tap_order(taps: Steps, channel: int, channels_last: bool) -> Steps:
    """Digits of a tap, the least first, in the order of memory."""
    return (channel, *taps) if channels_last else (*taps, channel)


def _window(axes: tuple[Axis, ...], *, of_a: bool, outer_is_pixel: bool, channels_last: bool) -> Window | None:
    """The window of axes, the innermost first, if anything can lie outside."""
    if all(_is_inside(axis) for axis in axes):
        return None
    strides, dilations = tuple(axis.stride for axis in axes), tuple(axis.dilation for axis in axes)
    tap_axis = int(channels_last)
    return Window(
        of_a=of_a,
        first=tuple(-axis.pad for axis in axes),
        extent=tuple(axis.size for axis in axes),
        outer=strides if outer_is_pixel else dilations,
        sum=dilations if outer_is_pixel else strides,
        outer_axis=0 if outer_is_pixel else tap_axis,
        sum_axis=tap_axis if outer_is_pixel else 0,
    )


def _is_inside(axis: Axis) -> bool:
    reach = (axis.outputs - 1) * axis.stride - axis.pad + (axis.taps - 1) * axis.dilation
    return axis.taps == 0 or (axis.pad <= 0 and reach < axis.size)


def _simplified(product: Product) -> Product:
    """The same with as few digits as possible; coordinates that a window checks keep theirs."""
    a, b, out, window = product.a, product.b, product.out, product.window
    m, n, k = product.m, product.n, product.k
    if window is None or not window.of_a:
        m, (a_m, out_m) = _merged(m, (a.outer, out.outer))
        a, out = replace(a, outer=a_m), replace(out, outer=out_m)
    if window is None or window.of_a:
        n, (b_n, out_n) = _merged(n, (b.outer, out.sum))
        b, out = replace(b, outer=b_n), replace(out, sum=out_n)
    if window is None:
        k, (a_k, b_k) = _merged(k, (a.sum, b.sum))
        a, b = replace(a, sum=a_k), replace(b, sum=b_k)
    return replace(product, m=m, n=n, k=k, a=a, b=b, out=out)


def _merged(index: Index, uses: tuple[Steps, ...]) -> tuple[Index, tuple[Steps, ...]]:
    """An index without digits of size 1, and with neighbours as one where every use's steps run on from one to the
    next."""
    sizes: list[int] = []
    steps: list[list[int]] = []
    for size, *at in zip(index.sizes, *uses, strict=True):
        if size == 1:
            continue
        if sizes and all(here == before * sizes[-1] for here, before in zip(at, steps[-1], strict=True)):
            sizes[-1] *= size
            continue
        sizes.append(size)
        steps.append(at)
    if not sizes:
        return Index(sizes=(1,)), tuple((1,) for _ in uses)
    return Index(sizes=tuple(sizes)), tuple(zip(*steps, strict=True))


def linear_step(index: Index, steps: Steps) -> int | None:
    """Elements between neighbours along an index; None where they are not equally far apart."""
    digits = [(size, step) for size, step in zip(index.sizes, steps, strict=True) if size != 1]
    if not digits:
        return 1
    if any(after[1] != size * step for (size, step), after in itertools.pairwise(digits)):
        return None
    return digits[0][1]


def vector_length(most: int, along: Index, steps: Steps, others: Iterable[int]) -> int:
    """The largest power of two up to `most` of neighbours along an index that lie side by side at a multiple of it.

    Args:
        most: a power of two.
        steps: of the tensor along the index.
        others: what else an offset is made of: steps of the other index, first element, step of a group.
    """
    step = linear_step(along, steps)
    if (steps[0] if step is None else step) != 1:
        return 1
    if step is not None:
        return math.gcd(most, along.count, *others)
    return math.gcd(most, along.sizes[0], *steps[1:], *others)


def used_steps(index: Index, steps: Steps) -> tuple[int, ...]:
    """Steps along digits that ever differ from 0."""
    return tuple(step for size, step in zip(index.sizes, steps, strict=True) if size != 1)
