"""ConvImplicitGemmHalo on a GPU: the host's reference bit for bit, within guard bands, over its whole space."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.problems.drawn_configs import spread
from helpers.values.exact_results import check_exact

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry

cupy = pytest.importorskip("cupy")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

SOLVER = Registry.default().named("ConvImplicitGemmHalo")
SHAPES: dict[str, dict[str, Any]] = {
    "3d": {"x": (2, 32, 9, 12, 64), "w": (32, 32, 3, 3, 3), "padding": 1},
    "3d_narrow": {"x": (2, 64, 5, 13, 9), "w": (64, 64, 3, 3, 3), "padding": 1},
    "3d_uneven": {"x": (2, 24, 6, 10, 70), "w": (40, 24, 3, 2, 4), "padding": ((0, 1), (1, 0), (3, 1))},
    "3d_dilated": {"x": (1, 16, 5, 15, 17), "w": (24, 16, 2, 3, 3), "padding": (1, 2, 3), "dilation": (1, 2, 3)},
    "3d_depth_alone": {"x": (2, 64, 8, 5, 7), "w": (64, 64, 3, 1, 1), "padding": (1, 0, 0)},
    "3d_one_slice": {"x": (2, 40, 1, 20, 33), "w": (48, 40, 1, 3, 3), "padding": (0, 1, 1)},
    "3d_deep_filter": {"x": (1, 8, 3, 6, 8), "w": (8, 8, 5, 3, 3), "padding": (4, 1, 1)},
    "2d": {"x": (5, 64, 14, 28), "w": (64, 64, 3, 3), "padding": 1},
    "2d_one_image": {"x": (1, 32, 19, 200), "w": (56, 32, 3, 5), "padding": ((1, 1), (0, 4))},
    "2d_many_images": {"x": (19, 16, 7, 7), "w": (16, 16, 5, 5), "padding": 2},
    "1d": {"x": (3, 32, 300), "w": (32, 32, 7), "padding": 9, "dilation": 3},
}


def problem_of(shape: str, **fields: Any) -> ProblemDescription:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=True)
    return ProblemDescription.convolution(**SHAPES[shape], layout=layout, **fields)


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
@pytest.mark.parametrize("shape", SHAPES)
def test_small_integers_are_exact(
    shape: str, direction: Direction, dtype: DataType, device: Device, compiler: Compiler
) -> None:
    problem = problem_of(shape, direction=direction, dtype=dtype)
    assert SOLVER.applicability(problem, device)
    for config in spread(SOLVER, problem, device, 4, defaults=3):
        check_exact(problem, SOLVER, config, device, compiler)
