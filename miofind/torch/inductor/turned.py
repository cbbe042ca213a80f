"""Graphs whose convolutions Inductor leaves channels first, run channels last.

Tensor cores read channels last: in a network that is channels first each convolution turns what it reads and writes, or
a kernel before and behind it does. Inductor turns whole graphs, but convolutions of two dimensions alone, and in
training no graph that has grouped ones or one with many more input than output channels (ResNeXt, RegNet, U-Nets). Here
the pass does so in float16 and bfloat16, where FindDBs answer most of what the convolutions compute. PyTorch has no
such memory format of one dimension, and its own convolutions and gradients of that stay channels first.

Operators are put in channels last, and convolutions that stay read so. Each step's fake tensor then says how its result
lies: by that Inductor lays out what it keeps for backward, whose graph is traced anew from there. What a user sees
keeps the strides that were traced (`strides.restore_strides`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor import inductor_prims

from miofind.torch.fused.calls import Forward
from miofind.torch.fused.ops import OPERATORS
from miofind.torch.inductor.graphs import HALVES, added_step, has_numbers, traced_strides
from miofind.torch.inductor.kept import asked_problems
from miofind.torch.inductor.strides import reads_strides, retrace_step
from miofind.torch.inductor.writing import SpatialRanks, Writing, is_put_in, spelt
from miofind.torch.override.dispatcher import current
from miofind.torch.override.formats import packed_strides

aten = torch.ops.aten

_LEAST_SHARE = 0.5
"""Of the multiplications: what FindDBs answer channels last of a graph that is turned."""


def turnable(graph: fx.Graph) -> SpatialRanks:
    """The spatial ranks whose convolutions may be turned."""
    if reads_strides(graph) or _returns_views() or _is_kept_elsewhere() or not _keeps_strides(graph):
        return frozenset()
    return frozenset(_spatial_rank(node) for node in _convolutions(graph))


def _keeps_strides(graph: fx.Graph) -> bool:
    """Whether Inductor gives what a graph returns the strides that it was traced with.

    It does not in a branch of `torch.cond` or the body of a loop, where they are compared with others'.
    """
    return traced_strides(graph) is not None


def _returns_views() -> bool:
    """Whether a user is given several views of one tensor of the graph that is compiled.

    They are made of it as it lies, outside of the graph.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return metadata is not None and metadata.num_intermediate_bases > 0


def _is_kept_elsewhere() -> bool:
    """Whether hooks of the user's keep what a backward pass reads.

    They may give back another order, as `save_on_cpu` does, and a compiled backward pass wants the one that it was
    compiled for. What checkpoints compute once more lies as it did.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint"


def turn(writing: Writing) -> None:
    """Put in channels last the operators that the network itself calls, of the dimensions that are turned."""
    for node in list(_convolutions(writing.graph)):
        if node.target is OPERATORS[Forward] and _spatial_rank(node) in writing.turned:
            call = Forward(*node.args, **node.kwargs)._replace(channels_last=True)
            problem = writing.served(call)
            if problem is not None:
                node.args, node.kwargs = spelt(call)
                writing.put_in.append(problem)


def put_bare(writing: Writing) -> None:
    """Put in channels last what stayed of the convolutions that are turned, with nothing that follows them.

    PyTorch's own would give an image of one channel, which lies in both orders, as it lies first. A bias is added
    behind, as Inductor adds it.
    """
    for node in list(_convolutions(writing.graph)):
        if node.target is not aten.convolution.default or node.args[6] or _spatial_rank(node) not in writing.turned:
            continue
        x, w, bias, stride, padding, dilation, _, _, groups = node.args
        call = Forward(x, w, None, None, None, "none", stride, padding, dilation, groups, channels_last=True)
        with writing.graph.inserting_before(node):
            made = writing.put(call)
            if made is not None and bias is not None:
                along = writing.step(aten.reshape.default, bias, [-1, *(1,) * _spatial_rank(node)])
                made = writing.step(aten.add.Tensor, made, along)
        if made is not None:
            node.replace_all_uses_with(made)
            writing.graph.erase_node(node)


def is_answered(writing: Writing, graph: fx.Graph) -> bool:
    """Whether FindDBs answer most of what a graph's convolutions compute, channels last.

    Args:
        writing: of a copy of the graph, in which operators were put in so.
    """
    whole = sum(_multiplications(node) for node in _convolutions(graph) if _spatial_rank(node) in writing.turned)
    left = sum(
        _multiplications(node)
        for node in _convolutions(writing.graph)
        if _spatial_rank(node) in writing.turned and not _is_answered(writing, node)
    )
    return whole > 0 and whole - left >= _LEAST_SHARE * whole


def lay_out(graph: fx.Graph, turned: SpatialRanks) -> None:
    """Have the convolutions that stay in a graph read channels last, and all steps say how what they give lies.

    Args:
        turned: the spatial ranks of convolutions that are turned here.
    """
    put_in = {node for node in graph.nodes if is_put_in(node)}
    retrace(graph, put_in.union(*(node.users for node in put_in)), turned)


def retrace(graph: fx.Graph, relaid: set[fx.Node], turned: SpatialRanks = frozenset()) -> None:
    """Have all steps say how what they give lies.

    Args:
        relaid: steps that may give what they gave in another order than before.
        turned: the spatial ranks of convolutions that are given what they read channels last.
    """
    relaid = {*relaid}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.convolution.default and _spatial_rank(node) in turned - {1} and _reads_images(node):
            relaid.add(_read_last(graph, node))
        retrace_step(node, relaid)


def _read_last(graph: fx.Graph, convolution: fx.Node) -> fx.Node:
    """The step that gives a convolution what it reads channels last: no copy where that can be written so."""
    x = convolution.args[0]
    shape = tuple(x.meta["val"].shape)
    with graph.inserting_before(convolution):
        last = packed_strides(shape, True)
        given = added_step(graph, inductor_prims.force_stride_order, x, last)
    convolution.replace_input_with(x, given)
    return given


def _convolutions(graph: fx.Graph) -> Iterator[fx.Node]:
    """PyTorch's forward convolutions, and operators of the network's own, that are channels first and in 16 bits."""
    for node in graph.nodes:
        if node.target not in (aten.convolution.default, OPERATORS[Forward]) or not has_numbers(node):
            continue
        is_open = node.kwargs.get("channels_last") is None
        if is_open and node.meta["val"].dtype in HALVES and node.meta["val"].is_contiguous():
            yield node


def _spatial_rank(node: fx.Node) -> int:
    """The spatial rank of a convolution."""
    return int(node.meta["val"].dim()) - 2


def _multiplications(node: fx.Node) -> int:
    """Of a forward convolution: for each of its results, of a transposed one for each of what it reads."""
    x, w = (each.meta["val"] for each in node.args[:2])
    is_transposed = node.target is aten.convolution.default and node.args[6]
    return int((x if is_transposed else node.meta["val"]).numel() * math.prod(w.shape[1:]))


def _is_answered(writing: Writing, convolution: fx.Node) -> bool:
    """Whether a FindDB answers a convolution that stayed in the graph, and an override is there to run it."""
    if convolution.target is not aten.convolution.default or current(convolution.meta["val"].device.type) is None:
        return False
    asked = [*asked_problems(writing, convolution)]
    return bool(asked) and all(writing.serves(problem, convolution.meta["val"].device) is not None for problem in asked)


def _reads_images(convolution: fx.Node) -> bool:
    """Whether a convolution reads 16 bits of known sizes."""
    return convolution.args[0].meta["val"].dtype in HALVES and has_numbers(convolution)
