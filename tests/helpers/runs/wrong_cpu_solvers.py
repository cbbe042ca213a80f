"""Solvers of the CPU place that fail: one computes wrong results, another does not launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import Config, ConvSolution, HostStep
from miofind.solvers.cpu.direct import ConvCpuDirect, convolve


def off_by_one(problem: ProblemDescription, config: Config, buffers: Mapping[str, Any]) -> None:
    """The convolution, plus 1."""
    convolve(problem, config, buffers)
    buffers[problem.direction.output][...] += 1


def refuses_to_start(problem: ProblemDescription, config: Config, buffers: Mapping[str, Any]) -> None:
    """Nothing."""
    raise RuntimeError("the launch was refused")


class Wrong(ConvCpuDirect):
    """Wrong everywhere."""

    id = "vendor/Wrong"

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(HostStep(module=__name__, function="off_by_one"),))


class Refusing(ConvCpuDirect):
    """Fails at each launch."""

    id = "vendor/Refusing"

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(HostStep(module=__name__, function="refuses_to_start"),))


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have both among the solvers of the default registry."""
    monkeypatch.setattr(Registry, "_default", Registry([Wrong(), Refusing(), *Registry.default().values()]))
