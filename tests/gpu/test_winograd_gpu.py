"""Winograd on a GPU, with either one who multiplies: both gates for all kinds of tiles, layouts and types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.device_buffers import Buffer, download, integers, upload
from helpers.runs.gates import check_gates

from miofind.compiler import Compiler
from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.reference.convolution import numpy_dtype, reference_on_host
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"x": (8, 64, 28, 28), "w": (96, 64, 3, 3), "padding": 1},
    "small": {"x": (2, 256, 7, 7), "w": (128, 256, 3, 3), "padding": 1},
    "odd": {"x": (3, 33, 17, 15), "w": (35, 33, 3, 3), "padding": ((1, 0), (0, 2))},
    "groups": {"x": (4, 128, 13, 14), "w": (64, 32, 3, 3), "padding": 1, "groups": 4},
    "no_padding": {"x": (4, 48, 18, 20), "w": (40, 48, 2, 2)},
    "5x5": {"x": (4, 32, 20, 18), "w": (48, 32, 5, 5), "padding": 2},
    "1x3": {"x": (4, 64, 17, 28), "w": (64, 64, 1, 3), "padding": (0, 1)},
    "3x1": {"x": (4, 64, 17, 28), "w": (64, 64, 3, 1), "padding": (1, 0)},
    "1d": {"x": (5, 48, 77), "w": (32, 24, 3), "padding": 1, "groups": 2},
}


@pytest.fixture(params=["ConvWinograd", "ConvWinogradMma"])
def solver(request: pytest.FixtureRequest) -> Solver:
    return Registry.default().named(request.param)


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_configurations_pass_both_gates(
    solver: Solver,
    shape: str,
    dtype: str,
    direction: Direction,
    channels_last: bool,
    device: Device,
    compiler: Compiler,
) -> None:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=channels_last)
    kind = {"dtype": "float32", "math": "tf32"} if dtype == "tf32" else {"dtype": dtype}
    problem = ProblemDescription.convolution(**SHAPES[shape], **kind, direction=direction, layout=layout)
    answer = solver.applicability(problem, device)
    if not answer:
        assert "float16" in answer.reason
        pytest.skip(answer.reason)
    check_gates(solver, problem, device, compiler, spread(solver, problem, device, 6), seed=3)


@pytest.mark.parametrize("direction", list(Direction))
def test_layouts_mix(direction: Direction, device: Device, compiler: Compiler) -> None:
    solver = Registry.default()["ConvWinograd"]
    for layout in ({"x": "NHWC", "w": "NCHW", "y": "NCHW"}, {"x": "NCHW", "w": "NHWC", "y": "NHWC"}):
        problem = ProblemDescription.convolution(**SHAPES["odd"], direction=direction, layout=layout)
        check_gates(solver, problem, device, compiler, spread(solver, problem, device, 2), seed=3)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", list(Direction))
def test_long_sums_keep_their_bound(
    solver: Solver, direction: Direction, layout: str, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(
        x=(8, 512, 28, 28), w=(256, 512, 3, 3), padding=1, direction=direction, layout=layout
    )
    check_gates(solver, problem, device, compiler, spread(solver, problem, device, 6), seed=3)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", list(Direction))
def test_guard_bands_stay_and_small_integers_are_exact(
    solver: Solver, direction: Direction, layout: str, device: Device, compiler: Compiler
) -> None:
    """From poisoned workspace, with chunks that end anywhere."""
    problem = ProblemDescription.convolution(**SHAPES["groups"], direction=direction, layout=layout)
    inputs = integers(problem, seed=7)
    expected = reference_on_host(problem, **inputs).astype(numpy_dtype(problem.output.dtype)).astype(np.float64)
    base = next(config for config in solver.default_configs(problem, device) if config["tile"] == 2)
    can_end_anywhere = solver.id == "ConvWinograd" or direction is not Direction.BACKWARD_WEIGHTS
    for tiles in (57, 100, base["tiles"]) if can_end_anywhere else (base["tiles"],):
        config = Config({**base, "tiles": tiles})
        invoker = make_invoker(problem, device, solver, config, compiler)
        buffers, workspace = upload(problem, inputs), Buffer(invoker.workspace_bytes)
        addresses = [buffer.address for buffer in buffers.values()]
        invoker.run((*addresses, workspace.address), cupy.cuda.get_current_stream().ptr)
        np.testing.assert_array_equal(download(problem, buffers), expected, err_msg=config.json)
        workspace.read(np.dtype(np.uint8))


@pytest.mark.parametrize("direction", list(Direction))
def test_runs_repeat_their_bits(solver: Solver, direction: Direction, device: Device, compiler: Compiler) -> None:
    problem = ProblemDescription.convolution(**SHAPES["3x3"], direction=direction)
    generator = np.random.default_rng(5)
    inputs = {name: generator.standard_normal(problem.tensor(name).shape) for name in direction.inputs}
    for config in solver.default_configs(problem, device)[:3]:
        invoker = make_invoker(problem, device, solver, config, compiler)
        results = []
        for _ in range(3):
            kinds = {name: values.astype(numpy_dtype(problem.tensor(name).dtype)) for name, values in inputs.items()}
            buffers, workspace = upload(problem, kinds), Buffer(invoker.workspace_bytes)
            addresses = [buffer.address for buffer in buffers.values()]
            invoker.run((*addresses, workspace.address), cupy.cuda.get_current_stream().ptr)
            results.append(download(problem, buffers))
        assert all((result == results[0]).all() for result in results), config.json
