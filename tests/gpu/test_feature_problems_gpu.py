"""Solvers' examples, and what these lack and the solvers accept, through both gates on a GPU: dtypes, layouts,
directions, strides, dilations, groups, odd sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from helpers.problems.feature_problems import derived_problems
from helpers.runs.gates import check_both_gates

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.libraries.cudnn import HEURISTIC
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

pytestmark = pytest.mark.gpu

FEW = 4
"""Default configurations of a derived problem that are all run."""


def cases() -> Iterator[object]:
    """As for the newest device that solvers serve; the device of the test may refuse some."""
    for solver in Registry.default().values():
        if any(key.place is Place.CUDA for key in solver.keys):
            for problem in solver.examples():
                yield pytest.param(solver, problem, False, id=f"{solver.id}-example-{problem}")
            for feature, problem in derived_problems(solver, Device.virtual("90a")):
                if max(problem.x.size, problem.y.size) > 1 << 30:
                    continue  # gigabytes each: test_in_parts_gpu has small ones of all kinds
                yield pytest.param(solver, problem, True, id=f"{solver.id}-{feature}-{problem}")


@pytest.mark.parametrize(("solver", "problem", "is_derived"), list(cases()))
def test_examples_and_problems_that_they_lack_are_right(
    solver: Solver, problem: ProblemDescription, is_derived: bool, device: Device, compiler: Compiler
) -> None:
    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    defaults = solver.default_configs(problem, device)
    if solver.library is Library.CUDNN and defaults[0]["engine"] == HEURISTIC:
        pytest.skip("cuDNN has no engine for it")
    configs = some_of(defaults) if is_derived else defaults[:1]
    kernels = [step for config in configs for step in solver.solution(problem, device, config).kernels]
    list(compiler.build_all(kernels, device.arch))  # on all processors, before they are wanted one by one
    for config in configs:
        check_both_gates(problem, solver, config, device, compiler)


def some_of(configs: Sequence[Config]) -> Sequence[Config]:
    """All where they are few, else the first and the last."""
    return configs if len(configs) <= FEW else (configs[0], configs[-1])
