"""Dense solvers that fuse an epilogue, on a GPU: both gates for configurations that reach every exit."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.problems.drawn_configs import drawn, drawn_wgmma
from helpers.runs.fused_runs import check_fused
from helpers.runs.gates import check_gates

from miofind.compiler import Compiler
from miofind.core.epilogue import Activation
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

NHWC = {"dtype": "float16", "layout": "NHWC"}
Y_FIRST = {"dtype": "float16", "layout": {"x": "NHWC", "w": "NHWC", "y": "NCHW"}}
EPILOGUES = ("bias.relu", "scale.bias.residual.clamp", "float32.bias.silu.residual", "channel_bias.residual.leaky_relu")
GRADIENTS = ("residual", "drelu", "residual.dclamp", "residual.dsilu")
WGMMA: dict[str, dict[str, Any]] = {
    "walked": {"x": (2, 264, 13, 12), "w": (136, 264, 2, 3), "padding": 1, **NHWC},
    "groups": {"x": (2, 160, 13, 12), "w": (256, 80, 3, 3), "padding": ((1, 0), (2, 1)), "groups": 2, **NHWC},
    "pointwise": {"x": (3, 264, 9, 11), "w": (296, 264, 1, 1), **NHWC},
    "few_filters": {"x": (2, 72, 9, 7), "w": (24, 72, 3, 3), "padding": 1, "dtype": "bfloat16", "layout": "NHWC"},
    "many_tiles": {"x": (16, 64, 28, 28), "w": (64, 64, 3, 3), "padding": 1, "stride": 2, **NHWC},
    "tf32": {"x": (2, 68, 9, 9), "w": (36, 68, 3, 3), "padding": 1, "math": "tf32", "layout": "NHWC"},
    "nchw": {"x": (3, 136, 16, 17), "w": (72, 136, 1, 1), "dtype": "float16"},
    "y_first": {"x": (3, 136, 11, 13), "w": (136, 136, 3, 3), "padding": 1, **Y_FIRST},
    "y_first_groups": {"x": (3, 128, 9, 11), "w": (192, 64, 2, 3), "padding": 1, "groups": 2, **Y_FIRST},
    "1d": {"x": (3, 24, 50), "w": (40, 24, 9), "padding": 4, "dtype": "float16", "layout": "NWC"},
}
WGMMA_DATA: dict[str, dict[str, Any]] = {
    "walked": {"x": (2, 136, 13, 12), "w": (72, 136, 2, 3), "padding": 1, **NHWC},
    "groups": {"x": (2, 128, 13, 12), "w": (256, 64, 3, 3), "padding": ((1, 0), (2, 1)), "groups": 2, **NHWC},
    "pointwise": {"x": (3, 296, 9, 11), "w": (264, 296, 1, 1), **NHWC},
    "few_channels": {"x": (2, 24, 9, 7), "w": (72, 24, 3, 3), "padding": 1, "dtype": "bfloat16", "layout": "NHWC"},
    "many_tiles": {"x": (16, 64, 28, 28), "w": (64, 64, 3, 3), "padding": 1, **NHWC},
    "strided": {"x": (2, 136, 13, 14), "w": (72, 136, 3, 3), "padding": ((1, 0), (0, 2)), "stride": 2, **NHWC},
    "strided_many_tiles": {"x": (16, 256, 29, 28), "w": (64, 256, 3, 3), "padding": 1, "stride": 2, **NHWC},
    "no_taps": {"x": (3, 264, 17, 16), "w": (64, 264, 1, 1), "stride": 2, **NHWC},
    "no_taps_groups": {"x": (3, 256, 9, 8), "w": (128, 128, 1, 1), "stride": (1, 2), "groups": 2, **NHWC},
    "tf32": {"x": (2, 68, 9, 9), "w": (36, 68, 3, 3), "padding": 1, "math": "tf32", "layout": "NHWC"},
    "tf32_no_taps": {"x": (2, 68, 9, 9), "w": (36, 68, 1, 1), "stride": 2, "math": "tf32", "layout": "NHWC"},
    "nchw": {"x": (3, 72, 16, 17), "w": (136, 72, 1, 1), "dtype": "float16"},
    "x_first": {
        "x": (3, 136, 11, 13),
        "w": (136, 136, 3, 3),
        "padding": 1,
        "dtype": "float16",
        "layout": {"x": "NCHW", "w": "NHWC", "y": "NHWC"},
    },
    "1d": {"x": (3, 40, 50), "w": (24, 40, 9), "padding": 4, "dtype": "float16", "layout": "NWC"},
}
DIRECT: dict[str, dict[str, Any]] = {
    "nchw": {"x": (2, 19, 17, 15), "w": (38, 19, 3, 3), "padding": 1, "dtype": "float16"},
    "nhwc": {"x": (2, 16, 14, 13), "w": (24, 8, 3, 3), "groups": 2, "stride": 2, "layout": "NHWC"},
    "float32": {"x": (2, 6, 9, 8), "w": (10, 6, 1, 1)},
    "1d": {"x": (2, 6, 40), "w": (10, 6, 7), "dilation": 3, "padding": 9, "dtype": "bfloat16"},
}

CHANNELS_FIRST: dict[str, dict[str, Any]] = {
    "walked": {"x": (2, 136, 11, 13), "w": (72, 136, 3, 3), "padding": 1, "dtype": "float16"},
    "strided": {"x": (3, 24, 15, 9), "w": (40, 24, 1, 1), "stride": 2, "dtype": "bfloat16"},
    "groups": {"x": (2, 128, 9, 10), "w": (128, 64, 3, 3), "padding": 1, "groups": 2, "dtype": "float16"},
}


def check(solver: Solver, problem: ProblemDescription, device: Device, configs: list[Config]) -> None:
    """Configurations pass both gates."""
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    check_gates(solver, problem, device, Compiler(), configs)


def fused(fields: dict[str, Any], epilogue: str) -> ProblemDescription:
    return ProblemDescription.convolution(**fields, epilogue=epilogue)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", WGMMA)
def test_every_exit_of_wgmma_applies_it(shape: str, epilogue: str, device: Device) -> None:
    solver = Registry.default()["ConvImplicitGemmWgmma"]
    problem = fused(WGMMA[shape], epilogue)
    configs = [*solver.default_configs(problem, device)[:2], *drawn_wgmma(solver, problem, device, 2, 1)]
    check(solver, problem, device, list(dict.fromkeys(configs)))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("epilogue", GRADIENTS)
@pytest.mark.parametrize("shape", WGMMA_DATA)
def test_every_exit_of_wgmma_fuses_gradients(shape: str, epilogue: str, device: Device) -> None:
    solver = Registry.default()["ConvImplicitGemmWgmma"]
    problem = fused({**WGMMA_DATA[shape], "direction": "backward_data"}, epilogue)
    configs = [*solver.default_configs(problem, device)[:2], *drawn_wgmma(solver, problem, device, 2, 1)]
    check(solver, problem, device, list(dict.fromkeys(configs)))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", DIRECT)
@pytest.mark.parametrize("solver_id", ["ConvDirectNaive", "ConvDirectTiled"])
def test_direct_kernels_apply_it(solver_id: str, shape: str, epilogue: str, device: Device) -> None:
    solver, problem = Registry.default()[solver_id], fused(DIRECT[shape], epilogue)
    configs = list(solver.default_configs(problem, device)[:2])
    if len(solver.parameters) > 3:
        configs += drawn(solver, problem, device, 2)
    check(solver, problem, device, list(dict.fromkeys(configs)))


@pytest.mark.parametrize("epilogue", GRADIENTS)
@pytest.mark.parametrize("shape", DIRECT)
@pytest.mark.parametrize("solver_id", ["ConvDirectNaive", "ConvDirectTiled", "ConvImplicitGemmMma"])
def test_gathering_kernels_fuse_gradients(solver_id: str, shape: str, epilogue: str, device: Device) -> None:
    """Some of these strides leave pixels that no tap meets."""
    for stride in (1, 3):
        fields = {**DIRECT[shape], "direction": "backward_data", "stride": stride}
        solver, problem = Registry.default()[solver_id], fused(fields, epilogue)
        configs = list(solver.default_configs(problem, device)[:2])
        if len(solver.parameters) > 3:
            configs += drawn(solver, problem, device, 2)
        check(solver, problem, device, list(dict.fromkeys(configs)))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", DIRECT)
def test_gathered_products_apply_it(shape: str, epilogue: str, device: Device) -> None:
    solver, problem = Registry.default()["ConvImplicitGemmMma"], fused(DIRECT[shape], epilogue)
    configs = [*solver.default_configs(problem, device)[:2], *drawn(solver, problem, device, 4)]
    check(solver, problem, device, list(dict.fromkeys(configs)))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", CHANNELS_FIRST)
def test_products_of_transposed_tensors_apply_it(shape: str, epilogue: str, device: Device) -> None:
    solver, problem = Registry.default()["ConvChannelsLast"], fused(CHANNELS_FIRST[shape], epilogue)
    check(solver, problem, device, list(solver.default_configs(problem, device)))


@pytest.mark.parametrize("activation", [each for each in Activation if each is not Activation.NONE])
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("solver_id", ["ConvDirectNaive", "ConvImplicitGemmWgmma"])
def test_every_activation(
    solver_id: str, dtype: str, activation: Activation, device: Device, compiler: Compiler
) -> None:
    solver = Registry.default()[solver_id]
    fields = {"x": (2, 16, 9, 8), "w": (24, 16, 3, 3), "dtype": dtype, "layout": "NHWC"}
    problem = fused(fields, f"bias.{activation}.residual")
    if not solver.applicability(problem, device):
        pytest.skip(f"{solver_id} does not serve {dtype}")
    config = solver.default_configs(problem, device)[0]
    check(solver, problem, device, [config])
    check_fused(problem, solver, config, device, compiler)
