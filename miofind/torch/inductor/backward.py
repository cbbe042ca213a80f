"""Gradients of a graph's convolutions: with an activation's derivative and the sum at a branch, and of biases.

Those of one dimension that read channels last are put in with nothing besides, too: PyTorch's own are channels first.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from miofind.torch.fused.calls import BackwardData, BackwardWeights
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.inductor.decompositions import derivative_of
from miofind.torch.inductor.graphs import erase_unused
from miofind.torch.inductor.writing import Writing

aten = torch.ops.aten


def replace_backward(writing: Writing, node: fx.Node) -> None:
    """Put operators in for the gradients of a convolution that something is computed with, where a FindDB answers."""
    gradients = {user.args[1]: user for user in node.users}
    mask = list(node.args[10])
    if 0 in gradients and mask[0] and _put_backward_data(writing, node, gradients[0]):
        mask[0] = False
    sums = gradients.get(2) if mask[2] else _sum_of_channels(node)
    if 1 in gradients and mask[1]:
        if sums is not None and _put_backward_weights(writing, node, gradients[1], sums):
            mask[1] = mask[2] = False
        elif _is_put_in_bare(writing, *node.args[:2]) and _put_backward_weights(writing, node, gradients[1], None):
            mask[1] = False
    writing.tidy()
    for each in [user for user in node.users if not user.users]:
        writing.graph.erase_node(each)
    if not node.users:
        writing.graph.erase_node(node)
    elif mask != list(node.args[10]):
        node.args = (*node.args[:10], mask)
        node.meta["val"] = tuple(v if wanted else None for v, wanted in zip(node.meta["val"], mask, strict=True))


def _geometry(node: fx.Node) -> tuple[Any, ...]:
    """Stride, padding, dilation and groups of a backward convolution."""
    *_, stride, padding, dilation, _, _, groups, _ = node.args
    return stride, padding, dilation, groups


def _is_put_in_bare(writing: Writing, dy: fx.Node, x: fx.Node) -> bool:
    """Whether an operator is to compute a gradient that nothing follows."""
    return dy.meta["val"].dim() == 3 and writing.is_last(dy.meta["val"], x.meta["val"])


def _put_backward_data(writing: Writing, node: fx.Node, gradient: fx.Node) -> bool:
    """Whether the gradient of the input was put in, with as much as can be of a sum and an activation's derivative."""
    dy, x, w = node.args[:3]
    value = gradient.meta["val"]
    bare = (gradient, None, None, Nonlinearity())
    steps: list[tuple[fx.Node, Any, Any, Nonlinearity]] = [bare] if _is_put_in_bare(writing, dy, x) else []
    end, residual = gradient, None
    addition = next(iter(end.users)) if len(end.users) == 1 else None
    if addition is not None and addition.target is aten.add.Tensor and not addition.kwargs:
        first, second = addition.args
        residual = second if first is end else first
        given = residual.meta.get("val") if isinstance(residual, fx.Node) else None
        is_alike = isinstance(given, torch.Tensor) and given.shape == value.shape and given.dtype == value.dtype
        if first is second or not is_alike:
            residual = None
        else:
            steps.append((addition, residual, None, Nonlinearity()))
            end = addition
    if (found := derivative_of(end)) is not None:
        steps.append((found.steps[-1], residual, found.given, found.numbers))
    last = writing.is_last(value, dy.meta["val"], x.meta["val"])
    for end, residual, saved, of in reversed(steps):
        call = BackwardData(dy, x, w, residual, saved, of.activation, *_geometry(node))
        with writing.graph.inserting_before(end):
            call = call._replace(low=of.low, high=of.high, slope=of.slope, channels_last=last)
            made = writing.put(call, fuses=of.activation not in ("none", "relu"))
        if made is not None:
            end.replace_all_uses_with(made)
            erase_unused(end, but=aten.convolution_backward.default)
            return True
    return False


def _sum_of_channels(node: fx.Node) -> fx.Node | None:
    """The step that sums the gradient of the output of a backward convolution over all but channels."""
    dy = node.args[0]
    rank = dy.meta["val"].dim()
    axes = [0, *range(2, rank)]
    sums = (user for user in dy.users if user.target is aten.sum.dim_IntList and len(user.args) == 2)
    return next((each for each in sums if sorted(axis % rank for axis in each.args[1]) == axes), None)


def _put_backward_weights(writing: Writing, node: fx.Node, gradient: fx.Node, sums: fx.Node | None) -> bool:
    """Whether the gradient of the weights was put in, together with that of the bias if there is one."""
    dy, x, w = node.args[:3]
    last = writing.is_last(gradient.meta["val"], dy.meta["val"], x.meta["val"])
    stride, padding, dilation, groups = _geometry(node)
    of_bias = None if sums is None else sums.meta["val"].dtype
    call = BackwardWeights(dy, x, w, stride, padding, dilation, groups, of_bias, last)
    order = {each: place for place, each in enumerate(writing.graph.nodes)}
    if sums is not None and any(order[user] < order[node] for user in sums.users):
        return False
    with writing.graph.inserting_after(node):
        made = writing.put(call)
    if made is None:
        return False
    with writing.graph.inserting_after(made):
        for i, each in enumerate((gradient,) if sums is None else (gradient, sums)):
            each.replace_all_uses_with(writing.step(operator.getitem, made, i))
            writing.graph.erase_node(each)
    return True
