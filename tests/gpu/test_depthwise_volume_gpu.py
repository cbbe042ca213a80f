"""ConvDepthwiseVolume and ConvDepthwiseVolumeWeights on a GPU: both gates, infinities, epilogues, equal bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.device_buffers import integers
from helpers.runs.device_runs import DeviceRun
from helpers.runs.gates import check_gates

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.reference.convolution import reference_on_host
from miofind.solvers.depthwise.volume import ConvDepthwiseVolume
from miofind.solvers.depthwise.volume_weights import ConvDepthwiseVolumeWeights

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "3x3x3": {"x": (2, 54, 6, 14, 14), "w": (54, 1, 3, 3, 3), "padding": 1},
    "several_tiles": {"x": (1, 6, 9, 37, 70), "w": (6, 1, 3, 3, 3), "padding": 1},
    "images_stride": {"x": (2, 24, 5, 15, 16), "w": (24, 1, 3, 3, 3), "padding": 1, "stride": (1, 2, 2)},
    "stride": {"x": (2, 20, 9, 11, 17), "w": (20, 1, 3, 3, 3), "padding": 1, "stride": 2},
    "stride_3": {"x": (1, 8, 11, 13, 16), "w": (8, 1, 3, 2, 4), "padding": ((0, 1), (2, 0), 1), "stride": (3, 2, 3)},
    "5x5x5": {"x": (2, 16, 7, 10, 12), "w": (16, 1, 5, 5, 5), "padding": 2},
    "5x5x5_stride": {"x": (1, 8, 9, 12, 14), "w": (8, 1, 5, 5, 5), "padding": 2, "stride": 2},
    "3x5x5": {"x": (2, 12, 6, 9, 28), "w": (12, 1, 3, 5, 5), "padding": (1, 2, 2)},
    "7x7x7": {"x": (1, 8, 9, 10, 24), "w": (8, 1, 7, 7, 7), "padding": 3},
    "odd": {"x": (3, 13, 5, 7, 7), "w": (13, 1, 3, 3, 3), "padding": ((1, 0), (2, 1), (0, 2))},
    "beyond_the_filter": {"x": (1, 4, 3, 5, 6), "w": (4, 1, 2, 2, 2), "padding": 4},
    "dilation": {"x": (1, 16, 11, 13, 12), "w": (16, 1, 3, 3, 3), "padding": (2, 3, 1), "dilation": (2, 3, 1)},
    "no_tap_meets": {"x": (2, 8, 5, 9, 9), "w": (8, 1, 1, 1, 1), "stride": (2, 3, 3)},
    "planes": {"x": (2, 16, 4, 13, 14), "w": (16, 1, 1, 3, 3), "padding": (0, 1, 1)},
    "narrow_tiles": {"x": (1, 12, 9, 19, 23), "w": (12, 1, 5, 5, 5), "padding": 2, "stride": 2},
    "few_copies": {"x": (2, 6, 7, 18, 21), "w": (6, 1, 7, 7, 7), "padding": 3, "stride": (1, 2, 2)},
    "patches": {"x": (1, 5, 8, 17, 19), "w": (5, 1, 3, 3, 3), "padding": 1, "stride": (1, 4, 4)},
    "frames": {"x": (2, 16, 9, 8, 7), "w": (16, 1, 5, 1, 1), "padding": (2, 0, 0)},
}
EPILOGUES = {
    Direction.FORWARD: ("bias.relu", "scale.bias.residual.clamp", "channel_bias.silu.residual"),
    Direction.BACKWARD_DATA: ("residual", "dsilu", "residual.drelu"),
}


def make(shape: str, layout: Layout, **fields: Any) -> ProblemDescription:
    given = SHAPES[shape]
    return ProblemDescription.convolution(**given, groups=given["x"][1], layout=layout, **fields)


def solver_of(problem: ProblemDescription) -> ConvDepthwiseVolume | ConvDepthwiseVolumeWeights:
    is_of_weights = problem.direction is Direction.BACKWARD_WEIGHTS
    return ConvDepthwiseVolumeWeights() if is_of_weights else ConvDepthwiseVolume()


@pytest.mark.parametrize("layout", [Layout.NCDHW, Layout.NDHWC])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32])
@pytest.mark.parametrize("shape", SHAPES)
def test_volumes_pass_both_gates(
    shape: str, dtype: DataType, direction: Direction, layout: Layout, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, layout, direction=direction, dtype=dtype)
    solver = solver_of(problem)
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    fallbacks = [config for config in solver.fallbacks if solver.is_valid_config(problem, device, config)]
    check_gates(solver, problem, device, compiler, [*spread(solver, problem, device, 3, defaults=3), *fallbacks])


@pytest.mark.parametrize("layout", [Layout.NCDHW, Layout.NDHWC])
@pytest.mark.parametrize(
    ("direction", "epilogue"), [(direction, text) for direction, texts in EPILOGUES.items() for text in texts]
)
@pytest.mark.parametrize("shape", ["3x3x3", "images_stride", "stride", "odd", "5x5x5"])
def test_epilogues_pass_both_gates(
    shape: str, direction: Direction, epilogue: str, layout: Layout, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, layout, direction=direction, dtype=DataType.FLOAT16, epilogue=epilogue)
    solver = solver_of(problem)
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    check_gates(solver, problem, device, compiler, list(spread(solver, problem, device, 1, defaults=2)))


@pytest.mark.parametrize("layout", [Layout.NCDHW, Layout.NDHWC])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
@pytest.mark.parametrize("shape", ["images_stride", "stride", "dilation", "5x5x5", "patches"])
def test_infinities_stay_where_they_are_met(
    shape: str, direction: Direction, layout: Layout, device: Device, compiler: Compiler
) -> None:
    """Tiles that reach beyond a volume, and planes between residues, leave none elsewhere."""
    problem = make(shape, layout, direction=direction, dtype=DataType.FLOAT16)
    inputs = {name: np.abs(values) + 1 for name, values in integers(problem, seed=3).items()}
    volume = inputs["y" if direction is Direction.BACKWARD_DATA else "x"]
    volume[-1, 2, -1, -1, -1] = volume[0, 4, 0, 1, 0] = np.inf
    with np.errstate(invalid="ignore", over="ignore"):
        expected = reference_on_host(problem, **inputs)
    for config in spread(solver_of(problem), problem, device, 4, defaults=2):
        result = DeviceRun.of(problem, solver_of(problem), config, device, compiler).output(inputs)
        np.testing.assert_array_equal(np.isinf(result), np.isinf(expected), err_msg=config.json)
        assert not np.isnan(result).any(), config.json


def test_weights_are_the_same_bits_on_every_run(device: Device, compiler: Compiler) -> None:
    """With splits, whose partials a second kernel adds up."""
    problem = make("several_tiles", Layout.NCDHW, direction=Direction.BACKWARD_WEIGHTS, dtype=DataType.FLOAT32)
    generator = np.random.default_rng(4)
    inputs = {
        name: generator.standard_normal(problem.tensor(name).shape).astype(np.float32)
        for name in problem.direction.inputs
    }
    configs = solver_of(problem).default_configs(problem, device)
    config = next(each for each in configs if solver_of(problem).solution(problem, device, each).workspace.regions)
    run = DeviceRun.of(problem, solver_of(problem), config, device, compiler)
    results = [run.output(inputs) for _ in range(3)]
    assert all((result == results[0]).all() for result in results)
