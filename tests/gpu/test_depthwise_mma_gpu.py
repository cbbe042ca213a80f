"""Depthwise convolution on tensor cores on a GPU: the host's reference bit for bit, within guard bands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.device_buffers import download, integers, upload
from helpers.runs.gates import check_gates
from helpers.values.exact_results import check_exact

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"x": (3, 72, 14, 14), "w": (72, 1, 3, 3), "padding": 1, "groups": 72},
    "3x3_stride": {"x": (2, 32, 30, 29), "w": (32, 1, 3, 3), "padding": 1, "stride": 2, "groups": 32},
    "5x5_stride": {"x": (2, 48, 28, 27), "w": (48, 1, 5, 5), "padding": 2, "stride": 2, "groups": 48},
    "7x7": {"x": (5, 40, 7, 9), "w": (40, 1, 7, 7), "padding": 3, "groups": 40},
    "7x7_wide": {"x": (1, 16, 20, 130), "w": (16, 1, 7, 7), "padding": 3, "groups": 16},
    "uneven": {"x": (2, 24, 11, 33), "w": (24, 1, 2, 5), "padding": ((4, 0), (1, 6)), "stride": (3, 2), "groups": 24},
    "dilated": {"x": (1, 16, 33, 20), "w": (16, 1, 3, 3), "padding": 6, "dilation": (6, 2), "groups": 16},
    "dilated_stride": {
        "x": (2, 24, 21, 22), "w": (24, 1, 3, 3), "padding": 3, "dilation": 3, "stride": 2, "groups": 24,
    },
    "no_tap_meets": {"x": (2, 8, 9, 9), "w": (8, 1, 1, 1), "stride": 4, "groups": 8},
    "many_images": {"x": (9, 16, 5, 6), "w": (16, 1, 3, 3), "padding": 1, "groups": 16},
    "1d": {"x": (3, 32, 100), "w": (32, 1, 7), "padding": ((6, 0),), "groups": 32},
}  # fmt: skip


def solver_of(direction: Direction) -> Solver:
    suffix = "Weights" if direction is Direction.BACKWARD_WEIGHTS else ""
    return Registry.default()[f"ConvDepthwiseMma{suffix}"]


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_small_integers_are_exact(
    shape: str, direction: Direction, dtype: DataType, device: Device, compiler: Compiler
) -> None:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=True)
    problem = ProblemDescription.convolution(**SHAPES[shape], layout=layout, direction=direction, dtype=dtype)
    solver = solver_of(direction)
    assert solver.applicability(problem, device)
    for config in spread(solver, problem, device, 4, defaults=3):
        check_exact(problem, solver, config, device, compiler)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("c", "size", "taps", "stride"), [(96, 56, 7, 1), (240, 28, 5, 1), (144, 56, 3, 2)])
def test_layers_pass_both_gates(
    c: int, size: int, taps: int, stride: int, direction: Direction, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(
        x=(8, c, size, size),
        w=(c, 1, taps, taps),
        padding=taps // 2,
        stride=stride,
        groups=c,
        dtype="float16",
        layout="NHWC",
        direction=direction,
    )
    solver = solver_of(direction)
    check_gates(solver, problem, device, compiler, solver.default_configs(problem, device), seed=3)


def test_an_infinity_stays_among_its_eight_channels(device: Device, compiler: Compiler) -> None:
    """The declared reach: NaN in the channels that share its matrix where pixels meet it, finite results elsewhere."""
    problem = ProblemDescription.convolution(
        x=(1, 32, 9, 9), w=(32, 1, 3, 3), padding=1, groups=32, dtype="float16", layout="NHWC"
    )
    solver, inputs = solver_of(problem.direction), integers(problem, seed=3)
    inputs["x"][0, 13, 4, 4] = np.inf
    invoker = make_invoker(problem, device, solver, solver.default_configs(problem, device)[0], compiler)
    buffers = upload(problem, inputs)
    invoker.run((*(buffer.address for buffer in buffers.values()), 0), cupy.cuda.get_current_stream().ptr)
    finite = np.isfinite(download(problem, buffers))
    assert finite[0, :8].all()
    assert finite[0, 16:].all()
    near = np.zeros((9, 9), bool)
    near[3:6, 3:6] = True
    assert finite[0, 8:16][:, ~near].all()
    assert not finite[0, 12, 4, 4]
