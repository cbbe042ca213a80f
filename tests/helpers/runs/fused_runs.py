"""Fused configurations on a GPU against the float64 reference: fresh random inputs, poisoned outputs."""

from __future__ import annotations

import math

import numpy as np
from helpers.runs.device_runs import DeviceRun

from miofind.compiler import Compiler
from miofind.core.epilogue import EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.reference.convolution import numpy_dtype, reference_on_host
from miofind.reference.epilogue import apply_epilogue
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

NUMBERS = EpilogueParameters(alpha=-0.75, beta=2.0, low=-0.75, high=1.5, slope=0.125)
"""No number that a kernel may leave out."""

_SUM_ERROR = 1e-4
"""Of sums about as large as 1, and of what the epilogue makes of them."""


def random_inputs(problem: ProblemDescription, seed: int) -> dict[str, np.ndarray]:
    """Normal random numbers of the operands' dtypes as float64, weights such that sums are about as large as 1."""
    generator = np.random.default_rng(seed)
    spread = {"w": math.prod(problem.w.shape[1:]) ** -0.5}
    return {
        operand.name: (generator.standard_normal(operand.shape) * spread.get(operand.name, 1.0))
        .astype(numpy_dtype(operand.tensor.dtype))
        .astype(np.float64)
        for operand in problem.inputs
    }


def check_fused(
    problem: ProblemDescription, solver: Solver, config: Config, device: Device, compiler: Compiler
) -> None:
    """Fail where a result is further from the reference than its rounding and a float32 sum allow."""
    seed = int(np.random.default_rng().integers(1 << 30))
    inputs = random_inputs(problem, seed)
    sums = reference_on_host(problem, **{name: inputs[name] for name in problem.direction.inputs})
    wanted = apply_epilogue(problem, sums, inputs, NUMBERS)
    got = DeviceRun.of(problem, solver, config, device, compiler).output(inputs, NUMBERS)
    half_ulp = 2.0 ** -(problem.output.dtype.mantissa_bits + 1)
    np.testing.assert_allclose(
        got, wanted, rtol=1.05 * half_ulp, atol=_SUM_ERROR, err_msg=f"{problem} {config.json} seed={seed}"
    )
