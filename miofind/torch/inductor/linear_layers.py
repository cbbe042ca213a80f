"""Linear layers as convolutions with filters of one pixel, where an activation or steps of channels follow them.

A linear layer of images channels last is such a convolution. Inductor has a library compute it, and reads and writes
all of its results once more for what follows: a gelu (the blocks of ConvNeXt and of transformers), or a factor of each
channel and a sum (the end of ConvNeXt's). In float16 and bfloat16 the operators compute both at once; in training that
is the gradient of a layer's input times the derivative of the activation before it. Layers that nothing such follows
stay the library's, and those that no kernel computes faster with it than a pass behind a product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import fx

from miofind.torch.fused.calls import BackwardData, Forward
from miofind.torch.inductor.decompositions import activation_of, derivative_of
from miofind.torch.inductor.forward import replace_forward
from miofind.torch.inductor.graphs import HALVES, VIEWS, added_step, erase_unused, has_numbers
from miofind.torch.inductor.writing import Writing

aten = torch.ops.aten

_WINDOW = ([1, 1], [0, 0], [1, 1])
"""Stride, padding and dilation."""


def linear_layers(graph: fx.Graph) -> Iterator[fx.Node]:
    """The products of matrices that are linear layers with weights (k, c) as modules have them, in 16 bits."""
    for node in graph.nodes:
        if node.target not in (aten.addmm.default, aten.mm.default) or node.kwargs or not has_numbers(node):
            continue
        x, weights = (each.meta["val"] for each in node.args[-2:])
        bias = node.args[0].meta["val"] if node.target is aten.addmm.default else None
        has_form = x.is_contiguous() and weights.t().is_contiguous() and x.numel() and weights.numel()
        if x.dtype in HALVES and has_form and (bias is None or tuple(bias.shape) == (weights.shape[1],)):
            yield node


def replace_linear(writing: Writing, node: fx.Node) -> None:
    """Put an operator in for a linear layer with what follows it, if anything does and a FindDB answers."""
    result = _shaped(node)
    if _put_with_activation(writing, node, result) or result.meta["val"].dim() != 4 or len(result.users) != 1:
        return
    (permuted,) = result.users
    if permuted.target is not aten.permute.default or [*permuted.args[1]] != [0, 3, 1, 2]:
        return
    if not writing.is_last(_end_of(permuted).meta["val"]):
        return
    step = functools.partial(added_step, writing.graph)
    with writing.graph.inserting_before(permuted):
        convolution = step(aten.convolution.default, *_tensors(step, node, result), *_WINDOW, False, [0, 0], 1)
    permuted.replace_all_uses_with(convolution)
    if replace_forward(writing, convolution, fuses=True):
        erase_unused(permuted)
    else:
        convolution.replace_all_uses_with(permuted)
        erase_unused(convolution)


def input_gradients(graph: fx.Graph) -> Iterator[fx.Node]:
    """The products of matrices that may be the gradients of linear layers' inputs: of weights (k, c), in 16 bits."""
    for node in graph.nodes:
        if node.target is aten.mm.default and not node.kwargs and has_numbers(node):
            dy, weights = (each.meta["val"] for each in node.args)
            has_form = dy.is_contiguous() and weights.is_contiguous() and dy.numel() and weights.numel()
            if dy.dtype in HALVES and has_form:
                yield node


def replace_input_gradient(writing: Writing, node: fx.Node) -> None:
    """Put an operator in for a gradient and the derivative that it is multiplied by, if a FindDB answers."""
    gradient = _shaped(node)
    found = derivative_of(gradient)
    if found is None:
        return
    dy, weights = node.args
    end, of = found.steps[-1], found.numbers
    with writing.graph.inserting_before(end):
        images = _images(writing.step, dy, gradient)
        saved = _images(writing.step, found.given, gradient)
        w = writing.step(aten.reshape.default, weights, [*weights.meta["val"].shape, 1, 1])
    call = BackwardData(images, saved, w, None, saved, of.activation, *_WINDOW, 1, channels_last=True)
    _put_in_place(writing, call._replace(low=of.low, high=of.high, slope=of.slope), end)


def _shaped(node: fx.Node) -> fx.Node:
    """The layer's result, or what alone uses it, with the dimensions that the layer's input had: two or more."""
    if len(node.users) != 1:
        return node
    (user,) = node.users
    if user.target not in VIEWS or user.meta["val"].dim() < 2:
        return node
    shape = user.meta["val"].shape
    has_sizes = all(isinstance(size, int) for size in shape)
    return user if has_sizes and shape[-1] == node.meta["val"].shape[1] else node


def _end_of(image: fx.Node) -> fx.Node:
    """The last of the steps behind an image that each alone use the one before, and are images of the same shape."""
    shape = image.meta["val"].shape
    while len(image.users) == 1:
        (user,) = image.users
        value = user.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            break
        image = user
    return image


def _put_with_activation(writing: Writing, node: fx.Node, result: fx.Node) -> bool:
    """Whether an operator was put in for a layer and its activation."""
    found = activation_of(result)
    if found is None or found.steps[-1].meta["val"].dtype != node.meta["val"].dtype:
        return False
    end = found.steps[-1]
    with writing.graph.inserting_before(end):
        tensors, of = _tensors(writing.step, node, result), found.numbers
    call = Forward(*tensors, None, None, of.activation, *_WINDOW, 1, channels_last=True)
    return _put_in_place(writing, call._replace(low=of.low, high=of.high, slope=of.slope), end)


def _put_in_place(writing: Writing, call: Forward | BackwardData, end: fx.Node) -> bool:
    """Whether an operator was put in the place of the steps that end with this one."""
    with writing.graph.inserting_before(end):
        made = writing.put(call, fuses=True)
        if made is not None:
            end.replace_all_uses_with(_as_it_was(writing.step, made, end))
    if made is not None:
        erase_unused(end)
    writing.tidy()
    return made is not None


_Step = Callable[..., fx.Node]
"""Makes a new step."""


def _tensors(step: _Step, node: fx.Node, result: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """What a convolution reads that computes a layer: x, (n, c, height, width), w, (k, c, 1, 1), and the bias."""
    x, weights = node.args[-2:]
    filters = step(aten.permute.default, weights, [1, 0])
    return (
        _images(step, x, result),
        step(aten.reshape.default, filters, [*filters.meta["val"].shape, 1, 1]),
        node.args[0] if node.target is aten.addmm.default else None,
    )


def _images(step: _Step, x: fx.Node, like: fx.Node) -> fx.Node:
    """Something channels last as images, (n, c, height, width), with the outer dimensions of a layer's result.

    Rows of a matrix are images of one pixel.
    """
    outer = [*like.meta["val"].shape[:-1]]
    n, height, width = outer if len(outer) == 3 else (outer[0], math.prod(outer[1:]), 1)
    shape = (n, height, width, x.meta["val"].shape[-1])
    if x.target in VIEWS and tuple(x.args[0].meta["val"].shape) == shape:
        x = x.args[0]  # there and back Inductor may not see that it is the same
    if tuple(x.meta["val"].shape) != shape:
        x = step(aten.reshape.default, x, [*shape])
    return step(aten.permute.default, x, [0, 3, 1, 2])


def _as_it_was(step: _Step, images: fx.Node, like: fx.Node) -> fx.Node:
    """Images channels last with the dimensions of what they stand for."""
    last = step(aten.permute.default, images, [0, 2, 3, 1])
    shape = like.meta["val"].shape
    return last if last.meta["val"].shape == shape else step(aten.reshape.default, last, [*shape])
