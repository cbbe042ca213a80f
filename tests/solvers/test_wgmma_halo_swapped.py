"""ConvImplicitGemmHaloSwapped without a GPU: its launches in NumPy, its tiles, what it needs, what it refuses.

With ConvImplicitGemmHaloSwappedPlanes, its variant whose results are channels first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.in_numpy.launches import check_launches
from helpers.in_numpy.wgmma_halo_swapped import Launch
from helpers.problems.drawn_configs import spread

from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.occupancy import RESERVED_SHARED_BYTES, SmLimits
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config
from miofind.solver.structs import Struct
from miofind.solvers.implicit_gemm.wgmma_halo_swapped_tiling import SwappedHaloProduct, SwappedHaloTiling

DEVICE, SOLVER = Device.virtual("90a"), Registry.default().named("ConvImplicitGemmHaloSwapped")
PLANES = Registry.default().named("ConvImplicitGemmHaloSwappedPlanes")
SHAPES: dict[str, dict[str, Any]] = {
    "one_block": {"x": (32, 64, 80, 80), "w": (64, 64, 3, 3), "padding": 1},
    "two_blocks": {"x": (32, 128, 40, 40), "w": (128, 128, 3, 3), "padding": 1},
    "odd": {"x": (3, 40, 13, 29), "w": (200, 40, 3, 4), "padding": ((1, 1), (2, 1)), "dilation": (2, 1)},
    "large_image": {"x": (1, 64, 512, 512), "w": (64, 64, 3, 3), "padding": 1},
    "1d": {"x": (16, 32, 65536), "w": (32, 32, 11), "padding": 25, "dilation": 5},
    "planes": {"x": (32, 128, 40, 40), "w": (128, 128, 3, 3), "padding": 1},
    "planes_of_large_images": {"x": (1, 64, 511, 512), "w": (64, 64, 3, 5), "padding": (1, 4), "dilation": 2},
}
EITHER = pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
EACH = pytest.mark.parametrize("shape", SHAPES)


def layouts(dims: int, direction: Direction, *, planes: bool) -> dict[str, Layout]:
    output = {direction.output: Layout.of(dims, channels_last=False)} if planes else {}
    return dict.fromkeys("xwy", Layout.of(dims, channels_last=True)) | output


def solver_of(problem: ProblemDescription) -> Solver:
    return SOLVER if problem.output.layout.channels_last else PLANES


def problem_of(shape: str, direction: Direction, **fields: Any) -> ProblemDescription:
    layout = layouts(len(SHAPES[shape]["x"]) - 2, direction, planes="planes" in shape)
    fields = SHAPES[shape] | {"layout": layout, "direction": direction, "dtype": "float16"} | fields
    return ProblemDescription.convolution(**fields)


def tilings(shape: str, direction: Direction, **fields: Any) -> list[SwappedHaloTiling]:
    problem = problem_of(shape, direction, **fields)
    configs = spread(solver_of(problem), problem, DEVICE, 12, defaults=4)
    return [SwappedHaloTiling.of(SwappedHaloProduct.of(problem), config, DEVICE) for config in configs]


COMPUTED: dict[str, dict[str, Any]] = {
    "one_block": {"x": (2, 64, 10, 12), "w": (64, 64, 3, 3), "padding": 1},
    "two_blocks": {"x": (1, 72, 9, 11), "w": (136, 72, 2, 3), "padding": ((1, 0), (2, 1)), "dilation": (2, 1)},
    "few_channels": {"x": (3, 8, 13, 17), "w": (16, 8, 5, 4), "padding": (2, 3)},
    "wide_padding": {"x": (2, 16, 5, 6), "w": (24, 16, 2, 2), "padding": 4},
    "channel_bias": {
        "x": (2, 32, 9, 14),
        "w": (40, 32, 3, 3),
        "padding": 1,
        "epilogue": "scale.bias.channel_bias.residual.leaky_relu",
    },
    "residual_after": {"x": (2, 64, 7, 9), "w": (72, 64, 3, 3), "padding": 1, "epilogue": "bias.silu.residual"},
    "1d": {"x": (5, 24, 40), "w": (32, 24, 7), "padding": 9, "dilation": 3},
    "1d_channel_bias": {"x": (3, 16, 30), "w": (24, 16, 3), "epilogue": "channel_bias.residual.relu"},
}
COMPUTED_PLANES: dict[str, dict[str, Any]] = {
    "planes": {"x": (2, 64, 10, 16), "w": (64, 64, 3, 3), "padding": 1},
    "planes_padded": {"x": (1, 72, 9, 22), "w": (136, 72, 2, 3), "padding": ((1, 0), (3, 1)), "dilation": (2, 1)},
    "planes_of_few_channels": {"x": (3, 8, 13, 24), "w": (16, 8, 5, 4), "padding": (2, (2, 1))},
    "planes_with_channel_bias": {
        "x": (2, 32, 9, 40),
        "w": (40, 32, 3, 3),
        "padding": 1,
        "epilogue": "scale.bias.channel_bias.residual.leaky_relu",
    },
    "planes_of_wide_rows": {
        "x": (1, 16, 5, 88),
        "w": (72, 16, 3, 9),
        "padding": (1, 4),
        "epilogue": "bias.silu.residual",
    },
}
BACKWARD = {
    "one_block": "residual.drelu",
    "two_blocks": "dsilu",
    "1d": "residual.dhardswish",
    "planes": "residual.drelu",
    "planes_of_few_channels": "residual.dsilu",
}
EVERY = COMPUTED | COMPUTED_PLANES
CASES = [
    *(pytest.param(name, "", Direction.FORWARD, id=name) for name in EVERY),
    *(pytest.param(name, "", Direction.BACKWARD_DATA, id=f"data of {name}") for name in BACKWARD),
    *(
        pytest.param(name, epilogue, Direction.BACKWARD_DATA, id=f"{epilogue} of {name}")
        for name, epilogue in BACKWARD.items()
    ),
]


@pytest.mark.parametrize(
    "device",
    [pytest.param(DEVICE, marks=pytest.mark.full_matrix), replace(DEVICE, sm_count=3)],
    ids=["132 SMs", "3 SMs"],
)
@pytest.mark.parametrize(("name", "epilogue", "direction"), CASES)
def test_launches_compute_the_convolution(name: str, epilogue: str, direction: Direction, device: Device) -> None:
    """By their maps, numbers and defines, as the kernel counts with them; on few multiprocessors rings wrap around."""
    fields = {"epilogue": epilogue} | EVERY[name] | ({"epilogue": epilogue} if epilogue else {})
    layout = layouts(len(fields["x"]) - 2, direction, planes=name in COMPUTED_PLANES)
    problem = ProblemDescription.convolution(**fields, layout=layout, direction=direction, dtype="float16")
    solver = solver_of(problem)
    configs = spread(solver, problem, device, 4, defaults=2)
    check_launches(solver, problem, device, configs, lambda step, memory: Launch(step, memory).run())


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
        assert max(pixels) < tiling.tile_n <= (192 if tiling.consumers == 2 else 112), tiling
        assert max(pixels) + max(taps) < tiling.rows * pitch, tiling
        met = 2 * product.channels * (max(taps) + tiling.tile_n)
        behind = tiling.shared_bytes - 1024 - tiling.slots * tiling.slot_bytes
        assert met - tiling.slot_bytes <= behind, tiling


@EITHER
@EACH
def test_rings_hold_what_is_needed_at_once_and_fit(shape: str, direction: Direction) -> None:
    for tiling in tilings(shape, direction):
        chunks = tiling.product.chunks  # one is multiplied by until the next one's second tap is begun
        assert tiling.slots >= (chunks if tiling.unit_blocks > 1 else min(chunks, 2)), tiling
        of_all = tiling.unit_blocks * chunks * tiling.product.taps
        assert (tiling.filter_stages == of_all) == tiling.keeps_filters, tiling
        assert tiling.parts == 1 if tiling.keeps_filters else tiling.filter_stages >= 3, tiling  # two are multiplied by
        of_block = tiling.shared_bytes + tiling.static_bytes + RESERVED_SHARED_BYTES
        assert of_block <= SmLimits.of(DEVICE).shared_bytes, tiling


@EITHER
@EACH
def test_numbers_of_a_launch_fit(shape: str, direction: Direction) -> None:
    problem = problem_of(shape, direction)
    solver = solver_of(problem)
    for config in spread(solver, problem, DEVICE, 12, defaults=4):
        (step,) = solver.solution(problem, DEVICE, config).steps
        (numbers,) = (each for each in step.args if isinstance(each, Struct))
        numbers.in_memory()  # raises what does not fit


def test_taps_of_a_block_are_counted_in_32_bits() -> None:
    """Minutes of work for one small device; a count beyond would be taken for a stage before the first."""
    problem = ProblemDescription.convolution(
        x=(1, 8, 16000, 16000), w=(8, 8, 64, 32), padding=(32, 16), layout=Layout.NHWC, dtype="float16"
    )
    values = {"tile_h": 1, "tile_w": 8, "consumers": 2, "unit_blocks": 1, "slots_ahead": 1, "filter_stages": 8}
    assert SOLVER.is_valid_config(problem, DEVICE, Config(values))
    assert not SOLVER.is_valid_config(problem, replace(DEVICE, sm_count=16), Config(values))


def test_two_tensors_that_are_read_with_results_have_a_place_each() -> None:
    data = Direction.BACKWARD_DATA
    (one, *_), (two, *_) = (
        tilings("one_block", data, epilogue="drelu"),
        tilings("one_block", data, epilogue="residual.drelu"),
    )
    assert (one.product.out_buffers, two.product.out_buffers) == (1, 2)


RUNS = {"tile_h": 4, "tile_w": 20, "consumers": 2, "unit_blocks": 1, "slots_ahead": 1, "filter_stages": 6}


@pytest.mark.parametrize(
    ("fields", "values", "reason"),
    [
        ({}, {"unit_blocks": 4}, "there are two blocks of filters"),
        ({}, {"filter_stages": 0}, "filters that stay would have to change"),
        ({}, {"tile_h": 10}, "more accumulators than registers, of two consumers"),
        ({}, {"tile_h": 6, "consumers": 3}, "more accumulators than registers, of three consumers"),
        ({}, {"tile_w": 28}, "a smaller limit cuts as many tiles"),
        ({"w": (128, 64, 2, 3)}, {"unit_blocks": 2, "filter_stages": 6}, ""),
        ({"w": (64, 64, 2, 3)}, {}, "six stages are all filters, which would stay"),
        ({"layout": Layout.NWC, "epilogue": "channel_bias"}, {"tile_h": 2}, "a tile of two images, with terms of one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_run_is_refused(fields: dict[str, Any], values: dict[str, int], reason: str) -> None:
    """Each for one reason: without it they run."""
    shape = {"x": (32, 64, 40, 40), "w": (128, 64, 2, 2), "layout": Layout.NHWC, "dtype": "float16"}
    if fields.get("layout") is Layout.NWC:
        shape |= {"x": (32, 64, 40), "w": (128, 64, 2)}
    problem = ProblemDescription.convolution(**shape | fields)
    valid = RUNS if "layout" not in fields else RUNS | {"tile_h": 1}
    if "w" not in fields:
        assert SOLVER.is_valid_config(problem, DEVICE, Config(valid))
    tiling = SwappedHaloTiling.of(SwappedHaloProduct.of(problem), Config(valid | values), DEVICE)
    of_block = tiling.shared_bytes + tiling.static_bytes + RESERVED_SHARED_BYTES
    assert of_block <= SmLimits.of(DEVICE).shared_bytes, "not for lack of shared memory"
    assert SOLVER.is_valid_config(problem, DEVICE, Config(valid | values)) == (not reason), reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"w": (64, 64, 1, 1)}, "one tap"),
        ({"x": (4, 64, 30), "w": (64, 64, 1), "layout": Layout.NWC}, "one tap"),
        ({"x": (4, 64, 300), "w": (64, 64, 33), "layout": Layout.NWC}, "over 32 columns"),
        ({"stride": 2}, "stride 1"),
    ],
    ids=["1x1", "one tap of a line", "a long line", "strided"],
)
def test_problems_that_it_does_not_serve(fields: dict[str, Any], reason: str) -> None:
    """One tap with padding is no pointwise convolution, and was once taken; its kernel takes taps two at a time."""
    shape = {"x": (4, 64, 30, 30), "w": (64, 64, 3, 3), "padding": 1, "layout": Layout.NHWC, "dtype": "float16"}
    answer = SOLVER.applicability(ProblemDescription.convolution(**shape | fields), DEVICE)
    assert answer.refused
    assert reason in answer.reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"x": (4, 64, 40, 44)}, "44 pixels of a row"),
        ({"stride": 2}, "stride 1"),
        ({"layout": Layout.NHWC}, "alone with channels first, not x NHWC, w NHWC, y NHWC"),
        ({"layout": {"x": Layout.NCHW, "w": Layout.NHWC, "y": Layout.NCHW}}, "not x NCHW, w NHWC, y NCHW"),
        ({"x": (4, 64, 40, 72), "w": (64, 64, 3, 33)}, "over 32 columns"),
        ({"x": (4, 64, 40), "w": (64, 64, 3), "layout": {"x": "NWC", "w": "NWC", "y": "NCW"}}, "NWC"),
        ({"dtype": {"x": "float16", "w": "float16", "y": "bfloat16"}}, "one dtype"),
        ({"groups": 2, "w": (64, 32, 3, 3)}, "one group"),
    ],
    ids=[
        "served",
        "width",
        "strided",
        "channels last",
        "channels first",
        "columns",
        "one dimension",
        "dtypes",
        "groups",
    ],
)
def test_problems_that_planes_do_not_serve(fields: dict[str, Any], reason: str) -> None:
    layout = layouts(2, Direction.FORWARD, planes=True)
    shape = {"x": (4, 64, 40, 40), "w": (64, 64, 3, 3), "padding": 1, "layout": layout, "dtype": "float16"}
    answer = PLANES.applicability(ProblemDescription.convolution(**shape | fields), DEVICE)
    assert reason in answer.reason if reason else answer


@pytest.mark.parametrize("side", [56, 72, 96, 128])
def test_no_two_configurations_of_planes_are_one_launch(side: int) -> None:
    """Limits of 20 and 28 cut 72 columns into tiles of 18 and 24, and 18 are rounded up to 24."""
    problem = problem_of("planes", Direction.FORWARD, x=(8, 64, side, side), w=(64, 64, 3, 3))
    launches = [repr(PLANES.solution(problem, DEVICE, config)) for config in PLANES.configs(problem, DEVICE)]
    assert len(launches) > 200
    assert len(set(launches)) == len(launches)
    assert all(PLANES.is_valid_config(problem, DEVICE, config) for config in PLANES.default_configs(problem, DEVICE))


@pytest.mark.parametrize("tile_w", [16, 20])
def test_planes_are_of_tiles_of_whole_copies(tile_w: int) -> None:
    problem = problem_of("planes", Direction.FORWARD, x=(2, 64, 40, 60), w=(64, 64, 3, 3), padding=((1, 1), (1, 5)))
    assert problem.output.shape[-1] == 64
    tiling = SwappedHaloTiling.of(SwappedHaloProduct.of(problem), Config(RUNS | {"tile_w": tile_w}), DEVICE)
    assert tiling.tile_w == 16
    assert tiling.row_pixels == 24
    uneven = problem_of("planes", Direction.FORWARD, x=(2, 64, 40, 68), w=(64, 64, 3, 3), padding=((1, 1), (1, 5)))
    assert uneven.output.shape[-1] == 72
    tiling = SwappedHaloTiling.of(SwappedHaloProduct.of(uneven), Config(RUNS | {"tile_w": tile_w}), DEVICE)
    assert tiling.tile_w == {16: 16, 20: 24}[tile_w]  # five columns of tiles, and three
    assert tiling.tiles[1] == {16: 5, 20: 3}[tile_w]
