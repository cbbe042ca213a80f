"""The solvers of grouped convolutions on a GPU: the host's reference bit for bit, within guard bands."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.gates import check_gates
from helpers.values.exact_results import check_exact

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "4_channels": {"x": (2, 32, 30, 29), "w": (32, 4, 3, 3), "padding": 1, "groups": 8},
    "8_channels_stride": {"x": (3, 32, 28, 27), "w": (32, 8, 3, 3), "padding": 1, "stride": 2, "groups": 4},
    "16_channels": {"x": (3, 32, 14, 14), "w": (32, 16, 3, 3), "padding": 1, "groups": 2},
    "32_channels": {"x": (5, 96, 7, 7), "w": (96, 32, 3, 3), "padding": 1, "groups": 3},
    "64_channels_stride": {"x": (2, 128, 9, 12), "w": (128, 64, 3, 3), "padding": 1, "stride": 2, "groups": 2},
    "uneven_groups": {"x": (2, 24, 13, 9), "w": (40, 6, 5, 3), "padding": ((4, 0), (1, 5)), "groups": 4},
    "odd_groups": {"x": (2, 24, 11, 12), "w": (40, 3, 4, 3), "stride": (2, 3), "dilation": (3, 1), "groups": 8},
    "pointwise": {"x": (2, 48, 9, 12), "w": (128, 24, 1, 1), "groups": 2},
    "wide": {"x": (1, 16, 10, 130), "w": (16, 2, 3, 7), "padding": (1, 3), "groups": 8},
    "padding_beyond_the_filter": {"x": (1, 16, 6, 7), "w": (32, 4, 2, 2), "padding": 5, "stride": 2, "groups": 4},
    "1d": {"x": (2, 8, 50), "w": (16, 2, 7), "padding": 1, "stride": 2, "groups": 4},
}


def solver_of(direction: Direction) -> Solver:
    return Registry.default().named("ConvGroupedWeights" if direction is Direction.BACKWARD_WEIGHTS else "ConvGrouped")


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_small_integers_are_exact(
    shape: str, direction: Direction, channels_last: bool, dtype: DataType, device: Device, compiler: Compiler
) -> None:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=channels_last)
    problem = ProblemDescription.convolution(**SHAPES[shape], layout=layout, direction=direction, dtype=dtype)
    solver = solver_of(direction)
    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    for config in spread(solver, problem, device, 4, defaults=3):
        check_exact(problem, solver, config, device, compiler)


@pytest.mark.parametrize("layout", [Layout.NHWC, Layout.NCHW])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("width", "size", "stride"), [(4, 56, 1), (16, 28, 2), (32, 7, 1)])
def test_layers_of_resnext_pass_both_gates(
    width: int, size: int, stride: int, direction: Direction, layout: Layout, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(
        x=(8, 32 * width, size, size),
        w=(32 * width, width, 3, 3),
        padding=1,
        stride=stride,
        groups=32,
        dtype="float16",
        layout=layout,
        direction=direction,
    )
    solver = solver_of(direction)
    check_gates(solver, problem, device, compiler, solver.default_configs(problem, device), seed=3)
