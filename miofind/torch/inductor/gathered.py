"""Small steps of a graph of training that are alike, made one: casts of weights and their gradients, counts of batches.

Inductor makes a kernel of each, since nothing else of the graph can be computed with it. On a GPU that takes a
microsecond or two however few numbers there are, and a training step of ResNet-50 has some 160 of them. Steps over
lists of tensors are one kernel, as those of optimizers are.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from miofind.torch.fused.calls import BackwardData, BackwardWeights, Forward, Statistics
from miofind.torch.fused.ops import ARGUMENTS, LIBRARY, OPERATORS
from miofind.torch.fused.writes import is_mutable
from miofind.torch.inductor.graphs import CONVOLUTIONS, added_step, has_numbers
from miofind.torch.inductor.memory_formats import runs_last
from miofind.torch.inductor.writing import SpatialRanks
from miofind.torch.override.formats import is_dense, layout_like

aten, prims = torch.ops.aten, torch.ops.prims

_LEAST = 2
"""Steps that are worth one in their place."""
_LARGEST = 1 << 22
"""Elements of what is cast with others: more take longer than a launch."""
_MOST = 1 << 24
"""Elements of gradients that are cast at once: they are kept until the last of them is there."""

_NONE = slice(0, 0)
_WEIGHTS = {
    aten.convolution.default: slice(1, 3),
    aten.convolution_backward.default: slice(2, 3),
    OPERATORS[Forward]: slice(1, 4),
    OPERATORS[Statistics]: slice(1, 3),
    OPERATORS[BackwardData]: slice(2, 3),
    OPERATORS[BackwardWeights]: slice(2, 3),
}
"""Where convolutions take weights and vectors of channels among their arguments."""

LIBRARY.define("cast(Tensor[] tensors, ScalarType dtype) -> Tensor[]")


def _cast(tensors: Sequence[Any], dtype: Any) -> list[Any]:
    """The tensors in another dtype."""
    return [tensor.to(dtype, copy=True) for tensor in tensors]


LIBRARY.impl("cast", _cast, "CompositeExplicitAutograd")
torch.library.register_fake("miofind::cast", _cast)


def gather_casts(graph: fx.Graph, last_ranks: SpatialRanks) -> None:
    """Cast all weights before the first of them is read, and their gradients together, some millions of them at once.

    Those stay that turn a tensor to another memory order, too: each does that in tiles of its own.

    Args:
        last_ranks: the spatial ranks of convolutions that will be channels last, whatever they were traced as.
    """
    if not _is_lowered():
        return
    given, made = defaultdict[Any, list[fx.Node]](list), defaultdict[Any, list[fx.Node]](list)
    (output,) = (node for node in graph.nodes if node.op == "output")
    for node in graph.nodes:
        if node.target is not prims.convert_element_type.default or not has_numbers(node):
            continue
        source, value = node.args[0], node.meta["val"]
        kind = (node.args[1], value.device)
        if value.numel() > _LARGEST or source.meta["val"].dtype is value.dtype:  # the latter is a copy
            continue
        if source.op == "placeholder":
            if _is_weight(node, output) and not _is_written(source) and _keeps_order(node, last_ranks):
                given[kind].append(node)
        elif _is_gradient(source) and [*node.users] == [output] and _keeps_order(node, last_ranks):
            made[kind].append(node)
    for (dtype, _), casts in given.items():
        _gather(graph, casts, _behind_placeholders(graph), torch.ops.miofind.cast.default, dtype)
    order = {node: place for place, node in enumerate(graph.nodes)}
    for (dtype, _), casts in made.items():
        for some in _some_at_once(sorted(casts, key=lambda cast: order[cast.args[0]])):
            _gather(graph, some, some[-1].args[0].next, torch.ops.miofind.cast.default, dtype)


def gather_counts(graph: fx.Graph) -> None:
    """Count up batches of all batch norms at once."""
    counts = defaultdict[Any, list[fx.Node]](list)
    for node in graph.nodes:
        if node.target is not aten.add.Tensor or node.kwargs or type(node.args[1]) is not int or node.args[1] != 1:
            continue
        count = node.args[0]
        is_counter = count.op == "placeholder" and has_numbers(node) and not count.meta["val"].dim()
        is_counter = is_counter and node.meta["val"].dtype is count.meta["val"].dtype and not _is_written(count)
        if is_counter and all(user.target is aten.copy_.default and user.args[0] is count for user in node.users):
            counts[node.meta["val"].dtype, node.meta["val"].device].append(node)
    for added in counts.values():
        _gather(graph, added, _behind_placeholders(graph), aten._foreach_add.Scalar, 1)


@functools.cache
def _is_lowered() -> bool:
    """Whether Inductor knows how a list of tensors is cast: by its own casts, in one kernel."""
    from torch._inductor import lowering

    try:
        lowering.register_foreach_pointwise(torch.ops.miofind.cast.default, lowering.to_dtype)
    except (AttributeError, TypeError):  # it is Inductor's own, and may change
        return False
    return True


def _gather(graph: fx.Graph, steps: Sequence[fx.Node], before: fx.Node, target: Any, argument: Any) -> None:
    """One step over a list, before another one, for steps of one tensor each."""
    if len(steps) < _LEAST:
        return
    with graph.inserting_before(before):
        together = added_step(graph, target, [step.args[0] for step in steps], argument)
        each_alone = [graph.call_function(operator.getitem, (together, place)) for place in range(len(steps))]
    for step, alone in zip(steps, each_alone, strict=True):
        alone.meta["val"] = step.meta["val"]  # in the memory format that was noted with it
        step.replace_all_uses_with(alone)
        graph.erase_node(step)


def _behind_placeholders(graph: fx.Graph) -> fx.Node:
    """The first step that is computed."""
    found: fx.Node = next(itertools.dropwhile(lambda node: node.op == "placeholder", graph.nodes))
    return found


def _is_weight(cast: fx.Node, output: fx.Node) -> bool:
    """Whether convolutions alone read it, as their weights or what they scale and add channels by."""
    readers = [user for user in cast.users if user is not output]
    return bool(readers) and all(cast in user.args[_WEIGHTS.get(user.target, _NONE)] for user in readers)


def _is_written(placeholder: fx.Node) -> bool:
    """Whether a step may write to what a graph is given before its end, where `copy_` does what the trace did."""
    known = (operator.getitem, aten.copy_.default)
    users = [user for user in placeholder.users if user.op == "call_function" and user.target not in known]
    return any(not isinstance(user.target, torch._ops.OpOverload) or is_mutable(user.target) for user in users)


def _some_at_once(casts: Iterable[fx.Node]) -> Iterator[list[fx.Node]]:
    """Parts of a list that have _MOST elements or little more."""
    some, elements = list[fx.Node](), 0
    for cast in casts:
        some.append(cast)
        elements += cast.meta["val"].numel()
        if elements >= _MOST:
            yield some
            some, elements = [], 0
    if some:
        yield some


def _is_gradient(node: fx.Node) -> bool:
    """Whether a step is what a convolution's backward pass gives."""
    if node.target is not operator.getitem:
        return node.target in ARGUMENTS
    return node.args[0].target in (*CONVOLUTIONS, *ARGUMENTS)


def _keeps_order(cast: fx.Node, last_ranks: SpatialRanks) -> bool:
    """Whether the numbers lie in memory as before, whichever memory format is meant."""
    source, value = cast.args[0].meta["val"], cast.meta["val"]
    if source.dim() < 3 or source.shape[1] == 1 or math.prod(source.shape[2:]) == 1:
        return True
    if source.dim() == 3:
        return bool(source.is_contiguous() and value.is_contiguous())
    is_last = [is_dense(v, layout_like(v, channels_last=True)) for v in (source, value)]
    return all(is_last) or not (source.dim() - 2 in last_ranks or any(is_last) or any(map(runs_last, cast.users)))
