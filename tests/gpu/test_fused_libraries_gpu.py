"""Epilogues that cuDNN and cuBLASLt fuse, on a GPU: right results with default numbers and with others, NaN kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from miofind.compiler import Compiler
from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.core.tensor import TensorDescriptor
from miofind.device.device import Device
from miofind.errors import LaunchError
from miofind.launch.invoker import bases_of, make_invoker
from miofind.libraries.cudnn import engine_plans
from miofind.reference.convolution import numpy_dtype, reference_on_host
from miofind.reference.epilogue import apply_epilogue
from miofind.solver.registry import Registry
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verifier

pytestmark = pytest.mark.gpu
NUMBERS = EpilogueParameters(alpha=0.5, beta=2.0, low=-0.75, high=1.5, slope=0.125)
CUBLASLT = ("relu", "bias", "bias.relu", "residual", "bias.residual.relu")
CUDNN = ("relu", "bias", "bias.relu")
CUDNN_MAY = (
    "residual",
    "bias.residual.relu",
    "bias.gelu_tanh",
    "bias.silu.residual",
    "bias.clamp",
    "bias.leaky_relu",
    "bias.gelu",
    "float32.scale.bias.relu",
)
"""What cuDNN fuses in an engine that reads the epilogue's tensors too early, and may not fuse in another one."""
FUSED = {"ConvCudnn": CUDNN, "ConvGemm1x1": CUBLASLT, "ConvIm2colGemm": CUBLASLT}
"""By solver, the epilogues that its library fuses in both types: to refuse one of them is a fault."""
CASES = [(solver_id, text) for solver_id in FUSED for text in FUSED[solver_id]]
CASES += [("ConvCudnn", text) for text in CUDNN_MAY]


def fused(text: str, dtype: str, solver_id: str) -> ProblemDescription:
    w = (64, 32, 1, 1) if solver_id == "ConvGemm1x1" else (64, 32, 3, 3)
    return ProblemDescription.convolution(x=(2, 32, 14, 14), w=w, dtype=dtype, layout="NHWC", epilogue=text)


def in_memory(tensor: TensorDescriptor, data: Any) -> np.ndarray:
    dtype = numpy_dtype(tensor.dtype)
    strides = tuple(step * dtype.itemsize for step in tensor.strides)
    return np.ndarray(tensor.shape, dtype, buffer=data, strides=strides)


def computed(
    solver_id: str, problem: ProblemDescription, arrays: dict[str, np.ndarray], parameters: EpilogueParameters
) -> np.ndarray:
    """The output of a solver's first configuration in float64, poisoned before.

    Skips where there is no library, and where it has no engine but one that reads too early.
    """
    import cupy

    device, solver = Device.cuda(), Registry.default()[solver_id]
    if all(device.library_version(key.library) is None for key in solver.keys):
        pytest.skip(f"{solver.library} is not installed")
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    try:
        config = solver.default_configs(problem, device)[0]
    except LaunchError as error:
        if solver_id == "ConvCudnn" and str(problem.epilogue) in CUDNN_MAY:
            pytest.skip(str(error))
        raise
    buffers = {operand.name: cupy.full(operand.tensor.bytes, 0xFF, cupy.uint8) for operand in problem.operands}
    for operand in problem.inputs:
        data = np.empty(operand.tensor.bytes, np.uint8)
        in_memory(operand.tensor, data.data)[...] = arrays[operand.name].reshape(operand.tensor.shape)
        buffers[operand.name].set(data)
    invoker = make_invoker(problem, device, solver, config, Compiler())
    workspace = cupy.empty(max(1, invoker.workspace_bytes), cupy.uint8)
    addresses = {name: int(buffer.data.ptr) for name, buffer in buffers.items()}
    cupy.cuda.runtime.deviceSynchronize()
    invoker.run(bases_of(problem, addresses, int(workspace.data.ptr), parameters), 0)
    cupy.cuda.runtime.deviceSynchronize()
    return in_memory(problem.y, buffers["y"].get().data).astype(np.float64)


@pytest.mark.parametrize("parameters", [DEFAULT_PARAMETERS, NUMBERS], ids=["defaults", "numbers"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("solver_id", "text"), CASES)
def test_fused_solvers_compute_the_epilogue(
    solver_id: str, text: str, dtype: str, parameters: EpilogueParameters
) -> None:
    problem = fused(text, dtype, solver_id)
    random = np.random.default_rng()
    arrays = {o.name: random.standard_normal(o.shape).astype(numpy_dtype(o.tensor.dtype)) for o in problem.inputs}
    arrays["w"] = (arrays["w"].astype(np.float32) / 16).astype(numpy_dtype(problem.w.dtype))
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    wanted = apply_epilogue(problem, reference_on_host(problem, x=wide["x"], w=wide["w"]), wide, parameters)
    half_ulp = 2.0 ** -(problem.y.dtype.mantissa_bits + 1)
    assert computed(solver_id, problem, arrays, parameters) == pytest.approx(wanted, rel=1.05 * half_ulp, abs=1e-4)


@pytest.mark.parametrize(
    ("solver_id", "text"), [case for case in CASES if case[1] in ("bias.relu", "bias.clamp", "bias.leaky_relu")]
)
def test_nan_passes_through_activations(solver_id: str, text: str) -> None:
    problem = fused(text, "float16", solver_id)
    arrays = {o.name: np.ones(o.shape, numpy_dtype(o.tensor.dtype)) for o in problem.inputs}
    arrays["bias"][5] = np.nan
    result = computed(solver_id, problem, arrays, DEFAULT_PARAMETERS)
    assert np.isnan(result[:, 5]).all()
    assert not np.isnan(np.delete(result, 5, axis=1)).any()


@pytest.mark.parametrize("text", [*CUDNN, *CUDNN_MAY])
def test_no_engine_is_offered_that_reads_too_early(text: str) -> None:
    device, solver = Device.cuda(), Registry.default()["ConvCudnn"]
    problem = fused(text, "float16", solver.id)
    if not solver.applicability(problem, device):
        pytest.skip("cuDNN is not installed, or fuses nothing here")
    plans = engine_plans(problem, device)
    assert text == "relu" or all(plan.engine != 4 for plan in plans), "relu has no operands to read"
    assert plans or text in CUDNN_MAY


@pytest.mark.parametrize("text", ["bias", "bias.relu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("c", "k"), [(32, 8), (8, 32), (240, 10)])
def test_images_of_one_pixel_keep_apart_channels_first(c: int, k: int, dtype: str, text: str) -> None:
    """As of squeeze-and-excitation. cuDNN's engines stored them an element apart.

    Some of them lose infinities and NaN of a few seeds, and are left out of a find then.
    """
    problem = ProblemDescription.convolution(x=(32, c, 1, 1), w=(k, c, 1, 1), dtype=dtype, epilogue=text)
    device, solver, compiler = Device.cuda(), Registry.default()["ConvCudnn"], Compiler()
    if not solver.applicability(problem, device):
        pytest.skip("cuDNN is not installed, or fuses nothing here")
    verdicts = []
    with Verifier(problem, device, compiler) as verifier:
        for config in solver.default_configs(problem, device):
            invoker = make_invoker(problem, device, solver, config, compiler)
            claims = claims_of(solver, problem, device, config, compiler)
            verdicts.append(verifier.verify(invoker, claims))
            if verdicts[-1].ok:
                assert verifier.repeat(invoker, claims, verdicts[-1].fingerprint) == ""
    assert any(verdict.ok for verdict in verdicts)
    assert all(verdict.ok or verdict.message.startswith("nonfinite gate") for verdict in verdicts)
