"""Winograd and FFT solvers that fuse an epilogue, on a GPU: all gates for configurations that reach every exit."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.gates import check_gates

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

EPILOGUES = ("scale.bias.channel_bias.residual.clamp", "bias.silu.residual", "channel_bias.gelu")
GRADIENTS = ("residual.drelu", "dsilu")
WINOGRAD: dict[str, dict[str, Any]] = {
    "3x3": {"x": (8, 64, 28, 28), "w": (96, 64, 3, 3), "padding": 1},
    "last": {"x": (8, 64, 28, 28), "w": (96, 64, 3, 3), "padding": 1, "layout": "NHWC"},
    "odd": {"x": (3, 33, 17, 15), "w": (35, 33, 3, 3), "padding": ((1, 0), (0, 2))},
    "groups": {"x": (4, 128, 13, 14), "w": (64, 32, 3, 3), "padding": 1, "groups": 4, "layout": "NHWC"},
}
ANY_WINOGRAD: dict[str, dict[str, Any]] = {
    **WINOGRAD,
    "tf32": {"x": (4, 32, 20, 18), "w": (48, 32, 5, 5), "padding": 2, "math": "tf32"},
    "1d": {"x": (5, 48, 77), "w": (32, 24, 3), "padding": 1, "groups": 2, "layout": "NWC"},
}
LIBRARY_WINOGRAD: dict[str, dict[str, Any]] = {
    **ANY_WINOGRAD,
    "float16": {"x": (4, 64, 17, 28), "w": (64, 64, 3, 3), "padding": 1, "dtype": "float16", "layout": "NHWC"},
    "bfloat16": {"x": (2, 48, 18, 20), "w": (40, 48, 3, 3), "dtype": "bfloat16"},
    "mixed": {**WINOGRAD["odd"], "layout": {"x": "NHWC", "w": "NCHW", "y": "NCHW"}},
}
FFT: dict[str, dict[str, Any]] = {
    "11x11": {"x": (4, 32, 28, 28), "w": (48, 32, 11, 11), "padding": 5, "layout": "NHWC"},
    "stride": {"x": (2, 24, 61, 55), "w": (40, 12, 13, 15), "padding": 5, "stride": (2, 3), "groups": 2},
    "corners": {"x": (2, 8, 40, 43), "w": (8, 8, 9, 7), "padding": ((8, 3), (2, 6))},
    "depthwise": {"x": (4, 64, 56, 56), "w": (64, 1, 31, 31), "padding": 15, "groups": 64, "dtype": "float16"},
    "lines": {"x": (2, 24, 3000), "w": (16, 24, 256), "padding": 128, "dtype": "bfloat16", "layout": "NWC"},
    "lines_first": {"x": (2, 8, 9000), "w": (8, 8, 1024), "padding": 512},
}
LINES: dict[str, dict[str, Any]] = {
    "padded": {"x": (3, 37, 9000), "w": (37, 1, 1024), "padding": 512, "groups": 37},
    "causal": {"x": (2, 64, 2500), "w": (64, 1, 256), "padding": ((255, 0),), "groups": 64, "layout": "NWC"},
    "strided": {"x": (2, 16, 30000), "w": (16, 1, 4096), "padding": 2048, "stride": 2, "groups": 16},
    "tall": {"x": (2, 24, 700, 9), "w": (24, 1, 121, 1), "padding": (60, 0), "groups": 24, "dtype": "float16"},
}
SHAPES = {
    "ConvWinogradFused": WINOGRAD,
    "ConvWinogradMma": ANY_WINOGRAD,
    "ConvWinograd": LIBRARY_WINOGRAD,
    "ConvFft": FFT,
    "ConvFftTiles": FFT,
    "ConvFftDepthwise": LINES,
}
CASES = [
    pytest.param(solver_id, fields, id=f"{solver_id}-{name}")
    for solver_id, shapes in SHAPES.items()
    for name, fields in shapes.items()
]


def check(solver_id: str, problem: ProblemDescription, device: Device, compiler: Compiler) -> None:
    """Configurations pass the gates that they claim to."""
    solver = Registry.default()[solver_id]
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    check_gates(solver, problem, device, compiler, spread(solver, problem, device, 1, defaults=2))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("solver_id", "fields"), CASES)
def test_results_have_their_epilogue(
    solver_id: str, fields: dict[str, Any], epilogue: str, device: Device, compiler: Compiler
) -> None:
    check(solver_id, ProblemDescription.convolution(**fields, epilogue=epilogue), device, compiler)


@pytest.mark.parametrize("epilogue", GRADIENTS)
@pytest.mark.parametrize(("solver_id", "fields"), CASES)
def test_gradients_have_their_epilogue(
    solver_id: str, fields: dict[str, Any], epilogue: str, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(**fields, direction="backward_data", epilogue=epilogue)
    check(solver_id, problem, device, compiler)
