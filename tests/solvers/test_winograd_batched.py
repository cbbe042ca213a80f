"""ConvWinograd without a GPU: its steps in NumPy against the reference, its chunks, its bounds and its refusals."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from helpers.in_numpy.epilogue import EPILOGUES, operands_in_memory, results_of
from helpers.in_numpy.winograd import carry_out
from helpers.runs.fused_runs import random_inputs

from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidConfigError
from miofind.solver.registry import Registry
from miofind.solver.solver import Reach
from miofind.solver.steps import Config, KernelStep, MatmulStep
from miofind.solvers.winograd.batched import ConvWinograd
from miofind.solvers.winograd.steps import WinogradPlan

SOLVER = ConvWinograd()
DEVICE = Device.virtual("90a")
LARGE = ProblemDescription.convolution(x=(16, 256, 56, 56), w=(256, 256, 3, 3), padding=1)
SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"x": (2, 16, 9, 12), "w": (20, 16, 3, 3), "padding": 1},
    "groups": {"x": (3, 36, 7, 8), "w": (32, 18, 3, 3), "padding": ((1, 0), (2, 1)), "groups": 2},
    "5x5": {"x": (2, 16, 10, 7), "w": (17, 16, 5, 5), "padding": 2},
    "3x1": {"x": (2, 18, 12, 5), "w": (16, 18, 3, 1), "padding": (1, 0)},
    "1x3": {"x": (2, 18, 5, 12), "w": (16, 18, 1, 3), "padding": (0, 1)},
    "1d": {"x": (3, 16, 27), "w": (16, 16, 4), "padding": 1},
}


def make(shape: str, **fields: Any) -> ProblemDescription:
    return ProblemDescription.convolution(**SHAPES[shape], **fields)


def in_memory(problem: ProblemDescription, name: str, values: np.ndarray) -> np.ndarray:
    """Elements of a logical array in the order of the tensor's memory."""
    last = problem.tensor(name).layout.channels_last
    return np.ascontiguousarray(np.moveaxis(values, 1, -1) if last else values).ravel()


def result_of(problem: ProblemDescription, config: Config, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The logical result of the steps, from workspace full of NaN."""
    solution, out = SOLVER.solution(problem, DEVICE, config), problem.direction.output
    buffers = {name: in_memory(problem, name, inputs[name]) for name in problem.direction.inputs}
    buffers |= operands_in_memory(problem, inputs)
    buffers[out] = np.full(problem.output.size, np.nan)
    for region in solution.workspace.regions:
        size = 4 if region.name == "products" else problem.x.dtype.itemsize
        buffers[region.name] = np.full(region.bytes // size, np.nan)
    for step in solution.steps:
        assert isinstance(step, (KernelStep, MatmulStep))
        carry_out(step, buffers)
    shape = problem.output.shape
    if not problem.output.layout.channels_last:
        return buffers[out].reshape(shape)
    return np.moveaxis(buffers[out].reshape(shape[0], *shape[2:], shape[1]), -1, 1)


def check(problem: ProblemDescription, config: Config) -> None:
    inputs = random_inputs(problem, 5)
    expected = results_of(problem, inputs)
    scale = np.sqrt(np.mean(expected**2))
    error = np.abs(result_of(problem, config, inputs) - expected).max() / scale
    assert error < 1e-4, config.json  # constants are float32


@pytest.mark.sampled(2)
@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_compute_the_convolution(shape: str, direction: Direction, last: bool) -> None:
    layout = {3: ("NCW", "NWC"), 4: ("NCHW", "NHWC")}[len(SHAPES[shape]["x"])][last]
    problem = make(shape, direction=direction, layout=layout)
    answer = SOLVER.applicability(problem, DEVICE)
    assert answer, answer.reason
    for config in SOLVER.default_configs(problem, DEVICE):
        check(problem, config)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", {"x": "NCHW", "w": "NCHW", "y": "NHWC"}], ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_results_have_their_epilogue(epilogue: str, layout: Any) -> None:
    problem = make("groups", layout=layout, epilogue=epilogue, direction=EPILOGUES[epilogue])
    base = SOLVER.default_configs(problem, DEVICE)[0]
    for config in (*SOLVER.default_configs(problem, DEVICE), Config({**base, "tile": 4, "vector": 1, "tiles": 5})):
        check(problem, config)


@pytest.mark.parametrize("direction", list(Direction))
def test_layouts_mix(direction: Direction) -> None:
    for orders in itertools.product(("NCHW", "NHWC"), repeat=3):
        problem = make("groups", direction=direction, layout=dict(zip("xwy", orders, strict=True)))
        check(problem, SOLVER.default_configs(problem, DEVICE)[0])


@pytest.mark.parametrize("direction", list(Direction))
def test_chunks_end_anywhere(direction: Direction) -> None:
    problem = make("groups", direction=direction)
    base = SOLVER.default_configs(problem, DEVICE)[0]
    plan = WinogradPlan(problem=problem.lifted(3), tile=4, tiles=1)
    for tiles in (1, 3, plan.all_tiles - 1, plan.all_tiles):
        check(problem, Config({**base, "tile": 4, "vector": 1, "tiles": tiles}))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_slices_are_summed(layout: str) -> None:
    problem = ProblemDescription.convolution(
        x=(2, 8, 31, 30), w=(8, 4, 3, 3), padding=1, groups=2, layout=layout, direction="backward_weights"
    )
    base = SOLVER.default_configs(problem, DEVICE)[0]
    for slices, tiles in ((2, 480), (4, 300), (4, 479)):
        config = Config({**base, "tile": 2, "vector": 1, "tiles": tiles, "slices": slices})
        SOLVER.check_config(problem, DEVICE, config)
        check(problem, config)


@pytest.mark.parametrize("direction", list(Direction))
def test_one_product_serves_all_places_and_groups(direction: Direction) -> None:
    problem = make("groups", direction=direction)
    for config in SOLVER.default_configs(problem, DEVICE):
        plan = WinogradPlan(problem=problem.lifted(3), tile=config["tile"], tiles=config["tiles"])
        steps = SOLVER.solution(problem, DEVICE, config).steps
        products = [step for step in steps if isinstance(step, MatmulStep)]
        assert len(products) == plan.chunk_count
        assert {step.batch for step in products} == {plan.places * problem.groups * config["slices"]}


def test_chunks_are_even_and_cover_all_tiles() -> None:
    for config in SOLVER.configs(LARGE, DEVICE):
        plan = WinogradPlan(problem=LARGE.lifted(3), tile=config["tile"], tiles=config["tiles"])
        waste = plan.chunk_count * plan.tiles - plan.all_tiles
        assert 0 <= waste < 32 * plan.chunk_count


def test_smaller_chunks_take_less_workspace() -> None:
    sizes = {
        (config["tile"], config["tiles"]): SOLVER.workspace_bytes(LARGE, DEVICE, config)
        for config in SOLVER.configs(LARGE, DEVICE)
        if config["workspace_bytes"]
    }
    for tile in (2, 4, 6):
        ordered = [size for (of, _), size in sorted(sizes.items()) if of == tile]
        assert len(ordered) >= 3
        assert ordered == sorted(set(ordered))
        assert ordered[0] < ordered[-1] / 3


def test_defaults_have_every_tile() -> None:
    """So that a bound on the error leaves some."""
    for direction in Direction:
        problem = dataclasses.replace(LARGE, direction=direction)
        defaults = SOLVER.default_configs(problem, DEVICE)
        assert {config["tile"] for config in defaults} == {2, 4, 6}
        estimates = [SOLVER.estimate_ms(problem, DEVICE, config) for config in defaults]
        assert estimates[0] == min(estimates)


def test_the_last_default_has_the_smallest_workspace() -> None:
    for direction in Direction:
        problem = dataclasses.replace(LARGE, direction=direction)
        sizes = [SOLVER.workspace_bytes(problem, DEVICE, config) for config in SOLVER.configs(problem, DEVICE)]
        *_, last = SOLVER.default_configs(problem, DEVICE)
        assert SOLVER.workspace_bytes(problem, DEVICE, last) == min(sizes)


def test_large_tiles_win_where_tiles_are_many_and_small_ones_where_filters_are() -> None:
    few = ProblemDescription.convolution(x=(2, 1280, 8, 8), w=(1280, 1280, 3, 3), padding=1)
    first = {problem: SOLVER.default_configs(problem, DEVICE)[0]["tile"] for problem in (LARGE, few)}
    assert first[LARGE] > 2
    assert first[few] == 2


def test_error_growth_is_the_norms_and_more_for_operands_of_16_bits() -> None:
    growths = {}
    for tile in (2, 4, 6):
        config = next(config for config in SOLVER.configs(LARGE, DEVICE) if config["tile"] == tile)
        growths[tile] = SOLVER.error_growth(LARGE, config)
        assert SOLVER.is_exact(config) == (tile == 2)
    assert [round(growth, 1) for growth in growths.values()] == [1.0, 10.4, 46.3]
    narrow = {}
    for dtype in (DataType.FLOAT16, DataType.BFLOAT16):
        problem = ProblemDescription.convolution(x=(2, 64, 8, 8), w=(64, 64, 3, 3), padding=1, dtype=dtype)
        narrow[dtype] = SOLVER.error_growth(problem, SOLVER.default_configs(problem, DEVICE)[0])
    assert 100 < narrow[DataType.FLOAT16] < narrow[DataType.BFLOAT16]


@pytest.mark.parametrize("name", ["ConvWinograd", "ConvWinogradMma", "ConvWinogradFused"])
@pytest.mark.parametrize("direction", list(Direction))
def test_a_default_find_takes_tiles_of_two_forward_and_for_data(name: str, direction: Direction) -> None:
    """A filter's gradient has tiles at borders with pixels that some of its taps do not meet."""
    solver = Registry.default().named(name)
    problem = ProblemDescription.convolution(x=(8, 64, 28, 28), w=(64, 64, 3, 3), padding=1, direction=direction)
    if not solver.applicability(problem, DEVICE):
        pytest.skip("does not serve it")
    for config in solver.default_configs(problem, DEVICE):
        is_local = config.get("tile", 2) == 2 and direction is not Direction.BACKWARD_WEIGHTS
        assert solver.error_reach(problem, config) is (Reach.INPUTS if is_local else Reach.TILE)
        assert solver.keeps_bound(problem, config) is is_local


def test_float16_takes_tiles_of_two_alone() -> None:
    problem = ProblemDescription.convolution(x=(2, 64, 8, 8), w=(64, 64, 3, 3), padding=1, dtype="float16")
    assert {config["tile"] for config in SOLVER.configs(problem, DEVICE)} == {2}
    wide = ProblemDescription.convolution(x=(2, 64, 8, 8), w=(64, 64, 5, 5), padding=2, dtype="float16")
    assert "float16" in SOLVER.applicability(wide, DEVICE).reason


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stride": ({"stride": 2}, "stride and dilation 1"),
    "dilation": ({"dilation": 2}, "stride and dilation 1"),
    "1x1": ({"w": (64, 64, 1, 1)}, "one tap"),
    "7x7": ({"w": (64, 64, 7, 7), "padding": 3}, "5 taps"),
    "3d": ({"x": (1, 64, 5, 5, 5), "w": (64, 64, 3, 3, 3)}, "one or two"),
    "depthwise": ({"w": (64, 1, 3, 3), "groups": 64}, "channels a group"),
    "first_layer": ({"x": (1, 8, 9, 9), "w": (64, 8, 3, 3)}, "error bound in sums over 16 channels"),
    "last_layer": ({"w": (8, 64, 3, 3), "direction": "backward_data"}, "error bound in sums over 16 channels"),
    "few_pixels": ({"x": (1, 64, 7, 7), "direction": "backward_weights"}, "error bound in sums over 64 pixels"),
    "empty_sums": ({"padding": 3}, "nothing but padding"),
    "dtypes": ({"dtype": {"x": "float32", "w": "float32", "y": "float16"}}, "one dtype"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refusals_say_why(case: tuple[dict[str, Any], str]) -> None:
    fields, words = case
    base: dict[str, Any] = {"x": (2, 64, 9, 9), "w": (64, 64, 3, 3), "padding": 1}
    problem = ProblemDescription.convolution(**{**base, **fields})
    assert words in SOLVER.applicability(problem, DEVICE).reason


@pytest.mark.parametrize(
    "change",
    [{"tiles": 10**6}, {"tiles": 1}, {"slices": 2}, {"tile": 3}, {"vector": 2}, {"vector": 3}],
    ids=str,
)
def test_configurations_that_cannot_run_are_refused(change: dict[str, int]) -> None:
    good = SOLVER.default_configs(LARGE, DEVICE)[0]
    with pytest.raises(InvalidConfigError, match="ConvWinograd"):
        SOLVER.check_config(LARGE, DEVICE, Config({**good, **change}))
