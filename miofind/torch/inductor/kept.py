"""Convolutions that stay PyTorch's own in Inductor's graphs: what the override is asked for, and what they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._prims_common import suggest_memory_format

from miofind.core.problem import ProblemDescription
from miofind.torch.fused.calls import BackwardData, BackwardWeights
from miofind.torch.fused.ops import OPERATORS
from miofind.torch.inductor.graphs import CONVOLUTIONS, added_step, has_numbers, is_pointwise
from miofind.torch.inductor.strides import read_by_strides
from miofind.torch.inductor.writing import Writing
from miofind.torch.override.calls import ConvolutionCall, Unserved
from miofind.torch.override.dispatcher import current
from miofind.torch.override.flags import Flags, state
from miofind.torch.override.formats import channels_last_format, dense, is_dense, layout_like, output_layout
from miofind.torch.recording.recorder import recorded_call

aten = torch.ops.aten

_BACKWARD = (OPERATORS[BackwardData], OPERATORS[BackwardWeights])


def kept_problems(writing: Writing) -> Iterator[tuple[ProblemDescription, Any]]:
    """The problems of the convolutions that a graph keeps on devices where an override runs them, and the devices.

    Each is in the memory format that it will run in: a network that was tuned channels first has most of its gradients
    computed channels last, since Inductor turns them.
    """
    for node in writing.graph.nodes:
        if node.target in CONVOLUTIONS and has_numbers(node):
            device = node.args[0].meta["val"].device
            if current(device.type) is not None:
                yield from ((problem, device) for problem in asked_problems(writing, node))


def asked_problems(writing: Writing, node: fx.Node) -> Iterator[ProblemDescription]:
    """What is asked of each result of a convolution, with the bias, or its gradient, where kernels take it.

    Inductor adds a forward bias by itself, but on the CPU.
    """
    is_forward = node.target is aten.convolution.default
    x, w, bias, *geometry = node.args if is_forward else node.args[1:10]
    values = x.meta["val"], w.meta["val"]
    wanted, has_bias = ["y"], bias is not None and values[0].device.type == "cpu"
    if not is_forward:
        *mask, has_bias = node.args[10]
        wanted = [name for name, is_wanted in zip(("dx", "dw"), mask, strict=True) if is_wanted]
    flags = Flags.of(state(), on_gpu=values[0].is_cuda)
    try:
        with values[0].fake_mode:
            # PyTorch's own of one dimension stay channels first.
            if values[0].dim() > 3 and writing.will_run_last(values[0]):
                last = layout_like(values[0], channels_last=True)
                values = tuple(dense(value, last) for value in values)
            call = ConvolutionCall.of(*values, bias.meta["val"] if isinstance(bias, fx.Node) else bias, *geometry)
    except Unserved:
        return
    asked = (recorded_call(call, "", computed, flags.math, has_bias=has_bias).problem for computed in wanted)
    yield from (problem for problem in asked if problem is not None)


def pack_images(graph: fx.Graph) -> None:
    """Give convolutions that stay packed images, and gradients that run channels last images in that order.

    Else each copies what it reads: a part of a tensor, such as of one that is split, by a kernel that takes three times
    as long as Inductor's; an image that was traced channels first, as behind a group norm or a `contiguous()`, once for
    each gradient. Inductor writes a point-wise image in the new order alone, which all that read it share.
    """
    packed: dict[tuple[fx.Node, bool], fx.Node] = {}
    fixed = read_by_strides(graph)
    for node in list(graph.nodes):
        places, last = _read_images(node)
        for i in places:
            image = node.args[i]
            if (image, last) not in packed and not _is_packed(image.meta["val"], last):
                is_free = last and image not in fixed and _is_free(image)
                packed[image, last] = _packed(image, last, None if is_free else node)
            node.update_arg(i, packed.get((image, last), image))


def _read_images(node: fx.Node) -> tuple[tuple[int, ...], bool]:
    """The places of the images that a convolution reads, and whether it reads them channels last alone.

    Backward it reads x for the gradient of the weights alone. For a forward one of PyTorch's own Inductor finds the
    order, as for a backward one whose x has one channel: it lies in both orders, and Inductor asks for neither.
    """
    if node.target in _BACKWARD and node.kwargs.get("channels_last") and node.args[0].meta["val"].dim() > 3:
        return (0,) if node.target is OPERATORS[BackwardData] else (0, 1), True
    if node.target not in CONVOLUTIONS or not has_numbers(node):
        return (), False
    if node.target is aten.convolution.default:
        return (0,), False
    x, w, bias, *geometry, mask = node.args[1:]
    value = x.meta["val"]
    with value.fake_mode:
        layout = output_layout(value, w.meta["val"], bias, geometry)
    return (0, 1) if mask[1] else (0,), layout.channels_last and value.dim() > 3 and value.shape[1] > 1


def _is_packed(value: Any, last: bool) -> bool:
    """Whether a convolution reads a tensor as it lies: of one dimension channels first alone."""
    orders = (True,) if last else (False,) if value.dim() == 3 else (False, True)
    return any(is_dense(value, layout_like(value, channels_last=each)) for each in orders)


def _is_free(image: fx.Node) -> bool:
    """Whether Inductor may write an image in any order: it is computed element by element, and is no result."""
    return is_pointwise(image) and all(user.op == "call_function" for user in image.users)


def _packed(image: fx.Node, last: bool, reader: fx.Node | None) -> fx.Node:
    """The step that gives an image channels last, or packed in the order that its strides are in.

    Args:
        reader: the step that a copy is made for, right before it; None to have all that read the image read this.
    """
    value, graph = image.meta["val"], image.graph
    order = channels_last_format(value.dim()) if last else suggest_memory_format(value)
    with graph.inserting_after(image) if reader is None else graph.inserting_before(reader):
        step = added_step(graph, aten.clone.default, image, memory_format=order)
    if reader is None:
        image.replace_all_uses_with(step, delete_user_cb=lambda user: user is not step)
    return step
