"""The pass over a written output: the kernel's walks in NumPy, its forms compiled, and the launch's geometry."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.steps import KernelStep, Pointer, Scalar
from miofind.solvers.pointwise.epilogue_pass import Walk, pass_ms, pass_step

DEVICE = Device.virtual("90a")
TERMS = "scale.bias.channel_bias.residual.relu"
SIZES = (
    (2, 64, 4, 5),
    (3, 6, 5, 5),
    (3, 63, 7, 1),
    (5, 1, 3, 3),
    (2, 7, 1, 1),
    (4, 8, 14, 15),
    (1, 4104, 3, 1),
    (1, 513, 2, 3),
    (2, 12, 3, 2),
    (70, 40, 28, 29),
    (1, 2, 300, 301),
    (1, 3, 1, 1),
)

Numbers = NDArray[np.int64]


def fused(size: tuple[int, ...], layout: str, dtype: str, epilogue: str) -> ProblemDescription:
    n, k, *spatial = size
    ones = (1,) * len(spatial)
    return ProblemDescription.convolution(
        x=(n, 1, *spatial), w=(k, 1, *ones), dtype=dtype, layout=layout, epilogue=epilogue
    )


def step_of(problem: ProblemDescription) -> KernelStep:
    step = pass_step(problem, DEVICE)
    assert isinstance(step, KernelStep)
    return step


@dataclass(frozen=True)
class Walked:
    """For each element that a launch takes, in the order of threads: where it is, and whose terms it is given."""

    at: Numbers
    channel: Numbers
    image: Numbers


def walked(step: KernelStep, problem: ProblemDescription) -> Walked:
    """kernels_src/pointwise/epilogue_pass.cu, the indices alone."""
    defines = dict(step.defines)
    vector, unroll = int(defines["VECTOR"]), int(defines["UNROLL"])
    sizes = [int(arg.value) for arg in step.args if isinstance(arg, Scalar)]
    block, u, thread, e = np.ix_(*map(np.arange, (step.grid[0], unroll, step.block[0], vector)))
    if defines["WALK"] == Walk.CHANNELS_LAST:
        return _rows(sizes, step.block[0], unroll, (block, u, thread, e))
    elements = sizes[0] if defines["WALK"] == Walk.FLAT else sizes[0] * sizes[1]
    first = ((block * unroll + u) * step.block[0] + thread) * vector
    plane = (first + e) // math.prod(problem.out_spatial)
    if defines["WALK"] == Walk.CHANNELS_FIRST:
        size, channels = sizes[1:]
        behind = (block * unroll * step.block[0] * vector) % size + (u * step.block[0] + thread) * vector
        passed = behind // size
        channel = ((block * unroll * step.block[0] * vector) // size % channels + passed) % channels
        own = (block * unroll * step.block[0] * vector) // size + passed
        is_next = e >= (passed + 1) * size - behind
        in_vector = first + vector <= elements
        assert not (in_vector & (plane > own + 1)).any(), "a vector meets three planes"
        assert not (defines["IS_WHOLE"] and (in_vector & is_next).any())
        channel = np.where(in_vector, np.where(is_next, (channel + 1) % channels, channel), plane % channels)
        plane = np.where(in_vector, own + is_next, plane)
        return _inside(first + e, elements, channel, plane // channels)
    return _inside(first + e, elements, plane * 0, plane * 0)


def _rows(sizes: list[int], threads: int, unroll: int, at: tuple[Numbers, ...]) -> Walked:
    elements, channels, columns, rows, parts, blocks = sizes
    all_blocks, u, thread, e = at
    vector = e.size
    image, block = np.divmod(all_blocks, blocks)
    below, part = np.divmod(block, parts)
    in_rows = part * threads + thread
    column = in_rows if rows == 1 else in_rows % columns
    first = ((below * unroll + u) * rows * columns + in_rows) * vector
    is_taken = (column < columns) & (first + e < elements)
    channel = (column * vector + e) % channels
    index = image * elements + first + e
    wide = np.broadcast_shapes(index.shape, channel.shape)
    flat = [np.broadcast_to(each, wide)[np.broadcast_to(is_taken, wide)] for each in (index, channel, image)]
    return Walked(*flat)


def _inside(at: Numbers, elements: int, channel: Numbers, image: Numbers) -> Walked:
    wide = at.shape
    inside = at < elements
    return Walked(at[inside], *(np.broadcast_to(each, wide)[inside] for each in (channel, image)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("epilogue", ["relu", "residual", "bias", TERMS])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_each_element_is_taken_once_with_its_channel(
    size: tuple[int, ...], layout: str, dtype: str, epilogue: str
) -> None:
    problem = fused(size, layout, dtype, epilogue)
    step = step_of(problem)
    found = walked(step, problem)
    assert np.array_equal(np.sort(found.at), np.arange(problem.y.size))
    _, k, *spatial = size
    if layout == "NHWC":
        pixel, channel = np.divmod(found.at, k)
        image = pixel // math.prod(spatial)
    else:
        plane = found.at // math.prod(spatial)
        image, channel = np.divmod(plane, k)
    if dict(step.defines)["WALK"] != Walk.FLAT:
        assert np.array_equal(found.channel, channel)
    if "channel_bias" in epilogue:
        assert np.array_equal(found.image, image)


COMPILED = itertools.product(
    [(32, 64, 56, 56), (2, 63, 5, 5), (3, 8, 3, 1)],
    ["NCHW", "NHWC"],
    ["mish", "bias.gelu", "float32.scale.bias.channel_bias.residual.silu"],
    ["float16", "bfloat16", "float32", "float64"],
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "layout", "epilogue", "dtype"),
    [  # Five has no divisor in common with the sizes of the product: the sample is of every value.
        pytest.param(*case, marks=[] if number % 5 in (0, 2) else pytest.mark.full_matrix)
        for number, case in enumerate(COMPILED)
    ],
    ids=str,
)
def test_kernels_compile_and_spill_nothing(
    size: tuple[int, ...], layout: str, dtype: str, epilogue: str, compiler: Compiler
) -> None:
    if dtype == "float64":
        epilogue = epilogue.removeprefix("float32.")
    problem = fused(size, layout, dtype, epilogue)
    binary = compiler.build(step_of(problem), "90a")
    assert binary.resources["epilogue_pass"].spill_bytes == 0


def test_vectors_are_of_16_bytes_wherever_sizes_allow() -> None:
    for layout, size in (("NHWC", (2, 63, 9, 9)), ("NCHW", (2, 63, 9, 9)), ("NHWC", (2, 64, 9, 9))):
        assert dict(step_of(fused(size, layout, "float16", "bias")).defines)["VECTOR"] == 8
    assert dict(step_of(fused((2, 63, 9, 9), "NHWC", "float16", "channel_bias")).defines)["VECTOR"] == 1


def test_a_residual_costs_its_bytes() -> None:
    size = (32, 64, 56, 56)
    without, with_one = (pass_ms(fused(size, "NHWC", "float16", epilogue), DEVICE) for epilogue in ("relu", "residual"))
    assert 1.4 < with_one / without < 1.5


@pytest.fixture(scope="module")
def compiler(request: pytest.FixtureRequest) -> Compiler:
    from miofind.compiler import BinaryCache

    pytest.importorskip("cuda.bindings.nvrtc")
    assert request.config.cache is not None
    return Compiler(BinaryCache(request.config.cache.mkdir("kernels"), max_bytes=1 << 31))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("epilogue", ["residual", "residual.drelu", "dgelu", "residual.dsilu", "dgelu_tanh", "dclamp"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_passes_of_gradients_compile(compiler: Compiler, dtype: str, epilogue: str) -> None:
    """One run of elements, whatever the layout, over dx."""
    problem = ProblemDescription.convolution(
        x=(2, 24, 9, 7), w=(8, 24, 3, 3), direction="backward_data", dtype=dtype, epilogue=epilogue
    )
    step = step_of(problem)
    assert dict(step.defines)["WALK"] == Walk.FLAT
    assert step.args[0] == Pointer(buffer="x")
    compiler.build(step, "90a")
