"""Solvers of first layers that fuse an epilogue, on a GPU: the float64 reference, within guard bands."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.problems.drawn_configs import drawn
from helpers.runs.fused_runs import check_fused

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

EPILOGUES = (
    "bias.relu",
    "bias.silu",
    "float32.scale.bias.channel_bias.residual.leaky_relu",
    "bias.hardswish.residual",
    "residual.relu",
)
SHAPES: dict[str, dict[str, Any]] = {
    "7x7_stride": {"x": (2, 3, 64, 60), "w": (64, 3, 7, 7), "padding": 3, "stride": 2},
    "3x3": {"x": (2, 3, 32, 40), "w": (40, 3, 3, 3), "padding": 1},
    "odd": {"x": (3, 3, 31, 35), "w": (37, 3, 3, 3)},
    "4x4_stride": {"x": (3, 4, 36, 44), "w": (96, 4, 4, 4), "stride": 4},
    "wide": {"x": (1, 1, 21, 150), "w": (20, 1, 5, 5), "padding": 2},
}
CASES = [
    pytest.param(solver_id, layout, fields, dtype, id=f"{solver_id}-{name}-{layout}-{dtype}")
    for solver_id in ("ConvFirstLayer", "ConvFirstLayerWgmma")
    for layout in ("NHWC", "NCHW")
    for name, fields in SHAPES.items()
    for dtype in ("float16", "bfloat16")
]


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("solver_id", "layout", "fields", "dtype"), CASES)
def test_results_are_the_references(
    solver_id: str, layout: str, fields: dict[str, Any], dtype: str, epilogue: str, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(**fields, dtype=dtype, layout=layout, epilogue=epilogue)
    solver: Solver = Registry.default()[solver_id]
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    defaults = solver.default_configs(problem, device)[:2]
    for config in dict.fromkeys([*defaults, *drawn(solver, problem, device, 3)]):
        check_fused(problem, solver, config, device, compiler)
