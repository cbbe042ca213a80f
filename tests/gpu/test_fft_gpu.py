"""Fourier transforms on a GPU, by cuFFT and our own: the numeric gate for all kinds of tiles, layouts and types."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.device_buffers import Buffer, download, upload
from helpers.runs.gates import check_gates

from miofind.compiler import Compiler
from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.errors import LaunchError
from miofind.launch.invoker import make_invoker
from miofind.libraries.cufft import fft_plan
from miofind.reference.convolution import numpy_dtype, reference_on_host
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import FftStep, Pointer

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "11x11": {"x": (4, 32, 28, 28), "w": (48, 32, 11, 11), "padding": 5},
    "odd": {"x": (3, 33, 37, 35), "w": (35, 33, 9, 7), "padding": ((4, 3), (2, 5))},
    "stride": {"x": (2, 24, 61, 55), "w": (40, 12, 13, 15), "padding": 5, "stride": (2, 3), "groups": 2},
    "depthwise": {"x": (4, 64, 56, 56), "w": (64, 1, 31, 31), "padding": 15, "groups": 64},
    "multiplier": {"x": (2, 20, 40, 40), "w": (60, 1, 15, 15), "padding": 7, "groups": 20},
    "tall": {"x": (2, 32, 90, 20), "w": (32, 32, 25, 1), "padding": (12, 0)},
    "large": {"x": (1, 16, 200, 130), "w": (16, 16, 13, 13), "padding": 6},
    "1d": {"x": (2, 24, 3000), "w": (16, 24, 256), "padding": 128},
    "1d_depthwise": {"x": (2, 32, 9000), "w": (32, 1, 1024), "padding": 512, "groups": 32},
    "1d_4096": {"x": (1, 8, 20000), "w": (8, 8, 4096), "padding": 2048, "stride": 2},
}


LINES: dict[str, dict[str, Any]] = {
    "padded": {"x": (3, 37, 9000), "w": (37, 1, 1024), "padding": 512, "groups": 37},
    "causal": {"x": (2, 64, 2500), "w": (64, 1, 256), "padding": ((255, 0),), "groups": 64},
    "strided": {"x": (2, 16, 30000), "w": (16, 1, 4096), "padding": 2048, "stride": 2, "groups": 16},
    "tall": {"x": (2, 24, 700, 9), "w": (24, 1, 121, 1), "padding": (60, 0), "groups": 24},
}


@pytest.fixture(params=["ConvFft", "ConvFftTiles"])
def solver(request: pytest.FixtureRequest) -> Solver:
    return Registry.default().named(request.param)


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_configurations_keep_their_bounds(
    solver: Solver,
    shape: str,
    dtype: str,
    direction: Direction,
    channels_last: bool,
    device: Device,
    compiler: Compiler,
) -> None:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=channels_last)
    problem = ProblemDescription.convolution(**SHAPES[shape], dtype=dtype, direction=direction, layout=layout)
    assert solver.applicability(problem, device)
    check_gates(solver, problem, device, compiler, spread(solver, problem, device, 6), seed=3)


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", LINES)
def test_depthwise_lines_keep_their_bounds(
    shape: str, dtype: str, direction: Direction, channels_last: bool, device: Device, compiler: Compiler
) -> None:
    solver = Registry.default()["ConvFftDepthwise"]
    layout = Layout.of(len(LINES[shape]["x"]) - 2, channels_last=channels_last)
    problem = ProblemDescription.convolution(**LINES[shape], dtype=dtype, direction=direction, layout=layout)
    assert solver.applicability(problem, device)
    check_gates(solver, problem, device, compiler, list(solver.configs(problem, device)), seed=3)


@pytest.mark.parametrize("direction", list(Direction))
def test_layouts_and_types_mix(solver: Solver, direction: Direction, device: Device, compiler: Compiler) -> None:
    for layout in ({"x": "NHWC", "w": "NCHW", "y": "NCHW"}, {"x": "NCHW", "w": "NHWC", "y": "NHWC"}):
        problem = ProblemDescription.convolution(
            **SHAPES["odd"],
            direction=direction,
            layout=layout,
            dtype={"x": "float16", "w": "float32", "y": "float32"},
        )
        check_gates(solver, problem, device, compiler, spread(solver, problem, device, 2), seed=3)


@pytest.mark.parametrize("direction", list(Direction))
def test_guard_bands_stay_and_runs_repeat_their_bits(
    solver: Solver, direction: Direction, device: Device, compiler: Compiler
) -> None:
    """From poisoned workspace."""
    problem = ProblemDescription.convolution(**SHAPES["stride"], direction=direction)
    generator = np.random.default_rng(5)
    inputs = {name: generator.standard_normal(problem.tensor(name).shape) for name in direction.inputs}
    kinds = {name: values.astype(numpy_dtype(problem.tensor(name).dtype)) for name, values in inputs.items()}
    for config in solver.default_configs(problem, device)[:4]:
        invoker = make_invoker(problem, device, solver, config, compiler)
        results = []
        for _ in range(3):
            buffers, workspace = upload(problem, kinds), Buffer(invoker.workspace_bytes)
            addresses = [buffer.address for buffer in buffers.values()]
            invoker.run((*addresses, workspace.address), cupy.cuda.get_current_stream().ptr)
            results.append(download(problem, buffers))
            workspace.read(np.dtype(np.uint8))
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])


def test_a_graph_replays_transforms(solver: Solver, device: Device, compiler: Compiler) -> None:
    """Captured on another stream than it ran on before."""
    problem = ProblemDescription.convolution(**SHAPES["11x11"])
    config = solver.default_configs(problem, device)[0]
    invoker = make_invoker(problem, device, solver, config, compiler)
    generator = np.random.default_rng(6)
    inputs = {name: generator.standard_normal(problem.tensor(name).shape).astype(np.float32) for name in ("x", "w")}
    buffers, workspace = upload(problem, inputs), Buffer(invoker.workspace_bytes)
    addresses = [buffer.address for buffer in buffers.values()]
    invoker.run((*addresses, workspace.address), cupy.cuda.get_current_stream().ptr)
    once = download(problem, buffers)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        invoker.run((*addresses, workspace.address), stream.ptr)
        graph = stream.end_capture()
    buffers["y"].write(np.zeros(once.shape, np.float32))
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(download(problem, buffers), once)


def test_threads_share_a_plan(device: Device, compiler: Compiler) -> None:
    """Each with its own stream, buffers and workspace."""
    solver, problem = Registry.default()["ConvFft"], ProblemDescription.convolution(**SHAPES["11x11"])
    invoker = make_invoker(problem, device, solver, solver.default_configs(problem, device)[0], compiler)
    generator = np.random.default_rng(7)
    failures: list[str] = []

    def work(inputs: dict[str, np.ndarray]) -> None:
        with cupy.cuda.Device(device.index):
            expected = reference_on_host(problem, **inputs)
            stream = cupy.cuda.Stream(non_blocking=True)
            buffers, workspace = upload(problem, inputs), Buffer(invoker.workspace_bytes)
            cupy.cuda.runtime.deviceSynchronize()
            for _ in range(20):
                invoker.run((*(buffer.address for buffer in buffers.values()), workspace.address), stream.ptr)
            stream.synchronize()
            worst = np.abs(download(problem, buffers) - expected).max()
            if not worst < 1e-2:
                failures.append(f"off by {worst}")

    shapes = {name: problem.tensor(name).shape for name in ("x", "w")}
    drawn = [{name: generator.standard_normal(shape) for name, shape in shapes.items()} for _ in range(4)]
    kinds = [{name: values.astype(np.float32) for name, values in one.items()} for one in drawn]
    threads = [threading.Thread(target=work, args=(one,)) for one in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_plan_that_wants_more_workspace_is_refused(device: Device) -> None:
    step = FftStep(lengths=(64, 64), batch=512, inverse=False, data=Pointer(buffer="x"))
    if fft_plan(replace(step, workspace_bytes=1 << 30), device).workspace_bytes == 0:
        pytest.skip("this cuFFT wants none")
    with pytest.raises(LaunchError, match="cuFFT wants"):
        fft_plan(step, device)
