"""What a ranker knows of candidates: how a problem fills their tiles, and how they compare."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from miofind import ProblemDescription
from miofind.find.immediate.devices import described
from miofind.find.immediate.features import Columns, Guess, feature_names, problem_features
from miofind.solver.steps import Config

DEVICE = described("NVIDIA H200|132|9.0|")
PROBLEM = ProblemDescription.convolution(x=(1, 64, 56, 56), w=(128, 64, 3, 3), padding=1, dtype="float16")
DEPTHWISE = ProblemDescription.convolution(x=(6, 40, 30, 30), w=(40, 1, 3, 3), padding=1, groups=40, dtype="float16")
TILES = ("m_of_tiles", "n_of_tiles", "rows_of_tiles", "columns_of_tiles", "channels_of_tiles", "images_of_tiles")


def features(problem: ProblemDescription, *guesses: Guess) -> list[dict[str, float]]:
    """By name, of each candidate."""
    names = feature_names(problem_features(problem, DEVICE), guesses)
    matrix = Columns(names).matrix(problem, DEVICE, guesses)
    return [dict(zip(names, map(float, row), strict=True)) for row in matrix]


def guess(solver_id: str = "A", estimate_ms: float = 1.0, **config: Any) -> Guess:
    return Guess(solver_id, Config(config), estimate_ms, estimate_ms)


@pytest.mark.parametrize(
    "config",
    [
        {"tile_m": 128, "tile_n": 64, "tile_k": 32, "splits": 2},
        {"config": {"tile_m": 128, "tile_n": 64, "tile_k": 32, "splits": 2}, "solver": "B"},
        {"consumers": 2, "rows": 1, "tile_n": 64, "depth_bytes": 64, "splits": 2, "swapped": 0},
    ],
)
def test_products(config: dict[str, Any]) -> None:
    (found,) = features(PROBLEM, guess(**config))
    assert [found[name] for name in TILES] == pytest.approx([3136 / 3200, 1, 1, 1, 1, 1])
    blocks = 25 * 2 * 2
    assert 2 ** found["blocks"] == pytest.approx(blocks)
    assert found["waves"] == found["blocks_of_waves"] == pytest.approx(blocks / 132)
    assert 2 ** found["steps"] == pytest.approx(64 * 9 / 2 / 32)


def test_swapped_products() -> None:
    (found,) = features(PROBLEM, guess(consumers=1, rows=2, tile_n=192, swapped=1))
    assert (found["m_of_tiles"], found["n_of_tiles"]) == pytest.approx((1, 3136 / (17 * 192)))


def test_tiles_of_places() -> None:
    (found,) = features(DEPTHWISE, guess(rows=7, columns=4, channels=32, images=4))
    assert [found[name] for name in TILES] == pytest.approx([1, 1, 30 / 35, 30 / 32, 40 / 64, 6 / 8])
    blocks = 5 * 8 * 2 * 2
    assert found["waves"] == pytest.approx(blocks / 132)
    assert found["blocks_of_waves"] == pytest.approx(blocks / 132 / 2)


def test_candidates_of_one_solver_are_compared() -> None:
    found = features(PROBLEM, guess("A", 4.0, tile=1), guess("B", 1.0), guess("A", 2.0, tile=2))
    told = [(each["estimate_over_own_best"], each["own_candidates"], each["own_place"]) for each in found]
    assert told == [(1, 2, 1), (0, 1, 0), (0, 2, 0)]


@pytest.mark.parametrize("size", [0, -1, -7.5, 1e300, 1e-300, True, "999999x999999x999999", "x"])
@pytest.mark.parametrize("name", ["rows", "channels", "tile_n", "tile_m", "tile_k", "splits", "depth_bytes"])
def test_whatever_solvers_call_so_makes_numbers(name: str, size: Any) -> None:
    with np.errstate(over="ignore"):  # of the parameter as it is
        (found,) = features(PROBLEM, guess(**({"tile_n": 64} | {name: size})))
    tiling = {key: value for key, value in found.items() if not key.startswith("parameter")}
    assert all(map(math.isfinite, tiling.values()))
