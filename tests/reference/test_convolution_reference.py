"""The reference on the host against the sum that defines a convolution, written out; rounding done once."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.reference.convolution import reference_on_host, reference_step, round_once
from miofind.solver.geometry import geometry, index_bits
from miofind.solver.steps import Pointer

SHAPES: dict[str, dict[str, Any]] = {
    "1d": {"x": (2, 3, 9), "w": (4, 3, 3), "padding": 2, "stride": 3},
    "2d": {
        "x": (2, 4, 5, 6),
        "w": (6, 2, 3, 2),
        "groups": 2,
        "padding": ((1, 2), (0, 3)),
        "stride": (2, 1),
        "dilation": (1, 2),
    },
    "3d": {"x": (1, 2, 4, 5, 3), "w": (2, 1, 2, 3, 2), "groups": 2, "padding": 1, "stride": 2},
    "padding_beyond_the_filter": {"x": (1, 2, 3, 4), "w": (2, 2, 2, 2), "padding": 5, "dilation": (3, 1)},
    "stride_beyond_the_input": {"x": (2, 2, 3, 4), "w": (2, 2, 3, 2), "padding": 4, "stride": (5, 7)},
    "dilation_beyond_the_input": {"x": (1, 3, 3, 4), "w": (2, 3, 3, 3), "padding": (7, 9), "dilation": (6, 9)},
    "padding_before_alone": {"x": (1, 2, 6), "w": (3, 2, 4), "padding": ((9, 0),), "stride": 2, "dilation": 3},
    "padding_after_alone": {"x": (1, 2, 6), "w": (3, 2, 4), "padding": ((0, 9),), "stride": 3},
    "nothing_but_padding": {"x": (1, 1, 2, 2), "w": (2, 1, 1, 1), "padding": 4, "stride": 7},
}
VAST: dict[str, dict[str, Any]] = {
    "padding": {"x": (1, 2, 6, 5), "w": (2, 2, 3, 3), "padding": 10**6, "stride": 10**6 - 1},
    "one_axis": {"x": (1, 2, 6, 5), "w": (2, 2, 3, 3), "padding": ((10**9, 10**9), (1, 1)), "stride": (10**9, 1)},
    "dilation": {"x": (1, 2, 6, 5), "w": (2, 2, 3, 3), "padding": 10**6, "dilation": 10**6},
    "3d": {"x": (1, 2, 4, 3, 2), "w": (2, 2, 3, 3, 3), "padding": 2**20, "stride": 2**20 - 1},
}


def written_out(problem: ProblemDescription, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The output by nothing but loops over outputs, channels and taps."""
    lifted = problem.lifted(3)
    conv = lifted.conv
    out = problem.direction.output
    x, w, y = (
        np.zeros(lifted.tensor(name).shape) if name == out else arrays[name].reshape(lifted.tensor(name).shape)
        for name in ("x", "w", "y")
    )
    group_c, group_k = problem.c // problem.groups, problem.k // problem.groups
    for n, k, *o in np.ndindex(*lifted.y.shape):
        for c, *t in np.ndindex(*lifted.w.shape[1:]):
            at = [o[i] * conv.stride[i] - conv.pad_before[i] + t[i] * conv.dilation[i] for i in range(3)]
            if any(not 0 <= at[i] < lifted.spatial[i] for i in range(3)):
                continue
            source = (n, k // group_k * group_c + c, *at)
            if problem.direction is Direction.FORWARD:
                y[(n, k, *o)] += x[source] * w[(k, c, *t)]
            elif problem.direction is Direction.BACKWARD_DATA:
                x[source] += y[(n, k, *o)] * w[(k, c, *t)]
            else:
                w[(k, c, *t)] += y[(n, k, *o)] * x[source]
    return {"x": x, "w": w, "y": y}[out].reshape(problem.output.shape)


def inputs_of(problem: ProblemDescription) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    return {name: generator.standard_normal(problem.tensor(name).shape) for name in problem.direction.inputs}


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_host_reference_is_the_definition(shape: str, direction: Direction) -> None:
    problem = ProblemDescription.convolution(**SHAPES[shape], direction=direction)
    arrays = inputs_of(problem)
    np.testing.assert_allclose(reference_on_host(problem, **arrays), written_out(problem, arrays), atol=1e-12)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", VAST)
def test_padding_costs_the_host_reference_nothing(shape: str, direction: Direction) -> None:
    """It laid the input out among its zeros: padding of 1e6 took all memory, and every candidate failed."""
    problem = ProblemDescription.convolution(**VAST[shape], direction=direction)
    arrays = inputs_of(problem)
    tracemalloc.start()
    try:
        found = reference_on_host(problem, **arrays)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_allclose(found, written_out(problem, arrays), atol=1e-12)
    assert peak < 1 << 20


def test_listed_elements_are_those_of_the_whole() -> None:
    problem = ProblemDescription.convolution(**SHAPES["2d"])
    arrays = inputs_of(problem)
    indices = np.array([5, 0, problem.y.size - 1])
    listed = reference_on_host(problem, **arrays, indices=indices)
    np.testing.assert_array_equal(listed, reference_on_host(problem, **arrays).ravel()[indices])


def test_missing_or_misshapen_input_is_named() -> None:
    problem = ProblemDescription.convolution(**SHAPES["1d"])
    arrays = inputs_of(problem)
    with pytest.raises(ValueError, match="w is missing"):
        reference_on_host(problem, x=arrays["x"])
    with pytest.raises(ValueError, match=r"x is of shape \(1, 3, 9\)"):
        reference_on_host(problem, x=arrays["x"][:1], w=arrays["w"])


def test_bfloat16_is_rounded_once() -> None:
    """Through float32 a value just above half way would fall to half way, and then to even."""
    just_above, just_below = 1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40
    rounded = round_once(np.array([just_above, just_below, -just_above]), DataType.BFLOAT16)
    np.testing.assert_array_equal(rounded.astype(float), [1 + 2.0**-7, 1, -1 - 2.0**-7])


def test_rounding_keeps_what_is_special() -> None:
    values = np.array([np.inf, -np.inf, 1e300, -1e300, 0.0, -0.0, np.nan])
    expected = np.array([np.inf, -np.inf, np.inf, -np.inf, 0.0, -0.0, np.nan])
    for dtype in (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32):
        rounded = round_once(values, dtype).astype(float)
        np.testing.assert_array_equal(rounded, expected)
        np.testing.assert_array_equal(np.signbit(rounded[:6]), np.signbit(expected[:6]))


def test_exact_values_of_every_type_survive() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    for dtype, numpy_type in ((DataType.FLOAT16, np.float16), (DataType.BFLOAT16, ml_dtypes.bfloat16)):
        with np.errstate(invalid="ignore"):  # signalling NaNs are among the patterns
            values = every.view(numpy_type).astype(np.float64)
        values = values[np.isfinite(values)]
        np.testing.assert_array_equal(round_once(values, dtype).astype(np.float64), values)


@pytest.mark.parametrize("direction", list(Direction))
def test_kernel_step_names_the_inputs_and_its_regions(direction: Direction) -> None:
    problem = ProblemDescription.convolution(**SHAPES["2d"], direction=direction)
    step = reference_step(problem, 10)
    names = [arg.buffer for arg in step.args if isinstance(arg, Pointer)]
    assert names == [*direction.inputs, "indices", "sums", "scales"]
    assert step.grid == (10, 1, 1)


@pytest.mark.parametrize("groups", [1, 64])
@pytest.mark.parametrize("direction", list(Direction))
def test_a_whole_output_of_many_elements_needs_no_list_of_them(direction: Direction, groups: int) -> None:
    """Dense ones go by tiles where neighbours would read far apart, others by threads, depthwise weights by blocks."""
    problem = ProblemDescription.convolution(
        x=(64, 64, 32, 32), w=(256, 64 // groups, 3, 3), padding=1, groups=groups, direction=direction
    )
    step = reference_step(problem)
    names = [arg.buffer for arg in step.args if isinstance(arg, Pointer)]
    is_tiled = direction is not Direction.BACKWARD_DATA and (groups == 1 or direction is Direction.FORWARD)
    by_block = not is_tiled and direction is Direction.BACKWARD_WEIGHTS
    assert names == [*direction.inputs, *(["indices"] if by_block else []), "sums", "scales"]
    assert step.entry.endswith("_tiled" if is_tiled else "" if by_block else "_whole")
    elements = step.grid[0] * (1 if by_block else math.prod(step.block))
    assert problem.output.size <= elements <= problem.output.size * (4 if is_tiled and groups > 1 else 1)


@pytest.mark.parametrize(("k", "is_tiled"), [(16, False), (64, False), (1024, True)])
def test_a_few_elements_of_long_sums_are_left_to_blocks(k: int, is_tiled: bool) -> None:
    """One tile or a few are as many multiprocessors, the others idle: elements have a block each."""
    problem = ProblemDescription.convolution(
        x=(256, 16, 112, 112), w=(k, 16, 1, 1), dtype="float16", layout="NHWC", direction="backward_weights"
    )
    step = reference_step(problem)
    assert step.entry.endswith("_tiled") == is_tiled
    assert step.grid == (k // 16 if is_tiled else 16 * k, 1, 1)


def test_indices_are_wide_where_a_size_or_a_coordinate_needs_it() -> None:
    convolution = ProblemDescription.convolution
    assert index_bits(convolution(x=(1, 3, 9, 9), w=(4, 3, 3, 3))) == 32
    assert index_bits(convolution(x=(2**21, 512, 1), w=(1, 512, 1))) == 64
    assert index_bits(convolution(x=(1, 1, 3), w=(1, 1, 2), padding=2**29)) == 64


def test_geometry_counts_elements_in_the_problems_memory_order() -> None:
    problem = ProblemDescription.convolution(x=(2, 3, 5, 4), w=(6, 3, 2, 2), layout="NHWC", padding=((1, 0), (0, 2)))
    values = [value for _, value in geometry(problem).numbers]
    assert values[:4] == [2, 3, 6, 1]
    assert values[13:16] == [0, 1, 0]
    assert values[22:27] == [60, 1, 0, 12, 3]
    assert len(values) == 37
