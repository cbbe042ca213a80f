"""Solvers that have another compute part of their work."""

from __future__ import annotations

import pytest

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidConfigError
from miofind.solver.delegating import DelegatingSolver, kernels_on
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, Pointer

DEVICE = Device.virtual("90a")
DELEGATING = [solver for solver in Registry.default().values() if isinstance(solver, DelegatingSolver)]


def asked(solver: DelegatingSolver) -> tuple[ProblemDescription, Config]:
    problem = solver.examples()[0]
    return problem, solver.default_configs(problem, DEVICE)[0]


def test_there_are_some() -> None:
    assert {solver.id for solver in DELEGATING} >= {"ConvChannelsLast", "ConvChannelsLastMma", "ConvWinogradMma"}


@pytest.mark.parametrize("solver", DELEGATING, ids=lambda solver: solver.id)
def test_the_inner_solver_checks_its_part_of_a_configuration(solver: DelegatingSolver) -> None:
    problem, config = asked(solver)
    solver.check_config(problem, DEVICE, config)
    for part, told in (("none", "has no configuration of"), ({"tile": 3}, "must have the parameters")):
        with pytest.raises(InvalidConfigError, match=f"{solver.id}: .*{told}"):
            solver.check_config(problem, DEVICE, Config({**config, solver.inner_name: part}))


@pytest.mark.parametrize("solver", DELEGATING, ids=lambda solver: solver.id)
def test_the_inner_solver_is_of_the_default_registry_and_serves(solver: DelegatingSolver) -> None:
    problem, config = asked(solver)
    assert isinstance(solver.inner_solver, Solver)
    assert solver.inner_solver is Registry.default()[solver.inner]
    assert set(solver.inner_config(config)) == set(solver.inner_solver.parameters)
    assert solver.inner_solver.applicability(solver.inner_problem(problem, config), DEVICE)


def test_kernels_take_their_buffers_under_other_names() -> None:
    solver = Registry.default()["ConvDirectNaive"]
    problem = solver.examples()[0]
    solution = solver.solution(problem, DEVICE, solver.default_configs(problem, DEVICE)[0])
    renamed = kernels_on(solution, {"x": "tiles"})
    buffers = [arg.buffer for step in renamed for arg in step.args if isinstance(arg, Pointer)]
    assert "tiles" in buffers
    assert "x" not in buffers
    assert "w" in buffers
