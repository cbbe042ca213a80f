"""Solvers that sum dy up while they compute dw, on a GPU: every form, tails of filters and pixels, equal bits.

And statistics and bias gradients of channels-first tensors, by kernels for channels last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import drawn_wgmma
from helpers.runs.device_buffers import Buffer, addresses, integers, upload
from helpers.runs.device_runs import DeviceRun
from helpers.runs.gates import check_both_gates

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import bases_of
from miofind.reference.convolution import numpy_dtype
from miofind.solver.registry import Registry
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verifier

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

NHWC = {"dtype": "float16", "layout": "NHWC"}
Y_FIRST = {"dtype": "float16", "layout": {"x": "NHWC", "w": "NHWC", "y": "NCHW"}}
WGMMA: dict[str, dict[str, Any]] = {
    "walked": {"x": (2, 264, 13, 12), "w": (136, 264, 2, 3), "padding": 1, **NHWC},
    "groups": {"x": (2, 160, 13, 12), "w": (256, 80, 3, 3), "padding": ((1, 0), (2, 1)), "groups": 2, **NHWC},
    "groups_of_parts": {"x": (2, 144, 13, 12), "w": (144, 72, 3, 3), "padding": 1, "groups": 2, **NHWC},
    "pointwise": {"x": (3, 264, 9, 11), "w": (296, 264, 1, 1), **NHWC},
    "few_filters": {"x": (2, 72, 9, 7), "w": (24, 72, 3, 3), "padding": 1, "dtype": "bfloat16", "layout": "NHWC"},
    "many_tiles": {"x": (16, 64, 28, 28), "w": (64, 64, 3, 3), "padding": 1, "stride": 2, **NHWC},
    "many_pixels": {"x": (32, 64, 56, 56), "w": (72, 64, 1, 1), "dtype": "bfloat16", "layout": "NHWC"},
    "one_pixel": {"x": (1, 64, 3, 3), "w": (64, 64, 3, 3), **NHWC},
    "padding_alone": {"x": (2, 64, 3, 3), "w": (64, 64, 3, 3), "padding": 6, **NHWC},
    "nchw": {"x": (3, 136, 16, 17), "w": (72, 136, 1, 1), "dtype": "float16"},
    "y_first": {"x": (3, 72, 18, 34), "w": (136, 72, 3, 3), **Y_FIRST},
    "y_first_groups": {"x": (3, 128, 16, 16), "w": (192, 64, 3, 3), "padding": 1, "groups": 2, **Y_FIRST},
    "1d": {"x": (3, 24, 50), "w": (40, 24, 9), "padding": 4, "dtype": "float16", "layout": "NWC"},
}


def gradient(run: DeviceRun, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The bias gradient of one run into poisoned memory; guard bands are intact."""
    import cupy

    buffers, workspace = upload(run.problem, inputs), Buffer(run.invoker.workspace_bytes)
    bases = bases_of(run.problem, addresses(buffers), workspace.address)
    run.invoker.run(bases, cupy.cuda.get_current_stream().ptr)
    cupy.cuda.get_current_stream().synchronize()
    workspace.read(np.dtype(np.uint8))
    dtype = numpy_dtype(run.problem.outputs[1].tensor.dtype)
    return buffers["bias_gradient"].read(dtype).astype(np.float64)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("epilogue", ["bias_gradient", "float32.bias_gradient"])
@pytest.mark.parametrize("shape", WGMMA)
def test_every_form_of_wgmma_sums_dy(shape: str, epilogue: str, device: Device, compiler: Compiler) -> None:
    solver = Registry.default()["ConvImplicitGemmWgmma"]
    problem = ProblemDescription.convolution(**WGMMA[shape], direction="backward_weights", epilogue=epilogue)
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    configs = [*solver.default_configs(problem, device)[:3], *drawn_wgmma(solver, problem, device, 2, 1)]
    inputs, failures = integers(problem, 3), []
    wanted = inputs["y"].swapaxes(0, 1).reshape(problem.k, -1).sum(1)
    wanted = wanted.astype(numpy_dtype(problem.outputs[1].tensor.dtype)).astype(np.float64)
    with Verifier(problem, device, compiler, seed=5) as verifier:
        for config in dict.fromkeys(configs):
            run = DeviceRun.of(problem, solver, config, device, compiler)
            claims = claims_of(solver, problem, device, config, compiler)
            verdict = verifier.verify(run.invoker, claims)
            message = verdict.message or verifier.repeat(run.invoker, claims, verdict.fingerprint)
            if message:
                failures.append(f"{config.json}: {message}")
            if (found := gradient(run, inputs)).tolist() != wanted.tolist():
                failures.append(f"{config.json}: {found} is not {wanted}")
    assert not failures, "\n".join(failures)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("epilogue", ["statistics", "bias.relu.statistics", "bias_gradient", "float32.bias_gradient"])
@pytest.mark.parametrize(
    "fields",
    [
        {"x": (3, 72, 14, 13), "w": (136, 72, 3, 3), "padding": 1},
        {"x": (3, 128, 15, 14), "w": (64, 128, 1, 1), "stride": 2},
        {"x": (8, 128, 16, 16), "w": (64, 128, 3, 3), "padding": 1},
    ],
    ids=str,
)
def test_channels_first_tensors_by_kernels_for_channels_last(
    fields: dict[str, Any], epilogue: str, device: Device, compiler: Compiler
) -> None:
    solver = Registry.default()["ConvChannelsLast"]
    direction = "backward_weights" if "gradient" in epilogue else "forward"
    problem = ProblemDescription.convolution(**fields, dtype="bfloat16", direction=direction, epilogue=epilogue)
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    for config in solver.default_configs(problem, device)[:3]:
        check_both_gates(problem, solver, config, device, compiler)
