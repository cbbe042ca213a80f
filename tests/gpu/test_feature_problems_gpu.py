"""Solvers' examples, and strides, dilations, groups and odd sizes that these lack, through both gates on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from both_gates import check_both_gates
from feature_problems import derived_problems

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Place
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver

pytestmark = pytest.mark.gpu


def cases() -> Iterator[object]:
    """As for the newest device that solvers serve; the device of the test may refuse some."""
    for solver in Registry.default().values():
        if any(key.place is Place.CUDA for key in solver.keys):
            for problem in solver.examples():
                yield pytest.param(solver, problem, id=f"{solver.id}-example-{problem}")
            for feature, problem in derived_problems(solver, Device.virtual("90a")):
                yield pytest.param(solver, problem, id=f"{solver.id}-{feature}-{problem}")


@pytest.mark.parametrize(("solver", "problem"), list(cases()))
def test_examples_and_problems_that_they_lack_are_right(
    solver: Solver, problem: ProblemDescription, device: Device, compiler: Compiler
) -> None:
    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    check_both_gates(problem, solver, solver.default_configs(problem, device)[0], device, compiler)
