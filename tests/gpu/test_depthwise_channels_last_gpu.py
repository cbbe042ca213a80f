"""Depthwise convolution of channels-last images on a GPU: the host's reference, within guard bands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.device_buffers import integers
from helpers.runs.device_runs import DeviceRun
from helpers.values.exact_results import check_exact

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.reference.convolution import reference_on_host
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"x": (3, 72, 14, 14), "w": (72, 1, 3, 3), "padding": 1, "groups": 72},
    "5x5_stride": {"x": (2, 48, 28, 27), "w": (48, 1, 5, 5), "padding": 2, "stride": 2, "groups": 48},
    "7x7": {"x": (5, 40, 7, 9), "w": (40, 1, 7, 7), "padding": 3, "groups": 40},
    "odd_channels": {"x": (2, 13, 17, 15), "w": (13, 1, 3, 3), "padding": ((1, 0), (2, 1)), "groups": 13},
    "uneven": {"x": (2, 20, 11, 33), "w": (20, 1, 2, 5), "padding": ((4, 0), (1, 6)), "stride": (3, 2), "groups": 20},
    "dilated": {"x": (1, 16, 33, 20), "w": (16, 1, 3, 3), "padding": 6, "dilation": (6, 2), "groups": 16},
    "dilated_stride": {
        "x": (2, 24, 21, 22), "w": (24, 1, 3, 3), "padding": 3, "dilation": 3, "stride": 2, "groups": 24,
    },
    "multiplier": {"x": (2, 16, 9, 10), "w": (48, 1, 3, 3), "padding": 1, "stride": 2, "groups": 16},
    "no_tap_meets": {"x": (2, 8, 9, 9), "w": (8, 1, 1, 1), "stride": 3, "groups": 8},
    "1d": {"x": (3, 32, 100), "w": (32, 1, 7), "padding": ((6, 0),), "groups": 32},
}  # fmt: skip


def make(shape: str, **fields: Any) -> ProblemDescription:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=True)
    return ProblemDescription.convolution(**SHAPES[shape], layout=layout, **fields)


def solver_of(problem: ProblemDescription) -> Solver:
    weights = problem.direction is Direction.BACKWARD_WEIGHTS
    return Registry.default().named("ConvDepthwiseChannelsLastWeights" if weights else "ConvDepthwiseChannelsLast")


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32])
@pytest.mark.parametrize("shape", SHAPES)
def test_small_integers_are_exact(
    shape: str, dtype: DataType, direction: Direction, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, direction=direction, dtype=dtype)
    assert solver_of(problem).applicability(problem, device)
    for config in spread(solver_of(problem), problem, device, 3, defaults=2):
        check_exact(problem, solver_of(problem), config, device, compiler)


@pytest.mark.parametrize("direction", list(Direction))
def test_infinities_stay_where_they_are_met(direction: Direction, device: Device, compiler: Compiler) -> None:
    """No structural zero is multiplied by an infinite element of x or dy."""
    problem = ProblemDescription.convolution(
        x=(2, 16, 13, 11), w=(16, 1, 3, 3), padding=1, groups=16, dtype="float16", layout="NHWC", direction=direction
    )
    inputs = {name: np.abs(values) + 1 for name, values in integers(problem, seed=3).items()}
    image = "y" if direction is Direction.BACKWARD_DATA else "x"
    inputs[image][1, 5, 12, 10] = inputs[image][0, 7, 0, 4] = np.inf
    with np.errstate(invalid="ignore", over="ignore"):
        expected = reference_on_host(problem, **inputs)
    for config in spread(solver_of(problem), problem, device, 4, defaults=2):
        result = DeviceRun.of(problem, solver_of(problem), config, device, compiler).output(inputs)
        np.testing.assert_array_equal(np.isinf(result), np.isinf(expected), err_msg=config.json)
        assert not np.isnan(result).any(), config.json


def test_weights_are_the_same_bits_on_every_run(device: Device, compiler: Compiler) -> None:
    problem = make("3x3", direction="backward_weights", dtype="float32")
    generator = np.random.default_rng(4)
    inputs = {
        name: generator.standard_normal(problem.tensor(name).shape).astype(np.float32)
        for name in problem.direction.inputs
    }
    config = solver_of(problem).default_configs(problem, device)[0]
    run = DeviceRun.of(problem, solver_of(problem), config, device, compiler)
    results = [run.output(inputs) for _ in range(3)]
    assert all((result == results[0]).all() for result in results)
