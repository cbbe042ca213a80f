"""ConvImplicitGemmWgmmaVolume and ConvChannelsLastVolume without a GPU: launches in NumPy, maps, refusals."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from helpers.in_numpy.wgmma import Launch
from helpers.problems.drawn_configs import drawn_wgmma
from helpers.problems.struct_fields import named_args
from helpers.problems.wgmma_forms import KINDS
from numpy.typing import NDArray

from miofind.compiler.sources import read_source
from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.reference.convolution import reference_on_host
from miofind.solver.registry import Registry
from miofind.solver.steps import Config, Im2col, KernelStep, Pointer, TensorMap

pytestmark = pytest.mark.sampled(3)

Array = NDArray[np.float64]

DEVICE = Device.virtual("90a")
SOLVER, PLANAR = Registry.default()["ConvImplicitGemmWgmmaVolume"], Registry.default()["ConvImplicitGemmWgmma"]
AROUND = Registry.default()["ConvChannelsLastVolume"]
FORWARD, DATA, WEIGHTS = Direction.FORWARD, Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS


def conv(kind: str = "float16", **fields: Any) -> ProblemDescription:
    return ProblemDescription.convolution(**{"layout": Layout.NDHWC, **KINDS[kind], **fields})


SHAPES: dict[str, dict[str, Any]] = {
    "walked": {"x": (2, 72, 4, 6, 7), "w": (136, 72, 3, 2, 3), "padding": ((1, 0), (2, 1), (0, 2))},
    "strided": {"x": (2, 40, 7, 9, 8), "w": (72, 40, 3, 3, 2), "padding": 1, "stride": (2, 1, 3)},
    "strides of 2": {"x": (2, 72, 7, 9, 8), "w": (72, 72, 3, 2, 3), "padding": ((1, 0), (0, 1), 1), "stride": 2},
    "strided frames": {"x": (2, 72, 9, 6, 5), "w": (72, 72, 4, 1, 1), "padding": (1, 0, 0), "stride": (2, 1, 1)},
    "strides and dilation": {
        "x": (2, 40, 9, 9, 10),
        "w": (72, 40, 2, 3, 3),
        "padding": 2,
        "stride": (2, 1, 2),
        "dilation": (3, 1, 2),
    },
    "dilated": {"x": (1, 72, 7, 8, 9), "w": (72, 72, 2, 3, 2), "padding": (2, 0, 3), "dilation": (3, 1, 2)},
    "groups": {"x": (2, 160, 3, 5, 6), "w": (128, 80, 2, 1, 3), "padding": 1, "groups": 2},
    "planes": {"x": (3, 64, 5, 6, 7), "w": (72, 64, 1, 3, 3), "padding": (0, 1, 1)},
    "frames": {"x": (3, 64, 5, 6, 7), "w": (72, 64, 3, 1, 1), "padding": (1, 0, 0)},
    "points": {"x": (2, 264, 3, 5, 7), "w": (72, 264, 1, 1, 1)},
    "strided points": {"x": (2, 72, 5, 6, 7), "w": (72, 72, 1, 1, 1), "stride": 2},
}


def drawn_inputs(problem: ProblemDescription) -> dict[str, Array]:
    generator = np.random.default_rng(7)
    return {
        name: generator.integers(-3, 4, problem.tensor(name).shape).astype(np.float64)
        for name in problem.direction.inputs
    }


def in_memory(tensor: Array, layout: Layout) -> Array:
    """Elements in order."""
    return np.ascontiguousarray(np.moveaxis(tensor, 1, -1) if layout.channels_last else tensor).ravel()


def product_of(problem: ProblemDescription, config: Config) -> KernelStep:
    [step] = [step for step in SOLVER.solution(problem, DEVICE, config).kernels if step.entry == "implicit_gemm_wgmma"]
    return step


def computed(problem: ProblemDescription, config: Config, inputs: dict[str, Array]) -> Array:
    """The result's memory, from what a configuration's launch reaches by its maps; each place is written once."""
    memory = {name: in_memory(values, problem.tensor(name).layout) for name, values in inputs.items()}
    if problem.direction is DATA:  # TF32 takes the filter turned for each group: [group, tap, c, k]
        groups, c = problem.groups, problem.c // problem.groups
        turned = inputs["w"].reshape(groups, -1, c, math.prod(problem.filter)).transpose(0, 3, 2, 1)
        memory["filters"] = np.ascontiguousarray(turned).ravel()
    step = product_of(problem, config)
    parts = Launch(step, named_args(step), memory).run(problem.output.size)
    return parts.reshape(-1, problem.output.size).sum(axis=0)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("kind", ["float16", "tf32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_launches_compute_the_convolution(shape: str, kind: str, direction: Direction) -> None:
    problem = conv(kind, **SHAPES[shape], direction=direction)
    answer = SOLVER.applicability(problem, DEVICE)
    if not answer:
        assert "strides of 1 and 2" in answer.reason or "16 bits" in answer.reason
        return
    inputs = drawn_inputs(problem)
    expected = in_memory(reference_on_host(problem, **inputs), problem.output.layout)
    for config in [*SOLVER.default_configs(problem, DEVICE)[:1], *drawn_wgmma(SOLVER, problem, DEVICE, 2, 1)]:
        np.testing.assert_array_equal(computed(problem, config, inputs), expected, config.json)


@pytest.mark.parametrize("direction", [FORWARD, DATA])
@pytest.mark.parametrize("shape", ["walked", "frames", "points"])
def test_results_may_be_channels_first(shape: str, direction: Direction) -> None:
    layout = dict.fromkeys("xwy", Layout.NDHWC) | {"x" if direction is DATA else "y": Layout.NCDHW}
    problem = conv(**{**SHAPES[shape], "layout": layout, "direction": direction})
    inputs = drawn_inputs(problem)
    expected = in_memory(reference_on_host(problem, **inputs), Layout.NCDHW)
    for config in drawn_wgmma(SOLVER, problem, DEVICE, 2, 1):
        np.testing.assert_array_equal(computed(problem, config, inputs), expected, config.json)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (conv(x=(2, 16, 8, 8, 8), w=(16, 16, 3, 3, 3), stride=(3, 1, 1), direction=DATA), "strides of 1 and 2"),
        (conv(x=(1, 16, 40, 8, 8), w=(16, 16, 17, 3, 3), padding=(16, 1, 1)), "up to 15 beyond the tensor"),
        (conv(x=(1, 16, 40, 8, 8), w=(16, 16, 17, 3, 3), padding=(8, 1, 1)), ""),
        (conv(x=(1, 16, 40, 8, 8), w=(16, 16, 33, 3, 3), padding=((0, 20), (1, 1), (1, 1))), "at most 31 pixels"),
        (
            conv(
                x=(2, 16, 8, 8, 8),
                w=(16, 16, 3, 3, 3),
                layout={"x": Layout.NDHWC, "w": Layout.NDHWC, "y": Layout.NCDHW},
                direction=WEIGHTS,
            ),
            "no y channels first",
        ),
        (conv(x=(2, 16, 8, 8, 8), w=(16, 16, 3, 3, 3), layout=Layout.NCDHW), "channels-last operands"),
        (conv(x=(2, 3, 8, 8, 8), w=(16, 3, 3, 3, 3)), "3 channels"),
    ],
    ids=str,
)
def test_what_copies_of_volumes_cannot_do_is_refused(problem: ProblemDescription, words: str) -> None:
    answer = SOLVER.applicability(problem, DEVICE)
    assert bool(answer) == (not words)
    assert words in answer.reason


def test_maps_have_a_depth() -> None:
    problem = conv(**SHAPES["strided"])
    step = product_of(problem, SOLVER.default_configs(problem, DEVICE)[0])
    [walked] = [arg for arg in step.args if isinstance(arg, TensorMap) and isinstance(arg.copy, Im2col)]
    assert walked.sizes == (40, 8, 9, 7, 2)
    assert isinstance(walked.copy, Im2col)
    assert walked.copy.lower == (-1, -1, -1)
    assert walked.copy.strides == (3, 1, 2)
    assert step.source == "implicit_gemm/wgmma_volume.cu"


@pytest.mark.parametrize("solver", [SOLVER, AROUND], ids=lambda solver: solver.id)
def test_volumes_have_solvers_of_their_own(solver: Any) -> None:
    planar = ProblemDescription.convolution(x=(2, 64, 14, 14), w=(64, 64, 3, 3), dtype="float16")
    assert not solver.applicability(planar, DEVICE)
    assert not PLANAR.applicability(conv(**SHAPES["walked"]), DEVICE)


def test_channels_first_volumes_are_laid_out_anew() -> None:
    problem = conv(**SHAPES["walked"], layout=Layout.NCDHW)
    solution = AROUND.solution(problem, DEVICE, AROUND.default_configs(problem, DEVICE)[0])
    before, product = solution.kernels
    assert before.source == "implicit_gemm/transpose.cu"
    assert product.source == "implicit_gemm/wgmma_volume.cu"
    assert [arg.buffer for arg in product.args if isinstance(arg, Pointer)] == ["y"], "written where it is wanted"


def test_sources_without_the_variant_stay_as_they_were() -> None:
    """Rows that were measured before there were volumes hold: what they hash has no word of them."""
    source = read_source("implicit_gemm/wgmma.cu")
    code = [re.sub("//.*", "", text) for text in (source.text, *source.headers.values())]
    assert not any("volume" in text.lower() for text in code)
