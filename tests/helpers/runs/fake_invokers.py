"""Invokers for tests of verification and measurement: right ones, and ones with a fault built in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import Invoker
from miofind.reference.convolution import reference_on_host, round_once
from miofind.reference.epilogue import apply_epilogue
from miofind.solver.steps import RUN_PARAMETERS, Config

Run = Callable[[dict[str, Any], Any], None]


class FakeInvoker(Invoker):
    """Runs a function of (tensors by name, workspace) on the CPU place."""

    def __init__(self, problem: ProblemDescription, run: Run, *, workspace_bytes: int = 0) -> None:
        self.problem = problem
        self.device = Device.cpu()
        self.solver_id = "Fake"
        self.config = Config()
        self.workspace_bytes = workspace_bytes
        self.deterministic = True
        self.alignment_bytes = 2
        self.runs = 0
        self._run = run

    def run(self, bases: tuple[Any, ...], stream: int) -> None:
        self.runs += 1
        *tensors, workspace = bases
        names = [operand.name for operand in self.problem.operands]
        names += [RUN_PARAMETERS] if self.problem.epilogue else []
        self._run(dict(zip(names, tensors, strict=True)), workspace)


def inputs_of(problem: ProblemDescription, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors a direction reads."""
    return {name: tensors[name] for name in problem.direction.inputs}


def compute(problem: ProblemDescription, tensors: dict[str, Any]) -> np.ndarray:
    """The right result in float64."""
    sums = reference_on_host(problem, **inputs_of(problem, tensors))
    return apply_epilogue(problem, sums, tensors, tensors[RUN_PARAMETERS]) if problem.epilogue else sums


def right(problem: ProblemDescription) -> Run:
    """Computes in float64 and rounds once."""

    def run(tensors: dict[str, Any], workspace: Any) -> None:
        tensors[problem.direction.output][...] = round_once(compute(problem, tensors), problem.output.dtype)

    return run


def then(first: Run, second: Run) -> Run:
    """One after the other."""

    def run(tensors: dict[str, Any], workspace: Any) -> None:
        first(tensors, workspace)
        second(tensors, workspace)

    return run


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
