"""Solvers that sum up what they write, on a GPU: every exit's statistics, tails of channels and pixels, equal bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import drawn, drawn_wgmma
from helpers.runs.device_buffers import Buffer, addresses, download, upload
from helpers.runs.device_runs import DeviceRun
from helpers.runs.fused_runs import NUMBERS, random_inputs

from miofind.compiler import Compiler
from miofind.core.epilogue import DEFAULT_PARAMETERS, STATISTICS
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import bases_of
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verifier

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

NHWC = {"dtype": "float16", "layout": "NHWC"}
Y_FIRST = {"dtype": "float16", "layout": {"x": "NHWC", "w": "NHWC", "y": "NCHW"}}
WGMMA: dict[str, dict[str, Any]] = {
    "walked": {"x": (2, 264, 13, 12), "w": (136, 264, 2, 3), "padding": 1, **NHWC},
    "groups": {"x": (2, 160, 13, 12), "w": (256, 80, 3, 3), "padding": ((1, 0), (2, 1)), "groups": 2, **NHWC},
    "pointwise": {"x": (3, 264, 9, 11), "w": (296, 264, 1, 1), **NHWC},
    "few_filters": {"x": (2, 72, 9, 7), "w": (24, 72, 3, 3), "padding": 1, "dtype": "bfloat16", "layout": "NHWC"},
    "many_tiles": {"x": (16, 64, 28, 28), "w": (64, 64, 3, 3), "padding": 1, "stride": 2, **NHWC},
    "many_parts": {"x": (32, 64, 56, 56), "w": (72, 64, 1, 1), "dtype": "bfloat16", "layout": "NHWC"},
    "one_pixel": {"x": (1, 64, 3, 3), "w": (64, 64, 3, 3), **NHWC},
    "nchw": {"x": (3, 136, 16, 17), "w": (72, 136, 1, 1), "dtype": "float16"},
    "y_first": {"x": (3, 136, 11, 13), "w": (136, 136, 3, 3), "padding": 1, **Y_FIRST},
    "y_first_groups": {"x": (3, 128, 9, 11), "w": (192, 64, 2, 3), "padding": 1, "groups": 2, **Y_FIRST},
    "1d": {"x": (3, 24, 50), "w": (40, 24, 9), "padding": 4, "dtype": "float16", "layout": "NWC"},
}
FIRST_LAYERS: dict[str, dict[str, Any]] = {
    "stem": {"x": (3, 3, 96, 100), "w": (72, 3, 7, 7), "padding": 3, "stride": 2, **NHWC},
    "stem_nchw": {"x": (2, 3, 61, 67), "w": (40, 3, 7, 7), "padding": 3, "stride": 2, "dtype": "float16"},
    "two_outputs": {"x": (3, 3, 31, 33), "w": (20, 3, 3, 3), "padding": 1, "dtype": "bfloat16", "layout": "NHWC"},
    "two_outputs_nchw": {"x": (2, 1, 28, 29), "w": (6, 1, 5, 5), "padding": 2, "dtype": "float16"},
    "wide": {"x": (1, 3, 32, 224), "w": (64, 3, 4, 4), "stride": 4, "dtype": "bfloat16", "layout": "NHWC"},
}
DEPTHWISE: dict[str, dict[str, Any]] = {
    "odd": {"x": (2, 40, 15, 17), "w": (40, 1, 3, 3), "padding": 1, "stride": 2, "groups": 40, **NHWC},
    "wide": {"x": (8, 104, 56, 57), "w": (104, 1, 3, 3), "padding": 1, "groups": 104, **NHWC},
    "large": {
        "x": (3, 24, 14, 13),
        "w": (24, 1, 7, 7),
        "padding": 3,
        "groups": 24,
        "dtype": "bfloat16",
        "layout": "NHWC",
    },
    "dilated": {
        "x": (1, 16, 20, 19),
        "w": (16, 1, 3, 3),
        "padding": 6,
        "dilation": (6, 2),
        "groups": 16,
        "layout": "NHWC",
    },
    "1d": {"x": (3, 32, 100), "w": (32, 1, 7), "padding": 3, "groups": 32, "dtype": "float16", "layout": "NWC"},
}
OTHER_EPILOGUES = ("scale.bias.residual.clamp.statistics", "float32.bias.silu.statistics")


def cases(shapes: dict[str, dict[str, Any]], *fused: str) -> list[tuple[str, str]]:
    """All shapes with statistics alone, some of them with more of an epilogue, too."""
    alone = [(shape, "statistics") for shape in shapes]
    return alone + [(shape, epilogue) for shape in fused for epilogue in OTHER_EPILOGUES]


def outputs(run: DeviceRun, inputs: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """y as (k, all else) in float64, and the statistics by name, of one run into poisoned memory."""
    import cupy

    parameters = NUMBERS if run.problem.epilogue.changes_results else DEFAULT_PARAMETERS
    buffers, workspace = upload(run.problem, inputs), Buffer(run.invoker.workspace_bytes)
    bases = bases_of(run.problem, addresses(buffers), workspace.address, parameters)
    run.invoker.run(bases, cupy.cuda.get_current_stream().ptr)
    y = download(run.problem, buffers)
    workspace.read(np.dtype(np.uint8))  # its guard bands are intact
    sums = {name: buffers[name].read(np.dtype(np.float32)).copy() for name in STATISTICS}
    return y.swapaxes(0, 1).reshape(run.problem.k, -1), sums


@pytest.mark.parametrize(("shape", "epilogue"), cases(WGMMA, "groups", "pointwise", "many_tiles", "nchw", "y_first"))
def test_every_exit_of_wgmma_sums_what_it_writes(shape: str, epilogue: str, device: Device, compiler: Compiler) -> None:
    solver, problem = served("ConvImplicitGemmWgmma", WGMMA[shape], epilogue, device)
    configs = [*solver.default_configs(problem, device)[:2], *drawn_wgmma(solver, problem, device, 1, 1)]
    check(solver, problem, configs, device, compiler)


@pytest.mark.parametrize(("shape", "epilogue"), cases(FIRST_LAYERS, "stem", "two_outputs_nchw"))
def test_first_layers_sum_what_they_write(shape: str, epilogue: str, device: Device, compiler: Compiler) -> None:
    solver, problem = served("ConvFirstLayerWgmma", FIRST_LAYERS[shape], epilogue, device)
    configs = [*solver.default_configs(problem, device)[:3], *drawn(solver, problem, device, 2)]
    check(solver, problem, configs, device, compiler)


@pytest.mark.parametrize(("shape", "epilogue"), cases(DEPTHWISE, "odd", "large"))
def test_depthwise_kernels_sum_what_they_write(shape: str, epilogue: str, device: Device, compiler: Compiler) -> None:
    solver, problem = served("ConvDepthwiseChannelsLast", DEPTHWISE[shape], epilogue, device)
    configs = [*solver.default_configs(problem, device)[:2], *drawn(solver, problem, device, 2)]
    check(solver, problem, configs, device, compiler)


def served(solver_id: str, fields: dict[str, Any], epilogue: str, device: Device) -> tuple[Solver, ProblemDescription]:
    """A solver, and a problem that it serves; the test is skipped on devices that it does not."""
    solver, problem = Registry.default()[solver_id], ProblemDescription.convolution(**fields, epilogue=epilogue)
    answer = solver.applicability(problem, device)
    if not answer and device.arch != "90a":
        pytest.skip(answer.reason)
    assert answer, answer.reason
    return solver, problem


def check(
    solver: Solver, problem: ProblemDescription, configs: list[Config], device: Device, compiler: Compiler
) -> None:
    """Configurations pass both gates, sum up what they write, and give equal bits twice."""
    inputs, failures = random_inputs(problem, 3), []
    with Verifier(problem, device, compiler, seed=5) as verifier:
        for config in dict.fromkeys(configs):
            run = DeviceRun.of(problem, solver, config, device, compiler)
            verdict = verifier.verify(run.invoker, claims_of(solver, problem, device, config, compiler))
            if not verdict.ok:
                failures.append(f"{config.json}: {verdict.message}")
            (y, sums), (_, again) = outputs(run, inputs), outputs(run, inputs)
            wanted = {"sum": y.sum(1), "sum_of_squares": np.square(y).sum(1)}
            scale = {"sum": np.abs(y).sum(1), "sum_of_squares": wanted["sum_of_squares"]}
            for name in STATISTICS:
                if not (np.abs(sums[name] - wanted[name]) <= 2.0**-19 * scale[name]).all():
                    failures.append(f"{config.json}: {name} is {sums[name]}, not {wanted[name]}")
                if (sums[name] != again[name]).any():
                    failures.append(f"{config.json}: {name} differs from run to run")
    assert not failures, "\n".join(failures)
