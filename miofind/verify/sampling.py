"""Which elements of an output are checked: all where that is cheap, else those where kernels go wrong and random ones.

Pure index arithmetic on logical shapes; knows nothing of devices or buffers.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miofind.problem import Direction, ProblemDescription

Indices = NDArray[np.int64]

_TILES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBudget:
    """How much reference work one set of inputs may cost.

    Attributes:
        products: multiply-adds of the reference.
        full_size: largest output that is checked whole, if its products fit.
        least, most: bounds of the number of elements otherwise; `least` outweighs `products`.
    """

    products: int = 1 << 29
    full_size: int = 1 << 22
    least: int = 1 << 10
    most: int = 1 << 16


def sample_indices(problem: ProblemDescription, random: np.random.Generator, budget: SampleBudget) -> Indices:
    """Flat logical indices of the output elements to check, increasing, without repeats.

    Whole outputs where the budget allows; else corners, points at tile edges in each dimension and in the rows and
    columns of the matrix product that a kernel may tile, the end of the last tile, and random points.
    """
    shape = problem.output.shape
    size = problem.output.size
    length = problem.reduction_length
    if size <= budget.full_size and size * length <= budget.products:
        return np.arange(size, dtype=np.int64)
    count = min(size, max(budget.least, min(budget.most, budget.products // length)))
    parts = [
        _corners(shape),
        _edges(shape, random, count // 4),
        _matrix_edges(shape, random, count // 4),
        np.arange(max(0, size - min(128, count // 8)), size, dtype=np.int64),
        random.integers(0, size, count // 3, dtype=np.int64),
    ]
    return np.unique(np.concatenate(parts))


def edge_coordinates(size: int) -> Indices:
    """First and last coordinates of a dimension, and those next to the first and the last edge of usual tiles."""
    edges = {0, 1, size - 2, size - 1}
    for tile in _TILES:
        last = size // tile * tile
        edges.update((tile - 1, tile, tile + 1, last - 1, last, last + 1))
    return np.array(sorted(edge for edge in edges if 0 <= edge < size), dtype=np.int64)


def _corners(shape: tuple[int, ...]) -> Indices:
    points = list(itertools.product(*((0, size - 1) for size in shape)))
    return _flat(np.array(points, dtype=np.int64).T, shape)


def _edges(shape: tuple[int, ...], random: np.random.Generator, count: int) -> Indices:
    """Points whose every coordinate is at an edge with probability 1/2."""
    coordinates = [_edge_or_any(size, random, count) for size in shape]
    return _flat(np.stack(coordinates), shape)


def _matrix_edges(shape: tuple[int, ...], random: np.random.Generator, count: int) -> Indices:
    """Points at the edges of tiles of the output as a matrix: one dimension a channel, the others flattened."""
    points = []
    for axis in (0, 1):
        others = tuple(size for i, size in enumerate(shape) if i != axis)
        rows = _edge_or_any(math.prod(others), random, count // 2)
        columns = _edge_or_any(shape[axis], random, count // 2)
        coordinates = list(np.unravel_index(rows, others))
        coordinates.insert(axis, columns)
        points.append(_flat(np.stack(coordinates), shape))
    return np.concatenate(points)


def _edge_or_any(size: int, random: np.random.Generator, count: int) -> Indices:
    at_edge = random.choice(edge_coordinates(size), count)
    return np.where(random.random(count) < 0.5, at_edge, random.integers(0, size, count, dtype=np.int64))


def _flat(coordinates: Indices, shape: tuple[int, ...]) -> Indices:
    flat: Indices = np.ravel_multi_index(tuple(coordinates), shape).astype(np.int64)
    return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of an output that is itself the output of a smaller convolution, so that a dense reference serves it.

    Attributes:
        problem: the problem it is a part of.
        images: coordinates of the batch; all of it for backward weights, which sum over it.
        groups: coordinates of the groups.
        filters: output channels within each group; all of them for backward data.
        channels: input channels within each group; all of them for the forward direction.
    """

    problem: ProblemDescription
    images: Indices
    groups: Indices
    filters: Indices
    channels: Indices

    @property
    def part(self) -> ProblemDescription:
        """The smaller convolution."""
        conv = self.problem.conv
        return ProblemDescription.convolution(
            x=(self.images.size, self.groups.size * self.channels.size, *self.problem.spatial),
            w=(self.groups.size * self.filters.size, self.channels.size, *self.problem.filter),
            padding=tuple(zip(conv.pad_before, conv.pad_after, strict=True)),
            stride=conv.stride,
            dilation=conv.dilation,
            groups=self.groups.size,
            direction=self.problem.direction,
            dtype={name: self.problem.tensor(name).dtype for name in "xwy"},
            layout={name: self.problem.tensor(name).layout for name in "xwy"},
            math=self.problem.math,
        )

    def select(self, name: str) -> tuple[Indices, Indices]:
        """Open mesh of the coordinates of the first two dimensions of tensor "x", "w" or "y"."""
        rows, columns = self._axes()[name]
        return rows[:, None], columns[None, :]

    def index(self, at: tuple[np.intp, ...]) -> tuple[int, ...]:
        """Logical index in the whole output of an element of the part's output."""
        rows, columns = self._axes()[self.problem.direction.output]
        return (int(rows[at[0]]), int(columns[at[1]]), *(int(i) for i in at[2:]))

    def _axes(self) -> dict[str, tuple[Indices, Indices]]:
        groups = self.problem.groups
        x_channels = _within(self.groups, self.channels, self.problem.c // groups)
        y_channels = _within(self.groups, self.filters, self.problem.k // groups)
        return {
            "x": (self.images, x_channels),
            "w": (y_channels, self.channels),
            "y": (self.images, y_channels),
        }


def sample_box(problem: ProblemDescription, random: np.random.Generator, products: int) -> Box:
    """A part of the output whose reference takes about `products` multiply-adds: all of it where they suffice.

    Batch, then groups, then channels are thinned, each down to two or more: first, last and random coordinates.
    """
    sizes = {
        "images": problem.n,
        "groups": problem.groups,
        "filters": problem.k // problem.groups,
        "channels": problem.c // problem.groups,
    }
    counts = dict(sizes)
    spent = problem.flops // 2
    for name in _THINNED[problem.direction]:
        wanted = -(-counts[name] * products // spent)
        counts[name] = min(sizes[name], max(2, wanted))
        spent = spent * counts[name] // sizes[name]
    chosen = {name: _spread(sizes[name], count, random) for name, count in counts.items()}
    return Box(problem=problem, **chosen)


_THINNED = {
    Direction.FORWARD: ("images", "groups", "filters"),
    Direction.BACKWARD_DATA: ("images", "groups", "channels"),
    Direction.BACKWARD_WEIGHTS: ("groups", "filters", "channels"),
}


def _spread(size: int, count: int, random: np.random.Generator) -> Indices:
    """`count` increasing coordinates, the first and the last among them."""
    if count >= size:
        return np.arange(size, dtype=np.int64)
    inner = random.choice(np.arange(1, size - 1, dtype=np.int64), count - 2, replace=False)
    return np.sort(np.concatenate([inner, np.array([0, size - 1], dtype=np.int64)]))


def _within(groups: Indices, members: Indices, group_size: int) -> Indices:
    return (groups[:, None] * group_size + members[None, :]).reshape(-1)
