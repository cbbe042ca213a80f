"""Solvers of the CPU place as releases have them: the same ids, each time with what a release may change about them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import pytest

from miofind.core.problem import DataType, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.errors import InvalidConfigError
from miofind.find.lookup import validity
from miofind.solver.registry import Registry
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.solver.steps import Config, ConvSolution, HostStep, Region, WorkspacePlan

TILES = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a release says of one solver.

    Attributes:
        source: what the hash of its source is of.
        refuses: every problem.
        fails: it raises when it is asked whether it serves a problem.
        tiles: its configurations, all of them defaults.
        regions: bytes of workspace of a tile.
    """

    version: int = 1
    source: str = "today"
    refuses: bool = False
    fails: bool = False
    tiles: tuple[int, ...] = TILES
    regions: int = 256
    deterministic: bool = True


class OfRelease(Solver):
    """Direct summation, whatever its tile; its class says which release's."""

    algorithm = Algorithm.DIRECT
    keys = (KernelKey(place=Place.CPU, library=Library.PLAIN, dtypes=frozenset(DataType), layouts=frozenset(Layout)),)
    terms: ClassVar[Terms]

    def examples(self) -> tuple[ProblemDescription, ...]:
        return ()

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if self.terms.fails:
            raise ArithmeticError("broken for this test")
        return Applicability("refused by this release") if self.terms.refuses else APPLICABLE

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(Config.of(tile=tile) for tile in self.terms.tiles)

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        if config not in self.default_configs(problem, device):  # 1.0 is no 1
            raise InvalidConfigError(f"{self.id}: config {config.json} is none of this release")

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return float(config["tile"])

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        regions = (Region(name="scratch", bytes=self.terms.regions * config["tile"]),)
        return ConvSolution(
            steps=(HostStep(module="miofind.solvers.cpu.direct", function="convolve"),),
            workspace=WorkspacePlan(regions),
            deterministic=self.terms.deterministic,
        )


def made(name: str, terms: Terms) -> Solver:
    """The solver of an id as a release has it."""
    body = {"id": name, "version": terms.version, "terms": terms, "__module__": terms.source}
    solver: Solver = type("OfThatRelease", (OfRelease,), body)()
    return solver


@contextmanager
def released(*those: Solver) -> Iterator[None]:
    """That release is installed: these are all the solvers there are, each with its sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registry, "_default", Registry(those))
        patch.setattr(validity, "host_hash", lambda module: hashlib.sha256(module.encode()).hexdigest())
        yield
