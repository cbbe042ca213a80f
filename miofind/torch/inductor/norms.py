"""What norms do to each element: one factor and one shift for each channel.

A norm subtracts a mean, divides by a deviation, multiplies by a weight and adds a bias; its gradient does as much to
two tensors. Inductor's kernels read each of these vectors for every element, and compute a deviation from a variance
for it: a group norm's, channels last, takes nearly twice as long as reading and writing the tensor. Here vectors are
combined first, and written; for each element x * factor + shift is left, as in PyTorch's own kernels of group norms.
That is for tensors of 16 bits, whose rounding costs more than another order of operations in float32 does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims

from miofind.torch.fused.writes import is_mutable
from miofind.torch.inductor.graphs import (
    HALVES,
    VIEWS,
    added_step,
    before_copies,
    erase_unused,
    is_pointwise,
    known_value,
)
from miofind.torch.inductor.strides import seen_in_order
from miofind.torch.override.formats import packed_strides

aten, prims = torch.ops.aten, torch.ops.prims
_CONVERSION = prims.convert_element_type.default
_STEPS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)

_LEAST_SIZE = 1 << 22
"""Elements of a tensor: of less, writing the vectors costs as much as it saves."""
_LEAST_PLACES = 64
"""Elements of a channel."""
_MOST_STEPS = 64
"""Those that are followed for a norm, which has a dozen: calls are nested, and what is centred is followed anew."""


def combine_vectors(graph: fx.Graph) -> int:
    """Have what norms do to each element be a factor and a shift of its channel; returns how often.

    What they read is read later than before: at the last of their steps. So norms behind a step that writes to what it
    is given stay; of what AOTAutograd gives Inductor, all that writes to a graph's inputs is at the end.
    """
    norms = _Norms(graph)
    roots = [*itertools.takewhile(lambda node: not is_mutable(node.target), graph.nodes)]
    return sum(norms.is_replaced(node) for node in reversed(roots) if node.users)


@dataclass(frozen=True, slots=True)
class _Vector:
    """A step that gives a number for each channel, as it is applied to a tensor of a shape."""

    node: fx.Node
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Made:
    """Numbers of each channel that are made of others."""

    step: Any
    left: _Vector | _Made
    right: _Numbers


_Numbers = _Vector | _Made | int
"""Those of each channel, or one for all."""


def _product(left: _Numbers, right: _Numbers) -> _Numbers:
    if isinstance(left, int):
        if isinstance(right, int):
            return left * right
        left, right = right, left
    if isinstance(right, int) and right in (0, 1):
        return left if right else 0
    return _Made(aten.mul.Tensor, left, right)


def _sum(left: _Numbers, right: _Numbers) -> _Numbers:
    if isinstance(left, int):
        if isinstance(right, int):
            return left + right
        left, right = right, left
    return left if right == 0 else _Made(aten.add.Tensor, left, right)


@dataclass(frozen=True, slots=True)
class _Combination:
    """A sum of tensors, each multiplied by a factor of its channel, and of a constant of each channel."""

    factors: Mapping[fx.Node, _Numbers]
    constant: _Numbers = 0

    def times(self, factor: _Numbers) -> _Combination:
        """All of it, multiplied."""
        factors = {node: _product(each, factor) for node, each in self.factors.items()}
        return _Combination(factors, _product(self.constant, factor))

    def plus(self, other: _Combination) -> _Combination:
        """The sum of two."""
        nodes = dict.fromkeys((*self.factors, *other.factors))
        factors = {node: _sum(self.factors.get(node, 0), other.factors.get(node, 0)) for node in nodes}
        return _Combination(factors, _sum(self.constant, other.constant))

    def is_worthwhile(self) -> bool:
        """Whether kernels would read fewer vectors than they do, and a tensor is of 16 bits."""
        vectors = [each for each in (*self.factors.values(), self.constant) if not isinstance(each, int)]
        is_narrow = any(node.meta["val"].dtype in HALVES for node in self.factors)
        is_whole = 0 not in self.factors.values()  # what is taken off itself may not be finite
        return is_narrow and is_whole and len(vectors) < len(set[fx.Node]().union(*map(_read, vectors)))


class _Norms:
    """The norms of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._in_order = seen_in_order(graph)
        self._steps_left = 0

    def is_replaced(self, root: fx.Node) -> bool:
        """Whether a step is the last of those of a norm, and was replaced."""
        value = known_value(root)
        if value is None or value.numel() < _LEAST_SIZE:
            return False
        if math.prod(value.shape[2:]) < _LEAST_PLACES:
            return False
        self._steps_left = _MOST_STEPS
        found = self._combination(root, root)
        if found is None or not found.is_worthwhile():
            return False
        with self._graph.inserting_before(root):
            made = self._written_out(found, value.shape)
            if root in self._in_order and made.meta["val"].stride() != value.stride():
                made = self._in_order_of(made, value)
        root.replace_all_uses_with(made)
        erase_unused(root)
        return True

    def _combination(self, node: fx.Node, root: fx.Node) -> _Combination | None:
        """What a step gives as a combination of tensors as large as it; None where it is none.

        Args:
            root: what it is computed for.
        """
        value = known_value(node)
        if value is None or value.dtype != torch.float32:
            return None
        if node.target in VIEWS:
            return self._part(node.args[0], root)
        if node.target not in _STEPS or node.kwargs:
            return None
        left, right = (self._operand(each, node, root) for each in node.args)
        if left is None or right is None:
            return None
        if node.target is not aten.mul.Tensor:
            return left.plus(right if node.target is aten.add.Tensor else right.times(-1))
        if left.factors and right.factors:
            return None
        return left.times(right.constant) if left.factors else right.times(left.constant)

    def _operand(self, node: Any, reader: fx.Node, root: fx.Node) -> _Combination | None:
        """What a step reads: a vector, or a combination of tensors."""
        vector = self._vector(node, reader, root)
        return self._part(node, root) if vector is None else _Combination({}, vector)

    def _part(self, node: fx.Node, root: fx.Node) -> _Combination | None:
        """A combination that is part of another: a step itself where it is none, or is computed for others, too.

        What is centred alone, or behind a view, is computed for each that reads it.
        """
        value = known_value(node)
        if value is None or value.numel() != root.meta["val"].numel():
            return None
        is_centred = node.target is aten.sub.Tensor and self._vector(node.args[1], node, root) is not None
        is_alone = len(node.users) == 1 or is_centred or node.target in VIEWS
        self._steps_left -= 1
        found = self._combination(node, root) if is_alone and self._steps_left > 0 else None
        return _Combination({before_copies(node): 1}) if found is None else found

    def _vector(self, node: Any, applied: fx.Node, root: fx.Node) -> _Vector | None:
        """A step that another reads, if it gives a number for each channel of a root."""
        value = known_value(node)
        if value is None or value.device != root.meta["val"].device:
            return None
        shape, of_root = tuple(applied.meta["val"].shape), root.meta["val"].shape
        found = _Vector(node, shape)
        blocks = math.prod(shape[: _end(found)])
        is_for_channels = _end(found) <= 2 if shape == tuple(of_root) else of_root[0] * of_root[1] % blocks == 0
        return found if is_for_channels else None

    def _written_out(self, combination: _Combination, shape: torch.Size) -> fx.Node:
        """The steps of a combination, the last of which gives it."""
        step, total = self._step, self._stored(combination.constant, shape)
        for node, factor in combination.factors.items():
            given = node if node.meta["val"].shape == shape else step(aten.reshape.default, node, [*shape])
            if isinstance(factor, int):
                given = self._wide(given)
            if factor != 1:
                given = step(aten.mul.Tensor, given, self._stored(factor, shape))
            total = given if isinstance(total, int) else step(aten.add.Tensor, total, given)
        assert isinstance(total, fx.Node)
        return total

    def _stored(self, numbers: _Numbers, shape: torch.Size) -> Any:
        """The step that gives numbers of each channel, in float32, which Inductor writes before anything reads them."""
        if isinstance(numbers, int):
            return numbers
        made = self._made(numbers, shape)
        return self._step(inductor_prims.force_stride_order, made, packed_strides(tuple(made.meta["val"].shape), False))

    def _made(self, numbers: _Numbers, shape: torch.Size) -> Any:
        """The step that gives numbers of each channel in float32, to be applied to tensors of a shape.

        Each is widened first: what is made of numbers of 16 bits is not rounded to as many.
        """
        if isinstance(numbers, int):
            return numbers
        if isinstance(numbers, _Made):
            return self._step(numbers.step, self._made(numbers.left, shape), self._made(numbers.right, shape))
        wide, places, own, end = self._wide(numbers.node), [1] * (len(shape) - 2), _padded(numbers), _end(numbers)
        if numbers.shape == tuple(shape):
            return self._step(aten.reshape.default, wide, [*own[:2], *places])
        blocks, channels = math.prod(numbers.shape[:end]), shape[0] * shape[1]
        made = self._step(aten.reshape.default, wide, own[:end])
        made = self._step(aten.expand.default, made, [*numbers.shape[:end]])
        made = self._step(aten.reshape.default, made, [blocks, 1])
        made = self._step(aten.expand.default, made, [blocks, channels // blocks])
        return self._step(aten.reshape.default, made, [*shape[:2], *places])

    def _in_order_of(self, node: fx.Node, value: Any) -> fx.Node:
        """A step that gives the same numbers in the order of a tensor: a copy where Inductor need not write it."""
        if value.is_contiguous():
            return self._step(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self._step(inductor_prims.force_stride_order, node, [*value.stride()])

    def _wide(self, node: fx.Node) -> fx.Node:
        """A step that gives the same numbers in float32, as steps of the graph were computed."""
        is_wide = node.meta["val"].dtype == torch.float32
        return node if is_wide else self._step(_CONVERSION, node, torch.float32)

    def _step(self, target: Any, *arguments: Any, **named: Any) -> fx.Node:
        return added_step(self._graph, target, *arguments, **named)


def _padded(vector: _Vector) -> list[int]:
    """The sizes of a vector, with ones before them, in the dimensions of what it is applied to."""
    sizes = vector.node.meta["val"].shape
    return [*(1,) * (len(vector.shape) - len(sizes)), *sizes]


def _end(vector: _Vector) -> int:
    """The number of dimensions, of what a vector is applied to, that hold all in which it is longer than 1."""
    return max((i + 1 for i, size in enumerate(_padded(vector)) if size > 1), default=0)


def _read(numbers: _Numbers) -> set[fx.Node]:
    """What kernels read to make numbers of each channel: steps that are written, and what a graph is given."""
    if isinstance(numbers, int):
        return set()
    if isinstance(numbers, _Made):
        return _read(numbers.left) | _read(numbers.right)
    found, pending = set[fx.Node](), [numbers.node]
    while pending:
        node = pending.pop()
        if is_pointwise(node) or (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view):
            pending += node.all_input_nodes
        else:
            found.add(node)
    return found
