"""Batch norm's statistics in training, summed by the convolution that computes what is normed.

In a graph of training a batch norm is a step that computes variance and mean of each channel, and point-wise steps. The
first reads all that the convolution has just written; `miofind::convolution_statistics` sums up what it writes, and
variance and mean are those of the sums: mean = sum / m, variance = sum_of_squares / m - mean^2.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from miofind.torch.fused.calls import Statistics
from miofind.torch.fused.ops import OPERATORS
from miofind.torch.fused.writes import is_mutable
from miofind.torch.inductor.graphs import HALVES
from miofind.torch.inductor.writing import Writing

aten, prims = torch.ops.aten, torch.ops.prims

_DTYPES = HALVES
"""Those whose own rounding costs a variance as much as the difference of sums in float32 does; see docs/numerics.md."""


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
    if not converted.users:
        writing.graph.erase_node(converted)
    writing.graph.erase_node(convolution)
    writing.tidy()
    return True


def gather_vectors(graph: fx.Graph) -> None:
    """Have all vectors of channels that are made of an operator's sums follow it.

    What is kept for backward, and written to running statistics, stands at the end of a traced graph. Inductor makes
    one kernel of vectors that are near each other, else one of each.
    """
    vectors = _Vectors(graph)
    for node in list(graph.nodes):
        if node.target is OPERATORS[Statistics]:
            vectors.gather(node)


class _Vectors:
    """The vectors of channels that are made of operators' sums and of what the graph is given.

    Only what stands behind an operator's sums is moved, forward: what reads it follows in any case.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._known: dict[fx.Node, bool] = {}

    def gather(self, statistics: fx.Node) -> None:
        """Put each behind those that it is made of, in their order; operators come in the graph's."""
        sums = [node for node in statistics.users if node.args[1] > 0]
        self._last = max(sums, key=self._order.__getitem__, default=statistics)
        self._end_of_sums = self._order[self._last]
        self._known.clear()
        found, pending = set[fx.Node](), [*sums]
        while pending:
            users = [user for user in pending.pop().users if user not in found and _is_vector(user)]
            found.update(users)
            pending += users
        for node in sorted(found, key=self._order.__getitem__):
            if self._may_be_placed(node):
                self._place(node)

    def _may_be_placed(self, node: fx.Node) -> bool:
        """Whether all that a vector is made of is there behind the operator, or can be."""
        if self._is_there(node):
            return True
        if node not in self._known:
            self._known[node] = self._can_be_moved(node) and all(map(self._may_be_placed, _needed(node)))
        return self._known[node]

    @staticmethod
    def _can_be_moved(node: fx.Node) -> bool:
        if not _is_vector(node):
            return False
        if node.target is aten.copy_.default:  # a product is no view of the old numbers, and is placed before
            written = node.args[0]
            others = [user for user in written.users if user is not node]
            return written.op == "placeholder" and all(each.target is aten.mul.Tensor for each in others)
        return not is_mutable(node.target) and torch.Tag.nondeterministic_seeded not in node.target.tags

    def _is_there(self, node: fx.Node) -> bool:
        """Whether a step stands before the place of the next, where it stays: what else reads it may do so before."""
        return self._order[node] <= self._end_of_sums

    def _place(self, node: fx.Node) -> None:
        if self._is_there(node):
            return
        for each in _needed(node):
            self._place(each)
        self._last.append(node)
        self._last = node
        self._order[node] = self._end_of_sums


def _needed(node: fx.Node) -> list[fx.Node]:
    """What is to be computed before a step: what it reads, and what reads the old numbers of what it writes."""
    read: list[fx.Node] = node.all_input_nodes
    if node.target is not aten.copy_.default:
        return read
    return [*read[1:], *(user for user in read[0].users if user is not node)]


def _is_vector(node: fx.Node) -> bool:
    """Whether a step of PyTorch's gives a tensor of known size, of which one dimension at most is longer than 1."""
    value = node.meta.get("val")
    is_step = node.op == "call_function" and getattr(node.target, "namespace", None) in ("aten", "prims")
    if not is_step or not isinstance(value, torch.Tensor) or not value.dim():
        return False
    is_known = all(isinstance(size, int) for size in value.shape)
    return is_known and value.numel() == max(value.shape)  # of symbols, this would be a guard


def _statistics_of(convolution: fx.Node) -> fx.Node | None:
    """The step that gives variance and mean of each of a convolution's channels in float32, or None."""
    axes = [0, *range(2, convolution.meta["val"].dim())]
    converted = (node for node in convolution.users if node.target is prims.convert_element_type.default)
    for node in (user for each in converted if each.args[1] is torch.float32 for user in each.users):
        is_as_in_norms = node.kwargs.get("correction") == 0 and node.kwargs.get("keepdim") is True
        is_of_channels = node.target is aten.var_mean.correction and [*node.args[1:]] == [axes]
        if is_of_channels and is_as_in_norms and all(user.target is operator.getitem for user in node.users):
            return node
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
