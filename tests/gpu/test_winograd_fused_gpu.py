"""ConvWinogradFused on a GPU: both gates over shapes, layouts and configurations, guard bands, and bits that repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.device_buffers import Buffer, download, integers, upload
from helpers.runs.gates import check_gates

from miofind.compiler import Compiler
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.reference.convolution import numpy_dtype, reference_on_host
from miofind.solver.registry import Registry

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SOLVER = Registry.default()["ConvWinogradFused"]
DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD_DATA)
SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"x": (8, 64, 28, 28), "w": (96, 64, 3, 3), "padding": 1},
    "one_image": {"x": (1, 128, 28, 27), "w": (128, 128, 3, 3), "padding": 1},
    "small": {"x": (3, 256, 7, 7), "w": (128, 256, 3, 3), "padding": 1},
    "odd": {"x": (3, 33, 17, 15), "w": (35, 33, 3, 3), "padding": ((1, 0), (0, 2))},
    "groups": {"x": (4, 128, 13, 14), "w": (64, 32, 3, 3), "padding": 1, "groups": 4},
    "no_padding": {"x": (4, 48, 18, 20), "w": (40, 48, 3, 3)},
    "wide": {"x": (2, 20, 5, 131), "w": (18, 20, 3, 3), "padding": 2},
}


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("math", ["ieee", "tf32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_configurations_pass_both_gates(
    shape: str, math: str, direction: Direction, layout: str, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(**SHAPES[shape], math=math, direction=direction, layout=layout)
    check_gates(SOLVER, problem, device, compiler, spread(SOLVER, problem, device, 8), seed=3)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("channels", [512, 1280])
def test_long_sums_keep_their_bound(channels: int, layout: str, device: Device, compiler: Compiler) -> None:
    """Each of the warps that share a sum truncates no more than the bound allows."""
    problem = ProblemDescription.convolution(x=(4, channels, 28, 28), w=(128, channels, 3, 3), padding=1, layout=layout)
    longest = sorted(SOLVER.configs(problem, device), key=lambda config: int(config["warps_c"]))[:3]
    check_gates(SOLVER, problem, device, compiler, [*longest, *spread(SOLVER, problem, device, 4)], seed=3)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_guard_bands_stay_and_small_integers_are_exact(
    direction: Direction, layout: str, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(**SHAPES["odd"], direction=direction, layout=layout)
    inputs = integers(problem, seed=7)
    expected = reference_on_host(problem, **inputs).astype(numpy_dtype(problem.output.dtype)).astype(np.float64)
    for config in spread(SOLVER, problem, device, 6):
        invoker = make_invoker(problem, device, SOLVER, config, compiler)
        buffers, workspace = upload(problem, inputs), Buffer(invoker.workspace_bytes)
        addresses = [buffer.address for buffer in buffers.values()]
        invoker.run((*addresses, workspace.address), cupy.cuda.get_current_stream().ptr)
        np.testing.assert_array_equal(download(problem, buffers), expected, err_msg=config.json)
        workspace.read(np.dtype(np.uint8))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_runs_repeat_their_bits(direction: Direction, device: Device, compiler: Compiler) -> None:
    problem = ProblemDescription.convolution(**SHAPES["one_image"], direction=direction)
    generator = np.random.default_rng(5)
    inputs = {name: generator.standard_normal(problem.tensor(name).shape) for name in direction.inputs}
    for config in SOLVER.default_configs(problem, device)[:3]:
        invoker = make_invoker(problem, device, SOLVER, config, compiler)
        results = []
        for _ in range(3):
            buffers, workspace = upload(problem, inputs), Buffer(invoker.workspace_bytes)
            addresses = [buffer.address for buffer in buffers.values()]
            invoker.run((*addresses, workspace.address), cupy.cuda.get_current_stream().ptr)
            results.append(download(problem, buffers))
        assert all((result == results[0]).all() for result in results), config.json
