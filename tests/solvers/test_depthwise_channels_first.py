"""Configurations and estimates of the depthwise solvers of channels-first tensors."""

from __future__ import annotations

import dataclasses

import pytest

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, KernelStep

H200 = dataclasses.replace(Device.virtual("90a"), clock_hz=1.98e9, bandwidth_bytes_per_s=4.8e12)
FORWARD = Registry.default()["ConvDepthwiseChannelsFirst"]
WEIGHTS = Registry.default()["ConvDepthwiseChannelsFirstWeights"]
SHAPES: dict[str, dict[str, object]] = {
    "7x7": {"x": (32, 960, 7, 7), "w": (960, 1, 3, 3), "padding": 1, "groups": 960},
    "14x14": {"x": (32, 480, 14, 14), "w": (480, 1, 5, 5), "padding": 2, "groups": 480},
    "28x28": {"x": (32, 192, 28, 28), "w": (192, 1, 7, 7), "padding": 3, "groups": 192},
    "112x112": {"x": (32, 96, 112, 112), "w": (96, 1, 3, 3), "padding": 1, "stride": 2, "groups": 96},
    "odd": {"x": (3, 5, 33, 45), "w": (15, 1, 3, 5), "padding": ((2, 4), (9, 0)), "dilation": (2, 1), "groups": 5},
}


def make(shape: str, direction: Direction, dtype: DataType = DataType.FLOAT16) -> ProblemDescription:
    given = SHAPES[shape] | {"direction": direction, "dtype": dtype}
    return ProblemDescription.convolution(**given)  # type: ignore[arg-type]


def solver_of(problem: ProblemDescription) -> Solver:
    return WEIGHTS if problem.direction is Direction.BACKWARD_WEIGHTS else FORWARD


def steps(problem: ProblemDescription, config: Config) -> tuple[KernelStep, ...]:
    return tuple(solver_of(problem).solution(problem, H200, config).kernels)


def define(step: KernelStep, name: str) -> int:
    return int(dict(step.defines)[name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_cover_every_image_and_row(shape: str, direction: Direction) -> None:
    problem = make(shape, direction)
    for config in list(solver_of(problem).configs(problem, H200))[::7]:
        step = steps(problem, config)[0]
        images, row_blocks = define(step, "CHANNEL_IMAGES"), define(step, "ROW_BLOCKS")
        tiles = -(-define(step, "OUT_H") // define(step, "TILE_ROWS"))
        assert images == 1 or row_blocks == 1
        assert (row_blocks - 1) * -(-tiles // row_blocks) < tiles
        if direction is Direction.BACKWARD_WEIGHTS:
            groups = step.grid[0] // config["splits"]
            assert (groups - 1) * images < problem.k <= groups * images
        else:
            total = problem.n * (problem.k if direction is Direction.FORWARD else problem.c)
            groups = step.grid[0] // row_blocks
            assert (groups - 1) * images < total <= groups * images


@pytest.mark.sampled(6)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_spaces_are_small_and_fit_a_block(shape: str, direction: Direction) -> None:
    problem = make(shape, direction)
    every = list(solver_of(problem).configs(problem, H200))
    assert 20 <= len(every) <= 3000
    for config in every[::7]:
        step = steps(problem, config)[0]
        assert step.block[0] % 32 == 0
        assert step.block[0] <= 512
        assert step.shared_bytes <= H200.shared_bytes
        assert define(step, "MIN_BLOCKS") * step.block[0] <= 2048


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
def test_narrow_results_pass_through_shared_memory(direction: Direction) -> None:
    """Scattered narrow stores took up to five times as long on an H200."""
    for shape, staged in (("7x7", 1), ("14x14", 1)):
        problem = make(shape, direction)
        assert {define(steps(problem, config)[0], "STAGED") for config in FORWARD.configs(problem, H200)} == {staged}
    problem = make("112x112", Direction.BACKWARD_DATA)
    wide = [config for config in FORWARD.configs(problem, H200) if config["columns"] == 8]
    assert {define(steps(problem, config)[0], "STAGED") for config in wide} == {0}


def test_filter_rows_are_a_loop_where_neighbours_meet_neighbours() -> None:
    """Backward data of stride 2 meets every second filter row."""
    wide = {"x": (4, 16, 28, 28), "w": (16, 1, 5, 5), "padding": 2, "groups": 16}
    for stride, direction, expected in (
        (1, Direction.FORWARD, {False, True}),
        (2, Direction.FORWARD, {False, True}),
        (1, Direction.BACKWARD_DATA, {False, True}),
        (2, Direction.BACKWARD_DATA, {False}),
    ):
        problem = ProblemDescription.convolution(**wide, stride=stride, direction=direction)  # type: ignore[arg-type]
        assert {config["rolled"] for config in FORWARD.configs(problem, H200)} == expected
    assert {config["rolled"] for config in FORWARD.configs(make("7x7", Direction.FORWARD), H200)} == {False}


def test_sums_of_several_blocks_meet_in_a_cluster_or_a_second_kernel() -> None:
    problem = make("28x28", Direction.BACKWARD_WEIGHTS)
    for config in list(WEIGHTS.configs(problem, H200))[::3]:
        launches = steps(problem, config)
        has_partials = config["splits"] > 1 and not config["clustered"]
        assert len(launches) == 1 + has_partials
        partials = WEIGHTS.workspace_bytes(problem, H200, config)
        assert partials == (4 * config["splits"] * problem.w.size if has_partials else 0)
        assert launches[0].grid[0] % (config["splits"] if config["clustered"] else 1) == 0
        if has_partials:
            assert launches[1].pdl
    older = dataclasses.replace(Device.virtual("80"), clock_hz=1.4e9, bandwidth_bytes_per_s=2e12)
    assert not any(config["clustered"] for config in WEIGHTS.configs(problem, older))


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_defaults_come_in_the_order_of_their_estimates(shape: str, direction: Direction) -> None:
    problem = make(shape, direction)
    solver = solver_of(problem)
    estimates = [solver.estimate_ms(problem, H200, config) for config in solver.default_configs(problem, H200)]
    assert estimates == sorted(estimates)
    assert len(estimates) == 8


@pytest.mark.parametrize(("c", "size", "taps"), [(192, 28, 3), (576, 14, 3), (672, 14, 5), (144, 56, 5)])
def test_defaults_of_strided_dx_are_of_several_strips_and_differ(c: int, size: int, taps: int) -> None:
    """Tiles of dx are of whole strides: rows of 1 and of 2 are the same, and columns of 7 and of 8."""
    problem = ProblemDescription.convolution(
        x=(32, c, size, size),
        w=(c, 1, taps, taps),
        padding=taps // 2,
        stride=2,
        groups=c,
        dtype=DataType.FLOAT16,
        direction=Direction.BACKWARD_DATA,
    )
    launches = [steps(problem, config)[0] for config in FORWARD.default_configs(problem, H200)]
    assert len({(step.defines, step.grid) for step in launches}) == len(launches)
    assert len({(define(step, "TILE_ROWS"), define(step, "TILE_COLUMNS")) for step in launches}) >= 3


@pytest.mark.parametrize("direction", list(Direction))
def test_estimates_grow_with_the_problem(direction: Direction) -> None:
    problems = [make(shape, direction) for shape in ("7x7", "14x14", "112x112")]
    solver = solver_of(problems[0])
    estimates = [solver.estimate_ms(p, H200, solver.default_configs(p, H200)[0]) for p in problems]
    assert estimates == sorted(estimates)
    assert estimates[0] < estimates[-1] / 2


def test_wider_elements_and_more_work_take_longer() -> None:
    def estimate(shape: str, direction: Direction, dtype: DataType) -> float:
        problem = make(shape, direction, dtype)
        solver = solver_of(problem)
        return solver.estimate_ms(problem, H200, solver.default_configs(problem, H200)[0])

    for direction in Direction:
        half, single = (estimate("112x112", direction, dtype) for dtype in (DataType.FLOAT16, DataType.FLOAT32))
        assert half < single < 3 * half


@pytest.mark.parametrize("direction", list(Direction))
def test_rows_that_fit_no_block_are_refused(direction: Direction) -> None:
    problem = ProblemDescription.convolution(
        x=(1, 2, 400_000), w=(2, 1, 3), padding=1, groups=2, layout=Layout.NCW, direction=direction
    )
    assert "too long for a block" in solver_of(problem).applicability(problem, H200).reason
