"""Which part of an output the CPU place checks: strips of the output as a matrix, and some whole images of thin ones.

A row is a place in the output without its channel: (n, *spatial), or (c/groups, *filter) for backward weights. One
strip is some rows times some channels, so that a matrix product computes it; rows lie anywhere. Pure index arithmetic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from miofind.core.problem import Direction, ProblemDescription
from miofind.verify.sampling import Indices, covering, filled, flattened_edges, stratified

_EDGE_SHARE = 4  # at most a fourth of the rows lie where they are put
_WANTED_ROWS = 1024
_LEAST_ROWS = 16
_MOST_EDGES = 64
_FEW = 16  # channels of a group
_MANY = 256  # products of an element
_IMAGES_PRODUCTS = 1 << 25
_MOST_IMAGE_PRODUCTS = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class StripBudget:
    """How much the reference of a sampled output may cost on the host.

    Attributes:
        products: multiply-adds.
        gathered: elements of an operand that are gathered for rows.
        elements: of the output, which are compared for every candidate.
    """

    products: int = 1 << 27
    gathered: int = 1 << 23
    elements: int = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Some rows times some channels of an output.

    Attributes:
        rows: flat indices of rows.
        groups: groups of the convolution.
        members: output channels within each of them; input channels for backward data.
    """

    rows: Indices
    groups: Indices
    members: Indices


@dataclass(frozen=True, slots=True)
class Matrix:
    """An output as rows times channels.

    Attributes:
        axis: of the channels.
        rows: shape of the other axes.
        groups, members: groups, and channels in each.
        length: products of an element, in the mean: strided backward data has fewer than taps.
    """

    axis: int
    rows: tuple[int, ...]
    groups: int
    members: int
    length: int

    @staticmethod
    def of(problem: ProblemDescription) -> Matrix:
        """That of a problem's output."""
        axis = 0 if problem.direction is Direction.BACKWARD_WEIGHTS else 1
        shape = problem.output.shape
        rows = tuple(size for i, size in enumerate(shape) if i != axis)
        length = max(1, problem.flops // 2 // problem.output.size)
        return Matrix(axis, rows, problem.groups, shape[axis] // problem.groups, length)


def sample_strips(
    problem: ProblemDescription, random: np.random.Generator, budget: StripBudget | None = None
) -> tuple[Strip, ...]:
    """Strips of an output, random ones for each state of `random`, that together leave no coordinate out.

    - Every channel is in one of them, and every coordinate of every other axis that is no longer than the rows are
      many, so that no wrong image, channel, row or column of pixels or of taps goes unseen. There are as many rows as
      the longest axis, unless that alone takes more elements than twice the larger operand has.
    - Up to a fourth of the rows are the edges of tiles and of splits of the rows as they are flattened in either
      layout, the likeliest first; of the others half are one of each of as many runs of rows.
    """
    matrix, budget = Matrix.of(problem), budget or StripBudget()
    cut = _cut(matrix, budget, max(problem.tensor(name).size for name in problem.direction.inputs))
    rows = random.permutation(_covering_rows(matrix.rows, cut.rows, random))
    groups = np.array_split(random.permutation(matrix.groups), min(cut.group_parts, rows.size))
    members = np.array_split(random.permutation(matrix.members), min(cut.member_parts, rows.size // len(groups)))
    strips = []
    parts = np.array_split(rows, len(groups) * len(members))
    for part, (group, member) in zip(parts, itertools.product(groups, members), strict=True):
        strips.append(Strip(rows=np.sort(part), groups=np.sort(group), members=np.sort(member)))
    return tuple(strips)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How many rows are looked at, and in how many parts groups and members are split, each with rows of its own."""

    rows: int
    group_parts: int
    member_parts: int


def _cut(matrix: Matrix, budget: StripBudget, operand_elements: int) -> _Cut:
    """Counts that the budget allows; first come so many rows that their coordinates are covered."""
    total, longest = math.prod(matrix.rows), max(matrix.rows)
    gathered = max(budget.gathered, 2 * operand_elements)
    wanted = min(
        total, max(longest + min(longest // 3, _MOST_EDGES), min(_WANTED_ROWS, budget.gathered // matrix.length))
    )
    group_parts = min(matrix.groups, longest, -(-wanted * matrix.groups * matrix.length // gathered))
    groups = -(-matrix.groups // group_parts)
    rows = min(wanted, max(_LEAST_ROWS, gathered // (groups * matrix.length)))
    width = groups * matrix.members
    most = max(1, min(budget.products // matrix.length, budget.elements) // width)
    rows = max(rows, min(total, most, budget.gathered // (groups * matrix.length)))
    member_parts = min(matrix.members, max(1, rows // group_parts), -(-rows // most))
    rows = max(rows, min(total, most * member_parts, budget.gathered // (groups * matrix.length)))
    return _Cut(rows=rows, group_parts=group_parts, member_parts=member_parts)


def _covering_rows(shape: tuple[int, ...], count: int, random: np.random.Generator) -> Indices:
    """About `count` rows, increasing: edges, rows that hold every coordinate of every axis, and one of every few."""
    total = math.prod(shape)
    if count >= total:
        return np.arange(total, dtype=np.int64)
    axes = tuple(range(len(shape)))
    orders = [flattened_edges(shape, order, random) for order in (axes, (*axes[1:], 0))]
    put = min(count // _EDGE_SHARE, count - max(shape)) if count > max(shape) else count // _EDGE_SHARE
    designed = np.concatenate([order[: put // 2] for order in orders])
    swept = min(count - designed.size, max(*shape, (count - designed.size) // 2))
    sweep = np.stack([covering(size, swept, random) for size in shape])
    spread = stratified(total, count - designed.size - swept, random)
    return filled(np.concatenate([designed, np.ravel_multi_index(tuple(sweep), shape), spread]), count, total, random)


def strip_indices(problem: ProblemDescription, strips: Sequence[Strip]) -> Indices:
    """Flat logical indices of the elements of strips, each strip's by group, row and member."""
    matrix = Matrix.of(problem)
    shape = problem.output.shape
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    apart = steps.pop(matrix.axis)
    parts = []
    for strip in strips:
        rows = np.zeros_like(strip.rows)
        for at, step in zip(np.unravel_index(strip.rows, matrix.rows), steps, strict=True):
            rows += at * step
        channels = strip.groups[:, None, None] * matrix.members + strip.members
        parts.append((rows[:, None] + channels * apart).reshape(-1))
    return np.concatenate(parts)


def sample_images(problem: ProblemDescription, random: np.random.Generator) -> Indices:
    """Images that are checked whole besides, where few channels share what is gathered for a row of many products.

    Dense sums cost a tenth there. No images where there is nothing to gain, or where one is too large.
    """
    matrix = Matrix.of(problem)
    if problem.direction is Direction.BACKWARD_WEIGHTS or matrix.members >= _FEW or matrix.length < _MANY:
        return np.empty(0, np.int64)
    each = problem.flops // 2 // problem.n
    if each > _MOST_IMAGE_PRODUCTS:
        return np.empty(0, np.int64)
    return np.sort(random.permutation(problem.n)[: max(1, _IMAGES_PRODUCTS // each)]).astype(np.int64)


def of_images(problem: ProblemDescription, count: int) -> ProblemDescription:
    """The same convolution, forward or backward data, of `count` images."""
    x, y = (replace(tensor, shape=(count, *tensor.shape[1:])) for tensor in (problem.x, problem.y))
    return replace(problem, x=x, y=y)
