"""The kernels that a find of a problem would launch, listed without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.find.plan import search_space
from miofind.options import FindOptions
from miofind.solver.registry import Registry, composed
from miofind.solver.solver import Solver
from miofind.solver.steps import KernelStep


def solvers_with_kernels(problem: ProblemDescription, options: FindOptions, registry: Registry) -> Iterator[Solver]:
    """Solvers that may have kernels for a problem, each with its composed form for a fused one."""
    for solver in registry.values():
        if solver.sources and options.allows(solver):
            yield from (solver, composed(solver)) if problem.epilogue else (solver,)


def kernels_of(
    solver: Solver, problem: ProblemDescription, device: Device, *, search: bool, most: int | None = None
) -> Iterator[KernelStep]:
    """A solver's kernels for a problem, none where it does not serve it; whatever the solver's code raises.

    Args:
        search: of all configurations that a search may try, not of the defaults alone.
        most: of these configurations.
    """
    if not solver.applicability(problem, device):
        return
    configs = search_space(problem, device, solver) if search else solver.default_configs(problem, device)
    for config in itertools.islice(configs, most):
        yield from solver.solution(problem, device, config).kernels


def one_a_binary(wanted: Mapping[KernelStep, str]) -> dict[KernelStep, str]:
    """Of steps with what they are named, one for each binary, whatever the grid."""
    distinct: dict[object, tuple[KernelStep, str]] = {}
    for step, name in wanted.items():
        distinct.setdefault((step.binary, step.entry), (step, name))
    return dict(distinct.values())
