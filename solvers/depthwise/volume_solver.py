"""What the solvers of depthwise convolutions of volumes have in common: how they choose among configurations."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import ClassVar

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.columns import ConfigTable
from miofind.solver.solver import (
    APPLICABLE,
    Algorithm,
    Applicability,
    EstimatedConfig,
    RankedTable,
    Solver,
    first_of_kinds,
)
from miofind.solver.steps import Config
from miofind.solvers.depthwise.volume_tiling import KEYS, refuse_volumes

_DEFAULTS = 8


class DepthwiseVolumeSolver(Solver):
    """A solver on planes of volumes.

    Class attributes:
        fallbacks: one of them is valid wherever the solver serves; the first is in the short list, too.
    """

    algorithm = Algorithm.DIRECT
    keys = KEYS
    alignment_bytes = 16
    fallbacks: ClassVar[tuple[Config, ...]]

    @abstractmethod
    def short_list(self) -> ConfigTable:
        """Configurations that defaults are chosen among, the first of the fallbacks with them."""

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_volumes(problem)).refused:
            return answer
        if any(self.is_valid_config(problem, device, fallback) for fallback in self.fallbacks):
            return APPLICABLE
        return Applicability(f"no tile fits: filter {problem.filter} at stride {problem.conv.stride}")

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        # The best of each shape of a thread's work: estimates of one shape err alike.
        return first_of_kinds(
            self._ranked(problem, device),
            lambda each: (each.config["vector"], each.config["rows"], each.config["columns"]),
            _DEFAULTS,
        )

    def _ranked(self, problem: ProblemDescription, device: Device) -> RankedTable:
        """The short list as far as it is valid, or where nothing of it is the fallbacks, the least estimate first."""
        ranked = self.ranked_valid(problem, device, self.short_list())
        return ranked if len(ranked) else self.ranked_valid(problem, device, _table(self.fallbacks))


@functools.cache
def _table(configs: tuple[Config, ...]) -> ConfigTable:
    return ConfigTable(configs)
