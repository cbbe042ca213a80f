"""How a problem is cut so that kernels that count in 32 bits reach each part: by images, or by rows of each image.

A part is a problem of its own over memory of the whole: its tensors begin at offsets. Rows are those of the outermost
spatial dimension. They are cut channels last, where rows of an image lie one after another. Pure arithmetic on shapes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from miofind.core.problem import Direction, ProblemDescription, TensorDescriptor
from miofind.solvers.common.correlation import ceil_div, round_up

MAX_PARTS = 1024
"""Parts of a problem at most: each is a launch."""

_ALIGNMENT_BYTES = 16  # of every part's tensors, as copies and vectors want it


@dataclass(frozen=True)
class Part:
    """Some of a problem's results.

    Attributes:
        problem: what computes them.
        offsets_bytes: by operand, where its tensor begins in the whole one; 0 of those that are not named.
    """

    problem: ProblemDescription
    offsets_bytes: Mapping[str, int]


class _Rows(NamedTuple):
    """Rows of an image that are computed, and those that they meet.

    Attributes:
        x, y: first row and the one behind the last.
        pad_before, pad_after: what x lacks.
    """

    x: tuple[int, int]
    y: tuple[int, int]
    pad_before: int
    pad_after: int


@functools.lru_cache(maxsize=64)  # asked for every configuration
def parts(problem: ProblemDescription, most_elements: int) -> tuple[Part, ...]:
    """The parts of a problem, at most MAX_PARTS; () where it cannot be cut so.

    Parts of backward data have results of their own, as forward ones do. Those of backward weights are to be summed.

    Args:
        most_elements: of x and y of each part.
    """
    cut = _of_rows(problem, most_elements)
    if images := _images(problem, most_elements):
        firsts = range(0, problem.n, images)
        cut = (_of_images(problem, first, min(images, problem.n - first)) for first in firsts)
    found = tuple(itertools.islice(cut, MAX_PARTS + 1))  # of tensors of 2^47 bytes there would be millions
    return found if len(found) <= MAX_PARTS and all(map(_is_aligned, found)) else ()


def _is_aligned(part: Part) -> bool:
    return all(offset % _ALIGNMENT_BYTES == 0 for offset in part.offsets_bytes.values())


def _images(problem: ProblemDescription, most_elements: int) -> int:
    """Images of a part: as many as fit, spread evenly; 0 where one is too large, or all that fit end unaligned."""
    step = math.lcm(*(_aligned_after(_of_image(problem, name)) for name in _of_each_image(problem)))
    most = most_elements // max(problem.x.size // problem.n, problem.y.size // problem.n) // step * step
    return min(most, ceil_div(ceil_div(problem.n, ceil_div(problem.n, most)), step) * step) if most else 0


def _aligned_after(size_bytes: int) -> int:
    """After how many pieces of a size the next is aligned."""
    return _ALIGNMENT_BYTES // math.gcd(_ALIGNMENT_BYTES, size_bytes)


def _of_each_image(problem: ProblemDescription) -> list[str]:
    """The operands that have a part for each image."""
    one_of_all = {"w", "scale", "bias"}
    return [operand.name for operand in problem.operands if operand.name not in one_of_all]


def _of_image(problem: ProblemDescription, name: str) -> int:
    """Bytes of an operand's part for one image."""
    return problem.tensor(name).bytes // problem.n


def _of_images(problem: ProblemDescription, first: int, count: int) -> Part:
    x, y = (_with(tensor, 0, count) for tensor in (problem.x, problem.y))
    offsets = {name: first * _of_image(problem, name) for name in _of_each_image(problem)}
    return Part(replace(problem, x=x, y=y), offsets)


def _of_rows(problem: ProblemDescription, most_elements: int) -> Iterator[Part]:
    """Parts of some rows of one image each; none where there is no such cut."""
    if not (problem.x.layout.channels_last and problem.y.layout.channels_last):
        return
    cuts = _cuts(problem, most_elements)
    for image in range(problem.n if cuts else 0):
        for rows in cuts:
            yield _of_some_rows(problem, image, rows)


def _of_some_rows(problem: ProblemDescription, image: int, rows: _Rows) -> Part:
    of_image = _of_images(problem, image, 1)
    (x_start, x_stop), (y_start, y_stop) = rows.x, rows.y
    conv = replace(
        problem.conv,
        pad_before=(rows.pad_before, *problem.conv.pad_before[1:]),
        pad_after=(rows.pad_after, *problem.conv.pad_after[1:]),
    )
    part = replace(
        of_image.problem,
        x=_with(of_image.problem.x, 2, x_stop - x_start),
        y=_with(of_image.problem.y, 2, y_stop - y_start),
        conv=conv,
    )
    starts = {"x": x_start, "y": y_start, "channel_bias": 0}
    written = starts["x" if problem.direction is Direction.BACKWARD_DATA else "y"]  # residual and saved lie as it does
    offsets = {
        name: offset + starts.get(name, written) * _row(problem.tensor(name)) * problem.tensor(name).dtype.itemsize
        for name, offset in of_image.offsets_bytes.items()
    }
    return Part(part, offsets)


def _with(tensor: TensorDescriptor, dimension: int, size: int) -> TensorDescriptor:
    shape = list(tensor.shape)
    shape[dimension] = size
    return replace(tensor, shape=tuple(shape))


def _cuts(problem: ProblemDescription, most_elements: int) -> tuple[_Rows, ...]:
    """The rows of an image in parts of equal size, but for the first and the last; () where that cannot be.

    Parts of dx begin where the first tap of a filter does: dy is cut there by whole strides.
    """
    is_data, conv = problem.direction is Direction.BACKWARD_DATA, problem.conv
    height, stride = (problem.x if is_data else problem.y).shape[2], conv.stride[0]
    x_rows, y_rows = (most_elements // _row(tensor) for tensor in (problem.x, problem.y))
    reach = _reach(problem)
    if is_data:
        step, most = stride, min(x_rows, (y_rows - ceil_div(reach, stride) - 1) * stride)
    else:
        step, most = 1, min(y_rows, (x_rows - reach) // stride)
    most = most // step * step
    if most < 1 or ceil_div(height, most) > MAX_PARTS:
        return ()
    each = round_up(ceil_div(height, ceil_div(height, most)), step)
    starts = [0, *range(each - conv.pad_before[0] % step, height, each)]
    met = _met_by_dx if is_data else _met_by_y
    cuts = [met(problem, start, stop) for start, stop in zip(starts, [*starts[1:], height], strict=True)]
    return tuple(cut for cut in cuts if cut is not None) if None not in cuts else ()


def _row(tensor: TensorDescriptor) -> int:
    """Elements of a row of an image."""
    return tensor.size // (tensor.shape[0] * tensor.shape[2])


def _reach(problem: ProblemDescription) -> int:
    """Rows from a filter's first tap to its last one."""
    return (problem.filter[0] - 1) * problem.conv.dilation[0] + 1


def _met_by_y(problem: ProblemDescription, start: int, stop: int) -> _Rows | None:
    """The rows of x that rows of y meet; None where they are padding alone."""
    conv, height = problem.conv, problem.spatial[0]
    first = start * conv.stride[0] - conv.pad_before[0]
    last = (stop - 1) * conv.stride[0] - conv.pad_before[0] + _reach(problem)
    met = max(first, 0), min(last, height)
    return _Rows(met, (start, stop), met[0] - first, last - met[1]) if met[0] < met[1] else None


def _met_by_dx(problem: ProblemDescription, start: int, stop: int) -> _Rows | None:
    """The rows of dy that rows of dx meet; None where no problem has just these."""
    conv, height = problem.conv, problem.out_spatial[0]
    stride, before, reach = conv.stride[0], conv.pad_before[0], _reach(problem)
    first = max(0, ceil_div(start + before - reach + 1, stride))
    last = min(height, (stop - 1 + before) // stride + 1)
    pad_before = start + before - first * stride
    pad_after = max(0, (last - first - 1) * stride + reach - (stop - start) - pad_before)
    count = (stop - start + pad_before + pad_after - reach) // stride + 1
    if first >= last or pad_before < 0 or count != last - first:
        return None
    return _Rows((start, stop), (first, last), pad_before, pad_after)
