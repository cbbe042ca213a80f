"""Configurations of solvers made ready on a GPU, for its tests: outputs between guard bands. Imports CuPy when used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.runs.device_buffers import Buffer, addresses, download, upload

from miofind.compiler import Compiler
from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import Invoker, bases_of, make_invoker
from miofind.solver.solver import Solver
from miofind.solver.steps import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRun:
    """A configuration made ready."""

    problem: ProblemDescription
    config: Config
    invoker: Invoker

    @classmethod
    def of(
        cls, problem: ProblemDescription, solver: Solver, config: Config, device: Device, compiler: Compiler
    ) -> DeviceRun:
        return cls(problem=problem, config=config, invoker=make_invoker(problem, device, solver, config, compiler))

    def output(
        self, inputs: Mapping[str, np.ndarray], parameters: EpilogueParameters = DEFAULT_PARAMETERS
    ) -> np.ndarray:
        """The output in logical order, float64, into poisoned memory; guard bands are intact."""
        import cupy

        buffers, workspace = upload(self.problem, inputs), Buffer(self.invoker.workspace_bytes)
        bases = bases_of(self.problem, addresses(buffers), workspace.address, parameters)
        self.invoker.run(bases, cupy.cuda.get_current_stream().ptr)
        result = download(self.problem, buffers)
        workspace.read(np.dtype(np.uint8))
        return result


def runs_of_defaults(
    solver: Solver, problem: ProblemDescription, device: Device, compiler: Compiler, promises: Callable[[Config], bool]
) -> list[DeviceRun]:
    """Up to three default configurations that promise something; the test is skipped where there are none."""
    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    kept = [config for config in solver.default_configs(problem, device) if promises(config)]
    if not kept:
        pytest.skip("its default configurations promise nothing of the kind")
    return [DeviceRun.of(problem, solver, config, device, compiler) for config in kept[:3]]
