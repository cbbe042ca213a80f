"""Finds of problems with an epilogue on the CPU place, and what is done with their solutions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import miofind
from miofind.core.epilogue import EpilogueParameters
from miofind.finddb import MEMORY
from miofind.reference.convolution import reference_on_host
from miofind.reference.epilogue import apply_epilogue
from miofind.solver.registry import Registry
from miofind.solver.steps import Config
from miofind.solvers.cpu.winograd import ConvCpuWinograd

PROBLEM = miofind.ProblemDescription.convolution(
    x=(2, 32, 12, 11), w=(16, 32, 3, 3), padding=1, epilogue="bias.residual.clamp"
)
NUMBERS = {"alpha": 0.5, "beta": 2.0, "low": -1.0, "high": 2.5}


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[miofind.Handle]:
    database = tmp_path_factory.mktemp("fused") / "finddb.db"
    with miofind.Handle("cpu", database=database, strict=True) as made:
        yield made


@pytest.fixture(scope="module", params=["ConvCpuDirect+Pointwise", "ConvCpuWinograd+Pointwise"])
def solution(request: pytest.FixtureRequest, handle: miofind.Handle) -> miofind.Solution:
    """Of direct summation, and of a transform, which is packed."""
    options = miofind.FindOptions(only=(request.param,), max_error=1.0)
    return miofind.find_solutions(PROBLEM, options=options, handle=handle)[0]


def given() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {each.name: generator.standard_normal(each.shape).astype(np.float32) for each in PROBLEM.inputs}


def growth_of(solution: miofind.Solution) -> float:
    """How much wider the solution's errors may be than direct summation's: a find takes the fastest of several tiles,
    and the larger a tile of Winograd's, the larger its errors."""
    return Registry.default()[solution.solver_id].error_growth(PROBLEM, solution.config)


def assert_right(y: np.ndarray, growth: float = 1.0, **numbers: float) -> None:
    tolerance = 1e-5 * growth
    arrays = given()
    sums = reference_on_host(PROBLEM.bare, x=arrays["x"], w=arrays["w"])
    wanted = apply_epilogue(PROBLEM, sums, arrays, EpilogueParameters(**numbers))
    np.testing.assert_allclose(y, wanted, rtol=tolerance, atol=tolerance)


def test_a_solution_runs(solution: miofind.Solution) -> None:
    growth = growth_of(solution)
    assert_right(miofind.run_solution(solution, **given()), growth)
    assert_right(miofind.run_solution(solution, **given(), **NUMBERS), growth, **NUMBERS)


def test_one_call_finds_the_problem_that_the_arrays_pose(handle: miofind.Handle) -> None:
    y = miofind.convolution(**given(), **NUMBERS, padding=1, activation="clamp", handle=handle)
    assert_right(y, **NUMBERS)
    posed = miofind.ProblemDescription.from_arrays(**given(), padding=1, activation="clamp")
    assert posed == PROBLEM
    assert (posed.network_config, miofind.FindOptions()) in handle.answers


@pytest.mark.parametrize("tile", [2, 4, 6])
def test_results_are_right_with_whatever_tile_a_find_takes(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    """The tolerance was one of direct summation's, and the find took the tile that was the fastest."""
    config = Config.of(tile=tile)
    monkeypatch.setattr(ConvCpuWinograd, "default_configs", lambda *_: (config,))
    options = miofind.FindOptions(only=("ConvCpuWinograd+Pointwise",), max_error=1.0, find_mode="normal")
    with miofind.Handle("cpu", database=MEMORY) as handle:
        (solution,) = miofind.find_solutions(PROBLEM, options=options, handle=handle)
        assert solution.config == config
        test_a_solution_runs(solution)


def test_a_solution_is_packed(solution: miofind.Solution) -> None:
    arrays = given()
    packed = solution.pack(arrays["w"], bias=arrays["bias"])
    assert bool(packed.packed_bytes) == (solution.solver_id == "ConvCpuWinograd+Pointwise")
    assert_right(packed.run(arrays["x"], residual=arrays["residual"], **NUMBERS), growth_of(solution), **NUMBERS)


def test_a_solution_is_saved_and_loaded(handle: miofind.Handle, solution: miofind.Solution, tmp_path: Path) -> None:
    solution.save(tmp_path / "solution.json")
    loaded = miofind.Solution.load(tmp_path / "solution.json", handle)
    assert (loaded.id, loaded.problem) == (solution.id, PROBLEM)
    assert_right(miofind.run_solution(loaded, **given(), **NUMBERS), growth_of(solution), **NUMBERS)
