"""The arithmetic of windows and s2d blocks of few channels, and what their solvers refuse and estimate."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solvers.few_channels.s2d_blocks import S2dBlocks
from miofind.solvers.few_channels.window_rows import WindowTile, refuse_windows

SOLVERS = {
    "ConvFirstLayer": Direction.FORWARD,
    "ConvFirstLayerWgmma": Direction.FORWARD,
    "ConvFirstLayerData": Direction.BACKWARD_DATA,
    "ConvFirstLayerDataRows": Direction.BACKWARD_DATA,
    "ConvFirstLayerDataRowsTf32": Direction.BACKWARD_DATA,
    "ConvFirstLayerDataWgmma": Direction.BACKWARD_DATA,
    "ConvFirstLayerWeights": Direction.BACKWARD_WEIGHTS,
    "ConvFirstLayerWgmmaWeights": Direction.BACKWARD_WEIGHTS,
}
DEVICE = Device.virtual("90a")


def layer(**fields: Any) -> ProblemDescription:
    base = {"x": (4, 3, 64, 64), "w": (32, 3, 3, 3), "padding": 1, "dtype": "float16", "layout": "NHWC"}
    return ProblemDescription.convolution(**(base | fields))


def served_layer(solver_id: str, **fields: Any) -> ProblemDescription:
    """Of a type and a direction that a solver serves."""
    dtype = "float32" if solver_id.endswith("Tf32") else "float16"
    return layer(**({"dtype": dtype, "direction": SOLVERS[solver_id]} | fields))


@st.composite
def layers(draw: st.DrawFn, direction: Direction = Direction.FORWARD) -> ProblemDescription:
    sizes = [draw(st.integers(1, 40)) for _ in range(2)]
    taps = [draw(st.integers(1, 9)) for _ in range(2)]
    pads = [(draw(st.integers(0, 9)), draw(st.integers(0, 9))) for _ in range(2)]
    assume(all(size + sum(pad) >= tap for size, pad, tap in zip(sizes, pads, taps, strict=True)))
    return ProblemDescription.convolution(
        x=(1, 3, *sizes),
        w=(8, 3, *taps),
        padding=pads,
        stride=[draw(st.integers(1, 5)) for _ in range(2)],
        dtype=DataType.FLOAT16,
        layout=draw(st.sampled_from([Layout.NHWC, Layout.NCHW])),
        direction=direction,
    )


@given(problem=layers(), tile_h=st.sampled_from([1, 2, 4]), tile_w=st.sampled_from([32, 64]))
def test_windows_hold_what_their_outputs_meet(problem: ProblemDescription, tile_h: int, tile_w: int) -> None:
    """Along a row: windows start at even pixels, and the taps of all their outputs lie in their steps."""
    tile = WindowTile.of(problem, tile_h, tile_w)
    stride, pad, taps = problem.conv.stride[1], problem.conv.pad_before[1], problem.filter[1]
    first_pixel = tile.offset % 2
    row_windows = tile.windows // tile.tile_h
    for column in range(0, problem.out_spatial[1], tile.tile_w):
        left = column * stride - pad - tile.offset  # column of x that is staged at pixel first_pixel
        assert left % tile.vector == 0
        for window, output in itertools.product(range(row_windows), range(tile.outputs)):
            start = tile.offset + first_pixel + window * tile.outputs * stride
            assert start % 2 == 0
            out = column + window * tile.outputs + output
            met = [out * stride - pad + tap for tap in range(taps)]
            pixels = [at - left + first_pixel for at in met]
            assert pixels[0] - start == output * stride
            assert pixels[-1] < start + 4 * tile.row_steps
        assert first_pixel + tile.in_columns >= start + 4 * tile.row_steps
    assert 2 * tile.row_words >= first_pixel + tile.in_columns


@given(problem=layers(), tile_h=st.sampled_from([1, 2, 4, 8]), tile_w=st.sampled_from([32, 64, 128]))
def test_tiles_cover_the_outputs(problem: ProblemDescription, tile_h: int, tile_w: int) -> None:
    tile = WindowTile.of(problem, tile_h, tile_w)
    out_h, out_w = problem.out_spatial
    assert tile.tile_h * (tile.row_tiles - 1) < out_h <= tile.tile_h * tile.row_tiles
    assert tile.tile_w * (tile.column_tiles - 1) < out_w <= tile.tile_w * tile.column_tiles
    assert tile.tile_w == out_w or tile.tile_w % 8 == 0
    assert tile.windows * tile.outputs >= tile.tile_h * tile.tile_w


@given(problem=layers(), tile_h=st.sampled_from([1, 2, 4]), tile_w=st.sampled_from([32, 64]))
def test_vectors_are_aligned_neighbours_channels_first(problem: ProblemDescription, tile_h: int, tile_w: int) -> None:
    """Every vector of a tile's windows lies within a channel of y, all inside or all outside."""
    tile = WindowTile.of(problem, tile_h, tile_w)
    vector, (out_h, out_w) = tile.channels_first_vector(problem), problem.out_spatial
    row_windows = tile.windows // tile.tile_h
    for row, column in itertools.product(range(0, out_h, tile.tile_h), range(0, out_w, tile.tile_w)):
        for first in range(0, tile.windows * tile.outputs, vector):
            places = []
            for pixel in range(first, first + vector):
                window, output = divmod(pixel, tile.outputs)
                h, v = row + window // row_windows, column + window % row_windows * tile.outputs + output
                places.append(h * out_w + v if window < tile.windows and h < out_h and v < out_w else None)
            if places[0] is None:
                assert set(places) == {None}
            else:
                assert places[0] % vector == 0
                assert places == list(range(places[0], places[0] + vector))


@given(problem=layers(Direction.BACKWARD_DATA), steps=st.integers(1, 3))
def test_blocks_meet_every_output_of_their_pixels_once(problem: ProblemDescription, steps: int) -> None:
    for axis in range(2):
        stride, pad, taps = problem.conv.stride[axis], problem.conv.pad_before[axis], problem.filter[axis]
        s2d_blocks = S2dBlocks.of(problem, axis, steps * stride)
        assert 0 <= s2d_blocks.origin < s2d_blocks.size
        assert s2d_blocks.count * s2d_blocks.size >= problem.spatial[axis] + s2d_blocks.origin
        for pixel in range(problem.spatial[axis]):
            block, within = divmod(pixel + s2d_blocks.origin, s2d_blocks.size)
            met = {
                (block * steps + s2d_blocks.first + i, tap)
                for i in range(s2d_blocks.taps)
                if 0 <= (tap := s2d_blocks.last_tap + within - i * stride) < taps
            }
            assert met == {(i, r) for i in range(-20, 80) for r in range(taps) if i * stride - pad + r == pixel}


@pytest.mark.parametrize("solver_id", SOLVERS)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"x": (4, 5, 64, 64), "w": (32, 5, 3, 3)}, "up to 4 channels"),
        ({"x": (4, 4, 64, 64), "w": (32, 2, 3, 3), "groups": 2}, "one group"),
        ({"dilation": 2}, "dilation 1"),
        ({"stride": (1, 65)}, "strides up to 64"),
        ({"stride": 2**20}, "strides up to 64"),
        ({"layout": {"x": "NHWC", "w": "NCHW", "y": "NHWC"}}, "one layout"),
        ({"dtype": {"x": "float16", "w": "float16", "y": "bfloat16"}}, "one dtype"),
        ({"x": (1, 1, 2**16, 2**15), "w": (1, 1, 3, 3)}, "32 bits"),
    ],
)
def test_refusals(solver_id: str, fields: dict[str, Any], reason: str) -> None:
    problem = served_layer(solver_id, **fields)
    answer = Registry.default().named(solver_id).applicability(problem, DEVICE)
    is_of_another_type = "dtype" in fields and solver_id.endswith("Tf32")
    assert ("served are float32" if is_of_another_type else reason) in answer.reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stride": (1, 3)}, "multiples of 4"),
        ({"stride": (1, 6)}, "multiples of 4"),
        ({"w": (32, 3, 13, 17), "padding": 8}, "up to 64 products"),
        ({"x": (1, 3, 2000, 300), "w": (32, 3, 3, 7), "dilation": (600, 1)}, "too large"),
    ],
)
def test_warpgroup_products_refuse_what_they_cannot_read_in_place(fields: dict[str, Any], reason: str) -> None:
    assert reason in Registry.default()["ConvFirstLayerWgmma"].applicability(layer(**fields), DEVICE).reason


def test_warpgroup_products_serve_rows_apart() -> None:
    problem = layer(w=(32, 3, 3, 3), padding=(2, 1), dilation=(2, 1))
    assert Registry.default()["ConvFirstLayerWgmma"].applicability(problem, DEVICE)


@pytest.mark.parametrize("fields", [{}, {"stride": 2}, {"stride": 4}, {"padding": 3, "w": (320, 3, 7, 7)}])
@pytest.mark.parametrize("layout", [Layout.NHWC, Layout.NCHW])
def test_configurations_of_warpgroup_products_differ(fields: dict[str, Any], layout: Layout) -> None:
    """No two say the same, so that none is measured twice."""
    solver, problem = Registry.default()["ConvFirstLayerWgmma"], layer(layout=layout, **fields)
    made = [solver.solution(problem, DEVICE, config) for config in solver.configs(problem, DEVICE)]
    assert len({repr(solution) for solution in made}) == len(made)


def test_defaults_of_warpgroup_products_differ_in_kind_and_time_to_store() -> None:
    problem = layer(x=(32, 3, 224, 224), w=(128, 3, 7, 7), padding=3, stride=2)
    configs = Registry.default()["ConvFirstLayerWgmma"].default_configs(problem, DEVICE)
    assert [config["late"] for config in configs] == [1, 0] * 4
    assert len({(config["rows"], config["blocks"]) for config in configs}) == 4


def test_nothing_is_stored_late_where_a_strip_is_one_step() -> None:
    problem = layer(x=(1, 3, 10, 64), w=(64, 3, 3, 3), padding=1)
    configs = list(Registry.default()["ConvFirstLayerWgmma"].configs(problem, DEVICE))
    assert {config["strip"] for config in configs if config["rows"] == 4 and config["late"]} == {7, 10}
    assert not any(config["late"] for config in configs if config["rows"] == config["strip"])


@pytest.mark.parametrize("solver_id", SOLVERS)
def test_other_directions_are_refused(solver_id: str) -> None:
    for other in set(Direction) - {SOLVERS[solver_id]}:
        assert not Registry.default().named(solver_id).applicability(served_layer(solver_id, direction=other), DEVICE)


def test_filters_beyond_a_block_are_refused() -> None:
    forward, data = layer(w=(32, 3, 64, 64), padding=32), layer(w=(4096, 3, 16, 16), stride=16)
    assert "too large" in Registry.default()["ConvFirstLayer"].applicability(forward, DEVICE).reason
    backward = replace(data, direction=Direction.BACKWARD_DATA)
    assert "too large" in Registry.default()["ConvFirstLayerData"].applicability(backward, DEVICE).reason
    for solver_id in ("ConvFirstLayerDataRows", "ConvFirstLayerDataRowsTf32", "ConvFirstLayerDataWgmma"):
        problem = served_layer(solver_id, w=(4096, 3, 16, 16), stride=16)
        assert "too large" in Registry.default().named(solver_id).applicability(problem, DEVICE).reason


@pytest.mark.parametrize("solver_id", SOLVERS)
@pytest.mark.parametrize("layout", [Layout.NHWC, Layout.NCHW])
def test_larger_batches_take_longer(solver_id: str, layout: Layout) -> None:
    solver = Registry.default().named(solver_id)
    small, large = (served_layer(solver_id, x=(n, 3, 224, 224), layout=layout) for n in (8, 64))
    for config in solver.default_configs(small, DEVICE):
        assert solver.estimate_ms(small, DEVICE, config) < solver.estimate_ms(large, DEVICE, config)


@pytest.mark.parametrize("solver_id", SOLVERS)
def test_common_first_layers_are_served(solver_id: str) -> None:
    solver = Registry.default().named(solver_id)
    assert not refuse_windows(served_layer(solver_id)).refused
    large = () if solver_id == "ConvFirstLayerData" else ({"w": (64, 3, 7, 7), "padding": 3, "stride": 2},)
    for fields in ({"stride": 2}, {"w": (96, 3, 4, 4), "padding": 0, "stride": 4}, *large):
        assert solver.applicability(served_layer(solver_id, **fields), DEVICE)


@pytest.mark.parametrize(
    "fields",
    [
        {"x": (8, 3, 64, 64), "w": (80, 3, 15, 15), "padding": 7},
        {"x": (2, 1, 157, 681), "w": (32, 1, 5, 20), "padding": 0},
        {"x": (2, 3, 224, 224), "w": (64, 3, 11, 11), "padding": 2},
        {"x": (32, 2, 3, 3), "w": (1, 2, 3, 3), "padding": 0},
    ],
)
def test_weights_of_long_filters_and_single_outputs_are_served(fields: dict[str, Any]) -> None:
    problem = layer(direction=Direction.BACKWARD_WEIGHTS, **fields)
    solvers = ["ConvFirstLayerWeights"]
    if problem.filter not in ((15, 15), (11, 11)):  # whose sums fill a multiprocessor's registers
        solvers.append("ConvFirstLayerWgmmaWeights")
    for solver in map(Registry.default().named, solvers):
        assert solver.applicability(problem, DEVICE)
        assert solver.default_configs(problem, DEVICE)


def test_no_warp_is_without_rows_of_a_filter() -> None:
    solver = Registry.default()["ConvFirstLayerWeights"]
    problem = layer(direction=Direction.BACKWARD_WEIGHTS, w=(64, 3, 7, 7), padding=3, stride=2)
    assert {config["warps_y"] for config in solver.configs(problem, DEVICE)} == {1, 2, 3, 4, 7}


def test_warpgroups_share_pairs_of_taps_evenly() -> None:
    solver = Registry.default()["ConvFirstLayerWgmmaWeights"]
    for taps, shares in ((7, {1, 2, 4}), (3, {1, 2}), (5, {1, 3}), (2, {1})):
        problem = layer(direction=Direction.BACKWARD_WEIGHTS, w=(64, 3, 3, taps), stride=2)
        assert {config["groups_s"] for config in solver.configs(problem, DEVICE)} == shares


def test_defaults_differ_in_tiles() -> None:
    problem = layer(x=(32, 3, 224, 224), w=(64, 3, 7, 7), padding=3, stride=2)
    configs = Registry.default()["ConvFirstLayer"].default_configs(problem, DEVICE)
    tiles = [(config["tile_h"], config["tile_w"]) for config in configs]
    assert len(tiles) == 8
    assert all(tiles[:6].count(tile) <= 2 for tile in tiles)
    assert [config["vector"] for config in configs] == [2] * 6 + [4] * 2
    assert tiles[6:] == tiles[:2]


@pytest.mark.parametrize("math", ["ieee", "tf32"])
def test_infinities_become_nan_only_where_float32_is_split(math: str) -> None:
    solver_id = "ConvFirstLayerDataRowsTf32"
    solver, problem = Registry.default().named(solver_id), served_layer(solver_id, math=math)
    for config in solver.default_configs(problem, DEVICE):
        assert solver.spreads_nonfinite(problem, config) == (math == "ieee")


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("layout", [Layout.NHWC, Layout.NCHW])
def test_defaults_in_float32_share_no_arrangement_of_warps(stride: int, layout: Layout) -> None:
    solver_id = "ConvFirstLayerDataRowsTf32"
    problem = served_layer(solver_id, x=(32, 3, 224, 224), w=(64, 3, 4, 4), stride=stride, layout=layout)
    configs = Registry.default().named(solver_id).default_configs(problem, DEVICE)
    names = ("warps_m", "warps_n", "warps_k", "filters")
    assert len({tuple(config[name] for name in names) for config in configs}) == len(configs) == 8
