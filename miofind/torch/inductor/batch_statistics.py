"""Batch norm's statistics in training, summed by the convolution that computes what is normed.

In a graph of training a batch norm is a step that computes variance and mean of each channel, and point-wise steps. The
first reads all that the convolution has just written; `miofind::convolution_statistics` sums up what it writes, and
variance and mean are those of the sums: mean = sum / m, variance = sum_of_squares / m - mean^2.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from miofind.torch.fused_calls import Statistics
from miofind.torch.inductor.writing import Writing
from miofind.torch.ops import OPERATORS

aten, prims = torch.ops.aten, torch.ops.prims

_DTYPES = (torch.float16, torch.bfloat16)
"""Whose own rounding costs a variance as much as the difference of sums in float32 does; see docs/numerics.md."""


def put_statistics(writing: Writing, convolution: fx.Node) -> bool:
    """Whether the operator was put in for a convolution and the step that computes its statistics."""
    value = convolution.meta["val"]
    statistics = _statistics_of(convolution)
    if statistics is None or value.dtype not in _DTYPES:
        return False
    x, w, bias, stride, padding, dilation, _, _, groups = convolution.args
    call = Statistics(x, w, bias, stride, padding, dilation, groups, writing.is_last(value))
    with writing.graph.inserting_before(convolution):
        made = writing.put(call)
        if made is None:
            return False
        y, total, of_squares = (writing.step(operator.getitem, made, i) for i in range(3))
        variance_and_mean = _variance_and_mean(writing, total, of_squares, value.shape)
    convolution.replace_all_uses_with(y)
    for user in list(statistics.users):
        user.replace_all_uses_with(variance_and_mean[user.args[1]])
        writing.graph.erase_node(user)
    converted = statistics.args[0]
    writing.graph.erase_node(statistics)
    if converted is not y and not converted.users:
        writing.graph.erase_node(converted)
    writing.graph.erase_node(convolution)
    writing.tidy()
    return True


def gather_vectors(graph: fx.Graph) -> None:
    """Have all vectors of channels that a batch norm makes of the sums follow the operator that gives them.

    What is kept for backward, and written to running statistics, stands at the end of a traced graph. Inductor makes
    one kernel of vectors that are near each other, else one of each.
    """
    for node in list(graph.nodes):
        if node.target is OPERATORS[Statistics]:
            _Vectors(graph, node).gather()


class _Vectors:
    """The vectors of channels that are made of an operator's sums and of what the graph is given."""

    def __init__(self, graph: fx.Graph, statistics: fx.Node) -> None:
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._sums = [node for node in statistics.users if node.args[1] > 0]
        self._last = max(self._sums, key=self._order.__getitem__, default=statistics)
        self._placed = set(self._sums)

    def gather(self) -> None:
        """Put each behind those that it is made of, in their order."""
        found, pending = set[fx.Node](), [*self._sums]
        while pending:
            users = [user for user in pending.pop().users if user not in found and _is_vector(user)]
            found.update(users)
            pending += users
        for node in sorted(found, key=self._order.__getitem__):
            if self._may_be_placed(node):
                self._place(node)

    def _may_be_placed(self, node: fx.Node) -> bool:
        """Whether all that a vector is made of is there behind the operator, or can be."""
        if node in self._placed or node.op == "placeholder":
            return True
        if not _is_vector(node):
            return False
        read = node.all_input_nodes
        if node.target is aten.copy_.default:
            written, *read = read
            others = [user for user in written.users if user is not node]
            if written.op != "placeholder" or any(each.target is not aten.mul.Tensor for each in others):
                return False
            read += others
        return all(self._may_be_placed(each) for each in read)

    def _place(self, node: fx.Node) -> None:
        if node in self._placed or node.op == "placeholder":
            return
        read = node.all_input_nodes
        if node.target is aten.copy_.default:
            read = [*read[1:], *(user for user in read[0].users if user is not node)]
        for each in read:
            self._place(each)
        self._last.append(node)
        self._last = node
        self._placed.add(node)


def _is_vector(node: fx.Node) -> bool:
    """Whether a step of PyTorch's gives one number for each channel."""
    value = node.meta.get("val")
    is_step = node.op == "call_function" and getattr(node.target, "namespace", None) in ("aten", "prims")
    return is_step and isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == max(value.shape)


def _statistics_of(convolution: fx.Node) -> fx.Node | None:
    """The step that gives variance and mean of each of a convolution's channels in float32, or None."""
    axes = [0, *range(2, convolution.meta["val"].dim())]
    for converted in convolution.users:
        if converted.target is not prims.convert_element_type.default or converted.args[1] is not torch.float32:
            continue
        for node in converted.users:
            is_biased = node.kwargs.get("correction") == 0 and node.kwargs.get("keepdim") is True
            if node.target is aten.var_mean.correction and [*node.args[1:]] == [axes] and is_biased:
                is_read_apart = all(user.target is operator.getitem for user in node.users)
                return node if is_read_apart else None
    return None


def _variance_and_mean(
    writing: Writing, total: fx.Node, of_squares: fx.Node, shape: torch.Size
) -> tuple[fx.Node, fx.Node]:
    """New steps that give both, (1, k, 1, ...), of the sums of m values of each channel."""
    share = shape[1] / shape.numel()
    along = [1, shape[1], *[1] * (len(shape) - 2)]
    mean = writing.step(aten.mul.Tensor, total, share)
    square = writing.step(aten.mul.Tensor, mean, mean)
    difference = writing.step(aten.sub.Tensor, writing.step(aten.mul.Tensor, of_squares, share), square)
    variance = writing.step(aten.clamp_min.default, difference, 0)  # else rounding may leave less
    return writing.step(aten.reshape.default, variance, along), writing.step(aten.reshape.default, mean, along)
