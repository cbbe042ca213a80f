"""Layers that benchmarks/families.py draws: problems, and others for another seed."""

from __future__ import annotations

import random
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from miofind.core.problem import DataType, Direction

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(FOLDER)
    return runpy.run_path(str(FOLDER / "families.py"))


def test_equal_seeds_draw_equal_problems(families: dict[str, Any]) -> None:
    drawn = families["family_problems"]
    first = drawn(60, seed=1)
    assert first == drawn(60, seed=1) != drawn(60, seed=2)
    assert len(set(first)) == 60


def test_every_family_poses_problems(families: dict[str, Any]) -> None:
    draw = random.Random(0)
    for family, weight in families["FAMILIES"]:
        assert weight > 0
        for _ in range(40):
            layer = family(draw)
            problem = layer.problem(2, Direction.FORWARD, DataType.FLOAT16, "ieee", channels_last=True)
            assert problem.flops > 0
            assert problem.x.shape[:2] == (2, layer.channels)
            assert problem.groups == layer.groups


def test_problems_are_of_all_kinds_and_sizes_that_are_measured_soon(families: dict[str, Any]) -> None:
    problems = families["family_problems"](400, seed=3)
    for kinds in (
        Counter(problem.direction for problem in problems),
        Counter((problem.x.dtype, problem.math) for problem in problems),
        Counter(problem.spatial_dims for problem in problems),
        Counter(problem.x.layout.channels_last for problem in problems),
        Counter(bool(problem.epilogue) for problem in problems),
    ):
        assert len(kinds) > 1
        assert min(kinds.values()) >= 10
    assert all(problem.flops <= 2e12 for problem in problems)
    assert all(problem.flops <= 4e11 for problem in problems if problem.x.dtype is DataType.FLOAT32)
