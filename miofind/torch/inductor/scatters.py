"""Sums of scatters at constant places with constant weights, as linear maps along one dimension after another.

A gradient of an interpolation is such a sum: of each corner's gradients, weighed along each dimension. The graph says
where they go by steps that are computed of numbers alone, so it is their values that tell the map, not how they are
written; what merely looks alike is a map as well, and an equal one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from miofind.torch.inductor.constants import Constants
from miofind.torch.inductor.graphs import has_numbers

aten = torch.ops.aten

SCATTER = aten.index_put.default

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEVICES = ("cuda", "cpu")
_MOST_STEPS = 64
"""Steps between what is scattered and what the weights are multiplied with: 26 of three dimensions."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of a matrix, one in each column: column j has `weights[j]` in row `rows[j]`."""

    rows: torch.Tensor
    weights: torch.Tensor

    def scaled(self, factor: float | torch.Tensor) -> Entries:
        return replace(self, weights=self.weights * factor + 0.0)  # no zero is negative, so that equal ones are alike

    @property
    def key(self) -> bytes:
        return bytes(self.rows.numpy().tobytes() + self.weights.numpy().tobytes())


@dataclass(frozen=True, slots=True)
class Map:
    """A linear map: along each dimension the sum of some entries, one dimension after another, times a number."""

    along: tuple[tuple[Entries, ...], ...]
    scale: float = 1.0

    def weighed(self, place: int, weights: torch.Tensor) -> Map:
        """The map of what is multiplied along a dimension before."""
        along = [*self.along]
        along[place] = tuple(each.scaled(weights) for each in along[place])
        return replace(self, along=tuple(along))


@dataclass(frozen=True, slots=True)
class Scatter:
    """A step that adds values to zeros.

    Attributes:
        values: what it adds, of as many dimensions as its result.
        dimension: the first of those whose places are given; the others follow.
        rows: for each of these the place, for each place of the values.
    """

    node: fx.Node
    values: fx.Node
    dimension: int
    rows: tuple[torch.Tensor, ...]

    @property
    def plain(self) -> Map:
        """The map of what is scattered as it is."""
        ones = (torch.ones(rows.shape, dtype=torch.float64) for rows in self.rows)
        return Map(along=tuple((Entries(*each),) for each in zip(self.rows, ones, strict=True)))


@dataclass(frozen=True, slots=True)
class ScatterSum:
    """Scatters that a graph adds up, of weighed copies of one tensor.

    Attributes:
        source: what gives that tensor.
    """

    scatters: tuple[Scatter, ...]
    source: fx.Node

    @property
    def first(self) -> fx.Node:
        """The first of them in the graph."""
        return self.scatters[0].node

    def maps(self, constants: Constants) -> list[Map]:
        """The maps whose sum it is; one where it is separable."""
        linear = _Linear(constants, self.source)
        return merged([each for scatter in self.scatters for each in linear.maps(scatter)])


def scatter_sums(graph: fx.Graph, constants: Constants) -> list[ScatterSum]:
    """The sums of scatters of a graph, in order."""
    nodes = graph.find_nodes(op="call_function", target=SCATTER)
    by_sum = defaultdict[object, list[Scatter]](list)
    for scatter in (_scatter(node, constants) for node in nodes):
        if scatter is not None:
            shape = scatter.values.meta["val"].shape
            by_sum[_last_sum(scatter.node), scatter.dimension, len(scatter.rows), shape].append(scatter)
    return [each for scatters in by_sum.values() for each in _of_one_source(scatters, constants)]


def plain_summands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two steps of one shape and type that a step adds; None if it is another."""
    if node.target is not aten.add.Tensor or node.kwargs or not isinstance(node.args[1], fx.Node):
        return None
    first, second = node.args
    return (first, second) if first is not second and _are_alike(first, node) and _are_alike(second, node) else None


def merged(maps: Sequence[Map]) -> list[Map]:
    """The same sum of as few maps as it is when those are added that are equal along all dimensions but one."""
    for place in range(len(maps[0].along)):
        alike = defaultdict[object, list[Map]](list)
        for each in maps:
            others = (entries for i, entries in enumerate(each.along) if i != place)
            alike[tuple(tuple(entry.key for entry in entries) for entries in others)].append(each)
        maps = [_added(some, place) for some in alike.values()]
    return [*maps]


def _added(maps: Sequence[Map], place: int) -> Map:
    """The sum of maps that are equal along all dimensions but one."""
    if len(maps) == 1:
        return maps[0]
    entries = dict[bytes, Entries]()
    for each in maps:
        for entry in (entry.scaled(each.scale) for entry in each.along[place]):
            rows = entry.rows.numpy().tobytes()
            entries[rows] = _sum(entries[rows], entry) if rows in entries else entry
    along = [*maps[0].along]
    along[place] = tuple(entries.values())
    return Map(along=tuple(along))


def _sum(first: Entries, second: Entries) -> Entries:
    return replace(first, weights=first.weights + second.weights + 0.0)


def _scatter(node: fx.Node, constants: Constants) -> Scatter | None:
    """A step as a scatter at places that are known, of numbers and sizes that are; None where it is another."""
    if len(node.args) != 4 or node.args[3] is not True or not has_numbers(node):
        return None
    base, given, values = node.args[:3]
    value, shape = node.meta["val"], values.meta["val"].shape
    is_known = value.dtype in _DTYPES and value.device.type in _DEVICES and value.is_contiguous() and value.numel() > 0
    if not is_known or base.target is not aten.full.default or base.args[1] != 0:
        return None
    places = [i for i, index in enumerate(given) if index is not None]
    first = min(places, default=0)
    if not places or places != [*range(first, first + len(places))] or len(shape) != value.dim():
        return None
    rows = [_rows(constants.value(given[i]), len(places), i - first) for i in places]
    known = tuple(each for each in rows if each is not None)
    if len(known) < len(rows) or any(each.max() >= value.shape[i] for each, i in zip(known, places, strict=True)):
        return None
    wanted = [*value.shape[:first], *map(len, known), *value.shape[first + len(places) :]]
    return Scatter(node=node, values=values, dimension=first, rows=known) if [*shape] == wanted else None


def _rows(index: torch.Tensor | None, rank: int, place: int) -> torch.Tensor | None:
    """Places, from 0 on, that an index among others gives along its own dimension alone; None if it is another."""
    if index is None or index.dtype not in (torch.int64, torch.int32) or not 0 < index.dim() <= rank:
        return None
    shape = [1] * (rank - index.dim()) + [*index.shape]
    rows = index.flatten().long()
    return rows if shape[place] == rows.numel() > 0 and int(rows.min()) >= 0 else None


def _last_sum(node: fx.Node) -> fx.Node:
    """The last of the sums that a step is a summand of, where nothing reads those before it."""
    while len(node.users) == 1:
        (user,) = node.users
        if plain_summands(user) is None:
            break
        node = user
    return node


def _of_one_source(scatters: Iterable[Scatter], constants: Constants) -> Iterator[ScatterSum]:
    """Those of some scatters together that scatter weighed copies of one tensor."""
    found: list[tuple[list[Scatter], list[fx.Node]]] = []
    linear = _Linear(constants)
    for scatter in scatters:
        sources = [*linear.sources(scatter)]
        for some, common in found:
            if kept := [each for each in common if each in sources]:
                some.append(scatter)
                common[:] = kept
                break
        else:
            found.append(([scatter], sources))
    return (ScatterSum(scatters=tuple(some), source=common[0]) for some, common in found)


class _Linear:
    """Looks through steps that are linear: sums, and products with numbers or with weights along a dimension.

    Args:
        source: what is looked no further than.
    """

    def __init__(self, constants: Constants, source: fx.Node | None = None) -> None:
        self._constants, self._source = constants, source
        self._found: dict[fx.Node, list[Map]] = {}

    def sources(self, scatter: Scatter) -> Iterator[fx.Node]:
        """The steps of which alone what is scattered is a linear function, the nearest first."""
        left = {scatter.values}
        for _ in range(_MOST_STEPS):
            if len(left) == 1:
                yield from left
            node = max(left)  # the last of the graph's
            read = self._read(node, scatter)
            if read is None:
                return
            left = (left - {node}) | {each for each, _ in read}

    def maps(self, scatter: Scatter) -> list[Map]:
        """A scatter as maps of the source."""
        self._found = {}
        return self._of(scatter.values, scatter)

    def _of(self, node: fx.Node, scatter: Scatter) -> list[Map]:
        if node is self._source:
            return [scatter.plain]
        if node not in self._found:
            read = self._read(node, scatter)
            assert read is not None, "a source was found"
            maps = [_times(each, factor) for part, factor in read for each in self._of(part, scatter)]
            self._found[node] = merged(maps)
        return self._found[node]

    def _read(self, node: fx.Node, scatter: Scatter) -> list[tuple[fx.Node, _Factor]] | None:
        """The steps that a step is a sum of, each with its factor; None where it is no sum that is known."""
        if node.op != "call_function" or node.kwargs or not has_numbers(node):
            return None
        if node.target is aten.neg.default:
            read = [(node.args[0], _Factor(number=-1.0))]
        elif node.target in (aten.add.Tensor, aten.sub.Tensor) and isinstance(node.args[1], fx.Node):
            sign = -1.0 if node.target is aten.sub.Tensor else 1.0
            read = [(node.args[0], _Factor()), (node.args[1], _Factor(number=sign))]
        elif node.target is aten.mul.Tensor:
            read = self._product(node, scatter)
        else:
            return None
        return read if read and all(_are_alike(each, node) for each, _ in read) else None

    def _product(self, node: fx.Node, scatter: Scatter) -> list[tuple[fx.Node, _Factor]]:
        first, second = node.args
        for one, other in ((first, second), (second, first)):
            if isinstance(one, fx.Node) and (factor := self._factor(other, scatter)) is not None:
                return [(one, factor)]
        return []

    def _factor(self, given: object, scatter: Scatter) -> _Factor | None:
        """A number, or weights along one of the dimensions whose places are given; None for whatever else."""
        if not isinstance(given, fx.Node):
            return _Factor(number=float(given)) if isinstance(given, (int, float)) else None
        value = self._constants.value(given)
        if value is None or not value.dtype.is_floating_point:
            return None
        if value.numel() == 1:
            return _Factor(number=value.item())
        rank = len(scatter.values.meta["val"].shape)
        shape = [1] * (rank - value.dim()) + [*value.shape]
        places = [i - scatter.dimension for i, size in enumerate(shape) if size > 1]
        if len(places) > 1 or places[0] not in range(len(scatter.rows)):
            return None
        return _Factor(place=places[0], weights=value.flatten().double())


@dataclass(frozen=True, slots=True)
class _Factor:
    """A number, and weights along a dimension, if any."""

    number: float = 1.0
    place: int = 0
    weights: torch.Tensor | None = None


def _times(given: Map, factor: _Factor) -> Map:
    if factor.weights is not None:
        return given.weighed(factor.place, factor.weights)
    return replace(given, scale=given.scale * factor.number)


def _are_alike(one: object, other: fx.Node) -> bool:
    """Whether two steps give tensors of one shape and type."""
    first, second = (each.meta.get("val") if isinstance(each, fx.Node) else None for each in (one, other))
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return first.shape == second.shape and first.dtype is second.dtype
