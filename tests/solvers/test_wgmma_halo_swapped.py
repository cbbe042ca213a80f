"""Tiles of ConvImplicitGemmHaloSwapped: outputs have a place each, products stay in their block, rings hold enough."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.problems.drawn_configs import spread

from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.occupancy import RESERVED_SHARED_BYTES, SmLimits
from miofind.solver.registry import Registry
from miofind.solver.steps import Config
from miofind.solver.structs import Struct
from miofind.solvers.implicit_gemm.wgmma_halo_swapped_tiling import SwappedHaloProduct, SwappedHaloTiling

DEVICE, SOLVER = Device.virtual("90a"), Registry.default().named("ConvImplicitGemmHaloSwapped")
SHAPES: dict[str, dict[str, Any]] = {
    "one_block": {"x": (32, 64, 80, 80), "w": (64, 64, 3, 3), "padding": 1},
    "two_blocks": {"x": (32, 128, 40, 40), "w": (128, 128, 3, 3), "padding": 1},
    "odd": {"x": (3, 40, 13, 29), "w": (200, 40, 3, 4), "padding": ((1, 1), (2, 1)), "dilation": (2, 1)},
    "large_image": {"x": (1, 64, 512, 512), "w": (64, 64, 3, 3), "padding": 1},
    "1d": {"x": (16, 32, 65536), "w": (32, 32, 11), "padding": 25, "dilation": 5},
}
EITHER = pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
EACH = pytest.mark.parametrize("shape", SHAPES)


def tilings(shape: str, direction: Direction, **fields: Any) -> list[SwappedHaloTiling]:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=True)
    fields = SHAPES[shape] | {"layout": layout, "direction": direction, "dtype": "float16"} | fields
    problem = ProblemDescription.convolution(**fields)
    product = SwappedHaloProduct.of(problem)
    return [SwappedHaloTiling.of(product, config, DEVICE) for config in spread(SOLVER, problem, DEVICE, 12, defaults=4)]


@EITHER
@EACH
def test_tiles_cover_all_outputs(shape: str, direction: Direction) -> None:
    for tiling in tilings(shape, direction):
        height, width = tiling.product.height.outputs, tiling.product.width.outputs
        rows, columns = tiling.tiles
        assert (rows - 1) * tiling.tile_h < height <= rows * tiling.tile_h, tiling
        assert (columns - 1) * tiling.tile_w < width <= columns * tiling.tile_w, tiling
        assert tiling.units == tiling.product.images * rows * columns * tiling.parts, tiling
        assert tiling.parts * tiling.unit_blocks == tiling.product.filter_blocks, tiling
        assert (tiling.product.filter_blocks - 1) * 64 < tiling.product.results <= tiling.product.filter_blocks * 64


@EITHER
@EACH
def test_all_taps_of_a_tiles_pixels_are_in_its_slot(shape: str, direction: Direction) -> None:
    """What an instruction meets beyond a slot is shared memory still, and no result's."""
    for tiling in tilings(shape, direction):
        product, pitch = tiling.product, tiling.row_pixels
        taps_h, taps_w = range(product.height.taps), range(product.width.taps)
        taps = [r * product.height.dilation * pitch + s * product.width.dilation for r in taps_h for s in taps_w]
        pixels = [row * pitch + column for row in range(tiling.tile_h) for column in range(tiling.tile_w)]
        assert max(pixels) < tiling.tile_n <= 256, tiling
        assert max(pixels) + max(taps) < tiling.rows * pitch, tiling
        met = 2 * product.channels * (max(taps) + tiling.tile_n)
        behind = tiling.shared_bytes - 1024 - tiling.slots * tiling.slot_bytes
        assert met - tiling.slot_bytes <= behind, tiling


@EITHER
@EACH
def test_rings_hold_what_is_needed_at_once_and_fit(shape: str, direction: Direction) -> None:
    for tiling in tilings(shape, direction):
        assert tiling.slots > (tiling.product.chunks if tiling.unit_blocks > 1 else 1) - 1, tiling
        of_all = tiling.unit_blocks * tiling.product.chunks * tiling.product.taps
        assert tiling.filter_stages == of_all or tiling.filter_stages >= 4, tiling  # two are read, one is loaded
        assert tiling.filter_stages != of_all or tiling.parts == 1, tiling
        of_block = tiling.shared_bytes + tiling.static_bytes + RESERVED_SHARED_BYTES
        assert of_block <= SmLimits.of(DEVICE).shared_bytes, tiling


@EITHER
@EACH
def test_numbers_of_a_launch_fit(shape: str, direction: Direction) -> None:
    for tiling in tilings(shape, direction):
        problem = tiling.product.problem
        for config in SOLVER.default_configs(problem, DEVICE)[:1]:
            (step,) = SOLVER.solution(problem, DEVICE, config).steps
            (numbers,) = (each for each in step.args if isinstance(each, Struct))
            numbers.in_memory()  # raises what does not fit


def test_two_tensors_that_are_read_with_results_have_a_place_each() -> None:
    data = Direction.BACKWARD_DATA
    (one, *_), (two, *_) = (
        tilings("one_block", data, epilogue="drelu"),
        tilings("one_block", data, epilogue="residual.drelu"),
    )
    assert (one.product.tensors, two.product.tensors) == (1, 2)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"unit_blocks": 4}, "there are two blocks of filters"),
        ({"filter_stages": 0, "unit_blocks": 1}, "filters that stay would have to change"),
        ({"tile_h": 20, "tile_w": 40}, "more pixels than an instruction takes"),
        ({"tile_h": 8, "tile_w": 28, "consumers": 3}, "more accumulators than registers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_run_is_refused(values: dict[str, int], reason: str) -> None:
    problem = ProblemDescription.convolution(
        **SHAPES["two_blocks"], layout=Layout.NHWC, direction=Direction.FORWARD, dtype="float16"
    )
    runs = {"tile_h": 4, "tile_w": 40, "consumers": 2, "unit_blocks": 1, "slots_ahead": 1, "filter_stages": 6}
    assert SOLVER.is_valid_config(problem, DEVICE, Config(runs))
    assert not SOLVER.is_valid_config(problem, DEVICE, Config(runs | values)), reason
