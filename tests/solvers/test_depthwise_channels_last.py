"""Depthwise convolution by streamed rows of channels: its arithmetic, refusals and configurations. Needs no GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import Config
from miofind.solver.structs import Struct
from miofind.solvers.depthwise.channels_last_rows import (
    RowAxis,
    RowTiling,
    bank_conflicts,
    even_size,
    is_whole,
    phases,
    pixel_pitch,
    row_axes,
)

H200 = Device.virtual("90a")
SOLVER = Registry.default()["ConvDepthwiseChannelsLast"]
DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD_DATA)


def depthwise(c: int = 32, **fields: Any) -> ProblemDescription:
    shape = {"x": (2, c, 14, 14), "w": (c, 1, 3, 3), "padding": 1, "dtype": "float16", "layout": "NHWC", "groups": c}
    return ProblemDescription.convolution(**{**shape, **fields})


def axis_of(size: int, taps: int, pad: int, stride: int, dilation: int) -> RowAxis:
    assume(size + 2 * pad >= (taps - 1) * dilation + 1)
    return row_axes(
        depthwise(x=(1, 32, size, 1), w=(32, 1, taps, 1), padding=(pad, 0), stride=(stride, 1), dilation=(dilation, 1))
    )[0]


def lines(axis: RowAxis, residue: int) -> tuple[dict[int, int], dict[int, int]]:
    """Coordinates of x and y by index, as axis_of of depthwise/channels_last_rows.cuh has them."""
    first = residue * axis.x_stride - axis.pad
    low, high = -(first // axis.dilation), -((first - axis.x_size) // axis.dilation)
    ys = range(residue, axis.y_size, axis.y_step)
    return {m: first + axis.dilation * m for m in range(low, high)}, dict(enumerate(ys))


axes = {
    "size": st.integers(1, 40),
    "taps": st.integers(1, 7),
    "pad": st.integers(0, 9),
    "stride": st.integers(1, 5),
    "dilation": st.integers(1, 6),
}


@given(**axes)
def test_classes_join_what_the_convolution_joins(size: int, taps: int, pad: int, stride: int, dilation: int) -> None:
    axis = axis_of(size, taps, pad, stride, dilation)
    wanted = {
        (o * stride - pad + t * dilation, t, o)
        for o, t in itertools.product(range(axis.y_size), range(taps))
        if 0 <= o * stride - pad + t * dilation < size
    }
    joined: list[tuple[int, int, int]] = []
    for residue in range(axis.y_step):
        xs, ys = lines(axis, residue)
        assert all(0 <= x < size for x in xs.values())
        joined += [(xs[m], m - axis.stride * t, ys[t]) for m in xs for t in ys if 0 <= m - axis.stride * t < taps]
    assert len(joined) == len(set(joined))
    assert set(joined) == wanted


@given(**axes)
def test_classes_cover_x_where_stride_and_dilation_are_coprime(
    size: int, taps: int, pad: int, stride: int, dilation: int
) -> None:
    assume(math.gcd(stride, dilation) == 1)
    axis = axis_of(size, taps, pad, stride, dilation)
    covered = [x for residue in range(axis.y_step) for x in lines(axis, residue)[0].values()]
    assert sorted(covered) == list(range(size))


@given(**axes)
def test_units_hold_the_outputs_of_every_class(size: int, taps: int, pad: int, stride: int, dilation: int) -> None:
    axis = axis_of(size, taps, pad, stride, dilation)
    for residue in range(axis.y_step):
        xs, ys = lines(axis, residue)
        assert len(ys) <= axis.units(backward=False)
        if not xs:
            continue
        origin = min(xs) // axis.stride
        aligned = max(xs) // axis.stride - origin + 1
        assert aligned <= axis.units(backward=True, aligned=True)
    if axis.dilation == 1:
        assert axis.units(backward=True) == math.ceil(size / axis.stride)


@pytest.mark.parametrize(("total", "most", "unit", "share"), [(144, 64, 8, 48), (240, 64, 8, 64), (56, 28, 1, 28)])
def test_shares_are_even(total: int, most: int, unit: int, share: int) -> None:
    assert even_size(total, most, unit) == share


@given(total=st.integers(1, 2000), most=st.integers(1, 200), unit=st.sampled_from([1, 2, 4, 8]))
def test_shares_are_whole_units_within_the_limit(total: int, most: int, unit: int) -> None:
    share = even_size(total, most, unit)
    assert share % unit == 0
    assert share <= max(unit, math.ceil(most / unit) * unit)
    assert math.ceil(total / share) <= math.ceil(total / max(most, unit))


def test_bank_conflicts_of_known_accesses() -> None:
    assert bank_conflicts(np.array([128]), 4, 1, 32) == 1  # neighbouring words
    assert bank_conflicts(np.array([128]), 4, 1, 1) == 32  # a word of each row of banks
    # Two halves of a warp a multiple of 128 bytes apart, and an odd multiple of 64.
    assert bank_conflicts(np.array([64, 80]), 4, 4, 16).tolist() == [2, 1]
    assert bank_conflicts(np.array([128]), 2, 1, 16) == 2  # a row of banks and the next
    assert bank_conflicts(np.array([256]), 16, 1, 16) == 1  # in as many phases as the bytes take


@pytest.mark.parametrize("channels", [16, 32, 48, 64, 72, 112, 128])
@pytest.mark.parametrize("vector", [2, 4])
@pytest.mark.parametrize("step", [2, 4, 7, 8])
def test_pitches_hold_a_pixel_and_conflict_less_than_tight_ones(channels: int, vector: int, step: int) -> None:
    pitch, runs = pixel_pitch(channels, 2, vector, step, channels // vector), channels // vector
    assert pitch >= channels
    assert pitch % 8 == 0
    found, tight = bank_conflicts(2 * np.array([pitch, channels]), 2 * vector, step, runs)
    assert found <= tight


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [7, 14, 15, 28])
def test_tiles_cover_the_output(direction: Direction, stride: int, size: int) -> None:
    problem = depthwise(48, x=(5, 48, size, size + 3), stride=stride, direction=direction)
    for config in list(SOLVER.configs(problem, H200))[::29]:
        tiling = RowTiling.of(problem, config, 1)
        backward = direction is Direction.BACKWARD_DATA
        height, width = row_axes(problem)
        assert tiling.row_blocks * config["rows"] >= height.units(backward=backward)
        assert tiling.column_tiles * tiling.thread_groups * config["columns"] >= width.units(backward=backward)
        assert (tiling.row_blocks - 1) * config["rows"] < height.units(backward=backward)
        assert tiling.channel_blocks * tiling.channels >= problem.c > (tiling.channel_blocks - 1) * tiling.channels
        blocks = tiling.channel_blocks * tiling.column_tiles * tiling.row_blocks * problem.n
        assert tiling.blocks == blocks * height.y_step * width.y_step
        (step,) = SOLVER.solution(problem, H200, config).kernels
        (shape,) = (argument for argument in step.args if isinstance(argument, Struct))
        fields = {name: value for (name, _, _), value in zip(shape.type.fields, shape.values, strict=True)}
        divisors = [fields[name].values[0] for name in ("channel_blocks", "column_tiles", "row_blocks")]
        assert (fields["channels"], math.prod(divisors) * problem.n) == (48, blocks)


def test_whole_parts_leave_nothing_over() -> None:
    assert is_whole(depthwise(), 0, 7)
    assert not is_whole(depthwise(), 0, 4)
    back = depthwise(stride=2, direction="backward_data")
    assert is_whole(back, 0, 7)
    assert not is_whole(back, 1, 2)
    assert not is_whole(depthwise(dilation=2, padding=2), 0, 7)


def test_phases_are_of_undilated_problems() -> None:
    assert phases(depthwise(stride=(2, 3), padding=(1, 2))) == (1, 2)
    assert phases(depthwise(stride=2, padding=2, dilation=(1, 3))) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"groups": 16, "w": (32, 2, 3, 3)}, "one input channel a group"),
        ({"layout": "NCHW"}, "NCHW"),
        ({"layout": {"x": "NHWC", "w": "NCHW", "y": "NHWC"}}, "NCHW"),
        ({"direction": "backward_weights"}, "computes forward and backward_data"),
        (
            {
                "x": (1, 512, 8, 488281),
                "w": (512, 1, 3, 3),
                "groups": 512,
                "stride": (2, 1),
                "dilation": (9, 1),
                "padding": (9, 1),
                "direction": "backward_data",
            },
            "reach too far",
        ),
        ({"direction": "backward_data", "stride": 2, "dilation": 2, "padding": 2}, "common divisor"),
        ({"w": (32, 1, 13, 13), "padding": 6}, "too large"),
        ({"padding": (2**20 + 1, 1)}, "padding"),
        ({"dtype": "float64"}, "float64"),
    ],
)
def test_refusals_name_their_reason(fields: dict[str, Any], reason: str) -> None:
    problem = depthwise(**fields)
    answer = SOLVER.applicability(problem, H200)
    assert not answer
    assert reason in answer.reason


@pytest.mark.parametrize("filter_size", [3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_small_filters_have_a_space_worth_searching(filter_size: int, stride: int, direction: Direction) -> None:
    problem = depthwise(
        144,
        x=(32, 144, 56, 56),
        w=(144, 1, filter_size, filter_size),
        padding=filter_size // 2,
        stride=stride,
        direction=direction,
    )
    count = sum(1 for _ in SOLVER.configs(problem, H200))
    assert 50 <= count <= 2000


def test_odd_channels_are_served_one_by_one() -> None:
    problem = depthwise(7, x=(1, 7, 9, 9), w=(7, 1, 3, 3))
    assert {config["vector"] for config in SOLVER.configs(problem, H200)} == {1}


def test_estimates_grow_with_the_problem() -> None:
    def best_ms(problem: ProblemDescription) -> float:
        return min(SOLVER.estimate_ms(problem, H200, c) for c in SOLVER.default_configs(problem, H200))

    for direction in DIRECTIONS:
        small, large = (depthwise(x=(n, 32, 56, 56), direction=direction) for n in (8, 128))
        assert best_ms(small) < best_ms(large)


def test_a_wider_thread_than_the_image_is_no_point() -> None:
    problem = depthwise()
    assert not SOLVER.is_valid_config(
        problem, H200, Config({**SOLVER.default_configs(problem, H200)[0], "rows": 14, "columns": 64})
    )
