"""The solvers of the CPU place compute right results, in the problem's memory order, and say what they refuse."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.values.nonfinite import infinities
from helpers.values.uneven import spoils, uneven_inputs
from hypothesis import assume, given
from hypothesis import strategies as st

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription, TensorDescriptor
from miofind.device.device import Device, Place
from miofind.launch.invoker import make_invoker
from miofind.reference.convolution import numpy_dtype, reference_on_host, round_once
from miofind.solver.registry import Registry
from miofind.solver.solver import Applicability, Reach, Solver
from miofind.solver.steps import Config, HostStep
from miofind.solvers.common.overlap import least_products
from miofind.solvers.cpu.direct import ConvCpuDirect
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verifier

pytestmark = pytest.mark.sampled(3)

Check = Callable[[Solver, ProblemDescription], None]

SOLVERS = [solver for solver in Registry.default().values() if solver.keys[0].place is Place.CPU]
SHAPES: dict[str, dict[str, Any]] = {
    "1x1": {"x": (3, 12, 7, 5), "w": (8, 12, 1, 1)},
    "1x1_stride_groups": {"x": (2, 12, 8, 7), "w": (6, 4, 1, 1), "stride": (2, 3), "groups": 3},
    "1x1_one_pixel": {"x": (3, 5, 1, 1), "w": (4, 5, 1, 1)},
    "1x1_3d": {"x": (2, 4, 3, 5, 2), "w": (6, 4, 1, 1, 1)},
    "3x3": {"x": (3, 5, 9, 8), "w": (7, 5, 3, 3), "padding": 1},
    "asymmetric": {"x": (2, 4, 7, 6), "w": (6, 2, 3, 2), "padding": ((1, 0), (0, 2)), "stride": 2, "groups": 2},
    "depthwise": {"x": (2, 6, 9, 9), "w": (6, 1, 5, 5), "padding": 2, "groups": 6},
    "dilated": {"x": (1, 3, 11, 12), "w": (4, 3, 3, 3), "padding": 6, "dilation": (3, 5)},
    "padding_beyond_the_filter": {"x": (1, 2, 3, 4), "w": (2, 2, 2, 2), "padding": 5, "stride": 2},
    "inputs_left_over": {"x": (1, 2, 8, 9), "w": (3, 2, 2, 2), "stride": 3},
    "1d": {"x": (2, 3, 20), "w": (5, 3, 7), "dilation": 2},
    "3d": {"x": (1, 2, 4, 5, 6), "w": (2, 2, 3, 3, 3), "padding": 1, "stride": (1, 2, 1)},
    "many_channels": {"x": (1, 18, 8, 9), "w": (17, 18, 3, 3), "padding": 1},
}


def packed(tensor: TensorDescriptor, values: np.ndarray) -> np.ndarray:
    """An array of the tensor's dtype, logical shape and memory order."""
    order = np.argsort([-stride for stride in tensor.strides], kind="stable")
    array = np.empty([tensor.shape[i] for i in order], numpy_dtype(tensor.dtype)).transpose(np.argsort(order))
    array[...] = values
    return array


def run(solver: Solver, problem: ProblemDescription, config: Config, buffers: dict[str, np.ndarray]) -> None:
    """Carry the solution's steps out, its output and workspace poisoned."""
    device = Device.cpu()
    solver.check_config(problem, device, config)
    solution = solver.solution(problem, device, config)
    buffers = buffers | {region.name: np.full(region.bytes, 0xFF, np.uint8) for region in solution.workspace.regions}
    buffers[problem.direction.output][...] = np.nan
    for step in solution.steps:
        assert isinstance(step, HostStep)
        getattr(importlib.import_module(step.module), step.function)(problem, config, buffers)


def buffers_of(problem: ProblemDescription, *, integers: bool) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    tensors = {name: problem.tensor(name) for name in ("x", "w", "y")}
    return {
        name: packed(
            tensor,
            generator.integers(-1, 2, tensor.shape) if integers else generator.standard_normal(tensor.shape),
        )
        for name, tensor in tensors.items()
    }


def expected(problem: ProblemDescription, buffers: dict[str, np.ndarray]) -> np.ndarray:
    return reference_on_host(problem, **{name: buffers[name] for name in problem.direction.inputs})


def of_shape(shape: str, *, channels_last: bool = False, **fields: Any) -> ProblemDescription:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=channels_last)
    return ProblemDescription.convolution(**SHAPES[shape], layout=layout, **fields)


def accepted(solver: Solver, shape: str, **fields: Any) -> ProblemDescription:
    problem = of_shape(shape, **fields)
    answer = solver.applicability(problem, Device.cpu())
    if not answer:
        pytest.skip(answer.reason)
    return problem


def check_all(solver: Solver, check: Check, **fields: Any) -> None:
    """Of every shape that the solver takes, in one test: most take less time than a test of their own."""
    checked = 0
    for shape in SHAPES:
        problem = of_shape(shape, **fields)
        if not solver.applicability(problem, Device.cpu()):
            continue
        checked += 1
        try:
            check(solver, problem)
        except Exception as error:
            error.add_note(f"with the shape {shape!r}")
            raise
    if not checked:
        pytest.skip("it takes none of the shapes")


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_small_integers_are_exact(solver: Solver, direction: Direction, channels_last: bool) -> None:
    check_all(solver, check_small_integers, direction=direction, channels_last=channels_last)


def check_small_integers(solver: Solver, problem: ProblemDescription) -> None:
    for config in filter(solver.is_exact, solver.configs(problem, Device.cpu())):
        buffers = buffers_of(problem, integers=True)
        run(solver, problem, config, buffers)
        got = buffers[problem.direction.output]
        np.testing.assert_array_equal(got, expected(problem, buffers), err_msg=config.json)


@pytest.mark.parametrize("dtype", list(DataType))
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", ["1x1_stride_groups", "asymmetric"])
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_errors_are_within_the_bound_of_the_dtype(
    solver: Solver, shape: str, direction: Direction, dtype: DataType
) -> None:
    """|error| <= u_sum * length * sum |a||b|, and half a unit of the output's last place."""
    problem = accepted(solver, shape, direction=direction, dtype=dtype)
    config = solver.default_configs(problem, Device.cpu())[0]
    buffers = buffers_of(problem, integers=False)
    run(solver, problem, config, buffers)
    exact = expected(problem, buffers)
    magnitude = expected(problem, {name: np.abs(array.astype(np.float64)) for name, array in buffers.items()})
    roundoff = 2.0**-53 if dtype is DataType.FLOAT64 else 2.0**-24
    growth = solver.error_growth(problem, config)
    of_sum = growth * problem.reduction_length * roundoff * magnitude
    # Below the least normal number, float16 rounds to multiples of its least one.
    of_output = np.maximum(2.0 ** -(dtype.mantissa_bits + 1) * (np.abs(exact) + of_sum), least_half_unit(dtype))
    error = np.abs(buffers[direction.output].astype(np.float64) - exact)
    assert (error <= of_sum + of_output).all()


def least_half_unit(dtype: DataType) -> float:
    """Half of the least number above 0."""
    return 2.0**-25 if dtype is DataType.FLOAT16 else 0.0


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_infinities_reach_what_sums_them(solver: Solver, direction: Direction) -> None:
    check_all(solver, check_infinities, direction=direction)


def check_infinities(solver: Solver, problem: ProblemDescription) -> None:
    for config in solver.default_configs(problem, Device.cpu()):
        if solver.spreads_nonfinite(problem, config):
            continue
        for infinity in infinities(problem, seed=4):
            buffers = buffers_of(problem, integers=True)
            for name, values in infinity.inputs.items():
                buffers[name][...] = values
            with np.errstate(invalid="ignore"):
                run(solver, problem, config, buffers)
            infinity.check(buffers[problem.direction.output])


@pytest.mark.parametrize("dtype", list(DataType))
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_the_bound_holds_whatever_finite_values_inputs_have(
    solver: Solver, direction: Direction, dtype: DataType
) -> None:
    check_all(solver, check_bound, direction=direction, dtype=dtype)


def check_bound(solver: Solver, problem: ProblemDescription) -> None:
    kept = [c for c in solver.default_configs(problem, Device.cpu()) if solver.keeps_bound(problem, c)]
    for config in kept:
        for uneven in uneven_inputs(problem, seed=5):
            buffers = buffers_of(problem, integers=True)
            for name, values in uneven.inputs.items():
                buffers[name][...] = values
            run(solver, problem, config, buffers)
            uneven.check(buffers[problem.direction.output], solver.error_reach(problem, config))


LARGE_PIXELS: dict[str, tuple[str, Direction]] = {
    "fft": ("ConvCpuFft", Direction.FORWARD),
    "fft_data": ("ConvCpuFft", Direction.BACKWARD_DATA),
    "fft_weights": ("ConvCpuFft", Direction.BACKWARD_WEIGHTS),
    "winograd_weights": ("ConvCpuWinograd", Direction.BACKWARD_WEIGHTS),
}


@pytest.mark.parametrize("case", LARGE_PIXELS)
def test_what_mixes_a_tile_says_so_for_it_spoils_results_of_zeros(case: str) -> None:
    name, direction = LARGE_PIXELS[case]
    solver = Registry.default().named(name)
    problem = ProblemDescription.convolution(x=(16, 17, 12, 11), w=(16, 17, 3, 3), padding=1, direction=direction)
    assert solver.applicability(problem, Device.cpu())
    config = solver.default_configs(problem, Device.cpu())[0]
    assert solver.error_growth(problem, config) == 1
    assert solver.error_reach(problem, config) is Reach.TILE
    assert not solver.keeps_bound(problem, config)
    spoiled = False
    for uneven in uneven_inputs(problem, seed=5):
        buffers = buffers_of(problem, integers=True)
        for tensor, values in uneven.inputs.items():
            buffers[tensor][...] = values
        run(solver, problem, config, buffers)
        spoiled = spoiled or spoils(buffers[direction.output], problem, uneven.inputs)
    assert spoiled, f"{name} is more exact than it says"


@pytest.mark.parametrize("outputs", ["NHWC", "NCHW"])
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_dtypes_and_layouts_may_differ(solver: Solver, outputs: str) -> None:
    """Where the solver's keys and its own conditions allow it: some serve one layout, or one filter a channel."""
    fields: dict[str, Any] = {
        "x": (2, 16, 7, 5),
        "dtype": {"x": "float16", "w": "bfloat16", "y": "float32"},
        "layout": {"x": "NHWC", "w": "NCHW", "y": outputs},
    }
    shapes = ({"w": (4, 16, 1, 1)}, {"w": (4, 16, 3, 3)}, {"w": (16, 1, 3, 3), "groups": 16})
    problems = [ProblemDescription.convolution(**fields, **shape) for shape in shapes]
    answers = [solver.applicability(problem, Device.cpu()) for problem in problems]
    if not any(answers):
        pytest.skip("; ".join(dict.fromkeys(answer.reason for answer in answers)))
    problem = next(problem for problem, answer in zip(problems, answers, strict=True) if answer)
    buffers = buffers_of(problem, integers=True)
    config = solver.default_configs(problem, Device.cpu())[0]
    run(solver, problem, config, buffers)
    if solver.is_exact(config):
        np.testing.assert_array_equal(buffers["y"], expected(problem, buffers))
    np.testing.assert_allclose(buffers["y"], expected(problem, buffers), atol=1e-4)


class ChannelsFirst(ConvCpuDirect):
    """Serves one layout."""

    id = "ConvCpuChannelsFirst"
    keys = (replace(ConvCpuDirect.keys[0], layouts=frozenset({Layout.NCHW})),)


class OneFilterAChannel(ConvCpuDirect):
    """Serves depthwise convolutions alone."""

    id = "ConvCpuOneFilterAChannel"

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        return Applicability("" if problem.groups == problem.c == problem.k else "needs one filter a channel")


def test_a_solver_of_few_problems_is_asked_for_those_that_it_serves() -> None:
    test_dtypes_and_layouts_may_differ(OneFilterAChannel(), "NCHW")
    with pytest.raises(pytest.skip.Exception, match="x is NHWC, served are NCHW"):
        test_dtypes_and_layouts_may_differ(ChannelsFirst(), "NCHW")


FILTERED: dict[str, dict[str, Any]] = {
    "3x3": {"x": (2, 40, 13, 12), "w": (24, 40, 3, 3), "padding": 1},
    "3x2": {"x": (2, 32, 11, 9), "w": (34, 16, 3, 2), "padding": ((2, 0), (1, 1)), "groups": 2},
    "5x1": {"x": (2, 16, 17, 4), "w": (18, 16, 5, 1)},
    "4": {"x": (3, 16, 41), "w": (17, 16, 4), "padding": 3},
    "two_pixels": {"x": (16, 17, 2, 2), "w": (16, 17, 3, 3), "padding": 1},
    "3x3x3": {"x": (1, 16, 5, 6, 7), "w": (16, 16, 3, 3, 3), "padding": 1},
}


@pytest.mark.parametrize("dtype", list(DataType))
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", FILTERED)
@pytest.mark.parametrize("name", ["ConvCpuWinograd", "ConvCpuFft"])
def test_transforms_pass_both_gates(name: str, shape: str, direction: Direction, dtype: DataType) -> None:
    solver, device = Registry.default().named(name), Device.cpu()
    problem = ProblemDescription.convolution(**FILTERED[shape], dtype=dtype, direction=direction)
    configs = list(solver.configs(problem, device))
    assert configs
    with Verifier(problem, device, Compiler(), seed=4) as verifier:
        for config in configs:
            invoker = make_invoker(problem, device, solver, config, Compiler())
            verdict = verifier.verify(invoker, claims_of(solver, problem, device, config, Compiler()))
            assert verdict.ok, f"{config.json}: {verdict.message}"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stride": 2}, "stride and dilation 1"),
        ({"dilation": 2}, "stride and dilation 1"),
        ({"w": (16, 16, 1, 1)}, "one tap"),
        ({"w": (16, 16, 7, 3)}, "more than 5 taps"),
        ({"padding": ((3, 0), (0, 0))}, "nothing but padding"),
        ({"x": (8, 16, 1, 9), "padding": 1, "direction": "backward_weights"}, "nothing but padding"),
        ({"x": (2, 15, 9, 9), "w": (16, 15, 3, 3)}, "15 terms say too little"),
        ({"w": (15, 16, 3, 3), "direction": "backward_data"}, "15 terms say too little"),
        ({"x": (1, 16, 9, 9), "direction": "backward_weights"}, "49 terms say too little"),
        ({"x": (9, 16, 3, 3), "w": (16, 16, 5, 5), "padding": 3, "direction": "backward_weights"}, "36 terms say"),
    ],
    ids=[
        "stride",
        "dilation",
        "one tap",
        "many taps",
        "outputs of padding",
        "taps of padding",
        "few channels",
        "few filters",
        "few pixels",
        "few pixels for one tap",
    ],
)
def test_winograd_refuses_with_a_reason(fields: dict[str, Any], words: str) -> None:
    problem = ProblemDescription.convolution(**{"x": (2, 16, 9, 9), "w": (16, 16, 3, 3), **fields})
    assert words in Registry.default()["ConvCpuWinograd"].applicability(problem, Device.cpu()).reason


@given(
    direction=st.sampled_from(list(Direction)),
    size=st.integers(1, 6),
    taps=st.integers(1, 4),
    stride=st.integers(1, 5),
    pads=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_empty_sums_are_told(direction: Direction, size: int, taps: int, stride: int, pads: tuple[int, int]) -> None:
    assume(size + sum(pads) >= taps)
    problem = ProblemDescription.convolution(
        x=(1, 1, size), w=(1, 1, taps), padding=(pads,), stride=stride, direction=direction
    )
    ones = {name: np.ones(problem.tensor(name).shape) for name in direction.inputs}
    terms = reference_on_host(problem, **ones)
    assert least_products(problem) == terms.min()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dilation": 2}, "dilation 1"),
        ({"x": (1, 512, 58, 58), "w": (512, 512, 3, 3)}, "more than 256"),
        ({"padding": ((3, 0), (0, 0))}, "nothing but padding"),
        ({"stride": 4, "direction": "backward_data"}, "nothing but padding"),
        ({"x": (2, 1, 9, 9), "w": (4, 1, 3, 3), "dtype": "float64"}, "sums of 16 products"),
        ({"padding": 1000, "stride": (999, 1), "direction": "backward_weights"}, "transforms padding, too"),
    ],
    ids=[
        "dilation",
        "large transforms",
        "outputs of padding",
        "inputs that are not met",
        "short sums of float64",
        "vast padding",
    ],
)
def test_fft_refuses_with_a_reason(fields: dict[str, Any], words: str) -> None:
    problem = ProblemDescription.convolution(**{"x": (2, 6, 9, 9), "w": (4, 6, 3, 3), **fields})
    assert words in Registry.default()["ConvCpuFft"].applicability(problem, Device.cpu()).reason


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("dtype", [DataType.FLOAT64, DataType.FLOAT32, DataType.FLOAT16])
def test_long_filters_by_fft_pass_both_gates(dtype: DataType, direction: Direction) -> None:
    solver, device = Registry.default()["ConvCpuFft"], Device.cpu()
    for fields in (
        {"x": (2, 3, 1500), "w": (4, 3, 400), "padding": 200, "stride": 3},
        {"x": (2, 6, 35, 31), "w": (32, 3, 11, 9), "padding": ((5, 2), (0, 8)), "groups": 2, "stride": (2, 1)},
    ):
        problem = ProblemDescription.convolution(**fields, dtype=dtype, direction=direction)
        assert solver.applicability(problem, device)
        configs = list(solver.configs(problem, device))
        assert {config["tile"] > 0 for config in configs} == {False, True}
        with Verifier(problem, device, Compiler(), seed=6) as verifier:
            for config in configs:
                invoker = make_invoker(problem, device, solver, config, Compiler())
                verdict = verifier.verify(invoker, claims_of(solver, problem, device, config, Compiler()))
                assert verdict.ok, f"{config.json}: {verdict.message}"


def test_tiles_bound_the_workspace_of_fft() -> None:
    solver, device = Registry.default()["ConvCpuFft"], Device.cpu()
    problem = ProblemDescription.convolution(x=(2, 8, 200_000), w=(8, 8, 500))
    needed = {config["tile"]: 0 for config in solver.configs(problem, device)}
    for config in solver.configs(problem, device):
        needed[config["tile"]] = max(needed[config["tile"]], solver.workspace_bytes(problem, device, config))
    assert needed[0] > 150e6
    assert max(needed[1024], needed[4096]) < 68e6


@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16])
def test_direct_rounds_once(dtype: DataType) -> None:
    solver = Registry.default()["ConvCpuDirect"]
    problem = ProblemDescription.convolution(**SHAPES["3x3"], dtype=dtype)
    buffers = buffers_of(problem, integers=False)
    run(solver, problem, Config(), buffers)
    np.testing.assert_array_equal(buffers["y"], round_once(expected(problem, buffers), dtype))


def test_im2col_bounds_its_workspace() -> None:
    solver = Registry.default()["ConvCpuIm2colGemm"]
    problem = ProblemDescription.convolution(x=(64, 16, 32, 32), w=(16, 16, 3, 3), padding=1)
    one_image = 16 * 9 * 32 * 32 * 4
    for mebibytes in (2, 16):
        config = Config.of(chunk_mib=mebibytes, pixels_inner=True)
        assert one_image <= solver.workspace_bytes(problem, Device.cpu(), config) <= mebibytes << 20


def test_gemm1x1_refuses_padding_and_wider_filters() -> None:
    solver = Registry.default()["ConvCpuGemm1x1"]
    for fields in ({"w": (4, 4, 1, 1), "padding": 1}, {"w": (4, 4, 1, 2)}):
        problem = ProblemDescription.convolution(x=(1, 4, 5, 5), **fields)  # type: ignore[arg-type]
        assert "one tap" in solver.applicability(problem, Device.cpu()).reason
