"""ConvInParts on a GPU, through both gates: with small tensors that count as large, and with one that is."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.runs.gates import check_both_gates

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solvers.large.in_parts import ConvInParts

pytestmark = pytest.mark.gpu

SMALL = 1 << 14
PROBLEMS: dict[str, dict[str, Any]] = {
    "images": {"x": (7, 16, 24, 20), "w": (32, 16, 3, 3), "padding": 1},
    "rows": {"x": (2, 16, 64, 48), "w": (24, 16, 3, 3), "padding": ((2, 1), (1, 1)), "dilation": 2},
    "strided rows": {"x": (1, 8, 99, 64), "w": (16, 8, 5, 3), "padding": (2, 1), "stride": (3, 2)},
    "volumes": {"x": (1, 16, 31, 8, 16), "w": (16, 16, 3, 3, 3), "padding": 1},
    "signals": {"x": (1, 16, 4000), "w": (16, 16, 7), "padding": 3},
    "one tap": {"x": (9, 32, 16, 16), "w": (64, 32, 1, 1)},
    "depthwise": {"x": (5, 64, 20, 20), "w": (64, 1, 3, 3), "padding": 1, "groups": 64},
    "grouped": {"x": (5, 32, 20, 20), "w": (32, 4, 3, 3), "padding": 1, "groups": 8},
    "first layer": {"x": (5, 3, 64, 64), "w": (16, 3, 7, 7), "padding": 3, "stride": 2},
    "fused": {"x": (7, 16, 24, 20), "w": (32, 16, 3, 3), "padding": 1, "epilogue": "bias.channel_bias.residual.silu"},
    "fused rows": {"x": (1, 16, 96, 48), "w": (32, 16, 3, 3), "padding": 1, "epilogue": "scale.bias.residual.relu"},
    "masked": {"x": (1, 16, 96, 48), "w": (32, 16, 3, 3), "padding": 1, "epilogue": "residual.drelu"},
}
EVERY = ("forward", "backward_data", "backward_weights")
DIRECTIONS = {"fused": ("forward",), "fused rows": ("forward",), "masked": ("backward_data",)}
LAST = {3: "NWC", 4: "NHWC", 5: "NDHWC"}


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "tf32"])
@pytest.mark.parametrize(
    ("name", "direction"), [(name, direction) for name in PROBLEMS for direction in DIRECTIONS.get(name, EVERY)]
)
def test_parts_make_a_whole(
    name: str, direction: str, dtype: str, order: str, device: Device, compiler: Compiler
) -> None:
    """The first default configuration of each solver that serves all parts."""
    values, is_tf32 = PROBLEMS[name], dtype == "tf32"
    problem = ProblemDescription.convolution(
        **values,
        direction=direction,
        dtype="float32" if is_tf32 else dtype,
        math="tf32" if is_tf32 else "ieee",
        layout=LAST[len(values["x"])] if order == "last" else None,
    )
    solver = ConvInParts(SMALL)
    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    first = {config["solver"]: config for config in reversed(solver.default_configs(problem, device))}
    kernels = [step for config in first.values() for step in solver.solution(problem, device, config).kernels]
    list(compiler.build_all(kernels, device.arch))
    for config in first.values():
        check_both_gates(problem, solver, config, device, compiler)


@pytest.mark.parametrize("direction", EVERY)
def test_a_large_image_is_right(direction: str, device: Device, compiler: Compiler) -> None:
    """2^31 elements and more, of 4 GB."""
    problem = ProblemDescription.convolution(
        x=(1, 64, 16400, 2048),
        w=(64, 64, 3, 3),
        padding=1,
        stride=2,
        dtype="float16",
        layout="NHWC",
        direction=direction,
    )
    solver = Registry.default()["ConvInParts"]
    answer = solver.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    check_both_gates(problem, solver, solver.default_configs(problem, device)[0], device, compiler)
