"""The pass over a written output, on a GPU: each result is the rounded reference of the sums that lay there."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.runs.device_buffers import addresses, download, upload
from helpers.runs.step_launcher import make_step_launcher

from miofind.compiler import Compiler
from miofind.core.epilogue import EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.reference.convolution import numpy_dtype
from miofind.reference.epilogue import apply_epilogue
from miofind.solver.steps import RUN_PARAMETERS, KernelStep
from miofind.solvers.pointwise.epilogue_pass import pass_step

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

NUMBERS = EpilogueParameters(alpha=-0.75, beta=2.0, low=-0.75, high=1.5, slope=0.125)
SIZES = (
    (2, 64, 4, 5),
    (3, 6, 5, 5),
    (3, 63, 7, 1),
    (5, 1, 3, 3),
    (2, 7, 1, 1),
    (4, 8, 14, 15),
    (1, 4104, 3, 1),
    (1, 513, 2, 3),
    (2, 12, 3, 2),
    (70, 40, 28, 29),
    (8, 65, 56, 57),
    (1, 2, 300, 301),
)
EPILOGUES = ("relu", "residual.mish", "scale.clamp", "bias.silu", "bias.hardswish.residual", "channel_bias.elu")


@pytest.mark.parametrize("epilogue", [*EPILOGUES, "float32.scale.bias.channel_bias.residual.leaky_relu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_results_are_the_reference_of_what_lay_there(
    size: tuple[int, ...], layout: str, dtype: str, epilogue: str, device: Device, compiler: Compiler
) -> None:
    n, k, *spatial = size
    problem = ProblemDescription.convolution(
        x=(n, 1, *spatial),
        w=(k, 1, 1, 1),
        dtype=dtype,
        layout=layout,
        epilogue=epilogue.removeprefix("float32." if dtype == "float64" else ""),
    )
    generator = np.random.default_rng(11)
    arrays = {
        operand.name: generator.standard_normal(operand.shape).astype(numpy_dtype(operand.tensor.dtype)).astype(float)
        for operand in problem.operands
        if operand.name not in ("x", "w")
    }
    buffers = upload(problem, arrays)
    step = pass_step(problem, device)
    assert isinstance(step, KernelStep)
    launch = make_step_launcher(step, compiler.load(step, device))
    launch({**addresses(buffers), RUN_PARAMETERS: NUMBERS}, cupy.cuda.get_current_stream().ptr)  # type: ignore[dict-item]
    cupy.cuda.get_current_stream().synchronize()
    wanted = apply_epilogue(problem, arrays["y"], arrays, NUMBERS)
    rounding = 2.0 ** -(problem.y.dtype.mantissa_bits + 1)
    # Summands that cancel leave the errors of the accumulator's arithmetic.
    error = 2e-6 if dtype != "float64" else 1e-14
    np.testing.assert_allclose(download(problem, buffers), wanted, rtol=1.05 * rounding + error, atol=8 * error)
