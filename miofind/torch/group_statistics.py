"""Means and variances of groups of channels, as Inductor computes them fast where channels lie last.

A group norm's statistics are sums over a group's channels and all places of an image. Where channels lie last a group
is a few neighbouring elements of each place, and Inductor's kernels read each sector of memory once a group. The pass
has them sum each channel first, where neighbouring threads read neighbouring channels, and combines a group's channels
after it, by the formula for parts of equal size in Chan, Golub and LeVeque, "Updating Formulae and
a Pairwise Algorithm for Computing Sample Variances" (1979).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from miofind.core.tensor import Layout
from miofind.torch.formats import is_dense

aten, prims = torch.ops.aten, torch.ops.prims
_CONVERSION = prims.convert_element_type.default
_VIEWS = (aten.reshape.default, aten.view.default)

_WIDE_BYTES = 256
"""Of a group at one place: so many are read at once as they lie."""
_LEAST_SIZE = 1 << 21
"""Elements of a tensor: of less the second step costs as much as the first saves."""
_LEAST_SUMMED = 8
"""Numbers that are combined: of fewer Inductor does it again for every element that is normed."""


def split_group_statistics(graph: fx.Graph) -> int:
    """Have each channel's statistics computed first, then those of groups, where that is faster; returns how often."""
    found = [
        node for node in list(graph.nodes) if node.target is aten.var_mean.correction and _is_replaced(graph, node)
    ]
    return len(found)


def _is_replaced(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether a step that computes statistics of groups was replaced."""
    grouped = node.args[0]
    is_biased = node.kwargs.get("correction") == 0 and node.kwargs.get("keepdim") is True
    if not is_biased or [*node.args[1:]] != [[2, 3]] or grouped.target not in _VIEWS:
        return False
    source = _before_copies(grouped.args[0])
    if source is None or any(user.target is not operator.getitem for user in node.users):
        return False
    value = source.meta["val"]
    n, groups, channels, _ = grouped.meta["val"].shape
    is_so = value.dim() > 3 and tuple(value.shape[:2]) == (n, groups * channels) and channels > 1
    is_narrow = channels * value.element_size() < _WIDE_BYTES and value.numel() >= _LEAST_SIZE
    last = Layout.of(value.dim() - 2, channels_last=True)
    if not (is_so and is_narrow and is_dense(value, last)) or value.is_contiguous():
        return False
    with graph.inserting_before(node):
        made = _combined(graph, source, grouped)
    for user in list(node.users):
        user.replace_all_uses_with(made[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    return True


def _before_copies(node: Any) -> fx.Node | None:
    """What conversions to a wider dtype and copies to another memory order are of; None where sizes are no numbers."""
    while isinstance(node, fx.Node) and node.target in (_CONVERSION, aten.clone.default):
        before = node.args[0]
        dtypes = (node.meta["val"].dtype, before.meta["val"].dtype)
        if torch.promote_types(*dtypes) != dtypes[0]:
            break
        node = before
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    is_known = isinstance(value, torch.Tensor) and all(
        isinstance(size, int) for size in (*value.shape, *value.stride())
    )
    return node if is_known else None


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

    def step(target: Any, *arguments: Any, **named: Any) -> fx.Node:
        made = graph.call_function(target, arguments, named)
        values = fx.map_arg(arguments, lambda each: each.meta["val"])
        with source.meta["val"].fake_mode:
            made.meta["val"] = target(*values, **named)
        return made

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
