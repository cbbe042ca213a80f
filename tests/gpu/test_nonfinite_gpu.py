"""An infinity in an input reaches the results that sum it and no others, unless a solver says that it spreads."""

from __future__ import annotations

import pytest
from helpers.problems.small_examples import small_examples
from helpers.runs.device_runs import runs_of_defaults
from helpers.values.nonfinite import infinities

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("solver", "problem"), list(small_examples()), ids=lambda case: getattr(case, "id", None) or str(case)
)
def test_infinities_reach_what_sums_them(
    solver: Solver, problem: ProblemDescription, device: Device, compiler: Compiler
) -> None:
    def keeps(config: Config) -> bool:
        return not solver.spreads_nonfinite(problem, config)

    for run in runs_of_defaults(solver, problem, device, compiler, keeps):
        for infinity in infinities(problem, seed=4):
            infinity.check(run.output(infinity.inputs))
