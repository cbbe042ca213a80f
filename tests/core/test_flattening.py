"""Volumes as images: which problems need no third dimension, and that the same memory then has the same convolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.problems.problem_strategies import problems
from hypothesis import assume, example, given
from hypothesis import strategies as st

from miofind.core.epilogue import Epilogue
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription, TensorDescriptor
from miofind.core.tensor import MAX_DIMENSION
from miofind.reference.convolution import reference_on_host

FIRST, LAST = Layout.NCDHW, Layout.NDHWC


def volume(**arguments: Any) -> ProblemDescription:
    return ProblemDescription.convolution(**{"x": (2, 4, 5, 6, 7), "w": (6, 4, 1, 1, 1), **arguments})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"x": (2, 4, 30, 7), "w": (6, 4, 1, 1)}),
        ({"w": (6, 4, 1, 1, 3), "padding": (0, 0, 1)}, {"x": (2, 4, 30, 7), "w": (6, 4, 1, 3), "padding": (0, 1)}),
        (
            {"w": (6, 4, 3, 1, 1), "stride": (2, 1, 1), "padding": ((0, 1), 0, 0), "dilation": (2, 1, 1)},
            {"x": (2, 4, 5, 42), "w": (6, 4, 3, 1), "stride": (2, 1), "padding": ((0, 1), 0), "dilation": (2, 1)},
        ),
        (
            {"x": (2, 4, 1, 6, 7), "w": (6, 4, 1, 3, 3), "stride": (2, 2, 2), "padding": (0, 1, 2)},
            {"x": (2, 4, 6, 7), "w": (6, 4, 3, 3), "stride": 2, "padding": (1, 2)},
        ),
        ({"x": (2, 4, 5, 1, 7), "w": (6, 4, 3, 1, 3)}, {"x": (2, 4, 5, 7), "w": (6, 4, 3, 3)}),
        ({"x": (2, 4, 5, 6, 1), "w": (6, 4, 3, 3, 1), "groups": 1}, {"x": (2, 4, 5, 6), "w": (6, 4, 3, 3)}),
        (
            {"w": (6, 2, 1, 3, 3), "groups": 2, "layout": {"x": LAST, "w": FIRST, "y": LAST}},
            {"x": (10, 4, 6, 7), "w": (6, 2, 3, 3), "groups": 2, "layout": {"x": "NHWC", "w": "NCHW", "y": "NHWC"}},
        ),
    ],
)
@pytest.mark.parametrize("direction", list(Direction))
def test_what_is_flattened(given: dict[str, Any], wanted: dict[str, Any], direction: Direction) -> None:
    flattened = volume(**given, direction=direction).flattened
    assert flattened == ProblemDescription.convolution(**wanted, direction=direction)
    assert flattened.flattened is flattened


@pytest.mark.parametrize(
    "given",
    [
        {"w": (6, 4, 1, 3, 3)},
        {"w": (6, 4, 1, 3, 3), "layout": {"x": LAST, "w": LAST, "y": FIRST}},
        {"w": (6, 4, 1, 3, 3), "layout": {"x": FIRST, "w": LAST, "y": LAST}},
        {"w": (6, 4, 1, 3, 3), "layout": LAST, "stride": (2, 1, 1)},
        {"w": (6, 4, 1, 3, 3), "layout": LAST, "padding": (1, 0, 0)},
        {"w": (6, 4, 1, 3, 3), "layout": LAST, "epilogue": "channel_bias.relu"},
        {"w": (6, 4, 2, 3, 3), "layout": LAST},
        {"w": (6, 4, 3, 1, 1), "stride": (1, 1, 2)},
        {"w": (6, 4, 3, 1, 1), "padding": ((0, 0), (0, 0), (0, 1))},
        {"x": (2, 4, 1, 6, 7), "w": (6, 4, 1, 3, 3), "padding": ((1, 0), (0, 0), (0, 0))},
        {"x": (2, 4, 1, 6, 7), "w": (6, 4, 3, 3, 3), "padding": 1},
        {"stride": 2},
        {"x": (1, 1, 1 << 16, 1 << 16, 1), "w": (1, 1, 1, 1, 1), "padding": (0, 0, 1)},
    ],
)
def test_what_is_not(given: dict[str, Any]) -> None:
    problem = volume(**given)
    assert problem.flattened is problem


def test_no_axis_grows_beyond_the_largest() -> None:
    x = (1 << 11, 1, 1 << 21, 3, 3)
    problem = volume(x=x, w=(1, 1, 1, 2, 2), layout=LAST, dtype=DataType.FLOAT16)
    assert x[0] * x[2] > MAX_DIMENSION
    assert problem.flattened is problem


def test_equal_volumes_that_are_no_images_are_themselves() -> None:
    first, second = volume(w=(6, 4, 3, 3, 3)), volume(w=(6, 4, 3, 3, 3))
    assert first.flattened is first
    assert second.flattened is second


def test_images_and_sequences_are_what_they_are() -> None:
    for x, w in (((2, 4, 6, 7), (6, 4, 1, 1)), ((2, 4, 1, 7), (6, 4, 1, 3)), ((2, 4, 7), (6, 4, 1))):
        problem = ProblemDescription.convolution(x=x, w=w)
        assert problem.flattened is problem


@st.composite
def small_volumes(draw: st.DrawFn) -> ProblemDescription:
    """Volumes of which most are images."""
    often_one = st.just(1) | st.integers(1, 3)
    axes = [draw(st.tuples(st.just(1) | st.integers(1, 5), often_one, often_one, often_one)) for _ in range(3)]
    pads = [draw(st.just((0, 0)) | st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in axes]
    reach = [dilation * (taps - 1) + 1 for _, taps, _, dilation in axes]
    spatial = [max(size, r - sum(pad)) for (size, *_), r, pad in zip(axes, reach, pads, strict=True)]
    layouts = st.sampled_from([FIRST, LAST, LAST])
    groups = draw(st.integers(1, 2))
    return ProblemDescription.convolution(
        x=(draw(st.integers(1, 3)), 2 * groups, *spatial),
        w=(3 * groups, 2, *(taps for _, taps, _, _ in axes)),
        padding=pads,
        stride=tuple(stride for _, _, stride, _ in axes),
        dilation=tuple(dilation for *_, dilation in axes),
        groups=groups,
        direction=draw(st.sampled_from(Direction)),
        dtype=DataType.FLOAT64,
        layout={name: draw(layouts) for name in "xwy"},
    )


@given(small_volumes(), st.integers(0, 1 << 16))
@example(volume(dtype=DataType.FLOAT64, layout=LAST, w=(6, 4, 1, 3, 3)), 0)
def test_the_same_memory_has_the_same_convolution(problem: ProblemDescription, seed: int) -> None:
    flattened = problem.flattened
    assume(flattened is not problem)
    random = np.random.default_rng(seed)
    memory = {name: random.standard_normal(problem.tensor(name).size) for name in problem.direction.inputs}
    of_volumes, of_images = (
        reference_on_host(each, **{name: over(memory[name], each.tensor(name)) for name in memory})
        for each in (problem, flattened)
    )
    result = np.empty(problem.output.size)
    over(result, flattened.output)[...] = of_images
    np.testing.assert_allclose(over(result, problem.output), of_volumes, rtol=1e-12, atol=1e-12)


def over(memory: np.ndarray, tensor: TensorDescriptor) -> np.ndarray:
    """A tensor as an array over its memory."""
    strides = tuple(stride * memory.itemsize for stride in tensor.strides)
    return np.lib.stride_tricks.as_strided(memory, tensor.shape, strides)


@given(problems())
def test_flattening_keeps_sizes_and_arithmetic(problem: ProblemDescription) -> None:
    flattened = problem.flattened
    assert (flattened.flops, flattened.bytes) == (problem.flops, problem.bytes)
    assert flattened.reduction_length == problem.reduction_length
    assert [o.tensor.size for o in flattened.operands] == [o.tensor.size for o in problem.operands]
    assert [o.tensor.dtype for o in flattened.operands] == [o.tensor.dtype for o in problem.operands]
    assert (flattened.math, flattened.direction) == (problem.math, problem.direction)


def test_each_tensor_keeps_its_type_and_float32_its_arithmetic() -> None:
    dtypes = {"x": DataType.FLOAT16, "w": DataType.BFLOAT16, "y": DataType.FLOAT32}
    flattened = volume(dtype=dtypes).flattened
    assert [flattened.tensor(name).dtype for name in "xwy"] == [dtypes[name] for name in "xwy"]
    assert volume(math="tf32").flattened.math == "tf32"


def test_the_epilogue_stays() -> None:
    epilogue = Epilogue.of("scale.bias.residual.relu")
    flattened = volume(w=(6, 4, 1, 3, 3), layout=LAST, epilogue=epilogue).flattened
    assert (flattened.epilogue, flattened.n) == (epilogue, 10)
    assert flattened.tensor("residual").shape == (10, 6, 4, 5)
