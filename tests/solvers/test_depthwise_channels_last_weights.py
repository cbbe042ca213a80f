"""Backward weights of depthwise convolutions, channels-last: items, configurations and workspace. Needs no GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import KernelStep
from miofind.solver.structs import Struct
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.depthwise.channels_last_rows import row_axes

H200 = Device.virtual("90a")
SOLVER = Registry.default()["ConvDepthwiseChannelsLastWeights"]


def depthwise(c: int = 32, **fields: Any) -> ProblemDescription:
    shape = {"x": (2, c, 14, 14), "w": (c, 1, 3, 3), "padding": 1, "dtype": "float16", "layout": "NHWC", "groups": c}
    return ProblemDescription.convolution(**{**shape, **fields}, direction="backward_weights")


ODD = (
    depthwise(48, x=(5, 48, 17, 15), w=(48, 1, 5, 5), padding=2, stride=2),
    depthwise(20, x=(2, 20, 11, 33), w=(20, 1, 2, 5), padding=((4, 0), (1, 6)), stride=(3, 2)),
    depthwise(24, x=(2, 24, 21, 22), padding=3, dilation=3, stride=2),
    depthwise(13, x=(1, 13, 7, 9), w=(13, 1, 7, 7), padding=3, dtype="float32"),
    depthwise(16, x=(2, 16, 9, 10), w=(48, 1, 3, 3), stride=2),
)


def defines_of(step: KernelStep) -> dict[str, str | int]:
    return dict(step.defines)


def fields_of(struct: Any) -> dict[str, Any]:
    assert isinstance(struct, Struct)
    return {name: value for (name, _, _), value in zip(struct.type.fields, struct.values, strict=True)}


def first_step(problem: ProblemDescription, config: Any) -> KernelStep:
    step = SOLVER.solution(problem, H200, config).steps[0]
    assert isinstance(step, KernelStep)
    return step


@pytest.mark.parametrize("problem", ODD, ids=str)
def test_items_cover_every_gradient_once(problem: ProblemDescription) -> None:
    height, width = row_axes(problem)
    for config in list(SOLVER.configs(problem, H200))[::13]:
        step = first_step(problem, config)
        shape = fields_of(step.args[-1])
        items, iterations, rows = (shape[name] for name in ("items", "iterations", "rows"))
        channel_blocks, groups, row_blocks = (
            fields_of(shape[name])["by"] for name in ("channel_blocks", "column_groups", "row_blocks")
        )
        assert rows == config["rows"]
        assert (groups - 1) * config["columns"] < width.units(backward=False) <= groups * config["columns"]
        assert (row_blocks - 1) * rows < height.units(backward=False) <= row_blocks * rows
        assert items == groups * row_blocks * height.y_step * width.y_step * problem.n
        slots = int(defines_of(step)["SLOTS"])
        splits = step.grid[0] // channel_blocks
        assert (splits - 1) * slots * iterations < items <= splits * slots * iterations


@pytest.mark.parametrize("problem", ODD, ids=str)
def test_columns_said_to_exist_do(problem: ProblemDescription) -> None:
    width = row_axes(problem)[1]
    for config in list(SOLVER.configs(problem, H200))[::7]:
        defines = defines_of(first_step(problem, config))
        groups = ceil_div(width.units(backward=False), config["columns"])
        for place in range(int(defines["FIRST_INSIDE"]), int(defines["END_INSIDE"])):
            columns = (g * config["columns"] * width.stride + place - width.pad for g in range(groups))
            assert all(0 <= column < width.x_size for column in columns)


def test_most_columns_of_a_window_need_no_test() -> None:
    problem = depthwise(64, x=(8, 64, 56, 56))
    config = next(c for c in SOLVER.configs(problem, H200) if c["columns"] == 7)
    defines = defines_of(first_step(problem, config))
    assert (defines["FIRST_INSIDE"], defines["END_INSIDE"]) == (1, 8)


@pytest.mark.parametrize("problem", [*ODD, depthwise()], ids=str)
def test_split_k_partials_are_in_the_workspace(problem: ProblemDescription) -> None:
    for config in list(SOLVER.configs(problem, H200))[::17]:
        solution = SOLVER.solution(problem, H200, config)
        first = first_step(problem, config)
        channel_blocks = ceil_div(problem.c, int(defines_of(first)["CHANNELS"]))
        splits = first.grid[0] // channel_blocks
        assert len(solution.steps) == (2 if splits > 1 else 1)
        assert solution.workspace.bytes >= (4 * splits * problem.w.size if splits > 1 else 0)
        if splits > 1:
            finish = solution.steps[1]
            assert isinstance(finish, KernelStep)
            assert finish.pdl
            assert finish.grid[0] * 32 >= problem.k
            assert finish.grid[1] == math.prod(problem.filter)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"groups": 16, "w": (32, 2, 3, 3)}, "one input channel a group"),
        ({"layout": "NCHW"}, "NCHW"),
        ({"w": (32, 1, 13, 13), "padding": 6}, "too large"),
        ({"padding": (2**20 + 1, 1)}, "padding"),
        ({"dtype": "float64"}, "float64"),
    ],
)
def test_refusals_name_their_reason(fields: dict[str, Any], reason: str) -> None:
    answer = SOLVER.applicability(depthwise(**fields), H200)
    assert not answer
    assert reason in answer.reason


@pytest.mark.parametrize("filter_size", [3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_small_filters_have_a_space_worth_searching(filter_size: int, stride: int, dtype: str) -> None:
    problem = depthwise(
        144,
        x=(32, 144, 56, 56),
        w=(144, 1, filter_size, filter_size),
        padding=filter_size // 2,
        stride=stride,
        dtype=dtype,
    )
    assert 50 <= sum(1 for _ in SOLVER.configs(problem, H200)) <= 2000


def test_estimates_grow_with_the_problem() -> None:
    def best_ms(problem: ProblemDescription) -> float:
        return min(SOLVER.estimate_ms(problem, H200, c) for c in SOLVER.default_configs(problem, H200))

    assert best_ms(depthwise(x=(8, 32, 56, 56))) < best_ms(depthwise(x=(128, 32, 56, 56)))


def test_filters_of_many_outputs_a_channel_are_read_one_by_one() -> None:
    problem = depthwise(8, x=(2, 8, 9, 10), w=(24, 1, 3, 3))
    assert {config["vector"] for config in SOLVER.configs(problem, H200)} == {1}
