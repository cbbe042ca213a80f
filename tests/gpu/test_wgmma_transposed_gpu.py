"""ConvImplicitGemmWgmmaTurned on a GPU: the host's reference bit for bit, within guard bands, and both gates."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.gates import check_gates
from helpers.values.exact_results import check_exact

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SOLVER = Registry.default()["ConvImplicitGemmWgmmaTurned"]

SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"x": (3, 100, 14, 13), "w": (136, 100, 3, 3), "padding": 1},
    "strides": {"x": (2, 72, 19, 22), "w": (100, 72, 3, 2), "padding": ((0, 2), (1, 0)), "stride": (2, 3)},
    "dilation": {"x": (3, 40, 18, 17), "w": (36, 40, 2, 3), "padding": 4, "dilation": (1, 2)},
    "pointwise": {"x": (3, 300, 15, 17), "w": (260, 300, 1, 1)},
    "one_tap_strided": {"x": (3, 40, 19, 17), "w": (80, 40, 1, 1), "stride": 2},
    "groups": {"x": (2, 120, 16, 17), "w": (72, 60, 3, 1), "padding": (1, 0), "groups": 2},
    "pointwise_groups": {"x": (2, 216, 16, 7), "w": (360, 72, 1, 1), "groups": 3},
    "padding_beyond_the_filter": {"x": (1, 16, 6, 7), "w": (32, 16, 2, 2), "padding": 5, "stride": 2},
    "few_pixels": {"x": (1, 64, 2, 3), "w": (64, 64, 1, 1)},
    "1d": {"x": (2, 68, 150), "w": (132, 68, 5), "padding": 2, "layout": "NWC"},
}


def weights(**fields: Any) -> ProblemDescription:
    given = {"dtype": "float32", "math": "tf32", "layout": "NHWC", "direction": "backward_weights"}
    return ProblemDescription.convolution(**{**given, **fields})


@pytest.mark.parametrize("shape", SHAPES)
def test_small_integers_are_exact(shape: str, device: Device, compiler: Compiler) -> None:
    problem = weights(**SHAPES[shape])
    answer = SOLVER.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    for config in spread(SOLVER, problem, device, 12, defaults=4):
        check_exact(problem, SOLVER, config, device, compiler)


@pytest.mark.parametrize(("channels", "size", "taps", "stride"), [(64, 56, 3, 1), (256, 14, 3, 2), (256, 28, 1, 1)])
def test_layers_of_resnet_pass_both_gates(
    channels: int, size: int, taps: int, stride: int, device: Device, compiler: Compiler
) -> None:
    shapes = {"x": (8, channels, size, size), "w": (128, channels, taps, taps)}
    problem = weights(**shapes, padding=taps // 2, stride=stride)
    answer = SOLVER.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    check_gates(SOLVER, problem, device, compiler, SOLVER.default_configs(problem, device), seed=3)
