"""A solver that has another one compute part of its work: the other's configuration is a parameter of its own."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidConfigError
from miofind.solver.registry import Registry
from miofind.solver.solver import Reach, Solver
from miofind.solver.steps import Config, ConvSolution, KernelStep


class DelegatingSolver(Solver):
    """Delegates to another of miofind's solvers, known by its id alone, so that no family imports another.

    Its bounds are the other solver's for what that is asked, unless it says otherwise.

    Attributes:
        inner: id of the other solver.
        inner_name: parameter that holds the other solver's configuration.
    """

    inner: ClassVar[str]
    inner_name: ClassVar[str]

    @abstractmethod
    def inner_problem(self, problem: ProblemDescription, config: Config) -> ProblemDescription:
        """What the other solver is asked in place of a problem; its bounds are the same on every device."""

    @property
    def inner_solver(self) -> Solver:
        """The other solver."""
        return Registry.default()[self.inner]

    def inner_config(self, config: Config) -> Config:
        """The other solver's part of a configuration."""
        return _part(config, self.inner_name)

    def check_inner_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        """Do nothing for a configuration whose part the other solver takes for a problem.

        Args:
            problem: what the other solver is asked.

        Raises:
            InvalidConfigError: it is no configuration of the other solver.
        """
        if not isinstance(config[self.inner_name], dict):
            raise InvalidConfigError(f"{self.id}: config {config.json} has no configuration of {self.inner}")
        try:
            self.inner_solver.check_config(problem, device, self.inner_config(config))
        except InvalidConfigError as error:
            raise InvalidConfigError(f"{self.id}: config {config.json}: {error}") from error

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return self.inner_solver.error_growth(self.inner_problem(problem, config), self.inner_config(config))

    def error_reach(self, problem: ProblemDescription, config: Config) -> Reach:
        return self.inner_solver.error_reach(self.inner_problem(problem, config), self.inner_config(config))

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return self.inner_solver.spreads_nonfinite(self.inner_problem(problem, config), self.inner_config(config))

    def is_exact(self, config: Config) -> bool:
        return self.inner_solver.is_exact(self.inner_config(config))


@functools.lru_cache(maxsize=1 << 12)  # few serve all problems, and to write one as JSON takes longest
def _part(config: Config, name: str) -> Config:
    """The configuration that is a value of another."""
    return Config(config[name])


def kernels_on(solution: ConvSolution, names: Mapping[str, str]) -> tuple[KernelStep, ...]:
    """The kernels of the other solver's solution, with buffers of some names under others."""
    return tuple(step.on_buffers(names) for step in solution.kernels)
