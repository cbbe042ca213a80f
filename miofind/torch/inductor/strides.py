"""Strides in graphs: steps that depend on them, fake tensors brought up to date, results given those traced."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._inductor import config

from miofind.torch.fused.writes import is_mutable
from miofind.torch.inductor.graphs import (
    CONVOLUTIONS,
    added_step,
    has_known_sizes,
    known_value,
    traced_strides,
    user_visible,
)
from miofind.torch.inductor.writing import is_put_in

aten = torch.ops.aten

_NAMESPACES = ("aten", "prims", "miofind")
_UNTOLD = "miofind_untold"
"""What is noted of steps whose strides cannot be told of what they read by now."""

_BY_STRIDES = (
    aten.as_strided.default,
    aten.as_strided_.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten.resize.default,
    aten.view.dtype,
    aten.view_as_complex.default,
)
"""Steps whose results depend on how what they read lies in memory, or that refuse some orders."""


def reads_strides(graph: fx.Graph) -> bool:
    """Whether a step may give other numbers where what it reads lies in another order.

    So do random numbers that are to be eager's, which are drawn in the order of memory.
    """
    return any(map(_reads_order, {node.target for node in graph.nodes if node.op == "call_function"}))


def reads_convolved_by_strides(graph: fx.Graph) -> bool:
    """Whether a step may read what is computed from a convolution of the graph by how it lies in memory.

    A tensor of one place an image lies the same in both orders. A step that notes what it was given as it was traced
    (`eager_input_vals`, as PyTorch has it for operators of exact strides) is given that by Inductor.
    """
    convolved: set[fx.Node] = set()
    for node in graph.nodes:
        is_step = node.op == "call_function" and "eager_input_vals" not in node.meta
        if is_step and _reads_order(node.target) and not convolved.isdisjoint(node.all_input_nodes):
            return True
        value = known_value(node)
        is_of_channels = value is not None and value.dim() > 2 and all(size == 1 for size in value.shape[2:])
        if node.target in CONVOLUTIONS or not (is_of_channels or convolved.isdisjoint(node.all_input_nodes)):
            convolved.add(node)
    return False


def read_by_strides(graph: fx.Graph, others: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The steps that read the order of memory, and others, and all that these are computed from.

    A tensor among them keeps its order: what is computed from it would take another one, too.
    """
    found = {*others}
    for node in reversed(graph.nodes):
        is_one = node.op == "call_function" and _reads_order(node.target)
        if is_one or any(user in found for user in node.users):
            found.add(node)
    return found


def seen_in_order(graph: fx.Graph) -> set[fx.Node]:
    """The steps whose order of memory others read, or a user may see, and all that these are computed from.

    Inductor gives dense results the strides that were traced; parts of tensors lie as these do.
    """
    (output,) = graph.find_nodes(op="output")
    results, wanted = output.args[0], traced_strides(graph)
    if wanted is None or isinstance(results, fx.Node):
        return {*graph.nodes}
    seen = [(results[i], wanted[i]) for i in user_visible(graph) if wanted[i] is not None]
    return read_by_strides(graph, [node for node, strides in seen if not _is_dense(node, strides)])


def _is_dense(node: fx.Node, strides: Sequence[Any]) -> bool:
    """Whether what a step gives takes, at strides, as much memory as it has elements; False where that is not known."""
    value = known_value(node)
    if value is None or not all(isinstance(stride, int) for stride in strides):
        return False
    taken = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True))
    return bool(taken == value.numel())


def _reads_order(step: Any) -> bool:
    """Whether an operator's results may depend on the order in which what it reads lies in memory."""
    if step is operator.getitem:
        return False
    if not _is_known(step) or step in _BY_STRIDES:
        return True
    return bool(config.fallback_random) and torch.Tag.nondeterministic_seeded in step.tags


def _is_known(step: Any) -> bool:
    """Whether a step is an operator of PyTorch's, Inductor's or miofind's, of which it is known what it reads."""
    return isinstance(step, torch._ops.OpOverload) and step.namespace in _NAMESPACES


def retrace_step(node: fx.Node, relaid: set[fx.Node]) -> None:
    """Have a step say how what it gives lies, and note it with those before it where that has changed."""
    if node in relaid or any(each in relaid for each in node.all_input_nodes):
        before, after = node.meta.get("val"), _traced(node)
        if _strides(before) != _strides(after):
            node.meta["val"] = after
            relaid.add(node)


def _traced(node: fx.Node) -> Any:
    """What a step gives, of what its inputs are by now; as it was where it cannot be told."""
    if node.target is not operator.getitem and (not _is_known(node.target) or is_mutable(node.target)):
        return node.meta.get("val")
    before = _tensors(node.meta.get("val"))
    if not before or not all(map(has_known_sizes, before)):
        return node.meta.get("val")  # another call would give numbers of elements of other names
    arguments, named = fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    try:
        with detect_fake_mode((arguments, named)), torch.no_grad():
            return node.target(*arguments, **named)
    except (RuntimeError, ValueError):  # of a view, it may be, which Inductor makes a copy for
        node.meta[_UNTOLD] = True
        return node.meta.get("val")


def _strides(value: Any) -> list[Any]:
    """Those of a tensor, or of each of several."""
    return [each.stride() for each in _tensors(value)]


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that a step gives, one or several."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [each for each in values if isinstance(each, torch.Tensor)]


def restore_strides(graph: fx.Graph) -> None:
    """Have what is given back to the user lie by all the strides that were traced.

    Inductor gives dense results theirs, but takes no notice of dimensions of size 1, as who compares strides does, such
    as what puts gradients into buckets. Parts of tensors have but the order of theirs: of those whose tensors lie
    otherwise than traced each gets memory of its own. Parts that overlap, as of `unfold`, and those of a tensor of
    which more is given back, or that a compiled backward pass is given whole, stay as they lie.
    """
    (output,) = graph.find_nodes(op="output")
    results, wanted = output.args[0], traced_strides(graph)
    if wanted is None or isinstance(results, fx.Node):
        return
    given = list(results)
    seen = [i for i in user_visible(graph) if isinstance(given[i], fx.Node) and wanted[i] is not None]
    roots = Counter(_views_to(given[i])[-1] for i in seen)
    for i in seen:
        node, like = given[i], wanted[i]
        views = _views_to(node)
        with graph.inserting_before(output):
            if is_put_in(node) and _differs_in_ones(node, like):
                given[i] = added_step(graph, aten.as_strided.default, node, [*node.meta["val"].shape], [*like])
            elif roots[views[-1]] == 1 and _is_part(node, like) and _lies_otherwise(views, like):
                given[i] = _spread(graph, node, like)
    output.args = (type(results)(given),)


def _views_to(node: fx.Node) -> list[fx.Node]:
    """A step and those that it is a view of, the one that made the memory last."""
    found = [node]
    while (step := found[-1]).op == "call_function" and _is_view(step.target) and isinstance(step.args[0], fx.Node):
        found.append(step.args[0])
    return found


def _is_view(step: Any) -> bool:
    """Whether an operator gives what shares memory with what it is given first."""
    if step is operator.getitem:
        return True
    if not _is_known(step) or is_mutable(step) or not step._schema.returns:
        return False
    return step._schema.returns[0].alias_info is not None


def _lies_otherwise(views: Sequence[fx.Node], wanted: Sequence[int]) -> bool:
    """Whether a view lies at other strides than wanted, or may: what is relaid may be copied to be viewed."""
    is_told = not any(each.meta.get(_UNTOLD) or _is_copied(each) for each in views)
    return not is_told or _strides(views[0].meta["val"]) != [tuple(wanted)]


def _is_copied(node: fx.Node) -> bool:
    """Whether a step gives a tensor another shape that is no view of it, which Inductor reads as if it were one."""
    if node.target is not aten.reshape.default:
        return False
    read, shape = node.args[0].meta["val"], tuple(node.meta["val"].shape)
    try:
        with read.fake_mode:
            read.view(shape)
    except (RuntimeError, ValueError):
        return True
    return False


def _is_part(node: fx.Node, wanted: Sequence[Any]) -> bool:
    """Whether a step gives a part of a tensor, or repeats one, at known strides; not where parts overlap."""
    value = known_value(node)
    if value is None or not value.numel() or not all(isinstance(stride, int) for stride in wanted):
        return False
    taken = 1
    for stride, size in sorted(zip(wanted, value.shape, strict=True)):
        if size > 1 and 0 < stride < taken:
            return False
        taken += (size - 1) * stride
    return bool(taken != value.numel())


def _spread(graph: fx.Graph, node: fx.Node, strides: Sequence[int]) -> fx.Node:
    """The step that gives what another does at such strides, in memory of its own."""
    value = node.meta["val"]
    shape = [*value.shape]
    once = [size if stride else 1 for size, stride in zip(shape, strides, strict=True)]
    for dim in (dim for dim, size in enumerate(once) if size != shape[dim]):
        node = added_step(graph, aten.slice.Tensor, node, dim, 0, 1)
    taken = 1 + sum((size - 1) * stride for size, stride in zip(once, strides, strict=True))
    memory = graph.call_function(aten.full.default, ([taken], 0), {"dtype": value.dtype, "device": value.device})
    with value.fake_mode:
        memory.meta["val"] = memory.target(*memory.args, **memory.kwargs)
    written = added_step(graph, aten.as_strided_scatter.default, memory, node, once, [*strides])
    return added_step(graph, aten.as_strided.default, written, shape, [*strides])


def _differs_in_ones(node: fx.Node, wanted: Sequence[int]) -> bool:
    """Whether a step's strides are others than wanted, but only of dimensions of size 1."""
    value = node.meta["val"]
    pairs = [*zip(value.shape, value.stride(), wanted, strict=True)]
    if not all(isinstance(number, int) for pair in pairs for number in pair):
        return False
    return any(a != b for _, a, b in pairs) and all(a == b for size, a, b in pairs if size != 1)
