"""float64 references of strips of an output: operands are gathered from anywhere, matrix products do the rest.

Tested against `reference_on_host`, which computes whole outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import Direction, ProblemDescription
from miofind.verify.sampling import Indices
from miofind.verify.strips import Matrix, Strip

Tensors = Mapping[str, NDArray[Any]]
Wide = NDArray[np.float64]
Change = Callable[[Wide], Wide]
Taps = Sequence[Indices]

_PIECE_ELEMENTS = 1 << 19  # of operands at a time: 4 MiB


def strip_sums(
    problem: ProblemDescription, tensors: Tensors, strips: Sequence[Strip], changes: Sequence[Change]
) -> list[Wide]:
    """Sums of the products that make the elements of strips, an array (elements,) for each change of the inputs.

    Elements are in the order of `strip_indices`.

    Args:
        problem: whose output it is.
        tensors: the two inputs of the direction by name, of logical shape in any dtype and memory order.
        strips: parts of the output.
        changes: what is done to both inputs before they are multiplied, element by element; zeros stay zeros.
    """
    if problem.direction is Direction.BACKWARD_WEIGHTS:
        sums = _weights_sums(problem, tensors, strips, changes)
    else:
        sums = [_row_sums(problem, tensors, strip, changes) for strip in strips]
    return [np.concatenate([each[i].reshape(-1) for each in sums]) for i in range(len(changes))]


def _row_sums(problem: ProblemDescription, tensors: Tensors, strip: Strip, changes: Sequence[Change]) -> Wide:
    """Sums of one strip, (changes, groups, rows, members)."""
    gather = _forward_rows if problem.direction is Direction.FORWARD else _backward_data_rows
    w = _filters(problem, tensors["w"], strip)
    sums = np.zeros((len(changes), strip.groups.size, strip.rows.size, strip.members.size))
    for alike, taps in _alike(problem, strip.rows):
        chosen: tuple[Any, ...] = (..., *np.ix_(*taps))
        part = w[chosen].reshape(*w.shape[:2], -1).swapaxes(1, 2)
        changed = [change(part) for change in changes]
        step = max(1, _PIECE_ELEMENTS // (strip.groups.size * part.shape[1]))
        for start in range(0, alike.size, step):
            piece = alike[start : start + step]
            operand = gather(problem, tensors, strip.groups, (strip.rows[piece], taps))
            for i, change in enumerate(changes):
                sums[i, :, piece] = (change(operand) @ changed[i]).swapaxes(0, 1)
    return sums


def _alike(problem: ProblemDescription, rows: Indices) -> Iterator[tuple[Indices, Taps]]:
    """Places among `rows` of those that the same taps of each spatial axis make, and these taps; all forward.

    Output o reaches input i through tap t where o * stride = i + pad - t * dilation.
    """
    conv, every = problem.conv, [np.arange(size, dtype=np.int64) for size in problem.filter]
    if problem.direction is Direction.FORWARD or all(stride == 1 for stride in conv.stride):
        yield np.arange(rows.size, dtype=np.int64), every
        return
    _, *spatial = np.unravel_index(rows, Matrix.of(problem).rows)
    axes = list(zip(spatial, conv.pad_before, conv.stride, strict=True))
    classes = np.ravel_multi_index([(at + pad) % stride for at, pad, stride in axes], conv.stride)
    for each in np.unique(classes):
        rests = zip(np.unravel_index(each, conv.stride), every, conv.dilation, conv.stride, strict=True)
        taps = [all_[all_ * dilation % stride == rest] for rest, all_, dilation, stride in rests]
        if all(some.size for some in taps):
            yield np.flatnonzero(classes == each), taps


def _filters(problem: ProblemDescription, w: NDArray[Any], strip: Strip) -> Wide:
    """w as (groups, members, channels that are summed, *filter)."""
    groups, members = strip.groups, strip.members
    k, c = problem.k // problem.groups, problem.c // problem.groups
    if problem.direction is Direction.FORWARD:
        chosen = w[(groups[:, None] * k + members).reshape(-1)]
        return np.asarray(chosen.reshape(groups.size, members.size, c, *problem.filter), np.float64)
    chosen = w[(groups[:, None] * k + np.arange(k)).reshape(-1)].reshape(groups.size, k, c, *problem.filter)
    return np.ascontiguousarray(chosen[:, :, members].swapaxes(1, 2), np.float64)


def _forward_rows(problem: ProblemDescription, tensors: Tensors, groups: Indices, where: tuple[Indices, Taps]) -> Wide:
    """What of x some rows and their taps multiply, (groups, rows, length)."""
    rows, taps = where
    conv = problem.conv
    image, *out = np.unravel_index(rows, Matrix.of(problem).rows)
    steps = zip(out, taps, conv.stride, conv.pad_before, conv.dilation, strict=True)
    at = [o[:, None] * stride - pad + tap * dilation for o, tap, stride, pad, dilation in steps]
    inside = [(each >= 0) & (each < size) for each, size in zip(at, problem.spatial, strict=True)]
    return _gathered(tensors["x"], [image, *at], inside, _channels(groups, problem.c // problem.groups))


def _backward_data_rows(
    problem: ProblemDescription, tensors: Tensors, groups: Indices, where: tuple[Indices, Taps]
) -> Wide:
    """What of dy some rows and their taps multiply, (groups, rows, length)."""
    rows, taps = where
    conv = problem.conv
    image, *spatial = np.unravel_index(rows, Matrix.of(problem).rows)
    steps = zip(spatial, taps, conv.stride, conv.pad_before, conv.dilation, strict=True)
    at = [(i[:, None] + pad - tap * dilation) // stride for i, tap, stride, pad, dilation in steps]
    inside = [(each >= 0) & (each < size) for each, size in zip(at, problem.out_spatial, strict=True)]
    return _gathered(tensors["y"], [image, *at], inside, _channels(groups, problem.k // problem.groups))


def _channels(groups: Indices, size: int) -> Indices:
    """Channels of each group, (groups, size)."""
    return groups[:, None] * size + np.arange(size)


def _gathered(
    tensor: NDArray[Any], at: Sequence[Indices], inside: Sequence[NDArray[np.bool_]], channels: Indices
) -> Wide:
    """tensor[n, channels, *spatial], 0 where not inside, as (groups, rows, channels of a group times taps).

    Args:
        tensor: (n, channels, *spatial).
        at: image of each row, (rows,), then for each spatial axis the coordinates that its taps meet, (rows, taps).
        inside: for each spatial axis, whether they lie in the tensor.
        channels: (groups, channels of a group).
    """
    flat, strides = _in_memory(tensor)
    count = at[0].size
    offsets: NDArray[Any] = at[0] * strides[0]
    held: NDArray[np.bool_] = np.ones(count, np.bool_)
    for dim, (coordinate, valid) in enumerate(zip(at[1:], inside, strict=True)):
        apart = (count, *(1,) * dim, -1)
        offsets = offsets[..., None] + (coordinate * strides[2 + dim]).reshape(apart)
        held = held[..., None] & valid.reshape(apart)
    mask = held.reshape(count, -1)
    places = np.where(mask, offsets.reshape(mask.shape), 0)
    found = flat[places[None, :, None, :] + (channels * strides[1])[:, None, :, None]].astype(np.float64)
    if not mask.all():  # an infinity read in place of a zero is none
        found = np.where(mask[:, None, :], found, 0.0)
    return found.reshape(channels.shape[0], count, -1)


def _in_memory(tensor: NDArray[Any]) -> tuple[NDArray[Any], tuple[int, ...]]:
    """A tensor's elements in the order of memory, and its strides in them."""
    order = sorted(range(tensor.ndim), key=lambda axis: -tensor.strides[axis])
    packed = tensor.transpose(order)
    strides = [0] * tensor.ndim
    for i, axis in enumerate(order):
        strides[axis] = math.prod(packed.shape[i + 1 :])
    return packed.reshape(-1), tuple(strides)


def _weights_sums(
    problem: ProblemDescription, tensors: Tensors, strips: Sequence[Strip], changes: Sequence[Change]
) -> list[Wide]:
    """Sums of each strip, (changes, groups, rows, members), a few images at a time, which the cache holds."""
    sums = [np.zeros((len(changes), strip.groups.size, strip.rows.size, strip.members.size)) for strip in strips]
    step = max(1, _PIECE_ELEMENTS * problem.n // (problem.x.size + problem.y.size))
    for start in range(0, problem.n, step):
        x, dy = (_by_channel(tensors[name][start : start + step]) for name in "xy")
        for i, change in enumerate(changes):
            changed_x, changed_dy = change(x), change(dy)
            for strip, sum_ in zip(strips, sums, strict=True):
                channels = strip.groups[:, None] * Matrix.of(problem).members + strip.members
                right = changed_dy[channels].reshape(*channels.shape, -1).swapaxes(1, 2)
                sum_[i] += _weights_rows(problem, changed_x, strip) @ right
    return sums


def _by_channel(images: NDArray[Any]) -> Wide:
    """(channels, n, *spatial) of (n, channels, *spatial)."""
    return np.ascontiguousarray(images.swapaxes(0, 1), np.float64)


def _weights_rows(problem: ProblemDescription, x: Wide, strip: Strip) -> Wide:
    """What of x (c, n, *spatial) each row of w meets, 0 where that is padding, (groups, rows, outputs)."""
    found = np.zeros((strip.groups.size, strip.rows.size, x.shape[1], *problem.out_spatial))
    channel, tap = np.divmod(strip.rows, math.prod(problem.filter))
    for each in np.unique(tap):
        met, window = _window(problem, np.unravel_index(each, problem.filter))
        alike = np.flatnonzero(tap == each)
        channels = strip.groups[:, None] * (problem.c // problem.groups) + channel[alike]
        of_rows: tuple[Any, ...] = (slice(None), alike, slice(None), *met)
        of_x: tuple[Any, ...] = (channels, slice(None), *window)
        found[of_rows] = x[of_x]
    return found.reshape(*found.shape[:2], -1)


def _window(problem: ProblemDescription, taps: Sequence[np.intp]) -> tuple[list[slice], list[slice]]:
    """The outputs at which a filter position meets the input, and what of the input it meets."""
    conv = problem.conv
    met, window = [], []
    for dim, tap in enumerate(map(int, taps)):
        stride, offset = conv.stride[dim], tap * conv.dilation[dim] - conv.pad_before[dim]
        first = max(0, -(offset // stride))
        end = max(first, min(problem.out_spatial[dim], (problem.spatial[dim] - 1 - offset) // stride + 1))
        start = first * stride + offset
        met.append(slice(first, end))
        window.append(slice(start, start + (end - first) * stride, stride))
    return met, window
