"""Depthwise solvers that fuse an epilogue, on a GPU: the float64 reference, within guard bands."""

from __future__ import annotations

from typing import Any

import pytest
from drawn_configs import drawn
from fused_runs import check_fused

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
CHANNELS_LAST = ("ConvDepthwiseChannelsLast",)
SHAPES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "3x3": (CHANNELS_LAST, {"x": (3, 72, 14, 14), "w": (72, 1, 3, 3), "padding": 1}),
    "5x5_stride": (CHANNELS_LAST, {"x": (2, 48, 28, 27), "w": (48, 1, 5, 5), "padding": 2, "stride": 2}),
    "7x7": (CHANNELS_LAST, {"x": (5, 40, 7, 9), "w": (40, 1, 7, 7), "padding": 3}),
    "odd_channels": (CHANNELS_LAST, {"x": (2, 13, 17, 15), "w": (13, 1, 3, 3), "padding": ((1, 0), (2, 1))}),
    "dilated": (CHANNELS_LAST, {"x": (1, 16, 33, 20), "w": (16, 1, 3, 3), "padding": 6, "dilation": (6, 2)}),
    "multiplier": (CHANNELS_LAST, {"x": (2, 16, 9, 10), "w": (48, 1, 3, 3), "padding": 1, "stride": 2}),
}
CASES = [(solver, shape) for shape, (solvers, _) in SHAPES.items() for solver in solvers]


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("solver_id", "shape"), CASES)
def test_results_are_the_references(
    solver_id: str, shape: str, dtype: str, epilogue: str, device: Device, compiler: Compiler
) -> None:
    fields = SHAPES[shape][1]
    problem = ProblemDescription.convolution(
        **fields, groups=fields["x"][1], dtype=dtype, layout="NHWC", epilogue=epilogue
    )
    solver: Solver = Registry.default()[solver_id]
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    for config in dict.fromkeys([*solver.default_configs(problem, device)[:1], *drawn(solver, problem, device, 2)]):
        check_fused(problem, solver, config, device, compiler)
