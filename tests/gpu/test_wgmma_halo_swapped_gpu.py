"""ConvImplicitGemmHaloSwapped on a GPU: the host's reference bit for bit, within guard bands, over its whole space."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.gates import check_both_gates
from helpers.values.exact_results import check_exact

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

cupy = pytest.importorskip("cupy")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

SOLVER = Registry.default().named("ConvImplicitGemmHaloSwapped")
PLANES = Registry.default().named("ConvImplicitGemmHaloSwappedPlanes")
SHAPES: dict[str, dict[str, Any]] = {
    "one_block": {"x": (5, 64, 14, 28), "w": (64, 64, 3, 3), "padding": 1},
    "two_blocks": {"x": (3, 128, 13, 19), "w": (128, 128, 3, 3), "padding": 1},
    "many_chunks": {"x": (2, 264, 9, 11), "w": (72, 264, 3, 3), "padding": 1},
    "many_blocks": {"x": (2, 40, 9, 30), "w": (328, 40, 3, 3), "padding": ((0, 2), (1, 3))},
    "few_channels": {"x": (4, 16, 25, 40), "w": (16, 16, 5, 5), "padding": 2},
    "large_filter": {"x": (2, 24, 20, 33), "w": (32, 24, 11, 7), "padding": (5, 3)},
    "dilated": {"x": (2, 64, 21, 34), "w": (64, 64, 3, 3), "padding": (2, 3), "dilation": (2, 3)},
    "wide_padding": {"x": (2, 32, 7, 9), "w": (40, 32, 2, 2), "padding": 4},
    "one_pixel": {"x": (3, 64, 3, 3), "w": (64, 64, 3, 3), "padding": 0},
    "1d": {"x": (3, 32, 300), "w": (32, 32, 7), "padding": 9, "dilation": 3},
    "1d_deep": {"x": (4, 200, 130), "w": (136, 200, 3), "padding": 1},
    "planes": {"x": (5, 64, 14, 56), "w": (64, 64, 3, 3), "padding": 1},
    "planes_of_many_chunks": {"x": (2, 264, 9, 16), "w": (72, 264, 3, 3), "padding": 1},
    "planes_of_many_blocks": {"x": (2, 40, 9, 80), "w": (328, 40, 3, 3), "padding": ((0, 2), (1, 1))},
    "planes_of_few_channels": {"x": (4, 16, 25, 40), "w": (16, 16, 5, 5), "padding": 2},
    "planes_of_a_large_filter": {"x": (2, 24, 20, 64), "w": (32, 24, 11, 7), "padding": (5, 3)},
    "planes_dilated": {"x": (2, 64, 21, 32), "w": (64, 64, 3, 3), "padding": (2, 3), "dilation": (2, 3)},
    "planes_of_wide_rows": {"x": (1, 64, 6, 248), "w": (64, 64, 3, 3), "padding": 1},
}
FUSED = {
    "bias.silu": {},
    "scale.bias.gelu_tanh.residual": {},
    "channel_bias.residual.relu": {"dtype": DataType.BFLOAT16},
    "float32.bias.hardswish": {"dtype": DataType.BFLOAT16},
    "residual.drelu": {"direction": Direction.BACKWARD_DATA},
    "dsilu": {"direction": Direction.BACKWARD_DATA, "dtype": DataType.BFLOAT16},
}


def problem_of(shape: str, **fields: Any) -> ProblemDescription:
    layouts = dict.fromkeys("xwy", Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=True))
    if "planes" in shape:
        layouts[fields.get("direction", Direction.FORWARD).output] = Layout.NCHW
    return ProblemDescription.convolution(**SHAPES[shape], layout=layouts, **fields)


def solver_of(shape: str) -> Solver:
    return PLANES if "planes" in shape else SOLVER


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
@pytest.mark.parametrize("shape", SHAPES)
def test_small_integers_are_exact(
    shape: str, direction: Direction, dtype: DataType, device: Device, compiler: Compiler
) -> None:
    solver, problem = solver_of(shape), problem_of(shape, direction=direction, dtype=dtype)
    assert solver.applicability(problem, device)
    for config in spread(solver, problem, device, 4, defaults=3):
        check_exact(problem, solver, config, device, compiler)


@pytest.mark.parametrize("epilogue", FUSED)
@pytest.mark.parametrize(
    "shape", ["one_block", "two_blocks", "few_channels", "1d", "planes", "planes_of_many_blocks", "planes_dilated"]
)
def test_fused_results_pass_both_gates(shape: str, epilogue: str, device: Device, compiler: Compiler) -> None:
    solver, problem = (
        solver_of(shape),
        problem_of(shape, epilogue=epilogue, **({"dtype": DataType.FLOAT16} | FUSED[epilogue])),
    )
    assert solver.applicability(problem, device)
    for config in spread(solver, problem, device, 3, defaults=2):
        check_both_gates(problem, solver, config, device, compiler)


def test_results_repeat_where_a_row_ends_within_a_pair_of_pixels(device: Device, compiler: Compiler) -> None:
    """Rows of 27 pixels: one reciprocal served a row's last pixel and one of the halo, and was rounded by both."""
    problem = ProblemDescription.convolution(
        x=(32, 64, 80, 80), w=(64, 64, 3, 3), padding=1, dtype="float16", layout="NHWC", epilogue="bias.silu"
    )
    values = {"tile_h": 5, "tile_w": 28, "consumers": 2, "unit_blocks": 1, "slots_ahead": 1, "filter_stages": 8}
    for _ in range(3):
        check_both_gates(problem, SOLVER, Config(values), device, compiler)
