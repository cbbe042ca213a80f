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

Strides = tuple[int, ...]


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
    """Where a or b lies: at `offset` + group * `group_stride` + the digits of both indices * their strides.

    Attributes:
        buffer: "x", "w" or "y".
        mn_strides: elements between neighbours along each digit of m (for a) or n (for b).
        k_strides: the same of k.
        offset, group_stride: in elements.
    """

    buffer: str
    mn_strides: Strides
    k_strides: Strides
    offset: int
    group_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where the output lies, as an `Operand`, by the digits of m and n."""

    buffer: str
    m_strides: Strides
    n_strides: Strides
    offset: int
    group_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Coordinates of the image, the innermost first: elements outside are zero.

    Attributes:
        of_a: whether a is the image, else b.
        first, extent: coordinate of digits 0, and the image's size.
        mn_strides, k_strides: how far coordinates advance along digits of m (n if b is the image) and of k.
        mn_axis, k_axis: the digits that hold coordinates, from there on.
    """

    of_a: bool
    first: tuple[int, ...]
    extent: tuple[int, ...]
    mn_strides: Strides
    k_strides: Strides
    mn_axis: int
    k_axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """What one launch computes, for each group.

    Attributes:
        m, n, k: the indices.
        a, b, out: the tensors.
        a_k_major, b_k_major: whether tiles have rows along k, else along m or n: along memory where that is one.
        window: None where no element lies outside the image.
    """

    m: Index
    n: Index
    k: Index
    a: Operand
    b: Operand
    out: Output
    a_k_major: bool
    b_k_major: bool
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


def _spatial(strides: Strides) -> Strides:
    """Strides along the spatial dimensions, the innermost first."""
    return strides[:1:-1]


def _scaled(strides: Strides, factors: Iterable[int]) -> Strides:
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
        mn_strides=(*_scaled(read, (axis.stride for axis in axes)), read[0]),
        k_strides=_tap_order(_scaled(read, (axis.dilation for axis in axes)), read[1], last),
        offset=sum(_scaled(read, (-axis.pad for axis in axes))),
        group_stride=inputs * read[1],
    )
    filters = Operand(
        buffer="w",
        mn_strides=(w_out,),
        k_strides=_tap_order(_scaled(w, (axis.tap_step for axis in axes)), w_in, last),
        offset=sum(_scaled(w, (axis.first_tap for axis in axes))) if all(taps) else 0,
        group_stride=k * w[0],
    )
    pixel_strides = (*_scaled(write, (axis.output_step for axis in axes)), write[0])
    return Product(
        m=pixels if last else channels,
        n=channels if last else pixels,
        k=Index(sizes=_tap_order(taps, inputs, last)),
        a=image if last else filters,
        b=filters if last else image,
        out=Output(
            buffer=target,
            m_strides=pixel_strides if last else (write[1],),
            n_strides=(write[1],) if last else pixel_strides,
            offset=sum(_scaled(write, (axis.first_output for axis in axes))),
            group_stride=outputs * write[1],
        ),
        a_k_major=last or not flipped,
        b_k_major=last and not flipped,
        window=_window(axes, of_a=last, mn_is_pixel=True, channels_last=last),
    )


def _weights(problem: ProblemDescription, axes: tuple[Axis, ...]) -> Product:
    """Output channels and taps, summed over pixels; axes are those of forward, the innermost first."""
    x, w, y = problem.x.strides, problem.w.strides, problem.y.strides
    c, k, last = problem.c // problem.groups, problem.k // problem.groups, problem.x.layout.channels_last
    return Product(
        m=Index(sizes=(k,)),
        n=Index(sizes=_tap_order(tuple(axis.taps for axis in axes), c, last)),
        k=Index(sizes=(*(axis.outputs for axis in axes), problem.n)),
        a=Operand(buffer="y", mn_strides=(y[1],), k_strides=(*_spatial(y), y[0]), offset=0, group_stride=k * y[1]),
        b=Operand(
            buffer="x",
            mn_strides=_tap_order(_scaled(x, (axis.dilation for axis in axes)), x[1], last),
            k_strides=(*_scaled(x, (axis.stride for axis in axes)), x[0]),
            offset=sum(_scaled(x, (-axis.pad for axis in axes))),
            group_stride=c * x[1],
        ),
        out=Output(
            buffer="w",
            m_strides=(w[0],),
            n_strides=_tap_order(_spatial(w), w[1], last),
            offset=0,
            group_stride=k * w[0],
        ),
        a_k_major=not last,
        b_k_major=not last,
        window=_window(axes, of_a=False, mn_is_pixel=False, channels_last=last),
    )


def _tap_order(taps: tuple[int, ...], channel: int, channels_last: bool) -> tuple[int, ...]:
    """Digits of a tap, the least first, in the order of memory."""
    return (channel, *taps) if channels_last else (*taps, channel)


def _window(axes: tuple[Axis, ...], *, of_a: bool, mn_is_pixel: bool, channels_last: bool) -> Window | None:
    """The window of axes, the innermost first, if anything can lie outside."""
    if all(_is_inside(axis) for axis in axes):
        return None
    strides, dilations = tuple(axis.stride for axis in axes), tuple(axis.dilation for axis in axes)
    tap_axis = int(channels_last)
    return Window(
        of_a=of_a,
        first=tuple(-axis.pad for axis in axes),
        extent=tuple(axis.size for axis in axes),
        mn_strides=strides if mn_is_pixel else dilations,
        k_strides=dilations if mn_is_pixel else strides,
        mn_axis=0 if mn_is_pixel else tap_axis,
        k_axis=tap_axis if mn_is_pixel else 0,
    )


def _is_inside(axis: Axis) -> bool:
    reach = (axis.outputs - 1) * axis.stride - axis.pad + (axis.taps - 1) * axis.dilation
    return axis.taps == 0 or (axis.pad <= 0 and reach < axis.size)


def _simplified(product: Product) -> Product:
    """The same with as few digits as possible; coordinates that a window checks keep theirs."""
    a, b, out, window = product.a, product.b, product.out, product.window
    m, of_m = product.m, (a.mn_strides, out.m_strides)
    n, of_n = product.n, (b.mn_strides, out.n_strides)
    k, of_k = product.k, (a.k_strides, b.k_strides)
    if window is None or not window.of_a:
        m, of_m = _merged(m, of_m)
    if window is None or window.of_a:
        n, of_n = _merged(n, of_n)
    if window is None:
        k, of_k = _merged(k, of_k)
    return replace(
        product,
        m=m,
        n=n,
        k=k,
        a=replace(a, mn_strides=of_m[0], k_strides=of_k[0]),
        b=replace(b, mn_strides=of_n[0], k_strides=of_k[1]),
        out=replace(out, m_strides=of_m[1], n_strides=of_n[1]),
    )


def _merged(index: Index, uses: tuple[Strides, Strides]) -> tuple[Index, tuple[Strides, Strides]]:
    """An index without digits of size 1, and with neighbours as one where every use's strides run on from one to the
    next."""
    sizes: list[int] = []
    strides: list[list[int]] = []
    for size, *at in zip(index.sizes, *uses, strict=True):
        if size == 1:
            continue
        if sizes and all(here == before * sizes[-1] for here, before in zip(at, strides[-1], strict=True)):
            sizes[-1] *= size
            continue
        sizes.append(size)
        strides.append(at)
    if not sizes:
        return Index(sizes=(1,)), ((1,), (1,))
    first, second = zip(*strides, strict=True)
    return Index(sizes=tuple(sizes)), (first, second)


def linear_stride(index: Index, strides: Strides) -> int | None:
    """Elements between neighbours along an index; None where they are not equally far apart."""
    first = after = None
    for size, stride in zip(index.sizes, strides, strict=True):
        if size == 1:
            continue
        if first is None:
            first = stride
        elif stride != after:
            return None
        after = size * stride
    return 1 if first is None else first


def vector_length(most: int, along: Index, strides: Strides, others: Iterable[int]) -> int:
    """The largest power of two up to `most` of neighbours along an index that lie side by side at a multiple of it.

    Args:
        most: a power of two.
        strides: of the tensor along the index.
        others: what else an offset is made of: strides of the other index, first element, stride of a group.
    """
    stride = linear_stride(along, strides)
    if (strides[0] if stride is None else stride) != 1:
        return 1
    if stride is not None:
        return math.gcd(most, along.count, *others)
    return math.gcd(most, along.sizes[0], *strides[1:], *others)


def run_length(most: int, along: Index, strides: Strides) -> int:
    """The largest power of two up to `most` into whose multiples equally far neighbours along an index divide."""
    return math.gcd(most, along.count if linear_stride(along, strides) is not None else along.sizes[0])


def used_strides(index: Index, strides: Strides) -> tuple[int, ...]:
    """Strides along digits that ever differ from 0."""
    return tuple(stride for size, stride in zip(index.sizes, strides, strict=True) if size != 1)
