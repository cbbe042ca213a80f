"""ConvWinogradMma without a GPU: its transforms in NumPy around its products' convolution, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.in_numpy.epilogue import EPILOGUES, operands_in_memory, results_of
from helpers.in_numpy.winograd import carry_out
from helpers.runs.fused_runs import random_inputs

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidConfigError
from miofind.reference.convolution import reference_on_host
from miofind.solver.registry import Registry
from miofind.solver.steps import Config, KernelStep
from miofind.solvers.common.chunks import chunks
from miofind.solvers.winograd.mma import ConvWinogradMma, product_problem, product_tensors

SOLVER = ConvWinogradMma()
DEVICE = Device.virtual("90a")
SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"x": (2, 16, 9, 12), "w": (20, 16, 3, 3), "padding": 1},
    "groups": {"x": (3, 36, 7, 8), "w": (32, 18, 3, 3), "padding": ((1, 0), (2, 1)), "groups": 2},
    "5x5": {"x": (2, 16, 10, 7), "w": (17, 16, 5, 5), "padding": 2},
    "1d": {"x": (3, 16, 27), "w": (16, 16, 4), "padding": 1},
}


def logical(problem: ProblemDescription, name: str, flat: np.ndarray) -> np.ndarray:
    """A view of a tensor's memory with logical dimensions."""
    tensor = problem.tensor(name)
    shape, flat = tensor.shape, flat[: tensor.size]
    if not tensor.layout.channels_last:
        return flat.reshape(shape)
    return np.moveaxis(flat.reshape(shape[0], *shape[2:], shape[1]), -1, 1)


def result_of(problem: ProblemDescription, config: Config, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The logical result, from workspace full of NaN; the other solver's kernels are replaced by the reference."""
    solution, out = SOLVER.solution(problem, DEVICE, config), problem.direction.output
    buffers = {region.name: np.full(region.bytes // 4, np.nan) for region in solution.workspace.regions}
    for name in ("x", "w", "y"):
        buffers[name] = np.full(problem.tensor(name).size, np.nan)
        if name != out:
            logical(problem, name, buffers[name])[...] = inputs[name]
    buffers |= operands_in_memory(problem, inputs)
    plan = SOLVER.plan(problem, config)
    inner, names = product_problem(plan), product_tensors(plan)
    previous: KernelStep | None = None
    for step in solution.kernels:
        if step.source == "winograd/batched.cu":
            carry_out(step, buffers)
        elif previous is None or previous.source == "winograd/batched.cu":
            operands = {name: logical(inner, name, buffers[names[name]]) for name in inner.direction.inputs}
            product = reference_on_host(inner, **operands)
            logical(inner, inner.direction.output, buffers[names[inner.direction.output]])[...] = product
        previous = step
    return logical(problem, out, buffers[out])


def check(problem: ProblemDescription, config: Config) -> None:
    inputs = random_inputs(problem, 5)
    expected = results_of(problem, inputs)
    error = np.abs(result_of(problem, config, inputs) - expected).max() / np.sqrt(np.mean(expected**2))
    assert error < 1e-4, config.json  # constants are float32


def make(shape: str, last: bool, direction: Direction | str, epilogue: str = "") -> ProblemDescription:
    layout = {3: ("NCW", "NWC"), 4: ("NCHW", "NHWC")}[len(SHAPES[shape]["x"])][last]
    return ProblemDescription.convolution(**SHAPES[shape], layout=layout, direction=direction, epilogue=epilogue)


@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_compute_the_convolution(shape: str, direction: Direction, last: bool) -> None:
    problem = make(shape, last, direction)
    for config in SOLVER.default_configs(problem, DEVICE):
        check(problem, config)


@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_results_have_their_epilogue(epilogue: str, last: bool) -> None:
    """The products are those of the bare problem."""
    problem = make("groups", last, EPILOGUES[epilogue], epilogue)
    for config in SOLVER.default_configs(problem, DEVICE):
        assert product_problem(SOLVER.plan(problem, config)) == product_problem(SOLVER.plan(problem.bare, config))
        check(problem, config)


@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
def test_each_chunk_has_its_products(direction: Direction, last: bool) -> None:
    problem = make("groups", last, direction)
    base = SOLVER.default_configs(problem, DEVICE)[0]
    whole = {**base, "tile": 2}
    all_tiles = SOLVER.plan(problem, Config({**whole, "tiles": 1})).all_tiles
    for tiles in (5, all_tiles - 1):
        config = Config({**whole, "tiles": tiles})
        SOLVER.check_config(problem, DEVICE, config)
        check(problem, config)
        steps = SOLVER.solution(problem, DEVICE, config).kernels
        transforms = [step for step in steps if step.entry == "winograd_operands"]
        assert len(transforms) == len(list(chunks(all_tiles, tiles)))


@pytest.mark.parametrize("direction", list(Direction))
def test_the_products_are_one_convolution_of_all_places(direction: Direction) -> None:
    problem = make("groups", False, direction)
    config = SOLVER.default_configs(problem, DEVICE)[0]
    plan = SOLVER.plan(problem, config)
    inner = product_problem(plan)
    assert inner.is_1x1
    assert inner.groups == plan.places * problem.groups
    sizes = {region.name: region.bytes for region in plan.regions()}
    assert {names: inner.tensor(name).bytes for name, names in product_tensors(plan).items()} == sizes


def test_backward_weights_are_one_sum() -> None:
    problem = ProblemDescription.convolution(
        x=(16, 256, 56, 56), w=(256, 256, 3, 3), padding=1, direction="backward_weights"
    )
    configs = SOLVER.default_configs(problem, DEVICE)
    assert {SOLVER.plan(problem, config).chunk_count for config in configs} == {1}
    with pytest.raises(InvalidConfigError, match="one sum"):
        SOLVER.check_config(problem, DEVICE, Config({**configs[0], "tiles": configs[0]["tiles"] // 2}))


def test_growth_is_that_of_the_transforms_and_of_the_products() -> None:
    problem = ProblemDescription.convolution(x=(8, 256, 28, 28), w=(256, 256, 3, 3), padding=1)
    config = next(config for config in SOLVER.default_configs(problem, DEVICE) if config["tile"] == 4)
    plan = SOLVER.plan(problem, config)
    inner = Registry.default()["ConvImplicitGemmMma"].error_growth(product_problem(plan), Config(config["product"]))
    assert SOLVER.error_growth(problem, config) == plan.error_growth * inner
    assert inner == 1


def test_products_without_a_configuration_are_refused() -> None:
    problem = make("3x3", False, Direction.FORWARD)
    good = SOLVER.default_configs(problem, DEVICE)[0]
    for product in ({}, {**good["product"], "tile_k": 7}):
        with pytest.raises(InvalidConfigError, match="ConvWinogradMma"):
            SOLVER.check_config(problem, DEVICE, Config({**good, "product": product}))


def test_mixed_layouts_are_refused() -> None:
    problem = ProblemDescription.convolution(**SHAPES["3x3"], layout={"x": "NHWC", "w": "NCHW", "y": "NCHW"})
    assert "one layout" in SOLVER.applicability(problem, DEVICE).reason
