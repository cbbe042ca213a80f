"""Depthwise solvers that fuse an epilogue, on a GPU: the float64 reference, within guard bands."""

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
    "bias.clamp",
    "bias.silu",
    "float32.scale.bias.channel_bias.residual.leaky_relu",
    "bias.hardswish.residual",
    "residual.relu",
)
HALVES = ("float16", "bfloat16")
DTYPES = dict.fromkeys(("ConvDepthwiseChannelsLast", "ConvDepthwiseChannelsFirst"), (*HALVES, "float32"))
NHWC: dict[str, dict[str, Any]] = {
    "3x3": {"x": (3, 72, 14, 14), "w": (72, 1, 3, 3), "padding": 1},
    "5x5_stride": {"x": (2, 48, 28, 27), "w": (48, 1, 5, 5), "padding": 2, "stride": 2},
    "7x7": {"x": (5, 40, 7, 9), "w": (40, 1, 7, 7), "padding": 3},
}
ROWS: dict[str, dict[str, Any]] = {
    "odd_channels": {"x": (2, 13, 17, 15), "w": (13, 1, 3, 3), "padding": ((1, 0), (2, 1))},
    "dilated": {"x": (1, 16, 33, 20), "w": (16, 1, 3, 3), "padding": 6, "dilation": (6, 2)},
    "multiplier": {"x": (2, 16, 9, 10), "w": (48, 1, 3, 3), "padding": 1, "stride": 2},
}
LARGE: dict[str, dict[str, Any]] = {
    "13x13": {"x": (3, 24, 14, 14), "w": (24, 1, 13, 13), "padding": 6},
    "uneven": {"x": (5, 12, 33, 45), "w": (12, 1, 9, 11), "padding": ((2, 4), (9, 0))},
    "odd": {"x": (3, 7, 13, 15), "w": (7, 1, 9, 9), "padding": 4},
}
BANDS: dict[str, dict[str, Any]] = {
    "quads": {"x": (9, 6, 28, 28), "w": (6, 1, 5, 5), "padding": 2},
    "pairs": {"x": (16, 32, 14, 14), "w": (32, 1, 7, 7), "padding": 3},
    "odd_rows": {"x": (11, 10, 7, 9), "w": (10, 1, 3, 3), "padding": 1},
    "odd_outputs": {"x": (3, 4, 15, 18), "w": (4, 1, 4, 6), "padding": (1, 2)},
    "many_rows": {"x": (5, 3, 56, 56), "w": (3, 1, 7, 7), "padding": 3},
}
PLANES: dict[str, dict[str, Any]] = {
    "odd": {"x": (4, 20, 7, 7), "w": (20, 1, 3, 3), "padding": 1},
    "even": {"x": (2, 8, 24, 32), "w": (8, 1, 5, 5), "padding": 2},
    "stride_multiplier": {"x": (3, 4, 27, 25), "w": (12, 1, 3, 3), "stride": 2},
    "row_blocks": {"x": (2, 3, 60, 57), "w": (3, 1, 3, 5), "padding": ((2, 0), (3, 1))},
}
SHAPES = {
    ("ConvDepthwiseChannelsFirst", "NCHW"): PLANES,
    ("ConvDepthwiseChannelsLast", "NHWC"): NHWC | ROWS,
    ("ConvDepthwiseMma", "NHWC"): NHWC,
    ("ConvDepthwiseLarge", "NHWC"): LARGE,
    ("ConvDepthwiseLarge", "NCHW"): LARGE,
    ("ConvDepthwiseBands", "NCHW"): BANDS,
}
CASES = [
    pytest.param(solver_id, layout, fields, dtype, id=f"{solver_id}-{name}-{layout}-{dtype}")
    for (solver_id, layout), shapes in SHAPES.items()
    for name, fields in shapes.items()
    for dtype in DTYPES.get(solver_id, HALVES)
]


@pytest.mark.parametrize("epilogue", ["residual", "drelu", "residual.dclamp", "residual.dhardswish"])
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
@pytest.mark.parametrize("shape", [*NHWC, *ROWS])
@pytest.mark.parametrize("solver_id", ["ConvDepthwiseChannelsLast", "ConvDepthwiseMma"])
def test_gradients_are_the_references(
    solver_id: str, shape: str, dtype: str, epilogue: str, device: Device, compiler: Compiler
) -> None:
    """Strides of 1 and more, some of which leave pixels that no tap meets."""
    fields, solver = (NHWC | ROWS)[shape], Registry.default()[solver_id]
    for stride in (1, 2, 4):
        problem = ProblemDescription.convolution(
            **{**fields, "stride": stride},
            groups=fields["x"][1],
            dtype=dtype,
            layout="NHWC",
            direction="backward_data",
            epilogue=epilogue,
        )
        if not solver.applicability(problem, device):
            continue
        for config in (*solver.default_configs(problem, device)[:2], *drawn(solver, problem, device, 1)):
            check_fused(problem, solver, config, device, compiler)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("solver_id", "layout", "fields", "dtype"), CASES)
def test_results_are_the_references(
    solver_id: str, layout: str, fields: dict[str, Any], dtype: str, epilogue: str, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(
        **fields, groups=fields["x"][1], dtype=dtype, layout=layout, epilogue=epilogue
    )
    solver: Solver = Registry.default()[solver_id]
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    for config in dict.fromkeys([*solver.default_configs(problem, device)[:1], *drawn(solver, problem, device, 2)]):
        check_fused(problem, solver, config, device, compiler)
