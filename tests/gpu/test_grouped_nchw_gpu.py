"""The solvers of grouped channels-first convolutions on a GPU: the host's reference bit for bit, within guard bands."""

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
    "4_channels": {"x": (2, 32, 30, 28), "w": (32, 4, 3, 3), "padding": 1, "groups": 8},
    "8_channels_stride": {"x": (3, 32, 28, 28), "w": (32, 8, 3, 3), "padding": 1, "stride": 2, "groups": 4},
    "16_channels": {"x": (3, 32, 14, 14), "w": (32, 16, 3, 3), "padding": 1, "groups": 2},
    "32_channels": {"x": (5, 96, 7, 7), "w": (96, 32, 3, 3), "padding": 1, "groups": 3},
    "32_channels_stride": {"x": (5, 64, 14, 14), "w": (64, 32, 3, 3), "padding": 1, "stride": 2, "groups": 2},
    "64_channels": {"x": (2, 128, 9, 12), "w": (128, 64, 1, 1), "groups": 2},
    "uneven_groups": {"x": (2, 16, 13, 9), "w": (24, 4, 5, 3), "padding": ((4, 0), (1, 2)), "groups": 4},
    "odd_groups": {"x": (2, 24, 11, 12), "w": (16, 3, 2, 3), "stride": (2, 1), "dilation": (3, 1), "groups": 8},
    "no_padding": {"x": (2, 32, 8, 17), "w": (32, 8, 3, 3), "stride": 2, "groups": 4},
    "wide": {"x": (1, 16, 5, 130), "w": (16, 2, 3, 3), "padding": (1, 2), "groups": 8},
    "seven_runs": {"x": (3, 16, 15, 56), "w": (16, 8, 3, 3), "padding": 1, "groups": 2},
    "padding_beyond_the_filter": {"x": (1, 16, 6, 7), "w": (32, 4, 2, 2), "padding": (5, 2), "groups": 4},
    "1d": {"x": (2, 8, 50), "w": (16, 2, 5), "padding": 2, "stride": 2, "groups": 4},
}


def solver_of(direction: Direction) -> Solver:
    name = "ConvGroupedPlanesWeights" if direction is Direction.BACKWARD_WEIGHTS else "ConvGroupedPlanes"
    return Registry.default().named(name)


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_small_integers_are_exact(
    shape: str, direction: Direction, dtype: DataType, device: Device, compiler: Compiler
) -> None:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=False)
    problem = ProblemDescription.convolution(**SHAPES[shape], layout=layout, direction=direction, dtype=dtype)
    solver = solver_of(direction)
    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    for config in spread(solver, problem, device, 4, defaults=3):
        check_exact(problem, solver, config, device, compiler)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("width", "size", "stride"), [(4, 56, 1), (8, 28, 1), (16, 28, 2), (16, 14, 1), (32, 14, 2), (32, 7, 1)]
)
def test_layers_of_resnext_pass_both_gates(
    width: int, size: int, stride: int, direction: Direction, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(
        x=(8, 32 * width, size, size),
        w=(32 * width, width, 3, 3),
        padding=1,
        stride=stride,
        groups=32,
        dtype="float16",
        layout="NCHW",
        direction=direction,
    )
    solver = solver_of(direction)
    check_gates(solver, problem, device, compiler, solver.default_configs(problem, device), seed=3)
