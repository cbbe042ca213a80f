"""Random parts of a solver's space: valid, without duplicates, the same for equal seeds, and nothing is listed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

DEVICE = Device.virtual("90a")
NAMES = ("ConvDirectTiled", "ConvImplicitGemmWgmma", "ConvChannelsLast", "ConvIm2colGemm")


@pytest.fixture(autouse=True)
def every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "library_version", lambda self, library: 1)


def asked(name: str) -> tuple[Solver, ProblemDescription]:
    solver = Registry.default()[name]
    return solver, solver.examples()[0]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_valid_and_each_is_given_once(name: str) -> None:
    solver, problem = asked(name)
    drawn = list(itertools.islice(solver.drawn_configs(problem, DEVICE, 2000), 20))
    assert len(set(drawn)) == len(drawn) > 0
    for config in drawn:
        solver.check_config(problem, DEVICE, config)


@pytest.mark.parametrize("name", NAMES[:3])
def test_equal_seeds_draw_equal_configurations_and_others_others(name: str) -> None:
    solver, problem = asked(name)
    first, again, other = (list(solver.drawn_configs(problem, DEVICE, 500, seed)) for seed in ("a", "a", "b"))
    assert first == again
    assert set(first) != set(other)


def test_a_space_that_is_a_list_is_listed_so_far() -> None:
    solver, problem = asked("ConvIm2colGemm")
    assert not solver.parameters
    every = list(solver.configs(problem, DEVICE))
    assert list(solver.drawn_configs(problem, DEVICE, 3)) == every[:3]


def test_as_many_points_as_there_are_give_the_whole_space() -> None:
    solver, problem = asked("ConvDirectTiled")
    assert set(solver.drawn_configs(problem, DEVICE, 10**6)) == set(solver.configs(problem, DEVICE))


def test_nothing_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    solver, problem = asked("ConvImplicitGemmWgmma")
    tried = []
    is_valid = solver.is_valid_config

    def counted(problem: ProblemDescription, device: Device, config: Config) -> bool:
        tried.append(config)
        return is_valid(problem, device, config)

    def listed(*_: object) -> Iterator[Config]:
        pytest.fail("the space was listed")

    monkeypatch.setattr(type(solver), "is_valid_config", staticmethod(counted))
    monkeypatch.setattr(type(solver), "configs", listed)
    next(solver.drawn_configs(problem, DEVICE, 2000))
    assert len(tried) < 200
