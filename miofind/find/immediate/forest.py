"""Boosted trees as arrays, evaluated with NumPy: all trees take a step down at a time.

A leaf is a node that leads to itself. Whoever made the arrays, an evaluation reads inside them and ends: `Forest.of`
checks every index.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_TREES = 400
MAX_NODES = (1 << 16) - 1
MAX_DEPTH = 16
_MOST = 64

ARRAYS = {"roots": "<u2", "features": "<i2", "thresholds": "<f4", "left": "<u2", "right": "<u2", "values": "<f4"}
"""A forest's arrays and their types, in the order of a model file."""


class InvalidForestError(ValueError):
    """Arrays that are no forest."""


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Regression trees whose values are summed.

    Attributes:
        roots: the first node of each tree.
        features, thresholds: of each node; a row whose feature is at most the threshold goes left.
        below: of each node the right and the left one below, both the node itself where it is a leaf.
        values: of leaves, 0 elsewhere.
        depth: steps from a root to the lowest leaf.
    """

    roots: NDArray[np.intp]
    features: NDArray[np.intp]
    thresholds: NDArray[np.float32]
    below: NDArray[np.intp]
    values: NDArray[np.float32]
    depth: int

    @staticmethod
    def of(arrays: dict[str, NDArray[np.generic]], width: int) -> Forest:
        """A forest of arrays from anywhere.

        Args:
            arrays: by name, of the types of ARRAYS; a tree's nodes stand behind those above them.
            width: features that there are.

        Raises:
            InvalidForestError: they are no forest over so many features.
        """
        nodes = len(arrays["features"])
        _demand(0 < nodes <= MAX_NODES, f"{nodes} nodes")
        _demand(0 < len(arrays["roots"]) <= MAX_TREES, f"{len(arrays['roots'])} trees")
        _demand(all(len(arrays[name]) == nodes for name in ARRAYS if name != "roots"), "arrays of several lengths")
        roots, features, left, right = (arrays[name].astype(np.intp) for name in ("roots", "features", "left", "right"))
        thresholds, values = (arrays[name].astype(np.float32) for name in ("thresholds", "values"))
        _demand(bool(np.isfinite(thresholds).all() and np.isfinite(values).all()), "a number that is not finite")
        _demand(bool((np.abs(values) <= _MOST).all()), f"a value beyond {_MOST}")
        _demand(bool((features >= 0).all() and (features < width).all()), "a feature that there is not")
        _demand(bool((roots >= 0).all() and (roots < nodes).all()), "a root that is no node")
        own = np.arange(nodes)
        is_leaf = (left == own) & (right == own)
        goes_on = (left > own) & (right > own) & (left < nodes) & (right < nodes)
        _demand(bool((is_leaf | goes_on).all()), "a node that leads nowhere")
        depth = _depth(roots, left, right, is_leaf)
        below = np.stack((right, left), axis=1).reshape(-1)
        return Forest(roots, features, thresholds, below, values, depth)

    @property
    def left(self) -> NDArray[np.intp]:
        """Of each node the one below for rows whose feature is at most the threshold."""
        return self.below[1::2]

    @property
    def right(self) -> NDArray[np.intp]:
        """Of each node the one below for other rows."""
        return self.below[::2]

    @staticmethod
    def joined(forests: Sequence[Forest]) -> Forest:
        """The trees of several forests, one forest's after another's."""
        firsts = [0, *itertools.accumulate(len(forest.features) for forest in forests)]
        return Forest(
            roots=np.concatenate([forest.roots + first for forest, first in zip(forests, firsts, strict=False)]),
            features=np.concatenate([forest.features for forest in forests]),
            thresholds=np.concatenate([forest.thresholds for forest in forests]),
            below=np.concatenate([forest.below + first for forest, first in zip(forests, firsts, strict=False)]),
            values=np.concatenate([forest.values for forest in forests]),
            depth=max(forest.depth for forest in forests),
        )

    def sums(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """The sum of all trees' values for each row of features."""
        sums: NDArray[np.float64] = self.tree_values(rows).sum(axis=1, dtype=np.float64)
        return sums

    def tree_values(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Each tree's value for each row of features, as many as `of` was told: a row a row, a column a tree."""
        flat, (count, width) = rows.reshape(-1), rows.shape
        starts = np.repeat(np.arange(count) * width, len(self.roots))
        goes_left = rows.take(self.features[self.roots], axis=1) <= self.thresholds[self.roots]
        at = self.below.take(2 * self.roots + goes_left).reshape(-1)
        for _ in range(self.depth - 1):
            # `take` is faster than an index, and "wrap" than a check: all indices are within bounds (`of`).
            values = flat.take(starts + self.features.take(at, mode="wrap"), mode="wrap")
            goes_left = values <= self.thresholds.take(at, mode="wrap")
            at = self.below.take(2 * at + goes_left, mode="wrap")
        return self.values.take(at).reshape(count, -1)


def _depth(roots: NDArray[np.intp], left: NDArray[np.intp], right: NDArray[np.intp], is_leaf: NDArray[np.bool_]) -> int:
    """Steps from the roots until only leaves are left."""
    below = roots
    for depth in range(MAX_DEPTH + 1):
        reached = np.zeros(len(is_leaf), np.bool_)  # each node once, however many lead to it
        reached[below] = True
        level = np.flatnonzero(reached & ~is_leaf)
        if not len(level):
            return depth
        below = np.concatenate((left[level], right[level]))
    raise InvalidForestError(f"it is deeper than {MAX_DEPTH}")


def _demand(holds: bool, found: str) -> None:
    if not holds:
        raise InvalidForestError(f"it has {found}")
