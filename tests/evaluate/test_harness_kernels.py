"""The kernels of measuring, compiled ahead: they compile with the arguments that they are given, and none lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from miofind.compiler import BinaryCache, Compiler
from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.device.device import Device
from miofind.evaluate.harness_kernels import harness_steps, usual_harness_steps

pytest.importorskip("cuda.bindings.nvrtc")
GPU = Device.virtual("90a")
PROBLEMS = (
    ProblemDescription.convolution(x=(2, 8, 9, 8), w=(4, 8, 3, 3), dtype="float16", layout="NHWC"),
    ProblemDescription.convolution(
        x=(2, 8, 9, 8), w=(4, 8, 3, 3), dtype="bfloat16", direction="backward_weights", epilogue="bias_gradient"
    ),
    ProblemDescription.convolution(x=(32, 64, 60, 60), w=(64, 64, 3, 3), epilogue="scale.bias.residual.relu"),
)


@pytest.mark.parametrize(
    "problem", [PROBLEMS[0], *(pytest.param(each, marks=pytest.mark.full_matrix) for each in PROBLEMS[1:])], ids=str
)
def test_they_compile(problem: ProblemDescription, tmp_path: Path) -> None:
    compiler = Compiler(BinaryCache(tmp_path))
    steps = harness_steps(problem, GPU)
    for step in steps:
        compiler.build(step, GPU.arch)
    assert len({compiler.key(step, GPU.arch) for step in steps}) == len(steps), "one of each binary"
    sources = {step.source for step in steps}
    epilogue = {"harness/epilogue.cu"} if problem.epilogue.changes_results else set()
    sums = {"harness/channel_sums.cu"} if problem.second_outputs else set()
    tiled = {"harness/reference_tiled.cu"} if problem is PROBLEMS[-1] else set()
    plain = {f"harness/{name}.cu" for name in ("measure", "random_inputs", "reference", "verify")}
    assert sources == plain | tiled | epilogue | sums


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("channels", [64, 256])
def test_those_of_usual_problems_are_all_that_a_networks_problems_need(channels: int, trains: bool) -> None:
    """Of any layout, filter and stride."""
    usual = {step.binary for step in usual_harness_steps(DataType.FLOAT16, GPU, trains=trains)}
    problem = ProblemDescription.convolution(
        x=(32, channels, 60, 60),
        w=(channels, channels, 3, 3),
        dtype="float16",
        layout="NHWC",
        stride=2,
        epilogue=None if trains else "scale.bias.residual.silu",
    )
    for direction in Direction if trains else (Direction.FORWARD,):
        assert {step.binary for step in harness_steps(problem.in_direction(direction), GPU)} <= usual
    assert {step.binary for step in harness_steps(PROBLEMS[1], GPU)} - usual


def test_the_cpu_place_has_none() -> None:
    assert harness_steps(PROBLEMS[0], Device.cpu()) == ()
