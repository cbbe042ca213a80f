"""Maximum poolings of large windows, taken along one dimension after another.

The maximum of a window is that of its rows' maxima. Inductor unrolls windows of fewer than 25 elements; a larger one it
reduces, or leaves to PyTorch, and reads each element as often as the window is large: three of 5 x 5 take a sixth of
the time of YOLOv8s, whose backbone ends with them. Row by row it is read 5 + 5 times, by kernels that are unrolled.

Where gradients need the places of maxima, too, these are made of the rows' places and the rows: the first of equal
ones, and of numbers that are none, as Inductor has it. That is done where Inductor would reduce, in two dimensions and
of floating point, which has a number below all others for what lies outside.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims

from miofind.torch.inductor.graphs import added_step, has_numbers

aten = torch.ops.aten

_POOLING = inductor_prims._low_memory_max_pool_with_offsets
_POOLINGS = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    _POOLING: None,
}
"""The dimensions of a window; None where the arguments name each."""
_LEAST_WINDOW = 25
"""Elements: Inductor unrolls smaller windows."""


def split_poolings(graph: fx.Graph) -> None:
    """Have maxima of large windows be computed along one dimension after another."""
    for node in list(graph.nodes):
        if node.target not in _POOLINGS or any(user.target is not operator.getitem for user in node.users):
            continue
        window = _Window(_POOLINGS[node.target], *node.args[1:], **node.kwargs)
        if not window.is_large:
            continue
        made: tuple[fx.Node, ...]
        with graph.inserting_before(node):
            if not any(user.args[1] for user in node.users):
                made = (_values(graph, node.args[0], window),)
            elif _has_places_split(node, window):
                made = _values_and_places(graph, node.args[0], window, node.meta["val"][0].shape[-2])
            else:
                continue
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def _has_places_split(node: fx.Node, window: _Window) -> bool:
    """Whether the places of maxima can be made of the rows' places."""
    if node.target is not _POOLING or len(window.sizes) != 2 or not has_numbers(node):
        return False
    return bool(node.meta["val"][0].is_floating_point())


class _Window:
    """A pooling's window.

    Args:
        dimensions: None where all arguments name each.
        kernel_size, stride, padding, dilation, ceil_mode: as of `torch.nn.functional.max_pool2d`.

    Attributes:
        sizes, steps, padding, dilation: along each dimension.
        rounds_up: whether the number of places is rounded up.
    """

    def __init__(
        self,
        dimensions: int | None,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> None:
        count = dimensions or len(kernel_size)

        def each(values: Any) -> list[int]:
            given = [values] if isinstance(values, int) else [*values]
            return given * count if len(given) == 1 else given

        self.sizes, self.steps = each(kernel_size), each(stride or kernel_size)
        self.padding, self.dilation = each(padding), each(dilation)
        self.rounds_up = ceil_mode

    @property
    def is_large(self) -> bool:
        """Whether it is taken apart: Inductor does not unroll it, and would its rows."""
        is_split = math.prod(self.sizes) >= _LEAST_WINDOW > max(self.sizes)
        return is_split and sum(size > 1 for size in self.sizes) > 1

    def along(self, dimension: int) -> tuple[Any, ...]:
        """The arguments of a pooling along one dimension alone."""
        alone = [[rest] * len(self.sizes) for rest in (1, 1, 0, 1)]
        for values, of_all in zip(alone, (self.sizes, self.steps, self.padding, self.dilation), strict=True):
            values[dimension] = of_all[dimension]
        return (*alone, self.rounds_up)


def _values(graph: fx.Graph, x: fx.Node, window: _Window) -> fx.Node:
    """The maxima of windows."""
    dimensions = range(len(window.sizes))
    for i in sorted(dimensions, key=lambda i: (window.steps[i], i), reverse=True):  # what shrinks most comes first
        if (window.sizes[i], window.steps[i]) != (1, 1):
            x = added_step(graph, operator.getitem, added_step(graph, _POOLING, x, *window.along(i)), 0)
    return x


def _values_and_places(graph: fx.Graph, x: fx.Node, window: _Window, height: int) -> tuple[fx.Node, fx.Node]:
    """The maxima of windows of two dimensions, and each one's place in its window, counted row by row.

    Args:
        height: of the result.
    """

    def step(target: Any, *arguments: Any) -> fx.Node:
        return added_step(graph, target, *arguments)

    rows = step(_POOLING, x, *window.along(1))
    (size, _), (stride, _), (padding, _), (dilation, _) = window.sizes, window.steps, window.padding, window.dilation
    reach = (height - 1) * stride + 1
    below = max(0, reach + (size - 1) * dilation - x.meta["val"].shape[-2] - padding)
    outside = (-math.inf, 0)
    values, places = (
        step(aten.constant_pad_nd.default, step(operator.getitem, rows, i), [0, 0, padding, below], outside[i])
        for i in range(2)
    )
    best, place = None, None
    for i in range(size):
        begin = i * dilation
        value, column = (step(aten.slice.Tensor, each, -2, begin, begin + reach, stride) for each in (values, places))
        if best is None:
            best, place = value, column
            continue
        is_taken = step(aten.bitwise_or.Tensor, step(aten.gt.Tensor, value, best), _is_first_nan(step, value, best))
        best = step(aten.where.self, is_taken, value, best)
        place = step(aten.where.self, is_taken, step(aten.add.Tensor, column, i * window.sizes[1]), place)
    assert best is not None
    assert place is not None
    return best, place


def _is_first_nan(step: Any, value: fx.Node, best: fx.Node) -> fx.Node:
    """Whether a value is no number, and the best one so far is."""
    is_none, was_none = step(aten.isnan.default, value), step(aten.isnan.default, best)
    return step(aten.bitwise_and.Tensor, is_none, step(aten.bitwise_not.default, was_none))
