"""What the pass asks of Inductor's graphs, new steps in them, and copies of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from miofind.torch.fused.writes import is_mutable

aten, prims = torch.ops.aten, torch.ops.prims

CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
VIEWS = (aten.reshape.default, aten.view.default)
HALVES = (torch.float16, torch.bfloat16)
"""The dtypes of 16 bits, which tensor cores read channels last."""
_PROMOTED = (*HALVES, torch.float32, torch.float64)
"""The dtypes of floating point that PyTorch combines with others: not those of 8 bits."""


def has_numbers(node: fx.Node) -> bool:
    """Whether all sizes of what a step reads are numbers: none depends on a call's inputs."""
    return all(known_value(each) is not None for each in node.all_input_nodes)


def known_value(node: Any) -> Any:
    """The fake tensor that a step gives, of sizes that are numbers; None for whatever else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) and has_known_sizes(value) else None


def has_known_sizes(tensor: torch.Tensor) -> bool:
    """Whether the sizes and strides of a tensor are numbers: none depends on a call's inputs."""
    return all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of a result depends on the elements at its place alone, and nothing is written to.

    PyTorch does not tag conversions so.
    """
    is_tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    is_one = is_tagged or node.target is prims.convert_element_type.default
    return is_one and isinstance(node.meta.get("val"), torch.Tensor) and not is_mutable(node.target)


def is_widened(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a conversion from one tensor's type to another's is of floating point, and loses nothing."""
    are_promoted = before.dtype in _PROMOTED and after.dtype in _PROMOTED
    return are_promoted and bool(torch.promote_types(before.dtype, after.dtype) == after.dtype)


def before_copies(node: Any) -> Any:
    """What conversions to a wider type of floating point, and copies to another memory order, are of."""
    while isinstance(node, fx.Node) and node.target in (prims.convert_element_type.default, aten.clone.default):
        before = node.args[0]
        values = (known_value(before), known_value(node))
        if any(value is None for value in values) or not is_widened(*values):
            break
        node = before
    return node


def trains(graph: fx.Graph) -> bool:
    """Whether a graph is one of training: its weights change from call to call."""
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return any(name.startswith(("primals", "tangents")) for name in names)


def added_step(graph: fx.Graph, target: Any, *arguments: Any, **named: Any) -> fx.Node:
    """A new step of some nodes at the place where a graph inserts, with the fake tensor that it gives, or several."""
    node = graph.call_function(target, arguments, named)
    values, keywords = fx.map_arg((arguments, named), lambda each: each.meta["val"])
    first = next(each.meta["val"] for each in node.all_input_nodes)
    with (first if isinstance(first, torch.Tensor) else first[0]).fake_mode:
        node.meta["val"] = target(*values, **keywords)
    return node


def erase_unused(node: fx.Node, *, but: Any = None) -> None:
    """Erase a step that nothing uses, and those before it that it alone used.

    Args:
        but: what stays, and all before it.
    """
    unused = {node: None}
    while unused:
        last, _ = unused.popitem()
        read = last.all_input_nodes
        last.graph.erase_node(last)
        steps = (each for each in read if each.op == "call_function" and each.target is not but)
        unused |= {each: None for each in steps if not each.users}


def user_visible(graph: fx.Graph) -> list[int]:
    """The places of a graph's results that are a user's; all where it does not say."""
    (output,) = graph.find_nodes(op="output")
    results = output.args[0]
    count = 1 if isinstance(results, fx.Node) else len(results)
    return [*output.meta.get("user_visible_output_idxs", range(count))]


def traced_strides(graph: fx.Graph) -> list[Any] | None:
    """Of each result of a graph, the strides that Inductor gives it, None for what is no tensor; None if it gives none.

    Of size 1 a dimension's stride may differ.
    """
    (output,) = graph.find_nodes(op="output")
    noted: list[Any] | None = output.meta.get("original_output_strides")
    return noted


def copy_of(graph: fx.Graph) -> fx.Graph:
    """A graph of the same steps, each with what is noted with it."""
    copied = fx.Graph()
    _append(copied, graph)
    return copied


def put_back(graph: fx.Graph, copied: fx.Graph) -> None:
    """Give a graph the steps of a copy that was made of it, whatever has become of it since."""
    for node in graph.nodes:
        node.args, node.kwargs = (), {}
    for node in list(graph.nodes):
        graph.erase_node(node)
    _append(graph, copied)


def _append(graph: fx.Graph, copied: fx.Graph) -> None:
    given = graph.graph_copy(copied, {})
    last = next(node for node in reversed(copied.nodes) if node.op == "output")
    graph.output(given).meta.update(last.meta)
