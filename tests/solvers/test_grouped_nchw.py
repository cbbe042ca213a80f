"""How grouped convolutions of channels-first images are cut into rows, and which of them are served."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solvers.grouped.nchw_tiling import NchwRows, NchwTiling, NchwWeightsTiling, nchw_unit_channels, quiet_pitch

H200 = replace(Device.virtual("90a"), clock_hz=1.98e9, bandwidth_bytes_per_s=4.8e12)
FORWARD, WEIGHTS = Registry.default()["ConvGroupedPlanes"], Registry.default()["ConvGroupedPlanesWeights"]
RESNEXT = [(4, 56, 1), (8, 56, 2), (8, 28, 1), (16, 28, 2), (16, 14, 1), (32, 14, 2), (32, 7, 1)]


def grouped(groups: int, c: int, k: int, **fields: Any) -> ProblemDescription:
    """A problem of `groups` groups of c and k channels: 3x3 on (2, ., 14, 14) unless `fields` say otherwise."""
    size, taps = fields.pop("size", (14, 14)), fields.pop("taps", (3, 3))
    given = {"dtype": "float16", "layout": "NCHW", "padding": 1} | fields
    n = given.pop("n", 2)
    return ProblemDescription.convolution(x=(n, groups * c, *size), w=(groups * k, c, *taps), groups=groups, **given)


def solver_of(direction: Direction) -> Solver:
    return WEIGHTS if direction is Direction.BACKWARD_WEIGHTS else FORWARD


def resnext(width: int, size: int, stride: int, direction: Direction) -> ProblemDescription:
    """A 3x3 of ResNeXt-50 32x4d at batch 32."""
    return grouped(32, width, width, n=32, size=(size, size), stride=stride, direction=direction)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("width", "size", "stride"), RESNEXT)
def test_resnext_has_configurations_in_bounds(width: int, size: int, stride: int, direction: Direction) -> None:
    problem, solver = resnext(width, size, stride, direction), solver_of(direction)
    assert solver.applicability(problem, H200)
    defaults = solver.default_configs(problem, H200)
    assert len(defaults) == 8
    estimates = [solver.estimate_ms(problem, H200, config) for config in defaults]
    assert estimates == sorted(estimates)
    for config in defaults:
        step = solver.solution(problem, H200, config).kernels[0]
        assert step.shared_bytes <= H200.shared_bytes
        assert math.prod(step.block) <= 512


@pytest.mark.parametrize("width", [7, 13, 14, 20, 28, 55, 56])
@pytest.mark.parametrize(("taps", "pad"), [(1, 0), (3, 0), (3, 1), (3, 2), (5, 2)])
@pytest.mark.parametrize("stride", [1, 2])
def test_rows_of_x_hold_their_padding(width: int, taps: int, pad: int, stride: int) -> None:
    """Columns that outputs meet are in a row of the patch, or in the zeros that end it and the one before."""
    problem = grouped(
        4, 8, 8, size=(taps, width), taps=(1, taps), padding=(0, pad), stride=stride, direction="backward_weights"
    )
    if stride == 1 and pad < taps - 3:
        return
    tiling = NchwWeightsTiling.of(problem, WEIGHTS.default_configs(problem, H200)[0])
    columns = {v * stride + j - pad for v in range(problem.y.shape[3]) for j in range(taps)}
    assert max(columns) < tiling.x.pitch
    assert -min(columns) <= tiling.x.pitch - width
    assert tiling.x.pitch % 8 == tiling.y.pitch % 8 == 0
    assert tiling.y.pitch >= problem.y.shape[3]


@pytest.mark.parametrize("width", [7, 13, 16, 20, 55, 56])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("pad", [0, 1])
def test_tiles_that_are_read_meet_all_columns(width: int, direction: Direction, stride: int, pad: int) -> None:
    problem = grouped(4, 8, 8, size=(6, width), stride=stride, padding=pad, direction=direction)
    tiling = NchwTiling.of(problem, FORWARD.default_configs(problem, H200)[0])
    axis, outputs = tiling.axes[1], problem.output.shape[3]
    met = {v // axis.phases * axis.stride + axis.first + axis.reach for v in range(outputs)}
    assert min(max(met), tiling.source.width - 1) < 8 * tiling.in_tiles <= tiling.source.pitch
    assert 8 * tiling.width * axis.phases >= outputs


def test_tiles_cover_all_rows_and_images() -> None:
    problem = grouped(8, 4, 4, n=5, size=(29, 44), stride=2, direction=Direction.BACKWARD_DATA)
    for config in FORWARD.default_configs(problem, H200):
        tiling = NchwTiling.of(problem, config)
        assert tiling.row_tiles * tiling.rows * config["row_groups"] * tiling.axes[0].phases >= 29
        assert tiling.image_tiles * config["images"] >= problem.n
        assert tiling.channel_tiles * config["units"] * nchw_unit_channels(problem)[0] >= problem.k
        grid = FORWARD.solution(problem, H200, config).kernels[0].grid
        assert grid[1] * (config["turns"] or tiling.tile_count) >= tiling.tile_count


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
@pytest.mark.parametrize(("width", "size", "stride"), RESNEXT)
def test_blocks_are_resident_at_once_where_each_has_several_tiles(
    width: int, size: int, stride: int, direction: Direction
) -> None:
    problem = resnext(width, size, stride, direction)
    for config in FORWARD.configs(problem, H200):
        if config["turns"] == 0:
            step = FORWARD.solution(problem, H200, config).kernels[0]
            assert NchwTiling.of(problem, config).tile_count > 2 * step.grid[1]
            at_once = math.ceil(math.prod(step.grid) / H200.sm_count)
            assert at_once * step.shared_bytes <= H200.shared_bytes
            assert at_once * step.block[0] <= 2048


@pytest.mark.parametrize("lanes", [(0, 16, 32, 48), (0, 32, 64, 96), (0, 16, 224, 240), (0, 144, 288, 432)])
@pytest.mark.parametrize("size", [16, 128, 1000, 1792])
def test_channels_are_apart_from_neighbours(lanes: tuple[int, ...], size: int) -> None:
    pitch = quiet_pitch(size, lanes)
    assert size <= pitch < size + 16 + 128
    assert pitch % 16 == 0

    def most_met(pitch: int) -> int:
        banks = [(first + lane) % 128 // 16 for first in (0, pitch) for lane in lanes]
        return max(banks.count(bank) for bank in banks)

    assert most_met(pitch) == min(most_met(16 * i) for i in range(8))


@pytest.mark.parametrize(("width", "vector"), [(56, 8), (28, 4), (14, 2), (7, 1), (55, 1)])
def test_even_rows_are_copied_as_they_are(width: int, vector: int) -> None:
    rows = NchwRows(channels=8, images=2, rows=5, height=4, width=width, pitch=64, channel_bytes=2 * 5 * 128)
    assert rows.vector == vector
    assert rows.is_flat == (vector == 1)
    assert rows.laid_bytes == (rows.bytes if vector == 1 else 0)
    assert rows.arriving_bytes == (2 * 2 * 8 * 4 * width + 16 if vector == 1 else rows.bytes)


@pytest.mark.parametrize(
    ("c", "k", "channels", "filters"), [(4, 4, 1, 1), (16, 16, 2, 2), (32, 32, 2, 2), (8, 32, 1, 2)]
)
def test_items_share_a_pack(c: int, k: int, channels: int, filters: int) -> None:
    problem = grouped(8, c, k, direction=Direction.BACKWARD_WEIGHTS)
    config = next(c for c in WEIGHTS.configs(problem, H200) if c["shares"] == 1 and c["units"] == 1)
    tiling = NchwWeightsTiling.of(problem, config)
    assert (tiling.channel_blocks, tiling.item_blocks) == (channels, filters)
    assert tiling.items * channels * filters * 64 == tiling.x.channels * tiling.y.channels
    assert tiling.sums <= 80


def test_shares_split_the_channels_of_one_group() -> None:
    problem = resnext(32, 7, 1, Direction.BACKWARD_WEIGHTS)
    shared = [config for config in WEIGHTS.configs(problem, H200) if config["shares"] == 4]
    assert shared
    for config in shared:
        tiling = NchwWeightsTiling.of(problem, config)
        assert tiling.x.channels == 8
        assert tiling.channel_tiles == 4 * 32
    narrow = resnext(4, 56, 1, Direction.BACKWARD_WEIGHTS)
    assert {config["shares"] for config in WEIGHTS.configs(narrow, H200)} == {1}


def test_partials_are_planned() -> None:
    problem = resnext(8, 28, 1, Direction.BACKWARD_WEIGHTS)
    for config in WEIGHTS.default_configs(problem, H200):
        solution = WEIGHTS.solution(problem, H200, config)
        expected = 4 * config["splits"] * problem.w.size if config["splits"] > 1 else 0
        assert solution.workspace.bytes == expected
        assert len(solution.steps) == (2 if expected else 1)
        assert all(step.pdl for step in solution.kernels[1:])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"groups": 1, "c": 32, "k": 32}, "several groups"),
        ({"groups": 16, "c": 1, "k": 1}, "2 to 64 channels"),
        ({"groups": 4, "c": 8, "k": 8, "stride": 3}, "strides of 1 and 2"),
        ({"groups": 4, "c": 8, "k": 8, "taps": (1, 5), "padding": (0, 4), "stride": 2}, "shifts columns by"),
        ({"groups": 4, "c": 8, "k": 8, "dtype": "float32"}, "float32"),
        ({"groups": 4, "c": 8, "k": 8, "layout": Layout.NHWC}, "NHWC"),
        ({"groups": 4, "c": 16, "k": 16, "size": (201, 201)}, "too large"),
    ],
)
@pytest.mark.parametrize("direction", list(Direction))
def test_refusals_say_why(fields: dict[str, Any], reason: str, direction: Direction) -> None:
    answer = solver_of(direction).applicability(grouped(**fields, direction=direction), H200)
    assert not answer or direction is Direction.BACKWARD_DATA  # whose shifts are half as far
    assert reason in answer.reason or answer


def test_forward_keeps_filters_in_registers() -> None:
    assert "in registers" in FORWARD.applicability(grouped(2, 32, 32, taps=(5, 5), padding=2), H200).reason
    assert "fewest groups" in FORWARD.applicability(grouped(2, 64, 64), H200).reason
