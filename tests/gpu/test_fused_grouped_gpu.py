"""Solvers of grouped convolution that fuse an epilogue, on a GPU: the float64 reference, within guard bands."""

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
    "even": {"x": (3, 64, 28, 28), "w": (64, 4, 3, 3), "padding": 1, "groups": 16},
    "stride": {"x": (3, 32, 28, 30), "w": (64, 16, 3, 3), "padding": 1, "stride": 2, "groups": 2},
    "odd": {"x": (5, 48, 7, 7), "w": (48, 16, 3, 3), "padding": 1, "groups": 3},
    "uneven": {"x": (2, 16, 13, 12), "w": (24, 4, 4, 3), "padding": ((4, 0), (2, 1)), "groups": 4},
    "dense": {"x": (2, 64, 9, 12), "w": (96, 32, 1, 1), "groups": 2},
    "rows": {"x": (1, 32, 40, 60), "w": (32, 8, 3, 3), "padding": 1, "groups": 4},
}
CASES = [
    pytest.param(solver_id, layout, fields, dtype, id=f"{solver_id}-{name}-{layout}-{dtype}")
    for solver_id, layout in (("ConvGrouped", "NHWC"), ("ConvGrouped", "NCHW"), ("ConvGroupedPlanes", "NCHW"))
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


@pytest.mark.parametrize("epilogue", ["residual", "drelu", "residual.dclamp", "residual.dsilu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "stride"])
def test_gradients_are_the_references(
    shape: str, layout: str, dtype: str, epilogue: str, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(
        **SHAPES[shape], dtype=dtype, layout=layout, direction="backward_data", epilogue=epilogue
    )
    solver: Solver = Registry.default()["ConvGrouped"]
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    defaults = solver.default_configs(problem, device)[:2]
    for config in dict.fromkeys([*defaults, *drawn(solver, problem, device, 2)]):
        check_fused(problem, solver, config, device, compiler)
