"""Backward data with a residual and an activation's derivative, on the CPU place: calls, runs, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miofind
from miofind.core.epilogue import DERIVATIVES, EpilogueParameters
from miofind.errors import InvalidArrayError, InvalidOptionError, InvalidProblemError
from miofind.reference.convolution import reference_on_host
from miofind.reference.epilogue import apply_epilogue

RANDOM = np.random.default_rng(7)
X_SHAPE = (2, 8, 9, 7)
DY = RANDOM.standard_normal((2, 12, 5, 4)).astype(np.float32)
W = RANDOM.standard_normal((12, 8, 1, 1)).astype(np.float32)
RESIDUAL, SAVED = (RANDOM.standard_normal(X_SHAPE).astype(np.float32) for _ in range(2))
STRIDED = {"stride": 2}


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[miofind.Handle]:
    with miofind.Handle("cpu", database=str(Path(tmp_path_factory.mktemp("db")) / "own.db")) as made:
        yield made


def wanted_of(epilogue: str, **numbers: float) -> Any:
    problem = miofind.ProblemDescription.convolution(
        x=X_SHAPE, w=W.shape, direction="backward_data", epilogue=epilogue, **STRIDED
    )
    sums = reference_on_host(problem, y=DY, w=W)
    return apply_epilogue(problem, sums, {"residual": RESIDUAL, "saved": SAVED}, EpilogueParameters(**numbers))


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("adds", [False, True])
def test_a_call_multiplies_by_a_derivative(handle: miofind.Handle, derivative: str, adds: bool) -> None:
    """Most pixels meet no tap: the residual and the derivative are there, too."""
    given: dict[str, Any] = {"residual": RESIDUAL, "beta": -0.5} if adds else {}
    dx = miofind.convolution_backward_data(
        DY, W, X_SHAPE, derivative=derivative, saved=SAVED, alpha=2, handle=handle, **given, **STRIDED
    )
    numbers = {"alpha": 2.0, "beta": -0.5 if adds else 1.0}
    wanted = wanted_of(f"{'residual.' if adds else ''}d{derivative}", **numbers)
    np.testing.assert_allclose(dx, wanted, rtol=1e-5, atol=1e-5)


def test_a_residual_alone_is_accumulated(handle: miofind.Handle) -> None:
    dx = miofind.convolution_backward_data(DY, W, X_SHAPE, residual=RESIDUAL, handle=handle, **STRIDED)
    np.testing.assert_allclose(dx, wanted_of("residual"), rtol=1e-5, atol=1e-5)


def test_relu6_is_a_clamp_of_its_bounds(handle: miofind.Handle) -> None:
    call = {"derivative": "relu6", "saved": SAVED, "handle": handle, **STRIDED}
    dx = miofind.convolution_backward_data(DY, W, X_SHAPE, **call)
    np.testing.assert_allclose(dx, wanted_of("dclamp"), rtol=1e-5, atol=1e-5)
    with pytest.raises(InvalidOptionError, match="relu6 has the bounds 0 and 6"):
        miofind.convolution_backward_data(DY, W, X_SHAPE, high=5, **call)


def test_a_solution_runs_with_what_its_problem_reads(handle: miofind.Handle) -> None:
    problem = miofind.ProblemDescription.from_arrays(
        dy=DY, w=W, x_shape=X_SHAPE, residual=RESIDUAL, saved=SAVED, derivative="relu", **STRIDED
    )
    assert problem.epilogue.text == "residual.drelu"
    solutions = miofind.find_solutions(problem, handle=handle)
    assert solutions
    out = np.full(X_SHAPE, np.nan, np.float32)
    for solution in solutions:
        given = {"dy": DY, "out": out, "residual": RESIDUAL, "saved": SAVED}
        assert miofind.run_solution(solution, w=W, **given) is out
        np.testing.assert_allclose(out, wanted_of("residual.drelu"), rtol=1e-5, atol=1e-5)
        del given["saved"]
        with pytest.raises(InvalidArrayError, match="takes dy, w, residual and saved; given: w, dy, residual"):
            miofind.run_solution(solution, w=W, **given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "Find solutions of a problem whose epilogue has residual and a derivative$"),
        ({"scale": W[0, 0]}, "given: w, dy, scale, residual, saved. Find solutions"),
    ],
)
def test_a_bare_gradient_is_told_what_it_takes(handle: miofind.Handle, given: dict[str, Any], told: str) -> None:
    problem = miofind.ProblemDescription.from_arrays(dy=DY, w=W, x_shape=X_SHAPE, **STRIDED)
    solution = miofind.find_solutions(problem, handle=handle)[0]
    with pytest.raises(InvalidArrayError, match=told):
        miofind.run_solution(solution, w=W, dy=DY, residual=RESIDUAL, saved=SAVED, **given)


def test_no_forward_epilogue_is_advised_for_what_was_saved(handle: miofind.Handle) -> None:
    problem = miofind.ProblemDescription.from_arrays(x=RESIDUAL, w=W)
    solution = miofind.find_solutions(problem, handle=handle)[0]
    with pytest.raises(InvalidArrayError, match=r"takes x and w; given: x, w, saved$"):
        miofind.run_solution(solution, RESIDUAL, W, saved=SAVED)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"saved": SAVED}, "saved is what a derivative is taken at: name it"),
        ({"derivative": "relu"}, "derivative=relu is taken at an array: pass saved"),
        ({"derivative": "tanh", "saved": SAVED}, "derivative=tanh is not computed"),
        ({"bias": W[:, 0, 0, 0]}, "bias: backward_data takes none: bias is of the epilogues of forward"),
        ({"activation": "relu"}, "activation: backward_data takes none"),
        ({"derivative": "relu", "saved": SAVED[:1]}, "saved has shape"),
        ({"derivative": "relu", "saved": SAVED.astype(np.float16)}, "saved has dtype float16, dx has float32"),
    ],
)
def test_what_does_not_fit_is_refused(handle: miofind.Handle, given: dict[str, Any], told: str) -> None:
    with pytest.raises((InvalidProblemError, InvalidArrayError), match=told):
        miofind.convolution_backward_data(DY, W, X_SHAPE, handle=handle, **given, **STRIDED)


def test_a_forward_convolution_takes_no_derivative(handle: miofind.Handle) -> None:
    with pytest.raises(InvalidProblemError, match="is of the epilogues of backward_data"):
        miofind.convolution(RESIDUAL, W, derivative="relu", saved=SAVED, handle=handle)
