"""Small integers through a solver on a GPU, for its tests. Imports CuPy when it is used."""

from __future__ import annotations

import numpy as np
from helpers.runs.device_buffers import integers
from helpers.runs.device_runs import DeviceRun

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.reference.convolution import numpy_dtype, reference_on_host
from miofind.solver.solver import Solver
from miofind.solver.steps import Config


def check_exact(
    problem: ProblemDescription, solver: Solver, config: Config, device: Device, compiler: Compiler
) -> None:
    """Exact results from small integers, guard bands intact."""
    inputs = integers(problem, seed=len(config.json))
    result = DeviceRun.of(problem, solver, config, device, compiler).output(inputs)
    expected = reference_on_host(problem, **inputs).astype(numpy_dtype(problem.output.dtype)).astype(np.float64)
    np.testing.assert_array_equal(result, expected, err_msg=config.json)
