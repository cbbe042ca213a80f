"""ConvFft, ConvFftTiles and ConvFftDepthwise without a GPU: steps in NumPy, workspaces, bounds and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.in_numpy.epilogue import EPILOGUES, operands_in_memory, results_of
from helpers.in_numpy.fft import carry_out
from helpers.runs.fused_runs import random_inputs

from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidConfigError
from miofind.reference.convolution import reference_on_host
from miofind.solver.registry import Registry
from miofind.solver.solver import Reach
from miofind.solver.steps import Config, FftStep, KernelStep
from miofind.solvers.fft.depthwise_steps import DepthwisePlan
from miofind.solvers.fft.steps import FftPlan

pytestmark = pytest.mark.sampled(2)

DEVICE = Device.virtual("90a")
IDS = ("ConvFft", "ConvFftTiles")
SHAPES: dict[str, dict[str, Any]] = {
    "11x11": {"x": (2, 3, 20, 18), "w": (5, 3, 11, 11), "padding": 5},
    "groups": {"x": (2, 10, 16, 15), "w": (40, 5, 9, 7), "padding": ((1, 0), (0, 2)), "stride": (2, 1), "groups": 2},
    "depthwise": {"x": (3, 4, 17, 19), "w": (4, 1, 9, 9), "padding": 4, "groups": 4},
    "tall": {"x": (2, 9, 60, 3), "w": (12, 9, 25, 1), "padding": (12, 0)},
    "wide": {"x": (2, 9, 3, 60), "w": (12, 9, 1, 25), "padding": (0, 12)},
    "tiles": {"x": (2, 4, 37, 50), "w": (4, 4, 7, 5), "padding": (3, 2)},
    "1d": {"x": (2, 6, 150), "w": (8, 3, 64), "padding": 32, "groups": 2, "stride": 2},
}


def in_memory(problem: ProblemDescription, name: str, values: np.ndarray) -> np.ndarray:
    """Elements of a logical array in the order of the tensor's memory."""
    last = problem.tensor(name).layout.channels_last
    return np.ascontiguousarray(np.moveaxis(values, 1, -1) if last else values).ravel()


def result_of(problem: ProblemDescription, plan: FftPlan | DepthwisePlan, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The logical result of the steps, from workspace full of NaN."""
    out = problem.direction.output
    buffers = {name: in_memory(problem, name, inputs[name]) for name in problem.direction.inputs}
    buffers |= operands_in_memory(problem, inputs)
    buffers[out] = np.full(problem.output.size, np.nan)
    for region in plan.regions():
        buffers[region.name] = np.full(region.bytes // 8, np.nan, np.complex128)
    for step in plan.steps():
        assert isinstance(step, (KernelStep, FftStep))
        carry_out(step, buffers)
    return logical(problem, buffers[out])


def logical(problem: ProblemDescription, result: np.ndarray) -> np.ndarray:
    """The result in logical order."""
    shape = problem.output.shape
    if not problem.output.layout.channels_last:
        return result.reshape(shape)
    return np.moveaxis(result.reshape(shape[0], *shape[2:], shape[1]), -1, 1)


def drawn(problem: ProblemDescription) -> dict[str, np.ndarray]:
    """Normal inputs."""
    generator = np.random.default_rng(1)
    return {name: generator.standard_normal(problem.tensor(name).shape) for name in problem.direction.inputs}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", IDS)
def test_steps_compute_the_convolution(name: str, shape: str, direction: Direction, channels_last: bool) -> None:
    solver, fields = Registry.default().named(name), SHAPES[shape]
    layout = Layout.of(len(fields["x"]) - 2, channels_last=channels_last)
    problem = ProblemDescription.convolution(**fields, direction=direction, layout=layout)
    assert solver.applicability(problem, DEVICE)
    every = list(solver.configs(problem, DEVICE))
    by_plan = {(config["tile"], config["chunk_mib"]): config for config in every}
    inputs = drawn(problem)
    expected = reference_on_host(problem, **inputs)
    for config in by_plan.values():
        got = result_of(problem, FftPlan.of(problem, config), inputs)
        np.testing.assert_allclose(got, expected, atol=1e-9, err_msg=config.json)


FUSED: dict[str, dict[str, Any]] = {
    "groups": SHAPES["groups"],
    "corners": {"x": (2, 8, 20, 23), "w": (8, 8, 9, 7), "padding": ((8, 3), (2, 6))},
    "1d": SHAPES["1d"],
    "lines": {"x": (2, 6, 900), "w": (8, 6, 300), "padding": 150},
}
"""Of corners some results are summed directly; lines are transformed by a kernel of their own."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", FUSED)
@pytest.mark.parametrize("name", IDS)
def test_results_have_their_epilogue(name: str, shape: str, epilogue: str, channels_last: bool) -> None:
    solver, fields = Registry.default().named(name), FUSED[shape]
    layout = Layout.of(len(fields["x"]) - 2, channels_last=channels_last)
    problem = ProblemDescription.convolution(**fields, layout=layout, epilogue=epilogue, direction=EPILOGUES[epilogue])
    answer = solver.applicability(problem, DEVICE)
    assert answer, answer.reason
    inputs = random_inputs(problem, 3)
    expected = results_of(problem, inputs)
    by_tile = {config["tile"]: config for config in solver.configs(problem, DEVICE)}
    for config in by_tile.values():
        for at_once in (FftPlan.of(problem, config).at_once, 1):
            plan = replace(FftPlan.of(problem, config), at_once=at_once)
            np.testing.assert_allclose(result_of(problem, plan, inputs), expected, atol=1e-9, err_msg=config.json)


@pytest.mark.parametrize("name", IDS)
def test_reading_a_residual_takes_time(name: str) -> None:
    solver = Registry.default().named(name)
    fields: dict[str, Any] = {"x": (8, 64, 56, 56), "w": (64, 64, 11, 11), "padding": 5}
    bare, fused = (ProblemDescription.convolution(**fields, epilogue=text) for text in ("", "residual.relu"))
    config = solver.default_configs(bare, DEVICE)[0]
    assert solver.estimate_ms(fused, DEVICE, config) > solver.estimate_ms(bare, DEVICE, config)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("name", IDS)
def test_chunks_may_end_within_an_image(name: str, direction: Direction) -> None:
    solver = Registry.default().named(name)
    problem = ProblemDescription.convolution(x=(3, 4, 37, 50), w=(5, 4, 7, 5), padding=(3, 2), direction=direction)
    config = next(one for one in solver.configs(problem, DEVICE) if one["tile"] == 16)
    plan = replace(FftPlan.of(problem, config), at_once=7)
    assert plan.all_tiles % 7
    assert plan.all_tiles // problem.n % 7
    inputs = drawn(problem)
    np.testing.assert_allclose(result_of(problem, plan, inputs), reference_on_host(problem, **inputs), atol=1e-9)


@pytest.mark.parametrize("name", IDS)
def test_tiles_and_chunks_bound_the_workspace(name: str) -> None:
    solver = Registry.default().named(name)
    problem = ProblemDescription.convolution(x=(16, 32, 200, 200), w=(32, 32, 11, 11), padding=5)
    for config in solver.configs(problem, DEVICE):
        plan = FftPlan.of(problem, config)
        images = 8 * plan.frequencies * plan.at_once * 64
        assert images <= max(config["chunk_mib"] << 20, 8 * plan.frequencies * 64)
        assert solver.workspace_bytes(problem, DEVICE, config) <= 2 * (images + 8 * plan.frequencies * 32 * 32) + 1024
    least = min(solver.workspace_bytes(problem, DEVICE, one) for one in solver.default_configs(problem, DEVICE))
    assert least == min(solver.workspace_bytes(problem, DEVICE, one) for one in solver.configs(problem, DEVICE))
    assert least < 48 << 20


def test_the_library_is_given_no_more_than_its_region() -> None:
    """Filters are transformed in parts where they are many more than a chunk's planes."""
    solver = Registry.default()["ConvFft"]
    problem = ProblemDescription.convolution(x=(1, 256, 20, 20), w=(256, 256, 11, 11), padding=5)
    config = solver.default_configs(problem, DEVICE)[0]
    solution = solver.solution(problem, DEVICE, config)
    sizes = {region.name: region.bytes for region in solution.workspace.regions}
    transforms = [step for step in solution.steps if isinstance(step, FftStep)]
    assert sum(step.data.buffer == "filters" for step in transforms) > 1
    for step in transforms:
        *rows, last = step.lengths
        plane = 8 * math.prod(rows) * (last // 2 + 1)
        assert step.data.offset_bytes + step.batch * plane <= sizes[step.data.buffer]
        assert step.workspace is not None
        assert step.workspace_bytes <= sizes[step.workspace]
    assert sizes["scratch"] < sizes["filters"] // 8


def test_long_sums_need_no_wider_bound() -> None:
    solver = Registry.default()["ConvFft"]
    for problem, is_wider in (
        (ProblemDescription.convolution(x=(8, 64, 56, 56), w=(64, 64, 11, 11), padding=5), False),
        (ProblemDescription.convolution(x=(8, 64, 9000), w=(64, 1, 1024), padding=512, groups=64), False),
        (ProblemDescription.convolution(x=(8, 4, 56, 56), w=(4, 4, 5, 5), padding=2), True),
    ):
        config = solver.default_configs(problem, DEVICE)[0]
        assert (solver.error_growth(problem, config) > 1) is is_wider
        assert solver.error_reach(problem, config) is Reach.TILE
        assert not solver.keeps_bound(problem, config)


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dilation": 2}, "dilation 1"),
        ({"w": (4, 6, 4, 6)}, "fewer than 25 taps"),
        ({"stride": (2, 3)}, "fewer than 25 taps"),
        ({"padding": ((11, 0), (5, 5))}, "nothing but padding"),
        ({"x": (1, 6, 8, 8), "direction": "backward_weights"}, "16 products or more, not 9"),
        ({"x": (2, 6, 8, 20, 20), "w": (4, 6, 3, 3, 3), "padding": 1}, "one or two"),
    ],
    ids=["dilation", "few taps", "long strides", "outputs of padding", "few products", "3-D"],
)
def test_refusals_have_reasons(name: str, fields: dict[str, Any], words: str) -> None:
    problem = ProblemDescription.convolution(**{"x": (2, 6, 20, 20), "w": (4, 6, 11, 11), "padding": 5, **fields})
    assert words in Registry.default().named(name).applicability(problem, DEVICE).reason


EDGES: dict[str, dict[str, Any]] = {
    "causal": {"x": (2, 3, 600), "w": (3, 1, 256), "padding": ((255, 0),), "groups": 3},
    "unpadded": {"x": (2, 3, 600), "w": (3, 1, 256), "groups": 3, "direction": "backward_data"},
    "corners": {"x": (1, 8, 20, 23), "w": (8, 8, 9, 7), "padding": ((8, 3), (2, 6))},
    "corners_of_data": {"x": (1, 8, 20, 23), "w": (8, 8, 9, 7), "padding": 2, "direction": "backward_data"},
    "strided": {"x": (2, 16, 61), "w": (16, 8, 60), "padding": ((59, 20),), "stride": 2, "groups": 2},
    "strided_data": {"x": (2, 8, 91), "w": (8, 8, 60), "padding": 4, "stride": 2, "direction": "backward_data"},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("shape", EDGES)
def test_sums_of_few_products_are_direct(shape: str, channels_last: bool) -> None:
    """Each one that is below the limit, by the step that comes last; no other one."""
    layout = Layout.of(len(EDGES[shape]["x"]) - 2, channels_last=channels_last)
    solver, problem = Registry.default()["ConvFft"], ProblemDescription.convolution(**EDGES[shape], layout=layout)
    direction = problem.direction
    ones = {name: np.ones(problem.tensor(name).shape) for name in direction.inputs}
    products = reference_on_host(problem, **ones)
    inputs = drawn(problem)
    expected = reference_on_host(problem, **inputs)
    for config in solver.default_configs(problem, DEVICE):
        plan = FftPlan.of(problem, config)
        assert products.min() < plan.summed_directly
        *_, last = plan.steps()
        assert isinstance(last, KernelStep)
        buffers = {name: in_memory(problem, name, values) for name, values in inputs.items()}
        buffers[direction.output] = np.full(problem.output.size, np.nan)
        carry_out(last, buffers)
        got = logical(problem, buffers[direction.output])
        np.testing.assert_array_equal(np.isfinite(got), products < plan.summed_directly)
        np.testing.assert_allclose(got[np.isfinite(got)], expected[np.isfinite(got)], atol=1e-9)


def test_own_transforms_refuse_long_ones() -> None:
    problem = ProblemDescription.convolution(x=(1, 4, 70000), w=(4, 4, 20000), padding=10000)
    assert "longer transforms" in Registry.default()["ConvFftTiles"].applicability(problem, DEVICE).reason
    assert Registry.default()["ConvFft"].applicability(problem, DEVICE)


def test_small_shared_memory_leaves_shorter_lines() -> None:
    """32768 numbers of a line do not fit the 99 KiB of some architectures."""
    solver = Registry.default()["ConvFftTiles"]
    problem = ProblemDescription.convolution(x=(1, 4, 70000), w=(4, 4, 4096), padding=2048)
    longest = [
        max(config["tile"] for config in solver.configs(problem, Device.virtual(arch))) for arch in ("86", "90a")
    ]
    assert longest == [16384, 32768]


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("taps", [256, 1024, 4096])
def test_lines_of_any_length_have_defaults_of_several_tiles(name: str, taps: int) -> None:
    solver = Registry.default().named(name)
    problem = ProblemDescription.convolution(x=(4, 16, 131072), w=(16, 16, taps), padding=taps // 2)
    assert len({config["tile"] for config in solver.default_configs(problem, DEVICE)}) >= 3


def test_large_tiles_are_among_the_defaults() -> None:
    """Those of which fewer planes fit shared memory than of others."""
    problem = ProblemDescription.convolution(x=(32, 64, 56, 56), w=(64, 64, 11, 11), padding=5)
    defaults = Registry.default()["ConvFftTiles"].default_configs(problem, DEVICE)
    assert {(config["tile"], config["planes"]) for config in defaults} >= {(0, 4), (24, 8)}


LINES: dict[str, dict[str, Any]] = {
    "causal": {"x": (3, 5, 900), "w": (5, 1, 100), "padding": ((99, 0),), "groups": 5},
    "padded": {"x": (2, 4, 700), "w": (4, 1, 121), "padding": 60, "groups": 4, "direction": "backward_data"},
    "strided": {"x": (1, 3, 1100), "w": (3, 1, 120), "padding": 30, "stride": 3, "groups": 3},
    "wide": {"x": (1, 4, 3, 600), "w": (4, 1, 1, 90), "padding": (0, 45), "groups": 4},
    "tall": {"x": (2, 3, 600, 5), "w": (3, 1, 70, 1), "groups": 3, "direction": "backward_data"},
}


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("shape", LINES)
def test_depthwise_lines_compute_the_convolution(shape: str, channels_last: bool) -> None:
    solver, layout = (
        Registry.default()["ConvFftDepthwise"],
        Layout.of(len(LINES[shape]["x"]) - 2, channels_last=channels_last),
    )
    problem = ProblemDescription.convolution(**LINES[shape], layout=layout)
    assert solver.applicability(problem, DEVICE)
    inputs = drawn(problem)
    expected = reference_on_host(problem, **inputs)
    for config in solver.configs(problem, DEVICE):
        got = result_of(problem, DepthwisePlan.of(problem, config["tile"], config["points"]), inputs)
        np.testing.assert_allclose(got, expected, atol=1e-9, err_msg=config.json)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", LINES)
def test_depthwise_lines_have_their_epilogue(shape: str, epilogue: str, channels_last: bool) -> None:
    solver = Registry.default()["ConvFftDepthwise"]
    fields = {**LINES[shape], "direction": EPILOGUES[epilogue], "epilogue": epilogue}
    layout = Layout.of(len(LINES[shape]["x"]) - 2, channels_last=channels_last)
    problem = ProblemDescription.convolution(**fields, layout=layout)
    assert solver.applicability(problem, DEVICE)
    inputs = random_inputs(problem, 4)
    expected = results_of(problem, inputs)
    for config in solver.default_configs(problem, DEVICE):
        got = result_of(problem, DepthwisePlan.of(problem, config["tile"], config["points"]), inputs)
        np.testing.assert_allclose(got, expected, atol=1e-9, err_msg=config.json)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"w": (8, 2, 100), "groups": 2}, "one filter a channel"),
        ({"w": (8, 1, 100), "groups": 4}, "one filter a channel"),
        ({"direction": "backward_weights"}, "computes forward and backward_data"),
        ({"x": (2, 4, 60, 60), "w": (4, 1, 9, 9)}, "along one axis"),
        ({"x": (2, 4, 90000), "w": (4, 1, 9000)}, "256 to 16384"),
    ],
    ids=["dense", "multiplier", "weights", "2-D", "long filters"],
)
def test_depthwise_lines_refuse_with_a_reason(fields: dict[str, Any], words: str) -> None:
    problem = ProblemDescription.convolution(**{"x": (2, 4, 900), "w": (4, 1, 100), "groups": 4, **fields})
    assert words in Registry.default()["ConvFftDepthwise"].applicability(problem, DEVICE).reason


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_depthwise_lines_have_no_chunks_to_bound(direction: str) -> None:
    """All transforms of these tiles take 3 GiB, of which none is written: ConvFft would take 190 chunks of 16 MiB."""
    solver = Registry.default()["ConvFftDepthwise"]
    problem = ProblemDescription.convolution(
        x=(8, 768, 32768), w=(768, 1, 256), padding=((255, 0),), groups=768, dtype="float16", direction=direction
    )
    assert solver.applicability(problem, DEVICE)
    for config in solver.configs(problem, DEVICE):
        assert solver.workspace_bytes(problem, DEVICE, config) == 8 * 768 * config["tile"]


def test_depthwise_lines_bound_the_filters_transforms() -> None:
    """A line of every channel has offsets that fit 32 bits."""
    problem = ProblemDescription.convolution(x=(1, 1 << 17, 8000), w=(1 << 17, 1, 4000), groups=1 << 17)
    assert DepthwisePlan.of(problem, 8192, 2048).refuse_sizes().refused
    assert not DepthwisePlan.of(problem, 4096, 2048).refuse_sizes().refused


def test_configurations_that_cannot_run_are_refused() -> None:
    solver = Registry.default()["ConvFft"]
    problem = ProblemDescription.convolution(**SHAPES["11x11"])
    good = solver.default_configs(problem, DEVICE)[0]
    for changed in ({"tile": 16}, {"tile": 4096}, {"product": "32x32"}, {"chunk_mib": 4096}):
        with pytest.raises(InvalidConfigError, match="cannot run"):
            solver.check_config(problem, DEVICE, Config({**good, **changed}))
