"""Maximum poolings of large windows, taken along one dimension after another.

The maximum of a window is that of its rows' maxima. Inductor unrolls windows of fewer than 25 elements; a larger one it
reduces, or leaves to PyTorch, and reads each element as often as the window is large: three of 5 x 5 take a sixth of
the time of YOLOv8s, whose backbone ends with them. Row by row it is read 5 + 5 times, by kernels that are unrolled.
Only values are computed so: of poolings whose indices are asked for, as for gradients, nothing changes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims

from miofind.torch.inductor.graphs import added_step

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
        if node.target in _POOLINGS and all(
            user.target is operator.getitem and not user.args[1] for user in node.users
        ):
            _split(graph, node)


def _split(graph: fx.Graph, pooling: fx.Node) -> None:
    x, *arguments = pooling.args
    window, steps, padding, dilation, rounds_up = _named(_POOLINGS[pooling.target], *arguments, **pooling.kwargs)
    is_split = math.prod(window) >= _LEAST_WINDOW > max(window)
    if not is_split or sum(size > 1 for size in window) < 2:
        return
    # What shrinks most comes first.
    places = sorted(range(len(window)), key=lambda place: (steps[place], place), reverse=True)
    with graph.inserting_before(pooling):
        for place in places:
            if (window[place], steps[place]) != (1, 1):
                alone = [[rest] * len(window) for rest in (1, 1, 0, 1)]
                for values, of_all in zip(alone, (window, steps, padding, dilation), strict=True):
                    values[place] = of_all[place]
                made = added_step(graph, _POOLING, x, *alone, rounds_up)
                x = added_step(graph, operator.getitem, made, 0)
    for user in list(pooling.users):
        user.replace_all_uses_with(x)
        graph.erase_node(user)
    graph.erase_node(pooling)


def _named(
    dimensions: int | None,
    window: Sequence[int],
    steps: Sequence[int] = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[list[int], list[int], list[int], list[int], bool]:
    """A pooling's window, steps, padding and dilation along each dimension, and whether places are rounded up."""
    count = dimensions or len(window)

    def each(values: Any) -> list[int]:
        given = [values] if isinstance(values, int) else [*values]
        return given * count if len(given) == 1 else given

    return each(window), each(steps or window), each(padding), each(dilation), ceil_mode
