"""Which elements of an output are checked: all where that is cheap, else points that leave no coordinate out.

Pure index arithmetic on logical shapes.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device

Indices = NDArray[np.int64]

_TILES = (128, 64, 32, 256, 16, 8)
_SPLITS = 8
# At most a fourth of the points, and an eighth of the coordinates of a long axis, lie where they are put: the others
# make the chance that a single wrong element is seen.
_DESIGNED_SHARE = 4
_EDGE_SHARE = 8
_TAIL = 128
_FEW_REPEATS = 16  # points so sparse seldom meet

# Seconds of a device that the whole output may take, and what 132 multiprocessors of compute capability 9.0 are sure
# to do in one; other devices by their rate of float64, which conversions from and to float64 share.
_WHOLE_S = 0.1
_SAMPLE_SHARE = 4  # of that is what a sample may take
_PRODUCTS_PER_SM_S = 6e8
_SLOW_PRODUCTS_PER_SM_S = 2e8
_FAST_FLOAT64 = (80, 90, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBudget:
    """How much the reference for one set of inputs may cost.

    Attributes:
        products: multiply-adds; an output whose reference takes no more is checked whole.
        bytes: device memory for what all sets of inputs keep of an output that is checked whole.
        least, most: bounds of the number of elements otherwise; `least` outweighs `products`.
    """

    products: int = 1 << 29
    bytes: int = 1 << 30
    least: int = 1 << 12
    most: int = 1 << 16

    @staticmethod
    def of(device: Device) -> SampleBudget:
        """What a tenth of a second of a CUDA device pays for, by a rate that it is sure to reach."""
        rate = _PRODUCTS_PER_SM_S if device.sm in _FAST_FLOAT64 else _SLOW_PRODUCTS_PER_SM_S
        return SampleBudget(products=int(_WHOLE_S * device.sm_count * rate))

    def share(self, part: int) -> SampleBudget:
        """The same with one of so many parts of the work."""
        return replace(self, products=self.products // part)

    def within(self, free_bytes: int) -> SampleBudget:
        """The same with no more memory than that."""
        return replace(self, bytes=min(self.bytes, free_bytes))

    def covers(self, problem: ProblemDescription, element_bytes: int) -> bool:
        """Whether the whole output is checked, of which all sets of inputs keep `element_bytes` an element."""
        size = problem.output.size
        # Of strided backward data most taps meet no output, and cost a look all the same.
        products = max(problem.flops // 2, size * math.prod(problem.filter))
        return products <= self.products and size * element_bytes <= self.bytes


def sample_indices(problem: ProblemDescription, random: np.random.Generator, budget: SampleBudget) -> Indices:
    """Flat logical indices of the output elements to check, increasing, each once.

    The output's shape is (n or k, c or k, *spatial or *filter). Certain to be among them, where `count` is the number
    of points:

    - every coordinate of every axis of up to 3/8 of `count`, so that no wrong image, channel, row or column of pixels
      or of taps goes unseen; of a longer axis `edge_coordinates`, and one of every `size / (count / 4)`;
    - corners, and `edge_coordinates` of the axes flattened as the rows or columns of a matrix product, or as memory;
    - one of every `size / (3 / 8 * count)` elements in logical order.

    A single element at a place that nothing singles out is seen with a chance of at least half of count / size.
    """
    size = problem.output.size
    affordable = budget.products // (_SAMPLE_SHARE * problem.reduction_length)
    count = min(size, max(budget.least, min(budget.most, affordable)))
    if count == size:
        return np.arange(size, dtype=np.int64)
    shape, group_sizes = problem.output.shape, _group_sizes(problem)
    designed = _designed_points(shape, group_sizes, random)[: count // _DESIGNED_SHARE]
    swept = (count - designed.size) // 2
    sweep = np.stack([covering(n, swept, random, group_sizes) for n in shape])
    spread = stratified(size, count - designed.size - swept, random)
    return filled(np.concatenate([designed, _flat(sweep, shape), spread]), count, size, random)


@functools.lru_cache(maxsize=256)
def edge_coordinates(size: int, blocks: tuple[int, ...] = ()) -> Indices:
    """Coordinates of an axis where kernels go wrong, the likeliest first.

    Its ends and its middle, where it is split in 2, 4 or 8, and both sides of the edges of the first tile, of the one
    in the middle and of the last, for usual tiles and for `blocks`.
    """
    last = size - 1
    edges = [0, last, size // 2, 1, last - 1]
    for part in sorted(range(1, _SPLITS), key=lambda part: -math.gcd(part, _SPLITS)):
        split = part * size // _SPLITS
        edges += [split - 1, split, split + 1]
    for tile in (*blocks, *_TILES):
        for start in (tile, size // 2 // tile * tile, (size // 2 // tile + 1) * tile, last // tile * tile):
            edges += [start - 1, start, start + 1]
    inside = dict.fromkeys(edge for edge in edges if 0 <= edge < size)
    found = np.array(list(inside), dtype=np.int64)
    found.flags.writeable = False  # whoever asks again is given the same
    return found


def covering(size: int, count: int, random: np.random.Generator, blocks: tuple[int, ...] = ()) -> Indices:
    """`count` coordinates of an axis in random order: every one of them if it has no more than `count`.

    Of a longer axis up to an eighth are `edge_coordinates`, and the others one of each of as many equal parts.
    """
    if size <= count:
        rounds = np.tile(np.arange(size, dtype=np.int64), (-(-count // size), 1))
        return random.permuted(rounds, axis=1).reshape(-1)[:count]
    edges = edge_coordinates(size, blocks)[: count // _EDGE_SHARE]
    chosen = np.concatenate([edges, stratified(size, count - edges.size, random)])
    return random.permutation(chosen)


def stratified(size: int, count: int, random: np.random.Generator) -> Indices:
    """`count` coordinates, increasing, one at random from each of `count` equal parts of an axis."""
    bounds = np.linspace(0, size, count + 1).astype(np.int64)
    return bounds[:-1] + (random.random(count) * np.diff(bounds)).astype(np.int64)


def distinct(points: Indices) -> Indices:
    """Points, increasing, each once.

    np.unique hashes them since NumPy 2.3, which takes 20 times as long as to sort 65,536 of them (6.3 to 0.3 ms).
    """
    ordered = np.sort(points)
    is_new: NDArray[np.bool_] = np.diff(ordered, prepend=ordered[:1] - 1) != 0
    return ordered[is_new]


def filled(points: Indices, count: int, size: int, random: np.random.Generator) -> Indices:
    """Points below `size`, increasing, each once, and random ones to make `count` where many were there twice."""
    chosen = distinct(points)
    if size > _FEW_REPEATS * count:
        return chosen
    others = np.delete(np.arange(size, dtype=np.int64), chosen)
    return np.sort(np.concatenate([chosen, random.choice(others, count - chosen.size, replace=False)]))


def flattened_edges(
    shape: tuple[int, ...], axes: tuple[int, ...], random: np.random.Generator, blocks: tuple[int, ...] = ()
) -> Indices:
    """Flat indices of one point for each of the `edge_coordinates` of some axes flattened in the order given.

    The other coordinates are edges of their axes with a chance of 1/2, and any otherwise.
    """
    sizes = [shape[axis] for axis in axes]
    edges = edge_coordinates(math.prod(sizes), blocks)
    points = np.stack([_edge_or_any(size, edges.size, random) for size in shape])
    points[list(axes)] = np.stack(np.unravel_index(edges, sizes))
    return _flat(points, shape)


def _designed_points(shape: tuple[int, ...], group_sizes: tuple[int, ...], random: np.random.Generator) -> Indices:
    """Corners, and edges of every way in which kernels flatten axes, those that come first in each first."""
    corners = _flat(np.array(list(itertools.product(*((0, n - 1) for n in shape))), dtype=np.int64).T, shape)
    views = [flattened_edges(shape, axes, random, group_sizes) for axes in _flattenings(len(shape))]
    size = math.prod(shape)
    tail = np.arange(size - 1, max(-1, size - 1 - _TAIL), -1, dtype=np.int64)
    return np.concatenate([corners, _interleaved(views), tail])


def _flattenings(rank: int) -> tuple[tuple[int, ...], ...]:
    """Orders of axes as rows or columns of a matrix product, as one channel's or image's plane, and as memory."""
    spatial = tuple(range(2, rank))
    return ((0, *spatial), (1, *spatial), (*spatial, 1), (0, *spatial, 1), (0, 1, *spatial), spatial)


def _interleaved(parts: list[Indices]) -> Indices:
    """The first of each, then the second of each, and so on."""
    rows = itertools.zip_longest(*(part.tolist() for part in parts))
    return np.array([item for row in rows for item in row if item is not None], dtype=np.int64)


def _group_sizes(problem: ProblemDescription) -> tuple[int, ...]:
    """Channels of a group where there are several groups."""
    if problem.groups == 1:
        return ()
    return tuple({problem.c // problem.groups, problem.k // problem.groups})


def _edge_or_any(size: int, count: int, random: np.random.Generator) -> Indices:
    at_edge = random.choice(edge_coordinates(size), count)
    return np.where(random.random(count) < 0.5, at_edge, random.integers(0, size, count, dtype=np.int64))


def _flat(coordinates: Indices, shape: tuple[int, ...]) -> Indices:
    flat: Indices = np.ravel_multi_index(tuple(coordinates), shape).astype(np.int64)
    return flat
