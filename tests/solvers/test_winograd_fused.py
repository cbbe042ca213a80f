"""ConvWinogradFused without a GPU: its kernels in NumPy, how it cuts problems, and what it refuses."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.in_numpy.epilogue import EPILOGUES, operands_in_memory, results_of
from helpers.in_numpy.winograd_fused import carry_out
from helpers.runs.fused_runs import random_inputs

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.reference.convolution import reference_on_host
from miofind.solver.steps import Config, ConvSolution
from miofind.solvers.winograd.fused import ConvWinogradFused
from miofind.solvers.winograd.fused_tiling import FusedTiling

SOLVER = ConvWinogradFused()
DEVICE = Device.virtual("90a")
H200 = replace(DEVICE, clock_hz=1.98e9, bandwidth_bytes_per_s=4.8e12)
DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD_DATA)
LAYOUTS: dict[str, Any] = {
    "channels_first": "NCHW",
    "channels_last": "NHWC",
    "mixed": {"x": "NHWC", "w": "NCHW", "y": "NHWC"},
}
SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"x": (2, 16, 9, 12), "w": (20, 16, 3, 3), "padding": 1},
    "groups": {"x": (3, 36, 7, 8), "w": (34, 18, 3, 3), "padding": ((1, 0), (2, 1)), "groups": 2},
    "one_tile": {"x": (5, 17, 3, 4), "w": (16, 17, 3, 3)},
}


def logical(problem: ProblemDescription, name: str, flat: np.ndarray) -> np.ndarray:
    """A view of a tensor's memory with logical dimensions."""
    tensor = problem.tensor(name)
    n, channels, *sizes = tensor.shape
    if not tensor.layout.channels_last:
        return flat.reshape(tensor.shape)
    return np.moveaxis(flat.reshape(n, *sizes, channels), -1, 1)


def run(solution: ConvSolution, buffers: dict[str, np.ndarray]) -> None:
    for region in solution.workspace.regions:
        buffers[region.name] = np.full(region.bytes // 4, np.nan)
    for step in solution.kernels:
        carry_out(step, buffers)


def filled(problem: ProblemDescription, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    buffers = {name: np.full(problem.tensor(name).size, np.nan) for name in "xwy"}
    for name in problem.direction.inputs:
        logical(problem, name, buffers[name])[...] = inputs[name]
    return buffers | operands_in_memory(problem, inputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_compute_the_convolution(shape: str, direction: Direction, layout: str) -> None:
    problem = ProblemDescription.convolution(**SHAPES[shape], layout=LAYOUTS[layout], direction=direction)
    generator = np.random.default_rng(5)
    inputs = {name: generator.standard_normal(problem.tensor(name).shape) for name in direction.inputs}
    expected = reference_on_host(problem, **inputs)
    configs = list(SOLVER.configs(problem, DEVICE))
    for config in [configs[0], *random.Random(3).sample(configs, 2)]:
        buffers = filled(problem, inputs)
        run(SOLVER.solution(problem, DEVICE, config), buffers)
        result = logical(problem, direction.output, buffers[direction.output])
        np.testing.assert_allclose(result, expected, atol=1e-11, err_msg=config.json)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_have_their_epilogue(shape: str, epilogue: str, layout: str) -> None:
    problem = ProblemDescription.convolution(
        **SHAPES[shape], layout=LAYOUTS[layout], epilogue=epilogue, direction=EPILOGUES[epilogue]
    )
    inputs = random_inputs(problem, 7)
    config = SOLVER.default_configs(problem, DEVICE)[0]
    buffers = filled(problem, inputs)
    run(SOLVER.solution(problem, DEVICE, config), buffers)
    result = logical(problem, problem.direction.output, buffers[problem.direction.output])
    np.testing.assert_allclose(result, results_of(problem, inputs), atol=1e-11, err_msg=config.json)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_packed_filters_leave_one_launch(direction: Direction) -> None:
    problem = ProblemDescription.convolution(**SHAPES["groups"], direction=direction)
    config = SOLVER.default_configs(problem, DEVICE)[0]
    packing = SOLVER.packing(problem, DEVICE, config)
    assert packing is not None
    assert len(packing.run.kernels) == 1
    generator = np.random.default_rng(6)
    inputs = {name: generator.standard_normal(problem.tensor(name).shape) for name in direction.inputs}
    buffers, packed = filled(problem, inputs), np.full(packing.bytes // 4, np.nan)
    run(packing.pack, {"w": buffers["w"], "y": packed})
    assert np.isfinite(packed).all()
    run(packing.run, {**buffers, "w": packed})
    result = logical(problem, direction.output, buffers[direction.output])
    np.testing.assert_allclose(result, reference_on_host(problem, **inputs), atol=1e-11)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("n", "c", "size"), [(1, 128, 28), (1, 64, 56), (1, 256, 14), (1, 512, 7), (1, 64, 80), (32, 64, 56), (2, 640, 32)]
)
def test_networks_have_configurations_in_bounds(n: int, c: int, size: int, layout: str) -> None:
    problem = ProblemDescription.convolution(x=(n, c, size, size), w=(c, c, 3, 3), padding=1, layout=layout)
    defaults = SOLVER.default_configs(problem, H200)
    assert 4 <= len(defaults) <= 8
    estimates = [SOLVER.estimate_ms(problem, H200, config) for config in defaults]
    assert estimates == sorted(estimates)
    for config in SOLVER.configs(problem, H200):
        step = SOLVER.solution(problem, H200, config).kernels[1]
        assert step.shared_bytes <= H200.shared_bytes
        assert math.prod(step.block) <= 512
        assert FusedTiling.of(problem, config).registers * math.prod(step.block) <= 65536


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("math", ["ieee", "tf32"])
def test_estimates_grow_with_the_problem(layout: str, math: str) -> None:
    def best_ms(n: int, c: int, size: int) -> float:
        shape: dict[str, Any] = {"x": (n, c, size, size), "w": (c, c, 3, 3), "padding": 1}
        problem = ProblemDescription.convolution(**shape, layout=layout, math=math)
        return SOLVER.estimate_ms(problem, H200, SOLVER.default_configs(problem, H200)[0])

    assert best_ms(1, 64, 56) < best_ms(1, 64, 112) < best_ms(32, 64, 56) < best_ms(32, 64, 112)
    assert best_ms(2, 320, 32) < best_ms(2, 640, 32)


def test_long_sums_are_dealt_to_more_warps() -> None:
    """Tensor cores truncate: the longer a running sum, the further off it is."""
    shape: dict[str, Any] = {"x": (1, 1280, 16, 16), "w": (64, 1280, 3, 3), "padding": 1}
    ieee, tf32 = (ProblemDescription.convolution(**shape, math=math) for math in ("ieee", "tf32"))
    config = Config({**SOLVER.default_configs(ieee, DEVICE)[0], "tiles": 32, "filters": 32, "warps_c": 1})
    for rows, cols in ((4, 8), (8, 4)):
        one = Config({**config, "rows": rows, "cols": cols, "stages": 3, "warps_t": 1, "warps_k": 1})
        assert not SOLVER.is_valid_config(ieee, DEVICE, one)
        assert SOLVER.is_valid_config(tf32, DEVICE, one)


def test_small_images_share_blocks() -> None:
    problem = ProblemDescription.convolution(x=(8, 64, 7, 7), w=(64, 64, 3, 3), padding=1)
    tilings = [FusedTiling.of(problem, config) for config in SOLVER.configs(problem, DEVICE)]
    for tiling in tilings:
        assert tiling.images * tiling.rows * tiling.cols == tiling.block_tiles
    assert {tiling.images for tiling in tilings if tiling.rows == tiling.cols == 4} == {1, 2, 4}


def test_the_error_bound_is_that_of_direct_sums() -> None:
    problem = ProblemDescription.convolution(**SHAPES["3x3"])
    config = SOLVER.default_configs(problem, DEVICE)[0]
    assert SOLVER.error_growth(problem, config) == 1
    assert SOLVER.is_exact(config)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"direction": "backward_weights"}, "not backward_weights"),
        ({"w": (20, 16, 5, 5)}, "3 x 3"),
        ({"stride": 2}, "stride"),
        ({"x": (2, 8, 9, 12), "w": (20, 8, 3, 3)}, "16 channels"),
        ({"x": (2, 16, 100), "w": (20, 16, 3)}, "NCW"),
        ({"layout": {"x": "NHWC", "w": "NCHW", "y": "NCHW"}}, "one layout"),
    ],
)
def test_what_it_does_not_serve_is_refused(fields: dict[str, Any], reason: str) -> None:
    problem = ProblemDescription.convolution(**SHAPES["3x3"] | fields)
    assert reason in SOLVER.applicability(problem, DEVICE).reason
