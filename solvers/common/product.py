"""Convolutions as matrix products whose operands are gathered: out[m, n] = sum over k of a[m, k] * b[k, n].

An index is a number in mixed radix whose digits are coordinates of tensors, so that an element's offset is linear in
the digits of two indices: the host side of kernels_src/implicit_gemm/mma_operands.cuh. Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from miofind.core.problem import Direction, ProblemDescription
from miofind.solvers.common.correlation import Axis, backward_axes, forward_axis

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
    """Coordinates of the image, the innermost first: elements outside are zero.

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
        a_sum_major, b_sum_major: whether tiles have rows along k, else along m or n: along memory where that is one.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """Values of each index."""

    m: int
    n: int
    k: int


@functools.lru_cache(maxsize=64)
def largest(problem: ProblemDescription) -> Extents:
    """The most that a launch has, of each index."""
    launches = products(problem)
    return Extents(
        m=max(product.m.count for product in launches),
        n=max(product.n.count for product in launches),
        k=max(product.k.count for product in launches),
    )


@functools.lru_cache(maxsize=64)  # a search asks for each of thousands of configurations
def products(problem: ProblemDescription) -> tuple[Product, ...]:
    """The launches that compute a problem whose tensors have one layout."""
    dims = range(problem.spatial_dims)
    forward = tuple(forward_axis(problem, dim) for dim in reversed(dims))
    if problem.direction is Direction.BACKWARD_WEIGHTS:
        return (_simplified(_weights(problem, forward)),)
    if problem.direction is Direction.FORWARD:
        return (_simplified(_correlation(problem, forward)),)
    combinations = itertools.product(*(backward_axes(problem, dim) for dim in dims))
    return tuple(_simplified(_correlation(problem, axes[::-1])) for axes in combinations)


def _spatial(strides: Steps) -> Steps:
    """Strides along the spatial dimensions, the innermost first."""
    return strides[:1:-1]


def _scaled(strides: Steps, factors: Iterable[int]) -> Steps:
    return tuple(stride * factor for stride, factor in zip(_spatial(strides), factors, strict=True))


def _correlation(problem: ProblemDescription, axes: tuple[Axis, ...]) -> Product:
    """Pixels and output channels, summed over taps; pixels are m where channels are innermost, else n.

    Args:
        axes: the innermost first; of forward, or of one residue of backward data.
    """
    flipped = problem.direction is Direction.BACKWARD_DATA
    source, target = ("y", "x") if flipped else ("x", "y")
    read, write, w = problem.tensor(source).strides, problem.tensor(target).strides, problem.w.strides
    c, k = problem.c // problem.groups, problem.k // problem.groups
    (inputs, w_in), (outputs, w_out) = ((k, w[0]), (c, w[1])) if flipped else ((c, w[1]), (k, w[0]))
    last = problem.x.layout.channels_last
    taps = tuple(axis.taps for axis in axes)
    pixels = Index(sizes=(*(axis.outputs for axis in axes), problem.n))
    channels = Index(sizes=(outputs,))
    image = Operand(
        buffer=source,
        outer=(*_scaled(read, (axis.stride for axis in axes)), read[0]),
        sum=_tap_order(_scaled(read, (axis.dilation for axis in axes)), read[1], last),
        first=sum(_scaled(read, (-axis.pad for axis in axes))),
        group=inputs * read[1],
    )
    filters = Operand(
        buffer="w",
        outer=(w_out,),
        sum=_tap_order(_scaled(w, (axis.tap_step for axis in axes)), w_in, last),
        first=sum(_scaled(w, (axis.first_tap for axis in axes))) if all(taps) else 0,
        group=k * w[0],
    )
    pixel_steps = (*_scaled(write, (axis.output_step for axis in axes)), write[0])
    return Product(
        m=pixels if last else channels,
        n=channels if last else pixels,
        k=Index(sizes=_tap_order(taps, inputs, last)),
        a=image if last else filters,
        b=filters if last else image,
        out=Operand(
            buffer=target,
            outer=pixel_steps if last else (write[1],),
            sum=(write[1],) if last else pixel_steps,
            first=sum(_scaled(write, (axis.first_output for axis in axes))),
            group=outputs * write[1],
        ),
        a_sum_major=last or not flipped,
        b_sum_major=last and not flipped,
        window=_window(axes, of_a=last, outer_is_pixel=True, channels_last=last),
    )


def _weights(problem: ProblemDescription, axes: tuple[Axis, ...]) -> Product:
    """Output channels and taps, summed over pixels; axes are those of forward, the innermost first."""
    x, w, y = problem.x.strides, problem.w.strides, problem.y.strides
    c, k, last = problem.c // problem.groups, problem.k // problem.groups, problem.x.layout.channels_last
    return Product(
        m=Index(sizes=(k,)),
        n=Index(sizes=_tap_order(tuple(axis.taps for axis in axes), c, last)),
        k=Index(sizes=(*(axis.outputs for axis in axes), problem.n)),
        a=Operand(buffer="y", outer=(y[1],), sum=(*_spatial(y), y[0]), first=0, group=k * y[1]),
        b=Operand(
            buffer="x",
            outer=_tap_order(_scaled(x, (axis.dilation for axis in axes)), x[1], last),
            sum=(*_scaled(x, (axis.stride for axis in axes)), x[0]),
            first=sum(_scaled(x, (-axis.pad for axis in axes))),
            group=c * x[1],
        ),
        out=Operand(buffer="w", outer=(w[0],), sum=_tap_order(_spatial(w), w[1], last), first=0, group=k * w[0]),
        a_sum_major=not last,
        b_sum_major=not last,
        window=_window(axes, of_a=False, outer_is_pixel=False, channels_last=last),
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


def run_length(most: int, along: Index, steps: Steps) -> int:
    """The largest power of two up to `most` into whose multiples equally far neighbours along an index divide."""
    return math.gcd(most, along.count if linear_step(along, steps) is not None else along.sizes[0])


def used_steps(index: Index, steps: Steps) -> tuple[int, ...]:
    """Steps along digits that ever differ from 0."""
    return tuple(step for size, step in zip(index.sizes, steps, strict=True) if size != 1)
