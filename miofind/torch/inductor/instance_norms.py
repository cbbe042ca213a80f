"""Instance norms computed where images and channels are apart, as convolutions have them.

PyTorch norms instances as one image of all images' channels: (n, c, ...) is seen as (1, n * c, ...), and a batch norm
of that follows. Channels last there is no such view: Inductor reads and writes memory across its order, several times
slower, and PyTorch copies to channels first before. Here the steps between that view and the one back are those of
(n, c, ...): the same numbers in the same order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Set
from typing import Any

import torch
from torch import fx

from miofind.torch.inductor.graphs import VIEWS, added_step, has_numbers, is_pointwise
from miofind.torch.inductor.memory_formats import lying_last
from miofind.torch.inductor.strides import read_by_strides, retrace_step
from miofind.torch.inductor.writing import SpatialRanks

aten = torch.ops.aten


def unfold_images(graph: fx.Graph, turned: SpatialRanks = frozenset()) -> None:
    """Compute with images and channels apart what is computed of a view of channels-last tensors that joins them.

    Args:
        turned: the spatial ranks of convolutions that were traced channels first and will be channels last.
    """
    unfolding = _Unfolding(graph, lying_last(graph, turned), read_by_strides(graph))
    for node in list(graph.nodes):
        if node.op == "call_function":
            retrace_step(node, unfolding.relaid)
            unfolding.take(node)
    unfolding.finish()


class _Unfolding:
    """Goes over a graph's steps in order.

    Args:
        last: the steps whose results will lie channels last.
        fixed: those whose order of memory others read, or what is computed from them: these stay.

    Attributes:
        apart: by steps of (1, n * c, ...) or of a number for each of these channels, the steps of (n, c, ...).
        relaid: steps that give what was given in another order before, which may show further views.
    """

    def __init__(self, graph: fx.Graph, last: Set[fx.Node], fixed: Set[fx.Node]) -> None:
        self.apart: dict[fx.Node, fx.Node] = {}
        self.relaid = set[fx.Node]()
        self._graph = graph
        self._last, self._fixed = last, fixed
        self._joins = set[fx.Node]()
        self._passed_over = set[fx.Node]()

    def take(self, node: fx.Node) -> None:
        """Have a step follow those before it that are taken apart."""
        if node.meta.get("val") is None:  # of another pass, which says nothing of it
            return
        read = [each for each in node.all_input_nodes if each in self.apart]
        if not read:
            self._join(node)
            return
        with self._graph.inserting_before(node):
            if node.target is operator.getitem:
                self.apart[node] = self._step(operator.getitem, self.apart[node.args[0]], node.args[1])
            elif node.target is aten.var_mean.correction and _sums_all(node) and node.kwargs.get("keepdim"):
                self.apart[node] = self._reduced(node)
            elif node.target is aten.sum.dim_IntList and _sums_all(node):
                summed = self._reduced(node)
                if node.args[2:] == (True,):
                    self.apart[node] = summed
                else:
                    self._replace(node, self._step(aten.reshape.default, summed, [*node.meta["val"].shape]))
            elif node.target is aten.copy.default and node.args[1] in self.apart and _keeps_type(node):
                self.apart[node] = self._step(aten.clone.default, self.apart[node.args[1]])
                if node.args[0].target is aten.new_empty_strided.default:
                    self._passed_over.add(node.args[0])
            elif node.target is aten.clone.default:
                self.apart[node] = self._step(aten.clone.default, self.apart[read[0]])
            elif node.target in VIEWS and node.meta["val"].shape == self.apart[read[0]].meta["val"].shape:
                if self._is_alone(read[0]):
                    self._replace(node, self.apart[read[0]])
            elif is_pointwise(node) and (arguments := self._arguments(node, read[0])) is not None:
                self.apart[node] = self._step(node.target, *arguments, **node.kwargs)

    def finish(self) -> None:
        """Have all other steps read what was computed in the shape that they had, and erase what nothing reads."""
        for node, apart in reversed([*self.apart.items()]):
            users = [user for user in node.users if user not in self.apart]
            if node in self._joins:
                node.target = aten.reshape.default  # of what may lie in another order by now
            elif users and _is_tensor(node):
                with self._graph.inserting_before(node):
                    together = self._step(aten.reshape.default, apart, [*node.meta["val"].shape])
                node.replace_all_uses_with(together, delete_user_cb=lambda user: user not in self.apart)
        for node in reversed([*self._graph.nodes]):
            if not node.users and (node in self.apart or node in self._passed_over):
                self._graph.erase_node(node)

    def _join(self, node: fx.Node) -> None:
        """Note a step that sees the channels of several images, which lie channels last, as those of one.

        A copy to channels first before it, which PyTorch needs for the view, is passed over.
        """
        if node.target not in VIEWS or node in self._fixed or not has_numbers(node):
            return
        read, shape = node.args[0], tuple(node.meta["val"].shape)
        is_copied = read.target is aten.clone.default and has_numbers(read)
        images = read.args[0] if is_copied else read
        value = images.meta["val"]
        is_joined = (
            value.dim() > 3 and value.shape[0] > 1 and shape == (1, math.prod(value.shape[:2]), *value.shape[2:])
        )
        if is_joined and (images in self._last or not value.is_contiguous()):
            self.apart[node] = images
            self._joins.add(node)
            if is_copied:
                self._passed_over.add(read)

    def _is_alone(self, node: fx.Node) -> bool:
        """Whether what a step gives may stand for a result: it is no other tensor that was copied before."""
        copied = node in self._joins and node.args[0] is not self.apart[node]
        return not copied and self.apart[node].op != "placeholder"

    def _step(self, target: Any, *arguments: Any, **named: Any) -> fx.Node:
        node = added_step(self._graph, target, *arguments, **named)
        self.relaid.add(node)
        return node

    def _replace(self, node: fx.Node, by: fx.Node) -> None:
        node.replace_all_uses_with(by)
        self._graph.erase_node(node)
        self.relaid.add(by)

    def _reduced(self, node: fx.Node) -> fx.Node:
        """A step over all but channels, as one over all but images and channels."""
        apart = self.apart[node.args[0]]
        return self._step(node.target, apart, [*range(2, apart.meta["val"].dim())], *node.args[2:], **node.kwargs)

    def _arguments(self, node: fx.Node, read: fx.Node) -> tuple[Any, ...] | None:
        """Of a point-wise step, with images and channels apart as one that it reads; None where one cannot be so."""
        images, rank = self.apart[read].meta["val"].shape[:2], node.meta["val"].dim()
        shapes: dict[fx.Node, list[int]] = {}
        for argument in node.all_input_nodes:
            value = self.apart.get(argument, argument).meta.get("val")
            if not isinstance(value, torch.Tensor) or value.dim() > rank:
                return None
            if argument in self.apart:
                if value.dim() != rank or value.shape[:2] != images:
                    return None
            elif value.numel() > 1:
                shape = [1] * (rank - value.dim()) + [*value.shape]
                if shape[:2] != [1, math.prod(images)]:
                    return None
                shapes[argument] = [*images, *shape[2:]]
        if any(isinstance(each, fx.Node) for each in node.kwargs.values()):
            return None

        def apart(argument: fx.Node) -> fx.Node:
            if argument in shapes:
                return self._step(aten.reshape.default, argument, shapes[argument])
            return self.apart.get(argument, argument)

        return tuple(fx.map_arg(node.args, apart))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _keeps_type(copy: fx.Node) -> bool:
    """Whether a copy gives what it is given, in the same type and shape."""
    value, source = copy.meta["val"], copy.args[1].meta["val"]
    return bool((value.dtype, value.device, value.shape) == (source.dtype, source.device, source.shape))


def _sums_all(node: fx.Node) -> bool:
    """Whether a step is over all dimensions but that of channels."""
    value = node.args[0].meta["val"]
    return len(node.args) > 1 and node.args[1] is not None and [*node.args[1]] == [0, *range(2, value.dim())]
