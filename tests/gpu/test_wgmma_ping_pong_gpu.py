"""ConvImplicitGemmPingPong on a GPU: the host's reference bit for bit, within guard bands, over its whole space."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.gates import check_both_gates
from helpers.values.exact_results import check_exact

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import Config

cupy = pytest.importorskip("cupy")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

SOLVER = Registry.default().named("ConvImplicitGemmPingPong")
FORWARD, DATA = Direction.FORWARD, Direction.BACKWARD_DATA
SHAPES: dict[str, dict[str, Any]] = {
    "pointwise": {"x": (60, 64, 14, 28), "w": (128, 64, 1, 1)},
    "pointwise_padded": {"x": (3, 32, 9, 11), "w": (40, 32, 1, 1), "padding": (2, 1)},
    "three_blocks": {"x": (3, 192, 13, 19), "w": (192, 192, 3, 3), "padding": 1},
    "many_chunks": {"x": (2, 264, 9, 11), "w": (72, 264, 3, 3), "padding": 1},
    "many_filters": {"x": (2, 40, 9, 30), "w": (328, 40, 3, 3), "padding": ((0, 2), (1, 3))},
    "few_channels": {"x": (16, 16, 25, 40), "w": (16, 16, 5, 5), "padding": 2},
    "large_filter": {"x": (2, 24, 20, 33), "w": (32, 24, 11, 7), "padding": (5, 3)},
    "dilated": {"x": (2, 64, 21, 34), "w": (64, 64, 3, 3), "padding": (2, 3), "dilation": (2, 3)},
    "wide_padding": {"x": (2, 32, 7, 9), "w": (40, 32, 2, 2), "padding": 4},
    "small_images": {"x": (1200, 128, 3, 3), "w": (136, 128, 3, 3), "padding": 1},
    "one_pixel": {"x": (300, 64, 3, 3), "w": (64, 64, 3, 3), "padding": 0},
    "one_pixel_fewer": {"x": (1, 64, 13, 59), "w": (64, 64, 1, 1)},
    "one_pixel_more": {"x": (1, 64, 1, 769), "w": (64, 64, 1, 1)},
    "many_tiles": {"x": (32, 64, 56, 56), "w": (192, 64, 1, 1)},
    "tiny_images": {"x": (1100, 64, 4, 4), "w": (136, 64, 3, 3), "padding": 1},
    "many_images": {"x": (30, 64, 20, 28), "w": (192, 64, 1, 1)},
    "1d_images": {"x": (9, 40, 336), "w": (72, 40, 3), "padding": 1},
    "1d": {"x": (40, 32, 300), "w": (32, 32, 7), "padding": 9, "dilation": 3},
    "1d_deep": {"x": (4, 200, 130), "w": (136, 200, 3), "padding": 1},
}
STRIDED: dict[str, dict[str, Any]] = {
    "strided": {"x": (40, 64, 29, 31), "w": (192, 64, 3, 3), "padding": 1, "stride": 2},
    "strided_pointwise": {"x": (3, 128, 28, 27), "w": (72, 128, 1, 1), "stride": 2},
    "strided_dilated": {"x": (2, 40, 30, 41), "w": (64, 40, 3, 5), "padding": (2, 3), "stride": (1, 3), "dilation": 2},
    "strided_1d": {"x": (3, 40, 301), "w": (72, 40, 3), "padding": 1, "stride": 4},
}
PHASES: dict[str, dict[str, Any]] = {
    "phases": {"x": (20, 64, 28, 30), "w": (192, 64, 3, 3), "padding": 1, "stride": 2},
    "phases_apart": {"x": (9, 192, 32, 40), "w": (136, 192, 2, 2), "stride": 2},
    "phases_without_taps": {"x": (6, 72, 28, 34), "w": (128, 72, 1, 1), "stride": 2},
    "phases_of_rows": {"x": (3, 40, 30, 41), "w": (64, 40, 4, 3), "padding": ((1, 2), (0, 1)), "stride": (2, 1)},
    "phases_of_columns": {"x": (3, 24, 13, 52), "w": (264, 24, 2, 5), "padding": (1, 2), "stride": (1, 2)},
    "phases_dilated": {"x": (2, 40, 36, 48), "w": (72, 40, 3, 2), "padding": (3, 2), "dilation": (3, 2), "stride": 2},
    "phases_of_one_pixel": {"x": (700, 64, 2, 2), "w": (64, 64, 2, 2), "stride": 2},
    "phases_of_many_tiles": {"x": (32, 64, 112, 112), "w": (128, 64, 3, 3), "padding": 1, "stride": 2},
    "phases_1d": {"x": (9, 40, 302), "w": (72, 40, 5), "padding": 2, "stride": 2},
}
CHANNELS_FIRST: dict[str, dict[str, Any]] = {
    "first": {"x": (60, 64, 14, 28), "w": (128, 64, 1, 1)},
    "first_of_whole_units": {"x": (32, 64, 56, 56), "w": (192, 64, 1, 1)},
    "first_of_many_chunks": {"x": (2, 264, 10, 12), "w": (72, 264, 1, 1)},
    "first_of_many_filters": {"x": (2, 40, 12, 30), "w": (328, 40, 1, 1)},
    "first_of_few_channels": {"x": (16, 16, 24, 40), "w": (16, 16, 1, 1)},
    "first_of_small_images": {"x": (1200, 128, 2, 4), "w": (136, 128, 1, 1)},
    "first_of_a_large_image": {"x": (1, 64, 512, 509), "w": (96, 64, 1, 1)},
    "first_1d": {"x": (40, 32, 304), "w": (32, 32, 1)},
}
OUTPUT_FIRST: dict[str, dict[str, Any]] = {
    "output_first": {"x": (9, 64, 24, 40), "w": (192, 64, 3, 3), "padding": 1},
    "output_first_of_many_chunks": {"x": (2, 264, 16, 12), "w": (72, 264, 3, 3), "padding": 1},
    "output_first_dilated": {"x": (2, 64, 32, 34), "w": (328, 64, 3, 3), "padding": (2, 3), "dilation": (2, 3)},
    "output_first_of_small_images": {"x": (300, 128, 8, 8), "w": (136, 128, 3, 3), "padding": 1},
    "output_first_pointwise": {"x": (32, 64, 56, 56), "w": (128, 64, 1, 1)},
    "output_first_1d": {"x": (40, 32, 320), "w": (16, 32, 7), "padding": 3},
}
STRIDED_OUTPUT_FIRST: dict[str, dict[str, Any]] = {
    "output_first_strided": {"x": (20, 64, 32, 47), "w": (192, 64, 3, 3), "padding": 1, "stride": 2},
}
CASES = [
    *((shape, FORWARD) for shape in SHAPES | STRIDED | CHANNELS_FIRST | OUTPUT_FIRST | STRIDED_OUTPUT_FIRST),
    *((shape, DATA) for shape in SHAPES | PHASES | CHANNELS_FIRST | OUTPUT_FIRST),
]
FUSED = {
    "bias.silu": {},
    "scale.bias.gelu_tanh.residual": {},
    "float32.bias.hardswish": {"dtype": DataType.BFLOAT16},
    "residual.drelu": {"direction": DATA},
    "dsilu": {"direction": DATA, "dtype": DataType.BFLOAT16},
}


def problem_of(shape: str, **fields: Any) -> ProblemDescription:
    sizes = (SHAPES | STRIDED | PHASES | CHANNELS_FIRST | OUTPUT_FIRST | STRIDED_OUTPUT_FIRST)[shape]
    last, first = (Layout.of(len(sizes["x"]) - 2, channels_last=is_last) for is_last in (True, False))
    layouts = dict.fromkeys("xwy", first if shape in CHANNELS_FIRST else last)
    if shape in OUTPUT_FIRST | STRIDED_OUTPUT_FIRST:
        layouts[fields.get("direction", FORWARD).output] = first
    return ProblemDescription.convolution(**sizes, layout=layouts, **fields)


def configs_of(problem: ProblemDescription, device: Device, count: int, *, defaults: int) -> list[Config]:
    """Of the whole space, one whose filters stay among them, where a block has several tiles of the same."""
    stay = (config for config in SOLVER.configs(problem, device) if config["keeps_filters"])
    return list(dict.fromkeys([*spread(SOLVER, problem, device, count, defaults=defaults), *itertools.islice(stay, 1)]))


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
@pytest.mark.parametrize(("shape", "direction"), CASES)
def test_small_integers_are_exact(
    shape: str, direction: Direction, dtype: DataType, device: Device, compiler: Compiler
) -> None:
    problem = problem_of(shape, direction=direction, dtype=dtype)
    assert SOLVER.applicability(problem, device)
    for config in configs_of(problem, device, 3, defaults=3):
        check_exact(problem, SOLVER, config, device, compiler)


@pytest.mark.parametrize("epilogue", FUSED)
@pytest.mark.parametrize(
    "shape",
    [
        *("pointwise", "three_blocks", "few_channels", "small_images", "1d"),
        *("first", "first_of_few_channels", "first_1d"),
        *("output_first", "output_first_of_small_images", "output_first_pointwise", "output_first_1d"),
    ],
)
def test_fused_results_pass_both_gates(shape: str, epilogue: str, device: Device, compiler: Compiler) -> None:
    problem = problem_of(shape, epilogue=epilogue, **({"dtype": DataType.FLOAT16} | FUSED[epilogue]))
    assert SOLVER.applicability(problem, device)
    for config in configs_of(problem, device, 2, defaults=2):
        check_both_gates(problem, SOLVER, config, device, compiler)


@pytest.mark.parametrize("epilogue", ["residual.drelu", "dsilu", "residual", "residual.dgelu"])
@pytest.mark.parametrize("shape", ["phases", "phases_apart", "phases_without_taps", "phases_1d"])
def test_phases_are_finished_by_what_lies_a_stride_apart(
    shape: str, epilogue: str, device: Device, compiler: Compiler
) -> None:
    problem = problem_of(shape, epilogue=epilogue, dtype=DataType.FLOAT16, direction=DATA)
    assert SOLVER.applicability(problem, device)
    for config in configs_of(problem, device, 3, defaults=2):
        check_both_gates(problem, SOLVER, config, device, compiler)


@pytest.mark.parametrize("epilogue", ["channel_bias.residual.relu", "scale.bias.channel_bias.silu"])
@pytest.mark.parametrize(
    "shape",
    [
        *("tiny_images", "many_images", "1d_images", "first", "first_of_small_images"),
        *("output_first_of_small_images", "output_first_strided"),
    ],
)
def test_terms_of_images_pass_both_gates(shape: str, epilogue: str, device: Device, compiler: Compiler) -> None:
    """Images of multiples of 16 pixels, or counted in whole units, of which a tile has parts, or several."""
    problem = problem_of(shape, epilogue=epilogue, dtype=DataType.BFLOAT16)
    assert SOLVER.applicability(problem, device)
    for config in configs_of(problem, device, 3, defaults=3):
        check_both_gates(problem, SOLVER, config, device, compiler)


@pytest.mark.parametrize("keeps_filters", [0, 1])
@pytest.mark.parametrize("out_stages", [1, 2])
def test_a_residual_is_read_and_written_though_half_a_tiles_filters_are_beyond_the_last(
    out_stages: int, keeps_filters: int, device: Device, compiler: Compiler
) -> None:
    """192 filters by 128: copies of the second tile's second row lie wholly outside, and still complete."""
    problem = problem_of("many_tiles", epilogue="bias.residual.relu", dtype=DataType.FLOAT16)
    config = Config({"rows": 2, "tile_n": 128, "out_stages": out_stages, "keeps_filters": keeps_filters})
    check_both_gates(problem, SOLVER, config, device, compiler)
