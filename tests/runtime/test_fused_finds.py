"""Finds of problems with an epilogue on the CPU place, and what is done with their solutions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import miofind
from miofind.core.epilogue import EpilogueParameters
from miofind.epilogue_reference import apply_epilogue
from miofind.reference import reference_on_host

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


def assert_right(y: np.ndarray, **numbers: float) -> None:
    arrays = given()
    sums = reference_on_host(PROBLEM.bare, x=arrays["x"], w=arrays["w"])
    wanted = apply_epilogue(PROBLEM, sums, arrays, EpilogueParameters(**numbers))
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


def test_a_solution_runs(solution: miofind.Solution) -> None:
    assert_right(miofind.run_solution(solution, **given()))
    assert_right(miofind.run_solution(solution, **given(), **NUMBERS), **NUMBERS)


def test_one_call_finds_the_problem_that_the_arrays_pose(handle: miofind.Handle) -> None:
    y = miofind.convolution(**given(), **NUMBERS, padding=1, activation="clamp", handle=handle)
    assert_right(y, **NUMBERS)
    posed = miofind.ProblemDescription.from_arrays(**given(), padding=1, activation="clamp")
    assert posed == PROBLEM
    assert (posed.network_config, miofind.FindOptions()) in handle.answers


def test_a_solution_is_packed(solution: miofind.Solution) -> None:
    arrays = given()
    packed = solution.pack(arrays["w"], bias=arrays["bias"])
    assert bool(packed.packed_bytes) == (solution.solver_id == "ConvCpuWinograd+Pointwise")
    assert_right(packed.run(arrays["x"], residual=arrays["residual"], **NUMBERS), **NUMBERS)


def test_a_solution_is_saved_and_loaded(handle: miofind.Handle, solution: miofind.Solution, tmp_path: Path) -> None:
    solution.save(tmp_path / "solution.json")
    loaded = miofind.Solution.load(tmp_path / "solution.json", handle)
    assert (loaded.id, loaded.problem) == (solution.id, PROBLEM)
    assert_right(miofind.run_solution(loaded, **given(), **NUMBERS), **NUMBERS)
