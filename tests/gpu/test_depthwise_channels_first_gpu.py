"""The depthwise solvers of channels-first tensors on a GPU: the host's reference, within guard bands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.device_runs import DeviceRun
from helpers.runs.gates import check_gates
from helpers.values.exact_results import check_exact

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.reference.convolution import reference_on_host
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

DTYPES = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32)
SHAPES: dict[str, dict[str, Any]] = {
    "7x7": {"x": (9, 40, 7, 7), "w": (40, 1, 3, 3), "padding": 1, "groups": 40},
    "7x7 wide filter": {"x": (5, 24, 7, 7), "w": (24, 1, 7, 7), "padding": 3, "groups": 24},
    "14x14": {"x": (4, 36, 14, 14), "w": (36, 1, 5, 5), "padding": 2, "groups": 36},
    "14x14 stride": {"x": (4, 20, 14, 14), "w": (20, 1, 3, 3), "padding": 1, "stride": 2, "groups": 20},
    "28x28": {"x": (3, 12, 28, 28), "w": (12, 1, 3, 3), "padding": 1, "groups": 12},
    "56x56 stride": {"x": (3, 6, 56, 56), "w": (6, 1, 5, 5), "padding": 2, "stride": 2, "groups": 6},
    "112x112": {"x": (2, 3, 112, 112), "w": (3, 1, 3, 3), "padding": 1, "groups": 3},
    "odd": {"x": (3, 5, 33, 45), "w": (5, 1, 3, 5), "padding": ((2, 4), (9, 0)), "dilation": (2, 1), "groups": 5},
    "multiplier": {"x": (2, 5, 19, 17), "w": (15, 1, 2, 3), "padding": 1, "stride": (3, 2), "groups": 5},
    "one channel": {"x": (3, 1, 20, 24), "w": (8, 1, 4, 4), "stride": 4, "groups": 1},
    "beyond the filter": {"x": (2, 8, 9, 6), "w": (8, 1, 3, 3), "padding": ((9, 0), (1, 12)), "groups": 8},
    "far apart": {"x": (1, 2, 70, 66), "w": (2, 1, 3, 3), "padding": 24, "dilation": 24, "groups": 2},
    "1d": {"x": (3, 6, 200), "w": (6, 1, 31), "padding": 15, "groups": 6},
}


def make(shape: str, **fields: Any) -> ProblemDescription:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=False)
    return ProblemDescription.convolution(**SHAPES[shape], layout=layout, **fields)


def solver_of(problem: ProblemDescription) -> Solver:
    is_weights = problem.direction is Direction.BACKWARD_WEIGHTS
    return Registry.default().named(f"ConvDepthwiseChannelsFirst{'Weights' if is_weights else ''}")


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_small_integers_are_exact(
    shape: str, dtype: DataType, direction: Direction, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, dtype=dtype, direction=direction)
    assert solver_of(problem).applicability(problem, device)
    for config in spread(solver_of(problem), problem, device, 3, defaults=3):
        check_exact(problem, solver_of(problem), config, device, compiler)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", ["7x7", "28x28", "56x56 stride"])
def test_sums_of_normal_numbers_keep_their_bound(
    shape: str, direction: Direction, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, dtype=DataType.FLOAT16, direction=direction)
    solver = solver_of(problem)
    check_gates(solver, problem, device, compiler, spread(solver_of(problem), problem, device, 2, defaults=3), seed=7)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", ["7x7", "odd", "14x14 stride"])
def test_an_infinity_stays_with_what_meets_it(
    shape: str, direction: Direction, device: Device, compiler: Compiler
) -> None:
    """One infinite element makes those results infinite that it is a term of, and none a NaN."""
    problem = make(shape, dtype=DataType.FLOAT16, direction=direction)
    name = "y" if direction is Direction.BACKWARD_DATA else "x"
    ones = {each: np.ones(problem.tensor(each).shape) for each in direction.inputs}
    height, width = problem.tensor(name).shape[2:]
    for place in ((0, 0), (height - 1, width - 1), (height // 2, width // 2)):
        marked = np.zeros(problem.tensor(name).shape)
        marked[(0, 1, *place)] = 1
        met = reference_on_host(problem, **(ones | {name: marked})) != 0
        infinite = ones | {name: np.where(marked == 1, np.inf, 1.0)}
        for config in spread(solver_of(problem), problem, device, 3, defaults=3):
            result = DeviceRun.of(problem, solver_of(problem), config, device, compiler).output(infinite)
            np.testing.assert_array_equal(np.isinf(result), met, err_msg=config.json)
            assert not np.isnan(result).any()


@pytest.mark.parametrize("shape", ["7x7", "28x28", "multiplier"])
def test_backward_weights_give_equal_bits_each_time(shape: str, device: Device, compiler: Compiler) -> None:
    problem = make(shape, dtype=DataType.FLOAT32, direction=Direction.BACKWARD_WEIGHTS)
    generator = np.random.default_rng(1)
    inputs = {name: generator.standard_normal(problem.tensor(name).shape) for name in problem.direction.inputs}
    for config in spread(solver_of(problem), problem, device, 3, defaults=3):
        run = DeviceRun.of(problem, solver_of(problem), config, device, compiler)
        first = run.output(inputs)
        for _ in range(3):
            np.testing.assert_array_equal(run.output(inputs), first)
