"""cuDNN's fused plans on a GPU: right results with default numbers and with others, NaN kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from miofind.compiler import Compiler
from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.core.tensor import TensorDescriptor
from miofind.device.device import Device
from miofind.epilogue_reference import apply_epilogue
from miofind.launch.invoker import bases_of, make_invoker
from miofind.reference import numpy_dtype, reference_on_host
from miofind.solver.registry import Registry

pytestmark = pytest.mark.gpu
SOLVER = Registry.default()["ConvCudnn"]
NUMBERS = EpilogueParameters(alpha=0.5, beta=2.0, low=-0.75, high=1.5, slope=0.125)
TEXTS = [
    "relu",
    "bias.relu",
    "bias.residual.relu",
    "bias.silu.residual",
    "bias.clamp",
    "bias.leaky_relu",
    "bias.gelu",
    "bias.gelu_tanh",
    "float32.scale.bias.relu",
]


def fused(text: str, dtype: str) -> ProblemDescription:
    return ProblemDescription.convolution(
        x=(2, 32, 14, 14), w=(64, 32, 3, 3), padding=1, dtype=dtype, layout="NHWC", epilogue=text
    )


def in_memory(tensor: TensorDescriptor, data: Any) -> np.ndarray:
    dtype = numpy_dtype(tensor.dtype)
    strides = tuple(step * dtype.itemsize for step in tensor.strides)
    return np.ndarray(tensor.shape, dtype, buffer=data, strides=strides)


def computed(problem: ProblemDescription, arrays: dict[str, np.ndarray], parameters: EpilogueParameters) -> np.ndarray:
    """The output of cuDNN's best plan in float64, poisoned before; skips where no engine fuses the problem."""
    import cupy

    device = Device.cuda()
    try:
        config = SOLVER.default_configs(problem, device)[0]
    except Exception as error:
        pytest.skip(str(error))
    buffers = {operand.name: cupy.full(operand.tensor.bytes, 0xFF, cupy.uint8) for operand in problem.operands}
    for operand in problem.inputs:
        data = np.empty(operand.tensor.bytes, np.uint8)
        in_memory(operand.tensor, data.data)[...] = arrays[operand.name].reshape(operand.tensor.shape)
        buffers[operand.name].set(data)
    invoker = make_invoker(problem, device, SOLVER, config, Compiler())
    workspace = cupy.empty(max(1, invoker.workspace_bytes), cupy.uint8)
    addresses = {name: int(buffer.data.ptr) for name, buffer in buffers.items()}
    cupy.cuda.runtime.deviceSynchronize()
    invoker.run(bases_of(problem, addresses, int(workspace.data.ptr), parameters), 0)
    cupy.cuda.runtime.deviceSynchronize()
    return in_memory(problem.y, buffers["y"].get().data).astype(np.float64)


@pytest.mark.parametrize("parameters", [DEFAULT_PARAMETERS, NUMBERS], ids=["defaults", "numbers"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("text", TEXTS)
def test_fused_plans_compute_the_epilogue(text: str, dtype: str, parameters: EpilogueParameters) -> None:
    problem = fused(text, dtype)
    random = np.random.default_rng()
    arrays = {o.name: random.standard_normal(o.shape).astype(numpy_dtype(o.tensor.dtype)) for o in problem.inputs}
    arrays["w"] = (arrays["w"].astype(np.float32) / 16).astype(numpy_dtype(problem.w.dtype))
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    wanted = apply_epilogue(problem, reference_on_host(problem, x=wide["x"], w=wide["w"]), wide, parameters)
    half_ulp = 2.0 ** -(problem.y.dtype.mantissa_bits + 1)
    assert computed(problem, arrays, parameters) == pytest.approx(wanted, rel=1.05 * half_ulp, abs=1e-4)


@pytest.mark.parametrize("text", ["bias.relu", "bias.clamp", "bias.leaky_relu"])
def test_nan_passes_through_activations(text: str) -> None:
    problem = fused(text, "float16")
    arrays = {o.name: np.ones(o.shape, numpy_dtype(o.tensor.dtype)) for o in problem.inputs}
    arrays["bias"][5] = np.nan
    result = computed(problem, arrays, DEFAULT_PARAMETERS)
    assert np.isnan(result[:, 5]).all()
    assert not np.isnan(np.delete(result, 5, axis=1)).any()
