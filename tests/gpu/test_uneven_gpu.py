"""Solvers that keep direct summation's bound keep it whatever finite values inputs have."""

from __future__ import annotations

import pytest
from helpers.problems.small_examples import small_examples
from helpers.runs.device_runs import runs_of_defaults
from helpers.values.uneven import uneven_inputs

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("solver", "problem"), list(small_examples()), ids=lambda case: getattr(case, "id", None) or str(case)
)
def test_the_bound_holds_whatever_finite_values_inputs_have(
    solver: Solver, problem: ProblemDescription, device: Device, compiler: Compiler
) -> None:
    def keeps(config: Config) -> bool:
        return solver.keeps_bound(problem, config)

    trials = list(uneven_inputs(problem, seed=4))
    for run in runs_of_defaults(solver, problem, device, compiler, keeps):
        for uneven in trials:
            uneven.check(run.output(uneven.inputs), solver.error_reach(problem, run.config))
