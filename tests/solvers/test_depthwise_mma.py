"""How depthwise convolutions are cut for tensor cores, channels last, and which of them are served. Needs no GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solvers.common.packed_groups import GroupedAxis, odd_words
from miofind.solvers.depthwise.mma_tiling import (
    DepthwiseTiling,
    DepthwiseWeightsTiling,
    PairedPixels,
    pairs_of,
    unbalance,
    unit_axes,
)

H200 = replace(Device.virtual("90a"), clock_hz=1.98e9, bandwidth_bytes_per_s=4.8e12)
FORWARD, WEIGHTS = Registry.default()["ConvDepthwiseMma"], Registry.default()["ConvDepthwiseMmaWeights"]
LAYERS = [(96, 112, 3, 2), (32, 112, 3, 1), (96, 56, 7, 1), (144, 56, 5, 2), (240, 28, 5, 1), (384, 14, 7, 1)]
LAYERS += [(576, 14, 3, 2), (960, 7, 3, 1), (768, 7, 7, 1), (1152, 7, 5, 1)]


def depthwise(c: int = 32, **fields: Any) -> ProblemDescription:
    shape = {"x": (2, c, 14, 14), "w": (c, 1, 3, 3), "padding": 1, "dtype": "float16", "layout": "NHWC", "groups": c}
    return ProblemDescription.convolution(**{**shape, **fields})


def layer(c: int, size: int, taps: int, stride: int, direction: Direction) -> ProblemDescription:
    return depthwise(
        c, x=(32, c, size, size), w=(c, 1, taps, taps), padding=taps // 2, stride=stride, direction=direction
    )


def solver_of(direction: Direction) -> Solver:
    return WEIGHTS if direction is Direction.BACKWARD_WEIGHTS else FORWARD


def axis(outputs: int, stride: int, reach: int) -> GroupedAxis:
    return GroupedAxis(outputs=outputs, phases=1, stride=stride, first=0, reach=reach, taps=reach + 1)


def slot(column: int, step: int, run: int) -> int:
    """As PairedPixels of depthwise/depthwise_mma.cuh has it."""
    return column % (2 * step) * run + column // (2 * step)


paired = {
    "pairs": st.integers(1, 40),
    "step": st.sampled_from([1, 2, 4]),
    "reach": st.integers(0, 16),
    "rows": st.integers(1, 9),
    "images": st.sampled_from([1, 2, 4, 8]),
    "channels": st.sampled_from([16, 32, 48, 64, 128]),
}


@given(**paired)
def test_all_that_pairs_read_is_staged(
    pairs: int, step: int, reach: int, rows: int, images: int, channels: int
) -> None:
    """Each output of a pair meets pixels that are staged, in slots of their own, and no matrix leaves its row."""
    pixels = PairedPixels.of(axis(2 * pairs, step, reach), images=images, rows=rows, pairs=pairs, channels=channels)
    run = pairs + (pixels.matrices - 1) // (2 * step)
    met = {(2 * pair + half) * step + at for pair in range(pairs) for half in range(2) for at in range(reach + 1)}
    assert max(met) == pixels.columns - 1
    slots = [slot(column, step, run) for column in range(pixels.columns)]
    assert len(set(slots)) == len(slots)
    read = {slot(2 * step * pair + j, step, run) for pair in range(pairs) for j in range(pixels.matrices)}
    row_slots = 2 * step * run
    assert max(read | set(slots)) < row_slots
    assert pixels.shared_bytes >= images * rows * row_slots * odd_words(2 * channels)
    assert reach + step < pixels.matrices


@given(**paired)
def test_eight_pairs_meet_all_banks(pairs: int, step: int, reach: int, rows: int, images: int, channels: int) -> None:
    """Eight neighbouring pairs, also across images, lie in different 16-byte words modulo 128."""
    pixels = PairedPixels.of(axis(2 * pairs, step, reach), images=images, rows=rows, pairs=pairs, channels=channels)
    image_bytes = pixels.shared_bytes // images
    for first in range(0, images * pairs, 8):
        at = range(first, min(first + 8, images * pairs))
        words = [(i // pairs * image_bytes + i % pairs * odd_words(2 * channels)) // 16 for i in at]
        assert len({word % 8 for word in words}) == len(words)


@given(
    size=st.integers(1, 30),
    taps=st.integers(1, 7),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 2),
    pad=st.integers(0, 9),
    backward=st.booleans(),
)
def test_matrices_hold_all_that_a_pair_meets(
    size: int, taps: int, stride: int, dilation: int, pad: int, backward: bool
) -> None:
    """A tap joins units 2i and 2i + 1 with matrices `offset - first` and one step on."""
    if size + 2 * pad < (taps - 1) * dilation + 1:
        return
    problem = depthwise(
        x=(1, 32, size, size), w=(32, 1, taps, taps), padding=pad, stride=stride, dilation=dilation,
        direction=Direction.BACKWARD_DATA if backward else Direction.FORWARD,
    )  # fmt: skip
    _, width = unit_axes(problem)
    if width.stride == 3:
        return
    pixels = PairedPixels.of(width, images=1, rows=1, pairs=4, channels=16)
    for tap, phase in itertools.product(range(taps), range(width.phases)):
        at = phase + pad - tap * dilation if backward else tap * dilation - pad
        if backward and at % stride:
            continue
        matrix = (at // stride if backward else at) - width.first
        assert 0 <= matrix <= matrix + width.stride < pixels.matrices


@given(outputs=st.integers(1, 300), columns=st.sampled_from([8, 16, 32, 64]))
def test_pairs_cover_the_outputs_within_the_columns(outputs: int, columns: int) -> None:
    pairs = pairs_of(outputs, columns)
    assert 2 * pairs <= columns
    tiles = math.ceil(outputs / (2 * pairs))
    assert tiles <= math.ceil(outputs / columns)
    assert (tiles - 1) * 2 * pairs < outputs


def test_full_schedulers_are_balanced() -> None:
    assert [unbalance(warps) for warps in (1, 2, 4, 6, 8)] == [4, 2, 1, 8 / 6, 1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("c", "size", "taps", "stride"), LAYERS)
def test_layers_have_configurations_in_bounds(c: int, size: int, taps: int, stride: int, direction: Direction) -> None:
    problem, solver = layer(c, size, taps, stride, direction), solver_of(direction)
    assert solver.applicability(problem, H200)
    defaults = solver.default_configs(problem, H200)
    assert 4 <= len(defaults) <= 8
    estimates = [solver.estimate_ms(problem, H200, config) for config in defaults]
    assert estimates[0] == min(estimates)
    assert 20 <= sum(1 for _ in solver.configs(problem, H200)) <= 2000
    for config in defaults:
        step = solver.solution(problem, H200, config).kernels[0]
        assert step.shared_bytes <= H200.shared_bytes
        assert math.prod(step.block) <= 1024


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
def test_tiles_cover_all_outputs(direction: Direction) -> None:
    problem = depthwise(72, x=(5, 72, 29, 45), w=(72, 1, 3, 5), stride=2, direction=direction)
    height, width = unit_axes(problem)
    for config in list(FORWARD.configs(problem, H200))[::7]:
        tiling = DepthwiseTiling.of(problem, config)
        channels, rows, columns, images = tiling.tiles
        assert (channels - 1) * tiling.channels < 72 <= channels * tiling.channels
        assert rows * tiling.rows >= height.outputs
        assert columns * 2 * tiling.pairs >= width.outputs
        assert images * tiling.images >= 5


def test_every_tile_is_dealt_and_every_buffer_is_used() -> None:
    problem = layer(144, 28, 3, 1, Direction.BACKWARD_WEIGHTS)
    for config in list(WEIGHTS.configs(problem, H200))[::7]:
        tiling = DepthwiseWeightsTiling.of(problem, config)
        solution = WEIGHTS.solution(problem, H200, config)
        splits = solution.kernels[0].grid[1]
        assert splits <= tiling.tile_count
        assert config["stages"] <= math.ceil(tiling.tile_count / splits)
        if config["cluster"] > 1:
            assert splits == config["cluster"]
        has_partials = splits > 1 and config["cluster"] == 1
        assert solution.workspace.bytes == (-(-4 * splits * problem.w.size // 256) * 256 if has_partials else 0)
        assert [step.pdl for step in solution.kernels] == ([False, True] if has_partials else [False])


def test_clusters_are_for_devices_that_have_them() -> None:
    problem = layer(960, 7, 3, 1, Direction.BACKWARD_WEIGHTS)
    older = replace(Device.virtual("80"), clock_hz=1.4e9, bandwidth_bytes_per_s=1.5e12)
    assert any(config["cluster"] > 1 for config in WEIGHTS.configs(problem, H200))
    assert all(config["cluster"] == 1 for config in WEIGHTS.configs(problem, older))
    assert WEIGHTS.default_configs(problem, older)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"w": (64, 1, 3, 3)}, "one filter a channel"),
        ({"groups": 1, "w": (32, 32, 3, 3)}, "one filter a channel"),
        ({"c": 12}, "8 channels at once"),
        ({"w": (32, 1, 9, 9), "padding": 4}, "more than 64 taps"),
        ({"w": (32, 1, 1, 31), "padding": (0, 15)}, "reach 16 pixels"),
        ({"w": (32, 1, 3, 3), "dilation": 9, "padding": 9}, "reach 16 pixels"),
        ({"stride": 3}, "strides of 1, 2 and 4 columns"),
        ({"stride": (5, 1)}, "up to 4 rows"),
        ({"x": (1, 32, 9, 9), "padding": ((2**21, 0), (0, 0))}, "counts"),
        ({"dtype": "float32"}, "float32"),
    ],
)
@pytest.mark.parametrize("direction", list(Direction))
def test_refusals_say_why(fields: dict[str, Any], reason: str, direction: Direction) -> None:
    assert reason in solver_of(direction).applicability(depthwise(**fields, direction=direction), H200).reason


def test_more_images_than_a_grid_holds_are_refused() -> None:
    assert "for a grid" in FORWARD.applicability(depthwise(8, x=(70000, 8, 3, 3)), H200).reason
    assert WEIGHTS.applicability(depthwise(8, x=(70000, 8, 3, 3), direction="backward_weights"), H200)
