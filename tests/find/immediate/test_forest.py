"""Trees as arrays: they say what LightGBM says, and nothing that is no forest is taken for one."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from miofind.find.immediate.forest import MAX_DEPTH, Forest, InvalidForestError
from miofind.find.immediate.training.boosting import exported, time_forest


def stump(**changes: list[float]) -> dict[str, NDArray[np.generic]]:
    """A tree that gives 1 where feature 1 is at most 0.5, else 2."""
    arrays: dict[str, list[float]] = {
        "roots": [0],
        "features": [1, 0, 0],
        "thresholds": [0.5, 0.0, 0.0],
        "left": [1, 1, 2],
        "right": [2, 1, 2],
        "values": [0.0, 1.0, 2.0],
    }
    kinds = {"thresholds": np.float32, "values": np.float32}
    return {name: np.array(values, kinds.get(name, np.int16)) for name, values in (arrays | changes).items()}


def test_a_row_goes_left_up_to_the_threshold() -> None:
    rows = np.array([[9, 0.5], [9, 0.51], [9, -1]], np.float32)
    assert Forest.of(stump(), 2).sums(rows).tolist() == [1, 2, 1]
    twice = Forest.of(stump(roots=[0, 0]), 2)
    assert twice.sums(rows).tolist() == [2, 4, 2]


def test_joined_trees_give_each_what_they_give_alone() -> None:
    one, other = Forest.of(stump(), 2), Forest.of(stump(roots=[0, 0], values=[0.0, 3.0, 5.0]), 2)
    rows = np.array([[9, 0.5], [9, 0.51], [9, -1]], np.float32)
    joined = Forest.joined((one, other)).tree_values(rows)
    assert joined.tolist() == np.hstack((one.tree_values(rows), other.tree_values(rows))).tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"features": [2, 0, 0]},
        {"features": [-1, 0, 0]},
        {"roots": [3]},
        {"roots": [-1]},
        {"roots": []},
        {"left": [0, 1, 2]},
        {"left": [3, 1, 2]},
        {"left": [1, 0, 2]},
        {"right": [2, 1, 1]},
        {"values": [0, 1]},
        {"values": [0, float("nan"), 2]},
        {"values": [0, 1e30, 2]},
        {"thresholds": [float("inf"), 0, 0]},
        {name: [] for name in ("features", "thresholds", "left", "right", "values")},
    ],
    ids=str,
)
def test_what_is_no_forest_is_refused(changes: dict[str, list[float]]) -> None:
    with pytest.raises(InvalidForestError):
        Forest.of(stump(**changes), 2)


def test_a_chain_deeper_than_any_tree_is_refused() -> None:
    """A node for each step, and a leaf at the end."""
    steps = MAX_DEPTH + 1
    chain = {
        "features": [0.0] * (steps + 1),
        "thresholds": [0.0] * (steps + 1),
        "left": [*range(1, steps + 1), steps],
        "right": [*range(1, steps + 1), steps],
        "values": [0.0] * (steps + 1),
    }
    with pytest.raises(InvalidForestError, match="deeper"):
        Forest.of(stump(**chain), 1)


def test_arrays_say_what_lightgbm_says() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    random = np.random.default_rng(0)
    rows = random.normal(size=(500, 6)).astype(np.float32).round(1)
    targets = rows[:, 0] * (rows[:, 1] > 0.1) + rows[:, 2] ** 2
    parameters = {"verbose": -1, "num_threads": 1, "num_leaves": 15, "use_missing": False}
    booster = lightgbm.train(parameters, lightgbm.Dataset(rows, targets), 20)
    assert np.abs(exported(booster, 6).sums(rows) - booster.predict(rows)).max() < 1e-5


def test_equal_rows_make_equal_trees() -> None:
    pytest.importorskip("lightgbm")
    random = np.random.default_rng(0)
    rows = random.normal(size=(300, 4)).astype(np.float32)
    first, second = (time_forest(rows, rows[:, 0].tolist(), [1.0] * 300, trees=3) for _ in range(2))
    assert first.thresholds.tobytes() == second.thresholds.tobytes()
    assert first.values.tobytes() == second.values.tobytes()
