"""Gradients of upsamplings gathered: each element sums those of the output that were computed from it.

PyTorch decomposes an interpolation, and its gradient becomes a scatter for each corner: atomic additions to memory that
is zeroed before, channels first whatever the order of the gradient. The same sum is taken here over a small window of
the gradient for each element, with weights that are known as the graph is compiled: in the gradient's order, one
dimension after another where windows are large, and as point-wise steps, which Inductor computes with what follows.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims
from torch._subclasses.fake_tensor import unset_fake_temporarily

from miofind.torch.inductor.constants import Constants
from miofind.torch.inductor.graphs import HALVES, added_step, erase_unused
from miofind.torch.inductor.scatters import SCATTER, ScatterSum, plain_summands, scatter_sums
from miofind.torch.inductor.strides import read_by_strides, retrace_step
from miofind.torch.inductor.windows import Window, window_of
from miofind.torch.override.formats import channels_last_format, is_last, packed_strides

aten, prims = torch.ops.aten, torch.ops.prims

_MOST_TAPS = 25
"""Elements of a window that are read at once; larger ones are summed along one dimension after another."""


def gather_gradients(graph: fx.Graph) -> None:
    """Have gradients of upsamplings be sums over windows in place of scatters."""
    if not graph.find_nodes(op="call_function", target=SCATTER) or not _is_outermost(graph):
        return
    with unset_fake_temporarily(), torch.no_grad():  # places and weights are numbers
        _gather(graph)


def _is_outermost(graph: fx.Graph) -> bool:
    """Whether a graph is the joint one of all that is compiled: Inductor takes no constants in graphs within graphs.

    Nested regions count the gradients that they are given from 0 on; branches do not name them.
    """
    return any(node.target == "tangents_1" for node in _tangents(graph)[:1])


def _tangents(graph: fx.Graph) -> list[fx.Node]:
    """The gradients that a graph is given."""
    return [node for node in graph.find_nodes(op="placeholder") if node.target.startswith("tangents")]


def _backward(graph: fx.Graph) -> set[fx.Node]:
    """The steps that are computed from gradients.

    What others scatter may be a result of the forward pass, which lies as its user expects and in memory of its own.
    """
    found = {*_tangents(graph)}
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _gather(graph: fx.Graph) -> None:
    constants, backward = Constants(), _backward(graph)
    sums = [each for each in scatter_sums(graph, constants) if each.source in backward]
    windows = {each.first: (each, _windows(each, constants)) for each in sums}
    gathering, relaid = _Gathering(graph, read_by_strides(graph)), set[fx.Node]()
    for node in graph.nodes:  # in order, as one gradient's may follow from another's
        if node.op == "call_function":
            retrace_step(node, relaid)
        scatters, found = windows.get(node, (None, None))
        if scatters is not None and found is not None:
            result = gathering.written(scatters, found)
            relaid |= set() if result.meta["val"].is_contiguous() else {result}


def _windows(scatters: ScatterSum, constants: Constants) -> list[Window] | None:
    """Those of a sum of scatters along each of its dimensions; None where it is no upsampling's gradient."""
    maps = scatters.maps(constants)
    if len(maps) != 1:
        return None
    (found,), dimension = maps, scatters.scatters[0].dimension
    along = [tuple(each.scaled(found.scale) for each in found.along[0]), *found.along[1:]]
    shape = scatters.first.meta["val"].shape
    windows = [window_of(i, shape[i], entries) for i, entries in enumerate(along, dimension)]
    known = [window for window in windows if window is not None and window.is_worthwhile]
    return known if len(known) == len(windows) else None


class _Gathering:
    """Writes sums over windows into a graph.

    Args:
        fixed: the steps whose results lie as they were traced, whatever the order of gradients.
    """

    def __init__(self, graph: fx.Graph, fixed: Set[fx.Node]) -> None:
        self._graph, self._fixed = graph, fixed
        self._step = functools.partial(added_step, graph)
        self._constants: dict[str, fx.Node] = {}
        self._instead: dict[fx.Node, fx.Node] = {}

    def written(self, scatters: ScatterSum, windows: Sequence[Window]) -> fx.Node:
        """Put a sum over windows in the place of one of scatters."""
        first, source = scatters.first, scatters.source
        while source in self._instead:
            source = self._instead[source]
        dtype = first.meta["val"].dtype
        self._constants.clear()  # they stand behind what is given, and before what is put in here
        with self._graph.inserting_before(first):
            value = self._converted(source, torch.float32 if dtype in HALVES else dtype)
            for some in _at_once(windows):
                value = self._sum(value, some)
            result = self._laid_out(self._converted(value, dtype), source, is_fixed=first in self._fixed)
        self._replace(first, result)
        for other in (scatter.node for scatter in scatters.scatters[1:]):
            (added,) = other.users
            (rest,) = (each for each in plain_summands(added) or () if each is not other)
            self._replace(added, rest)
            erase_unused(added)
        erase_unused(first)
        return result

    def _replace(self, node: fx.Node, by: fx.Node) -> None:
        node.replace_all_uses_with(by)
        self._instead[node] = by

    def _converted(self, value: fx.Node, dtype: Any) -> fx.Node:
        if value.meta["val"].dtype is dtype:
            return value
        return self._step(prims.convert_element_type.default, value, dtype)

    def _laid_out(self, value: fx.Node, source: fx.Node, *, is_fixed: bool) -> fx.Node:
        """A result channels last where the gradient is and no step reads the order of what is computed from it.

        Else as it was traced.
        """
        like, given = source.meta["val"], value.meta["val"]
        if is_last(like) and not is_fixed:
            if is_last(given) or given.dim() not in (4, 5):
                return value
            return self._step(aten.clone.default, value, memory_format=channels_last_format(given.dim()))
        if given.is_contiguous():
            return value
        return self._step(aten.clone.default, value, memory_format=torch.contiguous_format)

    def _sum(self, value: fx.Node, windows: Sequence[Window]) -> fx.Node:
        if windows[0].is_whole:
            return self._whole_sum(value, *windows)
        if windows[0].line.is_strided:
            return self._strided_sum(value, windows)
        return self._indexed_sum(value, *windows)

    def _whole_sum(self, value: fx.Node, window: Window) -> fx.Node:
        """The sum along a dimension of which one element is left."""
        weighed = self._weighed(value, window.weights[:, 0], window.dimension)
        return self._step(aten.sum.dim_IntList, weighed, [window.dimension], True)

    def _strided_sum(self, value: fx.Node, windows: Sequence[Window]) -> fx.Node:
        """The sum over windows that begin at equal distances, of some dimensions at once.

        Each element of a window is a term of its own, which Inductor neither stores nor takes for a reduction.
        """
        padded = self._padded(value, windows)

        def summed(part: fx.Node, left: Sequence[Window]) -> fx.Node:
            if not left:
                return part
            (window, *others), dimension = left, left[0].dimension
            terms = list[fx.Node]()
            for place, weights in enumerate(window.weights):
                if not weights.any():
                    continue  # as of cubic ones by odd factors, which an infinity times 0 would spoil
                term = summed(self._taken(part, window, place), others)
                terms.append(self._weighed(term, weights, dimension, skips=window.skips(place)))
            return functools.reduce(lambda one, other: self._step(aten.add.Tensor, one, other), terms)

        return summed(padded, windows)

    def _padded(self, value: fx.Node, windows: Sequence[Window]) -> fx.Node:
        """Zeros where windows reach beyond the gradient."""
        beyond = {window.dimension: window.line.beyond for window in windows}
        last_first = range(value.meta["val"].dim() - 1, min(beyond) - 1, -1)
        ends = [end for dimension in last_first for end in beyond.get(dimension, (0, 0))]
        return self._step(aten.constant_pad_nd.default, value, ends, 0.0) if any(ends) else value

    def _taken(self, padded: fx.Node, window: Window, place: int) -> fx.Node:
        """What is at one place of all windows."""
        line = window.line
        begin = place + max(line.begin, 0)
        end = begin + (line.rows - 1) * line.step + 1
        return self._step(aten.slice.Tensor, padded, window.dimension, begin, end, line.step)

    def _indexed_sum(self, value: fx.Node, window: Window) -> fx.Node:
        """The sum over windows of one dimension that begin anywhere.

        Inductor does not see through indices in which order a result is best stored, and stores it channels first where
        it is not told otherwise.
        """
        line, dimension = window.line, window.dimension
        places = line.starts[:, None] + torch.arange(line.size)
        index = [*[None] * dimension, self._constant(places, value)]
        taken = self._step(aten._unsafe_index.Tensor, value, index)
        weighed = self._weighed(taken, window.weights.T, dimension, skips=bool((window.weights == 0).any()))
        summed = self._step(aten.sum.dim_IntList, weighed, [dimension + 1])
        if not is_last(value.meta["val"]):
            return summed
        strides = packed_strides(tuple(summed.meta["val"].shape), True)
        return self._step(inductor_prims.force_stride_order, summed, [*strides])

    def _weighed(self, value: fx.Node, weights: torch.Tensor, dimension: int, *, skips: bool = False) -> fx.Node:
        """The product with weights along a dimension, and others that follow it.

        Args:
            skips: whether it is 0 where a weight is: what is not to be read may be infinite or no number.
        """
        first = weights.flatten()[0]
        if (weights == first).all():
            return value if first == 1 else self._step(aten.mul.Tensor, value, first.item())
        like = value.meta["val"]
        shape = [*weights.shape] + [1] * (like.dim() - dimension - weights.dim())
        factor = self._constant(weights.to(like.dtype).reshape(shape), value)
        product = self._step(aten.mul.Tensor, value, factor)
        if not skips:
            return product
        return self._step(aten.where.self, self._step(aten.ne.Scalar, factor, 0), product, factor)

    def _constant(self, tensor: torch.Tensor, like: fx.Node) -> fx.Node:
        """A step that gives a tensor, on the device of another."""
        module, value = self._graph.owning_module, like.meta["val"]
        assert module is not None, "a compiled graph has one"
        tensor = tensor.contiguous()
        told = f"{value.device} {tensor.dtype} {[*tensor.shape]}".encode() + tensor.numpy().tobytes()
        name = f"_miofind_{hashlib.sha256(told).hexdigest()[:32]}"
        if name not in self._constants:
            module.register_buffer(name, tensor.to(value.device))
            given = self._graph.get_attr(name)
            given.meta["val"] = value.fake_mode.from_tensor(getattr(module, name), static_shapes=True)
            # Inductor's fake tensors alone are what other steps take.
            self._constants[name] = self._step(aten.lift_fresh_copy.default, given)
        return self._constants[name]


def _at_once(windows: Iterable[Window]) -> list[list[Window]]:
    """Windows of dimensions that are summed over together: at equal distances, as long as they have few elements."""
    together = list[list[Window]]()
    kept = [window for window in windows if not window.is_identity]
    for window in sorted(kept, key=lambda window: not window.is_whole):  # what leaves least comes first
        if together and _is_joined(together[-1], window):
            together[-1].append(window)
        else:
            together.append([window])
    return together


def _is_joined(some: Sequence[Window], window: Window) -> bool:
    """Whether a window is summed over together with some others."""
    are_strided = all(each.line.is_strided and not each.is_whole for each in (*some, window))
    return are_strided and math.prod(each.line.size for each in (*some, window)) <= _MOST_TAPS
