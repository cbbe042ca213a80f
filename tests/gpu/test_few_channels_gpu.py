"""The solvers of few channels on a GPU: exact on small integers, within guard bands."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.problems.drawn_configs import spread
from helpers.values.exact_results import check_exact

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

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
SHAPES: dict[str, dict[str, Any]] = {
    "7x7_stride": {"x": (2, 3, 64, 64), "w": (64, 3, 7, 7), "padding": 3, "stride": 2},
    "3x3": {"x": (3, 3, 40, 48), "w": (32, 3, 3, 3), "padding": 1},
    "3x3_stride": {"x": (2, 3, 41, 36), "w": (24, 3, 3, 3), "padding": 1, "stride": 2},
    "patches": {"x": (2, 3, 64, 64), "w": (96, 3, 4, 4), "stride": 4},
    "many_filters": {"x": (1, 4, 32, 32), "w": (320, 4, 3, 3), "padding": 1},
    "one_channel": {"x": (5, 1, 28, 28), "w": (6, 1, 5, 5), "padding": 2},
    "odd_columns": {"x": (2, 3, 17, 41), "w": (37, 3, 3, 3), "padding": ((1, 0), (0, 2))},
    "odd_columns_of_words": {"x": (2, 3, 17, 53), "w": (40, 3, 3, 3), "padding": ((1, 0), (0, 2))},
    "many_odd_columns": {"x": (1, 2, 9, 521), "w": (24, 2, 3, 5), "padding": (1, 2)},
    "wide": {"x": (1, 2, 9, 600), "w": (16, 2, 3, 5), "padding": (1, 2), "stride": (2, 1)},
    "uneven": {"x": (2, 4, 23, 30), "w": (20, 4, 2, 9), "padding": ((4, 0), (9, 1)), "stride": (1, 3)},
    "padding_beyond_the_filter": {"x": (1, 3, 6, 7), "w": (8, 3, 2, 2), "padding": 5, "stride": 2},
    "many_images": {"x": (300, 1, 17, 20), "w": (8, 1, 3, 3), "padding": 1},
    "long_filters": {"x": (2, 3, 40, 64), "w": (64, 3, 11, 11), "padding": 5, "stride": 4},
    "many_columns": {"x": (1, 3, 11, 500), "w": (70, 3, 5, 5), "padding": 2, "stride": 2},
    "stride_beyond_the_filter": {"x": (2, 3, 30, 31), "w": (8, 3, 2, 1), "stride": (3, 4)},
}


# What a solver computes in: its types, or the arithmetic of float32.
HALF = ({"dtype": DataType.FLOAT16}, {"dtype": DataType.BFLOAT16})
SINGLE = ({"dtype": DataType.FLOAT32}, {"dtype": DataType.FLOAT32, "math": MathMode.TF32})
ARITHMETIC = [(solver, kind) for solver in SOLVERS for kind in (SINGLE if solver.endswith("Tf32") else HALF)]


@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
@pytest.mark.parametrize(
    ("solver_id", "kind"),
    ARITHMETIC,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
@pytest.mark.parametrize("shape", SHAPES)
def test_first_layers_are_exact(
    shape: str, kind: dict[str, Any], solver_id: str, layout: Layout, device: Device, compiler: Compiler
) -> None:
    direction, solver = SOLVERS[solver_id], Registry.default().named(solver_id)
    problem = ProblemDescription.convolution(**SHAPES[shape], **kind, layout=layout, direction=direction)
    answer = solver.applicability(problem, device)
    if solver_id == "ConvFirstLayerData" and "strides above 1" in answer.reason:
        pytest.skip(answer.reason)
    if solver_id in ("ConvFirstLayerData", "ConvFirstLayerWgmmaWeights") and "too large" in answer.reason:
        pytest.skip(answer.reason)
    if solver_id == "ConvFirstLayerDataWgmma" and "multiples of 8" in answer.reason:
        pytest.skip(answer.reason)
    if solver_id == "ConvFirstLayerWgmma" and "multiples of 4" in answer.reason:
        pytest.skip(answer.reason)
    assert answer, answer.reason
    for config in spread(solver, problem, device, 4, defaults=3):
        check_exact(problem, solver, config, device, compiler)
