"""Convolutions that stay PyTorch's own in Inductor's graphs: what the override is asked for, and what they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._prims_common import suggest_memory_format

from miofind.core.problem import ProblemDescription
from miofind.torch.calls import ConvolutionCall, Unserved
from miofind.torch.flags import Flags, state
from miofind.torch.formats import dense, is_dense, layout_like
from miofind.torch.inductor.graphs import CONVOLUTIONS, added_step, has_numbers
from miofind.torch.inductor.writing import Writing
from miofind.torch.override import current
from miofind.torch.recorder import recorded_call

aten = torch.ops.aten


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
    """Have convolutions that stay be given copies of what is a part of a tensor, such as of one that is split.

    They would make them themselves, by a kernel that takes three times as long as Inductor's.
    """
    packed: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in CONVOLUTIONS and has_numbers(node):
            for i in _read_images(node):
                image = node.args[i]
                if image not in packed and not _is_packed(image.meta["val"]):
                    with graph.inserting_before(node):
                        packed[image] = _packed(graph, image)
                node.update_arg(i, packed.get(image, image))


def _read_images(convolution: fx.Node) -> tuple[int, ...]:
    """The places of the images that a convolution reads: backward, x for the gradient of the weights alone."""
    is_read = convolution.target is aten.convolution_backward.default and convolution.args[10][1]
    return (0, 1) if is_read else (0,)


def _is_packed(value: Any) -> bool:
    """Whether a convolution reads a tensor as it lies: of one dimension channels first alone."""
    orders = (False,) if value.dim() == 3 else (False, True)
    return any(is_dense(value, layout_like(value, channels_last=last)) for last in orders)


def _packed(graph: fx.Graph, image: fx.Node) -> fx.Node:
    """The step that copies a tensor in the order that its strides are in."""
    suggested = suggest_memory_format(image.meta["val"])
    return added_step(graph, aten.clone.default, image, memory_format=suggested)
