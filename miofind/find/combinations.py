"""Which solvers need not be asked of a problem, told from what many have in common: direction, types, layouts, size.

Of some forty solvers, most serve none of a problem's combination of these, whatever its sizes. None of them is imported
for that.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.facts import SolverFacts
from miofind.solver.registry import Registry
from miofind.solver.solver import APPLICABLE, Applicability, Combination, Solver, refuse_combination


class OfCombination(NamedTuple):
    """What is known of a solver before it is asked.

    Attributes:
        is_possible: whether the device has a place and a library of its.
        answer: why it serves no bare problem of the combination; of another package's solver nothing is known.
    """

    is_possible: bool
    answer: Applicability


class AnswersOfCombination(dict[str, OfCombination]):
    """By id, what is known of the solvers of a registry for all problems of a combination; told when it is asked for.

    Args:
        problem: any of the combination.
    """

    def __init__(self, registry: Registry, problem: ProblemDescription, device: Device) -> None:
        super().__init__()
        self._registry, self._problem, self._device = registry, problem.bare, device

    @staticmethod
    def of(registry: Registry, problem: ProblemDescription, device: Device) -> AnswersOfCombination:
        """Those of a problem's combination."""
        return _answers(registry, Combination.of(problem), device)

    def __missing__(self, solver_id: str) -> OfCombination:
        facts, device = self._registry.facts[solver_id], self._device
        answer = APPLICABLE
        if facts.is_own:
            answer = refuse_combination(facts, self._problem, device)
        self[solver_id] = OfCombination(is_possible(facts, device), answer)
        return self[solver_id]


@functools.lru_cache(maxsize=64)
def _answers(registry: Registry, combination: Combination, device: Device) -> AnswersOfCombination:
    return AnswersOfCombination(registry, combination.problem, device)


@functools.lru_cache(maxsize=256)
def is_possible(solver: Solver | SolverFacts, device: Device) -> bool:
    """Whether a device has a place and a library of a solver's."""
    return any(key.place is device.place and device.library_version(key.library) is not None for key in solver.keys)
