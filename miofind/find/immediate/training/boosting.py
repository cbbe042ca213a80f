"""Trees learnt with LightGBM, as the arrays that `forest.py` evaluates. Source: LightGBM, `Booster.dump_model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.errors import MissingLibraryError
from miofind.find.immediate.forest import Forest

TREES = 200
"""Of each of a model's two forests: an evaluation takes a quarter of a millisecond."""

_LABELS = 30
_PARAMETERS: dict[str, object] = {
    "num_leaves": 127,
    "max_depth": 10,
    "learning_rate": 0.1,
    "min_data_in_leaf": 5,
    "feature_fraction": 0.8,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "use_missing": False,
    # Equal inputs give equal trees.
    "seed": 1,
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,
    "verbose": -1,
}
_RANKING: dict[str, object] = {
    "objective": "lambdarank",
    "lambdarank_truncation_level": 4,
    "label_gain": [label / _LABELS for label in range(_LABELS + 1)],
}


def require_lightgbm() -> Any:
    """The module.

    Raises:
        MissingLibraryError: it is not installed.
    """
    try:
        import lightgbm
    except ImportError as error:
        raise MissingLibraryError(
            "LightGBM is not installed: install miofind's extra train, or train the table alone (--table-only)"
        ) from error
    return lightgbm


def time_forest(
    rows: NDArray[np.float32], targets: Sequence[float], weights: Sequence[float], trees: int = TREES
) -> Forest:
    """Trees that give a number for each row of features, by least squares."""
    lightgbm = require_lightgbm()
    data = lightgbm.Dataset(rows, np.asarray(targets), weight=np.asarray(weights))
    return exported(lightgbm.train(_PARAMETERS | {"objective": "regression"}, data, trees), rows.shape[1])


def rank_forest(rows: NDArray[np.float32], shares: Sequence[float], sizes: Sequence[int], trees: int = TREES) -> Forest:
    """Trees that order rows of one problem, by LambdaRank.

    Args:
        shares: how good each row is, from 0 to 1.
        sizes: rows of each problem, one after the other.
    """
    lightgbm = require_lightgbm()
    labels = np.rint(_LABELS * np.asarray(shares)).astype(np.int32)
    data = lightgbm.Dataset(rows, labels, group=list(sizes))
    return exported(lightgbm.train(_PARAMETERS | _RANKING, data, trees), rows.shape[1])


def exported(booster: Any, width: int) -> Forest:
    """The arrays of a booster over so many features of float32."""
    roots: list[int] = []
    nodes: list[tuple[int, float, int, int, float]] = []

    def add(node: dict[str, Any]) -> int:
        place = len(nodes)
        nodes.append((0, 0.0, place, place, float(node.get("leaf_value", 0.0))))
        if "split_feature" in node:
            left, right = add(node["left_child"]), add(node["right_child"])
            nodes[place] = (node["split_feature"], _floor32(node["threshold"]), left, right, 0.0)
        return place

    for tree in booster.dump_model()["tree_info"]:
        roots.append(add(tree["tree_structure"]))
    features, thresholds, left, right, values = zip(*nodes, strict=True)
    arrays: dict[str, NDArray[Any]] = {
        "roots": np.array(roots),
        "features": np.array(features),
        "thresholds": np.array(thresholds, np.float32),
        "left": np.array(left),
        "right": np.array(right),
        "values": np.array(values, np.float32),
    }
    return Forest.of(arrays, width)


def _floor32(threshold: float) -> float:
    """The largest float32 that is not above: a float32 is at most the one where it is at most the other."""
    rounded = np.float32(np.clip(threshold, -3e38, 3e38))
    if float(rounded) > threshold:
        rounded = np.nextafter(rounded, np.float32(-np.inf), dtype=np.float32)
    return float(rounded)
