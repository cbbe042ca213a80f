"""How grouped convolutions are cut for tensor cores, and which of them are served."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.structs import Struct
from miofind.solvers.common.packed_groups import (
    GroupedAxis,
    GroupedTiling,
    PackedGroups,
    odd_words,
    unit_channels,
    units_of,
)
from miofind.solvers.grouped.nhwc_shape import SHAPE
from miofind.solvers.grouped.nhwc_weights_tiling import GroupedWeightsTiling

H200 = replace(Device.virtual("90a"), clock_hz=1.98e9, bandwidth_bytes_per_s=4.8e12)
FORWARD, WEIGHTS = Registry.default()["ConvGrouped"], Registry.default()["ConvGroupedWeights"]


def grouped(groups: int, c: int, k: int, **fields: Any) -> ProblemDescription:
    """A problem of `groups` groups of c and k channels: 3x3 on (2, ., 14, 14) unless `fields` say otherwise."""
    size, taps = fields.pop("size", (14, 14)), fields.pop("taps", (3, 3))
    given = {"dtype": "float16", "layout": "NHWC", "padding": 1} | fields
    n = given.pop("n", 2)
    return ProblemDescription.convolution(x=(n, groups * c, *size), w=(groups * k, c, *taps), groups=groups, **given)


def resnext(width: int, size: int, stride: int, direction: Direction, layout: Layout) -> ProblemDescription:
    """A 3x3 of ResNeXt-50 32x4d at batch 32."""
    return grouped(32, width, width, n=32, size=(size, size), stride=stride, direction=direction, layout=layout)


@given(
    size=st.integers(1, 30),
    taps=st.integers(1, 7),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 4),
    pad=st.integers(0, 9),
)
def test_every_product_is_met_once_backwards(size: int, taps: int, stride: int, dilation: int, pad: int) -> None:
    """dx coordinates, phase by phase, meet the outputs that the forward convolution joins them with."""
    outputs = (size + 2 * pad - (taps - 1) * dilation - 1) // stride + 1
    if outputs < 1:
        return
    problem = grouped(
        4, 4, 4, size=(size, 9), taps=(taps, 1), stride=(stride, 1), dilation=(dilation, 1), padding=(pad, 0),
        direction=Direction.BACKWARD_DATA,
    )  # fmt: skip
    axis = GroupedAxis.of(problem, 0)
    joined = {(o, o * stride - pad + t * dilation, t) for o in range(outputs) for t in range(taps)}
    met = set()
    for i in range(axis.outputs):
        for phase in range(axis.phases):
            for t in range(taps):
                if (phase + pad - t * dilation) % stride == 0:
                    offset = (phase + pad - t * dilation) // stride
                    assert axis.first <= offset <= axis.first + axis.reach
                    met.add((i + offset, axis.phases * i + phase, t))
    assert {product for product in joined if 0 <= product[1] < size} == {
        (o, h, t) for o, h, t in met if 0 <= o < outputs and 0 <= h < size
    }


@pytest.mark.parametrize("c", [2, 3, 4, 6, 8, 12, 16, 20, 32, 64])
@pytest.mark.parametrize("k", [2, 4, 5, 8, 16, 24])
def test_packs_and_units_are_whole_blocks(c: int, k: int) -> None:
    problem = grouped(16, c, k)
    packs = PackedGroups.of(problem)
    assert packs.c % 8 == packs.k % 8 == 0
    assert packs.groups == 1 or (packs.groups // 2 * c) % 8 or (packs.groups // 2 * k) % 8
    for direction in (Direction.FORWARD, Direction.BACKWARD_DATA):
        summed, resulting = unit_channels(replace(problem, direction=direction))
        assert summed % 16 == resulting % 8 == 0
        total = problem.k if direction is Direction.BACKWARD_DATA else problem.c
        assert (units_of(replace(problem, direction=direction)) - 1) * summed < total
        assert units_of(replace(problem, direction=direction)) * summed >= total


def test_pixels_are_odd_numbers_of_words() -> None:
    assert [odd_words(size) for size in (16, 32, 48, 50, 64, 128)] == [16, 48, 48, 80, 80, 144]


@pytest.mark.parametrize("layout", [Layout.NHWC, Layout.NCHW])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("width", "size", "stride"), [(4, 56, 1), (8, 56, 2), (8, 28, 1), (16, 28, 2), (16, 14, 1), (32, 14, 2), (32, 7, 1)]
)
def test_resnext_has_configurations_in_bounds(
    width: int, size: int, stride: int, direction: Direction, layout: Layout
) -> None:
    problem = resnext(width, size, stride, direction, layout)
    solver = WEIGHTS if direction is Direction.BACKWARD_WEIGHTS else FORWARD
    assert solver.applicability(problem, H200)
    defaults = solver.default_configs(problem, H200)
    assert 4 <= len(defaults) <= 8
    estimates = [solver.estimate_ms(problem, H200, config) for config in defaults]
    assert estimates[0] == min(estimates)
    for config in defaults:
        step = solver.solution(problem, H200, config).kernels[0]
        assert step.shared_bytes <= H200.shared_bytes
        assert math.prod(step.block) <= 1024


def test_tiles_cover_all_outputs() -> None:
    problem = grouped(8, 4, 4, size=(29, 45), stride=2, direction=Direction.BACKWARD_DATA)
    for config in FORWARD.default_configs(problem, H200):
        tiling = GroupedTiling.of(problem, config)
        units, rows, columns, images = tiling.tiles
        assert units * tiling.units * unit_channels(problem)[0] >= problem.k
        assert rows * tiling.rows * tiling.row_groups * tiling.axes[0].phases >= 29
        assert columns * tiling.columns * tiling.axes[1].phases >= 45
        assert images * tiling.images >= problem.n


@pytest.mark.parametrize(("c", "k", "items"), [(4, 4, 1), (16, 16, 1), (32, 32, 4), (8, 32, 4), (24, 24, 7)])
def test_items_are_blocks_with_a_group_in_common(c: int, k: int, items: int) -> None:
    problem = grouped(8, c, k, direction=Direction.BACKWARD_WEIGHTS)
    config = next(config for config in WEIGHTS.default_configs(problem, H200) if config["shares"] == 1)
    tiling = GroupedWeightsTiling.of(problem, config)
    assert tiling.items == items
    blocks = {
        (g * c + i) // 16 * 1000 + (g * k + j) // 16
        for g in range(tiling.unit_c // c)
        for i in range(c)
        for j in range(k)
    }
    assert len(blocks) == items


@pytest.mark.parametrize("taps", [(1, 1), (3, 3), (1, 5)])
def test_groups_of_64_channels_are_served(taps: tuple[int, int]) -> None:
    """Their 16 items of warps leave no registers for more than a row of the filter each."""
    problem = grouped(2, 64, 64, taps=taps, padding=2, direction=Direction.BACKWARD_WEIGHTS)
    assert WEIGHTS.applicability(problem, H200)
    assert FORWARD.applicability(replace(problem, direction=Direction.BACKWARD_DATA), H200)


@pytest.mark.parametrize(("width", "shares"), [(4, {1}), (16, {1}), (32, {1, 2, 4})])
def test_blocks_share_the_items_of_wide_groups(width: int, shares: set[int]) -> None:
    problem = resnext(width, 14, 1, Direction.BACKWARD_WEIGHTS, Layout.NHWC)
    configs = list(WEIGHTS.configs(problem, H200))
    assert {config["shares"] for config in configs} == shares
    assert {config["shares"] for config in WEIGHTS.default_configs(problem, H200)} == shares
    for config in configs[:: max(1, len(configs) // 50)]:
        tiling = GroupedWeightsTiling.of(problem, config)
        x, y, z = WEIGHTS.solution(problem, H200, config).kernels[0].grid
        assert x * z == tiling.channel_tiles * tiling.tap_blocks
        assert y == config["splits"]
        assert tiling.channel_tiles * config["units"] * tiling.unit_c * tiling.unit_k >= problem.c * width


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
def test_blocks_of_several_stages_share_the_tiles(direction: Direction) -> None:
    problem = resnext(8, 28, 1, direction, Layout.NHWC)
    staged = [config for config in FORWARD.default_configs(problem, H200) if config["stages"] > 1]
    assert staged
    for config in staged:
        tiling = GroupedTiling.of(problem, config)
        channels, tiles, one = FORWARD.solution(problem, H200, config).kernels[0].grid
        assert (channels, one) == (tiling.tiles[0], 1)
        assert tiles < tiling.spatial_tiles
        assert -(-tiling.spatial_tiles // tiles) >= config["stages"]
    nchw = resnext(8, 28, 1, direction, Layout.NCHW)
    assert {config["stages"] for config in FORWARD.configs(nchw, H200)} == {1}


def test_partials_are_planned() -> None:
    problem = resnext(4, 56, 1, Direction.BACKWARD_WEIGHTS, Layout.NHWC)
    for config in WEIGHTS.default_configs(problem, H200):
        solution = WEIGHTS.solution(problem, H200, config)
        expected = 4 * config["splits"] * problem.w.size if config["splits"] > 1 else 0
        assert solution.workspace.bytes == expected
        assert len(solution.steps) == (2 if expected else 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"groups": 1, "c": 32, "k": 32}, "several groups"),
        ({"groups": 16, "c": 1, "k": 1}, "2 to 64 channels"),
        ({"groups": 2, "c": 128, "k": 128}, "2 to 64 channels"),
        ({"groups": 3, "c": 4, "k": 4}, "moves 8 channels at once"),
        ({"groups": 4, "c": 8, "k": 8, "taps": (40, 1), "size": (60, 9)}, "filters up to"),
        ({"groups": 4, "c": 8, "k": 8, "stride": 16}, "strides up to"),
        ({"groups": 4, "c": 8, "k": 8, "padding": ((2**20, 0), (0, 0))}, "reaches at most"),
        ({"groups": 4, "c": 8, "k": 8, "dtype": "float32"}, "float32"),
        ({"groups": 4, "c": 64, "k": 64, "taps": (31, 31), "size": (40, 40)}, "too large for a block"),
    ],
)
@pytest.mark.parametrize("direction", list(Direction))
def test_refusals_say_why(fields: dict[str, Any], reason: str, direction: Direction) -> None:
    solver = WEIGHTS if direction is Direction.BACKWARD_WEIGHTS else FORWARD
    answer = solver.applicability(grouped(**fields, direction=direction), H200)
    assert reason in answer.reason


def test_large_images_are_served() -> None:
    solver, device = Registry.default()["ConvGrouped"], Device.virtual("90a")
    problem = ProblemDescription.convolution(
        x=(1, 64, 1024, 1024), w=(64, 4, 3, 3), padding=1, groups=16, dtype="float16", layout="NHWC"
    )
    assert solver.applicability(problem, device)
    assert solver.default_configs(problem, device)


@pytest.mark.parametrize("direction", list(Direction))
def test_kernels_are_told_the_sizes_of_what_they_read_and_write(direction: Direction) -> None:
    problem = grouped(4, 8, 16, n=3, size=(15, 13), stride=2, direction=direction)
    solver = WEIGHTS if direction is Direction.BACKWARD_WEIGHTS else FORWARD
    config = solver.default_configs(problem, H200)[0]
    shape = solver.solution(problem, H200, config).kernels[0].args[-1]
    x, y = (32, 15, 13), (64, 8, 7)
    read, written = (y, x) if direction is Direction.BACKWARD_DATA else (x, y)
    assert isinstance(shape, Struct)
    assert shape.type == SHAPE
    assert shape.values[:-1] == (3, *read, *written)
