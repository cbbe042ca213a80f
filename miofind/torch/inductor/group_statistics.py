"""Means and variances of groups of channels, as Inductor computes them fast where channels lie last.

A group norm's statistics are sums over a group's channels and all places of an image. Where channels lie last a group
is a few neighbouring elements of each place, and Inductor's kernels read each sector of memory once a group. The pass
has them sum each channel first, where neighbouring threads read neighbouring channels, and combines a group's channels
after it, by the formula for parts of equal size in Chan, Golub and LeVeque, "Updating Formulae and
a Pairwise Algorithm for Computing Sample Variances" (1979).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Set
from typing import Any

import torch
from torch import fx

from miofind.torch.inductor.graphs import VIEWS, added_step, before_copies, known_value
from miofind.torch.inductor.memory_formats import lying_last
from miofind.torch.inductor.writing import SpatialRanks

aten, prims = torch.ops.aten, torch.ops.prims
_CONVERSION = prims.convert_element_type.default

_WIDE_BYTES = 256
"""Of a group at one place: so many are read at once as they lie."""
_LEAST_SIZE = 1 << 21
"""Elements of a tensor: of less the second step costs as much as the first saves."""
_LEAST_SUMMED = 8
"""Numbers that are combined: of fewer Inductor does it again for every element that is normed."""


def split_group_statistics(graph: fx.Graph, turned: SpatialRanks = frozenset()) -> int:
    """Have each channel's statistics computed first, then those of groups, where that is faster; returns how often.

    Args:
        turned: the spatial ranks of convolutions that were traced channels first and will be channels last.
    """
    last = lying_last(graph, turned)
    found = [node for node in list(graph.nodes) if _is_replaced(graph, node, last)]
    return len(found)


def _is_replaced(graph: fx.Graph, node: fx.Node, last: Set[fx.Node]) -> bool:
    """Whether a step was one that computes statistics of groups, and was replaced."""
    if node.target is not aten.var_mean.correction:
        return False
    grouped = node.args[0]
    is_biased = node.kwargs.get("correction") == 0 and node.kwargs.get("keepdim") is True
    if not is_biased or [*node.args[1:]] != [[2, 3]] or grouped.target not in VIEWS:
        return False
    source = before_copies(grouped.args[0])
    if any(user.target is not operator.getitem for user in node.users):
        return False
    if source not in last or not _has_groups(known_value(source), known_value(grouped)):
        return False
    with graph.inserting_before(node):
        made = _combined(graph, source, grouped)
    for user in list(node.users):
        user.replace_all_uses_with(made[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    return True


def _has_groups(value: Any, grouped: Any) -> bool:
    """Whether a tensor that lies channels last is one in groups of channels, and statistics are faster in two steps.

    Args:
        value, grouped: fake tensors; None for unknown ones.
    """
    if value is None or grouped is None or value.dim() not in (4, 5) or grouped.dim() != 4:
        return False
    if grouped.dtype not in (torch.float32, torch.float64):  # means of channels would be rounded to fewer bits
        return False
    n, groups, channels, _ = grouped.shape
    if tuple(value.shape[:2]) != (n, groups * channels) or channels == 1 or value.numel() < _LEAST_SIZE:
        return False
    return bool(channels * value.element_size() < _WIDE_BYTES)


def _parts(channels: int, places: int) -> int:
    """How many parts the places of each of a group's channels are cut into."""
    parts = 1
    while channels * parts < _LEAST_SUMMED and places % (2 * parts) == 0:
        parts *= 2
    return parts


def _combined(graph: fx.Graph, source: fx.Node, grouped: fx.Node) -> tuple[fx.Node, fx.Node]:
    """New steps that give variance and mean of groups, (n, groups, 1, 1), of a tensor of channels."""
    n, groups, channels, places = grouped.meta["val"].shape
    dtype = grouped.meta["val"].dtype
    parts = _parts(channels, places)

    step = functools.partial(added_step, graph)
    wide = source if source.meta["val"].dtype == dtype else step(_CONVERSION, source, dtype)
    cut = step(aten.reshape.default, wide, [n, groups * channels, parts, places // parts])
    of_parts = step(aten.var_mean.correction, cut, [3], correction=0)
    variances, means = (
        step(aten.reshape.default, step(operator.getitem, of_parts, i), [n, groups, channels * parts, 1])
        for i in range(2)
    )
    mean = step(aten.mean.dim, means, [2, 3], True)
    apart = step(aten.sub.Tensor, means, mean)
    square = step(aten.mul.Tensor, apart, apart)
    return step(aten.mean.dim, step(aten.add.Tensor, variances, square), [2, 3], True), mean
